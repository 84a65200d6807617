#include "../ggml/beacon-ops.h"
#include "beacon-api.h"
#include "beacon-policy.h"
#include "beacon-run.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-beacon.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

// Which layers use the operators of beacon-ops.h, and the tables that these need.

//
// turns
//

// angle of each pair per position, as rope_yarn in ggml mixes it; empty: the layer has no rotation
static std::vector<double> turn_speeds(const llama_context & lctx, int il) {
    const auto & model   = lctx.get_model();
    const auto & hparams = model.hparams;
    const auto & cparams = lctx.get_cparams();
    const int    n_rot   = hparams.n_rot(il);
    if (!hparams.has_rope(il) || hparams.rope_type == LLAMA_ROPE_TYPE_NONE || n_rot == 0) {
        return {};
    }
    std::vector<float> factors(n_rot / 2, 1.0f);
    if (const ggml_tensor * t = model.get_rope_factors(cparams, il)) {
        ggml_backend_tensor_get(t, factors.data(), 0, factors.size() * sizeof(float));
    }
    const double base  = model.get_rope_freq_base(cparams, il);
    const double scale = model.get_rope_freq_scale(cparams, il);

    float dims[2];
    ggml_rope_yarn_corr_dims(n_rot, cparams.n_ctx_orig_yarn, base, cparams.yarn_beta_fast, cparams.yarn_beta_slow,
                             dims);

    std::vector<double> speeds(n_rot / 2);
    for (int i = 0; i < n_rot / 2; ++i) {
        const double y    = (i - dims[0]) / std::max(0.001f, dims[1] - dims[0]);
        const double ramp = (1.0 - std::min(1.0, std::max(0.0, y))) * cparams.yarn_ext_factor;
        speeds[i]         = std::pow(base, -2.0 * i / n_rot) / factors[i] * (scale * (1.0 - ramp) + ramp);
    }
    return speeds;
}

static std::vector<float> make_turns(const std::vector<double> & speeds, uint32_t n_pos) {
    constexpr uint32_t N_LOW = 1u << GGML_BEACON_TURN_BITS;

    std::vector<float> turns;
    for (uint32_t row = 0; row < N_LOW + 1 + n_pos / N_LOW; ++row) {
        const double pos = row < N_LOW ? row : (row - N_LOW) * (double) N_LOW;
        for (const double speed : speeds) {
            turns.push_back(std::cos(pos * speed));
        }
        for (const double speed : speeds) {
            turns.push_back(std::sin(pos * speed));
        }
    }
    return turns;
}

void llama_kv_beacon::extend_turns(const llama_context & lctx, uint32_t n_pos) {
    if (n_pos <= n_turned) {
        return;
    }
    n_turned = n_pos;

    std::vector<std::vector<double>> speeds;  // of each table
    for (auto & layer : layers) {
        const auto own = turn_speeds(lctx, layer.il);
        if (!own.empty()) {
            const auto it = std::find(speeds.begin(), speeds.end(), own);
            layer.turns   = it - speeds.begin();
            if (it == speeds.end()) {
                speeds.push_back(own);
            }
        }
    }
    turns.clear();
    for (const auto & own : speeds) {
        turns.push_back(make_turns(own, n_pos));
    }
}

//
// choice
//

static ggml_backend_dev_t device_of(const ggml_tensor * t) {
    const auto dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(t->buffer));
    return dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// Numbers from -1 to 1 that are the same each time, in the tensor's own type.
static void fill(ggml_tensor * t, uint32_t & state, float offset = 0.0f) {
    std::vector<float> x(ggml_nelements(t));
    for (auto & value : x) {
        state = state * 1664525u + 1013904223u;
        value = offset + (state >> 8) * (2.0f / (1 << 24)) - 1.0f;
    }
    std::vector<uint8_t> data(ggml_nbytes(t));
    if (t->type == GGML_TYPE_F32) {
        memcpy(data.data(), x.data(), data.size());
    } else {
        ggml_get_type_traits(t->type)->from_float_ref(x.data(), data.data(), x.size());
    }
    ggml_backend_tensor_set(t, data.data(), 0, data.size());
}

static std::vector<uint8_t> read_bytes(const ggml_tensor * t) {
    std::vector<uint8_t> data(ggml_nbytes(t));
    ggml_backend_tensor_get(t, data.data(), 0, data.size());
    return data;
}

namespace {

// The tensors of a layer with few cells, on the same device, with numbers that are the same each time.
struct sample_layer {
    beacon_layer            layer;
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;

    sample_layer(const beacon_layer & like, uint32_t n_cells) : layer(like) {
        ctx.reset(ggml_init({ 8 * ggml_tensor_overhead(), nullptr, true }));

        const auto make = [&](ggml_tensor *& t, int64_t ne1, int64_t ne2) {
            t = ggml_new_tensor_4d(ctx.get(), t->type, t->ne[0], ne1, ne2, 1);
        };
        make(layer.k, n_cells, 1);
        make(layer.v, n_cells, 1);
        make(layer.q, like.q->ne[1], 1);
        for (ggml_tensor ** t : { &layer.mean, &layer.count, &layer.norm }) {
            make(*t, (*t)->ne[1], (*t)->ne[2]);
        }
        buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_buffer_get_type(like.k->buffer)));
        if (!buf) {
            throw std::runtime_error(beacon_fail("not enough memory to check the fused operators"));
        }
        uint32_t state = 1;
        for (ggml_tensor * t : { layer.k, layer.v, layer.q, layer.mean }) {
            fill(t, state);
        }
        fill(layer.count, state, 2.0f);
        fill(layer.norm, state, 2.0f);
        const float none = 0.0f;
        ggml_backend_tensor_set(layer.count, &none, 0, sizeof(none));
    }
};

}  // namespace

void llama_kv_beacon::choose_fused(llama_context & lctx) {
    if (has_chosen) {
        return;
    }
    has_chosen = true;

    const char *      env  = getenv("BEACONKV_FUSED");
    const std::string want = env ? env : "1";
    if (want != "0" && want != "1" && want != "require") {
        throw std::runtime_error(beacon_fail("BEACONKV_FUSED is 0, 1 or require, not '%s'", want.c_str()));
    }

    uint32_t n_fused = 0;
    for (uint32_t i = 0; want != "0" && i < layers.size(); ++i) {
        auto & layer = layers[i];

        // layers that look the same to the operators are checked once
        const auto like = std::find_if(layers.begin(), layers.begin() + i, [&](const beacon_layer & other) {
            return other.n_head == layer.n_head && other.n_head_kv == layer.n_head_kv &&
                   other.n_embd_head_k == layer.n_embd_head_k && other.n_embd_head_v == layer.n_embd_head_v &&
                   other.k->type == layer.k->type && other.v->type == layer.v->type && other.turns == layer.turns &&
                   other.kq_scale == layer.kq_scale && device_of(other.k) == device_of(layer.k);
        });
        if (like != layers.begin() + i) {
            layer.fused = like->fused;
        } else if (supports_fused(device_of(layer.k), layer)) {
            layer.fused = check_fused(lctx, i);
            if (!layer.fused) {
                LLAMA_LOG_WARN(
                    "beaconkv: layer %d: the fused operators disagree with the composed graph, which is used\n",
                    layer.il);
            }
        }
        n_fused += layer.fused;
    }
    LLAMA_LOG_INFO("beaconkv: %u of %zu layers are compacted by fused operators\n", n_fused, layers.size());
    if (want == "require" && n_fused < layers.size()) {
        throw std::runtime_error(
            beacon_fail("BEACONKV_FUSED=require, but only %u of %zu layers can be compacted by fused "
                        "operators",
                        n_fused, layers.size()));
    }
}

bool llama_kv_beacon::supports_fused(ggml_backend_dev_t dev, const beacon_layer & layer) {
    if (std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev))) == "RPC") {
        return false;  // it says yes to everything; who knows what the other end was built from
    }
    ggml_context_ptr ctx{ ggml_init({ 64 * ggml_tensor_overhead(), nullptr, true }) };

    const int64_t d = layer.n_embd_head_k;
    const int64_t e = layer.n_embd_head_v;
    const int64_t h = layer.n_head_kv;
    const int64_t m = layer.mean->ne[1];
    const int64_t r = layer.q->ne[1] / 2;  // query rows

    const auto make = [&](ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) {
        return ggml_new_tensor_3d(ctx.get(), type, ne0, ne1, ne2);
    };
    const auto f32 = [&](int64_t ne0, int64_t ne1) {
        return make(GGML_TYPE_F32, ne0, ne1, h);
    };
    const auto i32 = [&](int64_t ne0, int64_t ne1) {
        return make(GGML_TYPE_I32, ne0, ne1, 1);
    };
    ggml_beacon_score_params params = {};

    params.n_beacon         = m;
    ggml_tensor * k         = make(layer.k->type, d, h, 2);
    ggml_tensor * v         = make(layer.v->type, e, h, 2);
    ggml_tensor * q         = make(layer.q->type, d * layer.n_head, 2 * r, 1);
    ggml_tensor * caches[]  = { k, v };
    ggml_tensor * results[] = {
        ggml_beacon_track(ctx.get(), f32(d, m), f32(1, m), f32(1, m), q, i32(r, 2), nullptr, &params.rope),
        ggml_beacon_score(ctx.get(), k, v, f32(d, m), f32(d + e, 1), i32(2, 1), i32(2 + m + 1, 1), i32(2, h), nullptr,
                          f32(1, m), &params),
        ggml_beacon_move(ctx.get(), caches, 2, i32(1, h), 0),
    };
    return std::all_of(std::begin(results), std::end(results),
                       [&](const ggml_tensor * op) { return ggml_backend_dev_supports_op(dev, op); });
}

int beacon_device_fused(const char * device, bool * fused) {
    const auto dev = device ? ggml_backend_dev_by_name(device) : nullptr;
    if (!dev || !fused) {
        beacon_fail(dev ? "fused is NULL" : "ggml has no device '%s'", device ? device : "NULL");
        return BEACON_INVALID;
    }
    beacon_params params;
    beacon_params_default(&params);

    ggml_tensor cache = {};
    cache.type        = GGML_TYPE_F16;
    cache.ne[1]       = 2 * params.n_probe;
    ggml_tensor mean  = {};
    mean.ne[1]        = params.n_beacon;

    beacon_layer layer  = {};
    layer.n_head        = 2;
    layer.n_head_kv     = 1;
    layer.n_embd_head_k = 128;
    layer.n_embd_head_v = 128;
    layer.k             = &cache;
    layer.v             = &cache;
    layer.q             = &cache;
    layer.mean          = &mean;

    *fused = llama_kv_beacon::supports_fused(dev, layer);
    return BEACON_OK;
}

bool llama_kv_beacon::check_fused(llama_context & lctx, uint32_t i) {
    constexpr uint32_t N_CELLS   = 56;
    constexpr uint32_t N         = 45;     // some tiles, the last not whole
    constexpr int32_t  NOW       = 700;
    constexpr float    TOLERANCE = 1e-2f;  // a device may multiply with ten bits

    const uint32_t h = layers[i].n_head_kv;

    beacon_plan plan;
    plan.params     = &params;
    plan.kv         = kv;
    plan.parts      = policy.parts & (BEACON_PART_BEACONS | BEACON_PART_RECENT | BEACON_PART_RESTATED);
    plan.stream     = 0;
    plan.i1         = 1;
    plan.turns      = &turns;
    plan.now        = std::min<int32_t>(NOW, lctx.n_ctx_seq());
    plan.boundary   = plan.now - 20;
    plan.n_prefix   = 0;
    plan.n_keep     = N / 2;
    plan.mask_empty = true;
    plan.track      = true;
    plan.pos.resize(1);
    plan.keep.resize(1);
    for (uint32_t j = 0; j < N; ++j) {
        plan.cells.push_back(j + j / 5);
        plan.table_pos.push_back(j < N / 2 ? j : plan.now - N + j);
    }
    for (uint32_t head = 0; head < h; ++head) {
        for (uint32_t j = 0; j < N; ++j) {
            plan.pos[0].push_back((j + 1) * plan.now / (N + 1 + head % 3));
        }
        plan.keep[0].emplace_back();
        for (uint32_t j = 0; j < plan.n_keep; ++j) {
            plan.keep[0].back().push_back(2 * j + head % 2);
        }
    }
    for (uint32_t r = 0; r < params.n_probe; ++r) {
        plan.track_rows.push_back(r);
        plan.track_pos.push_back(std::max<int32_t>(0, plan.now - 2 * params.n_probe + r));
        plan.recent_rows.push_back(params.n_probe + r);
        plan.recent_pos.push_back(std::max<int32_t>(0, plan.now - params.n_probe + r));
    }
    list_newer(plan, 0);

    std::vector<float>   numbers[2];  // by fused
    std::vector<uint8_t> rows[2];
    for (const bool fused : { false, true }) {
        sample_layer sample(layers[i], N_CELLS);
        sample.layer.fused = fused;

        const std::vector<beacon_layer> one = { sample.layer };
        plan.layers                         = &one;

        std::vector<beacon_scores> scores;
        {
            beacon_graph_run run(lctx);
            auto *           gf = beacon_build_graph_score(plan, run.res, &lctx, false, scores);
            if (ggml_graph_n_nodes(gf) > 0 && run.compute(gf, "check") != GGML_STATUS_SUCCESS) {
                return false;
            }
            for (const ggml_tensor * t : { scores[0].beacon, scores[0].recent, scores[0].restated }) {
                auto part = beacon_read_f32(t);
                for (size_t j = N - 1; t == scores[0].restated && j < part.size(); j += N) {
                    part[j] = 0.0f;  // the newest cell has no likeness to a newer one; the composed graph says another
                }
                numbers[fused].insert(numbers[fused].end(), part.begin(), part.end());
            }
            for (const ggml_tensor * t : { one[0].mean, one[0].count, one[0].norm }) {
                const auto part = beacon_read_f32(t);
                numbers[fused].insert(numbers[fused].end(), part.begin(), part.end());
            }
        }
        beacon_graph_run run(lctx);
        auto *           gf = beacon_build_graph_move(plan, run.res);
        if (ggml_graph_n_nodes(gf) > 0 && run.compute(gf, "check") != GGML_STATUS_SUCCESS) {
            return false;
        }
        if (!beacon_moves_in_graph(plan, 0)) {
            beacon_move_host(plan, 0);
        }
        for (const ggml_tensor * t : { one[0].k, one[0].v }) {
            auto part = read_bytes(t);
            part.resize(plan.n_keep * t->nb[1]);
            rows[fused].insert(rows[fused].end(), part.begin(), part.end());
        }
    }
    float worst = rows[0] == rows[1] && numbers[0].size() == numbers[1].size() ? 0.0f : INFINITY;
    for (size_t j = 0; worst < INFINITY && j < numbers[0].size(); ++j) {
        const float error = std::abs(numbers[0][j] - numbers[1][j]) / (1.0f + std::abs(numbers[0][j]));
        worst             = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
    LLAMA_LOG_DEBUG("beaconkv: layer %d: fused and composed differ by up to %g\n", layers[i].il, worst);

    return worst < TOLERANCE;
}

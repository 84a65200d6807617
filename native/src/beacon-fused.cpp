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
#include <complex>
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

namespace {

// Two layers like a given one with few cells in two streams, on the same device, with numbers that are the same each
// time. The queries of the first rows are near to a centroid each: no rounding makes another one the nearest.
struct sample_layers {
    std::vector<beacon_layer> layers;
    ggml_context_ptr          ctx;
    ggml_backend_buffer_ptr   buf;
    uint32_t                  state = 1;

    sample_layers(const beacon_layer & like, uint32_t n_cells) : layers(2, like) {
        ctx.reset(ggml_init({ 16 * ggml_tensor_overhead(), nullptr, true }));

        const auto make = [&](ggml_tensor *& t, int64_t ne1, int64_t ne2, int64_t ne3) {
            t = ggml_new_tensor_4d(ctx.get(), t->type, t->ne[0], ne1, ne2, ne3);
        };
        for (auto & layer : layers) {
            make(layer.k, n_cells, 2, 1);
            make(layer.v, n_cells, 2, 1);
            make(layer.q, like.q->ne[1], 2, 1);
            for (ggml_tensor ** t : { &layer.mean, &layer.count, &layer.norm }) {
                make(*t, (*t)->ne[1], (*t)->ne[2], 2);
            }
        }
        buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_buffer_get_type(like.k->buffer)));
        if (!buf) {
            throw std::runtime_error(beacon_fail("not enough memory to check the fused operators"));
        }
    }

    // from -1 to 1
    float number() {
        state = state * 1664525u + 1013904223u;
        return (state >> 8) * (2.0f / (1 << 24)) - 1.0f;
    }

    static void set(ggml_tensor * t, const std::vector<float> & x) {
        std::vector<uint8_t> data(ggml_nbytes(t));
        if (t->type == GGML_TYPE_F32) {
            memcpy(data.data(), x.data(), data.size());
        } else {
            ggml_get_type_traits(t->type)->from_float_ref(x.data(), data.data(), x.size());
        }
        ggml_backend_tensor_set(t, data.data(), 0, data.size());
    }

    std::vector<float> numbers(const ggml_tensor * t, float offset = 0.0f) {
        std::vector<float> x(ggml_nelements(t));
        std::generate(x.begin(), x.end(), [&] { return offset + number(); });
        return x;
    }

    // rotate(x, pos): a query as it is after RoPE
    template <typename F> void fill(const std::vector<int32_t> & track_pos, const F & rotate) {
        for (auto & layer : layers) {
            const int64_t d       = layer.n_embd_head_k;
            const int64_t m       = layer.mean->ne[1];
            const int64_t n_group = layer.n_head / layer.n_head_kv;
            const int64_t n_rows  = layer.q->ne[1];

            const auto mean  = numbers(layer.mean);
            auto       q     = numbers(layer.q);
            auto       count = numbers(layer.count, 2.0f);
            for (int64_t i = 0; i < 2 * (int64_t) track_pos.size() * layer.n_head; ++i) {
                const int64_t stream = i / (track_pos.size() * layer.n_head);
                const int64_t row    = i / layer.n_head % track_pos.size();
                const int64_t head   = i % layer.n_head;

                const float * near =
                    &mean[((stream * layer.n_head_kv + head / n_group) * m + (7 * row + head) % m) * d];
                float * x = &q[((stream * n_rows + row) * layer.n_head + head) * d];
                for (int64_t j = 0; j < d; ++j) {
                    x[j] = near[j] + 0.1f * x[j];
                }
                rotate(x, track_pos[row]);
            }
            count[0] = count[count.size() / 2] = 0.0f;  // without a vote

            set(layer.k, numbers(layer.k));
            set(layer.v, numbers(layer.v));
            set(layer.q, q);
            set(layer.mean, mean);
            set(layer.count, count);
            set(layer.norm, numbers(layer.norm, 2.0f));
        }
    }
};

template <typename T> void append(std::vector<T> & to, const std::vector<T> & from) {
    to.insert(to.end(), from.begin(), from.end());
}

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
            const char * fault = check_fused(lctx, i);
            layer.fused        = !fault;
            if (fault) {
                LLAMA_LOG_WARN("beaconkv: layer %d: the fused operators %s, which is used instead\n", layer.il, fault);
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

const char * llama_kv_beacon::check_fused(llama_context & lctx, uint32_t i) {
    constexpr uint32_t N_CELLS   = 56;
    constexpr uint32_t N         = 45;     // some tiles, the last not whole
    constexpr uint32_t N_PREFIX  = 5;      // stay where they are
    constexpr int32_t  NOW       = 32768;  // as far as ggml's own rotation is good
    constexpr float    TOLERANCE = 1e-2f;  // a device may multiply with ten bits

    const auto &   layer   = layers[i];
    const auto &   hparams = lctx.get_model().hparams;
    const uint32_t h       = layer.n_head_kv;

    beacon_plan plan;
    plan.params     = &params;
    plan.kv         = kv;
    plan.parts      = policy.parts & (BEACON_PART_BEACONS | BEACON_PART_RECENT | BEACON_PART_RESTATED);
    plan.stream     = 1;
    plan.i1         = 2;
    plan.turns      = &turns;
    plan.now        = std::min<int32_t>(NOW, lctx.n_ctx_seq());
    plan.boundary   = plan.now - 20;
    plan.n_prefix   = N_PREFIX;
    plan.n_keep     = N / 2;
    plan.mask_empty = true;
    plan.track      = true;
    plan.pos.resize(2);
    plan.keep.resize(2);
    for (uint32_t j = 0; j < N; ++j) {
        plan.cells.push_back(j + j / N_PREFIX);
        plan.table_pos.push_back(j < N / 2 ? j : plan.now - N + j);
    }
    for (uint32_t l = 0; l < 2; ++l) {
        for (uint32_t head = 0; head < h; ++head) {
            for (uint32_t j = 0; j < N; ++j) {
                plan.pos[l].push_back((j + 1) * plan.now / (N + 1 + head % 3));
            }
            plan.keep[l].emplace_back();
            for (uint32_t j = 0; j < plan.n_keep; ++j) {
                plan.keep[l].back().push_back(j < N_PREFIX ? j : 2 * j - N_PREFIX + (head + l) % 2);
            }
        }
    }
    for (uint32_t r = 0; r < params.n_probe; ++r) {
        plan.track_rows.push_back(r);
        plan.track_pos.push_back((r + 1) * (plan.now - 1) / params.n_probe);
        plan.recent_rows.push_back(params.n_probe + r);
        plan.recent_pos.push_back(std::max<int32_t>(0, plan.now - params.n_probe + r));
    }
    list_newer(plan, 0);

    const auto rotate = [&](float * x, int32_t pos) {
        if (layer.turns < 0) {
            return;
        }
        constexpr int N_LOW   = 1 << GGML_BEACON_TURN_BITS;
        const bool    is_neox = hparams.rope_type != LLAMA_ROPE_TYPE_NORM;
        const int     half    = hparams.n_rot(layer.il) / 2;
        const float * low     = &turns[layer.turns][(size_t) (pos % N_LOW) * 2 * half];
        const float * high    = &turns[layer.turns][(size_t) (N_LOW + pos / N_LOW) * 2 * half];
        for (int p = 0; p < half; ++p) {
            const auto turn = std::complex<float>(low[p], low[half + p]) * std::complex<float>(high[p], high[half + p]);
            float &    a    = x[is_neox ? p : 2 * p];
            float &    b    = x[is_neox ? half + p : 2 * p + 1];
            const auto y    = std::complex<float>(a, b) * turn;
            a               = y.real();
            b               = y.imag();
        }
    };

    std::vector<float>   numbers[2];  // by fused
    std::vector<int32_t> twins[2];
    std::vector<uint8_t> rows[2];
    for (const bool fused : { false, true }) {
        sample_layers sample(layer, N_CELLS);
        sample.fill(plan.track_pos, rotate);
        for (auto & one : sample.layers) {
            one.fused = fused;
        }
        plan.layers = &sample.layers;
        {
            std::vector<beacon_scores> scores;
            beacon_graph_run           run(lctx);
            auto *                     gf = beacon_build_graph_score(plan, run.res, &lctx, false, scores);
            if (ggml_graph_n_nodes(gf) > 0 && run.compute(gf, "check") != GGML_STATUS_SUCCESS) {
                return "could not be tried beside the composed graph";
            }
            for (const auto & score : scores) {
                append(numbers[fused], beacon_read_f32(score.beacon));
                append(numbers[fused], beacon_read_f32(score.recent));

                // the newest cell has no likeness to a newer one; the composed graph says another
                auto restated = beacon_read_f32(score.restated);
                auto twin     = std::vector<int32_t>(restated.size());
                if (score.twin) {
                    ggml_backend_tensor_get(score.twin, twin.data(), 0, ggml_nbytes(score.twin));
                }
                for (size_t j = N - 1; j < restated.size(); j += N) {
                    restated[j] = 0.0f;
                    twin[j]     = 0;
                }
                append(numbers[fused], restated);
                append(twins[fused], twin);
            }
        }
        beacon_graph_run run(lctx);
        if (run.compute(beacon_build_graph_move(plan, run.res), "check") != GGML_STATUS_SUCCESS) {
            return "could not be tried beside the composed graph";
        }
        for (uint32_t l = 0; l < 2; ++l) {
            if (!beacon_moves_in_graph(plan, l)) {
                beacon_move_host(plan, l);
            }
            const auto & one = sample.layers[l];
            for (const ggml_tensor * t : { one.mean, one.count, one.norm }) {
                append(numbers[fused], beacon_read_f32(t));
            }
            for (const ggml_tensor * t : { one.k, one.v }) {  // the other stream, and what was kept
                std::vector<uint8_t> data(t->nb[2] + plan.n_keep * t->nb[1]);
                ggml_backend_tensor_get(t, data.data(), 0, data.size());
                append(rows[fused], data);
            }
        }
    }
    float worst = 0.0f;
    for (size_t j = 0; j < numbers[0].size(); ++j) {
        const float error = std::abs(numbers[0][j] - numbers[1][j]) / (1.0f + std::abs(numbers[0][j]));
        worst             = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
    size_t n_other = 0;  // twins: rounding may decide between two
    for (size_t j = 0; j < twins[0].size(); ++j) {
        n_other += twins[0][j] != twins[1][j];
    }
    LLAMA_LOG_DEBUG("beaconkv: layer %d: fused and composed differ by up to %g, and in %zu of %zu twins\n", layer.il,
                    worst, n_other, twins[0].size());

    return worst < TOLERANCE && n_other <= twins[0].size() / 20 && rows[0] == rows[1] ?
               nullptr :
               "disagree with the composed graph";
}

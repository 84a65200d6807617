#include "beacon-graph.h"

#include "../ggml/beacon-ops.h"
#include "beacon-policy.h"
#include "beaconkv.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

// A softmax of numbers at this scale picks the highest.
static constexpr float MAX_SCALE = 1e8f;

// R-KV: keys from this cosine on are alike
static constexpr float ALIKE = 0.5f;

// Its matrix of cosines is made in that many blocks of rows: more take more nodes, fewer more memory (cells^2/8 floats
// per KV head, several times over: it is there to compare with, at budgets of some thousand cells).
static constexpr int64_t N_ROW_BLOCKS = 8;

// Queries to come: the rotation is averaged over that many positions, that far apart. Where a beacon's query comes next
// is not known; what turns fast cancels out.
static constexpr int N_FUTURE      = 16;
static constexpr int STEP_BEACON   = 64;
static constexpr int STEP_EXPECTED = 32;  // Expected Attention: 512 positions

// the largest logits tensor of a layer, bytes; more probes are scored in blocks
static constexpr size_t MAX_BLOCK_BYTES = 32u * 1024 * 1024;

// inputs with data that is known when the graph is built
class llm_graph_input_beacon_data : public llm_graph_input_i {
  public:
    explicit llm_graph_input_beacon_data(const llama_kv_cache * kv) : kv(kv) {}

    void set_input(const llama_ubatch *) override {
        for (const auto & [tensor, data] : tensors) {
            if (tensor->buffer) {
                ggml_backend_tensor_set(tensor, data.data(), 0, data.size());
            }
        }
        if (k_rot && k_rot->buffer) {
            kv->set_input_k_rot(k_rot);
        }
    }

    template <typename T>
    ggml_tensor * add(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, const std::vector<T> & data) {
        if (data.empty()) {
            return nullptr;
        }

        ggml_tensor * tensor = ggml_new_tensor_2d(ctx, type, ne0, ne1);
        GGML_ASSERT(ggml_nbytes(tensor) == data.size() * sizeof(T));
        ggml_set_input(tensor);

        const auto * bytes = (const uint8_t *) data.data();
        tensors.emplace_back(tensor, std::vector<uint8_t>(bytes, bytes + ggml_nbytes(tensor)));
        return tensor;
    }

    ggml_tensor * k_rot = nullptr;  // Hadamard rotation of quantised caches, k_rot^2 == I

  private:
    const llama_kv_cache * kv;

    std::vector<std::pair<ggml_tensor *, std::vector<uint8_t>>> tensors;
};

// one stream's plane of a tensor [.., .., n_stream]
static ggml_tensor * stream_view_2d(ggml_context * ctx, ggml_tensor * t, uint32_t stream, int64_t ne0, int64_t ne1) {
    return ggml_view_2d(ctx, t, ne0, ne1, ggml_row_size(t->type, ne0), stream * t->nb[2]);
}

// probes that are scored at once
static int64_t block_size(const beacon_plan & plan, const beacon_layer & layer) {
    return std::max<int64_t>(16, MAX_BLOCK_BYTES / (plan.n() * layer.n_head_kv * sizeof(float)));
}

namespace {

// builds the score graph; a struct because its steps share the inputs
struct score_builder {
    const beacon_plan &   plan;
    const beacon_params & params;
    const llama_cparams & cparams;
    const llama_model &   model;
    const llama_hparams & hparams;

    ggml_context * ctx;
    ggml_cgraph *  gf;

    llm_graph_input_beacon_data * inp;

    const bool trace;  // keep q_pre, probes, k, k_pre and v readable

    llama_context & lctx;

    score_builder(const beacon_plan &           plan,
                  llama_context *               lctx,
                  llm_graph_result *            res,
                  llm_graph_input_beacon_data * inp,
                  bool                          trace) :
        plan(plan),
        params(*plan.params),
        cparams(lctx->get_cparams()),
        model(lctx->get_model()),
        hparams(model.hparams),
        ctx(res->get_ctx()),
        gf(res->get_gf()),
        inp(inp),
        trace(trace),
        lctx(*lctx) {}

    ggml_tensor * track_rows  = nullptr;          // I32 [n_track]
    ggml_tensor * track_back  = nullptr;          // I32 [n_track] positions, negative: undoes the rotation
    ggml_tensor * recent_rows = nullptr;          // I32 [n_recent]
    ggml_tensor * eye         = nullptr;          // F32 [n_beacon, n_beacon]
    ggml_tensor * cell        = nullptr;          // F32 [n] 0, 1, ..
    ggml_tensor * no_cell     = nullptr;          // F32 [n] 0.5, 0, 0, ..
    ggml_tensor * future      = nullptr;          // I32 [N_FUTURE] positions
    ggml_tensor * mask_sinks  = nullptr;          // F32 [n]
    ggml_tensor * ones        = nullptr;          // F32 [n_probe]
    ggml_tensor * mask_newer  = nullptr;          // F32 [n_newer, n]

    std::map<int64_t, ggml_tensor *> eyes;        // by n_embd_head: F32 [n_embd_head, n_embd_head]
    std::map<int64_t, ggml_tensor *> halves;      // by n_embd_head_k + n_embd_head_v, d: F32 [d] 0.5
    std::map<int64_t, ggml_tensor *> newer_rows;  // by n_head_kv: I32 [n_newer*n_head_kv]
    std::map<int64_t, ggml_tensor *> kv_rows;     // by n_head_kv: I32 [n*n_head_kv]
    std::map<int64_t, ggml_tensor *> masks;       // by heads of a group: F32 [n, n_beacon + n_recent*n_group]

    // of the fused operators
    ggml_tensor * cells      = nullptr;             // I32 [n]
    ggml_tensor * track_meta = nullptr;             // I32 [n_track, 2] rows, positions

    std::map<int64_t, ggml_tensor *> witness_rows;  // by n_head_kv: I32 [n_newer*n_head_kv] rows of the cache
    std::map<int64_t, ggml_tensor *> metas;  // by heads of a group: I32 [n + n_beacon + n_recent*n_group + n_newer]
    std::map<int, ggml_tensor *>     turns;  // by layer.turns: F32 [n_rot, ..]

    int64_t n() const { return plan.n(); }

    bool has(beacon_part part) const { return plan.parts & part; }

    int64_t n_newer() const { return plan.newer.size(); }

    // what a rotation scales by (YaRN's magnitude, see rope_yarn in ggml)
    float rope_magnitude(int il) const {
        return cparams.yarn_attn_factor * (cparams.yarn_ext_factor != 0.0f ?
                                               1.0f + 0.1f * logf(1.0f / model.get_rope_freq_scale(cparams, il)) :
                                               1.0f);
    }

    // rotation by a position, with the arguments of llama_kv_cache::build_rope_shift
    ggml_tensor * rope(ggml_tensor * x, ggml_tensor * pos, bool undo, int il) {
        if (!hparams.has_rope(il) || hparams.rope_type == LLAMA_ROPE_TYPE_NONE) {
            return x;
        }

        const bool is_mrope = hparams.rope_type == LLAMA_ROPE_TYPE_MROPE || hparams.rope_type == LLAMA_ROPE_TYPE_IMROPE;

        const float freq_scale  = model.get_rope_freq_scale(cparams, il);
        float       attn_factor = cparams.yarn_attn_factor;
        if (undo) {
            attn_factor /= rope_magnitude(il) * rope_magnitude(il);  // the inverse has to scale back
        }

        return ggml_rope_ext(ctx, x, pos, model.get_rope_factors(cparams, il), hparams.n_rot(il),
                             is_mrope ? LLAMA_ROPE_TYPE_NEOX : hparams.rope_type, cparams.n_ctx_orig_yarn,
                             model.get_rope_freq_base(cparams, il), freq_scale, cparams.yarn_ext_factor, attn_factor,
                             cparams.yarn_beta_fast, cparams.yarn_beta_slow);
    }

    // stored queries, [n_embd_head, n_head, n_rows]
    ggml_tensor * get_queries(const beacon_layer & layer, ggml_tensor * rows) {
        ggml_tensor * q = stream_view_2d(ctx, layer.q, plan.stream, layer.q->ne[0], layer.q->ne[1]);
        return ggml_reshape_3d(ctx, ggml_get_rows(ctx, q, rows), layer.n_embd_head_k, layer.n_head, rows->ne[0]);
    }

    // [n_embd_head, n_head, n_rows] -> [n_embd_head, n_group*n_rows, n_head_kv], the group's head outermost or innermost
    ggml_tensor * pool_group(const beacon_layer & layer, ggml_tensor * q, bool head_outermost) {
        const int64_t n_group = layer.n_head / layer.n_head_kv;
        const int64_t n_rows  = q->ne[2];

        q = ggml_reshape_4d(ctx, q, layer.n_embd_head_k, n_group, layer.n_head_kv, n_rows);
        q = head_outermost ? ggml_permute(ctx, q, 0, 2, 3, 1) : ggml_permute(ctx, q, 0, 1, 3, 2);

        return ggml_cont_3d(ctx, q, layer.n_embd_head_k, n_group * n_rows, layer.n_head_kv);
    }

    // this stream's beacons, [ne0, n_beacon, n_head_kv]
    ggml_tensor * beacon_view(ggml_tensor * t) {
        return ggml_view_3d(ctx, t, t->ne[0], t->ne[1], t->ne[2], t->nb[1], t->nb[2], plan.stream * t->nb[3]);
    }

    struct beacons {
        ggml_tensor * mean;   // [n_embd_head, n_beacon, n_head_kv]
        ggml_tensor * count;  // [1, n_beacon, n_head_kv]
        ggml_tensor * norm;   // [1, n_beacon, n_head_kv]
    };

    // fold queries x [n_embd_head, n_points, n_head_kv] into the centroids by cosine assignment and running mean
    beacons track(const beacon_layer & layer, const beacons & old, ggml_tensor * x) {
        const int64_t d        = layer.n_embd_head_k;
        const int64_t h        = layer.n_head_kv;
        const int64_t m        = params.n_beacon;
        const int64_t n_points = x->ne[1];

        ggml_tensor * sim = ggml_mul_mat(ctx, ggml_l2_norm(ctx, old.mean, 1e-12f), ggml_l2_norm(ctx, x, 1e-12f));
        ggml_tensor * idx = ggml_argmax(ctx, ggml_reshape_2d(ctx, sim, m, n_points * h));

        // one-hot labels, [n_points, m, h]
        ggml_tensor * label = ggml_reshape_3d(ctx, ggml_get_rows(ctx, eye, idx), m, n_points, h);
        label               = ggml_cont(ctx, ggml_transpose(ctx, label));

        ggml_tensor * len   = ggml_sqrt(ctx, ggml_sum_rows(ctx, ggml_sqr(ctx, x)));
        ggml_tensor * x_sum = ggml_mul_mat(ctx, ggml_cont(ctx, ggml_transpose(ctx, x)), label);     // [d, m, h]
        ggml_tensor * l_sum = ggml_mul_mat(ctx, ggml_reshape_3d(ctx, len, n_points, 1, h), label);  // [1, m, h]
        GGML_ASSERT(x_sum->ne[0] == d);

        beacons cur;
        cur.count            = ggml_add(ctx, old.count, ggml_sum_rows(ctx, label));
        ggml_tensor * weight = ggml_clamp(ctx, ggml_dup(ctx, cur.count), 1.0f, INFINITY);

        cur.mean = ggml_div(ctx, ggml_add(ctx, ggml_mul(ctx, old.mean, old.count), x_sum), weight);
        cur.norm = ggml_div(ctx, ggml_add(ctx, ggml_mul(ctx, old.norm, old.count), l_sum), weight);
        return cur;
    }

    // sum over dimension 1 of a [n, n_probe, n_head_kv] -> [n, 1, n_head_kv], by halves
    ggml_tensor * sum_probes(ggml_tensor * a) {
        ggml_tensor * rest = nullptr;

        const auto rows = [&](ggml_tensor * t, int64_t i0, int64_t ne1) {
            return ggml_view_3d(ctx, t, t->ne[0], ne1, t->ne[2], t->nb[1], t->nb[2], i0 * t->nb[1]);
        };

        while (a->ne[1] > 1) {
            const int64_t half = a->ne[1] / 2;
            if (a->ne[1] % 2 == 1) {
                ggml_tensor * last = rows(a, 2 * half, 1);
                rest               = rest ? ggml_add(ctx, rest, last) : last;
            }
            a = ggml_add(ctx, rows(a, 0, half), rows(a, half, half));
        }
        return rest ? ggml_add(ctx, a, rest) : a;
    }

    // sum over the probes [p0, p1) of their softmax attention to the cells, [n, 1, n_head_kv]
    ggml_tensor * attend(const beacon_layer & layer,
                         ggml_tensor *        k,
                         ggml_tensor *        probes,
                         int64_t              p0,
                         int64_t              p1,
                         ggml_tensor *        count) {
        const int64_t n_block = block_size(plan, layer);

        ggml_tensor * mask = masks.at(layer.n_head / layer.n_head_kv);
        ggml_tensor * sum  = nullptr;

        for (int64_t b0 = p0; b0 < p1; b0 += n_block) {
            const int64_t nb = std::min(n_block, p1 - b0);

            ggml_tensor * q = ggml_cont(ctx, ggml_view_3d(ctx, probes, probes->ne[0], nb, probes->ne[2], probes->nb[1],
                                                          probes->nb[2], b0 * probes->nb[1]));

            ggml_tensor * kq    = ggml_mul_mat(ctx, k, q);  // [n, nb, n_head_kv]
            float         scale = layer.kq_scale;
            ggml_prec_set_acc(kq, GGML_PREC_F32);

            if (hparams.attn_soft_cap) {
                const float cap = hparams.f_attn_logit_softcapping;
                kq              = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, kq, scale / cap)), cap);
                scale           = 1.0f;
            }

            kq = ggml_soft_max_ext(ctx, kq, ggml_view_2d(ctx, mask, n(), nb, mask->nb[1], b0 * mask->nb[1]), scale,
                                   0.0f);
            if (count) {
                kq = ggml_mul(ctx, kq, ggml_step(ctx, count));
            }

            ggml_tensor * cur = sum_probes(kq);
            sum               = sum ? ggml_add(ctx, sum, cur) : cur;
        }
        return sum;
    }

    // vectors [d, n_tokens, h] rotated to each position to come, on average
    ggml_tensor * rope_future(ggml_tensor * x, int il) {
        const int64_t d      = x->ne[0];
        const int64_t n_rows = x->ne[1] * x->ne[2];

        ggml_tensor * all    = ggml_repeat_4d(ctx, ggml_reshape_3d(ctx, x, d, n_rows, 1), d, n_rows, N_FUTURE, 1);
        ggml_tensor * turned = rope(all, future, false, il);

        turned = sum_probes(ggml_reshape_3d(ctx, turned, d * n_rows, N_FUTURE, 1));
        return ggml_scale(ctx, ggml_reshape_3d(ctx, turned, d, x->ne[1], x->ne[2]), 1.0f / N_FUTURE);
    }

    // highest likeness of each cell to the newer ones that plan.newer lists, and which of these it was: both
    // [1, n, n_head_kv], an older one and no likeness where none is newer. The likeness is the mean of two cosines, of
    // the keys with the rotation undone and of the values: what is said again has both alike, wherever it stood.
    void restated(ggml_tensor * k_pre, ggml_tensor * v, beacon_scores & out) {
        const int64_t d = k_pre->ne[0] + v->ne[0];
        const int64_t h = v->ne[2];

        // one product makes the sum of the two cosines
        ggml_tensor * unit =
            ggml_concat(ctx, ggml_l2_norm(ctx, k_pre, 1e-12f), ggml_l2_norm(ctx, v, 1e-12f), 0);  // [d, n, n_head_kv]
        ggml_tensor * newer = ggml_get_rows(ctx, ggml_reshape_2d(ctx, unit, d, n() * h), newer_rows.at(h));
        newer               = ggml_reshape_3d(ctx, newer, d, n_newer(), h);

        ggml_tensor * both = ggml_mul_mat(ctx, newer, unit);
        ggml_prec_set_acc(both, GGML_PREC_F32);
        ggml_tensor * rank = ggml_add(ctx, both, mask_newer);  // [n_newer, n, n_head_kv]
        ggml_tensor * twin = ggml_argmax(ctx, ggml_reshape_2d(ctx, rank, n_newer(), n() * h));
        ggml_tensor * best = ggml_get_rows(ctx, newer, ggml_reshape_2d(ctx, twin, n(), h));

        // a product with a constant row: sum_rows has one thread on the CPU
        output(out.restated, ggml_mul_mat(ctx, halves.at(d), ggml_mul(ctx, best, unit)));
        output(out.twin, twin);
    }

    // turns of a layer's rotation, and how to read them
    ggml_tensor * get_turns(const beacon_layer & layer, ggml_beacon_rope & rope) {
        rope = {};
        if (layer.turns < 0) {
            return nullptr;
        }
        rope.n_rot   = hparams.n_rot(layer.il);
        rope.pairs   = hparams.rope_type == LLAMA_ROPE_TYPE_NORM ? GGML_BEACON_PAIRS_NORMAL : GGML_BEACON_PAIRS_NEOX;
        rope.unscale = 1.0f / rope_magnitude(layer.il);

        ggml_tensor *& t = turns[layer.turns];
        if (!t) {
            const auto & table = (*plan.turns)[layer.turns];
            t                  = inp->add(ctx, GGML_TYPE_F32, rope.n_rot, table.size() / rope.n_rot, table);
        }
        return t;
    }

    // the same as track(), in place
    beacons track_fused(const beacon_layer & layer, const beacons & old) {
        ggml_beacon_rope rope;
        ggml_tensor *    t = get_turns(layer, rope);
        ggml_tensor *    q = stream_view_2d(ctx, layer.q, plan.stream, layer.q->ne[0], layer.q->ne[1]);

        beacons cur = old;
        cur.mean    = ggml_beacon_track(ctx, old.mean, old.count, old.norm, q, track_meta, t, &rope);
        ggml_build_forward_expand(gf, cur.mean);  // before anything reads count and norm
        return cur;
    }

    // keys with the rotation undone and values of plan.newer, unit vectors, [n_embd_head_k + n_embd_head_v, n_newer,
    // n_head_kv]
    ggml_tensor * get_witnesses(uint32_t i) {
        const auto &  layer = (*plan.layers)[i];
        const int64_t d     = layer.n_embd_head_k;
        const int64_t e     = layer.n_embd_head_v;
        const int64_t h     = layer.n_head_kv;

        std::vector<int32_t> back;
        for (int64_t head = 0; head < h; ++head) {
            for (const int32_t j : plan.newer) {
                back.push_back(-plan.pos[i][head * n() + j]);
            }
        }
        const int64_t n_rows = back.size();
        ggml_tensor * rows   = witness_rows.at(h);
        ggml_tensor * k = ggml_get_rows(ctx, stream_view_2d(ctx, layer.k, plan.stream, d, h * layer.k->ne[1]), rows);
        ggml_tensor * v = ggml_get_rows(ctx, stream_view_2d(ctx, layer.v, plan.stream, e, h * layer.v->ne[1]), rows);
        if (inp->k_rot) {
            k = llama_mul_mat_hadamard(ctx, k, inp->k_rot);
        }
        k = rope(ggml_reshape_3d(ctx, k, d, 1, n_rows), inp->add(ctx, GGML_TYPE_I32, n_rows, 1, back), true, layer.il);
        k = ggml_l2_norm(ctx, ggml_reshape_2d(ctx, k, d, n_rows), 1e-12f);

        ggml_tensor * unit = ggml_concat(ctx, k, ggml_l2_norm(ctx, v, 1e-12f), 0);
        return ggml_reshape_3d(ctx, unit, d + e, n_newer(), h);
    }

    // Compute t where a cache is. The scheduler knows that of what is written into a cache, but not of what reads it: it
    // would rather copy the cache.
    void pin(ggml_tensor * t, const ggml_tensor * cache) {
        const auto sched = lctx.get_sched();
        const auto buft  = ggml_backend_buffer_get_type(cache->buffer);
        const auto dev   = ggml_backend_buft_get_device(buft);
        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
            const auto backend = ggml_backend_sched_get_backend(sched, i);
            const bool is_cpu = ggml_backend_dev_type(ggml_backend_get_device(backend)) == GGML_BACKEND_DEVICE_TYPE_CPU;
            if (dev ? ggml_backend_get_device(backend) == dev : is_cpu) {
                ggml_backend_sched_set_tensor_backend(sched, t, backend);
                return;
            }
        }
    }

    // the same as attend() and restated()
    void score_fused(uint32_t i, ggml_tensor * probes, ggml_tensor * count, beacon_scores & out) {
        const auto &  layer = (*plan.layers)[i];
        const int64_t h     = layer.n_head_kv;

        const auto cache_view = [&](ggml_tensor * t, int64_t ne0) {
            return ggml_view_3d(ctx, t, ne0, h, t->ne[1], ggml_row_size(t->type, ne0), t->nb[1],
                                plan.stream * t->nb[2]);
        };
        ggml_tensor * witnesses = has(BEACON_PART_RESTATED) ? get_witnesses(i) : nullptr;

        ggml_beacon_score_params op = {};

        ggml_tensor * t = get_turns(layer, op.rope);

        op.n_beacon   = has(BEACON_PART_BEACONS) ? params.n_beacon : 0;
        op.n_sink     = params.n_sink;
        op.boundary   = plan.boundary;
        op.n_hadamard = inp->k_rot ? inp->k_rot->ne[0] : 0;
        op.scale      = layer.kq_scale;
        op.softcap    = hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;

        ggml_tensor * k   = cache_view(layer.k, layer.n_embd_head_k);
        ggml_tensor * v   = cache_view(layer.v, layer.n_embd_head_v);
        ggml_tensor * pos = inp->add(ctx, GGML_TYPE_I32, n(), h, plan.pos[i]);
        ggml_tensor * score =
            ggml_beacon_score(ctx, k, v, probes, witnesses, cells, metas.at(layer.n_head / h), pos, t, count, &op);
        ggml_set_output(score);
        pin(score, layer.k);

        const auto part = [&](int64_t row) {
            ggml_tensor * view = ggml_view_1d(ctx, score, n() * h, row * score->nb[1]);
            ggml_build_forward_expand(gf, view);
            return view;
        };
        if (has(BEACON_PART_BEACONS)) {
            out.beacon = part(0);
        }
        if (has(BEACON_PART_RECENT)) {
            out.recent = part(1);
        }
        if (has(BEACON_PART_RESTATED)) {
            out.restated   = part(2);
            out.twin       = part(3);
            out.twin->type = GGML_TYPE_I32;
        }
    }

    // R-KV's redundancy: the mean cosine of each cell's key to those of the others, where of those alike each one leaves
    // out the newest, [n, 1, n_head_kv]
    ggml_tensor * redundancy(ggml_tensor * k) {
        const int64_t d = k->ne[0];
        const int64_t h = k->ne[2];

        const int64_t n_block = (n() + N_ROW_BLOCKS - 1) / N_ROW_BLOCKS;

        ggml_tensor * unit = ggml_l2_norm(ctx, k, 1e-12f);
        ggml_tensor * sum  = nullptr;

        for (int64_t b0 = 0; b0 < n(); b0 += n_block) {
            const int64_t nb = std::min(n_block, n() - b0);

            ggml_tensor * row  = ggml_view_2d(ctx, cell, 1, nb, ggml_element_size(cell), b0 * ggml_element_size(cell));
            ggml_tensor * cols = ggml_repeat_4d(ctx, cell, n(), nb, 1, 1);
            ggml_tensor * off  = ggml_step(ctx, ggml_scale_bias(ctx, ggml_sqr(ctx, ggml_sub(ctx, cols, row)), 1.0f,
                                                                -0.5f));  // 0 on the diagonal

            ggml_tensor * rows =
                ggml_cont(ctx, ggml_view_3d(ctx, unit, d, nb, h, unit->nb[1], unit->nb[2], b0 * unit->nb[1]));
            ggml_tensor * sim = ggml_mul(ctx, ggml_mul_mat(ctx, unit, rows), off);  // [n, nb, h]

            // one-hot at the newest of those alike, at the first cell if none is
            ggml_tensor * alike = ggml_step(ctx, ggml_scale_bias(ctx, sim, 1.0f, -ALIKE));
            ggml_tensor * last  = ggml_add(ctx, ggml_mul(ctx, alike, cell), no_cell);
            ggml_tensor * pick  = ggml_soft_max_ext(ctx, last, nullptr, MAX_SCALE, 0.0f);

            ggml_tensor * cur = sum_probes(ggml_sub(ctx, sim, ggml_mul(ctx, sim, pick)));
            sum               = sum ? ggml_add(ctx, sum, cur) : cur;
        }
        return ggml_scale(ctx, sum, 1.0f / n());
    }

    struct moments {
        ggml_tensor * mean;    // [n_embd_head, 1, n_head]
        ggml_tensor * moment;  // [n_embd_head, n_embd_head, n_head]
        ggml_tensor * count;   // [1, 1, n_head]
    };

    // fold queries [n_embd_head, n_head, n_rows] into the moments of each query head
    moments track_moments(const moments & old, ggml_tensor * q) {
        const int64_t n_rows = q->ne[2];

        ggml_tensor * x   = ggml_cont(ctx, ggml_permute(ctx, q, 1, 2, 0, 3));  // [n_rows, d, n_head]
        ggml_tensor * all = ggml_view_1d(ctx, ones, n_rows, 0);
        ggml_tensor * sum = ggml_reshape_3d(ctx, ggml_mul_mat(ctx, all, x), x->ne[1], 1, x->ne[2]);
        ggml_tensor * xx  = ggml_mul_mat(ctx, x, x);

        moments cur;
        cur.count  = ggml_scale_bias(ctx, old.count, 1.0f, n_rows);
        cur.mean   = ggml_div(ctx, ggml_add(ctx, ggml_mul(ctx, old.mean, old.count), sum), cur.count);
        cur.moment = ggml_div(ctx, ggml_add(ctx, ggml_mul(ctx, old.moment, old.count), xx), cur.count);
        return cur;
    }

    // Expected Attention: log of E[exp(q*k)] for q ~ N(mean, covariance), rotated to the positions to come on average;
    // softmax over the cells, times the length of the values. Mean over the group, [n, 1, n_head_kv].
    ggml_tensor * expected(const beacon_layer & layer, ggml_tensor * k, const moments & m, ggml_tensor * v) {
        const int64_t d       = k->ne[0];
        const int64_t h       = k->ne[2];
        const int64_t n_group = layer.n_head / h;

        ggml_tensor * outer = ggml_reshape_3d(ctx, m.mean, 1, d, layer.n_head);
        ggml_tensor * cov   = ggml_sub(ctx, m.moment, ggml_mul_mat(ctx, outer, outer));

        ggml_tensor * rot = rope_future(eyes.at(d), layer.il);  // columns of the averaged rotation
        if (inp->k_rot) {
            rot = llama_mul_mat_hadamard(ctx, rot, inp->k_rot);
        }
        rot = ggml_cont(ctx, ggml_transpose(ctx, rot));

        ggml_tensor * mean = ggml_mul_mat(ctx, rot, m.mean);  // [d, 1, n_head]
        cov                = ggml_mul_mat(ctx, rot, cov);     // R*C
        cov                = ggml_mul_mat(ctx, rot, ggml_cont(ctx, ggml_transpose(ctx, cov)));

        ggml_tensor * lin  = ggml_mul_mat(ctx, k, ggml_reshape_3d(ctx, mean, d, n_group, h));  // [n, n_group, h]
        ggml_tensor * quad = ggml_mul_mat(ctx, k, ggml_reshape_3d(ctx, cov, d, d * n_group, h));
        quad               = ggml_reshape_4d(ctx, quad, n(), d, n_group, h);
        quad = ggml_mul(ctx, quad, ggml_reshape_4d(ctx, ggml_cont(ctx, ggml_transpose(ctx, k)), n(), d, 1, h));
        quad = ggml_reshape_3d(ctx, sum_probes(ggml_reshape_3d(ctx, quad, n(), d, layer.n_head)), n(), n_group, h);

        ggml_tensor * logit  = ggml_add(ctx, lin, ggml_scale(ctx, quad, 0.5f * layer.kq_scale));
        logit                = ggml_add(ctx, ggml_scale(ctx, logit, layer.kq_scale), mask_sinks);
        ggml_tensor * score  = sum_probes(ggml_soft_max(ctx, logit));
        ggml_tensor * v_norm = ggml_sqrt(ctx, ggml_sum_rows(ctx, ggml_sqr(ctx, v)));  // [1, n, h]
        return ggml_mul(ctx, ggml_scale(ctx, score, 1.0f / n_group), ggml_reshape_3d(ctx, v_norm, n(), 1, h));
    }

    // rows of K or V in the order of their positions, [d, n, h]
    ggml_tensor * rows_of(const beacon_layer & layer, ggml_tensor * t, int64_t d) {
        const int64_t h = layer.n_head_kv;

        ggml_tensor * rows = stream_view_2d(ctx, t, plan.stream, d, h * t->ne[1]);
        return ggml_reshape_3d(ctx, ggml_get_rows(ctx, rows, kv_rows.at(h)), d, n(), h);
    }

    // keys [d, n, h] as they were before they were rotated
    ggml_tensor * undo_rotation(ggml_tensor * k, uint32_t i) {
        std::vector<int32_t> pos(plan.pos[i].size());
        std::transform(plan.pos[i].begin(), plan.pos[i].end(), pos.begin(), [](int32_t p) { return -p; });

        if (inp->k_rot) {
            k = llama_mul_mat_hadamard(ctx, k, inp->k_rot);  // its own inverse
        }
        ggml_tensor * back = inp->add(ctx, GGML_TYPE_I32, pos.size(), 1, pos);
        ggml_tensor * x    = ggml_reshape_3d(ctx, k, k->ne[0], 1, pos.size());
        return ggml_reshape_3d(ctx, rope(x, back, true, (*plan.layers)[i].il), k->ne[0], n(), k->ne[2]);
    }

    // whether a layer's rows are gathered
    bool composes(const beacon_layer & layer) const {
        return !layer.fused || trace || has(BEACON_PART_REDUNDANCY) || has(BEACON_PART_EXPECTED);
    }

    void build_inputs();
    void build_inputs_fused(const beacon_layer & layer);
    void build_inputs_composed(const beacon_layer & layer);
    void build_layer(uint32_t i, beacon_scores & out);

    std::vector<ggml_tensor *> commits;  // copies of new centroids into place, last in the graph

    void output(ggml_tensor *& dst, ggml_tensor * t) {
        dst = t;
        ggml_set_output(t);
        ggml_build_forward_expand(gf, t);
    }
};

void score_builder::build_inputs() {
    const auto eye_of = [&](int64_t n) {
        std::vector<float> data(n * n, 0.0f);
        for (int64_t i = 0; i < n; ++i) {
            data[i * n + i] = 1.0f;
        }
        return inp->add(ctx, GGML_TYPE_F32, n, n, data);
    };

    track_rows = inp->add(ctx, GGML_TYPE_I32, plan.track_rows.size(), 1, plan.track_rows);

    std::vector<int32_t> back(plan.track_pos.size());
    std::transform(plan.track_pos.begin(), plan.track_pos.end(), back.begin(), [](int32_t p) { return -p; });
    track_back = inp->add(ctx, GGML_TYPE_I32, back.size(), 1, back);

    if (plan.init_only) {
        return;
    }

    const int64_t m = has(BEACON_PART_BEACONS) ? params.n_beacon : 0;

    if (has(BEACON_PART_RECENT)) {
        recent_rows = inp->add(ctx, GGML_TYPE_I32, plan.recent_rows.size(), 1, plan.recent_rows);
    }
    if (has(BEACON_PART_BEACONS)) {
        eye = eye_of(m);
    }
    if (plan.parts & (BEACON_PART_BEACONS | BEACON_PART_EXPECTED)) {
        std::vector<int32_t> pos;
        for (int i = 0; i < N_FUTURE; ++i) {
            pos.push_back(plan.now + i * (has(BEACON_PART_BEACONS) ? STEP_BEACON : STEP_EXPECTED));
        }
        future = inp->add(ctx, GGML_TYPE_I32, N_FUTURE, 1, pos);
    }

    if (has(BEACON_PART_REDUNDANCY)) {
        std::vector<float> first(n(), 0.0f);
        first[0] = 0.5f;
        std::vector<float> index(n());
        std::iota(index.begin(), index.end(), 0.0f);
        cell    = inp->add(ctx, GGML_TYPE_F32, n(), 1, index);
        no_cell = inp->add(ctx, GGML_TYPE_F32, n(), 1, first);
    }

    if (has(BEACON_PART_EXPECTED)) {
        ones = inp->add(ctx, GGML_TYPE_F32, params.n_probe, 1, std::vector<float>(params.n_probe, 1.0f));

        std::vector<float> mask;
        for (const int32_t p : plan.table_pos) {
            mask.push_back(p < (int32_t) params.n_sink ? -INFINITY : 0.0f);
        }
        mask_sinks = inp->add(ctx, GGML_TYPE_F32, n(), 1, mask);
    }

    for (uint32_t i = plan.i0; i < plan.i1; ++i) {
        const auto & layer = (*plan.layers)[i];
        if (has(BEACON_PART_EXPECTED) && eyes.count(layer.n_embd_head_k) == 0) {
            eyes[layer.n_embd_head_k] = eye_of(layer.n_embd_head_k);
        }
        if (layer.fused) {
            build_inputs_fused(layer);
        }
        if (composes(layer)) {
            build_inputs_composed(layer);
        }
    }
    inp->k_rot = plan.kv->build_input_k_rot(ctx);
}

void score_builder::build_inputs_fused(const beacon_layer & layer) {
    const int64_t h       = layer.n_head_kv;
    const int64_t n_group = layer.n_head / h;

    if (!cells) {
        cells = inp->add(ctx, GGML_TYPE_I32, n(), 1, plan.cells);

        auto data = plan.track_rows;
        data.insert(data.end(), plan.track_pos.begin(), plan.track_pos.end());
        track_meta = inp->add(ctx, GGML_TYPE_I32, plan.track_rows.size(), 2, data);
    }
    if (has(BEACON_PART_RESTATED) && witness_rows.count(h) == 0) {
        std::vector<int32_t> rows;
        for (int64_t head = 0; head < h; ++head) {
            for (const int32_t j : plan.newer) {
                rows.push_back(plan.cells[j] * h + head);
            }
        }
        witness_rows[h] = inp->add(ctx, GGML_TYPE_I32, rows.size(), 1, rows);
    }
    if (metas.count(n_group) == 0) {
        auto data = plan.table_pos;
        data.insert(data.end(), has(BEACON_PART_BEACONS) ? params.n_beacon : 0, plan.now);
        for (int64_t head = 0; has(BEACON_PART_RECENT) && head < n_group; ++head) {
            data.insert(data.end(), plan.recent_pos.begin(), plan.recent_pos.end());
        }
        if (has(BEACON_PART_RESTATED)) {
            data.insert(data.end(), plan.newer.begin(), plan.newer.end());
        }
        metas[n_group] = inp->add(ctx, GGML_TYPE_I32, data.size(), 1, data);
    }
}

void score_builder::build_inputs_composed(const beacon_layer & layer) {
    const int64_t h       = layer.n_head_kv;
    const int64_t n_group = layer.n_head / h;

    if (kv_rows.count(h) == 0) {
        std::vector<int32_t> rows;
        std::vector<int32_t> rows_newer;
        for (int64_t head = 0; head < h; ++head) {
            for (const int32_t cell : plan.cells) {
                rows.push_back(cell * h + head);
            }
            for (const int32_t i_newer : plan.newer) {
                rows_newer.push_back(head * n() + i_newer);
            }
        }
        kv_rows[h] = inp->add(ctx, GGML_TYPE_I32, rows.size(), 1, rows);
        if (has(BEACON_PART_RESTATED)) {
            newer_rows[h] = inp->add(ctx, GGML_TYPE_I32, rows_newer.size(), 1, rows_newer);
        }
    }
    if (layer.fused) {
        return;  // its rows are wanted, for a trace or for what has no operator
    }

    if (has(BEACON_PART_RESTATED) && !mask_newer) {
        std::vector<float> mask(n_newer() * n(), 0.0f);
        for (int64_t i = 0; i < n(); ++i) {
            for (int64_t j = 0; j < n_newer(); ++j) {
                mask[i * n_newer() + j] = plan.newer[j] > i ? j * 2 * GGML_BEACON_STEP : -10.0f;
            }
        }
        mask_newer = inp->add(ctx, GGML_TYPE_F32, n_newer(), n(), mask);
    }
    const int64_t d = layer.n_embd_head_k + layer.n_embd_head_v;
    if (has(BEACON_PART_RESTATED) && halves.count(d) == 0) {
        halves[d] = inp->add(ctx, GGML_TYPE_F32, d, 1, std::vector<float>(d, 0.5f));
    }
    if (masks.count(n_group) == 0) {
        const int64_t      m        = has(BEACON_PART_BEACONS) ? params.n_beacon : 0;
        const int64_t      n_recent = has(BEACON_PART_RECENT) ? plan.recent_pos.size() : 0;
        std::vector<float> data(n() * (m + n_recent * n_group), 0.0f);
        for (int64_t j = 0; j < m + n_recent * n_group; ++j) {
            const int32_t pos = j < m ? plan.now : plan.recent_pos[(j - m) % n_recent];
            for (int64_t c = 0; c < n(); ++c) {
                const int32_t p = plan.table_pos[c];
                if (p < (int32_t) params.n_sink || (p >= plan.boundary && p > pos)) {
                    data[j * n() + c] = -INFINITY;
                }
            }
        }
        masks[n_group] = inp->add(ctx, GGML_TYPE_F32, n(), m + n_recent * n_group, data);
    }
}

void score_builder::build_layer(uint32_t i, beacon_scores & out) {
    const auto & layer = (*plan.layers)[i];

    const int     il = layer.il;
    const int64_t d  = layer.n_embd_head_k;

    ggml_tensor * q_pre   = nullptr;
    const bool    has_use = has(BEACON_PART_EXPECTED) ? plan.track : plan.track && !layer.fused;
    if (!plan.track_rows.empty() && (plan.init_only || has_use || trace)) {
        q_pre = rope(get_queries(layer, track_rows), track_back, true, il);
        if (plan.init_only || trace) {
            output(out.q_pre, q_pre);
        }
    }
    if (plan.init_only) {
        return;
    }

    ggml_tensor * k = composes(layer) ? rows_of(layer, layer.k, d) : nullptr;
    ggml_tensor * v = composes(layer) ? rows_of(layer, layer.v, layer.n_embd_head_v) : nullptr;
    if (trace) {
        output(out.k, k);
        output(out.v, v);
    }

    ggml_tensor * probes = nullptr;
    beacons       cur    = {};
    const int64_t m      = has(BEACON_PART_BEACONS) ? params.n_beacon : 0;
    if (m > 0) {
        cur = { beacon_view(layer.mean), beacon_view(layer.count), beacon_view(layer.norm) };
        if (plan.track && !plan.track_rows.empty() && layer.fused) {
            cur = track_fused(layer, cur);
        } else if (plan.track && q_pre) {
            const beacons old = cur;

            cur = track(layer, old, pool_group(layer, q_pre, false));
            commits.push_back(ggml_cpy(ctx, cur.mean, old.mean));
            commits.push_back(ggml_cpy(ctx, cur.count, old.count));
            commits.push_back(ggml_cpy(ctx, cur.norm, old.norm));
        }
        probes = rope_future(ggml_mul(ctx, ggml_l2_norm(ctx, cur.mean, 1e-12f), cur.norm), il);
    }
    if (recent_rows) {
        ggml_tensor * recent = pool_group(layer, get_queries(layer, recent_rows), true);
        probes               = probes ? ggml_concat(ctx, probes, recent, 1) : recent;
    }
    if (probes) {
        if (inp->k_rot) {
            probes = llama_mul_mat_hadamard(ctx, probes, inp->k_rot);
        }
        if (trace) {
            output(out.probes, probes);
        }
        if (m > 0 && !layer.fused) {
            output(out.beacon, attend(layer, k, probes, 0, m, plan.mask_empty ? cur.count : nullptr));
        }
        if (recent_rows && !layer.fused) {
            output(out.recent, attend(layer, k, probes, m, probes->ne[1], nullptr));
        }
    }

    if (has(BEACON_PART_RESTATED) && composes(layer)) {
        ggml_tensor * k_pre = undo_rotation(k, i);
        if (trace) {
            output(out.k_pre, k_pre);
        }
        if (!layer.fused) {
            restated(k_pre, v, out);
        }
    }
    if (layer.fused && (probes || has(BEACON_PART_RESTATED))) {
        score_fused(i, probes, plan.mask_empty ? cur.count : nullptr, out);
    }
    if (has(BEACON_PART_REDUNDANCY)) {
        output(out.redundancy, redundancy(k));
    }
    if (has(BEACON_PART_EXPECTED)) {
        const auto view = [&](ggml_tensor * t, int64_t ne0, int64_t ne1) {
            const size_t nb1 = ne0 * sizeof(float);
            return ggml_view_3d(ctx, t, ne0, ne1, layer.n_head, nb1, nb1 * ne1, plan.stream * t->nb[3]);
        };
        moments cur = { view(layer.mean, d, 1), view(layer.moment, d, d), view(layer.count, 1, 1) };
        if (plan.track && q_pre) {
            const moments old = cur;

            cur = track_moments(old, q_pre);
            commits.push_back(ggml_cpy(ctx, cur.mean, old.mean));
            commits.push_back(ggml_cpy(ctx, cur.moment, old.moment));
            commits.push_back(ggml_cpy(ctx, cur.count, old.count));
        }
        output(out.expected, expected(layer, k, cur, v));
    }
}

}  // namespace

ggml_cgraph * beacon_build_graph_score(const beacon_plan &          plan,
                                       llm_graph_result *           res,
                                       llama_context *              lctx,
                                       bool                         trace,
                                       std::vector<beacon_scores> & scores) {
    auto inp = std::make_unique<llm_graph_input_beacon_data>(plan.kv);

    score_builder b(plan, lctx, res, inp.get(), trace);
    b.build_inputs();

    scores.assign(plan.layers->size(), {});
    for (uint32_t i = plan.i0; i < plan.i1; ++i) {
        b.build_layer(i, scores[i]);
    }
    // (the fused operator has tracked in place: who runs a graph that stops half-way puts the centroids back)
    for (auto * commit : b.commits) {
        ggml_build_forward_expand(b.gf, commit);
    }

    res->add_input(std::move(inp));

    return b.gf;
}

uint32_t beacon_layers_per_graph(const beacon_plan & plan, int64_t max_nodes) {
    int64_t n_blocks = 2;
    for (const auto & layer : *plan.layers) {
        const int64_t n_probes = plan.params->n_probe * (layer.n_head / layer.n_head_kv);
        const int64_t n_beacon = plan.params->n_beacon;
        const int64_t size     = block_size(plan, layer);
        n_blocks               = std::max(n_blocks, (n_probes + size - 1) / size + (n_beacon + size - 1) / size);
    }

    // tensors that a layer creates, views included, and the inputs that all layers share
    const int64_t n_layer = 150 + 40 * n_blocks + (plan.parts & BEACON_PART_REDUNDANCY ? 80 * N_ROW_BLOCKS : 0) +
                            (plan.parts & BEACON_PART_EXPECTED ? 200 : 0);
    const int64_t n_shared = 32;

    return std::max<int64_t>(1, (max_nodes - n_shared) / n_layer);
}

//
// move
//

static size_t row_bytes_k(const beacon_layer & layer) {
    return ggml_row_size(layer.k->type, layer.n_embd_head_k);
}

static size_t row_bytes_v(const beacon_layer & layer) {
    return ggml_row_size(layer.v->type, layer.n_embd_head_v);
}

// the rows of one head and cell as 32-bit words, so that every type moves unchanged: I32 [row_bytes/4, n_rows]
static ggml_tensor * word_rows(ggml_context * ctx,
                               ggml_tensor *  t,
                               uint32_t       stream,
                               size_t         row_bytes,
                               int64_t        i0,
                               int64_t        n_rows) {
    ggml_tensor * view = ggml_view_1d(ctx, t, ggml_blck_size(t->type), stream * t->nb[2] + i0 * row_bytes);

    view->type  = GGML_TYPE_I32;
    view->ne[0] = row_bytes / 4;
    view->ne[1] = n_rows;
    view->nb[0] = 4;
    view->nb[1] = row_bytes;
    view->nb[2] = view->nb[1] * n_rows;
    view->nb[3] = view->nb[2];

    return view;
}

// cells at the front that stay where they are in every head
static uint32_t n_in_place(const beacon_plan & plan) {
    uint32_t n = 0;
    while (n < plan.n_prefix && plan.cells[n] == (int32_t) n) {
        ++n;
    }
    return n;
}

// Whether the fused operator moves the layer's rows. Cells in the order of their positions are in ascending order too,
// unless some were removed and their places taken again.
static bool moves_fused(const beacon_plan & plan, uint32_t i) {
    const auto & layer = (*plan.layers)[i];
    return layer.fused && std::is_sorted(plan.cells.begin(), plan.cells.end());
}

// (not where the fused operator is, which the memory was reserved for)
static bool moves_composed(const beacon_plan & plan, uint32_t i) {
    const auto & layer = (*plan.layers)[i];
    return !layer.fused && row_bytes_k(layer) % 4 == 0 && row_bytes_v(layer) % 4 == 0;
}

bool beacon_moves_in_graph(const beacon_plan & plan, uint32_t i) {
    return moves_fused(plan, i) || moves_composed(plan, i);
}

// layers from i on, up to i1, that one fused operator can move
static uint32_t n_moved_at_once(const beacon_plan & plan, uint32_t i) {
    const auto & first = (*plan.layers)[i];

    uint32_t n = 1;
    while (2 * (n + 1) <= GGML_BEACON_MAX_MOVED && i + n < plan.i1) {
        const auto & layer = (*plan.layers)[i + n];
        if (!moves_fused(plan, i + n) || layer.n_head_kv != first.n_head_kv ||
            ggml_backend_buffer_get_type(layer.k->buffer) != ggml_backend_buffer_get_type(first.k->buffer)) {
            break;
        }
        ++n;
    }
    return n;
}

ggml_cgraph * beacon_build_graph_move(const beacon_plan & plan, llm_graph_result * res) {
    auto * ctx = res->get_ctx();
    auto * gf  = res->get_gf();

    auto inp = std::make_unique<llm_graph_input_beacon_data>(plan.kv);

    const uint32_t first  = n_in_place(plan);
    const int64_t  n_move = plan.n_keep - first;

    uint32_t n_layer = 1;
    for (uint32_t i = plan.i0; i < plan.i1; i += n_layer) {
        const auto &  layer = (*plan.layers)[i];
        const int64_t h     = layer.n_head_kv;

        n_layer = 1;
        if (moves_fused(plan, i)) {
            n_layer = n_moved_at_once(plan, i);

            std::vector<int32_t>       index;
            std::vector<ggml_tensor *> caches;
            for (uint32_t l = i; l < i + n_layer; ++l) {
                for (const auto & keep : plan.keep[l]) {
                    for (uint32_t j = first; j < plan.n_keep; ++j) {
                        index.push_back(plan.cells[keep[j]]);
                    }
                }
                const auto & other = (*plan.layers)[l];
                for (ggml_tensor * t : { other.k, other.v }) {
                    const int64_t ne0 = t == other.k ? other.n_embd_head_k : other.n_embd_head_v;
                    caches.push_back(ggml_view_3d(ctx, t, ne0, h, t->ne[1], ggml_row_size(t->type, ne0), t->nb[1],
                                                  plan.stream * t->nb[2]));
                }
            }
            ggml_tensor * src =
                ggml_reshape_3d(ctx, inp->add(ctx, GGML_TYPE_I32, n_move, h * n_layer, index), n_move, h, n_layer);
            ggml_build_forward_expand(gf, ggml_beacon_move(ctx, caches.data(), caches.size(), src, first));
        } else if (moves_composed(plan, i)) {
            std::vector<int32_t> rows;  // kept rows by cell, then head: the layout of the cache
            for (uint32_t j = first; j < plan.n_keep; ++j) {
                for (int64_t head = 0; head < h; ++head) {
                    rows.push_back(plan.cells[plan.keep[i][head][j]] * h + head);
                }
            }
            ggml_tensor * src = inp->add(ctx, GGML_TYPE_I32, rows.size(), 1, rows);

            for (ggml_tensor * t : { layer.k, layer.v }) {
                const size_t size = t == layer.k ? row_bytes_k(layer) : row_bytes_v(layer);

                ggml_tensor * all  = word_rows(ctx, t, plan.stream, size, 0, h * t->ne[1]);
                ggml_tensor * dst  = word_rows(ctx, t, plan.stream, size, first * h, rows.size());
                ggml_tensor * kept = ggml_get_rows(ctx, all, src);  // complete before a row is overwritten

                ggml_build_forward_expand(gf, ggml_cpy(ctx, kept, dst));
            }
        }
    }

    res->add_input(std::move(inp));

    return gf;
}

void beacon_move_host(const beacon_plan & plan, uint32_t i) {
    const auto &  layer = (*plan.layers)[i];
    const int64_t h     = layer.n_head_kv;

    for (ggml_tensor * t : { layer.k, layer.v }) {
        const size_t size = t == layer.k ? row_bytes_k(layer) : row_bytes_v(layer);

        std::vector<uint8_t> rows(t->nb[2]);
        ggml_backend_tensor_get(t, rows.data(), plan.stream * t->nb[2], t->nb[2]);

        std::vector<uint8_t> kept(plan.n_keep * h * size);
        for (uint32_t j = 0; j < plan.n_keep; ++j) {
            for (int64_t head = 0; head < h; ++head) {
                const int64_t src = plan.cells[plan.keep[i][head][j]] * h + head;
                memcpy(&kept[(j * h + head) * size], &rows[src * size], size);
            }
        }
        ggml_backend_tensor_set(t, kept.data(), plan.stream * t->nb[2], kept.size());
    }
}

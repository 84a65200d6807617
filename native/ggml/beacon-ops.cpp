#include "beacon-ops.h"

#include "ggml-impl.h"

static void check_rope(const ggml_beacon_rope & rope, const ggml_tensor * turns, int64_t d) {
    GGML_ASSERT(turns || rope.pairs == GGML_BEACON_PAIRS_NONE);
    if (rope.pairs != GGML_BEACON_PAIRS_NONE) {
        GGML_ASSERT(turns->type == GGML_TYPE_F32 && ggml_is_contiguous(turns));
        GGML_ASSERT(turns->ne[0] == rope.n_rot && turns->ne[1] > 1 << GGML_BEACON_TURN_BITS);
        GGML_ASSERT(rope.n_rot % 2 == 0 && rope.n_rot <= d);
    }
}

static void check_i32(const ggml_tensor * t, int64_t n) {
    GGML_ASSERT(t->type == GGML_TYPE_I32 && ggml_is_contiguous(t) && ggml_nelements(t) == n);
}

ggml_tensor * ggml_beacon_track(ggml_context *           ctx,
                                ggml_tensor *            mean,
                                ggml_tensor *            count,
                                ggml_tensor *            norm,
                                ggml_tensor *            q,
                                ggml_tensor *            rows,
                                ggml_tensor *            turns,
                                const ggml_beacon_rope * rope) {
    const int64_t d = mean->ne[0];
    const int64_t m = mean->ne[1];
    const int64_t h = mean->ne[2];

    GGML_ASSERT(mean->type == GGML_TYPE_F32 && ggml_is_contiguous(mean));
    for (const ggml_tensor * t : { count, norm }) {
        GGML_ASSERT(t->type == GGML_TYPE_F32 && ggml_is_contiguous(t));
        GGML_ASSERT(t->ne[0] == 1 && t->ne[1] == m && t->ne[2] == h);
    }
    GGML_ASSERT(q->type == GGML_TYPE_F16 && ggml_is_contiguous(q) && q->ne[0] % (d * h) == 0);
    check_i32(rows, 2 * rows->ne[0]);
    check_rope(*rope, turns, d);

    ggml_tensor * result = ggml_view_tensor(ctx, mean);
    ggml_set_op_params(result, rope, sizeof(*rope));

    result->op     = GGML_OP_BEACON_TRACK;
    result->src[0] = mean;
    result->src[1] = count;
    result->src[2] = norm;
    result->src[3] = q;
    result->src[4] = rows;
    result->src[5] = turns;
    return result;
}

ggml_tensor * ggml_beacon_score(ggml_context *                   ctx,
                                ggml_tensor *                    k,
                                ggml_tensor *                    v,
                                ggml_tensor *                    probes,
                                ggml_tensor *                    witnesses,
                                ggml_tensor *                    cells,
                                ggml_tensor *                    meta,
                                ggml_tensor *                    pos,
                                ggml_tensor *                    turns,
                                ggml_tensor *                    count,
                                const ggml_beacon_score_params * params) {
    const int64_t d = k->ne[0];
    const int64_t h = k->ne[1];
    const int64_t n = cells->ne[0];
    const int64_t p = probes ? probes->ne[1] : 0;
    const int64_t w = witnesses ? witnesses->ne[1] : 0;

    GGML_ASSERT(v->ne[1] == h && v->ne[2] == k->ne[2]);
    GGML_ASSERT(params->n_hadamard == 0 || d % params->n_hadamard == 0);
    GGML_ASSERT(params->n_beacon <= p);
    check_i32(cells, n);
    check_i32(meta, n + p + w);
    check_i32(pos, n * h);
    check_rope(params->rope, turns, d);
    if (probes) {
        GGML_ASSERT(probes->type == GGML_TYPE_F32 && ggml_is_contiguous(probes));
        GGML_ASSERT(probes->ne[0] == d && probes->ne[2] == h);
    }
    if (witnesses) {
        GGML_ASSERT(witnesses->type == GGML_TYPE_F32 && ggml_is_contiguous(witnesses));
        GGML_ASSERT(witnesses->ne[0] == d + v->ne[0] && witnesses->ne[2] == h);
    }
    if (count) {
        GGML_ASSERT(count->type == GGML_TYPE_F32 && ggml_is_contiguous(count));
        GGML_ASSERT(count->ne[1] == params->n_beacon && count->ne[2] == h);
    }

    ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n * h, 4);
    ggml_set_op_params(result, params, sizeof(*params));

    result->op = GGML_OP_BEACON_SCORE;

    ggml_tensor * srcs[] = { k, v, probes, witnesses, cells, meta, pos, turns, count };
    for (int i = 0; i < 9; ++i) {
        result->src[i] = srcs[i];
    }
    return result;
}

ggml_tensor * ggml_beacon_move(ggml_context * ctx,
                               ggml_tensor ** caches,
                               int            n_caches,
                               ggml_tensor *  index,
                               int            first) {
    GGML_ASSERT(n_caches >= 1 && n_caches <= GGML_BEACON_MAX_MOVED);
    GGML_ASSERT(index->type == GGML_TYPE_I32 && ggml_is_contiguous(index) && index->ne[3] == 1);
    GGML_ASSERT(index->ne[2] <= n_caches && n_caches % index->ne[2] == 0);

    ggml_tensor * result = ggml_view_tensor(ctx, caches[0]);

    result->op     = GGML_OP_BEACON_MOVE;
    result->src[0] = index;
    for (int i = 0; i < n_caches; ++i) {
        GGML_ASSERT(caches[i]->ne[1] == index->ne[1] && caches[i]->ne[3] == 1);
        GGML_ASSERT(caches[i]->nb[0] == ggml_type_size(caches[i]->type));
        GGML_ASSERT(first >= 0 && first + index->ne[0] <= caches[i]->ne[2]);
        result->src[1 + i] = caches[i];
    }
    ggml_set_op_params_i32(result, 0, n_caches);
    ggml_set_op_params_i32(result, 1, first);
    return result;
}

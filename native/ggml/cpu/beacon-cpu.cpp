#include "beacon-cpu.h"

#include "beacon-kernels.h"
#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "simd-mappings.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

void beacon_read_row(const ggml_tensor * t, int32_t cell, int g, float * dst) {
    const void *  src = (const char *) t->data + cell * t->nb[2] + g * t->nb[1];
    const int64_t n   = t->ne[0];
    switch (t->type) {
        case GGML_TYPE_F32:
            memcpy(dst, src, n * sizeof(float));
            break;
        case GGML_TYPE_F16:
            ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) src, dst, n);
            break;
        default:
            ggml_get_type_traits(t->type)->to_float(src, dst, n);
    }
}

void beacon_undo_rotation(const ggml_beacon_rope & rope, const float * turns, int32_t pos, float * x) {
    if (rope.pairs == GGML_BEACON_PAIRS_NONE) {
        return;
    }
    constexpr int N_LOW = 1 << GGML_BEACON_TURN_BITS;

    const int     half = rope.n_rot / 2;
    const float * low  = turns + (size_t) (pos % N_LOW) * rope.n_rot;
    const float * high = turns + (size_t) (N_LOW + pos / N_LOW) * rope.n_rot;

    const auto turn = [&](float & a, float & b, int i) {
        const float cosine = low[i] * high[i] - low[half + i] * high[half + i];
        const float sine   = low[half + i] * high[i] + low[i] * high[half + i];
        const float a0     = a;
        a                  = (a0 * cosine + b * sine) * rope.unscale;
        b                  = (b * cosine - a0 * sine) * rope.unscale;
    };
    // two loops, so that the one of most models becomes vectors
    if (rope.pairs == GGML_BEACON_PAIRS_NEOX) {
        float * __restrict y = x + half;
        for (int i = 0; i < half; ++i) {
            turn(x[i], y[i], i);
        }
    } else {
        for (int i = 0; i < half; ++i) {
            turn(x[2 * i], x[2 * i + 1], i);
        }
    }
}

//
// track: each thread has some KV heads
//

static size_t track_floats(const ggml_tensor * dst) {
    const size_t d = dst->ne[0];
    const size_t m = dst->ne[1];
    return m * (2 * d + 2) + d;  // unit means and sums; of each, queries and their lengths; one query
}

size_t beacon_track_work_size(const ggml_tensor * dst, int n_tasks) {
    return n_tasks * track_floats(dst) * sizeof(float);
}

void beacon_track(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * q    = dst->src[3];
    const ggml_tensor * rows = dst->src[4];

    ggml_beacon_rope rope;
    memcpy(&rope, dst->op_params, sizeof(rope));

    const int d       = dst->ne[0];
    const int m       = dst->ne[1];
    const int h       = dst->ne[2];
    const int n_rows  = rows->ne[0];
    const int n_group = q->ne[0] / d / h;

    const int32_t * row   = (const int32_t *) rows->data;
    const int32_t * pos   = row + n_rows;
    const float *   turns = dst->src[5] ? (const float *) dst->src[5]->data : nullptr;

    GGML_ASSERT(params->wsize >= beacon_track_work_size(dst, params->nth));
    float * unit   = (float *) params->wdata + params->ith * track_floats(dst);
    float * sum    = unit + (size_t) m * d;
    float * number = sum + (size_t) m * d;
    float * length = number + m;
    float * x      = length + m;

    for (int g = params->ith; g < h; g += params->nth) {
        float * mean  = (float *) dst->data + (size_t) g * m * d;
        float * count = (float *) dst->src[1]->data + g * m;
        float * norm  = (float *) dst->src[2]->data + g * m;

        std::fill(sum, x, 0.0f);
        for (int j = 0; j < m; ++j) {
            float len2 = 0.0f;
            ggml_vec_dot_f32(d, &len2, 0, mean + j * d, 0, mean + j * d, 0, 1);
            ggml_vec_cpy_f32(d, unit + j * d, mean + j * d);
            ggml_vec_scale_f32(d, unit + j * d, 1.0f / std::max(std::sqrt(len2), 1e-12f));
        }
        for (int r = 0; r < n_rows; ++r) {
            const auto * src = (const ggml_fp16_t *) q->data + (size_t) row[r] * q->ne[0] + (size_t) g * n_group * d;
            for (int head = 0; head < n_group; ++head) {
                ggml_cpu_fp16_to_fp32(src + head * d, x, d);
                beacon_undo_rotation(rope, turns, pos[r], x);

                int   best = 0;
                float high = -INFINITY;
                for (int j = 0; j < m; ++j) {
                    float dot = 0.0f;
                    ggml_vec_dot_f32(d, &dot, 0, unit + j * d, 0, x, 0, 1);
                    best = dot > high ? j : best;
                    high = std::max(high, dot);
                }
                float len2 = 0.0f;
                ggml_vec_dot_f32(d, &len2, 0, x, 0, x, 0, 1);
                ggml_vec_acc_f32(d, sum + best * d, x);
                number[best] += 1.0f;
                length[best] += std::sqrt(len2);
            }
        }
        for (int j = 0; j < m; ++j) {
            const float all = std::max(count[j] + number[j], 1.0f);
            for (int i = 0; i < d; ++i) {
                mean[j * d + i] = (mean[j * d + i] * count[j] + sum[j * d + i]) / all;
            }
            norm[j] = (norm[j] * count[j] + length[j]) / all;
            count[j] += number[j];
        }
    }
}

//
// move: each thread has some columns of the rows and goes through all cells in order
//

void beacon_move(const ggml_compute_params * params, ggml_tensor * dst) {
    constexpr size_t COLUMN = 64;  // bytes; as much as a cache line, so that threads don't share one

    const ggml_tensor * index    = dst->src[0];
    const int           n_caches = ggml_get_op_params_i32(dst, 0);
    const int           first    = ggml_get_op_params_i32(dst, 1);
    const int64_t       n_keep   = index->ne[0];
    const int64_t       h        = index->ne[1];

    for (int c = 0; c < n_caches; ++c) {
        const ggml_tensor * t     = dst->src[1 + c];
        const int64_t       layer = c * index->ne[2] / n_caches;
        const size_t        size  = ggml_row_size(t->type, t->ne[0]);

        const int64_t n_columns = (size + COLUMN - 1) / COLUMN;
        const int64_t c0        = n_columns * h * params->ith / params->nth;
        const int64_t c1        = n_columns * h * (params->ith + 1) / params->nth;

        for (int64_t g = c0 / n_columns; g * n_columns < c1; ++g) {
            const size_t begin = std::max<int64_t>(0, c0 - g * n_columns) * COLUMN;
            const size_t end   = std::min<size_t>(size, (c1 - g * n_columns) * COLUMN);

            const int32_t * src  = (const int32_t *) index->data + (layer * h + g) * n_keep;
            char *          head = (char *) t->data + g * t->nb[1] + begin;
            for (int64_t i = 0; i < n_keep; ++i) {
                if (src[i] != first + i) {
                    memcpy(head + (first + i) * t->nb[2], head + src[i] * t->nb[2], end - begin);
                }
            }
        }
    }
}

size_t ggml_beacon_work_size(const ggml_tensor * dst, int n_tasks) {
    return dst->op == GGML_OP_BEACON_TRACK ? beacon_track_work_size(dst, n_tasks) :
           dst->op == GGML_OP_BEACON_SCORE ? beacon_score_work_size(dst, n_tasks) :
                                             0;
}

void ggml_compute_forward_beacon(const ggml_compute_params * params, ggml_tensor * dst) {
    switch (dst->op) {
        case GGML_OP_BEACON_TRACK:
            return beacon_track(params, dst);
        case GGML_OP_BEACON_SCORE:
            return beacon_score(params, dst);
        case GGML_OP_BEACON_MOVE:
            return beacon_move(params, dst);
        default:
            GGML_ABORT("not an operator of a compaction: %s", ggml_op_name(dst->op));
    }
}

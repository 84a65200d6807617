#include "beacon-metal-args.h"
#include "common.h"
#include "dequantize.h"

// Kernels of the operators of beacon-ops.h, which tells the shapes. They do what those of the CPU do.

constant float BEACON_NONE = -1e30f;  // logit of a cell that a probe does not see

// numbers i to i + 3 of a row
static inline float4 beacon_read(const device char * row, int type, int i) {
    const int   block = i / 32;
    const short il    = i % 32 / 4;
    float4      x     = float4(0.0f);
    switch (type) {
        case BEACON_F32:
            return ((const device float4 *) row)[i / 4];
        case BEACON_F16:
            return float4(((const device half4 *) row)[i / 4]);
        case BEACON_BF16:
            return as_type<float4>(uint4(((const device ushort4 *) row)[i / 4]) << 16);
        case BEACON_Q4_0:
            dequantize_q4_0_t4((const device block_q4_0 *) row + block, il, x);
            break;
        case BEACON_Q4_1:
            dequantize_q4_1_t4((const device block_q4_1 *) row + block, il, x);
            break;
        case BEACON_Q5_0:
            dequantize_q5_0_t4((const device block_q5_0 *) row + block, il, x);
            break;
        case BEACON_Q5_1:
            dequantize_q5_1_t4((const device block_q5_1 *) row + block, il, x);
            break;
        case BEACON_Q8_0:
            dequantize_q8_0_t4((const device block_q8_0 *) row + block, il, x);
            break;
        case BEACON_IQ4_NL:
            dequantize_iq4_nl_t4((const device block_iq4_nl *) row + block, il, x);
            break;
    }
    return x;
}

// the two numbers of pair t of a head: the pairs that are rotated come first
static inline int2 beacon_pair(constant beacon_rope_args & rope, int t) {
    const int n_pairs = rope.n_rot / 2;
    return rope.is_neox && t < n_pairs ? int2(t, n_pairs + t) : int2(2 * t, 2 * t + 1);
}

// pair t as it was before it was rotated to pos
static inline float2 beacon_turn_back(constant beacon_rope_args & rope,
                                      const device float *        turns,
                                      int                         pos,
                                      int                         t,
                                      float2                      x) {
    const int n_pairs = rope.n_rot / 2;
    if (t >= n_pairs) {
        return x;
    }
    const device float * low    = turns + pos % rope.n_low * rope.n_rot + t;
    const device float * high   = turns + (rope.n_low + pos / rope.n_low) * rope.n_rot + t;
    const float          cosine = low[0] * high[0] - low[n_pairs] * high[n_pairs];
    const float          sine   = low[n_pairs] * high[0] + low[0] * high[n_pairs];
    return float2(x[0] * cosine + x[1] * sine, x[1] * cosine - x[0] * sine) * rope.unscale;
}

//
// score: maximum and sum of each probe's softmax per tile of cells, then over all tiles; then what each cell has of it,
// for which the logits are computed again; and, some cells at a time, unit vectors and their likeness to witnesses
//

// Adds the products of 64 rows a with 64 rows b of n numbers: x[c][i] is that of a[tid/16*4 + c] with b[tid%16*4 + i].
// A thread is given the rows that it loads, tid%64 of each, or NULL behind the end.
static inline void beacon_multiply(const device char *  a,
                                   int                  type,
                                   const device float * b,
                                   int                  n,
                                   threadgroup float *  shared,
                                   ushort               tid,
                                   thread float4 *      x) {
    threadgroup float * slice_a = shared;  // [BEACON_SLICE][BEACON_TILE]
    threadgroup float * slice_b = shared + BEACON_SLICE * BEACON_TILE;

    const int row  = tid % BEACON_TILE;
    const int part = tid / BEACON_TILE * 8;
    for (int i0 = 0; i0 < n; i0 += BEACON_SLICE) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int k = part; k < part + 8; k += 4) {
            const int    i  = i0 + k;
            const float4 xa = a && i < n ? beacon_read(a, type, i) : float4(0.0f);
            const float4 xb = b && i < n ? *(const device float4 *) (b + i) : float4(0.0f);
            for (int l = 0; l < 4; ++l) {
                slice_a[(k + l) * BEACON_TILE + row] = xa[l];
                slice_b[(k + l) * BEACON_TILE + row] = xb[l];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int k = 0; k < BEACON_SLICE; ++k) {
            const float4 xa = *(threadgroup float4 *) (slice_a + k * BEACON_TILE + tid / 16 * 4);
            const float4 xb = *(threadgroup float4 *) (slice_b + k * BEACON_TILE + tid % 16 * 4);
            for (int c = 0; c < 4; ++c) {
                x[c] += xa[c] * xb;
            }
        }
    }
}

// x = logits of the cells of a tile from j0 on with the probes from q0 on; of a cell behind the end NONE
static inline void beacon_logits(constant beacon_score_args & args,
                                 const device char *          k,
                                 const device float *         probes,
                                 const device int *           cells,
                                 const device int *           meta,
                                 int                          g,
                                 int                          j0,
                                 int                          q0,
                                 threadgroup float *          shared,
                                 ushort                       tid,
                                 thread float4 *              x) {
    for (int c = 0; c < 4; ++c) {
        x[c] = float4(0.0f);
    }
    const int row = tid % BEACON_TILE;
    beacon_multiply(j0 + row < args.n ? k + cells[j0 + row] * args.nb_k2 + g * args.nb_k1 : nullptr, args.type_k,
                    q0 + row < args.p ? probes + (g * args.p + q0 + row) * args.d : nullptr, args.d, shared, tid, x);

    for (int c = 0; c < 4; ++c) {
        const int  j       = j0 + tid / 16 * 4 + c;
        const int  place   = j < args.n ? meta[j] : 0;
        const bool is_cell = j < args.n && place >= args.n_sink;
        for (int i = 0; i < 4; ++i) {
            const int  q = q0 + tid % 16 * 4 + i;
            const bool is_seen =
                q < args.n_beacon || place < args.boundary || (q < args.p && place <= meta[args.n + q]);

            const float logit = x[c][i] * args.scale;
            x[c][i]           = !is_cell || !is_seen ? BEACON_NONE :
                                args.softcap > 0.0f  ? args.softcap * precise::tanh(logit / args.softcap) :
                                                       logit;
        }
    }
}

// maximum and sum of the probes' softmax in one tile of cells
kernel void kernel_beacon_score_tiles(constant beacon_score_args & args,
                                      const device char *          k,
                                      const device float *         probes,
                                      const device int *           cells,
                                      const device int *           meta,
                                      device float *               tiles,             // [h][n_tiles][2][p]
                                      threadgroup float *          shared [[threadgroup(0)]],
                                      uint3  group [[threadgroup_position_in_grid]],  // tiles of both, head
                                      ushort tid [[thread_index_in_threadgroup]]) {
    const int j0 = group[0] * BEACON_TILE;
    const int q0 = group[1] * BEACON_TILE;

    float4 x[4];
    beacon_logits(args, k, probes, cells, meta, group[2], j0, q0, shared, tid, x);

    const float4 high = max(max(x[0], x[1]), max(x[2], x[3]));
    const float4 sum  = exp(x[0] - high) + exp(x[1] - high) + exp(x[2] - high) + exp(x[3] - high);
    const int    at   = tid / 16 * BEACON_TILE + tid % 16 * 4;

    threadgroup float * maxima = shared;              // [16][BEACON_TILE]
    threadgroup float * sums   = shared + 16 * BEACON_TILE;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // all have multiplied
    *(threadgroup float4 *) (maxima + at) = high;
    *(threadgroup float4 *) (sums + at)   = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const int q = q0 + tid;
    if (tid < BEACON_TILE && q < args.p) {
        float m = BEACON_NONE;
        for (int r = 0; r < 16; ++r) {
            m = max(m, float(maxima[r * BEACON_TILE + tid]));
        }
        float s = 0.0f;
        for (int r = 0; r < 16; ++r) {
            s += sums[r * BEACON_TILE + tid] * exp(maxima[r * BEACON_TILE + tid] - m);
        }
        device float * out = tiles + (group[2] * args.n_tiles + group[0]) * 2 * args.p;
        out[q]             = m;
        out[args.p + q]    = s;
    }
}

// what the softmax of a probe takes off the logits, and by what it divides: of one that has no vote by nothing
kernel void kernel_beacon_score_probes(constant beacon_score_args & args,
                                       const device float *         tiles,             // [h][n_tiles][2][p]
                                       const device float *         count,
                                       device float *               totals,            // [h][2][p]
                                       uint3  group [[threadgroup_position_in_grid]],  // probes, head
                                       ushort tid [[thread_index_in_threadgroup]]) {
    const int q = group[0] * BEACON_THREADS + tid;
    const int g = group[1];
    if (q >= args.p) {
        return;
    }
    const device float * maxima = tiles + g * args.n_tiles * 2 * args.p + q;

    float m = BEACON_NONE;
    for (int t = 0; t < args.n_tiles; ++t) {
        m = max(m, maxima[t * 2 * args.p]);
    }
    float s = 0.0f;
    for (int t = 0; t < args.n_tiles; ++t) {
        s += maxima[(t * 2 + 1) * args.p] * exp(maxima[t * 2 * args.p] - m);
    }
    const bool is_empty = args.has_count && q < args.n_beacon && count[g * args.n_beacon + q] <= 0.0f;
    const bool votes    = m > BEACON_NONE && !is_empty;

    totals[g * 2 * args.p + q]       = votes ? m : 0.0f;
    totals[(g * 2 + 1) * args.p + q] = votes ? 1.0f / s : 0.0f;
}

// sums over the beacons and over the recent queries, of one tile of cells
kernel void kernel_beacon_score_cells(constant beacon_score_args & args,
                                      const device char *          k,
                                      const device float *         probes,
                                      const device int *           cells,
                                      const device int *           meta,
                                      const device float *         totals,
                                      device float *               dst,
                                      threadgroup float *          shared [[threadgroup(0)]],
                                      uint3  group [[threadgroup_position_in_grid]],  // tile, head
                                      ushort tid [[thread_index_in_threadgroup]]) {
    const int g  = group[1];
    const int j0 = group[0] * BEACON_TILE;

    const device float * highest = totals + g * 2 * args.p;
    const device float * share   = highest + args.p;

    float4 beacons = float4(0.0f);  // of 4 cells
    float4 others  = float4(0.0f);
    for (int q0 = 0; q0 < args.p; q0 += BEACON_TILE) {
        float4 x[4];
        beacon_logits(args, k, probes, cells, meta, g, j0, q0, shared, tid, x);
        for (int i = 0; i < 4; ++i) {
            const int q = q0 + tid % 16 * 4 + i;
            for (int c = 0; c < 4 && q < args.p; ++c) {
                const float y = share[q] * exp(min(x[c][i] - highest[q], 0.0f));
                beacons[c] += q < args.n_beacon ? y : 0.0f;
                others[c] += q < args.n_beacon ? 0.0f : y;
            }
        }
    }
    threadgroup float * parts = shared;               // [2][16][BEACON_TILE]
    const int           at    = tid % 16 * BEACON_TILE + tid / 16 * 4;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // all have multiplied
    *(threadgroup float4 *) (parts + at)                    = beacons;
    *(threadgroup float4 *) (parts + 16 * BEACON_TILE + at) = others;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const int s = tid / BEACON_TILE;
    const int j = j0 + tid % BEACON_TILE;
    if (s < 2 && j < args.n) {
        float sum = 0.0f;
        for (int r = 0; r < 16; ++r) {
            sum += parts[(s * 16 + r) * BEACON_TILE + tid % BEACON_TILE];
        }
        dst[(s * args.h + g) * args.n + j] = sum;
    }
}

// One simdgroup makes a unit vector, with all rotations undone, of a key or a value.
kernel void kernel_beacon_score_units(constant beacon_score_args & args,
                                      const device char *          k,
                                      const device char *          v,
                                      const device int *           cells,
                                      const device int *           pos,
                                      const device float *         turns,
                                      device float *               units,             // [h][n_units][d + e]
                                      threadgroup float *          x [[threadgroup(0)]],
                                      uint3  group [[threadgroup_position_in_grid]],  // unit, head, 0: K, 1: V
                                      ushort lane [[thread_index_in_threadgroup]]) {
    const int  j      = args.first + group[0];
    const int  g      = group[1];
    const bool is_key = group[2] == 0;
    const int  n      = is_key ? args.d : args.e;
    if (j >= args.n) {
        return;
    }
    const device char * row =
        is_key ? k + cells[j] * args.nb_k2 + g * args.nb_k1 : v + cells[j] * args.nb_v2 + g * args.nb_v1;
    for (int i = 4 * lane; i < n; i += 4 * N_SIMDWIDTH) {
        *(threadgroup float4 *) (x + i) = beacon_read(row, is_key ? args.type_k : args.type_v, i);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    // Hadamard's matrix in Sylvester's order; its scale goes with the length
    for (int step = 1; is_key && step < args.n_hadamard; step *= 2) {
        for (int t = lane; t < n / 2; t += N_SIMDWIDTH) {
            const int   i = t / step * 2 * step + t % step;
            const float a = x[i];
            const float b = x[i + step];
            x[i]          = a + b;
            x[i + step]   = a - b;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }

    float sum = 0.0f;
    for (int t = lane; t < n / 2; t += N_SIMDWIDTH) {
        const int2 i = is_key ? beacon_pair(args.rope, t) : int2(2 * t, 2 * t + 1);
        float2     y = float2(x[i[0]], x[i[1]]);
        if (is_key) {
            y = beacon_turn_back(args.rope, turns, pos[g * args.n + j], t, y);
        }
        x[i[0]] = y[0];
        x[i[1]] = y[1];
        sum += y[0] * y[0] + y[1] * y[1];
    }
    const float    scale = 1.0f / max(sqrt(simd_sum(sum)), 1e-12f);
    device float * unit  = units + (g * args.n_units + group[0]) * (args.d + args.e) + (is_key ? 0 : args.d);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = lane; i < n; i += N_SIMDWIDTH) {
        unit[i] = x[i] * scale;
    }
}

// the newer witness that each cell of a tile is most like
kernel void kernel_beacon_score_likeness(constant beacon_score_args & args,
                                         const device float *         units,
                                         const device float *         witnesses,
                                         const device int *           meta,
                                         device float *               dst,
                                         threadgroup float *          shared [[threadgroup(0)]],
                                         uint3  group [[threadgroup_position_in_grid]],  // tile, head
                                         ushort tid [[thread_index_in_threadgroup]]) {
    const int c0  = group[0] * BEACON_TILE;
    const int j0  = args.first + c0;
    const int g   = group[1];
    const int n   = args.d + args.e;
    const int row = tid % BEACON_TILE;

    const device int *   newer = meta + args.n + args.p;
    const device float * unit  = j0 + row < args.n ? units + (g * args.n_units + c0 + row) * n : nullptr;

    float4 rank = float4(-4.0f);  // the highest of 4 cells
    float4 dot  = float4(0.0f);
    int4   best = int4(0);
    for (int q0 = 0; q0 < args.w; q0 += BEACON_TILE) {
        if (newer[min(q0 + BEACON_TILE, args.w) - 1] <= j0) {
            continue;  // none is newer than any cell
        }
        float4 x[4] = { float4(0.0f), float4(0.0f), float4(0.0f), float4(0.0f) };
        beacon_multiply((const device char *) unit, BEACON_F32,
                        q0 + row < args.w ? witnesses + (g * args.w + q0 + row) * n : nullptr, n, shared, tid, x);
        for (int i = 0; i < 4; ++i) {
            const int q = q0 + tid % 16 * 4 + i;
            for (int c = 0; c < 4 && q < args.w; ++c) {
                const float r = 0.5f * x[c][i] + q * args.step;
                if (newer[q] > j0 + tid / 16 * 4 + c && r >= rank[c]) {
                    rank[c] = r;
                    dot[c]  = x[c][i];
                    best[c] = q;
                }
            }
        }
    }
    threadgroup float * ranks = shared;  // [16][BEACON_TILE]
    threadgroup float * dots  = ranks + 16 * BEACON_TILE;
    threadgroup int *   who   = (threadgroup int *) (dots + 16 * BEACON_TILE);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int c = 0; c < 4; ++c) {
        const int at = tid % 16 * BEACON_TILE + tid / 16 * 4 + c;
        ranks[at]    = rank[c];
        dots[at]     = dot[c];
        who[at]      = best[c];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (tid < BEACON_TILE && j0 + tid < args.n) {
        int at = tid;
        for (int i = tid + BEACON_TILE; i < 16 * BEACON_TILE; i += BEACON_TILE) {
            at = ranks[i] > ranks[at] || (ranks[i] == ranks[at] && who[i] > who[at]) ? i : at;
        }
        const int cells = args.h * args.n;
        const int j     = g * args.n + j0 + tid;

        dst[2 * cells + j]                  = 0.5f * dots[at];
        ((device int *) dst)[3 * cells + j] = who[at];
    }
}

//
// track: a threadgroup has a KV head, a simdgroup some of its queries, then some of its centroids
//

// pair t of query r of head g, rotation undone
static inline float2 beacon_query(constant beacon_track_args & args,
                                  const device half *          q,
                                  const device int *           rows,
                                  const device float *         turns,
                                  int                          g,
                                  int                          r,
                                  int                          t) {
    const int           row = r / args.n_group;
    const device half * x   = q + (ulong) rows[row] * args.n_q + (g * args.n_group + r % args.n_group) * args.d;
    const int2          i   = beacon_pair(args.rope, t);
    return beacon_turn_back(args.rope, turns, rows[args.n_rows + row], t, float2(x[i[0]], x[i[1]]));
}

kernel void kernel_beacon_track(constant beacon_track_args & args,
                                device float *               means,
                                device float *               counts,
                                device float *               norms,
                                const device half *          q,
                                const device int *           rows,
                                const device float *         turns,
                                threadgroup float *          shared [[threadgroup(0)]],
                                uint3                        group [[threadgroup_position_in_grid]],  // head
                                ushort                       tid [[thread_index_in_threadgroup]]) {
    const int g         = group[0];
    const int lane      = tid % N_SIMDWIDTH;
    const int simd      = tid / N_SIMDWIDTH;
    const int n_simd    = BEACON_THREADS / N_SIMDWIDTH;
    const int n_queries = args.n_rows * args.n_group;

    device float * mean  = means + g * args.m * args.d;
    device float * count = counts + g * args.m;
    device float * norm  = norms + g * args.m;

    threadgroup float * x      = shared + simd * args.d;  // of a simdgroup, each of its threads has its own pairs
    threadgroup float * scale  = shared + n_simd * args.d;
    threadgroup float * length = scale + args.m;
    threadgroup int *   label  = (threadgroup int *) (length + n_queries);

    for (int j = simd; j < args.m; j += n_simd) {
        float sum = 0.0f;
        for (int i = lane; i < args.d; i += N_SIMDWIDTH) {
            sum += mean[j * args.d + i] * mean[j * args.d + i];
        }
        sum = simd_sum(sum);
        if (lane == 0) {
            scale[j] = 1.0f / max(sqrt(sum), 1e-12f);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int r = simd; r < n_queries; r += n_simd) {
        float sum = 0.0f;
        for (int t = lane; t < args.d / 2; t += N_SIMDWIDTH) {
            const float2 y = beacon_query(args, q, rows, turns, g, r, t);
            x[2 * t]       = y[0];
            x[2 * t + 1]   = y[1];
            sum += y[0] * y[0] + y[1] * y[1];
        }
        sum = simd_sum(sum);

        int   best = 0;
        float high = 0.0f;
        for (int j = 0; j < args.m; ++j) {
            float dot = 0.0f;
            for (int t = lane; t < args.d / 2; t += N_SIMDWIDTH) {
                const int2 i = beacon_pair(args.rope, t);
                dot += mean[j * args.d + i[0]] * x[2 * t] + mean[j * args.d + i[1]] * x[2 * t + 1];
            }
            dot  = simd_sum(dot) * scale[j];
            best = j == 0 || dot > high ? j : best;
            high = j == 0 ? dot : max(high, dot);
        }
        if (lane == 0) {
            label[r]  = best;
            length[r] = sqrt(sum);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);

    for (int j = simd; j < args.m; j += n_simd) {
        const float before = count[j];
        float       number = 0.0f;
        float       total  = 0.0f;
        for (int r = 0; r < n_queries; ++r) {
            number += label[r] == j ? 1.0f : 0.0f;
            total += label[r] == j ? float(length[r]) : 0.0f;
        }
        const float all = max(before + number, 1.0f);
        for (int t = lane; t < args.d / 2; t += N_SIMDWIDTH) {
            float2 sum = float2(0.0f);
            for (int r = 0; r < n_queries; ++r) {
                if (label[r] == j) {
                    sum += beacon_query(args, q, rows, turns, g, r, t);
                }
            }
            const int2 i = beacon_pair(args.rope, t);
            for (int s = 0; s < 2; ++s) {
                device float & y = mean[j * args.d + i[s]];
                y                = (y * before + sum[s]) / all;
            }
        }
        simdgroup_barrier(mem_flags::mem_device);  // all have read the count
        if (lane == 0) {
            norm[j]  = (norm[j] * before + total) / all;
            count[j] = before + number;
        }
    }
}

//
// move
//

// A threadgroup has some columns of a head to itself and takes the cells in order, some rows at a time: all are read
// before any is written. What it writes lies below all that it reads later.
template <typename T>
static inline void beacon_move(constant beacon_move_args & args,
                               const device int *          source,  // [n_keep]
                               device T *                  rows,
                               int                         word,
                               int                         row) {
    constexpr int n_each    = 4;
    constexpr int n_at_once = BEACON_THREADS / BEACON_MOVE_WORDS;
    const int     n         = word < args.n_words ? args.n_keep : 0;
    for (int i0 = 0; i0 < args.n_keep; i0 += n_each * n_at_once) {
        T x[n_each];
        for (int r = 0; r < n_each; ++r) {
            const int i = i0 + r * n_at_once + row;
            if (i < n) {
                x[r] = rows[source[i] * args.stride + word];
            }
        }
        threadgroup_barrier(mem_flags::mem_device);
        for (int r = 0; r < n_each; ++r) {
            const int i = i0 + r * n_at_once + row;
            if (i < n) {
                rows[(args.first + i) * args.stride + word] = x[r];
            }
        }
    }
}

kernel void kernel_beacon_move(constant beacon_move_args & args,
                               const device int *          index,
                               device char *               cache,
                               uint3                       group [[threadgroup_position_in_grid]],  // columns, head
                               ushort                      tid [[thread_index_in_threadgroup]]) {
    const int word = group[0] * BEACON_MOVE_WORDS + tid % BEACON_MOVE_WORDS;
    const int row  = tid / BEACON_MOVE_WORDS;

    const device int * source = index + group[1] * args.n_keep;
    device char *      rows   = cache + group[1] * args.nb1;
    switch (args.word_size) {
        case 4:
            return beacon_move(args, source, (device uint *) rows, word, row);
        case 2:
            return beacon_move(args, source, (device ushort *) rows, word, row);
        default:
            return beacon_move(args, source, (device uchar *) rows, word, row);
    }
}

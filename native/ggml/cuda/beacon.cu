#include "beacon-ops.h"
#include "beacon.cuh"

#include <algorithm>
#include <cmath>
#include <cstring>

// Everything is F32 and nothing depends on the order in which blocks run: results are the same in every run.

static constexpr int MAX_HEAD  = 1024;  // head size
static constexpr int N_THREADS = 256;   // of a block

static constexpr float NONE = -1e30f;   // maximum of no logits

//
// numbers of a row, whatever its type
//

template <ggml_type type> static __device__ __forceinline__ float element(const char * row, int i) {
    const int b     = i / 32;      // block
    const int j     = i % 32;
    const int shift = j / 16 * 4;  // of a nibble: the first half of a block is in the low ones

    if constexpr (type == GGML_TYPE_F32) {
        return ((const float *) row)[i];
    } else if constexpr (type == GGML_TYPE_F16) {
        return __half2float(((const half *) row)[i]);
    } else if constexpr (type == GGML_TYPE_BF16) {
        return __uint_as_float((uint32_t) ((const uint16_t *) row)[i] << 16);
    } else if constexpr (type == GGML_TYPE_Q8_0) {
        const block_q8_0 & x = ((const block_q8_0 *) row)[b];
        return __half2float(x.d) * x.qs[j];
    } else if constexpr (type == GGML_TYPE_Q4_0) {
        const block_q4_0 & x = ((const block_q4_0 *) row)[b];
        return __half2float(x.d) * ((x.qs[j % 16] >> shift & 15) - 8);
    } else if constexpr (type == GGML_TYPE_Q4_1) {
        const block_q4_1 & x = ((const block_q4_1 *) row)[b];
        return __low2float(x.dm) * (x.qs[j % 16] >> shift & 15) + __high2float(x.dm);
    } else if constexpr (type == GGML_TYPE_Q5_0) {
        const block_q5_0 & x = ((const block_q5_0 *) row)[b];
        return __half2float(x.d) * ((x.qs[j % 16] >> shift & 15) + (x.qh[j / 8] >> j % 8 & 1) * 16 - 16);
    } else if constexpr (type == GGML_TYPE_Q5_1) {
        const block_q5_1 & x = ((const block_q5_1 *) row)[b];
        return __low2float(x.dm) * ((x.qs[j % 16] >> shift & 15) + (x.qh[j / 8] >> j % 8 & 1) * 16) +
               __high2float(x.dm);
    } else {
        static_assert(type == GGML_TYPE_IQ4_NL);
        const block_iq4_nl & x = ((const block_iq4_nl *) row)[b];
        return __half2float(x.d) * kvalues_iq4nl[x.qs[j % 16] >> shift & 15];
    }
}

template <ggml_type t> struct typed {
    static __device__ __forceinline__ float get(const char * row, int i) { return element<t>(row, i); }
};

// f(how a number of that type is read)
template <typename F> static __device__ __forceinline__ void with_type(ggml_type type, const F & f) {
    switch (type) {
        case GGML_TYPE_F32:
            return f(typed<GGML_TYPE_F32>());
        case GGML_TYPE_F16:
            return f(typed<GGML_TYPE_F16>());
        case GGML_TYPE_BF16:
            return f(typed<GGML_TYPE_BF16>());
        case GGML_TYPE_Q8_0:
            return f(typed<GGML_TYPE_Q8_0>());
        case GGML_TYPE_Q4_0:
            return f(typed<GGML_TYPE_Q4_0>());
        case GGML_TYPE_Q4_1:
            return f(typed<GGML_TYPE_Q4_1>());
        case GGML_TYPE_Q5_0:
            return f(typed<GGML_TYPE_Q5_0>());
        case GGML_TYPE_Q5_1:
            return f(typed<GGML_TYPE_Q5_1>());
        case GGML_TYPE_IQ4_NL:
            return f(typed<GGML_TYPE_IQ4_NL>());
        default:
            return;
    }
}

static bool is_supported(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_IQ4_NL:
            return true;
        default:
            return false;
    }
}

//
// rotations
//

struct rotation {
    ggml_beacon_rope rope;
    const float *    turns;

    // pair i as it was before it was rotated to pos
    __device__ __forceinline__ float2 undo(int pos, int i, float a, float b) const {
        constexpr int N_LOW = 1 << GGML_BEACON_TURN_BITS;

        const int     half = rope.n_rot / 2;
        const float * low  = turns + (int64_t) (pos % N_LOW) * rope.n_rot + i;
        const float * high = turns + (int64_t) (N_LOW + pos / N_LOW) * rope.n_rot + i;

        const float cosine = low[0] * high[0] - low[half] * high[half];
        const float sine   = low[half] * high[0] + low[0] * high[half];
        return make_float2((a * cosine + b * sine) * rope.unscale, (b * cosine - a * sine) * rope.unscale);
    }

    // numbers that are rotated
    __device__ __forceinline__ int size() const { return rope.pairs == GGML_BEACON_PAIRS_NONE ? 0 : rope.n_rot; }

    // where pair i is
    __device__ __forceinline__ int first(int i) const { return rope.pairs == GGML_BEACON_PAIRS_NEOX ? i : 2 * i; }

    __device__ __forceinline__ int second(int i) const {
        return rope.pairs == GGML_BEACON_PAIRS_NEOX ? rope.n_rot / 2 + i : 2 * i + 1;
    }

    // number i of a row as it was
    __device__ __forceinline__ float undo(const half * row, int pos, int i) const {
        if (i >= size()) {
            return __half2float(row[i]);
        }
        const bool   is_neox = rope.pairs == GGML_BEACON_PAIRS_NEOX;
        const int    pair    = is_neox ? i % (rope.n_rot / 2) : i / 2;
        const float2 x       = undo(pos, pair, __half2float(row[first(pair)]), __half2float(row[second(pair)]));
        return i == first(pair) ? x.x : x.y;
    }
};

//
// products of 64 rows a and 64 rows b: a thread has 4 x 4 of them in registers, and goes through slices of the rows
//

static constexpr int TILE  = 64;
static constexpr int SLICE = 32;

typedef float slice[SLICE][TILE + 4];  // rows are columns here, read as float4; padded against conflicts of banks

// numbers i0.. of 64 rows of n: get(row, i)
template <typename F> static __device__ __forceinline__ void fill(slice & s, int i0, int n, const F & get) {
    const int t = threadIdx.x;
#pragma unroll
    for (int k = 0; k < SLICE * TILE / N_THREADS; ++k) {
        const int i   = k % 4 * 8 + t % 8;
        const int row = k / 4 * 32 + t / 8;
        s[i][row]     = i0 + i < n ? get(row, i0 + i) : 0.0f;
    }
}

// acc[i][j] = a[row_a + i] * b[row_b + j]; fill_a(slice, i0) and fill_b give the rows
template <typename A, typename B>
static __device__ __forceinline__ void
multiply(slice & a, slice & b, int n, A fill_a, B fill_b, int row_a, int row_b, float (&acc)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            acc[i][j] = 0.0f;
        }
    }
    for (int i0 = 0; i0 < n; i0 += SLICE) {
        __syncthreads();  // the last slices have been used
        fill_a(a, i0);
        fill_b(b, i0);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SLICE; ++i) {
            const float4 x    = *(const float4 *) &a[i][row_a];
            const float4 y    = *(const float4 *) &b[i][row_b];
            const float  u[4] = { x.x, x.y, x.z, x.w };
            const float  v[4] = { y.x, y.y, y.z, y.w };
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    acc[j][k] += u[j] * v[k];
                }
            }
        }
    }
}

// the best of 16 threads in a row: the highest value, of those the largest index (order 1) or the smallest (-1)
static __device__ __forceinline__ void best_of_16(float & value, int & index, int order) {
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffff, value, offset, 16);
        const int   who   = __shfl_xor_sync(0xffffffff, index, offset, 16);
        if (other > value || (other == value && order * who > order * index)) {
            value = other;
            index = who;
        }
    }
}

static int n_tiles(int n) {
    return (n + TILE - 1) / TILE;
}

//
// track
//

struct track_args {
    float *         mean;   // [h][m][d]
    float *         count;  // [h][m]
    float *         norm;   // [h][m]
    const half *    q;
    const int32_t * rows;   // [2][n_rows]
    rotation        rot;

    int d, m, h, n_group, n_rows;

    int * label;  // [h][n_rows*n_group] nearest centroid of each query

    __device__ __forceinline__ int n_queries() const { return n_rows * n_group; }

    const __device__ __forceinline__ half * query(int g, int s) const {
        const int64_t head = (int64_t) rows[s / n_group] * h * n_group + g * n_group + s % n_group;
        return q + head * d;
    }

    __device__ __forceinline__ int pos(int s) const { return rows[n_rows + s / n_group]; }
};

// grid: 64 queries, heads
static __global__ void __launch_bounds__(N_THREADS) track_label(const track_args args) {
    alignas(16) __shared__ slice a, b;
    const __shared__ half *      query[TILE];
    __shared__ int               pos[TILE];
    __shared__ float             scale[TILE];  // 1 / length of a centroid

    ggml_cuda_pdl_sync();

    const int t  = threadIdx.x;
    const int g  = blockIdx.y;
    const int s0 = blockIdx.x * TILE;
    const int d  = args.d;

    const float * mean = args.mean + (int64_t) g * args.m * d;

    if (t < TILE) {
        const bool exists = s0 + t < args.n_queries();
        query[t]          = exists ? args.query(g, s0 + t) : nullptr;
        pos[t]            = exists ? args.pos(s0 + t) : 0;
    }

    const int row = t / 16 * 4;
    const int col = t % 16 * 4;

    float high[4];
    int   best[4];
    for (int i = 0; i < 4; ++i) {
        high[i] = -INFINITY;
        best[i] = 0;
    }
    for (int j0 = 0; j0 < args.m; j0 += TILE) {
        for (int j = t / WARP_SIZE; j < TILE; j += N_THREADS / WARP_SIZE) {
            float len2 = 0.0f;
            for (int i = t % WARP_SIZE; i < d && j0 + j < args.m; i += WARP_SIZE) {
                const float x = mean[(int64_t) (j0 + j) * d + i];
                len2 += x * x;
            }
            len2 = warp_reduce_sum(len2);
            if (t % WARP_SIZE == 0) {
                scale[j] = 1.0f / fmaxf(sqrtf(len2), 1e-12f);
            }
        }
        float acc[4][4];
        multiply(
            a, b, d,
            [&](slice & s, int i0) {
                fill(s, i0, d, [&](int c, int i) { return query[c] ? args.rot.undo(query[c], pos[c], i) : 0.0f; });
            },
            [&](slice & s, int i0) {
                fill(s, i0, d, [&](int j, int i) { return j0 + j < args.m ? mean[(int64_t) (j0 + j) * d + i] : 0.0f; });
            },
            row, col, acc);
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 4; ++j) {
                const float x = acc[i][j] * scale[col + j];
                if (x > high[i] && j0 + col + j < args.m) {
                    high[i] = x;
                    best[i] = j0 + col + j;
                }
            }
        }
        __syncthreads();  // scale has been used
    }
    for (int i = 0; i < 4; ++i) {
        best_of_16(high[i], best[i], -1);
        if (t % 16 == 0 && s0 + row + i < args.n_queries()) {
            args.label[(int64_t) g * args.n_queries() + s0 + row + i] = best[i];
        }
    }
}

// grid: centroids, heads. Each warp has every 8th query.
static __global__ void __launch_bounds__(N_THREADS) track_mean(const track_args args) {
    constexpr int N_WARPS = N_THREADS / WARP_SIZE;

    __shared__ float sum[N_WARPS][MAX_HEAD];
    __shared__ float number[N_WARPS];
    __shared__ float length[N_WARPS];

    ggml_cuda_pdl_sync();

    const int t    = threadIdx.x;
    const int warp = t / WARP_SIZE;
    const int lane = t % WARP_SIZE;
    const int j    = blockIdx.x;
    const int g    = blockIdx.y;
    const int d    = args.d;

    for (int i = lane; i < d; i += WARP_SIZE) {
        sum[warp][i] = 0.0f;
    }
    float n   = 0.0f;
    float len = 0.0f;
    for (int s = warp; s < args.n_queries(); s += N_WARPS) {
        if (args.label[(int64_t) g * args.n_queries() + s] != j) {
            continue;
        }
        const half * query = args.query(g, s);
        const int    pos   = args.pos(s);
        float        len2  = 0.0f;
        for (int i = lane; i < d; i += WARP_SIZE) {
            const float x = args.rot.undo(query, pos, i);
            sum[warp][i] += x;
            len2 += x * x;
        }
        n += 1.0f;
        len += sqrtf(warp_reduce_sum(len2));
    }
    if (lane == 0) {
        number[warp] = n;
        length[warp] = len;
    }
    __syncthreads();

    n   = 0.0f;
    len = 0.0f;
    for (int w = 0; w < N_WARPS; ++w) {
        n += number[w];
        len += length[w];
    }
    const int64_t row   = (int64_t) g * args.m + j;
    const float   count = args.count[row];
    const float   all   = fmaxf(count + n, 1.0f);
    for (int i = t; i < d; i += N_THREADS) {
        float x = args.mean[row * d + i] * count;
        for (int w = 0; w < N_WARPS; ++w) {
            x += sum[w][i];
        }
        args.mean[row * d + i] = x / all;
    }
    __syncthreads();  // all have read the count
    if (t == 0) {
        args.norm[row]  = (args.norm[row] * count + len) / all;
        args.count[row] = count + n;
    }
}

void ggml_cuda_op_beacon_track(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * q    = dst->src[3];
    const ggml_tensor * rows = dst->src[4];

    track_args args;
    memcpy(&args.rot.rope, dst->op_params, sizeof(args.rot.rope));
    args.mean      = (float *) dst->data;
    args.count     = (float *) dst->src[1]->data;
    args.norm      = (float *) dst->src[2]->data;
    args.q         = (const half *) q->data;
    args.rows      = (const int32_t *) rows->data;
    args.rot.turns = dst->src[5] ? (const float *) dst->src[5]->data : nullptr;
    args.d         = dst->ne[0];
    args.m         = dst->ne[1];
    args.h         = dst->ne[2];
    args.n_group   = q->ne[0] / args.d / args.h;
    args.n_rows    = rows->ne[0];
    if (args.n_rows == 0) {
        return;
    }
    const int n_queries = args.n_rows * args.n_group;

    ggml_cuda_pool_alloc<int> label(ctx.pool(), (size_t) args.h * n_queries);
    args.label = label.get();

    const ggml_cuda_kernel_launch_params labels = { dim3(n_tiles(n_queries), args.h), dim3(N_THREADS), 0,
                                                    ctx.stream() };
    const ggml_cuda_kernel_launch_params means  = { dim3(args.m, args.h), dim3(N_THREADS), 0, ctx.stream() };
    ggml_cuda_kernel_launch(track_label, labels, args);
    ggml_cuda_kernel_launch(track_mean, means, args);
}

//
// score: maxima and sums of each probe's softmax by tiles of cells, then of all; what each cell has of them; and
// the likeness of cells, some thousands at a time. Nothing of the size of cells x probes or witnesses is stored.
//

struct score_args {
    const char * k;
    const char * v;
    size_t       k_head, k_cell, v_head, v_cell;  // strides
    ggml_type    type_k, type_v;

    const float *   probes;     // [h][p][d]
    const float *   witnesses;  // [h][w][d + e]
    const int32_t * cells;      // [n]
    const int32_t * table_pos;  // [n]
    const int32_t * probe_pos;  // [p]
    const int32_t * newer;      // [w]
    const int32_t * pos;        // [h][n]
    const float *   count;      // [h][n_beacon], or NULL
    rotation        rot;

    int   d, e, h, n, p, w;
    int   n_beacon, n_sink, boundary, n_hadamard;
    float scale, softcap;

    float *   beacon;        // [h][n]
    float *   recent;        // [h][n]
    float *   restated;      // [h][n]
    int32_t * twin;          // [h][n]

    float2 * partial;        // [h][p][n_tiles] maxima and sums of a tile's cells
    float2 * total;          // [h][p] maxima, 1 / sums; 0, 0 of a probe without a vote

    float * units;           // [h][n_units][d + e] keys with all rotations undone and values, each of length 1
    int     first, n_units;  // cells they are of

    const __device__ __forceinline__ char * key(int g, int j) const { return k + g * k_head + cells[j] * k_cell; }

    const __device__ __forceinline__ char * value(int g, int j) const { return v + g * v_head + cells[j] * v_cell; }

    // whether probe q looks at a cell with that position in the cell table
    __device__ __forceinline__ bool sees(int q, int place) const {
        return place >= n_sink && (q < n_beacon || place < boundary || place <= probe_pos[q]);
    }
};

// what a block has of its tile of cells
struct score_tile {
    const char * key[TILE];
    int          place[TILE];  // positions in the cell table
};

static __device__ __forceinline__ void load_tile(score_tile & tile, const score_args & args, int g, int j0) {
    const int t = threadIdx.x;
    if (t < TILE) {
        const bool exists = j0 + t < args.n;
        tile.key[t]       = exists ? args.key(g, j0 + t) : nullptr;
        tile.place[t]     = exists ? args.table_pos[j0 + t] : 0;
    }
}

// cap*tanh(x/cap); the fast math of the build has a tanhf of three digits
static __device__ __forceinline__ float softcap(float x, float cap) {
    return cap * (1.0f - 2.0f / (expf(2.0f * x / cap) + 1.0f));
}

// logits of cells row.. of the tile and of probes q0 + col..
static __device__ __forceinline__ void logits(const score_args & args,
                                              const score_tile & tile,
                                              slice &            a,
                                              slice &            b,
                                              int                g,
                                              int                q0,
                                              int                row,
                                              int                col,
                                              float (&acc)[4][4]) {
    const float * probes = args.probes + ((int64_t) g * args.p + q0) * args.d;
    multiply(
        a, b, args.d,
        [&](slice & s, int i0) {
            with_type(args.type_k, [&](auto type) {
                fill(s, i0, args.d, [&](int c, int i) { return tile.key[c] ? type.get(tile.key[c], i) : 0.0f; });
            });
        },
        [&](slice & s, int i0) {
            fill(s, i0, args.d,
                 [&](int q, int i) { return q0 + q < args.p ? probes[(int64_t) q * args.d + i] : 0.0f; });
        },
        row, col, acc);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float x = acc[i][j] * args.scale;
            acc[i][j]     = args.softcap > 0.0f ? softcap(x, args.softcap) : x;
        }
    }
}

// grid: tiles, heads
static __global__ void __launch_bounds__(N_THREADS) score_partial(const score_args args) {
    alignas(16) __shared__ slice a, b;
    __shared__ score_tile        tile;

    ggml_cuda_pdl_sync();

    const int t  = threadIdx.x;
    const int g  = blockIdx.y;
    const int j0 = blockIdx.x * TILE;

    const int row = t % 16 * 4;  // 16 threads in a row have all cells of 4 probes
    const int col = t / 16 * 4;

    load_tile(tile, args, g, j0);
    for (int q0 = 0; q0 < args.p; q0 += TILE) {
        float x[4][4];
        logits(args, tile, a, b, g, q0, row, col, x);
        for (int j = 0; j < 4; ++j) {
            const int q = q0 + col + j;

            float max = NONE;
            bool  sees[4];
            for (int i = 0; i < 4; ++i) {
                sees[i] = q < args.p && j0 + row + i < args.n && args.sees(q, tile.place[row + i]);
                max     = sees[i] ? fmaxf(max, x[i][j]) : max;
            }
            max       = warp_reduce_max<16>(max);
            float sum = 0.0f;
            for (int i = 0; i < 4; ++i) {
                sum += sees[i] ? expf(x[i][j] - max) : 0.0f;
            }
            sum = warp_reduce_sum<16>(sum);
            if (t % 16 == 0 && q < args.p) {
                args.partial[((int64_t) g * args.p + q) * gridDim.x + blockIdx.x] = make_float2(max, sum);
            }
        }
    }
}

// grid: probes, heads; one warp
static __global__ void __launch_bounds__(WARP_SIZE) score_total(const score_args args, const int n_partial) {
    ggml_cuda_pdl_sync();

    const int t = threadIdx.x;
    const int q = blockIdx.x;
    const int g = blockIdx.y;

    const float2 * partial = args.partial + ((int64_t) g * args.p + q) * n_partial;

    float max = NONE;
    for (int i = t; i < n_partial; i += WARP_SIZE) {
        max = fmaxf(max, partial[i].x);
    }
    max       = warp_reduce_max(max);
    float sum = 0.0f;
    for (int i = t; i < n_partial; i += WARP_SIZE) {
        sum += partial[i].y * expf(partial[i].x - max);
    }
    sum = warp_reduce_sum(sum);

    const bool is_empty = args.count && q < args.n_beacon && args.count[(int64_t) g * args.n_beacon + q] <= 0.0f;
    if (t == 0) {
        const bool votes                     = max > NONE && !is_empty;
        args.total[(int64_t) g * args.p + q] = votes ? make_float2(max, 1.0f / sum) : make_float2(0.0f, 0.0f);
    }
}

// grid: tiles, heads
static __global__ void __launch_bounds__(N_THREADS) score_importance(const score_args args) {
    alignas(16) __shared__ slice a, b;
    __shared__ score_tile        tile;

    ggml_cuda_pdl_sync();

    const int t  = threadIdx.x;
    const int g  = blockIdx.y;
    const int j0 = blockIdx.x * TILE;

    const int row = t / 16 * 4;  // 16 threads in a row have all probes of 4 cells
    const int col = t % 16 * 4;

    float beacon[4] = {};
    float recent[4] = {};

    load_tile(tile, args, g, j0);
    for (int q0 = 0; q0 < args.p; q0 += TILE) {
        float x[4][4];
        logits(args, tile, a, b, g, q0, row, col, x);
        for (int j = 0; j < 4; ++j) {
            const int q = q0 + col + j;
            if (q >= args.p) {
                continue;
            }
            const float2 total = args.total[(int64_t) g * args.p + q];
            for (int i = 0; i < 4; ++i) {
                if (args.sees(q, tile.place[row + i])) {
                    const float share = total.y * expf(fminf(x[i][j] - total.x, 0.0f));
                    beacon[i] += q < args.n_beacon ? share : 0.0f;
                    recent[i] += q < args.n_beacon ? 0.0f : share;
                }
            }
        }
    }
    for (int i = 0; i < 4; ++i) {
        const float beacons = warp_reduce_sum<16>(beacon[i]);
        const float others  = warp_reduce_sum<16>(recent[i]);
        const int   j       = j0 + row + i;
        if (t % 16 == 0 && j < args.n) {
            args.beacon[(int64_t) g * args.n + j] = beacons;
            args.recent[(int64_t) g * args.n + j] = others;
        }
    }
}

// 1 / length of a row that one warp has
static __device__ __forceinline__ float inverse_length(const float * x, int n) {
    float len2 = 0.0f;
    for (int i = threadIdx.x; i < n; i += WARP_SIZE) {
        len2 += x[i] * x[i];
    }
    return 1.0f / fmaxf(sqrtf(warp_reduce_sum(len2)), 1e-12f);
}

// grid: cells from args.first on, heads; one warp
static __global__ void __launch_bounds__(WARP_SIZE) score_unit(const score_args args) {
    __shared__ float x[MAX_HEAD];

    ggml_cuda_pdl_sync();

    const int t = threadIdx.x;
    const int g = blockIdx.y;
    const int j = args.first + blockIdx.x;
    const int d = args.d;
    const int e = args.e;

    float * unit = args.units + ((int64_t) g * args.n_units + blockIdx.x) * (d + e);

    const char * key = args.key(g, j);
    with_type(args.type_k, [&](auto type) {
        for (int i = t; i < d; i += WARP_SIZE) {
            x[i] = type.get(key, i);
        }
    });
    __syncthreads();

    // Hadamard's matrix in Sylvester's order, normalised: its own inverse
    for (int step = 1; step < args.n_hadamard; step *= 2) {
        for (int pair = t; pair < d / 2; pair += WARP_SIZE) {
            const int   i    = pair / step * 2 * step + pair % step;
            const float sum  = x[i] + x[i + step];
            const float diff = x[i] - x[i + step];
            x[i]             = sum;
            x[i + step]      = diff;
        }
        __syncthreads();
    }
    const float scale = args.n_hadamard > 0 ? 1.0f / sqrtf((float) args.n_hadamard) : 1.0f;
    for (int i = t; i < d; i += WARP_SIZE) {
        x[i] *= scale;
    }
    __syncthreads();

    const int pos = args.pos[(int64_t) g * args.n + j];
    for (int pair = t; pair < args.rot.size() / 2; pair += WARP_SIZE) {
        float &      first  = x[args.rot.first(pair)];
        float &      second = x[args.rot.second(pair)];
        const float2 y      = args.rot.undo(pos, pair, first, second);
        first               = y.x;
        second              = y.y;
    }
    __syncthreads();

    const float inverse_k = inverse_length(x, d);
    for (int i = t; i < d; i += WARP_SIZE) {
        unit[i] = x[i] * inverse_k;
    }

    const char * value = args.value(g, j);
    with_type(args.type_v, [&](auto type) {
        for (int i = t; i < e; i += WARP_SIZE) {
            x[i] = type.get(value, i);
        }
    });
    const float inverse_v = inverse_length(x, e);
    for (int i = t; i < e; i += WARP_SIZE) {
        unit[d + i] = x[i] * inverse_v;
    }
}

// grid: tiles from args.first on, heads
static __global__ void __launch_bounds__(N_THREADS) score_likeness(const score_args args) {
    alignas(16) __shared__ slice a, b;

    ggml_cuda_pdl_sync();

    const int t    = threadIdx.x;
    const int g    = blockIdx.y;
    const int u0   = blockIdx.x * TILE;
    const int size = args.d + args.e;

    const int row = t / 16 * 4;  // 16 threads in a row have all witnesses of 4 cells
    const int col = t % 16 * 4;

    const float * units     = args.units + (int64_t) g * args.n_units * size;
    const float * witnesses = args.witnesses + (int64_t) g * args.w * size;

    float high[4];
    int   best[4];
    float like[4];  // of the best
    for (int i = 0; i < 4; ++i) {
        high[i] = -4.0f;
        best[i] = -1;
        like[i] = 0.0f;
    }
    for (int q0 = 0; q0 < args.w; q0 += TILE) {
        float acc[4][4];
        multiply(
            a, b, size,
            [&](slice & s, int i0) {
                fill(s, i0, size,
                     [&](int c, int i) { return u0 + c < args.n_units ? units[(int64_t) (u0 + c) * size + i] : 0.0f; });
            },
            [&](slice & s, int i0) {
                fill(s, i0, size,
                     [&](int q, int i) { return q0 + q < args.w ? witnesses[(int64_t) (q0 + q) * size + i] : 0.0f; });
            },
            row, col, acc);
        for (int j = 0; j < 4; ++j) {
            const int q = q0 + col + j;
            for (int i = 0; i < 4; ++i) {
                const float x    = 0.5f * acc[i][j];
                const float rank = x + (float) q * GGML_BEACON_STEP;
                if (q < args.w && args.newer[q] > args.first + u0 + row + i && rank >= high[i]) {
                    high[i] = rank;
                    best[i] = q;
                    like[i] = x;
                }
            }
        }
    }
    for (int i = 0; i < 4; ++i) {
        const int own = best[i];
        best_of_16(high[i], best[i], 1);  // -1 where none is newer

        const int64_t j = (int64_t) g * args.n + args.first + u0 + row + i;
        if (u0 + row + i < args.n_units && (best[i] < 0 ? t % 16 == 0 : own == best[i])) {
            args.restated[j] = like[i];
            args.twin[j]     = own < 0 ? 0 : own;
        }
    }
}

void ggml_cuda_op_beacon_score(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    constexpr int64_t MAX_UNITS = 4 << 20;  // floats: 16 MiB of scratch

    const ggml_tensor * k         = dst->src[0];
    const ggml_tensor * v         = dst->src[1];
    const ggml_tensor * probes    = dst->src[2];
    const ggml_tensor * witnesses = dst->src[3];

    ggml_beacon_score_params params;
    memcpy(&params, dst->op_params, sizeof(params));

    score_args args = {};

    args.k         = (const char *) k->data;
    args.v         = (const char *) v->data;
    args.k_head    = k->nb[1];
    args.k_cell    = k->nb[2];
    args.v_head    = v->nb[1];
    args.v_cell    = v->nb[2];
    args.type_k    = k->type;
    args.type_v    = v->type;
    args.probes    = probes ? (const float *) probes->data : nullptr;
    args.witnesses = witnesses ? (const float *) witnesses->data : nullptr;
    args.d         = k->ne[0];
    args.e         = v->ne[0];
    args.h         = k->ne[1];
    args.n         = dst->src[4]->ne[0];
    args.p         = probes ? probes->ne[1] : 0;
    args.w         = witnesses ? witnesses->ne[1] : 0;
    args.cells     = (const int32_t *) dst->src[4]->data;
    args.table_pos = (const int32_t *) dst->src[5]->data;
    args.probe_pos = args.table_pos + args.n;
    args.newer     = args.probe_pos + args.p;
    args.pos       = (const int32_t *) dst->src[6]->data;
    args.rot       = { params.rope, dst->src[7] ? (const float *) dst->src[7]->data : nullptr };
    args.count     = dst->src[8] ? (const float *) dst->src[8]->data : nullptr;

    args.n_beacon   = params.n_beacon;
    args.n_sink     = params.n_sink;
    args.boundary   = params.boundary;
    args.n_hadamard = params.n_hadamard;
    args.scale      = params.scale;
    args.softcap    = params.softcap;

    const int64_t n_rows = (int64_t) args.h * args.n;
    args.beacon          = (float *) dst->data;
    args.recent          = args.beacon + n_rows;
    args.restated        = args.recent + n_rows;
    args.twin            = (int32_t *) (args.restated + n_rows);

    const auto launch = [&](int n_blocks, int n_threads) {
        return ggml_cuda_kernel_launch_params{ dim3(n_blocks, args.h), dim3(n_threads), 0, ctx.stream() };
    };
    const int    n_partial = n_tiles(args.n);
    const size_t n_probes  = (size_t) args.h * args.p;

    ggml_cuda_pool_alloc<float2> partial(ctx.pool(), std::max<size_t>(1, n_probes * n_partial));
    ggml_cuda_pool_alloc<float2> total(ctx.pool(), std::max<size_t>(1, n_probes));
    args.partial = partial.get();
    args.total   = total.get();
    if (args.p > 0) {
        ggml_cuda_kernel_launch(score_partial, launch(n_partial, N_THREADS), args);
        ggml_cuda_kernel_launch(score_total, launch(args.p, WARP_SIZE), args, n_partial);
    }
    ggml_cuda_kernel_launch(score_importance, launch(n_partial, N_THREADS), args);

    const int64_t size  = (int64_t) args.h * (args.d + args.e);
    const int     chunk = std::min<int64_t>(args.n, std::max<int64_t>(1, MAX_UNITS / size / TILE) * TILE);

    ggml_cuda_pool_alloc<float> units(ctx.pool(), size * chunk);
    args.units = units.get();
    for (args.first = 0; args.first < args.n; args.first += chunk) {
        args.n_units = std::min(chunk, args.n - args.first);
        if (args.w > 0) {
            ggml_cuda_kernel_launch(score_unit, launch(args.n_units, WARP_SIZE), args);
        }
        ggml_cuda_kernel_launch(score_likeness, launch(n_tiles(args.n_units), N_THREADS), args);
    }
}

//
// move
//

struct move_args {
    char *          data[GGML_BEACON_MAX_MOVED];
    size_t          head[GGML_BEACON_MAX_MOVED];  // strides
    size_t          cell[GGML_BEACON_MAX_MOVED];
    size_t          size[GGML_BEACON_MAX_MOVED];  // of a row
    const int32_t * index;                        // [n_layer][h][n_keep]

    int n_caches, n_layer, n_keep, first;
};

static constexpr int MOVE_COLUMNS = 8;  // words of a row that a block has
static constexpr int MOVE_CELLS   = 4;  // that a thread has at once
static constexpr int MOVE_CHUNK   = N_THREADS / MOVE_COLUMNS * MOVE_CELLS;

// grid: columns, heads, caches. The columns of a head belong to one block, which goes through the cells in chunks. All
// cells of a chunk are read before one is written, and they are written to rows below any that a later chunk reads.
template <typename word> static __global__ void __launch_bounds__(N_THREADS) move_rows(const move_args args) {
    ggml_cuda_pdl_sync();

    const int t      = threadIdx.x;
    const int g      = blockIdx.y;
    const int c      = blockIdx.z;
    const int column = blockIdx.x * MOVE_COLUMNS + t % MOVE_COLUMNS;
    const int layer  = c * args.n_layer / args.n_caches;

    const bool exists = column * sizeof(word) < args.size[c];

    const int32_t * index = args.index + ((int64_t) layer * gridDim.y + g) * args.n_keep;
    char *          base  = args.data[c] + g * args.head[c] + column * sizeof(word);
    for (int i0 = 0; i0 < args.n_keep; i0 += MOVE_CHUNK) {
        word x[MOVE_CELLS];
        bool moves[MOVE_CELLS];
#pragma unroll
        for (int k = 0; k < MOVE_CELLS; ++k) {
            const int i      = i0 + k * (MOVE_CHUNK / MOVE_CELLS) + t / MOVE_COLUMNS;
            const int source = exists && i < args.n_keep ? index[i] : args.first + i;
            moves[k]         = source != args.first + i;
            if (moves[k]) {
                x[k] = *(const word *) (base + source * args.cell[c]);
            }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < MOVE_CELLS; ++k) {
            const int i = i0 + k * (MOVE_CHUNK / MOVE_CELLS) + t / MOVE_COLUMNS;
            if (moves[k]) {
                *(word *) (base + (args.first + i) * args.cell[c]) = x[k];
            }
        }
    }
}

void ggml_cuda_op_beacon_move(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * index = dst->src[0];

    move_args args;
    args.n_caches = ggml_get_op_params_i32(dst, 0);
    args.first    = ggml_get_op_params_i32(dst, 1);
    args.index    = (const int32_t *) index->data;
    args.n_keep   = index->ne[0];
    args.n_layer  = index->ne[2];

    size_t bits = 16;  // the lowest one that is set anywhere is the largest word
    size_t size = 0;
    for (int c = 0; c < args.n_caches; ++c) {
        const ggml_tensor * t = dst->src[1 + c];

        args.data[c] = (char *) t->data;
        args.head[c] = t->nb[1];
        args.cell[c] = t->nb[2];
        args.size[c] = ggml_row_size(t->type, t->ne[0]);
        bits |= (uintptr_t) t->data | t->nb[1] | t->nb[2] | args.size[c];
        size = std::max(size, args.size[c]);
    }
    const size_t word = bits & (~bits + 1);

    const int n_blocks = (size / word + MOVE_COLUMNS - 1) / MOVE_COLUMNS;

    const ggml_cuda_kernel_launch_params launch = { dim3(n_blocks, index->ne[1], args.n_caches), dim3(N_THREADS), 0,
                                                    ctx.stream() };
    switch (word) {
        case 16:
            return ggml_cuda_kernel_launch(move_rows<int4>, launch, args);
        case 8:
            return ggml_cuda_kernel_launch(move_rows<int2>, launch, args);
        case 4:
            return ggml_cuda_kernel_launch(move_rows<int>, launch, args);
        case 2:
            return ggml_cuda_kernel_launch(move_rows<short>, launch, args);
        default:
            return ggml_cuda_kernel_launch(move_rows<char>, launch, args);
    }
}

bool ggml_cuda_beacon_supported(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_BEACON_TRACK:
            return op->ne[0] <= MAX_HEAD;
        case GGML_OP_BEACON_SCORE:
            for (int i = 0; i < 2; ++i) {
                const ggml_tensor * t = op->src[i];
                if (!is_supported(t->type) || t->ne[0] > MAX_HEAD || t->nb[0] != ggml_type_size(t->type)) {
                    return false;
                }
            }
            return true;
        case GGML_OP_BEACON_MOVE:
            return true;
        default:
            return false;
    }
}

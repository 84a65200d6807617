#include "beacon-kernels.h"
#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// Cells are worked on in tiles, each by one thread. The first pass multiplies a tile with the probes, for the maximum and
// the sum of each one's softmax, and with the witnesses; the second multiplies it with the probes again and sums up what
// each cell has of their attention. Nothing of the size of cells x probes or cells x witnesses is stored.

namespace {

// LANES floats at once: probes or witnesses. A compiler without GNU's vectors gets one. (AVX-512's were no faster.)
#if !defined(__GNUC__)
constexpr int LANES = 1;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

constexpr int TILE = 6;  // cells: two vectors of sums each, which is what there are registers for

#if defined(__GNUC__)
typedef float   vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline ivec to_int(vec x) {
    return __builtin_convertvector(x, ivec);
}

inline vec to_float(ivec x) {
    return __builtin_convertvector(x, vec);
}
#else
typedef float   vec;
typedef int32_t ivec;

inline ivec to_int(vec x) {
    return (ivec) x;
}

inline vec to_float(ivec x) {
    return (vec) x;
}
#endif

inline vec as_float(ivec x) {
    vec y;
    memcpy(&y, &x, sizeof(y));
    return y;
}

inline ivec iota() {
    int32_t x[LANES];
    for (int i = 0; i < LANES; ++i) {
        x[i] = i;
    }
    ivec y;
    memcpy(&y, x, sizeof(y));
    return y;
}

inline vec & at(float * x) {
    return *(vec *) x;
}

inline const vec & at(const float * x) {
    return *(const vec *) x;
}

// a where b is no number
inline vec larger(vec a, vec b) {
    return b > a ? b : a;
}

constexpr float NONE = -1e30f;    // logit of a cell that a probe does not see

constexpr int PANEL = 2 * LANES;  // columns of a matrix that lie together

// out[c][j] = sum over i of a[c][i] * b[i][j], for TILE rows and a panel
inline void multiply(const float * a, const float * b, int n, float * out, int ldo) {
    vec acc[TILE][2] = {};
    for (int i = 0; i < n; ++i) {
        const vec b0 = at(b + i * PANEL);
        const vec b1 = at(b + i * PANEL + LANES);
        for (int c = 0; c < TILE; ++c) {
            const float x = a[c * n + i];
            acc[c][0] += x * b0;
            acc[c][1] += x * b1;
        }
    }
    for (int c = 0; c < TILE; ++c) {
        at(out + c * ldo)         = acc[c][0];
        at(out + c * ldo + LANES) = acc[c][1];
    }
}

// e^x for x <= 0, and of what is no number that; Cephes' polynomial
inline vec exp_neg(vec x) {
    x            = larger(x, vec{} - 87.0f);
    const ivec n = to_int(x * 1.44269504f - 0.5f);  // towards 0, so to the nearest
    const vec  m = to_float(n);
    const vec  r = (x - m * 0.693359375f) + m * 2.12194440e-4f;

    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y     = y * r + 8.3334519073e-3f;
    y     = y * r + 4.1665795894e-2f;
    y     = y * r + 1.6666665459e-1f;
    y     = y * r + 5.0000001201e-1f;
    y     = y * r * r + r + 1.0f;
    return y * as_float((n + 127) << 23);
}

int padded(int64_t n) {
    return (n + PANEL - 1) / PANEL * PANEL;
}

// src [n_rows][n_cols] into panels of its rows as columns, [padded(n_rows)/PANEL][n_cols][PANEL]
void make_panels(const float * src, int n_rows, int n_cols, float * dst) {
    for (int r = 0; r < padded(n_rows); ++r) {
        float * column = dst + (size_t) (r / PANEL) * n_cols * PANEL + r % PANEL;
        for (int c = 0; c < n_cols; ++c) {
            column[c * PANEL] = r < n_rows ? src[(size_t) r * n_cols + c] : 0.0f;
        }
    }
}

// Hadamard's matrix in Sylvester's order, normalised: its own inverse
void hadamard(float * x, int n) {
    for (int step = 1; step < n; step *= 2) {
        for (int i = 0; i < n; i += 2 * step) {
            for (int j = i; j < i + step; ++j) {
                const float a = x[j];
                const float b = x[j + step];
                x[j]          = a + b;
                x[j + step]   = a - b;
            }
        }
    }
    ggml_vec_scale_f32(n, x, 1.0f / std::sqrt((float) n));
}

void normalise(float * x, int n) {
    float sum = 0.0f;
    ggml_vec_dot_f32(n, &sum, 0, x, 0, x, 0, 1);
    ggml_vec_scale_f32(n, x, 1.0f / std::max(std::sqrt(sum), 1e-12f));
}

// One thread's part of the operator.
struct worker {
    const ggml_tensor * k;
    const ggml_tensor * v;

    ggml_beacon_score_params params;

    int h, n, d, e, p, w;
    int p_pad, w_pad;

    const int32_t * cells;
    const int32_t * table_pos;  // [n]
    const int32_t * probe_pos;  // [p]
    const int32_t * newer;      // [w]
    const int32_t * pos;        // [h][n]
    const float *   turns;

    float *   beacon;    // [h][n]
    float *   recent;    // [h][n]
    float *   restated;  // [h][n]
    int32_t * twin;      // [h][n]

    int ith, nth;

    // in the work buffer, for all threads
    float * probes    = nullptr;  // panels [h][p_pad/PANEL][d][PANEL]
    float * witnesses = nullptr;  // panels [h][w_pad/PANEL][d + e][PANEL]
    float * partial   = nullptr;  // [nth][h][2][p_pad] maxima and sums
    // for this one
    float * tile      = nullptr;  // [TILE][d]
    float * units     = nullptr;  // [TILE][d + e]
    float * products  = nullptr;  // [TILE][max(p_pad, w_pad)]
    float * totals    = nullptr;  // [2][p_pad]

    size_t size;                  // of the buffer, floats

    worker(const ggml_tensor * dst, float * buffer, int ith, int nth) :
        k(dst->src[0]),
        v(dst->src[1]),
        ith(ith),
        nth(nth) {
        const ggml_tensor * t_probes    = dst->src[2];
        const ggml_tensor * t_witnesses = dst->src[3];

        memcpy(&params, dst->op_params, sizeof(params));
        h     = k->ne[1];
        n     = dst->src[4]->ne[0];
        d     = k->ne[0];
        e     = v->ne[0];
        p     = t_probes ? t_probes->ne[1] : 0;
        w     = t_witnesses ? t_witnesses->ne[1] : 0;
        p_pad = padded(p);
        w_pad = padded(w);

        cells     = (const int32_t *) dst->src[4]->data;
        table_pos = (const int32_t *) dst->src[5]->data;
        probe_pos = table_pos + n;
        newer     = probe_pos + p;
        pos       = (const int32_t *) dst->src[6]->data;
        turns     = dst->src[7] ? (const float *) dst->src[7]->data : nullptr;

        beacon   = (float *) dst->data;
        recent   = beacon + h * n;
        restated = recent + h * n;
        twin     = (int32_t *) (restated + h * n);

        const size_t n_probes    = (size_t) h * d * p_pad;
        const size_t n_witnesses = (size_t) h * (d + e) * w_pad;
        const size_t n_partial   = (size_t) h * 2 * p_pad;
        const size_t n_products  = (size_t) TILE * std::max(p_pad, w_pad);
        const size_t n_own       = (size_t) TILE * (2 * d + e) + n_products + 2 * p_pad;

        size = n_probes + n_witnesses + nth * (n_partial + n_own);
        if (!buffer) {
            return;
        }
        probes    = buffer;
        witnesses = probes + n_probes;
        partial   = witnesses + n_witnesses;
        tile      = partial + nth * n_partial + ith * n_own;
        units     = tile + TILE * d;
        products  = units + TILE * (d + e);
        totals    = products + n_products;
    }

    float * maxima(int thread, int g) const { return partial + ((size_t) thread * h + g) * 2 * p_pad; }

    // cells [j0, j1): whole tiles
    void range(int & j0, int & j1) const {
        const int n_tiles = (n + TILE - 1) / TILE;
        j0                = n_tiles * ith / nth * TILE;
        j1                = std::min(n, n_tiles * (ith + 1) / nth * TILE);
    }

    void prepare(const ggml_tensor * dst) const {
        for (int g = ith; g < h; g += nth) {
            if (p > 0) {
                make_panels((const float *) dst->src[2]->data + (size_t) g * p * d, p, d,
                            probes + (size_t) g * d * p_pad);
            }
            if (w > 0) {
                make_panels((const float *) dst->src[3]->data + (size_t) g * w * (d + e), w, d + e,
                            witnesses + (size_t) g * (d + e) * w_pad);
            }
        }
    }

    // keys of the cells from j0 on, those behind the end are zero
    void load_tile(int g, int j0) const {
        for (int c = 0; c < TILE; ++c) {
            if (j0 + c < n) {
                beacon_read_row(k, cells[j0 + c], g, tile + c * d);
            } else {
                std::fill(tile + c * d, tile + (c + 1) * d, 0.0f);
            }
        }
    }

    // products = logits of the tile
    void logits(int g, int j0) const {
        for (int q = 0; q < p_pad; q += PANEL) {
            multiply(tile, probes + (size_t) d * (g * p_pad + q), d, products + q, p_pad);
        }
        for (int c = 0; c < TILE && j0 + c < n; ++c) {
            float *   row   = products + c * p_pad;
            const int place = table_pos[j0 + c];
            if (place < params.n_sink) {
                std::fill(row, row + p_pad, NONE);
                continue;
            }
            for (int q = 0; q < p_pad; q += LANES) {
                at(row + q) *= params.scale;
            }
            for (int q = 0; params.softcap > 0.0f && q < p; ++q) {
                row[q] = params.softcap * std::tanh(row[q] / params.softcap);
            }
            for (int q = params.n_beacon; place >= params.boundary && q < p; ++q) {
                row[q] = place > probe_pos[q] ? NONE : row[q];
            }
        }
    }

    void likeness(int g, int j0) const {
        for (int c = 0; c < TILE; ++c) {
            const int j = j0 + c;
            float *   u = units + c * (d + e);
            if (j >= n) {
                std::fill(u, u + d + e, 0.0f);
                continue;
            }
            memcpy(u, tile + c * d, d * sizeof(float));
            for (int i = 0; params.n_hadamard > 0 && i < d; i += params.n_hadamard) {
                hadamard(u + i, params.n_hadamard);
            }
            beacon_undo_rotation(params.rope, turns, pos[g * n + j], u);
            normalise(u, d);
            beacon_read_row(v, cells[j], g, u + d);
            normalise(u + d, e);
        }
        for (int q = 0; q < w_pad; q += PANEL) {
            multiply(units, witnesses + (size_t) (d + e) * (g * w_pad + q), d + e, products + q, w_pad);
        }
        for (int c = 0; c < TILE && j0 + c < n; ++c) {
            const int     j     = j0 + c;
            const float * row   = products + c * w_pad;
            const int     first = std::upper_bound(newer, newer + w, j) - newer;  // that is newer

            // the highest of each lane, then of all
            vec  high  = vec{} - 4.0f;
            ivec index = {};
            for (int q = first / LANES * LANES; q < w; q += LANES) {
                const ivec i    = iota() + q;
                const vec  rank = at(row + q) * 0.5f + to_float(i) * GGML_BEACON_STEP;
                const auto wins = (i >= first) & (i < w) & (rank >= high);
                high            = wins ? rank : high;
                index           = wins ? i : index;
            }
            float   best[LANES];
            int32_t who[LANES];
            memcpy(best, &high, sizeof(best));
            memcpy(who, &index, sizeof(who));
            int lane = 0;
            for (int i = 1; i < LANES; ++i) {
                lane = best[i] > best[lane] || (best[i] == best[lane] && who[i] > who[lane]) ? i : lane;
            }
            restated[g * n + j] = first < w ? 0.5f * row[who[lane]] : 0.0f;
            twin[g * n + j]     = who[lane];
        }
    }

    void first_pass() const {
        int j0, j1;
        range(j0, j1);
        for (int g = 0; g < h; ++g) {
            float * max = maxima(ith, g);
            float * sum = max + p_pad;
            std::fill(max, max + p_pad, NONE);
            std::fill(sum, sum + p_pad, 0.0f);
            for (int j = j0; j < j1; j += TILE) {
                load_tile(g, j);
                if (p > 0) {
                    const int n_rows = std::min(TILE, j1 - j);
                    logits(g, j);
                    for (int q = 0; q < p_pad; q += LANES) {
                        vec m = at(max + q);
                        for (int c = 0; c < n_rows; ++c) {
                            m = larger(m, at(products + c * p_pad + q));
                        }
                        vec x = at(sum + q) * exp_neg(at(max + q) - m);
                        for (int c = 0; c < n_rows; ++c) {
                            x += exp_neg(at(products + c * p_pad + q) - m);
                        }
                        at(max + q) = m;
                        at(sum + q) = x;
                    }
                }
                likeness(g, j);
            }
        }
    }

    void second_pass(const ggml_tensor * count) const {
        float * max   = totals;
        float * share = max + p_pad;

        int j0, j1;
        range(j0, j1);
        for (int g = 0; g < h; ++g) {
            for (int q = 0; q < p_pad; ++q) {
                float m   = NONE;
                float sum = 0.0f;
                for (int t = 0; t < nth; ++t) {
                    m = std::max(m, maxima(t, g)[q]);
                }
                for (int t = 0; t < nth; ++t) {
                    sum += maxima(t, g)[p_pad + q] * std::exp(maxima(t, g)[q] - m);
                }
                const bool is_empty =
                    count && q < params.n_beacon &&
                    *(const float *) ((const char *) count->data + g * count->nb[2] + q * count->nb[1]) <= 0.0f;
                const bool votes = q < p && m > NONE && !is_empty;
                max[q]           = votes ? m : 0.0f;
                share[q]         = votes ? 1.0f / sum : 0.0f;
            }
            for (int j = j0; j < j1; j += TILE) {
                load_tile(g, j);
                logits(g, j);
                for (int c = 0; c < TILE && j + c < j1; ++c) {
                    float * row = products + c * p_pad;
                    for (int q = 0; q < p_pad; q += LANES) {
                        const vec x = at(row + q) - at(max + q);
                        at(row + q) = at(share + q) * exp_neg(x > 0.0f ? vec{} : x);
                    }
                    float beacons = 0.0f;
                    float others  = 0.0f;
                    for (int q = 0; q < params.n_beacon; ++q) {
                        beacons += row[q];
                    }
                    for (int q = params.n_beacon; q < p; ++q) {
                        others += row[q];
                    }
                    const bool is_sink    = table_pos[j + c] < params.n_sink;
                    beacon[g * n + j + c] = is_sink ? 0.0f : beacons;
                    recent[g * n + j + c] = is_sink ? 0.0f : others;
                }
            }
        }
    }
};

}  // namespace

size_t beacon_score_work_size(const ggml_tensor * dst, int n_tasks) {
    return worker(dst, nullptr, 0, n_tasks).size * sizeof(float);
}

void beacon_score(const ggml_compute_params * params, ggml_tensor * dst) {
    const worker w(dst, (float *) params->wdata, params->ith, params->nth);
    GGML_ASSERT(params->wsize >= w.size * sizeof(float));

    w.prepare(dst);
    ggml_barrier(params->threadpool);
    w.first_pass();
    ggml_barrier(params->threadpool);
    w.second_pass(dst->src[8]);
}

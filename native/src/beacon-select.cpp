#include "beacon-select.h"

#include "beaconkv.h"

#include <algorithm>
#include <cmath>
#include <numeric>

//
// beacon_query_rows
//

void beacon_query_rows::init(uint32_t n_rows, uint32_t window) {
    n          = n_rows;
    stride_min = std::max<int32_t>(2, window / n_rows);

    track.resize(n);
    recent.resize(n);

    reset();
}

void beacon_query_rows::reset() {
    std::fill(recent.begin(), recent.end(), -1);
    reset_track();
}

void beacon_query_rows::reset_track() {
    std::fill(track.begin(), track.end(), -1);
    stride = stride_min;
}

void beacon_query_rows::push(int32_t pos) {
    if (pos % stride_min == stride_min / 2) {
        recent[(pos / stride_min) % n] = pos;
        return;
    }

    if (pos % stride != 0 || std::find(track.begin(), track.end(), pos) != track.end()) {
        return;  // not sampled, or there already: the patches of an image share a position
    }

    auto it = std::find(track.begin(), track.end(), -1);
    if (it == track.end()) {
        // full: keep every other row
        stride *= 2;
        for (auto & p : track) {
            p = p % stride == 0 ? p : -1;
        }
        if (pos % stride != 0) {
            return;
        }
        it = std::find(track.begin(), track.end(), -1);
        if (it == track.end()) {
            return;
        }
    }
    *it = pos;
}

uint32_t beacon_query_rows::row_of(int32_t pos) const {
    if (pos % stride_min == stride_min / 2) {
        const uint32_t row = (pos / stride_min) % n;
        return recent[row] == pos ? n + row : 2 * n;
    }
    if (pos % stride_min == 0) {
        const auto it = std::find(track.begin(), track.end(), pos);
        if (it != track.end()) {
            return it - track.begin();
        }
    }
    return 2 * n;
}

void beacon_query_rows::drop_from(int32_t pos) {
    for (auto * rows : { &track, &recent }) {
        for (auto & p : *rows) {
            p = p >= pos ? -1 : p;
        }
    }
}

void beacon_query_rows::list(bool is_recent, std::vector<int32_t> & rows, std::vector<int32_t> & pos) const {
    const auto &   src  = is_recent ? recent : track;
    const uint32_t offs = is_recent ? n : 0;

    std::vector<std::pair<int32_t, int32_t>> used;
    for (uint32_t r = 0; r < n; ++r) {
        if (src[r] >= 0) {
            used.emplace_back(src[r], offs + r);
        }
    }
    std::sort(used.begin(), used.end());

    rows.clear();
    pos.clear();
    for (const auto & [p, r] : used) {
        rows.push_back(r);
        pos.push_back(p);
    }
}

std::vector<int32_t> beacon_query_rows::save() const {
    std::vector<int32_t> data = { stride };
    data.insert(data.end(), track.begin(), track.end());
    data.insert(data.end(), recent.begin(), recent.end());
    return data;
}

bool beacon_query_rows::load(const std::vector<int32_t> & data) {
    if (data.size() != 1 + 2 * (size_t) n || data[0] < stride_min) {
        return false;
    }
    stride = data[0];
    std::copy(data.begin() + 1, data.begin() + 1 + n, track.begin());
    std::copy(data.begin() + 1 + n, data.end(), recent.begin());
    return true;
}

//
// sizes
//

uint32_t beacon_n_held(const beacon_params & params, uint32_t n_after) {
    if (n_after <= params.budget) {
        return n_after;
    }
    return params.budget - params.window + (n_after - params.budget - 1) % params.window + 1;
}

uint32_t beacon_n_batch_max(const beacon_params & params) {
    const uint32_t n_pin  = params.budget * params.pin_share;
    const uint64_t n_kept = (uint64_t) params.window + params.n_recent + std::max(params.n_sink, n_pin);

    return params.budget > n_kept ? params.budget - n_kept : 0;
}

//
// selection
//

void beacon_select(const float *          score,
                   uint32_t               n,
                   uint32_t               n_prefix,
                   uint32_t               n_recent,
                   uint32_t               n_keep,
                   std::vector<int32_t> & keep) {
    const uint32_t n_mid = n_keep - n_prefix - n_recent;

    std::vector<int32_t> order(n - n_prefix - n_recent);
    std::iota(order.begin(), order.end(), n_prefix);
    std::nth_element(order.begin(), order.begin() + n_mid, order.end(),
                     [&](int32_t a, int32_t b) { return score[a] != score[b] ? score[a] > score[b] : a > b; });

    keep.resize(n_keep);
    std::iota(keep.begin(), keep.begin() + n_prefix, 0);
    std::copy(order.begin(), order.begin() + n_mid, keep.begin() + n_prefix);
    std::sort(keep.begin() + n_prefix, keep.begin() + n_prefix + n_mid);
    std::iota(keep.begin() + n_prefix + n_mid, keep.end(), n - n_recent);
}

//
// k-means
//

static float dot(const float * a, const float * b, uint32_t d) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < d; ++i) {
        sum += a[i] * b[i];
    }
    return sum;
}

// x /= |x|, returns |x|
static float normalise(float * x, uint32_t d) {
    const float norm = std::sqrt(dot(x, x, d));
    for (uint32_t i = 0; i < d; ++i) {
        x[i] = norm > 0.0f ? x[i] / norm : 0.0f;
    }
    return norm;
}

void beacon_kmeans(const float * x, uint32_t n, uint32_t d, uint32_t m, float * mean, float * count, float * norm) {
    const int n_iter = 6;

    std::fill(mean, mean + (size_t) m * d, 0.0f);
    std::fill(count, count + m, 0.0f);
    std::fill(norm, norm + m, 0.0f);

    m = std::min(m, n);
    if (m == 0) {
        return;
    }

    std::vector<float> xn(x, x + (size_t) n * d);  // unit points
    std::vector<float> x_norm(n);
    std::vector<float> centre(d, 0.0f);
    for (uint32_t i = 0; i < n; ++i) {
        x_norm[i] = normalise(&xn[i * d], d);
        for (uint32_t k = 0; k < d; ++k) {
            centre[k] += xn[i * d + k];
        }
    }
    normalise(centre.data(), d);

    // farthest-point start: first the point least like the mean, then the one least like all that were picked
    std::vector<float> closest(n);
    for (uint32_t i = 0; i < n; ++i) {
        closest[i] = dot(&xn[i * d], centre.data(), d);
    }
    std::vector<float> c((size_t) m * d);
    for (uint32_t j = 0; j < m; ++j) {
        const uint32_t pick = std::min_element(closest.begin(), closest.end()) - closest.begin();
        std::copy(&xn[pick * d], &xn[pick * d] + d, &c[j * d]);
        for (uint32_t i = 0; i < n; ++i) {
            const float sim = dot(&xn[i * d], &c[j * d], d);
            closest[i]      = j == 0 ? sim : std::max(closest[i], sim);
        }
    }

    std::vector<uint32_t> label(n);
    for (int iter = 0; iter <= n_iter; ++iter) {
        std::fill(count, count + m, 0.0f);
        for (uint32_t i = 0; i < n; ++i) {
            float best = -2.0f;
            for (uint32_t j = 0; j < m; ++j) {
                const float sim = dot(&xn[i * d], &c[j * d], d);
                if (sim > best) {
                    best     = sim;
                    label[i] = j;
                }
            }
            count[label[i]] += 1.0f;
        }
        if (iter == n_iter) {
            break;
        }

        std::vector<float> sum((size_t) m * d, 0.0f);
        for (uint32_t i = 0; i < n; ++i) {
            for (uint32_t k = 0; k < d; ++k) {
                sum[label[i] * d + k] += xn[i * d + k];
            }
        }
        for (uint32_t j = 0; j < m; ++j) {
            if (count[j] > 0.0f) {
                normalise(&sum[j * d], d);
                std::copy(&sum[j * d], &sum[j * d] + d, &c[j * d]);
            }
        }
    }

    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t j = label[i];
        norm[j] += x_norm[i] / count[j];
        for (uint32_t k = 0; k < d; ++k) {
            mean[j * d + k] += x[i * d + k] / count[j];
        }
    }
}

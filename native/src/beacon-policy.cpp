#include "beacon-policy.h"

#include "beaconkv.h"

#include <algorithm>
#include <cmath>
#include <numeric>

// R-KV: share of the attention in the score, and neighbours that it is pooled over
static constexpr float RKV_LAMBDA = 0.1f;
static constexpr int   RKV_POOL   = 7;

// importance = share*beacon + (1 - share)*recent, each normalised over the cells
static void mix_importance(const beacon_head & head, float beacon_share) {
    const auto sum = [&](const float * x) {
        return x ? std::accumulate(x, x + head.n, 0.0) : 0.0;
    };
    const double sum_b = sum(head.beacon);
    const double sum_r = sum(head.recent);

    const bool has_b = sum_b > 0.0;
    const bool has_r = sum_r > 0.0;

    const double share = has_b && has_r ? beacon_share : has_b ? 1.0 : 0.0;
    for (uint32_t i = 0; i < head.n; ++i) {
        head.importance[i] =
            (has_b ? share * head.beacon[i] / sum_b : 0.0) + (has_r ? (1.0 - share) * head.recent[i] / sum_r : 0.0);
    }
}

// Beacons and recent queries; what is said again counts less, and a quota goes to what was never said again.
static void score_beacon(const beacon_params & params, const beacon_head & head, float * score) {
    mix_importance(head, params.beacon_share);

    const uint32_t i0 = head.n_prefix;
    const uint32_t i1 = head.n - head.n_recent;

    std::vector<float>   value(head.n);
    std::vector<int32_t> order(i1 - i0);
    std::iota(order.begin(), order.end(), i0);
    for (uint32_t i = i0; i < i1; ++i) {
        value[i] = head.importance[i] * std::max(1.0f - params.restated * head.carried[i], 1e-4f);
    }

    const uint32_t n_quota = std::floor(head.n_mid * params.quota + 0.5f);
    const uint32_t n_best  = head.n_mid - n_quota;
    std::nth_element(order.begin(), order.begin() + n_best, order.end(),
                     [&](int32_t a, int32_t b) { return value[a] != value[b] ? value[a] > value[b] : a > b; });

    for (uint32_t i = 0; i < head.n; ++i) {
        score[i] = -head.carried[i];  // -1 to 0
    }
    for (uint32_t j = 0; j < n_best; ++j) {
        score[order[j]] = 1.0f;
    }
}

// SnapKV: attention of the last queries
static void score_recent(const beacon_params & params, const beacon_head & head, float * score) {
    (void) params;
    mix_importance(head, 0.0f);
    std::copy(head.importance, head.importance + head.n, score);
}

// R-KV: attention of the last queries, pooled over neighbours, less the softmax of how alike the keys are on average
static void score_redundancy(const beacon_params & params, const beacon_head & head, float * score) {
    (void) params;
    mix_importance(head, 0.0f);

    const int32_t n = head.n;
    for (int32_t i = 0; i < n; ++i) {
        const int32_t j0 = std::max(i - RKV_POOL / 2, 0);
        const int32_t j1 = std::min(i + RKV_POOL / 2 + 1, n);

        score[i] = *std::max_element(head.importance + j0, head.importance + j1);
    }
    const double total = std::accumulate(score, score + n, 0.0);
    const double scale = total > 0.0 ? RKV_LAMBDA / total : 0.0;

    double sum = 0.0;
    for (int32_t i = 0; i < n; ++i) {
        sum += std::exp((double) head.redundancy[i]);
    }
    for (int32_t i = 0; i < n; ++i) {
        score[i] = scale * score[i] - (1.0 - RKV_LAMBDA) * std::exp((double) head.redundancy[i]) / sum;
    }
}

// Expected Attention: what queries like those so far would attend to
static void score_expected(const beacon_params & params, const beacon_head & head, float * score) {
    (void) params;
    std::copy(head.expected, head.expected + head.n, score);
}

// H2O: attention summed up over the compactions
static void score_accumulated(const beacon_params & params, const beacon_head & head, float * score) {
    (void) params;
    std::copy(head.carried, head.carried + head.n, score);
}

// StreamingLLM: sinks and the newest
static void score_streaming(const beacon_params & params, const beacon_head & head, float * score) {
    (void) params;
    std::iota(score, score + head.n, 0.0f);
}

static const beacon_policy_impl policies[] = {
    /*BEACON_POLICY_BEACON     */ { "beacon",      BEACON_PART_BEACONS | BEACON_PART_RECENT | BEACON_PART_RESTATED,
                                   score_beacon                                                                                       },
    /*BEACON_POLICY_RECENT     */
    { "recent",      BEACON_PART_RECENT,                                              score_recent      },
    /*BEACON_POLICY_REDUNDANCY */
    { "redundancy",  BEACON_PART_RECENT | BEACON_PART_REDUNDANCY,                     score_redundancy  },
    /*BEACON_POLICY_EXPECTED   */
    { "expected",    BEACON_PART_EXPECTED,                                            score_expected    },
    /*BEACON_POLICY_ACCUMULATED*/
    { "accumulated", BEACON_PART_RECENT | BEACON_PART_SUM,                            score_accumulated },
    /*BEACON_POLICY_STREAMING  */
    { "streaming",   0,                                                               score_streaming   },
};

const beacon_policy_impl * beacon_policy_get(int32_t policy) {
    return policy >= 0 && policy < (int32_t) (sizeof(policies) / sizeof(policies[0])) ? &policies[policy] : nullptr;
}

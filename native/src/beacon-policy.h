#pragma once

#include <cstdint>
#include <vector>

struct beacon_params;

// What is kept. A policy names the parts of the score graph that it needs, and makes of them one score per cell: in
// each KV head the cells with the highest scores stay. Sinks, pins, the recent window and the budget are the same for
// all. Each has its twin in beaconkv_gguf/reference.py.

enum beacon_part : uint32_t {
    BEACON_PART_BEACONS    = 1 << 0,  // attention of the beacons
    BEACON_PART_RECENT     = 1 << 1,  // attention of the recent queries
    BEACON_PART_RESTATED   = 1 << 2,  // highest likeness to a newer cell, carried along with its twin
    BEACON_PART_REDUNDANCY = 1 << 3,  // mean cosine to the other keys
    BEACON_PART_EXPECTED   = 1 << 4,  // attention of normally distributed queries
    BEACON_PART_SUM        = 1 << 5,  // the recent queries' attention is summed up and carried along
};

// One KV head at a compaction, cells in the order of their positions. Of the arrays [n] only those that belong to the
// policy's parts are there; the others are null.
struct beacon_head {
    uint32_t n;
    uint32_t n_prefix;      // first cells, which stay
    uint32_t n_mid;         // cells to choose behind the prefix and in front of the recent window
    uint32_t n_recent;      // last cells, which stay

    const float * beacon;   // sum over the beacons of their attention, sinks left out
    const float * recent;   // sum over the recent queries
    const float * carried;  // restated, or the sum of attention so far
    const float * redundancy;
    const float * expected;

    float * importance;  // out, for the trace: share of the probes' attention
};

struct beacon_policy_impl {
    const char * name;
    uint32_t     parts;

    void (*score)(const beacon_params & params, const beacon_head & head, float * score);
};

// nullptr: no such policy
const beacon_policy_impl * beacon_policy_get(int32_t policy);

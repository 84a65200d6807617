#pragma once

#include "llama-graph.h"

#include <cstdint>
#include <vector>

struct beacon_params;
struct llama_context;
class llama_kv_cache;

// The two graphs of a compaction:
//   score: track, probe, importance, restated -> what a policy's score is made of, a few floats per cell and KV head
//   move:  kept rows of K and V to the front, bytes as they are
// Composed of ggml's own operators they run on every backend, and are the reference for the fused ones of beacon-ops.h,
// which take their place in the layers that are chosen (beacon-fused.cpp).

struct beacon_layer {
    int32_t  il;
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t n_embd_head_k;
    uint32_t n_embd_head_v;
    size_t   pos_offs;    // of this layer in the stream's table of positions

    ggml_tensor * k;      // [n_embd_head_k*n_head_kv, budget, n_stream]
    ggml_tensor * v;      // [n_embd_head_v*n_head_kv, budget, n_stream]

    ggml_tensor * q;      // F16 [n_embd_head_k*n_head, 2*n_probe + 1, n_stream] rotated queries, the last row is scrap
    ggml_tensor * mean;   // F32 [n_embd_head_k, n_beacon, n_head_kv, n_stream] centroids, rotation undone
    ggml_tensor * count;  // F32 [1, n_beacon, n_head_kv, n_stream] queries in a cluster, 0: centroid not in use
    ggml_tensor * norm;   // F32 [1, n_beacon, n_head_kv, n_stream] their mean length

    // policy "expected" alone. mean and count are of each query head then: n_beacon is n_head/n_head_kv
    ggml_tensor * moment = nullptr;  // F32 [n_embd_head_k, n_embd_head_k, n_head, n_stream] mean of q*q^T

    // what is known of the queries so far
    std::vector<ggml_tensor *> history() const {
        return moment ? std::vector<ggml_tensor *>{ mean, count, norm, moment } :
                        std::vector<ggml_tensor *>{ mean, count, norm };
    }

    bool  stored   = false;  // the decode graph stores this layer's queries
    bool  fused    = false;  // the operators of beacon-ops.h do it
    int   turns    = -1;     // its table among those of beacon_plan, -1: nothing is rotated
    float kq_scale = 1.0f;
};

// What a compaction of one stream reads and decides, for the layers [i0, i1) of one graph.
struct beacon_plan {
    const beacon_params *             params;
    uint32_t                          parts;  // beacon_part
    const llama_kv_cache *            kv;
    const std::vector<beacon_layer> * layers;

    uint32_t stream;

    uint32_t i0 = 0;
    uint32_t i1 = 0;

    std::vector<int32_t> cells;      // [n] cells in the order of their positions
    std::vector<int32_t> table_pos;  // [n] their positions in the cell table

    int32_t  now;                    // position of the next token
    int32_t  boundary;               // cells below it are visible to every probe
    uint32_t n_prefix;               // cells that stay at the front
    uint32_t n_keep;

    std::vector<int32_t> newer;             // indices into cells, ascending: the keys that may restate older ones

    std::vector<std::vector<int32_t>> pos;  // [layer][KV head*n] true positions

    std::vector<int32_t> track_rows;
    std::vector<int32_t> track_pos;
    std::vector<int32_t> recent_rows;
    std::vector<int32_t> recent_pos;

    const std::vector<std::vector<float>> * turns = nullptr;  // tables of the fused operators, see beacon-ops.h

    bool init_only  = false;  // compute q_pre and nothing else: the first centroids are made of it on the host
    bool mask_empty = false;  // some centroids may be without a query: they don't vote
    bool track      = false;  // fold the tracked queries into the centroids

    std::vector<std::vector<std::vector<int32_t>>> keep;  // [layer][KV head][n_keep] indices into cells, ascending

    // [layer][KV head*n] what is carried along with a cell, and the index into cells of the one that it speaks of: the
    // highest likeness to a newer cell that is still held, and that one; or the attention so far, and itself
    std::vector<std::vector<float>>   carried;
    std::vector<std::vector<int32_t>> twin;

    uint32_t n() const { return cells.size(); }
};

// Outputs of the score graph for one layer, each ggml_set_output. Sums are over probes of softmax over cells.
struct beacon_scores {
    ggml_tensor * q_pre      = nullptr;  // F32 [n_embd_head_k, n_head, n_track]
    ggml_tensor * beacon     = nullptr;  // F32 [n, n_head_kv]
    ggml_tensor * recent     = nullptr;  // F32 [n, n_head_kv]
    ggml_tensor * restated   = nullptr;  // F32 [n, n_head_kv]
    ggml_tensor * twin       = nullptr;  // I32 [n*n_head_kv] index into plan.newer
    ggml_tensor * redundancy = nullptr;  // F32 [n, n_head_kv] mean cosine to the other keys
    ggml_tensor * expected   = nullptr;  // F32 [n, n_head_kv]
    ggml_tensor * probes     = nullptr;  // F32 [n_embd_head_k, n_beacon + n_recent*n_head/n_head_kv, n_head_kv]
    ggml_tensor * k          = nullptr;  // F32 [n_embd_head_k, n, n_head_kv]
    ggml_tensor * k_pre      = nullptr;  // F32 [n_embd_head_k, n, n_head_kv] rotation undone
    ggml_tensor * v          = nullptr;  // F32 [n_embd_head_v, n, n_head_kv]
};

// layers that fit into a graph of max_nodes
uint32_t beacon_layers_per_graph(const beacon_plan & plan, int64_t max_nodes);

// trace: keep q_pre, probes and k readable
ggml_cgraph * beacon_build_graph_score(const beacon_plan &          plan,
                                       llm_graph_result *           res,
                                       llama_context *              lctx,
                                       bool                         trace,
                                       std::vector<beacon_scores> & scores);

// layers that beacon_moves_in_graph is false of are left out: beacon_move_host does them
ggml_cgraph * beacon_build_graph_move(const beacon_plan & plan, llm_graph_result * res);

// false: the rows of a composed layer are no 32-bit words, or the cells of a fused one are out of order
bool beacon_moves_in_graph(const beacon_plan & plan, uint32_t i);

void beacon_move_host(const beacon_plan & plan, uint32_t i);

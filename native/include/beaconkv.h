// beaconkv.h - public C API of the bounded KV cache of beaconkv_gguf.
//
// The only header that the Python binding reads: plain C, no macro in a declaration but BEACON_API.
// Every function that can fail returns a beacon_status; beacon_last_error() has the message of the
// calling thread's last failure. Nothing here aborts, and a failed call changes nothing.
//
// Words: a *cell* is one row of the cache and an index; a *position* is a token's place in its
// sequence. Neither is ever the other.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && !defined(__MINGW32__)
#    ifdef LLAMA_BUILD
#        define BEACON_API __declspec(dllexport)
#    else
#        define BEACON_API __declspec(dllimport)
#    endif
#else
#    define BEACON_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// cdef begin

struct llama_context;

enum beacon_status {
    BEACON_OK               = 0,
    BEACON_INVALID          = 1,  // an argument is out of its range
    BEACON_BAD_STATE        = 2,  // not possible in the state that the cache is in
    BEACON_BUFFER_TOO_SMALL = 3,  // *n has the count that is needed
};

// What a bounded cache keeps.
enum beacon_policy {
    BEACON_POLICY_BEACON      = 0,  // beacons and recent queries, what is said again out of the way
    BEACON_POLICY_RECENT      = 1,  // attention of the recent queries (SnapKV)
    BEACON_POLICY_REDUNDANCY  = 2,  // the same, and how alike the keys are (R-KV)
    BEACON_POLICY_EXPECTED    = 3,  // attention of normally distributed queries (Expected Attention)
    BEACON_POLICY_ACCUMULATED = 4,  // attention summed up so far (H2O)
    BEACON_POLICY_STREAMING   = 5,  // the newest (StreamingLLM)
};

// Parameters of a bounded cache. Defaults (beacon_params_default) in brackets.
struct beacon_params {
    uint32_t budget;        // KV cells per attention layer and sequence; 0: no budget           [0]
    uint32_t window;        // decode tokens between two compactions = cells that one frees       [128]
    uint32_t n_sink;        // first positions, never evicted, left out of the scoring softmax    [4]
    uint32_t n_recent;      // newest positions, never evicted                                    [32]
    uint32_t n_beacon;      // centroids per layer and KV head                                    [16]
    uint32_t n_probe;       // recent queries kept per layer as probes, and as many for tracking  [16]
    float    beacon_share;  // share of the beacons in the importance, 0 to 1                     [0.5]
    float    restated;      // importance *= 1 - restated * likeness to a newer cell, 0 to 1       [1.0]
    float    quota;         // share of the free cells for the least restated cells, 0 to 1        [0.5]
    int32_t  policy;        // beacon_policy; beacons, restated and quota are those of the first alone
                            //                                                                    [BEACON_POLICY_BEACON]
    float    pin_share;     // a prompt of up to this share of the budget is pinned, 0 to 0.5     [0.25]
};

// What a context holds. Counts are of one sequence, or of all with seq_id -1; times and bytes always of the context.
struct beacon_stats {
    uint32_t budget;           // cells per sequence, 0 without a budget
    uint32_t n_ctx_seq;        // logical context per sequence, tokens
    uint32_t n_seq_max;        // sequences that the context was made for
    uint32_t n_layer;          // layers that live in the budget (without one: that have a full-attention cache)
    uint32_t n_fused;          // of these, compacted by fused operators; the others by graphs of ggml's own
    uint64_t n_logical;        // tokens that the sequence has seen and not removed
    uint64_t n_held;           // cells in use per layer
    uint64_t n_evicted;        // n_logical - n_held
    uint64_t n_pinned;         // first positions that no compaction moves
    uint64_t n_compact;        // compactions so far
    uint64_t n_evicted_total;  // cells that they evicted, per layer
    uint64_t bytes_k;          // K of the budgeted layers
    uint64_t bytes_v;          // V of the budgeted layers
    uint64_t bytes_ring;       // query rows
    uint64_t bytes_beacon;     // centroids, counts and norms; moments of the policy "expected"
    uint64_t bytes_allocated;  // what ggml's buffers of these four really take, padding included
    uint64_t bytes_other;      // SWA and recurrent caches of the same model: the budget leaves them alone
    uint64_t bytes_host;       // positions and what is carried along per layer, KV head and cell, in host memory
    uint64_t bytes_scratch;    // the backends' buffers for the largest graph of a compaction; decoding uses them too
    uint64_t bytes_full;       // K and V of the same layers in a cache of n_ctx_seq cells
    int64_t  us_compact;       // microseconds in compactions, and of these:
    int64_t  us_score;         //   track, probe, importance, restated
    int64_t  us_select;        //   choice on the host
    int64_t  us_move;          //   rows to the front
};

BEACON_API const char * beacon_version(void);

// message of the calling thread's last failed call; "" if none. Valid until its next failure.
BEACON_API const char * beacon_last_error(void);

// Forget it, where a call of llama.cpp's own follows whose failure may have a message here.
BEACON_API void beacon_clear_error(void);

// Name of a policy; NULL from the first number on that is none.
BEACON_API const char * beacon_policy_name(int32_t policy);

BEACON_API void beacon_params_default(struct beacon_params * params);

// Check params for a context of n_ctx_seq logical tokens per sequence (0: not known yet).
BEACON_API int beacon_params_check(const struct beacon_params * params, uint32_t n_ctx_seq);

// Largest number of tokens that one decode may bring per sequence under these parameters; n_batch is clamped to it.
BEACON_API uint32_t beacon_max_batch(const struct beacon_params * params);

// Contexts that this thread creates between the two calls live in the budget (llama_context_params keeps its layout).
// Scopes do not nest: a second begin is BEACON_BAD_STATE. end without begin does nothing.
BEACON_API int  beacon_scope_begin(const struct beacon_params * params);
BEACON_API void beacon_scope_end(void);

// false for a context without a budget
BEACON_API bool beacon_enabled(const struct llama_context * ctx);

BEACON_API int beacon_get_params(const struct llama_context * ctx, struct beacon_params * params);

// Works without a budget too: then it tells the bytes of the cache.
BEACON_API int beacon_get_stats(const struct llama_context * ctx, int32_t seq_id, struct beacon_stats * stats);

// Whether ggml's device of this name ("CPU", "CUDA0") has the fused operators for common shapes. A context tells what it
// uses: beacon_stats.n_fused. *fused is set if BEACON_OK is returned.
BEACON_API int beacon_device_fused(const char * device, bool * fused);

// Model layers that live in the budget, ascending. *n: in, capacity of il; out, how many there are.
BEACON_API int beacon_get_layers(const struct llama_context * ctx, int32_t * il, size_t * n);

// KV heads of layer il; 0 if the layer is not in the budget.
BEACON_API uint32_t beacon_n_head_kv(const struct llama_context * ctx, int32_t il);

// Positions that KV head `head` of layer il holds, ascending. *n: in, capacity of pos; out, how many there are.
BEACON_API int beacon_get_positions(const struct llama_context * ctx,
                                    int32_t                      seq_id,
                                    int32_t                      il,
                                    int32_t                      head,
                                    int32_t *                    pos,
                                    size_t *                     n);

// Pin the first n positions of the sequence: no later compaction evicts them. They must all be held by every head.
// At most max(n_sink, pin_share * budget). A smaller n than before unpins; 0 leaves the sinks.
BEACON_API int beacon_pin(struct llama_context * ctx, int32_t seq_id, uint32_t n);

// First position from which every head still holds every token; 0 if nothing was ever evicted; negative: no such sequence.
BEACON_API int32_t beacon_boundary(const struct llama_context * ctx, int32_t seq_id);

// Would llama_memory_seq_rm(seq_id, p0, p1) succeed? (Recurrent layers with rollback snapshots answer for themselves.) p0 < 0: from 0; p1 < 0: to the end.
BEACON_API bool beacon_can_seq_rm(const struct llama_context * ctx, int32_t seq_id, int32_t p0, int32_t p1);

// A ggml_abort_callback for llama_set_abort_callback: whether the bool at flag is set. Any thread may set it; decode
// then returns 2, a compaction at work leaves the cells as they were.
BEACON_API bool beacon_is_raised(void * flag);

// Keep the intermediate results of the last compaction of each layer, for tests and pictures. Slow; off by default.
BEACON_API int beacon_set_trace(struct llama_context * ctx, bool on);

// Array `name` of layer il of the last traced compaction, as bytes. *n: in, capacity of dst; out, the size in bytes.
// H: KV heads, n: cells before, in the order of positions, N: tracked query rows, R: recent query rows, d: head size,
// m: beacons, P: m + R*n_head/H, less what the policy does without.
//   "meta"       int32  [10]      n, N, R, n_keep, n_prefix (sinks or pins), boundary, next position, layer's n_head, m, P
//   "pos"        int32  [H][n]    true positions         "table_pos"  int32 [n]  positions in the cell table
//   "k", "v"     bytes  [n][row]  rows before            "k_after", "v_after"  bytes [n_keep][row]
//   "k_f32", "v_f32" f32 [H][n][d] K and V before, as ggml dequantises them
//   "k_pre"      f32    [H][n][d] K with the rotation undone ("beacon")
//   "q_track"    f32    [N][n_head][d] after RoPE        "q_track_pos" int32 [N]
//   "q_pre"      f32    [N][n_head][d] rotation undone
//   "q_recent"   f32    [R][n_head][d] after RoPE        "q_recent_pos" int32 [R]
//   "centroids_before", "centroids" f32 [H][m][d]        "counts_before", "counts", "norms_before", "norms" f32 [H][m]
//   "probes"     f32    [H][P][d] beacons, then recent queries (head of the group outermost), as multiplied with K
//   "importance" f32    [H][n]    share of the probes' attention; 0 for a policy without one
//   "similar"    f32    [H][n]    mean cosine to the other keys ("redundancy")
//   "expected"   f32    [H][n]    expected attention
//   "score"      f32    [H][n]    the highest stay
//   "newer"      int32  [..]      indices into n, ascending: the keys that others were compared with
//   "carried_before", "carried" f32 [H][n]  highest likeness to a newer cell, or the sum of attention ("accumulated"): as
//                                 kept from earlier compactions, and after this one
//   "twin"       int32  [H][n]    index into n of the cell that "carried" speaks of, or -1
//   "keep"       int32  [H][n_keep] indices into n, ascending
BEACON_API int beacon_get_trace(const struct llama_context * ctx,
                                int32_t                      il,
                                const char *                 name,
                                void *                       dst,
                                size_t *                     n);

// cdef end

#ifdef __cplusplus
}
#endif

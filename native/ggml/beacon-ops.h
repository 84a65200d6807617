#pragma once

#include "ggml.h"

#include <stdint.h>

// Operators of a compaction, in ggml's own form. Each does in one launch what beacon-graph.cpp composes of ggml's other
// operators; that one is the reference, and runs where a backend has no kernel.
//
// d, e: head sizes of K and V, h: KV heads, n: cells in the order of their positions, m: beacons, p: probes,
// w: witnesses. All tensors of a sequence are views of its stream.

#ifdef __cplusplus
extern "C" {
#endif

#define GGML_BEACON_MAX_MOVED 8        // tensors of one move
#define GGML_BEACON_TURN_BITS 8        // low bits of a position, which have their own turns
#define GGML_BEACON_STEP      3.2e-7f  // the likeness of a later witness counts that much higher: the newest wins a tie

// How the keys and queries of a layer are rotated.
//
// The turns are F32 [n_rot, 256 + n_pos/256]: cosines of the n_rot/2 pairs, then sines. Row i < 256 is a turn by i, row
// 256 + i one by 256*i; the one by a position is their product. No kernel has to know of frequencies, of their scaling
// (YaRN) or how to get a sine. They are exact, which ggml's own rotation is not at large positions: a key that is undone
// has a cosine of 0.99999 to itself at position 131,071.
struct ggml_beacon_rope {
    int32_t n_rot;    // numbers that are rotated, the first ones of a head
    int32_t pairs;    // GGML_BEACON_PAIRS_*
    float   unscale;  // a rotation that is undone scales by it
};

enum ggml_beacon_pairs {
    GGML_BEACON_PAIRS_NONE   = 0,  // nothing is rotated
    GGML_BEACON_PAIRS_NORMAL = 1,  // of neighbours
    GGML_BEACON_PAIRS_NEOX   = 2,  // of the two halves
};

// Queries into the nearest centroids, in place: cosine to the mean direction (the first of the highest), running mean,
// count and mean length. All are assigned before any mean moves.
//   mean       F32 [d, m, h]      centroids, rotation undone; zero with a count of 0
//   count      F32 [1, m, h]      queries so far
//   norm       F32 [1, m, h]      their mean length
//   q          F16 [d*n_head, ..] rows of rotated queries; those of heads g*n_head/h .. belong to KV head g
//   rows       I32 [n_rows, 2]    rows of q; their positions
//   turns      F32, or NULL without a rotation
// Result: a view of mean.
GGML_API struct ggml_tensor * ggml_beacon_track(struct ggml_context *           ctx,
                                                struct ggml_tensor *            mean,
                                                struct ggml_tensor *            count,
                                                struct ggml_tensor *            norm,
                                                struct ggml_tensor *            q,
                                                struct ggml_tensor *            rows,
                                                struct ggml_tensor *            turns,
                                                const struct ggml_beacon_rope * rope);

struct ggml_beacon_score_params {
    int32_t n_beacon;    // of the probes, the first are beacons, the others recent queries
    int32_t n_sink;      // cells at positions below are no cells for a probe
    int32_t boundary;    // cells at positions below are seen by every recent query; beacons see all cells
    int32_t n_hadamard;  // size of the blocks of a key that the cache keeps under a Hadamard rotation, 0: it does not
    float   scale;       // of the logits
    float   softcap;     // of the scaled logits: cap*tanh(x/cap), 0: none

    struct ggml_beacon_rope rope;
};

// How much probes look at cells, and how alike cells are to newer ones.
//   k, v       any type  [d, h, n_cells], [e, h, n_cells]
//   probes     F32 [d, p, h]      rotated, and under the Hadamard rotation of the cache; or NULL
//   witnesses  F32 [d + e, w, h]  of some cells, keys with all rotations undone and values, each of length 1; or NULL
//   cells      I32 [n]
//   meta       I32 [n + p + w]    positions of the cells in the cell table; last position that a probe sees; which cells
//                                 (0 to n - 1) the witnesses are, ascending
//   pos        I32 [n, h]         true positions
//   turns      F32, or NULL without a rotation
//   count      F32 [1, n_beacon, h]   queries of each beacon: those without one have no vote; or NULL: all have
// Result, 32-bit words [n*h, 4], each row [h][n]:
//   0, 1  sums over the beacons, over the recent queries of their softmax over the cells, F32; 0 without
//   2     the highest likeness to a newer witness, the mean of the two cosines, F32; 0 where none is newer
//   3     which witness that is, 0 to w - 1, I32; any where none is newer
GGML_API struct ggml_tensor * ggml_beacon_score(struct ggml_context *                   ctx,
                                                struct ggml_tensor *                    k,
                                                struct ggml_tensor *                    v,
                                                struct ggml_tensor *                    probes,
                                                struct ggml_tensor *                    witnesses,
                                                struct ggml_tensor *                    cells,
                                                struct ggml_tensor *                    meta,
                                                struct ggml_tensor *                    pos,
                                                struct ggml_tensor *                    turns,
                                                struct ggml_tensor *                    count,
                                                const struct ggml_beacon_score_params * params);

// Rows of caches to the front, in place, bytes as they are: row (head g, cell first + i) becomes row (g, index[i]).
//   caches     n_caches of any type, [.., h, n_cells] each; 1 to GGML_BEACON_MAX_MOVED
//   index      I32 [n_keep, h, n_layer]  ascending, with index[i] >= first + i; cache c takes plane c*n_layer/n_caches
// Result: a view of the first cache.
//
// A row never overtakes its source: whoever copies the rows of a head in order overwrites only what it has read. The
// bytes of a row don't depend on each other, so that a row may be cut into columns, each with its own thread.
GGML_API struct ggml_tensor * ggml_beacon_move(struct ggml_context * ctx,
                                               struct ggml_tensor ** caches,
                                               int                   n_caches,
                                               struct ggml_tensor *  index,
                                               int                   first);

#ifdef __cplusplus
}
#endif

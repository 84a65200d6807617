#pragma once

// What the host and the kernels of beacon.metal agree on, in the words that C++ and Metal have in common. Names are those
// of beacon-ops.h.

#define BEACON_THREADS 256    // of a threadgroup
#define BEACON_TILE    64     // cells, and probes or witnesses, that a threadgroup multiplies
#define BEACON_SLICE   32     // numbers of a head that it has in its memory at a time

#define BEACON_MOVE_WORDS 16  // of a row that a threadgroup moves

enum beacon_type {
    BEACON_F32,
    BEACON_F16,
    BEACON_BF16,
    BEACON_Q4_0,
    BEACON_Q4_1,
    BEACON_Q5_0,
    BEACON_Q5_1,
    BEACON_Q8_0,
    BEACON_IQ4_NL,
};

struct beacon_rope_args {
    int32_t n_rot;  // 0: nothing is rotated
    int32_t is_neox;
    int32_t n_low;  // turns by single positions, before those by n_low
    float   unscale;
};

struct beacon_score_args {
    int32_t  d, e, h, n, p, w;
    int32_t  type_k, type_v;  // beacon_type
    uint64_t nb_k1, nb_k2, nb_v1, nb_v2;
    int32_t  n_beacon, n_sink, boundary, n_hadamard;
    float    scale, softcap, step;
    int32_t  has_count;
    int32_t  n_tiles;         // of all cells
    int32_t  first, n_units;  // cells whose unit vectors are in memory

    struct beacon_rope_args rope;
};

struct beacon_track_args {
    int32_t d, m, n_rows, n_group;
    int32_t n_q;  // numbers of a row of q

    struct beacon_rope_args rope;
};

struct beacon_move_args {
    uint64_t nb1;
    uint64_t stride;     // of the cells, words
    int32_t  word_size;  // 4, 2 or 1 bytes
    int32_t  n_words;    // of a row
    int32_t  n_keep, first;
};

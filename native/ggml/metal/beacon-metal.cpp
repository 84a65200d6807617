#include "beacon-metal.h"

#include "../beacon-ops.h"
#include "beacon-metal-args.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

static constexpr size_t MAX_SHARED = 32768;    // bytes of threadgroup memory
static constexpr size_t UNITS_SIZE = 8 << 20;  // bytes of unit vectors that are in memory at a time

static int type_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
            return BEACON_F32;
        case GGML_TYPE_F16:
            return BEACON_F16;
        case GGML_TYPE_BF16:
            return BEACON_BF16;
        case GGML_TYPE_Q4_0:
            return BEACON_Q4_0;
        case GGML_TYPE_Q4_1:
            return BEACON_Q4_1;
        case GGML_TYPE_Q5_0:
            return BEACON_Q5_0;
        case GGML_TYPE_Q5_1:
            return BEACON_Q5_1;
        case GGML_TYPE_Q8_0:
            return BEACON_Q8_0;
        case GGML_TYPE_IQ4_NL:
            return BEACON_IQ4_NL;
        default:
            return -1;
    }
}

// whether the kernels can read a cache, 4 numbers at a time
static bool is_readable(const ggml_tensor * t) {
    const size_t size  = ggml_type_size(t->type);
    const size_t align = ggml_is_quantized(t->type) ? 2 : 4 * size;
    return type_of(t->type) >= 0 && t->nb[0] == size && t->ne[0] % 4 == 0 && t->nb[1] % align == 0 &&
           t->nb[2] % align == 0;
}

static ggml_metal_buffer_id buffer_of(const ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return ggml_metal_buffer_get_id((ggml_metal_buffer_t) buffer->context, t);
}

static ggml_metal_buffer_id behind(ggml_metal_buffer_id buffer, size_t bytes) {
    buffer.offs += bytes;
    return buffer;
}

static beacon_rope_args rope_args(const ggml_beacon_rope & rope) {
    return { rope.pairs == GGML_BEACON_PAIRS_NONE ? 0 : rope.n_rot, rope.pairs == GGML_BEACON_PAIRS_NEOX,
             1 << GGML_BEACON_TURN_BITS, rope.unscale };
}

static int tiles(int64_t n) {
    return (n + BEACON_TILE - 1) / BEACON_TILE;
}

namespace {

struct grid {
    int x, y, z;
};

// starts kernels
struct starter {
    ggml_metal_library_t lib;
    ggml_metal_encoder_t enc;

    template <typename Args>
    void operator()(const char *                                name,
                    Args &                                      args,
                    std::initializer_list<ggml_metal_buffer_id> buffers,
                    size_t                                      shared,
                    grid                                        groups,
                    int                                         n_threads = BEACON_THREADS) const {
        auto pipeline = ggml_metal_library_get_pipeline(lib, name);
        if (!pipeline.pipeline) {
            pipeline = ggml_metal_library_compile_pipeline(lib, name, name, nullptr);
        }
        ggml_metal_encoder_set_pipeline(enc, pipeline);
        ggml_metal_encoder_set_bytes(enc, &args, sizeof(args), 0);
        int i = 1;
        for (const auto & buffer : buffers) {
            ggml_metal_encoder_set_buffer(enc, buffer, i++);
        }
        if (shared > 0) {
            ggml_metal_encoder_set_threadgroup_memory_size(enc, GGML_PAD(shared, 16), 0);
        }
        ggml_metal_encoder_dispatch_threadgroups(enc, groups.x, groups.y, groups.z, n_threads, 1, 1);
    }

    void wait() const { ggml_metal_encoder_memory_barrier(enc); }
};

}  // namespace

//
// score
//

static int n_probes(const ggml_tensor * op) {
    return op->src[2] ? op->src[2]->ne[1] : 0;
}

// cells whose unit vectors are in memory at a time
static int n_units(const ggml_tensor * op) {
    const size_t size = op->src[0]->ne[1] * (op->src[0]->ne[0] + op->src[1]->ne[0]) * sizeof(float);
    const int    n    = tiles(op->src[4]->ne[0]) * BEACON_TILE;
    return op->src[3] ? std::min<int>(n, std::max<int>(1, UNITS_SIZE / size / BEACON_TILE) * BEACON_TILE) : 0;
}

// numbers
static size_t units_size(const ggml_tensor * op) {
    return (size_t) op->src[0]->ne[1] * (op->src[0]->ne[0] + op->src[1]->ne[0]) * n_units(op);
}

static size_t tiles_size(const ggml_tensor * op) {
    return (size_t) op->src[0]->ne[1] * tiles(op->src[4]->ne[0]) * 2 * n_probes(op);
}

size_t ggml_metal_beacon_extra(const ggml_tensor * op) {
    const size_t totals_size = (size_t) op->src[0]->ne[1] * 2 * n_probes(op);
    return (units_size(op) + tiles_size(op) + totals_size) * sizeof(float);
}

static void encode_score(const starter & start, const ggml_tensor * op) {
    const ggml_tensor * k = op->src[0];
    const ggml_tensor * v = op->src[1];

    ggml_beacon_score_params params;
    memcpy(&params, op->op_params, sizeof(params));

    beacon_score_args args = {};

    args.d          = k->ne[0];
    args.e          = v->ne[0];
    args.h          = k->ne[1];
    args.n          = op->src[4]->ne[0];
    args.p          = n_probes(op);
    args.w          = op->src[3] ? op->src[3]->ne[1] : 0;
    args.type_k     = type_of(k->type);
    args.type_v     = type_of(v->type);
    args.nb_k1      = k->nb[1];
    args.nb_k2      = k->nb[2];
    args.nb_v1      = v->nb[1];
    args.nb_v2      = v->nb[2];
    args.n_beacon   = params.n_beacon;
    args.n_sink     = params.n_sink;
    args.boundary   = params.boundary;
    args.n_hadamard = params.n_hadamard;
    args.scale      = params.scale;
    args.softcap    = params.softcap;
    args.step       = GGML_BEACON_STEP;
    args.has_count  = op->src[8] != nullptr;
    args.n_tiles    = tiles(args.n);
    args.n_units    = n_units(op);
    args.rope       = rope_args(params.rope);

    const ggml_metal_buffer_id dst    = buffer_of(op);
    const ggml_metal_buffer_id units  = behind(dst, ggml_nbytes(op));
    const ggml_metal_buffer_id sums   = behind(units, units_size(op) * sizeof(float));
    const ggml_metal_buffer_id totals = behind(sums, tiles_size(op) * sizeof(float));

    ggml_metal_buffer_id src[9];  // one that is missing is not read
    for (int i = 0; i < 9; ++i) {
        src[i] = op->src[i] ? buffer_of(op->src[i]) : dst;
    }
    const auto & [keys, values, probes, witnesses, cells, meta, pos, turns, count] = src;

    const size_t shared = 2 * BEACON_SLICE * BEACON_TILE * sizeof(float);
    if (args.p > 0) {
        start("kernel_beacon_score_tiles", args, { keys, probes, cells, meta, sums }, shared,
              { args.n_tiles, tiles(args.p), args.h });
        start.wait();
        start("kernel_beacon_score_probes", args, { sums, count, totals }, 0,
              { (args.p + BEACON_THREADS - 1) / BEACON_THREADS, args.h, 1 });
        start.wait();
    }
    start("kernel_beacon_score_cells", args, { keys, probes, cells, meta, totals, dst }, shared,
          { args.n_tiles, args.h, 1 });

    const int n_at_once = args.w > 0 ? args.n_units : args.n;
    for (args.first = 0; args.first < args.n; args.first += n_at_once) {
        const int n = std::min(n_at_once, args.n - args.first);
        if (args.w > 0) {
            start("kernel_beacon_score_units", args, { keys, values, cells, pos, turns, units },
                  std::max(args.d, args.e) * sizeof(float), { n, args.h, 2 }, 32);
            start.wait();
        }
        start("kernel_beacon_score_likeness", args, { units, witnesses, meta, dst }, shared, { tiles(n), args.h, 1 });
        start.wait();  // before the next units
    }
}

//
// track
//

static size_t track_shared(const ggml_tensor * op) {
    const size_t d         = op->ne[0];
    const size_t n_queries = op->src[4]->ne[0] * (op->src[3]->ne[0] / d / op->ne[2]);
    return (BEACON_THREADS / 32 * d + op->ne[1] + 2 * n_queries) * sizeof(float);
}

static void encode_track(const starter & start, const ggml_tensor * op) {
    ggml_beacon_rope rope;
    memcpy(&rope, op->op_params, sizeof(rope));

    const int d = op->ne[0];
    const int h = op->ne[2];

    const ggml_tensor * q = op->src[3];

    beacon_track_args args = {};

    args.d       = d;
    args.m       = op->ne[1];
    args.n_rows  = op->src[4]->ne[0];
    args.n_group = q->ne[0] / d / h;
    args.n_q     = q->ne[0];
    args.rope    = rope_args(rope);

    start("kernel_beacon_track", args,
          { buffer_of(op), buffer_of(op->src[1]), buffer_of(op->src[2]), buffer_of(q), buffer_of(op->src[4]),
            buffer_of(op->src[5] ? op->src[5] : op) },
          track_shared(op), { h, 1, 1 });
}

//
// move
//

static void encode_move(const starter & start, const ggml_tensor * op) {
    const ggml_tensor * index    = op->src[0];
    const int           n_caches = ggml_get_op_params_i32(op, 0);

    for (int c = 0; c < n_caches; ++c) {
        const ggml_tensor *        t      = op->src[1 + c];
        const ggml_metal_buffer_id buffer = buffer_of(t);
        const size_t               size   = ggml_row_size(t->type, t->ne[0]);
        const size_t               all    = size | t->nb[1] | t->nb[2] | buffer.offs;
        const int                  word   = all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 1;

        beacon_move_args args = {};

        args.nb1       = t->nb[1];
        args.stride    = t->nb[2] / word;
        args.word_size = word;
        args.n_words   = size / word;
        args.n_keep    = index->ne[0];
        args.first     = ggml_get_op_params_i32(op, 1);

        const int64_t layer = c * index->ne[2] / n_caches;
        start("kernel_beacon_move", args, { behind(buffer_of(index), layer * index->nb[2]), buffer }, 0,
              { (args.n_words + BEACON_MOVE_WORDS - 1) / BEACON_MOVE_WORDS, (int) index->ne[1], 1 });
    }
}

bool ggml_metal_beacon_supported(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_BEACON_TRACK:
            return op->ne[0] % 2 == 0 && track_shared(op) <= MAX_SHARED;
        case GGML_OP_BEACON_SCORE:
            return is_readable(op->src[0]) && is_readable(op->src[1]) &&
                   std::max(op->src[0]->ne[0], op->src[1]->ne[0]) * sizeof(float) <= MAX_SHARED;
        default:
            return op->op == GGML_OP_BEACON_MOVE;
    }
}

void ggml_metal_beacon_encode(ggml_metal_library_t lib, ggml_metal_encoder_t enc, const ggml_tensor * op) {
    const starter start = { lib, enc };
    switch (op->op) {
        case GGML_OP_BEACON_TRACK:
            return encode_track(start, op);
        case GGML_OP_BEACON_SCORE:
            return encode_score(start, op);
        case GGML_OP_BEACON_MOVE:
            return encode_move(start, op);
        default:
            GGML_ABORT("not an operator of a compaction: %s", ggml_op_name(op->op));
    }
}

#include "../emulated.h"

#include "cuda/beacon.cu"

void emulated_cuda(ggml_tensor * dst) {
    GGML_ASSERT(ggml_cuda_beacon_supported(dst));
    ggml_backend_cuda_context ctx;
    switch (dst->op) {
        case GGML_OP_BEACON_TRACK:
            return ggml_cuda_op_beacon_track(ctx, dst);
        case GGML_OP_BEACON_SCORE:
            return ggml_cuda_op_beacon_score(ctx, dst);
        case GGML_OP_BEACON_MOVE:
            return ggml_cuda_op_beacon_move(ctx, dst);
        default:
            GGML_ABORT("not an operator of a compaction: %s", ggml_op_name(dst->op));
    }
}

#pragma once

#include "common.cuh"

// The operators of beacon-ops.h.

bool ggml_cuda_beacon_supported(const ggml_tensor * op);

void ggml_cuda_op_beacon_track(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void ggml_cuda_op_beacon_score(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void ggml_cuda_op_beacon_move(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

#pragma once

#include "ggml.h"

#include <stddef.h>

// What ggml-cpu.c calls for the operators of beacon-ops.h.

struct ggml_compute_params;

#ifdef __cplusplus
extern "C" {
#endif

// bytes of the work buffer that n_tasks threads share; of a move 0
size_t ggml_beacon_work_size(const struct ggml_tensor * dst, int n_tasks);

void ggml_compute_forward_beacon(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif

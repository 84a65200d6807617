#pragma once

#include "../beacon-ops.h"

#include <cstddef>

// The kernels of the CPU and what they share.

struct ggml_compute_params;

size_t beacon_score_work_size(const ggml_tensor * dst, int n_tasks);
size_t beacon_track_work_size(const ggml_tensor * dst, int n_tasks);

void beacon_track(const ggml_compute_params * params, ggml_tensor * dst);
void beacon_score(const ggml_compute_params * params, ggml_tensor * dst);
void beacon_move(const ggml_compute_params * params, ggml_tensor * dst);

// row (head g, cell) of a cache [d, h, n_cells] as floats
void beacon_read_row(const ggml_tensor * t, int32_t cell, int g, float * dst);

// x as it was before it was rotated to pos; nothing without a rotation
void beacon_undo_rotation(const ggml_beacon_rope & rope, const float * turns, int32_t pos, float * x);

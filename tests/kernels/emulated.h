#pragma once

#include "ggml.h"

// The operator of beacon-ops.h that dst is the result of, computed on the CPU by the kernels of another backend and the
// code that launches them. Its tensors are in host memory.

void emulated_cuda(ggml_tensor * dst);
void emulated_metal(ggml_tensor * dst);

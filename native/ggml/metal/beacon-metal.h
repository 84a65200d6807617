#pragma once

#include "ggml-metal-device.h"

// What ggml-metal calls for the operators of beacon-ops.h.

#ifdef __cplusplus
extern "C" {
#endif

bool ggml_metal_beacon_supported(const struct ggml_tensor * op);

// bytes of memory that a score needs behind its result
size_t ggml_metal_beacon_extra(const struct ggml_tensor * op);

// A track and a move write to their sources, which has to be kept apart from what other operators do.
void ggml_metal_beacon_encode(ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * op);

#ifdef __cplusplus
}
#endif

#pragma once

#include <cstdint>

// What ggml-common.h needs of CUDA's header, see common.cuh.

struct half {
    uint16_t bits;
};

struct alignas(4) half2 {
    half x, y;
};

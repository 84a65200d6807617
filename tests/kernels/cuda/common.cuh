#pragma once

// Stands in for upstream's common.cuh and for CUDA itself, so that a C++ compiler takes beacon.cu as it is: only what is
// used there.

#include "../machine.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ MACHINE_SHARED

#define GGML_COMMON_DECL_CUDA
#define GGML_COMMON_IMPL_CUDA
#include "ggml-common.h"

#define WARP_SIZE 32

//
// types
//

struct alignas(8) float2 {
    float x, y;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

struct alignas(8) int2 {
    int x, y;
};

struct alignas(16) int4 {
    int x, y, z, w;
};

inline float2 make_float2(float x, float y) {
    return { x, y };
}

inline float __half2float(half x) {
    return ggml_fp16_to_fp32(x.bits);
}

inline float __low2float(half2 x) {
    return __half2float(x.x);
}

inline float __high2float(half2 x) {
    return __half2float(x.y);
}

inline float __uint_as_float(uint32_t x) {
    float y;
    memcpy(&y, &x, sizeof(y));
    return y;
}

//
// threads
//

struct dim3 {
    unsigned x, y, z;

    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 gridDim;

// an index that is asked for rather than stored: threads share what is stored
template <unsigned (*get)()> struct index_of {
    operator unsigned() const { return get(); }
};

inline unsigned thread_x() {
    return machine::thread();
}

inline unsigned block_x() {
    return machine::block() % gridDim.x;
}

inline unsigned block_y() {
    return machine::block() / gridDim.x % gridDim.y;
}

inline unsigned block_z() {
    return machine::block() / gridDim.x / gridDim.y;
}

struct thread_index {
    index_of<thread_x> x;
};

struct block_index {
    index_of<block_x> x;
    index_of<block_y> y;
    index_of<block_z> z;
};

inline const thread_index threadIdx;
inline const block_index  blockIdx;

inline void __syncthreads(machine::place at = MACHINE_HERE) {
    machine::barrier(at);
}

template <typename T> T __shfl_xor_sync(unsigned, T x, int mask, int, machine::place at = MACHINE_HERE) {
    return machine::exchange(x, machine::thread() % WARP_SIZE ^ mask, at);
}

template <int width = WARP_SIZE> float warp_reduce_sum(float x, machine::place at = MACHINE_HERE) {
    for (int offset = width / 2; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, offset, width, at);
    }
    return x;
}

template <int width = WARP_SIZE> float warp_reduce_max(float x, machine::place at = MACHINE_HERE) {
    for (int offset = width / 2; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset, width, at));
    }
    return x;
}

//
// the host's side: a launch returns when it is done
//

typedef void * cudaStream_t;

struct ggml_cuda_kernel_launch_params {
    dim3         block_nums;
    dim3         block_dims;
    size_t       shmem;
    cudaStream_t stream;
};

inline void ggml_cuda_pdl_sync() {}

template <typename... Params, typename... Args>
void ggml_cuda_kernel_launch(void (*kernel)(Params...),
                             const ggml_cuda_kernel_launch_params & params,
                             Args &&... args) {
    gridDim = params.block_nums;
    machine::launch(gridDim.x * gridDim.y * gridDim.z, params.block_dims.x, [&](int, int) { kernel(args...); });
}

struct ggml_cuda_pool {};

struct ggml_backend_cuda_context {
    ggml_cuda_pool memory;

    cudaStream_t stream() { return nullptr; }

    ggml_cuda_pool & pool() { return memory; }
};

// its memory is new each time, and NaN
template <typename T> struct ggml_cuda_pool_alloc {
    T * ptr;

    ggml_cuda_pool_alloc(ggml_cuda_pool &, size_t size) : ptr((T *) malloc(size * sizeof(T))) {
        memset((void *) ptr, 0xff, size * sizeof(T));
    }

    ~ggml_cuda_pool_alloc() { free(ptr); }

    ggml_cuda_pool_alloc(const ggml_cuda_pool_alloc &) = delete;

    T * get() { return ptr; }
};

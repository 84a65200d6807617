// The kernels of beacon.metal and the code that starts them, with a stand-in for Metal.

#include "../emulated.h"

#include "../../../native/ggml/metal/beacon-metal.cpp"
#include "../machine.h"

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#undef MAX
#undef MIN

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wattributes"
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-variable"

#include "metal_stdlib"

namespace {
#include "../../../native/ggml/metal/beacon.metal"
}  // namespace

#pragma GCC diagnostic pop

#undef kernel
#undef constant
#undef device
#undef thread
#undef threadgroup
#undef uint32_t

namespace {

struct dispatch;

// a thread of a kernel
using kernel = std::function<void(const dispatch & d, uint3 group, ushort thread)>;

struct dispatch {
    kernel              run;
    std::vector<char>   bytes;    // arguments
    std::vector<char *> buffers;  // from index 1 on
    size_t              shared = 0;
    uint3               grid;
    int                 n_threads = 0;
};

// The arguments of a kernel stand in the order of their indices; then follow threadgroup memory and what a thread has
// of its own.
template <typename T> T argument(const dispatch & d, size_t i, volatile void * shared, uint3 group, ushort thread) {
    if constexpr (std::is_reference_v<T>) {
        return *(std::remove_reference_t<T> *) d.bytes.data();
    } else if constexpr (std::is_same_v<T, ushort>) {
        return thread;
    } else if constexpr (std::is_same_v<T, uint3>) {
        return group;
    } else if constexpr (std::is_volatile_v<std::remove_pointer_t<T>>) {
        return (T) shared;
    } else {
        return (T) d.buffers.at(i - 1);
    }
}

template <typename... T, size_t... I> kernel wrap(void (*f)(T...), std::index_sequence<I...>) {
    return [f](const dispatch & d, uint3 group, ushort thread) {
        volatile void * shared = d.shared > 0 ? machine::shared_memory(d.shared) : nullptr;
        f(argument<T>(d, I, shared, group, thread)...);
    };
}

template <typename... T> kernel wrap(void (*f)(T...)) {
    return wrap(f, std::index_sequence_for<T...>());
}

const std::map<std::string, kernel> kernels = {
    { "kernel_beacon_score_tiles",    wrap(kernel_beacon_score_tiles)    },
    { "kernel_beacon_score_probes",   wrap(kernel_beacon_score_probes)   },
    { "kernel_beacon_score_cells",    wrap(kernel_beacon_score_cells)    },
    { "kernel_beacon_score_units",    wrap(kernel_beacon_score_units)    },
    { "kernel_beacon_score_likeness", wrap(kernel_beacon_score_likeness) },
    { "kernel_beacon_track",          wrap(kernel_beacon_track)          },
    { "kernel_beacon_move",           wrap(kernel_beacon_move)           },
};

}  // namespace

//
// what the code that starts the kernels calls
//

struct ggml_metal_pipeline {
    const kernel * run;
};

struct ggml_metal_encoder {
    dispatch              next;
    std::vector<dispatch> waiting;  // since the last barrier
};

ggml_metal_pipeline_with_params ggml_metal_library_get_pipeline(ggml_metal_library_t, const char *) {
    return {};
}

ggml_metal_pipeline_with_params ggml_metal_library_compile_pipeline(ggml_metal_library_t,
                                                                    const char * base,
                                                                    const char *,
                                                                    ggml_metal_cv_t) {
    static std::map<std::string, ggml_metal_pipeline> pipelines;

    pipelines[base] = { &kernels.at(base) };

    ggml_metal_pipeline_with_params result = {};
    result.pipeline                        = &pipelines[base];
    return result;
}

void ggml_metal_encoder_set_pipeline(ggml_metal_encoder_t enc, ggml_metal_pipeline_with_params pipeline) {
    enc->next     = {};
    enc->next.run = *pipeline.pipeline->run;
}

void ggml_metal_encoder_set_bytes(ggml_metal_encoder_t enc, void * data, size_t size, int) {
    enc->next.bytes.assign((char *) data, (char *) data + size);
}

void ggml_metal_encoder_set_buffer(ggml_metal_encoder_t enc, ggml_metal_buffer_id buffer, int idx) {
    enc->next.buffers.resize(idx);
    enc->next.buffers[idx - 1] = (char *) buffer.metal + buffer.offs;
}

void ggml_metal_encoder_set_threadgroup_memory_size(ggml_metal_encoder_t enc, size_t size, int) {
    GGML_ASSERT(size % 16 == 0 && size <= 32768);
    enc->next.shared = size;
}

void ggml_metal_encoder_dispatch_threadgroups(ggml_metal_encoder_t enc, int x, int y, int z, int n_threads, int, int) {
    enc->next.grid      = uint3(x, y, z);
    enc->next.n_threads = n_threads;
    enc->waiting.push_back(enc->next);
}

// Which kernels run first that no barrier separates is left open: the last ones do.
void ggml_metal_encoder_memory_barrier(ggml_metal_encoder_t enc) {
    for (; !enc->waiting.empty(); enc->waiting.pop_back()) {
        const dispatch & d = enc->waiting.back();
        const uint       x = d.grid[0];
        const uint       y = d.grid[1];
        machine::launch(x * y * d.grid[2], d.n_threads,
                        [&](int i, int thread) { d.run(d, uint3(i % x, i / x % y, i / x / y), thread); });
    }
}

ggml_metal_buffer_id ggml_metal_buffer_get_id(ggml_metal_buffer_t, const ggml_tensor * t) {
    return { t->data, 0 };
}

void emulated_metal(ggml_tensor * dst) {
    GGML_ASSERT(ggml_metal_beacon_supported(dst));

    ggml_tensor       op = *dst;
    std::vector<char> memory;
    if (dst->op == GGML_OP_BEACON_SCORE) {
        memory.assign(ggml_nbytes(dst) + ggml_metal_beacon_extra(dst), (char) 0xff);  // NaN
        op.data = memory.data();
    }
    ggml_metal_encoder enc;
    ggml_metal_beacon_encode(nullptr, &enc, &op);
    ggml_metal_encoder_memory_barrier(&enc);
    if (!memory.empty()) {
        memcpy(dst->data, op.data, ggml_nbytes(dst));
    }
}

// Computes cases of our ggml operators: cases from standard input, results to standard output, both binary
// (tests/operators.py).
//
//     run DEVICE
//
// cpu: ggml's CPU backend; cuda-emulated, metal-emulated: the sources of those kernels with a stand-in for their
// built-ins, see cuda/ and metal/; else a device of ggml by its name, such as CUDA0.
//
// case:   i32 op (0 track, 1 score, 2 move, 3 copy), stream, threads, n_params; n_params 32-bit words; i32 n_tensors;
//         tensors
// tensor: i32 ggml type, -1: NULL; then i64 ne[4]; the bytes. Of those that a sequence owns a part of, ne[3] is the number of
//         streams, and the operator gets one.
// result: i64 size and bytes of the result of a score, or of the tensors that were changed, whole; i64 microseconds

#include "beacon-ops.h"
#include "emulated.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

template <typename T> static bool read(T * data, size_t n) {
    return fread(data, sizeof(T), n, stdin) == n;
}

static void fail(const char * what) {
    fprintf(stderr, "error: %s\n", what);
    exit(2);
}

template <typename T> static T read_one() {
    T x;
    if (!read(&x, 1)) {
        fail("the input ends within a case");
    }
    return x;
}

// the part of one stream
static ggml_tensor * plane(ggml_context * ctx, ggml_tensor * t, int stream) {
    return t ? ggml_view_3d(ctx, t, t->ne[0], t->ne[1], t->ne[2], t->nb[1], t->nb[2], stream * t->nb[3]) : nullptr;
}

static ggml_tensor * build(ggml_context *               ctx,
                           int                          op,
                           int                          stream,
                           const std::vector<int32_t> & words,
                           std::vector<ggml_tensor *> & t,
                           std::vector<ggml_tensor *> & changed) {
    const auto own = [&](size_t i) {
        return plane(ctx, t.at(i), stream);
    };
    switch (op) {
        case 0:
            {
                ggml_beacon_rope rope;
                memcpy(&rope, words.data(), sizeof(rope));
                changed         = { t.at(0), t.at(1), t.at(2) };
                ggml_tensor * q = t.at(3);
                q               = ggml_view_2d(ctx, q, q->ne[0], q->ne[1], q->nb[1], stream * q->nb[3]);
                return ggml_beacon_track(ctx, own(0), own(1), own(2), q, t.at(4), t.at(5), &rope);
            }
        case 1:
            {
                ggml_beacon_score_params params;
                memcpy(&params, words.data(), sizeof(params));
                ggml_tensor * result = ggml_beacon_score(ctx, own(0), own(1), t.at(2), t.at(3), t.at(4), t.at(5),
                                                         t.at(6), t.at(7), t.at(8), &params);
                changed              = { result };
                return result;
            }
        case 2:
            {
                std::vector<ggml_tensor *> caches;
                for (size_t i = 1; i < t.size(); ++i) {
                    changed.push_back(t[i]);
                    caches.push_back(own(i));
                }
                return ggml_beacon_move(ctx, caches.data(), caches.size(), t.at(0), words.at(0));
            }
        case 3:  // ggml's own, for the bandwidth of a device: nothing is given back
            return ggml_cpy(ctx, t.at(0), t.at(1));
        default:
            fail("no such operator");
            return nullptr;
    }
}

int main(int argc, char ** argv) {
    const std::string device = argc == 2 ? argv[1] : "";

    ggml_backend_load_all();
    ggml_backend_ptr backend;
    if (device == "cpu" || device == "cuda-emulated" || device == "metal-emulated") {
        backend.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    } else {
        backend.reset(ggml_backend_init_by_name(device.c_str(), nullptr));
    }
    if (!backend) {
        fail("no such device");
    }

    for (int32_t op; read(&op, 1);) {
        const int stream    = read_one<int32_t>();
        const int n_threads = read_one<int32_t>();

        std::vector<int32_t> words(read_one<int32_t>());
        if (!read(words.data(), words.size())) {
            fail("the input ends within a case");
        }

        ggml_init_params init = { 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ggml_context_ptr ctx{ ggml_init(init) };

        std::vector<ggml_tensor *>        tensors;
        std::vector<std::vector<uint8_t>> data;
        for (int n = read_one<int32_t>(); n > 0; --n) {
            const auto type = read_one<int32_t>();
            tensors.push_back(nullptr);
            data.emplace_back();
            if (type < 0) {
                continue;
            }
            int64_t ne[4];
            if (!read(ne, 4)) {
                fail("the input ends within a tensor");
            }
            tensors.back() = ggml_new_tensor(ctx.get(), (ggml_type) type, 4, ne);
            data.back().resize(ggml_nbytes(tensors.back()));
            if (!read(data.back().data(), data.back().size())) {
                fail("the input ends within a tensor");
            }
        }

        std::vector<ggml_tensor *> changed;
        ggml_tensor *              result = build(ctx.get(), op, stream, words, tensors, changed);
        ggml_backend_buffer_ptr    buffer{ ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()) };
        for (size_t i = 0; i < tensors.size(); ++i) {
            if (tensors[i]) {
                ggml_backend_tensor_set(tensors[i], data[i].data(), 0, data[i].size());
            }
        }

        const int64_t t0 = ggml_time_us();
        if (device == "cuda-emulated") {
            emulated_cuda(result);
        } else if (device == "metal-emulated") {
            emulated_metal(result);
        } else {
            if (!ggml_backend_supports_op(backend.get(), result)) {
                fail("the device does not support the operator");
            }
            if (ggml_backend_is_cpu(backend.get())) {
                ggml_backend_cpu_set_n_threads(backend.get(), n_threads);
            }
            ggml_cgraph * gf = ggml_new_graph(ctx.get());
            ggml_build_forward_expand(gf, result);
            if (ggml_backend_graph_compute(backend.get(), gf) != GGML_STATUS_SUCCESS) {
                fail("the graph failed");
            }
        }
        const int64_t us = ggml_time_us() - t0;

        for (const ggml_tensor * t : changed) {
            const int64_t        size = ggml_nbytes(t);
            std::vector<uint8_t> bytes(size);
            ggml_backend_tensor_get(t, bytes.data(), 0, size);
            fwrite(&size, sizeof(size), 1, stdout);
            fwrite(bytes.data(), 1, size, stdout);
        }
        fwrite(&us, sizeof(us), 1, stdout);
        fflush(stdout);
    }
    return 0;
}

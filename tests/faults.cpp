// Preloaded before ggml: makes its n-th next call of a function fail, as a full device or a lost one would; or makes an
// operator compute something else, as one with a fault would.

#include "beacon-ops.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

static const char * g_name = "";
static int          g_left = 0;  // calls until the one that fails; below 0: none

extern "C" void fault_arm(const char * name, int n) {
    g_name = name;
    g_left = n;
}

// how many calls of the function would have been needed to fail
extern "C" int fault_left() {
    return g_left;
}

static bool fails(const char * name) {
    return strcmp(name, g_name) == 0 && g_left >= 0 && g_left-- == 0;
}

// RTLD_NEXT does not see libraries that were opened in a scope of their own
template <typename F> static F * next(const char * name) {
    static void * ggml = dlopen(getenv("FAULTS_GGML"), RTLD_LAZY | RTLD_NOLOAD);
    return (F *) dlsym(ggml, name);
}

extern "C" {

ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    return fails("alloc_buffer") ? nullptr : next<decltype(ggml_backend_buft_alloc_buffer)>(__func__)(buft, size);
}

ggml_backend_buffer_t ggml_backend_alloc_ctx_tensors_from_buft(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    return fails("alloc_tensors") ? nullptr :
                                    next<decltype(ggml_backend_alloc_ctx_tensors_from_buft)>(__func__)(ctx, buft);
}

bool ggml_backend_sched_reserve(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    return !fails("reserve") && next<decltype(ggml_backend_sched_reserve)>(__func__)(sched, graph);
}

bool ggml_backend_sched_alloc_graph(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    return !fails("alloc_graph") && next<decltype(ggml_backend_sched_alloc_graph)>(__func__)(sched, graph);
}

ggml_status ggml_backend_sched_graph_compute_async(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    return fails("compute") ? GGML_STATUS_FAILED :
                              next<decltype(ggml_backend_sched_graph_compute_async)>(__func__)(sched, graph);
}

ggml_tensor * ggml_beacon_score(ggml_context *                   ctx,
                                ggml_tensor *                    k,
                                ggml_tensor *                    v,
                                ggml_tensor *                    probes,
                                ggml_tensor *                    witnesses,
                                ggml_tensor *                    cells,
                                ggml_tensor *                    meta,
                                ggml_tensor *                    pos,
                                ggml_tensor *                    turns,
                                ggml_tensor *                    count,
                                const ggml_beacon_score_params * params) {
    ggml_beacon_score_params other = *params;
    other.scale *= strcmp(g_name, "wrong_score") == 0 ? 1.5f : 1.0f;
    return next<decltype(ggml_beacon_score)>(__func__)(ctx, k, v, probes, witnesses, cells, meta, pos, turns, count,
                                                       &other);
}

ggml_tensor * ggml_beacon_move(ggml_context * ctx, ggml_tensor ** caches, int n, ggml_tensor * index, int first) {
    const int n_moved = strcmp(g_name, "wrong_move") == 0 ? n / 2 : n;  // values stay where they are
    return next<decltype(ggml_beacon_move)>(__func__)(ctx, caches, n_moved, index, first);
}
}

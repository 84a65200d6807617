#pragma once

#include "beacon-api.h"
#include "llama-context.h"

#include <vector>

// A graph on the scheduler of the context, as llama_kv_cache::update computes the K-shift.
struct beacon_graph_run {
    llama_context &    lctx;
    llm_graph_result * res;

    explicit beacon_graph_run(llama_context & lctx) : lctx(lctx), res(lctx.get_gf_res_reserve()) {
        ggml_backend_sched_reset(lctx.get_sched());
        ggml_backend_sched_set_eval_callback(lctx.get_sched(), nullptr, nullptr);
        res->reset();
    }

    // GGML_STATUS_ALLOC_FAILED: nothing was computed
    ggml_status compute(ggml_cgraph * gf, const char * what) {
        ggml_status status = GGML_STATUS_ALLOC_FAILED;
        if (ggml_backend_sched_alloc_graph(lctx.get_sched(), gf)) {
            res->set_inputs(nullptr);

            status = lctx.graph_compute(gf, true);
            ggml_backend_sched_synchronize(lctx.get_sched());
        }
        if (status != GGML_STATUS_SUCCESS) {
            beacon_fail("the %s graph of a compaction failed: %s", what, ggml_status_to_string(status));
        }
        return status;
    }
};

// empty without a tensor
inline std::vector<float> beacon_read_f32(const ggml_tensor * t) {
    std::vector<float> data(t ? ggml_nelements(t) : 0);
    if (t) {
        ggml_backend_tensor_get(t, data.data(), 0, ggml_nbytes(t));
    }
    return data;
}

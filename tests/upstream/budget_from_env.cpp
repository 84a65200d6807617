// Puts upstream's tests into a KV budget without a change to them: BEACONKV_TEST_BUDGET, in cells. Linked into a test,
// the functions here come before libllama's of the same name; without the variable they pass calls on. What
// run_llama_cpp.py reads goes to stderr, for upstream's log may lose its end.

#include "beaconkv.h"
#include "llama-batch.h"
#include "llama.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

static uint32_t budget() {
    static const uint32_t cells = [] {
        const char * value = getenv("BEACONKV_TEST_BUDGET");
        return value ? (uint32_t) strtoul(value, nullptr, 10) : 0;
    }();
    return cells;
}

// libllama's own
template <typename F> static F * original(F *, const char * name) {
    void * symbol = dlsym(RTLD_NEXT, name);
    if (!symbol) {
        fprintf(stderr, "budget_from_env: no %s\n", name);
        abort();
    }
    return reinterpret_cast<F *>(symbol);
}

llama_context * llama_init_from_model(llama_model * model, llama_context_params params) {
    static auto * const init = original(llama_init_from_model, "llama_init_from_model");
    if (budget() == 0) {
        return init(model, params);
    }

    // The tests' contexts have 256 tokens: small numbers, so that there is something to evict.
    beacon_params beacon;
    beacon_params_default(&beacon);
    beacon.budget    = budget();
    beacon.window    = 16;
    beacon.n_recent  = 8;
    beacon.n_probe   = 8;
    beacon.pin_share = 0.0f;  // room for larger batches

    // what a budget declines: sequences in one cache, attention other than flash attention
    params.kv_unified      = false;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_AUTO;

    // a scope around each context, for tests create them in threads, too
    if (beacon_scope_begin(&beacon) != BEACON_OK) {
        fprintf(stderr, "\nbudget_from_env: %s\n", beacon_last_error());
        abort();
    }
    llama_context * ctx = init(model, params);
    beacon_scope_end();

    if (!ctx) {
        fprintf(stderr, "\nbudget_from_env: no context: %s\n", beacon_last_error());
    } else if (!beacon_enabled(ctx)) {
        fprintf(stderr, "\nbudget_from_env: a context without the budget\n");
        abort();
    }
    return ctx;
}

void llama_free(llama_context * ctx) {
    static auto * const free_context = original(llama_free, "llama_free");

    beacon_stats stats;
    if (budget() != 0 && ctx && beacon_get_stats(ctx, -1, &stats) == BEACON_OK) {
        fprintf(stderr, "\nbudget_from_env: compactions: %llu\n", (unsigned long long) stats.n_compact);
    }
    free_context(ctx);
}

// A test puts its prompt into one batch, whatever n_batch is. Let it, and bring the batch in parts.

llama_batch_ext * llama_batch_ext_init(llama_context * ctx) {
    static auto * const init  = original(llama_batch_ext_init, "llama_batch_ext_init");
    llama_batch_ext *   batch = init(ctx);
    if (budget() == 0) {
        return batch;
    }
    auto * large = new llama_batch_ext(llama_n_ctx(ctx), batch->n_embd_inp, batch->n_embd_inp_enc, batch->n_seq_max,
                                       batch->mem, batch->n_vocab, batch->n_pos_per_embd);
    llama_batch_ext_free(batch);
    return large;
}

int32_t llama_process(llama_context * ctx, llama_process_type type, llama_batch_ext * batch) {
    static auto * const process = original(llama_process, "llama_process");

    const auto & tokens  = batch->tokens;
    const size_t n_batch = llama_n_batch(ctx);
    if (budget() == 0 || type != LLAMA_PROCESS_TYPE_DECODE || tokens.size() <= n_batch) {
        return process(ctx, type, batch);
    }

    for (size_t i = 0; i < tokens.size(); i += n_batch) {
        const auto begin = tokens.begin() + i;
        const auto end   = tokens.begin() + std::min(i + n_batch, tokens.size());

        // the next part overwrites the outputs of this one
        if (end != tokens.end() && std::any_of(begin, end, [](const auto & token) { return token.output; })) {
            fprintf(stderr, "budget_from_env: n_batch = %zu is too small for this test's outputs\n", n_batch);
            return -1;
        }
        llama_batch_ext part = *batch;
        part.tokens.assign(begin, end);
        if (const int32_t status = process(ctx, type, &part)) {
            return status;
        }
    }
    return 0;
}

#include "beacon-api.h"

#include "beacon-policy.h"
#include "beaconkv.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-beacon.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

static thread_local std::string   g_last_error;
static thread_local beacon_params g_pending;
static thread_local bool          g_has_pending = false;

const beacon_params * beacon_pending_params() {
    return g_has_pending ? &g_pending : nullptr;
}

static void set_error(const char * fmt, va_list args) {
    char buf[512];
    vsnprintf(buf, sizeof(buf), fmt, args);
    g_last_error = buf;
}

const char * beacon_fail(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    set_error(fmt, args);
    va_end(args);

    LLAMA_LOG_ERROR("beaconkv: %s\n", g_last_error.c_str());

    return g_last_error.c_str();
}

// for the C API: the message goes to the caller, not to the log
static int fail(beacon_status status, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    set_error(fmt, args);
    va_end(args);

    return status;
}

//
// call sites in upstream's files
//

// why this model or context can't live in a budget, or nullptr
static const char * reason_to_decline(const llama_model & model, const llama_context_params & params) {
    const auto & hparams = model.hparams;

    if (hparams.vocab_only) {
        return "only its vocabulary is loaded";
    }
    if (params.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || params.ctx_other) {
        return "a draft context shares another one's cells";
    }
    if (llama_model_has_encoder(&model) || !hparams.causal_attn) {
        return "it is an encoder, which keeps no history";
    }
    if (llm_arch_is_diffusion(model.arch)) {
        return "it is a diffusion model, which keeps no history";
    }
    if (llm_arch_is_recurrent(model.arch)) {
        return "it is recurrent, its memory is bounded already";
    }
    if (hparams.is_mla()) {
        return "its attention is MLA, which has no cache of values";
    }
    if (hparams.use_alibi) {
        return "its attention is ALiBi, which needs the true position of every cell";
    }
    if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        return "its tensors are split across devices (split mode tensor)";
    }
    if (params.n_seq_max > 1 && params.kv_unified) {
        return "several sequences need caches of their own (kv_unified = false)";
    }
    if (params.embeddings) {
        return "embeddings are asked for, which need all tokens";
    }
    if (params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
        return "flash attention is off or not to be had for it";
    }
    return nullptr;
}

bool beacon_init_params(const llama_model & model, llama_context_params & params) {
    if (!g_has_pending) {
        const bool shares_cells = model.arch == LLM_ARCH_GEMMA4_ASSISTANT && params.ctx_other;
        if (shares_cells && beacon_enabled(params.ctx_other)) {
            beacon_fail("%s can't draft for a context in a KV budget: it reads that one's cells",
                        model.arch_name().c_str());
            return false;
        }
        return true;
    }

    if (const char * reason = reason_to_decline(model, params)) {
        beacon_fail("%s can't live in a KV budget: %s", model.arch_name().c_str(), reason);
        return false;
    }

    // as the constructor of llama_context computes n_ctx_seq
    const uint32_t n_ctx     = params.n_ctx == 0 ? model.hparams.n_ctx_train : params.n_ctx;
    const uint32_t n_ctx_seq = GGML_PAD(GGML_PAD(n_ctx, 256) / std::max(1u, params.n_seq_max), 256);
    if (beacon_params_check(&g_pending, n_ctx_seq) != BEACON_OK) {
        LLAMA_LOG_ERROR("beaconkv: %s\n", g_last_error.c_str());
        return false;
    }

    const uint32_t n_batch_max = beacon_n_batch_max(g_pending);
    if (params.n_batch > n_batch_max) {
        LLAMA_LOG_INFO("beaconkv: n_batch = %u, clamped to %u for a KV budget of %u cells\n", params.n_batch,
                       n_batch_max, g_pending.budget);
    }
    params.n_batch  = std::min(params.n_batch, n_batch_max);
    params.n_ubatch = std::min(params.n_ubatch, n_batch_max);

    params.kv_unified = false;  // each sequence in a stream of its own

    // upstream checks that the layers' backend has it, beacon_reserve refuses if not
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_AUTO;
    return true;
}

void beacon_reserve(llama_context & lctx) {
    if (auto * beacon = llama_kv_beacon::find(lctx.get_memory())) {
        beacon->reserve(lctx);
    } else if (g_has_pending) {
        throw std::runtime_error(
            beacon_fail("%s can't live in a KV budget: its memory has caches that mirror each other's cells",
                        lctx.get_model().arch_name().c_str()));
    }
}

int beacon_make_room(llama_context & lctx, const llama_batch_allocr & balloc) {
    auto * beacon = llama_kv_beacon::find(lctx.get_memory());
    if (!beacon) {
        return 0;
    }

    const uint32_t n_seq = lctx.get_cparams().n_seq_max;

    // tokens of each sequence; at most that many where image patches share a position
    const bool            is_exact = lctx.get_model().hparams.n_pos_per_embd() == 1;
    std::vector<uint32_t> n_new(n_seq, 0);
    for (uint32_t s = 0; s < n_seq; ++s) {
        if (balloc.seq_pos_min(s) < 0) {
            continue;
        }
        if (balloc.seq_pos_max(s) >= (llama_pos) lctx.n_ctx_seq()) {
            beacon_fail("position %d of sequence %u is past the logical context of %u tokens", balloc.seq_pos_max(s), s,
                        lctx.n_ctx_seq());
            return 1;
        }
        n_new[s] = is_exact ? balloc.seq_pos_max(s) - balloc.seq_pos_min(s) + 1 : balloc.get_n_tokens();
        beacon->begin_batch(s, n_new[s], balloc.seq_pos_min(s));
    }

    const auto fits = [&](uint32_t s) {
        return beacon->used(s) + n_new[s] <= beacon->kv_size();
    };

    for (uint32_t s = 0; s < n_seq; ++s) {
        if (!fits(s)) {
            beacon->request(s, n_new[s]);
        }
    }
    if (!beacon->is_requested()) {
        return 0;
    }

    lctx.memory_update(true);
    beacon->cancel();

    return beacon->get_failure();
}

//
// beaconkv.h
//

#ifndef BEACONKV_VERSION
#    define BEACONKV_VERSION "0.0.0"
#endif

const char * beacon_version(void) {
    return BEACONKV_VERSION;
}

const char * beacon_last_error(void) {
    return g_last_error.c_str();
}

void beacon_clear_error(void) {
    g_last_error.clear();
}

const char * beacon_policy_name(int32_t policy) {
    const auto * impl = beacon_policy_get(policy);
    return impl ? impl->name : nullptr;
}

void beacon_params_default(beacon_params * params) {
    if (!params) {
        return;
    }
    *params = {
        /*.budget       =*/0,
        /*.window       =*/128,
        /*.n_sink       =*/4,
        /*.n_recent     =*/32,
        /*.n_beacon     =*/16,
        /*.n_probe      =*/16,
        /*.beacon_share =*/0.5f,
        /*.restated     =*/1.0f,
        /*.quota        =*/0.5f,
        /*.policy       =*/BEACON_POLICY_BEACON,
        /*.pin_share    =*/0.25f,
    };
}

int beacon_params_check(const beacon_params * params, uint32_t n_ctx_seq) {
    if (!params) {
        return fail(BEACON_INVALID, "params is NULL");
    }

    const struct {
        const char * name;
        uint32_t     value;
        uint32_t     min;
        uint32_t     max;
    } counts[] = {
        { "budget",   params->budget,   1, INT32_MAX / 2 },
        { "window",   params->window,   2, 1u << 16      },
        { "n_sink",   params->n_sink,   0, 1u << 16      },
        { "n_recent", params->n_recent, 1, 1u << 16      },
        { "n_beacon", params->n_beacon, 1, 256           },
        { "n_probe",  params->n_probe,  1, 1024          },
    };

    for (const auto & c : counts) {
        if (c.value < c.min || c.value > c.max) {
            return fail(BEACON_INVALID, "%s = %u is not in [%u, %u]", c.name, c.value, c.min, c.max);
        }
    }

    if (!beacon_policy_get(params->policy)) {
        return fail(BEACON_INVALID, "policy = %d is none", params->policy);
    }

    const struct {
        const char * name;
        float        value;
        float        max;
    } shares[] = {
        { "beacon_share", params->beacon_share, 1.0f },
        { "restated",     params->restated,     1.0f },
        { "quota",        params->quota,        1.0f },
        { "pin_share",    params->pin_share,    0.5f },
    };

    for (const auto & s : shares) {
        if (!(s.value >= 0.0f && s.value <= s.max)) {  // NaN too
            return fail(BEACON_INVALID, "%s = %g is not in [0, %g]", s.name, s.value, s.max);
        }
    }

    if (params->n_probe > params->window / 2) {
        return fail(BEACON_INVALID, "n_probe = %u is more than half of window = %u", params->n_probe, params->window);
    }
    if (beacon_n_batch_max(*params) < 1) {
        return fail(BEACON_INVALID,
                    "budget = %u leaves no cell for a batch: sinks (%u) or pinned prompt (%g of it), %u recent and a "
                    "window of %u "
                    "come first",
                    params->budget, params->n_sink, params->pin_share, params->n_recent, params->window);
    }
    if (n_ctx_seq > 0 && params->budget > n_ctx_seq) {
        return fail(BEACON_INVALID, "budget = %u is more than the context of %u tokens per sequence", params->budget,
                    n_ctx_seq);
    }
    return BEACON_OK;
}

uint32_t beacon_max_batch(const beacon_params * params) {
    return params ? beacon_n_batch_max(*params) : 0;
}

int beacon_scope_begin(const beacon_params * params) {
    if (g_has_pending) {
        return fail(BEACON_BAD_STATE, "this thread has a scope open already");
    }
    if (const int status = beacon_params_check(params, 0)) {
        return status;
    }
    g_pending     = *params;
    g_has_pending = true;
    g_last_error.clear();
    return BEACON_OK;
}

void beacon_scope_end(void) {
    g_has_pending = false;
}

static llama_kv_beacon * get_beacon(const llama_context * ctx) {
    return ctx ? llama_kv_beacon::find(ctx->get_memory()) : nullptr;
}

// the beacon of ctx if it has sequence seq_id, else nullptr and the reason
static llama_kv_beacon * get_beacon(const llama_context * ctx, int32_t seq_id, int & status) {
    auto * beacon = get_beacon(ctx);
    if (!beacon) {
        status = fail(BEACON_BAD_STATE, ctx ? "the context has no KV budget" : "ctx is NULL");
        return nullptr;
    }
    if (!beacon->has_seq(seq_id)) {
        status = fail(BEACON_INVALID, "sequence %d is not in [0, %u)", seq_id, ctx->n_seq_max());
        return nullptr;
    }
    status = BEACON_OK;
    return beacon;
}

// *n: in, capacity; out, count
template <typename T, typename S> static int copy_out(const std::vector<S> & src, T * dst, size_t * n) {
    if (!n) {
        return fail(BEACON_INVALID, "n is NULL");
    }
    const size_t capacity = *n;

    *n = src.size();
    if (capacity < src.size() || (!dst && !src.empty())) {
        return fail(BEACON_BUFFER_TOO_SMALL, "room for %zu elements, %zu are needed", capacity, src.size());
    }
    std::copy(src.begin(), src.end(), dst);
    return BEACON_OK;
}

bool beacon_enabled(const llama_context * ctx) {
    return get_beacon(ctx) != nullptr;
}

int beacon_get_params(const llama_context * ctx, beacon_params * params) {
    int    status;
    auto * beacon = get_beacon(ctx, 0, status);
    if (!params) {
        return fail(BEACON_INVALID, "params is NULL");
    }
    if (beacon) {
        *params = beacon->get_params();
    }
    return status;
}

int beacon_get_stats(const llama_context * ctx, int32_t seq_id, beacon_stats * stats) {
    if (!ctx || !stats) {
        return fail(BEACON_INVALID, "%s is NULL", ctx ? "stats" : "ctx");
    }
    if (seq_id < -1 || seq_id >= (int32_t) ctx->n_seq_max()) {
        return fail(BEACON_INVALID, "sequence %d is not in [-1, %u)", seq_id, ctx->n_seq_max());
    }

    *stats           = {};
    stats->n_ctx_seq = ctx->n_ctx_seq();
    stats->n_seq_max = ctx->n_seq_max();

    llama_kv_beacon::get_memory_stats(ctx->get_memory(), *stats, seq_id);
    return BEACON_OK;
}

int beacon_get_layers(const llama_context * ctx, int32_t * il, size_t * n) {
    int    status;
    auto * beacon = get_beacon(ctx, 0, status);
    if (!beacon) {
        return status;
    }
    std::vector<int32_t> res;
    for (const auto & layer : beacon->get_layers()) {
        res.push_back(layer.il);
    }
    return copy_out(res, il, n);
}

uint32_t beacon_n_head_kv(const llama_context * ctx, int32_t il) {
    auto *        beacon = get_beacon(ctx);
    const int32_t i      = beacon ? beacon->find_layer(il) : -1;

    return i < 0 ? 0 : beacon->get_layers()[i].n_head_kv;
}

int beacon_get_positions(const llama_context * ctx,
                         int32_t               seq_id,
                         int32_t               il,
                         int32_t               head,
                         int32_t *             pos,
                         size_t *              n) {
    int    status;
    auto * beacon = get_beacon(ctx, seq_id, status);
    if (!beacon) {
        return status;
    }
    const int32_t i = beacon->find_layer(il);
    if (i < 0) {
        return fail(BEACON_INVALID, "layer %d does not live in the KV budget", il);
    }
    if (head < 0 || head >= (int32_t) beacon->get_layers()[i].n_head_kv) {
        return fail(BEACON_INVALID, "KV head %d is not in [0, %u)", head, beacon->get_layers()[i].n_head_kv);
    }
    std::vector<int32_t> res;
    beacon->get_positions(seq_id, i, head, res);
    return copy_out(res, pos, n);
}

int beacon_pin(llama_context * ctx, int32_t seq_id, uint32_t n) {
    int    status;
    auto * beacon = get_beacon(ctx, seq_id, status);
    if (!beacon) {
        return status;
    }
    return beacon->pin(seq_id, n) ? BEACON_OK : BEACON_BAD_STATE;
}

int32_t beacon_boundary(const llama_context * ctx, int32_t seq_id) {
    int    status;
    auto * beacon = get_beacon(ctx, seq_id, status);

    return beacon ? beacon->boundary(seq_id) : -1;
}

bool beacon_can_seq_rm(const llama_context * ctx, int32_t seq_id, int32_t p0, int32_t p1) {
    return ctx && llama_kv_beacon::mem_can_seq_rm(ctx->get_memory(), seq_id, p0, p1);
}

bool beacon_is_raised(void * flag) {
    static_assert(sizeof(std::atomic<bool>) == sizeof(bool));
    return flag && static_cast<std::atomic<bool> *>(flag)->load(std::memory_order_relaxed);
}

int beacon_set_trace(llama_context * ctx, bool on) {
    int    status;
    auto * beacon = get_beacon(ctx, 0, status);
    if (beacon) {
        beacon->set_trace(on);
    }
    return status;
}

int beacon_get_trace(const llama_context * ctx, int32_t il, const char * name, void * dst, size_t * n) {
    int    status;
    auto * beacon = get_beacon(ctx, 0, status);
    if (!beacon) {
        return status;
    }
    const auto * data = name ? beacon->get_trace(il, name) : nullptr;
    if (!data) {
        return fail(BEACON_INVALID, "no trace of '%s' for layer %d", name ? name : "NULL", il);
    }
    return copy_out(*data, (uint8_t *) dst, n);
}

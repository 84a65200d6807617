#pragma once

#include "llama.h"

#include <cstdint>

struct beacon_params;
struct llama_context;
class llama_batch_allocr;

// What upstream's files call besides llama_kv_beacon.

// parameters that beacon_scope_begin left for the contexts of this thread, or nullptr
const beacon_params * beacon_pending_params();

// Keeps the message for beacon_last_error(), logs it and returns it.
#ifdef __GNUC__
__attribute__((format(printf, 1, 2)))
#endif
const char * beacon_fail(const char * fmt, ...);

// llama_init_from_model: without a pending budget nothing. Else fits the parameters of the context to it (batch size,
// flash attention) or declines, by name and reason, a model or context that can't live in one: false.
bool beacon_init_params(const llama_model & model, llama_context_params & params);

// llama_context::sched_reserve: the graphs of a compaction. Throws.
void beacon_reserve(llama_context & lctx);

// llama_context::decode, before the batch is placed: compacts the sequences that would not fit.
// 0, or what decode shall return.
int beacon_make_room(llama_context & lctx, const llama_batch_allocr & balloc);

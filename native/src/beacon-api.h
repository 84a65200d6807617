#pragma once

#include "llama.h"

#include <cstdint>

struct beacon_params;
struct llama_context;
class llama_batch_allocr;
class llama_io_read_i;
class llama_io_write_i;

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

// llama_context's saved states, of one sequence or of all (seq_id -1): as the memory module writes and reads them, and
// under a budget in an envelope that tells what was saved and whether it is whole. Throw; a failed read changes nothing.
void beacon_state_write(llama_context & lctx, llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags);
void beacon_state_read(llama_context & lctx, llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags);

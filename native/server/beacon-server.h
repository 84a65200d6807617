#pragma once

#include "beaconkv.h"
#include "common.h"
#include "json.h"
#include "llama.h"

#include <mutex>
#include <string>
#include <vector>

using json = common_json;

// A KV budget in llama-server: what server-context.cpp calls.

// common_init_from_params under the budget of params: the model's context lives in it, those of draft models that come
// later don't. Without a budget it is the same. Null, and a line in the log, where the settings can't be.
common_init_result_ptr beacon_init_from_params(common_params & params);

// A prompt shares its first tokens, up to position pos, with what sequence seq_id holds. Can the cache be cut there? A
// bounded one can't where that was compacted.
bool beacon_can_cut(const llama_context * ctx, llama_seq_id seq_id, llama_pos pos);

// The last position up to pos where the cache can be cut without a checkpoint: the end of the pinned front, or 0.
llama_pos beacon_pinned_cut(const llama_context * ctx, llama_seq_id seq_id, llama_pos pos);

// Tokens that a draft may have, so that those of all slots fit a batch: a small budget has small ones.
int32_t beacon_draft_max(const llama_context * ctx);

// Why a state was refused, after what upstream says; beacon_clear_error comes before the state is read.
std::string beacon_explain(const char * message);

// What the slots hold. Written by the thread that decodes, between two batches, and read by any.
class beacon_board {
  public:
    void update(const llama_context * ctx);

    // of one slot; n_seq_max is 0 before the first update. Compactions, and the time that they took on the server, are
    // counted from where nothing of the slot's conversation was evicted.
    beacon_stats slot(int id) const;

    // settings and slots, for /props
    json props() const;

    // gauges and counters in Prometheus' text format, for /metrics
    std::string metrics() const;

  private:
    beacon_stats conversation(size_t i) const;

    mutable std::mutex mutex;

    beacon_params             params = {};
    std::vector<beacon_stats> slots;
    std::vector<beacon_stats> begins;  // of the conversations in them

    // summed up, also where a slot goes back to a state of before
    uint64_t n_compact = 0;
    uint64_t n_evicted = 0;
};

// for /slots: tokens, cells and bytes of one slot
json beacon_to_json(const beacon_stats & stats);

// the same for timings, where all values are numbers: with "beaconkv_" before their names
void beacon_add_timings(json & timings, const beacon_stats & stats);

// an error as clients of OpenAI know it: the code of a prompt that is too long is a name
json beacon_openai_error(json error);

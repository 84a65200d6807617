#include "beacon-server.h"

#include "log.h"

#include <algorithm>
#include <limits>

// a checkpoint holds all cells of a slot, so upstream's default of 32 would fill the memory that a budget saves
static constexpr int N_CHECKPOINTS = 4;

common_init_result_ptr beacon_init_from_params(common_params & params) {
    if (params.beacon.budget == 0) {
        return common_init_from_params(params);
    }
    if (beacon_scope_begin(&params.beacon) != BEACON_OK) {
        LOG_ERR("beaconkv: %s\n", beacon_last_error());
        return nullptr;
    }
    if (params.n_ctx_checkpoints == common_params().n_ctx_checkpoints) {
        params.n_ctx_checkpoints = N_CHECKPOINTS;
    }
    params.swa_full = false;  // sliding windows have caches of their size

    auto result = common_init_from_params(params);
    beacon_scope_end();
    return result;
}

bool beacon_can_cut(const llama_context * ctx, llama_seq_id seq_id, llama_pos pos) {
    return !beacon_enabled(ctx) || beacon_can_seq_rm(ctx, seq_id, pos, -1);
}

llama_pos beacon_pinned_cut(const llama_context * ctx, llama_seq_id seq_id, llama_pos pos) {
    beacon_stats stats;
    if (!beacon_enabled(ctx) || beacon_get_stats(ctx, seq_id, &stats) != BEACON_OK) {
        return 0;
    }
    pos = std::min<llama_pos>(pos, stats.n_pinned);
    return beacon_can_seq_rm(ctx, seq_id, pos, -1) ? pos : 0;
}

int32_t beacon_draft_max(const llama_context * ctx) {
    if (!beacon_enabled(ctx)) {
        return std::numeric_limits<int32_t>::max();
    }
    return (int32_t) (llama_n_batch(ctx) / llama_n_seq_max(ctx)) - 1;  // and the token before the draft
}

std::string beacon_explain(const char * message) {
    const std::string reason = beacon_last_error();
    return reason.empty() ? message : message + (": " + reason);
}

void beacon_board::update(const llama_context * ctx) {
    const std::lock_guard<std::mutex> lock(mutex);

    beacon_stats stats;
    if (beacon_get_stats(ctx, -1, &stats) != BEACON_OK) {
        return;
    }
    if (beacon_enabled(ctx)) {
        beacon_get_params(ctx, &params);
    }
    slots.resize(stats.n_seq_max, beacon_stats());
    begins.resize(stats.n_seq_max, beacon_stats());
    for (size_t i = 0; i < slots.size(); ++i) {
        if (beacon_get_stats(ctx, i, &stats) != BEACON_OK) {
            continue;
        }
        const auto & old = slots[i];
        n_compact += stats.n_compact - std::min(stats.n_compact, old.n_compact);  // a state of before has fewer
        n_evicted += stats.n_evicted_total - std::min(stats.n_evicted_total, old.n_evicted_total);
        slots[i] = stats;
        if (stats.n_evicted == 0) {
            begins[i] = stats;
        }
    }
}

beacon_stats beacon_board::slot(int id) const {
    const std::lock_guard<std::mutex> lock(mutex);
    return (size_t) id < slots.size() ? conversation(id) : beacon_stats();
}

beacon_stats beacon_board::conversation(size_t i) const {
    beacon_stats stats = slots[i];
    stats.n_compact -= std::min(stats.n_compact, begins[i].n_compact);
    stats.us_compact -= std::min(stats.us_compact, begins[i].us_compact);
    return stats;
}

// bytes are of the context, and every slot has an equal part of them
static uint64_t bytes_held(const beacon_stats & stats) {
    return stats.bytes_allocated / std::max(1u, stats.n_seq_max);
}

static uint64_t bytes_full(const beacon_stats & stats) {
    return stats.bytes_full / std::max(1u, stats.n_seq_max);
}

static std::vector<std::pair<const char *, uint64_t>> fields(const beacon_stats & stats) {
    return {
        { "budget",     stats.budget                },
        { "n_ctx",      stats.n_ctx_seq             },
        { "n_logical",  stats.n_logical             },
        { "n_held",     stats.n_held                },
        { "n_evicted",  stats.n_evicted             },
        { "n_pinned",   stats.n_pinned              },
        { "n_compact",  stats.n_compact             },
        { "us_compact", (uint64_t) stats.us_compact },
        { "bytes_held", bytes_held(stats)           },
        { "bytes_full", bytes_full(stats)           },
    };
}

json beacon_to_json(const beacon_stats & stats) {
    json res = json::object();
    for (const auto & [name, value] : fields(stats)) {
        res[name] = value;
    }
    return res;
}

void beacon_add_timings(json & timings, const beacon_stats & stats) {
    if (stats.n_seq_max == 0) {
        return;  // nobody has told yet
    }
    for (const auto & [name, value] : fields(stats)) {
        timings[std::string("beaconkv_") + name] = value;
    }
}

json beacon_board::props() const {
    const std::lock_guard<std::mutex> lock(mutex);

    json per_slot = json::array();
    for (size_t i = 0; i < slots.size(); ++i) {
        per_slot.push_back(beacon_to_json(conversation(i)));
    }
    json res = {
        { "version", beacon_version() },
        { "budget",  params.budget    },
        { "slots",   per_slot         },
    };
    if (params.budget > 0) {
        res["policy"]       = beacon_policy_name(params.policy);
        res["window"]       = params.window;
        res["n_sink"]       = params.n_sink;
        res["n_recent"]     = params.n_recent;
        res["n_beacon"]     = params.n_beacon;
        res["n_probe"]      = params.n_probe;
        res["beacon_share"] = params.beacon_share;
        res["restated"]     = params.restated;
        res["quota"]        = params.quota;
        res["pin_share"]    = params.pin_share;
    }
    return res;
}

std::string beacon_board::metrics() const {
    const std::lock_guard<std::mutex> lock(mutex);

    const beacon_stats any = slots.empty() ? beacon_stats() : slots[0];

    std::string text;

    const auto head = [&](const char * name, const char * type, const char * help) {
        text += string_format("# HELP beaconkv_%s %s\n# TYPE beaconkv_%s %s\n", name, help, name, type);
    };
    const auto one = [&](const char * name, const char * type, const char * help, double value) {
        head(name, type, help);
        text += string_format("beaconkv_%s %.15g\n", name, value);
    };
    const auto per_slot = [&](const char * name, const char * help, uint64_t beacon_stats::* field) {
        head(name, "gauge", help);
        for (size_t i = 0; i < slots.size(); ++i) {
            text += string_format("beaconkv_%s{slot=\"%zu\"} %llu\n", name, i, (unsigned long long) (slots[i].*field));
        }
    };

    one("budget_cells", "gauge", "KV cells per layer and slot, 0: a full cache", any.budget);
    per_slot("logical_tokens", "Tokens that the slot has seen", &beacon_stats::n_logical);
    per_slot("held_cells", "KV cells that the slot holds per layer", &beacon_stats::n_held);
    per_slot("evicted_tokens", "Tokens of the slot that no cell holds", &beacon_stats::n_evicted);
    one("held_bytes", "gauge", "Bytes of the KV cache of all slots, query rows and beacons included",
        any.bytes_allocated);
    one("full_bytes", "gauge", "Bytes that a full cache of all slots would take", any.bytes_full);
    one("compactions_total", "counter", "Compactions since the start", n_compact);
    one("evicted_cells_total", "counter", "KV cells per layer that they evicted", n_evicted);
    one("compaction_seconds_total", "counter", "Time that they took", any.us_compact / 1e6);

    return text;
}

json beacon_openai_error(json error) {
    if (error.contains("type") && error.at("type") == "exceed_context_size_error") {
        error["code"] = "context_length_exceeded";
    }
    return error;
}

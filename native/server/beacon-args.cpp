#include "beacon-args.h"

#include "arg.h"
#include "common.h"

#include <cmath>
#include <stdexcept>
#include <string>

// beacon_params_check has the last word, when the context is made

static uint32_t parse_count(const char * option, int value) {
    if (value < 0) {
        throw std::invalid_argument(string_format("%s must be 0 or more, not %d", option, value));
    }
    return value;
}

static float parse_share(const char * option, const std::string & text) {
    size_t end   = 0;
    float  value = NAN;
    try {
        value = std::stof(text, &end);
    } catch (const std::exception &) {
        end = 0;
    }
    if (end == 0 || end != text.size() || !(value >= 0.0f && value <= 1.0f)) {
        throw std::invalid_argument(string_format("%s must be a number from 0 to 1, not '%s'", option, text.c_str()));
    }
    return value;
}

static std::string policy_names() {
    std::string names;
    for (int32_t i = 0; beacon_policy_name(i); ++i) {
        names += (i > 0 ? ", " : "") + std::string(beacon_policy_name(i));
    }
    return names;
}

static int32_t parse_policy(const std::string & name) {
    for (int32_t i = 0; beacon_policy_name(i); ++i) {
        if (name == beacon_policy_name(i)) {
            return i;
        }
    }
    throw std::invalid_argument("--kv-policy must be one of " + policy_names() + ", not '" + name + "'");
}

void beacon_add_options(const std::function<void(common_arg)> & add_opt) {
    const common_beacon_params defaults;

    const auto add = [&](common_arg arg, const char * env) {
        arg.set_env(env);
        add_opt(arg.set_examples({ LLAMA_EXAMPLE_SERVER }));
    };
    // the handlers are plain functions: the options and their fields are spelled out
#define ADD_COUNT(option, env, field, what)                                                                      \
    add(common_arg({ option }, "N", string_format(what " (default: %u)", defaults.field),                        \
                   [](common_params & params, int value) { params.beacon.field = parse_count(option, value); }), \
        env)
#define ADD_SHARE(option, env, field, what)                                                 \
    add(common_arg({ option }, "F", string_format(what " (default: %.2f)", defaults.field), \
                   [](common_params & params, const std::string & value) {                  \
                       params.beacon.field = parse_share(option, value);                    \
                   }),                                                                      \
        env)

    ADD_COUNT("--kv-budget", "LLAMA_ARG_KV_BUDGET", budget,
              "KV cells per layer that each slot lives in; its context may be longer, what is least wanted is "
              "evicted. 0: a full cache");
    add(common_arg(
            { "--kv-policy" }, "NAME",
            "what a KV budget keeps: " + policy_names() + " (default: " + beacon_policy_name(defaults.policy) + ")",
            [](common_params & params, const std::string & value) { params.beacon.policy = parse_policy(value); }),
        "LLAMA_ARG_KV_POLICY");
    ADD_COUNT("--kv-window", "LLAMA_ARG_KV_WINDOW", window, "tokens between two compactions, and cells that one frees");
    ADD_COUNT("--kv-sinks", "LLAMA_ARG_KV_SINKS", n_sink, "first tokens, never evicted");
    ADD_COUNT("--kv-recent", "LLAMA_ARG_KV_RECENT", n_recent, "newest tokens, never evicted");
    ADD_COUNT("--kv-beacons", "LLAMA_ARG_KV_BEACONS", n_beacon, "beacon queries per layer and KV head");
    ADD_COUNT("--kv-probes", "LLAMA_ARG_KV_PROBES", n_probe, "recent queries per layer that score the cells");
    ADD_SHARE("--kv-beacon-share", "LLAMA_ARG_KV_BEACON_SHARE", beacon_share,
              "share of the beacons in the importance of a cell");
    ADD_SHARE("--kv-restated", "LLAMA_ARG_KV_RESTATED", restated,
              "how much the likeness to a newer cell lowers the importance");
    ADD_SHARE("--kv-quota", "LLAMA_ARG_KV_QUOTA", quota, "share of the cells for what is least restated");
    ADD_SHARE("--kv-pin-share", "LLAMA_ARG_KV_PIN_SHARE", pin_share,
              "a prompt of up to this share of the budget is never evicted; up to 0.5");

#undef ADD_COUNT
#undef ADD_SHARE
}

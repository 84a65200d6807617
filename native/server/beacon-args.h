#pragma once

#include "beaconkv.h"

#include <functional>

struct common_arg;
struct common_params;

// the KV budget in common_params: none by default
struct common_beacon_params : beacon_params {
    common_beacon_params() { beacon_params_default(this); }
};

// --kv-budget and the settings that belong to it
void beacon_add_options(const std::function<void(common_arg)> & add_opt);

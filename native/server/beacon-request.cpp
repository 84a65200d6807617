#include "beacon-request.h"

#include "common.h"
#include "json.h"

#include <limits>
#include <stdexcept>

static constexpr double INF = std::numeric_limits<double>::infinity();

// Numbers of a completion and what they may be. -1 switches off, or draws a seed.
static const struct {
    const char * name;
    double       min;
    double       max;
} NUMBERS[] = {
    { "temperature",       0,  INF },
    { "dynatemp_range",    0,  INF },
    { "dynatemp_exponent", 0,  INF },
    { "top_k",             -1, INF },
    { "top_p",             0,  1   },
    { "min_p",             0,  1   },
    { "typical_p",         0,  1   },
    { "xtc_probability",   0,  1   },
    { "xtc_threshold",     0,  1   },
    { "repeat_penalty",    0,  INF },
    { "mirostat",          0,  2   },
    { "mirostat_tau",      0,  INF },
    { "mirostat_eta",      0,  INF },
    { "seed",              -1, INF },
    { "n_probs",           0,  INF },
    { "top_logprobs",      0,  INF },
    { "id_slot",           -1, INF },
};

enum json_kind {
    STRING = 1,
    ARRAY  = 2,
    OBJECT = 4,
};

// The rest of a completion whose type nobody looks at.
static const struct {
    const char * name;
    int          kinds;
} TYPES[] = {
    { "model",                STRING          },
    { "stop",                 STRING | ARRAY  },
    { "grammar",              STRING          },
    { "samplers",             STRING | ARRAY  },
    { "logit_bias",           OBJECT | ARRAY  },
    { "messages",             ARRAY           },
    { "tools",                ARRAY           },
    { "tool_choice",          STRING | OBJECT },
    { "response_format",      OBJECT          },
    { "stream_options",       OBJECT          },
    { "chat_template_kwargs", OBJECT          },
};

static int kind_of(const common_json & value) {
    return value.is_string() ? STRING : value.is_array() ? ARRAY : value.is_object() ? OBJECT : 0;
}

static std::string kinds_to_string(int kinds) {
    std::string text;
    for (const auto & [kind, name] : { std::make_pair(STRING, "a string"), std::make_pair(ARRAY, "an array"),
                                       std::make_pair(OBJECT, "an object") }) {
        if (kinds & kind) {
            text += (text.empty() ? "" : " or ") + std::string(name);
        }
    }
    return text;
}

static bool ends_with(const std::string & text, const char * end) {
    return string_ends_with(text, end);
}

// Readers of JSON, schemas and grammars call themselves for each level.
static constexpr int MAX_DEPTH = 1000;

// Levels of brackets. Those in JSON's strings are text.
static void check_depth(const char * what, const std::string & text, bool is_json) {
    int  depth     = 0;
    bool is_string = false;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (is_json && c == '"') {
            is_string = !is_string;
        } else if (is_string) {
            i += c == '\\';  // what follows is no end
        } else if (c == '[' || c == '{' || c == '(') {
            if (++depth > MAX_DEPTH) {
                throw std::invalid_argument(string_format("%s is nested more than %d levels deep", what, MAX_DEPTH));
            }
        } else if (c == ']' || c == '}' || c == ')') {
            --depth;
        }
    }
}

void beacon_check_request(const std::string & path, const std::string & body) {
    check_depth("the request", body, true);
    if (!ends_with(path, "/completions") && !ends_with(path, "/completion") && !ends_with(path, "/messages")) {
        return;
    }
    common_json request;
    try {
        request = common_json::parse(body);
    } catch (const std::exception &) {
        return;
    }
    if (!request.is_object()) {
        return;
    }
    const auto given = [&](const char * name) {
        return request.contains(name) && !request.at(name).is_null();
    };
    for (const auto & field : NUMBERS) {
        if (!given(field.name)) {
            continue;
        }
        const auto & value = request.at(field.name);
        if (!value.is_number()) {
            throw std::invalid_argument(
                string_format("'%s' must be a number, not %s", field.name, value.dump().substr(0, 100).c_str()));
        }
        const auto number = value.get<double>();
        if (!(number >= field.min && number <= field.max)) {
            const auto limit = field.max == INF ? string_format("%g or more", field.min) :
                                                  string_format("from %g to %g", field.min, field.max);
            throw std::invalid_argument(string_format("'%s' must be %s, not %g", field.name, limit.c_str(), number));
        }
    }
    for (const auto & field : TYPES) {
        if (given(field.name) && !(kind_of(request.at(field.name)) & field.kinds)) {
            throw std::invalid_argument(string_format("'%s' must be %s, not %s", field.name,
                                                      kinds_to_string(field.kinds).c_str(),
                                                      request.at(field.name).dump().substr(0, 100).c_str()));
        }
    }
    if (given("grammar")) {
        check_depth("'grammar'", request.at("grammar").get<std::string>(), false);
    }
}

bool beacon_is_bad_request(const std::exception & error) {
    const std::string message = error.what();

    return dynamic_cast<const common_json_error *>(&error) || dynamic_cast<const std::out_of_range *>(&error) ||
           string_starts_with(message, "Failed to parse ") || string_starts_with(message, "Unknown reasoning format") ||
           string_starts_with(message, "Cannot use both ");
}

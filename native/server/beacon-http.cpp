#include "beacon-http.h"

#include "common.h"
#include "json.h"

#include <algorithm>
#include <cctype>
#include <filesystem>

std::set<std::string> beacon_page_paths(const common_params & params) {
    std::set<std::string> paths;
    if (params.public_path.empty()) {
        return paths;
    }
    std::error_code error;
    for (const auto & entry : std::filesystem::recursive_directory_iterator(params.public_path, error)) {
        if (entry.is_regular_file(error)) {
            const auto path = entry.path().lexically_relative(params.public_path).generic_string();
            paths.insert(params.api_prefix + "/" + path);
        }
    }
    paths.insert(params.api_prefix + "/");
    return paths;
}

static bool is_number(const std::string & text) {
    return std::all_of(text.begin(), text.end(), [](unsigned char c) { return c >= '0' && c <= '9'; });
}

// Name of "name", "name:port" or "[address]:port", in lower case and without a dot at its end; empty: it is none.
static std::string host_of(const std::string & authority) {
    const size_t bracket = authority[0] == '[' ? authority.find(']') : 0;
    if (bracket == std::string::npos) {
        return "";
    }
    const size_t end  = bracket > 0 ? bracket + 1 : authority.find(':');
    std::string  rest = end < authority.size() ? authority.substr(end) : "";
    if (!rest.empty() && (rest[0] != ':' || !is_number(rest.substr(1)))) {
        return "";
    }
    std::string name = authority.substr(0, end);
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    if (!name.empty() && name.back() == '.') {
        name.pop_back();
    }
    return name;
}

// the same of "scheme://authority"
static std::string host_of_origin(const std::string & origin) {
    for (const std::string scheme : { "http://", "https://" }) {
        if (origin.compare(0, scheme.size(), scheme) == 0) {
            return host_of(origin.substr(scheme.size()));
        }
    }
    return "";  // "null": a sandbox or a file
}

static bool is_ipv4(const std::string & host) {
    return std::all_of(host.begin(), host.end(), [](unsigned char c) { return (c >= '0' && c <= '9') || c == '.'; }) &&
           std::count(host.begin(), host.end(), '.') == 3;
}

static bool is_loopback(const std::string & host) {
    return host == "localhost" || host == "[::1]" || host == "::1" ||
           (is_ipv4(host) && host.compare(0, 4, "127.") == 0);
}

// A name that nobody else can make point here: an address, or one without a domain.
static bool is_own_name(const std::string & host) {
    return is_loopback(host) || is_ipv4(host) || host[0] == '[' || host.find('.') == std::string::npos ||
           string_ends_with(host, ".local");
}

static bool is_allowed(const common_params & params, const httplib::Request & req) {
    const auto host   = req.get_header_value("Host");
    const auto origin = req.get_header_value("Origin");

    const auto origins   = string_split<std::string>(params.cors_origins, ',');
    const auto is_listed = [&](const std::string & name) {
        return !name.empty() && std::any_of(origins.begin(), origins.end(),
                                            [&](const std::string & other) { return host_of_origin(other) == name; });
    };

    const auto & names    = params.hostnames;
    const bool   is_local = std::all_of(names.begin(), names.end(), is_loopback);
    const auto   name     = host_of(host);
    if (!host.empty() && !(is_local ? is_loopback(name) : !name.empty() && is_own_name(name)) && !is_listed(name)) {
        return false;
    }
    if (origin.empty()) {
        return true;  // no web page, or a page of our own that gets its files
    }
    if (std::find(origins.begin(), origins.end(), origin) != origins.end()) {
        return true;
    }
    if (!is_local && (origin == "http://" + host || origin == "https://" + host)) {
        return true;
    }
    return is_loopback(host_of_origin(origin));
}

static void set_error(httplib::Response & res, const common_json & error) {
    common_json body = common_json::object();
    body["error"]    = error;
    res.set_content(body.dump(), "application/json; charset=utf-8");
}

bool beacon_http_allow(const common_params & params, const httplib::Request & req, httplib::Response & res) {
    if (params.cors_origins == "*") {
        return true;
    }
    // nothing of ours is shown or run in somebody else's page
    res.set_header("X-Frame-Options", "DENY");
    res.set_header("X-Content-Type-Options", "nosniff");

    if (is_allowed(params, req)) {
        return true;
    }
    const common_json error = {
        { "message", "this server answers pages from this machine alone; --cors-origins names others" },
        { "type",    "permission_error"                                                               },
        { "code",    403                                                                              },
    };
    res.status = 403;
    set_error(res, error);
    return false;
}

void beacon_http_explain(httplib::Response & res) {
    if (res.status < 400 || !res.body.empty()) {
        return;
    }
    const common_json error = {
        { "message", httplib::status_message(res.status)                         },
        { "type",    res.status < 500 ? "invalid_request_error" : "server_error" },
        { "code",    res.status                                                  },
    };
    set_error(res, error);
}

#include "beacon-http.h"

#include "common.h"
#include "http.h"
#include "json.h"

#include <algorithm>
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

static bool is_loopback(const std::string & host) {
    return host == "localhost" || host == "127.0.0.1" || host == "::1" || host == "[::1]";
}

// name of "name", "name:port", "[::1]:port"
static std::string host_of(const std::string & authority) {
    const auto end = authority.find(':', authority.find(']') == std::string::npos ? 0 : authority.find(']'));
    return authority.substr(0, end);
}

static bool is_allowed(const common_params & params, const httplib::Request & req) {
    const auto host   = req.get_header_value("Host");
    const auto origin = req.get_header_value("Origin");

    // names of other networks can't be known; those of this machine can
    const auto & names    = params.hostnames;
    const bool   is_local = std::all_of(names.begin(), names.end(), is_loopback);
    if (is_local && !host.empty() && !is_loopback(host_of(host))) {
        return false;
    }
    if (origin.empty()) {
        return true;  // no web page, or a page of our own that gets its files
    }
    if (!is_local && (origin == "http://" + host || origin == "https://" + host)) {
        return true;
    }
    try {
        return is_loopback(common_http_parse_url(origin).host);
    } catch (const std::exception &) {
        return false;  // "null": a sandbox or a file
    }
}

bool beacon_http_allow(const common_params & params, const httplib::Request & req, httplib::Response & res) {
    if (params.cors_origins != "localhost") {
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
    res.set_content(
        common_json{
            { "error", error }
    }
            .dump(),
        "application/json; charset=utf-8");
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
    res.set_content(
        common_json{
            { "error", error }
    }
            .dump(),
        "application/json; charset=utf-8");
}

#pragma once

#include <cpp-httplib/httplib.h>

#include <set>
#include <string>

struct common_params;

// Page files that a browser has to get before it can send an API key: what is in params.public_path.
std::set<std::string> beacon_page_paths(const common_params & params);

// Unless --cors-origins is *: refuses what a web page from elsewhere asks for, which upstream runs and only hides the
// answer of, and names that were made to point here (DNS rebinding). Pages from this machine, from the server itself and
// from the listed origins are let in. False: res is the answer.
bool beacon_http_allow(const common_params & params, const httplib::Request & req, httplib::Response & res);

// A body for an error that has none, such as httplib's own 413.
void beacon_http_explain(httplib::Response & res);

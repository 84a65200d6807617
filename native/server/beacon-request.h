#pragma once

#include <exception>
#include <string>

// Throws std::invalid_argument, which names the field and what it may be, where a request has a value that upstream
// would take in silence, or is nested so deep that its readers would run out of stack. What upstream refuses is left to it,
// and so is a body that is no JSON object.
void beacon_check_request(const std::string & path, const std::string & body);

// Is the request to blame? Of what a handler throws before it has a task, upstream answers most with 500.
bool beacon_is_bad_request(const std::exception & error);

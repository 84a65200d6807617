#pragma once

#include <functional>

// A stop that may be asked for in a signal handler, where nothing may be locked: the returned function wakes a thread,
// which runs stop and ends the process 3 seconds later if it is still there. Threads that wait for the rest of an
// answer would keep it for ever.
std::function<void(int)> beacon_shutdown_guard(std::function<void(int)> stop);

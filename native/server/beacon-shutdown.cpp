#include "beacon-shutdown.h"

#include "log.h"

#include <chrono>
#include <cstdlib>
#include <thread>

#ifndef _WIN32
#    include <unistd.h>
#endif

static void stop_process(const std::function<void(int)> & stop, int signal) {
    stop(signal);
    std::this_thread::sleep_for(std::chrono::seconds(3));
    LOG_WRN("beaconkv: answers were being written; ending now\n");
    std::_Exit(0);
}

std::function<void(int)> beacon_shutdown_guard(std::function<void(int)> stop) {
#ifdef _WIN32
    // a console's handler has a thread of its own
    return [stop](int signal) {
        std::thread(stop_process, stop, signal).detach();
    };
#else
    int ends[2];
    if (pipe(ends) != 0) {
        return stop;
    }
    std::thread([stop, from = ends[0]]() {
        int signal = 0;
        if (read(from, &signal, sizeof(signal)) == sizeof(signal)) {
            stop_process(stop, signal);
        }
    }).detach();

    return [to = ends[1]](int signal) {
        if (write(to, &signal, sizeof(signal)) != sizeof(signal)) {
            std::_Exit(1);
        }
    };
#endif
}

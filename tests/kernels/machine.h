#pragma once

// Runs kernels on the CPU. The threads of a block (CUDA) or threadgroup (Metal) are fibers of one thread, which are
// resumed from barrier to barrier in an order that changes, so that an order that a kernel relies on shows. The order is
// the same in every run.
//
// To ThreadSanitizer each of them is a thread of its own. Barriers order those of a block or warp, the end of a launch
// orders all of them before what follows, and nothing orders a block and the next: what TSan reports is a race of the
// kernel.

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#    include <sanitizer/common_interface_defs.h>
#endif

#if defined(__SANITIZE_THREAD__)
#    include <sanitizer/tsan_interface.h>

extern "C" void __tsan_java_init(uintptr_t begin, uintptr_t size);
extern "C" void __tsan_java_alloc(uintptr_t begin, uintptr_t size);
#endif

// no sanitizer looks at what fibers and their scheduler share
#define MACHINE_UNSEEN __attribute__((noinline, no_sanitize("address", "thread")))

// Static memory of a block, of functions that are no templates: GCC ignores the section of a variable in a template. Its
// section is what each block finds as if it were new. AddressSanitizer has red zones only for variables without one.
#if defined(__SANITIZE_ADDRESS__)
#    define MACHINE_SHARED static
#else
#    define MACHINE_SHARED static __attribute__((section("machine_shared")))

extern "C" char __start_machine_shared[] __attribute__((weak));
extern "C" char __stop_machine_shared[] __attribute__((weak));
#endif

namespace machine {

constexpr int    WARP       = 32;
constexpr int    MAX_WARPS  = 32;
constexpr size_t STACK_SIZE = 128 * 1024;

// Sets of threads that blocks have in turn. The blocks of one set are in order to ThreadSanitizer, but it takes long to
// begin a thread.
#if defined(__SANITIZE_THREAD__)
constexpr int N_SETS = 4;
#else
constexpr int N_SETS = 1;
#endif

// a line of the kernel
struct place {
    const char * file;
    int          line;

    bool operator==(const place & other) const { return line == other.line && strcmp(file, other.file) == 0; }
};

#define MACHINE_HERE { __builtin_FILE(), __builtin_LINE() }

enum fiber_state { READY, AT_BARRIER, AT_WARP_BARRIER, DONE };

struct fiber {
    ucontext_t  context;
    void *      jump[5];
    bool        has_jump   = false;
    void *      stack      = nullptr;
    size_t      stack_size = 0;
    void *      fake_stack = nullptr;  // AddressSanitizer's
    void *      identity   = nullptr;  // ThreadSanitizer's
    int         thread     = 0;
    fiber_state state      = READY;
    place       at{ "", 0 };
    unsigned    n_barriers = 0, n_warp_barriers = 0;  // so far
};

// What threads of a block share. Of two things one is for odd barriers and one for even ones: a thread that is ahead
// is at most one barrier ahead.
struct block_memory {
    struct {
        char tag[2];
        alignas(16) unsigned char given[2][WARP][16];
    } warps[MAX_WARPS];

    char                    tag[2], begin;
    std::unique_ptr<char[]> shared;
};

struct state {
    fiber                                 main;
    std::array<fiber, MAX_WARPS * WARP>   sets[N_SETS];
    fiber *                               fibers  = nullptr;  // of the block
    int                                   size    = 0;        // how many there are
    fiber *                               current = nullptr;
    int                                   block   = 0;
    block_memory *                        memory  = nullptr;
    const std::function<void(int, int)> * body    = nullptr;
    char                                  end     = 0;  // of a launch
    std::mt19937                          random;
};

inline state the;

inline void release(void * tag) {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(tag);
#endif
    (void) tag;
}

inline void acquire(void * tag) {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(tag);
#endif
    (void) tag;
}

// swapcontext is a call of the kernel each time; GCC's own jumps are none.
#if defined(__clang__)
MACHINE_UNSEEN inline void switch_stacks(fiber & from, fiber & to) {
    swapcontext(&from.context, &to.context);
}
#else
[[noreturn]] MACHINE_UNSEEN inline void jump(fiber & to) {
    if (to.has_jump) {
        __builtin_longjmp(to.jump, 1);
    }
    setcontext(&to.context);
    abort();
}

MACHINE_UNSEEN inline void switch_stacks(fiber & from, fiber & to) {
    from.has_jump = true;
    if (!__builtin_setjmp(from.jump)) {
        jump(to);
    }
}
#endif

MACHINE_UNSEEN inline void resume(fiber & from, fiber & to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(from.state == DONE ? nullptr : &from.fake_stack, to.stack, to.stack_size);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to.identity, __tsan_switch_to_fiber_no_sync);
#endif
    switch_stacks(from, to);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

MACHINE_UNSEEN inline void run_fiber() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, (const void **) &the.main.stack, &the.main.stack_size);
#endif
    acquire(&the.memory->begin);
    (*the.body)(the.block, the.current->thread);
    the.current->state = DONE;
    release(&the.end);
    resume(*the.current, the.main);
}

MACHINE_UNSEEN inline int block() {
    return the.block;
}

MACHINE_UNSEEN inline int thread() {
    return the.current->thread;
}

MACHINE_UNSEEN inline void wait(fiber_state state, const place & at, char * tag) {
    the.current->state = state;
    the.current->at    = at;
    release(tag);
    resume(*the.current, the.main);
    acquire(tag);
}

// of all threads of the block
MACHINE_UNSEEN inline void barrier(place at = MACHINE_HERE) {
    wait(AT_BARRIER, at, &the.memory->tag[the.current->n_barriers++ % 2]);
}

// of all threads of the warp
MACHINE_UNSEEN inline void warp_barrier(place at = MACHINE_HERE) {
    wait(AT_WARP_BARRIER, at, &the.memory->warps[thread() / WARP].tag[the.current->n_warp_barriers++ % 2]);
}

MACHINE_UNSEEN inline unsigned char (*given())[16] {
    return the.memory->warps[thread() / WARP].given[the.current->n_warp_barriers % 2];
}

// All threads of a warp give one number and get that of a lane.
template <typename T> T exchange(T x, int lane, place at = MACHINE_HERE) {
    static_assert(sizeof(T) <= 16);
    auto * all = given();
    memcpy(all[thread() % WARP], &x, sizeof(x));
    warp_barrier(at);
    memcpy(&x, all[lane], sizeof(x));
    return x;
}

inline uint32_t ballot(bool x, place at = MACHINE_HERE) {
    auto * all              = given();
    all[thread() % WARP][0] = x;
    warp_barrier(at);
    uint32_t votes = 0;
    for (int lane = 0; lane < WARP; ++lane) {
        votes |= (uint32_t) all[lane][0] << lane;
    }
    return votes;
}

inline bool any(bool x, place at = MACHINE_HERE) {
    return ballot(x, at) != 0;
}

inline bool all(bool x, place at = MACHINE_HERE) {
    return ballot(!x, at) == 0;
}

MACHINE_UNSEEN inline std::unique_ptr<char[]> & shared() {
    return the.memory->shared;
}

// Memory of the block whose size is told at the launch. All its threads ask first of all, and for the same.
inline void * shared_memory(size_t size) {
    if (thread() == 0) {
        shared().reset(new char[size]);
        memset(shared().get(), 0xff, size);  // NaN
    }
    barrier();
    return shared().get();
}

[[noreturn]] inline void deadlock() {
    fprintf(stderr, "machine: the threads of block %d wait for each other for ever:\n", the.block);
    for (int i = 0; i < the.size; ++i) {
        const fiber & f      = the.fibers[i];
        const bool    is_new = i == 0 || f.state != the.fibers[i - 1].state || !(f.at == the.fibers[i - 1].at);
        const char *  does   = f.state == DONE ? "have returned; last barrier" : "wait at";
        if (is_new) {
            fprintf(stderr, "  from %d on they %s %s:%d\n", i, does, f.at.file, f.at.line);
        }
    }
    abort();
}

// whether threads [begin, end) all wait at the same barrier; they go on then
inline bool pass(int begin, int end, fiber_state state) {
    for (int i = begin; i < end; ++i) {
        if (the.fibers[i].state != state || !(the.fibers[i].at == the.fibers[begin].at)) {
            return false;
        }
    }
    for (int i = begin; i < end; ++i) {
        the.fibers[i].state = READY;
    }
    return true;
}

inline void run_block() {
    const int        n = the.size;
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);

    for (bool goes_on = true; goes_on;) {
        std::shuffle(order.begin(), order.end(), the.random);
        for (int i : order) {
            if (the.fibers[i].state == READY) {
                the.current = &the.fibers[i];
                resume(the.main, the.fibers[i]);
            }
        }
        goes_on = pass(0, n, AT_BARRIER);
        for (int i = 0; i < n; i += WARP) {
            goes_on |= pass(i, std::min(n, i + WARP), AT_WARP_BARRIER);
        }
    }
    for (int i = 0; i < n; ++i) {
        if (the.fibers[i].state != DONE) {
            deadlock();
        }
    }
}

// Static memory of the block: what the last one left is NaN, and forgotten by ThreadSanitizer, as memory that Java's
// collector gives away.
MACHINE_UNSEEN inline void renew_shared() {
#if !defined(__SANITIZE_ADDRESS__)
    for (volatile char * x = __start_machine_shared; x != __stop_machine_shared; ++x) {
        *x = (char) 0xff;
    }
#endif
#if defined(__SANITIZE_THREAD__)
    const uintptr_t   begin   = (uintptr_t) __start_machine_shared / 8 * 8;
    const uintptr_t   size    = ((uintptr_t) __stop_machine_shared + 7) / 8 * 8 - begin;
    static const bool is_init = size > 0 && (__tsan_java_init(begin, size), true);
    if (is_init) {
        __tsan_java_alloc(begin, size);
    }
#endif
}

// a fiber for a thread of a new block
inline void prepare(fiber & f, int thread) {
    if (!f.stack) {
        f.stack = mmap(nullptr, STACK_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (f.stack == MAP_FAILED) {
            perror("machine: mmap");
            abort();
        }
        f.stack_size = STACK_SIZE;
#if defined(__SANITIZE_THREAD__)
        f.identity = __tsan_create_fiber(0);
#endif
    }
    f.thread     = thread;
    f.state      = READY;
    f.at         = { "", 0 };
    f.n_barriers = f.n_warp_barriers = 0;
    f.has_jump                       = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp   = f.stack;
    f.context.uc_stack.ss_size = f.stack_size;
    makecontext(&f.context, run_fiber, 0);
}

// body(block, thread) for all threads of all blocks, in any order; returns when they are done
inline void launch(int n_blocks, int n_threads, const std::function<void(int, int)> & body) {
    if (n_threads < 1 || n_threads > MAX_WARPS * WARP) {
        fprintf(stderr, "machine: %d threads are no block\n", n_threads);
        abort();
    }
    std::vector<int> order(n_blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), the.random);

    std::vector<std::unique_ptr<block_memory>> memory;  // none is used twice

    the.body = &body;
#if defined(__SANITIZE_THREAD__)
    the.main.identity = __tsan_get_current_fiber();
#endif
    for (int block : order) {
        memory.push_back(std::make_unique<block_memory>());
        the.memory = memory.back().get();
        the.block  = block;
        the.fibers = the.sets[memory.size() % N_SETS].data();
        the.size   = n_threads;
        for (int t = 0; t < n_threads; ++t) {
            prepare(the.fibers[t], t);
        }
        renew_shared();
        release(&the.memory->begin);
        run_block();
    }
    acquire(&the.end);
}

}  // namespace machine

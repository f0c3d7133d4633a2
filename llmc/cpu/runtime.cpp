// The CPU device's runtime: it runs a grid's blocks on the machine's cores, and a block's threads on one core.
//
// The threads of a block start as a plain loop, one call of the kernel after the other on the same stack. Most kernels
// never wait, and for them that is all. Only when a thread waits for others (__syncthreads, a shuffle) does its call have
// to be put aside with all its local variables: the stack it runs on becomes its fiber, and the rest of the loop goes
// on in another one. From then on every thread that waits has a stack of its own, and waiting is a jump to the
// next thread that can run: a few dozen instructions, no system call.
#include "runtime.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t) __attribute__((weak));

namespace llmc {

__thread End end;

const int MAX_THREADS = 1024;          // of a block, as on every GPU
const size_t MAX_SHARED = 227 * 1024;       // of a block, as on compute capability 9.0
#ifdef LLMC_SANITIZE
const size_t STACK = 1 << 20;
#else
const size_t STACK = 256 << 10;             // virtual memory: only the pages in use exist
#endif

// ---- contexts: what a fiber is while it does not run. switch_context stores the running one in `from`, goes on in `to`.

#if defined __x86_64__ && !defined LLMC_UCONTEXT
struct Context { void* sp; };
extern "C" void llmc_switch(void** from, void* to);
// The callee-saved registers lie on the stack while a fiber waits; all others are the caller's business.
asm(R"(
.text
.globl llmc_switch
.hidden llmc_switch
.type llmc_switch, @function
llmc_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size llmc_switch, .-llmc_switch
)");
inline void switch_context(Context& from, Context& to) { llmc_switch(&from.sp, to.sp); }
inline void make_context(Context& context, char* top, void (*entry)()) {
    void** sp = (void**)top;    // a multiple of 16
    *--sp = nullptr;            // where entry's caller would be: a debugger's backtrace ends here
    *--sp = (void*)entry;       // popped by ret, which leaves sp at 8 mod 16, as after a call
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    context.sp = sp;
}
#elif defined __aarch64__ && !defined LLMC_UCONTEXT
struct Context { void* sp; };
extern "C" void llmc_switch(void** from, void* to);
asm(R"(
.text
.globl llmc_switch
.hidden llmc_switch
.type llmc_switch, %function
llmc_switch:
    stp x19, x20, [sp, #-160]!
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x19, x20, [sp], #160
    ret
.size llmc_switch, .-llmc_switch
)");
inline void switch_context(Context& from, Context& to) { llmc_switch(&from.sp, to.sp); }
inline void make_context(Context& context, char* top, void (*entry)()) {
    void** sp = (void**)(top - 160);
    memset(sp, 0, 160);
    sp[11] = (void*)entry;      // x30, the return address
    context.sp = sp;
}
#else
}
#include <ucontext.h>
namespace llmc {
struct Context { ucontext_t state; };
inline void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
inline void make_context(Context& context, char* top, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = top - STACK / 2;
    context.state.uc_stack.ss_size = STACK / 2;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}
#endif

// ---- a launch and its workers

struct Launch { Index grid, block; size_t shared_mem; };  // as the loader packs it; the kernel's arguments follow

enum Order { FORWARD, BACKWARD, SHUFFLED };

struct Job {
    const Kernel* kernel;
    const Launch* launch;
    const void* args;
    Order order;
    uint64_t blocks, stride;                // stride: coprime to blocks, walks through them out of order
    unsigned workers;
    std::atomic<uint64_t> next{0};          // the first block that nobody has taken
    std::atomic<bool> failed{false};
    std::mutex mutex;
    std::string error;
};

struct Fiber {                              // a thread of the running block
    Context context;
    Index index;                            // its threadIdx
    bool started;
    unsigned mask;                          // what it waits for: lanes (for a warp's meeting),
    void* mine;                             //   its contribution
    Together together;                      //   and what is to be done with all contributions; null at a barrier
    const char *what, *file;
    int line;
};

struct Worker {                             // one OS thread's state; lane masks are indexed by warp
    Job* job;
    Place place;                            // of the running block
    Fiber fiber[MAX_THREADS];
    unsigned alive[MAX_THREADS], ready[MAX_THREADS], at_barrier[MAX_THREADS], at_meeting[MAX_THREADS];
    unsigned threads, warp, warps, live, waiting, current;
    bool fibers;                            // some thread of the block has waited
    bool running = false;                   // a kernel, at this moment
    uint32_t random;
    Context outside, home, nowhere;         // the OS thread's stack; the stack of the loop over blocks; never resumed
    char* new_stack;
    std::vector<char*> stacks, free_stacks;
    char* shared = nullptr;
    size_t shared_size = 0;
};
__thread Worker* self;

static std::string at(const char* what, Index i) {
    return std::string(what) + " (" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

static std::string place(const char* file, int line) {
    const char* slash = strrchr(file, '/');
    return std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
}

static void abandon(Worker& w, const std::string& message) {
    Job& job = *w.job;
    {
        std::lock_guard<std::mutex> lock(job.mutex);
        if (job.error.empty()) job.error = std::string(job.kernel->name) + ", " + at("block", w.place.block) + message;
    }
    job.failed = true;
    switch_context(w.nowhere, w.outside);   // kernels own nothing that would have to be cleaned up
}

void fail(Index thread, const char* message, const char* file, int line) {
    abandon(*self, ", " + at("thread", thread) + ": " + message + " at " + place(file, line));
}

// A kernel that divides by zero or leaves its arrays far enough ends like one whose assertion fails. Which thread it was
// cannot be said: the compiler may have merged several into one vector instruction.
#ifndef LLMC_SANITIZE
static struct sigaction handler_before[NSIG];

static void fault(int signal, siginfo_t* info, void*) {
    if (self && self->running) {
        char message[100] = ": integer division by zero";
        if (signal != SIGFPE) snprintf(message, sizeof message, ": invalid memory access at address %p", info->si_addr);
        abandon(*self, std::string(message) + " (LLMC_CPU_SANITIZE=1 or LLMC_CPU_DEBUG=1 help to find the line)");
    }
    sigaction(signal, &handler_before[signal], nullptr);        // not a kernel's: happens again, as if we were not here
}
#endif

static void catch_faults() {
#ifndef LLMC_SANITIZE
    struct sigaction action = {};
    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;     // the handler is left without returning
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE}) sigaction(signal, &action, &handler_before[signal]);
#endif
}

// A stack that has overflown cannot serve the handler as well.
static void provide_signal_stack() {
    static __thread bool provided;
    stack_t stack = {};
    if (provided || sigaltstack(nullptr, &stack)) return;
    provided = true;
    if (!(stack.ss_flags & SS_DISABLE)) return;
    stack = {};
    stack.ss_size = 64 << 10;
    stack.ss_sp = malloc(stack.ss_size);
    sigaltstack(&stack, nullptr);
}

void* dynamic_shared() { return self->shared; }

// ---- the threads of a block

static char* take_stack(Worker& w) {        // returns its upper end
    if (w.free_stacks.empty()) {
        char* memory = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) { fputs("llmc: no memory for a thread's stack\n", stderr); abort(); }
        mprotect(memory, sysconf(_SC_PAGESIZE), PROT_NONE);  // a stack that overflows hits this page, not its neighbour
        // Stacks that all began at the same offset in a page would compete for the same few lines of the cache.
        size_t colour = w.stacks.size() * 320 % 4096 / 64 * 64;
        w.stacks.push_back(memory + STACK - colour);
        w.free_stacks.push_back(w.stacks.back());
    }
    char* top = w.free_stacks.back();
    w.free_stacks.pop_back();
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(top - STACK + 8192, STACK - 8192);
    return top;
}

static void begin_fibers(Worker& w, unsigned current) {
    w.warps = (w.threads + w.warp - 1) / w.warp;
    Index i = {0, 0, 0}, size = w.place.block_dim;
    for (unsigned t = 0; t < w.threads; t++) {
        w.fiber[t].started = false;
        w.fiber[t].index = i;
        if (++i.x == size.x) i.x = 0, i.y++;
        if (i.y == size.y) i.y = 0, i.z++;
    }
    for (unsigned i = 0; i < w.warps; i++) {
        unsigned lanes = w.threads - i * w.warp < w.warp ? w.threads - i * w.warp : w.warp;
        w.alive[i] = 0xffffffffu >> (32 - lanes);
        w.at_barrier[i] = w.at_meeting[i] = 0;
    }
    for (unsigned t = 0; t < current; t++) w.alive[t / w.warp] &= ~(1u << t % w.warp);  // returned without waiting
    memcpy(w.ready, w.alive, w.warps * sizeof(unsigned));
    w.live = w.threads - current;
    w.waiting = 0;
    w.current = current;
    w.fibers = true;
}

static void report_deadlock(Worker& w) {
    struct Group { unsigned count; Index first; };
    std::map<std::tuple<std::string, std::string>, Group> groups;
    for (unsigned t = 0; t < w.threads; t++) {
        Fiber& f = w.fiber[t];
        if (w.alive[t / w.warp] >> t % w.warp & 1) {
            auto& group = groups.insert({{f.what, place(f.file, f.line)}, {0, f.index}}).first->second;
            group.count++;
        }
    }
    std::string message = ": deadlock:", separator = " ";
    for (auto& [key, group] : groups) {
        message += separator + std::to_string(group.count) + (group.count > 1 ? " threads wait at " : " thread waits at ")
            + std::get<0>(key) + " (" + std::get<1>(key) + ", first " + at("thread", group.first) + ")";
        separator = ", ";
    }
    abandon(w, message);
}

static unsigned next_random(Worker& w) {
    w.random ^= w.random << 13, w.random ^= w.random >> 17, w.random ^= w.random << 5;
    return w.random;
}

// The lane of `lanes` (not empty) that comes after `lane`, round robin in the launch's order.
static unsigned choose_lane(Worker& w, unsigned lanes, unsigned lane) {
    unsigned later = lanes;
    if (w.job->order == FORWARD) later &= ~1u << lane;
    else if (w.job->order == BACKWARD) later &= (1u << lane) - 1;
    else later &= ~0u << next_random(w) % 32;
    if (!later) later = lanes;
    return w.job->order == BACKWARD ? 31 - __builtin_clz(later) : __builtin_ctz(later);
}

// A thread that can run. The rest of the warp comes first: its stacks are in the cache.
static unsigned choose_thread(Worker& w) {
    unsigned warp = w.current / w.warp, lane = w.current % w.warp;
    if (w.job->order == SHUFFLED) warp = next_random(w) % w.warps;
    for (unsigned i = 0; i < w.warps; i++) {
        if (w.ready[warp]) return warp * w.warp + choose_lane(w, w.ready[warp], lane);
        if (w.job->order == BACKWARD) warp = (warp ? warp : w.warps) - 1, lane = 0;
        else warp = warp + 1 < w.warps ? warp + 1 : 0, lane = 31;
    }
    report_deadlock(w);
    return 0;
}

static void release_barrier(Worker& w) {
    for (unsigned i = 0; i < w.warps; i++) w.ready[i] |= w.at_barrier[i], w.at_barrier[i] = 0;
    w.waiting = 0;
}

// Ends the meeting that this lane waits at if all who are still alive have come.
static void try_meeting(Worker& w, unsigned warp, unsigned lane) {
    Fiber* lanes = &w.fiber[warp * w.warp];
    Fiber& one = lanes[lane];
    unsigned wanted = one.mask & w.alive[warp];
    if ((w.at_meeting[warp] & wanted) != wanted) return;
    void* all[32] = {};
    for (unsigned rest = wanted; rest; rest &= rest - 1) {
        unsigned i = __builtin_ctz(rest);
        if (lanes[i].mask != one.mask) return;      // waits for others
        if (lanes[i].together != one.together)
            return abandon(w, ": lanes of a warp meet at " + std::string(one.what) + " (" + place(one.file, one.line) + ", "
                           + at("thread", one.index) + ") and " + lanes[i].what + " ("
                           + place(lanes[i].file, lanes[i].line) + ", " + at("thread", lanes[i].index) + ")");
        all[i] = lanes[i].mine;
    }
    one.together(all);
    w.at_meeting[warp] &= ~wanted;
    w.ready[warp] |= wanted;
}

// The running thread has returned: those who wait do not wait for it.
static void thread_returned(Worker& w) {
    unsigned warp = w.current / w.warp, bit = 1u << w.current % w.warp;
    w.alive[warp] &= ~bit;
    w.ready[warp] &= ~bit;
    w.live--;
    if (w.waiting && w.waiting == w.live) release_barrier(w);
    for (unsigned rest = w.at_meeting[warp]; rest; rest &= rest - 1)
        if (w.at_meeting[warp] & rest & -rest) try_meeting(w, warp, __builtin_ctz(rest));
}

static void run_thread(Worker& w) {
    Index i = w.fiber[w.current].index;
    w.fiber[w.current].started = true;
    end = {i.x + 1, i.y + 1, i.z + 1};
    w.job->kernel->threads(w.job->args, w.place, i);
    thread_returned(w);
}

// Uses this stack, whose thread has returned, for threads that have not begun, and gives it up at the first that has.
static void serve(Worker& w, char* stack) {
    while (w.live) {
        w.current = choose_thread(w);
        Fiber& f = w.fiber[w.current];
        if (!f.started) { run_thread(w); continue; }
        if (stack) w.free_stacks.push_back(stack);
        switch_context(stack ? w.nowhere : w.home, f.context);
    }
    if (!stack) return;
    w.free_stacks.push_back(stack);
    switch_context(w.nowhere, w.home);
}

static void fiber_entry() {
    Worker& w = *self;
    char* stack = w.new_stack;
    run_thread(w);
    serve(w, stack);
}

// The running thread waits; goes on with another one, and returns when it is this one's turn again.
static void run_others(Worker& w) {
    Fiber& me = w.fiber[w.current];
    w.current = choose_thread(w);
    Fiber& f = w.fiber[w.current];
    if (&f == &me) return;
    if (!f.started) make_context(f.context, w.new_stack = take_stack(w), fiber_entry);
    switch_context(me.context, f.context);
    end = {0, 0, 0};                        // those who ran meanwhile have set it to theirs
}

static unsigned number(Worker& w, Index thread) {
    return thread.x + w.place.block_dim.x * (thread.y + w.place.block_dim.y * thread.z);
}

static Fiber& wait_at(Worker& w, Index thread, const char* what, const char* file, int line) {
    if (!w.fibers) {
        begin_fibers(w, number(w, thread));
        w.fiber[w.current].started = true;
    }
    Fiber& me = w.fiber[w.current];
    me.what = what, me.file = file, me.line = line;
    w.ready[w.current / w.warp] &= ~(1u << w.current % w.warp);
    end = {0, 0, 0};
    return me;
}

void block_wait(Index thread, const char* what, const char* file, int line) {
    Worker& w = *self;
    if (w.threads == 1) return;
    wait_at(w, thread, what, file, line);
    w.at_barrier[w.current / w.warp] |= 1u << w.current % w.warp;
    if (++w.waiting == w.live) release_barrier(w);
    run_others(w);
}

void warp_wait(Index thread, unsigned mask, void* mine, Together together, const char* what, const char* file, int line) {
    Worker& w = *self;
    Fiber& me = wait_at(w, thread, what, file, line);
    unsigned warp = w.current / w.warp, lane = w.current % w.warp;
    me.mask = mask, me.mine = mine, me.together = together;
    w.at_meeting[warp] |= 1u << lane;
    try_meeting(w, warp, lane);
    run_others(w);
}

unsigned active_lanes(Index thread) {
    Worker& w = *self;
    unsigned t = number(w, thread), warp = t / w.warp;
    if (w.fibers) return w.alive[warp];
    unsigned lanes = w.threads - warp * w.warp < w.warp ? w.threads - warp * w.warp : w.warp;
    return 0xffffffffu >> (32 - lanes) & (~0u << t % w.warp);
}

// This file is compiled without -ffast-math: the order of the additions is the point.
template <class F> static void butterfly(void* const* lanes, F combine) {
    float now[32], next[32];
    for (int i = 0; i < 32; i++) now[i] = lanes[i] ? *(float*)lanes[i] : __builtin_nanf("");
    for (int distance = 16; distance; distance /= 2) {
        for (int i = 0; i < 32; i++) next[i] = combine(now[i], now[i ^ distance]);
        memcpy(now, next, sizeof now);
    }
    for (int i = 0; i < 32; i++) if (lanes[i]) *(float*)lanes[i] = now[i];
}

void warp_sum(Index thread, float* mine, const char* file, int line) {
    warp_wait(thread, ~0u, mine, [](void* const* lanes) { butterfly(lanes, [](float a, float b) { return a + b; }); },
              "cpu_warp_sum", file, line);
}

void warp_max(Index thread, float* mine, const char* file, int line) {
    warp_wait(thread, ~0u, mine, [](void* const* lanes) { butterfly(lanes, [](float a, float b) { return a > b || b != b ? a : b; }); },
              "cpu_warp_max", file, line);
}

// ---- the blocks of a grid

// Fills this worker's static shared memory with NaNs: a kernel that lacks a barrier must not find there what the block
// before, or the launch before with the same input, has left. It lies in the thread-local storage of the kernel's
// library, along with threadIdx and its like, which are set anew in any case.
static void poison_shared(const Kernel* kernel) {
    dl_iterate_phdr([](dl_phdr_info* library, size_t, void* kernel) {
        bool is_ours = false;
        size_t size = 0;
        for (int i = 0; i < library->dlpi_phnum; i++) {
            const ElfW(Phdr)& segment = library->dlpi_phdr[i];
            if (segment.p_type == PT_LOAD && (size_t)kernel - library->dlpi_addr - segment.p_vaddr < segment.p_memsz) is_ours = true;
            if (segment.p_type == PT_TLS) size = segment.p_memsz;
        }
        if (is_ours && library->dlpi_tls_data) memset(library->dlpi_tls_data, 0xff, size);
        return (int)is_ours;
    }, (void*)kernel);
}

static void run_block(Worker& w, uint64_t n) {
    const Job& job = *w.job;
    if (job.order == BACKWARD) n = job.blocks - 1 - n;
    else if (job.order == SHUFFLED) n = (n * job.stride + job.blocks / 2) % job.blocks;
    Index grid = w.place.grid_dim, block = w.place.block_dim;
    w.place.block = {int(n % grid.x), int(n / grid.x % grid.y), int(n / grid.x / grid.y)};
    w.fibers = false;
    end = {block.x, block.y, block.z};
    if (job.order == FORWARD) {
        job.kernel->threads(job.args, w.place, {0, 0, 0});
        if (!w.fibers) return;
        thread_returned(w);
    } else {
        if (w.shared_size) memset(w.shared, 0xff, w.shared_size);
        poison_shared(job.kernel);
        begin_fibers(w, 0);
        w.current = job.order == BACKWARD ? w.threads - 1 : next_random(w) % w.threads;
        run_thread(w);
    }
    serve(w, nullptr);
}

static __thread uint64_t block_limit;

static void block_loop() {
    Worker& w = *self;
    Job& job = *w.job;
    for (uint64_t done = 0; done < block_limit && !job.failed;) {
        // Large portions first, so that few of them are fetched; small ones at the end, so that all finish together.
        uint64_t begin = job.next.load(std::memory_order_relaxed);
        uint64_t portion = begin < job.blocks ? (job.blocks - begin) / (4 * job.workers) : 0;
        if (portion > block_limit - done) portion = block_limit - done;
        if (portion < 1) portion = 1;
        begin = job.next.fetch_add(portion);
        if (begin >= job.blocks) break;
        for (uint64_t i = begin; i < begin + portion && i < job.blocks && !job.failed; i++) run_block(w, i);
        done += portion;
    }
    switch_context(w.nowhere, w.outside);
}

// Runs blocks of the job until none is left or `limit` are done.
static void run_blocks(Worker& w, Job& job, uint64_t limit) {
    const Launch& launch = *job.launch;
    self = &w;
    w.job = &job;
    w.threads = launch.block.x * launch.block.y * launch.block.z;
    w.warp = job.kernel->warp;
    w.random = 20240326;
    w.place.block_dim = launch.block;
    w.place.grid_dim = launch.grid;
    if (w.shared_size != launch.shared_mem) {                   // exactly as large as asked for: ASan sees the end
        free(w.shared);
        w.shared = nullptr;
        w.shared_size = launch.shared_mem;
        if (w.shared_size && posix_memalign((void**)&w.shared, 128, w.shared_size)) abort();
    }
    block_limit = limit;
    w.free_stacks = w.stacks;                                   // also those that a failed launch has left behind
    make_context(w.home, take_stack(w), block_loop);
    provide_signal_stack();
    w.running = true;
    switch_context(w.outside, w.home);
    w.running = false;
}

// ---- the workers: the caller of a launch is one, the others sleep until there is enough to do

struct Pool {
    std::mutex mutex;
    std::condition_variable wake, done;
    Job* job = nullptr;
    uint64_t generation = 0;
    unsigned active = 0, workers;
    Worker callers;

    explicit Pool(unsigned workers) : workers(workers) {
        for (unsigned i = 1; i < workers; i++) std::thread([this] { work(*new Worker); }).detach();
    }

    void work(Worker& w) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return job && generation != seen; });
            seen = generation;
            Job& mine = *job;
            active++;
            lock.unlock();
            run_blocks(w, mine, ~0ull);
            lock.lock();
            if (--active == 0) done.notify_one();
        }
    }

    void run(Job& mine) {
        using namespace std::chrono;
        // The first block tells how long the grid will take. Waking a worker costs a few microseconds, and it needs a
        // few more to come: only for a grid that takes longer than that.
        auto start = steady_clock::now();
        run_blocks(callers, mine, 1);
        if (mine.blocks == 1 || mine.failed) return;
        double rest = duration<double, std::micro>(steady_clock::now() - start).count() * (mine.blocks - 1);
        double helpers = rest / 20;
        if (helpers > workers - 1) helpers = workers - 1;
        if (helpers > mine.blocks - 2) helpers = mine.blocks - 2;
        // In another order than usual there is one order, for a fault that has shown to show again.
        if (helpers < 1 || mine.order != FORWARD) return run_blocks(callers, mine, ~0ull);
        {
            std::lock_guard<std::mutex> lock(mutex);
            job = &mine;
            generation++;
        }
        for (int i = 0; i < (int)helpers; i++) wake.notify_one();
        run_blocks(callers, mine, ~0ull);
        std::unique_lock<std::mutex> lock(mutex);
        job = nullptr;                                          // who has not woken by now sleeps on
        done.wait(lock, [&] { return active == 0; });
    }
};

static std::mutex* one_launch = new std::mutex;
static Pool* pool;                                              // never destroyed: its threads live as long as the process

static unsigned worker_count() {
#ifdef LLMC_SANITIZE
    return 1;
#endif
    const char* wish = getenv("LLMC_CPU_THREADS");
    cpu_set_t cores;                        // that the process may use, of which there may be fewer than the machine has
    int count = wish && *wish ? atoi(wish) : sched_getaffinity(0, sizeof cores, &cores) ? 1 : CPU_COUNT(&cores);
    return count < 1 ? 1 : count;
}

static std::string run(const Kernel* kernel, const Launch* launch) {
    Index g = launch->grid, b = launch->block;
    std::string name = kernel->name;
    if (g.x < 1 || g.y < 1 || g.z < 1 || g.y > 65535 || g.z > 65535)
        return name + ": CUDA takes no such " + at("grid", g);
    if (b.x < 1 || b.y < 1 || b.z < 1 || b.x > MAX_THREADS || b.y > MAX_THREADS || b.z > 64 || b.x * b.y * b.z > MAX_THREADS)
        return name + ": CUDA takes no such " + at("block", b);
    if (kernel->max_threads && b.x * b.y * b.z > kernel->max_threads)
        return name + ": " + at("block", b) + " has more threads than the kernel's __launch_bounds__, "
            + std::to_string(kernel->max_threads);
    if (launch->shared_mem > MAX_SHARED)
        return name + ": " + std::to_string(launch->shared_mem) + " bytes of shared memory, more than a GPU has";
    Job job;
    job.kernel = kernel;
    job.launch = launch;
    job.args = launch + 1;
    job.blocks = (uint64_t)g.x * g.y * g.z;
    const char* order = getenv("LLMC_CPU_ORDER");
    job.order = !order || !*order || !strcmp(order, "forward") ? FORWARD : !strcmp(order, "backward") ? BACKWARD : SHUFFLED;
    if (job.order == SHUFFLED && strcmp(order, "shuffled"))
        return std::string("LLMC_CPU_ORDER is ") + order + "; it can be forward, backward or shuffled";
    auto gcd = [](uint64_t a, uint64_t b) { while (b) { uint64_t r = a % b; a = b; b = r; } return a; };
    for (job.stride = job.blocks / 3 * 2 + 1; gcd(job.stride, job.blocks) != 1;) job.stride++;

    std::lock_guard<std::mutex> lock(*one_launch);
    if (!pool) {
        pool = new Pool(worker_count());
        catch_faults();
        // A forked child has none of the threads; it makes its own at its first launch.
        static int once = pthread_atfork(nullptr, nullptr, [] { pool = nullptr; one_launch = new std::mutex; });
        (void)once;
    }
    job.workers = pool->workers;
    pool->run(job);
    return job.error;
}

}  // namespace llmc

// Runs a kernel on a packed Launch followed by its arguments; returns null or what went wrong.
extern "C" const char* llmc_launch(const llmc::Kernel* kernel, const llmc::Launch* launch) {
    static __thread char* message;
    std::string error = llmc::run(kernel, launch);
    if (error.empty()) return nullptr;
    free(message);
    return message = strdup(error.c_str());
}

// The CPU device's runtime: it runs a grid's blocks on the machine's cores, and a block's threads on one core.
//
// The threads of a block start as a plain loop, one call of the kernel after the other on the same stack. Most kernels
// never wait, and for them that is all. But when a thread waits for others (__syncthreads, a shuffle), its call must be
// put aside with all its local variables. The thread becomes a fiber, which keeps the stack that it runs on, and the
// threads that have not begun run on another stack. From then on every thread that waits has a stack of its own. To
// wait is to switch to the next thread that can run: this takes a few dozen instructions and no system call.
//
// "Thread" means CUDA's thread here. A thread of the operating system is called an OS thread.
#include "runtime.h"

#include <algorithm>
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

extern "C" void* __tls_get_addr(size_t* module_and_offset);
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t) __attribute__((weak));

namespace llmc {

__thread End end;

const int MAX_THREADS = 1024;               // of a block, as on every GPU
const size_t MAX_SHARED = 227 * 1024;       // of a block, as on compute capability 9.0
#ifdef LLMC_SANITIZE
const size_t STACK_SIZE = 1 << 20;
#else
const size_t STACK_SIZE = 256 << 10;        // of address space: only the pages in use take memory
#endif

// ---- contexts: a fiber's stack pointer and registers while it does not run. switch_context(from, to) stores those of
// the running fiber in `from` and goes on in `to`. It returns when another fiber switches to `from`.

#if defined __x86_64__
struct Context { void* sp; };
extern "C" void llmc_switch(void** from, void* to);
// The callee-saved registers lie on the stack while a fiber waits. The caller saves all others itself.
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
inline void make_context(Context& context, char* stack, void (*entry)()) {
    void** sp = (void**)stack;  // the upper end, a multiple of 16
    *--sp = nullptr;            // where entry's caller would be: a debugger's backtrace ends here
    *--sp = (void*)entry;       // popped by ret, which leaves sp at 8 mod 16, as after a call
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    context.sp = sp;
}
#elif defined __aarch64__
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
inline void make_context(Context& context, char* stack, void (*entry)()) {
    void** sp = (void**)(stack - 160);
    memset(sp, 0, 160);
    sp[11] = (void*)entry;      // x30, the return address
    context.sp = sp;
}
#else
#error "the CPU device knows x86-64 and aarch64"
#endif

// ---- a launch and its workers

// As the loader packs it; the kernel's arguments follow.
struct Launch { Index grid_dim, block_dim; size_t shared_mem; };

struct Job {
    const Kernel* kernel;
    const Launch* launch;
    const void* args;
    bool shuffled;                          // the order of blocks and of threads
    uint64_t blocks, stride;                // stride: coprime to blocks; shuffled order walks by it
    unsigned workers;
    std::atomic<uint64_t> next{0};          // the first block that nobody has taken
    std::atomic<bool> failed{false};
    std::mutex mutex;
    std::string error;
};

struct Fiber {                              // a thread of the running block, and what is kept while it waits
    Context context;
    Index index;                            // its threadIdx
    bool started;
    unsigned mask;                          // at a warp's meeting: the lanes that take part,
    void* mine;                             //   the variable that this one brings,
    Together together;                      //   and what to do with the variables of all
    const char *what, *file;                // where it waits, for a message
    int line;
};

struct Worker {                             // an OS thread that runs one block at a time
    Job* job;
    Builtins builtins;                      // of the running block
    unsigned long long blocks_begun;
    unsigned threads, warp_size, warps;     // of the running block
    bool fibers;                            // its threads are fibers; what follows is valid only then
    Fiber fiber[MAX_THREADS];
    unsigned current;                       // the running thread
    // For each warp: the lanes that have not returned, those that can run, those at a barrier, those at a meeting, and
    // those that wait for an mbarrier.
    unsigned alive[MAX_THREADS], ready[MAX_THREADS];
    unsigned at_barrier[MAX_THREADS], at_meeting[MAX_THREADS], at_mbarrier[MAX_THREADS];
    unsigned alive_count, at_barrier_count; // threads, in all warps
    int yes, yes_last_time;                 // threads at the barrier that said yes; how many did at the last barrier

    bool running = false;                   // a kernel, at this moment
    uint32_t random;
    Context outside, home, nowhere;         // the OS thread's stack; the stack of the loop over blocks; never resumed
    std::vector<char*> stacks, free_stacks; // each by its upper end, where it begins
    char* new_stack;                        // the stack of the fiber that starts next
    char* shared = nullptr;
    size_t shared_size = 0;
};
__thread Worker* self;

// A kernel's library: where it was loaded, and this OS thread's copy of its thread-local variables. These are static
// shared memory, threadIdx and the like.
struct Library { char *base, *variables; size_t size; };

static Library find_library(const Kernel* kernel) {
    Library found{(char*)kernel, nullptr, 0};
    dl_iterate_phdr([](dl_phdr_info* library, size_t, void* data) {
        Library& found = *(Library*)data;
        bool is_ours = false;
        for (int i = 0; i < library->dlpi_phnum; i++) {
            const ElfW(Phdr)& segment = library->dlpi_phdr[i];
            const size_t offset = (size_t)found.base - library->dlpi_addr - segment.p_vaddr;
            if (segment.p_type == PT_LOAD && offset < segment.p_memsz) is_ours = true;
            if (segment.p_type == PT_TLS) found.size = segment.p_memsz;
        }
        size_t first[2] = {library->dlpi_tls_modid, 0};  // an OS thread has a copy only after it has asked for it
        if (!is_ours) {
            found.size = 0;
            return 0;
        }
        found.base = (char*)library->dlpi_addr;
        if (library->dlpi_tls_modid) found.variables = (char*)__tls_get_addr(first);
        return 1;
    }, &found);
    return found;
}

#ifdef LLMC_MICROSCOPE
}
#include "microscope.h"
namespace llmc {
#define MICROSCOPE(...) microscope::__VA_ARGS__
const bool EACH_THREAD_IS_A_FIBER = true;   // from its start: the microscope asks which thread it is
#else
#define MICROSCOPE(...)
const bool EACH_THREAD_IS_A_FIBER = false;
#endif

static std::string numbered(const char* what, Index i) {
    const std::string x = std::to_string(i.x), y = std::to_string(i.y), z = std::to_string(i.z);
    return std::string(what) + " (" + x + ", " + y + ", " + z + ")";
}

static std::string source_line(const char* file, int line) {
    const char* slash = strrchr(file, '/');
    return std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
}

// Threads that do not return leave the red zones of their frames behind for ASan. Those that return leave none.
static void remove_red_zones(char* stack) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(stack - STACK_SIZE + 8192, STACK_SIZE - 8192);
}

static void abandon(Worker& w, const std::string& message) {
    Job& job = *w.job;
    {
        std::lock_guard<std::mutex> lock(job.mutex);
        if (job.error.empty())
            job.error = std::string(job.kernel->name) + ", " + numbered("block", w.builtins.blockIdx) + message;
    }
    job.failed = true;
    for (char* stack : w.stacks) remove_red_zones(stack);
    switch_context(w.nowhere, w.outside);   // kernels own nothing that must be cleaned up
}

void fail(Index thread, const char* message, const char* file, int line) {
    abandon(*self, ", " + numbered("thread", thread) + ": " + message + " at " + source_line(file, line));
}

// A kernel that divides by zero, or reads or writes far outside its arrays, ends like one whose assertion fails. The
// message cannot name the thread, because the compiler may have merged several into one vector instruction. On aarch64
// an integer division by zero gives 0 and no signal.
#ifndef LLMC_SANITIZE
static struct sigaction handler_before[NSIG];

static void fault(int signal, siginfo_t* info, void*) {
    if (self && self->running) {
        char message[100] = ": integer division by zero";
        if (signal != SIGFPE) snprintf(message, sizeof message, ": invalid memory access at address %p", info->si_addr);
        abandon(*self, std::string(message) + " (LLMC_CPU_SANITIZE=1 or LLMC_CPU_DEBUG=1 help to find the line)");
    }
    sigaction(signal, &handler_before[signal], nullptr);        // not from a kernel: let it happen again without us
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

// The signal handler cannot run on a stack that has overflowed, so it gets one of its own for each OS thread.
static void provide_signal_stack() {
    static __thread bool provided;
    stack_t alternate = {};
    if (provided || sigaltstack(nullptr, &alternate)) return;
    provided = true;
    if (!(alternate.ss_flags & SS_DISABLE)) return;             // the OS thread already has one
    alternate = {};
    alternate.ss_size = 64 << 10;
    alternate.ss_sp = malloc(alternate.ss_size);
    sigaltstack(&alternate, nullptr);
}

unsigned long long blocks_begun() { return self->blocks_begun; }

void* dynamic_shared() { return self->shared; }

// ---- the threads of a block

static char* take_stack(Worker& w) {
    if (w.free_stacks.empty()) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        char* lowest = (char*)mmap(nullptr, STACK_SIZE, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (lowest == MAP_FAILED) { fputs("llmc: no memory for a thread's stack\n", stderr); abort(); }
        mprotect(lowest, sysconf(_SC_PAGESIZE), PROT_NONE);  // a stack that overflows hits this page, not its neighbour
        // If all stacks began at the same offset in a page, they would compete for the same few lines of the cache.
        size_t colour = w.stacks.size() * 320 % 4096 / 64 * 64;
        w.stacks.push_back(lowest + STACK_SIZE - colour);
        w.free_stacks.push_back(w.stacks.back());
    }
    char* stack = w.free_stacks.back();
    w.free_stacks.pop_back();
    return stack;
}

// Makes the threads fibers, when thread `current` is the first to wait. The threads before it have returned, and those
// after it have not begun.
static void begin_fibers(Worker& w, unsigned current) {
    w.warps = (w.threads + w.warp_size - 1) / w.warp_size;
    Index i = {0, 0, 0}, size = w.builtins.blockDim;
    for (unsigned t = 0; t < w.threads; t++) {
        w.fiber[t].started = false;
        w.fiber[t].index = i;
        if (++i.x == size.x) i.x = 0, i.y++;
        if (i.y == size.y) i.y = 0, i.z++;
    }
    for (unsigned warp = 0; warp < w.warps; warp++) {
        unsigned rest = w.threads - warp * w.warp_size;
        w.alive[warp] = 0xffffffffu >> (32 - (rest < w.warp_size ? rest : w.warp_size));
        w.at_barrier[warp] = w.at_meeting[warp] = w.at_mbarrier[warp] = 0;
    }
    for (unsigned t = 0; t < current; t++) w.alive[t / w.warp_size] &= ~(1u << t % w.warp_size);
    memcpy(w.ready, w.alive, w.warps * sizeof(unsigned));
    w.alive_count = w.threads - current;
    w.at_barrier_count = 0;
    w.yes = 0;
    w.current = current;
    w.fibers = true;
}

static void report_deadlock(Worker& w) {
    struct Group { unsigned count; Index first; };
    std::map<std::tuple<std::string, std::string>, Group> groups;
    for (unsigned t = 0; t < w.threads; t++) {
        Fiber& f = w.fiber[t];
        if (w.alive[t / w.warp_size] >> t % w.warp_size & 1) {
            auto& group = groups.insert({{f.what, source_line(f.file, f.line)}, {0, f.index}}).first->second;
            group.count++;
        }
    }
    std::string message = ": deadlock:", separator = " ";
    for (auto& [key, group] : groups) {
        const char* waits = group.count > 1 ? " threads wait at " : " thread waits at ";
        message += separator + std::to_string(group.count) + waits + std::get<0>(key)
            + " (" + std::get<1>(key) + ", first " + numbered("thread", group.first) + ")";
        separator = ", ";
    }
    abandon(w, message);
}

static unsigned next_random(Worker& w) {
    w.random ^= w.random << 13, w.random ^= w.random >> 17, w.random ^= w.random << 5;
    return w.random;
}

// A thread that can run. The rest of the warp comes first, because its stacks are in the cache; then round robin.
static unsigned choose_thread(Worker& w) {
    unsigned warp = w.current / w.warp_size, lane = w.current % w.warp_size;
    if (w.job->shuffled) warp = next_random(w) % w.warps;
    for (unsigned i = 0; i < w.warps; i++) {
        if (unsigned ready = w.ready[warp]) {
            unsigned later = ready & (w.job->shuffled ? ~0u << next_random(w) % 32 : ~1u << lane);
            return warp * w.warp_size + __builtin_ctz(later ? later : ready);
        }
        warp = warp + 1 < w.warps ? warp + 1 : 0, lane = 31;
    }
    report_deadlock(w);
    return 0;
}

static void release_barrier(Worker& w) {
    MICROSCOPE(barrier_passed());
    for (unsigned warp = 0; warp < w.warps; warp++) w.ready[warp] |= w.at_barrier[warp], w.at_barrier[warp] = 0;
    w.at_barrier_count = 0;
    w.yes_last_time = w.yes, w.yes = 0;
}

static std::string waits_at(const Fiber& f) {
    return std::string(f.what) + " (" + source_line(f.file, f.line) + ", " + numbered("thread", f.index) + ")";
}

// Ends the meeting at which this lane waits, if all lanes that take part and have not returned are there.
static void try_meeting(Worker& w, unsigned warp, unsigned lane) {
    Fiber* fibers = &w.fiber[warp * w.warp_size];
    Fiber& one = fibers[lane];
    unsigned wanted = one.mask & w.alive[warp];
    if ((w.at_meeting[warp] & wanted) != wanted) return;
    void* all[32] = {};
    for (unsigned rest = wanted; rest; rest &= rest - 1) {
        unsigned i = __builtin_ctz(rest);
        if (fibers[i].mask != one.mask) return;     // it waits for other lanes
        if (fibers[i].together != one.together)
            return abandon(w, ": lanes of a warp meet at " + waits_at(one) + " and " + waits_at(fibers[i]));
        all[i] = fibers[i].mine;
    }
    MICROSCOPE(met(w, warp, wanted, one.what));
    MICROSCOPE(Pause pause);
    one.together(all);
    w.at_meeting[warp] &= ~wanted;
    w.ready[warp] |= wanted;
}

// The running thread has returned, so the threads that wait do not wait for it.
static void thread_returned(Worker& w) {
    unsigned warp = w.current / w.warp_size, bit = 1u << w.current % w.warp_size;
    w.alive[warp] &= ~bit;
    w.ready[warp] &= ~bit;
    w.alive_count--;
    if (w.at_barrier_count && w.at_barrier_count == w.alive_count) release_barrier(w);
    for (unsigned rest = w.at_meeting[warp]; rest; rest &= rest - 1)
        if (w.at_meeting[warp] & rest & -rest) try_meeting(w, warp, __builtin_ctz(rest));
}

static void run_thread(Worker& w) {
    Index i = w.fiber[w.current].index;
    w.fiber[w.current].started = true;
    end = {i.x + 1, i.y + 1, i.z + 1};      // so the loop in the kernel's library runs this thread only
    w.job->kernel->run_threads(w.job->args, w.builtins, i);
    thread_returned(w);
}

// Runs other threads on this stack, whose own thread has returned: threads that have not begun, until a thread is
// chosen that has. That thread has a stack of its own, so this stack becomes free. `stack` is null for the stack of the
// loop over blocks. That one does not become free, because the last thread to return goes back to it.
static void serve(Worker& w, char* stack) {
    while (w.alive_count) {
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

// The running thread waits: runs another one, and returns when it is the running thread's turn again.
static void run_others(Worker& w) {
    Fiber& me = w.fiber[w.current];
    w.current = choose_thread(w);
    Fiber& f = w.fiber[w.current];
    if (&f == &me) return;
    if (!f.started) make_context(f.context, w.new_stack = take_stack(w), fiber_entry);
    switch_context(me.context, f.context);
    end = {0, 0, 0};                        // the threads that ran meanwhile have changed it
}

static unsigned thread_number(Worker& w, Index thread) {
    return thread.x + w.builtins.blockDim.x * (thread.y + w.builtins.blockDim.y * thread.z);
}

static Fiber& wait_at(Worker& w, Index thread, const char* what, const char* file, int line) {
    if (!w.fibers) {
        begin_fibers(w, thread_number(w, thread));
        w.fiber[w.current].started = true;
    }
    Fiber& me = w.fiber[w.current];
    me.what = what, me.file = file, me.line = line;
    w.ready[w.current / w.warp_size] &= ~(1u << w.current % w.warp_size);
    end = {0, 0, 0};                        // so the loop that called this thread runs no other
    return me;
}

int block_wait(Index thread, bool yes, const char* what, const char* file, int line) {
    Worker& w = *self;
    MICROSCOPE(wait(__builtin_return_address(0), microscope::BARRIER, what));
    if (w.threads == 1) return yes;
    wait_at(w, thread, what, file, line);
    w.yes += yes;
    w.at_barrier[w.current / w.warp_size] |= 1u << w.current % w.warp_size;
    if (++w.at_barrier_count == w.alive_count) release_barrier(w);
    run_others(w);
    return w.yes_last_time;
}

void warp_wait(Index thread, unsigned mask, void* mine, Together together, const char* what, const char* file,
               int line) {
    Worker& w = *self;
    MICROSCOPE(wait(__builtin_return_address(0), microscope::MEETING, what));
    Fiber& me = wait_at(w, thread, what, file, line);
    unsigned warp = w.current / w.warp_size, lane = w.current % w.warp_size;
    me.mask = mask, me.mine = mine, me.together = together;
    w.at_meeting[warp] |= 1u << lane;
    try_meeting(w, warp, lane);
    run_others(w);
}

void mbarrier_init(MBarrier& barrier, int count) { barrier = {(signed char)count, (signed char)count, false, 0}; }

// All that wait for an mbarrier are woken. Those whose phase has not ended wait again.
void mbarrier_add(MBarrier& barrier, int arrivals, int bytes) {
    Worker& w = *self;
    barrier.missing -= arrivals, barrier.bytes -= bytes;
    if (barrier.missing || barrier.bytes) return;
    barrier.missing = barrier.count, barrier.parity = !barrier.parity;
    MICROSCOPE(barrier_passed());    // so a race between threads that no mbarrier orders may go unseen
    for (unsigned warp = 0; warp < (w.fibers ? w.warps : 0); warp++)
        w.ready[warp] |= w.at_mbarrier[warp], w.at_mbarrier[warp] = 0;
}

void mbarrier_wait(Index thread, const MBarrier& barrier, bool parity, const char* file, int line) {
    Worker& w = *self;
    while (barrier.parity == parity) {
        wait_at(w, thread, "mbarrier_wait", file, line);
        w.at_mbarrier[w.current / w.warp_size] |= 1u << w.current % w.warp_size;
        run_others(w);
    }
}

// ---- the blocks of a grid

static void run_block(Worker& w, uint64_t n) {
    const Job& job = *w.job;
    if (job.shuffled) n = (n * job.stride + job.blocks / 2) % job.blocks;
    Index grid_dim = w.builtins.gridDim, block_dim = w.builtins.blockDim;
    w.builtins.blockIdx = {int(n % grid_dim.x), int(n / grid_dim.x % grid_dim.y), int(n / grid_dim.x / grid_dim.y)};
    w.fibers = false;
    w.blocks_begun++;
    end = {block_dim.x, block_dim.y, block_dim.z};
    MICROSCOPE(block_begins(w));
    if (!job.shuffled && !EACH_THREAD_IS_A_FIBER) {
        job.kernel->run_threads(job.args, w.builtins, {0, 0, 0});
        if (!w.fibers) return;
        thread_returned(w);
    } else {
        if (w.shared_size) memset(w.shared, 0xff, w.shared_size);
        Library library = find_library(job.kernel);
        // NaNs, so that a kernel without a barrier finds no right numbers that another block or launch has left.
        if (library.variables) memset(library.variables, 0xff, library.size);
        begin_fibers(w, 0);
        w.current = job.shuffled ? next_random(w) % w.threads : 0;
        run_thread(w);
    }
    serve(w, nullptr);
    MICROSCOPE(block_ends(w));
}

static __thread uint64_t block_limit;

static void block_loop() {
    Worker& w = *self;
    Job& job = *w.job;
    for (uint64_t done = 0; done < block_limit && !job.failed;) {
        // Portions are large at first, so that there are few, and small at the end, so that all workers finish
        // together.
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
    w.threads = launch.block_dim.x * launch.block_dim.y * launch.block_dim.z;
    w.warp_size = job.kernel->warp_size;
    w.random = 20240326;
    w.builtins.blockDim = launch.block_dim;
    w.builtins.gridDim = launch.grid_dim;
    if (w.shared_size != launch.shared_mem) {  // exactly as large as the launch says: ASan sees the end
        free(w.shared);
        w.shared = nullptr;
        w.shared_size = launch.shared_mem;
        if (w.shared_size && posix_memalign((void**)&w.shared, 128, w.shared_size)) abort();
    }
    MICROSCOPE(launch_begins(w));
    block_limit = limit;
    w.free_stacks = w.stacks;  // also the stacks that a failed launch did not give back
    make_context(w.home, take_stack(w), block_loop);
    provide_signal_stack();
    w.running = true;
    switch_context(w.outside, w.home);
    w.running = false;
}

// ---- the workers: the caller of a launch is one. The others wait for a launch that has enough to do: awake at first,
// then asleep.

struct Pool {
    std::mutex mutex;
    std::condition_variable wake, done;
    Job* open = nullptr;                    // the job that workers may join
    std::atomic<uint64_t> generation{0};
    unsigned active = 0, workers;
    std::map<const Kernel*, double> us_of_block;    // how many microseconds a block of a kernel has taken
    Worker caller;

    explicit Pool(unsigned workers) : workers(workers) {
        for (unsigned i = 1; i < workers; i++) std::thread([this] { work(*new Worker); }).detach();
    }

    void work(Worker& w) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            // Mostly the next launch follows at once, and a worker that sleeps would start late. So a worker stays
            // awake for 200 microseconds. sched_yield lets other OS threads use the core meanwhile. With this wait and
            // products.cu together, a step of a small model took 8% less time.
            lock.unlock();
            const auto awake_until = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
            while (generation == seen && std::chrono::steady_clock::now() < awake_until) sched_yield();
            lock.lock();
            wake.wait(lock, [&] { return open && generation != seen; });
            seen = generation;
            Job& job = *open;
            active++;
            lock.unlock();
            run_blocks(w, job, ~0ull);
            lock.lock();
            if (--active == 0) done.notify_one();
        }
    }

    // How many workers are to help with the blocks that are left. To wake one costs a few microseconds, and it starts a
    // few microseconds later. So there is one for each 20 us of the blocks after the first.
    int helpers_for(double us_of_block, uint64_t left) const {
        return (int)std::min({us_of_block * (left - 1) / 20, workers - 1.0, left - 1.0});
    }

    void run_job(Job& job) {
        using namespace std::chrono;
        const auto start = steady_clock::now();
        const auto us_passed = [&] { return duration<double, std::micro>(steady_clock::now() - start).count(); };
        // The kernel's last launch tells how long a block takes. If there was none, or if by that the launch is short,
        // the caller runs the first block by itself to find out.
        double& us = us_of_block[job.kernel];
        int helpers = helpers_for(us, job.blocks);
        if (helpers < 1) {
            run_blocks(caller, job, 1);
            if (job.blocks == 1 || job.failed) return;
            helpers = helpers_for(us = us_passed(), job.blocks - 1);
        }
        // In shuffled order the caller works alone, so that an error that shows once shows on every run.
        if (helpers < 1 || job.shuffled) return run_blocks(caller, job, ~0ull);
        {
            std::lock_guard<std::mutex> lock(mutex);
            open = &job;
            generation++;
        }
        for (int i = 0; i < helpers; i++) wake.notify_one();
        run_blocks(caller, job, ~0ull);
        std::unique_lock<std::mutex> lock(mutex);
        open = nullptr;                                         // workers that have not joined by now wait on
        done.wait(lock, [&] { return active == 0; });
        us = us_passed() * (1 + helpers) / job.blocks;
    }
};

static std::mutex* launch_mutex = new std::mutex;               // one launch at a time
static Pool* pool;  // never destroyed: its threads live as long as the process

static unsigned worker_count() {
#if defined LLMC_SANITIZE || defined LLMC_MICROSCOPE
    return 1;
#endif
    const char* wish = getenv("LLMC_CPU_THREADS");
    cpu_set_t cores;                        // that the process may use: perhaps fewer than the machine has
    int count = wish && *wish ? atoi(wish) : sched_getaffinity(0, sizeof cores, &cores) ? 1 : CPU_COUNT(&cores);
    return count < 1 ? 1 : count;
}

// Returns an empty string, or what went wrong.
static std::string run_launch(const Kernel* kernel, const Launch* launch) {
    Index g = launch->grid_dim, b = launch->block_dim;
    std::string name = kernel->name;
    if (g.x < 1 || g.y < 1 || g.z < 1 || g.y > 65535 || g.z > 65535)
        return name + ": CUDA takes no such " + numbered("grid", g);
    if (b.x < 1 || b.y < 1 || b.z < 1 || b.x > MAX_THREADS || b.y > MAX_THREADS || b.z > 64 ||
        b.x * b.y * b.z > MAX_THREADS)
        return name + ": CUDA takes no such " + numbered("block", b);
    if (kernel->max_threads && b.x * b.y * b.z > kernel->max_threads)
        return name + ": " + numbered("block", b) + " has more threads than the kernel's __launch_bounds__, "
            + std::to_string(kernel->max_threads);
    if (launch->shared_mem > MAX_SHARED)
        return name + ": " + std::to_string(launch->shared_mem) + " bytes of shared memory, more than a GPU has";
    Job job;
    job.kernel = kernel;
    job.launch = launch;
    job.args = launch + 1;
    job.blocks = (uint64_t)g.x * g.y * g.z;
    const char* order = getenv("LLMC_CPU_ORDER");
    job.shuffled = order && *order && strcmp(order, "forward");
    if (job.shuffled && strcmp(order, "shuffled"))
        return std::string("LLMC_CPU_ORDER is ") + order + "; it can be forward or shuffled";
    auto gcd = [](uint64_t a, uint64_t b) { while (b) { uint64_t r = a % b; a = b; b = r; } return a; };
    for (job.stride = job.blocks / 3 * 2 + 1; gcd(job.stride, job.blocks) != 1;) job.stride++;

    std::lock_guard<std::mutex> lock(*launch_mutex);
    if (!pool) {
        pool = new Pool(worker_count());
        catch_faults();
        // A forked child has none of these OS threads. It makes its own at its first launch.
        static int once = pthread_atfork(nullptr, nullptr, [] { pool = nullptr; launch_mutex = new std::mutex; });
        (void)once;
    }
    job.workers = pool->workers;
    pool->run_job(job);
    return job.error;
}

}  // namespace llmc

// Runs a kernel. `launch` is a packed Launch, followed by the arguments. Returns null, or what went wrong.
extern "C" const char* llmc_launch(const llmc::Kernel* kernel, const llmc::Launch* launch) {
    static __thread char* message;
    std::string error = llmc::run_launch(kernel, launch);
    if (error.empty()) return nullptr;
    free(message);
    return message = strdup(error.c_str());
}

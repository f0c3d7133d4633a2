// Records what every thread of a launch touches, for dev/microscope. A part of runtime.cpp in builds with
// LLMC_MICROSCOPE.
//
// Kernels are compiled with GCC's -fsanitize=thread and -fsanitize-coverage=trace-pc, but linked without the libraries
// of these. The compiler calls functions before each access and in each basic block, and this file defines them. They
// keep a log for each thread. When a block has ended, its logs are replayed warp by warp, as a GPU executes them: all
// lanes at the same instruction execute it together, and lanes that a branch has separated meet again where all their
// paths join (at the branch's immediate post-dominator). The result is a list of warp instructions with the addresses
// of their lanes.
//
// Races are found while the threads run, by vector clocks (Flanagan and Freund's FastTrack, PLDI 2009). A race is two
// accesses to one element, at least one of them a write, by two blocks, or by two threads that met at no __syncthreads
// or __syncwarp in between.

#include <algorithm>
#include <set>
#include <unordered_map>

namespace llmc {
namespace microscope {

enum Kind : uint8_t { LOAD, STORE, ATOMIC, BARRIER, MEETING, VISIT };  // VISIT: a basic block begins

enum Space : int { DEVICE, STATIC_SHARED, DYNAMIC_SHARED };
// An array that kernels touch. base: for a static shared array its offset among the library's thread-local variables.
// Dynamic shared memory has neither base nor size here.
struct Array {
    char* base;
    size_t size;
    Space space;
    int item;                               // bytes of an element, if known; 4 in shared memory
};

struct Event {                              // of one thread
    char* pc;                               // where the call returns to
    int64_t offset;                         // in the array
    int array;
    Kind kind;
    uint8_t size;                           // bytes
};

// What dev/microscope reads, as NumPy's STEP and RACE there.
struct Step {                               // a warp instruction
    int64_t pc;
    int32_t block, warp, epoch;             // epoch: barriers that the warp has passed
    uint32_t mask;                          // lanes that take part
    int32_t array;
    uint8_t kind, size, unused[2];
    int64_t what;                           // of a barrier or a meeting: its name, a C string
    int64_t offset[32];                     // bytes from the array's beginning, of each lane
};

struct Access { int64_t pc; int32_t block, thread; uint8_t kind, unused[7]; };
struct Race { Access one, other; int32_t array, count; int64_t offset; };
struct Outside { int64_t pc, count; };      // accesses outside the arrays

struct Result {                             // of a launch
    const Step* steps;
    int64_t step_count;
    const Race* races;
    int64_t race_count;
    const Outside* outside;
    int64_t outside_count;
    char* library;                          // where the kernel's library was loaded
    int32_t grid[3], block[3];
};

struct Seen { Access access; uint32_t clock; int epoch; };
struct Accesses {                           // of one kind, with which a later access of another kind may race
    Seen by_block[2]{{{0, -1, -1}}, {{0, -1, -1}}};                     // by two different blocks
    std::vector<Seen> by_thread;            // in this block since its last barrier
};
struct Element {                            // the accesses to an element of an array since it was last stored to
    Seen stored{{0, -1, -1}};
    Accesses loads, atomics;
};

struct State {
    bool active = false;
    std::vector<Array> given, arrays;       // arrays: where they lie in this launch
    std::vector<Event> log[MAX_THREADS];
    std::vector<Step> steps;
    std::vector<Race> races;
    std::map<std::tuple<int64_t, int64_t, int, int>, size_t> race_at;
    std::vector<std::unordered_map<int64_t, Element>> elements;         // of each array
    std::unordered_map<int64_t, int64_t> outside;                       // how often, by pc
    std::vector<Outside> all_outside;
    uint32_t clock[MAX_THREADS][32];        // of a thread: what it knows of its warp's lanes
    int epoch, block;
    char* variables = nullptr;              // the library's thread-local variables, of this OS thread
    size_t variables_size = 0;
    Result result;
};
static State state;

// ---- races

static bool ordered(const Seen& before, int thread, int block) {
    if (before.access.block != block) return false;
    if (before.access.thread == thread || before.epoch < state.epoch) return true;
    unsigned warp_size = self->warp_size, there = before.access.thread;
    return there / warp_size == thread / warp_size && before.clock <= state.clock[thread][there % warp_size];
}

static void note_race(const Seen& before, const Access& now, int array, int64_t offset) {
    auto lines = std::make_tuple(before.access.pc, now.pc, (int)before.access.kind, (int)now.kind);
    auto [found, is_new] = state.race_at.insert({lines, state.races.size()});
    if (is_new) state.races.push_back({before.access, now, array, 0, offset});
    state.races[found->second].count++;
}

static void look_for_races(const Event& e, int thread) {
    const Array& array = state.arrays[e.array];
    Access now = {(int64_t)e.pc, state.block, thread, e.kind, {}};
    Seen seen = {now, state.clock[thread][thread % self->warp_size], state.epoch};
    for (int64_t at = e.offset / array.item; at <= (e.offset + e.size - 1) / array.item; at++) {
        Element& element = state.elements[e.array][at];
        auto against = [&](const Seen& before) {
            if (before.access.thread < 0) return;
            // Another block's own shared memory.
            if (array.space != DEVICE && before.access.block != state.block) return;
            if (!ordered(before, thread, state.block)) note_race(before, now, e.array, array.item * at);
        };
        auto against_all = [&](const Accesses& accesses) {
            for (const Seen& one : accesses.by_thread) if (one.access.block == state.block) against(one);
            for (const Seen& one : accesses.by_block) if (one.access.block != state.block) against(one);
        };
        auto add = [&](Accesses& accesses) {
            std::vector<Seen>& known = accesses.by_thread;
            const auto is_old = [&](const Seen& one) {
                return one.epoch != state.epoch || one.access.block != state.block;
            };
            const auto is_ours = [&](const Seen& one) { return one.access.thread == thread; };
            if (!known.empty() && is_old(known[0])) known.clear();
            auto same = std::find_if(known.begin(), known.end(), is_ours);
            if (same != known.end()) *same = seen;
            else known.push_back(seen);
            if (accesses.by_block[0].access.block == state.block) return;
            accesses.by_block[1] = accesses.by_block[0], accesses.by_block[0] = seen;
        };
        against(element.stored);
        if (e.kind != LOAD) against_all(element.loads);
        if (e.kind != ATOMIC) against_all(element.atomics);             // atomics do not race with one another
        if (e.kind == STORE) element = {}, element.stored = seen;
        else add(e.kind == LOAD ? element.loads : element.atomics);
    }
}

struct Pause {                              // accesses by one lane for a whole meeting belong to no thread
    bool was = state.active;
    Pause() { state.active = false; }
    ~Pause() { state.active = was; }
};

static void met(Worker& w, unsigned warp, unsigned lanes, const char* what) {
    if (!state.active || strcmp(what, "__syncwarp")) return;            // a shuffle orders no memory
    uint32_t joined[32] = {};
    for (unsigned rest = lanes; rest; rest &= rest - 1)
        for (unsigned i = 0; i < 32; i++)
            joined[i] = std::max(joined[i], state.clock[warp * w.warp_size + __builtin_ctz(rest)][i]);
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        unsigned lane = __builtin_ctz(rest);
        uint32_t* clock = state.clock[warp * w.warp_size + lane];
        memcpy(clock, joined, sizeof joined);
        clock[lane]++;
    }
}

static void barrier_passed() { state.epoch++; }

// ---- the log

static void note(void* pc, Kind kind, int array, int64_t offset, size_t size) {
    state.log[self->current].push_back({(char*)pc, offset, array, kind, (uint8_t)size});
}

static void touch(void* pc, const volatile void* address, size_t size, Kind kind) {
    if (!state.active || !self || !self->running) return;
    char* at = (char*)address;
    for (size_t i = 0; i < state.arrays.size(); i++) {
        Array& array = state.arrays[i];
        if ((size_t)(at - array.base) >= array.size) continue;
        note(pc, kind, i, at - array.base, size);
        look_for_races(state.log[self->current].back(), self->current);
        return;
    }
    if ((size_t)(at - (char*)__builtin_frame_address(0)) < STACK_SIZE) return;  // a local variable
    if ((size_t)(at - state.variables) < state.variables_size) return;          // threadIdx and its like
    state.outside[(int64_t)pc]++;
}

// Several bytes that are no vector: logs their words, one after the other.
static void touch_range(void* pc, const volatile char* address, size_t size, Kind kind) {
    const bool is_word = size == 1 || size == 2 || size == 4 || size == 8 || size == 16 || size == 32;
    if (is_word) return touch(pc, address, size, kind);
    for (size_t i = 0; i < size; i += 4) touch(pc, address + i, size - i < 4 ? size - i : 4, kind);
}

static void wait(void* pc, Kind kind, const char* what) {
    if (state.active) note(pc, kind, -1, (int64_t)what, 0);
}

// ---- the replay of a warp

struct Replay {
    const Event *at[32], *end[32];
    int epoch[32] = {}, warp;
    std::map<char*, std::set<char*>> after; // from each basic block, those to which lanes go; null is the kernel's end
    // Of each basic block, the immediate post-dominator; null if no lane does more there.
    std::map<char*, char*> meeting_points;

    char* block_of(int lane) { return at[lane] == end[lane] ? nullptr : at[lane]->pc; }

    // Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm", on the reversed graph of the paths that this
    // warp's lanes have taken.
    void find_meeting_points(const std::vector<Event>* logs, int lanes) {
        std::map<char*, std::set<char*>> before;
        std::set<char*> busy;                                           // from these there is something to do
        for (int lane = 0; lane < lanes; lane++) {
            char* last = nullptr;
            bool begun = false;
            for (const Event& e : logs[lane]) {
                if (e.kind != VISIT) { busy.insert(last); continue; }
                if (begun) before[e.pc].insert(last);
                last = e.pc, begun = true;
            }
            if (begun) before[nullptr].insert(last);
        }
        for (auto& [block, all] : before) for (char* b : all) after[b].insert(block);
        std::vector<char*> order;                                       // postorder from the end, against the arrows
        std::map<char*, int> number;
        std::vector<std::pair<char*, std::vector<char*>>> path;
        auto enter = [&](char* block) {
            number[block] = -1;
            path.push_back({block, {before[block].begin(), before[block].end()}});
        };
        enter(nullptr);
        while (!path.empty()) {
            auto& [block, rest] = path.back();
            if (rest.empty()) {
                number[block] = order.size();
                order.push_back(block);
                path.pop_back();
            } else {
                char* next = rest.back();
                rest.pop_back();
                if (!number.count(next)) enter(next);
            }
        }
        std::map<char*, char*>& point = meeting_points;
        point[nullptr] = nullptr;
        for (bool changed = true; changed;) {
            changed = false;
            for (size_t i = order.size() - 1; i-- > 0;) {
                char* block = order[i];
                bool any = false;
                char* common = nullptr;
                for (char* next : after[block]) {
                    if (!point.count(next)) continue;
                    if (!any) { common = next, any = true; continue; }
                    char* other = next;
                    while (common != other) {
                        while (number[common] < number[other]) common = point[common];
                        while (number[other] < number[common]) other = point[other];
                    }
                }
                if (any && (!point.count(block) || point[block] != common)) point[block] = common, changed = true;
            }
        }
        for (bool changed = true; changed;) {
            changed = false;
            for (auto& [block, all] : after)
                for (char* next : all) if (busy.count(next) && busy.insert(block).second) changed = true;
        }
        for (auto& [block, meeting] : point) if (!busy.count(meeting)) meeting = nullptr;
    }

    bool reaches(char* from, char* to) {
        std::set<char*> seen;
        std::vector<char*> open{from};
        while (!open.empty()) {
            char* block = open.back();
            open.pop_back();
            for (char* next : after[block]) {
                if (next == to) return true;
                if (seen.insert(next).second) open.push_back(next);
            }
        }
        return false;
    }

    void emit(unsigned lanes) {
        const Event& first = *at[__builtin_ctz(lanes)];
        Step step = {};
        step.pc = (int64_t)first.pc, step.block = state.block, step.warp = warp, step.kind = first.kind;
        step.size = first.size, step.array = first.array, step.epoch = epoch[__builtin_ctz(lanes)];
        if (first.array < 0) step.what = first.offset;
        for (unsigned rest = lanes; rest; rest &= rest - 1) {
            int lane = __builtin_ctz(rest);
            if (at[lane]->array != first.array) continue;               // of another array: a step of its own
            step.mask |= 1u << lane;
            if (first.array >= 0) step.offset[lane] = at[lane]->offset;
            if (first.kind == BARRIER) epoch[lane]++;
            at[lane]++;
        }
        state.steps.push_back(step);
    }

    // Executes a basic block's instructions, up to the beginning of the next one.
    void execute(unsigned lanes) {
        for (unsigned rest = lanes; rest; rest &= rest - 1) at[__builtin_ctz(rest)]++;
        for (;;) {
            unsigned waiting = 0, together = 0;
            char* lowest = nullptr;
            for (unsigned rest = lanes; rest; rest &= rest - 1) {
                int lane = __builtin_ctz(rest);
                if (at[lane] == end[lane] || at[lane]->kind == VISIT) continue;
                waiting |= 1u << lane;
                if (!lowest || at[lane]->pc < lowest) lowest = at[lane]->pc, together = 0;
                if (at[lane]->pc == lowest) together |= 1u << lane;
            }
            if (!waiting) return;
            emit(together);
        }
    }

    // Which lanes go on to which basic block; null is the kernel's end.
    std::map<char*, unsigned> ways_of(unsigned lanes) {
        std::map<char*, unsigned> ways;
        for (unsigned rest = lanes; rest; rest &= rest - 1) ways[block_of(__builtin_ctz(rest))] |= rest & -rest;
        return ways;
    }

    // If some lanes return, only the kernel's end is common to all. The others meet as soon as they are at the same
    // basic block. If one group's path passes another group's block, but not the other way round, the other group
    // waits.
    void run_to_the_end(std::map<char*, unsigned> ways, const std::vector<Event>* logs, int count) {
        for (ways.erase(nullptr); !ways.empty(); ways.erase(nullptr)) {
            auto first = std::find_if(ways.begin(), ways.end(), [&](auto& one) {
                return std::none_of(ways.begin(), ways.end(), [&](auto& other) {
                    return other.first != one.first && reaches(other.first, one.first) &&
                        !reaches(one.first, other.first);
                });
            });
            auto [block, lanes] = *first;
            ways.erase(first);
            execute(lanes);
            std::map<char*, unsigned> parted = ways_of(lanes);
            char* meeting = meeting_points[block];
            if (parted.size() > 1 && meeting) {
                for (auto& [next, group] : parted) run(group, meeting, logs, count);
                ways[meeting] |= lanes;
            } else {
                for (auto& [next, group] : parted) ways[next] |= group;
            }
        }
    }

    // Replays `lanes`, from the block at which they all are, up to the basic block `stop`.
    void run(unsigned lanes, char* stop, const std::vector<Event>* logs, int count) {
        for (;;) {
            char* block = block_of(__builtin_ctz(lanes));
            if (block == stop) return;
            execute(lanes);
            std::map<char*, unsigned> ways = ways_of(lanes);
            if (ways.size() == 1) continue;
            if (meeting_points.empty()) find_meeting_points(logs, count);
            char* meeting = meeting_points[block];
            if (!meeting) return run_to_the_end(ways, logs, count);
            for (auto& [next, group] : ways) run(group, meeting, logs, count);
        }
    }
};

// ---- a block, a launch

static void block_begins(Worker& w) {
    if (!state.active) return;
    Index i = w.builtins.blockIdx, size = w.builtins.gridDim;
    state.block = i.x + size.x * (i.y + size.y * i.z);
    state.epoch = 0;
    for (unsigned t = 0; t < w.threads; t++) {
        state.log[t].clear();
        memset(state.clock[t], 0, sizeof state.clock[t]);
        state.clock[t][t % w.warp_size] = 1;
    }
    for (size_t i = 0; i < state.arrays.size(); i++) if (state.arrays[i].space != DEVICE) state.elements[i].clear();
}

static void block_ends(Worker& w) {
    if (!state.active) return;
    for (unsigned first = 0; first < w.threads; first += w.warp_size) {
        Replay replay;
        unsigned lanes = std::min(w.warp_size, w.threads - first);
        replay.warp = first / w.warp_size;
        for (unsigned i = 0; i < lanes; i++) {
            std::vector<Event>& log = state.log[first + i];
            replay.at[i] = log.data(), replay.end[i] = log.data() + log.size();
        }
        replay.run(0xffffffffu >> (32 - lanes), nullptr, &state.log[first], lanes);
    }
}

static void launch_begins(Worker& w) {
    if (!state.active) return;
    const Library library = find_library(w.job->kernel);
    state.result.library = library.base, state.variables = library.variables, state.variables_size = library.size;
    state.arrays = state.given;
    for (Array& array : state.arrays) {
        if (array.space == STATIC_SHARED) array.base = state.variables + (size_t)array.base;
        if (array.space == DYNAMIC_SHARED) array.base = w.shared, array.size = w.shared_size;
    }
    memcpy(state.result.grid, &w.builtins.gridDim, sizeof(Index));
    memcpy(state.result.block, &w.builtins.blockDim, sizeof(Index));
}

}  // namespace microscope
}  // namespace llmc

// Watches the next launch. llmc_microscope_end, below, returns what the launch did with the arrays.
extern "C" void llmc_microscope_begin(const llmc::microscope::Array* arrays, int count) {
    using namespace llmc::microscope;
    state.given.assign(arrays, arrays + count);
    state.elements.assign(count, {}), state.outside.clear();
    state.steps.clear(), state.races.clear(), state.race_at.clear();
    state.active = true;
}

extern "C" const llmc::microscope::Result* llmc_microscope_end() {
    using namespace llmc::microscope;
    state.active = false;
    state.elements.clear();
    state.all_outside.clear();
    for (auto& [pc, count] : state.outside) state.all_outside.push_back({pc, count});
    Result& result = state.result;
    result.steps = state.steps.data(), result.step_count = state.steps.size();
    result.races = state.races.data(), result.race_count = state.races.size();
    result.outside = state.all_outside.data(), result.outside_count = state.all_outside.size();
    return &result;
}

// ---- what the compiler calls

#define LLMC_SEEN(p, size, kind) llmc::microscope::touch(__builtin_return_address(0), p, size, llmc::microscope::kind)
#define LLMC_ACCESSES(size)                                                             \
    extern "C" void __tsan_read##size(void* p) { LLMC_SEEN(p, size, LOAD); }            \
    extern "C" void __tsan_write##size(void* p) { LLMC_SEEN(p, size, STORE); }          \
    extern "C" void __tsan_unaligned_read##size(void* p) { LLMC_SEEN(p, size, LOAD); }  \
    extern "C" void __tsan_unaligned_write##size(void* p) { LLMC_SEEN(p, size, STORE); }
LLMC_ACCESSES(1)
LLMC_ACCESSES(2)
LLMC_ACCESSES(4)
LLMC_ACCESSES(8)
LLMC_ACCESSES(16)
#define LLMC_SEEN_RANGE(p, size, kind) \
    llmc::microscope::touch_range(__builtin_return_address(0), (char*)p, size, llmc::microscope::kind)
extern "C" void __tsan_read_range(void* p, size_t size) { LLMC_SEEN_RANGE(p, size, LOAD); }
extern "C" void __tsan_write_range(void* p, size_t size) { LLMC_SEEN_RANGE(p, size, STORE); }

// CUDA's atomics are loops here, of a load and a compare-and-exchange. The latter counts as the whole atomic.
#define LLMC_ATOMICS(bits, type)                                                                           \
    extern "C" type __tsan_atomic##bits##_load(const volatile type* p, int) {                              \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                       \
    }                                                                                                      \
    extern "C" int __tsan_atomic##bits##_compare_exchange_weak(                                            \
        volatile type* p, type* expected, type value, int, int) {                                          \
        LLMC_SEEN(p, sizeof *p, ATOMIC);                                                                   \
        return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    }
LLMC_ATOMICS(32, uint32_t)
LLMC_ATOMICS(64, uint64_t)
extern "C" void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

extern "C" void __sanitizer_cov_trace_pc() {
    using namespace llmc::microscope;
    if (state.active && llmc::self && llmc::self->running) note(__builtin_return_address(0), VISIT, -1, 0, 0);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

// What a compiled kernel file and the runtime share.
#pragma once
#include <cstddef>

namespace llmc {

struct Index { int x, y, z; };

struct Builtins {               // CUDA's built-in variables that all threads of a block share
    Index blockIdx, blockDim, gridDim;
};

struct Kernel {
    const char* name;
    void (*run_threads)(const void* args, const Builtins& builtins, Index from);  // from thread `from` to `end`
    unsigned warp_size;         // lanes in a warp: 1 or 32
    int max_threads;            // __launch_bounds__; 0 where there are none
};

// Where the loop over the block's threads ends: at the block's size. Once a thread has waited, the loop ends after its
// present thread (the runtime then sets `end` to 0). A kernel writes no variables of type End, so the compiler may
// assume that the kernel does not change it.
struct End { long x, y, z; };
extern __thread End end;

// `thread` is the thread that calls one of the functions below.

// Waits for all threads of the block that have not returned. Returns how many of them said yes.
int block_wait(Index thread, bool yes, const char* what, const char* file, int line);

// Waits for all lanes in `mask` that have not returned: their meeting. Every lane brings a pointer to a variable of its
// own. The last lane to come calls `together` with all these pointers (null for a lane that takes no part), and
// `together` may read and write through them.
typedef void (*Together)(void* const* lanes);
void warp_wait(Index thread, unsigned mask, void* mine, Together together, const char* what, const char* file,
               int line);

// An mbarrier in shared memory. A phase ends when no arrival and no byte is missing; phases have parity 0, 1, 0 ...
struct MBarrier {
    signed char count, missing;     // arrivals of a phase, and those still missing
    bool parity;                    // of the phase that has not ended
    int bytes;                      // missing
};
void mbarrier_init(MBarrier& barrier, int count);
void mbarrier_add(MBarrier& barrier, int arrivals, int bytes);      // bytes that come; those to wait for are negative
// Waits for a phase's end.
void mbarrier_wait(Index thread, const MBarrier& barrier, bool parity, const char* file, int line);

unsigned long long blocks_begun();  // by this worker: a number that each block has to itself
void* dynamic_shared();         // the launch's shared_mem bytes for this block, aligned to 128

// Ends the launch with an error that names kernel, block and thread. It does not return. It is not declared so, because
// AddressSanitizer would then look for the end of a stack that it does not know.
void fail(Index thread, const char* message, const char* file, int line);

}  // namespace llmc

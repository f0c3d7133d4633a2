// What a compiled kernel file and the runtime share: CUDA's built-in variables and the few functions that wait.
#pragma once
#include <cstddef>

struct uint3 { unsigned x, y, z; };
typedef uint3 dim3;

// Of the thread that now runs on this OS thread. Real variables, so that gdb can show and compare them.
extern __thread uint3 threadIdx, blockIdx;
extern __thread dim3 blockDim, gridDim;

namespace llmc {

struct Kernel {
    const char* name;
    // Runs the block's threads from..to (exclusive in each axis), or only as far as the one that returns after the block
    // has become fibers (see runtime.cpp).
    void (*threads)(const void* args, uint3 from, uint3 to);
    unsigned warp;              // lanes in a warp: 1 or 32
    unsigned max_threads;       // __launch_bounds__; 0 where there are none
};

struct Fiber;
extern __thread Fiber* fibers;  // null as long as no thread of the running block has waited

// Waits for all threads of the block that have not returned.
void block_wait(const char* what, const char* file, int line);

// Waits for all lanes in `mask` that have not returned. Every lane brings a pointer to something of its own; the last one to
// come calls `together` with everybody's pointers (null where a lane takes no part), which may read and write them all.
typedef void (*Together)(void* const* lanes);
void warp_wait(unsigned mask, void* mine, Together together, const char* what, const char* file, int line);
unsigned active_lanes();        // the lanes of this warp that have not returned

void warp_sum(float* mine, const char* file, int line);
void warp_max(float* mine, const char* file, int line);

void* dynamic_shared();         // the launch's shared_mem bytes for this block, aligned to 128

// Ends the launch with an error that names kernel, block and thread. Does not return (but is not declared so:
// AddressSanitizer would then look for the end of a stack that it does not know).
void fail(const char* message, const char* file, int line);

}  // namespace llmc

// What a compiled kernel file and the runtime share.
#pragma once
#include <cstddef>

namespace llmc {

struct Index { int x, y, z; };

struct Place {                  // where in the grid a block is
    Index block, block_dim, grid_dim;
};

struct Kernel {
    const char* name;
    void (*threads)(const void* args, const Place& place, Index from);  // runs the threads from `from` to `end`
    unsigned warp;              // lanes in a warp: 1 or 32
    int max_threads;            // __launch_bounds__; 0 where there are none
};

// Where the loop over the block's threads ends: at its size, or, once a thread has waited (0), after the thread it is at.
// Of a type that no kernel writes, so that the compiler knows the end of the loop to be fixed.
struct End { long x, y, z; };
extern __thread End end;

// The functions below are told which thread calls.

// Waits for all threads of the block that have not returned.
void block_wait(Index thread, const char* what, const char* file, int line);

// Waits for all lanes in `mask` that have not returned. Every lane brings a pointer to something of its own; the last one to
// come calls `together` with everybody's pointers (null where a lane takes no part), which may read and write them all.
typedef void (*Together)(void* const* lanes);
void warp_wait(Index thread, unsigned mask, void* mine, Together together, const char* what, const char* file, int line);
unsigned active_lanes(Index thread);  // the lanes of this warp that have not returned

void warp_sum(Index thread, float* mine, const char* file, int line);
void warp_max(Index thread, float* mine, const char* file, int line);

void* dynamic_shared();         // the launch's shared_mem bytes for this block, aligned to 128

// Ends the launch with an error that names kernel, block and thread. Does not return (but is not declared so:
// AddressSanitizer would then look for the end of a stack that it does not know).
void fail(Index thread, const char* message, const char* file, int line);

}  // namespace llmc

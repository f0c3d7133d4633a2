// A kernel whose launch takes a few microseconds starts, and loads, before the previous launch has ended.
#pragma once
#include "common.cuh"

// Starts to bring the line of 128 bytes at p to the L2 cache, and does not wait. This pays in a kernel whose time is
// mostly that of loads which wait for one another.
__device__ inline void prefetch(const floatX* p) {
#ifndef LLMC_CPU
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// Programmatic dependent launch (CUDA programming guide). By default a kernel starts when the previous launch has
// ended. A kernel that says PROGRAMMATIC in its declaration may start earlier: as soon as each block of that launch has
// called trigger_programmatic_launch or has returned. So the kernel loads at a time when it would otherwise wait. This
// pays if launches take a few microseconds.
//
// grid_dependency_synchronize waits until all earlier launches have ended. A kernel calls it before it writes anything,
// and before it reads what an earlier launch may write. Before that call the kernel may prefetch, and it may read
// parameters. Their update has ended by then. If this stream updates them, a copy of tokens comes between, and a copy
// waits for all earlier launches. If another stream does, this one waits for it, and then the kernel does not start
// early (ProgrammaticKernel in device/cuda_kernel.py). A kernel may also read a text's position, by early_position.
//
// In such a kernel no pointer is both const and __restrict__. That would say that nobody writes the array while the
// kernel runs. Then the compiler may move a load from it to the other side of grid_dependency_synchronize.
#define PROGRAMMATIC

__device__ inline void trigger_programmatic_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The position of sequence b, to be read before grid_dependency_synchronize. A copy, or the kernel that draws a token,
// sets the positions. The next launch is the encoder's, which waits before it lets any other kernel start.
__device__ inline int early_position(const int* positions, int b) {
    return *const_cast<const volatile int*>(positions + b);
}

__device__ inline void grid_dependency_synchronize() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

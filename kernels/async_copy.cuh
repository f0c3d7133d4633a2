// Copies from global to shared memory that a thread does not wait for (cp.async, since compute capability 8.0).
#pragma once
#include "common.cuh"

// copy_four starts to copy four words (16 bytes) to shared memory, or zeros if not `inside`, and does not wait. A
// thread calls copies_wait before it reads its copies.
template <class X>
__device__ inline void copy_four(X* to, const X* from, bool inside = true) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
#else
    const uint4 zero = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(to) = inside ? *reinterpret_cast<const uint4*>(from) : zero;
#endif
}

// As copy_four, a single float.
__device__ inline void copy_one(float* to, const float* from, bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
        :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 4 : 0) : "memory");
#else
    *to = inside ? *from : 0.0f;
#endif
}

__device__ inline void copies_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

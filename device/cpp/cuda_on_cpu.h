// CUDA C for a C++17 compiler: included before a .cu file, it lets g++ or clang++ build the file unmodified.
//
// A kernel becomes a plain function, which the loop at the end of this file calls once for each thread. This loop makes
// kernels fast on a CPU. The kernel is inlined into it, and if threads do not wait for each other, the compiler
// vectorises over threadIdx.x as over any loop variable. runtime.cpp says what happens if they do wait.
//
// Of CUDA's functions this file has those that kernels/ and the pages use. Another one takes a line or two here.
//
// The build sets WARP_SIZE. If it is 1 (the default), every thread is a warp of its own. Shuffles are then the
// identity, and a loop `for (int i = lane; i < C; i += WARP_SIZE)` is contiguous. A thread moves CPU_WIDTH numbers at a
// time, in loops that the compiler turns into vectors. If it is 32, warps and accesses are those of a GPU.
#pragma once
#if WARP_SIZE == 1
#define CPU_WIDTH 16
#endif
#include "runtime.h"

#if defined __GNUC__ && !defined __clang__ && !defined __FAST_MATH__ && defined __OPTIMIZE__
// glibc then declares the vector variants of expf, tanhf ... (-fno-finite-math-only unsets it)
#define __FAST_MATH__ 1
#endif
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// A worker runs one block at a time, so each worker has its own shared memory. AddressSanitizer puts red zones around
// ordinary variables only, so its builds run with one worker.
#ifdef LLMC_SANITIZE
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

#undef assert
#define assert(condition) \
    ((condition) ? (void)0 : llmc::fail(threadIdx, "assertion `" #condition "` failed", __FILE__, __LINE__))

// ---- built-in variables. They are signed, unlike CUDA's: so the compiler knows that an index made from them does not
// wrap around from one thread to the next. They are static, so the compiler knows that no pointer points to them.

typedef llmc::Index dim3;
static __thread dim3 threadIdx, blockIdx, blockDim, gridDim;
#define warpSize WARP_SIZE
namespace llmc { const int built_warp_size = WARP_SIZE; }  // the loader asserts that the .cu file has not changed it

// ---- vector types

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- arithmetic

template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> T;
    return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> T;
    return (T)a < (T)b ? (T)b : (T)a;
}

namespace llmc {
template <class To, class From> inline To bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &value, sizeof to);
    return to;
}
}
inline unsigned __float_as_uint(float x) { return llmc::bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return llmc::bits<float>(x); }
inline float __int_as_float(int x) { return llmc::bits<float>(x); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
// The C library's are calls, and with a call a loop is not vectorised. Of a NaN and a number both return the number.
inline float cpu_fmaxf(float x, float y) { return x > y || y != y ? x : y; }
inline float cpu_fminf(float x, float y) { return x < y || y != y ? x : y; }
#define fmaxf cpu_fmaxf
#define fminf cpu_fminf
// exp2 of a whole number, from exponent bits, times exp2 of a fraction, from a polynomial. There are no branches and no
// calls, so the compiler vectorises it anywhere. It is as accurate as a GPU's. Results that would be denormal are 0.
inline float __expf(float exponent) {
    float x = 1.44269504f * exponent;
    x = x < -126.0f ? -126.0f : x > 127.99f ? 127.99f : x;
    const float n = rintf(x), f = x - n;
    float y = 1.5403530e-4f;
    y = y * f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    y *= llmc::bits<float>((unsigned)((int)(n - 1.0f) + 127) << 23) * 2.0f;  // n may be 128
    // A product, since GCC does not vectorise a sum of numbers that a condition makes 0.
    return (exponent > 88.7228f ? INFINITY : y) * (exponent < -87.3365f ? 0.0f : 1.0f);
}
inline float __fdividef(float x, float y) { return x / y; }

// Atomic, since blocks run on several OS threads. Returns the old value, as CUDA's does. The compiler deduces T from
// the pointer alone, so that atomicAdd(unsigned*, int) is legal.
template <class T> inline T atomicAdd(T* p, std::common_type_t<T> value) {
    T old, updated;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do updated = old + value;
    while (!__atomic_compare_exchange(p, &old, &updated, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    return old;
}

// ---- waiting. Default arguments bring the file and line of the call, for the message about a deadlock.

#define LLMC_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace llmc {
struct KeepThread {             // while one thread waits, others run and set threadIdx to theirs
    Index kept = threadIdx;
    ~KeepThread() { threadIdx = kept; }
};
}

inline void __syncthreads(LLMC_HERE) {
    llmc::KeepThread keep;
    llmc::block_wait(threadIdx, false, "__syncthreads", file, line);
}

inline int __syncthreads_count(int predicate, LLMC_HERE) {
    llmc::KeepThread keep;
    return llmc::block_wait(threadIdx, predicate != 0, "__syncthreads_count", file, line);
}

inline void cpu_mbarrier_wait(const llmc::MBarrier& barrier, int parity, LLMC_HERE) {
    llmc::KeepThread keep;
    llmc::mbarrier_wait(threadIdx, barrier, parity, file, line);
}

inline void* cpu_dynamic_shared() { return llmc::dynamic_shared(); }

// All exchange between lanes is built on this meeting of the lanes in `mask`. Each lane brings a variable, `mine`, and
// waits. When the last one has come, one call of `together(T* const lanes[WARP_SIZE])` reads and writes the variables
// of all lanes (the pointer is null for a lane that takes no part). Then all go on. An instruction of a whole warp,
// such as a GPU's matrix product, takes one meeting. `together` must not capture, because one lane's function serves
// all lanes.
template <class T, class F>
inline void cpu_warp_together(unsigned mask, T& mine, F together, const char* what = "cpu_warp_together", LLMC_HERE) {
#if WARP_SIZE == 1
    (void)mask, (void)what, (void)file, (void)line;
    T* const lanes[1] = {&mine};
    together(lanes);
#else
    static_assert(std::is_empty<F>::value, "a function for the whole warp cannot capture one lane's variables");
    (void)together;             // it captures nothing, so it has no data: any object of its type can be called
    llmc::KeepThread keep;
    const auto call = [](void* const* lanes) { char any; (*(F*)&any)((T* const*)lanes); };
    llmc::warp_wait(threadIdx, mask, &mine, call, what, file, line);
#endif
}

inline void __syncwarp(unsigned mask = 0xffffffffu, LLMC_HERE) {
    char nothing;
    cpu_warp_together(mask, nothing, [](char* const*) {}, "__syncwarp", file, line);
}

namespace llmc {
// From which lane does `lane` read? As in CUDA, a lane that would read outside its segment of `width` lanes reads its
// own.
struct FromIndex { static int source(int lane, int i, int w) { return (lane & -w) | (i & (w - 1)); } };
struct FromXor {
    static int source(int lane, int i, int w) { return ((lane ^ i) & -w) <= (lane & -w) ? lane ^ i : lane; }
};
struct FromDown { static int source(int lane, int i, int w) { return (lane & (w - 1)) + i >= w ? lane : lane + i; } };

template <class From, class T>
inline T shuffle(unsigned mask, T value, int argument, int width, const char* what, const char* file, int line) {
    struct Shuffle { T value, result; int argument, width; } mine = {value, value, argument, width};
    if (WARP_SIZE > 1)
        cpu_warp_together(mask, mine, [](Shuffle* const lanes[WARP_SIZE]) {
            for (int lane = 0; lane < WARP_SIZE; lane++) {
                if (!lanes[lane]) continue;
                Shuffle* from = lanes[From::source(lane, lanes[lane]->argument, lanes[lane]->width) % WARP_SIZE];
                if (from) lanes[lane]->result = from->value;
                else memset(&lanes[lane]->result, 0xff, sizeof(T));  // undefined in CUDA; here a NaN, which shows
            }
        }, what, file, line);
    return mine.result;
}
}
template <class T> inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, LLMC_HERE) {
    return llmc::shuffle<llmc::FromIndex>(mask, value, lane, width, "__shfl_sync", file, line);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, LLMC_HERE) {
    return llmc::shuffle<llmc::FromXor>(mask, value, lane_mask, width, "__shfl_xor_sync", file, line);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, LLMC_HERE) {
    return llmc::shuffle<llmc::FromDown>(mask, value, (int)delta, width, "__shfl_down_sync", file, line);
}

inline int __any_sync(unsigned mask, int predicate, LLMC_HERE) {
    bool any = predicate != 0;
    cpu_warp_together(mask, any, [](bool* const lanes[WARP_SIZE]) {
        bool yes = false;
        for (int lane = 0; lane < WARP_SIZE; lane++) yes |= lanes[lane] && *lanes[lane];
        for (int lane = 0; lane < WARP_SIZE; lane++) if (lanes[lane]) *lanes[lane] = yes;
    }, "__any_sync", file, line);
    return any;
}

// ---- the loop over a block's threads, which the loader wraps around each kernel. It is a macro, because GCC 12 would
// not inline a kernel into a function that gets the kernel as an argument, not even as a lambda.

// The loop counts from the block's first thread in the grid. So the kernel's `i = blockIdx.x * blockDim.x +
// threadIdx.x` is the loop's own variable, and GCC takes `if (i < N)` as a second end of the loop, instead of masking
// every access. LLMC_FLATTEN lets GCC inline all functions that a kernel calls. Builds with sanitizers do without it,
// because a file would take them a minute. Warps of 32 do without it, too, because there nothing is vectorised.
#if defined CPU_WIDTH && !defined LLMC_SANITIZE
#define LLMC_FLATTEN __attribute__((flatten))
#else
#define LLMC_FLATTEN
#endif
#define LLMC_FOR_EACH_THREAD(builtins, from, call) \
    blockIdx = builtins.blockIdx, blockDim = builtins.blockDim, gridDim = builtins.gridDim; \
    const int first = blockIdx.x * blockDim.x; \
    for (int z = from.z; z < (int)llmc::end.z; z++, from.y = 0) { \
        threadIdx.z = z; \
        for (int y = from.y; y < (int)llmc::end.y; y++, from.x = 0) { \
            threadIdx.y = y; \
            for (int i = first + from.x; i < first + (int)llmc::end.x; i++) { \
                threadIdx.x = i - first; \
                call; \
            } \
        } \
    }

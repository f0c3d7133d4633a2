// What several layers share: reductions over a warp and a block, bf16, and 16-byte accesses.
// A kernel file stays plain CUDA C++ that NVRTC, nvcc, g++ and clang++ all compile. LLMC_CPU is defined when a C++
// compiler builds the file for the CPU device (device/cpp).
#pragma once

// Lanes in a warp. The CPU device builds the same files with warps of a single lane: a loop
// `for (i = lane; i < n; i += WARP_SIZE)` is contiguous there. A file that needs the GPU's number defines it first.
#ifndef WARP_SIZE
#define WARP_SIZE 32
#endif

// In a kernel's declaration: the kernel overwrites the whole array behind this pointer, and does not read it before.
// Without this word, device/recording.py must assume that the kernel reads and writes an array that is not const.
#define SETS

// DYNAMIC_SHARED(float, x): float* x, the shared memory whose size the launch gives.
#ifdef LLMC_CPU
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(cpu_dynamic_shared())
#else
#define DYNAMIC_SHARED(type, name)                                 \
    extern __shared__ __align__(128) unsigned char name##_bytes[]; \
    type* name = reinterpret_cast<type*>(name##_bytes)
#define INFINITY __int_as_float(0x7f800000)
#endif

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Butterfly reductions: every lane ends with the same value, combined in the same order on every run.
__device__ inline float warp_sum(float x) {
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ inline float warp_max(float x) {
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Block reductions for blocks of at most 32 warps: each warp leaves its result in shared memory, then every warp
// reduces those. The last barrier lets the next reduction reuse the memory. Blocks are one-dimensional, unless the
// caller gives block_max the thread's number in the block and the number of threads.
__device__ inline float block_sum(float x) {
    __shared__ float warp_sums[32];
    const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const float warp_total = warp_sum(x);
    if (lane == 0) warp_sums[threadIdx.x / WARP_SIZE] = warp_total;
    __syncthreads();
    float total = 0.0f;
    for (int w = lane; w < warps; w += WARP_SIZE) total += warp_sums[w];
    total = warp_sum(total);
    __syncthreads();
    return total;
}

__device__ inline float block_max(float x, unsigned thread = threadIdx.x, unsigned threads = blockDim.x) {
    __shared__ float warp_maxima[32];
    const int lane = thread % WARP_SIZE, warps = threads / WARP_SIZE;
    const float warp_largest = warp_max(x);
    if (lane == 0) warp_maxima[thread / WARP_SIZE] = warp_largest;
    __syncthreads();
    float largest = -INFINITY;
    for (int w = lane; w < warps; w += WARP_SIZE) largest = fmaxf(largest, warp_maxima[w]);
    largest = warp_max(largest);
    __syncthreads();
    return largest;
}

// A float of 16 bits, bfloat16: the sign and the exponent of fp32, and the first 7 bits of its mantissa.
struct bf16 {
    unsigned short bits;
};

// The type of parameters, activations and the gradients of activations: float, or bf16 in a build with -DfloatX=bf16. A
// kernel turns the numbers that it reads into fp32, computes in fp32, and rounds to the nearest bf16 when it writes.
// Gradients of parameters are always fp32.
#ifndef floatX
#define floatX float
#endif
#ifdef CPU_WIDTH
constexpr int WIDTH = CPU_WIDTH;
#else
constexpr int WIDTH = 16 / sizeof(floatX);  // numbers in an access of 16 bytes
#endif

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

// Two floats as bf16, rounded to nearest, ties to even. The first is in the lower half of the word.
__device__ inline unsigned to_bf16(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
#else
    auto round = [](float x) {
        const unsigned bits = __float_as_uint(x);
        const unsigned rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded;  // one NaN for all, as from the instruction
    };
    return round(first) | round(second) << 16;
#endif
}

// The two bf16 numbers of such a word.
__device__ inline float first_of(unsigned word) { return __uint_as_float(word << 16); }
__device__ inline float second_of(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

__device__ inline void set(float& to, float x) { to = x; }
__device__ inline void set(bf16& to, float x) { to.bits = (unsigned short)to_bf16(x, x); }

// The value that a kernel reads after x has been stored as floatX.
__device__ inline float rounded(float x) {
    floatX stored;
    set(stored, x);
    return to_float(stored);
}

// WIDTH consecutive numbers, as floats. In memory they are floatX or floats. If possible, a thread moves 16 bytes in an
// access: one access for floatX, one or two for floats. The rows of an (N, C) matrix allow this if C is a multiple of
// WIDTH. Any other C must work, too. So a kernel's body is written once and compiled twice:
//   by_alignment(C % WIDTH == 0, [&](auto memory) { Vec x = memory.load(p, left); ... memory.store(p, x, left); });
// `left` is how many numbers the row still has from p on. Numbers beyond its end load as 0 and are not stored.
struct Vec {
    float x[WIDTH];
};

// Four numbers: an access of 16 bytes in fp32, of 8 bytes in bf16. In a bf16 build some arrays are fp32, too. A Vec of
// eight floats takes two accesses, each with gaps of 16 bytes between a warp's lanes. The CPU takes more numbers.
#ifdef CPU_WIDTH
constexpr int FLOATS = CPU_WIDTH;
#else
constexpr int FLOATS = 4;
#endif

struct Floats {
    float x[FLOATS];
};

struct Ragged {
    template <class T>
    __device__ static Vec load(const T* p, int left) {
        Vec v;
        for (int k = 0; k < WIDTH; k++) v.x[k] = k < left ? to_float(p[k]) : 0.0f;
        return v;
    }
    template <class T>
    __device__ static void store(T* p, const Vec& v, int left) {
        for (int k = 0; k < WIDTH && k < left; k++) set(p[k], v.x[k]);
    }
    template <class T>
    __device__ static Floats load_floats(const T* p, int left) {
        Floats v;
        for (int k = 0; k < FLOATS; k++) v.x[k] = k < left ? to_float(p[k]) : 0.0f;
        return v;
    }
    template <class T>
    __device__ static void store_floats(T* p, const Floats& v, int left) {
        for (int k = 0; k < FLOATS && k < left; k++) set(p[k], v.x[k]);
    }
};

struct Aligned {
#ifdef CPU_WIDTH
    template <class T> static Vec load(const T* p, int) { return Ragged::load(p, WIDTH); }
    template <class T> static void store(T* p, const Vec& v, int) { Ragged::store(p, v, WIDTH); }
    template <class T> static Floats load_floats(const T* p, int) { return Ragged::load_floats(p, FLOATS); }
    template <class T> static void store_floats(T* p, const Floats& v, int) { Ragged::store_floats(p, v, FLOATS); }
#else
    __device__ static Vec load(const float* p, int left) {
        Vec v;
        for (int k = 0; k < WIDTH; k += 4) {
            const float4 f = *reinterpret_cast<const float4*>(p + k);
            v.x[k] = f.x, v.x[k + 1] = f.y, v.x[k + 2] = f.z, v.x[k + 3] = f.w;
        }
        return v;
    }
    __device__ static Vec load(const bf16* p, int left) {
        const uint4 u = *reinterpret_cast<const uint4*>(p);
        const unsigned words[4] = {u.x, u.y, u.z, u.w};
        Vec v;
        for (int k = 0; k < WIDTH; k++) {
            v.x[k] = __uint_as_float(k % 2 == 0 ? words[k / 2] << 16 : words[k / 2] & 0xffff0000u);
        }
        return v;
    }
    __device__ static void store(float* p, const Vec& v, int left) {
        for (int k = 0; k < WIDTH; k += 4) {
            *reinterpret_cast<float4*>(p + k) = make_float4(v.x[k], v.x[k + 1], v.x[k + 2], v.x[k + 3]);
        }
    }
    __device__ static void store(bf16* p, const Vec& v, int left) {
        unsigned words[4];
        for (int k = 0; k < WIDTH; k += 2) words[k / 2] = to_bf16(v.x[k], v.x[k + 1]);
        *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __device__ static Floats load_floats(const float* p, int left) {
        const float4 f = *reinterpret_cast<const float4*>(p);
        return {{f.x, f.y, f.z, f.w}};
    }
    __device__ static Floats load_floats(const bf16* p, int left) {  // p at a multiple of 8 bytes
        const uint2 u = *reinterpret_cast<const uint2*>(p);
        return {{__uint_as_float(u.x << 16), __uint_as_float(u.x & 0xffff0000u), __uint_as_float(u.y << 16),
                 __uint_as_float(u.y & 0xffff0000u)}};
    }
    __device__ static void store_floats(float* p, const Floats& v, int left) {
        *reinterpret_cast<float4*>(p) = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
    }
    __device__ static void store_floats(bf16* p, const Floats& v, int left) {
        *reinterpret_cast<uint2*>(p) = make_uint2(to_bf16(v.x[0], v.x[1]), to_bf16(v.x[2], v.x[3]));
    }
#endif
};

template <class Body>
__device__ inline void by_alignment(bool aligned, Body body) {
    if (aligned) body(Aligned()); else body(Ragged());
}

__device__ inline bool is_aligned(const void* p, int bytes = 16) { return reinterpret_cast<size_t>(p) % bytes == 0; }

// What the kernels of flash_attention.cu, for every GPU since 8.0, and those of flash_attention_hopper.cu, for 9.0,
// share: exponentials, copies to shared memory, and the place of a head's rows.
#pragma once
#include "common.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

__device__ inline float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// exp(x / sqrt(HS)) = exp2(x * to_exponent).
template <int HS>
__device__ inline float to_exponent() {
    return LOG2E * rsqrtf((float)HS);
}

// The two bf16 numbers of a word.
__device__ inline float first_of(unsigned word) { return __uint_as_float(word << 16); }
__device__ inline float second_of(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

// Loads four (8, 8) matrices of bf16 from shared memory. `row` is the address of row lane % 8 of matrix lane / 8. The
// lane gets, as r[i], columns 2t and 2t + 1 of row g of matrix i; if TRANSPOSED, rows 2t and 2t + 1 of column g.
template <bool TRANSPOSED>
__device__ inline void load_matrices(unsigned (&r)[4], const bf16* row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
    const unsigned address = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
#elif defined(LLMC_CPU)
    struct Lane { const bf16* row; unsigned r[4]; } mine = {row, {}};
    cpu_warp_together(ALL_LANES, mine, [](Lane* const lanes[32]) {
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++) {
                const int row0 = TRANSPOSED ? 2 * t : g, row1 = TRANSPOSED ? 2 * t + 1 : g;
                const int column0 = TRANSPOSED ? g : 2 * t, column1 = TRANSPOSED ? g : 2 * t + 1;
                const unsigned first = lanes[8 * i + row0]->row[column0].bits;
                lanes[lane]->r[i] = first | (unsigned)lanes[8 * i + row1]->row[column1].bits << 16;
            }
        }
    }, "load_matrices");
    for (int i = 0; i < 4; i++) r[i] = mine.r[i];
#endif
}

// These two start to copy four words (16 bytes), or a float, to shared memory, or zeros if not `inside`. A thread calls
// copies_wait before it reads what it has copied.
template <class X>
__device__ inline void copy_four(X* to, const X* from, bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
#else
    const uint4 zero = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(to) = inside ? *reinterpret_cast<const uint4*>(from) : zero;
#endif
}

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

// The query head of a sequence that a block works on, and where its queries, keys and values begin in qkv. Their rows
// lie `stride` numbers apart.
template <int HS>
struct Head {
    int C, sequence, number, stride;
    const floatX *query, *key, *value;

    __device__ Head(const floatX* qkv, int T, int NH, int NKV)
        : C(NH * HS), sequence(blockIdx.x / NH), number(blockIdx.x % NH), stride(C + 2 * NKV * HS),
          query(qkv + (long long)sequence * T * stride + number * HS),
          key(qkv + (long long)sequence * T * stride + C + number / (NH / NKV) * HS), value(key + NKV * HS) {}

    // Where the head's rows begin in an array (B, T, NH, HS).
    __device__ long long rows(int T) const { return (long long)sequence * T * C + number * HS; }
};

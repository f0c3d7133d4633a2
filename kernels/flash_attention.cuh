// What flash_attention.cu, for every GPU since compute capability 8.0, and flash_attention_hopper.cu, for 9.0, share:
// exponentials, and numbers in bf16.
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

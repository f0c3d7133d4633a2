// One number's GELU and its derivative, in the tanh form; or in the erf form, for a file that includes gelu_erf.cuh
// first.
#pragma once
#include "common.cuh"

#ifndef GELU_ERF

constexpr float TWICE_SQRT_2_OVER_PI = 1.5957691216057308f;

// 1 / x for 1 <= x. Division rounds correctly, which takes several instructions. In bf16 another rounding follows, so
// an error of 2^-22 does not matter.
__device__ inline float reciprocal(float x) { return sizeof(floatX) == 2 ? __fdividef(1.0f, x) : 1.0f / x; }

// gelu(x) = x * share(x)
__device__ __forceinline__ float share(float x) {
    return reciprocal(1.0f + __expf(-TWICE_SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
}

// gelu'(x), from s = share(x)
__device__ __forceinline__ float gradient(float x, float s) {
    const float slope = TWICE_SQRT_2_OVER_PI * (1.0f + 3.0f * 0.044715f * x * x);
    return s + x * s * (1.0f - s) * slope;
}

#endif

__device__ __forceinline__ float gelu(float x) { return x * share(x); }

// x = inp + bias. inp becomes gelu(x), and d, the gradient of gelu(x), becomes the gradient of x.
__device__ __forceinline__ void differentiate(float& d, float& inp, const float& bias) {
    const float x = inp + bias, s = share(x);
    d *= gradient(x, s);
    inp = x * s;
}

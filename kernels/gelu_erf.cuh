// GELU's erf form, in the place of gelu.cuh's tanh form: gelu(x) = x * share(x), and gelu'(x) = gradient(x, share(x)).
#pragma once
#define GELU_ERF

__device__ __forceinline__ float share(float x) { return 0.5f + 0.5f * erff(0.70710678f * x); }

__device__ __forceinline__ float gradient(float x, float s) { return s + 0.39894228f * x * __expf(-0.5f * x * x); }

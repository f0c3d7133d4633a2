// Quantized weights of a model that writes text: the product of a single row, and the weight in bf16 for products of
// several rows. Both are memory-bound.
#include "../matvec.cuh"
#include "quantize.cuh"

// Two numbers of e4m3, the first in the lower byte. For NaN any number: there the scale is NaN.
__device__ inline void from_e4m3(float& first, float& second, unsigned both) {
#ifdef HAS_E4M3
    asm("{ .reg .b32 both; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 both, %2; mov.b32 {low, high}, both;"
        " cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }" : "=f"(first), "=f"(second) : "h"((unsigned short)both));
#else
    // A float with the exponent and the mantissa of x, in their places, is 2^-120 times x.
    auto number = [](unsigned x) { return 0x1p120f * __uint_as_float((x & 0x80u) << 24 | (x & 0x7fu) << 20); };
    first = number(both), second = number(both >> 8);
#endif
}

__device__ inline Vec numbers_of(const Fp8Vec& q) {
    Vec v;
    for (int k = 0; k < WIDTH; k += 2) from_e4m3(v.x[k], v.x[k + 1], q.words[k / 4] >> k % 4 * 8);
    return v;
}

// matvec_kernel for a weight that is scale (1) times q (OC, C). C is a multiple of 16.
extern "C" __global__ void PROGRAMMATIC matvec_fp8_kernel(SETS floatX* out, const floatX* inp, const unsigned char* q,
                                                          const float* scale, const floatX* bias,
                                                          const floatX* residual, int C, int OC) {
    trigger_programmatic_launch();
    auto load = [&](int o, int i) { return *reinterpret_cast<const Fp8Vec*>(q + (size_t)o * C + i); };
    matvec<64 / WIDTH>(inp, bias, residual, C, OC, Aligned(), load, store_to(out, *scale));
}

// out (n) = scale (1) times q (n). In bf16 this rounds nothing.
extern "C" __global__ void dequantize_kernel(SETS floatX* out, const unsigned char* q, const float* scale, size_t n) {
    const size_t i = WIDTH * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    Vec v = numbers_of(*reinterpret_cast<const Fp8Vec*>(q + i));
    for (int k = 0; k < WIDTH; k++) v.x[k] *= *scale;
    Aligned::store(out + i, v, WIDTH);
}

// RMSNorm's forward pass with a quantized output (norm.cuh). ../rmsnorm.cu explains it.
#include "norm.cuh"

// Pass 1 of forward.
extern "C" __global__ void __launch_bounds__(512, 2) rmsnorm_forward_fp8_kernel(
    float* scale, float* previous_amax, float* block_amax, SETS unsigned char* q, float* __restrict__ rstd,
    const floatX* __restrict__ inp, const floatX* __restrict__ weight, float eps, int N, int C) {
    norm_forward_fp8({scale, previous_amax, block_amax}, q, nullptr, rstd, inp, {nullptr, weight}, eps, N, C);
}

extern "C" __global__ void __launch_bounds__(256, 4) rmsnorm_quantize_kernel(
    float* scale, float* previous_amax, float* block_amax, int second_pass, unsigned char* q, unsigned char* q_T,
    const floatX* __restrict__ inp, const floatX* __restrict__ weight, const float* __restrict__ rstd, int N, int C) {
    norm_quantize({scale, previous_amax, block_amax, second_pass}, q, q_T, inp, {nullptr, weight}, nullptr, rstd, N, C);
}

// out (N, C) = gelu(inp + bias) with gelu(x) = x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3).
// Bytes: one read, one write, 8 N C.
#define WARP_SIZE 32
#include "../../kernels/common.cuh"

constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;

// One float per thread, as the formula has it: a flat index, which is divided to find the channel, and tanhf.
extern "C" __global__ void formula_kernel(float* out, const float* inp, const float* bias, size_t n, int C) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float x = inp[i] + bias[i % C];
    out[i] = 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
}

// The same number: (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)).
__device__ inline float gelu(float x) {
    return x / (1.0f + __expf(-2.0f * SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
}

// Less arithmetic: a block stays in one row, so that there is nothing to divide, and tanh becomes a sigmoid with the
// hardware's exponential. It gains nothing, since the threads wait for memory and not for arithmetic.
extern "C" __global__ void sigmoid_kernel(float* out, const float* inp, const float* bias, int C) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < C) out[(size_t)blockIdx.x * C + i] = gelu(inp[(size_t)blockIdx.x * C + i] + bias[i]);
}

// Four channels per thread: accesses of 16 bytes, four times as much on its way. C is a multiple of 4.
extern "C" __global__ void float4_kernel(float* out, const float* inp, const float* bias, int C) {
    const int i = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= C) return;
    Vec x = Aligned::load(inp + (size_t)blockIdx.x * C + i, 4);
    const Vec b = Aligned::load(bias + i, 4);
    for (int k = 0; k < 4; k++) x.x[k] = gelu(x.x[k] + b.x[k]);
    Aligned::store(out + (size_t)blockIdx.x * C + i, x, 4);
}

// common.cuh's conversions between fp32 and bf16.
#include "../../kernels/common.cuh"

// x (2 n) rounded: two at a time, and one at a time. A thread has two.
extern "C" __global__ void to_bf16_kernel(bf16* pairs, bf16* singles, const float* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const unsigned both = to_bf16(x[2 * i], x[2 * i + 1]);
    pairs[2 * i].bits = (unsigned short)both;
    pairs[2 * i + 1].bits = (unsigned short)(both >> 16);
    set(singles[2 * i], x[2 * i]);
    set(singles[2 * i + 1], x[2 * i + 1]);
}

extern "C" __global__ void to_float_kernel(float* out, const bf16* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = to_float(x[i]);
}

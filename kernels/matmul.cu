// Linear layers: out (N, OC) = inp (N, C) @ weight (OC, C)^T + bias (OC), N = B*T. The products are cuBLAS's;
// here is what stands around them. Memory-bound, both.
#include "common.cuh"

// out[n, i] += bias[i]. Block x: a row; thread: four columns of grid column y.
extern "C" __global__ void add_bias_kernel(float* out, const float* bias, int OC) {
    const int i = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= OC) return;
    float* p = out + (size_t)blockIdx.x * OC + i;
    Four x = load4(p, OC - i);
    const Four b = load4(bias + i, OC - i);
    for (int k = 0; k < 4; k++) x.x[k] += b.x[k];
    store4(p, x, OC - i);
}

// out (C, N) = inp (N, C)^T. A thread owns a column of grid column x and eight rows of grid row y.
extern "C" __global__ void transpose_kernel(float* out, const float* inp, int N, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, n0 = blockIdx.y * COLUMN_ROWS;
    if (i >= C) return;
    float v[COLUMN_ROWS];
#pragma unroll
    for (int k = 0; k < COLUMN_ROWS; k++) v[k] = n0 + k < N ? inp[(size_t)(n0 + k) * C + i] : 0.0f;
    store_transposed(out + (size_t)i * N + n0, v, N - n0);
}

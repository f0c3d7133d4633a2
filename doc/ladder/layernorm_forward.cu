// out (N, C) = (inp - mean) * rstd * weight + bias, row by row, with rstd = 1 / sqrt(variance + 1e-5); mean and rstd (N)
// are kept for backward. Bytes: inp is read once and out written once, 8 N C.
#define WARP_SIZE 32
#include "../../kernels/common.cuh"

// One thread per row: three loops over the row, for its mean, its variance and the output. The lanes of a warp stand in 32
// rows, C floats apart, so each access touches 32 sectors; and the row comes three times.
extern "C" __global__ void thread_a_row_kernel(float* out, float* mean, float* rstd, const float* inp,
                                               const float* weight, const float* bias, int N, int C) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float* row = inp + (size_t)n * C;
    float m = 0.0f, v = 0.0f;
    for (int i = 0; i < C; i++) m += row[i];
    m /= C;
    for (int i = 0; i < C; i++) v += (row[i] - m) * (row[i] - m);
    const float s = rsqrtf(v / C + 1e-5f);
    for (int i = 0; i < C; i++) out[(size_t)n * C + i] = (row[i] - m) * s * weight[i] + bias[i];
    mean[n] = m;
    rstd[n] = s;
}

// The sum over a block of 256 threads, in eight steps of a tree; every thread gets it.
__device__ inline float tree_sum(float* sums, float x) {
    sums[threadIdx.x] = x;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    const float total = sums[0];
    __syncthreads();  // before the next sum overwrites it
    return total;
}

// One block per row: neighbouring threads take neighbouring channels, and add up by a tree in shared memory. Each step of
// the tree is a barrier for all 256 threads, and half of those that worked before have nothing left to do.
extern "C" __global__ void block_a_row_kernel(float* out, float* mean, float* rstd, const float* inp,
                                              const float* weight, const float* bias, int N, int C) {
    __shared__ float sums[256];
    const int n = blockIdx.x;
    const float* row = inp + (size_t)n * C;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < C; i += 256) sum += row[i];
    const float m = tree_sum(sums, sum) / C;
    sum = 0.0f;
    for (int i = threadIdx.x; i < C; i += 256) sum += (row[i] - m) * (row[i] - m);
    const float s = rsqrtf(tree_sum(sums, sum) / C + 1e-5f);
    for (int i = threadIdx.x; i < C; i += 256) out[(size_t)n * C + i] = (row[i] - m) * s * weight[i] + bias[i];
    if (threadIdx.x == 0) mean[n] = m, rstd[n] = s;
}

// One warp per row: five shuffles add up the lanes' sums from register to register, without shared memory or barriers.
// Block: (32 lanes, rows).
extern "C" __global__ void warp_a_row_kernel(float* out, float* mean, float* rstd, const float* inp,
                                             const float* weight, const float* bias, int N, int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
    if (n >= N) return;
    const float* row = inp + (size_t)n * C;
    float sum = 0.0f;
    for (int i = lane; i < C; i += 32) sum += row[i];
    const float m = warp_sum(sum) / C;
    sum = 0.0f;
    for (int i = lane; i < C; i += 32) sum += (row[i] - m) * (row[i] - m);
    const float s = rsqrtf(warp_sum(sum) / C + 1e-5f);
    for (int i = lane; i < C; i += 32) out[(size_t)n * C + i] = (row[i] - m) * s * weight[i] + bias[i];
    if (lane == 0) mean[n] = m, rstd[n] = s;
}

// The row in registers: a lane reads its share once, by 16 bytes and all loads at once, and keeps it for all three steps.
// Registers have no index, so the loops are unrolled to a number fixed here: C is a multiple of 4, at most 1024.
extern "C" __global__ void registers_kernel(float* out, float* mean, float* rstd, const float* inp,
                                            const float* weight, const float* bias, int N, int C) {
    constexpr int VECTORS = 1024 / 4 / 32;
    const int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
    if (n >= N) return;
    const float* row = inp + (size_t)n * C;
    Vec x[VECTORS];
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        const int i = 4 * (lane + 32 * j);
        x[j] = i < C ? Aligned::load(row + i, 4) : Vec();
    }
#pragma unroll
    for (int j = 0; j < VECTORS; j++) sum += (x[j].x[0] + x[j].x[1]) + (x[j].x[2] + x[j].x[3]);
    const float m = warp_sum(sum) / C;
    sum = 0.0f;
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        for (int k = 0; k < 4; k++) {
            x[j].x[k] -= m;
            sum += 4 * (lane + 32 * j) < C ? x[j].x[k] * x[j].x[k] : 0.0f;
        }
    }
    const float s = rsqrtf(warp_sum(sum) / C + 1e-5f);
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        const int i = 4 * (lane + 32 * j);
        if (i >= C) continue;
        const Vec w = Aligned::load(weight + i, 4), b = Aligned::load(bias + i, 4);
        for (int k = 0; k < 4; k++) x[j].x[k] = x[j].x[k] * s * w.x[k] + b.x[k];
        Aligned::store(out + (size_t)n * C + i, x[j], 4);
    }
    if (lane == 0) mean[n] = m, rstd[n] = s;
}

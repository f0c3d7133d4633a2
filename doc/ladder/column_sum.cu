// out (C) += the column sums of inp (N, C): the gradient of a bias. Bytes: inp is read once, 4 N C.
#define WARP_SIZE 32
#include "../../kernels/common.cuh"

// One thread per column: it walks down all the rows, and its warp reads whole sectors. But there are only C threads, far
// fewer than the GPU holds, and each waits for memory again and again.
extern "C" __global__ void thread_a_column_kernel(float* out, const float* inp, int N, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= C) return;
    float sum = 0.0f;
    for (int n = 0; n < N; n++) sum += inp[(size_t)n * C + i];
    out[i] += sum;
}

// One block per column: 256 threads share its rows and add up their sums by a tree in shared memory. There are enough
// threads now, but the lanes of a warp read 32 rows, 4 bytes from each sector.
extern "C" __global__ void block_a_column_kernel(float* out, const float* inp, int N, int C) {
    __shared__ float sums[256];
    float sum = 0.0f;
    for (int n = threadIdx.x; n < N; n += 256) sum += inp[(size_t)n * C + blockIdx.x];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] += sums[0];
}

// Chunks of rows with atomics: a thread per column again, but a grid row for each chunk of rows, which adds its sum to out
// atomically. It is fast and not for us: the chunks are added in the order in which they happen to finish, and a sum of
// floats depends on its order.
extern "C" __global__ void atomics_kernel(float* out, const float* inp, int N, int C, int rows) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= C) return;
    const int begin = blockIdx.y * rows, end = min(N, begin + rows);
    float sum = 0.0f;
    for (int n = begin; n < end; n++) sum += inp[(size_t)n * C + i];
    atomicAdd(out + i, sum);
}

// Chunks of rows, then a second stage: each chunk writes its sum to a place of its own, and a second kernel adds these up
// in order. The result has the same bits on every run, for the price of that kernel.
extern "C" __global__ void chunks_kernel(float* partials, const float* inp, int N, int C, int rows) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= C) return;
    const int begin = blockIdx.y * rows, end = min(N, begin + rows);
    float sum = 0.0f;
    for (int n = begin; n < end; n++) sum += inp[(size_t)n * C + i];
    partials[(size_t)blockIdx.y * C + i] = sum;
}

extern "C" __global__ void second_stage_kernel(float* out, const float* partials, int P, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= C) return;
    float sum = 0.0f;
    for (int p = 0; p < P; p++) sum += partials[(size_t)p * C + i];
    out[i] += sum;
}

// Four columns per thread: the chunks are read by 16 bytes, eight rows ahead of the sums. A quarter of the threads ask for
// four times as much each, so that there is no more on its way than before. C is a multiple of 4.
extern "C" __global__ void float4_kernel(float* partials, const float* inp, int N, int C, int rows) {
    const int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= C) return;
    const int begin = blockIdx.y * rows, end = min(N, begin + rows);
    Vec sum = {};
#pragma unroll 8
    for (int n = begin; n < end; n++) {
        const Vec x = Aligned::load(inp + (size_t)n * C + i, 4);
        for (int k = 0; k < 4; k++) sum.x[k] += x.x[k];
    }
    Aligned::store(partials + (size_t)blockIdx.y * C + i, sum, 4);
}

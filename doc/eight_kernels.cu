// Eight kernels, each for one idea of page 1 of the book. `python doc/eight_kernels.py` launches them and prints what each
// thread did.
#include "../kernels/common.cuh"

// 1. Index: every thread runs the same lines and differs from the others in its numbers alone.
extern "C" __global__ void index_kernel(int* block, int* thread) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    block[i] = blockIdx.x;
    thread[i] = threadIdx.x;
}

// 2. Guard: threads come in whole blocks, numbers do not. A thread without a number does nothing.
extern "C" __global__ void guard_kernel(float* y, const float* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    y[i] = x[i] * x[i];
}

// 3. Two dimensions: who (N, C) gets the number of the block that wrote each element. x runs along a row, y down a column.
extern "C" __global__ void matrix_kernel(int* who, int N, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, n = blockIdx.y * blockDim.y + threadIdx.y;
    if (n >= N || i >= C) return;
    who[n * C + i] = blockIdx.y * gridDim.x + blockIdx.x;
}

// 4. Shared memory: what one thread leaves there, another of the same block finds. Each block of eight turns its numbers
// round.
extern "C" __global__ void shared_kernel(float* y, const float* x) {
    __shared__ float waiting[8];
    const int i = blockIdx.x * 8 + threadIdx.x;
    waiting[threadIdx.x] = x[i];
    __syncthreads();
    y[i] = waiting[7 - threadIdx.x];
}

// 5. Barrier: eight threads add up eight numbers in three rounds, and in each wait for those that still write. rounds
// (4, 8) gets the shared memory before the first round and after each.
extern "C" __global__ void barrier_kernel(float* rounds, const float* x) {
    __shared__ float sums[8];
    const int t = threadIdx.x;
    sums[t] = x[t];
    rounds[t] = sums[t];
    __syncthreads();
    for (int half = 4, round = 1; half > 0; half /= 2, round++) {
        if (t < half) sums[t] += sums[t + half];
        __syncthreads();  // by all threads, also those that had nothing to add
        rounds[8 * round + t] = sums[t];
    }
}

// 6. Shuffle: the lanes of a warp read each other's registers, without memory and without a barrier. rounds (6, 32) gets
// every lane's sum before the first round and after each.
extern "C" __global__ void shuffle_kernel(float* rounds, const float* x) {
    const int lane = threadIdx.x;
    float sum = x[lane];
    rounds[lane] = sum;
    for (int offset = 16, round = 1; offset > 0; offset /= 2, round++) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        rounds[32 * round + lane] = sum;
    }
}

// 7. Race: each thread reads what its left neighbour writes, and no barrier says that the neighbour has written it. It is
// right where threads run in their order, and wrong all the same.
extern "C" __global__ void race_kernel(float* y, const float* x) {
    __shared__ float waiting[64];
    waiting[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = threadIdx.x > 0 ? waiting[threadIdx.x] - waiting[threadIdx.x - 1] : 0.0f;
}

// 8. Warps: one warp adds up n numbers, each lane every WARP_SIZE-th of them. lane_of (n) gets the lane that took each.
extern "C" __global__ void warps_kernel(float* sum, int* lane_of, const float* x, int n) {
    const int lane = threadIdx.x % WARP_SIZE;
    float mine = 0.0f;
    for (int i = lane; i < n; i += WARP_SIZE) {
        mine += x[i];
        lane_of[i] = lane;
    }
    mine = warp_sum(mine);
    if (lane == 0) *sum = mine;
}

// dwte[v] += the sum of dout[n] over the positions n that hold token v; dout (N, C), dwte (V, C), inp (N) token ids.
// Positions with the same token meet in a row of dwte. Bytes: dout is read, and each row that is met is read and written:
// 4 C (N + 2 tokens).
#define WARP_SIZE 32
#include "../../kernels/common.cuh"

// One thread per channel: it adds up all positions, one after the other. Nobody else writes to its column of dwte, so that
// nothing can go wrong; but only C threads work.
extern "C" __global__ void thread_a_channel_kernel(float* dwte, const float* dout, const int* inp, int N, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= C) return;
    for (int n = 0; n < N; n++) dwte[(size_t)inp[n] * C + i] += dout[(size_t)n * C + i];
}

// One thread per float with atomics: all positions at once, in the order in which they come. It is the fastest rung and not
// for us: sums of the same floats in another order differ in their last bits.
extern "C" __global__ void atomics_kernel(float* dwte, const float* dout, const int* inp, int C) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x, n = blockIdx.x;
    if (i < C) atomicAdd(dwte + (size_t)inp[n] * C + i, dout[(size_t)n * C + i]);
}

// One block per token: the host has sorted the positions by token, so a block finds its own side by side and adds them up
// in order. All wait for the block of the commonest token. order (N): the sorted positions; count (N): at the first
// position of a token how many it has, else 0.
extern "C" __global__ void sorted_kernel(float* dwte, const float* dout, const int* inp, const int* order,
                                         const int* count, int C) {
    const int positions = count[blockIdx.x];
    if (positions == 0) return;
    const int* position = order + blockIdx.x;
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        float sum = 0.0f;
        for (int j = 0; j < positions; j++) sum += dout[(size_t)position[j] * C + i];
        dwte[(size_t)inp[position[0]] * C + i] += sum;
    }
}

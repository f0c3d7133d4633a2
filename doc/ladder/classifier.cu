// For each row of logits (N, Vp), of which the first V are vocabulary: losses (N) = log(sum_v exp(x_v)) - x_target, and
// over the logits their gradient, (softmax(x)_v - [v == target]) * dloss, 0 in the padding.
// Bytes: the logits are read once and written once, 8 N Vp.
#define WARP_SIZE 32
#include "../../kernels/common.cuh"

// Writes the gradient of logit i.
__device__ inline void finish(float* row, int i, int V, int target, float largest, float scale, float dloss) {
    row[i] = i >= V ? 0.0f : __expf(row[i] - largest) * scale - (i == target ? dloss : 0.0f);
}

// One thread per row: three loops, for the largest logit, the sum of the exponentials and the gradient. The lanes of a warp
// are a row apart, Vp floats.
extern "C" __global__ void thread_a_row_kernel(float* logits, float* losses, float dloss, const int* targets, int N,
                                               int V, int Vp) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    float* row = logits + (size_t)n * Vp;
    float largest = -INFINITY, sum = 0.0f;
    for (int i = 0; i < V; i++) largest = fmaxf(largest, row[i]);
    for (int i = 0; i < V; i++) sum += __expf(row[i] - largest);
    losses[n] = logf(sum) + largest - row[targets[n]];
    for (int i = 0; i < Vp; i++) finish(row, i, V, targets[n], largest, dloss / sum, dloss);
}

// One block per row: its threads share the row, and reduce by shuffles and shared memory. Still three passes.
extern "C" __global__ void __launch_bounds__(1024) block_a_row_kernel(float* logits, float* losses, float dloss,
                                                                     const int* targets, int V, int Vp) {
    const int n = blockIdx.x, target = targets[n];
    float* row = logits + (size_t)n * Vp;
    const float target_logit = row[target];
    float largest = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < V; i += blockDim.x) largest = fmaxf(largest, row[i]);
    largest = block_max(largest);
    for (int i = threadIdx.x; i < V; i += blockDim.x) sum += __expf(row[i] - largest);
    sum = block_sum(sum);
    if (threadIdx.x == 0) losses[n] = logf(sum) + largest - target_logit;
    for (int i = threadIdx.x; i < Vp; i += blockDim.x) finish(row, i, V, target, largest, dloss / sum, dloss);
}

// Online softmax: the sum is kept relative to the largest logit so far and rescaled where a larger one comes, so that one
// pass finds both. Two passes over the row remain.
extern "C" __global__ void __launch_bounds__(1024) online_kernel(float* logits, float* losses, float dloss,
                                                                const int* targets, int V, int Vp) {
    const int n = blockIdx.x, target = targets[n];
    float* row = logits + (size_t)n * Vp;
    const float target_logit = row[target];
    float largest = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < V; i += blockDim.x) {
        const float x = row[i];
        if (x > largest) {
            sum *= __expf(largest - x);
            largest = x;
        }
        sum += __expf(x - largest);
    }
    const float row_largest = block_max(largest);
    sum = block_sum(sum * __expf(largest - row_largest));
    if (threadIdx.x == 0) losses[n] = logf(sum) + row_largest - target_logit;
    for (int i = threadIdx.x; i < Vp; i += blockDim.x) finish(row, i, V, target, row_largest, dloss / sum, dloss);
}

// Four logits per thread: accesses of 16 bytes, several of them on their way, and one rescaling for four. Vp is a multiple
// of 4; the last four of the vocabulary may be ragged.
extern "C" __global__ void __launch_bounds__(1024) float4_kernel(float* logits, float* losses, float dloss,
                                                                const int* targets, int V, int Vp) {
    const int n = blockIdx.x, target = targets[n];
    float* row = logits + (size_t)n * Vp;
    const float target_logit = row[target];
    float largest = -INFINITY, sum = 0.0f;
#pragma unroll 4
    for (int i = 4 * threadIdx.x; i < V; i += 4 * blockDim.x) {
        Vec x = Aligned::load(row + i, 4);
        float top = largest;
        for (int k = 0; k < 4; k++) {
            if (i + k >= V) x.x[k] = -INFINITY;
            top = fmaxf(top, x.x[k]);
        }
        sum *= __expf(largest - top);
        for (int k = 0; k < 4; k++) sum += __expf(x.x[k] - top);
        largest = top;
    }
    const float row_largest = block_max(largest);
    sum = block_sum(sum * __expf(largest - row_largest));
    if (threadIdx.x == 0) losses[n] = logf(sum) + row_largest - target_logit;
    const float scale = dloss / sum;
#pragma unroll 4
    for (int i = 4 * threadIdx.x; i < Vp; i += 4 * blockDim.x) {
        Vec x = Aligned::load(row + i, 4);
        for (int k = 0; k < 4; k++) {
            x.x[k] = i + k < V ? __expf(x.x[k] - row_largest) * scale - (i + k == target ? dloss : 0.0f) : 0.0f;
        }
        Aligned::store(row + i, x, 4);
    }
}

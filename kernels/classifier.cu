// Fused classifier: softmax cross-entropy over each row of logits (N, Vp) and its gradient, in one kernel.
//   loss = log(sum_v exp(x_v)) - x_target;   dx_v = (softmax(x)_v - [v == target]) * dloss, written over x.
// Only the first V of a row's Vp entries are vocabulary: the padding takes no part and gets gradient 0. Where the loss
// is not finite, the gradient is NaN, so that the gradients' norm tells of any loss that is not finite.
// Memory-bound: the row is read once, for the running maximum and sum (online softmax, Milakov & Gimelshein 2018), and
// waits in shared memory until its gradient is written over it. Where shared memory is too small for a whole row, the
// rest is read a second time.
#include "common.cuh"

// One block a row; one-dimensional. Vp is a multiple of 4. Shared memory: the row's first `cached` floats, a multiple of 4.
extern "C" __global__ void __launch_bounds__(1024) fused_classifier_kernel(float* logits, float* losses, float dloss,
                                                                          const int* targets, int V, int Vp,
                                                                          int cached) {
    DYNAMIC_SHARED(float, cache);
    const int n = blockIdx.x, target = targets[n];
    float* row = logits + (size_t)n * Vp;
    const float target_logit = row[target];  // before anyone overwrites it; the reductions' barriers stand between

    float largest = -INFINITY, sum = 0.0f;  // sum of exp(x - largest) over this thread's share
    for (int i = 4 * threadIdx.x; i < V; i += 4 * blockDim.x) {
        Vec x = Aligned::load(row + i, 4);
        if (i + 4 > V) {
            for (int k = 0; k < 4; k++) x.x[k] = i + k < V ? x.x[k] : -INFINITY;
        }
        if (i < cached) Aligned::store(cache + i, x, 4);
        const float four_largest = fmaxf(fmaxf(x.x[0], x.x[1]), fmaxf(x.x[2], x.x[3]));
        if (four_largest > largest) {
            sum *= __expf(largest - four_largest);
            largest = four_largest;
        }
        for (int k = 0; k < 4; k++) sum += __expf(x.x[k] - largest);
    }
    const float row_largest = block_max(largest);
    const float row_sum = block_sum(sum * __expf(largest - row_largest));

    const float loss = logf(row_sum) + row_largest - target_logit;
    if (threadIdx.x == 0) losses[n] = loss;
    if (!(loss < INFINITY)) dloss = 0.0f * INFINITY;
    const float scale = dloss / row_sum;
    // From the row's end to its start: what was read last is the likeliest to be in L2 still.
    for (int i = 4 * ((V - 1) / (4 * blockDim.x) * blockDim.x + threadIdx.x); i >= 0; i -= 4 * blockDim.x) {
        if (i >= V) continue;
        Vec x = Aligned::load(i < cached ? cache + i : row + i, 4);
        for (int k = 0; k < 4; k++) x.x[k] = __expf(x.x[k] - row_largest) * scale;
        if (i + 4 > V) {
            for (int k = 0; k < 4; k++) x.x[k] = i + k < V ? x.x[k] : 0.0f;
        }
        if (target >= i && target < i + 4) {
            for (int k = 0; k < 4; k++) x.x[k] -= i + k == target ? dloss : 0.0f;
        }
        Aligned::store(row + i, x, 4);
    }
    for (int i = (V + 3) / 4 * 4 + threadIdx.x; i < Vp; i += blockDim.x) row[i] = 0.0f;
}

// Fused classifier: softmax cross-entropy over each row of logits (N, Vp) and its gradient, in one kernel.
//   loss = log(sum_v exp(x_v)) - x_target;   dx_v = (softmax(x)_v - [v == target]) * dloss, written over x.
// Only the first V of a row's Vp entries are the vocabulary. The others are padding: they do not count, and their
// gradient is 0. If a loss is not finite, its row's gradient is NaN, and so the norm of the gradients shows it.
// Without a dloss the caller wants only the loss, and x stays. A target below 0 is not learned: its loss is 0, and the
// gradient of its row, too.
// Memory-bound: the block reads the row once, for the running maximum and sum (online softmax, Milakov & Gimelshein
// 2018). The row waits in shared memory until the block writes its gradient. All of it is on its way there before a
// thread uses its first number. If shared memory is too small for a whole row, the block reads the rest twice.
#include "async_copy.cuh"

__device__ inline float largest_of(Vec v) {
    for (int half = WIDTH / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; k++) v.x[k] = fmaxf(v.x[k], v.x[k + half]);
    }
    return v.x[0];
}

// A block, one-dimensional, takes a row. Vp is a multiple of WIDTH. Shared memory holds the row's first `cached`
// numbers, a multiple of WIDTH.
extern "C" __global__ void __launch_bounds__(1024) fused_classifier_kernel(floatX* logits, float* losses,
                                                                          const float* step_dloss, const int* targets,
                                                                          int V, int Vp, int cached) {
    DYNAMIC_SHARED(floatX, cache);
    const int n = blockIdx.x, target = targets[n];
    floatX* row = logits + (size_t)n * Vp;
    float dloss = step_dloss ? *step_dloss : 0.0f;  // now, so that nobody waits for it later
    if (target < 0) {
        if (threadIdx.x == 0) losses[n] = 0.0f;
        for (int i = WIDTH * threadIdx.x; step_dloss && i < Vp; i += WIDTH * blockDim.x) {
            Aligned::store(row + i, {}, WIDTH);
        }
        return;
    }
    // Each thread reads it before another overwrites it: the barriers of the two reductions come first.
    const float target_logit = to_float(row[target]);

    for (int i = WIDTH * threadIdx.x; i < V && i < cached; i += WIDTH * blockDim.x) {
        // One copy on a GPU. On the CPU WIDTH numbers take several.
        for (int k = 0; k < WIDTH; k += 16 / sizeof(floatX)) copy_four(cache + i + k, row + i + k);
    }
    copies_wait();
    float largest = -INFINITY, sum = 0.0f;  // sum of exp(x - largest) over this thread's numbers
    for (int i = WIDTH * threadIdx.x; i < V; i += WIDTH * blockDim.x) {
        Vec x = Aligned::load(i < cached ? cache + i : row + i, WIDTH);
        if (i + WIDTH > V) {
            for (int k = 0; k < WIDTH; k++) x.x[k] = i + k < V ? x.x[k] : -INFINITY;
        }
        const float vector_largest = largest_of(x);
        if (vector_largest > largest) {
            sum *= __expf(largest - vector_largest);
            largest = vector_largest;
        }
        for (int k = 0; k < WIDTH; k++) sum += __expf(x.x[k] - largest);
    }
    const float row_largest = block_max(largest);
    const float row_sum = block_sum(sum * __expf(largest - row_largest));

    const float loss = logf(row_sum) + row_largest - target_logit;
    if (threadIdx.x == 0) losses[n] = loss;
    if (!step_dloss) return;
    if (!(loss < INFINITY)) dloss = 0.0f * INFINITY;
    const float scale = dloss / row_sum;
    // From the row's end to its start: L2 most likely still has what was read last.
    for (int i = WIDTH * ((V - 1) / (WIDTH * blockDim.x) * blockDim.x + threadIdx.x); i >= 0; i -= WIDTH * blockDim.x) {
        if (i >= V) continue;
        Vec x = Aligned::load(i < cached ? cache + i : row + i, WIDTH);
        for (int k = 0; k < WIDTH; k++) x.x[k] = __expf(x.x[k] - row_largest) * scale;
        if (i + WIDTH > V) {
            for (int k = 0; k < WIDTH; k++) x.x[k] = i + k < V ? x.x[k] : 0.0f;
        }
        if (target >= i && target < i + WIDTH) {
            for (int k = 0; k < WIDTH; k++) x.x[k] -= i + k == target ? dloss : 0.0f;
        }
        Aligned::store(row + i, x, WIDTH);
    }
    for (int i = WIDTH * ceil_div(V, WIDTH) + threadIdx.x; i < Vp; i += blockDim.x) set(row[i], 0.0f);
}

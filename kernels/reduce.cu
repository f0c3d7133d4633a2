// Sums in two stages, always in the same order, so that runs repeat to the last bit: blocks write partial sums, and a
// second kernel adds these up. The gradients of biases and of norms use this, and the gradient norm does.
#include "common.cuh"

// Column sums of inp (N, C): partials[p, i] = sum of inp[n, i] over the rows n of chunk p. Memory-bound: one read of
// inp. A thread has a vector of columns of grid column x. Grid row y is the chunk, which has `rows` rows.
extern "C" __global__ void column_partials_kernel(SETS float* partials, const floatX* inp, int N, int C, int rows) {
    const int i = WIDTH * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= C) return;
    const int begin = blockIdx.y * rows, end = min(N, begin + rows);
    by_alignment(C % WIDTH == 0, [&](auto memory) {
        Vec sum = {};
#pragma unroll 8  // loads in flight: one at a time took 14% longer
        for (int n = begin; n < end; n++) {
            const Vec x = memory.load(inp + (size_t)n * C + i, C - i);
            for (int k = 0; k < WIDTH; k++) sum.x[k] += x.x[k];
        }
        memory.store(partials + (size_t)blockIdx.y * C + i, sum, C - i);
    });
}

// out_y[i] += sum over p of partials[p, y, i], for partials (P, S, C) and up to six outputs (C), one for each grid row
// y. An output may be null. If there are more than S outputs, the rest get the last sum, too. Block: (columns, rows of
// threads over p), at most WARP_SIZE columns, a power of two: a warp has several rows of few columns.
extern "C" __global__ void add_partials_kernel(float* out0, float* out1, float* out2, float* out3, float* out4,
                                               float* out5, const float* partials, int P, int C, int S) {
    __shared__ float warp_sums[32][WARP_SIZE];
    const int y = blockIdx.y, s = min(y, S - 1), thread = threadIdx.y * blockDim.x + threadIdx.x;
    float* out = y == 0 ? out0 : y == 1 ? out1 : y == 2 ? out2 : y == 3 ? out3 : y == 4 ? out4 : out5;
    if (out == nullptr) return;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const bool adds = threadIdx.y == 0 && i < C;
    const float before = adds ? out[i] : 0.0f;  // loads while the block sums up
    float sum = 0.0f;
    if (i < C) {
#pragma unroll 8
        for (int p = threadIdx.y; p < P; p += blockDim.y) sum += partials[((size_t)p * S + s) * C + i];
    }
    for (int offset = WARP_SIZE / 2; offset >= blockDim.x; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    if (thread % WARP_SIZE < blockDim.x) warp_sums[thread / WARP_SIZE][threadIdx.x] = sum;
    __syncthreads();
    if (!adds) return;
    float total = 0.0f;
    const int warps = ceil_div(blockDim.x * blockDim.y, WARP_SIZE);
    for (int warp = 0; warp < warps; warp++) total += warp_sums[warp][threadIdx.x];
    out[i] = before + total;
}

// partials[block] = sum of x[i]^2 over this block's share of x (n); blocks stride over x together.
extern "C" __global__ void squares_partials_kernel(float* partials, const float* x, size_t n) {
    float sum = 0.0f;
    for (size_t i = FLOATS * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); i < n;
         i += FLOATS * (size_t)gridDim.x * blockDim.x) {
        const int left = n - i < FLOATS ? (int)(n - i) : FLOATS;
        by_alignment(left == FLOATS && is_aligned(x), [&](auto memory) {
            const Floats v = memory.load_floats(x + i, left);
            for (int k = 0; k < FLOATS; k++) sum += v.x[k] * v.x[k];
        });
    }
    const float total = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

// One block. norm[0] = sqrt(sum of partials (P)). norm[1] is the factor that brings a gradient of this norm down to
// `largest`; it is 1 if the norm is not above `largest`, or if `largest` is 0. norm[2] counts steps that were not
// finite: their norm was not, or AdamW has set norm[3], which this kernel sets back to 0. norm[1] is NaN if the norm is
// not finite, and without skip_nonfinite also after a step that was not.
extern "C" __global__ void norm_kernel(float* norm, const float* partials, int P, float largest, int skip_nonfinite) {
    float sum = 0.0f;
    for (int p = threadIdx.x; p < P; p += blockDim.x) sum += partials[p];
    const float total = sqrtf(block_sum(sum));
    if (threadIdx.x > 0) return;
    const bool finite = total < INFINITY;
    norm[0] = total;
    norm[2] += (norm[3] != 0.0f ? 1.0f : 0.0f) + (finite ? 0.0f : 1.0f);
    norm[3] = 0.0f;
    norm[1] = largest == 0.0f || total <= largest ? 1.0f : largest / total;
    if (!finite || (norm[2] > 0.0f && !skip_nonfinite)) norm[1] = 0.0f * INFINITY;
}

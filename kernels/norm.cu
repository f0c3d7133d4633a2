// Kernels that all norms share: the forward pass of a few rows, and the output once more, for the weight gradient of
// the product after it. norm.cuh has the forward pass of many rows.
#include "norm.cuh"
#include "tile.cuh"

// The weights and shifts of one vector: 0 past the end of the row, and where there is no tensor.
struct Parameters {
    Vec weight = {}, shift = {};

    template <class Memory>
    __device__ Parameters(Memory memory, const Norm& norm, int i, int C) {
        if (norm.weight != nullptr && i < C) weight = memory.load(norm.weight + i, C - i);
        if (norm.shift != nullptr && i < C) shift = memory.load(norm.shift + i, C - i);
    }

    __device__ Vec of(const Vec& n) const { return scale_and_shift(n, weight, shift); }
};

// x and y become their sums over the block, which has at most MAX_WARPS warps (MAX_THREADS in kernels/norm.py). A
// kernel may call this once: a second call would need a barrier before it writes.
__device__ inline void block_sums(float& x, float& y) {
    constexpr int MAX_WARPS = 16;
    __shared__ float sums[2][MAX_WARPS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    x = warp_sum(x), y = warp_sum(y);
    if (lane == 0) sums[0][warp] = x, sums[1][warp] = y;
    __syncthreads();
    x = 0.0f, y = 0.0f;
#pragma unroll
    for (int w = 0; w < MAX_WARPS; w++) {
        if (w < warps) x += sums[0][w], y += sums[1][w];
    }
}

// The body of the kernels for a few rows, as when a model writes text. Their time is mostly that of loads and barriers
// which wait for one another. So the parameters come while the previous launch is still at work, a thread keeps its
// vector of the row in registers, and one barrier brings both sums. Block n takes row n, and each thread one vector.
// The tensors are those of norm_row (norm.cuh).
//
// With d = x - x[0], the mean is x[0] + mean(d), and the variance is mean(d^2) - mean(d)^2. This difference must not be
// small beside mean(d^2), whose rounding would then count. With d = x it is, if the mean is large. But x[0] is at most
// sqrt(C) standard deviations from the mean, so mean(d^2) is at most C + 1 times the variance.
__device__ __forceinline__ void few_rows_forward(float* mean, float* rstd, const floatX* inp, const Norm& norm0,
                                                 const Norm& norm1, float eps, int C) {
    const int n = blockIdx.x, i = WIDTH * threadIdx.x;
    const size_t start = (size_t)n * C;
    const float one_of_row = 1.0f / C;
    trigger_programmatic_launch();
    by_alignment(C % WIDTH == 0 && norm0.aligned() && norm1.aligned(), [&](auto memory) {
        const Parameters parameters0(memory, norm0, i, C), parameters1(memory, norm1, i, C);
        grid_dependency_synchronize();
        const float first = mean != nullptr ? to_float(inp[start]) : 0.0f;
        const Vec x = i < C ? memory.load(inp + start + i, C - i) : Vec();
        float sum = 0.0f, squares = 0.0f;
        for (int k = 0; k < WIDTH; k++) {
            const float d = i + k < C ? x.x[k] - first : 0.0f;
            sum += d;
            squares += d * d;
        }
        block_sums(sum, squares);
        const float mean_d = mean != nullptr ? sum * one_of_row : 0.0f;
        const float m = first + mean_d, s = rsqrtf(squares * one_of_row - mean_d * mean_d + eps);
        if (i < C) {
            const Vec y = normalised(x, m, s);
            memory.store(norm0.out + start + i, parameters0.of(y), C - i);
            if (norm1.out != nullptr) memory.store(norm1.out + start + i, parameters1.of(y), C - i);
        }
        if (threadIdx.x == 0) {
            if (mean != nullptr) mean[n] = m;
            rstd[n] = s;
        }
    });
}

// A kernel of its own for each norm has none of what the norm lacks. One for all, which tests pointers, takes 1% longer
// for a token of GPT-2 124M on an H200, and 1.5% for one of Qwen3-0.6B.
extern "C" __global__ void PROGRAMMATIC layernorm_few_rows_kernel(floatX* out, float* mean, float* rstd,
                                                                  const floatX* inp, const floatX* weight,
                                                                  const floatX* bias, float eps, int C) {
    few_rows_forward(mean, rstd, inp, {out, weight, bias}, {}, eps, C);
}

extern "C" __global__ void PROGRAMMATIC rmsnorm_few_rows_kernel(floatX* out, float* rstd, const floatX* inp,
                                                                const floatX* weight, float eps, int C) {
    few_rows_forward(nullptr, rstd, inp, {out, weight}, {}, eps, C);
}

extern "C" __global__ void PROGRAMMATIC parallel_residual_few_rows_kernel(
    floatX* out0, floatX* out1, float* mean, float* rstd, const floatX* inp, const floatX* weight0,
    const floatX* shift0, const floatX* weight1, const floatX* shift1, float eps, int C) {
    few_rows_forward(mean, rstd, inp, {out0, weight0, shift0}, {out1, weight1, shift1}, eps, C);
}

// out_T (C,N) = the transposed output of a norm, from what forward read, inp (N,C), and from mean (or null) and rstd,
// which forward wrote. In bf16 out_T (N,C) = the same output, not transposed. A block takes one tile.
extern "C" __global__ void norm_transposed_kernel(SETS floatX* __restrict__ out_T, const floatX* __restrict__ inp,
                                                  const floatX* __restrict__ weight, const floatX* __restrict__ shift,
                                                  const float* __restrict__ mean, const float* __restrict__ rstd,
                                                  int N, int C) {
    __shared__ Tile tile;
    const int i0 = blockIdx.x * TILE_COLUMNS, n0 = blockIdx.y * TILE;
    const Norm norm = {nullptr, weight, shift};
    by_alignment(C % WIDTH == 0 && norm.aligned(), [&](auto memory) {
        tile.fill(memory, out_T, n0, i0, N, C, [&](int n, int i, int) {
            const Vec x = memory.load(inp + (size_t)n * C + i, C - i);
            const float m = mean != nullptr ? mean[n] : 0.0f;
            return norm.of(memory, i, normalised(x, m, rstd[n]), C);
        });
    });
    write_recomputed(out_T, tile, n0, i0, N, C);
}

// Kernels that all norms share: the forward pass of a few rows, and the output once more, for the weight gradient of the
// product after it. norm.cuh has the forward pass of many rows.
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

    __device__ Vec of(const Vec& n) const {
        Vec y;
        for (int k = 0; k < WIDTH; k++) y.x[k] = fmaf(n.x[k], weight.x[k], shift.x[k]);
        return y;
    }
};

// x and y become their sums over the block. A kernel may call this once.
__device__ inline void block_sums(float& x, float& y) {
    __shared__ float sums[2][32];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    x = warp_sum(x), y = warp_sum(y);
    if (lane == 0) sums[0][warp] = x, sums[1][warp] = y;
    __syncthreads();
    x = 0.0f, y = 0.0f;
    for (int w = 0; w < warps; w++) x += sums[0][w], y += sums[1][w];
}

// norm_forward of a few rows, as when a model writes text. Here a kernel's time is mostly that of loads and barriers
// which wait for one another. So the parameters come while the previous launch is still at work, a thread keeps its
// vector of the row in registers, and one barrier brings both sums. Block n takes row n, and each thread one vector.
//
// With d = x - x[0], the mean is x[0] + mean(d), and the variance is mean(d^2) - mean(d)^2. Without x[0] rounding would
// ruin this difference if the mean were large. x[0] is at most sqrt(C) standard deviations from the mean, so rounding
// counts at most C times.
extern "C" __global__ void PROGRAMMATIC norm_few_rows_kernel(
    floatX* __restrict__ out0, floatX* __restrict__ out1, float* __restrict__ mean, float* __restrict__ rstd,
    const floatX* __restrict__ inp, const floatX* __restrict__ weight0, const floatX* __restrict__ shift0,
    const floatX* __restrict__ weight1, const floatX* __restrict__ shift1, float eps, int C) {
    const int n = blockIdx.x, i = WIDTH * threadIdx.x;
    const size_t start = (size_t)n * C;
    const Norm norm0 = {out0, weight0, shift0}, norm1 = {out1, weight1, shift1};
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
        const float m = mean != nullptr ? sum / C : 0.0f, s = rsqrtf(squares / C - m * m + eps);
        if (threadIdx.x == 0) {
            if (mean != nullptr) mean[n] = first + m;
            rstd[n] = s;
        }
        if (i >= C) return;
        const Vec y = normalised(x, first + m, s);
        memory.store(out0 + start + i, parameters0.of(y), C - i);
        if (out1 != nullptr) memory.store(out1 + start + i, parameters1.of(y), C - i);
    });
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

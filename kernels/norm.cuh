// The forward pass of all norms. Over the last axis of x (N, C), N = B*T:
//   n = (x - mean) * rstd,  out = n * weight + shift
// for one or two outs, with rstd = 1 / sqrt(variance + eps). RMSNorm is the same with mean 0 and without shifts.
// Memory-bound: it reads its input once and writes its outputs once, as the row waits in shared memory. A few rows have
// kernels of their own, in norm.cu.
#pragma once
#include "dependent_launch.cuh"

// A vector of out, from one of n. It rounds alike in every kernel.
__device__ inline Vec scale_and_shift(const Vec& n, const Vec& weight, const Vec& shift) {
    Vec y;
    for (int k = 0; k < WIDTH; k++) y.x[k] = fmaf(n.x[k], weight.x[k], shift.x[k]);
    return y;
}

struct Norm {
    floatX* out;           // (N,C)
    const floatX* weight;  // (C). Parameters' addresses need not be multiples of 16.
    const floatX* shift;   // (C)

    __device__ bool aligned() const { return is_aligned(weight) && is_aligned(shift); }

    // A vector of out, from one of n.
    template <class Memory>
    __device__ Vec of(Memory memory, int i, const Vec& n, int C) const {
        const Vec w = memory.load(weight + i, C - i), b = shift != nullptr ? memory.load(shift + i, C - i) : Vec();
        return scale_and_shift(n, w, b);
    }

    template <class Memory>
    __device__ void store_out(Memory memory, size_t start, int i, const Vec& n, int C) const {
        const Vec y = of(memory, i, n, C);
        memory.store(out + start + i, y, C - i);
    }
};

// A vector of n, from one of x.
__device__ inline Vec normalised(Vec x, float mean, float rstd) {
    for (int k = 0; k < WIDTH; k++) x.x[k] = rstd * (x.x[k] - mean);
    return x;
}

// The sum over a row, which one warp has, or the whole block.
__device__ inline float row_sum(float x) { return blockDim.x > WARP_SIZE ? block_sum(x) : warp_sum(x); }

// A row of a kernel: row n of inp, which one warp takes, or the whole block. A thread loads 16 numbers at a time.
// row: shared memory for the row, C floats, rounded up to a multiple of WIDTH. Each thread touches only its own floats.
// norm0: a Norm, or a type with the same members that stores in its own way.
//
// If a model lacks a tensor, its pointer is null: mean, a shift, out1. Where a kernel says nullptr, the compiler leaves
// out the code. Elsewhere a test costs a branch, which all threads take together.
template <class Norm0>
__device__ inline void norm_row(float* mean, float* rstd, const floatX* inp, const Norm0& norm0, const Norm& norm1,
                                float eps, int n, int C, float* row) {
    constexpr int AT_ONCE = 16 / WIDTH;  // vectors that are loaded before the first is used
    const int first = WIDTH * threadIdx.x, step = WIDTH * blockDim.x;
    const size_t start = (size_t)n * C;
    by_alignment(C % WIDTH == 0 && norm0.aligned() && norm1.aligned(), [&](auto memory) {
        float sum = 0.0f;  // of x, or without a mean of its square; 0 past the end of the row
        for (int begin = first; begin < C; begin += AT_ONCE * step) {
            Vec x[AT_ONCE] = {};
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int i = begin + b * step;
                if (i < C) x[b] = memory.load(inp + start + i, C - i);
            }
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int i = begin + b * step;
                if (i >= C) continue;
                Aligned::store(row + i, x[b], WIDTH);
                for (int k = 0; k < WIDTH; k++) sum += mean != nullptr ? x[b].x[k] : x[b].x[k] * x[b].x[k];
            }
        }
        float m = 0.0f;
        if (mean != nullptr) {
            m = row_sum(sum) / C;
            sum = 0.0f;
            for (int i = first; i < C; i += step) {
                const Vec x = Aligned::load(row + i, WIDTH);
                for (int k = 0; k < WIDTH; k++) sum += i + k < C ? (x.x[k] - m) * (x.x[k] - m) : 0.0f;
            }
        }
        const float s = rsqrtf(row_sum(sum) / C + eps);

#pragma unroll (AT_ONCE)
        for (int i = first; i < C; i += step) {
            const Vec x = normalised(Aligned::load(row + i, WIDTH), m, s);
            norm0.store_out(memory, start, i, x, C);
            if (norm1.out != nullptr) norm1.store_out(memory, start, i, x, C);
        }
        if (threadIdx.x == 0) {
            if (mean != nullptr) mean[n] = m;
            rstd[n] = s;
        }
    });
}

// The row of this thread's warp, or of its block. A block is (WARP_SIZE, rows), with a warp for each row, or
// (warps * WARP_SIZE, 1), with several warps for one long row.
__device__ inline int row_of_thread() { return blockIdx.x * blockDim.y + threadIdx.y; }

// The shared memory of this row. A launch gives a block as much for each of its rows.
__device__ inline float* memory_of_row(float* rows, int C) { return rows + threadIdx.y * WIDTH * ceil_div(C, WIDTH); }

// The body of a kernel. Its tensors are norm_row's.
__device__ inline void norm_forward(float* mean, float* rstd, const floatX* inp, const Norm& norm0, const Norm& norm1,
                                    float eps, int N, int C) {
    DYNAMIC_SHARED(float, rows);
    const int n = row_of_thread();
    trigger_programmatic_launch();
    if (n >= N) return;
    grid_dependency_synchronize();
    norm_row(mean, rstd, inp, norm0, norm1, eps, n, C, memory_of_row(rows, C));
}

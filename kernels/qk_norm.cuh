// How the lanes of a warp share a head, and the sums of the backward pass.
#pragma once
#include "rope.cuh"

// As many lanes as a head of 128 channels has vectors: a warp in fp32, half a warp in bf16.
constexpr int LANES = WARP_SIZE > 1 ? 128 / WIDTH : 1;

// The thread's place among the lanes of its head, and that head's place among those at once in a block.
__device__ inline int lane() { return threadIdx.x % LANES; }
__device__ inline int place() { return threadIdx.x / LANES; }
__device__ inline int heads_at_once() { return blockDim.x / LANES; }

// The sum over the lanes of a head. whole: all lanes of the warp call it together, so one constant mask will do.
__device__ inline float head_sum(float x, bool whole = false) {
    if (LANES == WARP_SIZE) return warp_sum(x);
    const unsigned lanes = whole ? 0xffffffffu : 0xffffffffu >> (32 - LANES) << place() * LANES % 32;
    for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(lanes, x, offset);
    return x;
}

// A vector's part of the sum of g * n over its head. dy, x and w are the vectors, s is rstd.
__device__ inline void add_gn(float& sum, const Vec& dy, const Vec& x, const Vec& w, float s) {
    for (int k = 0; k < WIDTH; k++) sum += dy.x[k] * w.x[k] * (x.x[k] * s);
}

// A vector of dx. Adds its dy * n to dweight.
__device__ inline Vec input_gradient(Vec& dweight, const Vec& dy, const Vec& x, const Vec& w, float s, float mean_gn) {
    Vec dx;
    for (int k = 0; k < WIDTH; k++) {
        const float n = x.x[k] * s;
        dx.x[k] = s * (dy.x[k] * w.x[k] - n * mean_gn);
        dweight.x[k] += dy.x[k] * n;
    }
    return dx;
}

// A block's sums of dy * n. LANES lanes go through many heads, and have two rows in shared memory: the sums of their
// query heads, and of their key heads. Until the barrier a lane reads there only what it wrote itself. At the end the
// block writes its sums to partials (gridDim.x, 2, HS): for q, then for k. Shared memory: two rows of HS floats,
// rounded up to a multiple of WIDTH, for each of the heads at once.
struct WeightSums {
    float *all, *own;
    int width, HS;

    __device__ WeightSums(float* memory, int HS) : all(memory), width(WIDTH * ceil_div(HS, WIDTH)), HS(HS) {
        own = all + 2 * place() * width;
        for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
            Aligned::store(own + i, Vec(), WIDTH);
            Aligned::store(own + width + i, Vec(), WIDTH);
        }
    }

    __device__ float* of(bool query) const { return query ? own : own + width; }

    __device__ void write(float* partials) const {
        __syncthreads();
        for (int i = threadIdx.x; i < 2 * HS; i += blockDim.x) {
            const int of = i / HS, channel = i % HS;
            float total = 0.0f;
            for (int y = 0; y < heads_at_once(); y++) total += all[(2 * y + of) * width + channel];
            partials[(size_t)blockIdx.x * 2 * HS + i] = total;
        }
    }
};

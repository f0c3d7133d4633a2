// The products of kernels/mma.cuh as the ladders and the exercises write them: d is added to. And how results are stored.
#pragma once
#include "../../kernels/mma.cuh"

// d (16, 8) += a (16, 8) b (8, 8), by the 32 lanes of a warp together. mma.cuh shows which numbers of a, b and d a lane
// holds: there are 8 groups of 4 lanes, and a group has two rows of a and of d to itself, and a column of b. The core
// multiplies each row by each column, 16 x 8 x 8 multiplications in one instruction, where an FMA of the warp does 32.
__device__ inline void mma(float (&d)[4], const float (&a)[4], float b0, float b1) { mma(d, a, b0, b1, d); }

// d (16, 8) += a (16, 16) b (16, 8), of bf16: twice the multiplications, from as many registers.
__device__ inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma_bf16(d, a, b0, b1, d);
}

// Two neighbours of a row, rounded to its type.
__device__ inline void store_two(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }
__device__ inline void store_two(bf16* to, float x, float y) { *reinterpret_cast<unsigned*>(to) = to_bf16(x, y); }

// Stores a warp's 64 x 32 elements of c, 4 x 4 results, of the 128 x 128 of a block that begin at row m0, column n0.
template <class X>
__device__ inline void store_products(X* c, const float (&sum)[4][4][4], int m0, int n0, int M, int N) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            for (int half = 0; half < 2; half++) {
                const int row = m0 + warp / 4 * 64 + 16 * i + 8 * half + g, column = n0 + warp % 4 * 32 + 8 * j + 2 * t;
                if (row >= M || column >= N) continue;
                store_two(c + (size_t)row * N + column, sum[i][j][2 * half], sum[i][j][2 * half + 1]);
            }
        }
    }
}

// The products of kernels/mma.cuh as the ladders and the exercises write them: d is added to.
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

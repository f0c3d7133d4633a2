// Linear layers: out (N, OC) = inp (N, C) @ weight (OC, C)^T + bias (OC), N = B*T. cuBLAS computes the products, except
// that of a single row. This file has that one, and a transposition. Both are memory-bound.
#include "common.cuh"

// out (C, N) = inp (N, C)^T. A block takes one tile. inp may be a weight, whose address need not be a multiple of 16.
extern "C" __global__ void transpose_kernel(SETS floatX* out, const floatX* inp, int N, int C) {
    __shared__ Tile tile;
    const int i0 = blockIdx.x * TILE_COLUMNS, n0 = blockIdx.y * TILE;
    by_alignment(C % WIDTH == 0 && is_aligned(inp), [&](auto memory) {
        Tile::for_each(n0, i0, N, C, [&](int n, int i, int row, int column, int) {
            tile.put(row, column, memory.load(inp + (size_t)n * C + i, C - i));
        });
    });
    __syncthreads();
    store_transposed(out, tile, n0, i0, N, C);
}

// The product of a single row, for a model that writes text: out (OC) = inp (C) @ weight (OC, C)^T + bias (OC). bias
// may be null. Each number of the weight is used in one multiplication only. So a tile of the weight would have nothing
// to share, and a kernel that loads tiles takes some 4 us even for the smallest weight.
//
// Block: (lanes, outputs), if `lanes` lanes of a warp, a power of two, compute an output; or (warps * WARP_SIZE, 1), if
// several warps do. A thread starts to load AT_ONCE vectors of the weight before it uses the first, and before the
// launch in front has ended. A thread whose output would lie behind the last one computes the last one, too.
extern "C" __global__ void PROGRAMMATIC matvec_kernel(SETS floatX* out, const floatX* inp, const floatX* weight,
                                                      const floatX* bias, int C, int OC) {
    constexpr int AT_ONCE = 32 / WIDTH;
    const int o = min((int)(blockIdx.x * blockDim.y + threadIdx.y), OC - 1), step = WIDTH * blockDim.x;
    trigger_programmatic_launch();
    const floatX* row = weight + (size_t)o * C;
    const float b = bias != nullptr ? to_float(bias[o]) : 0.0f;  // now, so that it is there when the sum is

    by_alignment(C % WIDTH == 0 && is_aligned(weight), [&](auto memory) {
        Vec sum = {};
        for (int first = WIDTH * threadIdx.x; first < C; first += AT_ONCE * step) {
            Vec w[AT_ONCE] = {}, x[AT_ONCE] = {};
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int i = first + b * step;
                if (i < C) w[b] = memory.load(row + i, C - i);
            }
            if (first < step) grid_dependency_synchronize();  // launches in front may write the input, but no weights
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int i = first + b * step;
                if (i < C) x[b] = memory.load(inp + i, C - i);
            }
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                for (int k = 0; k < WIDTH; k++) sum.x[k] += w[b].x[k] * x[b].x[k];
            }
        }
        float total = sum_of(sum);
        if (blockDim.x > WARP_SIZE) total = block_sum(total);
        else for (int i = blockDim.x / 2; i > 0; i /= 2) total += __shfl_xor_sync(0xffffffffu, total, i);
        if (threadIdx.x == 0) set(out[o], total + b);
    });
}

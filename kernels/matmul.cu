// Linear layers: out (N, OC) = inp (N, C) @ weight (OC, C)^T + bias (OC), N = B*T. Where out is the residual stream,
// they also add residual (N, OC), the stream before the branch. cuBLAS computes the products, except that of a
// single row. This file has that one (gelu.cu has it with GELU), and a transposition. Both are memory-bound.
#include "matvec.cuh"
#include "tile.cuh"

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

extern "C" __global__ void __launch_bounds__(128, MATVEC_BLOCKS)
PROGRAMMATIC matvec_kernel(SETS floatX* out, const floatX* inp, const floatX* weight, const floatX* bias,
                           const floatX* residual, int C, int OC) {
    matvec_floatX(inp, weight, bias, residual, C, OC, store_to(out, 1.0f));
}

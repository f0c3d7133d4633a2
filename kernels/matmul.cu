// Linear layers: out (N, OC) = inp (N, C) @ weight (OC, C)^T + bias (OC), N = B*T. The products are cuBLAS's;
// here is what stands around them. Memory-bound, both.
#include "common.cuh"

// out[n, i] += bias[i]. Block x: a row; thread: a vector of columns of grid column y.
extern "C" __global__ void add_bias_kernel(floatX* out, const floatX* bias, int OC) {
    const int i = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= OC) return;
    floatX* p = out + (size_t)blockIdx.x * OC + i;
    by_alignment(OC % WIDTH == 0, [&](auto memory) {
        Vec x = memory.load(p, OC - i);
        const Vec b = memory.load(bias + i, OC - i);
        for (int k = 0; k < WIDTH; k++) x.x[k] += b.x[k];
        memory.store(p, x, OC - i);
    });
}

// out (C, N) = inp (N, C)^T. A block takes one tile. inp may be a weight, which need not begin at 16 bytes.
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

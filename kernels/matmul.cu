// Linear layers: out (N, OC) = inp (N, C) @ weight (OC, C)^T + bias (OC), N = B*T. The products are cuBLAS's;
// here is what stands around them. Memory-bound, both.
#include "common.cuh"

// out[n, i] += bias[i]. Block x: a row; thread: four columns of grid column y.
extern "C" __global__ void add_bias_kernel(float* out, const float* bias, int OC) {
    const int i = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= OC) return;
    float* p = out + (size_t)blockIdx.x * OC + i;
    by_alignment(OC % 4 == 0, [&](auto memory) {
        Four x = memory.load(p, OC - i);
        const Four b = memory.load(bias + i, OC - i);
        for (int k = 0; k < 4; k++) x.x[k] += b.x[k];
        memory.store(p, x, OC - i);
    });
}

// out (C, N) = inp (N, C)^T. A block takes one tile. inp may be a weight, which need not begin at 16 bytes.
extern "C" __global__ void transpose_kernel(SETS float* out, const float* inp, int N, int C) {
    __shared__ Tile tile;
    const int i0 = blockIdx.x * TILE, n0 = blockIdx.y * TILE;
    by_alignment(C % 4 == 0 && is_aligned(inp), [&](auto memory) {
        tile.fill(n0, i0, N, C, [&](int n, int i, int) { return memory.load(inp + (size_t)n * C + i, C - i); });
    });
    __syncthreads();
    store_transposed(out, tile, n0, i0, N, C);
}

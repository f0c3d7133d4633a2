// The output of a norm once more, for the weight gradient of the product after it. norm.cuh has the forward pass.
#include "norm.cuh"
#include "tile.cuh"

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

// GELU, tanh form (Hendrycks & Gimpel 2016): gelu(x) = x/2 * (1 + tanh(u)) = x * sigmoid(2u), which is cheaper,
// with u = sqrt(2/pi) * (x + 0.044715 x^3) and x = inp + bias, where inp (N, C) is a product without its bias yet and C
// is 4 times the model's channels: a multiple of 4, although the bias, a parameter, need not begin at 16 bytes.
// Backward: dinp = dout * gelu'(x), gelu' = s + x * s * (1 - s) * 2 du/dx with s the sigmoid; dbias += sum_rows(dinp).
// Memory-bound: forward reads and writes N*C floats; backward reads two and writes two, one of them gelu(x) transposed:
// the weight gradient of the next product needs it that way, so forward's output need not be kept.
#include "common.cuh"

constexpr float TWICE_SQRT_2_OVER_PI = 1.5957691216057308f;

__device__ inline float gelu_sigmoid(float x) {
    return 1.0f / (1.0f + __expf(-TWICE_SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
}

// Block x: a row; thread: four columns of grid column y.
extern "C" __global__ void gelu_forward_kernel(float* out, const float* inp, const float* bias, int C) {
    const int i = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= C) return;
    const size_t at = (size_t)blockIdx.x * C + i;
    by_alignment(C % 4 == 0 && is_aligned(bias), [&](auto memory) {
        Four x = memory.load(inp + at, C - i);
        const Four b = memory.load(bias + i, C - i);
        for (int k = 0; k < 4; k++) {
            const float u = x.x[k] + b.x[k];
            x.x[k] = u * gelu_sigmoid(u);
        }
        memory.store(out + at, x, C - i);
    });
}

// A block takes the 64 columns of grid column x and walks down the `rows` rows of chunk y by tiles. dout (N,C) becomes
// dinp in place, out_T (C,N) is set to the transposed gelu(inp + bias), partials (gridDim.y, C) to the sums of dinp.
extern "C" __global__ void gelu_backward_kernel(float* dout, float* out_T, float* partials, const float* inp,
                                                const float* bias, int N, int C, int rows) {
    __shared__ Tile tile;
    const int i0 = blockIdx.x * TILE, begin = blockIdx.y * rows, end = min(N, begin + rows);
    Four sums[TILE_VECTORS] = {};

    for (int n0 = begin; n0 < end; n0 += TILE) {
        by_alignment(C % 4 == 0 && is_aligned(bias), [&](auto memory) {
#pragma unroll
            for (int r = 0; r < TILE_ROWS; r++) {
                const int row = threadIdx.y + r * TILE_THREADS;
                for (int c = 0; c < TILE_VECTORS; c++) {
                    const int column = 4 * (threadIdx.x + c * TILE_THREADS), i = i0 + column;
                    if (n0 + row >= end || i >= C) continue;
                    const size_t at = (size_t)(n0 + row) * C + i;
                    Four x = memory.load(inp + at, C - i), d = memory.load(dout + at, C - i);
                    const Four b = memory.load(bias + i, C - i);
                    for (int k = 0; k < 4; k++) {
                        const float u = x.x[k] + b.x[k], s = gelu_sigmoid(u);
                        const float slope = TWICE_SQRT_2_OVER_PI * (1.0f + 3.0f * 0.044715f * u * u);
                        d.x[k] *= s + u * s * (1.0f - s) * slope;
                        x.x[k] = u * s;
                        sums[c].x[k] += d.x[k];
                    }
                    memory.store(dout + at, d, C - i);
                    tile.put(row, column, x);
                }
            }
        });
        __syncthreads();
        store_transposed(out_T, tile, n0, i0, N, C);
        __syncthreads();
    }

    // The threads of a column of the block have sums of the same 64 columns of the matrix: the tile brings them together.
    for (int c = 0; c < TILE_VECTORS; c++) tile.put(threadIdx.y, 4 * (threadIdx.x + c * TILE_THREADS), sums[c]);
    __syncthreads();
    for (int column = threadIdx.y * TILE_THREADS + threadIdx.x; column < TILE; column += TILE_THREADS * TILE_THREADS) {
        float total = 0.0f;
        for (int y = 0; y < TILE_THREADS; y++) total += tile.at[y][column];
        if (i0 + column < C) partials[(size_t)blockIdx.y * C + i0 + column] = total;
    }
}

// GELU (Hendrycks & Gimpel 2016): gelu(x) = x * P(a standard normal number is below x), in two forms:
//   tanh: x/2 * (1 + tanh(u)) = x * sigmoid(2u), which is cheaper, with u = sqrt(2/pi) * (x + 0.044715 x^3);
//   erf: x/2 * (1 + erf(x / sqrt(2))), the definition itself. The tanh form differs from it by 0.0005 at most.
// x = inp + bias, where inp (N, C) is a product to which its bias has not been added yet. The bias is a parameter,
// whose address need not be a multiple of 16, or a null pointer if the product has none.
// Backward: dinp = dout * gelu'(x);  dbias += sum_rows(dinp). With s the factor of x in gelu(x) = x * s,
//   tanh: gelu' = s + x * s * (1 - s) * 2 du/dx;  erf: gelu' = s + x * exp(-x^2 / 2) / sqrt(2 pi).
// Memory-bound: forward reads N*C numbers and writes as many. Backward reads two such arrays and writes two. One of
// these is gelu(x), for the weight gradient of the next product, so forward's output need not be kept. In fp32 it is
// transposed (Tile::fill).
#include "dependent_launch.cuh"
#include "gelu.cuh"
#include "tile.cuh"

constexpr int ROWS = 2;  // of a block of the forward pass

// Block x: ROWS rows; thread: a vector of columns of grid column y. A thread loads the vectors of all its rows before
// it uses the first. With a single row an H200 took 15 to 18% longer.
__device__ __forceinline__ void forward(floatX* out, const floatX* inp, const floatX* bias, int N, int C) {
    const int i = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x);
    const int begin = ROWS * blockIdx.x, rows = min(ROWS, N - begin);
    trigger_programmatic_launch();
    if (i >= C) return;
    grid_dependency_synchronize();
    inp += (size_t)begin * C + i;
    out += (size_t)begin * C + i;
    by_alignment(C % WIDTH == 0 && is_aligned(bias), [&](auto memory) {
        Vec x[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r < rows) x[r] = memory.load(inp + (size_t)r * C, C - i);
        }
        const Vec b = bias != nullptr ? memory.load(bias + i, C - i) : Vec();
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            for (int k = 0; k < WIDTH; k++) x[r].x[k] = gelu(x[r].x[k] + b.x[k]);
            memory.store(out + (size_t)r * C, x[r], C - i);
        }
    });
}

// A block takes the TILE_COLUMNS columns of grid column x and walks down the `rows` rows of chunk y by tiles. dout
// (N,C) becomes dinp in place. Sets out_T (C,N) to the transposed gelu(inp + bias), and partials (gridDim.y,
// C) to the chunk's column sums of dinp.
__device__ __forceinline__ void backward(floatX* dout, floatX* out_T, float* partials, const floatX* inp,
                                         const floatX* bias, int N, int C, int rows) {
    __shared__ Tile tile;
    const int i0 = blockIdx.x * TILE_COLUMNS, begin = blockIdx.y * rows, end = min(N, begin + rows);
    Vec sums[TILE_VECTORS] = {};

    for (int n0 = begin; n0 < end; n0 += TILE) {
        by_alignment(C % WIDTH == 0 && is_aligned(bias), [&](auto memory) {
            tile.fill(memory, out_T, n0, i0, end, C, [&](int n, int i, int c) {
                const size_t at = (size_t)n * C + i;
                Vec x = memory.load(inp + at, C - i), d = memory.load(dout + at, C - i);
                const Vec b = bias != nullptr ? memory.load(bias + i, C - i) : Vec();
                for (int k = 0; k < WIDTH; k++) {
                    differentiate(d.x[k], x.x[k], b.x[k]);
                    sums[c].x[k] += d.x[k];
                }
                memory.store(dout + at, d, C - i);
                return x;
            });
        });
        write_recomputed(out_T, tile, n0, i0, N, C);
        __syncthreads();
    }

    // Threads with the same threadIdx.x have sums of the same columns of the matrix. The tile brings them together.
    for (int c = 0; c < TILE_VECTORS; c++) tile.put(threadIdx.y, WIDTH * (threadIdx.x + c * TILE_THREADS), sums[c]);
    __syncthreads();
    constexpr int THREADS = TILE_THREADS * TILE_THREADS;
    for (int column = threadIdx.y * TILE_THREADS + threadIdx.x; column < TILE_COLUMNS; column += THREADS) {
        float total = 0.0f;
        for (int y = 0; y < TILE_THREADS; y++) total += tile.at[y][column];
        if (i0 + column < C) partials[(size_t)blockIdx.y * C + i0 + column] = total;
    }
}

#ifndef GELU_ERF

extern "C" __global__ void PROGRAMMATIC gelu_forward_kernel(floatX* out, const floatX* inp, const floatX* bias,
                                                            int N, int C) {
    forward(out, inp, bias, N, C);
}

extern "C" __global__ void gelu_backward_kernel(floatX* dout, SETS floatX* out_T, SETS float* partials,
                                                const floatX* inp, const floatX* bias, int N, int C, int rows) {
    backward(dout, out_T, partials, inp, bias, N, C, rows);
}

#endif

// GELU (Hendrycks & Gimpel 2016): gelu(x) = x * P(a standard normal number is below x), in two forms:
//   tanh: x/2 * (1 + tanh(u)) = x * sigmoid(2u) with u = sqrt(2/pi) * (x + 0.044715 x^3), which takes one exponential;
//   erf: x/2 * (1 + erf(x / sqrt(2))), the definition itself. The tanh form differs from it by 0.0005 at most.
// x = inp + bias, where inp (N, C) is a product to which its bias has not been added yet. The bias is a parameter,
// whose address need not be a multiple of 16 bytes, or a null pointer if the product has none.
// Backward: dinp = dout * gelu'(x), and dbias += the column sums of dinp, before dinp is rounded. A block writes
// partial sums, which add_partials (reduce.cu) adds to dbias. With gelu(x) = x * s, where s = share(x) (gelu.cuh),
//   tanh: gelu' = s + x * s * (1 - s) * d(2u)/dx;  erf: gelu' = s + x * exp(-x^2 / 2) / sqrt(2 pi).
// Memory-bound: forward reads N*C numbers and writes as many. Backward reads two such arrays and writes two. One of
// the two is gelu(x), for the weight gradient of the next product, so forward's output need not be kept. In fp32 it is
// written transposed, because that product is then faster (tile.cuh: TRANSPOSES).
// A Vec has 16 bytes of the arrays' type, floatX, as fp32 numbers. All arithmetic is fp32.
#include "gelu.cuh"
#include "matvec.cuh"  // dependent launches, and the product of a single row
#include "tile.cuh"

constexpr int ROWS = 2;  // rows of a block in forward

// blockIdx.x chooses ROWS rows, blockIdx.y and threadIdx.x a vector of columns. A thread loads the vectors of all its
// rows before it uses the first. With a single row an H200 took 15 to 18% longer.
__device__ __forceinline__ void forward(floatX* out, const floatX* inp, const floatX* bias, int N, int C) {
    const int i = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x);
    const int begin = ROWS * blockIdx.x, rows = min(ROWS, N - begin);
    trigger_programmatic_launch();
    if (i >= C) return;
    grid_dependency_synchronize();
    inp += (size_t)begin * C + i;
    out += (size_t)begin * C + i;
    by_alignment(C % WIDTH == 0 && is_aligned(bias), [&](auto memory) {
        Vec v[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r < rows) v[r] = memory.load(inp + (size_t)r * C, C - i);
        }
        const Vec b = bias != nullptr ? memory.load(bias + i, C - i) : Vec();
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            for (int k = 0; k < WIDTH; k++) v[r].x[k] = gelu(v[r].x[k] + b.x[k]);
            memory.store(out + (size_t)r * C, v[r], C - i);
        }
    });
}

// forward of a single row, as of a token of one text, in the kernel of the product before it (matvec.cuh):
// fch (OC) = inp (C) @ weight (OC, C)^T, and out (OC) = gelu(fch + bias).
__device__ __forceinline__ void matvec_forward(floatX* out, floatX* fch, const floatX* inp, const floatX* weight,
                                               const floatX* bias, int C, int OC) {
    matvec_floatX(inp, weight, bias, nullptr, C, OC, [=](int o, float sum, float b, float) {
        set(fch[o], sum);
        set(out[o], gelu(rounded(sum) + b));
    });
}

// blockIdx.x chooses TILE_COLUMNS columns, blockIdx.y a chunk of `rows` rows, a multiple of TILE. A block walks down
// its chunk by tiles. It has TILE_THREADS x TILE_THREADS threads. Each takes one vector (on the CPU several) of each
// TILE_THREADS-th row of a tile. dout (N,C) becomes dinp in place. Sets out_T to gelu(inp + bias): in fp32 transposed,
// (C,N); in bf16 as it is, (N,C). Sets partials (chunks,C), fp32, to the column sums of each chunk of dinp.
__device__ __forceinline__ void backward(floatX* dout, floatX* out_T, float* partials, const floatX* inp,
                                         const floatX* bias, int N, int C, int rows) {
    __shared__ Tile tile;
    const int i0 = blockIdx.x * TILE_COLUMNS, begin = blockIdx.y * rows, end = min(N, begin + rows);
    Vec sums[TILE_VECTORS] = {};

    for (int n0 = begin; n0 < end; n0 += TILE) {
        by_alignment(C % WIDTH == 0 && is_aligned(bias), [&](auto memory) {
            tile.fill(memory, out_T, n0, i0, end, C, [&](int n, int i, int c) {
                const size_t at = (size_t)n * C + i;
                Vec v = memory.load(inp + at, C - i), d = memory.load(dout + at, C - i);
                const Vec b = bias != nullptr ? memory.load(bias + i, C - i) : Vec();
                for (int k = 0; k < WIDTH; k++) {
                    differentiate(d.x[k], v.x[k], b.x[k]);  // d becomes dinp, v becomes gelu(v + b)
                    sums[c].x[k] += d.x[k];
                }
                memory.store(dout + at, d, C - i);
                return v;  // fill keeps it in the tile, or in bf16 stores it to out_T
            });
        });
        write_recomputed(out_T, tile, n0, i0, N, C);
        __syncthreads();  // in fp32: the tile has been written, and takes the next one, or the sums
    }

    // The TILE_THREADS threads with one threadIdx.x have added up different rows of the same columns. Each puts its
    // sums into row threadIdx.y of the tile. Then each column has one thread that adds them up.
    for (int c = 0; c < TILE_VECTORS; c++) tile.put(threadIdx.y, WIDTH * (threadIdx.x + c * TILE_THREADS), sums[c]);
    __syncthreads();
    constexpr int THREADS = TILE_THREADS * TILE_THREADS;
    for (int column = threadIdx.y * TILE_THREADS + threadIdx.x; column < TILE_COLUMNS; column += THREADS) {
        float total = 0.0f;
        for (int y = 0; y < TILE_THREADS; y++) total += tile.at[y][column];
        if (i0 + column < C) partials[(size_t)blockIdx.y * C + i0 + column] = total;
    }
}

#ifndef GELU_ERF  // gelu_erf.cu includes this file, and names its own kernels

extern "C" __global__ void PROGRAMMATIC gelu_forward_kernel(floatX* out, const floatX* inp, const floatX* bias,
                                                            int N, int C) {
    forward(out, inp, bias, N, C);
}

extern "C" __global__ void __launch_bounds__(128, MATVEC_BLOCKS)
PROGRAMMATIC matvec_gelu_kernel(SETS floatX* out, SETS floatX* fch, const floatX* inp, const floatX* weight,
                                const floatX* bias, int C, int OC) {
    matvec_forward(out, fch, inp, weight, bias, C, OC);
}

extern "C" __global__ void gelu_backward_kernel(floatX* dout, SETS floatX* out_T, SETS float* partials,
                                                const floatX* inp, const floatX* bias, int N, int C, int rows) {
    backward(dout, out_T, partials, inp, bias, N, C, rows);
}

#endif

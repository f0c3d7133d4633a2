// GELU (Hendrycks & Gimpel 2016): gelu(x) = x * P(a standard normal number is below x), in two forms:
//   tanh: x/2 * (1 + tanh(u)) = x * sigmoid(2u), which is cheaper, with u = sqrt(2/pi) * (x + 0.044715 x^3);
//   erf: x/2 * (1 + erf(x / sqrt(2))), the definition itself. The tanh form differs from it by 0.0005 at most.
// x = inp + bias, where inp (N, C) is a product to which its bias has not been added yet. The bias is a parameter,
// whose address need not be a multiple of 16, or a null pointer if the product has none. Backward: dinp = dout *
// gelu'(x), with s the factor of x in gelu(x) = x * s; dbias += sum_rows(dinp).
//   tanh: gelu' = s + x * s * (1 - s) * 2 du/dx;  erf: gelu' = s + x * exp(-x^2 / 2) / sqrt(2 pi).
// Memory-bound: forward reads N*C numbers and writes as many. Backward reads two such arrays and writes two. One of
// these is gelu(x), for the weight gradient of the next product, so forward's output need not be kept. In fp32 it is
// transposed (Tile::fill).
#include "fp8.cuh"

constexpr int ROWS = 2;  // of a block of the forward pass

// The two forms: s = share(x), gelu(x) = x * s and gelu'(x) = gradient(x, s).
struct Tanh {
    static constexpr float TWICE_SQRT_2_OVER_PI = 1.5957691216057308f;
    __device__ static float share(float x) {
        return reciprocal(1.0f + __expf(-TWICE_SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
    }
    __device__ static float gradient(float x, float s) {
        const float slope = TWICE_SQRT_2_OVER_PI * (1.0f + 3.0f * 0.044715f * x * x);
        return s + x * s * (1.0f - s) * slope;
    }
};

struct Erf {
    __device__ static float share(float x) { return 0.5f + 0.5f * erff(0.70710678f * x); }
    __device__ static float gradient(float x, float s) { return s + 0.39894228f * x * __expf(-0.5f * x * x); }
};

template <class Gelu>
__device__ __forceinline__ float value(float x) { return x * Gelu::share(x); }

// Inlined by force, because g++ otherwise rounds the tanh form differently on the CPU device.
// Block x: ROWS rows; thread: a vector of columns of grid column y. A thread loads the vectors of all its rows before it
// uses the first. With a single row an H200 took 15 to 18% longer.
template <class Gelu>
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
            for (int k = 0; k < WIDTH; k++) x[r].x[k] = value<Gelu>(x[r].x[k] + b.x[k]);
            memory.store(out + (size_t)r * C, x[r], C - i);
        }
    });
}

// inp becomes gelu(inp + bias), and d, which is its gradient, that of inp.
template <class Gelu>
__device__ __forceinline__ void differentiate(float& d, float& inp, const float& bias) {
    const float x = inp + bias, s = Gelu::share(x);
    d *= Gelu::gradient(x, s);
    inp = x * s;
}

// A block takes the TILE_COLUMNS columns of grid column x and walks down the `rows` rows of chunk y by tiles. dout
// (N,C) becomes dinp in place. The kernel sets out_T (C,N) to the transposed gelu(inp + bias), and partials (gridDim.y,
// C) to the chunk's column sums of dinp.
template <class Gelu>
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
                    differentiate<Gelu>(d.x[k], x.x[k], b.x[k]);
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
    for (int column = threadIdx.y * TILE_THREADS + threadIdx.x; column < TILE_COLUMNS; column += TILE_THREADS * TILE_THREADS) {
        float total = 0.0f;
        for (int y = 0; y < TILE_THREADS; y++) total += tile.at[y][column];
        if (i0 + column < C) partials[(size_t)blockIdx.y * C + i0 + column] = total;
    }
}

// As forward, but sets codes (N, C). N and C are multiples of 16, and all arrays lie at multiples of 16 bytes. A thread
// loads the vectors of four rows before it uses the first.
template <class Gelu>
__device__ __forceinline__ void forward_codes(Coding coding, unsigned char* codes, const floatX* inp,
                                              const floatX* bias, int N, int C) {
    if (!coding.begin()) return;
    const int vectors = C / WIDTH;
    for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < N / 4 * vectors; t += gridDim.x * blockDim.x) {
        const int i = t % vectors * WIDTH;
        const size_t at = (size_t)(t / vectors) * 4 * C + i;
        Vec x[4];
#pragma unroll
        for (int r = 0; r < 4; r++) x[r] = Aligned::load(inp + at + (size_t)r * C, WIDTH);
        const Vec b = bias != nullptr ? Aligned::load(bias + i, WIDTH) : Vec();
#pragma unroll
        for (int r = 0; r < 4; r++) {
            for (int k = 0; k < WIDTH; k++) x[r].x[k] = value<Gelu>(x[r].x[k] + b.x[k]);
            store_codes(codes + at + (size_t)r * C, coding.codes_of_bf16(x[r]));
        }
    }
    coding.end();
}

// As backward, but sets codes (N, C) and codes_T (C, N) of dinp, and codes out_T (C, N) of the output, by the scale of
// forward. If out_T is null, out (N, C) is set instead. dout stays as it is. Sizes and addresses are as in
// forward_codes. The blocks share the chunks, each of a tile's columns. A thread loads the vectors of its rows before
// it uses the first. It loads the bias for each row anew, so that registers suffice for three blocks a multiprocessor.
template <class Gelu>
__device__ __forceinline__ void backward_codes(Coding coding, unsigned char* codes, unsigned char* codes_T, floatX* out,
                                               unsigned char* out_T, const float* out_scale, float* partials,
                                               const floatX* dout, const floatX* inp, const floatX* bias, int N, int C,
                                               int rows) {
    __shared__ CodeTile<> of_d, of_out;
    // Of four rows of each tile of a chunk.
    __shared__ __align__(16) float sums[CodeTile<>::ROWS / 4][CodeTile<>::COLUMNS];
    const int columns = ceil_div(C, of_d.COLUMNS);
    Coding again = {};
    if (!coding.begin()) return;
    if (out_T != nullptr) again.inverse = inverse_of(*out_scale);
    for (int t = blockIdx.x; t < columns * ceil_div(N, rows); t += gridDim.x) {
        const int chunk = t / columns, i0 = t % columns * of_d.COLUMNS;
        const int begin = chunk * rows, end = min(N, begin + rows);
        for (int n0 = begin; n0 < end; n0 += of_d.ROWS) {
            of_d.for_each(n0, i0, N, C, [&](int n, int i, int row, int column) {
                Vec d[4], x[4];
                Codes ds[4], outs[4];
                const size_t at = (size_t)n * C + i;
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    d[r] = Aligned::load(dout + at + (size_t)r * C, WIDTH);
                    x[r] = Aligned::load(inp + at + (size_t)r * C, WIDTH);
                }
                Vec sum = {};
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const Vec b = bias != nullptr ? Aligned::load(bias + i, WIDTH) : Vec();
                    for (int k = 0; k < WIDTH; k++) {
                        differentiate<Gelu>(d[r].x[k], x[r].x[k], b.x[k]);
                        sum.x[k] += d[r].x[k];
                    }
                    store_codes(codes + at + (size_t)r * C, ds[r] = coding.codes_of_bf16(d[r]));
                    if (out_T != nullptr) outs[r] = again.codes_of_bf16(x[r]);
                    else Aligned::store(out + at + (size_t)r * C, x[r], WIDTH);
                }
                const Vec before = n0 > begin ? Aligned::load(sums[row / 4] + column, WIDTH) : Vec();
                for (int k = 0; k < WIDTH; k++) sum.x[k] += before.x[k];
                Aligned::store(sums[row / 4] + column, sum, WIDTH);
                of_d.put(row, column, ds);
                if (out_T != nullptr) of_out.put(row, column, outs);
            });
            __syncthreads();
            of_d.store(codes_T, n0, i0, N, C);
            if (out_T != nullptr) of_out.store(out_T, n0, i0, N, C);
            if (n0 + of_d.ROWS >= end) {  // the chunk's last tile
                for (int i = threadIdx.x; i < min(of_d.COLUMNS, C - i0); i += blockDim.x) {
                    float total = 0.0f;
                    for (int y = 0; y < min(of_d.ROWS, end - begin) / 4; y++) total += sums[y][i];
                    partials[(size_t)chunk * C + i0 + i] = total;
                }
            }
            __syncthreads();  // the next tile overwrites this one
        }
    }
    coding.end();
}

extern "C" __global__ void PROGRAMMATIC gelu_forward_kernel(floatX* out, const floatX* inp, const floatX* bias,
                                                            int N, int C) {
    forward<Tanh>(out, inp, bias, N, C);
}

extern "C" __global__ void gelu_backward_kernel(floatX* dout, SETS floatX* out_T, SETS float* partials,
                                                const floatX* inp, const floatX* bias, int N, int C, int rows) {
    backward<Tanh>(dout, out_T, partials, inp, bias, N, C, rows);
}

extern "C" __global__ void PROGRAMMATIC gelu_erf_forward_kernel(floatX* out, const floatX* inp, const floatX* bias,
                                                                int N, int C) {
    forward<Erf>(out, inp, bias, N, C);
}

extern "C" __global__ void gelu_erf_backward_kernel(floatX* dout, SETS floatX* out_T, SETS float* partials,
                                                    const floatX* inp, const floatX* bias, int N, int C, int rows) {
    backward<Erf>(dout, out_T, partials, inp, bias, N, C, rows);
}

extern "C" __global__ void __launch_bounds__(256, 4) gelu_forward_codes_kernel(
    float* scale, float* before, float* maxima, int correct, unsigned char* codes, const floatX* inp,
    const floatX* bias, int N, int C) {
    forward_codes<Tanh>({scale, before, maxima, correct}, codes, inp, bias, N, C);
}

extern "C" __global__ void __launch_bounds__(256, 3) gelu_backward_codes_kernel(
    float* scale, float* before, float* maxima, int correct, unsigned char* codes, unsigned char* codes_T, floatX* out,
    unsigned char* out_T, const float* out_scale, float* partials, const floatX* dout, const floatX* inp,
    const floatX* bias, int N, int C, int rows) {
    backward_codes<Tanh>({scale, before, maxima, correct}, codes, codes_T, out, out_T, out_scale, partials, dout, inp,
                        bias, N, C, rows);
}

extern "C" __global__ void __launch_bounds__(256, 4) gelu_erf_forward_codes_kernel(
    float* scale, float* before, float* maxima, int correct, unsigned char* codes, const floatX* inp,
    const floatX* bias, int N, int C) {
    forward_codes<Erf>({scale, before, maxima, correct}, codes, inp, bias, N, C);
}

extern "C" __global__ void __launch_bounds__(256, 3) gelu_erf_backward_codes_kernel(
    float* scale, float* before, float* maxima, int correct, unsigned char* codes, unsigned char* codes_T, floatX* out,
    unsigned char* out_T, const float* out_scale, float* partials, const floatX* dout, const floatX* inp,
    const floatX* bias, int N, int C, int rows) {
    backward_codes<Erf>({scale, before, maxima, correct}, codes, codes_T, out, out_T, out_scale, partials, dout, inp,
                        bias, N, C, rows);
}

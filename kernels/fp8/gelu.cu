// GELU with quantized results. ../gelu.cu explains GELU, quantize.cuh the two passes. N and C are multiples of 16, and
// all arrays lie at multiples of 16 bytes.
#include "../gelu.cuh"
#include "quantize.cuh"

// q (N, C) = gelu(inp + bias) / scale. A thread loads the vectors of four rows before it uses the first.
__device__ __forceinline__ void forward_fp8(Quantizer quantizer, unsigned char* q, const floatX* inp,
                                            const floatX* bias, int N, int C) {
    if (!quantizer.begin()) return;
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
            for (int k = 0; k < WIDTH; k++) x[r].x[k] = gelu(x[r].x[k] + b.x[k]);
            store_fp8(q + at + (size_t)r * C, quantizer.quantize_as_bf16(x[r]));
        }
    }
    quantizer.end();
}

// Sets q (N, C) and q_T (C, N) of dinp, and out_T (C, N), the transposed copy of the output, by forward's scale. If
// out_T is null, out (N, C), bf16, is set instead. dout stays as it is. partials (chunks, C): each chunk's column sums
// of dinp. A chunk has `rows` rows, which are whole tiles. The blocks share the chunks, each of a tile's columns. A
// thread loads the vectors of its rows before it uses the first. It loads the bias for each row anew, so that registers
// suffice for three blocks a multiprocessor.
__device__ __forceinline__ void backward_fp8(Quantizer quantizer, unsigned char* q, unsigned char* q_T, floatX* out,
                                             unsigned char* out_T, const float* out_scale, float* partials,
                                             const floatX* dout, const floatX* inp, const floatX* bias, int N, int C,
                                             int rows) {
    __shared__ Fp8Tile<> d_tile, out_tile;
    // Of four rows of each tile of a chunk.
    __shared__ __align__(16) float sums[Fp8Tile<>::ROWS / 4][Fp8Tile<>::COLUMNS];
    const int columns = ceil_div(C, d_tile.COLUMNS);
    Quantizer out_quantizer = {};
    if (!quantizer.begin()) return;
    if (out_T != nullptr) out_quantizer.inverse = inverse_of(*out_scale);
    for (int t = blockIdx.x; t < columns * ceil_div(N, rows); t += gridDim.x) {
        const int chunk = t / columns, i0 = t % columns * d_tile.COLUMNS;
        const int begin = chunk * rows, end = min(N, begin + rows);
        for (int n0 = begin; n0 < end; n0 += d_tile.ROWS) {
            d_tile.for_each(n0, i0, N, C, [&](int n, int i, int row, int column) {
                Vec d[4], x[4];
                Fp8Vec ds[4], outs[4];
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
                        differentiate(d[r].x[k], x[r].x[k], b.x[k]);
                        sum.x[k] += d[r].x[k];
                    }
                    store_fp8(q + at + (size_t)r * C, ds[r] = quantizer.quantize_as_bf16(d[r]));
                    if (out_T != nullptr) outs[r] = out_quantizer.quantize_as_bf16(x[r]);
                    else Aligned::store(out + at + (size_t)r * C, x[r], WIDTH);
                }
                const Vec previous = n0 > begin ? Aligned::load(sums[row / 4] + column, WIDTH) : Vec();
                for (int k = 0; k < WIDTH; k++) sum.x[k] += previous.x[k];
                Aligned::store(sums[row / 4] + column, sum, WIDTH);
                d_tile.put(row, column, ds);
                if (out_T != nullptr) out_tile.put(row, column, outs);
            });
            __syncthreads();
            d_tile.store(q_T, n0, i0, N, C);
            if (out_T != nullptr) out_tile.store(out_T, n0, i0, N, C);
            if (n0 + d_tile.ROWS >= end) {  // the chunk's last tile
                for (int i = threadIdx.x; i < min(d_tile.COLUMNS, C - i0); i += blockDim.x) {
                    float total = 0.0f;
                    for (int y = 0; y < min(d_tile.ROWS, end - begin) / 4; y++) total += sums[y][i];
                    partials[(size_t)chunk * C + i0 + i] = total;
                }
            }
            __syncthreads();  // the next tile overwrites this one
        }
    }
    quantizer.end();
}

#ifndef GELU_ERF

extern "C" __global__ void __launch_bounds__(256, 4) gelu_forward_fp8_kernel(
    float* scale, float* previous_amax, float* block_amax, int second_pass, unsigned char* q, const floatX* inp,
    const floatX* bias, int N, int C) {
    forward_fp8({scale, previous_amax, block_amax, second_pass}, q, inp, bias, N, C);
}

extern "C" __global__ void __launch_bounds__(256, 3) gelu_backward_fp8_kernel(
    float* scale, float* previous_amax, float* block_amax, int second_pass, unsigned char* q, unsigned char* q_T,
    floatX* out, unsigned char* out_T, const float* out_scale, float* partials, const floatX* dout, const floatX* inp,
    const floatX* bias, int N, int C, int rows) {
    backward_fp8({scale, previous_amax, block_amax, second_pass}, q, q_T, out, out_T, out_scale, partials, dout, inp,
                 bias, N, C, rows);
}

#endif

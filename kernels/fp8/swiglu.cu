// SwiGLU with quantized results. ../swiglu.cu explains SwiGLU, quantize.cuh the two passes. N and C are multiples of
// 16, and all arrays lie at multiples of 16 bytes.
#include "../swiglu.cuh"
#include "quantize.cuh"

// q (N, C) = swiglu(inp) / scale. The blocks share the rows.
extern "C" __global__ void __launch_bounds__(256, 4) swiglu_forward_fp8_kernel(
    float* scale, float* previous_amax, float* block_amax, int second_pass, unsigned char* q,
    const floatX* __restrict__ inp, int N, int C) {
    Quantizer quantizer = {scale, previous_amax, block_amax, second_pass};
    if (!quantizer.begin()) return;
    for (int n = blockIdx.x; n < N; n += gridDim.x) {
        for (int i = WIDTH * threadIdx.x; i < C; i += WIDTH * blockDim.x) {
            const floatX* row = inp + 2 * (size_t)n * C;
            const Vec out = forward(Aligned::load(row + i, WIDTH), Aligned::load(row + C + i, WIDTH));
            store_fp8(q + (size_t)n * C + i, quantizer.quantize_as_bf16(out));
        }
    }
    quantizer.end();
}

// Sets q (N, 2C) and q_T (2C, N) of dinp, and out_T (C, N), the transposed copy of the output, by forward's scale. If
// out_T is null, out (N, C), bf16, is set instead. The blocks share the tiles of out. A thread loads the vectors of its
// rows before it uses the first, so two blocks a multiprocessor have enough loads in flight.
extern "C" __global__ void __launch_bounds__(256, 2) swiglu_backward_fp8_kernel(
    float* scale, float* previous_amax, float* block_amax, int second_pass, unsigned char* q, unsigned char* q_T,
    floatX* __restrict__ out, unsigned char* out_T, const float* out_scale, const floatX* __restrict__ dout,
    const floatX* __restrict__ inp, int N, int C) {
    __shared__ Fp8Tile<> up_tile, gate_tile, out_tile;
    const int columns = ceil_div(C, up_tile.COLUMNS);
    Quantizer quantizer = {scale, previous_amax, block_amax, second_pass}, out_quantizer = {};
    if (!quantizer.begin()) return;
    if (out_T != nullptr) out_quantizer.inverse = inverse_of(*out_scale);
    for (int t = blockIdx.x; t < columns * ceil_div(N, up_tile.ROWS); t += gridDim.x) {
        const int n0 = t / columns * up_tile.ROWS, i0 = t % columns * up_tile.COLUMNS;
        up_tile.for_each(n0, i0, N, C, [&](int n, int i, int row, int column) {
            Vec d[4], up[4], gate[4];
            Fp8Vec ups[4], gates[4], outs[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const floatX* row = inp + (size_t)(n + r) * 2 * C + i;
                d[r] = Aligned::load(dout + (size_t)(n + r) * C + i, WIDTH);
                up[r] = Aligned::load(row, WIDTH), gate[r] = Aligned::load(row + C, WIDTH);
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const Gradients found = backward(d[r], up[r], gate[r]);
                unsigned char* row = q + (size_t)(n + r) * 2 * C + i;
                store_fp8(row, ups[r] = quantizer.quantize_as_bf16(found.up));
                store_fp8(row + C, gates[r] = quantizer.quantize_as_bf16(found.gate));
                if (out_T != nullptr) outs[r] = out_quantizer.quantize_as_bf16(found.out);
                else Aligned::store(out + (size_t)(n + r) * C + i, found.out, WIDTH);
            }
            up_tile.put(row, column, ups), gate_tile.put(row, column, gates);
            if (out_T != nullptr) out_tile.put(row, column, outs);
        });
        __syncthreads();
        up_tile.store(q_T, n0, i0, N, C);
        gate_tile.store(q_T + (size_t)C * N, n0, i0, N, C);
        if (out_T != nullptr) out_tile.store(out_T, n0, i0, N, C);
        __syncthreads();  // the next tile overwrites this one
    }
    quantizer.end();
}

// Quantizes a matrix that is there in bf16 (quantize.cuh). Memory-bound: the kernel reads 2 bytes a number and writes
// one, or two if the product that sums over rows needs the transposed copy. If the scale has changed, it does so twice.
#include "quantize.cuh"

// q (N, C) = inp (N, C) / scale, and q_T (C, N) is its transposed copy. One of the two may be null. N and C are
// multiples of 16, and all arrays lie at multiples of 16 bytes.
extern "C" __global__ void __launch_bounds__(256, 4) quantize_kernel(float* scale, float* previous_amax,
                                                                     float* block_amax, int second_pass,
                                                                     unsigned char* q, unsigned char* q_T,
                                                                     const floatX* __restrict__ inp, int N, int C) {
    Quantizer quantizer = {scale, previous_amax, block_amax, second_pass};
    quantize_tiles(quantizer, q, q_T, N, C, [&](int n, int i, Vec* v) {
        for (int r = 0; r < 4; r++) v[r] = Aligned::load(inp + (size_t)(n + r) * C + i, WIDTH);
    });
}

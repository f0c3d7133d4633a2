// Codes (fp8.cuh) of a matrix that is there in bf16. Memory-bound: encode reads 2 bytes a number and writes one, or two
// if the product that sums over rows needs the codes of the transposed matrix. If the scale has changed, it does so
// twice.
#include "fp8.cuh"

// codes (N, C) = inp (N, C) / scale, and codes_T (C, N) the same transposed. One of the two may be null. N and C are
// multiples of 16, and all arrays lie at multiples of 16 bytes.
extern "C" __global__ void __launch_bounds__(256, 4) encode_kernel(float* scale, float* before, float* maxima,
                                                                   int correct, unsigned char* codes,
                                                                   unsigned char* codes_T,
                                                                   const floatX* __restrict__ inp, int N, int C) {
    Coding coding = {scale, before, maxima, correct};
    encode_tiles(coding, codes, codes_T, N, C, [&](int n, int i, Vec* v) {
        for (int r = 0; r < 4; r++) v[r] = Aligned::load(inp + (size_t)(n + r) * C + i, WIDTH);
    });
}

// Codes (fp8.cuh) of a matrix that is there in bf16. Memory-bound: encode reads 2 bytes a number and writes one, or two
// if the product that sums over rows needs the codes of the transposed matrix. If the scale was another one the time
// before, it does so twice.
#include "fp8.cuh"

// codes (N, C) = inp (N, C) / scale, and codes_T (C, N) the same transposed. One of the two may be null. N and C are
// multiples of 16, and all arrays lie at multiples of 16 bytes. The blocks share the tiles, from the end, which was
// written last and may still be in L2, to the beginning.
extern "C" __global__ void __launch_bounds__(256, 4) encode_kernel(float* scale, float* maxima, int correct,
                                                                   unsigned char* codes, unsigned char* codes_T,
                                                                   const floatX* __restrict__ inp, int N, int C) {
    __shared__ CodeTile tile;
    const int columns = ceil_div(C, tile.COLUMNS);
    Coding coding = {scale, maxima, correct};
    if (!coding.begin()) return;
    for (int t = columns * ceil_div(N, tile.ROWS) - 1 - blockIdx.x; t >= 0; t -= gridDim.x) {
        const int n0 = t / columns * tile.ROWS, i0 = t % columns * tile.COLUMNS;
        tile.for_each(n0, i0, N, C, [&](int n, int i, int row, int column) {
            Vec v[4];
            Codes rows[4];
            for (int r = 0; r < 4; r++) v[r] = Aligned::load(inp + (size_t)(n + r) * C + i, WIDTH);
            for (int r = 0; r < 4; r++) {
                rows[r] = coding.codes_of(v[r]);
                if (codes != nullptr) store_codes(codes + (size_t)(n + r) * C + i, rows[r]);
            }
            tile.put(row, column, rows);
        });
        if (codes_T == nullptr) continue;
        __syncthreads();
        tile.store(codes_T, n0, i0, N, C);
        __syncthreads();  // the next tile overwrites this one
    }
    coding.end();
}

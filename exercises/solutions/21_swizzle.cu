// Exercise 21: a swizzle.
//
//   out[c][n] = x[n][c]   for n < N, c < C;   x (N, C), out (C, N)
// Exercise 12 made the tile's rows one word longer. Then most rows do not begin at a multiple of 16 bytes, and a thread
// cannot write 16 bytes at once. Here it does. A row of the tile stays 32 words long: eight chunks of four words. But
// the chunks of a row change places, and so no two lanes meet in a bank.
//
// N and C are multiples of 32. A block has 256 threads, eight warps, and takes a tile of 32 rows and 32 columns; the
// grid is (C / 32, N / 32) blocks. Shared memory serves eight lanes at a time if each accesses 16 bytes, and all
// 32 if each accesses 4. Of x and of out, only whole sectors may move: eight neighbouring floats.
#include "../../kernels/common.cuh"

// Where in the tile chunk 0 to 7 of a row begins: a multiple of 4.
__device__ inline int place(int row, int chunk) {
    return 32 * row + 4 * (chunk ^ row % 8);
}

extern "C" __global__ void swizzled_transpose_kernel(float* out, const float* x, int N, int C) {
    __shared__ __align__(16) float tile[32 * 32];
    const int n0 = 32 * blockIdx.y, c0 = 32 * blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int of_row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const float4 four = *reinterpret_cast<const float4*>(x + (n0 + of_row) * C + c0 + 4 * chunk);
    *reinterpret_cast<float4*>(&tile[place(of_row, chunk)]) = four;
    __syncthreads();
    for (int i = 0; i < 4; i++) {
        const int row = 8 * i + lane % 8, column = 4 * warp + lane / 8;
        out[(c0 + column) * N + n0 + row] = tile[place(row, column / 4) + column % 4];
    }
}

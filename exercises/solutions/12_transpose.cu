// Exercise 12: transpose without waste.
//
//   out[c][n] = x[n][c]   for n < N, c < C;   x (N, C), out (C, N)
// A block has (32, 8) threads and takes a tile of 32 rows and 32 columns; the grid is (C / 32, N / 32) blocks, both
// rounded up. The lanes of a warp must read neighbours of x and write neighbours of out. Then every sector moves once.
// In between, the tile waits in shared memory. There no two lanes may access different words of one bank at once.

extern "C" __global__ void transpose_tile_kernel(float* out, const float* x, int N, int C) {
    __shared__ float tile[32][33];
    const int n0 = 32 * blockIdx.y, c0 = 32 * blockIdx.x;
    for (int row = threadIdx.y; row < 32; row += 8) {
        const int n = n0 + row, c = c0 + threadIdx.x;
        if (n < N && c < C) tile[row][threadIdx.x] = x[n * C + c];
    }
    __syncthreads();
    for (int column = threadIdx.y; column < 32; column += 8) {
        const int n = n0 + threadIdx.x, c = c0 + column;
        if (n < N && c < C) out[c * N + n] = tile[threadIdx.x][column];
    }
}

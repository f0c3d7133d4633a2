// Exercise 3: a matrix.
//
//   out[n][c] = x[n][c] + bias[c]   for n < N, c < C
// out and x (N, C) lie in memory row after row: element (n, c) is number n * C + c. Blocks are (32, 4) threads: 32
// along a row (x), 4 rows (y). The grid is (C / 32, N / 4) blocks, both rounded up.

extern "C" __global__ void add_bias_kernel(float* out, const float* x, const float* bias, int N, int C) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    const int n = blockIdx.y * blockDim.y + threadIdx.y;
    if (n < N && c < C) out[n * C + c] = x[n * C + c] + bias[c];
}

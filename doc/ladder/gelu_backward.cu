// Backward of gelu.cu, with x = inp + bias: dout (N, C) becomes dinp = dout * gelu'(x) in place, out_T (C, N) is set to
// gelu(x), transposed, for the weight gradient that follows, and dbias (C) += sum_rows(dinp). With s = 1 / (1 + exp(-2u))
// and u = sqrt(2/pi) (x + 0.044715 x^3): gelu(x) = x s, gelu'(x) = s + x s (1 - s) 2 du/dx.
// Bytes: two reads, two writes, 16 N C.
#define WARP_SIZE 32
#include "../../kernels/common.cuh"

constexpr float SQRT_2_OVER_PI = 0.7978845608028654f, FACTOR = 0.044715f;

// One float per thread, as the formulas have it: a flat index and tanhf. The lanes of a warp are neighbours in a row. So
// their outputs belong to 32 rows of the transposed matrix, and each goes to another sector. A second kernel sums.
extern "C" __global__ void scattered_kernel(float* dout, float* out_T, const float* inp, const float* bias, int N, int C) {
    const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (size_t)N * C) return;
    const int n = (int)(at / C), i = (int)(at % C);
    const float x = inp[at] + bias[i], tanh_u = tanhf(SQRT_2_OVER_PI * (x + FACTOR * x * x * x));
    const float slope = SQRT_2_OVER_PI * (1.0f + 3.0f * FACTOR * x * x);
    out_T[(size_t)i * N + n] = 0.5f * x * (1.0f + tanh_u);
    dout[at] *= 0.5f * (1.0f + tanh_u) + 0.5f * x * (1.0f - tanh_u * tanh_u) * slope;
}

// The same numbers, computed from s, the factor of x in gelu(x).
__device__ inline float share(float x) {
    return 1.0f / (1.0f + __expf(-2.0f * SQRT_2_OVER_PI * (x + FACTOR * x * x * x)));
}

__device__ inline float gradient(float x, float s) {
    return s + x * s * (1.0f - s) * 2.0f * SQRT_2_OVER_PI * (1.0f + 3.0f * FACTOR * x * x);
}

// A kernel for each result: one for dinp, one for gelu(x), one that transposes it through a tile, and one for the sums.
// All move whole sectors, but together they read or write an (N, C) matrix eight times.
extern "C" __global__ void derivative_kernel(float* dout, const float* inp, const float* bias, int C) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= C) return;
    const size_t at = (size_t)blockIdx.x * C + i;
    const float x = inp[at] + bias[i];
    dout[at] *= gradient(x, share(x));
}

// Rows become columns in shared memory. Each row has 33 floats, so that a column lies in all banks.
constexpr int SIDE = 32, ROWS = 8;  // of a tile; of threads

// Does the tile at row n0 and column i0. Returns the sum of the thread's numbers of dinp, which are of one column.
__device__ inline float do_tile(float (&tile)[SIDE][SIDE + 1], float* dout, float* out_T, const float* inp,
                                const float* bias, int n0, int i0, int N, int C) {
    const int i = i0 + threadIdx.x;
    float sum = 0.0f;
    for (int r = threadIdx.y; r < SIDE; r += ROWS) {
        if (n0 + r >= N || i >= C) continue;
        const size_t at = (size_t)(n0 + r) * C + i;
        const float x = inp[at] + bias[i], s = share(x), d = dout[at] * gradient(x, s);
        dout[at] = d;
        sum += d;
        tile[r][threadIdx.x] = x * s;
    }
    __syncthreads();
    for (int r = threadIdx.y; r < SIDE; r += ROWS) {
        if (i0 + r < C && n0 + threadIdx.x < N) out_T[(size_t)(i0 + r) * N + n0 + threadIdx.x] = tile[threadIdx.x][r];
    }
    __syncthreads();
    return sum;
}

// One pass for three of them: a block reads a tile of dout and inp, and computes gelu' and gelu from one exponential.
// It stores dinp along the rows of inp, and the output along those of the transposed matrix. A second kernel sums.
extern "C" __global__ void tile_kernel(float* dout, float* out_T, const float* inp, const float* bias, int N, int C) {
    __shared__ float tile[SIDE][SIDE + 1];
    do_tile(tile, dout, out_T, inp, bias, SIDE * blockIdx.y, SIDE * blockIdx.x, N, C);
}

// Column sums on the way: a block walks down the rows of a chunk and adds up the numbers that it writes, so no kernel
// reads dinp again. partials (gridDim.y, C) gets each chunk's sums. A second kernel adds these up, in order.
extern "C" __global__ void sums_kernel(float* dout, float* out_T, float* partials, const float* inp, const float* bias,
                                       int N, int C, int rows) {
    __shared__ float tile[SIDE][SIDE + 1];
    const int begin = rows * blockIdx.y, i = SIDE * blockIdx.x + threadIdx.x;
    float sum = 0.0f;
    for (int n0 = begin; n0 < min(begin + rows, N); n0 += SIDE) {
        sum += do_tile(tile, dout, out_T, inp, bias, n0, SIDE * blockIdx.x, N, C);
    }
    tile[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || i >= C) return;
    float total = 0.0f;
    for (int y = 0; y < ROWS; y++) total += tile[y][threadIdx.x];
    partials[(size_t)blockIdx.y * C + i] = total;
}

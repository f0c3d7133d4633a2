// With n = (inp - mean) * rstd and g = dout * weight, row by row:
//   dinp (N, C) += rstd * (g - mean(g) - n * mean(g * n));  dweight (C) += sum_rows(dout * n);  dbias (C) += sum_rows(dout)
// Sums along the rows and down the columns of the same arrays. Bytes: dout and inp are read, dinp is read and written,
// 16 N C.
#define WARP_SIZE 32
#include "../../kernels/common.cuh"

// One thread per row, then one thread per column: the two kinds of sums by a kernel each, both as plain loops.
extern "C" __global__ void thread_a_row_kernel(float* dinp, const float* dout, const float* inp, const float* weight,
                                               const float* mean, const float* rstd, int N, int C) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const size_t start = (size_t)n * C;
    float mean_g = 0.0f, mean_gn = 0.0f;
    for (int i = 0; i < C; i++) {
        const float g = dout[start + i] * weight[i];
        mean_g += g / C;
        mean_gn += g * (inp[start + i] - mean[n]) * rstd[n] / C;
    }
    for (int i = 0; i < C; i++) {
        const float g = dout[start + i] * weight[i], x = (inp[start + i] - mean[n]) * rstd[n];
        dinp[start + i] += rstd[n] * (g - mean_g - x * mean_gn);
    }
}

extern "C" __global__ void thread_a_column_kernel(float* dweight, float* dbias, const float* dout, const float* inp,
                                                  const float* mean, const float* rstd, int N, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= C) return;
    float sum_dw = 0.0f, sum_db = 0.0f;
    for (int n = 0; n < N; n++) {
        const float d = dout[(size_t)n * C + i];
        sum_dw += d * (inp[(size_t)n * C + i] - mean[n]) * rstd[n];
        sum_db += d;
    }
    dweight[i] += sum_dw;
    dbias[i] += sum_db;
}

// One warp per row, for dinp: sums along the row by shuffles.
__device__ inline void warp_of_row(float* dinp, const float* dout, const float* inp, const float* weight, float m, float s,
                                   int C) {
    float sum_g = 0.0f, sum_gn = 0.0f;
    for (int i = threadIdx.x; i < C; i += 32) {
        const float g = dout[i] * weight[i];
        sum_g += g;
        sum_gn += g * (inp[i] - m) * s;
    }
    const float mean_g = warp_sum(sum_g) / C, mean_gn = warp_sum(sum_gn) / C;
    for (int i = threadIdx.x; i < C; i += 32) {
        dinp[i] += s * (dout[i] * weight[i] - mean_g - (inp[i] - m) * s * mean_gn);
    }
}

// One warp per row with atomics: every row adds its share to dweight and dbias as it goes. N rows meet at each of 2 C
// addresses, and stand in line there. Block: (32 lanes, rows).
extern "C" __global__ void atomics_kernel(float* dinp, float* dweight, float* dbias, const float* dout,
                                          const float* inp, const float* weight, const float* mean, const float* rstd,
                                          int N, int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N) return;
    const size_t start = (size_t)n * C;
    warp_of_row(dinp + start, dout + start, inp + start, weight, mean[n], rstd[n], C);
    for (int i = threadIdx.x; i < C; i += 32) {
        const float d = dout[start + i];
        atomicAdd(dweight + i, d * (inp[start + i] - mean[n]) * rstd[n]);
        atomicAdd(dbias + i, d);
    }
}

// One warp per row, chunks of rows for the columns: the sums down the columns in two stages of fixed order, as in
// column_sum.cu. dout and inp come twice from memory.
extern "C" __global__ void warp_a_row_kernel(float* dinp, const float* dout, const float* inp, const float* weight,
                                             const float* mean, const float* rstd, int N, int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N) return;
    const size_t start = (size_t)n * C;
    warp_of_row(dinp + start, dout + start, inp + start, weight, mean[n], rstd[n], C);
}

extern "C" __global__ void chunks_kernel(float* partials, const float* dout, const float* inp, const float* mean,
                                         const float* rstd, int N, int C, int rows) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= C) return;
    const int begin = blockIdx.y * rows, end = min(N, begin + rows);
    float sum_dw = 0.0f, sum_db = 0.0f;
    for (int n = begin; n < end; n++) {
        const float d = dout[(size_t)n * C + i];
        sum_dw += d * (inp[(size_t)n * C + i] - mean[n]) * rstd[n];
        sum_db += d;
    }
    float* sums = partials + (size_t)blockIdx.y * 2 * C;
    sums[i] = sum_dw;
    sums[C + i] = sum_db;
}

// partials (P, 2, C).
extern "C" __global__ void second_stage_kernel(float* dweight, float* dbias, const float* partials, int P, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= C) return;
    float sum_dw = 0.0f, sum_db = 0.0f;
    for (int p = 0; p < P; p++) {
        sum_dw += partials[(size_t)p * 2 * C + i];
        sum_db += partials[((size_t)p * 2 + 1) * C + i];
    }
    dweight[i] += sum_dw;
    dbias[i] += sum_db;
}

// One block walks down its rows: a thread always meets the same columns, so that it keeps their sums in registers, and
// dout and inp come once. It is slower all the same: the 256 threads wait for one another four times in each row. C is
// at most 1024.
extern "C" __global__ void one_pass_kernel(float* dinp, float* partials, const float* dout, const float* inp,
                                           const float* weight, const float* mean, const float* rstd, int N, int C) {
    constexpr int COLUMNS = 1024 / 256;
    float sum_dw[COLUMNS] = {}, sum_db[COLUMNS] = {};
    for (int n = blockIdx.x; n < N; n += gridDim.x) {
        const size_t start = (size_t)n * C;
        float g[COLUMNS], x[COLUMNS], sum_g = 0.0f, sum_gn = 0.0f;
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) {
            const int i = threadIdx.x + 256 * k;
            const float d = i < C ? dout[start + i] : 0.0f;
            x[k] = i < C ? (inp[start + i] - mean[n]) * rstd[n] : 0.0f;
            g[k] = i < C ? d * weight[i] : 0.0f;
            sum_dw[k] += d * x[k];
            sum_db[k] += d;
            sum_g += g[k];
            sum_gn += g[k] * x[k];
        }
        const float mean_g = block_sum(sum_g) / C, mean_gn = block_sum(sum_gn) / C;
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) {
            const int i = threadIdx.x + 256 * k;
            if (i < C) dinp[start + i] += rstd[n] * (g[k] - mean_g - x[k] * mean_gn);
        }
    }
    float* sums = partials + (size_t)blockIdx.x * 2 * C;
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) {
        const int i = threadIdx.x + 256 * k;
        if (i < C) sums[i] = sum_dw[k], sums[C + i] = sum_db[k];
    }
}

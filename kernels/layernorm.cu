// Layernorm: out = n * weight + bias with n = (x - mean) * rstd, over the last axis of x (N, C), N = B*T;
// rstd = 1 / sqrt(variance + 1e-5). The residual connection in front of it is added in the same kernel.
// Backward: with g = dout * weight,
//   dx += rstd * (g - mean(g) - n * mean(g * n));  dweight += sum_rows(dout * n);  dbias += sum_rows(dout)
// Memory-bound: forward reads its inputs once and writes its outputs once, as the row waits in shared memory;
// backward reads dout, x and the old dx and writes dx and the transposed n * weight + bias.
#include "common.cuh"

// One warp a row. Block: (WARP_SIZE, rows); shared memory: C floats a row, each lane touching only its own.
// x = inp1, or with inp2 given: x = residual = inp1 + inp2 + bias2 (bias2 (C) belongs to the product inp2).
// Writes out (N,C), mean (N), rstd (N) and, with inp2, residual (N,C).
extern "C" __global__ void layernorm_forward_kernel(float* out, float* mean, float* rstd, float* residual,
                                                    const float* inp1, const float* inp2, const float* bias2,
                                                    const float* weight, const float* bias, int N, int C) {
    DYNAMIC_SHARED(float, rows);
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N) return;
    const int lane = threadIdx.x;
    float* row = rows + threadIdx.y * ceil_div(C, 4) * 4;
    const size_t start = (size_t)n * C;

    float sum = 0.0f;
    for (int i = 4 * lane; i < C; i += 4 * WARP_SIZE) {
        Four x = load4(inp1 + start + i, C - i);
        if (inp2 != nullptr) {
            const Four y = load4(inp2 + start + i, C - i), b = load4(bias2 + i, C - i);
            for (int k = 0; k < 4; k++) x.x[k] += y.x[k] + b.x[k];
            store4(residual + start + i, x, C - i);
        }
        store4(row + i, x, 4);
        sum += (x.x[0] + x.x[1]) + (x.x[2] + x.x[3]);
    }
    const float m = warp_sum(sum) / C;

    sum = 0.0f;
    for (int i = 4 * lane; i < C; i += 4 * WARP_SIZE) {
        const Four x = load4(row + i, 4);
        for (int k = 0; k < 4; k++) sum += i + k < C ? (x.x[k] - m) * (x.x[k] - m) : 0.0f;
    }
    const float s = rsqrtf(warp_sum(sum) / C + 1e-5f);

    for (int i = 4 * lane; i < C; i += 4 * WARP_SIZE) {
        Four x = load4(row + i, 4);
        const Four w = load4(weight + i, C - i), b = load4(bias + i, C - i);
        for (int k = 0; k < 4; k++) x.x[k] = s * (x.x[k] - m) * w.x[k] + b.x[k];
        store4(out + start + i, x, C - i);
    }
    if (lane == 0) {
        mean[n] = m;
        rstd[n] = s;
    }
}

// One block takes `rows` rows, MOST_ROWS at a time: first a warp a row finds the two means, then a thread a column walks
// down the rows. The columns' sums go to partials (gridDim.x, 3, C): of dout * n, of dout, and of the new dx, which is
// the bias gradient of the projection that fed the residual stream; add_partials_kernel (reduce.cu) adds them up.
// dx (N,C) is added to; out_T (C,N) is set to the transposed forward output, for the weight gradient that follows.
constexpr int MOST_ROWS = 32;

extern "C" __global__ void layernorm_backward_kernel(float* dinp, float* partials, float* out_T, const float* dout,
                                                     const float* inp, const float* weight, const float* bias,
                                                     const float* mean, const float* rstd, int N, int C, int rows) {
    __shared__ float mean_g[MOST_ROWS], mean_gn[MOST_ROWS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const int block_end = min(N, (int)(blockIdx.x + 1) * rows);
    float* dweight = partials + (size_t)blockIdx.x * 3 * C;
    float *dbias = dweight + C, *dsum = dbias + C;

    for (int begin = blockIdx.x * rows; begin < block_end; begin += MOST_ROWS) {
        const int count = min(MOST_ROWS, block_end - begin);
        for (int r = warp; r < count; r += warps) {
            const size_t start = (size_t)(begin + r) * C;
            const float m = mean[begin + r], s = rstd[begin + r];
            float sum_g = 0.0f, sum_gn = 0.0f;
            for (int i = lane; i < C; i += WARP_SIZE) {
                const float g = dout[start + i] * weight[i];
                sum_g += g;
                sum_gn += g * (inp[start + i] - m) * s;
            }
            sum_g = warp_sum(sum_g);
            sum_gn = warp_sum(sum_gn);
            if (lane == 0) {
                mean_g[r] = sum_g / C;
                mean_gn[r] = sum_gn / C;
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < C; i += blockDim.x) {
            const float w = weight[i], b = bias[i];
            const bool first = begin == blockIdx.x * rows;
            float sum_dw = first ? 0.0f : dweight[i], sum_db = first ? 0.0f : dbias[i], sum_dx = first ? 0.0f : dsum[i];
            for (int r0 = 0; r0 < count; r0 += COLUMN_ROWS) {
                float out[COLUMN_ROWS];
#pragma unroll
                for (int k = 0; k < COLUMN_ROWS; k++) {
                    const int r = r0 + k;
                    out[k] = 0.0f;
                    if (r >= count) continue;
                    const size_t at = (size_t)(begin + r) * C + i;
                    const float n = (inp[at] - mean[begin + r]) * rstd[begin + r], d = dout[at];
                    const float dx = dinp[at] + rstd[begin + r] * (d * w - mean_g[r] - n * mean_gn[r]);
                    dinp[at] = dx;
                    out[k] = n * w + b;
                    sum_dw += d * n;
                    sum_db += d;
                    sum_dx += dx;
                }
                store_transposed(out_T + (size_t)i * N + begin + r0, out, count - r0);
            }
            dweight[i] = sum_dw;
            dbias[i] = sum_db;
            dsum[i] = sum_dx;
        }
        __syncthreads();  // the next rows' means overwrite these
    }
}

// Layernorm: out = n * weight + bias with n = (x - mean) * rstd, over the last axis of x (N, C), N = B*T;
// rstd = 1 / sqrt(variance + 1e-5). The residual connection in front of it is added in the same kernel.
// Backward: with g = dout * weight,
//   dx += rstd * (g - mean(g) - n * mean(g * n));  dweight += sum_rows(dout * n);  dbias += sum_rows(dout)
// Memory-bound: forward reads its inputs once and writes its outputs once, as the row waits in shared memory;
// backward reads dout, x and the old dx and writes dx.
#include "common.cuh"

// One block a row; one-dimensional. Shared memory: C floats, rounded up to a multiple of 4, each thread touching only its
// own. x = inp1, or with inp2 given: x = residual = inp1 + inp2 + bias2 (bias2 (C) belongs to the product inp2).
// Writes out (N,C), mean (N), rstd (N) and, with inp2, residual (N,C).
extern "C" __global__ void layernorm_forward_kernel(float* out, float* mean, float* rstd, float* residual,
                                                    const float* inp1, const float* inp2, const float* bias2,
                                                    const float* weight, const float* bias, int C) {
    DYNAMIC_SHARED(float, row);
    const int first = 4 * threadIdx.x, step = 4 * blockDim.x;
    const size_t start = (size_t)blockIdx.x * C;

    by_alignment(C % 4 == 0, [&](auto memory) {
        float sum = 0.0f;
        for (int i = first; i < C; i += step) {
            Vec x = memory.load(inp1 + start + i, C - i);
            if (inp2 != nullptr) {
                const Vec y = memory.load(inp2 + start + i, C - i), b = memory.load(bias2 + i, C - i);
                for (int k = 0; k < 4; k++) x.x[k] += y.x[k] + b.x[k];
                memory.store(residual + start + i, x, C - i);
            }
            Aligned::store(row + i, x, 4);
            sum += (x.x[0] + x.x[1]) + (x.x[2] + x.x[3]);  // 0 past the end of the row
        }
        const float m = block_sum(sum) / C;

        sum = 0.0f;
        for (int i = first; i < C; i += step) {
            const Vec x = Aligned::load(row + i, 4);
            for (int k = 0; k < 4; k++) sum += i + k < C ? (x.x[k] - m) * (x.x[k] - m) : 0.0f;
        }
        const float s = rsqrtf(block_sum(sum) / C + 1e-5f);

        for (int i = first; i < C; i += step) {
            Vec x = Aligned::load(row + i, 4);
            const Vec w = memory.load(weight + i, C - i), b = memory.load(bias + i, C - i);
            for (int k = 0; k < 4; k++) x.x[k] = s * (x.x[k] - m) * w.x[k] + b.x[k];
            memory.store(out + start + i, x, C - i);
        }
        if (threadIdx.x == 0) {
            mean[blockIdx.x] = m;
            rstd[blockIdx.x] = s;
        }
    });
}

// A block takes as many rows as it has warps, then advances by gridDim.x times as many. First a warp a row finds the
// two means and leaves dout and n in shared memory; then a thread with four columns walks down the rows. dinp (N,C) is
// added to. The columns' sums go to partials (gridDim.x, 3, C): of dout * n, of dout, and of the new dinp, which is the
// bias gradient of the projection that fed the residual stream. Shared memory: 2 rows of C floats, rounded up to a
// multiple of 4, a warp.
extern "C" __global__ void layernorm_backward_kernel(float* __restrict__ dinp, float* __restrict__ partials,
                                                     const float* __restrict__ dout, const float* __restrict__ inp,
                                                     const float* __restrict__ weight, const float* __restrict__ mean,
                                                     const float* __restrict__ rstd, int N, int C) {
    __shared__ float rstd_of[32], mean_g[32], mean_gn[32];
    DYNAMIC_SHARED(float, rows_d);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const int width = 4 * ceil_div(C, 4);
    float* rows_n = rows_d + warps * width;
    float* sums = partials + (size_t)blockIdx.x * 3 * C;

    by_alignment(C % 4 == 0, [&](auto memory) {
        for (int begin = blockIdx.x * warps; begin < N; begin += gridDim.x * warps) {
            if (begin + warp < N) {
                const size_t start = (size_t)(begin + warp) * C;
                const float m = mean[begin + warp], s = rstd[begin + warp];
                float sum_g = 0.0f, sum_gn = 0.0f;
#pragma unroll 6  // loads in flight: C = 768 is six of them; one at a time took 9% longer
                for (int i = 4 * lane; i < C; i += 4 * WARP_SIZE) {
                    const Vec d = memory.load(dout + start + i, C - i), w = memory.load(weight + i, C - i);
                    Vec n = memory.load(inp + start + i, C - i);
                    for (int k = 0; k < 4; k++) {
                        n.x[k] = (n.x[k] - m) * s;
                        const float g = d.x[k] * w.x[k];  // 0 past the end of the row, where d is
                        sum_g += g;
                        sum_gn += g * n.x[k];
                    }
                    Aligned::store(rows_d + warp * width + i, d, 4);
                    Aligned::store(rows_n + warp * width + i, n, 4);
                }
                sum_g = warp_sum(sum_g);
                sum_gn = warp_sum(sum_gn);
                if (lane == 0) rstd_of[warp] = s, mean_g[warp] = sum_g / C, mean_gn[warp] = sum_gn / C;
            }
            __syncthreads();
            const int count = min(warps, N - begin);
            for (int i = 4 * threadIdx.x; i < C; i += 4 * blockDim.x) {
                const Vec w = memory.load(weight + i, C - i);
                Vec sum_dw = {}, sum_db = {}, sum_dx = {};
                if (begin >= gridDim.x * warps) {  // go on with the sums of the rows before
                    sum_dw = memory.load(sums + i, C - i);
                    sum_db = memory.load(sums + C + i, C - i);
                    sum_dx = memory.load(sums + 2 * C + i, C - i);
                }
#pragma unroll 8  // one row at a time took 5% longer
                for (int r = 0; r < count; r++) {
                    float* p = dinp + (size_t)(begin + r) * C + i;
                    Vec dx = memory.load(p, C - i);
                    const Vec d = Aligned::load(rows_d + r * width + i, 4), n = Aligned::load(rows_n + r * width + i, 4);
                    for (int k = 0; k < 4; k++) {
                        dx.x[k] += rstd_of[r] * (d.x[k] * w.x[k] - mean_g[r] - n.x[k] * mean_gn[r]);
                        sum_dw.x[k] += d.x[k] * n.x[k];
                        sum_db.x[k] += d.x[k];
                        sum_dx.x[k] += dx.x[k];
                    }
                    memory.store(p, dx, C - i);
                }
                memory.store(sums + i, sum_dw, C - i);
                memory.store(sums + C + i, sum_db, C - i);
                memory.store(sums + 2 * C + i, sum_dx, C - i);
            }
            __syncthreads();  // the next rows overwrite shared memory
        }
    });
}

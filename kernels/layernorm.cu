// Layernorm: out = n * weight + bias with n = (x - mean) * rstd, over the last axis of x (N, C), N = B*T;
// rstd = 1 / sqrt(variance + 1e-5). The residual connection in front of it is added in the same kernel.
// Backward: with g = dout * weight,
//   dx += rstd * (g - mean(g) - n * mean(g * n));  dweight += sum_rows(dout * n);  dbias += sum_rows(dout)
// Memory-bound: forward reads its inputs once and writes its outputs once, as the row waits in shared memory;
// backward reads dout, x and the old dx and writes dx.
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
    float* row = rows + threadIdx.y * 4 * ceil_div(C, 4);
    const size_t start = (size_t)n * C;

    by_alignment(C % 4 == 0, [&](auto memory) {
        float sum = 0.0f;
#pragma unroll 4
        for (int i = 4 * lane; i < C; i += 4 * WARP_SIZE) {
            Four x = memory.load(inp1 + start + i, C - i);
            if (inp2 != nullptr) {
                const Four y = memory.load(inp2 + start + i, C - i), b = memory.load(bias2 + i, C - i);
                for (int k = 0; k < 4; k++) x.x[k] += y.x[k] + b.x[k];
                memory.store(residual + start + i, x, C - i);
            }
            Aligned::store(row + i, x, 4);
            sum += (x.x[0] + x.x[1]) + (x.x[2] + x.x[3]);
        }
        const float m = warp_sum(sum) / C;

        sum = 0.0f;
        for (int i = 4 * lane; i < C; i += 4 * WARP_SIZE) {
            const Four x = Aligned::load(row + i, 4);
            for (int k = 0; k < 4; k++) sum += i + k < C ? (x.x[k] - m) * (x.x[k] - m) : 0.0f;
        }
        const float s = rsqrtf(warp_sum(sum) / C + 1e-5f);

        for (int i = 4 * lane; i < C; i += 4 * WARP_SIZE) {
            Four x = Aligned::load(row + i, 4);
            const Four w = memory.load(weight + i, C - i), b = memory.load(bias + i, C - i);
            for (int k = 0; k < 4; k++) x.x[k] = s * (x.x[k] - m) * w.x[k] + b.x[k];
            memory.store(out + start + i, x, C - i);
        }
        if (lane == 0) {
            mean[n] = m;
            rstd[n] = s;
        }
    });
}

// One warp a row, and then the row that is as many rows further as the grid has warps. dinp (N,C) is added to.
// A warp adds up three column sums in its own part of shared memory: of dout * n, of dout, and of the new dinp, which is
// the bias gradient of the projection that fed the residual stream. At the end the block adds up its warps' sums and
// writes them to partials (gridDim.x, 3, C). Shared memory: 5 rows of C floats, rounded up to a multiple of 4, a warp.
extern "C" __global__ void layernorm_backward_kernel(float* dinp, float* partials, const float* dout, const float* inp,
                                                     const float* weight, const float* mean, const float* rstd,
                                                     int N, int C) {
    DYNAMIC_SHARED(float, shared);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const int width = 4 * ceil_div(C, 4);
    float* sum_dweight = shared + (size_t)warp * 5 * width;
    float *sum_dbias = sum_dweight + width, *sum_dinp = sum_dbias + width;
    float *row_d = sum_dinp + width, *row_n = row_d + width;  // the row at hand: dout and n

    const Four zero = {};
    for (int i = 4 * lane; i < C; i += 4 * WARP_SIZE) {
        Aligned::store(sum_dweight + i, zero, 4);
        Aligned::store(sum_dbias + i, zero, 4);
        Aligned::store(sum_dinp + i, zero, 4);
    }
    by_alignment(C % 4 == 0, [&](auto memory) {
        for (int row = blockIdx.x * warps + warp; row < N; row += gridDim.x * warps) {
            const size_t start = (size_t)row * C;
            const float m = mean[row], s = rstd[row];
            float sum_g = 0.0f, sum_gn = 0.0f;
#pragma unroll 6
            for (int i = 4 * lane; i < C; i += 4 * WARP_SIZE) {
                const Four d = memory.load(dout + start + i, C - i), w = memory.load(weight + i, C - i);
                Four n = memory.load(inp + start + i, C - i);
                for (int k = 0; k < 4; k++) {
                    n.x[k] = (n.x[k] - m) * s;
                    const float g = d.x[k] * w.x[k];  // 0 past the end of the row, where d is
                    sum_g += g;
                    sum_gn += g * n.x[k];
                }
                Aligned::store(row_d + i, d, 4);
                Aligned::store(row_n + i, n, 4);
            }
            const float mean_g = warp_sum(sum_g) / C, mean_gn = warp_sum(sum_gn) / C;
#pragma unroll 6
            for (int i = 4 * lane; i < C; i += 4 * WARP_SIZE) {
                const Four d = Aligned::load(row_d + i, 4), n = Aligned::load(row_n + i, 4);
                const Four w = memory.load(weight + i, C - i);
                Four dx = memory.load(dinp + start + i, C - i);
                Four dw = Aligned::load(sum_dweight + i, 4), db = Aligned::load(sum_dbias + i, 4);
                Four sum_dx = Aligned::load(sum_dinp + i, 4);
                for (int k = 0; k < 4; k++) {
                    dx.x[k] += s * (d.x[k] * w.x[k] - mean_g - n.x[k] * mean_gn);
                    dw.x[k] += d.x[k] * n.x[k];
                    db.x[k] += d.x[k];
                    sum_dx.x[k] += dx.x[k];
                }
                memory.store(dinp + start + i, dx, C - i);
                Aligned::store(sum_dweight + i, dw, 4);
                Aligned::store(sum_dbias + i, db, 4);
                Aligned::store(sum_dinp + i, sum_dx, 4);
            }
        }
    });
    __syncthreads();
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        for (int sum = 0; sum < 3; sum++) {
            float total = 0.0f;
            for (int w = 0; w < warps; w++) total += shared[((size_t)w * 5 + sum) * width + i];
            partials[((size_t)blockIdx.x * 3 + sum) * C + i] = total;
        }
    }
}

// out_T (C,N) = the transposed output of forward, from its input and the mean and rstd it left. A block takes one tile.
extern "C" __global__ void layernorm_transposed_kernel(float* out_T, const float* inp, const float* mean,
                                                       const float* rstd, const float* weight, const float* bias,
                                                       int N, int C) {
    __shared__ Tile tile;
    const int i0 = blockIdx.x * TILE, n0 = blockIdx.y * TILE;
    by_alignment(C % 4 == 0, [&](auto memory) {
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++) {
            const int row = threadIdx.y + r * TILE_THREADS, n = n0 + row;
            for (int c = 0; c < TILE_VECTORS; c++) {
                const int column = 4 * (threadIdx.x + c * TILE_THREADS), i = i0 + column;
                if (n >= N || i >= C) continue;
                Four x = memory.load(inp + (size_t)n * C + i, C - i);
                const Four w = memory.load(weight + i, C - i), b = memory.load(bias + i, C - i);
                for (int k = 0; k < 4; k++) x.x[k] = rstd[n] * (x.x[k] - mean[n]) * w.x[k] + b.x[k];
                tile.put(row, column, x);
            }
        }
    });
    __syncthreads();
    store_transposed(out_T, tile, n0, i0, N, C);
}

// Layernorm: out = n * weight + bias with n = (x - mean) * rstd, over the last axis of x (N, C), N = B*T;
// rstd = 1 / sqrt(variance + eps). norm.cuh has the forward pass.
// Backward: with g = dout * weight,
//   dx += rstd * (g - mean(g) - n * mean(g * n));  dweight += sum_rows(dout * n);  dbias += sum_rows(dout)
// Memory-bound: backward reads dout, x and the old dx and writes dx.
#include "norm.cuh"

// Writes out (N,C), mean (N) and rstd (N).
extern "C" __global__ void PROGRAMMATIC layernorm_forward_kernel(
    floatX* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd, const floatX* inp,
    const floatX* weight, const floatX* bias, float eps, int N, int C) {
    norm_forward(mean, rstd, inp, {out, weight, bias}, {}, eps, N, C);
}

// A block takes as many rows as it has warps, then advances by gridDim.x times as many. First each warp takes a row: it
// finds the two means, and leaves dout and n in shared memory. Then each thread takes FLOATS columns and walks down the
// rows. The kernel adds to dinp (N,C). It writes three sums of each column to partials (gridDim.x, 3, C): of dout * n,
// of dout, and of the new dinp. The last is the bias gradient of the projection that fed the residual stream. Shared
// memory: for each warp 2 rows of C floats, rounded up to a multiple of WIDTH.
extern "C" __global__ void layernorm_backward_kernel(floatX* __restrict__ dinp, SETS float* __restrict__ partials,
                                                     const floatX* __restrict__ dout, const floatX* __restrict__ inp,
                                                     const floatX* __restrict__ weight, const float* __restrict__ mean,
                                                     const float* __restrict__ rstd, int N, int C) {
    __shared__ float rstd_of[32], mean_g[32], mean_gn[32];
    DYNAMIC_SHARED(float, rows_d);
    // Rows of dinp that a thread loads at once. With one at a time an H200 took 3 to 8% longer in fp32, 18% in bf16.
    // With four it took 4% longer in fp32 than with three.
    constexpr int AT_ONCE = WIDTH == 4 ? 3 : 4;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const int width = WIDTH * ceil_div(C, WIDTH);
    float* rows_n = rows_d + warps * width;
    float* sums = partials + (size_t)blockIdx.x * 3 * C;

    by_alignment(C % WIDTH == 0, [&](auto memory) {
        for (int begin = blockIdx.x * warps; begin < N; begin += gridDim.x * warps) {
            if (begin + warp < N) {
                const size_t start = (size_t)(begin + warp) * C;
                const float m = mean[begin + warp], s = rstd[begin + warp];
                float sum_g = 0.0f, sum_gn = 0.0f;
#pragma unroll (24 / WIDTH)  // loads in flight: all of C = 768; in fp32 one at a time took 9% longer
                for (int i = WIDTH * lane; i < C; i += WIDTH * WARP_SIZE) {
                    const Vec d = memory.load(dout + start + i, C - i), w = memory.load(weight + i, C - i);
                    Vec n = memory.load(inp + start + i, C - i);
                    for (int k = 0; k < WIDTH; k++) {
                        n.x[k] = (n.x[k] - m) * s;
                        const float g = d.x[k] * w.x[k];  // 0 past the end of the row, where d is
                        sum_g += g;
                        sum_gn += g * n.x[k];
                    }
                    Aligned::store(rows_d + warp * width + i, d, WIDTH);
                    Aligned::store(rows_n + warp * width + i, n, WIDTH);
                }
                sum_g = warp_sum(sum_g);
                sum_gn = warp_sum(sum_gn);
                if (lane == 0) rstd_of[warp] = s, mean_g[warp] = sum_g / C, mean_gn[warp] = sum_gn / C;
            }
            __syncthreads();
            const int count = min(warps, N - begin);
            for (int i = FLOATS * threadIdx.x; i < C; i += FLOATS * blockDim.x) {
                const Floats w = memory.load_floats(weight + i, C - i);
                Floats sum_dw = {}, sum_db = {}, sum_dx = {};
                if (begin >= gridDim.x * warps) {  // go on with the sums of the rows before
                    sum_dw = memory.load_floats(sums + i, C - i);
                    sum_db = memory.load_floats(sums + C + i, C - i);
                    sum_dx = memory.load_floats(sums + 2 * C + i, C - i);
                }
                for (int first = 0; first < count; first += AT_ONCE) {
                    Floats dx[AT_ONCE];
                    floatX* p = dinp + (size_t)(begin + first) * C + i;
#pragma unroll
                    for (int r = 0; r < AT_ONCE; r++) {
                        if (first + r < count) dx[r] = memory.load_floats(p + r * C, C - i);
                    }
#pragma unroll
                    for (int r = 0; r < AT_ONCE; r++) {
                        const int at = first + r;
                        if (at >= count) break;
                        const Floats d = Aligned::load_floats(rows_d + at * width + i, FLOATS);
                        const Floats n = Aligned::load_floats(rows_n + at * width + i, FLOATS);
                        for (int k = 0; k < FLOATS; k++) {
                            dx[r].x[k] += rstd_of[at] * (d.x[k] * w.x[k] - mean_g[at] - n.x[k] * mean_gn[at]);
                            sum_dw.x[k] += d.x[k] * n.x[k];
                            sum_db.x[k] += d.x[k];
                            sum_dx.x[k] += dx[r].x[k];
                        }
                        memory.store_floats(p + r * C, dx[r], C - i);
                    }
                }
                memory.store_floats(sums + i, sum_dw, C - i);
                memory.store_floats(sums + C + i, sum_db, C - i);
                memory.store_floats(sums + 2 * C + i, sum_dx, C - i);
            }
            __syncthreads();  // the next rows overwrite shared memory
        }
    });
}

// The norm of a residual stream to which two branches are added in parallel. Over the last axis of x (N, C), N = B*T:
//   n = (x - mean) * rstd,  out0 = n * weight0 + shift0,  out1 = n * weight1 + shift1
// Attention and MLP of a layer read the same stream, one out0 and the other out1 ("untied"), or both out0 ("tied").
// rstd = 1 / sqrt(variance + eps). RMSNorm is the same with mean 0 and without shifts. norm.cuh has the forward pass.
// In front of it, x = inp + dropout0(proj0) + dropout1(proj1). Without dropout the products add to the stream.
// Backward: with g = weight0 * dout0 + weight1 * dout1,
//   dx += rstd * (g - mean(g) - n * mean(g * n)), RMSNorm without mean(g);  dproj = dropout(dx);
//   dweight += sum_rows(dout * n);  dshift += sum_rows(dout);  dbias += sum_rows(dproj)
// Memory-bound: backward reads dout0, dout1, x and the old dx and writes dx, and dproj where there is dropout.
//
// If a model lacks a tensor, its pointer is null, as in norm.cuh. Kernels without dropout have none of its arithmetic.
#include "dropout.cuh"
#include "norm.cuh"

extern "C" __global__ void PROGRAMMATIC parallel_residual_forward_kernel(
    floatX* __restrict__ out0, floatX* __restrict__ out1, float* __restrict__ mean, float* __restrict__ rstd,
    const floatX* inp, const floatX* weight0, const floatX* shift0, const floatX* weight1, const floatX* shift1,
    float eps, int N, int C) {
    norm_forward(mean, rstd, inp, {out0, weight0, shift0}, {out1, weight1, shift1}, eps, N, C);
}

// out (N,C) = residual (N,C) + dropout(out). One warp takes a row. Block: (WARP_SIZE, rows).
extern "C" __global__ void add_dropped_kernel(floatX* __restrict__ out, const floatX* __restrict__ residual, int N,
                                              int C, const int* __restrict__ random, int site) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N) return;
    const Dropout drop(random, site);
    const size_t start = (size_t)n * C;
    by_alignment(C % WIDTH == 0, [&](auto memory) {
        for (int i = WIDTH * threadIdx.x; i < C; i += WIDTH * WARP_SIZE) {
            Vec x = drop(memory.load(out + start + i, C - i), n, i, C);
            const Vec r = memory.load(residual + start + i, C - i);
            for (int k = 0; k < WIDTH; k++) x.x[k] += r.x[k];
            memory.store(out + start + i, x, C - i);
        }
    });
}

// A block takes `rows` rows at once, at most MAX_ROWS, then advances by gridDim.x * rows. Each thread takes vectors of
// columns. It leaves g and n in shared memory while the block sums up g and g * n of each row, and then finishes the
// same columns. The kernel adds to dinp (N,C).
//
// It writes the columns' sums to partials (gridDim.x, S, C): of dout0 * n, of dout0, of dout1 * n, of dout1, of dproj0,
// of dproj1. A model that lacks one of these has no row for it. Without a mean there are no sums of dout0 and dout1.
// Until the last row is done the block keeps the sums in shared memory, or in partials if that is too small (keep = 0).
//
// Shared memory: 2 * rows rows of C floats, rounded up to a multiple of WIDTH, and S such rows to keep the sums.
// In bf16 a thread has twice as many numbers, and blocks have half as many threads.
constexpr int MAX_ROWS = 4, MAX_THREADS = 2048 / WIDTH;

__device__ inline void backward_rows(floatX* dinp, floatX* dproj0, floatX* dproj1, float* partials,
                                     const floatX* dout0, const floatX* dout1, const floatX* inp,
                                     const floatX* weight0, const floatX* weight1, const float* mean,
                                     const float* rstd, int N, int C, int S, int rows, int keep,
                                     const int* random = nullptr, int site0 = -1, int site1 = -1) {
    __shared__ float warp_sums[2][MAX_THREADS / WARP_SIZE][MAX_ROWS], mean_g[MAX_ROWS], mean_gn[MAX_ROWS];
    DYNAMIC_SHARED(float, rows_g);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const int width = WIDTH * ceil_div(C, WIDTH), step = WIDTH * blockDim.x;
    const bool untied = dout1 != nullptr, centred = mean != nullptr;
    const int dout1_row = centred ? 2 : 1, dproj_row = untied ? 2 * dout1_row : dout1_row;  // rows of partials
    float* rows_n = rows_g + rows * width;
    float* sums = keep ? rows_n + rows * width : partials + (size_t)blockIdx.x * S * C;

    by_alignment(C % WIDTH == 0 && is_aligned(weight0) && is_aligned(weight1), [&](auto memory) {
        for (int begin = blockIdx.x * rows; begin < N; begin += gridDim.x * rows) {
            const size_t start = (size_t)begin * C;
            const int count = min(rows, N - begin);
            auto add_to_sum = [&](int row, int i, Vec sum) {
                if (begin >= gridDim.x * rows) {  // add the sums of the rows before
                    const Vec before = memory.load(sums + row * C + i, C - i);
                    for (int k = 0; k < WIDTH; k++) sum.x[k] += before.x[k];
                }
                memory.store(sums + row * C + i, sum, C - i);
            };

            float sum_g[MAX_ROWS] = {}, sum_gn[MAX_ROWS] = {};
            for (int i = WIDTH * threadIdx.x; i < C; i += step) {
                const Vec w0 = memory.load(weight0 + i, C - i), w1 = untied ? memory.load(weight1 + i, C - i) : Vec();
                Vec d0[MAX_ROWS] = {}, d1[MAX_ROWS] = {}, n[MAX_ROWS] = {};
#pragma unroll
                for (int r = 0; r < MAX_ROWS; r++) {
                    if (r >= count) continue;
                    d0[r] = memory.load(dout0 + start + (size_t)r * C + i, C - i);
                    if (untied) d1[r] = memory.load(dout1 + start + (size_t)r * C + i, C - i);
                    n[r] = memory.load(inp + start + (size_t)r * C + i, C - i);
                }
                Vec sum_d0 = {}, sum_d0n = {}, sum_d1 = {}, sum_d1n = {};
#pragma unroll
                for (int r = 0; r < MAX_ROWS; r++) {
                    if (r >= count) continue;
                    const float m = centred ? mean[begin + r] : 0.0f, s = rstd[begin + r];
                    Vec g;
                    for (int k = 0; k < WIDTH; k++) {
                        n[r].x[k] = (n[r].x[k] - m) * s;
                        g.x[k] = d0[r].x[k] * w0.x[k] + d1[r].x[k] * w1.x[k];  // 0 past the end of the row, where d is
                        sum_g[r] += g.x[k];
                        sum_gn[r] += g.x[k] * n[r].x[k];
                        sum_d0.x[k] += d0[r].x[k];
                        sum_d1.x[k] += d1[r].x[k];
                        sum_d0n.x[k] += d0[r].x[k] * n[r].x[k];
                        sum_d1n.x[k] += d1[r].x[k] * n[r].x[k];
                    }
                    Aligned::store(rows_g + r * width + i, g, WIDTH);
                    Aligned::store(rows_n + r * width + i, n[r], WIDTH);
                }
                add_to_sum(0, i, sum_d0n);
                if (centred) add_to_sum(1, i, sum_d0);
                if (untied) add_to_sum(dout1_row, i, sum_d1n);
                if (untied && centred) add_to_sum(dout1_row + 1, i, sum_d1);
            }
            Vec dx[MAX_ROWS];
            auto load_dx = [&](int i) {
#pragma unroll
                for (int r = 0; r < MAX_ROWS; r++) {
                    if (r < count && i < C) dx[r] = memory.load(dinp + start + (size_t)r * C + i, C - i);
                }
            };
            load_dx(WIDTH * threadIdx.x);  // loads while the block sums up
#pragma unroll
            for (int r = 0; r < MAX_ROWS; r++) {
                const float warp_g = warp_sum(sum_g[r]), warp_gn = warp_sum(sum_gn[r]);
                if (lane == 0) warp_sums[0][warp][r] = warp_g, warp_sums[1][warp][r] = warp_gn;
            }
            __syncthreads();
            for (int r = threadIdx.x; r < count; r += blockDim.x) {
                float g = 0.0f, gn = 0.0f;
                for (int w = 0; w < warps; w++) g += warp_sums[0][w][r], gn += warp_sums[1][w][r];
                mean_g[r] = centred ? g / C : 0.0f;
                mean_gn[r] = gn / C;
            }
            __syncthreads();

            for (int i = WIDTH * threadIdx.x; i < C; i += step) {
                Vec sum0 = {}, sum1 = {};
#pragma unroll
                for (int r = 0; r < MAX_ROWS; r++) {
                    if (r >= count) continue;
                    const size_t at = start + (size_t)r * C + i;
                    const Vec g = Aligned::load(rows_g + r * width + i, WIDTH);
                    const Vec n = Aligned::load(rows_n + r * width + i, WIDTH);
                    const float s = rstd[begin + r];
                    for (int k = 0; k < WIDTH; k++) dx[r].x[k] += s * (g.x[k] - mean_g[r] - n.x[k] * mean_gn[r]);
                    memory.store(dinp + at, dx[r], C - i);
                    // Takes the gradient back through a branch's dropout, and adds it to the sum for its bias.
                    auto through = [&](int site, floatX* dproj, Vec& sum) {
                        Vec p = dx[r];
                        if (dproj != nullptr) {
                            p = Dropout(random, site)(p, begin + r, i, C);
                            memory.store(dproj + at, p, C - i);
                        }
                        for (int k = 0; k < WIDTH; k++) sum.x[k] += p.x[k];
                    };
                    through(site0, dproj0, sum0);
                    through(site1, dproj1, sum1);
                }
                load_dx(i + step);
                if (dproj_row < S) add_to_sum(dproj_row, i, sum0);
                if (dproj_row + 1 < S) add_to_sum(dproj_row + 1, i, sum1);
            }
        }
        float* block_partials = partials + (size_t)blockIdx.x * S * C;
        for (int i = WIDTH * threadIdx.x; keep && i < C; i += step) {
            for (int row = 0; row < S; row++) {
                memory.store(block_partials + row * C + i, memory.load(sums + row * C + i, C - i), C - i);
            }
        }
    });
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) parallel_residual_backward_kernel(
    floatX* __restrict__ dinp, SETS float* __restrict__ partials, const floatX* __restrict__ dout0,
    const floatX* __restrict__ dout1, const floatX* __restrict__ inp, const floatX* __restrict__ weight0,
    const floatX* __restrict__ weight1, const float* __restrict__ mean, const float* __restrict__ rstd,
    int N, int C, int S, int rows, int keep) {
    backward_rows(dinp, nullptr, nullptr, partials, dout0, dout1, inp, weight0, weight1, mean, rstd, N, C, S, rows,
                  keep);
}

// Also sets dproj0 and dproj1 (N,C), if they are given.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) parallel_residual_dropout_backward_kernel(
    floatX* __restrict__ dinp, floatX* __restrict__ dproj0, floatX* __restrict__ dproj1,
    SETS float* __restrict__ partials, const floatX* __restrict__ dout0, const floatX* __restrict__ dout1,
    const floatX* __restrict__ inp, const floatX* __restrict__ weight0, const floatX* __restrict__ weight1,
    const float* __restrict__ mean, const float* __restrict__ rstd, int N, int C, int S, int rows, int keep,
    const int* __restrict__ random, int site0, int site1) {
    backward_rows(dinp, dproj0, dproj1, partials, dout0, dout1, inp, weight0, weight1, mean, rstd, N, C, S, rows, keep,
                  random, site0, site1);
}

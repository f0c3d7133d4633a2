// RMSNorm: out = n * weight with n = x * rstd, over the last axis of x (N, C), N = B*T;
// rstd = 1 / sqrt(mean(x^2) + eps). It is layernorm without mean and bias. The same kernel adds the residual connection
// in front.
// Backward: with g = dout * weight,
//   dx += rstd * (g - n * mean(g * n));  dweight += sum_rows(dout * n)
// Memory-bound: forward reads its inputs once and writes its outputs once, as the row waits in shared memory;
// backward reads dout, x and the old dx and writes dx.
//
// Memory is kept busy by many loads in flight: a thread issues a batch of independent loads before it uses the first.
// `__restrict__` tells the compiler that no array overlaps another, so that it may move loads ahead of stores.
#include "common.cuh"

// The sum over a row, which one warp has, or the whole block.
__device__ inline float row_sum(float x) { return blockDim.x > WARP_SIZE ? block_sum(x) : warp_sum(x); }

// The block is (WARP_SIZE, rows), with a warp for each row, or (warps * WARP_SIZE, 1), with several warps for one long
// row. A thread has loads of 16 numbers of each input in flight. Shared memory: C floats, rounded up to a multiple of
// WIDTH, for each row; a thread reads only what it wrote itself. x = inp1, or, if inp2 is given, x = residual = inp1 +
// inp2. Writes out (N,C), rstd (N) and, if inp2 is given, residual (N,C). rstd and out are computed from the stored x,
// rounded in bf16, because backward reads it. The weight is a parameter, whose address need not be a multiple of 16.
extern "C" __global__ void PROGRAMMATIC rmsnorm_forward_kernel(floatX* __restrict__ residual, floatX* __restrict__ out,
                                                               float* __restrict__ rstd,
                                                               const floatX* __restrict__ inp1,
                                                               const floatX* __restrict__ inp2,
                                                               const floatX* __restrict__ weight, float eps, int N,
                                                               int C) {
    constexpr int AT_ONCE = 16 / WIDTH;  // vectors of each input that are loaded before the first is used
    DYNAMIC_SHARED(float, rows);
    const int n = blockIdx.x * blockDim.y + threadIdx.y, step = WIDTH * blockDim.x;
    trigger_programmatic_launch();
    if (n >= N) return;
    const size_t start = (size_t)n * C;
    float* row = rows + threadIdx.y * WIDTH * ceil_div(C, WIDTH);

    // For a model that writes text, rows are few, and no other block has loaded the weight.
    for (int i = WIDTH * threadIdx.x; i < C && gridDim.x <= FEW_BLOCKS; i += step) prefetch(weight + i);
    grid_dependency_synchronize();

    by_alignment(C % WIDTH == 0 && is_aligned(weight), [&](auto memory) {
        float sum = 0.0f;
        for (int first = WIDTH * threadIdx.x; first < C; first += AT_ONCE * step) {
            Vec x[AT_ONCE] = {}, y[AT_ONCE] = {};
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int i = first + b * step;
                if (i < C) x[b] = memory.load(inp1 + start + i, C - i);
                if (inp2 != nullptr && i < C) y[b] = memory.load(inp2 + start + i, C - i);
            }
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int i = first + b * step;
                for (int k = 0; k < WIDTH; k++) {
                    if (inp2 != nullptr) x[b].x[k] = rounded(x[b].x[k] + y[b].x[k]);
                    sum += x[b].x[k] * x[b].x[k];  // 0 past the end of the row
                }
                if (i < C) Aligned::store(row + i, x[b], WIDTH);
                if (inp2 != nullptr && i < C) memory.store(residual + start + i, x[b], C - i);
            }
        }
        const float s = rsqrtf(row_sum(sum) / C + eps);

#pragma unroll (16 / WIDTH)
        for (int i = WIDTH * threadIdx.x; i < C; i += step) {
            Vec x = Aligned::load(row + i, WIDTH);
            const Vec w = memory.load(weight + i, C - i);
            for (int k = 0; k < WIDTH; k++) x.x[k] = s * x.x[k] * w.x[k];
            memory.store(out + start + i, x, C - i);
        }
        if (threadIdx.x == 0) rstd[n] = s;
    });
}

// A block takes `rows` rows at once, at most MOST_ROWS, then advances by gridDim.x * rows. Each thread takes vectors of
// columns. It leaves its dout and x in shared memory while the block sums up g * x of each row, and then finishes the
// same columns. The kernel adds to dinp (N,C). It writes the columns' sums of dout * n to partials (gridDim.x, C).
// Shared memory: 2 * rows rows of C floats, rounded up to a multiple of WIDTH. In bf16 a thread has twice as many
// numbers, and blocks have half as many threads.
constexpr int MOST_ROWS = 4, MOST_THREADS = 1024 / WIDTH;

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 3)
rmsnorm_backward_kernel(floatX* __restrict__ dinp, SETS float* __restrict__ partials,
                        const floatX* __restrict__ dout, const floatX* __restrict__ inp,
                        const floatX* __restrict__ weight, const float* __restrict__ rstd, int N, int C, int rows) {
    __shared__ float of_warp[MOST_THREADS / WARP_SIZE][MOST_ROWS], mean_gx[MOST_ROWS];
    DYNAMIC_SHARED(float, rows_d);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const int width = WIDTH * ceil_div(C, WIDTH), step = WIDTH * blockDim.x;
    float* rows_x = rows_d + rows * width;
    float* sums = partials + (size_t)blockIdx.x * C;

    by_alignment(C % WIDTH == 0 && is_aligned(weight), [&](auto memory) {
        for (int begin = blockIdx.x * rows; begin < N; begin += gridDim.x * rows) {
            const size_t start = (size_t)begin * C;
            const int count = min(rows, N - begin);
            float sum_gx[MOST_ROWS] = {};
            for (int i = WIDTH * threadIdx.x; i < C; i += step) {
                const Vec w = memory.load(weight + i, C - i);
                Vec d[MOST_ROWS] = {}, x[MOST_ROWS] = {};
#pragma unroll
                for (int r = 0; r < MOST_ROWS; r++) {
                    if (r < count) d[r] = memory.load(dout + start + (size_t)r * C + i, C - i);
                    if (r < count) x[r] = memory.load(inp + start + (size_t)r * C + i, C - i);
                }
#pragma unroll
                for (int r = 0; r < MOST_ROWS; r++) {
                    for (int k = 0; k < WIDTH; k++) sum_gx[r] += d[r].x[k] * w.x[k] * x[r].x[k];
                    if (r < count) Aligned::store(rows_d + r * width + i, d[r], WIDTH);
                    if (r < count) Aligned::store(rows_x + r * width + i, x[r], WIDTH);
                }
            }
#pragma unroll
            for (int r = 0; r < MOST_ROWS; r++) {
                const float warp_total = warp_sum(sum_gx[r]);
                if (lane == 0) of_warp[warp][r] = warp_total;
            }
            __syncthreads();
            for (int r = threadIdx.x; r < count; r += blockDim.x) {
                float total = 0.0f;
                for (int w = 0; w < warps; w++) total += of_warp[w][r];
                mean_gx[r] = total / C;
            }
            __syncthreads();

            for (int i = WIDTH * threadIdx.x; i < C; i += step) {
                const Vec w = memory.load(weight + i, C - i);
                Vec sum = {}, dx[MOST_ROWS];
                if (begin >= gridDim.x * rows) sum = memory.load(sums + i, C - i);  // of the rows before
#pragma unroll
                for (int r = 0; r < MOST_ROWS; r++) {
                    if (r < count) dx[r] = memory.load(dinp + start + (size_t)r * C + i, C - i);
                }
#pragma unroll
                for (int r = 0; r < MOST_ROWS; r++) {
                    if (r >= count) continue;
                    const Vec d = Aligned::load(rows_d + r * width + i, WIDTH);
                    const Vec x = Aligned::load(rows_x + r * width + i, WIDTH);
                    const float s = rstd[begin + r];
                    for (int k = 0; k < WIDTH; k++) {
                        const float n = x.x[k] * s;
                        dx[r].x[k] += s * (d.x[k] * w.x[k] - n * s * mean_gx[r]);
                        sum.x[k] += d.x[k] * n;
                    }
                    memory.store(dinp + start + (size_t)r * C + i, dx[r], C - i);
                }
                memory.store(sums + i, sum, C - i);
            }
        }
    });
}

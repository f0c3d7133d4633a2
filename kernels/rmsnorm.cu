// RMSNorm: out = n * weight with n = x * rstd, over the last axis of x (N, C), N = B*T;
// rstd = 1 / sqrt(mean(x^2) + eps). It is layernorm without mean and bias. norm.cuh has the forward pass.
// Backward: with g = dout * weight,
//   dx += rstd * (g - n * mean(g * n));  dweight += sum_rows(dout * n)
// Memory-bound: backward reads dout, x and the old dx and writes dx.
//
// Memory is kept busy by many loads in flight: a thread issues a batch of independent loads before it uses the first.
// `__restrict__` tells the compiler that no array overlaps another, so that it may move loads ahead of stores.
#include "norm.cuh"

// Writes out (N,C) and rstd (N).
extern "C" __global__ void PROGRAMMATIC rmsnorm_forward_kernel(
    floatX* __restrict__ out, float* __restrict__ rstd, const floatX* inp, const floatX* weight, float eps, int N,
    int C) {
    norm_forward(nullptr, rstd, inp, {out, weight}, {}, eps, N, C);
}

// The block is (threads of a row, groups). Each group takes AT_ONCE rows at a time, then all groups advance together.
// Each thread takes vectors of columns. It reads dout and inp twice, for the sums along the rows and for dx; the second
// time they are in the first-level cache. The kernel adds to dinp (N,C). It writes the columns' sums of dout * n to
// partials (gridDim.x, C). Until the last row is done each group keeps its sums in shared memory (groups, C); or, if
// that is too small (keep = 0), the only group keeps them in partials.
constexpr int AT_ONCE = 2, MAX_THREADS = 512;

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
rmsnorm_backward_kernel(floatX* __restrict__ dinp, SETS float* __restrict__ partials,
                        const floatX* __restrict__ dout, const floatX* __restrict__ inp,
                        const floatX* __restrict__ weight, const float* __restrict__ rstd, int N, int C, int keep) {
    __shared__ float warp_sums[2][AT_ONCE][MAX_THREADS / WARP_SIZE];
    DYNAMIC_SHARED(float, group_sums);
    const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;  // of a row
    const int first = WIDTH * threadIdx.x, step = WIDTH * blockDim.x, stride = gridDim.x * blockDim.y * AT_ONCE;
    const float one_of_row = 1.0f / C;
    float* block_sums = partials + (size_t)blockIdx.x * C;
    float* sums = keep ? group_sums + threadIdx.y * C : block_sums;

    by_alignment(C % WIDTH == 0 && is_aligned(weight), [&](auto memory) {
        int turn = 0;
        for (int block_begin = blockIdx.x * blockDim.y * AT_ONCE; block_begin < N; block_begin += stride, turn++) {
            const int begin = block_begin + threadIdx.y * AT_ONCE;
            const size_t start = (size_t)begin * C;
            float s[AT_ONCE] = {}, mean_gn[AT_ONCE] = {};
            Vec dx[AT_ONCE];
            // A vector of row r of this turn; 0 if there is no such row.
            auto load = [&](const floatX* p, int r, int i) {
                return begin + r < N ? memory.load(p + start + (size_t)r * C + i, C - i) : Vec();
            };
            auto load_dx = [&](int i) {
#pragma unroll
                for (int r = 0; r < AT_ONCE; r++) {
                    if (i < C) dx[r] = load(dinp, r, i);
                }
            };
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                if (begin + r < N) s[r] = rstd[begin + r];
            }
#pragma unroll 1
            for (int i = first; i < C; i += step) {
                const Vec w = memory.load(weight + i, C - i);
                Vec d[AT_ONCE], x[AT_ONCE];
#pragma unroll
                for (int r = 0; r < AT_ONCE; r++) {
                    d[r] = load(dout, r, i);
                    x[r] = load(inp, r, i);
                }
                if (i == first) load_dx(i);  // which comes while the block sums up
#pragma unroll
                for (int r = 0; r < AT_ONCE; r++) {
                    for (int k = 0; k < WIDTH; k++) mean_gn[r] += d[r].x[k] * w.x[k] * (x[r].x[k] * s[r]);
                }
            }
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                const float gn = warp_sum(mean_gn[r]);
                if (lane == 0) warp_sums[turn % 2][r][threadIdx.y * warps + threadIdx.x / WARP_SIZE] = gn;
            }
            __syncthreads();  // there is another one before the turn after the next overwrites warp_sums
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                float gn = 0.0f;
#pragma unroll 1
                for (int w = lane; w < warps; w += WARP_SIZE) gn += warp_sums[turn % 2][r][threadIdx.y * warps + w];
                mean_gn[r] = warp_sum(gn) * one_of_row;
            }

#pragma unroll 1
            for (int i = first; i < C; i += step) {
                const Vec w = memory.load(weight + i, C - i);
                Vec sum = {};
                if (turn > 0) sum = memory.load(sums + i, C - i);  // of the rows before
#pragma unroll
                for (int r = 0; r < AT_ONCE; r++) {
                    if (begin + r >= N) continue;
                    const Vec d = load(dout, r, i), x = load(inp, r, i);
                    for (int k = 0; k < WIDTH; k++) {
                        const float n = x.x[k] * s[r];
                        dx[r].x[k] += s[r] * (d.x[k] * w.x[k] - n * mean_gn[r]);
                        sum.x[k] += d.x[k] * n;
                    }
                    memory.store(dinp + start + (size_t)r * C + i, dx[r], C - i);
                }
                load_dx(i + step);
                memory.store(sums + i, sum, C - i);
            }
        }
    });
    if (!keep) return;
    __syncthreads();
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < C; i += blockDim.x * blockDim.y) {
        float total = 0.0f;
        for (int group = 0; group < blockDim.y; group++) total += group_sums[group * C + i];
        block_sums[i] = total;
    }
}

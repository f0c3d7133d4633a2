// RMSNorm of each head of queries and keys, and RoPE after it. Over the channels x (HS) of a head:
//   n = x * rstd,  out = rotate(n * weight), with rstd = 1 / sqrt(mean(x^2) + eps)
// The heads of q share one weight (HS), those of k another. Values pass as they are. rope.cu says what RoPE does.
// Backward: dout is turned back to dy; with g = dy * weight,
//   dx = rstd * (g - n * mean(g * n));  dweight += sum over positions and heads of dy * n
// Memory-bound: forward reads and writes each head once. Backward reads dout and x of queries and keys, and writes dx.
//
// A warp has a head. It reads the head twice, for the sum and for the result; the second time the first-level cache has
// it. Weights are parameters and need not begin at 16 bytes.
#include "rope.cuh"

// inp and out (N,NH+2*NKV,HS), N = B*T; rstd (N,NH+NKV); table (T,HS/2,2). The block has warps of WARP_SIZE, a head each.
extern "C" __global__ void qk_norm_forward_kernel(SETS float* __restrict__ out, SETS float* __restrict__ rstd,
                                                  const float* __restrict__ inp, const float* __restrict__ qweight,
                                                  const float* __restrict__ kweight, const float* __restrict__ table,
                                                  float eps, int N, int T, int NH, int NKV, int HS) {
    const int head = blockIdx.x * blockDim.y + threadIdx.y, heads = NH + 2 * NKV;
    if (head >= N * heads) return;
    const int n = head / heads, h = head % heads;
    const float* x = inp + (size_t)head * HS;
    float* y = out + (size_t)head * HS;
    const float* weight = h < NH ? qweight : kweight;
    const float* angles = table + (size_t)(n % T) * HS;

    by_alignment(HS % 4 == 0 && is_aligned(weight), [&](auto memory) {
        if (h >= NH + NKV) {
            for (int i = 4 * threadIdx.x; i < HS; i += 4 * WARP_SIZE) memory.store(y + i, memory.load(x + i, HS - i), HS - i);
            return;
        }
        float sum = 0.0f;
        for (int i = 4 * threadIdx.x; i < HS; i += 4 * WARP_SIZE) {
            const Vec v = memory.load(x + i, HS - i);
            for (int k = 0; k < 4; k++) sum += v.x[k] * v.x[k];
        }
        const float s = rsqrtf(warp_sum(sum) / HS + eps);
        for (int i = 4 * threadIdx.x; i < HS; i += 4 * WARP_SIZE) {
            Vec v = memory.load(x + i, HS - i);
            const Vec w = memory.load(weight + i, HS - i);
            for (int k = 0; k < 4; k++) v.x[k] = s * v.x[k] * w.x[k];
            memory.store(y + i, rotate(v, memory.load(angles + i, HS - i), 1.0f), HS - i);
        }
        if (threadIdx.x == 0) rstd[(size_t)n * (NH + NKV) + h] = s;
    });
}

// Changes dqkv (N,NH+2*NKV,HS) in place, in its query and key heads. A warp goes through many heads and sums up, in
// shared memory, dy * n of its query heads and of its key heads; a lane reads there only what it wrote itself. At the end
// the block's sums go to partials (gridDim.x, 2, HS): for q, for k. Shared memory: two rows of HS floats, rounded up to a
// multiple of 4, for each warp.
extern "C" __global__ void qk_norm_backward_kernel(float* __restrict__ dqkv, float* __restrict__ partials,
                                                   const float* __restrict__ inp, const float* __restrict__ qweight,
                                                   const float* __restrict__ kweight, const float* __restrict__ rstd,
                                                   const float* __restrict__ table, int N, int T, int NH, int NKV,
                                                   int HS) {
    DYNAMIC_SHARED(float, sums);
    const int width = 4 * ceil_div(HS, 4), lane = threadIdx.x, warps = blockDim.y;
    float* own = sums + 2 * threadIdx.y * width;
    for (int i = 4 * lane; i < HS; i += 4 * WARP_SIZE) {
        Aligned::store(own + i, Vec(), 4);
        Aligned::store(own + width + i, Vec(), 4);
    }

    for (int head = blockIdx.x * warps + threadIdx.y; head < N * (NH + NKV); head += gridDim.x * warps) {
        const int n = head / (NH + NKV), h = head % (NH + NKV);
        const size_t start = ((size_t)n * (NH + 2 * NKV) + h) * HS;
        const float* weight = h < NH ? qweight : kweight;
        const float* angles = table + (size_t)(n % T) * HS;
        float* sum = h < NH ? own : own + width;
        const float s = rstd[head];

        by_alignment(HS % 4 == 0 && is_aligned(weight), [&](auto memory) {
            auto turned_back = [&](int i) {
                return rotate(memory.load(dqkv + start + i, HS - i), memory.load(angles + i, HS - i), -1.0f);
            };
            float sum_gn = 0.0f;
            for (int i = 4 * lane; i < HS; i += 4 * WARP_SIZE) {
                const Vec dy = turned_back(i), x = memory.load(inp + start + i, HS - i);
                const Vec w = memory.load(weight + i, HS - i);
                for (int k = 0; k < 4; k++) sum_gn += dy.x[k] * w.x[k] * (x.x[k] * s);
            }
            const float mean_gn = warp_sum(sum_gn) / HS;
            for (int i = 4 * lane; i < HS; i += 4 * WARP_SIZE) {
                const Vec dy = turned_back(i), x = memory.load(inp + start + i, HS - i);
                const Vec w = memory.load(weight + i, HS - i);
                Vec dx, total = Aligned::load(sum + i, 4);
                for (int k = 0; k < 4; k++) {
                    const float normalised = x.x[k] * s;
                    dx.x[k] = s * (dy.x[k] * w.x[k] - normalised * mean_gn);
                    total.x[k] += dy.x[k] * normalised;
                }
                Aligned::store(sum + i, total, 4);
                memory.store(dqkv + start + i, dx, HS - i);
            }
        });
    }
    __syncthreads();
    for (int i = threadIdx.y * WARP_SIZE + lane; i < 2 * HS; i += warps * WARP_SIZE) {
        const int of = i / HS, channel = i % HS;
        float total = 0.0f;
        for (int warp = 0; warp < warps; warp++) total += sums[(2 * warp + of) * width + channel];
        partials[(size_t)blockIdx.x * 2 * HS + i] = total;
    }
}

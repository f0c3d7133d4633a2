// RMSNorm of each head of queries and keys, and RoPE after it. Over the channels x (HS) of a head:
//   n = x * rstd,  out = rotate(n * weight), with rstd = 1 / sqrt(mean(x^2) + eps)
// The heads of q share one weight (HS), those of k another. Values stay as they are. rope.cu explains RoPE.
// Backward: dy is dout, rotated back; with g = dy * weight,
//   dx = rstd * (g - n * mean(g * n));  dweight += sum over positions and heads of dy * n
// Memory-bound: forward reads and writes each head once. Backward reads dout and x of queries and keys, and writes dx.
//
// LANES neighbours in a warp take a head. They read it twice, for the sum and for the result; the second time it is in
// the first-level cache. In forward they load their first weights and angles while the previous launch is at work.
// Weights are parameters, whose addresses need not be multiples of 16.
#include "dependent_launch.cuh"
#include "qk_norm.cuh"

// inp and out (N,NH+2*NKV,HS), N = B*T; rstd (N,NH+NKV); table (T,HS/2,2). starts (B), which may be null, has the
// position of each sequence's first row.
extern "C" __global__ void PROGRAMMATIC qk_norm_forward_kernel(SETS floatX* __restrict__ out,
                                                               SETS float* __restrict__ rstd, const floatX* inp,
                                                               const floatX* qweight, const floatX* kweight,
                                                               const float* table, const int* starts, float eps, int N,
                                                               int T, int NH, int NKV, int HS) {
    const int head = blockIdx.x * heads_at_once() + place(), heads = NH + 2 * NKV;
    trigger_programmatic_launch();
    if (head >= N * heads) return;
    const int n = head / heads, h = head % heads;
    const floatX* x = inp + (size_t)head * HS;
    floatX* y = out + (size_t)head * HS;
    const floatX* weight = h < NH ? qweight : kweight;
    const float* angles = table + (size_t)(n % T + (starts == nullptr ? 0 : early_position(starts, n / T))) * HS;

    by_alignment(HS % WIDTH == 0 && is_aligned(weight), [&](auto memory) {
        const int mine = WIDTH * lane();
        const bool is_value = h >= NH + NKV;
        Vec w = {}, a = {};
        if (mine < HS && !is_value) {
            w = memory.load(weight + mine, HS - mine);
            a = memory.load(angles + mine, HS - mine);
        }
        grid_dependency_synchronize();
        if (is_value) {
            for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
                memory.store(y + i, memory.load(x + i, HS - i), HS - i);
            }
            return;
        }
        float sum = 0.0f;
        for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
            const Vec v = memory.load(x + i, HS - i);
            for (int k = 0; k < WIDTH; k++) sum += v.x[k] * v.x[k];
        }
        const float s = rsqrtf(head_sum(sum) / HS + eps);
        for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
            Vec v = memory.load(x + i, HS - i);
            if (i != mine) w = memory.load(weight + i, HS - i), a = memory.load(angles + i, HS - i);
            for (int k = 0; k < WIDTH; k++) v.x[k] = s * v.x[k] * w.x[k];
            memory.store(y + i, rotate(v, a, 1.0f), HS - i);
        }
        if (lane() == 0) rstd[(size_t)n * (NH + NKV) + h] = s;
    });
}

// Changes dqkv (N,NH+2*NKV,HS) in place, in its query and key heads.
extern "C" __global__ void qk_norm_backward_kernel(floatX* __restrict__ dqkv, SETS float* __restrict__ partials,
                                                   const floatX* __restrict__ inp, const floatX* __restrict__ qweight,
                                                   const floatX* __restrict__ kweight, const float* __restrict__ rstd,
                                                   const float* __restrict__ table, int N, int T, int NH, int NKV,
                                                   int HS) {
    DYNAMIC_SHARED(float, memory_of_sums);
    const WeightSums sums(memory_of_sums, HS);
    const int at_once = heads_at_once();
    for (int head = blockIdx.x * at_once + place(); head < N * (NH + NKV); head += gridDim.x * at_once) {
        const int n = head / (NH + NKV), h = head % (NH + NKV);
        const size_t start = ((size_t)n * (NH + 2 * NKV) + h) * HS;
        const floatX* weight = h < NH ? qweight : kweight;
        const float* angles = table + (size_t)(n % T) * HS;
        float* sum = sums.of(h < NH);
        const float s = rstd[head];

        by_alignment(HS % WIDTH == 0 && is_aligned(weight), [&](auto memory) {
            auto turned_back = [&](int i) {
                return rotate(memory.load(dqkv + start + i, HS - i), memory.load(angles + i, HS - i), -1.0f);
            };
            float sum_gn = 0.0f;
            for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
                const Vec dy = turned_back(i), x = memory.load(inp + start + i, HS - i);
                add_gn(sum_gn, dy, x, memory.load(weight + i, HS - i), s);
            }
            const float mean_gn = head_sum(sum_gn) / HS;
            for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
                const Vec dy = turned_back(i), x = memory.load(inp + start + i, HS - i);
                Vec total = Aligned::load(sum + i, WIDTH);
                const Vec dx = input_gradient(total, dy, x, memory.load(weight + i, HS - i), s, mean_gn);
                Aligned::store(sum + i, total, WIDTH);
                memory.store(dqkv + start + i, dx, HS - i);
            }
        });
    }
    sums.write(partials);
}

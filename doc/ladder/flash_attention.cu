// Causal attention without (T, T) matrices: out (B, T, NH, 64) = softmax(q k^T / 8) v over the keys up to the query
// itself, lse (B, NH, T) = log(sum(exp(q k^T / 8))), from qkv (B, T, 3, NH, 64).
// 2 T^2 * 64 operations per head on 16 T * 64 bytes: bound by arithmetic, if the operands come fast enough.
//
// All rungs go through the keys in order. For each query they keep the largest score so far, `top`, the sum of
// exp(score - top), and the sum of exp(score - top) * v. If a larger score comes, they rescale both (online softmax).
#define WARP_SIZE 32
#include "attention_tiles.cuh"

// Where a block works: blockIdx.x is a head of a sequence, and its rows of q, k and v lie `stride` floats apart.
struct Head {
    const float *q, *k, *v;
    float *out, *lse;
    int stride, out_stride;
    __device__ Head(float* out, float* lse, const float* qkv, int T, int NH)
        : q(qkv + ((size_t)(blockIdx.x / NH) * T * 3 * NH + blockIdx.x % NH) * HS), k(q + NH * HS), v(k + NH * HS),
          out(out + ((size_t)(blockIdx.x / NH) * T * NH + blockIdx.x % NH) * HS), lse(lse + (size_t)blockIdx.x * T),
          stride(3 * NH * HS), out_stride(NH * HS) {}
};

// One thread per query: the query and its sum of values stay in registers, and the thread goes through the keys one by
// one. The lanes of a warp are at the same key, so each load is one number for all of them. It serves one
// multiplication of each lane.
extern "C" __global__ void __launch_bounds__(64) scalar_kernel(float* out, float* lse, const float* qkv, int T, int NH) {
    const Head head(out, lse, qkv, T, NH);
    const int t = 64 * blockIdx.y + threadIdx.x;
    if (t >= T) return;
    float q[HS], acc[HS] = {}, top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HS; i++) q[i] = head.q[(size_t)t * head.stride + i];
    for (int s = 0; s <= t; s++) {
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < HS; i++) score += q[i] * head.k[(size_t)s * head.stride + i];
        score *= SCALE;
        if (score > top) {
            const float factor = __expf(top - score);
            sum *= factor;
#pragma unroll
            for (int i = 0; i < HS; i++) acc[i] *= factor;
            top = score;
        }
        const float p = __expf(score - top);
        sum += p;
#pragma unroll
        for (int i = 0; i < HS; i++) acc[i] += p * head.v[(size_t)s * head.stride + i];
    }
#pragma unroll
    for (int i = 0; i < HS; i++) head.out[(size_t)t * head.out_stride + i] = acc[i] / sum;
    head.lse[t] = top + logf(sum);
}

// Tiles in shared memory: a block copies 32 keys and values at a time to shared memory for its 64 queries, and its
// threads load them by 16 bytes. The sums are rescaled once for eight keys, whose scores wait in registers.
extern "C" __global__ void __launch_bounds__(64) tiled_kernel(float* out, float* lse, const float* qkv, int T, int NH) {
    __shared__ __align__(16) float keys[KEYS][HS], values[KEYS][HS];
    const Head head(out, lse, qkv, T, NH);
    const int t0 = 64 * blockIdx.y, t = t0 + threadIdx.x;
    float q[HS], acc[HS] = {}, top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HS; i++) q[i] = t < T ? head.q[(size_t)t * head.stride + i] : 0.0f;
    for (int s0 = 0; s0 < min(t0 + 64, T); s0 += KEYS) {
        load_rows<64, false, false>(&keys[0][0], head.k, KEYS, s0, T, head.stride);
        load_rows<64, false, false>(&values[0][0], head.v, KEYS, s0, T, head.stride);
        __syncthreads();
#pragma unroll 1
        for (int s8 = 0; s8 < KEYS; s8 += 8) {
            float p[8], before = top;
#pragma unroll
            for (int s = 0; s < 8; s++) {
                float score = 0.0f;
#pragma unroll
                for (int i = 0; i < HS; i += 4) {
                    const Vec k = Aligned::load(&keys[s8 + s][i], 4);
                    for (int e = 0; e < 4; e++) score += q[i + e] * k.x[e];
                }
                p[s] = s0 + s8 + s <= t ? score * SCALE : -INFINITY;
                top = fmaxf(top, p[s]);
            }
            const float factor = __expf(before - top);
            sum *= factor;
#pragma unroll
            for (int i = 0; i < HS; i++) acc[i] *= factor;
#pragma unroll
            for (int s = 0; s < 8; s++) {
                p[s] = __expf(p[s] - top);
                sum += p[s];
#pragma unroll
                for (int i = 0; i < HS; i += 4) {
                    const Vec v = Aligned::load(&values[s8 + s][i], 4);
                    for (int e = 0; e < 4; e++) acc[i + e] += p[s] * v.x[e];
                }
            }
        }
        __syncthreads();
    }
    if (t >= T) return;
#pragma unroll
    for (int i = 0; i < HS; i++) head.out[(size_t)t * head.out_stride + i] = acc[i] / sum;
    head.lse[t] = top + logf(sum);
}

// ---- with tensor cores: blocks of four warps with 16 queries each, tiles of 32 keys.

// The 16 rows from `row0` on of the result: row g of the fragments is divided by sum[0], row g + 8 by sum[1].
__device__ inline void store_result(const Head& head, const float (&acc)[HS / 8][4], const float (&top)[2],
                                    const float (&sum)[2], int row0, int T) {
    const float factors[2] = {1.0f / sum[0], 1.0f / sum[1]};
    store_rows(head.out, acc, factors, row0, T, head.out_stride);
    for (int h = 0; h < 2; h++) {
        const int row = row0 + threadIdx.x % 32 / 4 + 8 * h;
        if (threadIdx.x % 4 == 0 && row < T) head.lse[row] = top[h] + logf(sum[h]);
    }
}

// Tensor cores through shared memory: the scores of mma go to shared memory, two lanes turn a row of them into p, and p
// comes back as mma's first operand. The rows of scores are a float longer, so that a column lies in different banks.
extern "C" __global__ void __launch_bounds__(128) mma_kernel(float* out, float* lse, const float* qkv, int T, int NH) {
    __shared__ __align__(16) float queries[64 * HS], keys[KEYS * HS], values[KEYS * HS];
    __shared__ float scores[64][KEYS + 1], factors[64];
    const Head head(out, lse, qkv, T, NH);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, t0 = 64 * blockIdx.y, y = threadIdx.x / 32 * 16;
    const int mine = threadIdx.x / 2, half = threadIdx.x % 2 * 16;  // the row of this lane and its neighbour
    float acc[HS / 8][4] = {}, top = -INFINITY, sum = 0.0f;
    load_rows<128, false, true>(queries, head.q, 64, t0, T, head.stride);
    for (int s0 = 0; s0 < min(t0 + 64, T); s0 += KEYS) {
        load_rows<128, false, true>(keys, head.k, KEYS, s0, T, head.stride);
        load_rows<128, false, true>(values, head.v, KEYS, s0, T, head.stride);
        __syncthreads();
        if (s0 < t0 + y + 16) {  // not all of them above the diagonal
            float s[KEYS / 8][4] = {};
#pragma unroll
            for (int k = 0; k < HS; k += 8) {
                float a[4];
                for (int e = 0; e < 4; e++) a[e] = queries[place<false>(y + g + e % 2 * 8, k + t + e / 2 * 4)];
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
                    mma(s[n], a, keys[place<false>(8 * n + g, k + t)], keys[place<false>(8 * n + g, k + t + 4)]);
                }
            }
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                for (int e = 0; e < 4; e++) scores[y + g + e / 2 * 8][8 * n + 2 * t + e % 2] = s[n][e];
            }
            __syncwarp();
            float largest = top, total = 0.0f;
            for (int i = half; i < half + 16; i++) {
                scores[mine][i] = s0 + i <= t0 + mine ? scores[mine][i] * SCALE : -INFINITY;
                largest = fmaxf(largest, scores[mine][i]);
            }
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            for (int i = half; i < half + 16; i++) {
                const float p = __expf(scores[mine][i] - largest);
                total += p;
                scores[mine][i] = to_tf32(p);
            }
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            const float factor = __expf(top - largest);
            sum = sum * factor + total;
            top = largest;
            if (half == 0) factors[mine] = factor;
            __syncwarp();
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                for (int e = 0; e < 4; e++) acc[n][e] *= factors[y + g + e / 2 * 8];
            }
#pragma unroll
            for (int k = 0; k < KEYS; k += 8) {
                float a[4];
                for (int e = 0; e < 4; e++) a[e] = scores[y + g + e % 2 * 8][k + t + e / 2 * 4];
#pragma unroll
                for (int n = 0; n < HS / 8; n++) {
                    mma(acc[n], a, values[place<false>(k + t, 8 * n + g)], values[place<false>(k + t + 4, 8 * n + g)]);
                }
            }
        }
        __syncthreads();
    }
    // top and sum of rows g and g + 8 are with the lanes 2g and 2g + 16.
    float tops[2], sums[2];
    for (int h = 0; h < 2; h++) {
        tops[h] = __shfl_sync(0xffffffffu, top, 2 * g + 16 * h);
        sums[h] = __shfl_sync(0xffffffffu, sum, 2 * g + 16 * h);
    }
    store_result(head, acc, tops, sums, t0 + y, T);
}

// What a warp keeps for its 16 queries: q as operands of mma, and for rows g and g + 8 the largest score and the lane's
// share of the sum.
struct Queries {
    float q[HS / 8][4], acc[HS / 8][4], top[2], sum[2];
    __device__ Queries(const float* rows, int row0, int T, int stride) : acc{}, top{-INFINITY, -INFINITY}, sum{} {
        load_operand(q, rows, row0, T, stride);
    }

    // A tile of keys and values for queries from row0 on.
    template <bool SWIZZLED, bool ROUND>
    __device__ void attend(const float* keys, const float* values, int s0, int row0) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        float p[KEYS / 8][4] = {};
        add_scores<SWIZZLED, ROUND>(p, q, keys);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = top[h];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    p[n][e] = s0 + 8 * n + 2 * t + e % 2 <= row0 + g + 8 * h ? p[n][e] * SCALE : -INFINITY;
                    largest = fmaxf(largest, p[n][e]);
                }
            }
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));  // the four lanes of a row
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            const float factor = __expf(top[h] - largest);
            top[h] = largest;
            sum[h] *= factor;
#pragma unroll
            for (int n = 0; n < HS / 8; n++) acc[n][2 * h] *= factor, acc[n][2 * h + 1] *= factor;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    p[n][e] = __expf(p[n][e] - largest);
                    sum[h] += p[n][e];
                    p[n][e] = to_tf32(p[n][e]);
                }
            }
        }
        add_sum<SWIZZLED, ROUND>(acc, p, values);
    }

    __device__ void store(const Head& head, int row0, int T) {
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        }
        store_result(head, acc, top, sum, row0, T);
    }
};

template <bool SWIZZLED>
__device__ inline void with_registers(float* out, float* lse, const float* qkv, int T, int NH) {
    __shared__ __align__(16) float keys[KEYS * HS], values[KEYS * HS];
    const Head head(out, lse, qkv, T, NH);
    const int t0 = 64 * blockIdx.y, row0 = t0 + threadIdx.x / 32 * 16;
    Queries queries(head.q, row0, T, head.stride);
    for (int s0 = 0; s0 < min(t0 + 64, T); s0 += KEYS) {
        load_rows<128, SWIZZLED, true>(keys, head.k, KEYS, s0, T, head.stride);
        load_rows<128, SWIZZLED, true>(values, head.v, KEYS, s0, T, head.stride);
        __syncthreads();
        if (s0 < row0 + 16) queries.attend<SWIZZLED, false>(keys, values, s0, row0);
        __syncthreads();
    }
    queries.store(head, row0, T);
}

// Scores stay in registers: the result of one mma is an operand of the next, if the keys come in another order. The
// queries' operands stay in registers, too.
extern "C" __global__ void __launch_bounds__(128)
registers_kernel(float* out, float* lse, const float* qkv, int T, int NH) {
    with_registers<false>(out, lse, qkv, T, NH);
}

// Swizzled tiles: each row has its chunks of 16 bytes in another order, so the eight rows of an operand lie in
// different banks. Without that all rows of 64 floats begin in the same bank, and are served one after the other.
extern "C" __global__ void __launch_bounds__(128)
swizzled_kernel(float* out, float* lse, const float* qkv, int T, int NH) {
    with_registers<true>(out, lse, qkv, T, NH);
}

// Asynchronous copies in two stages: the next tile is on its way while the warps work on this one.
extern "C" __global__ void __launch_bounds__(128)
two_stages_kernel(float* out, float* lse, const float* qkv, int T, int NH) {
    __shared__ __align__(16) float keys[2][KEYS * HS], values[2][KEYS * HS];
    const Head head(out, lse, qkv, T, NH);
    const int t0 = 64 * blockIdx.y, row0 = t0 + threadIdx.x / 32 * 16, end = min(t0 + 64, T);
    const auto start = [&](int s0, int stage) {
        copy_rows(keys[stage], head.k, s0, T, head.stride);
        copy_rows(values[stage], head.v, s0, T, head.stride);
    };
    start(0, 0);
    Queries queries(head.q, row0, T, head.stride);
    for (int s0 = 0, stage = 0; s0 < end; s0 += KEYS, stage ^= 1) {
        copies_wait();
        __syncthreads();  // this stage is there for all threads, and all are done with the other
        if (s0 + KEYS < end) start(s0 + KEYS, stage ^ 1);
        if (s0 < row0 + 16) queries.attend<true, true>(keys[stage], values[stage], s0, row0);
    }
    queries.store(head, row0, T);
}

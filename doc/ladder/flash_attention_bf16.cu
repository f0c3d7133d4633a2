// Causal attention without (T, T) matrices, in bf16: out (B, T, NH, 64) = softmax(q k^T / 8) v over the keys up to the query
// itself, from qkv (B, T, 3, NH, 64); lse (B, NH, T) = log(sum(exp(q k^T / 8))) is fp32, as are scores and sums.
// 2 T^2 * 64 operations per head on 8 T * 64 bytes. flash_attention.cu climbs up to scores that stay in registers; this file
// goes on from there, in bf16. Blocks have four warps with 16 queries each, tiles 64 keys, as many bytes as 32 of fp32.
#define WARP_SIZE 32
#include "tensor_cores.cuh"
static_assert(WIDTH == 8, "these kernels are compiled with -DfloatX=bf16");

constexpr int HS = 64, KEYS = 64;  // of a head; of a tile
constexpr float SCALE = 0.125f;    // 1 / sqrt(HS)

// Where a block works: blockIdx.x is a head of a sequence, and its rows of q, k and v lie `stride` numbers apart.
struct Head {
    const bf16 *q, *k, *v;
    bf16* out;
    float* lse;
    int stride, out_stride;
    __device__ Head(bf16* out, float* lse, const bf16* qkv, int T, int NH)
        : q(qkv + ((size_t)(blockIdx.x / NH) * T * 3 * NH + blockIdx.x % NH) * HS), k(q + NH * HS), v(k + NH * HS),
          out(out + ((size_t)(blockIdx.x / NH) * T * NH + blockIdx.x % NH) * HS), lse(lse + (size_t)blockIdx.x * T),
          stride(3 * NH * HS), out_stride(NH * HS) {}
};

// The place of a number in a tile whose rows are 128 bytes. Swizzled, the chunks of 16 bytes of row r change places: chunk c
// is where c ^ (r % 8) would be.
template <bool SWIZZLED>
__device__ inline int place(int row, int column) {
    return row * HS + (SWIZZLED ? column ^ row % 8 * 8 : column);
}

// Calls copy(to, from, inside) for the thread's share of a tile of keys and of one of values, from row s0 on.
template <bool SWIZZLED, class Copy>
__device__ inline void for_each_copy(bf16* keys, bf16* values, const Head& head, int s0, int T, Copy copy) {
    for (int i = threadIdx.x; i < KEYS * HS / 8; i += 128) {
        const int row = i / (HS / 8), column = i % (HS / 8) * 8, to = place<SWIZZLED>(row, column);
        const bool inside = s0 + row < T;
        const size_t at = inside ? (size_t)(s0 + row) * head.stride + column : 0;
        copy(keys + to, head.k + at, inside);
        copy(values + to, head.v + at, inside);
    }
}

__device__ inline unsigned two_of(bf16 first, bf16 second) { return first.bits | (unsigned)second.bits << 16; }
__device__ inline unsigned word_at(const bf16* two) { return *reinterpret_cast<const unsigned*>(two); }

// What a warp keeps of its 16 queries: q as operands of mma_bf16, and of rows g and g + 8 the largest score and the lane's
// share of the sum.
struct Queries {
    unsigned q[HS / 16][4];
    float acc[HS / 8][4], top[2], sum[2];
    __device__ Queries(const bf16* rows, int row0, int T, int stride) : acc{}, top{-INFINITY, -INFINITY}, sum{} {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int k = 0; k < HS / 16; k++) {
            for (int e = 0; e < 4; e++) {
                const int row = row0 + g + e % 2 * 8, column = 16 * k + 2 * t + e / 2 * 8;
                q[k][e] = row < T ? word_at(rows + (size_t)row * stride + column) : 0;
            }
        }
    }

    // A tile of keys and values for queries from row0 on. A lane has columns 2t and 2t + 1 of each result of q k^T. Two
    // results side by side, packed to words, are the operand that p v needs: 16 keys, in their own order.
    template <bool SWIZZLED, bool LDMATRIX>
    __device__ void attend(const bf16* keys, const bf16* values, int s0, int row0) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const auto at = [](const bf16* tile, int row, int column) { return tile + place<SWIZZLED>(row, column); };
        float p[KEYS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < HS / 16; k++) {
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                unsigned b[4];  // two words for each of two groups of eight keys
                if (LDMATRIX) load_matrices<false>(b, at(keys, 16 * n + lane / 16 * 8 + lane % 8, 16 * k + lane / 8 % 2 * 8));
                for (int e = 0; e < (LDMATRIX ? 0 : 4); e++)
                    b[e] = word_at(at(keys, 16 * n + e / 2 * 8 + g, 16 * k + 2 * t + e % 2 * 8));
                mma_bf16(p[2 * n], q[k], b[0], b[1]);
                mma_bf16(p[2 * n + 1], q[k], b[2], b[3]);
            }
        }
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
                }
            }
        }
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            unsigned a[4];
            for (int e = 0; e < 4; e++) a[e] = to_bf16(p[2 * k + e / 2][e % 2 * 2], p[2 * k + e / 2][e % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < HS / 16; n++) {
                unsigned b[4];  // two words for each of two groups of eight channels
                if (LDMATRIX) load_matrices<true>(b, at(values, 16 * k + lane % 16, 16 * n + lane / 16 * 8));
                for (int e = 0; e < (LDMATRIX ? 0 : 4); e++) {
                    const int row = 16 * k + 2 * t + e % 2 * 8, column = 16 * n + e / 2 * 8 + g;
                    b[e] = two_of(*at(values, row, column), *at(values, row + 1, column));
                }
                mma_bf16(acc[2 * n], a, b[0], b[1]);
                mma_bf16(acc[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    __device__ void store(const Head& head, int row0, int T) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
            const int row = row0 + g + 8 * h;
            if (row >= T) continue;
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                *reinterpret_cast<unsigned*>(head.out + (size_t)row * head.out_stride + 8 * n + 2 * t) =
                    to_bf16(acc[n][2 * h] / sum[h], acc[n][2 * h + 1] / sum[h]);
            }
            if (t == 0) head.lse[row] = top[h] + logf(sum[h]);
        }
    }
};

template <bool SWIZZLED, bool LDMATRIX>
__device__ inline void one_stage(bf16* out, float* lse, const bf16* qkv, int T, int NH) {
    __shared__ __align__(16) bf16 keys[KEYS * HS], values[KEYS * HS];
    const Head head(out, lse, qkv, T, NH);
    const int t0 = 64 * blockIdx.y, row0 = t0 + threadIdx.x / 32 * 16;
    Queries queries(head.q, row0, T, head.stride);
    for (int s0 = 0; s0 < min(t0 + 64, T); s0 += KEYS) {
        for_each_copy<SWIZZLED>(keys, values, head, s0, T, [](bf16* to, const bf16* from, bool inside) {
            Aligned::store(to, inside ? Aligned::load(from, 8) : Vec(), 8);
        });
        __syncthreads();
        queries.attend<SWIZZLED, LDMATRIX>(keys, values, s0, row0);
        __syncthreads();
    }
    queries.store(head, row0, T);
}

// Scores stay in registers: two results of q k^T, packed to words, are an operand of p v, and no key changes its place. Two
// neighbours of a row of k are one word; two of a column of v are two loads of two bytes.
extern "C" __global__ void __launch_bounds__(128)
registers_kernel(bf16* out, float* lse, const bf16* qkv, int T, int NH) {
    one_stage<false, false>(out, lse, qkv, T, NH);
}

// ldmatrix: one instruction brings a warp four matrices of 8 x 8, those of v transposed on their way. Rows of 128 bytes all
// begin in the same bank, so that the eight rows of a matrix are served one after the other.
extern "C" __global__ void __launch_bounds__(128)
ldmatrix_kernel(bf16* out, float* lse, const bf16* qkv, int T, int NH) {
    one_stage<false, true>(out, lse, qkv, T, NH);
}

// Swizzled tiles: each row has its chunks of 16 bytes in another order, so that the eight rows of a matrix lie in different
// banks. One order serves keys and values, since ldmatrix fetches both by eight chunks of eight rows.
extern "C" __global__ void __launch_bounds__(128)
swizzled_kernel(bf16* out, float* lse, const bf16* qkv, int T, int NH) {
    one_stage<true, true>(out, lse, qkv, T, NH);
}

// Asynchronous copies in two stages: the next tile is on its way while the warps work on this one.
extern "C" __global__ void __launch_bounds__(128)
two_stages_kernel(bf16* out, float* lse, const bf16* qkv, int T, int NH) {
    __shared__ __align__(16) bf16 keys[2][KEYS * HS], values[2][KEYS * HS];
    const Head head(out, lse, qkv, T, NH);
    const int t0 = 64 * blockIdx.y, row0 = t0 + threadIdx.x / 32 * 16, end = min(t0 + 64, T);
    const auto start = [&](int s0, int stage) {
        for_each_copy<true>(keys[stage], values[stage], head, s0, T, [](bf16* to, const bf16* from, bool inside) {
            copy_four(to, from, inside);
        });
    };
    start(0, 0);
    Queries queries(head.q, row0, T, head.stride);
    for (int s0 = 0, stage = 0; s0 < end; s0 += KEYS, stage ^= 1) {
        copies_wait();
        __syncthreads();  // this stage is there for all threads, and all are done with the other
        if (s0 + KEYS < end) start(s0 + KEYS, stage ^ 1);
        queries.attend<true, true>(keys[stage], values[stage], s0, row0);
    }
    queries.store(head, row0, T);
}

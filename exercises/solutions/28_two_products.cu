// Exercise 28: two products in a row, in bf16.
//
//   out = p v   with p = q k^T, rounded to bf16;   q, k, v and out (B, 16, 64)
// It is attention without the exponentials. A block is one warp, and has 16 queries and 16 keys. q, k and v wait in
// shared memory as bf16, swizzled: a row has eight chunks of eight numbers, and `place` says where each chunk lies.
//
// mma.cuh has the two instructions. With g = lane / 4 and t = lane % 4:
//   load_matrices<TRANSPOSED>(r, row)   r[4] = the lane's words of four 8 x 8 matrices. `row` is the address of row
//                                       lane % 8 of matrix lane / 8. Of each matrix the lane gets numbers 2t and 2t + 1
//                                       of row g, or, if TRANSPOSED, of column g.
//   mma_bf16(d, a, b0, b1, c)           d (16, 8) = a (16, 16) b (16, 8) + c. A word of a has two neighbours of a row:
//                                       a[0] columns 2t and 2t + 1 of row g, a[1] those of row g + 8; a[2] and a[3] are
//                                       eight columns further. A word of b has two neighbours of column g: b0 rows 2t
//                                       and 2t + 1, b1 eight rows further. d[0] and d[1] are columns 2t and 2t + 1 of
//                                       row g, d[2] and d[3] those of row g + 8.
// to_bf16(x, y) rounds two numbers and packs them into a word, x into the lower half.
#include "../../kernels/common.cuh"
#include "../../kernels/mma.cuh"

constexpr int HS = 64;

__device__ inline int place(int row, int chunk) { return HS * row + 8 * (chunk ^ row % 8); }

// 16 rows of x to a tile: in each turn a row, two numbers per lane.
__device__ inline void copy(bf16* tile, const float* x) {
    for (int row = 0; row < 16; row++) {
        const float2 two = reinterpret_cast<const float2*>(x + HS * row)[threadIdx.x];
        reinterpret_cast<unsigned*>(&tile[place(row, threadIdx.x / 4)])[threadIdx.x % 4] = to_bf16(two.x, two.y);
    }
}

extern "C" __global__ void two_products_kernel(float* out, const float* q, const float* k, const float* v) {
    __shared__ __align__(16) bf16 queries[16 * HS], keys[16 * HS], values[16 * HS];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4, first = 16 * HS * blockIdx.x;
    copy(queries, q + first), copy(keys, k + first), copy(values, v + first);
    __syncthreads();
    float scores[2][4] = {};
    for (int j = 0; j < 8; j += 2) {
        unsigned a[4], b[4];
        load_matrices<false>(a, &queries[place(lane % 16, j + lane / 16)]);
        load_matrices<false>(b, &keys[place(lane / 16 * 8 + lane % 8, j + lane / 8 % 2)]);
        for (int n = 0; n < 2; n++) mma_bf16(scores[n], a, b[2 * n], b[2 * n + 1], scores[n]);
    }
    unsigned p[4];
    for (int e = 0; e < 4; e++) p[e] = to_bf16(scores[e / 2][e % 2 * 2], scores[e / 2][e % 2 * 2 + 1]);
    for (int j = 0; j < 8; j += 2) {
        unsigned b[4];
        load_matrices<true>(b, &values[place(lane % 16, j + lane / 16)]);
        for (int n = 0; n < 2; n++) {
            float d[4] = {};
            mma_bf16(d, p, b[2 * n], b[2 * n + 1], d);
            for (int half = 0; half < 2; half++) {
                float* to = out + first + HS * (g + 8 * half) + 8 * (j + n) + 2 * t;
                *reinterpret_cast<float2*>(to) = make_float2(d[2 * half], d[2 * half + 1]);
            }
        }
    }
}

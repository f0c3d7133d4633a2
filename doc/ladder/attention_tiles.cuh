// What the ladders of flash attention in TF32 share, forward and backward: tiles in shared memory, and a warp's products
// with them.
#pragma once
#include "tensor_cores.cuh"

constexpr int HS = 64, KEYS = 32;  // of a head; rows of a tile
constexpr float SCALE = 0.125f;    // 1 / sqrt(HS)

// The place of a float in a tile whose rows are HS floats. Swizzled, the chunks of 16 bytes of row r change places: chunk
// c is where c ^ (r % 8) would be.
template <bool SWIZZLED>
__device__ inline int place(int row, int column) {
    return row * HS + (SWIZZLED ? column ^ row % 8 * 4 : column);
}

// `count` rows of an array from row s0 on, zeros from row T on; rounded to TF32 if ROUND.
template <int THREADS, bool SWIZZLED, bool ROUND>
__device__ inline void load_rows(float* tile, const float* rows, int count, int s0, int T, int stride) {
    for (int i = threadIdx.x; i < count * HS / 4; i += THREADS) {
        const int row = i / (HS / 4), column = i % (HS / 4) * 4;
        Vec x = s0 + row < T ? Aligned::load(rows + (size_t)(s0 + row) * stride + column, 4) : Vec();
        for (int e = 0; e < 4; e++) x.x[e] = ROUND ? to_tf32(x.x[e]) : x.x[e];
        Aligned::store(tile + place<SWIZZLED>(row, column), x, 4);
    }
}

// Starts to copy a tile's rows from row s0 on to a swizzled tile, not rounded.
__device__ inline void copy_rows(float* tile, const float* rows, int s0, int T, int stride) {
    for (int i = threadIdx.x; i < KEYS * HS / 4; i += 128) {
        const int row = i / (HS / 4), column = i % (HS / 4) * 4;
        const bool inside = s0 + row < T;
        copy_four(tile + place<true>(row, column), rows + (inside ? (size_t)(s0 + row) * stride + column : 0), inside);
    }
}

// The 16 rows of an array from row0 on as first operand of sums over HS; zeros from row T on.
__device__ inline void load_operand(float (&a)[HS / 8][4], const float* rows, int row0, int T, int stride) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < HS / 8; k++) {
        for (int e = 0; e < 4; e++) {
            const int row = row0 + g + e % 2 * 8, column = 8 * k + t + e / 2 * 4;
            a[k][e] = row < T ? to_tf32(rows[(size_t)row * stride + column]) : 0.0f;
        }
    }
}

// A float of a tile, rounded to TF32 if that has not been done.
template <bool SWIZZLED, bool ROUND>
__device__ inline float in_tile(const float* tile, int row, int column) {
    const float x = tile[place<SWIZZLED>(row, column)];
    return ROUND ? to_tf32(x) : x;
}

// s (16, KEYS) += a tile^T.
template <bool SWIZZLED, bool ROUND>
__device__ inline void add_scores(float (&s)[KEYS / 8][4], const float (&a)[HS / 8][4], const float* tile) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const auto at = [](const float* tile, int row, int column) { return in_tile<SWIZZLED, ROUND>(tile, row, column); };
#pragma unroll
    for (int k = 0; k < HS / 8; k++) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            mma(s[n], a[k], at(tile, 8 * n + g, 8 * k + t), at(tile, 8 * n + g, 8 * k + t + 4));
        }
    }
}

// acc (16, HS) += p tile, for p (16, KEYS) as add_scores leaves scores, rounded. As a result a lane has columns 2t and
// 2t + 1 of p; as operand it must have columns t and t + 4. They are the same numbers if the product's column t stands for
// row 2t of the tile and its column t + 4 for row 2t + 1, in p and in the tile alike: a sum may be taken in any order.
template <bool SWIZZLED, bool ROUND>
__device__ inline void add_sum(float (&acc)[HS / 8][4], const float (&p)[KEYS / 8][4], const float* tile) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const auto at = [](const float* tile, int row, int column) { return in_tile<SWIZZLED, ROUND>(tile, row, column); };
#pragma unroll
    for (int k = 0; k < KEYS / 8; k++) {
        const float a[4] = {p[k][0], p[k][2], p[k][1], p[k][3]};
#pragma unroll
        for (int n = 0; n < HS / 8; n++) {
            mma(acc[n], a, at(tile, 8 * k + 2 * t, 8 * n + g), at(tile, 8 * k + 2 * t + 1, 8 * n + g));
        }
    }
}

// The 16 rows from row0 on of an array from the fragments of a sum: row g times factors[0], row g + 8 times factors[1].
__device__ inline void store_rows(float* rows, const float (&acc)[HS / 8][4], const float (&factors)[2], int row0, int T,
                                  int stride) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = row0 + g + 8 * h;
        if (row >= T) continue;
#pragma unroll
        for (int n = 0; n < HS / 8; n++) {
            *reinterpret_cast<float2*>(rows + (size_t)row * stride + 8 * n + 2 * t) =
                make_float2(acc[n][2 * h] * factors[h], acc[n][2 * h + 1] * factors[h]);
        }
    }
}

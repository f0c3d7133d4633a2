// Exercise 20: a product on tensor cores.
//
//   out (M, N) = a (M, K) b (K, N)
// Matrices lie in memory row after row. A block has four warps and computes a tile of out, 32 rows and 16 columns. Each
// warp computes 16 rows and 8 columns of it. The grid is (N / 16, M / 32) blocks, both rounded up. M, N and K may be
// any numbers: elements outside of a matrix count as 0.
//
// mma(d, f, b0, b1) of tensor_cores.cuh adds the product of A (16, 8) and B (8, 8) to D (16, 8). No lane holds a whole
// matrix: of A it has float f[4], of B float b0 and b1, of D float d[4]. With g = lane / 4 and t = lane % 4:
//
//          of A  column t  t + 4        of B  column g        of D  column 2t  2t + 1
//   row g          f[0]    f[2]        row t     b0           row g      d[0]    d[1]
//   row g + 8      f[1]    f[3]    row t + 4     b1           row g + 8  d[2]    d[3]
//
// mma is one instruction of the whole warp: all 32 lanes must call it, also lanes without an element of out. It ignores
// the last 13 bits of the numbers that it multiplies, so round these numbers by to_tf32(x) first.
#include "../../doc/ladder/tensor_cores.cuh"

extern "C" __global__ void product_kernel(float* out, const float* a, const float* b, int M, int N, int K) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = 32 * blockIdx.y + 16 * (warp / 2), column = 16 * blockIdx.x + 8 * (warp % 2);  // of the warp's tile
    const auto a_at = [&](int m, int k) { return m < M && k < K ? to_tf32(a[m * K + k]) : 0.0f; };
    const auto b_at = [&](int k, int n) { return k < K && n < N ? to_tf32(b[k * N + n]) : 0.0f; };
    float d[4] = {};
    for (int k = 0; k < K; k += 8) {
        const float f[4] = {a_at(row + g, k + t), a_at(row + g + 8, k + t),
                            a_at(row + g, k + t + 4), a_at(row + g + 8, k + t + 4)};
        mma(d, f, b_at(k + t, column + g), b_at(k + t + 4, column + g));
    }
    for (int i = 0; i < 4; i++) {
        const int m = row + g + i / 2 * 8, n = column + 2 * t + i % 2;
        if (m < M && n < N) out[m * N + n] = d[i];
    }
}

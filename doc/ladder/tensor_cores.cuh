// What the ladders of matrix products and of flash attention have of a GPU that C++ has no words for: the products of a
// tensor core. On the CPU device each has a twin in plain C++.
#pragma once
#include "../../kernels/async_copy.cuh"

// TF32 has fp32's exponent and 10 bits of mantissa. A tensor core ignores the 13 bits below; adding half of the last
// bit that it sees makes that the nearest such number.
__device__ inline float to_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

// d (16, 8) = a (16, 8) b (8, 8) + d, by the 32 lanes of a warp together. No lane has a matrix: each holds four numbers
// of a, two of b and four of d, its fragments. With g = lane / 4 and t = lane % 4 they are
//
//          of a  column t  t + 4        of b  column g        of d  column 2t  2t + 1
//   row g          a[0]    a[2]        row t     b0           row g      d[0]    d[1]
//   row g + 8      a[1]    a[3]    row t + 4     b1           row g + 8  d[2]    d[3]
//
// So 8 groups of 4 lanes: a group has two rows of a and of d to itself, and a column of b. The core multiplies each row
// by each column, 16 x 8 x 8 multiplications in one instruction, where an FMA of the warp does 32.
__device__ inline void mma(float (&d)[4], const float (&a)[4], float b0, float b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
#elif defined(LLMC_CPU)
    struct Lane { float a[4], b[2], d[4]; } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    cpu_warp_together(0xffffffffu, mine, [](Lane* const lanes[32]) {
        const auto seen = [](float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); };
        float A[16][8], B[8][8];
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++) A[g + i % 2 * 8][t + i / 2 * 4] = seen(lanes[lane]->a[i]);
            for (int i = 0; i < 2; i++) B[t + i * 4][g] = seen(lanes[lane]->b[i]);
        }
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++)
                for (int k = 0; k < 8; k++) lanes[lane]->d[i] += A[g + i / 2 * 8][k] * B[k][2 * t + i % 2];
        }
    }, "mma");
    for (int i = 0; i < 4; i++) d[i] = mine.d[i];
#else
    __trap();  // no TF32 before compute capability 8.0
#endif
}

// d (16, 8) = a (16, 16) b (16, 8) + d, of bf16. A word holds two numbers that are neighbours along the sum, the first in
// its lower half: columns of a, rows of b. Where mma has column t, this has columns 2t and 2t + 1; 8 stands for 4:
//
//          of a  columns 2t ..  2t + 8 ..      of b     column g      of d  column 2t  2t + 1
//   row g             a[0]      a[2]        rows 2t ..     b0         row g      d[0]    d[1]
//   row g + 8         a[1]      a[3]        rows 2t + 8 .. b1         row g + 8  d[2]    d[3]
//
// Twice the multiplications of mma, from as many registers.
__device__ inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif defined(LLMC_CPU)
    struct Lane { unsigned a[4], b[2]; float d[4]; } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    cpu_warp_together(0xffffffffu, mine, [](Lane* const lanes[32]) {
        const auto half = [](unsigned word, int i) { return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u); };
        float A[16][16], B[16][8];
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 8; i++) A[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = half(lanes[lane]->a[i / 2], i % 2);
            for (int i = 0; i < 4; i++) B[2 * t + i % 2 + i / 2 * 8][g] = half(lanes[lane]->b[i / 2], i % 2);
        }
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++)
                for (int k = 0; k < 16; k++) lanes[lane]->d[i] += A[g + i / 2 * 8][k] * B[k][2 * t + i % 2];
        }
    }, "mma_bf16");
    for (int i = 0; i < 4; i++) d[i] = mine.d[i];
#else
    __trap();  // no bf16 before compute capability 8.0
#endif
}

// Four (8, 8) matrices of bf16 from shared memory, fetched by a warp together: `row` is where row lane % 8 of matrix
// lane / 8 begins, 16 bytes. As r[i] the lane gets columns 2t and 2t + 1 of row g of matrix i, or if TRANSPOSED, rows 2t
// and 2t + 1 of column g.
template <bool TRANSPOSED>
__device__ inline void load_matrices(unsigned (&r)[4], const bf16* row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
    const unsigned address = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
#elif defined(LLMC_CPU)
    struct Lane { uint4 row; unsigned r[4]; } mine = {*reinterpret_cast<const uint4*>(row), {}};
    cpu_warp_together(0xffffffffu, mine, [](Lane* const lanes[32]) {
        const auto at = [&](int i, int row, int column) {
            const uint4 u = lanes[8 * i + row]->row;
            const unsigned words[4] = {u.x, u.y, u.z, u.w};
            return words[column / 2] >> 16 * (column % 2) & 0xffffu;
        };
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++) {
                lanes[lane]->r[i] = TRANSPOSED ? at(i, 2 * t, g) | at(i, 2 * t + 1, g) << 16
                                               : at(i, g, 2 * t) | at(i, g, 2 * t + 1) << 16;
            }
        }
    }, "load_matrices");
    for (int i = 0; i < 4; i++) r[i] = mine.r[i];
#endif
}

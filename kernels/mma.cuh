// Products with tensor cores (mma) and loads of their operands (ldmatrix), of GPUs since compute capability 8.0.
// Each has a twin in plain C++ for the CPU device.
//
// The operands of a product, A (16, 8) B (8, 8) + C (16, 8), are spread over the lanes of a warp. With g = lane / 4 and
// t = lane % 4, a lane holds
//          of A  column t  t + 4        of B  column g         of C and of the result  column 2t  2t + 1
//   row g          a[0]    a[2]        row t     b0            row g                     c[0]     c[1]
//   row g + 8      a[1]    a[3]    row t + 4     b1            row g + 8                 c[2]     c[3]
// In bf16 the product is A (16, 16) B (16, 8) + C (16, 8). In place of columns t and t + 4 of A a lane holds two pairs
// of columns, from 2t and from 2t + 8, each pair in one word, and of B such pairs of rows.
#pragma once
#include "async_copy.cuh"

// The tensor core sees of each operand TF32's 10 bits of mantissa, and ignores the bits below. This function rounds to
// the nearest such number, and halfway cases away from zero. A NaN with all bits set becomes a 0.
__device__ inline float to_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

// What the tensor core sees of x.
__device__ inline float tf32_bits(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// d (16, 8) = a (16, 8) b (8, 8) + c.
__device__ inline void mma(float (&d)[4], const float (&a)[4], float b0, float b1, const float (&c)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)),
          "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#elif defined(LLMC_CPU)
    struct Lane { float a[4], b[2], c[4]; } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    cpu_warp_together(0xffffffffu, mine, [](Lane* const lanes[32]) {
        float A[16][8], B[8][8];
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 4; i++) A[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = tf32_bits(lanes[lane]->a[i]);
            for (int i = 0; i < 2; i++) B[lane % 4 + i * 4][lane / 4] = tf32_bits(lanes[lane]->b[i]);
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                for (int k = 0; k < 8; k++)
                    lanes[lane]->c[i] += A[lane / 4 + i / 2 * 8][k] * B[k][lane % 4 * 2 + i % 2];
    }, "mma");
    for (int i = 0; i < 4; i++) d[i] = mine.c[i];
#else
    __trap();  // compute capability 7.5 has no TF32: the launchers refuse it
#endif
}

// The same in bf16, 16 columns of A by 16 rows of B: d (16, 8) = a (16, 16) b (16, 8) + c.
__device__ inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&c)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#elif defined(LLMC_CPU)
    struct Lane { unsigned a[4], b[2]; float c[4]; };
    Lane mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    cpu_warp_together(0xffffffffu, mine, [](Lane* const lanes[32]) {
        const auto half = [](unsigned word, int i) { return to_float(bf16{(unsigned short)(word >> i * 16)}); };
        float A[16][16], B[16][8];
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 8; i++) {
                const int column = lane % 4 * 2 + i % 2;
                A[lane / 4 + i / 2 % 2 * 8][column + i / 4 * 8] = half(lanes[lane]->a[i / 2], i % 2);
                if (i < 4) B[column + i / 2 * 8][lane / 4] = half(lanes[lane]->b[i / 2], i % 2);
            }
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                for (int k = 0; k < 16; k++)
                    lanes[lane]->c[i] += A[lane / 4 + i / 2 * 8][k] * B[k][lane % 4 * 2 + i % 2];
    }, "mma_bf16");
    for (int i = 0; i < 4; i++) d[i] = mine.c[i];
#else
    __trap();  // the launchers refuse compute capability 7.5
#endif
}

// Loads four (8, 8) matrices of bf16 from shared memory. `row` is the address of row lane % 8 of matrix lane / 8. The
// lane gets, as r[i], columns 2t and 2t + 1 of row g of matrix i; if TRANSPOSED, rows 2t and 2t + 1 of column g.
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
    // Each lane loads the row that it names: so the microscope sees the access, of 16 bytes, and counts its passes.
    const uint4 words = *reinterpret_cast<const uint4*>(row);
    struct Lane { unsigned row[4], r[4]; } mine = {{words.x, words.y, words.z, words.w}, {}};
    cpu_warp_together(0xffffffffu, mine, [](Lane* const lanes[32]) {
        const auto at = [&](int lane, int column) { return lanes[lane]->row[column / 2] >> column % 2 * 16 & 0xffffu; };
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++) {
                const int row0 = 8 * i + (TRANSPOSED ? 2 * t : g), row1 = 8 * i + (TRANSPOSED ? 2 * t + 1 : g);
                const int column0 = TRANSPOSED ? g : 2 * t, column1 = TRANSPOSED ? g : 2 * t + 1;
                lanes[lane]->r[i] = at(row0, column0) | at(row1, column1) << 16;
            }
        }
    }, "load_matrices");
    for (int i = 0; i < 4; i++) r[i] = mine.r[i];
#endif
}

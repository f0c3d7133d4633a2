// Numbers of one byte for matrix products: e4m3, a sign, 4 bits of exponent and 3 of mantissa (Micikevicius et al.
// 2022, arXiv 2209.05433). The largest is 448. So each matrix has a scale, and is about scale * codes. The scale is the
// least power of two with which no code is clipped. Then only the rounding to e4m3 changes a number: to divide by a
// power of two changes its exponent alone.
//
// An (N, C) matrix is encoded in two kernels, because every code depends on the largest number of all: absmax reads
// the matrix, and encode reads it again. Both are memory-bound: they read 4 bytes a number and write one, or two if
// the product that sums over rows needs the codes of the transposed matrix.
#include "common.cuh"

constexpr float LARGEST = 448.0f;

// The scale of a matrix whose largest absolute value is `largest`; NaN if that is infinite. At least 2^-126.
__device__ inline float scale_of(float largest) {
    if (!(largest < INFINITY)) return __int_as_float(0x7fffffff);
    // The largest code is 1.75 * 2^8. So with the exponent lowered by 8, a mantissa above 1.75 needs one more.
    const unsigned bits = __float_as_uint(largest), exponent = (bits >> 23) + ((bits & 0x7fffffu) > 0x600000u);
    return __uint_as_float((exponent > 9u ? exponent - 8u : 1u) << 23);
}

// 1 / scale
__device__ inline float inverse_of(float scale) {
    return scale == scale ? __uint_as_float((254u << 23) - __float_as_uint(scale)) : scale;
}

// a * b, also where a is below 2^-126: CuPy compiles all that is not written in PTX to take such a number as 0.
__device__ inline float exact_product(float a, float b) {
#ifdef LLMC_CPU
    return a * b;
#else
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
#endif
}

// The code nearest to x, ties to even. Numbers beyond 448 become 448, and NaN becomes 0x7f.
__device__ inline unsigned to_e4m3(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    const float size = __uint_as_float(bits & 0x7fffffffu);
    if (size != size) return 0x7fu;
    if (size >= LARGEST) return sign | 0x7eu;
    // Below 2^-6 the exponent stays, and neighbours are 2^-9 apart. So are floats from 2^14 on: the sum rounds.
    if (size < 0.015625f) return sign | (__float_as_uint(size + 16384.0f) - __float_as_uint(16384.0f));
    const unsigned rounded = __float_as_uint(size) + 0x7ffffu + (bits >> 20 & 1u);
    return sign | ((rounded >> 20) - (120u << 3));  // the exponent's bias is 127 in fp32, and 7 here
}

// Four codes in a word, the first in the lowest byte.
__device__ inline unsigned to_e4m3(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | (unsigned)high << 16;
#else
    return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
#endif
}

// maxima (gridDim.x): for each block the largest absolute value of its part of inp (n); infinity if it has a NaN. n is
// a multiple of WIDTH, and inp lies at a multiple of 16 bytes. A maximum is the same in any order: absmax goes from the
// end, which was written last and may still be in L2, to the beginning, where encode starts. (With the other direction
// an H200 took 1% longer for a step of Llama 3.2 1B at B 8.)
extern "C" __global__ void absmax_kernel(SETS float* maxima, const floatX* inp, size_t n) {
    float largest = 0.0f;
    bool finite = true;
    const size_t step = (size_t)WIDTH * gridDim.x * blockDim.x;
    for (size_t i = WIDTH * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); i < n; i += step) {
        const Vec v = Aligned::load(inp + (n - WIDTH - i), WIDTH);
        for (int k = 0; k < WIDTH; k++) {
            largest = fmaxf(largest, fabsf(v.x[k]));
            finite = finite && v.x[k] == v.x[k];
        }
    }
    largest = block_max(finite ? largest : INFINITY);
    if (threadIdx.x == 0) maxima[blockIdx.x] = largest;
}

constexpr int ROWS = 64, COLUMNS = 128, THREADS = 256;  // of a tile; each of the threads has 4 rows of 8 columns

// codes (N, C) = inp (N, C) / scale, and codes_T (C, N) the same transposed. One of the two may be null. N and C are
// multiples of 16, and all arrays lie at multiples of 16 bytes.
//
// The scale comes from maxima (count), absmax's. If maxima is null, the scale is `known`. The first block stores what
// came from maxima in scale, if scale is not null. If inp has a number that is not finite, scale and all codes become
// NaN: clipping hides nothing.
extern "C" __global__ void encode_kernel(SETS unsigned char* codes, SETS unsigned char* codes_T, SETS float* scale,
                                         const float* maxima, int count, const float* known, const floatX* inp, int N,
                                         int C) {
    __shared__ unsigned tile[COLUMNS][ROWS / 4 + 1];  // codes of four rows a word
    const int n0 = blockIdx.y * ROWS, c0 = blockIdx.x * COLUMNS;
    float of_matrix = known != nullptr ? *known : 0.0f;
    if (known == nullptr) {
        float largest = 0.0f;
        for (int i = threadIdx.x; i < count; i += blockDim.x) largest = fmaxf(largest, maxima[i]);
        largest = block_max(largest);
        of_matrix = scale_of(largest);
        if (scale != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *scale = of_matrix;
    }
    const float inverse = inverse_of(of_matrix);

    for (int thread = threadIdx.x; thread < THREADS; thread += blockDim.x) {
        const int x = thread % 16, y = thread / 16, n = n0 + 4 * y, c = c0 + 8 * x;
        if (n >= N || c >= C) continue;
        float v[4][8];
        for (int r = 0; r < 4; r++) {
            const uint4 u = *reinterpret_cast<const uint4*>(inp + (size_t)(n + r) * C + c);
            const unsigned words[4] = {u.x, u.y, u.z, u.w};
            for (int k = 0; k < 8; k++) {
                const unsigned bits = k % 2 == 0 ? words[k / 2] << 16 : words[k / 2] & 0xffff0000u;
                v[r][k] = exact_product(__uint_as_float(bits), inverse);
            }
        }
        if (codes != nullptr) {
            for (int r = 0; r < 4; r++) {
                const float* row = v[r];
                *reinterpret_cast<uint2*>(codes + (size_t)(n + r) * C + c) = make_uint2(
                    to_e4m3(row[0], row[1], row[2], row[3]), to_e4m3(row[4], row[5], row[6], row[7]));
            }
        }
        for (int k = 0; k < 8; k++) tile[8 * x + k][y] = to_e4m3(v[0][k], v[1][k], v[2][k], v[3][k]);
    }
    if (codes_T == nullptr) return;
    __syncthreads();
    for (int i = threadIdx.x; i < COLUMNS * ROWS / 16; i += blockDim.x) {
        const int c = i / (ROWS / 16), n = i % (ROWS / 16) * 16;
        const unsigned* words = &tile[c][n / 4];
        if (c0 + c < C && n0 + n < N) {
            *reinterpret_cast<uint4*>(codes_T + (size_t)(c0 + c) * N + n0 + n) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

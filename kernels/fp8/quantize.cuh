// Quantizes matrices to e4m3, numbers of one byte: a sign, 4 bits of exponent and 3 of mantissa (Micikevicius et al.
// 2022, arXiv 2209.05433). The largest is 448. So each matrix has a scale, and is about scale * q. The scale is the
// least power of two with which no number is clipped. Then only the rounding to e4m3 changes a number: to divide by a
// power of two changes its exponent alone.
#pragma once
#include "../common.cuh"

// Whether there are instructions for e4m3. CUDA 12.0 has them for compute capability 9.0 alone. Then nothing is
// quantized with 8.9, but the other kernels must compile.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900 || \
    __CUDA_ARCH__ == 890 && (__CUDACC_VER_MAJOR__ > 12 || __CUDACC_VER_MINOR__ > 0))
#define HAS_E4M3
#endif

constexpr float MAX_E4M3 = 448.0f;

// The scale of a matrix with this amax, its largest absolute value; NaN if that is infinite. At least 2^-126.
__device__ inline float scale_of(float amax) {
    if (!(amax < INFINITY)) return __int_as_float(0x7fffffff);
    // The largest number of e4m3 is 1.75 * 2^8. So with the exponent lowered by 8, a mantissa above 1.75 needs one
    // more.
    const unsigned bits = __float_as_uint(amax), exponent = (bits >> 23) + ((bits & 0x7fffffu) > 0x600000u);
    return __uint_as_float((exponent > 9u ? exponent - 8u : 1u) << 23);
}

// 1 / scale
__device__ inline float inverse_of(float scale) {
    return scale == scale ? __uint_as_float((254u << 23) - __float_as_uint(scale)) : scale;
}

// a * b, also where a is below 2^-126: CuPy compiles everything that is not written in PTX to take such a number as 0.
__device__ inline float multiply_denormals(float a, float b) {
#ifdef LLMC_CPU
    return a * b;
#else
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
#endif
}

// The number of e4m3 nearest to x, ties to even. Numbers beyond 448 become 448, and NaN becomes 0x7f.
__device__ inline unsigned to_e4m3(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    const float size = __uint_as_float(bits & 0x7fffffffu);
    if (size != size) return 0x7fu;
    if (size >= MAX_E4M3) return sign | 0x7eu;
    // Below 2^-6 the exponent stays, and neighbours are 2^-9 apart. So are floats from 2^14 on: the sum rounds.
    if (size < 0.015625f) return sign | (__float_as_uint(size + 16384.0f) - __float_as_uint(16384.0f));
    const unsigned rounded = __float_as_uint(size) + 0x7ffffu + (bits >> 20 & 1u);
    return sign | ((rounded >> 20) - (120u << 3));  // the exponent's bias is 127 in fp32, and 7 here
}

// Four numbers of e4m3 in a word, the first in the lowest byte.
__device__ inline unsigned to_e4m3(float a, float b, float c, float d) {
#ifdef HAS_E4M3
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | (unsigned)high << 16;
#else
    return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
#endif
}

// A Vec in e4m3, as it lies in memory, at a multiple of WIDTH bytes.
struct alignas(WIDTH) Fp8Vec {
    unsigned words[WIDTH / 4];
};

__device__ inline void store_fp8(unsigned char* p, const Fp8Vec& v) { *reinterpret_cast<Fp8Vec*>(p) = v; }

// Numbers as they are when they have been stored in bf16.
__device__ inline Vec rounded_to_bf16(Vec v) {
    for (int k = 0; k < WIDTH; k += 2) {
        const unsigned both = to_bf16(v.x[k], v.x[k + 1]);
        v.x[k] = __uint_as_float(both << 16);
        v.x[k + 1] = __uint_as_float(both & 0xffff0000u);
    }
    return v;
}

// Dynamic scaling, a scale for each tensor, in one read of the tensor. A kernel that quantizes runs twice.
// Pass 1 quantizes by a guessed scale. It writes each block's amax to block_amax (gridDim.x + 1), and after them the
// guess. Pass 2, with `second_pass`, computes the right scale from these and stores it. If the guess was right, it
// returns; else it quantizes again. So results never depend on a guess. Mostly the guess is right: from one step to the
// next an amax mostly keeps its exponent.
// The guess for a weight or an input: scale[0], its last scale.
// The guess for a gradient, which has previous_amax: *previous_amax is the amax of the layer quantized before. We
// multiply it by scale[1], a running mean of this layer's amax over that one: a batch with large gradients has them in
// all layers. The first layer of a pass follows the last one of the pass before.
// If the matrix has a number that is not finite, its scale and all its numbers become NaN: clipping hides nothing.
// Without block_amax a kernel runs once, by a known scale.
struct Quantizer {
    float *scale, *previous_amax, *block_amax;
    int second_pass;
    float inverse;  // 1 / the scale of this pass
    unsigned amax;  // the thread's, as bits. As integers, NaN's are above infinity's

    // All threads of a block call it first. In pass 2 the block is one-dimensional. False: there is nothing to do.
    __device__ bool begin() {
        float taken;
        if (second_pass) {
            float found = 0.0f;
            for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) found = fmaxf(found, block_amax[i]);
            found = block_max(found);
            taken = scale_of(found);
            if (blockIdx.x == 0 && threadIdx.x == 0) {
                scale[0] = taken;
                if (previous_amax != nullptr) {
                    const float ratio = found / *previous_amax, mean = 0.5f * (scale[1] + ratio);
                    scale[1] = fabsf(mean - ratio) < 0.5f * ratio ? mean : ratio;  // drops a mean far from the ratio
                    *previous_amax = found;
                }
            }
        } else {
            taken = previous_amax != nullptr ? scale_of(*previous_amax * scale[1]) : scale[0];
        }
        inverse = inverse_of(taken);
        return !second_pass || __float_as_uint(taken) != __float_as_uint(block_amax[gridDim.x]);
    }

    __device__ Fp8Vec quantize(const Vec& v) {
        Fp8Vec q;
        for (int k = 0; k < WIDTH; k++) amax = max(amax, __float_as_uint(v.x[k]) & 0x7fffffffu);
        for (int k = 0; k < WIDTH; k += 4) {
            q.words[k / 4] = to_e4m3(multiply_denormals(v.x[k], inverse), multiply_denormals(v.x[k + 1], inverse),
                                     multiply_denormals(v.x[k + 2], inverse), multiply_denormals(v.x[k + 3], inverse));
        }
        return q;
    }

    // The same for numbers that would otherwise be stored in bf16, and then quantized.
    __device__ Fp8Vec quantize_as_bf16(const Vec& v) { return quantize(rounded_to_bf16(v)); }

    // All threads of a block call it last.
    __device__ void end() {
        if (block_amax == nullptr || second_pass) return;
        const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
        const float found = block_max(__uint_as_float(min(amax, 0x7f800000u)), thread, blockDim.x * blockDim.y);
        if (thread == 0) block_amax[blockIdx.x] = found;
        if (thread == 0 && blockIdx.x == 0) block_amax[gridDim.x] = inverse_of(inverse);
    }
};

// 128 rows of a column fill a line of L2. With tiles of 64 x 128 an H100 takes 119 us for SwiGLU's backward pass, not
// 112 (8192 rows, C 3072).
constexpr int FP8_ROWS = 128, FP8_COLUMNS = 64;

// A quantized tile of ROWS x COLUMNS numbers, transposed: a word has four rows of a column.
template <int R = FP8_ROWS, int K = FP8_COLUMNS>
struct Fp8Tile {
    static constexpr int ROWS = R, COLUMNS = K;
    unsigned words[COLUMNS][ROWS / 4 + 1];

    // For the tile at row n0 and column i0 of an (N, C) matrix: calls work(n, i, row, column) for vectors that lie
    // inside the matrix. work takes those of the next three rows, too. N and C are multiples of 16.
    template <class Work>
    __device__ static void for_each(int n0, int i0, int N, int C, Work work) {
        constexpr int VECTORS = COLUMNS / WIDTH;
        for (int t = threadIdx.x; t < VECTORS * ROWS / 4; t += blockDim.x) {
            const int row = t / VECTORS * 4, column = t % VECTORS * WIDTH;
            if (n0 + row < N && i0 + column < C) work(n0 + row, i0 + column, row, column);
        }
    }

    __device__ void put(int row, int column, const Fp8Vec* rows) {
        for (int k = 0; k < WIDTH; k++) {
            unsigned word = 0;
            for (int r = 0; r < 4; r++) word |= (rows[r].words[k / 4] >> k % 4 * 8 & 255u) << 8 * r;
            words[column + k][row / 4] = word;
        }
    }

    // Writes the tile to the transposed copy q_T (C, N). The caller puts a barrier before the call.
    __device__ void store(unsigned char* q_T, int n0, int i0, int N, int C) const {
        for (int t = threadIdx.x; t < COLUMNS * ROWS / 16; t += blockDim.x) {
            const int column = t / (ROWS / 16), row = t % (ROWS / 16) * 16;
            const unsigned* from = &words[column][row / 4];
            if (i0 + column >= C || n0 + row >= N) continue;
            *reinterpret_cast<uint4*>(q_T + (size_t)(i0 + column) * N + n0 + row) =
                make_uint4(from[0], from[1], from[2], from[3]);
        }
    }
};

// Quantizes an (N, C) matrix. Sets q (N, C), and its transposed copy q_T (C, N). One of the two may be null.
// load(n, i, v) sets v[0] to v[3] to vectors of rows n to n + 3, each from column i on. It should load all four before
// it uses the first. The blocks share the tiles, and begin with the last ones: these were written last, and may still
// be in L2.
template <class Load>
__device__ inline void quantize_tiles(Quantizer& quantizer, unsigned char* q, unsigned char* q_T, int N, int C,
                                      Load load) {
    __shared__ Fp8Tile<> tile;
    const int columns = ceil_div(C, tile.COLUMNS);
    if (!quantizer.begin()) return;
    for (int t = columns * ceil_div(N, tile.ROWS) - 1 - blockIdx.x; t >= 0; t -= gridDim.x) {
        const int n0 = t / columns * tile.ROWS, i0 = t % columns * tile.COLUMNS;
        tile.for_each(n0, i0, N, C, [&](int n, int i, int row, int column) {
            Vec v[4];
            Fp8Vec rows[4];
            load(n, i, v);
            for (int r = 0; r < 4; r++) {
                rows[r] = quantizer.quantize(v[r]);
                if (q != nullptr) store_fp8(q + (size_t)(n + r) * C + i, rows[r]);
            }
            tile.put(row, column, rows);
        });
        if (q_T == nullptr) continue;
        __syncthreads();
        tile.store(q_T, n0, i0, N, C);
        __syncthreads();  // the next tile overwrites this one
    }
    quantizer.end();
}

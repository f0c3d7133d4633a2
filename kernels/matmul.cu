// Linear layers: out (N, OC) = inp (N, C) @ weight (OC, C)^T + bias (OC), N = B*T. cuBLAS computes the products, except
// that of a single row. This file has that one, and a transposition. Both are memory-bound.
#include "fp8.cuh"

// out (C, N) = inp (N, C)^T. A block takes one tile. inp may be a weight, whose address need not be a multiple of 16.
extern "C" __global__ void transpose_kernel(SETS floatX* out, const floatX* inp, int N, int C) {
    __shared__ Tile tile;
    const int i0 = blockIdx.x * TILE_COLUMNS, n0 = blockIdx.y * TILE;
    by_alignment(C % WIDTH == 0 && is_aligned(inp), [&](auto memory) {
        Tile::for_each(n0, i0, N, C, [&](int n, int i, int row, int column, int) {
            tile.put(row, column, memory.load(inp + (size_t)n * C + i, C - i));
        });
    });
    __syncthreads();
    store_transposed(out, tile, n0, i0, N, C);
}

// The numbers of two codes, the first in the lower byte. For NaN any number: there the scale is NaN.
__device__ inline void from_e4m3(float& first, float& second, unsigned codes) {
#ifdef HAS_E4M3
    asm("{ .reg .b32 both; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 both, %2; mov.b32 {low, high}, both;"
        " cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }" : "=f"(first), "=f"(second) : "h"((unsigned short)codes));
#else
    // A float with a code's exponent and mantissa, in their places, is 2^-120 times the number.
    auto number = [](unsigned code) { return 0x1p120f * __uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20); };
    first = number(codes), second = number(codes >> 8);
#endif
}

__device__ inline Vec numbers_of(const Codes& codes) {
    Vec v;
    for (int k = 0; k < WIDTH; k += 2) from_e4m3(v.x[k], v.x[k + 1], codes.words[k / 4] >> k % 4 * 8);
    return v;
}

__device__ inline const Vec& numbers_of(const Vec& v) { return v; }

// The product of a single row, for a model that writes text: out (OC) = inp (C) @ weight (OC, C)^T + bias (OC). bias
// may be null. Each number of the weight is used in one multiplication only. So a tile of the weight would have nothing
// to share, and a kernel that loads tiles takes some 4 us even for the smallest weight.
//
// Block: (lanes, outputs), if `lanes` lanes of a warp, a power of two, compute an output; or (warps * WARP_SIZE, 1), if
// several warps do. A thread starts to load AT_ONCE vectors of the weight before it uses the first, and before the
// launch in front has ended. A thread whose output would lie behind the last one computes the last one, too.
//
// memory loads vectors of the input. load(o, i) loads the vector of the weight that begins at the i-th number of row o.
// The weight is `scale` times these numbers.
template <int AT_ONCE, class Memory, class Load>
__device__ inline void matvec(floatX* out, const floatX* inp, const floatX* bias, int C, int OC, Memory memory,
                              float scale, Load load) {
    const int o = min((int)(blockIdx.x * blockDim.y + threadIdx.y), OC - 1), step = WIDTH * blockDim.x;
    const float b = bias != nullptr ? to_float(bias[o]) : 0.0f;  // now, so that it is there when the sum is
    Vec sum = {};
    for (int first = WIDTH * threadIdx.x; first < C; first += AT_ONCE * step) {
        decltype(load(o, 0)) w[AT_ONCE] = {};
        Vec x[AT_ONCE] = {};
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) {
            const int i = first + b * step;
            if (i < C) w[b] = load(o, i);
        }
        if (first < step) grid_dependency_synchronize();  // launches in front may write the input, but no weights
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) {
            const int i = first + b * step;
            if (i < C) x[b] = memory.load(inp + i, C - i);
        }
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) {
            const Vec v = numbers_of(w[b]);
            for (int k = 0; k < WIDTH; k++) sum.x[k] += v.x[k] * x[b].x[k];
        }
    }
    float total = sum_of(sum);
    if (blockDim.x > WARP_SIZE) total = block_sum(total);
    else for (int i = blockDim.x / 2; i > 0; i /= 2) total += __shfl_xor_sync(0xffffffffu, total, i);
    if (threadIdx.x == 0) set(out[o], scale * total + b);
}

extern "C" __global__ void PROGRAMMATIC matvec_kernel(SETS floatX* out, const floatX* inp, const floatX* weight,
                                                      const floatX* bias, int C, int OC) {
    trigger_programmatic_launch();
    by_alignment(C % WIDTH == 0 && is_aligned(weight), [&](auto memory) {
        auto load = [&](int o, int i) { return memory.load(weight + (size_t)o * C + i, C - i); };
        matvec<32 / WIDTH>(out, inp, bias, C, OC, memory, 1.0f, load);
    });
}

// The same for a weight that is scale (1) times the numbers of codes (OC, C). C is a multiple of 16.
extern "C" __global__ void PROGRAMMATIC matvec_codes_kernel(SETS floatX* out, const floatX* inp,
                                                            const unsigned char* codes, const float* scale,
                                                            const floatX* bias, int C, int OC) {
    trigger_programmatic_launch();
    auto load = [&](int o, int i) { return *reinterpret_cast<const Codes*>(codes + (size_t)o * C + i); };
    matvec<64 / WIDTH>(out, inp, bias, C, OC, Aligned(), *scale, load);
}

// out (n) = scale (1) times the numbers of codes (n), for products of several rows. In bf16 this rounds nothing.
extern "C" __global__ void decode_kernel(SETS floatX* out, const unsigned char* codes, const float* scale, size_t n) {
    const size_t i = WIDTH * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    Vec v = numbers_of(*reinterpret_cast<const Codes*>(codes + i));
    for (int k = 0; k < WIDTH; k++) v.x[k] *= *scale;
    Aligned::store(out + i, v, WIDTH);
}

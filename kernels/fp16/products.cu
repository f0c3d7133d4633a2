// Rounds a matrix to fp16, a sign, 5 bits of exponent and 10 of mantissa, for the operand of a product. fp16 ends at
// 65504, and below 2^-14 it loses bits. So the matrix is about scale * out, with a power of two for the scale: it
// changes exponents alone. With the scale the largest absolute value, amax, lies in [2^14, 2^15). Numbers down to 2^-28
// of amax keep their 10 bits. Both kernels are memory-bound: the first reads 4 bytes per number, the second reads 4 and
// writes 2.
#include "../common.cuh"

// The scale of a matrix with this amax; NaN if that is infinite. It is at least 2^-63, so that the product of two scales
// is a normal number. With it a matrix loses bits only if its amax is below 2^-77. If that is a gradient, its squares,
// which AdamW takes, are 0 anyway.
__device__ inline float fp16_scale_of(float amax) {
    const unsigned exponent = __float_as_uint(amax) >> 23;
    return __uint_as_float(exponent == 255 ? 0x7fffffffu : (max(exponent, 78u) - 14u) << 23);
}

// Two numbers below 65520 as fp16, rounded to nearest, ties to even. The first is in the lower half of the word.
__device__ inline unsigned to_fp16(float first, float second) {
#ifdef LLMC_CPU
    auto round = [](float x) {
        const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu;
        // Below 2^-14 the exponent stays, and neighbours are 2^-24 apart. So are floats from 0.5 on: the sum rounds.
        const unsigned small = __float_as_uint(__uint_as_float(size) + 0.5f) - __float_as_uint(0.5f);
        const unsigned large = (size + 0xfffu + (size >> 13 & 1u)) >> 13;
        const unsigned number = size < 0x38800000u ? small : large - (112u << 10);  // exponent's bias: 127, here 15
        return size > 0x7f800000u ? 0x7fffu : (bits >> 16 & 0x8000u) | number;
    };
    return round(first) | round(second) << 16;
#else
    unsigned both;
    asm("{ .reg .b16 low, high; cvt.rn.f16.f32 low, %1; cvt.rn.f16.f32 high, %2; mov.b32 %0, {low, high}; }"
        : "=r"(both) : "f"(first), "f"(second));
    return both;
#endif
}

// block_amax[block] = the largest absolute value of the block's share of inp (n); infinity if it has a NaN.
extern "C" __global__ void fp16_amax_kernel(SETS float* block_amax, const float* inp, size_t n) {
    unsigned amax = 0;  // as bits. As integers, NaN's are above infinity's
    for (size_t i = FLOATS * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); i < n;
         i += FLOATS * (size_t)gridDim.x * blockDim.x) {
        const int left = n - i < FLOATS ? (int)(n - i) : FLOATS;
        by_alignment(left == FLOATS && is_aligned(inp), [&](auto memory) {
            const Floats v = memory.load_floats(inp + i, left);
            for (int k = 0; k < FLOATS; k++) amax = max(amax, __float_as_uint(v.x[k]) & 0x7fffffffu);
        });
    }
    const float found = block_max(__uint_as_float(min(amax, 0x7f800000u)));
    if (threadIdx.x == 0) block_amax[blockIdx.x] = found;
}

// out (n) = inp (n) / scale[0] in fp16, from the amax of each of `blocks` blocks. scale[1] is the scale of a product
// with another operand, whose own scale is a_scale[0]; scale[1] = scale[0] if a_scale is null.
extern "C" __global__ void fp16_round_kernel(SETS unsigned short* out, SETS float* scale, const float* a_scale,
                                             const float* block_amax, int blocks, const float* inp, size_t n) {
    float amax = 0.0f;
    for (int i = threadIdx.x; i < blocks; i += blockDim.x) amax = fmaxf(amax, block_amax[i]);
    const float taken = fp16_scale_of(block_max(amax));
    if (blockIdx.x == 0 && threadIdx.x == 0) scale[0] = taken, scale[1] = a_scale == nullptr ? taken : taken * *a_scale;
    const float inverse = taken == taken ? __uint_as_float((254u << 23) - __float_as_uint(taken)) : taken;
    for (size_t i = FLOATS * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); i < n;
         i += FLOATS * (size_t)gridDim.x * blockDim.x) {
        const int left = n - i < FLOATS ? (int)(n - i) : FLOATS;
        Floats v;
        by_alignment(left == FLOATS && is_aligned(inp), [&](auto memory) { v = memory.load_floats(inp + i, left); });
        unsigned words[FLOATS / 2];
        for (int k = 0; k < FLOATS; k += 2) words[k / 2] = to_fp16(v.x[k] * inverse, v.x[k + 1] * inverse);
        if (left == FLOATS) {
            for (int k = 0; k < FLOATS; k += 4) {
                *reinterpret_cast<uint2*>(out + i + k) = make_uint2(words[k / 2], words[k / 2 + 1]);
            }
        } else {
            for (int k = 0; k < left; k++) out[i + k] = (unsigned short)(words[k / 2] >> k % 2 * 16);
        }
    }
}

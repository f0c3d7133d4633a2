// The forward pass of a norm with a quantized output. ../norm.cuh explains norms, quantize.cuh the two passes. N and C
// are multiples of 16.
#include "../norm.cuh"
#include "quantize.cuh"

// A Norm that stores q (N,C).
struct QuantizedNorm : Norm {
    unsigned char* q;
    Quantizer& quantizer;

    template <class Memory>
    __device__ void store_out(Memory memory, size_t start, int i, const Vec& n, int C) const {
        store_fp8(q + start + i, quantizer.quantize_as_bf16(of(memory, i, n, C)));
    }
};

// Pass 1. Sets q (N,C), mean and rstd. Blocks loop over rows: each leaves one amax, and few amaxes are cheap to reduce.
// The kernel is not PROGRAMMATIC.
__device__ inline void norm_forward_fp8(Quantizer quantizer, unsigned char* q, float* mean, float* rstd,
                                        const floatX* inp, const Norm& norm, float eps, int N, int C) {
    DYNAMIC_SHARED(float, rows);
    const QuantizedNorm quantized = {norm, q, quantizer};
    float* row = memory_of_row(rows, C);
    quantizer.begin();
    for (int n = row_of_thread(); n < N; n += gridDim.x * blockDim.y) {
        norm_row(mean, rstd, inp, quantized, {}, eps, n, C, row);
    }
    quantizer.end();
}

// Sets q (N,C) and q_T (C,N) of out; either may be null. inp is x as it is stored. mean, which may be null, and rstd
// are forward's. The body of the kernel that is pass 2 of forward, and that writes q_T in backward.
__device__ inline void norm_quantize(Quantizer quantizer, unsigned char* q, unsigned char* q_T, const floatX* inp,
                                     const Norm& norm, const float* mean, const float* rstd, int N, int C) {
    quantize_tiles(quantizer, q, q_T, N, C, [&](int n, int i, Vec* v) {
        for (int r = 0; r < 4; r++) v[r] = Aligned::load(inp + (size_t)(n + r) * C + i, WIDTH);
        by_alignment(norm.aligned(), [&](auto memory) {
            for (int r = 0; r < 4; r++) {
                const float m = mean != nullptr ? mean[n + r] : 0.0f;
                v[r] = rounded_to_bf16(norm.of(memory, i, normalised(v[r], m, rstd[n + r]), C));
            }
        });
    });
}

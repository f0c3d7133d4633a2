// GELU, tanh form (Hendrycks & Gimpel 2016): gelu(x) = x/2 * (1 + tanh(u)) = x * sigmoid(2u), which is cheaper,
// with u = sqrt(2/pi) * (x + 0.044715 x^3) and x = inp + bias, where inp (N, C) is a product without its bias yet and C
// is 4 times the model's channels.
// Backward: dinp = dout * gelu'(x), gelu' = s + x * s * (1 - s) * 2 du/dx with s the sigmoid; dbias += sum_rows(dinp).
// Memory-bound: forward reads and writes N*C floats; backward reads two and writes two, one of them gelu(x) transposed:
// the weight gradient of the next product needs it that way, so forward's output need not be kept.
#include "common.cuh"

constexpr float TWICE_SQRT_2_OVER_PI = 1.5957691216057308f;

__device__ inline float gelu_sigmoid(float x) {
    return 1.0f / (1.0f + expf(-TWICE_SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
}

// Block x: a row; thread: four columns of grid column y.
extern "C" __global__ void gelu_forward_kernel(float* out, const float* inp, const float* bias, int C) {
    const int i = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= C) return;
    const size_t at = (size_t)blockIdx.x * C + i;
    Four x = load4(inp + at, C - i);
    const Four b = load4(bias + i, C - i);
    for (int k = 0; k < 4; k++) {
        const float u = x.x[k] + b.x[k];
        x.x[k] = u * gelu_sigmoid(u);
    }
    store4(out + at, x, C - i);
}

// A thread owns a column of grid column x and walks down the `rows` rows of chunk y. dout (N,C) becomes dinp in place,
// out_T (C,N) is set to the transposed gelu(inp + bias), partials (gridDim.y, C) to the chunks' sums of dinp.
extern "C" __global__ void gelu_backward_kernel(float* dout, float* out_T, float* partials, const float* inp,
                                                const float* bias, int N, int C, int rows) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= C) return;
    const int begin = blockIdx.y * rows, end = min(N, begin + rows);
    const float b = bias[i];
    float sum = 0.0f;
    for (int n0 = begin; n0 < end; n0 += COLUMN_ROWS) {
        float out[COLUMN_ROWS];
#pragma unroll
        for (int k = 0; k < COLUMN_ROWS; k++) {
            out[k] = 0.0f;
            if (n0 + k >= end) continue;
            const size_t at = (size_t)(n0 + k) * C + i;
            const float x = inp[at] + b, s = gelu_sigmoid(x);
            const float slope = TWICE_SQRT_2_OVER_PI * (1.0f + 3.0f * 0.044715f * x * x);
            const float d = dout[at] * (s + x * s * (1.0f - s) * slope);
            dout[at] = d;
            out[k] = x * s;
            sum += d;
        }
        store_transposed(out_T + (size_t)i * N + n0, out, end - n0);
    }
    partials[(size_t)blockIdx.y * C + i] = sum;
}

// AdamW (Loshchilov & Hutter 2017), one thread for four parameters (FLOATS):
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   param -= lr * ((m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * param)
// Memory-bound: for each parameter it reads four floats and writes three, and a copy in bf16 if there is one.
#include "common.cuh"

constexpr float LARGEST = 1.8446743e19f;  // its square is just finite

// norm: what norm_kernel computes. Each gradient is multiplied by norm[1]; if that is NaN, nothing changes. If
// the square of a gradient would not be finite, its thread leaves its parameters as they are and sets norm[3] = 1.
// The host computes complement = 1 - beta and correction = 1 - beta^t in double precision. In fp32 the difference
// 1 - 0.999 would be off by 1e-5 of itself.
// rounded: the copy in bf16, or null. rates: lr, correction1 and correction2, for a launch that is replayed in later
// steps with the same arguments; or null.
extern "C" __global__ void adamw_kernel(float* params, bf16* rounded, const float* grads, float* m, float* v,
                                        float* norm, const float* rates, size_t n, float lr, float beta1,
                                        float beta2, float complement1, float complement2, float correction1,
                                        float correction2, float eps, float weight_decay) {
    const size_t i = FLOATS * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    const float scale = norm[1];
    if (scale != scale) return;
    if (rates != nullptr) lr = rates[0], correction1 = rates[1], correction2 = rates[2];
    const int left = n - i < FLOATS ? (int)(n - i) : FLOATS;
    // All buffers of floats are aligned alike.
    by_alignment(left == FLOATS && is_aligned(params) && is_aligned(rounded, 8), [&](auto memory) {
        Floats p = memory.load_floats(params + i, left), m4 = memory.load_floats(m + i, left);
        Floats v4 = memory.load_floats(v + i, left);
        const Floats g = memory.load_floats(grads + i, left);
        for (int k = 0; k < FLOATS; k++) {
            if (!(fabsf(scale * g.x[k]) < LARGEST)) {
                norm[3] = 1.0f;
                return;
            }
        }
        for (int k = 0; k < FLOATS; k++) {
            const float grad = scale * g.x[k];
            m4.x[k] = beta1 * m4.x[k] + complement1 * grad;
            v4.x[k] = beta2 * v4.x[k] + complement2 * grad * grad;
            const float step = (m4.x[k] / correction1) / (sqrtf(v4.x[k] / correction2) + eps);
            p.x[k] -= lr * (step + weight_decay * p.x[k]);
        }
        memory.store_floats(params + i, p, left);
        if (rounded != nullptr) memory.store_floats(rounded + i, p, left);
        memory.store_floats(m + i, m4, left);
        memory.store_floats(v + i, v4, left);
    });
}

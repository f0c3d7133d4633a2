// AdamW: m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
//   param -= lr * ((m / correction1) / (sqrt(v / correction2) + eps) + weight_decay * param)
// with correction = 1 - beta^t and complement = 1 - beta from the host. Bytes: reads 4 arrays and writes 3, 28 n.
#define WARP_SIZE 32
#include "../../kernels/common.cuh"

// One kernel a line: a pass over memory for each line of the formula, as array libraries do it. m, v and the gradient
// come twice: 40 n bytes.
extern "C" __global__ void moment1_kernel(float* m, const float* grads, size_t n, float beta1, float complement1) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) m[i] = beta1 * m[i] + complement1 * grads[i];
}

extern "C" __global__ void moment2_kernel(float* v, const float* grads, size_t n, float beta2, float complement2) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) v[i] = beta2 * v[i] + complement2 * grads[i] * grads[i];
}

extern "C" __global__ void step_kernel(float* params, const float* m, const float* v, size_t n, float lr,
                                       float correction1, float correction2, float eps, float weight_decay) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float step = (m[i] / correction1) / (sqrtf(v[i] / correction2) + eps);
    params[i] -= lr * (step + weight_decay * params[i]);
}

// Fused: one thread updates one parameter, and m and v pass from line to line in registers.
extern "C" __global__ void fused_kernel(float* params, const float* grads, float* m, float* v, size_t n, float lr,
                                        float beta1, float beta2, float complement1, float complement2,
                                        float correction1, float correction2, float eps, float weight_decay) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = grads[i], m1 = beta1 * m[i] + complement1 * g, v1 = beta2 * v[i] + complement2 * g * g;
    const float step = (m1 / correction1) / (sqrtf(v1 / correction2) + eps);
    m[i] = m1;
    v[i] = v1;
    params[i] -= lr * (step + weight_decay * params[i]);
}

// Four parameters per thread: accesses of 16 bytes, four times as much on its way. n is a multiple of 4.
extern "C" __global__ void float4_kernel(float* params, const float* grads, float* m, float* v, size_t n, float lr,
                                         float beta1, float beta2, float complement1, float complement2,
                                         float correction1, float correction2, float eps, float weight_decay) {
    const size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    Vec p = Aligned::load(params + i, 4), m4 = Aligned::load(m + i, 4), v4 = Aligned::load(v + i, 4);
    const Vec g = Aligned::load(grads + i, 4);
    for (int k = 0; k < 4; k++) {
        m4.x[k] = beta1 * m4.x[k] + complement1 * g.x[k];
        v4.x[k] = beta2 * v4.x[k] + complement2 * g.x[k] * g.x[k];
        const float step = (m4.x[k] / correction1) / (sqrtf(v4.x[k] / correction2) + eps);
        p.x[k] -= lr * (step + weight_decay * p.x[k]);
    }
    Aligned::store(params + i, p, 4);
    Aligned::store(m + i, m4, 4);
    Aligned::store(v + i, v4, 4);
}

// AdamW (Loshchilov & Hutter 2017), one thread for four parameters (FLOATS):
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   param -= lr * ((m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * param)
// Memory-bound: for each parameter it reads 16 bytes and writes 12, in fp32 and in bf16.
//
// In bf16 the parameters are rounded from a master copy in fp32, and
//   master = (param, or its predecessor if it was rounded up) << 16 | low.
// So memory holds only `low` beside the parameter. v is never negative, and its sign bit says whether the parameter was
// rounded up. All of this is exact, and takes 2 bytes more for each parameter.
#include "common.cuh"

constexpr float MAX_GRADIENT = 1.8446743e19f;  // its square is just finite

// Takes a master copy apart, and puts it together again. A NaN stays a NaN, with other bits. Signs are set as bits,
// because a float operation may flush subnormal numbers to 0, and need not keep the sign of 0.
__device__ inline void split(unsigned& param, unsigned& low, float& v, float master) {
    const unsigned bits = __float_as_uint(master);
    param = to_bf16(master, master) & 0xffffu;
    low = bits & 0xffffu;
    const unsigned rounded_up = param != bits >> 16;
    v = __uint_as_float((__float_as_uint(v) & 0x7fffffffu) | rounded_up << 31);
}

__device__ inline float join(unsigned param, unsigned low, float v) {
    const unsigned rounded_up = __float_as_uint(v) >> 31;
    return __uint_as_float((param - rounded_up) << 16 | low);
}

// Numbers of 16 bits as they are in memory, not turned into fp32.
struct Halves {
    unsigned x[FLOATS];

    __device__ static Halves load(Ragged, const bf16* p, int left) {
        Halves v;
        for (int k = 0; k < FLOATS; k++) v.x[k] = k < left ? p[k].bits : 0u;
        return v;
    }
    __device__ void store(Ragged, bf16* p, int left) const {
        for (int k = 0; k < FLOATS && k < left; k++) p[k].bits = (unsigned short)x[k];
    }
#ifdef CPU_WIDTH
    static Halves load(Aligned, const bf16* p, int) { return load(Ragged(), p, FLOATS); }
    void store(Aligned, bf16* p, int) const { store(Ragged(), p, FLOATS); }
#else
    __device__ static Halves load(Aligned, const bf16* p, int) {
        const uint2 u = *reinterpret_cast<const uint2*>(p);
        return {{u.x & 0xffffu, u.x >> 16, u.y & 0xffffu, u.y >> 16}};
    }
    __device__ void store(Aligned, bf16* p, int) const {
        *reinterpret_cast<uint2*>(p) = make_uint2(x[0] | x[1] << 16, x[2] | x[3] << 16);
    }
#endif
};

// The parameters as AdamW updates them: in bf16 the master copy. load_master takes the sign from v, and store_master
// sets it.
template <class Memory>
__device__ inline Floats load_master(Memory memory, const floatX* params, const bf16* low, Floats& v, int left) {
    if constexpr (sizeof(floatX) == 4) return memory.load_floats(params, left);
    else {
        const Halves p = Halves::load(memory, params, left), l = Halves::load(memory, low, left);
        Floats master;
        for (int k = 0; k < FLOATS; k++) master.x[k] = join(p.x[k], l.x[k], v.x[k]), v.x[k] = fabsf(v.x[k]);
        return master;
    }
}

template <class Memory>
__device__ inline void store_master(Memory memory, floatX* params, bf16* low, Floats& v, const Floats& master,
                                    int left) {
    if constexpr (sizeof(floatX) == 4) memory.store_floats(params, master, left);
    else {
        Halves p, l;
        for (int k = 0; k < FLOATS; k++) split(p.x[k], l.x[k], v.x[k], master.x[k]);
        p.store(memory, params, left);
        l.store(memory, low, left);
    }
}

// norm: what norm_kernel computes. Each gradient is multiplied by norm[1]; if that is NaN, nothing changes. If
// the square of a gradient would not be finite, its thread leaves its parameters as they are and sets norm[3] = 1.
// The host computes complement = 1 - beta and correction = 1 - beta^t in double precision. In fp32 the difference
// 1 - 0.999 would be off by 1e-5 of itself.
// low: null in fp32. rates: lr, correction1 and correction2, for a launch that is replayed in later steps with the same
// arguments; or null.
extern "C" __global__ void adamw_kernel(floatX* params, bf16* low, const float* grads, float* m, float* v,
                                        float* norm, const float* rates, size_t n, float lr, float beta1,
                                        float beta2, float complement1, float complement2, float correction1,
                                        float correction2, float eps, float weight_decay) {
    const size_t i = FLOATS * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    const float scale = norm[1];
    if (scale != scale) return;
    if (rates != nullptr) lr = rates[0], correction1 = rates[1], correction2 = rates[2];
    const int left = n - i < FLOATS ? (int)(n - i) : FLOATS;
    // grads, m and v are aligned alike.
    const bool aligned = is_aligned(m) && is_aligned(params, 4 * sizeof(floatX)) && is_aligned(low, 8);
    by_alignment(left == FLOATS && aligned, [&](auto memory) {
        Floats m4 = memory.load_floats(m + i, left), v4 = memory.load_floats(v + i, left);
        Floats p = load_master(memory, params + i, low + i, v4, left);
        const Floats g = memory.load_floats(grads + i, left);
        for (int k = 0; k < FLOATS; k++) {
            if (!(fabsf(scale * g.x[k]) < MAX_GRADIENT)) {
                norm[3] = 1.0f;
                return;
            }
        }
        for (int k = 0; k < FLOATS; k++) {
            const float grad = scale * g.x[k];
            m4.x[k] = beta1 * m4.x[k] + complement1 * grad;
            v4.x[k] = beta2 * v4.x[k] + complement2 * grad * grad;
            const float step = (m4.x[k] / correction1) / (sqrtf(v4.x[k] / correction2) + eps);
            // fmaf by name: left to itself, the compiler rounds the product in one branch of by_alignment and not in
            // the other. But bits must not depend on alignment, because --offload updates other ranges at a time.
            p.x[k] = fmaf(-lr, step + weight_decay * p.x[k], p.x[k]);
        }
        store_master(memory, params + i, low + i, v4, p, left);
        memory.store_floats(m + i, m4, left);
        memory.store_floats(v + i, v4, left);
    });
}

// A thread for each number. low and v: both null if the parameters are only rounded.
extern "C" __global__ void split_kernel(bf16* params, bf16* low, float* v, const float* values, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (low == nullptr) {
        set(params[i], values[i]);
        return;
    }
    unsigned first, last;
    split(first, last, v[i], values[i]);
    params[i].bits = (unsigned short)first;
    low[i].bits = (unsigned short)last;
}

extern "C" __global__ void join_kernel(float* values, const bf16* params, const bf16* low, const float* v, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] = join(params[i].bits, low[i].bits, v[i]);
}

// The product of a single row with a weight, for kernels that store weights in different ways, or do different things
// with a sum.
#pragma once
#include "dependent_launch.cuh"

__device__ inline const Vec& numbers_of(const Vec& v) { return v; }

__device__ inline float sum_of(const Vec& v) {
    float sum = (v.x[0] + v.x[1]) + (v.x[2] + v.x[3]);
    for (int k = 4; k < WIDTH; k += 4) sum += (v.x[k] + v.x[k + 1]) + (v.x[k + 2] + v.x[k + 3]);
    return sum;
}

// inp (C) @ weight (OC, C)^T, for a model that writes text. For each output o a thread calls finish(o, sum, b), where b
// is its bias, or 0 if bias is null. For the last output several threads may call it, with the same numbers.
//
// Each number of the weight is used in one multiplication only. So a tile of the weight would have nothing to share,
// and a kernel that loads tiles takes some 4 us even for the smallest weight.
//
// Block: (lanes, outputs), if `lanes` lanes of a warp, a power of two, compute an output; or (warps * WARP_SIZE, 1), if
// several warps do. A thread starts to load AT_ONCE vectors of the weight before it uses the first, and before the
// previous launch has ended. A thread whose output would lie after the last one computes the last one, too.
//
// memory loads vectors of the input. load(o, i) loads the vector of the weight that begins at the i-th number of row o;
// numbers_of turns it into floats.
template <int AT_ONCE, class Memory, class Load, class Finish>
__device__ inline void matvec(const floatX* inp, const floatX* bias, int C, int OC, Memory memory, Load load,
                              Finish finish) {
    const int o = min((int)(blockIdx.x * blockDim.y + threadIdx.y), OC - 1), step = WIDTH * blockDim.x;
    const float b = bias != nullptr ? to_float(bias[o]) : 0.0f;  // now, so that it is there when the sum is
    Vec sum = {};
    for (int first = WIDTH * threadIdx.x; first < C; first += AT_ONCE * step) {
        decltype(load(o, 0)) w[AT_ONCE] = {};
        Vec x[AT_ONCE] = {};
#pragma unroll
        for (int a = 0; a < AT_ONCE; a++) {
            const int i = first + a * step;
            if (i < C) w[a] = load(o, i);
        }
        if (first < step) grid_dependency_synchronize();  // previous launches may write the input, but no weights
#pragma unroll
        for (int a = 0; a < AT_ONCE; a++) {
            const int i = first + a * step;
            if (i < C) x[a] = memory.load(inp + i, C - i);
        }
#pragma unroll
        for (int a = 0; a < AT_ONCE; a++) {
            const Vec v = numbers_of(w[a]);
            for (int k = 0; k < WIDTH; k++) sum.x[k] += v.x[k] * x[a].x[k];
        }
    }
    float total = sum_of(sum);
    if (blockDim.x > WARP_SIZE) total = block_sum(total);
    else for (int i = blockDim.x / 2; i > 0; i /= 2) total += __shfl_xor_sync(0xffffffffu, total, i);
    if (threadIdx.x == 0) finish(o, total, b);
}

// matvec of a weight whose type is floatX.
template <class Finish>
__device__ inline void matvec_floatX(const floatX* inp, const floatX* weight, const floatX* bias, int C, int OC,
                                     Finish finish) {
    trigger_programmatic_launch();
    by_alignment(C % WIDTH == 0 && is_aligned(weight), [&](auto memory) {
        auto load = [&](int o, int i) { return memory.load(weight + (size_t)o * C + i, C - i); };
        matvec<32 / WIDTH>(inp, bias, C, OC, memory, load, finish);
    });
}

// A finish for matvec: out[o] = scale * sum + bias + residual[o]. residual (OC) may be null.
__device__ inline auto store_to(floatX* out, const floatX* residual, float scale) {
    return [=](int o, float sum, float bias) {
        // We load this only now, not beside the input: with an earlier load a token of GPT-2 took 4% longer on an H100.
        const float r = residual != nullptr ? to_float(residual[o]) : 0.0f;
        set(out[o], scale * sum + bias + r);
    };
}

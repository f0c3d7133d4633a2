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

// inp (C) @ weight (OC, C)^T, for a model that writes text. For each output o a thread calls finish(o, sum, b, r). b is
// its bias and r its residual, or 0 if bias or residual is null. For the last output several threads may call it, with
// the same numbers.
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
__device__ inline void matvec(const floatX* inp, const floatX* bias, const floatX* residual, int C, int OC,
                              Memory memory, Load load, Finish finish) {
    const int o = min((int)(blockIdx.x * blockDim.y + threadIdx.y), OC - 1), step = WIDTH * blockDim.x;
    const float b = bias != nullptr ? to_float(bias[o]) : 0.0f;  // now, so that it is there when the sum is
    floatX r = {};
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
        if (first < step && residual != nullptr) r = residual[o];  // an earlier launch may have written it
#pragma unroll
        for (int a = 0; a < AT_ONCE; a++) {
            const Vec v = numbers_of(w[a]);
            for (int k = 0; k < WIDTH; k++) sum.x[k] += v.x[k] * x[a].x[k];
        }
    }
    float total = sum_of(sum);
    if (blockDim.x > WARP_SIZE) total = block_sum(total);
    else for (int i = blockDim.x / 2; i > 0; i /= 2) total += __shfl_xor_sync(0xffffffffu, total, i);
    if (threadIdx.x == 0) finish(o, total, b, to_float(r));
}

// At least this many blocks of 128 threads must fit on a multiprocessor. So it bounds a thread's registers. If threads
// may have more registers, fewer blocks fit, and fewer weights are on their way. If they may have fewer, a thread loads
// its input in several rounds, and waits for each. On an H200 a token of GPT-2 124M in TF32 takes 0.295 ms with 5
// blocks, 0.276 with 6, and 0.290 if the compiler decides, which then makes 7 fit. In bf16 it takes 0.218 ms with 6 and
// 0.227 with 8. A token of SmolLM2 takes 0.509 and 0.536, one of Qwen3-0.6B 0.809 and 0.792.
constexpr int MATVEC_BLOCKS = 6;

// matvec of a weight whose type is floatX.
template <class Finish>
__device__ inline void matvec_floatX(const floatX* inp, const floatX* weight, const floatX* bias,
                                     const floatX* residual, int C, int OC, Finish finish) {
    auto load_by = [&](auto memory) {
        return [=](int o, int i) { return memory.load(weight + (size_t)o * C + i, C - i); };
    };
    trigger_programmatic_launch();
    if (C % WIDTH == 0 && is_aligned(weight)) {
        matvec<32 / WIDTH>(inp, bias, residual, C, OC, Aligned(), load_by(Aligned()), finish);
    } else {  // rare, so it must not take more registers
        matvec<1>(inp, bias, residual, C, OC, Ragged(), load_by(Ragged()), finish);
    }
}

// A finish for matvec: out[o] = scale * sum + bias[o] + residual[o].
__device__ inline auto store_to(floatX* out, float scale) {
    return [=](int o, float sum, float bias, float residual) { set(out[o], scale * sum + bias + residual); };
}

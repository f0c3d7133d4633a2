// out (n) = inp (n): the least that a kernel can do, and so the measure of all that are bound by memory.
// Bytes: each float is read once and written once, 8 n.
#define WARP_SIZE 32
#include "../../kernels/common.cuh"

// A run of floats for each thread: 32 neighbours, as a CPU's thread would take them, so that in each step the 32 lanes of
// a warp touch 32 sectors of 32 bytes for 4 bytes each. What they leave must wait in a cache for the next step.
extern "C" __global__ void run_a_thread_kernel(float* out, const float* inp, size_t n) {
    const size_t begin = 32 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    for (size_t i = begin; i < begin + 32 && i < n; i++) out[i] = inp[i];
}

// One float for each thread: neighbouring lanes copy neighbouring floats, so that a warp's access is 4 whole sectors.
// The hardware combines it by itself: this is coalescing.
extern "C" __global__ void float_a_thread_kernel(float* out, const float* inp, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = inp[i];
}

// Four floats for each thread: one access of 16 bytes instead of four of 4, a quarter of the instructions and four times
// the bytes on their way for each of them. n is a multiple of 4.
extern "C" __global__ void float4_a_thread_kernel(float* out, const float* inp, size_t n) {
    const size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) Aligned::store(out + i, Aligned::load(inp + i, 4), 4);
}

// Four loads before the first store: a thread has 64 bytes on their way instead of 16. Memory answers after hundreds of
// cycles, and what has been asked for until then decides how fast bytes arrive. Here it gains nothing and costs a little:
// with one load from each of its 2048 threads a multiprocessor had asked for enough.
extern "C" __global__ void four_loads_kernel(float* out, const float* inp, size_t n) {
    const size_t first = 4 * (4 * (size_t)blockIdx.x * blockDim.x + threadIdx.x), step = 4 * blockDim.x;
    Vec x[4];
#pragma unroll
    for (int k = 0; k < 4; k++) if (first + k * step < n) x[k] = Aligned::load(inp + first + k * step, 4);
#pragma unroll
    for (int k = 0; k < 4; k++) if (first + k * step < n) Aligned::store(out + first + k * step, x[k], 4);
}

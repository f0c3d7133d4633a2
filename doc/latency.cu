// What a GPU's memories take to answer, and how many warps must ask so that the answer's latency does not count: page 2 of
// the book. `python doc/latency.py` launches these.
#define WARP_SIZE 32
#include "../kernels/common.cuh"

// One thread follows a chain for some steps, from place[0] on and to the new place[0]: next (n) has at each place the one
// that comes next. Each load needs the one before it, so a step takes the latency of the memory that next fits in.
extern "C" __global__ void chain_kernel(int* place, const int* next, int steps) {
    int at = place[0];
    for (int s = 0; s < steps; s++) at = next[at];
    place[0] = at;
}

// The same in shared memory; n is at most 4096.
extern "C" __global__ void shared_chain_kernel(int* place, const int* next, int n, int steps) {
    __shared__ int chain[4096];
    for (int i = 0; i < n; i++) chain[i] = next[i];
    int at = place[0];
    for (int s = 0; s < steps; s++) at = chain[at];
    place[0] = at;
}

// out (n) = inp (n), n a multiple of 4, by a grid of any size: each thread goes on a grid further when it is done with its
// four floats. A thread has one load on its way at a time.
extern "C" __global__ void copy_kernel(float* out, const float* inp, size_t n) {
    const size_t step = 4 * (size_t)gridDim.x * blockDim.x;
#pragma unroll 1
    for (size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); i < n; i += step) {
        Aligned::store(out + i, Aligned::load(inp + i, 4), 4);
    }
}

// What several layers share: reductions over a warp and a block, 16-byte accesses, and the transposed store.
// A kernel file stays plain CUDA C++ that NVRTC, nvcc, g++ and clang++ all compile; LLMC_CPU is defined where a
// C++ compiler builds it for the CPU device (llmc/cpu).
#pragma once

// Lanes in a warp. The CPU device builds the same files with warps of a single lane, so that the loops
// `for (i = lane; i < n; i += WARP_SIZE)` become contiguous there; a file that needs the GPU's number defines it first.
#ifndef WARP_SIZE
#define WARP_SIZE 32
#endif

// DYNAMIC_SHARED(float, x): float* x, the shared memory whose size the launch gives.
#ifdef LLMC_CPU
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(cpu_dynamic_shared())
#else
#define DYNAMIC_SHARED(type, name)                                 \
    extern __shared__ __align__(128) unsigned char name##_bytes[]; \
    type* name = reinterpret_cast<type*>(name##_bytes)
#define INFINITY __int_as_float(0x7f800000)
#endif

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Butterfly reductions: every lane ends with the same value, combined in the same order on every run.
__device__ inline float warp_sum(float x) {
#ifdef LLMC_CPU
    return cpu_warp_sum(x);  // one meeting of the lanes instead of five
#else
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
#endif
}

__device__ inline float warp_max(float x) {
#ifdef LLMC_CPU
    return cpu_warp_max(x);
#else
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
#endif
}

// Block reductions for one-dimensional blocks of at most 32 warps: each warp leaves its result in shared memory, then
// every warp reduces those. The last barrier lets the next reduction reuse the memory.
__device__ inline float block_sum(float x) {
    __shared__ float of_warp[32];
    const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const float warp_total = warp_sum(x);
    if (lane == 0) of_warp[threadIdx.x / WARP_SIZE] = warp_total;
    __syncthreads();
    float total = 0.0f;
    for (int w = lane; w < warps; w += WARP_SIZE) total += of_warp[w];
    total = warp_sum(total);
    __syncthreads();
    return total;
}

__device__ inline float block_max(float x) {
    __shared__ float of_warp[32];
    const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const float warp_largest = warp_max(x);
    if (lane == 0) of_warp[threadIdx.x / WARP_SIZE] = warp_largest;
    __syncthreads();
    float largest = -INFINITY;
    for (int w = lane; w < warps; w += WARP_SIZE) largest = fmaxf(largest, of_warp[w]);
    largest = warp_max(largest);
    __syncthreads();
    return largest;
}

// Four consecutive floats. `left` is how many there are from p to the end of the row: one 16-byte access where all
// four exist and p is aligned (every row is, when C is a multiple of 4), single floats otherwise, so that any C works.
// Missing elements load as 0 and are not stored.
struct Four {
    float x[4];
};

__device__ inline bool is_vector(const float* p, int left) {
    return left >= 4 && (reinterpret_cast<size_t>(p) & 15) == 0;
}

__device__ inline Four load4(const float* p, int left) {
    Four v;
    if (is_vector(p, left)) {
        const float4 f = *reinterpret_cast<const float4*>(p);
        v.x[0] = f.x, v.x[1] = f.y, v.x[2] = f.z, v.x[3] = f.w;
    } else {
        for (int k = 0; k < 4; k++) v.x[k] = k < left ? p[k] : 0.0f;
    }
    return v;
}

__device__ inline void store4(float* p, const Four& v, int left) {
    if (is_vector(p, left)) {
        *reinterpret_cast<float4*>(p) = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
    } else {
        for (int k = 0; k < 4 && k < left; k++) p[k] = v.x[k];
    }
}

// A thread that walks down one column of an (N, C) matrix, eight rows at a time, writes them to the transposed (C, N)
// matrix with this: eight consecutive floats are one whole 32-byte sector, so no detour through shared memory is needed.
constexpr int COLUMN_ROWS = 8;

__device__ inline void store_transposed(float* p, const float (&v)[COLUMN_ROWS], int left) {
    for (int r = 0; r < COLUMN_ROWS; r += 4) store4(p + r, Four{v[r], v[r + 1], v[r + 2], v[r + 3]}, left - r);
}

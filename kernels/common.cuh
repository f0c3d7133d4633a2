// What several layers share: reductions over a warp and a block, 16-byte accesses, and the transposed store.
// A kernel file stays plain CUDA C++ that NVRTC, nvcc, g++ and clang++ all compile; LLMC_CPU is defined where a
// C++ compiler builds it for the CPU device (device/cpp).
#pragma once

// Lanes in a warp. The CPU device builds the same files with warps of a single lane, so that the loops
// `for (i = lane; i < n; i += WARP_SIZE)` become contiguous there; a file that needs the GPU's number defines it first.
#ifndef WARP_SIZE
#define WARP_SIZE 32
#endif

// In a kernel's declaration: the kernel overwrites all of the array behind this pointer, and does not read it before.
// Whoever orders launches (device/recording.py) must otherwise take a pointer that is not const for read and written.
#define SETS

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

// Four consecutive floats, moved in one 16-byte access where that is possible. Rows of an (N, C) matrix allow it when C is
// a multiple of 4, and any other C must work too, so a kernel's body is written once and compiled twice:
//   by_alignment(C % 4 == 0, [&](auto memory) { Four x = memory.load(p, left); ... memory.store(p, x, left); });
// `left` is how many floats there are from p to the end of the row; those that are missing load as 0 and are not stored.
struct Four {
    float x[4];
};

struct Aligned {
    __device__ static Four load(const float* p, int left) {
        const float4 f = *reinterpret_cast<const float4*>(p);
        return {{f.x, f.y, f.z, f.w}};
    }
    __device__ static void store(float* p, const Four& v, int left) {
        *reinterpret_cast<float4*>(p) = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
    }
};

struct Ragged {
    __device__ static Four load(const float* p, int left) {
        Four v;
        for (int k = 0; k < 4; k++) v.x[k] = k < left ? p[k] : 0.0f;
        return v;
    }
    __device__ static void store(float* p, const Four& v, int left) {
        for (int k = 0; k < 4 && k < left; k++) p[k] = v.x[k];
    }
};

template <class Body>
__device__ inline void by_alignment(bool aligned, Body body) {
    if (aligned) body(Aligned()); else body(Ragged());
}

__device__ inline bool is_aligned(const float* p) { return (reinterpret_cast<size_t>(p) & 15) == 0; }

// A matrix is transposed by tiles of 64 x 64 that wait in shared memory, so that reads and writes both use whole sectors:
// half a warp moves 256 neighbouring bytes. (Where it wrote twice 128, an H200 took 2 to 12% longer.)
// A block has TILE_THREADS x TILE_THREADS threads; thread (x, y) has the rows y, y + TILE_THREADS, ... of a tile, and in
// each the vectors of four floats x, x + TILE_THREADS, ...
constexpr int TILE = 64;
constexpr int TILE_THREADS = WARP_SIZE > 1 ? 16 : 1;
constexpr int TILE_ROWS = TILE / TILE_THREADS;
constexpr int TILE_VECTORS = TILE / 4 / TILE_THREADS;

struct Tile {
    // A word more to a row, so that the words of a column lie in different banks. A thread has four columns, or four
    // rows, so that threads x and x + 8 still share a bank, and an access takes two passes. A swizzle needs only one, but
    // gained 1% at most.
    float at[TILE][TILE + 1];

    __device__ void put(int row, int column, const Four& v) {
        for (int k = 0; k < 4; k++) at[row][column + k] = v.x[k];
    }

    // Puts value(n, i, c) wherever the thread has a vector inside an (N, C) matrix, for the tile at row n0 and column i0:
    // its four floats are row n, columns i to i + 3, and it is the thread's vector number c of the row.
    template <class Value>
    __device__ void fill(int n0, int i0, int N, int C, Value value) {
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++) {
            const int row = threadIdx.y + r * TILE_THREADS;
            for (int c = 0; c < TILE_VECTORS; c++) {
                const int column = 4 * (threadIdx.x + c * TILE_THREADS);
                if (n0 + row < N && i0 + column < C) put(row, column, value(n0 + row, i0 + column, c));
            }
        }
    }
};

// Writes the tile that was read at row n0 and column i0 of an (N, C) matrix to the transposed (C, N) matrix. The caller
// puts a barrier before.
__device__ inline void store_transposed(float* out_T, const Tile& tile, int n0, int i0, int N, int C) {
    by_alignment(N % 4 == 0, [&](auto memory) {
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++) {
            const int column = threadIdx.y + r * TILE_THREADS;
            for (int c = 0; c < TILE_VECTORS; c++) {
                const int row = 4 * (threadIdx.x + c * TILE_THREADS);
                Four v;
                for (int k = 0; k < 4; k++) v.x[k] = tile.at[row + k][column];
                if (i0 + column < C && n0 + row < N) {
                    memory.store(out_T + (size_t)(i0 + column) * N + n0 + row, v, N - n0 - row);
                }
            }
        }
    });
}

// out (C, N) = inp (N, C)^T. Bytes: one read, one write, 8 N C. Only the order is difficult: a warp reads 32 neighbours
// of a row of inp, and in out these lie N floats apart.
#define WARP_SIZE 32
#include "../../kernels/common.cuh"

// Reads along the rows: neighbouring lanes read neighbours, and each writes to a sector of its own. Block: (32, 8).
extern "C" __global__ void rows_in_kernel(float* out, const float* inp, int N, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, n = blockIdx.y * blockDim.y + threadIdx.y;
    if (i < C && n < N) out[(size_t)i * N + n] = inp[(size_t)n * C + i];
}

// Writes along the rows: a warp reads 32 sectors, and writes whole ones. That is better: L1 keeps the rest of a sector
// that was read for the next access. But L1 does not collect writes: it sends each piece to L2 by itself.
extern "C" __global__ void rows_out_kernel(float* out, const float* inp, int N, int C) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y;
    if (i < C && n < N) out[(size_t)i * N + n] = inp[(size_t)n * C + i];
}

// A tile of 32 x 32 waits in shared memory: `row` floats from one of its rows to the next.
template <int ROW>
__device__ inline void by_tile(float* out, const float* inp, int N, int C) {
    __shared__ float tile[32][ROW];
    const int i0 = 32 * blockIdx.x, n0 = 32 * blockIdx.y, x = threadIdx.x;
    for (int y = threadIdx.y; y < 32; y += 8) {
        if (i0 + x < C && n0 + y < N) tile[y][x] = inp[(size_t)(n0 + y) * C + i0 + x];
    }
    __syncthreads();
    for (int y = threadIdx.y; y < 32; y += 8) {
        if (i0 + y < C && n0 + x < N) out[(size_t)(i0 + y) * N + n0 + x] = tile[x][y];
    }
}

// A tile in shared memory: device memory is read and written by whole sectors, and rows become columns in shared
// memory. There a column of the tile lies in a single bank, so the 32 lanes are served one after the other.
extern "C" __global__ void tile_kernel(float* out, const float* inp, int N, int C) { by_tile<32>(out, inp, N, C); }

// A tile with rows of 33: element (row, column) is in bank (row + column) % 32, so a column lies in all 32 of them.
extern "C" __global__ void padded_tile_kernel(float* out, const float* inp, int N, int C) { by_tile<33>(out, inp, N, C); }

// Linear layers: out (N, OC) = inp (N, C) @ weight (OC, C)^T + bias (OC), N = B*T. The products are cuBLAS's, but for
// that of a single row; here is this one, and what stands around the others. Memory-bound, all of them.
#include "common.cuh"

// out[n, i] += bias[i]. Block x: a row; thread: a vector of columns of grid column y.
extern "C" __global__ void add_bias_kernel(floatX* out, const floatX* bias, int OC) {
    const int i = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= OC) return;
    floatX* p = out + (size_t)blockIdx.x * OC + i;
    by_alignment(OC % WIDTH == 0, [&](auto memory) {
        Vec x = memory.load(p, OC - i);
        const Vec b = memory.load(bias + i, OC - i);
        for (int k = 0; k < WIDTH; k++) x.x[k] += b.x[k];
        memory.store(p, x, OC - i);
    });
}

// out (C, N) = inp (N, C)^T. A block takes one tile. inp may be a weight, which need not begin at 16 bytes.
extern "C" __global__ void transpose_kernel(SETS floatX* out, const floatX* inp, int N, int C) {
    __shared__ Tile tile;
    const int i0 = blockIdx.x * TILE_COLUMNS, n0 = blockIdx.y * TILE;
    by_alignment(C % WIDTH == 0 && is_aligned(inp), [&](auto memory) {
        Tile::for_each(n0, i0, N, C, [&](int n, int i, int row, int column, int) {
            tile.put(row, column, memory.load(inp + (size_t)n * C + i, C - i));
        });
    });
    __syncthreads();
    store_transposed(out, tile, n0, i0, N, C);
}

// out (OC) = inp (C) @ weight (OC, C)^T + bias (OC), which may be null: N = 1, where text is written. Each weight is read
// for one multiplication, so a tile of a matrix would have nothing to share, and a kernel that loads tiles takes some 4 us
// for the smallest weight. Block: (lanes, outputs), where so many lanes of a warp, a power of two, have an output; or
// (warps * WARP_SIZE, 1), where several warps have one. A thread has AT_ONCE vectors of the weight on their way before it
// uses the first, and before the launch in front has ended. An output behind the last is the last once more.
extern "C" __global__ void PROGRAMMATIC matvec_kernel(SETS floatX* out, const floatX* inp, const floatX* weight,
                                                      const floatX* bias, int C, int OC) {
    constexpr int AT_ONCE = 32 / WIDTH;
    const int o = min((int)(blockIdx.x * blockDim.y + threadIdx.y), OC - 1), step = WIDTH * blockDim.x;
    trigger_programmatic_launch();
    const floatX* row = weight + (size_t)o * C;

    by_alignment(C % WIDTH == 0 && is_aligned(weight), [&](auto memory) {
        Vec sum = {};
        for (int first = WIDTH * threadIdx.x; first < C; first += AT_ONCE * step) {
            Vec w[AT_ONCE] = {}, x[AT_ONCE] = {};
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int i = first + b * step;
                if (i < C) w[b] = memory.load(row + i, C - i);
            }
            if (first < step) grid_dependency_synchronize();  // the input may be on its way, weights are not
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                const int i = first + b * step;
                if (i < C) x[b] = memory.load(inp + i, C - i);
            }
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) {
                for (int k = 0; k < WIDTH; k++) sum.x[k] += w[b].x[k] * x[b].x[k];
            }
        }
        float total = sum_of(sum);
        if (blockDim.x > WARP_SIZE) total = block_sum(total);
        else for (int i = blockDim.x / 2; i > 0; i /= 2) total += __shfl_xor_sync(0xffffffffu, total, i);
        if (threadIdx.x == 0) set(out[o], total + (bias != nullptr ? to_float(bias[o]) : 0.0f));
    });
}

// SwiGLU (Shazeer 2020): out = silu(gate) * up with silu(x) = x * sigmoid(x). inp (N, 2C) is one matrix product: the
// first C columns of a row are up, the last C are gate. There is no bias.
// Backward: with s = sigmoid(gate),
//   dup = dout * gate * s;  dgate = dout * up * s * (1 + gate * (1 - s))
// Memory-bound: forward reads 2 N*C numbers and writes N*C. Backward reads 3 N*C and writes 3 N*C. A third of these are
// out, for the weight gradient of the next product, so forward's output need not be kept. In fp32 it is transposed
// (Tile::fill).
#include "dependent_launch.cuh"
#include "swiglu.cuh"
#include "tile.cuh"

// Block x: a row; thread: a vector of columns of grid column y.
extern "C" __global__ void PROGRAMMATIC swiglu_forward_kernel(floatX* __restrict__ out, const floatX* inp, int C) {
    const int i = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x);
    trigger_programmatic_launch();
    if (i >= C) return;
    grid_dependency_synchronize();
    const floatX* row = inp + 2 * (size_t)blockIdx.x * C;
    by_alignment(C % WIDTH == 0, [&](auto memory) {
        const Vec up = memory.load(row + i, C - i), gate = memory.load(row + C + i, C - i);
        memory.store(out + (size_t)blockIdx.x * C + i, forward(up, gate), C - i);
    });
}

// A block takes one tile of out. Sets dinp (N,2C) and out_T (C,N), or out_T (N,C) if it is not transposed.
extern "C" __global__ void swiglu_backward_kernel(SETS floatX* __restrict__ dinp, SETS floatX* __restrict__ out_T,
                                                  const floatX* __restrict__ dout, const floatX* __restrict__ inp,
                                                  int N, int C) {
    __shared__ Tile tile;
    const int i0 = blockIdx.x * TILE_COLUMNS, n0 = blockIdx.y * TILE;
    by_alignment(C % WIDTH == 0, [&](auto memory) {
        tile.fill(memory, out_T, n0, i0, N, C, [&](int n, int i, int) {
            const size_t at = 2 * (size_t)n * C + i;  // of up; gate is C further
            const Vec up = memory.load(inp + at, C - i), gate = memory.load(inp + at + C, C - i);
            const Gradients found = backward(memory.load(dout + (size_t)n * C + i, C - i), up, gate);
            memory.store(dinp + at, found.up, C - i);
            memory.store(dinp + at + C, found.gate, C - i);
            return found.out;
        });
    });
    write_recomputed(out_T, tile, n0, i0, N, C);
}

// The transposed store: a matrix goes through shared memory tile by tile, and is written transposed.
#pragma once
#include "common.cuh"

// A weight's gradient needs its layer's input, which backward recomputes. In fp32 and TF32 the product is faster if
// this input is transposed. In bf16 it is not, so there the input is written as it is (kernels/matmul.py).
constexpr bool TRANSPOSES = sizeof(floatX) == 4;

// A matrix is transposed by tiles of TILE rows. A tile waits in shared memory, so that reads and writes both use whole
// sectors: half a warp moves 256 neighbouring bytes. (When it wrote two pieces of 128, an H200 took 2 to 12% longer.)
// A block has TILE_THREADS x TILE_THREADS threads. Thread (x, y) has the rows y, y + TILE_THREADS, ... of a tile, and
// in each row the vectors x, x + TILE_THREADS, ...
constexpr int TILE = 64, TILE_COLUMNS = WARP_SIZE > 1 ? 16 * WIDTH : 64;
constexpr int TILE_THREADS = WARP_SIZE > 1 ? 16 : 1;
constexpr int TILE_VECTORS = TILE_COLUMNS / WIDTH / TILE_THREADS;

struct Tile {
    // A row has one extra word, so that the words of a column lie in different banks. A thread has four columns, or
    // four rows. So threads x and x + 8 still share a bank, and an access takes two passes. With a swizzle it takes one
    // pass, but that gained 1% at most.
    float at[TILE][TILE_COLUMNS + 1];

    __device__ void put(int row, int column, const Vec& v) {
        for (int k = 0; k < WIDTH; k++) at[row][column + k] = v.x[k];
    }

    // For the tile at row n0 and column i0 of an (N, C) matrix: calls work(n, i, row, column, c) for each vector of the
    // thread that lies inside the matrix. The vector has columns i to i + WIDTH - 1 of row n of the matrix. It lies at
    // (row, column) of the tile, and it is the thread's vector number c of that row.
    template <class Work>
    __device__ static void for_each(int n0, int i0, int N, int C, Work work) {
#pragma unroll
        for (int r = 0; r < TILE / TILE_THREADS; r++) {
            const int row = threadIdx.y + r * TILE_THREADS;
            for (int c = 0; c < TILE_VECTORS; c++) {
                const int column = WIDTH * (threadIdx.x + c * TILE_THREADS);
                if (n0 + row < N && i0 + column < C) work(n0 + row, i0 + column, row, column, c);
            }
        }
    }

    // Computes the tile at row n0 and column i0 of an (N, C) matrix whose vectors are value(n, i, c). If TRANSPOSES is
    // false, fill stores it to out (N, C) at once. Else it stays in `at`, and the caller must call write_recomputed.
    template <class Memory, class Value>
    __device__ void fill(Memory memory, floatX* out, int n0, int i0, int N, int C, Value value) {
        for_each(n0, i0, N, C, [&](int n, int i, int row, int column, int c) {
            const Vec v = value(n, i, c);
            if (TRANSPOSES) put(row, column, v); else memory.store(out + (size_t)n * C + i, v, C - i);
        });
    }
};

// Writes a tile, which was read at row n0 and column i0 of an (N, C) matrix, to the transposed (C, N) matrix. The
// caller puts a barrier before the call.
__device__ inline void store_transposed(floatX* out_T, const Tile& tile, int n0, int i0, int N, int C) {
    by_alignment(N % WIDTH == 0, [&](auto memory) {
#pragma unroll
        for (int r = 0; r < TILE_COLUMNS / TILE_THREADS; r++) {
            const int column = threadIdx.y + r * TILE_THREADS;
            for (int row = WIDTH * threadIdx.x; row < TILE; row += WIDTH * TILE_THREADS) {
                Vec v;
                for (int k = 0; k < WIDTH; k++) v.x[k] = tile.at[row + k][column];
                if (i0 + column < C && n0 + row < N) {
                    memory.store(out_T + (size_t)(i0 + column) * N + n0 + row, v, N - n0 - row);
                }
            }
        }
    });
}

// After Tile::fill: writes the tile, transposed, to out_T (C, N). In bf16 nothing is left to do.
__device__ inline void write_recomputed(floatX* out_T, const Tile& tile, int n0, int i0, int N, int C) {
    if (!TRANSPOSES) return;
    __syncthreads();
    store_transposed(out_T, tile, n0, i0, N, C);
}

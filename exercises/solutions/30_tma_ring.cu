// Exercise 30: a ring of stages that the TMA fills.
//
//   out (B, 64) = the sum over the N rows of each sequence of x (B, N, 64), which is in bf16
// A block takes a sequence. It has three warps. One thread of the last warp is the producer: it asks the TMA for tiles
// of ROWS rows. The other two warps are the consumers: each of their threads adds up a column. Between them lies a ring
// of STAGES tiles, and each stage has two mbarriers. A phase of `full` needs the producer's arrival and the tile's
// bytes. A phase of `empty` needs two arrivals, one of each consumer warp.
//
// hopper.cuh has the instructions. (It has `swizzled_offset`, too; write your own.)
//   barrier_wait(barrier, parity)     waits until the phase of this parity has ended. A new mbarrier is in phase 0, so
//                                     a wait for parity 1 is over at once.
//   barrier_expect(barrier, bytes)    arrives; and the phase does not end before so many bytes have come.
//   copy_box<ROWS>(to, x, 0, row, sequence, barrier)
//                                     starts a copy of ROWS rows of 64 numbers, from this row of x on, into `to`.
//                                     Rows after the last one become zeros. Zeros count as bytes, too.
//   warp_arrive(barrier)              waits for all lanes of the warp, and arrives once for them.
// A row of a tile has eight chunks of 16 bytes, eight numbers each. The TMA swizzles them: chunk c of row r lies where
// chunk c ^ r % 8 would lie without a swizzle.
#define ARCHITECTURE 90a
#define WARP_SIZE 32
#include "../../kernels/hopper.cuh"

constexpr int ROWS = 16, STAGES = 4;

// Where a number lies in a tile.
__device__ inline int place(int row, int column) {
    return 64 * row + (column ^ row % 8 * 8);
}

extern "C" __global__ void tma_ring_kernel(float* out, const __grid_constant__ TensorMap x, int N) {
    __shared__ __align__(1024) bf16 tiles[STAGES][ROWS * 64];
    __shared__ Barrier full[STAGES], empty[STAGES];
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full[stage], 1);
            barrier_init(empty[stage], 2);
        }
        barriers_ready();
    }
    __syncthreads();
    const int all = (N + ROWS - 1) / ROWS;
    if (threadIdx.x == 64) {
        for (int i = 0; i < all; i++) {
            const int stage = i % STAGES, parity = i / STAGES % 2;
            barrier_wait(empty[stage], parity ^ 1);
            barrier_expect(full[stage], sizeof tiles[stage]);
            copy_box<ROWS>(tiles[stage], x, 0, ROWS * i, blockIdx.x, full[stage]);
        }
    } else if (threadIdx.x < 64) {
        float sum = 0.0f;
        for (int i = 0; i < all; i++) {
            const int stage = i % STAGES, parity = i / STAGES % 2;
            barrier_wait(full[stage], parity);
            for (int row = 0; row < ROWS; row++) sum += to_float(tiles[stage][place(row, threadIdx.x)]);
            warp_arrive(empty[stage]);
        }
        out[64 * blockIdx.x + threadIdx.x] = sum;
    }
}

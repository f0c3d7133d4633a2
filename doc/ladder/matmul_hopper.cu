// c (M, N) = a (M, K) b (K, N), all by rows and in bf16, by Hopper's own instructions: the ladder of matmul_bf16.cu
// goes on.
//
// wgmma multiplies tiles that lie in shared memory, and the warps only start it. A block keeps the sums of 128 x 128 or
// 128 x 256 elements in registers: two warpgroups with 64 rows each. (In the last rung each has a tile of its own.)
// What remains is to have the next tiles there in time. Rungs from the second on let the tensor memory accelerator
// (TMA) copy. It fills with zeros what lies outside, so M is any number; N and K are multiples of 8, as before.
//
// What the rungs have in common with the products that training uses is in hopper_product.cuh.
#define ARCHITECTURE 90a  // only GPUs of compute capability 9.0 have wgmma
#define WARP_SIZE 32
#include "../../kernels/async_copy.cuh"
#include "../../kernels/hopper_product.cuh"
static_assert(WIDTH == 8, "these kernels are compiled with -DfloatX=bf16");

// ---- the product of a warpgroup

// Rounds the warpgroup's sums, and stores two at a time: four lanes have 16 bytes of a row.
template <int N>
__device__ inline void store_products(bf16* c, const float (&sum)[N][4], int row0, int column0, int M, int columns) {
    const int row = row0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = column0 + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        if (row + 8 * h >= M) continue;
        #pragma unroll
        for (int n = 0; n < N; n++) {
            if (column + 8 * n < columns)
                *reinterpret_cast<unsigned*>(c + (size_t)(row + 8 * h) * columns + column + 8 * n) =
                    to_bf16(sum[n][2 * h], sum[n][2 * h + 1]);
        }
    }
}

// wgmma: a warpgroup multiplies 64 x 16 by 16 x 128 in one instruction, which reads both from shared memory. No warp
// loads fragments, and the 256 threads copy tiles as before.
extern "C" __global__ void __launch_bounds__(256, 2) wgmma_kernel(bf16* c, const bf16* a, const bf16* b, int M, int N,
                                                                 int K) {
    SHARED_TILES(stage);
    const int row0 = ROWS * blockIdx.y, column0 = 128 * blockIdx.x, first_row = 64 * warpgroup_of();
    float sum[1][16][4];
    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        #pragma unroll
        for (int i = threadIdx.x; i < ROWS * DEPTH / 8; i += 256) {
            const int row = i / 8, k = i % 8 * 8, l = i / 16, column = i % 16 * 8;
            const bool a_inside = row0 + row < M && k0 + k < K, b_inside = k0 + l < K && column0 + column < N;
            copy_four(stage + swizzled_offset<ROWS>(row, k), a_inside ? a + (size_t)(row0 + row) * K + k0 + k : a,
                      a_inside);
            copy_four(stage + ROWS * DEPTH + swizzled_offset<DEPTH>(l, column),
                      b_inside ? b + (size_t)(k0 + l) * N + column0 + column : b, b_inside);
        }
        copies_wait();
        written_for_async();
        __syncthreads();
        start_products<true>(sum, stage, first_row, k0 > 0);
        wgmma_wait<0>();
        fence_operand(sum[0]);
        __syncthreads();
    }
    store_products(c, sum[0], row0, column0, M, N);
}

// ---- by the TMA

// TMA: one thread asks for the tiles, and the hardware finds addresses, swizzles and tells an mbarrier when all is
// there. The other threads have no loads to issue and no addresses to compute.
extern "C" __global__ void __launch_bounds__(256, 2)
tma_kernel(bf16* c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int M, int N, int K) {
    SHARED_TILES(stage);
    Barrier& full = *reinterpret_cast<Barrier*>(stage + STAGE<128>);
    const int row0 = ROWS * blockIdx.y, column0 = 128 * blockIdx.x, first_row = 64 * warpgroup_of();
    float sum[1][16][4];
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barriers_ready();
    }
    __syncthreads();
    for (int k0 = 0, parity = 0; k0 < K; k0 += DEPTH, parity ^= 1) {
        if (threadIdx.x == 0) copy_tiles<128, 1>(stage, a, b, row0, column0, k0, full);
        barrier_wait(full, parity);
        start_products<true>(sum, stage, first_row, k0 > 0);
        wgmma_wait<0>();
        fence_operand(sum[0]);
        __syncthreads();
    }
    store_products(c, sum[0], row0, column0, M, N);
}

// ---- a producer, and a ring

template <int COLUMNS, int STAGES>
__device__ inline void ring_product(bf16* c, const TensorMap& a, const TensorMap& b, int M, int N, int K) {
    SHARED_TILES(tiles);
    const Ring<COLUMNS, STAGES> ring(tiles, tiles + STAGES * STAGE<COLUMNS>);
    const int row0 = ROWS * blockIdx.y, column0 = COLUMNS * blockIdx.x;
    PipelineState<STAGES> at;
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    if (warpgroup_of() == 2) {
        give_registers<2, 232>();
        if (threadIdx.x == 256) {
            for (int k0 = 0; k0 < K; k0 += DEPTH, at.advance()) {
                barrier_wait(ring.empty[at.stage], at.parity ^ 1);
                copy_tiles<COLUMNS, 1>(ring.at(at.stage), a, b, row0, column0, k0, ring.full[at.stage]);
            }
        }
    } else {
        take_registers<232>();
        float sum[1][COLUMNS / 8][4];
        consume(sum, ring, at, 64 * warpgroup_of(), K, [] {});
        store_products(c, sum[0], row0, column0, M, N);
    }
}

// Producer and consumers: a third warpgroup copies ahead into a ring of four stages, and no __syncthreads is left in
// the loop. A stage's two mbarriers say when it is full and when it is empty.
extern "C" __global__ void __launch_bounds__(384, 1)
ring_kernel(bf16* c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int M, int N, int K) {
    ring_product<128, 4>(c, a, b, M, N, K);
}

// 128 x 256 elements per block: an element of a serves twice as many products, so a quarter less comes from L2 for each.
// The producer gives registers away, and a consumer's thread has 128 sums.
extern "C" __global__ void __launch_bounds__(384, 1)
wide_kernel(bf16* c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int M, int N, int K) {
    ring_product<256, 4>(c, a, b, M, N, K);
}

// ---- blocks that stay

// The consumers make one tile after the other together. store(buffer, sum, row0, column0) is given BUFFER numbers of
// shared memory.
template <int BLOCKS, int BUFFER, class Store>
__device__ inline void stay(const TensorMap& a, const TensorMap& b, int M, int N, int K, Store store) {
    constexpr int STAGES = 4;
    SHARED_TILES(tiles);
    bf16* const buffer = tiles + STAGES * STAGE<256>;
    const Ring<256, STAGES, BLOCKS> ring(tiles, buffer + BUFFER);
    if (threadIdx.x == 0) ring.init();
    if (BLOCKS > 1) cluster_wait(); else __syncthreads();
    if (warpgroup_of() == 2) {
        give_registers<2, 232>();
        if (threadIdx.x == 256) produce(ring, a, b, M, N, K);
    } else {
        take_registers<232>();
        PipelineState<STAGES> at;
        const int all = Work<256, BLOCKS>::tiles(M, N), first_row = 64 * warpgroup_of();
        for (int i = blockIdx.x / BLOCKS; i < all; i += gridDim.x / BLOCKS) {
            const Work<256, BLOCKS> work(i, M, N);
            float sum[1][32][4];
            consume(sum, ring, at, first_row, K, [] {});
            store(buffer, sum, work.row0, work.column0);
        }
    }
    if (BLOCKS > 1) cluster_wait();  // neither block may end while the other may write to it
}

// Persistent blocks: one for each multiprocessor makes one tile after the other, and copies for the next while it
// stores; an order of tiles keeps in L2 what several read.
extern "C" __global__ void __launch_bounds__(384, 1)
persistent_kernel(bf16* c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int M, int N,
                  int K) {
    stay<1, 0>(a, b, M, N, K, [&](bf16*, const auto& sum, int row0, int column0) {
        store_products(c, sum[0], row0, column0, M, N);
    });
}

// A cluster of two: two blocks, one above the other, need the same tiles of b, so each copies half of a tile to both.
// Then a third less comes from L2.
extern "C" __global__ void CLUSTER_OF_A_PAIR __launch_bounds__(384, 1)
cluster_kernel(bf16* c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int M, int N, int K) {
    stay<PAIR, 0>(a, b, M, N, K, [&](bf16*, const auto& sum, int row0, int column0) {
        store_products(c, sum[0], row0, column0, M, N);
    });
}

// A warp's 16 rows of each half of the warpgroup's rows of c, slab by slab; row0 is the warpgroup's first row. BUFFERS
// of the warp take turns: the TMA reads one while the warp writes to another.
template <int BUFFERS, int HALVES, int N>
__device__ inline void store_slabs(const TensorMap& c, bf16* buffer, const float (&sum)[HALVES][N][4], int row0,
                                   int column0) {
    static_assert(HALVES * N / 8 % BUFFERS == 0, "else the next tile would begin with a buffer that is not the oldest");
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first_row = threadIdx.x / 32 % 4 * 16;
    #pragma unroll
    for (int turn = 0; turn < HALVES * N / 8; turn++) {
        const int half = turn / (N / 8), slab = turn % (N / 8);
        bf16* const rows = buffer + turn % BUFFERS * SLOT;
        if (lane == 0) stores_read<BUFFERS - 1>();
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            const int n = slab * 8 + i / 2, h = i % 2;
            *reinterpret_cast<unsigned*>(rows + swizzled_offset<16>(g + 8 * h, i / 2 * 8) + 2 * t) =
                to_bf16(sum[half][n][2 * h], sum[half][n][2 * h + 1]);
        }
        written_for_async();
        __syncwarp();
        if (lane == 0) store_box<16>(c, rows, column0 + slab * 64, row0 + half * 64 + first_row);
    }
}

// TMA stores: the warps leave their sums in shared memory, and the TMA writes whole lines of 128 bytes while they go
// on.
extern "C" __global__ void CLUSTER_OF_A_PAIR __launch_bounds__(384, 1)
store_kernel(SETS const __grid_constant__ TensorMap c, const __grid_constant__ TensorMap a,
             const __grid_constant__ TensorMap b, int M, int N, int K) {
    stay<PAIR, 8 * 2 * SLOT>(a, b, M, N, K, [&](bf16* buffer, const auto& sum, int row0, int column0) {
        store_slabs<2>(c, buffer + threadIdx.x / 32 * 2 * SLOT, sum, row0 + 64 * warpgroup_of(), column0);
    });
    if (threadIdx.x % 32 == 0) stores_read<0>();
}

// ---- ping-pong

template <int BUFFERS>
struct StoreSlabs {
    static constexpr int BUFFER = BUFFERS * SLOT, BARRIERS = 0;
    const TensorMap& c;
    bf16* slots;
    __device__ void place(bf16* mine, Barrier*) { slots = mine; }
    __device__ void begin(int, int) const {}
    template <class Sums>
    __device__ void finish(const Sums& sum, int row0, int column0) const {
        store_slabs<BUFFERS>(c, slots, sum, row0, column0);
    }
};

// Ping-pong: each consumer has a whole tile, 192 sums per thread, and stores it while the other one multiplies.
extern "C" __global__ void CLUSTER_OF_A_PAIR __launch_bounds__(384, 1)
pingpong_kernel(SETS const __grid_constant__ TensorMap c, const __grid_constant__ TensorMap a,
                const __grid_constant__ TensorMap b, int M, int N, int K) {
    alternate<4, PAIR, BY_ROWS>(StoreSlabs<3>{c}, a, b, M, N, K);
}

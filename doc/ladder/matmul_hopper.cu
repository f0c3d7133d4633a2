// c (M, N) = a (M, K) b (K, N), all by rows and in bf16, by Hopper's own instructions: the ladder of matmul_bf16.cu
// goes on.
//
// wgmma multiplies tiles that lie in shared memory, and the warps only start it. A block keeps the sums of 128 x 128 or
// 128 x 256 elements in registers: two warpgroups with 64 rows each. What remains is to have the next tiles there in
// time. Rungs from the second on let the tensor memory accelerator (TMA) copy. It fills with zeros what lies outside,
// so M is any number; N and K are multiples of 8, as before.
#define ARCHITECTURE 90a  // only GPUs of compute capability 9.0 have wgmma
#define WARP_SIZE 32
#include "../../kernels/async_copy.cuh"
#include "../../kernels/hopper.cuh"
static_assert(WIDTH == 8, "these kernels are compiled with -DfloatX=bf16");

constexpr int ROWS = 128, DEPTH = 64;  // of a tile of a; a tile of b has DEPTH rows, and COLUMNS columns in slabs of 64

// The numbers of a stage: a tile of a, and one of b behind it.
template <int COLUMNS>
constexpr int STAGE = (ROWS + COLUMNS) * DEPTH;

// ---- the product of a warpgroup

// d (64, 8 N) = a (64, 16) b (16, 8 N), plus d if `add`; N is 16 or 32. Both operands lie in shared memory, b by rows.
// As wgmma of hopper.cuh otherwise.
template <int N>
__device__ inline void wgmma_by_rows(float (&d)[N][4], Descriptor a, Descriptor b, bool add) {
#ifdef LLMC_CPU
    unsigned mine[4];
    fragment(mine, a);
    emulate_wgmma<true>(d, mine, b, add);
#else
    if constexpr (N == 16)
        asm volatile("{.reg .pred add; setp.ne.b32 add, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
            NUMBERS_OF_16 ", %64, %65, add, 1, 1, 0, 1;}"
            : EIGHT_FOURS(d, 0), EIGHT_FOURS(d, 8) : "l"(a), "l"(b), "r"((int)add));
    else
        asm volatile("{.reg .pred add; setp.ne.b32 add, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
            NUMBERS_OF_32 ", %128, %129, add, 1, 1, 0, 1;}"
            : EIGHT_FOURS(d, 0), EIGHT_FOURS(d, 8), EIGHT_FOURS(d, 16), EIGHT_FOURS(d, 24)
            : "l"(a), "l"(b), "r"((int)add));
#endif
}

// Starts sum = a b, plus sum if `add`, for the warpgroup's 64 rows of a stage.
template <int N>
__device__ inline void start_products(float (&sum)[N][4], const bf16* stage, int warpgroup, bool add) {
    const unsigned address = shared_address(stage) & 0xffffff;  // above it is the block's number in its cluster
    const Descriptor a = descriptor(address + warpgroup * 64 * 128, 0);
    const Descriptor b = descriptor(address + ROWS * 128, DEPTH * 128);
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < DEPTH; k += 16) wgmma_by_rows(sum, further(a, k), further(b, k * 64), add || k > 0);
    wgmma_commit();
}

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
    const int row0 = ROWS * blockIdx.y, column0 = 128 * blockIdx.x, warpgroup = warpgroup_of();
    float sum[16][4];
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
        start_products(sum, stage, warpgroup, k0 > 0);
        wgmma_wait<0>();
        fence_operand(sum);
        __syncthreads();
    }
    store_products(c, sum, row0, column0, M, N);
}

// ---- by the TMA

// One thread asks for a stage, at number k0 of K: `full` then tells when all bytes are there. In a pair of blocks,
// which have the same columns, each asks for every other slab of b, for both.
template <int COLUMNS, int BLOCKS>
__device__ inline void copy_tiles(bf16* stage, const TensorMap& a, const TensorMap& b, int row0, int column0, int k0,
                                  Barrier& full) {
    barrier_expect(full, 2 * STAGE<COLUMNS>);
    copy_box<ROWS>(stage, a, k0, row0, 0, full);
    #pragma unroll
    for (int i = 0; i < COLUMNS / 64; i++) {
        bf16* const slab = stage + (ROWS + 64 * i) * DEPTH;
        if (BLOCKS == 1) copy_box<DEPTH>(slab, b, column0 + 64 * i, k0, 0, full);
        else if (i % BLOCKS == blockIdx.x % BLOCKS) copy_box_to_pair<DEPTH>(slab, b, column0 + 64 * i, k0, full);
    }
}

// TMA: one thread asks for the tiles, and the hardware finds addresses, swizzles and tells an mbarrier when all is
// there. The other threads have no loads to issue and no addresses to compute.
extern "C" __global__ void __launch_bounds__(256, 2)
tma_kernel(bf16* c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int M, int N, int K) {
    SHARED_TILES(stage);
    Barrier& full = *reinterpret_cast<Barrier*>(stage + STAGE<128>);
    const int row0 = ROWS * blockIdx.y, column0 = 128 * blockIdx.x, warpgroup = warpgroup_of();
    float sum[16][4];
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barriers_ready();
    }
    __syncthreads();
    for (int k0 = 0, parity = 0; k0 < K; k0 += DEPTH, parity ^= 1) {
        if (threadIdx.x == 0) copy_tiles<128, 1>(stage, a, b, row0, column0, k0, full);
        barrier_wait(full, parity);
        start_products(sum, stage, warpgroup, k0 > 0);
        wgmma_wait<0>();
        fence_operand(sum);
        __syncthreads();
    }
    store_products(c, sum, row0, column0, M, N);
}

// ---- a producer, and a ring

// STAGES stages on their way from a producer to consumers. Each has two mbarriers: `full` waits for the bytes, and
// `empty` for the warps that read them, those of BLOCKS blocks.
template <int COLUMNS, int STAGES, int BLOCKS = 1>
struct Ring {
    bf16* tiles;
    Barrier *full, *empty;

    __device__ Ring(bf16* tiles, void* barriers)
        : tiles(tiles), full(static_cast<Barrier*>(barriers)), empty(full + STAGES) {}
    __device__ void init() const {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full[stage], 1);
            barrier_init(empty[stage], 8 * BLOCKS);
        }
        barriers_ready();
    }
    __device__ bf16* at(int stage) const { return tiles + stage * STAGE<COLUMNS>; }
    __device__ void release(int stage) const {
        if (BLOCKS > 1) warp_arrive_at_pair(empty[stage]); else warp_arrive(empty[stage]);
    }
};

// Adds up the products of all K, as the tiles come. While one group of products runs, the next is started behind it. A
// stage is released when the group that reads it has ended.
template <int N, class R, int STAGES>
__device__ inline void consume(float (&sum)[N][4], const R& ring, PipelineState<STAGES>& at, int K) {
    const int warpgroup = warpgroup_of();
    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        barrier_wait(ring.full[at.stage], at.parity);
        start_products(sum, ring.at(at.stage), warpgroup, k0 > 0);
        wgmma_wait<1>();
        if (k0 > 0) ring.release(at.before());
        at.advance();
    }
    wgmma_wait<0>();
    fence_operand(sum);
    ring.release(at.before());
}

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
        float sum[COLUMNS / 8][4];
        consume(sum, ring, at, K);
        store_products(c, sum, row0, column0, M, N);
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

// Tile number i of c, ROWS * BLOCKS x 256 elements. All tiles of GROUP rows come before the next rows, column by
// column. So the tiles at work make a square of c, about, and share rows of a and columns of b in L2.
template <int BLOCKS>
struct Work {
    static constexpr int GROUP = 16 / BLOCKS;
    int row0, column0;
    __device__ Work(int i, int M, int N) {
        const int down = ceil_div(M, ROWS * BLOCKS), across = ceil_div(N, 256);
        const int first = i / (GROUP * across) * GROUP, together = min(GROUP, down - first), j = i - first * across;
        row0 = ((first + j % together) * BLOCKS + blockIdx.x % BLOCKS) * ROWS;
        column0 = j / together * 256;
    }
};

// The blocks of the grid, or its clusters, take the tiles of c in turn. store(buffer, sum, row0, column0) is given
// BUFFER numbers of shared memory.
template <int BLOCKS, int BUFFER, class Store>
__device__ inline void stay(const TensorMap& a, const TensorMap& b, int M, int N, int K, Store store) {
    constexpr int STAGES = 4;
    SHARED_TILES(tiles);
    bf16* const buffer = tiles + STAGES * STAGE<256>;
    const Ring<256, STAGES, BLOCKS> ring(tiles, buffer + BUFFER);
    const int all = ceil_div(M, ROWS * BLOCKS) * ceil_div(N, 256);
    PipelineState<STAGES> at;
    if (threadIdx.x == 0) ring.init();
    if (BLOCKS > 1) cluster_wait(); else __syncthreads();
    if (warpgroup_of() == 2) {
        give_registers<2, 232>();
        if (threadIdx.x == 256) {
            for (int i = blockIdx.x / BLOCKS; i < all; i += gridDim.x / BLOCKS) {
                const Work<BLOCKS> work(i, M, N);
                for (int k0 = 0; k0 < K; k0 += DEPTH, at.advance()) {
                    barrier_wait(ring.empty[at.stage], at.parity ^ 1);
                    copy_tiles<256, BLOCKS>(ring.at(at.stage), a, b, work.row0, work.column0, k0, ring.full[at.stage]);
                }
            }
        }
    } else {
        take_registers<232>();
        for (int i = blockIdx.x / BLOCKS; i < all; i += gridDim.x / BLOCKS) {
            const Work<BLOCKS> work(i, M, N);
            float sum[32][4];
            consume(sum, ring, at, K);
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
        store_products(c, sum, row0, column0, M, N);
    });
}

// A cluster of two: two blocks, one above the other, need the same tiles of b, so each copies half of a tile to both.
// Then a third less comes from L2.
extern "C" __global__ void CLUSTER_OF_A_PAIR __launch_bounds__(384, 1)
cluster_kernel(bf16* c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int M, int N, int K) {
    stay<PAIR, 0>(a, b, M, N, K, [&](bf16*, const auto& sum, int row0, int column0) {
        store_products(c, sum, row0, column0, M, N);
    });
}

// A warp's 16 rows of c, slab by slab. Two buffers take turns: the TMA reads one while the warp writes to the other.
template <int N>
__device__ inline void store_slabs(const TensorMap& c, bf16* buffer, const float (&sum)[N][4], int row0, int column0) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int slab = 0; slab < N / 8; slab++) {
        bf16* const rows = buffer + (2 * warp + slab % 2) * 16 * 64;
        if (lane == 0) stores_read<1>();
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            const int n = slab * 8 + i / 2, h = i % 2;
            *reinterpret_cast<unsigned*>(rows + swizzled_offset<16>(g + 8 * h, i / 2 * 8) + 2 * t) =
                to_bf16(sum[n][2 * h], sum[n][2 * h + 1]);
        }
        written_for_async();
        __syncwarp();
        if (lane == 0) store_box<16>(c, rows, column0 + slab * 64, row0 + warp * 16);
    }
}

// TMA stores: the warps leave their sums in shared memory, and the TMA writes whole lines of 128 bytes while they go
// on.
extern "C" __global__ void CLUSTER_OF_A_PAIR __launch_bounds__(384, 1)
store_kernel(SETS const __grid_constant__ TensorMap c, const __grid_constant__ TensorMap a,
             const __grid_constant__ TensorMap b, int M, int N, int K) {
    stay<PAIR, 8 * 2 * 16 * 64>(a, b, M, N, K, [&](bf16* buffer, const auto& sum, int row0, int column0) {
        store_slabs(c, buffer, sum, row0, column0);
    });
    if (threadIdx.x % 32 == 0) stores_read<0>();
}

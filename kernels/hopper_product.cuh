// A product by Hopper's instructions, which the last product of the book (doc/ladder) and mlp_hopper.cu share: how a
// warpgroup multiplies tiles in shared memory, how a producer copies them ahead, and which tile a block makes.
#pragma once
#include "hopper.cuh"

// Of a tile of a. A tile of b has DEPTH rows, and COLUMNS columns in slabs of 64; or it lies by columns, in one slab.
constexpr int ROWS = 128, DEPTH = 64;

constexpr int SLOT = 16 * 64;  // numbers of a warp's part of a slab of c: its 16 rows of each 64 of a tile

// The numbers of a stage: a tile of a, and one of b behind it.
template <int COLUMNS>
constexpr int STAGE = (ROWS + COLUMNS) * DEPTH;

// ---- the product of a warpgroup

// d (64, 8 N) = a (64, 16) b (16, 8 N), plus d if `add`; N is 16, 24 or 32. Both operands lie in shared memory, b by
// rows or column by column. As wgmma of hopper.cuh otherwise.
template <bool BY_ROWS, int N>
__device__ inline void start_product(float (&d)[N][4], Descriptor a, Descriptor b, bool add) {
#ifdef LLMC_CPU
    unsigned mine[4];
    fragment(mine, a);
    emulate_wgmma<BY_ROWS>(d, mine, b, add);
#else
    if constexpr (N == 16)
        asm volatile("{.reg .pred add; setp.ne.b32 add, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
            NUMBERS_OF_16 ", %64, %65, add, 1, 1, 0, %67;}"
            : EIGHT_FOURS(d, 0), EIGHT_FOURS(d, 8) : "l"(a), "l"(b), "r"((int)add), "n"((int)BY_ROWS));
    else if constexpr (N == 24)
        asm volatile("{.reg .pred add; setp.ne.b32 add, %98, 0; wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
            NUMBERS_OF_24 ", %96, %97, add, 1, 1, 0, %99;}"
            : EIGHT_FOURS(d, 0), EIGHT_FOURS(d, 8), EIGHT_FOURS(d, 16)
            : "l"(a), "l"(b), "r"((int)add), "n"((int)BY_ROWS));
    else
        asm volatile("{.reg .pred add; setp.ne.b32 add, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
            NUMBERS_OF_32 ", %128, %129, add, 1, 1, 0, %131;}"
            : EIGHT_FOURS(d, 0), EIGHT_FOURS(d, 8), EIGHT_FOURS(d, 16), EIGHT_FOURS(d, 24)
            : "l"(a), "l"(b), "r"((int)add), "n"((int)BY_ROWS));
#endif
}

// Starts sum = a b, plus sum if `add`, for the warpgroup's rows of a stage: one or two HALVES of 64, from first_row on.
template <bool BY_ROWS, int HALVES, int N>
__device__ inline void start_products(float (&sum)[HALVES][N][4], const bf16* stage, int first_row, bool add) {
    const unsigned address = shared_address(stage) & 0xffffff;  // above it is the block's number in its cluster
    const Descriptor a = descriptor(address + first_row * 128, 0);
    const Descriptor b = descriptor(address + ROWS * 128, DEPTH * 128);
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        #pragma unroll
        for (int h = 0; h < HALVES; h++)
            start_product<BY_ROWS>(sum[h], further(a, h * 64 * 64 + k), further(b, BY_ROWS ? k * 64 : k), add || k > 0);
    }
    wgmma_commit();
}

// ---- the producer's copies

// How b lies in memory: by rows, or by columns. Or b is two matrices by columns, one after the other, and a tile has
// half of its columns from each.
enum Layout { BY_ROWS, BY_COLUMNS, TWO_BY_COLUMNS };

// One thread asks for a stage, at number k0 of K: `full` then tells when all bytes are there. In a pair of blocks,
// which have the same columns, each asks for every other slab of b, for both. Of three slabs it asks for one and two in
// turn.
template <int COLUMNS, int BLOCKS, Layout LAYOUT = BY_ROWS>
__device__ inline void copy_tiles(bf16* stage, const TensorMap& a, const TensorMap& b, int row0, int column0, int k0,
                                  Barrier& full) {
    barrier_expect(full, 2 * STAGE<COLUMNS>);
    copy_box<ROWS>(stage, a, k0, row0, 0, full);
    if constexpr (LAYOUT == BY_ROWS) {
        #pragma unroll
        for (int i = 0; i < COLUMNS / 64; i++) {
            bf16* const slab = stage + (ROWS + 64 * i) * DEPTH;
            if (BLOCKS == 1) copy_box<DEPTH>(slab, b, column0 + 64 * i, k0, 0, full);
            else if ((i + k0 / DEPTH) % BLOCKS == blockIdx.x % BLOCKS)
                copy_box_to_pair<DEPTH>(slab, b, column0 + 64 * i, k0, full);
        }
    } else {
        static_assert(BLOCKS == 1);
        constexpr int HALF = COLUMNS / 2;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool two = LAYOUT == TWO_BY_COLUMNS;
            copy_box<HALF>(stage + (ROWS + i * HALF) * DEPTH, b, k0, two ? column0 : column0 + i * HALF, two ? i : 0,
                           full);
        }
    }
}

// ---- which tiles a block makes

// Tile number i of c, ROWS * BLOCKS x COLUMNS elements. All tiles of GROUP rows come before the next rows, column by
// column. So the tiles at work make a square of c, about, and share rows of a and columns of b in L2.
template <int COLUMNS, int BLOCKS>
struct Work {
    static constexpr int GROUP = 16 / BLOCKS;
    int row0, column0;
    __device__ Work(int i, int M, int N) {
        const int down = ceil_div(M, ROWS * BLOCKS), across = ceil_div(N, COLUMNS);
        const int first = i / (GROUP * across) * GROUP, together = min(GROUP, down - first), j = i - first * across;
        row0 = ((first + j % together) * BLOCKS + blockIdx.x % BLOCKS) * ROWS;
        column0 = j / together * COLUMNS;
    }
    static __device__ int tiles(int M, int N) { return ceil_div(M, ROWS * BLOCKS) * ceil_div(N, COLUMNS); }
};

// ---- a ring, and its consumers

// STAGES stages on their way from a producer to consumers. Each has two mbarriers: `full` waits for the bytes, and
// `empty` for the warps that read them, WARPS in each of BLOCKS blocks.
template <int COLUMNS, int STAGES, int BLOCKS = 1, int WARPS = 8, Layout LAYOUT = BY_ROWS>
struct Ring {
    static constexpr bool B_BY_ROWS = LAYOUT == BY_ROWS;
    using Tiles = Work<LAYOUT == TWO_BY_COLUMNS ? COLUMNS / 2 : COLUMNS, BLOCKS>;
    bf16* tiles;
    Barrier *full, *empty;

    __device__ Ring(bf16* tiles, void* barriers)
        : tiles(tiles), full(static_cast<Barrier*>(barriers)), empty(full + STAGES) {}
    __device__ void init() const {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full[stage], 1);
            barrier_init(empty[stage], WARPS * BLOCKS);
        }
        barriers_ready();
    }
    __device__ bf16* at(int stage) const { return tiles + stage * STAGE<COLUMNS>; }
    __device__ void release(int stage) const {
        if (BLOCKS > 1) warp_arrive_at_pair(empty[stage]); else warp_arrive(empty[stage]);
    }
};

// Adds up the products of all K, as the tiles come. While one group of products runs, the next is started behind it. A
// stage is released when the group that reads it has ended. Calls started() when all products have been started.
template <int HALVES, int N, class R, int STAGES, class Started>
__device__ inline void consume(float (&sum)[HALVES][N][4], const R& ring, PipelineState<STAGES>& at, int first_row,
                               int K, Started started) {
    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        barrier_wait(ring.full[at.stage], at.parity);
        start_products<R::B_BY_ROWS>(sum, ring.at(at.stage), first_row, k0 > 0);
        wgmma_wait<1>();
        if (k0 > 0) ring.release(at.before());
        at.advance();
    }
    started();
    wgmma_wait<0>();
    #pragma unroll
    for (int h = 0; h < HALVES; h++) fence_operand(sum[h]);
    ring.release(at.before());
}

// The blocks of the grid, or its clusters, take the tiles of c in turn. The producer copies for one after the other.
template <int COLUMNS, int STAGES, int BLOCKS, int WARPS, Layout LAYOUT>
__device__ inline void produce(const Ring<COLUMNS, STAGES, BLOCKS, WARPS, LAYOUT>& ring, const TensorMap& a,
                               const TensorMap& b, int M, int N, int K) {
    PipelineState<STAGES> at;
    using Tiles = typename Ring<COLUMNS, STAGES, BLOCKS, WARPS, LAYOUT>::Tiles;
    const int all = Tiles::tiles(M, N);
    for (int i = blockIdx.x / BLOCKS; i < all; i += gridDim.x / BLOCKS) {
        const Tiles work(i, M, N);
        for (int k0 = 0; k0 < K; k0 += DEPTH, at.advance()) {
            barrier_wait(ring.empty[at.stage], at.parity ^ 1);
            copy_tiles<COLUMNS, BLOCKS, LAYOUT>(ring.at(at.stage), a, b, work.row0, work.column0, k0,
                                                ring.full[at.stage]);
        }
    }
}

// ---- ping-pong

// The two consumers take the block's tiles, 128 x 192 elements, by turns. One starts its products when the other has
// started all of its own. So the tensor cores have one tile at a time, and do not pause between two.
//
// `epilogue` says what is done with a tile's sums. Each consumer warp has its own copy of it. Before the first tile
// place(buffer, barriers) gives it the warp's shared memory, BUFFER numbers and BARRIERS mbarriers, which it may
// initialise. For each tile begin(row0, column0) is called before the products, and finish(sum, row0, column0) after.
template <int STAGES, int BLOCKS, Layout LAYOUT, class Epilogue>
__device__ inline void alternate(Epilogue epilogue, const TensorMap& a, const TensorMap& b, int M, int N, int K) {
    constexpr int COLUMNS = 192;
    SHARED_TILES(tiles);
    bf16* const buffers = tiles + STAGES * STAGE<COLUMNS>;
    const Ring<COLUMNS, STAGES, BLOCKS, 4, LAYOUT> ring(tiles, buffers + 8 * Epilogue::BUFFER);
    using Tiles = typename Ring<COLUMNS, STAGES, BLOCKS, 4, LAYOUT>::Tiles;
    Barrier* const may_start = ring.empty + STAGES;  // one for each consumer; the other's four warps arrive
    const int warpgroup = warpgroup_of(), warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        barrier_init(may_start[0], 4);
        barrier_init(may_start[1], 4);
        ring.init();
    }
    if (warpgroup < 2) epilogue.place(buffers + warp * Epilogue::BUFFER, may_start + 2 + warp * Epilogue::BARRIERS);
    if (BLOCKS > 1) cluster_wait(); else __syncthreads();
    if (warpgroup == 2) {
        give_registers<2, 232>();
        if (threadIdx.x == 256) produce(ring, a, b, M, N, K);
    } else {
        take_registers<232>();
        PipelineState<STAGES> at;
        const int all = Tiles::tiles(M, N);
        for (int i = blockIdx.x / BLOCKS, turn = 0; i < all; i += gridDim.x / BLOCKS, turn++) {
            if (turn % 2 != warpgroup) {
                at.skip(ceil_div(K, DEPTH));
                continue;
            }
            const Tiles work(i, M, N);
            float sum[2][COLUMNS / 8][4] = {};  // else ptxas keeps all registers of the tile before, and spills others
            epilogue.begin(work.row0, work.column0);
            barrier_wait(may_start[warpgroup], (turn + 1) / 2 % 2 ^ 1);  // turn 0 waits for nobody
            consume(sum, ring, at, 0, K, [&] { warp_arrive(may_start[1 - warpgroup]); });
            epilogue.finish(sum, work.row0, work.column0);
        }
    }
    if (BLOCKS > 1) cluster_wait();  // neither block may end while the other may write to it
    if (threadIdx.x % 32 == 0) stores_read<0>();
}

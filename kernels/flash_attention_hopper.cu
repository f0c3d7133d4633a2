// Causal attention as in flash_attention.cu, in bf16, with Hopper's own instructions: for compute capability 9.0.
//
// A warp issues mma.sync, after it has loaded the operands into registers. A warpgroup issues wgmma: four warps, which
// have 64 rows together. This instruction reads a whole tile of keys or of values from shared memory by itself. The
// warps go on, and wait for the result later. The tensor memory accelerator (TMA) copies tiles to shared memory by
// itself, too: one thread asks for a tile, and names a tensor map, which describes the array, and an mbarrier, which
// tells when the tile is there. So a block needs no __syncthreads in its loop, and its warpgroups have roles.
//
//   The producer, the last warpgroup: one thread waits until a stage is empty, and asks for the next tile. It keeps a
//   few registers, and leaves the others to the warpgroups that compute. In backward_key a second warp loads lse and D.
//   The others compute, each for 64 rows of the block. Each waits until a stage is full, starts its products, and says
//   when it has read the stage. No warpgroup waits for another one: while one computes exponentials, the tensor cores
//   work on the products of the others.
//
// Between them lie two rings of STAGES tiles in shared memory: of keys and of values (in backward_key: of queries and
// of dout). Each tile has two mbarriers, "full" and "empty".
//
// A tile's time in forward, for one warpgroup:
//
//   tensor cores    scores of tile j | values of tile j + 1 added to the sum |               | scores of tile j - 1 ...
//   warps           wait             | softmax of tile j: exponentials, p rounded to bf16    | wait ...
//   the keys' stage                  | empty: the producer may copy the keys of tile j - STAGES
//   the values' stage                                                        | empty
//
// Backward has the two kernels of flash_attention.cu, with the same products. A block's own rows are operand a of the
// scores: queries and dout, or keys and values. ds or p, computed from the scores, are operand a of the sums, from
// registers, as p is in forward. backward_query starts the scores, the sum of the tile before, and dout v^T. So does
// backward_key with the scores, dp and the sum for dk of the tile before; the sum for dv runs beside ds, and on beside
// the next scores. For heads of 128 it has no registers for s and dp while these run: there dp follows later.
//
// The assembler puts each wait as early as it may, before exponentials that could run beside the product. In forward we
// make it look as if the wait needed their results. In backward that is slower: other warpgroups fill the tensor cores.
#define ARCHITECTURE 90a  // only GPUs of compute capability 9.0 have wgmma
#define WARP_SIZE 32
#define floatX bf16       // in runs of any precision
#include "flash_attention.cuh"
#include "hopper.cuh"

constexpr int TILE_ROWS = 64;  // of the tiles that a block streams

// ---- tiles

// Starts to copy a tile of ROWS rows and HS columns.
template <int HS, int ROWS>
__device__ inline void copy_tile(bf16* to, const TensorMap& map, int column, int row, int sequence, Barrier& barrier) {
    #pragma unroll
    for (int i = 0; i < HS / 64 * ROWS; i += TILE_ROWS)
        copy_box<TILE_ROWS>(to + i * 64, map, column + i / ROWS * 64, row + i % ROWS, sequence, barrier);
}

// The query head that a block works on. In a sequence, qkv and its gradient have rows of `stride` numbers. There the
// head's queries, keys and values begin at these columns; in out and dout, which have C columns, at query_column, too.
template <int HS>
struct Head {
    int C, stride, sequence, query_column, key_column, value_column;

    __device__ Head(int NH, int NKV, int head)
        : C(NH * HS), stride(C + 2 * NKV * HS), sequence(head / NH), query_column(head % NH * HS),
          key_column(C + head % NH / (NH / NKV) * HS), value_column(key_column + NKV * HS) {}

    // Where the head's rows begin in an array (B, T, NH, HS), and where the sequence begins in qkv.
    __device__ long long rows(int T) const { return (long long)sequence * T * C + query_column; }
    __device__ long long position(int T) const { return (long long)sequence * T * stride; }
};

// Tiles of two arrays on their way from the producer to the warps that compute: 0 keys and 1 values, or 0 queries and 1
// dout. Each array has a ring of STAGES tiles. A tile's barrier `full` waits for the `writers` of array 0 (for array 1
// that is the TMA alone), and `empty` for the `readers`, which are warps. One more barrier, `arrived`, is for the
// block's own rows.
template <int HS, int STAGES>
struct Stream {
    static_assert(STAGES >= 2, "one is read, one comes");
    static constexpr int TILE = TILE_ROWS * HS;
    bf16* tiles;
    Barrier* barriers;

    __device__ Stream(bf16* tiles, void* barriers) : tiles(tiles), barriers(static_cast<Barrier*>(barriers)) {}
    __device__ Barrier& arrived() const { return barriers[4 * STAGES]; }
    __device__ Barrier& full(int array, int stage) const { return barriers[(2 * array) * STAGES + stage]; }
    __device__ Barrier& empty(int array, int stage) const { return barriers[(2 * array + 1) * STAGES + stage]; }
    __device__ void init(int writers, int readers) const {  // all threads call it
        if (threadIdx.x == 0) {
            barrier_init(arrived(), 1);
            for (int stage = 0; stage < STAGES; stage++) {
                barrier_init(full(0, stage), writers);
                barrier_init(full(1, stage), 1);
                barrier_init(empty(0, stage), readers);
                barrier_init(empty(1, stage), readers);
            }
            barriers_ready();
        }
        __syncthreads();
    }
    __device__ void copy(int array, const PipelineState<STAGES>& at, const TensorMap& map, int column, int row,
                         int sequence) const {
        barrier_wait(empty(array, at.stage), at.parity ^ 1);
        barrier_expect(full(array, at.stage), TILE * 2);
        bf16* const to = tiles + (2 * at.stage + array) * TILE;
        copy_tile<HS, TILE_ROWS>(to, map, column, row, sequence, full(array, at.stage));
    }
    __device__ void wait(int array, const PipelineState<STAGES>& at) const {
        barrier_wait(full(array, at.stage), at.parity);
    }
    __device__ void wait_before(int array, const PipelineState<STAGES>& at) const {  // for the tile before
        barrier_wait(full(array, at.before()), at.parity ^ (at.stage == 0));
    }
    __device__ void release(int array, int stage) const { warp_arrive(empty(array, stage)); }
    __device__ void skip(PipelineState<STAGES>& at) const {
        for (int array = 0; array < 2; array++) {
            wait(array, at);
            release(array, at.stage);
        }
        at.advance();
    }
    __device__ Descriptor tile(int array, int stage) const {
        return further(descriptor(tiles, TILE_ROWS * 128), (2 * stage + array) * TILE);
    }
};

// What the producer of a block of queries does: it copies the tiles of keys and values, the last one first.
template <int HS, int STAGES>
__device__ inline void copy_keys_and_values(const Stream<HS, STAGES>& stream, const TensorMap& qkv,
                                            const Head<HS>& head, int last) {
    PipelineState<STAGES> at;
    for (int tile = last; tile >= 0; tile--, at.advance()) {
        stream.copy(0, at, qkv, head.key_column, tile * TILE_ROWS, head.sequence);
        stream.copy(1, at, qkv, head.value_column, tile * TILE_ROWS, head.sequence);
    }
}

// What a block works on: one of `heads` heads, and one of its tiles. All tiles of `group` heads come before the next
// heads: what their blocks stream stays in L2.
struct Work {
    int head, tile;
    __device__ Work(int tiles, int heads, int group) {
        const int first = blockIdx.x / (group * tiles) * group, at = blockIdx.x % (group * tiles);
        const int together = min(group, heads - first);
        head = first + at % together;
        tile = at / together;
    }
};

// ---- products of tiles

// Returns x, but the compiler cannot see that. So it computes what depends on the result again, and does not keep it in
// registers through a loop.
__device__ inline int opaque(int x) {
#ifndef LLMC_CPU
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// A bool as a type: so a generic lambda is compiled for each of its values.
template <bool X>
struct Is {
    static constexpr bool value = X;
};

// Starts s = a b^T, a sum over HS, or s += a b^T if `add`. a: a warpgroup's 64 rows of a tile of ROWS rows. b: a tile
// of N * 8 rows. Each product takes 16 columns, which begin within the 128 bytes of a row.
template <int HS, int ROWS, int N>
__device__ inline void start_scores(float (&s)[N][4], Descriptor a, Descriptor b, bool add = false) {
    #pragma unroll
    for (int i = 0; i < HS / 16; i++) {
        const int at = i % 4 * 16;
        wgmma(s, further(a, i / 4 * ROWS * 64 + at), further(b, i / 4 * N * 8 * 64 + at), add || i > 0);
    }
}

// Starts sum = p b, over the K * 16 rows of tile b; or sum += p b if `add`.
template <int K, int N>
__device__ inline void start_sum(float (&sum)[N][4], const unsigned (&p)[K][4], Descriptor b, bool add) {
    #pragma unroll
    for (int i = 0; i < K; i++) wgmma(sum, p[i], further(b, i * 16 * 64), add || i > 0);
}

// Packs results of start_scores into words. Two neighbouring results become one operand p of start_sum.
template <int K, int N>
__device__ inline void pack(unsigned (&p)[K][4], const float (&s)[N][4]) {
    static_assert(N == 2 * K);
    #pragma unroll
    for (int i = 0; i < K * 4; i++) {
        const float (&x)[4] = s[i / 4 * 2 + i % 4 / 2];
        p[i / 4][i % 4] = to_bf16(x[i % 2 * 2], x[i % 2 * 2 + 1]);
    }
}

// The warp's 16 rows of an array, from row0 on, = scale * sum, but no row from T on. scale is for rows g and g + 8. The
// warp collects the numbers in its rows of a tile that no product reads any more, and stores them by 16 bytes.
template <int HS, int ROWS>
__device__ inline void store_rows(bf16* rows, bf16* tile, const float (&sum)[HS / 8][4], const float (&scale)[2],
                                  int row0, int T, int stride) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = threadIdx.x / 32 * 16;
    #pragma unroll
    for (int n = 0; n < HS / 8; n++) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            *reinterpret_cast<unsigned*>(tile + swizzled_offset<ROWS>(first + h * 8 + g, 8 * n) + 2 * t) =
                to_bf16(sum[n][2 * h] * scale[h], sum[n][2 * h + 1] * scale[h]);
        }
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < HS / 16; i++) {
        const int down = (32 * i + lane) / (HS / 8), column = lane % (HS / 8) * 8;
        if (row0 + down < T)
            *reinterpret_cast<uint4*>(rows + (long long)(row0 + down) * stride + column) =
                *reinterpret_cast<const uint4*>(tile + swizzled_offset<ROWS>(first + down, column));
    }
}

// The same in fp32, two neighbours at a time.
template <int HS>
__device__ inline void store_floats(float* rows, const float (&sum)[HS / 8][4], float scale, int row0, int T,
                                    int stride) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = row0 + h * 8 + g;
        #pragma unroll
        for (int n = 0; n < (row < T ? HS / 8 : 0); n++) {
            *reinterpret_cast<float2*>(rows + (long long)row * stride + 8 * n + 2 * t) =
                make_float2(sum[n][2 * h] * scale, sum[n][2 * h + 1] * scale);
        }
    }
}

// ---- forward

// Turns the scores of a tile into p = 2^(s log2(e) / sqrt(HS) - reference), and adds them to sum. The reference of a
// row keeps its sums in range. The tile on the diagonal comes first and sets it to the row's largest exponent. It moves
// only if an exponent is above it by more than 8. Then the function returns true, and the caller must multiply the sums
// of values so far by `factor`.
template <int HS, bool DIAGONAL, int N>
__device__ inline bool softmax(float (&s)[N][4], float (&sum)[2], float (&reference)[2], float (&factor)[2],
                               int ahead) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2 + ahead;
    float top[2] = {-INFINITY, -INFINITY};
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            if (DIAGONAL && 8 * n + column + i % 2 > row + i / 2 * 8) s[n][i] = -INFINITY;
            top[i / 2] = fmaxf(top[i / 2], s[n][i]);
        }
    }
    top[0] = top[0] * to_exponent<HS>() - reference[0];
    top[1] = top[1] * to_exponent<HS>() - reference[1];
    const bool moved = DIAGONAL || __any_sync(ALL_LANES, fmaxf(top[0], top[1]) > 8.0f);
    if (moved) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            float rise = fmaxf(top[h], __shfl_xor_sync(ALL_LANES, top[h], 1));  // the four lanes of a row
            rise = fmaxf(rise, __shfl_xor_sync(ALL_LANES, rise, 2));
            if (!DIAGONAL && !(rise > 8.0f)) rise = 0.0f;  // so a row's roundings depend on this row alone
            reference[h] += rise;
            factor[h] = exp2_approx(-rise);
            if (!DIAGONAL) sum[h] *= factor[h];
        }
    }
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            s[n][i] = exp2_approx(s[n][i] * to_exponent<HS>() - reference[i / 2]);
            sum[i / 2] += s[n][i];
        }
    }
    return moved && !DIAGONAL;
}

// Shared memory: the queries, tiles of keys and values, and the barriers.
template <int HS, int WARPGROUPS, int STAGES, int REGISTERS>
__device__ inline void forward(bf16* out, float* lse, const TensorMap& qkv, int T, int NH, int NKV, int heads,
                               int group) {
    constexpr int QUERIES = 64 * WARPGROUPS, KEYS = TILE_ROWS;
    SHARED_TILES(shared);
    bf16 *const queries = shared, *const tiles = queries + QUERIES * HS;
    const Stream<HS, STAGES> stream(tiles, tiles + 2 * STAGES * KEYS * HS);
    const Work work(ceil_div(T, QUERIES), heads, group);
    const Head<HS> head(NH, NKV, work.head);
    const int block0 = (ceil_div(T, QUERIES) - 1 - work.tile) * QUERIES;  // most work comes first
    const int last = (min(block0 + QUERIES, T) - 1) / KEYS, warpgroup = warpgroup_of();

    stream.init(1, 4 * WARPGROUPS);
    if (warpgroup == WARPGROUPS) {
        give_registers<WARPGROUPS, REGISTERS>();
        if (threadIdx.x == 128 * WARPGROUPS) {
            barrier_expect(stream.arrived(), QUERIES * HS * 2);
            copy_tile<HS, QUERIES>(queries, qkv, head.query_column, block0, head.sequence, stream.arrived());
            copy_keys_and_values(stream, qkv, head, last);
        }
        return;
    }
    take_registers<REGISTERS>();

    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
    const int row0 = block0 + 64 * warpgroup, diagonal = row0 < T ? row0 / KEYS : -1;
    float acc[HS / 8][4], s[KEYS / 8][4], sum[2] = {}, reference[2] = {}, factor[2] = {};
    unsigned p[KEYS / 16][4];
    const Descriptor q = descriptor(queries + 64 * warpgroup * 64, 0);
    PipelineState<STAGES> at;
    int tile = last;

    barrier_wait(stream.arrived(), 0);
    for (; tile > diagonal; tile--) stream.skip(at);
    if (diagonal < 0) return;

    stream.wait(0, at);
    wgmma_fence();
    start_scores<HS, QUERIES>(s, q, stream.tile(0, at.stage));
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(s);
    stream.release(0, at.stage);
    softmax<HS, true>(s, sum, reference, factor, tile * KEYS - row0);
    pack(p, s);
    at.advance();
    for (tile--; tile >= 0; tile--) {
        stream.wait(0, at);
        wgmma_fence();
        start_scores<HS, QUERIES>(s, q, stream.tile(0, at.stage));
        wgmma_commit();
        stream.wait_before(1, at);
        start_sum(acc, p, stream.tile(1, at.before()), tile + 1 < diagonal);
        wgmma_commit();
        wgmma_wait<1>();
        fence_operand(s);
        stream.release(0, at.stage);
        const bool moved = softmax<HS, false>(s, sum, reference, factor, 0);
        // No sum is negative. The compiler does not know: so the wait comes after all exponentials.
        if (moved || fminf(sum[0], sum[1]) < 0.0f) {
            wgmma_wait<0>();
            fence_operand(acc);
            #pragma unroll
            for (int i = 0; i < HS / 8 * 4; i++) acc[i / 4][i % 4] *= factor[i % 4 / 2];
        }
        wgmma_wait<0>();
        fence_operand(acc);
        stream.release(1, at.before());
        pack(p, s);
        at.advance();
    }
    stream.wait_before(1, at);
    wgmma_fence();
    start_sum(acc, p, stream.tile(1, at.before()), diagonal > 0);
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(acc);

    float inverse[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 1);
        sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 2);
        inverse[h] = 1.0f / sum[h];
        const int row = block0 + warp * 16 + h * 8 + g;
        if (t == 0 && row < T) lse[(long long)work.head * T + row] = LN2 * reference[h] + logf(sum[h]);
    }
    store_rows<HS, QUERIES>(out + head.rows(T), queries, acc, inverse, block0 + warp * 16, T, head.C);
}

// ---- backward

// s has the scores of a warpgroup's 64 queries with a tile of keys. It becomes p.
template <int HS, bool DIAGONAL, int N>
__device__ inline void query_probabilities(float (&s)[N][4], const float (&log2_sum)[2], int ahead) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2 + ahead;
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool hidden = DIAGONAL && 8 * n + column + i % 2 > row + i / 2 * 8;
            const float x = exp2_approx(s[n][i] * to_exponent<HS>() - log2_sum[i / 2]);
            s[n][i] = hidden ? 0.0f : x;
        }
    }
}

// p becomes ds = p (dp - D).
template <int N>
__device__ inline void query_gradients(float (&p)[N][4], const float (&dp)[N][4], const float (&D)[2]) {
    #pragma unroll
    for (int i = 0; i < N * 4; i++) p[i / 4][i % 4] *= dp[i / 4][i % 4] - D[i % 4 / 2];
}

// s has the scores of a warpgroup's 64 keys with a tile of queries, transposed. It becomes p. log2_sums:
// lse * log2(e) of the tile's queries.
template <int HS, bool DIAGONAL, int N>
__device__ inline void key_probabilities(float (&s)[N][4], const float* log2_sums, int ahead) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 two = *reinterpret_cast<const float2*>(log2_sums + 8 * n + column);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool hidden = DIAGONAL && ahead + 8 * n + column + i % 2 < row + i / 2 * 8;
            const float x = exp2_approx(s[n][i] * to_exponent<HS>() - (i % 2 == 0 ? two.x : two.y));
            s[n][i] = hidden ? 0.0f : x;
        }
    }
}

// Sets each column of x, the sums of a warpgroup's 64 rows, to a number.
template <int N>
__device__ inline void broadcast(float (&x)[N][4], const float* numbers) {
    #pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 two = *reinterpret_cast<const float2*>(numbers + 8 * n + threadIdx.x % 4 * 2);
        #pragma unroll
        for (int i = 0; i < 4; i++) x[n][i] = i % 2 == 0 ? two.x : two.y;
    }
    fence_operand(x);
}

// D = rowsum(dout * out) for rows g and g + 8 of the warp's 16, from row0 on; NaN if lse is not finite. Each lane loads
// 16 bytes. The lanes of a row add up their products by shuffles.
template <int HS>
__device__ inline void find_D(float (&D)[2], float* dsum, const bf16* dout, const bf16* out, const float* lse, int row0,
                              int T, int stride) {
    constexpr int LANES = HS / 8, ROWS = 32 / LANES;  // of a row; rows at a time
    const int lane = threadIdx.x % 32, g = lane / 4, column = lane % LANES * 8;
    #pragma unroll
    for (int i = 0; i < 16 / ROWS; i++) {
        const int row = row0 + i * ROWS + lane / LANES;
        float sum = 0.0f;
        if (row < T) {
            const uint4 x = *reinterpret_cast<const uint4*>(dout + (long long)row * stride + column);
            const uint4 y = *reinterpret_cast<const uint4*>(out + (long long)row * stride + column);
            sum = first_of(x.x) * first_of(y.x) + second_of(x.x) * second_of(y.x);
            sum += first_of(x.y) * first_of(y.y) + second_of(x.y) * second_of(y.y);
            sum += first_of(x.z) * first_of(y.z) + second_of(x.z) * second_of(y.z);
            sum += first_of(x.w) * first_of(y.w) + second_of(x.w) * second_of(y.w);
        }
        #pragma unroll
        for (int offset = 1; offset < LANES; offset *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
        if (row < T) sum = fmaf(0.0f, lse[row], sum);
        if (row < T && column == 0) dsum[row] = sum;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float found = __shfl_sync(ALL_LANES, sum, (h * 8 + g) % ROWS * LANES);
            if ((h * 8 + g) / ROWS == i) D[h] = found;
        }
    }
}

// Sets dq, and D for the kernel that follows. Shared memory: the queries, their dout, tiles of keys and values, and the
// barriers.
template <int HS, int WARPGROUPS, int STAGES, int REGISTERS>
__device__ inline void backward_query(bf16* dqkv, float* dsum, const TensorMap& dout_map, const bf16* dout,
                                      const bf16* out, const float* lse, const TensorMap& qkv, int T, int NH, int NKV,
                                      int heads, int group) {
    constexpr int QUERIES = 64 * WARPGROUPS, KEYS = TILE_ROWS;
    SHARED_TILES(shared);
    bf16 *const queries = shared, *const douts = queries + QUERIES * HS, *const tiles = douts + QUERIES * HS;
    const Stream<HS, STAGES> stream(tiles, tiles + 2 * STAGES * KEYS * HS);
    const Work work(ceil_div(T, QUERIES), heads, group);
    const Head<HS> head(NH, NKV, work.head);
    const int block0 = (ceil_div(T, QUERIES) - 1 - work.tile) * QUERIES;  // most work comes first
    const int last = (min(block0 + QUERIES, T) - 1) / KEYS, warpgroup = warpgroup_of();

    stream.init(1, 4 * WARPGROUPS);
    if (warpgroup == WARPGROUPS) {
        give_registers<WARPGROUPS, REGISTERS>();
        if (threadIdx.x == 128 * WARPGROUPS) {
            barrier_expect(stream.arrived(), 2 * QUERIES * HS * 2);
            copy_tile<HS, QUERIES>(queries, qkv, head.query_column, block0, head.sequence, stream.arrived());
            copy_tile<HS, QUERIES>(douts, dout_map, head.query_column, block0, head.sequence, stream.arrived());
            copy_keys_and_values(stream, qkv, head, last);
        }
        return;
    }
    take_registers<REGISTERS>();

    const int warp = threadIdx.x / 32, row0 = block0 + 64 * warpgroup, diagonal = row0 < T ? row0 / KEYS : -1;
    float dq[HS / 8][4] = {}, s[KEYS / 8][4], dp[KEYS / 8][4], log2_sum[2], D[2];
    unsigned ds[KEYS / 16][4];
    const Descriptor q = descriptor(queries + 64 * warpgroup * 64, 0), d = further(q, QUERIES * HS);

    out += head.rows(T);
    dout += head.rows(T);
    lse += (long long)work.head * T;
    find_D<HS>(D, dsum + (long long)work.head * T, dout, out, lse, block0 + warp * 16, T, head.C);
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = block0 + warp * 16 + h * 8 + threadIdx.x % 32 / 4;
        log2_sum[h] = row < T ? LOG2E * lse[row] : 0.0f;
    }
    barrier_wait(stream.arrived(), 0);
    PipelineState<STAGES> at;
    int tile = last;
    for (; tile > diagonal; tile--) stream.skip(at);
    if (diagonal < 0) return;

    const auto attend = [&](auto masked) {
        stream.wait(0, at);
        wgmma_fence();
        start_scores<HS, QUERIES>(s, q, stream.tile(0, at.stage));
        wgmma_commit();
        if (!masked.value) {
            start_sum(dq, ds, stream.tile(0, at.before()), true);
            wgmma_commit();
        }
        stream.wait(1, at);
        start_scores<HS, QUERIES>(dp, d, stream.tile(1, at.stage));
        wgmma_commit();
        wgmma_wait<masked.value ? 1 : 2>();
        fence_operand(s);
        query_probabilities<HS, masked.value>(s, log2_sum, tile * KEYS - row0);
        wgmma_wait<0>();
        fence_operand(dq);
        fence_operand(dp);
        if (!masked.value) stream.release(0, at.before());
        stream.release(1, at.stage);
        query_gradients(s, dp, D);
        pack(ds, s);
        at.advance();
        tile--;
    };
    attend(Is<true>());
    while (tile >= 0) attend(Is<false>());
    wgmma_fence();
    start_sum(dq, ds, stream.tile(0, at.before()), true);
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(dq);

    const float scale[2] = {rsqrtf((float)HS), rsqrtf((float)HS)};
    bf16* const gradient = dqkv + head.position(T) + head.query_column;
    store_rows<HS, QUERIES>(gradient, queries, dq, scale, block0 + warp * 16, T, head.stride);
}

// What the first thread of backward_key's producer does: it copies the tiles of queries and dout from `tile` on, below
// `end`, of one query head after the other.
template <int HS, int STAGES>
__device__ inline void copy_queries_and_douts(const Stream<HS, STAGES>& stream, PipelineState<STAGES>& at,
                                              const TensorMap& qkv, const TensorMap& dout, const Head<HS>& head,
                                              int query_heads, int& tile, int end) {
    const int first = tile;
    int column = head.query_column;
    #pragma unroll 1
    do {
        stream.copy(0, at, qkv, column, tile * TILE_ROWS, head.sequence);
        stream.copy(1, at, dout, column, tile * TILE_ROWS, head.sequence);
        at.advance();
        if (++tile == end) tile = first, column += HS, query_heads--;
    } while (query_heads > 0);
}

// Reads D from dsum. Sets dk and dv of dqkv: a block takes a head of keys, and its query heads one after the other. Or,
// if dkv_heads is not null, a block takes a query head, and sets its share in dkv_heads. Then there are more blocks.
// Shared memory: the keys, the values, tiles of queries and of dout, lse * log2(e) and -D of each tile, and barriers.
// EARLY: dp is started before the exponentials. GROUPS: query heads share keys. (With it, heads that share none take an
// H100 10% longer for both kernels of backward: 12 heads of 64, B 16, T 1024.)
template <int HS, int WARPGROUPS, int STAGES, int REGISTERS, bool EARLY, bool GROUPS>
__device__ inline void backward_key(bf16* dqkv, float* dkv_heads, const float* dsum, const TensorMap& dout,
                                    const float* lse, const TensorMap& qkv, int T, int NH, int NKV, int heads,
                                    int group) {
    constexpr int KEYS = 64 * WARPGROUPS, QUERIES = TILE_ROWS;
    static_assert(!GROUPS || STAGES > WARPGROUPS, "a warpgroup holds a tile while it skips others");
    SHARED_TILES(shared);
    bf16 *const keys = shared, *const values = keys + KEYS * HS, *const tiles = values + KEYS * HS;
    float* const terms = reinterpret_cast<float*>(tiles + 2 * STAGES * QUERIES * HS);
    const Stream<HS, STAGES> stream(tiles, terms + 2 * STAGES * QUERIES);
    const Work work(ceil_div(T, KEYS), heads, group);
    const int query_heads = !GROUPS || dkv_heads != nullptr ? 1 : NH / NKV;
    const Head<HS> head(NH, NKV, work.head * query_heads);
    const int block0 = work.tile * KEYS, first = block0 / QUERIES, end = ceil_div(T, QUERIES);
    const int warpgroup = warpgroup_of();
    PipelineState<STAGES> at;
    int tile = first, left = query_heads;

    stream.init(2, 4 * WARPGROUPS);  // queries are full when they, lse and D have come
    if (warpgroup == WARPGROUPS) {
        give_registers<WARPGROUPS, REGISTERS>();
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        if (warp == 0 && lane == 0) {
            barrier_expect(stream.arrived(), 2 * KEYS * HS * 2);
            copy_tile<HS, KEYS>(keys, qkv, head.key_column, block0, head.sequence, stream.arrived());
            copy_tile<HS, KEYS>(values, qkv, head.value_column, block0, head.sequence, stream.arrived());
            copy_queries_and_douts(stream, at, qkv, dout, head, query_heads, tile, end);
        } else if (warp == 1) {
            lse += (long long)work.head * query_heads * T;
            dsum += (long long)work.head * query_heads * T;
            float x[2][2];
            // From row T on queries, dout, lse and D are zeros, and add zeros.
            const auto load = [&]() {
                #pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int row = tile * QUERIES + i * 32 + lane;
                    x[0][i] = row < T ? LOG2E * lse[row] : 0.0f;
                    x[1][i] = row < T ? -dsum[row] : 0.0f;
                }
            };
            load();
            #pragma unroll 1
            while (true) {
                barrier_wait(stream.empty(0, at.stage), at.parity ^ 1);
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    terms[(2 * at.stage + i / 2) * QUERIES + i % 2 * 32 + lane] = x[i / 2][i % 2];
                warp_arrive(stream.full(0, at.stage));
                at.advance();
                if (++tile == end) {
                    if (--left == 0) break;
                    tile = first, lse += T, dsum += T;
                }
                load();
            }
        }
        return;
    }
    take_registers<REGISTERS>();

    float dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    unsigned p[QUERIES / 16][4], ds[QUERIES / 16][4];
    const Descriptor k = descriptor(keys + 64 * warpgroup * 64, 0), v = further(k, KEYS * HS);

    barrier_wait(stream.arrived(), 0);
    if (block0 + 64 * warpgroup >= T) {
        for (int i = query_heads * (end - first); i > 0; i--) stream.skip(at);
        return;
    }
    for (; tile < first + warpgroup; tile++) stream.skip(at);
    int last = 0;  // the stage of the tile before, which is not released yet. It may be another head's tile.
    // begins: there is no tile before.
    const auto attend = [&](auto begins) {
        const int before = GROUPS ? last : at.before();
        const float* const term = terms + 2 * at.stage * QUERIES;
        float s[QUERIES / 8][4], dp[QUERIES / 8][4];
        stream.wait(0, at);
        if (EARLY) broadcast(dp, term + QUERIES);
        wgmma_fence();
        start_scores<HS, KEYS>(s, k, stream.tile(0, at.stage));
        wgmma_commit();
        if (EARLY) {
            stream.wait(1, at);
            start_scores<HS, KEYS>(dp, v, stream.tile(1, at.stage), true);
            wgmma_commit();
        }
        if (!begins.value) {
            start_sum(dk, ds, stream.tile(0, before), true);
            wgmma_commit();
        }
        wgmma_wait<EARLY + !begins.value>();  // for the scores, and for dv of the tile before
        fence_operand(s);
        fence_operand(dv);
        if (!begins.value) stream.release(1, before);
        const int ahead = (tile - first) * QUERIES - (int)threadIdx.x / 128 * 64;  // 0: on the diagonal
        if (begins.value || (GROUPS && ahead == 0)) key_probabilities<HS, true>(s, term, ahead);
        else key_probabilities<HS, false>(s, term, 0);
        pack(p, s);
        wgmma_wait<0>();  // for dk of the tile before: this tile's ds takes the registers of that one's
        fence_operand(dk);
        if (EARLY) fence_operand(dp);
        if (!begins.value) stream.release(0, before);
        if (!EARLY) {
            stream.wait(1, at);
            broadcast(dp, term + QUERIES);
        }
        wgmma_fence();
        if (!EARLY) {
            start_scores<HS, KEYS>(dp, v, stream.tile(1, at.stage), true);
            wgmma_commit();
        }
        start_sum(dv, p, stream.tile(1, at.stage), true);
        wgmma_commit();
        if (!EARLY) {
            wgmma_wait<1>();
            fence_operand(dp);
        }
        #pragma unroll
        for (int i = 0; i < QUERIES / 2; i++) dp[i / 4][i % 4] *= s[i / 4][i % 4];
        pack(ds, dp);
        last = at.stage;
        at.advance();
        tile++;
    };
    attend(Is<true>());
    wgmma_wait<0>();
    fence_operand(dv);
    fence_operand(dk);
    while (GROUPS || tile < ceil_div(T, QUERIES)) {
        if (GROUPS && tile == ceil_div(T, QUERIES)) {
            if (--left == 0) break;
            for (tile = first; tile < first + warpgroup_of(); tile++) stream.skip(at);
        }
        attend(Is<false>());
    }
    wgmma_fence();
    start_sum(dk, ds, stream.tile(0, GROUPS ? last : at.before()), true);
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(dv);
    fence_operand(dk);

    // These are computed again: the loop has no registers for them.
    const Work same(ceil_div(T, KEYS), heads, opaque(group));
    const int heads_here = !GROUPS || dkv_heads != nullptr ? 1 : opaque(NH) / NKV;
    const Head<HS> mine(opaque(NH), NKV, same.head * heads_here);
    const int row = same.tile * KEYS + opaque(threadIdx.x) / 32 * 16;
    const bool inside = row + threadIdx.x % 16 < T;
    float nan = 0.0f;  // or NaN if a D is not finite
    for (int h = 0; inside && h < heads_here; h++)
        nan += 0.0f * dsum[((long long)same.head * heads_here + h) * T + row + threadIdx.x % 16];
    nan = warp_sum(nan);
    const float scale[2] = {rsqrtf((float)HS) + nan, rsqrtf((float)HS) + nan}, one[2] = {1.0f + nan, 1.0f + nan};
    if (GROUPS && dkv_heads != nullptr) {  // in both arrays dv lies C numbers behind dk
        float* const share = dkv_heads + mine.rows(2 * T);
        store_floats<HS>(share, dk, scale[0], row, T, 2 * mine.C);
        store_floats<HS>(share + mine.C, dv, one[0], row, T, 2 * mine.C);
    } else {
        bf16* const gradient = dqkv + mine.position(T);
        store_rows<HS, KEYS>(gradient + mine.key_column, keys, dk, scale, row, T, mine.stride);
        store_rows<HS, KEYS>(gradient + mine.value_column, values, dv, one, row, T, mine.stride);
    }
}

// The template arguments are HS, warpgroups that compute, stages, registers of a thread that computes, and EARLY.
// kernels/flash_attention.py knows the first three, too. There are as many warpgroups as the registers allow: while one
// computes exponentials, the others keep the tensor cores busy.
extern "C" __global__ void __launch_bounds__(640, 1)
flash_attention_forward_wgmma_kernel_64(bf16* out, float* lse, const __grid_constant__ TensorMap qkv, int T, int NH,
                                        int NKV, int heads, int group) {
    forward<64, 4, 4, 112>(out, lse, qkv, T, NH, NKV, heads, group);
}

extern "C" __global__ void __launch_bounds__(512, 1)
flash_attention_backward_query_wgmma_kernel_64(bf16* dqkv, SETS float* dsum, const __grid_constant__ TensorMap dout_map,
                                               const bf16* dout, const bf16* out, const float* lse,
                                               const __grid_constant__ TensorMap qkv, int T, int NH, int NKV, int heads,
                                               int group) {
    backward_query<64, 3, 3, 160>(dqkv, dsum, dout_map, dout, out, lse, qkv, T, NH, NKV, heads, group);
}

extern "C" __global__ void __launch_bounds__(384, 1)
flash_attention_backward_key_wgmma_kernel_64(bf16* dqkv, SETS float* dkv_heads, const float* dsum,
                                             const __grid_constant__ TensorMap dout, const float* lse,
                                             const __grid_constant__ TensorMap qkv, int T, int NH, int NKV, int heads,
                                             int group) {
    if (NKV < NH) {
        backward_key<64, 2, 3, 240, true, true>(dqkv, dkv_heads, dsum, dout, lse, qkv, T, NH, NKV, heads, group);
    } else {
        backward_key<64, 2, 3, 240, true, false>(dqkv, nullptr, dsum, dout, lse, qkv, T, NH, NKV, heads, group);
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
flash_attention_forward_wgmma_kernel_128(bf16* out, float* lse, const __grid_constant__ TensorMap qkv, int T, int NH,
                                         int NKV, int heads, int group) {
    forward<128, 3, 3, 160>(out, lse, qkv, T, NH, NKV, heads, group);
}

extern "C" __global__ void __launch_bounds__(384, 1)
flash_attention_backward_query_wgmma_kernel_128(bf16* dqkv, SETS float* dsum,
                                                const __grid_constant__ TensorMap dout_map, const bf16* dout,
                                                const bf16* out, const float* lse,
                                                const __grid_constant__ TensorMap qkv, int T, int NH, int NKV,
                                                int heads, int group) {
    backward_query<128, 2, 3, 240>(dqkv, dsum, dout_map, dout, out, lse, qkv, T, NH, NKV, heads, group);
}

extern "C" __global__ void __launch_bounds__(384, 1)
flash_attention_backward_key_wgmma_kernel_128(bf16* dqkv, SETS float* dkv_heads, const float* dsum,
                                              const __grid_constant__ TensorMap dout, const float* lse,
                                              const __grid_constant__ TensorMap qkv, int T, int NH, int NKV, int heads,
                                              int group) {
    backward_key<128, 2, 3, 240, false, true>(dqkv, dkv_heads, dsum, dout, lse, qkv, T, NH, NKV, heads, group);
}

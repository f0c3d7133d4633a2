// Causal attention without the (T, T) matrices ("FlashAttention", Dao et al., arXiv 2205.14135), in TF32 or bf16.
//
// With s = q k^T / sqrt(HS) over the keys up to the query itself, for each batch row and head:
//   p = softmax(s);  out = p v;  lse = log(sum(exp(s)))                                    forward
//   p = exp(s - lse);  dp = dout v^T;  D = rowsum(dout * out);  ds = p * (dp - D)          backward
//   dq = ds k / sqrt(HS);  dk = ds^T q / sqrt(HS);  dv = p^T dout
// Shapes: qkv and dqkv (B, T, NH + 2 NKV, HS), the heads of q, then of k, then of v; out and dout (B, T, NH, HS); lse
// and D (B, NH, T). Query head h uses key and value head h // (NH / NKV).
//
// A head takes 2 T^2 HS operations forward and 5 T^2 HS backward (here 7), on O(T HS) bytes. Tensor cores and shared
// memory, which feeds them, wait for one another; neither is the bound. Each warp owns 16 M rows of one side of the
// products. The other side streams through shared memory, 8 KiB of each of two arrays at a time, in two stages: while
// the tensor cores work on one tile, the next is copied. In a step a warp takes 8 N rows of a tile. M is 2 for HS =
// 64: then each operand that is loaded serves two products or four. Backward computes the scores twice: a block for
// each tile of queries sums dq and D, and a block for each tile of keys sums dk and dv. So each sum has one owner and
// a fixed order, without atomics, and two runs agree to the bit. Query heads may share keys (NKV < NH). Then there is
// still a block for each query head and tile of keys, because fewer and longer blocks would leave multiprocessors idle.
// Each writes its share of dk and dv to dkv_heads (B, T, 2, NH, HS), in fp32. A last kernel, bound by memory, adds up
// the shares of each group of heads, in order.
//
// Each kernel is written once, for TF32 and bf16. What depends on the type is in flash_attention_tiles.cuh: how a warp
// holds the rows that it owns, where they are in a tile, and its products. In bf16 the kernels round p, ds and the
// results; all else is fp32.

#define WARP_SIZE 32
#include "flash_attention_tiles.cuh"

// The query head of a sequence that a block works on, and where its queries, keys and values begin in qkv. Their rows
// lie `stride` numbers apart.
template <int HS>
struct Head {
    int C, sequence, number, stride;
    const floatX *query, *key, *value;

    __device__ Head(const floatX* qkv, int T, int NH, int NKV)
        : C(NH * HS), sequence(blockIdx.x / NH), number(blockIdx.x % NH), stride(C + 2 * NKV * HS),
          query(qkv + (long long)sequence * T * stride + number * HS),
          key(qkv + (long long)sequence * T * stride + C + number / (NH / NKV) * HS), value(key + NKV * HS) {}

    // Where the head's rows begin in an array (B, T, NH, HS).
    __device__ long long rows(int T) const { return (long long)sequence * T * C + number * HS; }
};

// ---- forward

// 8 N keys and values for the 16 M queries of a warp: p = 2^(to_exponent * q k^T - reference). The reference keeps a
// row's sums in range. The row's largest exponent would do, but so does any number close to it. So the reference moves,
// and the sums so far are rescaled, only if an exponent is above it by more than 8. The step on the diagonal comes
// first and sets the reference. `ahead` is the number of the first key less that of the first query.
template <int HS, int M, int N, bool DIAGONAL, class Q>
__device__ inline void attend(float (&out)[HS / 16][2 * M][4], float (&sum)[M][2], float (&reference)[M][2],
                              const Q& q, const floatX (&tiles)[2][TILE_SIZE], int step, int ahead,
                              const Offsets<floatX, HS>& offsets) {
    const floatX *keys = tiles[0] + step * 8 * N * HS, *values = tiles[1] + step * 8 * N * HS;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float p[M][N][4] = {};
    #pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        Word a[M][PRODUCTS][4];
        q.get(a, k, offsets);
        add_scores<HS>(p, a, keys, k, offsets, DIAGONAL);
    }

    float top[M][2], highest = -INFINITY;
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            top[m][h] = -INFINITY;
            #pragma unroll
            for (int n = 0; n < N; n++) {
                #pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& x = p[m][n][2 * h + i];
                    x = x * to_exponent<HS>() - reference[m][h];
                    if (DIAGONAL && ahead + 8 * n + 2 * t + i > 16 * m + 8 * h + g) x = -INFINITY;
                    top[m][h] = fmaxf(top[m][h], x);
                }
            }
            highest = fmaxf(highest, top[m][h]);
        }
    }
    if (DIAGONAL || __any_sync(ALL_LANES, highest > 8.0f)) {
        #pragma unroll
        for (int m = 0; m < M; m++) {
            float rise[2];
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                rise[h] = fmaxf(top[m][h], __shfl_xor_sync(ALL_LANES, top[m][h], 1));
                rise[h] = fmaxf(rise[h], __shfl_xor_sync(ALL_LANES, rise[h], 2));
                // In bf16 other rows of the warp do not move it: so the roundings of a query's p depend on it alone.
                if (!DIAGONAL) rise[h] = rise[h] > (IS_BF16 ? 8.0f : 0.0f) ? rise[h] : 0.0f;
                reference[m][h] += rise[h];
                #pragma unroll
                for (int n = 0; n < N; n++) {
                    p[m][n][2 * h] -= rise[h];
                    p[m][n][2 * h + 1] -= rise[h];
                }
            }
            if (!DIAGONAL) {
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    rise[h] = exp2_approx(-rise[h]);
                    sum[m][h] *= rise[h];
                }
                scale_sum<HS>(out, m, rise);
            }
        }
    }
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float x = exp2_approx(p[m][n][i]);
                sum[m][i / 2] += x;
                p[m][n][i] = summand(x);
            }
        }
        if (8 * (n + 1) % ROWS_SUMMED == 0) add_sum<HS>(out, p, values, n + 1 - ROWS_SUMMED / 8, offsets, DIAGONAL);
    }
}

// Grid (B * NH, tiles of WARPS * 16 M queries). In a step a warp takes at least as many keys as it has queries. So it
// meets the diagonal in a single step.
template <int HS, int M, int N, bool Q_KEPT>
__device__ inline void forward(floatX* out, float* lse, const floatX* qkv, int T, int NH, int NKV) {
    constexpr int ROWS = 16 * M, STEP = 8 * N, TILE_ROWS = TILE_SIZE / HS, STEPS = TILE_ROWS / STEP;
    static_assert(ROWS <= STEP && STEP <= TILE_ROWS, "a warp meets its diagonal in one step");
    __shared__ __align__(128) floatX tiles[2][2][TILE_SIZE];    // stage; keys, values
    DYNAMIC_SHARED(floatX, operands);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    // Which of all warps the block's first is, this warp's first row, its step on the diagonal. Longest blocks first.
    const int first = (gridDim.y - 1 - blockIdx.y) * WARPS, row0 = (first + warp) * ROWS, diagonal = row0 / STEP;
    const Head<HS> head(qkv, T, NH, NKV);
    const Offsets<floatX, HS> offsets;
    int tile = ceil_div(min((first + WARPS) * ROWS, T), TILE_ROWS) - 1, stage = 0;
    const auto start = [&](int tile, int stage) {
        copy_tiles<HS>(tiles[stage], head.key, head.value, tile * TILE_ROWS, T, head.stride, head.stride, offsets);
    };

    start(tile, stage);
    Operand<floatX, HS, M, Q_KEPT> q(operands);
    float acc[HS / 16][2 * M][4] = {}, sum[M][2] = {}, reference[M][2] = {};
    q.start(head.query, row0, T, head.stride, offsets, true);
    copies_finish();
    q.finish(offsets);
    for (; tile >= first * ROWS / TILE_ROWS; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        #pragma unroll 1
        for (int i = STEPS - 1; i >= 0; i--) {
            const int step = tile * STEPS + i, ahead = ROWS == STEP ? 0 : step * STEP - row0;
            if (step == diagonal) attend<HS, M, N, true>(acc, sum, reference, q, tiles[stage], i, ahead, offsets);
            if (step < diagonal) attend<HS, M, N, false>(acc, sum, reference, q, tiles[stage], i, ahead, offsets);
        }
        copies_finish();
    }
    for (; tile >= 0; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        #pragma unroll
        for (int i = STEPS - 1; i >= 0; i--)
            attend<HS, M, N, false>(acc, sum, reference, q, tiles[stage], i, 0, offsets);
        copies_finish();
    }

    #pragma unroll
    for (int m = 0; m < M; m++) {
        float inverse[2];
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = row0 + 16 * m + 8 * h + g;
            sum[m][h] += __shfl_xor_sync(ALL_LANES, sum[m][h], 1);
            sum[m][h] += __shfl_xor_sync(ALL_LANES, sum[m][h], 2);
            inverse[h] = 1.0f / sum[m][h];
            if (t == 0 && row < T) lse[(long long)blockIdx.x * T + row] = LN2 * reference[m][h] + logf(sum[m][h]);
        }
        scale_sum<HS>(acc, m, inverse);
    }
    store_sum<HS>(out + head.rows(T), acc, row0, T, head.C, 1.0f, &tiles[0][0][0]);
}

// ---- backward

// 8 N keys and values for the 16 M queries of a warp. In TF32 the warp keeps the queries in registers and their dout in
// shared memory. With both in shared memory an H200 took 3% longer for HS = 64 and 18% for 128; with both in registers,
// 3% for 128. bf16 needs half as many registers: with both there it took 8% less for 128. log2_sum is lse / log(2).
template <int HS, int M, int N, bool DIAGONAL, class Q, class DOUT>
__device__ inline void backward_query_tile(float (&dq)[HS / 16][2 * M][4], const Q& q, const DOUT& dout,
                                           const float (&log2_sum)[M][2], const float (&D)[M][2],
                                           const floatX (&tiles)[2][TILE_SIZE], int step, int ahead,
                                           const Offsets<floatX, HS>& offsets) {
    const floatX *keys = tiles[0] + step * 8 * N * HS, *values = tiles[1] + step * 8 * N * HS;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float p[M][N][4] = {}, ds[M][N][4];
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < N; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) ds[m][n][i] = -D[m][i / 2];
        }
    }
    add_two_scores<HS>(p, q, keys, ds, dout, values, offsets);
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool hidden = DIAGONAL && ahead + 8 * n + 2 * t + i % 2 > 16 * m + 8 * (i / 2) + g;
                const float x = hidden ? 0.0f : exp2_approx(p[m][n][i] * to_exponent<HS>() - log2_sum[m][i / 2]);
                ds[m][n][i] = summand(x * ds[m][n][i], DIAGONAL);
            }
        }
        if (8 * (n + 1) % ROWS_SUMMED == 0) add_sum<HS>(dq, ds, keys, n + 1 - ROWS_SUMMED / 8, offsets);
    }
}

// Grid (B * NH, tiles of WARPS * 16 M queries). Sets dq, and D for the kernel that follows.
template <int HS, int M, int N, bool Q_KEPT, bool DOUT_KEPT>
__device__ inline void backward_query(floatX* dqkv, float* dsum, const floatX* dout, const floatX* out,
                                      const float* lse, const floatX* qkv, int T, int NH, int NKV) {
    constexpr int ROWS = 16 * M, STEP = 8 * N, TILE_ROWS = TILE_SIZE / HS, STEPS = TILE_ROWS / STEP;
    static_assert(ROWS <= STEP && STEP <= TILE_ROWS, "a warp meets its diagonal in one step");
    __shared__ __align__(128) floatX tiles[2][2][TILE_SIZE];    // stage; keys, values
    DYNAMIC_SHARED(floatX, operands);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int first = (gridDim.y - 1 - blockIdx.y) * WARPS, row0 = (first + warp) * ROWS, diagonal = row0 / STEP;
    const Head<HS> head(qkv, T, NH, NKV);
    out += head.rows(T);
    dout += head.rows(T);
    lse += (long long)blockIdx.x * T;
    dsum += (long long)blockIdx.x * T;
    const Offsets<floatX, HS> offsets;
    int tile = ceil_div(min((first + WARPS) * ROWS, T), TILE_ROWS) - 1, stage = 0;
    const auto start = [&](int tile, int stage) {
        copy_tiles<HS>(tiles[stage], head.key, head.value, tile * TILE_ROWS, T, head.stride, head.stride, offsets);
    };

    // In bf16 the tiles' memory first has the block's own rows of q and out. So a block needs 48 KiB, and a
    // multiprocessor of 100 KiB has room for two.
    if (!IS_BF16) start(tile, stage);
    Operand<floatX, HS, M, Q_KEPT> q(tiles[0][0]);
    Operand<floatX, HS, M, DOUT_KEPT> d(operands);
    Factors<floatX, HS, M> o(tiles[1][0]);
    static_assert(Q_KEPT && q.SIZE <= 2 * TILE_SIZE, "the tiles' memory is free again before the first tile comes");
    float dq[HS / 16][2 * M][4] = {}, log2_sum[M][2], D[M][2];
    q.start(head.query, row0, T, head.stride, offsets);
    d.start(dout, row0, T, head.C, offsets, true);
    o.start(out, row0, T, head.C, offsets);
    #pragma unroll
    for (int i = 0; i < M * 2; i++) {
        const int row = row0 + 8 * i + g;
        log2_sum[i / 2][i % 2] = row < T ? LOG2E * lse[row] : 0.0f;
    }
    // D is computed from dout as the products see it, so that dp - D is 0 where it should be.
    const auto find_D = [&] {
        #pragma unroll
        for (int i = 0; i < M * 2; i++) {
            const int row = row0 + 8 * i + g;
            float& sum = D[i / 2][i % 2];
            sum = o.sum(d, i / 2, i % 2, offsets);
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            sum = fmaf(0.0f, log2_sum[i / 2][i % 2], sum);  // NaN if lse is not finite
            if (t == 0 && row < T) dsum[row] = sum;
        }
    };
    if (!IS_BF16) find_D();  // it need not wait for copies: it loads out by itself
    copies_finish();
    q.finish(offsets);
    d.finish(offsets);
    if (IS_BF16) {
        find_D();
        __syncthreads();
        start(tile, stage);
        copies_finish();
    }
    for (; tile >= first * ROWS / TILE_ROWS; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        #pragma unroll 1
        for (int i = STEPS - 1; i >= 0; i--) {
            const int step = tile * STEPS + i, ahead = ROWS == STEP ? 0 : step * STEP - row0;
            if (step == diagonal) 
                backward_query_tile<HS, M, N, true>(dq, q, d, log2_sum, D, tiles[stage], i, ahead, offsets);
            if (step < diagonal) 
                backward_query_tile<HS, M, N, false>(dq, q, d, log2_sum, D, tiles[stage], i, ahead, offsets);
        }
        copies_finish();
    }
    for (; tile >= 0; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        #pragma unroll 1
        for (int i = STEPS - 1; i >= 0; i--)
            backward_query_tile<HS, M, N, false>(dq, q, d, log2_sum, D, tiles[stage], i, 0, offsets);
        copies_finish();
    }
    store_sum<HS>(dqkv + (head.query - qkv), dq, row0, T, head.stride, rsqrtf((float)HS), &tiles[0][0][0]);
}

// 8 N queries and their dout for the 16 M keys of a warp. The scores are transposed: keys by queries.
template <int HS, int M, int N, bool DIAGONAL, class K, class V>
__device__ inline void backward_key_tile(float (&dk)[HS / 16][2 * M][4], float (&dv)[HS / 16][2 * M][4],
                                         const K& k, const V& v, const floatX* queries, const floatX* douts,
                                         const float* lse, const float* D, int ahead,
                                         const Offsets<floatX, HS>& offsets) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float p[M][N][4] = {}, ds[M][N][4];
    #pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 two = *reinterpret_cast<const float2*>(D + 8 * n + 2 * t);
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) ds[m][n][i] = -(i % 2 == 0 ? two.x : two.y);
        }
    }
    add_two_scores<HS>(p, k, queries, ds, v, douts, offsets);
    #pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 two = *reinterpret_cast<const float2*>(lse + 8 * n + 2 * t);
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool hidden = DIAGONAL && ahead + 8 * n + 2 * t + i % 2 < 16 * m + 8 * (i / 2) + g;
                const float log2_sum = LOG2E * (i % 2 == 0 ? two.x : two.y);
                const float x = hidden ? 0.0f : exp2_approx(p[m][n][i] * to_exponent<HS>() - log2_sum);
                p[m][n][i] = summand(x);
                ds[m][n][i] = summand(x * ds[m][n][i]);
            }
        }
        if (8 * (n + 1) % ROWS_SUMMED == 0) {
            add_sum<HS>(dv, p, douts, n + 1 - ROWS_SUMMED / 8, offsets);
            add_sum<HS>(dk, ds, queries, n + 1 - ROWS_SUMMED / 8, offsets);
        }
    }
}

// Grid (B * NH, tiles of WARPS * 16 M keys). Reads D from dsum. Sets dk and dv of dqkv. If query heads share keys, it
// sets this head's share of dk and dv in dkv_heads instead, which is null otherwise.
template <int HS, int M, int N, bool K_KEPT, bool V_KEPT>
__device__ inline void backward_key(floatX* dqkv, float* dkv_heads, const float* dsum, const floatX* dout,
                                    const float* lse, const floatX* qkv, int T, int NH, int NKV) {
    constexpr int ROWS = 16 * M, STEP = 8 * N, TILE_ROWS = TILE_SIZE / HS, STEPS = TILE_ROWS / STEP;
    constexpr int DIAGONALS = ROWS > STEP ? ROWS / STEP : 1;    // steps in which a warp meets its diagonal
    constexpr int UNROLL = STEPS > 2 ? 1 : STEPS;               // more than two steps would need too many registers
    __shared__ __align__(128) floatX tiles[2][2][TILE_SIZE];    // stage; queries, dout
    __shared__ __align__(8) float terms[2][2][TILE_ROWS];       // stage; lse and D of the queries
    DYNAMIC_SHARED(floatX, operands);
    const int warp = threadIdx.x / 32;
    const int first = blockIdx.y * WARPS, row0 = (first + warp) * ROWS, diagonal = row0 / STEP;
    const Head<HS> head(qkv, T, NH, NKV);
    dout += head.rows(T);
    lse += (long long)blockIdx.x * T;
    dsum += (long long)blockIdx.x * T;
    const Offsets<floatX, HS> offsets;
    const int end = ceil_div(T, TILE_ROWS);
    int tile = first * ROWS / TILE_ROWS, stage = 0;
    const auto start = [&](int tile, int stage) {
        copy_tiles<HS>(tiles[stage], head.query, dout, tile * TILE_ROWS, T, head.stride, head.C, offsets);
        // From row T on queries, dout, lse and D are zeros, and add zeros.
        const int array = threadIdx.x / TILE_ROWS, down = threadIdx.x % TILE_ROWS, row = tile * TILE_ROWS + down;
        const float* term = array == 0 ? lse : dsum;
        if (array < 2) copy_one(&terms[stage][array][down], term + (row < T ? row : 0), row < T);
    };

    start(tile, stage);
    // Keys that stay in registers come by the memory of the second tiles. So in bf16 a block needs 49 KiB, and a
    // multiprocessor of 100 KiB, which keeps one for each block, has room for two.
    Operand<floatX, HS, M, K_KEPT> k(K_KEPT ? tiles[1][0] : operands);
    Operand<floatX, HS, M, V_KEPT> v(operands + (K_KEPT ? 0 : k.SIZE));
    float dk[HS / 16][2 * M][4], dv[HS / 16][2 * M][4];
    k.start(head.key, row0, T, head.stride, offsets);
    v.start(head.value, row0, T, head.stride, offsets);
    const int row = row0 + threadIdx.x % 32;                    // if M is 1, also rows of the next warp
    const float zero = warp_sum(row < T ? 0.0f * dsum[row] : 0.0f);  // or NaN if D is not finite
    #pragma unroll
    for (int i = 0; i < HS / 16 * 2 * M * 4; i++) {
        dk[i / 4 / (2 * M)][i / 4 % (2 * M)][i % 4] = dv[i / 4 / (2 * M)][i / 4 % (2 * M)][i % 4] = zero;
    }
    copies_finish();
    k.finish(offsets);
    v.finish(offsets);
    if (K_KEPT) __syncthreads();  // before the second tiles come
    for (; tile < min((first + WARPS) * ROWS / TILE_ROWS, end); tile++, stage ^= 1) {
        start(tile + 1, stage ^ 1);
        #pragma unroll 1
        for (int i = 0; i < STEPS; i++) {
            const floatX *queries = tiles[stage][0] + i * STEP * HS, *douts = tiles[stage][1] + i * STEP * HS;
            const float *lse = terms[stage][0] + i * STEP, *D = terms[stage][1] + i * STEP;
            const int step = tile * STEPS + i, ahead = ROWS == STEP ? 0 : step * STEP - row0;
            if (step >= diagonal && step < diagonal + DIAGONALS)
                backward_key_tile<HS, M, N, true>(dk, dv, k, v, queries, douts, lse, D, ahead, offsets);
            if (step >= diagonal + DIAGONALS)
                backward_key_tile<HS, M, N, false>(dk, dv, k, v, queries, douts, lse, D, ahead, offsets);
        }
        copies_finish();
    }
    for (; tile < end; tile++, stage ^= 1) {
        start(tile + 1, stage ^ 1);
        #pragma unroll UNROLL
        for (int i = 0; i < STEPS; i++) {
            const floatX *queries = tiles[stage][0] + i * STEP * HS, *douts = tiles[stage][1] + i * STEP * HS;
            const float *lse = terms[stage][0] + i * STEP, *D = terms[stage][1] + i * STEP;
            backward_key_tile<HS, M, N, false>(dk, dv, k, v, queries, douts, lse, D, 0, offsets);
        }
        copies_finish();
    }
    // In both arrays dv lies C numbers behind dk: the kernel writes to dqkv only if NKV = NH.
    const auto store = [&](auto* to, int stride) {
        const auto shared = reinterpret_cast<decltype(to)>(tiles);
        store_sum<HS>(to, dk, row0, T, stride, rsqrtf((float)HS), shared);
        store_sum<HS>(to + head.C, dv, row0, T, stride, 1.0f, shared);
    };
    if (NKV < NH) store(dkv_heads + head.rows(2 * T), 2 * head.C);
    else store(dqkv + (head.key - qkv), head.stride);
}

// The template arguments are HS, M, N, and which of a warp's own rows stay in registers. kernels/flash_attention.py
// knows the rows of a block, 64 M, and the bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_forward_kernel_64(floatX* out, float* lse, const floatX* qkv, int T, int NH, int NKV) {
    forward<64, 2, 4, true>(out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_query_kernel_64(floatX* dqkv, SETS float* dsum, const floatX* dout, const floatX* out,
                                         const float* lse, const floatX* qkv, int T, int NH, int NKV) {
    backward_query<64, 2, 4, true, false>(dqkv, dsum, dout, out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_key_kernel_64(floatX* dqkv, SETS float* dkv_heads, const float* dsum, const floatX* dout,
                                       const float* lse, const floatX* qkv, int T, int NH, int NKV) {
    backward_key<64, 2, IS_BF16 ? 2 : 4, IS_BF16, false>(dqkv, dkv_heads, dsum, dout, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_forward_kernel_128(floatX* out, float* lse, const floatX* qkv, int T, int NH, int NKV) {
    forward<128, IS_BF16 ? 2 : 1, IS_BF16 ? 4 : 2, !IS_BF16>(out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_query_kernel_128(floatX* dqkv, SETS float* dsum, const floatX* dout, const floatX* out,
                                         const float* lse, const floatX* qkv, int T, int NH, int NKV) {
    backward_query<128, 1, IS_BF16 ? 4 : 2, true, IS_BF16>(dqkv, dsum, dout, out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_key_kernel_128(floatX* dqkv, SETS float* dkv_heads, const float* dsum, const floatX* dout,
                                       const float* lse, const floatX* qkv, int T, int NH, int NKV) {
    backward_key<128, 1, 2, IS_BF16, false>(dqkv, dkv_heads, dsum, dout, lse, qkv, T, NH, NKV);
}

// Sets dk and dv of dqkv to the sums over the query heads of each group of dkv_heads (B, T, 2, NH, HS). A thread (x, y)
// of a block has WIDTH channels of one of the B*T*2*NKV `heads` of keys and values.
extern "C" __global__ void flash_attention_group_sum_kernel(floatX* dqkv, const float* dkv_heads, int heads, int NH,
                                                            int NKV, int HS) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y, i = WIDTH * threadIdx.x, group = NH / NKV;
    if (n >= heads) return;
    const float* share = dkv_heads + (size_t)n * group * HS + i;  // the heads of a group are neighbours
    Vec sum = Aligned::load(share, WIDTH);
    #pragma unroll 4
    for (int h = 1; h < group; h++) {
        const Vec x = Aligned::load(share + h * HS, WIDTH);
        for (int k = 0; k < WIDTH; k++) sum.x[k] += x.x[k];
    }
    const int position = n / (2 * NKV), head = NH + n % (2 * NKV);
    Aligned::store(dqkv + ((size_t)position * (NH + 2 * NKV) + head) * HS + i, sum, WIDTH);
}

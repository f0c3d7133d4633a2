// Backward of causal attention without (T, T) matrices: dqkv (B, T, 3, NH, 64) from qkv and dout (B, T, NH, 64), and from
// what forward has left (flash_attention.cu), out (B, T, NH, 64) and lse (B, NH, T). With s = q k^T / 8 over the keys up to
// the query itself:
//   p = exp(s - lse);  dp = dout v^T;  D = rowsum(dout * out);  ds = p * (dp - D)
//   dq = ds k / 8;  dk = ds^T q / 8;  dv = p^T dout
// Five products of T^2 * 64 operations per head on 32 T * 64 bytes. dq of a query is a sum over keys; dk and dv of a key
// are sums over queries. No loop over tiles can keep both sums in registers. That is where the rungs differ.
#define WARP_SIZE 32
#include "attention_tiles.cuh"

// Row n of an array of pairs: of q and dout, or of k and v.
struct Pair {
    const float *first, *second;
    int first_stride, second_stride;
};

// Where a block works: blockIdx.x is a head of a sequence.
struct Head {
    Pair queries, keys;
    const float *lse, *dsum;
    float *dq, *dk, *dv;
    int stride;
    __device__ Head(float* dqkv, const float* dsum, const float* dout, const float* lse, const float* qkv, int T, int NH)
        : lse(lse + (size_t)blockIdx.x * T), dsum(dsum + (size_t)blockIdx.x * T), stride(3 * NH * HS) {
        const int C = NH * HS;
        const size_t row = (size_t)(blockIdx.x / NH) * T, column = blockIdx.x % NH * HS;
        const float* q = qkv + row * stride + column;
        queries = {q, dout + row * C + column, stride, C};
        keys = {q + C, q + 2 * C, stride, stride};
        dq = dqkv + (q - qkv), dk = dq + C, dv = dk + C;
    }

    // What a block of queries, or of keys, meets.
    template <bool OF_QUERIES>
    __device__ Pair others() const { return OF_QUERIES ? keys : queries; }
};

// The rows of the other side that a block's 64 rows meet: of a block of queries the keys up to its last query, of a
// block of keys the queries from its first key on.
template <bool OF_QUERIES>
__device__ inline int begin() { return OF_QUERIES ? 0 : 64 * blockIdx.y; }
template <bool OF_QUERIES>
__device__ inline int end(int T) { return OF_QUERIES ? min(64 * (int)blockIdx.y + 64, T) : T; }

// Computes D for all kernels below. A warp takes one of the B*T*NH rows of out. Unless dqkv is null, dq becomes 0.
extern "C" __global__ void dsum_kernel(float* dsum, float* dqkv, const float* dout, const float* out, int rows, int T,
                                       int NH) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, column = 2 * threadIdx.x;
    if (row >= rows) return;
    const float2 x = *reinterpret_cast<const float2*>(dout + (size_t)row * HS + column);
    const float2 y = *reinterpret_cast<const float2*>(out + (size_t)row * HS + column);
    const float sum = warp_sum(x.x * y.x + x.y * y.y);
    const int position = row / NH, head = row % NH;
    if (threadIdx.x == 0) dsum[((size_t)(position / T) * NH + head) * T + position % T] = sum;
    if (dqkv == nullptr) return;
    *reinterpret_cast<float2*>(dqkv + ((size_t)position * 3 * NH + head) * HS + column) = make_float2(0.0f, 0.0f);
}

// ---- without tensor cores: blocks of 128 threads with 64 rows.

// A row of queries: q, dout and the sum dq. Or a row of keys: k, v and the sums dk and dv. Two lanes share it, four
// channels for the one, four for the other: for a key, one lane alone would need 256 registers.
template <bool OF_QUERIES>
struct Row {
    int number, column;
    float first[HS / 2], second[HS / 2], first_sum[HS / 2], second_sum[HS / 2];
    __device__ Row(const Head& head, int T)
        : number(64 * blockIdx.y + threadIdx.x / 2), column(threadIdx.x % 2 * 4), first_sum{}, second_sum{} {
        const Pair& own = OF_QUERIES ? head.queries : head.keys;
        const size_t row = min(number, T - 1);
#pragma unroll
        for (int i = 0; i < HS / 2; i++) {
            first[i] = own.first[row * own.first_stride + channel(i)];
            second[i] = own.second[row * own.second_stride + channel(i)];
        }
    }

    __device__ int channel(int i) const { return i / 4 * 8 + column + i % 4; }

    // Adds what row `other` of the other side gives to the sums. It begins at `firsts` and `seconds`.
    template <class Memory>
    __device__ void add(Memory memory, const float* firsts, const float* seconds, int other, const Head& head, int T) {
        float score = 0.0f, dp = 0.0f;
#pragma unroll
        for (int i = 0; i < HS / 2; i += 4) {
            const Vec x = memory.load(firsts + channel(i), 4), y = memory.load(seconds + channel(i), 4);
            for (int e = 0; e < 4; e++) score += first[i + e] * x.x[e], dp += second[i + e] * y.x[e];
        }
        score += __shfl_xor_sync(0xffffffffu, score, 1);
        dp += __shfl_xor_sync(0xffffffffu, dp, 1);
        const int query = OF_QUERIES ? number : other, key = OF_QUERIES ? other : number;
        const bool seen = key <= query && query < T;
        const float p = seen ? __expf(score * SCALE - head.lse[query]) : 0.0f;
        const float ds = seen ? p * (dp - head.dsum[query]) : 0.0f;
#pragma unroll
        for (int i = 0; i < HS / 2; i += 4) {
            const Vec x = memory.load(firsts + channel(i), 4);
            for (int e = 0; e < 4; e++) first_sum[i + e] += ds * x.x[e];
            if (OF_QUERIES) continue;
            const Vec y = memory.load(seconds + channel(i), 4);
            for (int e = 0; e < 4; e++) second_sum[i + e] += p * y.x[e];
        }
    }

    __device__ void store(const Head& head, int T) const {
        if (number >= T) return;
        const size_t row = (size_t)number * head.stride;
#pragma unroll
        for (int i = 0; i < HS / 2; i++) {
            (OF_QUERIES ? head.dq : head.dk)[row + channel(i)] = SCALE * first_sum[i];
            if (!OF_QUERIES) head.dv[row + channel(i)] = second_sum[i];
        }
    }
};

template <bool OF_QUERIES>
__device__ inline void by_rows(const Head& head, int T) {
    const Pair others = head.others<OF_QUERIES>();
    Row<OF_QUERIES> row(head, T);
    for (int i = begin<OF_QUERIES>(); i < end<OF_QUERIES>(T); i++) {
        row.add(Ragged(), others.first + (size_t)i * others.first_stride,
                others.second + (size_t)i * others.second_stride, i, head, T);
    }
    row.store(head, T);
}

// Two threads per row: blocks of queries sum dq, blocks of keys sum dk and dv, all in registers. Both compute p and ds:
// seven products instead of five. The lanes of a warp are at the same row of the other side. So each load is one number
// for 16 lanes, and serves one multiplication of each.
extern "C" __global__ void __launch_bounds__(128)
scalar_kernel(float* dqkv, const float* dsum, const float* dout, const float* lse, const float* qkv, int T, int NH) {
    const Head head(dqkv, dsum, dout, lse, qkv, T, NH);
    if (blockIdx.z == 0) by_rows<true>(head, T);
    if (blockIdx.z == 1) by_rows<false>(head, T);
}

template <bool OF_QUERIES>
__device__ inline void by_rows_of_tiles(float (&firsts)[KEYS * HS], float (&seconds)[KEYS * HS], const Head& head, int T) {
    const Pair others = head.others<OF_QUERIES>();
    Row<OF_QUERIES> row(head, T);
    for (int i0 = begin<OF_QUERIES>(); i0 < end<OF_QUERIES>(T); i0 += KEYS) {
        load_rows<128, false, false>(firsts, others.first, KEYS, i0, T, others.first_stride);
        load_rows<128, false, false>(seconds, others.second, KEYS, i0, T, others.second_stride);
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < KEYS; i++) row.add(Aligned(), firsts + i * HS, seconds + i * HS, i0 + i, head, T);
        __syncthreads();
    }
    row.store(head, T);
}

// Tiles in shared memory: a block copies 32 rows at a time, of the two arrays that its 64 rows meet, to shared memory.
// Its threads load them by 16 bytes.
extern "C" __global__ void __launch_bounds__(128)
tiled_kernel(float* dqkv, const float* dsum, const float* dout, const float* lse, const float* qkv, int T, int NH) {
    __shared__ __align__(16) float firsts[KEYS * HS], seconds[KEYS * HS];
    const Head head(dqkv, dsum, dout, lse, qkv, T, NH);
    if (blockIdx.z == 0) by_rows_of_tiles<true>(firsts, seconds, head, T);
    if (blockIdx.z == 1) by_rows_of_tiles<false>(firsts, seconds, head, T);
}

// ---- with tensor cores: blocks of four warps with 16 rows each, swizzled tiles of 32 rows of the other side.

// A warp's 16 rows: of queries, q and dout as operands of mma and the sum dq; or of keys, k and v and the sums dk and dv.
template <bool OF_QUERIES>
struct Rows {
    int row0;
    float first[HS / 8][4], second[HS / 8][4], first_sum[HS / 8][4], second_sum[HS / 8][4];
    __device__ Rows(const Head& head, int T)
        : row0(64 * blockIdx.y + threadIdx.x / 32 * 16), first_sum{}, second_sum{} {
        const Pair& own = OF_QUERIES ? head.queries : head.keys;
        load_operand(first, own.first, row0, T, own.first_stride);
        load_operand(second, own.second, row0, T, own.second_stride);
    }

    // Whether the warp's rows meet any of a tile that begins at row i0.
    __device__ bool meets(int i0) const { return OF_QUERIES ? i0 < row0 + 16 : i0 + KEYS > row0; }

    // Adds what the tile that begins at row i0 gives to the sums. ds (16, KEYS) is set, too.
    template <bool ROUND>
    __device__ void add(float (&ds)[KEYS / 8][4], const float* firsts, const float* seconds, int i0, const Head& head,
                        int T) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        float p[KEYS / 8][4] = {}, dp[KEYS / 8][4] = {};
        add_scores<true, ROUND>(p, first, firsts);
        add_scores<true, ROUND>(dp, second, seconds);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            for (int e = 0; e < 4; e++) {
                const int own = row0 + g + e / 2 * 8, other = i0 + 8 * n + 2 * t + e % 2;
                const int query = OF_QUERIES ? own : other, key = OF_QUERIES ? other : own;
                const bool seen = key <= query && query < T;
                const float x = seen ? __expf(p[n][e] * SCALE - head.lse[query]) : 0.0f;
                ds[n][e] = seen ? to_tf32(x * (dp[n][e] - head.dsum[query])) : 0.0f;
                p[n][e] = to_tf32(x);
            }
        }
        add_sum<true, ROUND>(first_sum, ds, firsts);
        if (!OF_QUERIES) add_sum<true, ROUND>(second_sum, p, seconds);
    }

    __device__ void store(const Head& head, int T) const {
        const float scaled[2] = {SCALE, SCALE}, ones[2] = {1.0f, 1.0f};
        store_rows(OF_QUERIES ? head.dq : head.dk, first_sum, scaled, row0, T, head.stride);
        if (!OF_QUERIES) store_rows(head.dv, second_sum, ones, row0, T, head.stride);
    }
};

template <bool OF_QUERIES>
__device__ inline void by_warps(float (&firsts)[KEYS * HS], float (&seconds)[KEYS * HS], const Head& head, int T) {
    const Pair others = head.others<OF_QUERIES>();
    Rows<OF_QUERIES> rows(head, T);
    float ds[KEYS / 8][4];
    for (int i0 = begin<OF_QUERIES>(); i0 < end<OF_QUERIES>(T); i0 += KEYS) {
        load_rows<128, true, true>(firsts, others.first, KEYS, i0, T, others.first_stride);
        load_rows<128, true, true>(seconds, others.second, KEYS, i0, T, others.second_stride);
        __syncthreads();
        if (rows.meets(i0)) rows.template add<false>(ds, firsts, seconds, i0, head, T);
        __syncthreads();
    }
    rows.store(head, T);
}

// Tensor cores: a warp has 16 rows, its operands and sums stay in registers, and tiles are swizzled, as in forward's
// rung "Swizzled tiles".
extern "C" __global__ void __launch_bounds__(128)
mma_kernel(float* dqkv, const float* dsum, const float* dout, const float* lse, const float* qkv, int T, int NH) {
    __shared__ __align__(16) float firsts[KEYS * HS], seconds[KEYS * HS];
    const Head head(dqkv, dsum, dout, lse, qkv, T, NH);
    if (blockIdx.z == 0) by_warps<true>(firsts, seconds, head, T);
    if (blockIdx.z == 1) by_warps<false>(firsts, seconds, head, T);
}

// Where ds of a key and a query lies in a tile of 64 x KEYS. Two bits of the key flip two bits of the query. So neither
// the lanes that store it nor those that load it have conflicts.
__device__ inline int place_of_ds(int key, int query) {
    return key * KEYS + (query ^ 8 * (((key ^ key >> 2) & 1) | (key & 2)));
}

// One pass with atomics: only blocks of keys, five products. A block adds its part of dq to device memory by atomicAdd,
// in the order in which blocks arrive. That product sums over the rows of ds, so ds must be another operand of mma. The
// warps of the block exchange it through shared memory.
extern "C" __global__ void __launch_bounds__(128)
atomics_kernel(float* dqkv, const float* dsum, const float* dout, const float* lse, const float* qkv, int T, int NH) {
    __shared__ __align__(16) float keys[64 * HS], queries[KEYS * HS], douts[KEYS * HS], shared_ds[64 * KEYS];
    const Head head(dqkv, dsum, dout, lse, qkv, T, NH);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
    const int query0 = warp % 2 * 16, column0 = warp / 2 * 32;  // a warp's part of the tile's dq: 16 queries, 32 channels
    Rows<false> rows(head, T);
    load_rows<128, true, true>(keys, head.keys.first, 64, begin<false>(), T, head.stride);
    for (int i0 = begin<false>(); i0 < T; i0 += KEYS) {
        load_rows<128, true, true>(queries, head.queries.first, KEYS, i0, T, head.queries.first_stride);
        load_rows<128, true, true>(douts, head.queries.second, KEYS, i0, T, head.queries.second_stride);
        __syncthreads();
        float ds[KEYS / 8][4], dq[4][4] = {};
        rows.template add<false>(ds, queries, douts, i0, head, T);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            for (int h = 0; h < 2; h++) {
                *reinterpret_cast<float2*>(shared_ds + place_of_ds(16 * warp + g + 8 * h, 8 * n + 2 * t)) =
                    make_float2(ds[n][2 * h], ds[n][2 * h + 1]);
            }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 64; k += 8) {  // column t stands for key 2t, column t + 4 for key 2t + 1
            float a[4];
            for (int e = 0; e < 4; e++) a[e] = shared_ds[place_of_ds(k + 2 * t + e / 2, query0 + g + e % 2 * 8)];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int column = column0 + 8 * n + g;
                mma(dq[n], a, keys[place<true>(k + 2 * t, column)], keys[place<true>(k + 2 * t + 1, column)]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            for (int e = 0; e < 4; e++) {
                const int query = i0 + query0 + g + e / 2 * 8, column = column0 + 8 * n + 2 * t + e % 2;
                if (query < T) atomicAdd(head.dq + (size_t)query * head.stride + column, SCALE * dq[n][e]);
            }
        }
    }
    rows.store(head, T);
}

template <bool OF_QUERIES>
__device__ inline void in_two_stages(float (&firsts)[2][KEYS * HS], float (&seconds)[2][KEYS * HS], const Head& head,
                                     int T) {
    const Pair others = head.others<OF_QUERIES>();
    Rows<OF_QUERIES> rows(head, T);
    const int last = end<OF_QUERIES>(T);
    const auto start = [&](int i0, int stage) {
        copy_rows(firsts[stage], others.first, i0, T, others.first_stride);
        copy_rows(seconds[stage], others.second, i0, T, others.second_stride);
    };
    float ds[KEYS / 8][4];
    start(begin<OF_QUERIES>(), 0);
    for (int i0 = begin<OF_QUERIES>(), stage = 0; i0 < last; i0 += KEYS, stage ^= 1) {
        copies_wait();
        __syncthreads();  // this stage is there for all threads, and all are done with the other
        if (i0 + KEYS < last) start(i0 + KEYS, stage ^ 1);
        if (rows.meets(i0)) rows.template add<true>(ds, firsts[stage], seconds[stage], i0, head, T);
    }
    rows.store(head, T);
}

// Two passes again and asynchronous copies: every sum has one owner and a fixed order, and while the warps work on one pair
// of tiles, cp.async brings the next.
extern "C" __global__ void __launch_bounds__(128)
two_stages_kernel(float* dqkv, const float* dsum, const float* dout, const float* lse, const float* qkv, int T, int NH) {
    __shared__ __align__(16) float firsts[2][KEYS * HS], seconds[2][KEYS * HS];
    const Head head(dqkv, dsum, dout, lse, qkv, T, NH);
    if (blockIdx.z == 0) in_two_stages<true>(firsts, seconds, head, T);
    if (blockIdx.z == 1) in_two_stages<false>(firsts, seconds, head, T);
}

// How flash_attention.cu's warps hold their operands and multiply them, in TF32 and in bf16. Four things depend on the
// type: how a lane holds its operands (Operand), where they are in a tile (Offsets), the products (add_scores,
// add_sum), and the rows and columns of a sum that a lane holds (scale_sum, store_sum).
//
// mma.cuh says how the operands of a product, A B + C, are spread over the lanes of a warp. g is lane / 4, t is
// lane % 4. For TF32 we choose two orders. So a lane can load its operands with wide accesses, and the result of one
// product is an operand of the next:
// - Scores, s = q k^T, are sums over HS. Any order will do if A and B have the same. Of each 16 columns lane t takes
//   4t .. 4t + 3. One 16-byte load fetches them: two columns for each of two products.
// - A lane gets row g, columns 2t and 2t + 1 of s. Sums over keys need p as an operand, and may take the keys in any
//   order: row t of the product stands for key 2t and row t + 4 for key 2t + 1, in A and in B. We compute the sums
//   transposed, out^T = v^T p^T, so p is B: c[0], c[1] are b0, b1 without a move. Row g of A stands for column 2g of
//   v, and row g + 8 for column 2g + 1: one 8-byte load fetches both. The price: a lane's sums belong to other queries
//   than its scores, so the factors that rescale the sums must change lanes (to_columns).
// bf16 needs no such choices. Two results, packed, are an operand A, so the sums are not transposed. The instruction
// ldmatrix fetches the words of four (8, 8) matrices from shared memory, as they are or transposed.
#pragma once
#include "flash_attention.cuh"
#include "mma.cuh"

constexpr bool IS_BF16 = sizeof(floatX) == 2;
constexpr int WARPS = 4;                            // a block; two blocks fill a multiprocessor's registers
constexpr int THREADS = WARPS * 32;
constexpr int TILE_FLOATS = 2048;                   // a streamed tile has room for so many floats
constexpr int TILE_SIZE = TILE_FLOATS * WIDTH / 4;  // and for so many of floatX: TILE_SIZE / HS rows

// A lane holds operands in words of 32 bits: one number for TF32, or two of bf16. 16 columns take PRODUCTS products.
__device__ float word_of(float);
__device__ unsigned word_of(bf16);
using Word = decltype(word_of(floatX()));
constexpr int PRODUCTS = IS_BF16 ? 1 : 2;

// A GPU's arithmetic makes NaNs with all bits set, and to_tf32 (mma.cuh) turns such a NaN into a 0 of the other sign.
// Nobody would see it. With keep_nan the result is NaN if x or y is: one comparison for two numbers of a row.
//
// Each number is compared once: q and dout when a warp loads its own rows, k and v in forward's tile on the diagonal.
// There query i meets key and value i, so a NaN in q, k or v makes lse or out of row i NaN.
// Backward need not look for NaNs in q, k and v: if lse, out or dout of a row is not finite, D of that row is NaN or
// infinite. In the tile on the diagonal D makes dq NaN. The block of keys begins its sums at 0 * D of its own rows. In
// bf16 every NaN stays one anyway.
__device__ inline float to_tf32(float x, float y, bool keep_nan) {
    const bool unordered = !(x < y || x >= y);
    return keep_nan && unordered ? __uint_as_float(0x7fc00000u) : to_tf32(x);
}

// ---- tiles in shared memory

// A row of a tile of floats is HS / 4 chunks of 16 bytes, swizzled: bit 1 of the row's number flips bit 1 of a chunk's,
// and bits 0 and 2 of the row's, combined by xor, flip bit 2. Shared memory serves eight lanes at a time if each wants
// 16 bytes, and sixteen if each wants 8. No two lanes of such a group meet in a bank. A lane wants chunks 4j + c of a
// row, for one c < 4 and all j. `first` has their offsets for j = 0 and 1; j + 2 is 32 floats further on.
struct Chunks {
    int first[2];
    __device__ int operator()(int j) const { return first[j % 2] + j / 2 * 32; }
};

template <int HS>
__device__ inline Chunks swizzled_chunks(int row, int c) {
    const int start = row * HS + 4 * (c ^ (row & 2)), odd = (row ^ row >> 2) & 1;
    return {{start + 16 * odd, start + 16 * (odd ^ 1)}};
}

// In bf16 eight lanes at a time want one chunk of eight rows, or eight chunks of one row. Bits 0 to 2 of the row's
// number flip the same bits of the chunk's number.
template <int HS>
__device__ inline int swizzled(int row, int chunk) { return row * HS + 8 * (chunk ^ row % 8); }

// Where in a tile this lane loads, and where this thread copies to.
template <class X, int HS>
struct Offsets;

template <int HS>
struct Offsets<float, HS> {
    Chunks score;         // in add_scores: row g, columns 4t .. 4t + 3 of 16
    Chunks sum[2];        // in add_sum: rows 2t and 2t + 1, columns 2g and 2g + 1 of 16
    int copy;             // the first chunk that the thread copies: eight threads copy 128 bytes of a row

    __device__ Offsets() {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, chunk = threadIdx.x % 8;
        const Chunks copy_chunks = swizzled_chunks<HS>(threadIdx.x / 8, chunk % 4);
        copy = chunk < 4 ? copy_chunks.first[0] : copy_chunks.first[1];
        score = swizzled_chunks<HS>(g, t);
        for (int i = 0; i < 2; i++) {
            sum[i] = swizzled_chunks<HS>(2 * t + i, g / 2);
            sum[i].first[0] += g % 2 * 2;
            sum[i].first[1] += g % 2 * 2;
        }
    }
};

template <int HS>
struct Offsets<bf16, HS> {
    // Where the row begins that this lane gives to load_matrices: one of rows 0 .. 15 and columns 0 .. 15, which are
    // four matrices. load_matrices delivers them row by row, or column by column.
    int by_row, by_column, copy;

    __device__ Offsets() {
        const int lane = threadIdx.x % 32;
        by_row = swizzled<HS>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
        by_column = swizzled<HS>(lane % 16, lane / 16);
        copy = swizzled<HS>(threadIdx.x / 8, threadIdx.x % 8);
    }

    // The same for rows row0 .. row0 + 15, where row0 is a multiple of 8, and columns 16k .. 16k + 15.
    __device__ static int at(int offset, int row0, int k) { return row0 * HS + (offset ^ 16 * k); }
};

// Starts to copy ROWS rows of an array, from row0 on; rows before 0 or from T on become zeros. In bf16 a thread
// computes addresses from its first row, which may be outside: there the copy reads nothing. On an H200 that took 4 to
// 6% less time. In TF32 there are no registers left for it.
template <int HS, int ROWS>
__device__ inline void copy_rows(floatX* to, const floatX* rows, int row0, int T, int stride,
                                 const Offsets<floatX, HS>& offsets) {
    const int mine = threadIdx.x / 8 * stride + threadIdx.x % 8 * WIDTH;
    const floatX* first = rows + ((long long)row0 * stride + mine);
    #pragma unroll
    for (int i = 0; i < ROWS * HS / WIDTH / THREADS; i++) {
        const int down = i * (THREADS / 8) % ROWS, right = i * (THREADS / 8) / ROWS * 8 * WIDTH;
        const int row = row0 + threadIdx.x / 8 + down, column = threadIdx.x % 8 * WIDTH + right;
        const bool inside = (unsigned)row < (unsigned)T;
        const floatX* from = rows + (inside ? (long long)row * stride + column : 0);
        if (IS_BF16) from = first + down * stride + right;
        copy_four(to + offsets.copy + down * HS + right, from, inside);
    }
}

// Starts to copy a tile of each of two arrays.
template <int HS>
__device__ inline void copy_tiles(floatX (&tiles)[2][TILE_SIZE], const floatX* rows0, const floatX* rows1, int row0,
                                  int T, int stride0, int stride1, const Offsets<floatX, HS>& offsets) {
    copy_rows<HS, TILE_SIZE / HS>(tiles[0], rows0, row0, T, stride0, offsets);
    copy_rows<HS, TILE_SIZE / HS>(tiles[1], rows1, row0, T, stride1, offsets);
}

// After this all threads see the block's copies, and no thread still reads the stage that the next copies overwrite.
__device__ inline void copies_finish() {
    copies_wait();
    __syncthreads();
}

// ---- a warp's own rows

// Rows row0 .. row0 + 16 M - 1 of an array as operand A of scores, where row0 is the warp's first row; zeros from row T
// on. `get` works after copies_finish and `finish`. If KEPT, the rows stay in registers. Else the warp fetches them
// from shared memory for each product: SIZE numbers for all warps.
template <class X, int HS, int M, bool KEPT>
struct Operand;

// Floats lie in shared memory in the order in which the lanes read them. Each thread writes the numbers that it reads.
template <int HS, int M, bool KEPT>
struct Operand<float, HS, M, KEPT> {
    static constexpr int SIZE = KEPT ? 0 : HS * 16 * M * WARPS;
    float* mine;
    float a[HS / 16][M][2][4];

    __device__ Operand(float* shared) : mine(shared + 4 * threadIdx.x) {}

    __device__ void start(const float* rows, int row0, int T, int stride, const Offsets<float, HS>&,
                          bool keep_nan = false) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = row0 + 16 * m + 8 * h + g;
                #pragma unroll
                for (int k = 0; k < HS / 16; k++) {
                    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (row < T) x = *reinterpret_cast<const float4*>(rows + (long long)row * stride + 16 * k + 4 * t);
                    a[k][m][0][h] = to_tf32(x.x, x.y, keep_nan);
                    a[k][m][0][h + 2] = to_tf32(x.y);
                    a[k][m][1][h] = to_tf32(x.z, x.w, keep_nan);
                    a[k][m][1][h + 2] = to_tf32(x.w);
                }
            }
        }
        if (KEPT) return;
        #pragma unroll
        for (int i = 0; i < HS / 16 * M * 2; i++) {
            const float (&x)[4] = a[i / 2 / M][i / 2 % M][i % 2];
            *reinterpret_cast<float4*>(mine + i * 4 * THREADS) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }

    __device__ void finish(const Offsets<float, HS>&) {}

    __device__ void get(float (&to)[M][2][4], int k, const Offsets<float, HS>&) const {
        #pragma unroll
        for (int i = 0; i < M * 2; i++) {
            const float (&x)[4] = a[k][i / 2][i % 2];
            float4 y = make_float4(x[0], x[1], x[2], x[3]);
            if (!KEPT) y = *reinterpret_cast<const float4*>(mine + (k * M * 2 + i) * 4 * THREADS);
            float (&z)[4] = to[i / 2][i % 2];
            z[0] = y.x, z[1] = y.y, z[2] = y.z, z[3] = y.w;
        }
    }
};

// Numbers of bf16 are always copied to shared memory, in the order of a tile.
template <int HS, int M, bool KEPT>
struct Operand<bf16, HS, M, KEPT> {
    static constexpr int SIZE = HS * 16 * M * WARPS;
    bf16* shared;
    unsigned a[KEPT ? HS / 16 : 1][M][1][4];

    __device__ Operand(bf16* shared) : shared(shared) {}

    __device__ void start(const bf16* rows, int row0, int T, int stride, const Offsets<bf16, HS>& offsets,
                          bool keep_nan = false) {
        const int block_row0 = row0 - threadIdx.x / 32 * 16 * M;
        copy_rows<HS, 16 * M * WARPS>(shared, rows, block_row0, T, stride, offsets);
    }

    __device__ void finish(const Offsets<bf16, HS>& offsets) {
        #pragma unroll
        for (int i = 0; i < (KEPT ? HS / 16 * M : 0); i++) fetch(a[i / M][i % M][0], i % M, i / M, offsets);
    }

    __device__ void fetch(unsigned (&to)[4], int m, int k, const Offsets<bf16, HS>& offsets) const {
        load_matrices<false>(to, shared + offsets.at(offsets.by_column, (threadIdx.x / 32 * M + m) * 16, k));
    }

    __device__ void get(unsigned (&to)[M][1][4], int k, const Offsets<bf16, HS>& offsets) const {
        #pragma unroll
        for (int m = 0; m < M; m++) {
            if (!KEPT) fetch(to[m][0], m, k, offsets);
            #pragma unroll
            for (int i = 0; i < (KEPT ? 4 : 0); i++) to[m][0][i] = a[k][m][0][i];
        }
    }
};

// The same rows of another array, not rounded. `sum` multiplies them by those of an operand, number by number.
template <class X, int HS, int M>
struct Factors;

template <int HS, int M>
struct Factors<float, HS, M> {
    const float* rows;
    int row0, T, stride;

    __device__ Factors(float*) {}

    __device__ void start(const float* rows, int row0, int T, int stride, const Offsets<float, HS>&) {
        this->rows = rows, this->row0 = row0, this->T = T, this->stride = stride;
    }

    // This lane's part of the sum of the products in row 16m + 8h + g.
    template <bool KEPT>
    __device__ float sum(const Operand<float, HS, M, KEPT>& operand, int m, int h, const Offsets<float, HS>&) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = row0 + 16 * m + 8 * h + g;
        float sum = 0.0f;
        #pragma unroll
        for (int k = 0; k < HS / 16; k++) {
            float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < T) x = *reinterpret_cast<const float4*>(rows + (long long)row * stride + 16 * k + 4 * t);
            const float (&y)[2][4] = operand.a[k][m];
            sum += tf32_bits(y[0][h]) * x.x + tf32_bits(y[0][h + 2]) * x.y;
            sum += tf32_bits(y[1][h]) * x.z + tf32_bits(y[1][h + 2]) * x.w;
        }
        return sum;
    }
};

template <int HS, int M>
struct Factors<bf16, HS, M> : Operand<bf16, HS, M, false> {
    __device__ Factors(bf16* shared) : Operand<bf16, HS, M, false>(shared) {}

    template <bool KEPT>
    __device__ float sum(const Operand<bf16, HS, M, KEPT>& operand, int m, int h,
                         const Offsets<bf16, HS>& offsets) const {
        float sum = 0.0f;
        #pragma unroll
        for (int k = 0; k < HS / 16; k++) {
            unsigned x[4], y[4];
            this->fetch(x, m, k, offsets);
            operand.fetch(y, m, k, offsets);
            #pragma unroll
            for (int i = h; i < 4; i += 2) sum += first_of(x[i]) * first_of(y[i]) + second_of(x[i]) * second_of(y[i]);
        }
        return sum;
    }
};

// ---- products

// s (16 M, 8 N) += a tile^T, over columns 16k .. 16k + 15.
template <int HS, int M, int N>
__device__ inline void add_scores(float (&s)[M][N][4], const float (&a)[M][2][4], const float* tile, int k,
                                  const Offsets<float, HS>& offsets, bool keep_nan = false) {
    float4 b[N];
    #pragma unroll
    for (int n = 0; n < N; n++) b[n] = *reinterpret_cast<const float4*>(tile + offsets.score(k) + 8 * n * HS);
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int m = 0; m < M; m++)
            mma(s[m][n], a[m][0], to_tf32(b[n].x, b[n].y, keep_nan), to_tf32(b[n].y), s[m][n]);
    }
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int m = 0; m < M; m++)
            mma(s[m][n], a[m][1], to_tf32(b[n].z, b[n].w, keep_nan), to_tf32(b[n].w), s[m][n]);
    }
}

template <int HS, int M, int N>
__device__ inline void add_scores(float (&s)[M][N][4], const unsigned (&a)[M][1][4], const bf16* tile, int k,
                                  const Offsets<bf16, HS>& offsets, bool keep_nan = false) {
    unsigned b[N / 2][4];
    #pragma unroll
    for (int n = 0; n < N / 2; n++) load_matrices<false>(b[n], tile + offsets.at(offsets.by_row, 16 * n, k));
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int m = 0; m < M; m++) mma_bf16(s[m][n], a[m][0], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1], s[m][n]);
    }
}

// The scores of two pairs of matrices, over all columns: s += q k^T, t += d v^T.
template <int HS, int M, int N, class Q, class D>
__device__ inline void add_two_scores(float (&s)[M][N][4], const Q& q, const floatX* k, float (&t)[M][N][4], const D& d,
                                      const floatX* v, const Offsets<floatX, HS>& offsets) {
    #pragma unroll
    for (int i = 0; i < HS / 16; i++) {
        Word a[M][PRODUCTS][4];
        q.get(a, i, offsets);
        add_scores<HS>(s, a, k, i, offsets);
        d.get(a, i, offsets);
        add_scores<HS>(t, a, v, i, offsets);
    }
}

// sum (16 M, HS) += p tile, over rows 8n .. 8n + 7 of the tile; p is rounded. sum is transposed: element 2e + i of a
// lane's sum[j][2m + h] belongs to column 16j + 2g + e of row 16m + 8h + 2t + i.
template <int HS, int M, int N>
__device__ inline void add_sum(float (&sum)[HS / 16][2 * M][4], const float (&p)[M][N][4], const float* tile, int n,
                               const Offsets<float, HS>& offsets, bool keep_nan = false) {
    #pragma unroll
    for (int j = 0; j < HS / 16; j++) {
        const float2 even = *reinterpret_cast<const float2*>(tile + offsets.sum[0](j) + 8 * n * HS);
        const float2 odd = *reinterpret_cast<const float2*>(tile + offsets.sum[1](j) + 8 * n * HS);
        const float a[4] = {to_tf32(even.x, even.y, keep_nan), to_tf32(even.y),
                            to_tf32(odd.x, odd.y, keep_nan), to_tf32(odd.y)};
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                mma(sum[j][2 * m + h], a, p[m][n][2 * h], p[m][n][2 * h + 1], sum[j][2 * m + h]);
            }
        }
    }
}

// The same in bf16, over rows 8n .. 8n + 15. Element 2e + i of a lane's sum[j][2m + h] belongs to column 16j + 8h + 2t
// + i of row 16m + 8e + g.
template <int HS, int M, int N>
__device__ inline void add_sum(float (&sum)[HS / 16][2 * M][4], const float (&p)[M][N][4], const bf16* tile, int n,
                               const Offsets<bf16, HS>& offsets, bool keep_nan = false) {
    unsigned a[M][4];
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) a[m][i] = to_bf16(p[m][n + i / 2][i % 2 * 2], p[m][n + i / 2][i % 2 * 2 + 1]);
    }
    #pragma unroll
    for (int j = 0; j < HS / 16; j++) {
        unsigned b[4];
        load_matrices<true>(b, tile + offsets.at(offsets.by_column, 8 * n, j));
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            #pragma unroll
            for (int m = 0; m < M; m++) mma_bf16(sum[j][2 * m + h], a[m], b[2 * h], b[2 * h + 1], sum[j][2 * m + h]);
        }
    }
}

constexpr int ROWS_SUMMED = IS_BF16 ? 16 : 8;  // of the tile, by one add_sum

// p as add_sum takes it. TF32 needs it rounded; the add_sum for bf16 rounds by itself.
__device__ inline float summand(float x) { return IS_BF16 ? x : to_tf32(x); }
__device__ inline float summand(float x, bool keep_nan) { return IS_BF16 ? x : to_tf32(x, x, keep_nan); }

// A lane has a number for row g and one for row g + 8, of 16. Its transposed sums belong to other rows: 8h + 2t and 8h
// + 2t + 1. The lane fetches the numbers of these rows from the lanes that have them.
__device__ inline void to_columns(float (&column)[2][2], const float (&row)[2]) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        #pragma unroll
        for (int i = 0; i < 2; i++) column[h][i] = __shfl_sync(ALL_LANES, row[h], threadIdx.x % 4 * 8 + 4 * i);
    }
}

// Multiplies rows 16m .. 16m + 15 of sum by their scale. A lane has the scale of rows g and g + 8.
template <int HS, int H>
__device__ inline void scale_sum(float (&sum)[HS / 16][H][4], int m, const float (&scale)[2]) {
    float column[2][2];
    if (!IS_BF16) to_columns(column, scale);
    #pragma unroll
    for (int j = 0; j < HS / 16; j++) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) sum[j][2 * m + h][i] *= IS_BF16 ? scale[i / 2] : column[h][i % 2];
        }
    }
}

__device__ inline void store_two(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }
__device__ inline void store_two(bf16* to, float x, float y) { *reinterpret_cast<unsigned*>(to) = to_bf16(x, y); }

// Rows row0 .. row0 + 8 H - 1 of an array = scale * sum, but no row from T on. The lanes hold pairs of neighbours. In
// bf16 a warp collects them in `shared`, HS * 8 H numbers for each warp, and stores them by 16 bytes.
template <int HS, int H, class X>
__device__ inline void store_sum(X* rows, const float (&sum)[HS / 16][H][4], int row0, int T, int stride, float scale,
                                 X* shared) {
    constexpr bool TOGETHER = sizeof(X) == 2;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (TOGETHER) {
        shared += threadIdx.x / 32 * HS * 8 * H;
        __syncwarp();  // after this all lanes have read what lies in `shared`
    }
    #pragma unroll
    for (int h = 0; h < H; h++) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = IS_BF16 ? h / 2 * 16 + 8 * i + g : 8 * h + 2 * t + i;
            const int column = IS_BF16 ? h % 2 * 8 + 2 * t : 2 * g;
            if (!TOGETHER && row0 + row >= T) continue;
            #pragma unroll
            for (int j = 0; j < HS / 16; j++) {
                const float (&x)[4] = sum[j][h];
                X* to = TOGETHER ? shared + swizzled<HS>(row, 2 * j + h % 2) + 2 * t
                                 : rows + (long long)(row0 + row) * stride + 16 * j + column;
                store_two(to, x[IS_BF16 ? 2 * i : i] * scale, x[IS_BF16 ? 2 * i + 1 : i + 2] * scale);
            }
        }
    }
    if (!TOGETHER) return;
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < HS * 8 * H / 8 / 32; i++) {
        const int row = (32 * i + lane) / (HS / 8), chunk = lane % (HS / 8);
        if (row0 + row < T)
            *reinterpret_cast<uint4*>(rows + (long long)(row0 + row) * stride + 8 * chunk) =
                *reinterpret_cast<const uint4*>(shared + swizzled<HS>(row, chunk));
    }
}

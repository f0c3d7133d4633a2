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
// The operands of a tensor-core product, A (16, 8) B (8, 8) + C (16, 8), are spread over the lanes of a warp. With
// g = lane / 4 and t = lane % 4, a lane holds
//          of A  column t  t + 4        of B  column g         of C and of the result  column 2t  2t + 1
//   row g          a[0]    a[2]        row t     b0            row g                     c[0]     c[1]
//   row g + 8      a[1]    a[3]    row t + 4     b1            row g + 8                 c[2]     c[3]
// We choose two orders. So a lane can load its operands with wide accesses, and the result of one product is an operand
// of the next:
// - Scores, s = q k^T, are sums over HS. Any order will do if A and B have the same. Of each 16 columns lane t takes
//   4t .. 4t + 3. One 16-byte load fetches them: two columns for each of two products.
// - A lane gets row g, columns 2t and 2t + 1 of s. Sums over keys need p as an operand, and may take the keys in any
//   order: row t of the product stands for key 2t and row t + 4 for key 2t + 1, in A and in B. We compute the sums
//   transposed, out^T = v^T p^T, so p is B: c[0], c[1] are b0, b1 without a move. Row g of A stands for column 2g of
//   v, and row g + 8 for column 2g + 1: one 8-byte load fetches both. The price: a lane's sums belong to other queries
//   than its scores, so the factors that rescale the sums must change lanes (to_columns).
//
// bf16 needs no such choices. Its product is A (16, 16) B (16, 8) + C (16, 8). In place of columns t and t + 4 of A a
// lane holds two pairs of columns, from 2t and from 2t + 8, each pair in one word, and of B such pairs of rows. Two
// results, packed, are an operand A, so the sums are not transposed. The instruction ldmatrix fetches the words of
// four (8, 8) matrices from shared memory, as they are or transposed.
//
// Each kernel is written once. Four things depend on the type: how a lane holds its operands (Operand), where they are
// in a tile (Offsets), the products (add_scores, add_sum), and where a lane's numbers of a sum belong (scale_sum,
// store_sum). In bf16 the kernels round p, ds and the results; all else is fp32.

#define WARP_SIZE 32
#include "flash_attention.cuh"

// Loads four (8, 8) matrices of bf16 from shared memory. `row` is the address of row lane % 8 of matrix lane / 8. The
// lane gets, as r[i], columns 2t and 2t + 1 of row g of matrix i; if TRANSPOSED, rows 2t and 2t + 1 of column g.
template <bool TRANSPOSED>
__device__ inline void load_matrices(unsigned (&r)[4], const bf16* row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
    const unsigned address = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
#elif defined(LLMC_CPU)
    struct Lane { const bf16* row; unsigned r[4]; } mine = {row, {}};
    cpu_warp_together(ALL_LANES, mine, [](Lane* const lanes[32]) {
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++) {
                const int row0 = TRANSPOSED ? 2 * t : g, row1 = TRANSPOSED ? 2 * t + 1 : g;
                const int column0 = TRANSPOSED ? g : 2 * t, column1 = TRANSPOSED ? g : 2 * t + 1;
                const unsigned first = lanes[8 * i + row0]->row[column0].bits;
                lanes[lane]->r[i] = first | (unsigned)lanes[8 * i + row1]->row[column1].bits << 16;
            }
        }
    }, "load_matrices");
    for (int i = 0; i < 4; i++) r[i] = mine.r[i];
#endif
}

// As copy_four, a single float.
__device__ inline void copy_one(float* to, const float* from, bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
        :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 4 : 0) : "memory");
#else
    *to = inside ? *from : 0.0f;
#endif
}

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

// ---- instructions

// The tensor core sees of each operand TF32's 10 bits of mantissa, and ignores the bits below. This function rounds to
// the nearest such number, and halfway cases away from zero.
__device__ inline float to_tf32(float x) {
    return __uint_as_float(__float_as_uint(x) + 0x1000u);
}

// That addition turns a NaN with all bits set, as a GPU's arithmetic makes it, into a 0 of the other sign. Nobody would
// see it. With keep_nan the result is NaN if x or y is: one comparison for two numbers of a row.
//
// Each number is compared once: q and dout when a warp loads its own rows, k and v in forward's tile on the diagonal.
// There query i meets key and value i, so a NaN in q, k or v makes lse or out of row i NaN.
// Backward need not look for NaNs in q, k and v: if lse, out or dout of a row is not finite, D of that row is NaN or
// infinite. In the tile on the diagonal D makes dq NaN. The block of keys adds 0 * D of its own rows to the factors of
// dk and dv. In bf16 every NaN stays one anyway.
__device__ inline float to_tf32(float x, float y, bool keep_nan) {
    const bool unordered = !(x < y || x >= y);
    return keep_nan && unordered ? __uint_as_float(0x7fc00000u) : to_tf32(x);
}

// What the tensor core sees of x.
__device__ inline float tf32_bits(float x) {
    return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}

// d (16, 8) = a (16, 8) b (8, 8) + c.
__device__ inline void mma(float (&d)[4], const float (&a)[4], float b0, float b1, const float (&c)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)),
          "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#elif defined(LLMC_CPU)
    struct Lane { float a[4], b[2], c[4]; } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    cpu_warp_together(ALL_LANES, mine, [](Lane* const lanes[32]) {
        float A[16][8], B[8][8];
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 4; i++) A[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = tf32_bits(lanes[lane]->a[i]);
            for (int i = 0; i < 2; i++) B[lane % 4 + i * 4][lane / 4] = tf32_bits(lanes[lane]->b[i]);
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                for (int k = 0; k < 8; k++)
                    lanes[lane]->c[i] += A[lane / 4 + i / 2 * 8][k] * B[k][lane % 4 * 2 + i % 2];
    }, "mma");
    for (int i = 0; i < 4; i++) d[i] = mine.c[i];
#else
    __trap();  // compute capability 7.5 has no TF32: the launchers refuse it
#endif
}

// The same in bf16, 16 columns of A by 16 rows of B: d (16, 8) = a (16, 16) b (16, 8) + c.
__device__ inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&c)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#elif defined(LLMC_CPU)
    struct Lane { unsigned a[4], b[2]; float c[4]; };
    Lane mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    cpu_warp_together(ALL_LANES, mine, [](Lane* const lanes[32]) {
        float A[16][16], B[16][8];
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 8; i++) {
                const unsigned a = lanes[lane]->a[i / 2], b = lanes[lane]->b[i / 2 % 2];
                const int column = lane % 4 * 2 + i % 2;
                A[lane / 4 + i / 2 % 2 * 8][column + i / 4 * 8] = i % 2 == 0 ? first_of(a) : second_of(a);
                if (i < 4) B[column + i / 2 * 8][lane / 4] = i % 2 == 0 ? first_of(b) : second_of(b);
            }
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                for (int k = 0; k < 16; k++)
                    lanes[lane]->c[i] += A[lane / 4 + i / 2 * 8][k] * B[k][lane % 4 * 2 + i % 2];
    }, "mma_bf16");
    for (int i = 0; i < 4; i++) d[i] = mine.c[i];
#else
    __trap();  // the launchers refuse compute capability 7.5
#endif
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
        const Chunks of_copy = swizzled_chunks<HS>(threadIdx.x / 8, chunk % 4);
        copy = chunk < 4 ? of_copy.first[0] : of_copy.first[1];
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

// Behind this all threads see the block's copies, and no thread still reads the stage that the next copies overwrite.
__device__ inline void copies_finish() {
    copies_wait();
    __syncthreads();
}

// ---- a warp's own rows

// Rows row0 .. row0 + 16 M - 1 of an array as operand A of scores, where row0 is the warp's first row; zeros from row T
// on. `get` works behind copies_finish and `finish`. If KEPT, the rows stay in registers. Else the warp fetches them
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
        const int of_block = row0 - threadIdx.x / 32 * 16 * M;
        copy_rows<HS, 16 * M * WARPS>(shared, rows, of_block, T, stride, offsets);
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

// A lane has a number for row g and one for row g + 8, of 16. Its transposed sums belong to other rows: 8h + 2t and 8h +
// 2t + 1. The lane fetches the numbers of these rows from the lanes that have them.
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
        __syncwarp();  // behind this all lanes have read what lies in `shared`
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

// ---- forward

// 8 N keys and values for the 16 M queries of a warp: p = 2^(to_exponent * q k^T - reference). The reference keeps a
// row's sums in range. The row's largest exponent would do, but so does any number close to it. So the reference moves,
// and the sums so far are rescaled, only if an exponent is above it by more than 8. The step on the diagonal comes
// first and sets the reference. `ahead` is the number of the first key less that of the first query.
template <int HS, int M, int N, bool DIAGONAL, class Q>
__device__ inline void attend(float (&out)[HS / 16][2 * M][4], float (&sum)[M][2], float (&reference)[M][2],
                              const Q& q, const floatX* keys, const floatX* values, int ahead,
                              const Offsets<floatX, HS>& offsets) {
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
            const floatX *keys = tiles[stage][0] + i * STEP * HS, *values = tiles[stage][1] + i * STEP * HS;
            const int step = tile * STEPS + i, ahead = ROWS == STEP ? 0 : step * STEP - row0;
            if (step == diagonal) attend<HS, M, N, true>(acc, sum, reference, q, keys, values, ahead, offsets);
            if (step < diagonal) attend<HS, M, N, false>(acc, sum, reference, q, keys, values, ahead, offsets);
        }
        copies_finish();
    }
    for (; tile >= 0; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        #pragma unroll
        for (int i = STEPS - 1; i >= 0; i--) {
            const floatX *keys = tiles[stage][0] + i * STEP * HS, *values = tiles[stage][1] + i * STEP * HS;
            attend<HS, M, N, false>(acc, sum, reference, q, keys, values, 0, offsets);
        }
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
                                           const floatX* keys, const floatX* values, int ahead,
                                           const Offsets<floatX, HS>& offsets) {
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
    #pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        Word a[M][PRODUCTS][4];
        q.get(a, k, offsets);
        add_scores<HS>(p, a, keys, k, offsets);
        dout.get(a, k, offsets);
        add_scores<HS>(ds, a, values, k, offsets);
    }
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

    start(tile, stage);
    Operand<floatX, HS, M, Q_KEPT> q(operands);
    Operand<floatX, HS, M, DOUT_KEPT> d(operands + q.SIZE);
    Factors<floatX, HS, M> o(operands + q.SIZE + d.SIZE);
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
    if (IS_BF16) find_D();
    for (; tile >= first * ROWS / TILE_ROWS; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        #pragma unroll 1
        for (int i = STEPS - 1; i >= 0; i--) {
            const floatX *keys = tiles[stage][0] + i * STEP * HS, *values = tiles[stage][1] + i * STEP * HS;
            const int step = tile * STEPS + i, ahead = ROWS == STEP ? 0 : step * STEP - row0;
            if (step == diagonal)
                backward_query_tile<HS, M, N, true>(dq, q, d, log2_sum, D, keys, values, ahead, offsets);
            if (step < diagonal)
                backward_query_tile<HS, M, N, false>(dq, q, d, log2_sum, D, keys, values, ahead, offsets);
        }
        copies_finish();
    }
    for (; tile >= 0; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        #pragma unroll 1
        for (int i = STEPS - 1; i >= 0; i--) {
            const floatX *keys = tiles[stage][0] + i * STEP * HS, *values = tiles[stage][1] + i * STEP * HS;
            backward_query_tile<HS, M, N, false>(dq, q, d, log2_sum, D, keys, values, 0, offsets);
        }
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
    #pragma unroll
    for (int j = 0; j < HS / 16; j++) {
        Word a[M][PRODUCTS][4];
        k.get(a, j, offsets);
        add_scores<HS>(p, a, queries, j, offsets);
        v.get(a, j, offsets);
        add_scores<HS>(ds, a, douts, j, offsets);
    }
    #pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 two = *reinterpret_cast<const float2*>(lse + 8 * n + 2 * t);
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool hidden = DIAGONAL && ahead + 8 * n + 2 * t + i % 2 < 16 * m + 8 * (i / 2) + g;
                const float of_query = LOG2E * (i % 2 == 0 ? two.x : two.y);
                const float x = hidden ? 0.0f : exp2_approx(p[m][n][i] * to_exponent<HS>() - of_query);
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
    __shared__ float nan[THREADS];                              // of each thread: 0, or NaN if D is not finite
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
    Operand<floatX, HS, M, K_KEPT> k(operands);
    Operand<floatX, HS, M, V_KEPT> v(operands + k.SIZE);
    float dk[HS / 16][2 * M][4] = {}, dv[HS / 16][2 * M][4] = {};
    k.start(head.key, row0, T, head.stride, offsets);
    v.start(head.value, row0, T, head.stride, offsets);
    {
        const int row = row0 + threadIdx.x % 32;  // if M is 1, also rows of the next warp
        nan[threadIdx.x] = warp_sum(row < T ? 0.0f * dsum[row] : 0.0f);
    }
    copies_finish();
    k.finish(offsets);
    v.finish(offsets);
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
        store_sum<HS>(to, dk, row0, T, stride, rsqrtf((float)HS) + nan[threadIdx.x], shared);
        store_sum<HS>(to + head.C, dv, row0, T, stride, 1.0f + nan[threadIdx.x], shared);
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

// Causal attention without the (T, T) matrices ("FlashAttention", Dao et al., arXiv 2205.14135), in TF32.
//
// With s = q k^T / sqrt(HS) over the keys up to the query itself, for each batch row and head:
//   p = softmax(s);  out = p v;  lse = log(sum(exp(s)))                                    forward
//   p = exp(s - lse);  dp = dout v^T;  D = rowsum(dout * out);  ds = p * (dp - D)          backward
//   dq = ds k / sqrt(HS);  dk = ds^T q / sqrt(HS);  dv = p^T dout
// Shapes: qkv and dqkv (B, T, NH + 2 NKV, HS), the heads of q, then of k, then of v; out and dout (B, T, NH, HS); lse
// and D (B, NH, T). Query head h uses key and value head h // (NH / NKV).
//
// Bound by arithmetic on the tensor cores, and almost as much by shared memory, which feeds them: 2 T^2 HS operations a
// head forward, 5 T^2 HS backward (7 as done here), on O(T HS) bytes. Each warp owns 16 M rows of one side of the
// products; the other side streams through shared memory, TILE_FLOATS floats of each of two arrays at a time, and while
// the tensor cores work on one stage the next is being copied. M is 2 for HS = 64: each operand loaded then serves four
// products. Backward goes over the scores twice, with a block for each tile of queries (dq, D) and with a block for
// each tile of keys (dk, dv): every sum has one owner and a fixed order, without atomics, and two runs agree to the
// bit. If query heads share keys (NKV < NH), there is still a block for each query head and tile of keys, since fewer
// and longer ones would leave multiprocessors idle. It writes the head's share of dk and dv to dkv_heads
// (B, T, 2, NH, HS), and a last kernel, bound by memory, adds up the shares of each group of heads in order.
//
// The operands of a tensor-core product, A (16, 8) B (8, 8) + C (16, 8), are spread over the lanes of a warp. With
// g = lane / 4 and t = lane % 4, a lane holds
//          of A  column t  t + 4        of B  column g         of C and of the result  column 2t  2t + 1
//   row g          a[0]    a[2]        row t     b0            row g                     c[0]     c[1]
//   row g + 8      a[1]    a[3]    row t + 4     b1            row g + 8                 c[2]     c[3]
// Two liberties let a lane load its operands with wide accesses, and use the result of one product as an operand of the
// next:
// - Scores, s = q k^T, are sums over HS, in any order as long as A and B agree. Of each 16 columns lane t takes 4t ..
//   4t + 3, which one 16-byte load fetches: two for each of two products.
// - As a result of s, a lane holds row g, columns 2t and 2t + 1. Sums over keys need p as an operand, and may name keys
//   as they like: the product's row t stands for key 2t and its row t + 4 for key 2t + 1, in A and in B. The sums are
//   done transposed, out^T = v^T p^T, so that p is B: c[0], c[1] are then b0, b1 as they are, and row g of A may stand
//   for column 2g of v, row g + 8 for column 2g + 1, which one 8-byte load fetches. In return a lane's sums belong to
//   other queries than its scores, and what scales them changes lanes (to_columns).

#define WARP_SIZE 32
#include "common.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARPS = 4;                         // a block; two blocks fill a multiprocessor's registers
constexpr int THREADS = WARPS * 32;
constexpr int TILE_FLOATS = 2048;                // of a streamed tile: TILE_FLOATS / HS rows
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

// ---- instructions

// The tensor core sees of each operand TF32's 10 bits of mantissa, and ignores those below. This makes them the
// nearest such number's, halfway away from zero.
__device__ inline float to_tf32(float x) {
    return __uint_as_float(__float_as_uint(x) + 0x1000u);
}

// A NaN with all its bits set, as arithmetic makes it on a GPU, is made a 0 of the other sign by that, and would be
// hidden. With keep_nan the result is NaN if x or y is: one comparison for two numbers of a row.
//
// Each number is compared once, where a warp meets its own rows: q and dout when they are loaded, k and v in forward's
// tile on the diagonal. There query i meets key and value i, so a NaN in q, k or v is one in lse or out of row i.
// Backward does not search q, k and v again: what is not finite in lse, out or dout makes D of that row NaN or
// infinite. The tile on the diagonal hands that on to dq; the block of keys adds 0 * D of its own rows to the scales of
// dk and dv.
__device__ inline float to_tf32(float x, float y, bool keep_nan) {
    const bool unordered = !(x < y || x >= y);
    return keep_nan && unordered ? __uint_as_float(0x7fc00000u) : to_tf32(x);
}

// What it sees.
__device__ inline float tf32_bits(float x) {
    return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}

__device__ inline float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// exp(x / sqrt(HS)) = exp2(x * to_exponent).
template <int HS>
__device__ inline float to_exponent() {
    return LOG2E * rsqrtf((float)HS);
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

// Start to copy four floats, or one, to shared memory; zeros if not `inside`. They are there after copies_wait, for
// this thread.
__device__ inline void copy_four(float* to, const float* from, bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
#else
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    *reinterpret_cast<float4*>(to) = inside ? *reinterpret_cast<const float4*>(from) : zero;
#endif
}

__device__ inline void copy_one(float* to, const float* from, bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
        :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 4 : 0) : "memory");
#else
    *to = inside ? *from : 0.0f;
#endif
}

__device__ inline void copies_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// ---- tiles in shared memory

// A row of a tile is kept as HS / 4 chunks of 16 bytes, swizzled: bit 1 of the row's number flips bit 1 of a chunk's, and
// its bits 0 and 2, by xor, bit 2. Of an access of 16 bytes a lane, eight lanes are served at a time, of 8 bytes sixteen;
// no two lanes of such a group meet in a bank. A lane wants chunks 4j + c of one row, for some c < 4 and every j:
// `first` has their offsets in the tile for j = 0 and 1; each further two j are 32 floats on.
struct Chunks {
    int first[2];
    __device__ int operator()(int j) const { return first[j % 2] + j / 2 * 32; }
};

template <int HS>
__device__ inline Chunks swizzled_chunks(int row, int c) {
    const int start = row * HS + 4 * (c ^ (row & 2)), odd = (row ^ row >> 2) & 1;
    return {{start + 16 * odd, start + 16 * (odd ^ 1)}};
}

// The offsets in a tile of what this lane loads, and of what this thread copies.
struct Offsets {
    Chunks score;         // in add_scores: row g, columns 4t .. 4t + 3 of 16
    Chunks sum[2];        // in add_sum: rows 2t and 2t + 1, columns 2g and 2g + 1 of 16
    int copy;             // the first chunk that the thread copies: eight threads copy 128 bytes of a row
};

template <int HS>
__device__ inline Offsets tile_offsets() {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, chunk = threadIdx.x % 8;
    Offsets offsets = {swizzled_chunks<HS>(g, t),
                       {swizzled_chunks<HS>(2 * t, g / 2), swizzled_chunks<HS>(2 * t + 1, g / 2)}, 0};
    const Chunks copy = swizzled_chunks<HS>(threadIdx.x / 8, chunk % 4);
    offsets.copy = chunk < 4 ? copy.first[0] : copy.first[1];
    for (Chunks& sum : offsets.sum) {
        sum.first[0] += g % 2 * 2;
        sum.first[1] += g % 2 * 2;
    }
    return offsets;
}

// Starts to copy rows row0 .. row0 + TILE_FLOATS / HS - 1 of an array, zeros for rows before 0 or from T on.
template <int HS>
__device__ inline void copy_tile(float* tile, const float* rows, int row0, int T, int stride,
                                 const Offsets& offsets) {
    constexpr int ROWS = TILE_FLOATS / HS;
    #pragma unroll
    for (int i = 0; i < TILE_FLOATS / 4 / THREADS; i++) {
        const int down = i * (THREADS / 8) % ROWS, right = i * (THREADS / 8) / ROWS * 32;
        const int row = row0 + threadIdx.x / 8 + down, column = threadIdx.x % 8 * 4 + right;
        const bool inside = (unsigned)row < (unsigned)T;
        const float* from = rows + (inside ? (long long)row * stride + column : 0);
        copy_four(tile + offsets.copy + down * HS + right, from, inside);
    }
}

// Starts to copy the same rows of two arrays.
template <int HS>
__device__ inline void copy_tiles(float (&tiles)[2][TILE_FLOATS], const float* rows0, const float* rows1, int row0,
                                  int T, int stride0, int stride1, const Offsets& offsets) {
    copy_tile<HS>(tiles[0], rows0, row0, T, stride0, offsets);
    copy_tile<HS>(tiles[1], rows1, row0, T, stride1, offsets);
}

// The block's copies are there for all of its threads, and none still reads what the next ones overwrite.
__device__ inline void copies_finish() {
    copies_wait();
    __syncthreads();
}

// What a block works at, a query head of a sequence, and where its queries, keys and values begin in qkv: their rows are
// `stride` floats apart.
template <int HS>
struct Head {
    int C, sequence, number, stride;
    const float *query, *key, *value;

    __device__ Head(const float* qkv, int T, int NH, int NKV)
        : C(NH * HS), sequence(blockIdx.x / NH), number(blockIdx.x % NH), stride(C + 2 * NKV * HS),
          query(qkv + (long long)sequence * T * stride + number * HS),
          key(qkv + (long long)sequence * T * stride + C + number / (NH / NKV) * HS), value(key + NKV * HS) {}

    // Where its rows begin in an array (B, T, NH, HS).
    __device__ long long rows(int T) const { return (long long)sequence * T * C + number * HS; }
};

// ---- products

// Rows row0 .. row0 + 16 M - 1 of an array as operand A of scores: a[k] for columns 16k .. 16k + 15. Zeros from row T
// on.
template <int HS, int M>
__device__ inline void load_operand(float (&a)[HS / 16][M][2][4], const float* rows, int row0, int T, int stride,
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
}

// All columns of such an operand in shared memory, in the order in which the lanes read it; each thread writes what
// it will read.
template <int HS, int M>
struct Operand {
    static constexpr int FLOATS = HS * 16 * M * WARPS;
    float* mine;

    __device__ void put(const float (&a)[HS / 16][M][2][4]) const {
        #pragma unroll
        for (int k = 0; k < HS / 16; k++) {
            #pragma unroll
            for (int i = 0; i < 2 * M; i++) {
                const float (&x)[4] = a[k][i / 2][i % 2];
                *reinterpret_cast<float4*>(mine + (2 * M * k + i) * 4 * THREADS) = make_float4(x[0], x[1], x[2], x[3]);
            }
        }
    }

    __device__ void get(float (&a)[M][2][4], int k) const {
        #pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            const float4 x = *reinterpret_cast<const float4*>(mine + (2 * M * k + i) * 4 * THREADS);
            float (&to)[4] = a[i / 2][i % 2];
            to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
        }
    }
};

// s (16 M, 8 N) += a tile^T, over columns 16k .. 16k + 15.
template <int HS, int M, int N>
__device__ inline void add_scores(float (&s)[M][N][4], const float (&a)[M][2][4], const float* tile, int k,
                                  const Offsets& offsets, bool keep_nan = false) {
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

// sum (16 M, HS) += p tile, over rows 8n .. 8n + 7 of the tile; p is rounded. sum is kept transposed: of sum[j][2m +
// h], a lane has in element 2e + i column 16j + 2g + e of row 16m + 8h + 2t + i.
template <int HS, int M, int N>
__device__ inline void add_sum(float (&sum)[HS / 16][2 * M][4], const float (&p)[M][N][4], const float* tile, int n,
                               const Offsets& offsets, bool keep_nan = false) {
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

// A number for each of rows g and g + 8 of 16, as the lanes need it that hold a transposed sum: for rows 8h + 2t and
// 8h + 2t + 1.
__device__ inline void to_columns(float (&column)[2][2], const float (&row)[2]) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        #pragma unroll
        for (int i = 0; i < 2; i++) column[h][i] = __shfl_sync(ALL_LANES, row[h], threadIdx.x % 4 * 8 + 4 * i);
    }
}

// Rows 16m .. 16m + 15 of sum times their scale.
template <int HS, int H>
__device__ inline void scale_sum(float (&sum)[HS / 16][H][4], int m, const float (&scale)[2][2]) {
    #pragma unroll
    for (int j = 0; j < HS / 16; j++) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) sum[j][2 * m + h][i] *= scale[h][i % 2];
        }
    }
}

// Rows row0 .. row0 + 8 H - 1 of an array = scale * sum; nothing from row T on.
template <int HS, int H>
__device__ inline void store_sum(float* rows, const float (&sum)[HS / 16][H][4], int row0, int T, int stride,
                                 float scale) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int h = 0; h < H; h++) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = row0 + 8 * h + 2 * t + i;
            if (row >= T) continue;
            #pragma unroll
            for (int j = 0; j < HS / 16; j++)
                *reinterpret_cast<float2*>(rows + (long long)row * stride + 16 * j + 2 * g) =
                    make_float2(sum[j][h][i] * scale, sum[j][h][2 + i] * scale);
        }
    }
}

// ---- forward

// A tile of keys and values for the 16 M queries of a warp: p = 2^(to_exponent * q k^T - reference). The reference
// keeps a row's sums in range; its largest exponent would do, but so does any number close to it. It moves, and what
// has been summed is rescaled, only where an exponent passes it by more than 8. The tile on the diagonal comes first
// and sets it.
template <int HS, int M, bool DIAGONAL>
__device__ inline void attend(float (&out)[HS / 16][2 * M][4], float (&sum)[M][2], float (&reference)[M][2],
                              const float (&q)[HS / 16][M][2][4], const float (&tiles)[2][TILE_FLOATS],
                              const Offsets& offsets) {
    const float *keys = tiles[0], *values = tiles[1];
    constexpr int N = TILE_FLOATS / HS / 8;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float p[M][N][4] = {};
    #pragma unroll
    for (int k = 0; k < HS / 16; k++) add_scores<HS>(p, q[k], keys, k, offsets, DIAGONAL);

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
                    if (DIAGONAL && 8 * n + 2 * t + i > 16 * m + 8 * h + g) x = -INFINITY;
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
                if (!DIAGONAL) rise[h] = fmaxf(rise[h], 0.0f);
                reference[m][h] += rise[h];
                #pragma unroll
                for (int n = 0; n < N; n++) {
                    p[m][n][2 * h] -= rise[h];
                    p[m][n][2 * h + 1] -= rise[h];
                }
            }
            if (!DIAGONAL) {
                float scale[2][2];
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    rise[h] = exp2_approx(-rise[h]);
                    sum[m][h] *= rise[h];
                }
                to_columns(scale, rise);
                scale_sum<HS>(out, m, scale);
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
                p[m][n][i] = to_tf32(x);
            }
        }
        add_sum<HS>(out, p, values, n, offsets, DIAGONAL);
    }
}

// Grid (B * NH, tiles of WARPS * TILE_FLOATS / HS queries). A warp has as many queries as a streamed tile has keys,
// so that it meets the diagonal in a single one.
template <int HS>
__device__ inline void forward(float* out, float* lse, const float* qkv, int T, int NH, int NKV) {
    constexpr int ROWS = TILE_FLOATS / HS, M = ROWS / 16;
    __shared__ __align__(128) float tiles[2][2][TILE_FLOATS];    // stage; keys, values
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    // Tiles: the block's first, and the warp's own. Blocks with the most work come first.
    const int first = (gridDim.y - 1 - blockIdx.y) * WARPS, diagonal = first + warp;
    const Head<HS> head(qkv, T, NH, NKV);
    const Offsets offsets = tile_offsets<HS>();
    int tile = min(first + WARPS, ceil_div(T, ROWS)) - 1, stage = 0;
    const auto start = [&](int tile, int stage) {
        copy_tiles<HS>(tiles[stage], head.key, head.value, tile * ROWS, T, head.stride, head.stride, offsets);
    };

    start(tile, stage);
    float q[HS / 16][M][2][4], acc[HS / 16][2 * M][4] = {}, sum[M][2] = {}, reference[M][2] = {};
    load_operand<HS>(q, head.query, diagonal * ROWS, T, head.stride, true);
    copies_finish();
    for (; tile >= first; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        if (tile == diagonal) attend<HS, M, true>(acc, sum, reference, q, tiles[stage], offsets);
        if (tile < diagonal) attend<HS, M, false>(acc, sum, reference, q, tiles[stage], offsets);
        copies_finish();
    }
    for (; tile >= 0; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        attend<HS, M, false>(acc, sum, reference, q, tiles[stage], offsets);
        copies_finish();
    }

    #pragma unroll
    for (int m = 0; m < M; m++) {
        float inverse[2], scale[2][2];
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = diagonal * ROWS + 16 * m + 8 * h + g;
            sum[m][h] += __shfl_xor_sync(ALL_LANES, sum[m][h], 1);
            sum[m][h] += __shfl_xor_sync(ALL_LANES, sum[m][h], 2);
            inverse[h] = 1.0f / sum[m][h];
            if (t == 0 && row < T) lse[(long long)blockIdx.x * T + row] = LN2 * reference[m][h] + logf(sum[m][h]);
        }
        to_columns(scale, inverse);
        scale_sum<HS>(acc, m, scale);
    }
    store_sum<HS>(out + head.rows(T), acc, diagonal * ROWS, T, head.C, 1.0f);
}

// ---- backward

// A tile of keys and values for the 16 M queries of a warp. The warp keeps the queries in registers and their dout in
// shared memory. With both in shared memory an H200 took 3% longer for HS = 64 and 18% for 128; with both in registers 3%
// for 128. log2_sum is lse as a power of two.
template <int HS, int M, bool DIAGONAL>
__device__ inline void backward_query_tile(float (&dq)[HS / 16][2 * M][4],
                                           const float (&q)[HS / 16][M][2][4], const Operand<HS, M>& dout,
                                           const float (&log2_sum)[M][2],
                                           const float (&D)[M][2], const float (&tiles)[2][TILE_FLOATS],
                                           const Offsets& offsets) {
    const float *keys = tiles[0], *values = tiles[1];
    constexpr int N = TILE_FLOATS / HS / 8;
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
        add_scores<HS>(p, q[k], keys, k, offsets);
        float a[M][2][4];
        dout.get(a, k);
        add_scores<HS>(ds, a, values, k, offsets);
    }
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool hidden = DIAGONAL && 8 * n + 2 * t + i % 2 > 16 * m + 8 * (i / 2) + g;
                const float x = hidden ? 0.0f : exp2_approx(p[m][n][i] * to_exponent<HS>() - log2_sum[m][i / 2]);
                const float y = x * ds[m][n][i];
                ds[m][n][i] = to_tf32(y, y, DIAGONAL);
            }
        }
        add_sum<HS>(dq, ds, keys, n, offsets);
    }
}

// Grid (B * NH, tiles of WARPS * TILE_FLOATS / HS queries). Sets dq, and D for the kernel that follows.
template <int HS>
__device__ inline void backward_query(float* dqkv, float* dsum, const float* dout, const float* out, const float* lse,
                                      const float* qkv, int T, int NH, int NKV) {
    constexpr int ROWS = TILE_FLOATS / HS, M = ROWS / 16;
    __shared__ __align__(128) float tiles[2][2][TILE_FLOATS];    // stage; keys, values
    DYNAMIC_SHARED(float, operands);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int first = (gridDim.y - 1 - blockIdx.y) * WARPS, diagonal = first + warp, row0 = diagonal * ROWS;
    const Head<HS> head(qkv, T, NH, NKV);
    out += head.rows(T);
    dout += head.rows(T);
    lse += (long long)blockIdx.x * T;
    dsum += (long long)blockIdx.x * T;
    const Offsets offsets = tile_offsets<HS>();
    int tile = min(first + WARPS, ceil_div(T, ROWS)) - 1, stage = 0;
    const auto start = [&](int tile, int stage) {
        copy_tiles<HS>(tiles[stage], head.key, head.value, tile * ROWS, T, head.stride, head.stride, offsets);
    };

    start(tile, stage);
    const Operand<HS, M> d{operands + 4 * threadIdx.x};
    float q[HS / 16][M][2][4], dq[HS / 16][2 * M][4] = {}, log2_sum[M][2], D[M][2];
    load_operand<HS>(q, head.query, row0, T, head.stride);
    {
        float da[HS / 16][M][2][4];
        load_operand<HS>(da, dout, row0, T, head.C, true);
        // D is taken of dout as the products see it, so that dp - D vanishes when it should.
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = row0 + 16 * m + 8 * h + g;
                log2_sum[m][h] = row < T ? LOG2E * lse[row] : 0.0f;
                D[m][h] = 0.0f;
                #pragma unroll
                for (int k = 0; k < HS / 16; k++) {
                    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (row < T) x = *reinterpret_cast<const float4*>(out + (long long)row * head.C + 16 * k + 4 * t);
                    const float (&y)[2][4] = da[k][m];
                    D[m][h] += tf32_bits(y[0][h]) * x.x + tf32_bits(y[0][h + 2]) * x.y;
                    D[m][h] += tf32_bits(y[1][h]) * x.z + tf32_bits(y[1][h + 2]) * x.w;
                }
                D[m][h] += __shfl_xor_sync(ALL_LANES, D[m][h], 1);
                D[m][h] += __shfl_xor_sync(ALL_LANES, D[m][h], 2);
                D[m][h] = fmaf(0.0f, log2_sum[m][h], D[m][h]);  // NaN if lse is not finite
                if (t == 0 && row < T) dsum[row] = D[m][h];
            }
        }
        d.put(da);
    }
    copies_finish();
    for (; tile >= first; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        if (tile == diagonal) backward_query_tile<HS, M, true>(dq, q, d, log2_sum, D, tiles[stage], offsets);
        if (tile < diagonal) backward_query_tile<HS, M, false>(dq, q, d, log2_sum, D, tiles[stage], offsets);
        copies_finish();
    }
    for (; tile >= 0; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        backward_query_tile<HS, M, false>(dq, q, d, log2_sum, D, tiles[stage], offsets);
        copies_finish();
    }
    store_sum<HS>(dqkv + (head.query - qkv), dq, row0, T, head.stride, rsqrtf((float)HS));
}

// A tile of queries and output gradients for the 16 M keys of a warp. The scores are transposed: keys by queries.
template <int HS, int M, bool DIAGONAL>
__device__ inline void backward_key_tile(float (&dk)[HS / 16][2 * M][4], float (&dv)[HS / 16][2 * M][4],
                                         const Operand<HS, M>& k, const Operand<HS, M>& v,
                                         const float (&tiles)[2][TILE_FLOATS],
                                         const float (&terms)[2][TILE_FLOATS / HS], const Offsets& offsets) {
    const float *queries = tiles[0], *douts = tiles[1], *lse = terms[0], *D = terms[1];
    constexpr int N = TILE_FLOATS / HS / 8;
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
        float a[M][2][4];
        k.get(a, j);
        add_scores<HS>(p, a, queries, j, offsets);
        v.get(a, j);
        add_scores<HS>(ds, a, douts, j, offsets);
    }
    #pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 two = *reinterpret_cast<const float2*>(lse + 8 * n + 2 * t);
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool hidden = DIAGONAL && 8 * n + 2 * t + i % 2 < 16 * m + 8 * (i / 2) + g;
                const float of_query = LOG2E * (i % 2 == 0 ? two.x : two.y);
                const float x = hidden ? 0.0f : exp2_approx(p[m][n][i] * to_exponent<HS>() - of_query);
                p[m][n][i] = to_tf32(x);
                ds[m][n][i] = to_tf32(x * ds[m][n][i]);
            }
        }
        add_sum<HS>(dv, p, douts, n, offsets);
        add_sum<HS>(dk, ds, queries, n, offsets);
    }
}

// Grid (B * NH, tiles of WARPS * TILE_FLOATS / HS keys). Sets dk and dv of dqkv; or if query heads share keys, this
// head's share of them in dkv_heads, which is null otherwise. Reads D from dsum.
template <int HS>
__device__ inline void backward_key(float* dqkv, float* dkv_heads, const float* dsum, const float* dout,
                                    const float* lse, const float* qkv, int T, int NH, int NKV) {
    constexpr int ROWS = TILE_FLOATS / HS, M = ROWS / 16;
    __shared__ __align__(128) float tiles[2][2][TILE_FLOATS];    // stage; queries, output gradients
    __shared__ __align__(8) float terms[2][2][ROWS];             // stage; lse and D of the queries
    __shared__ float nan[THREADS];                               // of each thread: 0, or NaN as D is
    DYNAMIC_SHARED(float, operands);
    const int warp = threadIdx.x / 32;
    const int first = blockIdx.y * WARPS, diagonal = first + warp, row0 = diagonal * ROWS;
    const Head<HS> head(qkv, T, NH, NKV);
    dout += head.rows(T);
    lse += (long long)blockIdx.x * T;
    dsum += (long long)blockIdx.x * T;
    const Offsets offsets = tile_offsets<HS>();
    const int end = ceil_div(T, ROWS);
    int tile = first, stage = 0;
    const auto start = [&](int tile, int stage) {
        copy_tiles<HS>(tiles[stage], head.query, dout, tile * ROWS, T, head.stride, head.C, offsets);
        // Queries from T on are zeros throughout, and add zeros.
        const int array = threadIdx.x / ROWS, down = threadIdx.x % ROWS, row = tile * ROWS + down;
        const float* term = array == 0 ? lse : dsum;
        if (array < 2) copy_one(&terms[stage][array][down], term + (row < T ? row : 0), row < T);
    };

    start(tile, stage);
    float* mine = operands + 4 * threadIdx.x;
    const Operand<HS, M> k{mine}, v{mine + Operand<HS, M>::FLOATS};
    float dk[HS / 16][2 * M][4] = {}, dv[HS / 16][2 * M][4] = {};
    {
        float a[HS / 16][M][2][4], b[HS / 16][M][2][4];
        load_operand<HS>(a, head.key, row0, T, head.stride);
        load_operand<HS>(b, head.value, row0, T, head.stride);
        k.put(a);
        v.put(b);
        const int row = row0 + threadIdx.x % 32;  // for HS = 128 the next warp's, too
        nan[threadIdx.x] = warp_sum(row < T ? 0.0f * dsum[row] : 0.0f);
    }
    copies_finish();
    for (; tile < min(first + WARPS, end); tile++, stage ^= 1) {
        start(tile + 1, stage ^ 1);
        if (tile == diagonal) backward_key_tile<HS, M, true>(dk, dv, k, v, tiles[stage], terms[stage], offsets);
        if (tile > diagonal) backward_key_tile<HS, M, false>(dk, dv, k, v, tiles[stage], terms[stage], offsets);
        copies_finish();
    }
    for (; tile < end; tile++, stage ^= 1) {
        start(tile + 1, stage ^ 1);
        backward_key_tile<HS, M, false>(dk, dv, k, v, tiles[stage], terms[stage], offsets);
        copies_finish();
    }
    // In both arrays dv lies C floats behind dk: dqkv is written to only if NKV = NH.
    const bool shared_keys = NKV < NH;
    float* to = shared_keys ? dkv_heads + head.rows(2 * T) : dqkv + (head.key - qkv);
    const int to_stride = shared_keys ? 2 * head.C : head.stride;
    store_sum<HS>(to, dk, row0, T, to_stride, rsqrtf((float)HS) + nan[threadIdx.x]);
    store_sum<HS>(to + head.C, dv, row0, T, to_stride, 1.0f + nan[threadIdx.x]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_forward_kernel_64(float* out, float* lse, const float* qkv, int T, int NH, int NKV) {
    forward<64>(out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_query_kernel_64(float* dqkv, float* dsum, const float* dout, const float* out,
                                         const float* lse, const float* qkv, int T, int NH, int NKV) {
    backward_query<64>(dqkv, dsum, dout, out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_key_kernel_64(float* dqkv, float* dkv_heads, const float* dsum, const float* dout,
                                       const float* lse, const float* qkv, int T, int NH, int NKV) {
    backward_key<64>(dqkv, dkv_heads, dsum, dout, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_forward_kernel_128(float* out, float* lse, const float* qkv, int T, int NH, int NKV) {
    forward<128>(out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_query_kernel_128(float* dqkv, float* dsum, const float* dout, const float* out,
                                         const float* lse, const float* qkv, int T, int NH, int NKV) {
    backward_query<128>(dqkv, dsum, dout, out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_key_kernel_128(float* dqkv, float* dkv_heads, const float* dsum, const float* dout,
                                       const float* lse, const float* qkv, int T, int NH, int NKV) {
    backward_key<128>(dqkv, dkv_heads, dsum, dout, lse, qkv, T, NH, NKV);
}

// dk and dv of dqkv = the sums over the query heads of each group of dkv_heads (B, T, 2, NH, HS). Thread (x, y) of a
// block: four channels of one of the B*T*2*NKV `heads` of keys and values.
extern "C" __global__ void flash_attention_group_sum_kernel(float* dqkv, const float* dkv_heads, int heads, int NH,
                                                            int NKV, int HS) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y, i = 4 * threadIdx.x, group = NH / NKV;
    if (n >= heads) return;
    const float* share = dkv_heads + (size_t)n * group * HS + i;  // the heads of a group are neighbours
    Vec sum = Aligned::load(share, 4);
    #pragma unroll 4
    for (int h = 1; h < group; h++) {
        const Vec x = Aligned::load(share + h * HS, 4);
        for (int k = 0; k < 4; k++) sum.x[k] += x.x[k];
    }
    const int position = n / (2 * NKV), head = NH + n % (2 * NKV);
    Aligned::store(dqkv + ((size_t)position * (NH + 2 * NKV) + head) * HS + i, sum, 4);
}

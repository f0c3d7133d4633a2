// Causal attention without the (T, T) matrices ("FlashAttention", Dao et al., arXiv 2205.14135), in TF32.
//
// With s = q k^T / sqrt(HS) over the keys up to the query itself, for each batch row and head:
//   p = softmax(s);  out = p v;  lse = log(sum(exp(s)))                                    forward
//   p = exp(s - lse);  dp = dout v^T;  D = rowsum(dout * out);  ds = p * (dp - D)          backward
//   dq = ds k / sqrt(HS);  dk = ds^T q / sqrt(HS);  dv = p^T dout
// Shapes: qkv and dqkv (B, T, 3, NH, HS); out and dout (B, T, NH, HS); lse and D (B, NH, T).
//
// Bound by arithmetic on the tensor cores, and almost as much by shared memory, which feeds them: 2 T^2 HS operations a
// head forward, 5 T^2 HS backward (7 as done here), on O(T HS) bytes. Each warp owns 16 M rows of one side of the
// products; the other side streams through shared memory, TILE_FLOATS floats of each of two arrays at a time, and while
// the tensor cores work on one stage the next is being copied. M is 2 for HS = 64: each operand loaded then serves four
// products. Backward goes over the scores twice, with a block for each tile of queries (dq, D) and with a block for
// each tile of keys (dk, dv): every sum has one owner and a fixed order, without atomics, and two runs agree to the bit.
//
// The operands of a tensor-core product, A (16, 8) B (8, 8) + C, are spread over the lanes of a warp. With g = lane / 4
// and t = lane % 4, a lane holds
//   of A rows g and g + 8, columns t and t + 4;   of B rows t and t + 4, column g;
//   of C and of the result rows g and g + 8, columns 2t and 2t + 1.
// Two liberties make every operand come out of shared memory, or out of another product, as its lane needs it:
// - Scores, s = q k^T, contract over HS, in any order as long as A and B agree. Lane t takes columns 4t .. 4t + 3 of
//   each 16, two for each of two products, so that one 16-byte load fetches them.
// - Sums over scores are done transposed: out^T = v^T p^T. What a lane holds of s as a result, row g and columns 2t and
//   2t + 1, is what it must hold of p^T as B, column g and rows t and t + 4, if row 2t of v takes the place of t and
//   row 2t + 1 that of t + 4. And row g of A may stand for column 2g of v, row g + 8 for column 2g + 1, which one
//   8-byte load fetches.

#define WARP_SIZE 32
#include "common.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARPS = 4;
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

// A row is kept as HS / 4 pieces of 16 bytes, with bits 1 and 2 of a piece's number flipped by bits of the row's,
// such that no access below meets a bank twice. Where piece 4j + c of a row is, c < 4, for j = 0 and 1; each further
// two j are 32 floats on.
struct Place {
    int at[2];
    __device__ int operator()(int j) const { return at[j % 2] + j / 2 * 32; }
};

template <int HS>
__device__ inline Place place(int row, int c) {
    const int start = row * HS + 4 * (c ^ (row & 2)), odd = (row ^ row >> 2) & 1;
    return {{start + 16 * odd, start + 16 * (odd ^ 1)}};
}

// Where a lane finds its part of each operand, and a thread what it copies.
struct Places {
    Place score;          // of row g, columns 4t .. 4t + 3 of 16
    Place sum[2];         // of rows 2t and 2t + 1, columns 2g and 2g + 1 of 16
    int copy;             // of the thread's first copied piece: eight threads copy 128 bytes of a row
};

template <int HS>
__device__ inline Places places() {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, piece = threadIdx.x % 8;
    Places p = {place<HS>(g, t), {place<HS>(2 * t, g / 2), place<HS>(2 * t + 1, g / 2)}, 0};
    const Place copy = place<HS>(threadIdx.x / 8, piece % 4);
    p.copy = piece < 4 ? copy.at[0] : copy.at[1];
    for (Place& sum : p.sum) {
        sum.at[0] += g % 2 * 2;
        sum.at[1] += g % 2 * 2;
    }
    return p;
}

// Starts to copy rows row0 .. row0 + TILE_FLOATS / HS - 1 of an array, zeros for rows before 0 or from T on.
template <int HS>
__device__ inline void copy_tile(float* tile, const float* rows, int row0, int T, int stride, const Places& where) {
    constexpr int ROWS = TILE_FLOATS / HS;
    #pragma unroll
    for (int i = 0; i < TILE_FLOATS / 4 / THREADS; i++) {
        const int down = i * (THREADS / 8) % ROWS, right = i * (THREADS / 8) / ROWS * 32;
        const int row = row0 + threadIdx.x / 8 + down, column = threadIdx.x % 8 * 4 + right;
        const bool inside = (unsigned)row < (unsigned)T;
        const float* from = rows + (inside ? (long long)row * stride + column : 0);
        copy_four(tile + where.copy + down * HS + right, from, inside);
    }
}

// ---- products

// Rows row0 .. row0 + 16 M - 1 of an array as operand A of scores: a[k] for columns 16k .. 16k + 15. Zeros from row T
// on.
template <int HS, int M>
__device__ inline void load_operand(float (&a)[HS / 16][M][2][4], const float* rows, int row0, int T, int stride) {
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
                a[k][m][0][h] = to_tf32(x.x);
                a[k][m][0][h + 2] = to_tf32(x.y);
                a[k][m][1][h] = to_tf32(x.z);
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
                                  const Places& where) {
    float4 b[N];
    #pragma unroll
    for (int n = 0; n < N; n++) b[n] = *reinterpret_cast<const float4*>(tile + where.score(k) + 8 * n * HS);
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int m = 0; m < M; m++) mma(s[m][n], a[m][0], to_tf32(b[n].x), to_tf32(b[n].y), s[m][n]);
    }
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int m = 0; m < M; m++) mma(s[m][n], a[m][1], to_tf32(b[n].z), to_tf32(b[n].w), s[m][n]);
    }
}

// sum (16 M, HS) += p tile, over rows 8n .. 8n + 7 of the tile; p is rounded. sum is kept transposed: of sum[j][2m +
// h], a lane has in element 2e + i column 16j + 2g + e of row 16m + 8h + 2t + i.
template <int HS, int M, int N>
__device__ inline void add_sum(float (&sum)[HS / 16][2 * M][4], const float (&p)[M][N][4], const float* tile, int n,
                               const Places& where) {
    #pragma unroll
    for (int j = 0; j < HS / 16; j++) {
        const float2 even = *reinterpret_cast<const float2*>(tile + where.sum[0](j) + 8 * n * HS);
        const float2 odd = *reinterpret_cast<const float2*>(tile + where.sum[1](j) + 8 * n * HS);
        const float a[4] = {to_tf32(even.x), to_tf32(even.y), to_tf32(odd.x), to_tf32(odd.y)};
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
                              const Places& where) {
    const float *keys = tiles[0], *values = tiles[1];
    constexpr int N = TILE_FLOATS / HS / 8;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float p[M][N][4] = {};
    #pragma unroll
    for (int k = 0; k < HS / 16; k++) add_scores<HS>(p, q[k], keys, k, where);

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
        add_sum<HS>(out, p, values, n, where);
    }
}

// Grid (B * NH, tiles of WARPS * TILE_FLOATS / HS queries). A warp has as many queries as a streamed tile has keys,
// so that it meets the diagonal in a single one.
template <int HS>
__device__ inline void forward(float* out, float* lse, const float* qkv, int T, int NH) {
    constexpr int ROWS = TILE_FLOATS / HS, M = ROWS / 16;
    __shared__ __align__(128) float tiles[2][2][TILE_FLOATS];    // stage; keys, values
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int C = NH * HS, b = blockIdx.x / NH, head = blockIdx.x % NH;
    // Tiles: the block's first, and the warp's own. Blocks with the most work come first.
    const int first = (gridDim.y - 1 - blockIdx.y) * WARPS, diagonal = first + warp;
    const float* query = qkv + (long long)b * T * 3 * C + head * HS;
    const float* key = query + C;
    const float* value = key + C;
    const Places where = places<HS>();
    int tile = min(first + WARPS, ceil_div(T, ROWS)) - 1, stage = 0;
    const auto start = [&](int tile, int stage) {
        copy_tile<HS>(tiles[stage][0], key, tile * ROWS, T, 3 * C, where);
        copy_tile<HS>(tiles[stage][1], value, tile * ROWS, T, 3 * C, where);
    };
    const auto finish = [] {
        copies_wait();
        __syncthreads();
    };

    start(tile, stage);
    float q[HS / 16][M][2][4], acc[HS / 16][2 * M][4] = {}, sum[M][2] = {}, reference[M][2] = {};
    load_operand<HS>(q, query, diagonal * ROWS, T, 3 * C);
    finish();
    for (; tile >= first; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        if (tile == diagonal) attend<HS, M, true>(acc, sum, reference, q, tiles[stage], where);
        if (tile < diagonal) attend<HS, M, false>(acc, sum, reference, q, tiles[stage], where);
        finish();
    }
    for (; tile >= 0; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        attend<HS, M, false>(acc, sum, reference, q, tiles[stage], where);
        finish();
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
    store_sum<HS>(out + (long long)b * T * C + head * HS, acc, diagonal * ROWS, T, C, 1.0f);
}

// ---- backward

// A tile of keys and values for the 16 M queries of a warp.
template <int HS, int M, bool DIAGONAL>
__device__ inline void backward_query_tile(float (&dq)[HS / 16][2 * M][4], const Operand<HS, M>& q,
                                           const Operand<HS, M>& dout, const float (&lse)[M][2], const float (&D)[M][2],
                                           const float (&tiles)[2][TILE_FLOATS], const Places& where) {
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
        float a[M][2][4];
        q.get(a, k);
        add_scores<HS>(p, a, keys, k, where);
        dout.get(a, k);
        add_scores<HS>(ds, a, values, k, where);
    }
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool hidden = DIAGONAL && 8 * n + 2 * t + i % 2 > 16 * m + 8 * (i / 2) + g;
                const float x = exp2_approx(p[m][n][i] * to_exponent<HS>() - lse[m][i / 2]);
                ds[m][n][i] = hidden ? 0.0f : to_tf32(x * ds[m][n][i]);
            }
        }
        add_sum<HS>(dq, ds, keys, n, where);
    }
}

// Grid (B * NH, tiles of WARPS * TILE_FLOATS / HS queries). Sets dq, and D for the kernel that follows.
template <int HS>
__device__ inline void backward_query(float* dqkv, float* dsum, const float* dout, const float* out, const float* lse,
                                      const float* qkv, int T, int NH) {
    constexpr int ROWS = TILE_FLOATS / HS, M = ROWS / 16;
    __shared__ __align__(128) float tiles[2][2][TILE_FLOATS];    // stage; keys, values
    DYNAMIC_SHARED(float, operands);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int C = NH * HS, b = blockIdx.x / NH, head = blockIdx.x % NH;
    const int first = (gridDim.y - 1 - blockIdx.y) * WARPS, diagonal = first + warp, row0 = diagonal * ROWS;
    const float* query = qkv + (long long)b * T * 3 * C + head * HS;
    const float* key = query + C;
    const float* value = key + C;
    out += (long long)b * T * C + head * HS;
    dout += (long long)b * T * C + head * HS;
    lse += (long long)blockIdx.x * T;
    dsum += (long long)blockIdx.x * T;
    const Places where = places<HS>();
    int tile = min(first + WARPS, ceil_div(T, ROWS)) - 1, stage = 0;
    const auto start = [&](int tile, int stage) {
        copy_tile<HS>(tiles[stage][0], key, tile * ROWS, T, 3 * C, where);
        copy_tile<HS>(tiles[stage][1], value, tile * ROWS, T, 3 * C, where);
    };
    const auto finish = [] {
        copies_wait();
        __syncthreads();
    };

    start(tile, stage);
    float* mine = operands + 4 * threadIdx.x;
    const Operand<HS, M> q{mine}, d{mine + Operand<HS, M>::FLOATS};
    float dq[HS / 16][2 * M][4] = {}, row_lse[M][2], D[M][2];
    {
        float a[HS / 16][M][2][4], da[HS / 16][M][2][4];
        load_operand<HS>(a, query, row0, T, 3 * C);
        load_operand<HS>(da, dout, row0, T, C);
        // D is taken of dout as the products see it, so that dp - D vanishes where it should.
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = row0 + 16 * m + 8 * h + g;
                row_lse[m][h] = row < T ? LOG2E * lse[row] : 0.0f;
                D[m][h] = 0.0f;
                #pragma unroll
                for (int k = 0; k < HS / 16; k++) {
                    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (row < T) x = *reinterpret_cast<const float4*>(out + (long long)row * C + 16 * k + 4 * t);
                    const float (&y)[2][4] = da[k][m];
                    D[m][h] += tf32_bits(y[0][h]) * x.x + tf32_bits(y[0][h + 2]) * x.y;
                    D[m][h] += tf32_bits(y[1][h]) * x.z + tf32_bits(y[1][h + 2]) * x.w;
                }
                D[m][h] += __shfl_xor_sync(ALL_LANES, D[m][h], 1);
                D[m][h] += __shfl_xor_sync(ALL_LANES, D[m][h], 2);
                if (t == 0 && row < T) dsum[row] = D[m][h];
            }
        }
        q.put(a);
        d.put(da);
    }
    finish();
    for (; tile >= first; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        if (tile == diagonal) backward_query_tile<HS, M, true>(dq, q, d, row_lse, D, tiles[stage], where);
        if (tile < diagonal) backward_query_tile<HS, M, false>(dq, q, d, row_lse, D, tiles[stage], where);
        finish();
    }
    for (; tile >= 0; tile--, stage ^= 1) {
        start(tile - 1, stage ^ 1);
        backward_query_tile<HS, M, false>(dq, q, d, row_lse, D, tiles[stage], where);
        finish();
    }
    store_sum<HS>(dqkv + (query - qkv), dq, row0, T, 3 * C, rsqrtf((float)HS));
}

// A tile of queries and output gradients for the 16 M keys of a warp. The scores are transposed: keys by queries.
template <int HS, int M, bool DIAGONAL>
__device__ inline void backward_key_tile(float (&dk)[HS / 16][2 * M][4], float (&dv)[HS / 16][2 * M][4],
                                         const Operand<HS, M>& k, const Operand<HS, M>& v,
                                         const float (&tiles)[2][TILE_FLOATS],
                                         const float (&terms)[2][TILE_FLOATS / HS], const Places& where) {
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
        add_scores<HS>(p, a, queries, j, where);
        v.get(a, j);
        add_scores<HS>(ds, a, douts, j, where);
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
        add_sum<HS>(dv, p, douts, n, where);
        add_sum<HS>(dk, ds, queries, n, where);
    }
}

// Grid (B * NH, tiles of WARPS * TILE_FLOATS / HS keys). Sets dk and dv; reads D from dsum.
template <int HS>
__device__ inline void backward_key(float* dqkv, const float* dsum, const float* dout, const float* lse,
                                    const float* qkv, int T, int NH) {
    constexpr int ROWS = TILE_FLOATS / HS, M = ROWS / 16;
    __shared__ __align__(128) float tiles[2][2][TILE_FLOATS];    // stage; queries, output gradients
    __shared__ __align__(8) float terms[2][2][ROWS];             // stage; lse and D of the queries
    DYNAMIC_SHARED(float, operands);
    const int warp = threadIdx.x / 32;
    const int C = NH * HS, b = blockIdx.x / NH, head = blockIdx.x % NH;
    const int first = blockIdx.y * WARPS, diagonal = first + warp, row0 = diagonal * ROWS;
    const float* query = qkv + (long long)b * T * 3 * C + head * HS;
    const float* key = query + C;
    const float* value = key + C;
    dout += (long long)b * T * C + head * HS;
    lse += (long long)blockIdx.x * T;
    dsum += (long long)blockIdx.x * T;
    const Places where = places<HS>();
    const int end = ceil_div(T, ROWS);
    int tile = first, stage = 0;
    const auto start = [&](int tile, int stage) {
        copy_tile<HS>(tiles[stage][0], query, tile * ROWS, T, 3 * C, where);
        copy_tile<HS>(tiles[stage][1], dout, tile * ROWS, T, C, where);
        // Queries from T on are zeros throughout, and add zeros.
        const int array = threadIdx.x / ROWS, down = threadIdx.x % ROWS, row = tile * ROWS + down;
        const float* term = array == 0 ? lse : dsum;
        if (array < 2) copy_one(&terms[stage][array][down], term + (row < T ? row : 0), row < T);
    };
    const auto finish = [] {
        copies_wait();
        __syncthreads();
    };

    start(tile, stage);
    float* mine = operands + 4 * threadIdx.x;
    const Operand<HS, M> k{mine}, v{mine + Operand<HS, M>::FLOATS};
    float dk[HS / 16][2 * M][4] = {}, dv[HS / 16][2 * M][4] = {};
    {
        float a[HS / 16][M][2][4], b[HS / 16][M][2][4];
        load_operand<HS>(a, key, row0, T, 3 * C);
        load_operand<HS>(b, value, row0, T, 3 * C);
        k.put(a);
        v.put(b);
    }
    finish();
    for (; tile < min(first + WARPS, end); tile++, stage ^= 1) {
        start(tile + 1, stage ^ 1);
        if (tile == diagonal) backward_key_tile<HS, M, true>(dk, dv, k, v, tiles[stage], terms[stage], where);
        if (tile > diagonal) backward_key_tile<HS, M, false>(dk, dv, k, v, tiles[stage], terms[stage], where);
        finish();
    }
    for (; tile < end; tile++, stage ^= 1) {
        start(tile + 1, stage ^ 1);
        backward_key_tile<HS, M, false>(dk, dv, k, v, tiles[stage], terms[stage], where);
        finish();
    }
    store_sum<HS>(dqkv + (key - qkv), dk, row0, T, 3 * C, rsqrtf((float)HS));
    store_sum<HS>(dqkv + (value - qkv), dv, row0, T, 3 * C, 1.0f);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_forward_kernel_64(float* out, float* lse, const float* qkv, int T, int NH) {
    forward<64>(out, lse, qkv, T, NH);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_query_kernel_64(float* dqkv, float* dsum, const float* dout, const float* out,
                                         const float* lse, const float* qkv, int T, int NH) {
    backward_query<64>(dqkv, dsum, dout, out, lse, qkv, T, NH);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_key_kernel_64(float* dqkv, const float* dsum, const float* dout, const float* lse,
                                       const float* qkv, int T, int NH) {
    backward_key<64>(dqkv, dsum, dout, lse, qkv, T, NH);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_forward_kernel_128(float* out, float* lse, const float* qkv, int T, int NH) {
    forward<128>(out, lse, qkv, T, NH);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_query_kernel_128(float* dqkv, float* dsum, const float* dout, const float* out,
                                         const float* lse, const float* qkv, int T, int NH) {
    backward_query<128>(dqkv, dsum, dout, out, lse, qkv, T, NH);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
flash_attention_backward_key_kernel_128(float* dqkv, const float* dsum, const float* dout, const float* lse,
                                       const float* qkv, int T, int NH) {
    backward_key<128>(dqkv, dsum, dout, lse, qkv, T, NH);
}

// Causal attention as in flash_attention.cu, in bf16, by Hopper's own matrix product: for GPUs of compute capability
// 9.0.
//
// mma.sync is an instruction of a warp, which has loaded its operands into registers before. wgmma is one of a
// warpgroup, four warps with 64 rows together. It reads a whole tile of keys or of values from shared memory by itself,
// and nobody waits for it: the warps go on, and ask for its result later. What is left to the warps is the softmax, so
// a warpgroup starts the scores of its next tile and the sum over values of its last one, and takes exponentials while
// the tensor cores work.
#define ARCHITECTURE 90a  // wgmma is in no GPU before compute capability 9.0, and in none after it
#define WARP_SIZE 32
#define floatX bf16       // whatever the run's precision is
#include "flash_attention.cuh"

// ---- tiles in shared memory

#ifdef LLMC_CPU
#define SHARED_TILES(name) bf16* const name = (bf16*)cpu_dynamic_shared()
#else
#define SHARED_TILES(name) extern __shared__ __align__(1024) bf16 name[]
#endif

// A tile is kept as wgmma wants it, in slabs of 64 columns: a row of a slab is 128 bytes, eight rows are 1024, and the
// tile begins at a multiple of that. Row r has its chunks of 16 bytes swizzled: chunk c is where c ^ (r % 8) would be.
// Rows of queries and of keys are read along the sum (HS), those of values across it, and the one order serves both.
template <int ROWS>
__device__ inline int place(int row, int column) {
    return column / 64 * ROWS * 64 + row * 64 + (column % 64 ^ row % 8 * 8);
}

__device__ inline unsigned shared_address(const bf16* p) {
#ifdef LLMC_CPU
    return (unsigned)((const char*)p - (const char*)cpu_dynamic_shared());
#else
    return (unsigned)__cvta_generic_to_shared(p);
#endif
}

// What wgmma is told of an operand in shared memory, in units of 16 bytes: where it begins; from bit 16 on, for values,
// how far it is from a slab to the next; from bit 32 on how far from eight rows to the next eight. Bit 62: swizzled,
// 128 bytes.
using Descriptor = unsigned long long;
__device__ inline Descriptor descriptor(const bf16* tile, int slab_bytes) {
    return (Descriptor)(shared_address(tile) >> 4) | (Descriptor)(slab_bytes >> 4) << 16 | (Descriptor)64 << 32 |
           (Descriptor)1 << 62;
}

// The same, so many numbers further on.
__device__ inline Descriptor further(Descriptor operand, int numbers) { return operand + (numbers * 2 >> 4); }

// ---- instructions

#ifdef LLMC_CPU
// Where a byte of an operand lies: bits 7 to 9 of its address flip bits 4 to 6. Where a chunk of 16 bytes of a row
// lies, of queries or keys, and of values, whose rows go on in the next slab.
inline const char* swizzled(Descriptor operand, int at) {
    at += (int)(operand & 0x3fff) << 4;
    return (const char*)cpu_dynamic_shared() + (at ^ (at >> 7) % 8 << 4);
}
inline const char* operand_at(Descriptor operand, int row, int chunk) {
    return swizzled(operand, row / 8 * ((int)(operand >> 32 & 0x3fff) << 4) + row % 8 * 128 + chunk * 16);
}
inline const char* values_at(Descriptor operand, int row, int chunk) {
    return operand_at(operand + (chunk / 8 * (operand >> 16 & 0x3fff)), row, chunk % 8);
}

// What wgmma does below, for a warp's 16 rows. The lanes fetch b together, in chunks.
template <bool ROWS, int N>
inline void emulate_wgmma(float (&d)[N][4], const unsigned (&a)[4], Descriptor b, bool add) {
    struct Lane { unsigned a[4]; uint4 b[N / 2]; float d[N][4]; } mine;
    for (int i = 0; i < 4; i++) mine.a[i] = a[i];
    for (int i = 0; i < N / 2; i++) {
        const int chunk = i * 32 + threadIdx.x % 32;
        mine.b[i] = *(const uint4*)(ROWS ? values_at(b, chunk / N, chunk % N)
                                         : operand_at(b, chunk % (8 * N), chunk / (8 * N)));
    }
    for (int i = 0; i < N * 4; i++) mine.d[i / 4][i % 4] = add ? d[i / 4][i % 4] : 0.0f;
    cpu_warp_together(ALL_LANES, mine, [](Lane* const lanes[32]) {
        float A[16][16], B[16][8 * N];
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 8; i++) {
                const bf16 x = {(unsigned short)(lanes[lane]->a[i / 2] >> i % 2 * 16)};
                A[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = to_float(x);
            }
            for (int i = 0; i < N / 2 * 8; i++) {
                const int chunk = i / 8 * 32 + lane;
                const float x = to_float(((const bf16*)&lanes[lane]->b[i / 8])[i % 8]);
                if (ROWS) B[chunk / N][chunk % N * 8 + i % 8] = x;
                else B[chunk / (8 * N) * 8 + i % 8][chunk % (8 * N)] = x;
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < N * 4; i++) {
                const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                for (int k = 0; k < 16; k++) lanes[lane]->d[i / 4][i % 4] += A[row][k] * B[k][column];
            }
        }
    }, "wgmma");
    for (int i = 0; i < N * 4; i++) d[i / 4][i % 4] = mine.d[i / 4][i % 4];
}
#endif

// The numbers of d[n][i] in the text of an instruction, and for the compiler.
#define NUMBERS_OF_8 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define NUMBERS_OF_16 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, " \
    "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, " \
    "%61, %62, %63}"
#define FOUR(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define EIGHT_FOURS(d, n) \
    FOUR(d, n), FOUR(d, n + 1), FOUR(d, n + 2), FOUR(d, n + 3), FOUR(d, n + 4), FOUR(d, n + 5), FOUR(d, n + 6), \
    FOUR(d, n + 7)

// d (64, 8 N) = a (64, 16) b (16, 8 N) + d, or without d unless `add`, by the 128 threads of a warpgroup together; N is
// 8 or 16. Warp w has rows 16w .. 16w + 15 of a and of d, and they are spread over its lanes as in mma_bf16: d[n] as
// its d, for columns 8n .. 8n + 7, and a as its a, unless that, too, is in shared memory. b is there, column by column,
// or if ROWS, row by row. The instruction only starts the product: a, d and what lies in shared memory are its own
// until wgmma_wait.
template <bool ROWS, int N>
__device__ inline void wgmma(float (&d)[N][4], const unsigned (&a)[4], Descriptor b, bool add) {
#ifdef LLMC_CPU
    emulate_wgmma<ROWS>(d, a, b, add);
#else
    if constexpr (N == 8)
        asm volatile("{.reg .pred add; setp.ne.b32 add, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            NUMBERS_OF_8 ", {%32, %33, %34, %35}, %36, add, 1, 1, %38;}"
            : EIGHT_FOURS(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)ROWS));
    else
        asm volatile("{.reg .pred add; setp.ne.b32 add, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
            NUMBERS_OF_16 ", {%64, %65, %66, %67}, %68, add, 1, 1, %70;}"
            : EIGHT_FOURS(d, 0), EIGHT_FOURS(d, 8)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)ROWS));
#endif
}

template <int N>
__device__ inline void wgmma(float (&d)[N][4], Descriptor a, Descriptor b, bool add) {
#ifdef LLMC_CPU
    unsigned mine[4];
    for (int i = 0; i < 4; i++) {
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i % 2 * 8;
        mine[i] = *(const unsigned*)(operand_at(a, row, i / 2) + threadIdx.x % 4 * 4);
    }
    emulate_wgmma<false>(d, mine, b, add);
#else
    if constexpr (N == 8)
        asm volatile("{.reg .pred add; setp.ne.b32 add, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            NUMBERS_OF_8 ", %32, %33, add, 1, 1, 0, 0;}" : EIGHT_FOURS(d, 0) : "l"(a), "l"(b), "r"((int)add));
    else
        asm volatile("{.reg .pred add; setp.ne.b32 add, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
            NUMBERS_OF_16 ", %64, %65, add, 1, 1, 0, 0;}"
            : EIGHT_FOURS(d, 0), EIGHT_FOURS(d, 8) : "l"(a), "l"(b), "r"((int)add));
#endif
}

// Before the first product after registers of one were written; behind the last product of a group; until all but the
// last PENDING groups are done.
__device__ inline void wgmma_fence() {
#ifndef LLMC_CPU
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ inline void wgmma_commit() {
#ifndef LLMC_CPU
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// To the compiler, d is written here: what reads it comes after this, and what made it before.
template <int N>
__device__ inline void settle(float (&d)[N][4]) {
#ifndef LLMC_CPU
    #pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : FOUR(d, n) :: "memory");
#endif
}

template <int PENDING>
__device__ inline void wgmma_wait() {
#ifndef LLMC_CPU
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
#endif
}

// The thread's copies up to here are a group.
__device__ inline void copies_commit() {
#ifndef LLMC_CPU
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// The thread's groups of copies but for the last PENDING are there, and behind the next barrier wgmma may read them: it
// does so by another path to shared memory (the async proxy) than a thread's own accesses.
template <int PENDING>
__device__ inline void copies_arrive() {
#ifndef LLMC_CPU
    asm volatile("cp.async.wait_group %0; fence.proxy.async.shared::cta;" :: "n"(PENDING) : "memory");
#endif
}

// ---- forward

// Starts to copy rows row0 .. row0 + ROWS - 1 of an array; zeros for those from T on.
template <int HS, int ROWS, int THREADS>
__device__ inline void copy_rows(bf16* to, const bf16* rows, int row0, int T, int stride) {
    const int down = threadIdx.x / 8, column = threadIdx.x % 8 * 8;
    const bf16* from = rows + ((long long)(row0 + down) * stride + column);
    to += place<ROWS>(down, column);
    #pragma unroll
    for (int i = 0; i < ROWS; i += THREADS / 8) {
        #pragma unroll
        for (int slab = 0; slab < HS / 64; slab++) {
            if (ROWS % (THREADS / 8) == 0 || down + i < ROWS)
                copy_four(to + (slab * ROWS + i) * 64, from + (long long)i * stride + slab * 64, row0 + down + i < T);
        }
    }
}

// The scores of a tile become p = 2^(s log2(e) / sqrt(HS) - reference), and are added to sum. The reference of a row
// keeps its sums in range; the tile on the diagonal, which comes first, sets it to its largest exponent. It moves only
// where an exponent passes it by more than 8. Then what has been summed has to be multiplied by `factor`, and the
// result is true.
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
            if (!DIAGONAL && !(rise > 8.0f)) rise = 0.0f;  // so that a row's roundings depend on it alone
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

// Grid (B * NH, tiles of 64 WARPGROUPS queries). Shared memory: the queries, then STAGES times a tile of KEYS keys and
// one of values. If Q_KEPT, the queries go to registers.
template <int HS, int WARPGROUPS, int KEYS, int STAGES, bool Q_KEPT>
__device__ inline void forward(bf16* out, float* lse, const bf16* qkv, int T, int NH, int NKV) {
    static_assert(KEYS % 64 == 0 && STAGES >= 3, "a warpgroup meets its diagonal in one tile; one is read, one comes");
    constexpr int THREADS = 128 * WARPGROUPS, QUERIES = 64 * WARPGROUPS, TILE = KEYS * HS;
    SHARED_TILES(shared);
    bf16 *const queries = shared, *const tiles = shared + QUERIES * HS;
    const int warpgroup = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);  // for the compiler: one for all lanes of a warp
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const Head<HS> head(qkv, T, NH, NKV);
    const int block0 = (gridDim.y - 1 - blockIdx.y) * QUERIES, row0 = block0 + 64 * warpgroup;  // most work comes first
    const int last = (min(block0 + QUERIES, T) - 1) / KEYS, diagonal = row0 < T ? row0 / KEYS : -1;

    const auto start = [&](int tile, int stage) {
        if (tile >= 0) {
            copy_rows<HS, KEYS, THREADS>(tiles + 2 * stage * TILE, head.key, tile * KEYS, T, head.stride);
            copy_rows<HS, KEYS, THREADS>(tiles + (2 * stage + 1) * TILE, head.value, tile * KEYS, T, head.stride);
        }
        copies_commit();
    };
    float acc[HS / 8][4], sum[2] = {}, reference[2] = {}, factor[2] = {};
    unsigned a[Q_KEPT ? HS / 16 : 1][4], p[KEYS / 16][4];
    const Descriptor rows = descriptor(queries + 64 * warpgroup * 64, 0), first = descriptor(tiles, KEYS * 128);

    // s = q k^T: 16 columns a product, which begin within the 128 bytes of a row.
    const auto start_scores = [&](float (&s)[KEYS / 8][4], int stage) {
        const Descriptor keys = further(first, 2 * stage * TILE);
        wgmma_fence();
        #pragma unroll
        for (int i = 0; i < HS / 16; i++) {
            const int at = i % 4 * 16;
            const Descriptor b = further(keys, i / 4 * KEYS * 64 + at);
            if constexpr (Q_KEPT) wgmma<false>(s, a[i], b, i > 0);
            else wgmma(s, further(rows, i / 4 * QUERIES * 64 + at), b, i > 0);
        }
        wgmma_commit();
    };
    // acc += p v: 16 rows of values a product. The first one, of the tile on the diagonal, sets it.
    const auto start_sum = [&](int stage, bool add) {
        const Descriptor values = further(first, (2 * stage + 1) * TILE);
        wgmma_fence();
        #pragma unroll
        for (int i = 0; i < KEYS / 16; i++) wgmma<true>(acc, p[i], further(values, i * 16 * 64), add || i > 0);
        wgmma_commit();
    };
    // Two neighbouring results of q k^T, packed to words, are an operand a of p v.
    const auto pack = [&](const float (&s)[KEYS / 8][4]) {
        #pragma unroll
        for (int i = 0; i < KEYS / 16 * 4; i++) {
            const float (&x)[4] = s[i / 4 * 2 + i % 4 / 2];
            p[i / 4][i % 4] = to_bf16(x[i % 2 * 2], x[i % 2 * 2 + 1]);
        }
    };

    copy_rows<HS, QUERIES, THREADS>(queries, head.query, block0, T, head.stride);
    #pragma unroll
    for (int i = 0; i < STAGES - 2; i++) start(last - i, i);
    int stage = 0, before = 0;
    for (int tile = last; tile >= 0; tile--) {
        copies_arrive<STAGES - 3>();
        __syncthreads();  // the tile is there for all threads, and all are done with the tile before the last
        start(tile - (STAGES - 2), stage + STAGES - 2 < STAGES ? stage + STAGES - 2 : stage - 2);
        if (tile <= diagonal) {
            float s[KEYS / 8][4];
            if (tile == diagonal) {
                #pragma unroll
                for (int i = 0; i < (Q_KEPT ? HS / 16 : 0); i++)
                    load_matrices<false>(a[i], queries + place<QUERIES>(warp * 16 + lane % 16, 16 * i + lane / 16 * 8));
                start_scores(s, stage);
                wgmma_wait<0>();
                settle(s);
                softmax<HS, true>(s, sum, reference, factor, tile * KEYS - row0);
            } else {
                start_scores(s, stage);
                start_sum(before, tile + 1 < diagonal);
                wgmma_wait<1>();
                settle(s);
                const bool moved = softmax<HS, false>(s, sum, reference, factor, 0);
                // A sum is never negative. But to know that takes all exponentials, and so the assembler cannot put the
                // wait before them, which it otherwise does.
                if (moved || fminf(sum[0], sum[1]) < 0.0f) {
                    wgmma_wait<0>();
                    settle(acc);
                    #pragma unroll
                    for (int i = 0; i < HS / 8 * 4; i++) acc[i / 4][i % 4] *= factor[i % 4 / 2];
                }
                wgmma_wait<0>();
                settle(acc);
            }
            pack(s);
        }
        before = stage;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    if (diagonal >= 0) {
        start_sum(before, diagonal > 0);
        wgmma_wait<0>();
        settle(acc);
    }

    __syncthreads();  // no product reads queries any more: their place serves to bring together what is stored
    bf16* const rows_out = queries + warp * 16 * 64;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 1);
        sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 2);
        const float inverse = 1.0f / sum[h];
        const int row = block0 + warp * 16 + h * 8 + g;
        if (t == 0 && row < T) lse[(long long)blockIdx.x * T + row] = LN2 * reference[h] + logf(sum[h]);
        #pragma unroll
        for (int n = 0; n < HS / 8; n++) {
            *reinterpret_cast<unsigned*>(rows_out + place<QUERIES>(h * 8 + g, 8 * n) + 2 * t) =
                to_bf16(acc[n][2 * h] * inverse, acc[n][2 * h + 1] * inverse);
        }
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < HS / 16; i++) {
        const int down = (32 * i + lane) / (HS / 8), column = lane % (HS / 8) * 8, row = block0 + warp * 16 + down;
        if (row < T)
            *reinterpret_cast<uint4*>(out + head.rows(T) + (long long)row * head.C + column) =
                *reinterpret_cast<const uint4*>(rows_out + place<QUERIES>(down, column));
    }
}

// The numbers in brackets are HS, warpgroups, keys of a tile, and stages; then, whether queries go to registers. Two
// blocks fill a multiprocessor: while some warps take exponentials, others keep the tensor cores busy.
extern "C" __global__ void __launch_bounds__(256, 2)
flash_attention_forward_wgmma_kernel_64(bf16* out, float* lse, const bf16* qkv, int T, int NH, int NKV) {
    forward<64, 2, 64, 3, true>(out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(128, 2)
flash_attention_forward_wgmma_kernel_128(bf16* out, float* lse, const bf16* qkv, int T, int NH, int NKV) {
    forward<128, 1, 64, 3, false>(out, lse, qkv, T, NH, NKV);
}

// Causal attention as in flash_attention.cu, in bf16, by Hopper's own matrix product: for GPUs of compute capability
// 9.0.
//
// A warp issues mma.sync, after it has loaded the operands into registers. A warpgroup issues wgmma: four warps, which
// have 64 rows together. This instruction reads a whole tile of keys or of values from shared memory by itself. The
// warps go on, and wait for the result later. So only the softmax is left to the warps: a warpgroup starts the scores
// of its next tile and the sum over the values of its last one, and computes exponentials while the tensor cores work
// on the sum.
//
// Backward has the two kernels of flash_attention.cu, with the same products. A block's own rows are operand a of the
// scores: queries and dout, or keys and values. ds or p, computed from the scores, are operand a of the sums, from
// registers, as p is in forward. The assembler puts each wait as early as it may: before the exponentials that should
// run beside the product. So the kernels make it look as if a wait needed the results of these exponentials.
#define ARCHITECTURE 90a  // only GPUs of compute capability 9.0 have wgmma
#define WARP_SIZE 32
#define floatX bf16       // in runs of any precision
#include "flash_attention.cuh"

// ---- tiles in shared memory

#ifdef LLMC_CPU
#define SHARED_TILES(name) bf16* const name = (bf16*)cpu_dynamic_shared()
#else
#define SHARED_TILES(name) extern __shared__ __align__(1024) bf16 name[]
#endif

// A tile lies in shared memory as wgmma wants it, in slabs of 64 columns. A row of a slab is 128 bytes, eight rows are
// 1024, and the tile begins at a multiple of 1024. The chunks of 16 bytes of row r are swizzled: chunk c lies where c ^
// (r % 8) would. wgmma reads queries and keys along the sum (HS), and values across it. One order serves both.
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

// A descriptor tells wgmma where an operand lies in shared memory, in units of 16 bytes: from bit 0 on, where it
// begins; from bit 16 on, for values, how far apart slabs are; from bit 32 on, how far apart groups of eight rows are.
// Bit 62 says that rows of 128 bytes are swizzled.
using Descriptor = unsigned long long;
__device__ inline Descriptor descriptor(const bf16* tile, int slab_bytes) {
    return (Descriptor)(shared_address(tile) >> 4) | (Descriptor)(slab_bytes >> 4) << 16 | (Descriptor)64 << 32 |
           (Descriptor)1 << 62;
}

// The descriptor of an operand that begins `numbers` numbers further on.
__device__ inline Descriptor further(Descriptor operand, int numbers) { return operand + (numbers * 2 >> 4); }

// ---- instructions

#ifdef LLMC_CPU
// swizzled: where a byte of an operand lies; bits 7 to 9 of its address flip bits 4 to 6. operand_at: where 16 bytes, a
// chunk of a row of queries or keys, lie. values_at: the same for values, whose rows go on in the next slab.
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

// Does on a CPU what wgmma does, for a warp's 16 rows. The lanes fetch b together, in chunks.
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

// NUMBERS_OF_8 and NUMBERS_OF_16 name all d[n][i] in the text of an instruction. FOUR and EIGHT_FOURS list them for the
// compiler.
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

// d (64, 8 N) = a (64, 16) b (16, 8 N), plus d if `add`; N is 8 or 16. The 128 threads of a warpgroup compute it
// together. Warp w has rows 16w .. 16w + 15 of a and of d. They are spread over its lanes as in mma_bf16: d[n] as its
// d, for columns 8n .. 8n + 7, and a as its a. a may also lie in shared memory. b always does, column by column, or row
// by row if ROWS. The instruction only starts the product: until wgmma_wait nobody may touch a, d, or the operands in
// shared memory.
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

// wgmma_fence comes between writes to registers of a product and the product. wgmma_commit ends a group of products.
// wgmma_wait waits until all groups but the last PENDING are done.
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

// Tells the compiler that d is written here. So it moves no read of d before this line, and no write behind it.
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

// Makes a group of the copies that the thread has started since the last call.
__device__ inline void copies_commit() {
#ifndef LLMC_CPU
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of the thread's copies except the last PENDING. After the next barrier wgmma may read them. The
// fence is for wgmma, which reads shared memory by another path (the async proxy) than a thread.
template <int PENDING>
__device__ inline void copies_arrive() {
#ifndef LLMC_CPU
    asm volatile("cp.async.wait_group %0; fence.proxy.async.shared::cta;" :: "n"(PENDING) : "memory");
#endif
}

// ---- copies

// Starts to copy rows row0 .. row0 + ROWS - 1 of an array; rows from T on become zeros.
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

// ---- products of tiles

// Returns x, but the compiler takes the result for a new number. So it computes again what depends on it, and does not
// keep that in registers through a loop.
__device__ inline int anew(int x) {
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

// The thread's warpgroup. The shuffle tells the compiler that all lanes of a warp have the same one.
template <int WARPGROUPS>
__device__ inline int warpgroup_of() {
    return WARPGROUPS == 1 ? 0 : __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);
}

// A warpgroup's own 64 rows as operand a of scores. They lie in shared memory, in a tile of ROWS rows. If KEPT, `fetch`
// takes them to registers.
template <int HS, int ROWS, bool KEPT>
struct Operand {
    Descriptor rows;
    unsigned a[KEPT ? HS / 16 : 1][4];

    // The caller has passed a barrier after the tile has arrived.
    __device__ void fetch(const bf16* tile) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 16;
        #pragma unroll
        for (int i = 0; i < (KEPT ? HS / 16 : 0); i++)
            load_matrices<false>(a[i], tile + place<ROWS>(row, 16 * i + threadIdx.x % 32 / 16 * 8));
    }
};

// Starts s = a b^T, a sum over HS, for the N * 8 rows of tile b. Each product takes 16 columns, which begin within the
// 128 bytes of a row.
template <int HS, int ROWS, bool KEPT, int N>
__device__ inline void start_scores(float (&s)[N][4], const Operand<HS, ROWS, KEPT>& a, Descriptor b) {
    #pragma unroll
    for (int i = 0; i < HS / 16; i++) {
        const int at = i % 4 * 16;
        const Descriptor columns = further(b, i / 4 * N * 8 * 64 + at);
        if constexpr (KEPT) wgmma<false>(s, a.a[i], columns, i > 0);
        else wgmma(s, further(a.rows, i / 4 * ROWS * 64 + at), columns, i > 0);
    }
}

// Starts sum = p b, over the K * 16 rows of tile b; or sum += p b if `add`.
template <int K, int N>
__device__ inline void start_sum(float (&sum)[N][4], const unsigned (&p)[K][4], Descriptor b, bool add) {
    #pragma unroll
    for (int i = 0; i < K; i++) wgmma<true>(sum, p[i], further(b, i * 16 * 64), add || i > 0);
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
            *reinterpret_cast<unsigned*>(tile + place<ROWS>(first + h * 8 + g, 8 * n) + 2 * t) =
                to_bf16(sum[n][2 * h] * scale[h], sum[n][2 * h + 1] * scale[h]);
        }
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < HS / 16; i++) {
        const int down = (32 * i + lane) / (HS / 8), column = lane % (HS / 8) * 8;
        if (row0 + down < T)
            *reinterpret_cast<uint4*>(rows + (long long)(row0 + down) * stride + column) =
                *reinterpret_cast<const uint4*>(tile + place<ROWS>(first + down, column));
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

// Grid (B * NH, tiles of 64 WARPGROUPS queries). Shared memory: the queries, then STAGES times a tile of KEYS keys and
// one of values.
template <int HS, int WARPGROUPS, int KEYS, int STAGES, bool Q_KEPT>
__device__ inline void forward(bf16* out, float* lse, const bf16* qkv, int T, int NH, int NKV) {
    static_assert(KEYS % 64 == 0 && STAGES >= 3, "a warpgroup meets its diagonal in one tile; one is read, one comes");
    constexpr int THREADS = 128 * WARPGROUPS, QUERIES = 64 * WARPGROUPS, TILE = KEYS * HS;
    SHARED_TILES(shared);
    bf16 *const queries = shared, *const tiles = shared + QUERIES * HS;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
    const int warpgroup = warpgroup_of<WARPGROUPS>();
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
    unsigned p[KEYS / 16][4];
    Operand<HS, QUERIES, Q_KEPT> q = {descriptor(queries + 64 * warpgroup * 64, 0)};
    const Descriptor first = descriptor(tiles, KEYS * 128);
    const auto keys = [&](int stage) { return further(first, 2 * stage * TILE); };
    const auto values = [&](int stage) { return further(first, (2 * stage + 1) * TILE); };

    copy_rows<HS, QUERIES, THREADS>(queries, head.query, block0, T, head.stride);
    #pragma unroll
    for (int i = 0; i < STAGES - 2; i++) start(last - i, i);
    int stage = 0, before = 0;
    for (int tile = last; tile >= 0; tile--) {
        copies_arrive<STAGES - 3>();
        __syncthreads();  // all threads see the tile, and none still reads the tile before the last
        start(tile - (STAGES - 2), stage + STAGES - 2 < STAGES ? stage + STAGES - 2 : stage - 2);
        if (tile <= diagonal) {
            float s[KEYS / 8][4];
            if (tile == diagonal) {
                q.fetch(queries);
                wgmma_fence();
                start_scores(s, q, keys(stage));
                wgmma_commit();
                wgmma_wait<0>();
                settle(s);
                softmax<HS, true>(s, sum, reference, factor, tile * KEYS - row0);
            } else {
                wgmma_fence();
                start_scores(s, q, keys(stage));
                wgmma_commit();
                start_sum(acc, p, values(before), tile + 1 < diagonal);
                wgmma_commit();
                wgmma_wait<1>();
                settle(s);
                const bool moved = softmax<HS, false>(s, sum, reference, factor, 0);
                // No sum is negative. The compiler does not know: so the wait stays behind all exponentials.
                if (moved || fminf(sum[0], sum[1]) < 0.0f) {
                    wgmma_wait<0>();
                    settle(acc);
                    #pragma unroll
                    for (int i = 0; i < HS / 8 * 4; i++) acc[i / 4][i % 4] *= factor[i % 4 / 2];
                }
                wgmma_wait<0>();
                settle(acc);
            }
            pack(p, s);
        }
        before = stage;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    if (diagonal >= 0) {
        wgmma_fence();
        start_sum(acc, p, values(before), diagonal > 0);
        wgmma_commit();
        wgmma_wait<0>();
        settle(acc);
    }

    __syncthreads();  // no product reads queries any more
    float inverse[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 1);
        sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 2);
        inverse[h] = 1.0f / sum[h];
        const int row = block0 + warp * 16 + h * 8 + g;
        if (t == 0 && row < T) lse[(long long)blockIdx.x * T + row] = LN2 * reference[h] + logf(sum[h]);
    }
    store_rows<HS, QUERIES>(out + head.rows(T), queries, acc, inverse, block0 + warp * 16, T, head.C);
}

// ---- backward

// s has the scores of a warpgroup's 64 queries with a tile of keys, dp is dout v^T. s becomes ds = p (dp - D).
template <int HS, bool DIAGONAL, int N>
__device__ inline void query_gradients(float (&s)[N][4], const float (&dp)[N][4], const float (&log2_sum)[2],
                                       const float (&D)[2], int ahead) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2 + ahead;
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool hidden = DIAGONAL && 8 * n + column + i % 2 > row + i / 2 * 8;
            const float x = hidden ? 0.0f : exp2_approx(s[n][i] * to_exponent<HS>() - log2_sum[i / 2]);
            s[n][i] = x * (dp[n][i] - D[i / 2]);
        }
    }
}

// s has the scores of a warpgroup's 64 keys with a tile of queries, transposed. It becomes p. lse is the tile's.
template <int HS, bool DIAGONAL, int N>
__device__ inline void key_probabilities(float (&s)[N][4], const float* lse, int ahead) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 two = *reinterpret_cast<const float2*>(lse + 8 * n + column);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool hidden = DIAGONAL && ahead + 8 * n + column + i % 2 < row + i / 2 * 8;
            const float log2_sum = LOG2E * (i % 2 == 0 ? two.x : two.y);
            s[n][i] = hidden ? 0.0f : exp2_approx(s[n][i] * to_exponent<HS>() - log2_sum);
        }
    }
}

// dp becomes ds = p (dp - D).
template <int N>
__device__ inline void key_gradients(float (&dp)[N][4], const float (&p)[N][4], const float* D) {
    #pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 two = *reinterpret_cast<const float2*>(D + 8 * n + threadIdx.x % 4 * 2);
        #pragma unroll
        for (int i = 0; i < 4; i++) dp[n][i] = p[n][i] * (dp[n][i] - (i % 2 == 0 ? two.x : two.y));
    }
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

// Grid (B * NH, tiles of 64 WARPGROUPS queries). Sets dq, and D for the kernel that follows. Shared memory: the
// queries, their dout, then STAGES times a tile of KEYS keys and one of values.
template <int HS, int WARPGROUPS, int KEYS, int STAGES, bool KEPT>
__device__ inline void backward_query(bf16* dqkv, float* dsum, const bf16* dout, const bf16* out, const float* lse,
                                      const bf16* qkv, int T, int NH, int NKV) {
    static_assert(KEYS % 64 == 0 && STAGES >= 3, "a warpgroup meets its diagonal in one tile; one is read, one comes");
    constexpr int THREADS = 128 * WARPGROUPS, QUERIES = 64 * WARPGROUPS, TILE = KEYS * HS;
    SHARED_TILES(shared);
    bf16 *const queries = shared, *const douts = queries + QUERIES * HS, *const tiles = douts + QUERIES * HS;
    const int warpgroup = warpgroup_of<WARPGROUPS>(), warp = threadIdx.x / 32;
    const Head<HS> head(qkv, T, NH, NKV);
    const int block0 = (gridDim.y - 1 - blockIdx.y) * QUERIES, row0 = block0 + 64 * warpgroup;
    const int last = (min(block0 + QUERIES, T) - 1) / KEYS, diagonal = row0 < T ? row0 / KEYS : -1;
    out += head.rows(T);
    dout += head.rows(T);
    lse += (long long)blockIdx.x * T;
    dsum += (long long)blockIdx.x * T;

    const auto start = [&](int tile, int stage) {
        if (tile >= 0) {
            copy_rows<HS, KEYS, THREADS>(tiles + 2 * stage * TILE, head.key, tile * KEYS, T, head.stride);
            copy_rows<HS, KEYS, THREADS>(tiles + (2 * stage + 1) * TILE, head.value, tile * KEYS, T, head.stride);
        }
        copies_commit();
    };
    float dq[HS / 8][4] = {}, s[KEYS / 8][4] = {}, dp[KEYS / 8][4], log2_sum[2], D[2];
    unsigned ds[KEYS / 16][4];
    Operand<HS, QUERIES, KEPT> q = {descriptor(queries + 64 * warpgroup * 64, 0)};
    Operand<HS, QUERIES, KEPT> d = {descriptor(douts + 64 * warpgroup * 64, 0)};
    const Descriptor first = descriptor(tiles, KEYS * 128);
    const auto keys = [&](int stage) { return further(first, 2 * stage * TILE); };
    const auto values = [&](int stage) { return further(first, (2 * stage + 1) * TILE); };

    copy_rows<HS, QUERIES, THREADS>(queries, head.query, block0, T, head.stride);
    copy_rows<HS, QUERIES, THREADS>(douts, dout, block0, T, head.C);
    #pragma unroll
    for (int i = 0; i < STAGES - 2; i++) start(last - i, i);
    find_D<HS>(D, dsum, dout, out, lse, block0 + warp * 16, T, head.C);
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = block0 + warp * 16 + h * 8 + threadIdx.x % 32 / 4;
        log2_sum[h] = row < T ? LOG2E * lse[row] : 0.0f;
    }
    int tile = last, stage = 0;
    // Waits until the tile before the last has been added to dq. Then ds of the last tile may take the registers of
    // that one's. At the head of a loop this wait stays behind the exponentials.
    const auto finish = [&] {
        wgmma_wait<0>();
        settle(dq);
        pack(ds, s);
    };
    // After this all threads see the tile, and none still reads the tile before the last.
    const auto arrive = [&] {
        copies_arrive<STAGES - 3>();
        __syncthreads();
        start(tile - (STAGES - 2), stage + STAGES - 2 < STAGES ? stage + STAGES - 2 : stage - 2);
    };
    const auto before = [&] { return stage > 0 ? stage - 1 : STAGES - 1; };
    const auto attend = [&](auto masked) {
        wgmma_fence();
        start_scores(s, q, keys(stage));
        start_scores(dp, d, values(stage));
        wgmma_commit();
        start_sum(dq, ds, keys(masked.value && tile == diagonal ? stage : before()), true);  // ds begins as 0
        wgmma_commit();
        wgmma_wait<1>();
        settle(s);
        settle(dp);
        query_gradients<HS, masked.value>(s, dp, log2_sum, D, tile * KEYS - row0);
    };
    const auto leave = [&] {
        tile--;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    };
    for (; tile >= block0 / KEYS; leave()) {
        finish();
        arrive();
        if (tile == diagonal) {
            q.fetch(queries);
            d.fetch(douts);
        }
        if (tile <= diagonal) attend(Is<true>());
        wgmma_wait<0>();
        settle(dq);
    }
    for (; tile >= 0; leave()) {
        finish();
        arrive();
        attend(Is<false>());
    }
    finish();
    wgmma_fence();
    start_sum(dq, ds, keys(before()), true);
    wgmma_commit();
    wgmma_wait<0>();
    settle(dq);

    __syncthreads();  // no product reads queries any more
    const Head<HS> same(qkv, T, anew(NH), NKV);
    const float scale[2] = {rsqrtf((float)HS), rsqrtf((float)HS)};
    store_rows<HS, QUERIES>(dqkv + (same.query - qkv), queries, dq, scale, block0 + warp * 16, T, same.stride);
}

// Grid (B * NH, tiles of 64 WARPGROUPS keys). Reads D from dsum. Sets dk and dv of dqkv. If query heads share keys, it
// sets this head's share in dkv_heads instead, which is null otherwise. Shared memory: the keys, the values, STAGES
// times a tile of QUERIES queries and one of dout, and STAGES times lse and D of a tile.
template <int HS, int WARPGROUPS, int QUERIES, int STAGES, bool KEPT>
__device__ inline void backward_key(bf16* dqkv, float* dkv_heads, const float* dsum, const bf16* dout, const float* lse,
                                    const bf16* qkv, int T, int NH, int NKV) {
    static_assert(QUERIES == 64 && STAGES >= 3, "a warpgroup meets its diagonal in one tile; one is read, one comes");
    constexpr int THREADS = 128 * WARPGROUPS, KEYS = 64 * WARPGROUPS, TILE = QUERIES * HS;
    SHARED_TILES(shared);
    bf16 *const keys = shared, *const values = keys + KEYS * HS, *const tiles = values + KEYS * HS;
    float* const terms = reinterpret_cast<float*>(tiles + 2 * STAGES * TILE);
    const int warpgroup = warpgroup_of<WARPGROUPS>(), warp = threadIdx.x / 32;
    const Head<HS> head(qkv, T, NH, NKV);
    const int block0 = blockIdx.y * KEYS, row0 = block0 + 64 * warpgroup;  // most work comes first
    const int end = ceil_div(T, QUERIES), diagonal = row0 / QUERIES;
    const float* const term = (threadIdx.x < QUERIES ? lse : dsum) + (long long)blockIdx.x * T;
    dout += head.rows(T);

    const auto start = [&](int tile, int stage) {
        if (tile < end) {
            copy_rows<HS, QUERIES, THREADS>(tiles + 2 * stage * TILE, head.query, tile * QUERIES, T, head.stride);
            copy_rows<HS, QUERIES, THREADS>(tiles + (2 * stage + 1) * TILE, dout, tile * QUERIES, T, head.C);
            // From row T on queries, dout, lse and D are zeros, and add zeros.
            const int row = tile * QUERIES + threadIdx.x % QUERIES;
            if (threadIdx.x < 2 * QUERIES)
                copy_one(terms + 2 * stage * QUERIES + threadIdx.x, term + (row < T ? row : 0), row < T);
        }
        copies_commit();
    };
    float dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    unsigned p[QUERIES / 16][4], ds[QUERIES / 16][4] = {};
    Operand<HS, KEYS, KEPT> k = {descriptor(keys + 64 * warpgroup * 64, 0)};
    Operand<HS, KEYS, KEPT> v = {further(k.rows, KEYS * HS)};
    const Descriptor first = descriptor(tiles, QUERIES * 128);
    const auto queries = [&](int stage) { return further(first, 2 * stage * TILE); };
    const auto douts = [&](int stage) { return further(first, (2 * stage + 1) * TILE); };

    copy_rows<HS, KEYS, THREADS>(keys, head.key, block0, T, head.stride);
    copy_rows<HS, KEYS, THREADS>(values, head.value, block0, T, head.stride);
    int tile = block0 / QUERIES, stage = 0;
    #pragma unroll
    for (int i = 0; i < STAGES - 2; i++) start(tile + i, i);
    // After this all threads see the tile, and none still reads the tile before the last.
    const auto arrive = [&] {
        copies_arrive<STAGES - 3>();
        __syncthreads();
        start(tile + STAGES - 2, stage + STAGES - 2 < STAGES ? stage + STAGES - 2 : stage - 2);
    };
    const auto before = [&] { return stage > 0 ? stage - 1 : STAGES - 1; };
    const auto attend = [&](auto masked) {
        const float *const log_sums = terms + 2 * stage * QUERIES, *const D = log_sums + QUERIES;
        float s[QUERIES / 8][4], dp[QUERIES / 8][4];
        wgmma_fence();
        start_scores(s, k, queries(stage));
        wgmma_commit();
        // ds of the tile before; it begins as 0.
        start_sum(dk, ds, queries(masked.value && tile == diagonal ? stage : before()), true);
        wgmma_commit();
        wgmma_wait<1>();  // for the scores, and for dv of the tile before
        settle(s);
        key_probabilities<HS, masked.value>(s, log_sums, tile * QUERIES - row0);
        pack(p, s);
        // No p is negative. The compiler does not know: so the wait stays behind all exponentials.
        unsigned signs = 0;
        #pragma unroll
        for (int i = 0; i < QUERIES / 4; i++) signs |= p[i / 4][i % 4];
        if (signs >> 31) wgmma_wait<0>();
        wgmma_wait<0>();  // for dk of the tile before: this tile's ds takes the registers of that one's
        settle(dk);
        wgmma_fence();
        start_scores(dp, v, douts(stage));
        wgmma_commit();
        start_sum(dv, p, douts(stage), true);
        wgmma_commit();
        wgmma_wait<1>();
        settle(dp);
        key_gradients(dp, s, D);
        pack(ds, dp);
    };
    const auto leave = [&] {
        tile++;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    };
    for (const int behind = min(tile + WARPGROUPS, end); tile < behind; leave()) {
        arrive();
        if (tile == diagonal) {
            k.fetch(keys);
            v.fetch(values);
        }
        if (tile >= diagonal) attend(Is<true>());
        wgmma_wait<0>();
        settle(dk);
        settle(dv);
    }
    for (; tile < end; leave()) {
        arrive();
        attend(Is<false>());
    }
    wgmma_fence();
    start_sum(dk, ds, queries(before()), true);
    wgmma_commit();
    wgmma_wait<0>();
    settle(dv);
    settle(dk);

    __syncthreads();  // no product reads keys and values any more
    const int row = block0 + warp * 16;
    const bool inside = row + threadIdx.x % 16 < T;
    dsum += (long long)blockIdx.x * T + row + threadIdx.x % 16;
    const float nan = warp_sum(inside ? 0.0f * *dsum : 0.0f);  // 0, or NaN if D is not finite
    const float scale[2] = {rsqrtf((float)HS) + nan, rsqrtf((float)HS) + nan}, one[2] = {1.0f + nan, 1.0f + nan};
    const Head<HS> same(qkv, T, anew(NH), NKV);
    if (NKV < NH) {  // in both arrays dv lies C numbers behind dk
        float* const share = dkv_heads + same.rows(2 * T);
        store_floats<HS>(share, dk, scale[0], row, T, 2 * same.C);
        store_floats<HS>(share + same.C, dv, one[0], row, T, 2 * same.C);
    } else {
        bf16* const gradient = dqkv + (same.key - qkv);
        store_rows<HS, KEYS>(gradient, keys, dk, scale, row, T, same.stride);
        store_rows<HS, KEYS>(gradient + same.C, values, dv, one, row, T, same.stride);
    }
}

// The template arguments are HS, warpgroups, rows of a tile, stages, and whether the block's own rows go to registers.
// kernels/flash_attention.py knows the rows of a block, 64 for each warpgroup, and the stages, too. While some
// warpgroups of a multiprocessor compute exponentials, others keep the tensor cores busy: there are four in forward
// (two if HS is 128), three in backward_query (two), and two in backward_key, whose sums leave no registers for more.
extern "C" __global__ void __launch_bounds__(256, 2)
flash_attention_forward_wgmma_kernel_64(bf16* out, float* lse, const bf16* qkv, int T, int NH, int NKV) {
    forward<64, 2, 64, 3, true>(out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(128, 2)
flash_attention_forward_wgmma_kernel_128(bf16* out, float* lse, const bf16* qkv, int T, int NH, int NKV) {
    forward<128, 1, 64, 3, false>(out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(128, 3)
flash_attention_backward_query_wgmma_kernel_64(bf16* dqkv, SETS float* dsum, const bf16* dout, const bf16* out,
                                               const float* lse, const bf16* qkv, int T, int NH, int NKV) {
    backward_query<64, 1, 64, 3, false>(dqkv, dsum, dout, out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(128, 2)
flash_attention_backward_key_wgmma_kernel_64(bf16* dqkv, SETS float* dkv_heads, const float* dsum, const bf16* dout,
                                             const float* lse, const bf16* qkv, int T, int NH, int NKV) {
    backward_key<64, 1, 64, 4, true>(dqkv, dkv_heads, dsum, dout, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(256, 1)
flash_attention_backward_query_wgmma_kernel_128(bf16* dqkv, SETS float* dsum, const bf16* dout, const bf16* out,
                                                const float* lse, const bf16* qkv, int T, int NH, int NKV) {
    backward_query<128, 2, 64, 3, false>(dqkv, dsum, dout, out, lse, qkv, T, NH, NKV);
}

extern "C" __global__ void __launch_bounds__(256, 1)
flash_attention_backward_key_wgmma_kernel_128(bf16* dqkv, SETS float* dkv_heads, const float* dsum, const bf16* dout,
                                              const float* lse, const bf16* qkv, int T, int NH, int NKV) {
    backward_key<128, 2, 64, 3, false>(dqkv, dkv_heads, dsum, dout, lse, qkv, T, NH, NKV);
}

// c (M, N) = a (M, K) b (K, N), all by rows and in bf16: 2 M N K operations on 2 (M K + K N + M N) bytes. matmul.cu climbs
// up to tensor cores in TF32; this file shows what two bytes change. Sums are fp32, and are rounded once, to c.
//
// A block of 256 threads makes 128 x 128 elements. M is any number, N and K are multiples of 8, so that rows begin at
// multiples of 16 bytes.
#define WARP_SIZE 32
#include "tensor_cores.cuh"
static_assert(WIDTH == 8, "these kernels are compiled with -DfloatX=bf16");

// Eight numbers as floats, zeros from outside of the matrix.
__device__ inline Vec load_eight(const bf16* matrix, int row, int column, int rows, int columns) {
    return row < rows && column < columns ? Aligned::load(matrix + (size_t)row * columns + column, 8) : Vec();
}

// Without tensor cores: the fp32 ladder's warp tiles, of numbers that become fp32 on their way to shared memory.
// Half the bytes come from device memory; loads from shared memory and multiplications are as many as before.
extern "C" __global__ void __launch_bounds__(256) fma_kernel(bf16* c, const bf16* a, const bf16* b, int M, int N, int K) {
    __shared__ __align__(16) float a_T[16][128], tile_b[16][128];
    const int m0 = 128 * blockIdx.y, n0 = 128 * blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int y = warp / 4 * 64 + lane / 4 * 4, x = warp % 4 * 32 + lane % 4 * 4;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += 16) {
        const int row = threadIdx.x % 128, k = threadIdx.x / 128 * 8, l = threadIdx.x / 16, column = threadIdx.x % 16 * 8;
        const Vec of_a = load_eight(a, m0 + row, k0 + k, M, K);
        for (int i = 0; i < 8; i++) a_T[k + i][row] = of_a.x[i];
        Aligned::store(&tile_b[l][column], load_eight(b, k0 + l, n0 + column, K, N), 8);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 16; k++) {
            const Floats fa[2] = {Aligned::load_floats(&a_T[k][y], 4), Aligned::load_floats(&a_T[k][y + 32], 4)};
            const Floats fb[2] = {Aligned::load_floats(&tile_b[k][x], 4), Aligned::load_floats(&tile_b[k][x + 16], 4)};
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 8; j++) sum[i][j] += fa[i / 4].x[i % 4] * fb[j / 4].x[j % 4];
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; i++) {
        for (int half = 0; half < 2; half++) {
            const int m = m0 + y + i % 4 + i / 4 * 32, n = n0 + x + half * 16;
            const float* four = sum[i] + 4 * half;
            if (m >= M || n >= N) continue;
            Aligned::store_floats(c + (size_t)m * N + n, {{four[0], four[1], four[2], four[3]}}, 4);
        }
    }
}

// ---- with tensor cores. A warp makes 64 x 32 elements, as 4 x 4 results of mma_bf16; K comes by 32, which are as many
// bytes as 16 of TF32. Rows of the tiles are 16 bytes longer, so that eight rows lie in different banks.
constexpr int DEPTH = 32, A_ROW = DEPTH + 8, B_ROW = 128 + 8;

struct Tiles {
    bf16 a[128][A_ROW], b[DEPTH][B_ROW];
};

__device__ inline unsigned two_of(bf16 first, bf16 second) { return first.bits | (unsigned)second.bits << 16; }

// Floats rows of fragments of a, and four columns of those of b, for 16 numbers of K: word by word, or by ldmatrix.
template <bool LDMATRIX>
__device__ inline void fetch(unsigned (&of_a)[4][4], unsigned (&of_b)[4][2], const Tiles& tiles, int k) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int y = warp / 4 * 64, x = warp % 4 * 32;
    if (LDMATRIX) {
        for (int i = 0; i < 4; i++) load_matrices<false>(of_a[i], &tiles.a[y + 16 * i + lane % 16][k + lane / 16 * 8]);
        for (int j = 0; j < 4; j += 2) {
            unsigned r[4];
            load_matrices<true>(r, &tiles.b[k + lane % 16][x + 8 * j + lane / 16 * 8]);
            for (int e = 0; e < 4; e++) of_b[j + e / 2][e % 2] = r[e];
        }
        return;
    }
    for (int i = 0; i < 4; i++) {
        for (int e = 0; e < 4; e++) {
            const bf16* two = &tiles.a[y + 16 * i + g + e % 2 * 8][k + 2 * t + e / 2 * 8];
            of_a[i][e] = *reinterpret_cast<const unsigned*>(two);
        }
    }
    for (int j = 0; j < 4; j++) {
        for (int e = 0; e < 2; e++) {
            const int row = k + 2 * t + 8 * e, column = x + 8 * j + g;
            of_b[j][e] = two_of(tiles.b[row][column], tiles.b[row + 1][column]);
        }
    }
}

template <bool LDMATRIX>
__device__ inline void add_products(float (&sum)[4][4][4], const Tiles& tiles) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        unsigned of_a[4][4], of_b[4][2];
        fetch<LDMATRIX>(of_a, of_b, tiles, k);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) mma_bf16(sum[i][j], of_a[i], of_b[j][0], of_b[j][1]);
        }
    }
}

// Calls copy(to, from, inside) for the thread's share of the tiles at row m0, column n0 and number k0 of K: twice 16 bytes
// of each.
template <class Copy>
__device__ inline void for_each_copy(Tiles& tiles, const bf16* a, const bf16* b, int m0, int n0, int k0, int M, int N,
                                     int K, Copy copy) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int y = threadIdx.x / 4 + 64 * i, k = threadIdx.x % 4 * 8;
        const int l = threadIdx.x / 16 + 16 * i, x = threadIdx.x % 16 * 8;
        const bool a_inside = m0 + y < M && k0 + k < K, b_inside = k0 + l < K && n0 + x < N;
        copy(&tiles.a[y][k], a_inside ? a + (size_t)(m0 + y) * K + k0 + k : a, a_inside);
        copy(&tiles.b[l][x], b_inside ? b + (size_t)(k0 + l) * N + n0 + x : b, b_inside);
    }
}

template <bool LDMATRIX>
__device__ inline void one_stage(bf16* c, const bf16* a, const bf16* b, int M, int N, int K) {
    __shared__ __align__(16) Tiles tiles;
    const int m0 = 128 * blockIdx.y, n0 = 128 * blockIdx.x;
    float sum[4][4][4] = {};
    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        for_each_copy(tiles, a, b, m0, n0, k0, M, N, K, [](bf16* to, const bf16* from, bool inside) {
            Aligned::store(to, inside ? Aligned::load(from, 8) : Vec(), 8);
        });
        __syncthreads();
        add_products<LDMATRIX>(sum, tiles);
        __syncthreads();
    }
    store_products(c, sum, m0, n0, M, N);
}

// bf16 on the tensor cores: one instruction of a warp multiplies 16 x 16 by 16 x 8, twice as much as in TF32. Two
// neighbours of a row of a are one word; two of a column of b are two loads of two bytes.
extern "C" __global__ void __launch_bounds__(256, 2) mma_kernel(bf16* c, const bf16* a, const bf16* b, int M, int N,
                                                               int K) {
    one_stage<false>(c, a, b, M, N, K);
}

// ldmatrix: one instruction brings a warp four matrices of 8 x 8, those of b transposed on their way. 6 of them fetch what
// took 16 loads of words and 16 of two bytes.
extern "C" __global__ void __launch_bounds__(256, 2) ldmatrix_kernel(bf16* c, const bf16* a, const bf16* b, int M, int N,
                                                                    int K) {
    one_stage<true>(c, a, b, M, N, K);
}

// Two stages and asynchronous copies: while the tensor cores work on one pair of tiles, cp.async brings the next. Nothing
// is rounded on the way any more, so that the copies pass through no register.
extern "C" __global__ void __launch_bounds__(256, 2) two_stages_kernel(bf16* c, const bf16* a, const bf16* b, int M,
                                                                      int N, int K) {
    __shared__ __align__(16) Tiles tiles[2];
    const int m0 = 128 * blockIdx.y, n0 = 128 * blockIdx.x;
    const auto start = [&](int k0, int stage) {
        for_each_copy(tiles[stage], a, b, m0, n0, k0, M, N, K, [](bf16* to, const bf16* from, bool inside) {
            copy_four(to, from, inside);
        });
    };
    float sum[4][4][4] = {};
    start(0, 0);
    for (int k0 = 0, stage = 0; k0 < K; k0 += DEPTH, stage ^= 1) {
        copies_wait();
        __syncthreads();  // this stage is there for all threads, and all are done with the other
        if (k0 + DEPTH < K) start(k0 + DEPTH, stage ^ 1);
        add_products<true>(sum, tiles[stage]);
    }
    store_products(c, sum, m0, n0, M, N);
}

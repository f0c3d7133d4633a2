// c (M, N) = a (M, K) b (K, N), all by rows: 2 M N K operations on 4 (M K + K N + M N) bytes. Of the three products of a
// linear layer this is the input's gradient: dinp (B*T, C) = dout (B*T, OC) weight (OC, C).
//
// The product needs each number of a N times and each of b M times. From rung to rung they come from a nearer place:
// device memory, shared memory, registers. In the end everything waits for the multipliers. Then come faster ones.
#define WARP_SIZE 32
#include "tensor_cores.cuh"

// One thread per element: it multiplies a row of a by a column of b, and its warp makes 32 elements of a column of c, so
// each load of a and each store to c touches 32 sectors.
extern "C" __global__ void naive_kernel(float* c, const float* a, const float* b, int M, int N, int K) {
    const int m = blockIdx.x * blockDim.x + threadIdx.x, n = blockIdx.y * blockDim.y + threadIdx.y;
    if (m >= M || n >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; k++) sum += a[(size_t)m * K + k] * b[(size_t)k * N + n];
    c[(size_t)m * N + n] = sum;
}

// Coalesced: a warp makes 32 neighbours in a row of c instead, from one number of a and 32 neighbours of b. Only x and
// y have changed places.
extern "C" __global__ void coalesced_kernel(float* c, const float* a, const float* b, int M, int N, int K) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y * blockDim.y + threadIdx.y;
    if (m >= M || n >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; k++) sum += a[(size_t)m * K + k] * b[(size_t)k * N + n];
    c[(size_t)m * N + n] = sum;
}

// All threads of the block copy rows row0 .. row0 + ROWS - 1 and columns column0 .. column0 + COLUMNS - 1 of a matrix
// to shared memory. Outside of the matrix they write zeros, which add nothing to a product.
template <int ROWS, int COLUMNS, int THREADS>
__device__ inline void load_tile(float (&tile)[ROWS][COLUMNS], const float* matrix, int row0, int column0, int rows,
                                 int columns) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
        const int y = i / COLUMNS, x = i % COLUMNS;
        const bool inside = row0 + y < rows && column0 + x < columns;
        tile[y][x] = inside ? matrix[(size_t)(row0 + y) * columns + column0 + x] : 0.0f;
    }
}

// Tiles in shared memory: a block makes 32 x 32 elements and takes 32 numbers of K at a time, so each number that it
// reads from device memory serves 32 times. It gains little, because the caches did the same for the rung before. Each
// multiplication still waits for two loads, now from shared memory.
extern "C" __global__ void __launch_bounds__(1024) shared_kernel(float* c, const float* a, const float* b, int M, int N,
                                                                int K) {
    __shared__ float tile_a[32][32], tile_b[32][32];
    const int m0 = 32 * blockIdx.y, n0 = 32 * blockIdx.x, y = threadIdx.x / 32, x = threadIdx.x % 32;
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += 32) {
        load_tile<32, 32, 1024>(tile_a, a, m0, k0, M, K);
        load_tile<32, 32, 1024>(tile_b, b, k0, n0, K, N);
        __syncthreads();
        for (int k = 0; k < 32; k++) sum += tile_a[y][k] * tile_b[k][x];
        __syncthreads();  // before the next tiles overwrite these
    }
    if (m0 + y < M && n0 + x < N) c[(size_t)(m0 + y) * N + n0 + x] = sum;
}

// A column of 8 elements per thread: a number of b in a register serves 8 rows of a, so eight multiplications take nine
// loads from shared memory instead of sixteen. 512 threads make 64 x 64 elements.
extern "C" __global__ void __launch_bounds__(512) column_of_8_kernel(float* c, const float* a, const float* b, int M,
                                                                    int N, int K) {
    __shared__ float tile_a[64][8], tile_b[8][64];
    const int m0 = 64 * blockIdx.y, n0 = 64 * blockIdx.x, y = threadIdx.x / 64 * 8, x = threadIdx.x % 64;
    float sum[8] = {};
    for (int k0 = 0; k0 < K; k0 += 8) {
        load_tile<64, 8, 512>(tile_a, a, m0, k0, M, K);
        load_tile<8, 64, 512>(tile_b, b, k0, n0, K, N);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float of_b = tile_b[k][x];
            for (int i = 0; i < 8; i++) sum[i] += tile_a[y + i][k] * of_b;
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; i++) {
        if (m0 + y + i < M && n0 + x < N) c[(size_t)(m0 + y + i) * N + n0 + x] = sum[i];
    }
}

// A square of 8 x 8 elements per thread: 16 loads from shared memory serve 64 multiplications. 256 threads make 128 x 128
// elements. The lanes' columns are 8 apart, so four lanes meet in each bank, and each lane stores to its own sectors.
extern "C" __global__ void __launch_bounds__(256) square_of_8_kernel(float* c, const float* a, const float* b, int M,
                                                                    int N, int K) {
    __shared__ float tile_a[128][8], tile_b[8][128];
    const int m0 = 128 * blockIdx.y, n0 = 128 * blockIdx.x, y = threadIdx.x / 16 * 8, x = threadIdx.x % 16 * 8;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += 8) {
        load_tile<128, 8, 256>(tile_a, a, m0, k0, M, K);
        load_tile<8, 128, 256>(tile_b, b, k0, n0, K, N);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float of_a[8], of_b[8];
            for (int i = 0; i < 8; i++) of_a[i] = tile_a[y + i][k];
            for (int j = 0; j < 8; j++) of_b[j] = tile_b[k][x + j];
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 8; j++) sum[i][j] += of_a[i] * of_b[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 8; j++) {
            if (m0 + y + i < M && n0 + x + j < N) c[(size_t)(m0 + y + i) * N + n0 + x + j] = sum[i][j];
        }
    }
}

// The same by 16 bytes. From here on N and K must be multiples of 4. A thread copies one vector of each tile. The tile
// of a is transposed, so that the numbers that a thread wants are neighbours.
__device__ inline Vec load_four(const float* matrix, int row, int column, int rows, int columns) {
    return row < rows && column < columns ? Aligned::load(matrix + (size_t)row * columns + column, 4) : Vec();
}

__device__ inline void load_tiles(float (&a_T)[8][128], float (&tile_b)[8][128], const float* a, const float* b, int m0,
                                  int n0, int k0, int M, int N, int K) {
    const int y = threadIdx.x / 2, k = threadIdx.x % 2 * 4, x = threadIdx.x % 32 * 4;
    const Vec of_a = load_four(a, m0 + y, k0 + k, M, K);
    for (int i = 0; i < 4; i++) a_T[k + i][y] = of_a.x[i];
    Aligned::store(&tile_b[threadIdx.x / 32][x], load_four(b, k0 + threadIdx.x / 32, n0 + x, K, N), 4);
}

// 8 x 8 elements from four loads of 16 bytes: four rows from y on and four from y + dy on, four columns from x on and
// four from x + dx on.
__device__ inline void add_squares(float (&sum)[8][8], const float (&a_T)[8][128], const float (&tile_b)[8][128], int y,
                                   int dy, int x, int dx) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const Vec of_a[2] = {Aligned::load(&a_T[k][y], 4), Aligned::load(&a_T[k][y + dy], 4)};
        const Vec of_b[2] = {Aligned::load(&tile_b[k][x], 4), Aligned::load(&tile_b[k][x + dx], 4)};
        for (int i = 0; i < 8; i++)
            for (int j = 0; j < 8; j++) sum[i][j] += of_a[i / 4].x[i % 4] * of_b[j / 4].x[j % 4];
    }
}

__device__ inline void store_squares(float* c, const float (&sum)[8][8], int m, int dy, int n, int dx, int M, int N) {
    for (int i = 0; i < 8; i++) {
        for (int half = 0; half < 2; half++) {
            const int row = m + i % 4 + i / 4 * dy, column = n + half * dx;
            const float* four = sum[i] + 4 * half;
            if (row >= M || column >= N) continue;
            Aligned::store(c + (size_t)row * N + column, {{four[0], four[1], four[2], four[3]}}, 4);
        }
    }
}

// Vectorised: the same squares, by accesses of 16 bytes to device memory and to shared memory. There are a quarter as
// many loads. The lanes' columns are still 8 apart, and two lanes meet in a bank.
extern "C" __global__ void __launch_bounds__(256) vectorised_kernel(float* c, const float* a, const float* b, int M,
                                                                   int N, int K) {
    __shared__ __align__(16) float a_T[8][128], tile_b[8][128];
    const int m0 = 128 * blockIdx.y, n0 = 128 * blockIdx.x, y = threadIdx.x / 16 * 8, x = threadIdx.x % 16 * 8;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += 8) {
        load_tiles(a_T, tile_b, a, b, m0, n0, k0, M, N, K);
        __syncthreads();
        add_squares(sum, a_T, tile_b, y, 4, x, 4);
        __syncthreads();
    }
    store_squares(c, sum, m0 + y, 4, n0 + x, 4, M, N);
}

// Warp tiles: a warp makes 64 x 32 elements, and neighbouring lanes have neighbouring fours, so no two lanes meet in a
// bank, and the warp loads fewer different numbers. There are 8 lanes down and 4 across. A lane's two fours are 32 rows
// or 16 columns apart.
extern "C" __global__ void __launch_bounds__(256) warp_tiles_kernel(float* c, const float* a, const float* b, int M,
                                                                   int N, int K) {
    __shared__ __align__(16) float a_T[8][128], tile_b[8][128];
    const int m0 = 128 * blockIdx.y, n0 = 128 * blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int y = warp / 4 * 64 + lane / 4 * 4, x = warp % 4 * 32 + lane % 4 * 4;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += 8) {
        load_tiles(a_T, tile_b, a, b, m0, n0, k0, M, N, K);
        __syncthreads();
        add_squares(sum, a_T, tile_b, y, 32, x, 16);
        __syncthreads();
    }
    store_squares(c, sum, m0 + y, 32, n0 + x, 16, M, N);
}

// ---- with tensor cores. kernels/mma.cuh has their instruction, mma, and says which lane holds what of its operands.
// A warp makes the same 64 x 32 elements, as 4 x 4 results of mma, and takes 16 numbers of K at a time. A lane is g
// rows and t columns from the corner of a fragment of a, or t rows and g columns from that of b. With rows of 20 and of
// 136 floats the lanes meet 32 different banks: all 20 g + t differ modulo 32, and all 136 t + g.
constexpr int A_ROW = 16 + 4, B_ROW = 128 + 8;

// ROUND says whether the numbers of the tiles must still be rounded to TF32.
template <bool ROUND>
__device__ inline void add_products(float (&sum)[4][4][4], const float (&tile_a)[128][A_ROW],
                                    const float (&tile_b)[16][B_ROW]) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int y = warp / 4 * 64 + g, x = warp % 4 * 32 + g;
    const auto seen = [](float v) { return ROUND ? to_tf32(v) : v; };
#pragma unroll
    for (int k = 0; k < 16; k += 8) {
        float of_a[4][4], of_b[4][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            for (int e = 0; e < 4; e++) of_a[i][e] = seen(tile_a[y + 16 * i + e % 2 * 8][k + t + e / 2 * 4]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            for (int e = 0; e < 2; e++) of_b[j][e] = seen(tile_b[k + t + 4 * e][x + 8 * j]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) mma(sum[i][j], of_a[i], of_b[j][0], of_b[j][1]);
        }
    }
}

// TF32 on the tensor cores: one instruction of a warp multiplies 16 x 8 by 8 x 8 numbers with 10 bits of mantissa. The
// threads round them on their way to shared memory; the sums stay fp32.
extern "C" __global__ void __launch_bounds__(256, 2) mma_kernel(float* c, const float* a, const float* b, int M, int N,
                                                               int K) {
    __shared__ __align__(16) float tile_a[128][A_ROW], tile_b[16][B_ROW];
    const int m0 = 128 * blockIdx.y, n0 = 128 * blockIdx.x;
    float sum[4][4][4] = {};
    for (int k0 = 0; k0 < K; k0 += 16) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int y = threadIdx.x / 4 + 64 * i, k = threadIdx.x % 4 * 4;
            const int l = threadIdx.x / 32 + 8 * i, x = threadIdx.x % 32 * 4;
            Vec of_a = load_four(a, m0 + y, k0 + k, M, K), of_b = load_four(b, k0 + l, n0 + x, K, N);
            for (int e = 0; e < 4; e++) of_a.x[e] = to_tf32(of_a.x[e]), of_b.x[e] = to_tf32(of_b.x[e]);
            Aligned::store(&tile_a[y][k], of_a, 4);
            Aligned::store(&tile_b[l][x], of_b, 4);
        }
        __syncthreads();
        add_products<false>(sum, tile_a, tile_b);
        __syncthreads();
    }
    store_products(c, sum, m0, n0, M, N);
}

// Two stages and asynchronous copies: while the tensor cores work on one pair of tiles, cp.async brings the next.
// Nobody waits for memory at the barrier, as long as the products take longer than the copies.
extern "C" __global__ void __launch_bounds__(256, 2) two_stages_kernel(float* c, const float* a, const float* b, int M,
                                                                      int N, int K) {
    __shared__ __align__(16) float tile_a[2][128][A_ROW], tile_b[2][16][B_ROW];
    const int m0 = 128 * blockIdx.y, n0 = 128 * blockIdx.x;
    const auto start = [&](int k0, int stage) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int y = threadIdx.x / 4 + 64 * i, k = threadIdx.x % 4 * 4;
            const int l = threadIdx.x / 32 + 8 * i, x = threadIdx.x % 32 * 4;
            const bool a_inside = m0 + y < M && k0 + k < K, b_inside = k0 + l < K && n0 + x < N;
            copy_four(&tile_a[stage][y][k], a_inside ? a + (size_t)(m0 + y) * K + k0 + k : a, a_inside);
            copy_four(&tile_b[stage][l][x], b_inside ? b + (size_t)(k0 + l) * N + n0 + x : b, b_inside);
        }
    };
    float sum[4][4][4] = {};
    start(0, 0);
    for (int k0 = 0, stage = 0; k0 < K; k0 += 16, stage ^= 1) {
        copies_wait();
        __syncthreads();  // this stage is there for all threads, and all are done with the other
        if (k0 + 16 < K) start(k0 + 16, stage ^ 1);
        add_products<true>(sum, tile_a[stage], tile_b[stage]);
    }
    store_products(c, sum, m0, n0, M, N);
}

// Products of small matrices, on the CPU device. NumPy's library, OpenBLAS, multiplies nearly as fast. But NumPy calls
// it once for each matrix of a batch, and Python must wake other OS threads to share the work. Here the workers that
// run kernels multiply, and they are still awake (runtime.cpp).
//
// A block computes some rows and columns of one product. It copies a panel of b, DEPTH rows and COLUMNS columns, to a
// buffer that stays in the first-level cache. Then it multiplies ROWS rows of a with this panel at a time, and keeps
// the sums in registers. So it loads a vector of b once for ROWS rows, and a number of a once for COLUMNS columns.

// The sums of ROWS rows leave registers for two vectors of b and a number of a. AVX-512 and NEON have 32 registers,
// others 16.
#if defined __AVX512F__
constexpr int LANES = 16, ROWS = 8;
#elif defined __AVX__
constexpr int LANES = 8, ROWS = 6;
#elif defined __aarch64__
constexpr int LANES = 4, ROWS = 8;
#else
constexpr int LANES = 4, ROWS = 6;
#endif
constexpr int COLUMNS = 2 * LANES, DEPTH = 128;

typedef float Vector __attribute__((vector_size(4 * LANES)));

// c (m,n) = op(a) (m,k) @ op(b) (k,n) + beta * c, for gridDim.z products, whose matrices follow one another in c, a and
// b. If beta is 0, c is not read. With trans_a, a lies in memory as (k,m) and op transposes it; trans_b likewise. Block
// (x, y, z) has one thread. It takes 32 columns from 32 x on, and `rows` rows from `rows` * y on, of product z. It adds
// up DEPTH terms of a sum at a time, in the order of k.
extern "C" __global__ void product_kernel(float* c, const float* a, const float* b, int m, int n, int k, int trans_a,
                                          int trans_b, float beta, int rows) {
    alignas(sizeof(Vector)) float packed[DEPTH * COLUMNS];
    a += (size_t)blockIdx.z * m * k, b += (size_t)blockIdx.z * k * n, c += (size_t)blockIdx.z * m * n;
    const int begin = blockIdx.y * rows, end = min(m, begin + rows), last = min(n, 32 * (blockIdx.x + 1));
    const size_t row = trans_a ? 1 : k, step = trans_a ? m : 1;  // from a row, or a column, of op(a) to the next

    for (int j0 = 32 * blockIdx.x; j0 < last; j0 += COLUMNS) {
        const int width = min(COLUMNS, last - j0);
        if (width < COLUMNS) memset(packed, 0, sizeof packed);
        for (int p0 = 0; p0 < k; p0 += DEPTH) {
            const int depth = min(DEPTH, k - p0);
            for (int p = 0; p < depth && !trans_b; p++) {
                memcpy(packed + p * COLUMNS, b + (size_t)(p0 + p) * n + j0, 4 * width);
            }
            for (int j = 0; j < width && trans_b; j++) {
                for (int p = 0; p < depth; p++) packed[p * COLUMNS + j] = b[(size_t)(j0 + j) * k + p0 + p];
            }
            const float factor = p0 == 0 ? beta : 1.0f;
            for (int i = begin; i < end; i += ROWS) {
                const float* of_row[ROWS];  // behind the last row: the last one again
                for (int r = 0; r < ROWS; r++) of_row[r] = a + min(i + r, end - 1) * row + p0 * step;
                Vector sums[ROWS][2] = {};
                for (int p = 0; p < depth; p++) {
                    const Vector* v = reinterpret_cast<const Vector*>(packed + p * COLUMNS);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++) {
                        const float x = of_row[r][p * step];
                        sums[r][0] += x * v[0];
                        sums[r][1] += x * v[1];
                    }
                }
                for (int r = 0; r < ROWS && i + r < end; r++) {
                    float sum[COLUMNS];
                    memcpy(sum, sums[r], sizeof sum);
                    float* to = c + (size_t)(i + r) * n + j0;
                    for (int j = 0; j < width; j++) to[j] = factor == 0.0f ? sum[j] : sum[j] + factor * to[j];
                }
            }
        }
    }
}

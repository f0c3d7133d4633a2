// Products of matrices on the CPU device, by the workers that run kernels (runtime.cpp).
//
// A block computes a rectangle of c. It copies DEPTH columns of its rows of a to a buffer that stays in the
// second-level cache. Then it copies a panel of b, DEPTH rows and COLUMNS columns, to a buffer that stays in the
// first-level cache, and multiplies ROWS rows of a with this panel at a time. Their sums stay in registers: it loads a
// vector of b once for ROWS rows, and a number of a once for COLUMNS columns. Both buffers hold the numbers in the
// order in which they are used, so it hardly matters how a and b lie in memory.
#if defined __SSE__
#include <xmmintrin.h>
#endif

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
constexpr int COLUMNS = 2 * LANES, DEPTH = 256;
constexpr int LINE = 16;  // numbers in a line of the cache
// device/cpu.py knows these: how many rows a block can have, and the values of `causal`
constexpr int MAX_ROWS = 264, CAUSAL_C = 1, CAUSAL_A = 2;

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4)));

// to[i * WIDTH + l] = number i of line l, for `count` lines of `depth` numbers that are neighbours in memory. Behind
// the last line come copies of it, whose sums are not used.
template <int WIDTH>
inline void transpose(float* to, const float* from, size_t stride, int count, int depth) {
    const auto line = [=](int l) { return from + min(l, count - 1) * stride; };
    int i = 0;
#if defined __SSE__
    for (int l = 0; l < WIDTH; l += 4) {
        const int first = min(l, WIDTH - 4);  // the last four lines may overlap with those before
        const float *a = line(first), *b = line(first + 1), *c = line(first + 2), *d = line(first + 3);
        for (i = 0; i + 4 <= depth; i += 4) {
            __m128 x0 = _mm_loadu_ps(a + i), x1 = _mm_loadu_ps(b + i);
            __m128 x2 = _mm_loadu_ps(c + i), x3 = _mm_loadu_ps(d + i);
            _MM_TRANSPOSE4_PS(x0, x1, x2, x3);
            float* y = to + i * WIDTH + first;
            _mm_storeu_ps(y, x0), _mm_storeu_ps(y + WIDTH, x1);
            _mm_storeu_ps(y + 2 * WIDTH, x2), _mm_storeu_ps(y + 3 * WIDTH, x3);
        }
    }
#endif
    for (; i < depth; i++) {
        for (int l = 0; l < WIDTH; l++) to[i * WIDTH + l] = line(l)[i];
    }
}

// Which terms of a part of a sum are needed: those from `from` on, below `upto`. The others are 0.
struct Terms {
    int from, upto;
};

// Copies `count` lines, rows of op(a) or columns of op(b), of `depth` numbers. Number i of line l lies at
// from[l * stride + i * step], and stride or step is 1. The lines become panels of WIDTH lines, one after another. In a
// panel the numbers i of all lines are neighbours. The panel that begins with line l needs only the numbers terms(l).
template <int WIDTH, class Which>
inline void pack(float* to, const float* from, size_t stride, size_t step, int count, int depth, Which terms) {
    if (step == 1) {
        for (int l = 0; l < count; l += WIDTH) {
            const Terms t = terms(l);
            transpose<WIDTH>(to + l * depth + t.from * WIDTH, from + l * stride + t.from, stride, min(WIDTH, count - l),
                             t.upto - t.from);
        }
        return;
    }
    const int whole = count / WIDTH * WIDTH;
    for (int first = 0; first < depth; first += 8) {  // so that neither reads nor writes use many pages at a time
        for (int l = 0; l < whole; l += WIDTH) {
            const Terms t = terms(l);
            for (int i = max(first, t.from); i < min(first + 8, t.upto); i++) {
                memcpy(to + l * depth + i * WIDTH, from + l + i * step, 4 * WIDTH);
            }
        }
    }
    for (int i = 0; i < depth && whole < count; i++) {
        float* last = to + whole * depth + i * WIDTH;
        for (int l = 0; l < WIDTH; l++) last[l] = from[min(whole + l, count - 1) + i * step];
    }
}

// c (m,n) = op(a) (m,k) @ op(b) (k,n) + beta * c, for gridDim.z products, whose matrices follow one another in c, a and
// b. If beta is 0, c is not read. With trans_a, a lies in memory as (k,m) and op transposes it; trans_b likewise. Block
// (x, y, z) has one thread. The blocks share out the columns by x and the rows by y, at most MAX_ROWS each. A sum adds
// at most DEPTH terms at a time, in the order of k. It does not depend on the grid.
//
// CAUSAL: which matrix is causal attention, none, c or a. In memory it consists of (T,T) matrices one below another.
// Above their diagonals a is 0, and nobody reads c. A block leaves these terms and numbers out, for ROWS rows at a
// time. Rows, or a part of a sum, that reach into the next matrix are done in full. It is a template, because the tests
// for this would make all other products 1 to 2% slower.
template <int CAUSAL>
inline void multiply(float* packed_a, float* c, const float* a, const float* b, int m, int n, int k, int trans_a,
                     int trans_b, float beta) {
    __align__(64) float packed_b[COLUMNS * DEPTH];
    a += (size_t)blockIdx.z * m * k, b += (size_t)blockIdx.z * k * n, c += (size_t)blockIdx.z * m * n;
    const auto share = [](int length, int width, int block, int blocks) {
        return min((int64_t)length, (int64_t)((length + width - 1) / width) * block / blocks * width);
    };
    const int begin = share(m, ROWS, blockIdx.y, gridDim.y), end = share(m, ROWS, blockIdx.y + 1, gridDim.y);
    const int left = share(n, COLUMNS, blockIdx.x, gridDim.x), right = share(n, COLUMNS, blockIdx.x + 1, gridDim.x);
    const size_t row_a = trans_a ? 1 : k, step_a = trans_a ? m : 1;
    const size_t column_b = trans_b ? k : 1, step_b = trans_b ? 1 : n;
    const int parts = (k + DEPTH - 1) / DEPTH, max_depth = (k + parts - 1) / parts;
    const int T = CAUSAL == CAUSAL_C ? n : trans_a ? m : k;

    for (int p = 0; p < k; p += max_depth) {
        const int depth = min(max_depth, k - p);
        const float factor = p == 0 ? beta : 1.0f;
        const auto all = [=](int) { return Terms{0, depth}; };
        const auto terms = [=](int i) {  // of rows i to i + ROWS - 1
            if (CAUSAL != CAUSAL_A) return all(i);
            if (trans_a) return Terms{p % T + depth <= T ? max(0, min(i - p % T, depth)) : 0, depth};
            return Terms{0, i % T + ROWS <= T ? max(0, min(i % T + ROWS - p, depth)) : depth};
        };
        pack<ROWS>(packed_a, a + begin * row_a + p * step_a, row_a, step_a, end - begin, depth,
                   [&](int l) { return terms(begin + l); });
        for (int j = left; j < right; j += COLUMNS) {
            const float* panel = b + j * column_b + p * step_b;
            pack<COLUMNS>(packed_b, panel, column_b, step_b, min(COLUMNS, right - j), depth, all);
            // Meanwhile the next panel comes to the cache: a few lines of it for each ROWS rows of c.
            const int length = trans_b ? depth / LINE : max(1, COLUMNS / LINE);  // of a column or row of it, in lines
            const int lines = j + 2 * COLUMNS <= right ? length * (trans_b ? COLUMNS : depth) : 0;
            int line = 0;
            for (int i = begin; i < end; i += ROWS) {
                const Terms needed = terms(i);
                if (CAUSAL == CAUSAL_A && needed.from >= needed.upto && p > 0) continue;      // would add nothing
                if (CAUSAL == CAUSAL_C && i % T + ROWS <= T && j >= i % T + ROWS) continue;  // above the diagonal
                for (const int upto = min(lines, lines * (i - begin + ROWS) / (end - begin)); line < upto; line++) {
                    __builtin_prefetch(panel + COLUMNS * column_b + line / length * max(column_b, step_b) +
                                       line % length * LINE);
                }
                float* to = c + (size_t)i * n + j;
                for (int r = 0; r < ROWS; r++) {  // both lines of the cache, if c is not aligned
                    __builtin_prefetch(to + (size_t)r * n, 1), __builtin_prefetch(to + (size_t)r * n + COLUMNS - 1, 1);
                }
                const float* x = packed_a + (i - begin) * depth + needed.from * ROWS;
                const Vector* y = reinterpret_cast<const Vector*>(packed_b) + needed.from * 2;
                Vector sums[ROWS][2] = {};
#pragma GCC unroll 4  // otherwise the loop's speed depends on its address, by up to a tenth
                for (int q = needed.from; q < needed.upto; q++, x += ROWS, y += 2) {
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++) {
                        sums[r][0] += x[r] * y[0];
                        sums[r][1] += x[r] * y[1];
                    }
                }
                for (int r = 0; r < ROWS && i + r < end; r++) {
                    float* out = to + (size_t)r * n;
                    if (j + COLUMNS <= right) {
                        Unaligned* v = reinterpret_cast<Unaligned*>(out);
                        v[0] = factor == 0.0f ? sums[r][0] : sums[r][0] + factor * v[0];
                        v[1] = factor == 0.0f ? sums[r][1] : sums[r][1] + factor * v[1];
                    } else {
                        for (int l = 0; j + l < right; l++) {
                            const float sum = sums[r][l / LANES][l % LANES];
                            out[l] = factor == 0.0f ? sum : sum + factor * out[l];
                        }
                    }
                }
            }
        }
    }
}

extern "C" __global__ void product_kernel(float* c, const float* a, const float* b, int m, int n, int k, int trans_a,
                                          int trans_b, float beta, int causal) {
    __shared__ __align__(64) float packed_a[MAX_ROWS * DEPTH];
    if (causal == CAUSAL_C) multiply<CAUSAL_C>(packed_a, c, a, b, m, n, k, trans_a, trans_b, beta);
    else if (causal == CAUSAL_A) multiply<CAUSAL_A>(packed_a, c, a, b, m, n, k, trans_a, trans_b, beta);
    else multiply<0>(packed_a, c, a, b, m, n, k, trans_a, trans_b, beta);
}

// RMSNorm of each head of queries and keys, and RoPE after it. Over the channels x (HS) of a head:
//   n = x * rstd,  out = rotate(n * weight), with rstd = 1 / sqrt(mean(x^2) + eps)
// The heads of q share one weight (HS), those of k another. Values stay as they are. rope.cu explains RoPE.
// Backward: dy is dout, rotated back; with g = dy * weight,
//   dx = rstd * (g - n * mean(g * n));  dweight += sum over positions and heads of dy * n
// Memory-bound: forward reads and writes each head once. Backward reads dout and x of queries and keys, and writes dx.
//
// LANES neighbours in a warp take a head. They read it twice, for the sum and for the result; the second time it is in
// the first-level cache. Weights are parameters, whose addresses need not be multiples of 16.
#include "fp8.cuh"
#include "rope.cuh"

// As many lanes as a head of 128 channels has vectors: a warp in fp32, half a warp in bf16.
constexpr int LANES = WARP_SIZE > 1 ? 128 / WIDTH : 1;

// The thread's place among the lanes of its head, and that head's place among those at once in a block.
__device__ inline int lane() { return threadIdx.x % LANES; }
__device__ inline int place() { return threadIdx.x / LANES; }
__device__ inline int heads_at_once() { return blockDim.x / LANES; }

// The sum over the lanes of a head. whole: all lanes of the warp call it together, so one constant mask will do.
__device__ inline float head_sum(float x, bool whole = false) {
    if (LANES == WARP_SIZE) return warp_sum(x);
    const unsigned lanes = whole ? 0xffffffffu : 0xffffffffu >> (32 - LANES) << place() * LANES % 32;
    for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(lanes, x, offset);
    return x;
}

// inp and out (N,NH+2*NKV,HS), N = B*T; rstd (N,NH+NKV); table (T,HS/2,2). starts (B), which may be null, has the
// position of each sequence's first row.
extern "C" __global__ void PROGRAMMATIC qk_norm_forward_kernel(SETS floatX* __restrict__ out,
                                                               SETS float* __restrict__ rstd,
                                                               const floatX* __restrict__ inp,
                                                               const floatX* __restrict__ qweight,
                                                               const floatX* __restrict__ kweight,
                                                               const float* __restrict__ table,
                                                               const int* __restrict__ starts, float eps, int N, int T,
                                                               int NH, int NKV, int HS) {
    const int head = blockIdx.x * heads_at_once() + place(), heads = NH + 2 * NKV;
    trigger_programmatic_launch();
    if (head >= N * heads) return;
    grid_dependency_synchronize();
    const int n = head / heads, h = head % heads;
    const floatX* x = inp + (size_t)head * HS;
    floatX* y = out + (size_t)head * HS;
    const floatX* weight = h < NH ? qweight : kweight;
    const float* angles = table + (size_t)(n % T + (starts == nullptr ? 0 : starts[n / T])) * HS;

    by_alignment(HS % WIDTH == 0 && is_aligned(weight), [&](auto memory) {
        if (h >= NH + NKV) {
            for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
                memory.store(y + i, memory.load(x + i, HS - i), HS - i);
            }
            return;
        }
        float sum = 0.0f;
        for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
            const Vec v = memory.load(x + i, HS - i);
            for (int k = 0; k < WIDTH; k++) sum += v.x[k] * v.x[k];
        }
        const float s = rsqrtf(head_sum(sum) / HS + eps);
        for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
            Vec v = memory.load(x + i, HS - i);
            const Vec w = memory.load(weight + i, HS - i);
            for (int k = 0; k < WIDTH; k++) v.x[k] = s * v.x[k] * w.x[k];
            memory.store(y + i, rotate(v, memory.load(angles + i, HS - i), 1.0f), HS - i);
        }
        if (lane() == 0) rstd[(size_t)n * (NH + NKV) + h] = s;
    });
}

// A vector's part of the sum of g * n over its head. dy, x and w are the vectors, s is rstd.
__device__ inline void add_gn(float& sum, const Vec& dy, const Vec& x, const Vec& w, float s) {
    for (int k = 0; k < WIDTH; k++) sum += dy.x[k] * w.x[k] * (x.x[k] * s);
}

// A vector of dx. Adds its dy * n to dweight.
__device__ inline Vec input_gradient(Vec& dweight, const Vec& dy, const Vec& x, const Vec& w, float s, float mean_gn) {
    Vec dx;
    for (int k = 0; k < WIDTH; k++) {
        const float n = x.x[k] * s;
        dx.x[k] = s * (dy.x[k] * w.x[k] - n * mean_gn);
        dweight.x[k] += dy.x[k] * n;
    }
    return dx;
}

// A block's sums of dy * n. LANES lanes go through many heads, and have two rows in shared memory: the sums of their
// query heads, and of their key heads. Until the barrier a lane reads there only what it wrote itself. At the end the
// block writes its sums to partials (gridDim.x, 2, HS): for q, then for k. Shared memory: two rows of HS floats,
// rounded up to a multiple of WIDTH, for each of the heads at once.
struct WeightSums {
    float *all, *own;
    int width, HS;

    __device__ WeightSums(float* memory, int HS) : all(memory), width(WIDTH * ceil_div(HS, WIDTH)), HS(HS) {
        own = all + 2 * place() * width;
        for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
            Aligned::store(own + i, Vec(), WIDTH);
            Aligned::store(own + width + i, Vec(), WIDTH);
        }
    }

    __device__ float* of(bool query) const { return query ? own : own + width; }

    __device__ void write(float* partials) const {
        __syncthreads();
        for (int i = threadIdx.x; i < 2 * HS; i += blockDim.x) {
            const int of = i / HS, channel = i % HS;
            float total = 0.0f;
            for (int y = 0; y < heads_at_once(); y++) total += all[(2 * y + of) * width + channel];
            partials[(size_t)blockIdx.x * 2 * HS + i] = total;
        }
    }
};

// Changes dqkv (N,NH+2*NKV,HS) in place, in its query and key heads.
extern "C" __global__ void qk_norm_backward_kernel(floatX* __restrict__ dqkv, SETS float* __restrict__ partials,
                                                   const floatX* __restrict__ inp, const floatX* __restrict__ qweight,
                                                   const floatX* __restrict__ kweight, const float* __restrict__ rstd,
                                                   const float* __restrict__ table, int N, int T, int NH, int NKV,
                                                   int HS) {
    DYNAMIC_SHARED(float, memory_of_sums);
    const WeightSums sums(memory_of_sums, HS);
    const int at_once = heads_at_once();
    for (int head = blockIdx.x * at_once + place(); head < N * (NH + NKV); head += gridDim.x * at_once) {
        const int n = head / (NH + NKV), h = head % (NH + NKV);
        const size_t start = ((size_t)n * (NH + 2 * NKV) + h) * HS;
        const floatX* weight = h < NH ? qweight : kweight;
        const float* angles = table + (size_t)(n % T) * HS;
        float* sum = sums.of(h < NH);
        const float s = rstd[head];

        by_alignment(HS % WIDTH == 0 && is_aligned(weight), [&](auto memory) {
            auto turned_back = [&](int i) {
                return rotate(memory.load(dqkv + start + i, HS - i), memory.load(angles + i, HS - i), -1.0f);
            };
            float sum_gn = 0.0f;
            for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
                const Vec dy = turned_back(i), x = memory.load(inp + start + i, HS - i);
                add_gn(sum_gn, dy, x, memory.load(weight + i, HS - i), s);
            }
            const float mean_gn = head_sum(sum_gn) / HS;
            for (int i = WIDTH * lane(); i < HS; i += WIDTH * LANES) {
                const Vec dy = turned_back(i), x = memory.load(inp + start + i, HS - i);
                Vec total = Aligned::load(sum + i, WIDTH);
                const Vec dx = input_gradient(total, dy, x, memory.load(weight + i, HS - i), s, mean_gn);
                Aligned::store(sum + i, total, WIDTH);
                memory.store(dqkv + start + i, dx, HS - i);
            }
        });
    }
    sums.write(partials);
}

// The same for heads of 128 channels, but sets codes (N,NH+2*NKV,128) and codes_T (NH+2*NKV,128,N) of the gradient,
// also of the value heads. dout, the gradient of forward's output, stays as it is. N is a multiple of 16. A tile has
// 64 positions of a head, and LANES lanes take four at a time. The blocks share the tiles. Each takes neighbours: heads
// of the same positions, whose angles are then in the first-level cache. Shared memory: that of WeightSums, and four
// tiles of floatX, of dout and x twice: a thread starts to copy its vectors of the next tile before it computes this
// one's.
extern "C" __global__ void __launch_bounds__(256, 2) qk_norm_backward_codes_kernel(
    float* scale, float* before, float* maxima, int correct, unsigned char* codes, unsigned char* codes_T,
    float* partials, const floatX* __restrict__ dout, const floatX* __restrict__ inp,
    const floatX* __restrict__ qweight, const floatX* __restrict__ kweight, const float* __restrict__ rstd,
    const float* __restrict__ table, int N, int T, int NH, int NKV) {
    constexpr int ROWS = 64, HS = 128, AT_ONCE = WARP_SIZE > 1 ? 256 / LANES : 1;
    constexpr int VECTORS = HS / (WIDTH * LANES), PIECE = 16 / sizeof(floatX);  // of a lane; numbers of a copy_four
    __shared__ CodeTile<ROWS, HS> tile;
    DYNAMIC_SHARED(float, memory);
    Coding coding = {scale, before, maxima, correct};
    if (!coding.begin()) return;
    const WeightSums sums(memory, HS);
    floatX* copies = reinterpret_cast<floatX*>(memory + 2 * AT_ONCE * HS);
    const int heads = NH + 2 * NKV, group = heads / NKV, C = heads * HS;
    const int tiles = heads * ceil_div(N, ROWS), of_block = ceil_div(tiles, gridDim.x);
    const int begin = blockIdx.x * of_block, end = min(tiles, begin + of_block);

    auto position_of = [&](int t) { return t / heads * ROWS; };  // the first one of tile t
    // The heads of a group in turn: its queries, its key, its value. So each block gets its share of the values, which
    // take less time.
    auto head_of = [&](int t) {
        const int kv = t % heads / group, j = t % group;
        return j < group - 2 ? kv * (group - 2) + j : NH + (j - group + 2) * NKV + kv;
    };
    // Where the vectors of dout of tile t are copied to. Those of inp follow.
    auto copies_of = [&](int t) { return copies + t % 2 * 2 * ROWS * HS; };
    auto channel = [&](int v) { return WIDTH * (lane() + v * LANES); };
    auto copy = [&](int t) {
        const int n0 = position_of(t), h = head_of(t);
        for (int row = 4 * place(); row < min(ROWS, N - n0); row += 4 * AT_ONCE) {
#pragma unroll
            for (int r = row; r < row + 4; r++) {
                for (int v = 0; v < VECTORS; v++) {
                    for (int i = channel(v); i < channel(v) + WIDTH; i += PIECE) {
                        const size_t from = (size_t)(n0 + r) * C + h * HS + i;
                        floatX* to = copies_of(t) + r * HS + i;
                        copy_four(to, dout + from);
                        if (h < NH + NKV) copy_four(to + ROWS * HS, inp + from);
                    }
                }
            }
        }
    };
    // Encodes four rows of tile t, after differentiate(r, d) has changed the vectors d of row r.
    auto encode_rows = [&](int t, int row, auto differentiate) {
        Codes rows[VECTORS][4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            Vec d[VECTORS];
            for (int v = 0; v < VECTORS; v++) d[v] = Aligned::load(copies_of(t) + (row + r) * HS + channel(v), WIDTH);
            differentiate(r, d);
            const size_t start = (size_t)(position_of(t) + row + r) * C + head_of(t) * HS;
            for (int v = 0; v < VECTORS; v++) {
                store_codes(codes + start + channel(v), rows[v][r] = coding.codes_of_bf16(d[v]));
            }
        }
        for (int v = 0; v < VECTORS; v++) tile.put(row, channel(v), rows[v]);
    };

    if (begin < end) copy(begin);
    for (int t = begin; t < end; t++) {
        const int n0 = position_of(t), h = head_of(t);
        copies_wait();
        if (t + 1 < end) copy(t + 1);
        for (int row = 4 * place(); row < min(ROWS, N - n0); row += 4 * AT_ONCE) {
            if (h >= NH + NKV) {
                encode_rows(t, row, [](int, Vec*) {});
                continue;
            }
            const floatX* weight = h < NH ? qweight : kweight;
            float* sum = sums.of(h < NH);
            Vec w[VECTORS], total[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                by_alignment(is_aligned(weight), [&](auto memory) { w[v] = memory.load(weight + channel(v), WIDTH); });
                total[v] = Aligned::load(sum + channel(v), WIDTH);
            }
            int position = (n0 + row) % T;
            encode_rows(t, row, [&](int r, Vec* d) {
                const float* angles = table + (size_t)position * HS;
                const float s = rstd[(size_t)(n0 + row + r) * (NH + NKV) + h];
                float sum_gn = 0.0f;
                Vec x[VECTORS];
                for (int v = 0; v < VECTORS; v++) {
                    x[v] = Aligned::load(copies_of(t) + (ROWS + row + r) * HS + channel(v), WIDTH);
                    d[v] = rotate(d[v], Aligned::load(angles + channel(v), WIDTH), -1.0f);
                    add_gn(sum_gn, d[v], x[v], w[v], s);
                }
                // N is a multiple of 16, so either all lanes of a warp have rows, or none.
                const float mean_gn = head_sum(sum_gn, true) / HS;
                for (int v = 0; v < VECTORS; v++) d[v] = input_gradient(total[v], d[v], x[v], w[v], s, mean_gn);
                position = position + 1 < T ? position + 1 : 0;
            });
            for (int v = 0; v < VECTORS; v++) Aligned::store(sum + channel(v), total[v], WIDTH);
        }
        __syncthreads();
        tile.store(codes_T, n0, h * HS, N, C);
        __syncthreads();  // the next tile overwrites this one
    }
    sums.write(partials);
    coding.end();
}

// The backward pass of qk_norm with a quantized result. ../qk_norm.cu explains it, quantize.cuh the two passes.
#include "../async_copy.cuh"
#include "../qk_norm.cuh"
#include "quantize.cuh"

constexpr int POSITIONS = 64, HEAD_SIZE = 128;

// For heads of HEAD_SIZE channels. Sets q (N,NH+2*NKV,HS) and q_T (NH+2*NKV,HS,N) of dinp, also for the value heads.
// dout, the gradient of forward's output, stays as it is. N is a multiple of 16.
// Tile: POSITIONS positions of a head.
// Work: the blocks share the tiles. Each takes neighbours: heads of the same positions, whose angles are then in the
// first-level cache. LANES lanes take four positions at a time.
// Shared memory: that of WeightSums, and four tiles of floatX: dout and x of this tile and of the next one. A thread
// starts to copy its vectors of the next tile before it computes this one's.
extern "C" __global__ void __launch_bounds__(256, 2) qk_norm_backward_fp8_kernel(
    float* scale, float* previous_amax, float* block_amax, int second_pass, unsigned char* q, unsigned char* q_T,
    float* partials, const floatX* __restrict__ dout, const floatX* __restrict__ inp,
    const floatX* __restrict__ qweight, const floatX* __restrict__ kweight, const float* __restrict__ rstd,
    const float* __restrict__ table, int N, int T, int NH, int NKV) {
    constexpr int ROWS = POSITIONS, HS = HEAD_SIZE, AT_ONCE = WARP_SIZE > 1 ? 256 / LANES : 1;
    constexpr int VECTORS = HS / (WIDTH * LANES), PIECE = 16 / sizeof(floatX);  // of a lane; numbers of a copy_four
    __shared__ Fp8Tile<ROWS, HS> tile;
    DYNAMIC_SHARED(float, memory);
    Quantizer quantizer = {scale, previous_amax, block_amax, second_pass};
    if (!quantizer.begin()) return;
    const WeightSums sums(memory, HS);
    floatX* copies = reinterpret_cast<floatX*>(memory + 2 * AT_ONCE * HS);
    const int heads = NH + 2 * NKV, group = heads / NKV, C = heads * HS;
    const int tiles = heads * ceil_div(N, ROWS), share = ceil_div(tiles, gridDim.x);
    const int begin = blockIdx.x * share, end = min(tiles, begin + share);

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
    // Quantizes four rows of tile t, after differentiate(r, d) has changed the vectors d of row r.
    auto quantize_rows = [&](int t, int row, auto differentiate) {
        Fp8Vec rows[VECTORS][4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            Vec d[VECTORS];
            for (int v = 0; v < VECTORS; v++) d[v] = Aligned::load(copies_of(t) + (row + r) * HS + channel(v), WIDTH);
            differentiate(r, d);
            const size_t start = (size_t)(position_of(t) + row + r) * C + head_of(t) * HS;
            for (int v = 0; v < VECTORS; v++) {
                store_fp8(q + start + channel(v), rows[v][r] = quantizer.quantize_as_bf16(d[v]));
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
                quantize_rows(t, row, [](int, Vec*) {});
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
            quantize_rows(t, row, [&](int r, Vec* d) {
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
        tile.store(q_T, n0, h * HS, N, C);
        __syncthreads();  // the next tile overwrites this one
    }
    sums.write(partials);
    quantizer.end();
}

// The MLP's products by Hopper's instructions, in bf16. GELU, SwiGLU and their backward passes are their epilogues:
// while one consumer computes what becomes of its tile, the other one multiplies (hopper_product.cuh: alternate). A
// kernel of its own would read the product again from memory. Every number is computed and rounded as by the product
// and gelu.cu or swiglu.cu.
//
// A tensor map's rows have a multiple of 16 bytes, so all sizes but M are multiples of 8. Rows and columns of a tile
// that lie outside come as zeros and are not stored.
#define ARCHITECTURE 90a
#define WARP_SIZE 32
#include "gelu.cuh"
#include "hopper_product.cuh"
#include "swiglu.cuh"

constexpr int STAGES = 4, SWIGLU_STAGES = 5, SLABS = 3;

// A lane's part of a tile, rounded: half the registers of its sums. Two neighbours share a word.
struct Products {
    unsigned slab[SLABS][2][8][2];  // slab, half of the tile's rows, n, h

    __device__ Products(const float (&sum)[2][24][4]) {
        #pragma unroll
        for (int i = 0; i < SLABS * 32; i++) {
            const float(&four)[4] = sum[i / 16 % 2][i / 32 * 8 + i / 2 % 8];
            slab[i / 32][i / 16 % 2][i / 2 % 8][i % 2] = to_bf16(four[i % 2 * 2], four[i % 2 * 2 + 1]);
        }
    }
    // The next slab comes to the place of slab 0.
    __device__ void next() {
        #pragma unroll
        for (int i = 0; i < (SLABS - 1) * 32; i++)
            slab[i / 32][i / 16 % 2][i / 2 % 8][i % 2] = slab[i / 32 + 1][i / 16 % 2][i / 2 % 8][i % 2];
    }
};

// What the epilogues share. A tile's slabs come in turn, each in two halves of its rows: turn 2s + h is half h of slab
// s. In a turn each warp has 16 rows. A lane has two of these rows, and in each of the slab's eight groups of eight
// columns, n = 0 to 7, it has two columns.
struct Epilogue {
    static constexpr int TURNS = 2 * SLABS;
    const bf16* bias;  // (N), at a multiple of 4 bytes
    int N;
    bf16* slots;
    Barrier* full;

    static __device__ int lane() { return threadIdx.x % 32; }
    static __device__ int row_of(int half) { return half * 64 + threadIdx.x / 32 % 4 * 16; }
    __device__ bf16* slot(int i) const { return slots + i * SLOT; }
    // Where the lane's two numbers lie in a slot.
    static __device__ unsigned& word(bf16* slot, int n, int h) {
        return *reinterpret_cast<unsigned*>(slot + ((lane() / 4 * 72 + lane() % 4 * 2) ^ 8 * n) + 512 * h);
    }
    // The bias of the lane's two columns. If these lie outside, it is that of other columns, and nobody uses it.
    __device__ unsigned bias_of(int column0, int n) const {
        return *reinterpret_cast<const unsigned*>(bias + min(column0 + 8 * n, N - 8) + lane() % 4 * 2);
    }
};

// ---- GELU, forward

// Slots 0 and 1 take turns for fch, 2 and 3 for out.
struct GeluForward : Epilogue {
    static constexpr int BUFFER = 4 * SLOT, BARRIERS = 0;
    const TensorMap &out, &fch;

    __device__ GeluForward(const TensorMap& out, const TensorMap& fch, const bf16* bias, int N)
        : Epilogue{bias, N}, out(out), fch(fch) {}
    __device__ void place(bf16* mine, Barrier*) { slots = mine; }
    __device__ void begin(int, int) const {}
    __device__ void finish(const float (&sum)[2][24][4], int row0, int column0) const {
        Products products(sum);
        #pragma unroll 1
        for (int slab = 0; slab < SLABS; slab++, products.next()) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = row0 + row_of(half), column = column0 + 64 * slab;
                if (lane() == 0) stores_read<2>();  // all but those of the turn before
                __syncwarp();
                #pragma unroll
                for (int i = 0; i < 16; i++) {
                    const int n = i / 2, h = i % 2;
                    const unsigned x = products.slab[0][half][n][h], b = bias_of(column, n);
                    word(slot(half), n, h) = x;
                    word(slot(2 + half), n, h) =
                        to_bf16(gelu(first_of(x) + first_of(b)), gelu(second_of(x) + second_of(b)));
                }
                written_for_async();
                __syncwarp();
                if (lane() == 0) {
                    store_box<16>(fch, slot(half), column, row);
                    store_box<16>(out, slot(2 + half), column, row);
                }
            }
        }
    }
};

// out (M, N) = gelu(fch + bias), fch (M, N) = inp (M, K) weight (N, K)^T.
extern "C" __global__ void __launch_bounds__(384, 1)
matmul_gelu_forward_wgmma_kernel(SETS const __grid_constant__ TensorMap out, SETS const __grid_constant__ TensorMap fch,
                                 const __grid_constant__ TensorMap inp, const __grid_constant__ TensorMap weight,
                                 const bf16* bias, int M, int N, int K) {
    alternate<STAGES, 1, BY_COLUMNS>(GeluForward(out, fch, bias, N), inp, weight, M, N, K);
}

// ---- GELU, backward

// fch comes to slots 0 to 2 by turns, the first two turns of a tile beside its products. dfch takes fch's place, and
// slot 3 has out. A warp's partial sums are over 32 rows of the tile.
struct GeluBackward : Epilogue {
    static constexpr int BUFFER = 4 * SLOT, BARRIERS = 3;
    const TensorMap &dfch, &out, &fch;
    float* partials;

    __device__ GeluBackward(const TensorMap& dfch, const TensorMap& out, float* partials, const TensorMap& fch,
                            const bf16* bias, int N)
        : Epilogue{bias, N}, dfch(dfch), out(out), fch(fch), partials(partials) {}
    __device__ void place(bf16* mine, Barrier* barriers) {
        slots = mine, full = barriers;
        if (lane() > 0) return;
        for (int i = 0; i < BARRIERS; i++) barrier_init(full[i], 1);
        barriers_ready();
    }
    static_assert(TURNS % 3 == 0);  // so a tile's last turn has slot 2
    // To be called when the stores from the slot that it fills have been read. A warp's first tile has none yet. Later,
    // the last turn of a tile has waited for the stores of all turns before it. Its own are from slot 2 and from out's,
    // and the first two turns of the next tile fill slots 0 and 1.
    __device__ void load(int turn, int row0, int column0) const {
        barrier_expect(full[turn % 3], 2 * SLOT);
        copy_box<16>(slot(turn % 3), fch, column0 + turn / 2 * 64, row0 + row_of(turn % 2), 0, full[turn % 3]);
    }
    __device__ void begin(int row0, int column0) const {
        if (lane() > 0) return;
        load(0, row0, column0);
        load(1, row0, column0);
    }
    __device__ void finish(const float (&sum)[2][24][4], int row0, int column0) const {
        Products products(sum);
        #pragma unroll 1
        for (int slab = 0; slab < SLABS; slab++, products.next()) {
            const int column = column0 + 64 * slab;
            float sums[8][2] = {};
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const int turn = 2 * slab + half;
                bf16 *const in_place = slot(turn % 3), *const out_slot = slot(3);
                unsigned x[8][2];
                barrier_wait(full[turn % 3], turn / 3);  // a tile has two phases of each
                #pragma unroll
                for (int i = 0; i < 16; i++) x[i / 2][i % 2] = word(in_place, i / 2, i % 2);
                #pragma unroll
                for (int i = 0; i < 16; i++) {
                    const int n = i / 2, h = i % 2;
                    const unsigned b = bias_of(column, n), d = products.slab[0][half][n][h];
                    float d0 = first_of(d), d1 = second_of(d), x0 = first_of(x[n][h]), x1 = second_of(x[n][h]);
                    differentiate(d0, x0, first_of(b));
                    differentiate(d1, x1, second_of(b));
                    sums[n][0] += d0;
                    sums[n][1] += d1;
                    word(in_place, n, h) = to_bf16(d0, d1);
                    x[n][h] = to_bf16(x0, x1);
                }
                if (lane() == 0) {
                    stores_read<0>();  // those of the turn before, while this one was computed
                    if (turn + 2 < TURNS) load(turn + 2, row0, column0);
                }
                __syncwarp();
                #pragma unroll
                for (int i = 0; i < 16; i++) word(out_slot, i / 2, i % 2) = x[i / 2][i % 2];
                written_for_async();
                __syncwarp();
                if (lane() == 0) {
                    store_box<16>(dfch, in_place, column, row0 + row_of(half));
                    store_box<16>(out, out_slot, column, row0 + row_of(half));
                }
            }
            store_partials(sums, row0, column);
        }
    }
    // Adds up the warp's sums over the lanes with the same columns. Each step leaves a lane with half as many columns:
    // at last it has those of n = lane / 4.
    __device__ void store_partials(float (&sums)[8][2], int row0, int column) const {
        #pragma unroll
        for (int step = 0; step < 3; step++) {
            const int left = 4 >> step, lanes = 16 >> step;
            const bool upper = lane() & lanes;
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                if (i >= 2 * left) continue;
                float &low = sums[i / 2][i % 2], &high = sums[left + i / 2][i % 2];
                const float given = __shfl_xor_sync(0xffffffffu, upper ? low : high, lanes);
                low = (upper ? high : low) + given;
            }
        }
        const int own = column + lane() * 2;
        if (own < N) {
            float* const to = partials + (size_t)(row0 / 32 + threadIdx.x / 32 % 4) * N + own;
            *reinterpret_cast<float2*>(to) = {sums[0][0], sums[0][1]};
        }
    }
};

// With dgelu (M, N) = dout (M, K) weight (K, N): dfch (M, N) = dgelu gelu'(fch + bias), and out (M, N) = gelu(fch +
// bias) once more. partials (4 ceil(M / 128), N): sums of dfch, before it is rounded.
extern "C" __global__ void __launch_bounds__(384, 1)
matmul_gelu_backward_wgmma_kernel(SETS const __grid_constant__ TensorMap dfch,
                                  SETS const __grid_constant__ TensorMap out, SETS float* partials,
                                  const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap weight,
                                  const __grid_constant__ TensorMap fch,
                                  const bf16* bias, int M, int N, int K) {
    alternate<STAGES, 1, BY_ROWS>(GeluBackward(dfch, out, partials, fch, bias, N), dout, weight, M, N, K);
}

// ---- SwiGLU, forward

// A tile has 96 columns of up, and in the same lanes those of gate. That is not a number of slabs. So a warp puts 16
// rows in order in shared memory, and its lanes store them.
struct SwigluForward {
    static constexpr int COLUMNS = 96, PITCH = COLUMNS + 8, BUFFER = 16 * PITCH, BARRIERS = 0;
    bf16 *out, *fch;
    int M, H;
    bf16* rows;

    __device__ void place(bf16* mine, Barrier*) { rows = mine; }
    __device__ void begin(int, int) const {}
    __device__ void finish(const float (&sum)[2][24][4], int row0, int column0) const {
        const Products products(sum);
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const auto up = [&](int n, int h) { return products.slab[n / 8][half][n % 8][h]; };
            const auto gate = [&](int n, int h) { return up(n + 12, h); };
            const int row = row0 + Epilogue::row_of(half);
            store(fch, 2 * H, row, column0, up);
            store(fch + H, 2 * H, row, column0, gate);
            store(out, H, row, column0, [&](int n, int h) {
                return to_bf16(swiglu(first_of(up(n, h)), first_of(gate(n, h))),
                               swiglu(second_of(up(n, h)), second_of(gate(n, h))));
            });
        }
    }
    // Stores 16 rows of a matrix whose rows lie `stride` numbers apart. word(n, h): the lane's numbers of columns 8n to
    // 8n + 7, in the upper or the lower half of these rows.
    template <class Word>
    __device__ void store(bf16* to, int stride, int row, int column0, Word word) const {
        const int lane = Epilogue::lane();
        to += (size_t)row * stride + column0;
        #pragma unroll
        for (int i = 0; i < 24; i++) {
            bf16* const place = rows + (lane / 4 + i % 2 * 8) * PITCH + i / 2 * 8 + lane % 4 * 2;
            *reinterpret_cast<unsigned*>(place) = word(i / 2, i % 2);
        }
        __syncwarp();
        #pragma unroll 3  // all six have more addresses than there are registers
        for (int i = 0; i < 16 * COLUMNS / 8 / 32; i++) {
            const int r = (lane + 32 * i) / (COLUMNS / 8), column = (lane + 32 * i) % (COLUMNS / 8) * 8;
            if (row + r < M && column0 + column < H)
                *reinterpret_cast<uint4*>(to + r * stride + column) =
                    *reinterpret_cast<const uint4*>(rows + r * PITCH + column);
        }
        __syncwarp();
    }
};

// out (M, H) = SwiGLU of fch (M, 2H), and fch = inp (M, K) weight (2H, K)^T: in each row first up, then gate. weight's
// map has three axes, the first for up and gate.
extern "C" __global__ void __launch_bounds__(384, 1)
matmul_swiglu_forward_wgmma_kernel(SETS bf16* out, SETS bf16* fch, const __grid_constant__ TensorMap inp,
                                   const __grid_constant__ TensorMap weight, int M, int H, int K) {
    alternate<SWIGLU_STAGES, 1, TWO_BY_COLUMNS>(SwigluForward{out, fch, M, H}, inp, weight, M, H, K);
}

// ---- SwiGLU, backward

// As GeluBackward, but by 8 rows at a time, because there are more arrays: up and gate come to three pairs of slots by
// turns, and their gradients take their place. The last slot has out. H is a multiple of 64, so a slab lies inside, or
// outside. In a slab outside the copies bring other numbers or zeros, and its results are not stored.
struct SwigluBackward {
    static constexpr int PART = 8 * 64, TURNS = 4 * SLABS, BUFFER = 8 * PART, BARRIERS = 3;
    const TensorMap &dfch, &out, &fch;
    int H;
    bf16* slots;
    Barrier* full;

    __device__ void place(bf16* mine, Barrier* barriers) {
        slots = mine, full = barriers;
        if (Epilogue::lane() > 0) return;
        for (int i = 0; i < BARRIERS; i++) barrier_init(full[i], 1);
        barriers_ready();
    }
    static __device__ int row_of(int turn) { return Epilogue::row_of(turn / 2 % 2) + turn % 2 * 8; }
    __device__ bf16* pair(int turn) const { return slots + turn % 3 * 2 * PART; }
    static_assert(TURNS % 3 == 0);  // so a tile's last turn has the last pair
    // To be called when GeluBackward's is.
    __device__ void load(int turn, int row0, int column0) const {
        const int row = row0 + row_of(turn), column = column0 + turn / 4 * 64;
        barrier_expect(full[turn % 3], 2 * 2 * PART);
        copy_box<8>(pair(turn), fch, column, row, 0, full[turn % 3]);
        copy_box<8>(pair(turn) + PART, fch, H + column, row, 0, full[turn % 3]);
    }
    __device__ void begin(int row0, int column0) const {
        if (Epilogue::lane() > 0) return;
        load(0, row0, column0);
        load(1, row0, column0);
    }
    __device__ void finish(const float (&sum)[2][24][4], int row0, int column0) const {
        bf16* const out_slot = slots + 6 * PART;
        Products products(sum);
        #pragma unroll 1
        for (int slab = 0; slab < SLABS; slab++, products.next()) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int turn = 4 * slab + i, row = row0 + row_of(i), column = column0 + 64 * slab;
                bf16 *const up_slot = pair(turn), *const gate_slot = up_slot + PART;
                unsigned up[8], gate[8];
                barrier_wait(full[turn % 3], turn / 3 % 2);  // a tile has four phases of each
                #pragma unroll
                for (int n = 0; n < 8; n++) {
                    up[n] = Epilogue::word(up_slot, n, 0);
                    gate[n] = Epilogue::word(gate_slot, n, 0);
                }
                #pragma unroll
                for (int n = 0; n < 8; n++) {
                    const unsigned d = products.slab[0][i / 2][n][i % 2];
                    float up0 = first_of(up[n]), up1 = second_of(up[n]);
                    float gate0 = first_of(gate[n]), gate1 = second_of(gate[n]);
                    const float out0 = differentiate_swiglu(first_of(d), up0, gate0);
                    const float out1 = differentiate_swiglu(second_of(d), up1, gate1);
                    Epilogue::word(up_slot, n, 0) = to_bf16(up0, up1);
                    Epilogue::word(gate_slot, n, 0) = to_bf16(gate0, gate1);
                    up[n] = to_bf16(out0, out1);
                }
                if (Epilogue::lane() == 0) {
                    stores_read<0>();  // those of the turn before, while this one was computed
                    if (turn + 2 < TURNS) load(turn + 2, row0, column0);
                }
                __syncwarp();
                #pragma unroll
                for (int n = 0; n < 8; n++) Epilogue::word(out_slot, n, 0) = up[n];
                written_for_async();
                __syncwarp();
                if (Epilogue::lane() == 0 && column < H) {
                    store_box<8>(dfch, up_slot, column, row);
                    store_box<8>(dfch, gate_slot, H + column, row);
                    store_box<8>(out, out_slot, column, row);
                }
            }
        }
    }
};

// With dswiglu (M, H) = dout (M, K) weight (K, H): dfch (M, 2H), the gradient of fch (M, 2H), and out (M, H) = SwiGLU
// of fch once more.
extern "C" __global__ void __launch_bounds__(384, 1)
matmul_swiglu_backward_wgmma_kernel(SETS const __grid_constant__ TensorMap dfch,
                                    SETS const __grid_constant__ TensorMap out,
                                    const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap weight,
                                    const __grid_constant__ TensorMap fch, int M, int H, int K) {
    alternate<STAGES, 1, BY_ROWS>(SwigluBackward{dfch, out, fch, H}, dout, weight, M, H, K);
}

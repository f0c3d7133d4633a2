// Products of the MLP by Hopper's instructions, in bf16, with GELU in their epilogues: while one
// consumer computes what becomes of its tile, the other one multiplies (hopper_product.cuh: alternate). So arrays that
// a kernel of its own would read again from memory, after the product, never leave the chip. Every number is computed
// and rounded as by the product and gelu.cu.
//
// Tensor maps have rows of 16 bytes or multiples: the sizes but N are multiples of 8. Rows and columns of a tile that
// lie outside come as zeros and are not stored.
#define ARCHITECTURE 90a
#define WARP_SIZE 32
#include "gelu.cuh"
#include "hopper_product.cuh"

constexpr int STAGES = 4, SLABS = 3;

__device__ inline float first_of(unsigned word) { return __uint_as_float(word << 16); }
__device__ inline float second_of(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

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

// What the epilogues share. A tile's slabs come in turn, each in two halves: turn 2s + h is the half h of slab s. In
// each a warp has 16 rows, and a lane two of these and 16 columns. n: eight columns of the slab, of which it has two.
struct Epilogue {
    static constexpr int TURNS = 2 * SLABS;
    const bf16* bias;  // (N), at a multiple of 4 bytes
    int N;
    bf16* slots;

    static __device__ int lane() { return threadIdx.x % 32; }
    static __device__ int row_of(int half) { return half * 64 + threadIdx.x / 32 % 4 * 16; }
    __device__ bf16* slot(int i) const { return slots + i * SLOT; }
    // Where the lane's two numbers lie in a slot.
    static __device__ unsigned& word(bf16* slot, int n, int h) {
        return *reinterpret_cast<unsigned*>(slot + ((lane() / 4 * 72 + lane() % 4 * 2) ^ 8 * n) + 512 * h);
    }
    // The bias of the lane's two columns. Where these lie outside it is anybody's.
    __device__ unsigned bias_of(int column0, int n) const {
        return *reinterpret_cast<const unsigned*>(bias + min(column0 + 8 * n, N - 8) + lane() % 4 * 2);
    }
};

// ---- GELU, forward

// Slots 0 and 1 take turns for fch, 2 and 3 for out.
struct GeluForward : Epilogue {
    static constexpr int SLOTS = 4, BARRIERS = 0;
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
    alternate<STAGES, 1, false>(GeluForward(out, fch, bias, N), inp, weight, M, N, K);
}

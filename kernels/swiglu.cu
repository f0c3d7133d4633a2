// SwiGLU (Shazeer 2020): out = silu(gate) * up with silu(x) = x * sigmoid(x). inp (N, 2C) is one matrix product: the
// first C columns of a row are up, the last C are gate. There is no bias.
// Backward: with s = sigmoid(gate),
//   dup = dout * gate * s;  dgate = dout * up * s * (1 + gate * (1 - s))
// Memory-bound: forward reads 2 N*C numbers and writes N*C. Backward reads 3 N*C and writes 3 N*C. A third of these are
// out, for the weight gradient of the next product, so forward's output need not be kept. In fp32 it is transposed
// (Tile::fill).
#include "fp8.cuh"

// If x is far below 0, the exponential is infinite and the sigmoid 0. If it is far above 0, they are 0 and 1.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// A vector of the output.
__device__ inline Vec forward(Vec up, const Vec& gate) {
    for (int k = 0; k < WIDTH; k++) up.x[k] *= gate.x[k] * sigmoid(gate.x[k]);
    return up;
}

// Block x: a row; thread: a vector of columns of grid column y.
extern "C" __global__ void PROGRAMMATIC swiglu_forward_kernel(floatX* __restrict__ out, const floatX* __restrict__ inp,
                                                              int C) {
    const int i = WIDTH * (blockIdx.y * blockDim.x + threadIdx.x);
    trigger_programmatic_launch();
    if (i >= C) return;
    grid_dependency_synchronize();
    const floatX* row = inp + 2 * (size_t)blockIdx.x * C;
    by_alignment(C % WIDTH == 0, [&](auto memory) {
        const Vec up = memory.load(row + i, C - i), gate = memory.load(row + C + i, C - i);
        memory.store(out + (size_t)blockIdx.x * C + i, forward(up, gate), C - i);
    });
}

// The same for codes (N, C) of out. The blocks share the rows.
extern "C" __global__ void __launch_bounds__(256, 4) swiglu_forward_codes_kernel(
    float* scale, float* before, float* maxima, int correct, unsigned char* codes, const floatX* __restrict__ inp,
    int N, int C) {
    Coding coding = {scale, before, maxima, correct};
    if (!coding.begin()) return;
    for (int n = blockIdx.x; n < N; n += gridDim.x) {
        for (int i = WIDTH * threadIdx.x; i < C; i += WIDTH * blockDim.x) {
            const floatX* row = inp + 2 * (size_t)n * C;
            const Vec out = forward(Aligned::load(row + i, WIDTH), Aligned::load(row + C + i, WIDTH));
            store_codes(codes + (size_t)n * C + i, coding.codes_of_bf16(out));
        }
    }
    coding.end();
}

// Vectors of the output, and of the gradients of up and gate.
struct Gradients {
    Vec out, up, gate;
};

__device__ inline Gradients backward(const Vec& d, const Vec& up, const Vec& gate) {
    Gradients of;
    for (int k = 0; k < WIDTH; k++) {
        const float g = gate.x[k], s = sigmoid(g), silu = g * s;
        of.out.x[k] = silu * up.x[k];
        of.gate.x[k] = d.x[k] * up.x[k] * (s + silu * (1.0f - s));
        of.up.x[k] = d.x[k] * silu;
    }
    return of;
}

// A block takes one tile of out. Sets dinp (N,2C) and out_T (C,N), or out_T (N,C) if it is not transposed.
extern "C" __global__ void swiglu_backward_kernel(SETS floatX* __restrict__ dinp, SETS floatX* __restrict__ out_T,
                                                  const floatX* __restrict__ dout, const floatX* __restrict__ inp,
                                                  int N, int C) {
    __shared__ Tile tile;
    const int i0 = blockIdx.x * TILE_COLUMNS, n0 = blockIdx.y * TILE;
    by_alignment(C % WIDTH == 0, [&](auto memory) {
        tile.fill(memory, out_T, n0, i0, N, C, [&](int n, int i, int) {
            const size_t at = 2 * (size_t)n * C + i;  // of up; gate is C further
            const Vec up = memory.load(inp + at, C - i), gate = memory.load(inp + at + C, C - i);
            const Gradients of = backward(memory.load(dout + (size_t)n * C + i, C - i), up, gate);
            memory.store(dinp + at, of.up, C - i);
            memory.store(dinp + at + C, of.gate, C - i);
            return of.out;
        });
    });
    write_recomputed(out_T, tile, n0, i0, N, C);
}

// The same for codes (N, 2C) and codes_T (2C, N) of dinp, and for codes out_T (C, N) of out, by the scale of forward.
// If out_T is null, out (N, C) is set instead. The blocks share the tiles of out. A thread loads the vectors of its
// rows before it uses the first, so two blocks a multiprocessor have enough loads in flight.
extern "C" __global__ void __launch_bounds__(256, 2) swiglu_backward_codes_kernel(
    float* scale, float* before, float* maxima, int correct, unsigned char* codes, unsigned char* codes_T,
    floatX* __restrict__ out, unsigned char* out_T, const float* out_scale, const floatX* __restrict__ dout,
    const floatX* __restrict__ inp, int N, int C) {
    __shared__ CodeTile<> of_up, of_gate, of_out;
    const int columns = ceil_div(C, of_up.COLUMNS);
    Coding coding = {scale, before, maxima, correct}, again = {};
    if (!coding.begin()) return;
    if (out_T != nullptr) again.inverse = inverse_of(*out_scale);
    for (int t = blockIdx.x; t < columns * ceil_div(N, of_up.ROWS); t += gridDim.x) {
        const int n0 = t / columns * of_up.ROWS, i0 = t % columns * of_up.COLUMNS;
        of_up.for_each(n0, i0, N, C, [&](int n, int i, int row, int column) {
            Vec d[4], up[4], gate[4];
            Codes ups[4], gates[4], outs[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const floatX* row = inp + (size_t)(n + r) * 2 * C + i;
                d[r] = Aligned::load(dout + (size_t)(n + r) * C + i, WIDTH);
                up[r] = Aligned::load(row, WIDTH), gate[r] = Aligned::load(row + C, WIDTH);
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const Gradients of = backward(d[r], up[r], gate[r]);
                unsigned char* row = codes + (size_t)(n + r) * 2 * C + i;
                store_codes(row, ups[r] = coding.codes_of_bf16(of.up));
                store_codes(row + C, gates[r] = coding.codes_of_bf16(of.gate));
                if (out_T != nullptr) outs[r] = again.codes_of_bf16(of.out);
                else Aligned::store(out + (size_t)(n + r) * C + i, of.out, WIDTH);
            }
            of_up.put(row, column, ups), of_gate.put(row, column, gates);
            if (out_T != nullptr) of_out.put(row, column, outs);
        });
        __syncthreads();
        of_up.store(codes_T, n0, i0, N, C);
        of_gate.store(codes_T + (size_t)C * N, n0, i0, N, C);
        if (out_T != nullptr) of_out.store(out_T, n0, i0, N, C);
        __syncthreads();  // the next tile overwrites this one
    }
    coding.end();
}

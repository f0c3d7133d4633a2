// Encoder: out[b,t] = wte[inp[b,t]] + wpe[t], rows of C numbers, or dropout of that; inp (B,T) holds token ids. A model
// whose positions are rotary (rope.cu) has no wpe. A model that writes text runs forward on the last rows alone. It
// gives starts (B): row t of sequence b then has the position starts[b] + t. Backward: dwte[v] += sum of dout[b,t] over
// the positions that hold token v;  dwpe[t] += sum of dout[b,t] over b. Most rows of dwte get nothing. Ranks exchange
// only the other rows, with their tokens (a sparse matrix), and then add them. Memory-bound: forward reads two rows and
// writes one for each position.
//
// With float atomics, each run would add rows to dwte in another order. Instead the positions come sorted by token, so
// that each token's positions are neighbours, and one block adds them up in a fixed order.
#include "dependent_launch.cuh"
#include "dropout.cuh"

// One warp takes a position. Block: (WARP_SIZE, positions). wpe and starts (B) may be null. finish(vector, n, i)
// returns what the kernel stores for a vector: that of position n which begins at channel i.
template <class Finish>
__device__ inline void forward_positions(floatX* out, const int* inp, const floatX* wte, const floatX* wpe,
                                         const int* starts, int N, int T, int C, Finish finish) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N) return;
    const floatX* token = wte + (size_t)inp[n] * C;
    const int t = n % T + (starts == nullptr ? 0 : starts[n / T]);
    const floatX* position = wpe == nullptr ? nullptr : wpe + (size_t)t * C;
    floatX* row = out + (size_t)n * C;
    by_alignment(C % WIDTH == 0, [&](auto memory) {
        for (int i = WIDTH * threadIdx.x; i < C; i += WIDTH * WARP_SIZE) {
            Vec a = memory.load(token + i, C - i);
            const Vec b = position == nullptr ? Vec() : memory.load(position + i, C - i);
            for (int k = 0; k < WIDTH; k++) a.x[k] += b.x[k];
            memory.store(row + i, finish(a, n, i), C - i);
        }
    });
}

extern "C" __global__ void PROGRAMMATIC encoder_forward_kernel(floatX* out, const int* inp, const floatX* wte,
                                                               const floatX* wpe, const int* starts, int N, int T,
                                                               int C) {
    grid_dependency_synchronize();
    trigger_programmatic_launch();  // only now: early_position needs it
    forward_positions(out, inp, wte, wpe, starts, N, T, C, [](const Vec& a, int n, int i) { return a; });
}

extern "C" __global__ void encoder_dropout_forward_kernel(floatX* out, const int* inp, const floatX* wte,
                                                          const floatX* wpe, int N, int T, int C,
                                                          const int* random, int site) {
    const Dropout drop(random, site);
    forward_positions(out, inp, wte, wpe, nullptr, N, T, C,
                      [&](const Vec& a, int n, int i) { return drop(a, n, i, C); });
}

// row (C) = the sum of the rows of dout at some positions, or row += that. Block: (threads over the channels, a vector
// each; rows of threads); row y adds up every blockDim.y-th position. At most 1024 threads.
__device__ inline void sum_positions(float* row, bool accumulate, const floatX* dout, const int* position,
                                     int positions, int C) {
    __shared__ Vec thread_sums[1024];
    by_alignment(C % WIDTH == 0, [&](auto memory) {
        for (int i0 = 0; i0 < C; i0 += WIDTH * blockDim.x) {
            const int i = i0 + WIDTH * threadIdx.x;
            Vec sum = {};
            if (i < C) {
                for (int j = threadIdx.y; j < positions; j += blockDim.y) {
                    const Vec d = memory.load(dout + (size_t)position[j] * C + i, C - i);
                    for (int k = 0; k < WIDTH; k++) sum.x[k] += d.x[k];
                }
            }
            thread_sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
            __syncthreads();
            if (threadIdx.y == 0 && i < C) {
                Vec total = {};
                if (accumulate) total = memory.load(row + i, C - i);
                for (int y = 0; y < blockDim.y && y < positions; y++) {
                    for (int k = 0; k < WIDTH; k++) total.x[k] += thread_sums[y * blockDim.x + threadIdx.x].x[k];
                }
                memory.store(row + i, total, C - i);
            }
            __syncthreads();
        }
    });
}

// order (N) lists the positions, those of equal tokens together. At the first place of a token in this order, count (N)
// says how many positions the token has; elsewhere it is 0. Block x has place x, and works only if a token begins
// there.
extern "C" __global__ void wte_backward_kernel(float* dwte, const floatX* dout, const int* inp, const int* order,
                                               const int* count, int C) {
    const int* position = order + blockIdx.x;
    const int positions = count[blockIdx.x];
    if (positions == 0) return;
    sum_positions(dwte + (size_t)inp[position[0]] * C, true, dout, position, positions, C);
}

// The same sums, but not added to dwte: values[x] (C) is the sum for the token indices[x]. That is -1 if no token
// begins at place x.
extern "C" __global__ void wte_backward_sparse_kernel(float* values, int* indices, const floatX* dout, const int* inp,
                                                      const int* order, const int* count, int C) {
    const int* position = order + blockIdx.x;
    const int positions = count[blockIdx.x];
    if (threadIdx.x == 0 && threadIdx.y == 0) indices[blockIdx.x] = positions == 0 ? -1 : inp[position[0]];
    if (positions == 0) return;
    sum_positions(values + (size_t)blockIdx.x * C, false, dout, position, positions, C);
}

// dwte[indices[x]] += values[x] for x < N, except if the index is -1. No two other indices are the same. One warp takes
// a row. values and indices may lie on another GPU, which answers later than memory, so a thread has several loads in
// flight.
extern "C" __global__ void add_sparse_kernel(float* dwte, const float* values, const int* indices, int N, int C) {
    constexpr int AT_ONCE = 6, STRIDE = FLOATS * WARP_SIZE;
    by_alignment(C % FLOATS == 0, [&](auto memory) {
        for (int x = blockIdx.x * blockDim.y + threadIdx.y; x < N; x += gridDim.x * blockDim.y) {
            if (indices[x] < 0) continue;
            const float* value = values + (size_t)x * C;
            float* row = dwte + (size_t)indices[x] * C;
            for (int i0 = FLOATS * threadIdx.x; i0 < C; i0 += AT_ONCE * STRIDE) {
                Floats sum[AT_ONCE], added[AT_ONCE];
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    const int i = i0 + k * STRIDE;
                    if (i >= C) break;
                    added[k] = memory.load_floats(value + i, C - i);
                    sum[k] = memory.load_floats(row + i, C - i);
                }
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    const int i = i0 + k * STRIDE;
                    if (i >= C) break;
                    for (int j = 0; j < FLOATS; j++) sum[k].x[j] += added[k].x[j];
                    memory.store_floats(row + i, sum[k], C - i);
                }
            }
        }
    });
}

// Block (t, y), thread: one channel of one position, summed over the batch in order.
extern "C" __global__ void wpe_backward_kernel(float* dwpe, const floatX* dout, int B, int T, int C) {
    const int t = blockIdx.x;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= C) return;
    float sum = 0.0f;
    for (int b = 0; b < B; b++) sum += to_float(dout[((size_t)b * T + t) * C + i]);
    dwpe[(size_t)t * C + i] += sum;
}

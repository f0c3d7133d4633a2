// What ranks compute on flat buffers: sums in the order of the ranks, and a checksum. And a rank fetches rows of a
// table from the ranks that own them.
//
// A GPU with peer access, over NVLink or PCIe, loads and stores in another GPU's memory as in its own. The kernels take
// buffers by their addresses, so each can be any GPU's. The links bound sum_kernel if its buffers are on several GPUs;
// else memory does, as it bounds checksum_kernel: both read each number once. gather_rows_kernel waits for the links.
#include "common.cuh"

#ifdef LLMC_CPU
#define IN_ORDER(x) asm volatile("" : "+m"(x))  // -ffast-math would add the buffers in another order
#else
#define IN_ORDER(x)
#endif

// to[m][i] = from[0][i] + from[1][i] + ... + from[num_from - 1][i], in this order, for each buffer of `to` and each i
// of some pieces; all are floats. Four numbers describe a piece: how many vectors the pieces before it have, its first
// float, the float after its last, and by how much its place differs in all buffers of `from` but the `own`-th. A call
// adds up one of `shares` equal parts of all vectors, the `share`-th. aligned: whether each piece begins at a multiple
// of 16 bytes in all buffers, and consists of whole vectors. A buffer may be in both lists.
extern "C" __global__ void sum_kernel(const unsigned long long* to, int num_to, const unsigned long long* from,
                                      int num_from, int own, const long long* pieces, int num_pieces, int share,
                                      int shares, int aligned) {
    constexpr int AT_ONCE = 4;  // loads that a thread has in flight, because another GPU answers later than memory
    const long long* last = pieces + 4 * (num_pieces - 1);
    const long long vectors = last[0] + (last[2] - last[1] + WIDTH - 1) / WIDTH;
    const long long begin = vectors * share / shares, end = vectors * (share + 1) / shares;
    by_alignment(aligned, [&](auto memory) {
        const long long* piece = pieces;
        const long long step = (long long)gridDim.x * blockDim.x;
        for (long long v = begin + (long long)blockIdx.x * blockDim.x + threadIdx.x; v < end; v += step) {
            while (piece < last && v >= piece[4]) piece += 4;
            const long long i = piece[1] + WIDTH * (v - piece[0]), there = i + piece[3];
            const int left = piece[2] - i < WIDTH ? (int)(piece[2] - i) : WIDTH;
            Vec sum;
            for (int r = 0; r < num_from; r += AT_ONCE) {
                Vec x[AT_ONCE];
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    if (r + k >= num_from) break;
                    const float* buffer = reinterpret_cast<const float*>(from[r + k]);
                    x[k] = memory.load(buffer + (r + k == own ? i : there), left);
                }
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    if (r + k >= num_from) break;
                    // The first number is copied, not added to 0: 0 + -0 would be 0.
                    for (int j = 0; j < WIDTH; j++) sum.x[j] = r + k == 0 ? x[k].x[j] : sum.x[j] + x[k].x[j];
                    IN_ORDER(sum);
                }
            }
            for (int m = 0; m < num_to; m++) {
                // The address is a sum of integers: from reinterpret_cast<float*>(to[m]) + i nvcc stores single floats.
                memory.store(reinterpret_cast<float*>(to[m] + 4 * i), sum, left);
            }
        }
    });
}

// Copies the rows of a batch's tokens in a table (V, C), each once, from the ranks that own them. The table begins
// at number `start` of a flat buffer of floatX. Rank r, whose buffer is at buffers[r], owns the r-th `length` numbers.
// order, count (N): the batch's positions, sorted by token (encoder.cu). A warp copies a row.
// Block: (WARP_SIZE, rows).
extern "C" __global__ void gather_rows_kernel(const unsigned long long* buffers, int own, size_t length, size_t start,
                                              const int* inp, const int* order, const int* count, int N, int C) {
    constexpr int AT_ONCE = 8;  // loads that a thread has in flight
    const int x = blockIdx.x * blockDim.y + threadIdx.y;
    if (x >= N || count[x] == 0) return;
    const size_t row = start + (size_t)inp[order[x]] * C;
    floatX* to = reinterpret_cast<floatX*>(buffers[own]);
    int owner = (int)(row / length);
    for (int i0 = threadIdx.x; i0 < C; i0 += AT_ONCE * WARP_SIZE) {
        floatX values[AT_ONCE];
        int owners[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = i0 + k * WARP_SIZE;
            if (i >= C) break;
            while (row + i >= (owner + 1) * length) owner++;
            owners[k] = owner;
            values[k] = reinterpret_cast<const floatX*>(buffers[owner])[row + i];
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = i0 + k * WARP_SIZE;
            if (i >= C) break;
            if (owners[k] != own) to[row + i] = values[k];
        }
    }
}

// sum += a 64-bit hash of each word of x (n) and its place. Integers may be added in any order.
// The hash is the last step of SplitMix64 (Steele, Lea and Flood, 2014).
extern "C" __global__ void checksum_kernel(unsigned long long* sum, const unsigned int* x, size_t n) {
    unsigned long long total = 0;
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        unsigned long long z = x[i] + i * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        total += z ^ (z >> 31);
    }
    atomicAdd(sum, total);
}

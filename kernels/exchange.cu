// What ranks do with flat buffers beside sending them: a sum in the order of the ranks, and a checksum.
// Memory-bound: both read what they are given once.
#include "common.cuh"

// sums[i] += own[i] and parts[r, i] of the ranks r from 0 to `ranks` - 1, one after another, for parts (ranks, n) of
// which row `rank` is not read: own stands for it.
extern "C" __global__ void add_in_order_kernel(float* sums, const float* own, const float* parts, int rank, int ranks,
                                               size_t n) {
    const size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    const int left = n - i < 4 ? (int)(n - i) : 4;
    by_alignment(n % 4 == 0, [&](auto memory) {
        Four sum = memory.load(sums + i, left);
        for (int r = 0; r < ranks; r++) {
            const Four x = memory.load((r == rank ? own : parts + r * n) + i, left);
            for (int k = 0; k < 4; k++) sum.x[k] += x.x[k];
#ifdef LLMC_CPU
            asm volatile("" : "+m"(sum));  // -ffast-math would take the ranks in another order
#endif
        }
        memory.store(sums + i, sum, left);
    });
}

// sum += a 64-bit hash of each word of x (n) and its place. Whole numbers may be added in any order.
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

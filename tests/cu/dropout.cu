// What dropout draws, written down.
#include "../../kernels/dropout.cuh"

// One thread per row: out (N, 4) = philox of counter (N, 4) under key (N, 2).
extern "C" __global__ void philox_kernel(int* out, const int* counter, const int* key, int N) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    Words words;
    for (int k = 0; k < 4; k++) words.x[k] = counter[4 * n + k];
    words = philox(words, key[2 * n], key[2 * n + 1]);
    for (int k = 0; k < 4; k++) out[4 * n + k] = words.x[k];
}

// One block per row: out (N, C) = dropout of ones.
extern "C" __global__ void dropout_ones_kernel(float* out, int C, const int* random, int site) {
    const Dropout drop(random, site);
    const int n = blockIdx.x;
    Vec ones;
    for (int k = 0; k < WIDTH; k++) ones.x[k] = 1.0f;
    for (int i = WIDTH * threadIdx.x; i < C; i += WIDTH * blockDim.x) {
        Ragged::store(out + (size_t)n * C + i, drop(ones, n, i, C), C - i);
    }
}

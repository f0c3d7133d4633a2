// Encoder: out[b,t] = wte[inp[b,t]] + wpe[t], rows of C floats; inp (B,T) holds token ids.
// Backward: dwte[v] += sum of dout[b,t] over the positions that hold token v;  dwpe[t] += sum of dout[b,t] over b.
// Memory-bound: forward reads two rows and writes one for each position.
//
// Adding rows to dwte with float atomics would sum in another order on every run. Instead the positions come sorted by
// token (`order`), so each token's positions are neighbours and one block adds them up from first to last.
#include "common.cuh"

// One warp a position. Block: (WARP_SIZE, positions).
extern "C" __global__ void encoder_forward_kernel(float* out, const int* inp, const float* wte, const float* wpe,
                                                  int N, int T, int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N) return;
    const float* token = wte + (size_t)inp[n] * C;
    const float* position = wpe + (size_t)(n % T) * C;
    float* row = out + (size_t)n * C;
    for (int i = 4 * threadIdx.x; i < C; i += 4 * WARP_SIZE) {
        Four a = load4(token + i, C - i);
        const Four b = load4(position + i, C - i);
        for (int k = 0; k < 4; k++) a.x[k] += b.x[k];
        store4(row + i, a, C - i);
    }
}

// Block x of the grid stands at place x of the sorted order and works only if a new token begins there.
// A thread owns the channels i of grid column y. order (N) lists positions, those of equal tokens together.
extern "C" __global__ void wte_backward_kernel(float* dwte, const float* dout, const int* inp, const int* order,
                                               int N, int C) {
    const int first = blockIdx.x;
    const int token = inp[order[first]];
    if (first > 0 && inp[order[first - 1]] == token) return;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= C) return;
    float sum = 0.0f;
    for (int j = first; j < N && inp[order[j]] == token; j++) sum += dout[(size_t)order[j] * C + i];
    dwte[(size_t)token * C + i] += sum;
}

// Block (t, y), thread: one channel of one position, summed over the batch in order.
extern "C" __global__ void wpe_backward_kernel(float* dwpe, const float* dout, int B, int T, int C) {
    const int t = blockIdx.x;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= C) return;
    float sum = 0.0f;
    for (int b = 0; b < B; b++) sum += dout[((size_t)b * T + t) * C + i];
    dwpe[(size_t)t * C + i] += sum;
}

// Causal softmax over the rows of att (rows, T), in place: row t of each (T, T) matrix becomes softmax(scale * x) over its
// first t + 1 entries, and 0 after them. Bytes: half of att is read, all of it written, 6 rows T.
#define WARP_SIZE 32
#include "../../kernels/common.cuh"

// One thread per row: three loops, for the largest entry, the sum of the exponentials and the output. The lanes of a warp
// are T floats apart, and wait for the longest of their rows.
extern "C" __global__ void thread_a_row_kernel(float* att, float scale, size_t rows, int T) {
    const size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= rows) return;
    float* row = att + n * T;
    const int length = (int)(n % T) + 1;
    float largest = -INFINITY, sum = 0.0f;
    for (int s = 0; s < length; s++) largest = fmaxf(largest, row[s]);
    for (int s = 0; s < length; s++) sum += __expf(scale * (row[s] - largest));
    for (int s = 0; s < T; s++) row[s] = s < length ? __expf(scale * (row[s] - largest)) / sum : 0.0f;
}

// One block per row: 256 threads share the row and read it by whole sectors. It is short for them, and two reductions with
// two barriers each keep them waiting.
extern "C" __global__ void block_a_row_kernel(float* att, float scale, int T) {
    float* row = att + (size_t)blockIdx.x * T;
    const int length = blockIdx.x % T + 1;
    float largest = -INFINITY, sum = 0.0f;
    for (int s = threadIdx.x; s < length; s += blockDim.x) largest = fmaxf(largest, row[s]);
    largest = block_max(largest);
    for (int s = threadIdx.x; s < length; s += blockDim.x) sum += __expf(scale * (row[s] - largest));
    const float norm = 1.0f / block_sum(sum);
    for (int s = threadIdx.x; s < T; s += blockDim.x) {
        row[s] = s < length ? __expf(scale * (row[s] - largest)) * norm : 0.0f;
    }
}

// One warp per row: shuffles reduce, nobody waits at a barrier. Block: (32 lanes, rows).
extern "C" __global__ void warp_a_row_kernel(float* att, float scale, size_t rows, int T) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= rows) return;
    float* row = att + n * T;
    const int lane = threadIdx.x, length = (int)(n % T) + 1;
    float largest = -INFINITY, sum = 0.0f;
    for (int s = lane; s < length; s += 32) largest = fmaxf(largest, row[s]);
    largest = warp_max(largest);
    for (int s = lane; s < length; s += 32) sum += __expf(scale * (row[s] - largest));
    const float norm = 1.0f / warp_sum(sum);
    for (int s = lane; s < T; s += 32) row[s] = s < length ? __expf(scale * (row[s] - largest)) * norm : 0.0f;
}

// Online softmax: the largest and the sum in one pass, the sum rescaled where a larger one comes.
extern "C" __global__ void online_kernel(float* att, float scale, size_t rows, int T) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= rows) return;
    float* row = att + n * T;
    const int lane = threadIdx.x, length = (int)(n % T) + 1;
    float largest = -INFINITY, sum = 0.0f;
    for (int s = lane; s < length; s += 32) {
        const float top = fmaxf(largest, row[s]);
        sum = sum * __expf(scale * (largest - top)) + __expf(scale * (row[s] - top));
        largest = top;
    }
    const float row_largest = warp_max(largest);
    const float norm = 1.0f / warp_sum(sum * __expf(scale * (largest - row_largest)));
    for (int s = lane; s < T; s += 32) row[s] = s < length ? __expf(scale * (row[s] - row_largest)) * norm : 0.0f;
}

// A kernel that needs both of its barriers: out (R, N) = each row of x (R, N) reversed, through shared memory.
// Built three times, so that a test can show what it looks like when one is left out.

template <bool BEFORE_READING, bool BEFORE_OVERWRITING>
__device__ inline void reverse_rows(float* out, const float* x, int R, int N) {
    __shared__ float row[128];
    for (int r = 0; r < R; r++) {
        row[threadIdx.x] = x[r * N + threadIdx.x];
        if (BEFORE_READING) __syncthreads();
        out[r * N + threadIdx.x] = row[N - 1 - threadIdx.x];
        if (BEFORE_OVERWRITING) __syncthreads();
    }
}

extern "C" __global__ void reverse_kernel(float* out, const float* x, int R, int N) {
    reverse_rows<true, true>(out, x, R, N);
}

extern "C" __global__ void reads_too_early_kernel(float* out, const float* x, int R, int N) {
    reverse_rows<false, true>(out, x, R, N);
}

extern "C" __global__ void overwrites_too_early_kernel(float* out, const float* x, int R, int N) {
    reverse_rows<true, false>(out, x, R, N);
}

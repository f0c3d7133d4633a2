// Exercise 5: find the race.
//
//   out[r] = the sum of the 128 numbers of row r of x (R, 128)
// One block of 128 threads takes one row after another and copies it to `tile`. Then the first 64 threads add the other
// 64 numbers to their own, the first 32 add the next 32, and so on, until tile[0] is the sum.

extern "C" __global__ void row_sums_kernel(float* out, const float* x, int R) {
    __shared__ float tile[128];
    const int i = threadIdx.x;
    for (int r = 0; r < R; r++) {
        tile[i] = x[r * 128 + i];
        __syncthreads();  // the row is complete
        for (int half = 64; half > 0; half /= 2) {
            if (i < half) tile[i] += tile[i + half];
            __syncthreads();  // this half is complete
        }
        if (i == 0) out[r] = tile[0];
    }
}

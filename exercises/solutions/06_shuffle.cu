// Exercise 6: a sum without memory.
//
// Blocks have 64 threads, two warps of 32 lanes. Each warp adds up its 32 numbers of x, and every lane
// writes the sum:
//   out[i] = sum of the 32 numbers of the warp that thread i belongs to
// Use no shared memory: lanes read each other's registers. `__shfl_xor_sync(0xffffffffu, value, o)` gives each lane
// the `value` of the lane whose number differs from its own in the bits of o. Each number is read from x once.

extern "C" __global__ void warp_sums_kernel(float* out, const float* x) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = x[i];
    for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    out[i] = sum;
}

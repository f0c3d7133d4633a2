// Warps whose lanes part and meet again, and accesses that race or do not, for what the microscope says of them.
#define WARP_SIZE 32

// Some lanes return within a loop: the others store together when they have left it.
extern "C" __global__ void return_in_loop_kernel(float* out, const float* x) {
    const int lane = threadIdx.x;
    for (int i = 0; i < lane; i++) {
        if (i == 20) return;
        out[lane] += x[lane];
    }
    out[64 + lane] = 1.0f;
}

// Some lanes of a branch return: the others meet after it.
extern "C" __global__ void return_in_branch_kernel(float* out, const float* x) {
    const int lane = threadIdx.x;
    if (lane < 16) {
        if (lane < 3) return;
        out[lane] = x[lane];
    } else {
        out[lane] = 2.0f * x[lane];
    }
    out[64 + lane] = x[64 + lane];
}

// A loop of as many turns as the lane's number, in a loop of four: all lanes begin each of the four together.
extern "C" __global__ void loop_in_loop_kernel(float* out, const float* x) {
    const int lane = threadIdx.x;
    for (int n = 0; n < 4; n++) {
        float sum = x[n * 32 + lane];
        for (int i = 0; i < lane; i++) sum += out[256 + i];
        out[n * 32 + lane] = sum;
    }
}

// The last block reads with a plain load what all have added to.
extern "C" __global__ void atomic_then_load_kernel(float* out, float* total) {
    if (threadIdx.x > 0) return;
    atomicAdd(total, 1.0f);
    if (blockIdx.x == gridDim.x - 1) out[0] = *total;
}

// One lane stores where all add.
extern "C" __global__ void atomic_then_store_kernel(float* out) {
    atomicAdd(out, 1.0f);
    if (threadIdx.x == 31) out[0] = 5.0f;
}

__shared__ float of_the_file[64];

// The array has no function of its own, and the barrier is missing.
extern "C" __global__ void shared_of_the_file_kernel(float* out) {
    of_the_file[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = of_the_file[63 - threadIdx.x];
}

// Neighbours write bytes of one word: no race.
extern "C" __global__ void bytes_kernel(unsigned char* bytes) { bytes[threadIdx.x] = threadIdx.x; }

__device__ float of_the_device[64];

extern "C" __global__ void outside_kernel(float* out) { out[threadIdx.x] = of_the_device[threadIdx.x]; }

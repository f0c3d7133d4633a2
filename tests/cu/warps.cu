// What lanes exchange, each kernel on one block of any size and shape.
#define WARP_SIZE 32

static __device__ int thread_number() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

// out (4, threads): the three shuffles of x (threads), and its sum over each warp by five of them.
extern "C" __global__ void exchange_kernel(float* out, const float* x, int argument, int width) {
    int t = thread_number(), n = blockDim.x * blockDim.y * blockDim.z;
    float v = x[t];
    out[t] = __shfl_sync(0xffffffff, v, argument, width);
    out[n + t] = __shfl_xor_sync(0xffffffff, v, argument, width);
    out[2 * n + t] = __shfl_down_sync(0xffffffff, v, argument, width);
    float sum = v;
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    out[3 * n + t] = sum;
}

extern "C" __global__ void vote_kernel(int* out, const int* x) {
    out[threadIdx.x] = __any_sync(0xffffffff, x[threadIdx.x] > 0);
}

// out (threads, 2): how many of x (threads) are above 0, and how many below.
extern "C" __global__ void count_kernel(int* out, const int* x) {
    out[2 * threadIdx.x] = __syncthreads_count(x[threadIdx.x] > 0);
    out[2 * threadIdx.x + 1] = __syncthreads_count(x[threadIdx.x] < 0);
}

// Threads return at different times; those that are left still meet. out (threads, 2)
extern "C" __global__ void early_return_kernel(int* out) {
    int t = threadIdx.x;
    if (t % 3 == 1) return;
    __syncthreads();
    out[2 * t] = t;
    if (t < 40) return;
    __syncwarp();
    __syncthreads();
    out[2 * t + 1] = t;
}

// The block's dynamic shared memory, reversed: n floats.
extern "C" __global__ void dynamic_shared_kernel(float* out, const float* x, int n) {
    float* shared = (float*)cpu_dynamic_shared();
    assert((size_t)shared % 128 == 0);
    for (int i = threadIdx.x; i < n; i += blockDim.x) shared[i] = x[blockIdx.x * n + i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[blockIdx.x * n + i] = shared[n - 1 - i];
}

extern "C" __global__ void atomics_kernel(float* sum, unsigned* count) {
    atomicAdd(sum, 1.0f);
    atomicAdd(count, 1);
}

extern "C" __global__ void __launch_bounds__(64)
index_kernel(int4* out, const float2* __restrict__ unused, long long far,
                                                              size_t size, unsigned flags, double d) {
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread_number()] = make_int4(threadIdx.x, threadIdx.y, threadIdx.z, block);
    if (thread_number() == 0 && block == 0)
        out[0].w = (int)(far >> 40) + (int)(size >> 40) + (int)(flags >> 31) + (int)d + !unused;
}

extern "C" __global__ void intrinsics_kernel(float* out, const float* x) {
    float v = x[threadIdx.x];
    int n = blockDim.x, t = threadIdx.x;
    out[t] = rsqrtf(v);
    out[n + t] = __expf(v) + __fdividef(v, 3.0f);
    out[2 * n + t] = __uint_as_float(__float_as_uint(v) ^ 0x80000000u) + __int_as_float(0x3f800000);
    out[3 * n + t] = fmaxf(-INFINITY, v) + v / INFINITY + (isinf(-INFINITY) ? 1.0f : 0.0f) +
        (isnan(INFINITY - INFINITY) ? 2.0f : 0.0f);
    out[4 * n + t] = max(1, (int)v) + min(2.5f, v);
}

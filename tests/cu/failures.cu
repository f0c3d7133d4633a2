// Kernels with a fault each, for what the CPU device has to say about it.

extern "C" __global__ void assert_kernel(const int* x, int N) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) assert(x[i] >= 0);
}

extern "C" __global__ void barrier_in_a_branch_kernel() {
    if (threadIdx.x == 3) {
        __shfl_xor_sync(0xffffffff, 1.0f, 1);
    } else {
        __syncthreads();
    }
}

extern "C" __global__ void different_meetings_kernel(float* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xffffffff, 1.0f, 1);
    else __syncwarp();
}

// Reverses 64 numbers through shared memory, without the barrier that belongs between writing and reading.
extern "C" __global__ void missing_barrier_kernel(float* out, const float* x) {
    __shared__ float shared[64];
    shared[threadIdx.x] = x[threadIdx.x];
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

extern "C" __global__ void with_barrier_kernel(float* out, const float* x) {
    __shared__ float shared[64];
    shared[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

// Block b + 1 reads what block b has written: blocks of one launch must not.
extern "C" __global__ void blocks_in_order_kernel(int* x) {
    if (threadIdx.x == 0) x[blockIdx.x + 1] = x[blockIdx.x] + 1;
}

extern "C" __global__ void off_by_one_kernel(float* out, int N) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= N) out[i] = 1.0f;
}

extern "C" __global__ void shared_off_by_one_kernel(float* out, int N) {
    __shared__ float shared[64];
    float* p = shared;
    for (int i = threadIdx.x; i <= N; i += blockDim.x) p[i] = 1.0f;
    __syncthreads();
    if (threadIdx.x == 0) out[0] = p[0];
}

extern "C" __global__ void wild_pointer_kernel(float* out, size_t offset) { out[offset] = 1.0f; }

extern "C" __global__ void division_kernel(int* out, int divisor) { out[threadIdx.x] = 100 / divisor; }

extern "C" __global__ void recursion_kernel(int* out, int depth) {
    volatile int big[1024];
    big[depth % 1024] = depth;
    __syncthreads();
    if (depth > 0) recursion_kernel(out, depth - 1);
    out[0] = big[depth % 1024];
}

// The first thread arrives at an mbarrier that expects two, and ends. The others wait.
extern "C" __global__ void mbarrier_kernel(int arrivals) {
    __shared__ llmc::MBarrier barrier;
    if (threadIdx.x == 0) llmc::mbarrier_init(barrier, 2);
    __syncthreads();
    if (threadIdx.x == 0) llmc::mbarrier_add(barrier, arrivals, 0);
    else cpu_mbarrier_wait(barrier, 0);
}

// All threads but the first wait for ever, with arrays on their stacks.
extern "C" __global__ void arrays_on_stacks_kernel(float* out, int n) {
    __shared__ llmc::MBarrier barrier;
    float a[3], b[5], c[7], d[9];
    for (int i = 0; i < n; i++) a[i] = b[i] = c[i] = d[i] = out[i];
    if (threadIdx.x == 0) llmc::mbarrier_init(barrier, 2);
    __syncthreads();
    if (threadIdx.x > 0) cpu_mbarrier_wait(barrier, 0);
    for (int i = 0; i < n; i++) out[i] += a[i] + b[i] + c[i] + d[i];
}

// A single array, which takes more of the stack than all of those.
extern "C" __global__ void large_array_kernel(float* out, int n) {
    float a[500];
    for (int i = 0; i < n; i++) a[i] = out[i % 8] + i;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < n; i++) sum += a[i];
    out[threadIdx.x % 8] = sum;
}

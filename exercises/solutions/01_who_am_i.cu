// Exercise 1: who am I?
//
// The kernel is launched with 5 blocks of 64 threads, and all 320 threads run this one function. Each must write its
// name at its own place i of who. Here i counts the threads of all blocks, block after block:
//   who[i] = 1000 * (number of the block) + (number of the thread in its block).
// Every thread knows blockIdx.x, threadIdx.x and blockDim.x, the number of threads in a block.

extern "C" __global__ void who_am_i_kernel(int* who) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    who[i] = 1000 * blockIdx.x + threadIdx.x;
}

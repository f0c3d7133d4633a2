// Exercise 1: who am I?
//
// The kernel is launched with 5 blocks of 64 threads, and all 320 threads run this one function. Each shall leave its
// name at its own place: the number i counts the threads through all blocks, block after block, and
//   who[i] = 1000 * (number of the block) + (number of the thread in its block).
// Given are blockIdx.x, threadIdx.x and blockDim.x, the threads in a block.

extern "C" __global__ void who_am_i_kernel(int* who) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    who[i] = 1000 * blockIdx.x + threadIdx.x;
}

// Ones leave shared memory for `first`, then twos for `second`, from the same place. Built twice: without the wait the
// twos may come before the ones have been read.
#define WARP_SIZE 32
#include "../../kernels/hopper.cuh"

template <bool WAITS>
__device__ inline void store_ones_and_twos(const TensorMap& first, const TensorMap& second) {
    SHARED_TILES(box);
    for (int value = 1; value <= 2; value++) {
        for (int i = threadIdx.x; i < 16 * 64; i += WARP_SIZE) set(box[i], value);
        written_for_async();
        __syncwarp();
        if (threadIdx.x == 0) {
            store_box<16>(value == 1 ? first : second, box, 0, 0);
            if (WAITS) stores_read<0>();
        }
        __syncwarp();
    }
    if (threadIdx.x == 0) stores_read<0>();
}

extern "C" __global__ void waits_kernel(SETS const __grid_constant__ TensorMap first,
                                        SETS const __grid_constant__ TensorMap second) {
    store_ones_and_twos<true>(first, second);
}

extern "C" __global__ void writes_too_early_kernel(SETS const __grid_constant__ TensorMap first,
                                                   SETS const __grid_constant__ TensorMap second) {
    store_ones_and_twos<false>(first, second);
}

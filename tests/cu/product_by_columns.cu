// The last rung of doc/ladder/matmul_hopper.cu where b lies column by column, as the weight of a linear layer does.
#define ARCHITECTURE 90a
#define WARP_SIZE 32
#include "../../doc/ladder/matmul_hopper.cu"

extern "C" __global__ void CLUSTER_OF_A_PAIR __launch_bounds__(384, 1)
by_columns_kernel(SETS const __grid_constant__ TensorMap c, const __grid_constant__ TensorMap a,
                  const __grid_constant__ TensorMap b, int M, int N, int K) {
    alternate<4, PAIR, false>(StoreSlabs<3>{c}, a, b, M, N, K);
}

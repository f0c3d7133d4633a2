// Rotary position embedding (Su et al. 2021) for the first R channels of a head (HS), all of them or a part. Channels
// 2i and 2i+1 are a pair. It is rotated by the angle a = position * frequency_i:
//   out[2i] = x[2i] * cos a - x[2i+1] * sin a;  out[2i+1] = x[2i] * sin a + x[2i+1] * cos a
// Queries and keys are rotated, values are not. So q . k depends on the distance of the two positions only. These pairs
// are Meta's. Hugging Face pairs i with i + R/2, so we reorder its weights when we read them.
// Backward: a rotation by -a, as the gradient of a rotation is its inverse.
// Memory-bound: reads and writes these channels of queries and keys once. Cosines and sines come from a table (T, R/2,
// 2). A row of it has R numbers, and all heads of a position use the same row.
#include "dependent_launch.cuh"
#include "rope.cuh"

// Changes qkv (B,T,all_heads,HS) in place, in the first `heads` heads of each position. R is even. direction is 1, or
// -1 for backward. starts (B), which may be null, has the position of each sequence's first row. Block (t, b) takes one
// row. Its threads are (vectors of channels, heads).
extern "C" __global__ void PROGRAMMATIC rope_kernel(floatX* __restrict__ qkv, const float* table, const int* starts,
                                                    float direction, int heads, int all_heads, int HS, int R) {
    constexpr int AT_ONCE = 16 / WIDTH;  // heads that a thread loads before it stores the first
    trigger_programmatic_launch();
    const size_t n = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
    const int position = blockIdx.x + (starts == nullptr ? 0 : early_position(starts, blockIdx.y));
    floatX* row = qkv + n * all_heads * HS;
    const float* angles = table + (size_t)position * R;
    by_alignment(HS % WIDTH == 0 && R % WIDTH == 0, [&](auto memory) {
        for (int i = WIDTH * threadIdx.x; i < R; i += WIDTH * blockDim.x) {
            const Vec a = memory.load(angles + i, R - i);  // cos and sin of one pair, then of the next
            grid_dependency_synchronize();                 // from the second time on it does not wait
            for (int first = threadIdx.y; first < heads; first += AT_ONCE * blockDim.y) {
                Vec x[AT_ONCE] = {};
#pragma unroll
                for (int b = 0; b < AT_ONCE; b++) {
                    const int h = first + b * blockDim.y;
                    if (h < heads) x[b] = memory.load(row + (size_t)h * HS + i, R - i);
                }
#pragma unroll
                for (int b = 0; b < AT_ONCE; b++) {
                    const int h = first + b * blockDim.y;
                    if (h < heads) memory.store(row + (size_t)h * HS + i, rotate(x[b], a, direction), R - i);
                }
            }
        }
    });
}

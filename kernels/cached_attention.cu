// Attention from a position on: the queries of new positions meet the keys and values of all positions up to their own.
// The keys and values of earlier positions lie in a cache, each (B, NKV, context, HS). Those of the T new positions of
// each sequence lie in qkv (B, T, NH+2NKV, HS), beside the queries. Sequence b's new positions begin at positions[b]:
//   out[t] = sum over s <= p of att[s] v[s],  p = positions[b] + t,
//   att = softmax over s <= p of q[t] . k[s] / sqrt(HS), or for ReLU max(0, q[t] . k[s] / sqrt(HS)) / (p + 1)
// The kernel also writes the new keys and values to the cache, for later tokens. For a single new position blocks of
// their own do that, so the query does not wait for it.
//
// It is memory-bound if a single query meets many keys: each key and value is read once, for a few products. A single
// query gives too few blocks to keep a GPU busy. So the keys are split among blocks, too (flash-decoding, Dao et al.
// 2023). Each block writes three results: the largest score, the sum of exponentials, and the weighted sum of its
// values, not yet normalised. A second kernel combines these results in the order of the splits.
//
// The splits divide the whole context, not only the positions written so far. For the position lies on the device, and
// a recorded step launches the same blocks at every position. A block whose split begins after the position does
// nothing.
//
// With one query the kernel's time is mostly that of loads which wait for one another. So the kernel prefetches: its
// first keys and values while the previous launch is still at work, and later tiles while it computes the one before.
//
// NH / NKV query heads share a head of keys and values. A block takes up to HEADS of these query heads. It reads each
// key and value once for all of them.
#include "dependent_launch.cuh"

constexpr int TILE_KEYS = 64;  // keys whose scores wait in shared memory
constexpr int AT_ONCE = 4;     // keys that a lane loads before it uses the first
constexpr int LANES = WARP_SIZE > 1 ? 8 : 1;  // lanes that share a key: of 64 channels, each has two vectors in fp32
constexpr int MAX_WARPS = 4;

// The number of keys in a split, in whole tiles. It fits number_of_splits in kernels/cached_attention.py.
__device__ inline int keys_of_split(int context, int splits) {
    return ceil_div(ceil_div(context, splits), TILE_KEYS) * TILE_KEYS;
}

// The sum over the lanes of a key.
__device__ inline float key_sum(float x) {
    if (LANES == 1) return x;
    for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Where the keys, or the values, of one sequence and head are: those before position `first` in the cache, the others
// in qkv.
struct Rows {
    const floatX *cached, *fresh;
    int first, HS, stride;  // stride: from one position to the next in qkv

    __device__ const floatX* at(int s) const {
        return s < first ? cached + (size_t)s * HS : fresh + (size_t)(s - first) * stride;
    }

    // The block's threads prefetch the rows from `start` to `end` - 1.
    __device__ void prefetch_all(int start, int end) const {
        constexpr int LINE = 128 / sizeof(floatX);
        const int lines = ceil_div(HS, LINE);
#pragma unroll 1
        for (int j = threadIdx.x; j < (end - start) * lines; j += blockDim.x) {
            prefetch(at(start + j / lines) + j % lines * LINE);
        }
    }
};

// Block (n, h, z) takes row n of B*T, group h of the query heads, and the z-th split of the keys. A group is HEADS of
// the NH / NKV query heads that share keys, or those that are left of them. The block of a kv head's first group and
// first split also writes the new key and value to the cache. If T is 1, the grid also has blocks with z = splits. Then
// the one of the first group writes them, and these blocks do nothing else.
//
// Block: one-dimensional, at most MAX_WARPS warps. The values of a tile are shared out among `slots`: a slot has its
// own sums, over every slots-th value. A thread adds up a vector of channels for a slot. Shared memory: for each slot
// HEADS rows of HS floats, rounded up to a multiple of WIDTH. stats gets the largest score and the sum of exponentials.
template <int HEADS>
__device__ inline void attend(floatX* out, float* parts, float* stats, floatX* keys, floatX* values, const floatX* qkv,
                              const int* positions, int T, int context, int NH, int NKV, int HS, int relu, float scale,
                              int splits, int slots) {
    constexpr int VALUES = HEADS == 1 ? 32 / WIDTH : 4;  // values that a thread loads before it uses the first
    __shared__ float scores[TILE_KEYS][HEADS];  // later the weight of each key
    __shared__ float largest[HEADS], sums[HEADS], factors[HEADS];
    DYNAMIC_SHARED(float, acc);  // (slots, HEADS, width)
    const int G = NH / NKV, groups = ceil_div(G, HEADS), kv = blockIdx.y / groups, g0 = blockIdx.y % groups * HEADS;
    const int heads = min(HEADS, G - g0), h0 = kv * G + g0;
    const int n = blockIdx.x, b = n / T, span = keys_of_split(context, splits), start = blockIdx.z * span;
    const size_t cache = ((size_t)b * NKV + kv) * context * HS;
    const int stride = (NH + 2 * NKV) * HS;
    const floatX* fresh = qkv + (size_t)b * T * stride + (size_t)(NH + kv) * HS;
    trigger_programmatic_launch();
    const int first = early_position(positions, b), length = first + n % T + 1, end = min(start + span, length);
    const int z = blockIdx.z, writer = T == 1 ? splits : 0;
    const bool only_writes = z == splits;
    if (only_writes ? g0 > 0 : start >= end) return;
    if (!only_writes) {
        const int known = min(start + min(span, TILE_KEYS), first);
        Rows{keys + cache, nullptr, known, HS, 0}.prefetch_all(start, known);
        Rows{values + cache, nullptr, known, HS, 0}.prefetch_all(start, known);
    }
    grid_dependency_synchronize();
    if (z == writer && g0 == 0) {
        by_alignment(HS % WIDTH == 0, [&](auto memory) {
            const floatX* from = fresh + (size_t)(n % T) * stride;
            const size_t to = cache + (size_t)(length - 1) * HS;
            for (int i = WIDTH * threadIdx.x; i < HS; i += WIDTH * blockDim.x) {
                const Vec key = memory.load(from + i, HS - i);
                const Vec value = memory.load(from + (size_t)NKV * HS + i, HS - i);
                memory.store(keys + to + i, key, HS - i);
                memory.store(values + to + i, value, HS - i);
            }
        });
    }
    if (only_writes) return;

    const int vectors = ceil_div(HS, WIDTH), width = vectors * WIDTH;
    const floatX* q = qkv + (size_t)n * stride + (size_t)h0 * HS;
    const Rows k_rows = {keys + cache, fresh, first, HS, stride};
    const Rows v_rows = {values + cache, fresh + (size_t)NKV * HS, first, HS, stride};
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;

    by_alignment(HS % WIDTH == 0, [&](auto memory) {
        for (int tile = start; tile < end; tile += TILE_KEYS) {
            const int count = min(TILE_KEYS, end - tile);
            const bool is_first = tile == start;
            if (!is_first) v_rows.prefetch_all(tile, tile + count);
            k_rows.prefetch_all(tile + count, min(tile + count + TILE_KEYS, end));
            // Scores: LANES lanes per key, AT_ONCE keys at once. After the last key they take the last one again.
            const int group = threadIdx.x / LANES, together = blockDim.x / LANES;
            for (int j0 = 0; j0 < count; j0 += AT_ONCE * together) {
                const floatX* k[AT_ONCE];
                float score[AT_ONCE][HEADS] = {};
#pragma unroll
                for (int a = 0; a < AT_ONCE; a++) {
                    k[a] = k_rows.at(tile + min(j0 + group + a * together, count - 1));
                }
#pragma unroll(HEADS == 1 ? 2 : 1)
                for (int i = WIDTH * (lane % LANES); i < HS; i += WIDTH * LANES) {
                    Vec x[AT_ONCE];
#pragma unroll
                    for (int a = 0; a < AT_ONCE; a++) x[a] = memory.load(k[a] + i, HS - i);
#pragma unroll
                    for (int g = 0; g < HEADS; g++) {
                        const Vec y = memory.load(q + (g < heads ? g : 0) * HS + i, HS - i);
#pragma unroll
                        for (int a = 0; a < AT_ONCE; a++) {
                            for (int c = 0; c < WIDTH; c++) score[a][g] += x[a].x[c] * y.x[c];
                        }
                    }
                }
#pragma unroll
                for (int a = 0; a < AT_ONCE; a++) {
                    const int j = j0 + group + a * together;
#pragma unroll
                    for (int g = 0; g < HEADS; g++) {
                        const float total = scale * key_sum(score[a][g]);
                        if (lane % LANES == 0 && j < count) scores[j][g] = total;
                    }
                }
            }
            __syncthreads();
            // The weight of each key, and the factor for the sums so far if the maximum has risen. A warp takes a head.
            for (int g = warp; g < HEADS; g += warps) {
                float highest = lane == 0 && !is_first ? largest[g] : -INFINITY, sum = 0.0f;
                for (int j = lane; j < count && !relu; j += WARP_SIZE) highest = fmaxf(highest, scores[j][g]);
                highest = warp_max(highest);
                for (int j = lane; j < count; j += WARP_SIZE) {
                    const float x = scores[j][g];
                    const float counts = !relu ? __expf(x - highest) : x <= 0.0f ? 0.0f : x / length;  // NaN stays
                    scores[j][g] = counts;
                    sum += counts;
                }
                sum = warp_sum(sum);
                if (lane == 0) {
                    factors[g] = relu || is_first ? 1.0f : __expf(largest[g] - highest);
                    sums[g] = is_first ? sum : factors[g] * sums[g] + sum;
                    largest[g] = highest;
                }
            }
            __syncthreads();
            for (int j = threadIdx.x; j < slots * vectors; j += blockDim.x) {
                const int slot = j / vectors, i = WIDTH * (j % vectors);
                float* own = acc + slot * HEADS * width + i;
                Vec total[HEADS];
#pragma unroll
                for (int g = 0; g < HEADS; g++) {
                    total[g] = is_first ? Vec() : Aligned::load(own + g * width, WIDTH);
                    for (int c = 0; c < WIDTH; c++) total[g].x[c] *= factors[g];
                }
                for (int s0 = slot; s0 < count; s0 += VALUES * slots) {
                    Vec v[VALUES];  // after the last: the last one again
#pragma unroll
                    for (int a = 0; a < VALUES; a++) {
                        v[a] = memory.load(v_rows.at(tile + min(s0 + a * slots, count - 1)) + i, HS - i);
                    }
#pragma unroll
                    for (int a = 0; a < VALUES; a++) {
                        const int s = s0 + a * slots;
                        if (s >= count) break;
#pragma unroll
                        for (int g = 0; g < HEADS; g++) {
                            for (int c = 0; c < WIDTH; c++) total[g].x[c] += scores[s][g] * v[a].x[c];
                        }
                    }
                }
#pragma unroll
                for (int g = 0; g < HEADS; g++) Aligned::store(own + g * width, total[g], WIDTH);
            }
            __syncthreads();
        }

        for (int j = threadIdx.x; j < heads * vectors; j += blockDim.x) {
            const int g = j / vectors, i = WIDTH * (j % vectors);
            const size_t row = (size_t)n * NH + h0 + g;
            Vec total = {};
            for (int slot = 0; slot < slots; slot++) {
                const Vec x = Aligned::load(acc + (slot * HEADS + g) * width + i, WIDTH);
                for (int c = 0; c < WIDTH; c++) total.x[c] += x.x[c];
            }
            if (splits > 1) {
                memory.store(parts + (row * splits + blockIdx.z) * HS + i, total, HS - i);
                if (i == 0) {
                    float* stat = stats + 2 * (row * splits + blockIdx.z);
                    stat[0] = largest[g], stat[1] = sums[g];
                }
            } else {
                const float norm = relu ? 1.0f : 1.0f / sums[g];
                for (int c = 0; c < WIDTH; c++) total.x[c] *= norm;
                memory.store(out + row * HS + i, total, HS - i);
            }
        }
    });
}

// If splits is 1, the kernel sets out (B*T,NH,HS), and parts and stats may be null. Else it sets stats
// (B*T,NH,splits,2) and parts (B*T,NH,splits,HS) for the splits that have keys. There are two kernels: in the first
// HEADS is 1, for query heads that share no keys, in the second 4.
extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, 4)
PROGRAMMATIC cached_attention_kernel(floatX* out, float* parts, float* stats, floatX* keys, floatX* values,
                                     const floatX* qkv, const int* positions, int T, int context, int NH, int NKV,
                                     int HS, int relu, float scale, int splits, int slots) {
    attend<1>(out, parts, stats, keys, values, qkv, positions, T, context, NH, NKV, HS, relu, scale, splits, slots);
}

extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, 3)
PROGRAMMATIC cached_attention_shared_kernel(floatX* out, float* parts, float* stats, floatX* keys, floatX* values,
                                            const floatX* qkv, const int* positions, int T, int context, int NH,
                                            int NKV, int HS, int relu, float scale, int splits, int slots) {
    attend<4>(out, parts, stats, keys, values, qkv, positions, T, context, NH, NKV, HS, relu, scale, splits, slots);
}

// Sets out (B*T*NH,HS) from the results of the splits that have keys. Block x takes a row. A thread takes a channel, so
// that many loads are in flight even if rows are few. The block has whole warps.
extern "C" __global__ void PROGRAMMATIC add_splits_kernel(SETS floatX* out, const float* parts, const float* stats,
                                                          const int* positions, int T, int context, int NH, int HS,
                                                          int relu, int splits) {
    constexpr int PARTS = 16;  // parts that a thread loads before it uses the first
    trigger_programmatic_launch();
    const size_t row = blockIdx.x;
    const int n = blockIdx.x / NH, length = early_position(positions, n / T) + n % T + 1;
    const int count = ceil_div(length, keys_of_split(context, splits));
    grid_dependency_synchronize();
    float part[PARTS];
    auto load_parts = [&](int first, int i) {
#pragma unroll
        for (int b = 0; b < PARTS; b++) {  // after the last: the last one again
            part[b] = parts[(row * splits + min(first + b, count - 1)) * HS + i];
        }
    };
    const int mine = min(threadIdx.x, HS - 1);
    load_parts(0, mine);  // with the results that scale them
    const float* row_stats = stats + 2 * row * splits;
    float largest = -INFINITY;
    for (int z = threadIdx.x % WARP_SIZE; z < count; z += WARP_SIZE) largest = fmaxf(largest, row_stats[2 * z]);
    largest = relu ? 0.0f : warp_max(largest);
    auto factor = [&](int z) { return relu ? 1.0f : __expf(row_stats[2 * z] - largest); };
    float sum = 0.0f;
    for (int z = threadIdx.x % WARP_SIZE; z < count; z += WARP_SIZE) sum += row_stats[2 * z + 1] * factor(z);
    const float norm = relu ? 1.0f : 1.0f / warp_sum(sum);
    for (int i = threadIdx.x; i < HS; i += blockDim.x) {
        float total = 0.0f;
        for (int first = 0; first < count; first += PARTS) {
            if (i != mine || first != 0) load_parts(first, i);
#pragma unroll
            for (int b = 0; b < PARTS; b++) {
                if (first + b < count) total += norm * factor(first + b) * part[b];
            }
        }
        set(out[row * HS + i], total);
    }
}

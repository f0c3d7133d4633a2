// Draws each sequence's next token from softmax(logits / temperature), on the device, so that the next step can begin
// before the host has seen the token. The generator, xorshift64* (llmc/step/sampler.py), makes a coin in [0, 1) from
// its state. A token with logit x has the weight w = exp((x - max) / temperature). The kernel draws the first token
// whose cumulative weight is above the coin times the sum of all weights. One block takes a sequence. Sums are doubles,
// added in a fixed order. Temperature 0 takes the largest logit. If a logit is NaN or infinity, or all are -infinity,
// then the token means nothing. It is still one of the V, because the next step reads it, and `drawn` says that it
// means nothing.
//
// top_k and top_p set a threshold: tokens whose logit is below it have no weight. Tokens that tie with it stay in.
//   top_k: the threshold is the k-th largest logit
//   top_p: the threshold is the largest logit such that the logits at or above it have a share top_p of the weights, or
//     more; if top_k has left out tokens, it is a share of the weights that remain
// The kernel finds a threshold bit by bit, from the highest bit of its rank to the lowest. The rank of a float is its
// bits as an integer, after all bits of a negative float and the sign bit of a positive one have been flipped. So ranks
// are in the order of the floats.
#include "dependent_launch.cuh"

__device__ inline double warp_sum_double(double x) {
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Like block_sum of common.cuh. Each warp's sum stays in warp_sums.
__device__ inline double block_sum_double(double x, double* warp_sums) {
    const int warps = blockDim.x / WARP_SIZE;
    const double warp_total = warp_sum_double(x);
    __syncthreads();  // no thread reads the old warp_sums any more
    if (threadIdx.x % WARP_SIZE == 0) warp_sums[threadIdx.x / WARP_SIZE] = warp_total;
    __syncthreads();
    double total = 0.0;
    for (int w = 0; w < warps; w++) total += warp_sums[w];
    return total;
}

// The float with this rank; -INFINITY for ranks below those of all floats.
__device__ inline float float_of_rank(unsigned rank) {
    if (rank <= 0x007fffffu) return -INFINITY;
    return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

// Draws from the first V logits of each row of logits (B,Vp). Sets tokens (B). Adds 1 to positions (B), which stay
// below `context`. Advances the generators' states (B). drawn (B) may be null; it gets the tokens, too, but -1 for one
// that means nothing. Block: one-dimensional, at most 32 warps.
extern "C" __global__ void __launch_bounds__(1024, 1)
PROGRAMMATIC sample_kernel(int* tokens, int* positions, unsigned long long* states, const floatX* logits, int V,
                           int Vp, float temperature, int top_k, float top_p, int context, int* drawn) {
    __shared__ double warp_sums[32];
    const floatX* row = logits + (size_t)blockIdx.x * Vp;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    trigger_programmatic_launch();
    grid_dependency_synchronize();

    unsigned long long state = states[blockIdx.x];
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    const unsigned random = (unsigned)(state * 0x2545F4914F6CDD1DULL >> 32);
    const double coin = (random >> 8) / 16777216.0;

    // Calls work(x, i) for each of the thread's logits x, with its index.
    auto for_each = [&](auto work) {
#pragma unroll 4
        for (int i = WIDTH * threadIdx.x; i < V; i += WIDTH * blockDim.x) {
            const Vec x = Aligned::load(row + i, WIDTH);  // Vp is a multiple of WIDTH
            for (int k = 0; k < WIDTH; k++) if (i + k < V) work(x.x[k], i + k);
        }
    };

    float own = -INFINITY, first = V;  // the thread's largest logit and its first index, exact below 2^24
    for_each([&](float x, int i) {
        if (x != x) x = INFINITY;
        if (x > own || (x == own && first == V)) own = x, first = i;
    });
    const float largest = block_max(own);
    auto finish = [&](int token) {
        tokens[blockIdx.x] = token = min(token, V - 1);
        if (drawn != nullptr) drawn[blockIdx.x] = fabsf(largest) < INFINITY ? token : -1;
        positions[blockIdx.x] = min(positions[blockIdx.x] + 1, context - 1);
        states[blockIdx.x] = state;
    };
    if (temperature == 0.0f) {
        first = -block_max(own == largest ? -first : -V);
        if (threadIdx.x == 0) finish((int)first);
        return;
    }

    float threshold = -INFINITY;
    auto weight = [&](float x) { return x >= threshold ? expf((x - largest) / temperature) : 0.0f; };
    auto highest_rank = [&](auto enough) {  // the highest rank for which `enough` is true
        unsigned rank = 0;
        for (unsigned bit = 0x80000000u; bit > 0; bit /= 2) rank |= enough(float_of_rank(rank | bit)) ? bit : 0u;
        return rank;
    };
    if (top_k > 0 && top_k < V) {
        threshold = float_of_rank(highest_rank([&](float lowest) {
            float count = 0.0f;  // below 2^24, so exact
            for_each([&](float x, int i) { count += x >= lowest ? 1.0f : 0.0f; });
            return block_sum(count) >= top_k;
        }));
    }
    if (top_p < 1.0f) {
        auto sum_from = [&](float lowest) {
            double sum = 0.0;
            for_each([&](float x, int i) { sum += x >= lowest ? weight(x) : 0.0f; });
            return block_sum_double(sum, warp_sums);
        };
        const double needed = top_p * sum_from(threshold);
        threshold = fmaxf(threshold, float_of_rank(highest_rank([&](float lowest) {
            return sum_from(lowest) >= needed;
        })));
    }

    // The target is the coin times the sum of all weights. The walk to it gets finer. Each warp has `span` consecutive
    // logits, and the warp at whose end the cumulative weight first exceeds the target goes on alone. It takes its
    // logits in steps of WIDTH * WARP_SIZE and finds the step. Then it finds the lane in this step. The lane finds its
    // token.
    const int step = WIDTH * WARP_SIZE, span = ceil_div(ceil_div(V, warps), step) * step;
    const int start = warp * span, end = min(start + span, V);
    auto weights_at = [&](int i, Vec& w) {
        double sum = 0.0;
        w = Vec();
        if (i < end) {
            const Vec x = Aligned::load(row + i, WIDTH);
            for (int k = 0; k < WIDTH; k++) {
                w.x[k] = i + k < end ? weight(x.x[k]) : 0.0f;
                sum += w.x[k];
            }
        }
        return sum;
    };
    Vec w;
    double thread_sum = 0.0;
#pragma unroll 4
    for (int i = start + WIDTH * lane; i < end; i += step) thread_sum += weights_at(i, w);
    const double target = coin * block_sum_double(thread_sum, warp_sums);
    // The first warp that exceeds the target. If rounding leaves none, it is the last warp that has a weight.
    int chosen = 0;
    double before = 0.0, sum_before = 0.0;
    for (int v = 0; v < warps; v++) {
        if (warp_sums[v] > 0.0) chosen = v, before = sum_before;
        sum_before += warp_sums[v];
        if (sum_before > target) break;
    }
    if (warp != chosen) return;

    constexpr int AT_ONCE = 4;  // steps that are summed before the first sum is used
    int at = start;
    sum_before = before;
    for (int i = start; i < end && !(sum_before > target); i += AT_ONCE * step) {
        double sums[AT_ONCE];  // 0 for steps beyond the end
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) sums[b] = weights_at(i + b * step + WIDTH * lane, w);
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) sums[b] = warp_sum_double(sums[b]);
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) {
            if (sum_before > target) break;
            if (sums[b] > 0.0) at = i + b * step, before = sum_before;
            sum_before += sums[b];
        }
    }
    const double lane_sum = weights_at(at + WIDTH * lane, w);
    int winner = 0;
    sum_before = before;
    for (int l = 0; l < WARP_SIZE; l++) {
        const double sum = WARP_SIZE > 1 ? __shfl_sync(0xffffffffu, lane_sum, l) : lane_sum;
        if (sum > 0.0) winner = l, before = sum_before;
        sum_before += sum;
        if (sum_before > target) break;
    }
    if (lane != winner) return;
    int token = at + WIDTH * lane;
    for (int k = 0; k < WIDTH; k++) {
        if (w.x[k] > 0.0f) token = at + WIDTH * lane + k;
        before += w.x[k];
        if (before > target) break;
    }
    finish(token);
}

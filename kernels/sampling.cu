// Draws each sequence's next token from softmax(logits / temperature), on the device, so that the next step can begin
// before the host has seen the token. The generator, xorshift64* (llmc/step/sampler.py), makes a coin in [0, 1) from
// its state. A token with logit x has the weight w = exp((x - max) / temperature). The kernel draws the first token
// whose cumulative weight is above the coin times the sum of all weights. One block takes a sequence. The weights of a
// vector are added in fp32, since some GPUs have 64 times as many units for fp32 as for doubles. Their sums are added
// in doubles. Each sum has a fixed order. Temperature 0 takes the largest logit. If a logit is NaN or infinity, or all
// are -infinity, then the token means nothing. It is still one of the V, because the next step reads it, and `drawn`
// says that it means nothing.
//
// top_k and top_p set a threshold: tokens whose logit is below it have no weight. Tokens that tie with it stay in.
//   top_k: the threshold is the k-th largest logit
//   top_p: the threshold is the largest logit such that the logits at or above it have a share top_p of the weights, or
//     more; if top_k has left out tokens, it is a share of the weights that remain
// The kernel finds a threshold bit by bit, from the highest bit of its rank to the lowest. The rank of a float is its
// bits as an integer, after all bits of a negative float and the sign bit of a positive one have been flipped. So ranks
// are in the order of the floats.
//
// For each bit the kernel reads all logits, and that takes most of its time. So for a top_k of at most half its threads
// it begins with a bound: the k-th largest of the threads' largest logits. Each of k threads has a logit at or above
// it, so the threshold is not below it. Of random logits 52 are at or above it for a top_k of 50, and some 700 for 512.
// The kernel collects these in shared memory and compares them there.
#include "dependent_launch.cuh"

__device__ inline double warp_sum_double(double x) {
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Like block_sum of common.cuh. Each warp's sum stays in warp_sums.
__device__ inline double block_sum_double(double x, double* warp_sums) {
    const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const double warp_total = warp_sum_double(x);
    __syncthreads();  // no thread reads the old warp_sums any more
    if (lane == 0) warp_sums[threadIdx.x / WARP_SIZE] = warp_total;
    __syncthreads();
    double total = 0.0;
    for (int w = lane; w < warps; w += WARP_SIZE) total += warp_sums[w];
    return warp_sum_double(total);
}

// Each lane has a sum. Returns the first lane at which `before`, plus the sums up to and with this lane's, is above the
// target. If rounding leaves none, it is the last lane whose sum is above 0; if no sum is, lane 0. Adds to `before` the
// sums in front of it.
__device__ inline int find_lane(double sum, double target, double& before) {
    const int lane = threadIdx.x % WARP_SIZE;
    double through = sum;
    for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
        const double other = __shfl_sync(0xffffffffu, through, lane - distance);
        if (lane >= distance) through += other;
    }
    const int first = -(int)warp_max(sum > 0.0 && before + through > target ? -lane : -WARP_SIZE);
    const int last = (int)warp_max(sum > 0.0 ? lane : 0);
    const int found = first < WARP_SIZE ? first : last;
    const double in_front = __shfl_sync(0xffffffffu, through, found - 1);
    if (found > 0) before += in_front;
    return found;
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
    constexpr int CANDIDATES = 1024;
    constexpr unsigned LAST_BIT = sizeof(floatX) == 2 ? 1u << 16 : 1u;  // of a rank; all later bits of a bf16 are equal
    __shared__ double warp_sums[32];
    __shared__ float candidates[CANDIDATES], kth_largest;
    __shared__ int found;
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

    auto logits_at = [&](int i) {
        Vec x = Aligned::load(row + i, WIDTH);  // Vp is a multiple of WIDTH
        if (i + WIDTH > V) {
            for (int k = 0; k < WIDTH; k++) if (i + k >= V) x.x[k] = -INFINITY;
        }
        return x;
    };
    // Calls work(x, i) for each of the thread's vectors of logits x, with the index of its first.
    auto for_each = [&](auto work) {
#pragma unroll 4
        for (int i = WIDTH * threadIdx.x; i < V; i += WIDTH * blockDim.x) work(logits_at(i), i);
    };

    float own = -INFINITY;  // the thread's largest logit, in the vector at own_at
    int own_at = 0;
    bool has_nan = false;
    for_each([&](const Vec& x, int i) {
        float most = x.x[0];
        for (int k = 0; k < WIDTH; k++) most = fmaxf(most, x.x[k]), has_nan |= x.x[k] != x.x[k];
        if (most > own) own = most, own_at = i;
    });
    const float largest = block_max(has_nan ? INFINITY : own);
    auto finish = [&](int token) {
        tokens[blockIdx.x] = token = min(token, V - 1);
        if (drawn != nullptr) drawn[blockIdx.x] = fabsf(largest) < INFINITY ? token : -1;
        positions[blockIdx.x] = min(positions[blockIdx.x] + 1, context - 1);
        states[blockIdx.x] = state;
    };
    if (temperature == 0.0f) {
        float first = V;  // the index of the thread's largest logit if none is larger, exact below 2^24
        if (own == largest) {
            const Vec x = logits_at(own_at);
            for (int k = WIDTH - 1; k >= 0; k--) if (x.x[k] == largest) first = own_at + k;
        }
        first = -block_max(-first);
        if (threadIdx.x == 0) finish((int)first);
        return;
    }

    // The highest float for which `enough` is true. The search sets the bits of its rank down to last_bit. The bits
    // after that stay 0.
    auto highest = [&](unsigned last_bit, auto enough) {
        unsigned rank = 0;
        for (unsigned bit = 1u << 31; bit >= last_bit; bit /= 2) rank |= enough(float_of_rank(rank | bit)) ? bit : 0u;
        return float_of_rank(rank);
    };
    float threshold = -3.40282347e38f;  // a logit of -INFINITY has no weight
    if (top_k > 0 && top_k < V) {
        if (threadIdx.x == 0) found = 0;
        float bound = -INFINITY;
        if (2 * top_k <= (int)blockDim.x) {  // 16 bits of a rank will do
            bound = highest(1u << 16, [&](float x) { return __syncthreads_count(own >= x) >= top_k; });
        }
        if (bound > -INFINITY && own >= bound) {
            for_each([&](const Vec& x, int) {
                for (int k = 0; k < WIDTH; k++) {
                    if (!(x.x[k] >= bound)) continue;
                    const int at = atomicAdd(&found, 1);
                    if (at < CANDIDATES) candidates[at] = x.x[k];
                }
            });
        }
        __syncthreads();
        if (bound > -INFINITY && found <= CANDIDATES) {
            for (int i = threadIdx.x; i < found; i += blockDim.x) {
                int larger = 0;  // candidates; of those that tie, the first counts as the largest
                for (int j = 0; j < found; j++) {
                    larger += candidates[j] > candidates[i] || (candidates[j] == candidates[i] && j < i);
                }
                if (larger == top_k - 1) kth_largest = candidates[i];
            }
            __syncthreads();
            threshold = fmaxf(threshold, kth_largest);
        } else {
            threshold = fmaxf(threshold, highest(LAST_BIT, [&](float lowest) {
                float count = 0.0f;  // below 2^24, so exact
                if (own >= lowest) {
                    for_each([&](const Vec& x, int) {
                        for (int k = 0; k < WIDTH; k++) count += x.x[k] >= lowest ? 1.0f : 0.0f;
                    });
                }
                return block_sum(count) >= top_k;
            }));
        }
    }

    const float inverse = 1.0f / temperature;
    auto weights = [&](Vec x, float lowest) {
        for (int k = 0; k < WIDTH; k++) x.x[k] = x.x[k] >= lowest ? __expf((x.x[k] - largest) * inverse) : 0.0f;
        return x;
    };
    auto sum_of = [](const Vec& w) {
        float sum = 0.0f;
        for (int k = 0; k < WIDTH; k++) sum += w.x[k];
        return (double)sum;
    };
    if (top_p < 1.0f) {
        auto sum_from = [&](float lowest) {
            double sum = 0.0;
            if (own >= lowest) for_each([&](const Vec& x, int) { sum += sum_of(weights(x, lowest)); });
            return block_sum_double(sum, warp_sums);
        };
        const double needed = top_p * sum_from(threshold);
        threshold = fmaxf(threshold, highest(LAST_BIT, [&](float lowest) {
            return sum_from(fmaxf(threshold, lowest)) >= needed;
        }));
    }

    // The target is the coin times the sum of all weights. The walk to it gets finer. Each warp has `span` consecutive
    // logits, and the warp at whose end the cumulative weight first exceeds the target goes on alone. It takes its
    // logits in steps of WIDTH * WARP_SIZE and finds the step. Then it finds the lane in this step. The lane finds its
    // token.
    const int step = WIDTH * WARP_SIZE, span = ceil_div(ceil_div(V, warps), step) * step;
    const int start = warp * span, end = min(start + span, V);
    auto weights_at = [&](int i) { return i < end ? weights(logits_at(i), threshold) : Vec(); };
    double thread_sum = 0.0;
#pragma unroll 4
    for (int i = start + WIDTH * lane; i < end; i += step) thread_sum += sum_of(weights_at(i));
    const double target = coin * block_sum_double(thread_sum, warp_sums);
    double before = 0.0;
    if (warp != find_lane(lane < warps ? warp_sums[lane] : 0.0, target, before)) return;

    constexpr int AT_ONCE = 4;  // steps that are summed before the first sum is used
    int at = start;
    double through = before;
    for (int i = start; i < end && !(through > target); i += AT_ONCE * step) {
        double sums[AT_ONCE];  // 0 for steps beyond the end
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) sums[b] = sum_of(weights_at(i + b * step + WIDTH * lane));
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) sums[b] = warp_sum_double(sums[b]);
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) {
            if (through > target) break;
            if (sums[b] > 0.0) at = i + b * step, before = through;
            through += sums[b];
        }
    }
    int token = at + WIDTH * lane;
    const Vec w = weights_at(token);
    if (lane != find_lane(sum_of(w), target, before)) return;
    for (int k = 0; k < WIDTH; k++) {
        if (w.x[k] > 0.0f) token = at + WIDTH * lane + k;
        before += w.x[k];
        if (before > target) break;
    }
    finish(token);
}

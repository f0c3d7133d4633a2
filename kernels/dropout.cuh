// Dropout: each number becomes 0 with probability P. The others are multiplied by 1 / (1 - P), which keeps the mean.
//
// Nobody stores which numbers become 0. Philox4x32-10 (Salmon et al., 2011) turns a counter of four words and a key of
// two words into four random words, by ten rounds of multiplications. The key is the run's seed. The counter is (group
// of four numbers, place in the model, step, batch of the step). So backward draws the numbers that forward drew, a
// resumed run draws those of a run that never stopped, and a CPU those of a GPU. Seed, step and batch come with the
// data of a batch, so each replay of a recorded step draws new numbers.
#pragma once
#include "common.cuh"

struct Words {
    unsigned x[4];
};

__device__ inline Words philox(Words counter, unsigned key0, unsigned key1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned long long a = 0xd2511f53ull * counter.x[0], b = 0xcd9e8d57ull * counter.x[2];
        counter = {{(unsigned)(b >> 32) ^ counter.x[1] ^ key0, (unsigned)b,
                    (unsigned)(a >> 32) ^ counter.x[3] ^ key1, (unsigned)a}};
        key0 += 0x9e3779b9u;  // the golden ratio
        key1 += 0xbb67ae85u;  // the root of 3, less 1
    }
    return counter;
}

// Dropout at one place of a model, its `site`. `random` has six words (Model.random_words): the seed's two, the step,
// the batch of the step, P in units of 2^-32, and the bits of the float 1 / (1 - P). A negative site drops nothing.
struct Dropout {
    unsigned site, step, batch, key0, key1, threshold;
    float scale;

    __device__ Dropout(const int* random, int site)
        : site(site), step(random[2]), batch(random[3]), key0(random[0]), key1(random[1]),
          threshold(site < 0 ? 0 : random[4]), scale(site < 0 ? 1.0f : __int_as_float(random[5])) {}

    // A vector of row n of an (N, C) matrix, columns i to i + WIDTH - 1. Each four columns are a group.
    __device__ Vec operator()(const Vec& v, int n, int i, int C) const {
        const unsigned group = (unsigned)n * ceil_div(C, 4) + i / 4;
        Vec kept;
        for (int g = 0; g < WIDTH / 4; g++) {
            const Words draw = philox({{group + g, site, step, batch}}, key0, key1);
            for (int k = 0; k < 4; k++) kept.x[4 * g + k] = draw.x[k] < threshold ? 0.0f : scale * v.x[4 * g + k];
        }
        return kept;
    }
};

// The rotation of RoPE. rope.cu explains it.
#pragma once
#include "common.cuh"

// Rotates pairs of neighbouring channels. `angles` has the cosine and the sine of the first pair's angle, then those of
// the next pair. direction is 1, or -1 to rotate back.
__device__ inline Vec rotate(const Vec& x, const Vec& angles, float direction) {
    Vec y;
    for (int k = 0; k < WIDTH; k += 2) {
        const float cos = angles.x[k], sin = direction * angles.x[k + 1];
        y.x[k] = x.x[k] * cos - x.x[k + 1] * sin;
        y.x[k + 1] = x.x[k] * sin + x.x[k + 1] * cos;
    }
    return y;
}

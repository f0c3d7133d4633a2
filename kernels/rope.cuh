// The rotation of RoPE, which rope.cu says more of.
#pragma once
#include "common.cuh"

// Rotates two pairs of neighbouring channels. `angles` holds the cosine and the sine of the first pair's angle, then those
// of the second. direction is 1, or -1 to rotate back.
__device__ inline Four rotate(const Four& x, const Four& angles, float direction) {
    const float cos0 = angles.x[0], sin0 = direction * angles.x[1], cos1 = angles.x[2], sin1 = direction * angles.x[3];
    return {{x.x[0] * cos0 - x.x[1] * sin0, x.x[0] * sin0 + x.x[1] * cos0,
             x.x[2] * cos1 - x.x[3] * sin1, x.x[2] * sin1 + x.x[3] * cos1}};
}

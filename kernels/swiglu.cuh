// A number of SwiGLU's output, a vector of it, and of its gradients.
#pragma once
#include "common.cuh"

// If x is far below 0, the exponential is infinite and the sigmoid 0. If it is far above 0, they are 0 and 1.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ inline float swiglu(float up, float gate) { return up * (gate * sigmoid(gate)); }

// A vector of the output.
__device__ inline Vec forward(Vec up, const Vec& gate) {
    for (int k = 0; k < WIDTH; k++) up.x[k] = swiglu(up.x[k], gate.x[k]);
    return up;
}

// Returns the output once more. From d, its gradient, up and gate become their gradients.
__device__ inline float differentiate_swiglu(float d, float& up, float& gate) {
    const float s = sigmoid(gate), silu = gate * s, out = silu * up;
    gate = d * up * (s + silu * (1.0f - s));
    up = d * silu;
    return out;
}

// Vectors of the output, and of the gradients of up and gate.
struct Gradients {
    Vec out, up, gate;
};

__device__ inline Gradients backward(const Vec& d, const Vec& up, const Vec& gate) {
    Gradients found = {{}, up, gate};
    for (int k = 0; k < WIDTH; k++) found.out.x[k] = differentiate_swiglu(d.x[k], found.up.x[k], found.gate.x[k]);
    return found;
}

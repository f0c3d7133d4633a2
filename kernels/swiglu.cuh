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

// Vectors of the output, and of the gradients of up and gate.
struct Gradients {
    Vec out, up, gate;
};

__device__ inline Gradients backward(const Vec& d, const Vec& up, const Vec& gate) {
    Gradients found;
    for (int k = 0; k < WIDTH; k++) {
        const float g = gate.x[k], s = sigmoid(g), silu = g * s;
        found.out.x[k] = silu * up.x[k];
        found.gate.x[k] = d.x[k] * up.x[k] * (s + silu * (1.0f - s));
        found.up.x[k] = d.x[k] * silu;
    }
    return found;
}

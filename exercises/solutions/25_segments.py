"""Exercise 25: fewer checkpoints.

Recomputation keeps the input of every layer: L arrays for L layers. Fewer are enough. Keep the input of every k-th
layer only, a checkpoint. Backward takes k layers at a time, the last ones first. It runs their forward pass again from
the checkpoint, and now keeps the input of each. If k is near the root of L, about 2 sqrt(L) arrays are in memory.
"""

import math
from collections.abc import Callable

import numpy as np

Layer = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray, np.ndarray], np.ndarray]]


def backward_through(x: np.ndarray, dout: np.ndarray, layers: list[Layer]) -> np.ndarray:
    """The gradient of x, given dout, the gradient of the last layer's output. Neither may change.

    layers: for each of L layers, the first one first, two functions that return a new array of the shape of x.
    forward(x) is the layer's output, and backward(x, dout) is the gradient of its input x. Call no layer's forward more
    than twice. At most 2 sqrt(L) + 3 arrays may be in memory at a time, without the given x and dout.
    """
    every = max(1, math.isqrt(len(layers)))
    checkpoints = []
    for l, (forward, _) in enumerate(layers):
        if l % every == 0:
            checkpoints.append(x)
        x = forward(x)
    for start in reversed(range(0, len(layers), every)):
        segment, inputs = layers[start : start + every], [checkpoints.pop()]
        for forward, _ in segment[:-1]:
            inputs.append(forward(inputs[-1]))
        for _, backward in reversed(segment):
            dout = backward(inputs.pop(), dout)
    return dout

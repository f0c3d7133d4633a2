"""Exercise 14: softmax's sum in one pass.

The pair (largest, total) says of some numbers x all that softmax needs: largest = max(x) and
total = sum(exp(x - largest)). Of no numbers it is EMPTY.
"""

import numpy as np

EMPTY = (-np.inf, 0.0)


def fold(largest: float, total: float, piece: np.ndarray) -> tuple[float, float]:
    """The pair of all numbers so far, whose pair is (largest, total), and those of `piece` (at least one, all finite).

    The numbers so far are gone: only their pair is there. No exponential may overflow.
    """
    new = max(largest, piece.max())
    return new, total * np.exp(largest - new) + np.exp(piece - new).sum()


def merge(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """The pair of two sets of numbers together, from the pair of each. One of them, or both, may be EMPTY."""
    largest = max(a[0], b[0])
    if largest == -np.inf:
        return EMPTY
    return largest, a[1] * np.exp(a[0] - largest) + b[1] * np.exp(b[0] - largest)

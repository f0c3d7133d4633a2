"""Exercise 14: softmax's sum in one pass.

Of some numbers x, softmax needs only the pair (largest, total): largest = max(x) and total = sum(exp(x - largest)). If
there are no numbers, the pair is EMPTY.
"""

import numpy as np

EMPTY = (-np.inf, 0.0)


def fold(largest: float, total: float, piece: np.ndarray) -> tuple[float, float]:
    """The pair of all numbers: those so far, with the pair (largest, total), and those of `piece` (at least one).

    You no longer have the numbers so far, only their pair. All numbers are finite. No exponential may overflow.
    """
    new = max(largest, piece.max())
    return new, total * np.exp(largest - new) + np.exp(piece - new).sum()


def merge(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """The pair of two sets of numbers taken together. a and b are the pairs of the two sets; each may be EMPTY."""
    largest = max(a[0], b[0])
    if largest == -np.inf:
        return EMPTY
    return largest, a[1] * np.exp(a[0] - largest) + b[1] * np.exp(b[0] - largest)

"""Exercise 22: the sum that stopped growing.

bf16 keeps 8 significant bits of a number. Add up 4096 ones, and store the sum in bf16 each time: it is 256. The sum of
a bias's gradient over 4096 rows would stop in the same way. Say where it stops, and find two ways to avoid that.
"""

import math

import numpy as np


def bf16(x: np.ndarray) -> np.ndarray:
    """x rounded to the nearest bf16 numbers, ties to even. The result still has the type float32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def stops_at(term: float) -> float:
    """Where a sum stops that begins at 0, adds `term`, a positive bf16 number, again and again, and is stored in bf16.

    Neighbours of bf16 are 2 apart from 256 on, 4 from 512 on, and so on with every power of two.
    """
    return 256 * 2.0 ** math.ceil(math.log2(term))


def sum_in_fp32(x: np.ndarray) -> np.ndarray:
    """The sum of x (n), bf16 numbers, as a bf16 number. Round only once: the sum on the way may be fp32."""
    return bf16(np.sum(x, dtype=np.float32))


def sum_in_bf16(x: np.ndarray) -> np.ndarray:
    """The sum of x (n), with every sum on the way in bf16, too: add two numbers, or two arrays, only as bf16(a + b).
    n is a power of two, no number is negative, and the sum may be off by 2%."""
    while len(x) > 1:
        x = bf16(x[: len(x) // 2] + x[len(x) // 2 :])
    return x[0]

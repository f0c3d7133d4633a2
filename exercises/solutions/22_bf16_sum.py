"""Exercise 22: the sum that stopped growing.

bf16 keeps 8 significant bits of a number. Add up 4096 ones, and store the sum in bf16 each time: it is 256. The sum of
a bias's gradient over 4096 rows would stop in the same way. Say where, and find two ways out.
"""

import math

import numpy as np


def bf16(x: np.ndarray) -> np.ndarray:
    """x rounded to the nearest bf16 numbers, of two as near to the even one; they are still of type float32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def stops_at(term: float) -> float:
    """Where a sum stops that is stored in bf16 after each addition of `term`, the same positive bf16 number each time.

    Neighbours of bf16 are 2 apart from 256 on, 4 from 512 on, and so on with every power of two.
    """
    return 256 * 2.0 ** math.ceil(math.log2(term))


def sum_in_fp32(x: np.ndarray) -> np.ndarray:
    """The sum of x (n), bf16 numbers, as a bf16 number: off by one rounding. Only what is stored must be bf16."""
    return bf16(np.sum(x, dtype=np.float32))


def sum_in_bf16(x: np.ndarray) -> np.ndarray:
    """The sum of x (n) where sums on the way have to be bf16 too: bf16(a + b) is all that may be done with two numbers,
    or with two arrays of them. n is a power of two, no number is negative, and the sum may be off by 2%."""
    while len(x) > 1:
        x = bf16(x[: len(x) // 2] + x[len(x) // 2 :])
    return x[0]

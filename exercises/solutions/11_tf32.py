"""Exercise 11: the bits of TF32."""

import numpy as np


def fields(x: np.float32) -> tuple[int, int, int]:
    """Sign, exponent and mantissa of an fp32 number: its highest bit, the next 8, the lowest 23, each as an int."""
    bits = int(np.float32(x).view(np.uint32))
    return bits >> 31, bits >> 23 & 0xFF, bits & 0x7FFFFF


def to_tf32(x: np.ndarray) -> np.ndarray:
    """Each number of x (float32, finite) rounded to the nearest TF32 number; a tie goes away from zero.

    TF32 has fp32's sign and exponent, and the upper 10 of its 23 bits of mantissa. The result is float32, has the same
    shape, and its lowest 13 bits are 0.
    """
    bits = x.view(np.uint32) + np.uint32(0x1000)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)

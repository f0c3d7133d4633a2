"""Exercise 27: numbers of one byte.

e4m3 has a sign, the highest bit, 4 bits of exponent and 3 of mantissa. Let e and m be the exponent's and the
mantissa's bits. If e is 0, the number is m * 2^-9, else (8 + m) * 2^(e - 10). All seven bits 1 are NaN. So
the largest number is 448. Write the numbers of bytes, a scale, a quantized matrix, and a product of two.
"""

import numpy as np


def numbers_of(q: np.ndarray) -> np.ndarray:
    """The numbers of bytes (uint8, any shape), as floats. In uint8, 3 - 10 is 249."""
    exponent, mantissa = (q >> 3 & 15).astype(int), (q & 7).astype(int)
    sizes = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    sizes[q & 0x7F == 0x7F] = np.nan
    return np.where(q & 0x80, -sizes, sizes)


def scale_of(x: np.ndarray) -> float:
    """The least power of two with which no number of x / scale is beyond 448. Some number of x is not 0. If one is not
    finite, the scale is NaN."""
    largest = np.abs(x.astype(np.float64)).max()
    return 2.0 ** np.ceil(np.log2(largest / 448)) if np.isfinite(largest) else np.nan


def quantize(x: np.ndarray, scale: float) -> np.ndarray:
    """The bytes (uint8) of the numbers nearest to x / scale, for finite x. Of two that are equally near it is the even
    one. Numbers beyond 448 are clipped to it. The scale is a power of two."""
    sizes = np.minimum(np.abs(x / scale), 448)
    exponent = np.frexp(np.maximum(sizes, 2.0**-6))[1] - 1
    steps = np.round(sizes / 2.0 ** (exponent - 3))
    return (8 * (exponent + 6) + steps + 128 * np.signbit(x)).astype(np.uint8)


def product(a: np.ndarray, scale_a: float, b: np.ndarray, scale_b: float) -> np.ndarray:
    """The matrix (N,OC) that is nearly inp (N,C) @ weight (OC,C)^T: a and b are these two, quantized."""
    return scale_a * scale_b * (numbers_of(a) @ numbers_of(b).T)

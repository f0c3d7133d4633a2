"""Numbers of one byte on the host: e4m3, a sign, 4 bits of exponent and 3 of mantissa (arXiv 2209.05433). NumPy has no
such type, so an array of them is uint8. The kernels of kernels/fp8/ quantize to it."""

import numpy as np

E4M3 = np.dtype(np.uint8)


def _all_numbers() -> np.ndarray:
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    size[(bits & 0x7F) == 0x7F] = np.nan
    return np.where(bits & 0x80, -size, size).astype(np.float32)


NUMBERS = _all_numbers()  # by their bits


def from_e4m3(q: np.ndarray) -> np.ndarray:
    """The numbers of an array of e4m3, fp32."""
    return NUMBERS[q]

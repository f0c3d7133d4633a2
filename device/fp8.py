"""Numbers of one byte on the host: e4m3, a sign, 4 bits of exponent and 3 of mantissa (arXiv 2209.05433). NumPy has no
such type, so an array of them holds their codes as uint8. kernels/fp8.cu makes them."""

import numpy as np

E4M3 = np.dtype(np.uint8)


def _decoded() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    size[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -size, size).astype(np.float32)


DECODED = _decoded()  # the number of each code


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    """The numbers of codes, fp32."""
    return DECODED[codes]

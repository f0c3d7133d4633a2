"""bfloat16 on the host. NumPy has no such type, so an array of it holds the 16 bits of each number as uint16: the sign
and the exponent of fp32, and the first 7 bits of its mantissa."""

import numpy as np

BF16 = np.dtype(np.uint16)
DEFINES = {np.dtype(np.float32): (), BF16: ("-DfloatX=bf16",)}  # the compiler's flags for kernels of a type


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The nearest bf16 numbers to fp32 values, ties to even. Every NaN becomes 0x7fff."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16).astype(np.uint16)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > 0x7F800000, np.uint16(0x7FFF), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 numbers as fp32, without rounding."""
    wide = bits.astype(np.uint32)
    wide <<= 16  # in place, because this may be a whole model
    return wide.view(np.float32)


def floatX_of(precision: str) -> np.dtype:
    """The type of parameters, activations and their gradients: BF16 in the precisions "bf16" and "fp8", else fp32."""
    return BF16 if precision in ("bf16", "fp8") else np.dtype(np.float32)

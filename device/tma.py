"""Tensor maps: how a kernel of Hopper's tells the tensor memory accelerator (TMA) which array to copy tiles from."""

from __future__ import annotations

from typing import Any

import numpy as np

BYTES, ALIGNMENT = 128, 64  # of a CUtensorMap


class TensorMap(np.ndarray):
    """An argument of a kernel, by value, for a parameter `const __grid_constant__ TensorMap`: 128 bytes, in a NumPy
    array of size one. Observers are given `array` in its place, which the kernel reads."""

    array: Any

    @classmethod
    def of(cls, array: Any) -> TensorMap:
        """A map of an array, which its device has yet to fill in."""
        memory = np.zeros(BYTES + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        made = memory[start : start + BYTES].view(f"V{BYTES}").view(cls)
        made.array = array
        return made

"""Grid and block of a launcher's kernels, as the launcher chooses them for an H200, without a device."""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import device
from kernels import gelu, layernorm, matmul, reduce

import numpy as np

MULTIPROCESSORS, SHARED_MEMORY = 132, 232448  # an H200's, the latter in bytes a block


class Recorder:
    """Stands for a .cu file: notes what is launched instead of launching it."""

    warp_size, width = 32, 4

    def __init__(self, calls: dict[str, tuple[tuple, tuple]]):
        self.calls = calls

    def block(self, threads: int) -> int:
        return threads

    def threads(self, most: int, needed: int) -> int:
        return most

    def launch(self, name: str, grid: tuple, block: tuple, args: tuple, shared_mem: int = 0) -> None:
        self.calls[name.removesuffix("_kernel")] = grid, block


def launched(launcher: Callable, *arguments, **named) -> dict[str, tuple[tuple, tuple]]:
    """{kernel: (grid, block)} of a launcher of linear layers, GELU, norms or sums. Arrays may be None."""
    calls = {}
    with ExitStack() as stack:
        for module in (gelu, layernorm, matmul, reduce):
            stack.enter_context(patch.object(module, "cu", Recorder(calls)))
        h200 = SimpleNamespace(
            multiprocessors=MULTIPROCESSORS, shared_memory=SHARED_MEMORY, floatX=np.dtype(np.float32)
        )
        stack.enter_context(patch.object(device.current, "device", h200))
        stack.enter_context(patch.object(device, "scratch", lambda purpose, shape, dtype: None))
        launcher(*arguments, **named)
    return calls

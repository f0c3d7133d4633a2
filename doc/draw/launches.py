"""Grid and block of a launcher's kernels, as the launcher chooses them for an H200, without a device."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import device
from device.sources import Source
from kernels import gelu, layernorm, matmul, reduce

import numpy as np

MULTIPROCESSORS, SHARED_MEMORY = 132, 232448  # an H200's, the latter in bytes per block


class Recorder(Source):
    """Stands for a .cu file on a GPU: it notes what is launched instead of launching it."""

    warp_size = 32

    def __init__(self, path: Path, calls: dict[str, tuple[tuple, tuple]]):
        super().__init__(path)
        self.calls = calls

    def launch(self, name: str, grid: tuple, block: tuple, args: tuple, shared_mem: int = 0) -> None:
        self.calls[name.removesuffix("_kernel")] = grid, block


def launched(launcher: Callable, *arguments, **named) -> dict[str, tuple[tuple, tuple]]:
    """{kernel: (grid, block)} of a launcher of linear layers, GELU, norms or sums. Arrays may be None."""
    calls = {}
    with ExitStack() as stack:
        for module in (gelu, layernorm, matmul, reduce):
            stack.enter_context(patch.object(module, "cu", Recorder(module.cu.path, calls)))
        h200 = SimpleNamespace(
            multiprocessors=MULTIPROCESSORS, shared_memory=SHARED_MEMORY, floatX=np.dtype(np.float32)
        )
        stack.enter_context(patch.object(device.current, "device", h200))
        stack.enter_context(patch.object(device, "scratch", lambda purpose, shape, dtype: None))
        launcher(*arguments, **named)
    return calls

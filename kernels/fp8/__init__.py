"""Layers whose products take operands quantized to e4m3 (`--precision fp8`): a package of its own.

A product takes q, e4m3, of both its operands, and a scale of each from its amax, its largest absolute value. Sums are
in fp32 or a little less wide (device/cublaslt.py). Tensor cores multiply e4m3 twice as fast as bf16, but they want both
operands contiguous along the sum. So backward needs transposed copies, too. To quantize costs time, and small products
would lose by it (llmc/model/fp8.py).

quantized.py has what such products take, quantize.py makes it of a bf16 matrix. The other files stand beside a layer of
the same name in kernels/. They register launchers (kernels/dispatch.py) that write or read quantized matrices.
"""

from pathlib import Path

import device


def source(python_file: str | Path) -> device.Source:
    """device.source for the launchers of this folder."""
    return device.source(python_file, needed=lambda: device.precision == "fp8")

"""GELU with the bias in front of it: the launchers of gelu.cu."""

import device
from device import ceil_div
from kernels.matmul import tile_grid
from kernels.reduce import add_partials, rows_per_chunk

cu = device.source(__file__)


def gelu_forward(out, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """out (N,C) = gelu(inp + bias), in the tanh form or the erf form. inp is a product to which its bias (C) has not
    been added yet. bias is None if the product has none."""
    block = cu.threads(128, ceil_div(C, cu.width))  # on an H200 256 take up to 4% longer, 64 12 to 18%, 1024 12%
    kernel = "gelu_erf_forward_kernel" if erf else "gelu_forward_kernel"
    rows = 2  # of a block, as gelu.cu has it
    cu.launch(kernel, (ceil_div(N, rows), ceil_div(C, cu.width * block)), (block,), (out, inp, bias, N, C))


def gelu_backward(dinp, dbias, out_T, scratch, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """dinp (N,C) comes in as the gradient of the output, and becomes the gradient of the input, in place. dbias (C) +=
    its column sums. bias and dbias are None if the product has no bias.

    Sets out_T (C,N) to gelu(inp + bias), transposed; or if matmul.transposes() is false, sets out_T (N,C) to gelu(inp +
    bias). scratch holds (MOST_PARTIALS, C) floats.
    """
    side, rows = cu.block(16), rows_per_chunk(N, multiple=64)
    chunks, kernel = ceil_div(N, rows), "gelu_erf_backward_kernel" if erf else "gelu_backward_kernel"
    columns, _ = tile_grid(cu, N, C)
    cu.launch(kernel, (columns, chunks), (side, side), (dinp, out_T, scratch, inp, bias, N, C, rows))
    add_partials([dbias], scratch, chunks, C)

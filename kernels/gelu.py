"""GELU with the product and the bias in front of it: the launchers of gelu.cu."""

import device
from device import ceil_div
from kernels.matmul import as_stored, matmul_forward, tile_grid
from kernels.reduce import add_partials, partials_of, rows_per_chunk

cu = device.source(__file__)


def matmul_gelu_forward(
    out, fch, inp, weight, bias, B: int, T: int, C: int, OC: int, erf: bool = False
) -> None:  # fmt: skip
    """out (B,T,OC) = gelu(inp (B,T,C) @ weight (OC,C)^T + bias (OC)). Sets fch (B,T,OC), too, for backward: the product
    without the bias, which is added in fp32 where it is needed. bias is None if there is none."""
    matmul_forward(fch, inp, weight, None, B, T, C, OC)
    gelu_forward(out, fch, bias, B * T, OC, erf)


def gelu_forward(out, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """out (N,C) = gelu(inp + bias), in the tanh form or the erf form. inp is a product to which its bias (C) has not
    been added yet. bias is None if the product has none."""
    block = cu.threads(128, ceil_div(C, cu.width))  # on an H200 256 take up to 4% longer, 64 12 to 18%, 1024 12%
    kernel = "gelu_erf_forward_kernel" if erf else "gelu_forward_kernel"
    rows = 2  # of a block, as gelu.cu has it
    cu.launch(kernel, (ceil_div(N, rows), ceil_div(C, cu.width * block)), (block,), (out, inp, bias, N, C))


def gelu_backward(dinp, dbias, out, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """dinp (N,C) comes in as the gradient of the output, and becomes the gradient of the input, in place. dbias (C) +=
    its column sums. bias and dbias are None if the product has no bias.

    Sets out (N,C) to gelu(inp + bias) once more, in the layout that matmul_backward_weight wants.
    """
    side, rows = cu.block(16), rows_per_chunk(N, multiple=64)
    chunks, kernel = ceil_div(N, rows), "gelu_erf_backward_kernel" if erf else "gelu_backward_kernel"
    columns, _ = tile_grid(cu, N, C)
    partials = partials_of(chunks * C)
    cu.launch(kernel, (columns, chunks), (side, side), (dinp, as_stored(out), partials, inp, bias, N, C, rows))
    add_partials([dbias], partials, chunks, C)

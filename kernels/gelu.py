"""GELU with the product and the bias in front of it: the launchers of gelu.cu."""

import device
from device import ceil_div
from kernels.fp8 import MOST_BLOCKS, TILE_ROWS, Coded, blocks_of, codings
from kernels.matmul import as_stored, matmul_forward, tile_grid
from kernels.reduce import add_partials, partials_of, rows_per_chunk

cu = device.source(__file__)


def matmul_gelu_forward(
    out, fch, inp, weight, bias, B: int, T: int, C: int, OC: int, erf: bool = False
) -> None:  # fmt: skip
    """out (B,T,OC) = gelu(inp (B,T,C) @ weight (OC,C)^T + bias (OC)). Sets fch (B,T,OC), too, for backward: the product
    without the bias, which is added in fp32 where it is needed. bias is None if there is none. out may be Coded."""
    matmul_forward(fch, inp, weight, None, B, T, C, OC)
    gelu_forward(out, fch, bias, B * T, OC, erf)


def gelu_forward(out, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """out (N,C) = gelu(inp + bias), in the tanh form or the erf form. inp is a product to which its bias (C) has not
    been added yet. bias is None if the product has none. out may be Coded: then its codes and its scale are set, and
    bias, here and in backward, must lie at a multiple of 16 bytes."""
    form = "gelu_erf" if erf else "gelu"
    if isinstance(out, Coded):
        blocks = blocks_of(N, C, MOST_BLOCKS)
        for coding in codings(blocks, out):
            args = *coding, out.codes, inp, bias, N, C
            cu.launch(f"{form}_forward_codes_kernel", (blocks,), (cu.block(256),), args)
        return
    block = cu.threads(128, ceil_div(C, cu.width))  # on an H200 256 take up to 4% longer, 64 12 to 18%, 1024 12%
    rows = 2  # of a block, as gelu.cu has it
    grid = ceil_div(N, rows), ceil_div(C, cu.width * block)
    cu.launch(f"{form}_forward_kernel", grid, (block,), (out, inp, bias, N, C))


def gelu_backward(dinp, dbias, out, dout, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """Sets dinp (N,C) to the gradient of inp, in the place of dout (N,C), the gradient of the output: both are the same
    memory. dbias (C) += the column sums of dinp, before they are rounded. bias and dbias are None if the product has no
    bias.

    Sets out (N,C) to gelu(inp + bias) once more, in the layout that matmul_backward_weight wants.

    dinp may be Coded: then its codes and its scale are set, and it must not overlap dout. Then out may be Coded, too:
    its codes_T are set, by the scale of forward.
    """
    form = "gelu_erf" if erf else "gelu"
    rows = rows_per_chunk(N, multiple=TILE_ROWS if isinstance(dinp, Coded) else 64)  # those of whole tiles
    chunks = ceil_div(N, rows)
    partials = partials_of(chunks * C)
    if isinstance(dinp, Coded):
        of_out = (None, out.codes_T, out.scale) if isinstance(out, Coded) else (out, None, None)
        blocks = blocks_of(N, C, 3)  # as the kernels' __launch_bounds__ say
        for coding in codings(blocks, dinp):
            args = *coding, dinp.codes, dinp.codes_T, *of_out, partials, dout, inp, bias, N, C, rows
            cu.launch(f"{form}_backward_codes_kernel", (blocks,), (cu.block(256),), args)
    else:
        if device.address(dinp) != device.address(dout):
            raise ValueError("GELU's gradient is made in the place of that of its output")
        side, (columns, _) = cu.block(16), tile_grid(cu, N, C)
        args = dout, as_stored(out), partials, inp, bias, N, C, rows
        cu.launch(f"{form}_backward_kernel", (columns, chunks), (side, side), args)
    add_partials([dbias], partials, chunks, C)

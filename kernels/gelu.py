"""GELU, after a product and its bias: the launchers of gelu.cu, and of gelu_erf.cu for the erf form."""

from pathlib import Path

import device
from device import ceil_div
from kernels.dispatch import dispatched
from kernels.launches import MATRIX, describe
from kernels.matmul import as_stored, matmul_backward_inp, matmul_forward, matvec_block, recomputed, tile_grid
from kernels.mlp_hopper import matmul_gelu_backward_wgmma, matmul_gelu_forward_wgmma, takes
from kernels.reduce import add_partials, partials_of, rows_per_chunk

cu = device.source(__file__)
cu_erf = device.source(Path(__file__).with_stem("gelu_erf"), needed=lambda: False)  # compiled at its first launch


def matmul_gelu_forward(
    out, fch, inp, weight, bias, B: int, T: int, C: int, OC: int, erf: bool = False
) -> None:  # fmt: skip
    """out (B,T,OC) = gelu(inp (B,T,C) @ weight (OC,C)^T + bias (OC)). Sets fch (B,T,OC), too, for backward: the product
    without the bias, which is added in fp32 where it is needed. bias is None if there is none."""
    if bias is not None and not erf and takes(B * T, OC, C, weight, bias):
        matmul_gelu_forward_wgmma(out, fch, inp, weight, bias, B * T, C, OC)
    elif B * T == 1 and type(weight) not in matmul_forward.registry:  # a quantized weight has a product of its own
        matvec_gelu(out, fch, inp, weight, bias, C, OC, erf)
    else:
        matmul_forward(fch, inp, weight, None, B, T, C, OC)
        gelu_forward(out, fch, bias, B * T, OC, erf)


def matvec_gelu(out, fch, inp, weight, bias, C: int, OC: int, erf: bool = False) -> None:
    """matmul_gelu_forward of a single row: inp (C), weight (OC,C), bias, fch and out (OC). Neither fch nor out may
    overlap inp."""
    source, form = (cu_erf, "gelu_erf") if erf else (cu, "gelu")
    block = matvec_block(source, C, OC)
    source.launch(f"matvec_{form}_kernel", (ceil_div(OC, block[1]),), block, (out, fch, inp, weight, bias, C, OC))


def matmul_gelu_backward(
    dfch, dbias, out, dgelu, dout, weight, fch, bias, B: int, T: int, C: int, OC: int, erf: bool = False
) -> None:  # fmt: skip
    """The backward pass of GELU and of the product after it, which has given (B,T,OC) from the gelu (B,T,C) of
    fch (B,T,C), a product without its bias (C). dgelu (B,T,C) = dout (B,T,OC) @ weight (OC,C), and the rest as
    gelu_backward: sets dfch (B,T,C) and out (B*T,C), and adds to dbias (C).

    Nobody may read dgelu afterwards, which need not be written. It is memory for it: in bf16 and fp32 dfch's own.
    """
    if bias is not None and not erf and takes(B * T, C, OC, weight, bias):
        matmul_gelu_backward_wgmma(dfch, dbias, out, dout, weight, fch, bias, B * T, C, OC)
    else:
        matmul_backward_inp(dgelu, dout, weight, B, T, C, OC)
        gelu_backward(dfch, dbias, out, dgelu, fch, bias, B * T, C, erf)


@dispatched("out")
def gelu_forward(out, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """out (N,C) = gelu(inp + bias), in the tanh form or the erf form. inp is a product to which its bias (C) has not
    been added yet. bias is None if the product has none."""
    source, form = (cu_erf, "gelu_erf") if erf else (cu, "gelu")
    block = source.threads(128, ceil_div(C, source.width))  # on an H200 256 take up to 4% longer, 64 18%, 1024 12%
    grid = ceil_div(N, source.constant("ROWS")), ceil_div(C, source.width * block)
    source.launch(f"{form}_forward_kernel", grid, (block,), (out, inp, bias, N, C))


@dispatched("dinp")
def gelu_backward(dinp, dbias, out, dout, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """dinp (N,C) = dout * gelu'(inp + bias), in place: dinp and dout (N,C), the gradient of the output, are the same
    memory. dbias (C) += the column sums of dinp, before they are rounded. bias and dbias are None if the product has no
    bias.

    out (N,C) = gelu(inp + bias) once more, in the layout that matmul_backward_weight wants.
    """
    if device.address(dinp) != device.address(dout):
        raise ValueError("gelu_backward works in place: dinp must be dout's memory")
    source, form = (cu_erf, "gelu_erf") if erf else (cu, "gelu")
    rows = rows_per_chunk(N, multiple=64)  # whole tiles
    chunks = ceil_div(N, rows)
    partials = partials_of(chunks * C)
    side, (columns, _) = source.block(16), tile_grid(source, N, C)
    args = dout, as_stored(out), partials, inp, bias, N, C, rows
    source.launch(f"{form}_backward_kernel", (columns, chunks), (side, side), args)
    add_partials([dbias], partials, chunks, C)


for form, erf in ("gelu", False), ("gelu_erf", True):
    describe(matvec_gelu, "C=256 OC=64", "out fch bias: OC; inp: C; weight: OC,C", {"erf": erf}, "erf" * erf,
             hard="C=1100 OC=5", moved={f"matvec_{form}": lambda a: a.weight.nbytes})
    describe(gelu_forward, MATRIX, "out inp: N,C; bias: C", {"erf": erf}, "erf" * erf)
    describe(gelu_backward, MATRIX, "dinp out inp: N,C; bias dbias*: C",
             lambda size, a, erf=erf: recomputed(size, a) | {"dout": a.dinp, "erf": erf}, "erf" * erf,
             hard="N=133 C=67", twice={f"{form}_backward": "dout"})

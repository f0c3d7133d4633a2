"""GELU with quantized results: the launchers of gelu.cu and gelu_erf.cu."""

from pathlib import Path

import device
from device import ceil_div
from kernels import fp8
from kernels.fp8.quantize import FP8, blocks_of, launch_both_passes, quantized, quantized_out, recomputed
from kernels.fp8.quantized import Quantized
from kernels.gelu import gelu_backward, gelu_forward
from kernels.launches import MATRIX, describe
from kernels.reduce import add_partials, partials_of, rows_per_chunk

cu = fp8.source(__file__)
cu_erf = device.source(Path(__file__).with_stem("gelu_erf"), needed=lambda: False)  # compiled at its first launch


@gelu_forward.register(Quantized)
def quantized_forward(out: Quantized, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """gelu_forward. Sets q of out (N,C), and its scale. bias, here and in backward, lies at a multiple of 16 bytes."""
    source, form = (cu_erf, "gelu_erf") if erf else (cu, "gelu")
    kernel = f"{form}_forward_fp8_kernel"
    launch_both_passes(source, kernel, blocks_of(source, kernel, N, C), out.scale, (out.q,), inp, bias, N, C)


@gelu_backward.register(Quantized)
def quantized_backward(dinp: Quantized, dbias, out, dout, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """gelu_backward. Sets q and q_T of dinp (N,C), and its scale. dinp must not overlap dout, which stays as it is.
    Sets out (N,C), or, if it is Quantized, its q_T, by forward's scale."""
    source, form = (cu_erf, "gelu_erf") if erf else (cu, "gelu")
    kernel = f"{form}_backward_fp8_kernel"
    rows = rows_per_chunk(N, multiple=source.constant("FP8_ROWS"))
    chunks = ceil_div(N, rows)
    partials = partials_of(chunks * C)
    args = *recomputed(out), partials, dout, inp, bias, N, C, rows
    launch_both_passes(source, kernel, blocks_of(source, kernel, N, C), dinp.scale, (dinp.q, dinp.q_T), *args)
    add_partials([dbias], partials, chunks, C)


for erf in False, True:
    variant = "erf fp8" if erf else "fp8"
    describe(gelu_forward, MATRIX, "inp: N,C; bias: C", lambda size, a, erf=erf: quantized_out(size, a) | {"erf": erf},
             variant, **FP8)
    describe(gelu_backward, MATRIX, "dout inp: N,C; bias dbias*: C",
             lambda size, a, erf=erf: quantized_out(size, a) | {"dinp": quantized(size.N, size.C), "erf": erf},
             variant, hard="N=80 C=400", **FP8)

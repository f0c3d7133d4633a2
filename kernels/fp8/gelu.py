"""GELU with quantized results: the launchers of gelu.cu and gelu_erf.cu."""

from pathlib import Path

import device
from device import ceil_div
from kernels.fp8 import source
from kernels.fp8.quantize import MAX_BLOCKS, TILE_ROWS, blocks_of, both_passes, recomputed
from kernels.fp8.quantized import Quantized, note_written
from kernels.gelu import gelu_backward, gelu_forward
from kernels.reduce import add_partials, partials_of, rows_per_chunk

cu = source(__file__)
cu_erf = device.source(Path(__file__).with_stem("gelu_erf"), needed=lambda: False)  # compiled at its first launch


@gelu_forward.register(Quantized)
def quantized_forward(out: Quantized, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """gelu_forward. Sets q of out (N,C), and its scale. bias, here and in backward, lies at a multiple of 16 bytes."""
    file, form = (cu_erf, "gelu_erf") if erf else (cu, "gelu")
    blocks = blocks_of(N, C, MAX_BLOCKS)
    for arguments in both_passes(blocks, out.scale):
        file.launch(f"{form}_forward_fp8_kernel", (blocks,), (cu.block(256),), (*arguments, out.q, inp, bias, N, C))
    note_written(out.scale, out.q)


@gelu_backward.register(Quantized)
def quantized_backward(dinp: Quantized, dbias, out, dout, inp, bias, N: int, C: int, erf: bool = False) -> None:
    """gelu_backward. Sets q and q_T of dinp (N,C), and its scale. dinp must not overlap dout, which stays as it is.
    Sets out (N,C), or, if it is Quantized, its q_T, by forward's scale."""
    file, form = (cu_erf, "gelu_erf") if erf else (cu, "gelu")
    blocks = blocks_of(N, C, 3)  # as the kernel's __launch_bounds__ say
    rows = rows_per_chunk(N, multiple=TILE_ROWS)
    chunks = ceil_div(N, rows)
    partials = partials_of(chunks * C)
    for arguments in both_passes(blocks, dinp.scale):
        args = *arguments, dinp.q, dinp.q_T, *recomputed(out), partials, dout, inp, bias, N, C, rows
        file.launch(f"{form}_backward_fp8_kernel", (blocks,), (cu.block(256),), args)
    note_written(dinp.scale, dinp.q, dinp.q_T)
    add_partials([dbias], partials, chunks, C)

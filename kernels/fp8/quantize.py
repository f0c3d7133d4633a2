"""Quantizes matrices that are there in bf16: the launchers of quantize.cu; and what all launchers of this folder
share."""

import device
from device import ceil_div
from device.sources import Source
from kernels.fp8 import source
from kernels.fp8.quantized import GradientScale, Quantized, Scale, note_written
from kernels.launches import MATRIX, describe

import numpy as np

cu = source(__file__)

MAX_AMAXES = 8  # on a multiprocessor, one from each block: a norm's kernel has so many blocks, which are small


def quantize(out: Quantized, inp, N: int, C: int) -> None:
    """Quantizes inp (N,C), bf16. Sets out's q (N,C) and q_T (C,N); one of the two may be None. Also sets its scale: the
    old one changes only the time that this takes. N and C are multiples of MULTIPLE, and all arrays lie at multiples of
    16 bytes."""
    blocks = blocks_of(cu, "quantize_kernel", N, C)
    for arguments in both_passes(blocks, out.scale):
        launch_quantize(blocks, arguments, out, inp, N, C)


def quantize_by_scale(out: Quantized, inp, N: int, C: int) -> None:
    """The same by out's scale, which is only read. Numbers for which it is too small are clipped."""
    launch_quantize(blocks_of(cu, "quantize_kernel", N, C), known(out.scale), out, inp, N, C)


def launch_quantize(blocks: int, arguments: tuple, out: Quantized, inp, N: int, C: int) -> None:
    cu.launch("quantize_kernel", (blocks,), (cu.block(256),), (*arguments, out.q, out.q_T, inp, N, C))
    note_written(out.scale, out.q, out.q_T)


def both_passes(blocks: int, scale: Scale | GradientScale) -> list[tuple]:
    """The first four arguments of a kernel that quantizes a matrix, for each of its two passes (quantize.cuh:
    Quantizer): scale, previous_amax, block_amax, second_pass."""
    block_amax = device.scratch("fp8 amax", (blocks + 1,), np.float32)
    return [(scale.scale, scale.previous_amax, block_amax, second_pass) for second_pass in (0, 1)]


def launch_both_passes(
    cu: Source, kernel: str, blocks: int, scale: Scale | GradientScale, written: tuple, *args, shared_mem: int = 0
) -> None:
    """Launches both passes of a kernel. written: what it sets of the quantized matrix, q or q and q_T."""
    for arguments in both_passes(blocks, scale):
        cu.launch(kernel, (blocks,), (cu.block(256),), (*arguments, *written, *args), shared_mem=shared_mem)
    note_written(scale, *written)


def known(scale: Scale) -> tuple:
    """The same arguments for a single pass by a known scale."""
    return scale.scale, None, None, 0


def recomputed(out) -> tuple:
    """The arguments out, out_T and out_scale of a kernel that recomputes an output in backward: in bf16, or, if out is
    Quantized, its q_T."""
    if not isinstance(out, Quantized):
        return out, None, None
    note_written(out.scale, out.q_T)
    return None, out.q_T, out.scale.scale


def blocks_of(cu: Source, kernel: str, N: int, C: int) -> int:
    """The blocks of a kernel that share the tiles of an (N,C) matrix: no more than run at once."""
    tiles = ceil_div(N, cu.constant("FP8_ROWS")) * ceil_div(C, cu.constant("FP8_COLUMNS"))
    return min(tiles, cu.blocks_at_once(kernel) * device.multiprocessors)


def input_scratch(scale: Scale, N: int, C: int, transposed: bool) -> Quantized:
    """Scratch for a quantized input (N,C) of one product: for q, or for q_T."""
    if transposed:
        return Quantized(None, device.scratch("fp8 input_T", (C, N), np.uint8), scale)
    return Quantized(device.scratch("fp8 input", (N, C), np.uint8), None, scale)


def gradient_scratch(scale: GradientScale, N: int, OC: int) -> Quantized:
    """Scratch for a quantized gradient with OC columns. Gradients of other widths have their own: there the next
    kernel that quantizes need not wait for a product on the side stream."""
    q = device.scratch(f"fp8 dout {OC}", (N, OC), np.uint8)
    return Quantized(q, device.scratch(f"fp8 dout_T {OC}", (OC, N), np.uint8), scale)


def scratch_bytes(N: int, inputs: list[tuple[int, int]], gradients: list[tuple[int, int]]) -> dict[str, int]:
    """The scratch for products of N rows: purpose, bytes. inputs, gradients: the shapes (OC,C) of the weights whose
    products quantize their input, and the gradient of their output, because no layer's kernel does."""
    widest = N * max((C for _, C in inputs), default=0)
    douts = {f"fp8 {what} {OC}": N * OC for OC, _ in gradients for what in ("dout", "dout_T")}
    amax = 4 * (MAX_AMAXES * device.multiprocessors + 1)
    return {"fp8 input": widest, "fp8 input_T": widest, "fp8 amax": amax} | douts


def quantized(N: int, C: int) -> Quantized:
    """Room for a quantized matrix, whose scale, ratio and previous amax are 1."""
    q, q_T = (device.empty(shape, np.uint8) for shape in ((N, C), (C, N)))
    return Quantized(q, q_T, GradientScale("matrix", *(device.asarray(np.ones(n, np.float32)) for n in (2, 1))))


def quantized_out(size, a) -> dict:
    return {"out": quantized(size.N if hasattr(size, "N") else size.B * size.T, size.C)}


FP8 = {"needs": "N % 16 == 0; C % 16 == 0", "precision": "bf16"}
FP8_ROWS = FP8 | {"variant": "fp8", "needs": "B * T % 16 == 0; C % 16 == 0"}
describe(quantize, MATRIX, "inp: N,C", quantized_out, hard="N=80 C=400", **FP8)

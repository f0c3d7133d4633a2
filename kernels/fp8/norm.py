"""Norms with a quantized output: the launches that layernorm.py and rmsnorm.py share. The body of the forward kernels
is norm_forward_fp8 (norm.cuh)."""

import device
from device.sources import Source
from kernels.fp8.quantize import MAX_AMAXES, blocks_of, both_passes, known
from kernels.fp8.quantized import Quantized, note_written
from kernels.norm import MAX_THREADS, forward_blocks

import numpy as np


def launch_forward(
    cu: Source, name: str, out: Quantized, stats, inp, norm, eps: float, N: int, C: int
) -> None:  # fmt: skip
    """Launches both passes. Sets q of out (N,C), and its scale. The arguments are those of kernels/norm.py.

    The blocks of pass 1 have at most MAX_THREADS threads. There are no more blocks than run at once: each leaves an
    amax, and each block of pass 2 reads all of them. So pass 2 has the same grid."""
    kernel = f"{name}_forward_fp8_kernel"
    (blocks,), (threads, rows), shared_mem = forward_blocks(cu, N, C)
    at_once = min(MAX_AMAXES, cu.blocks_at_once(kernel) * MAX_THREADS // (threads * rows)) * device.multiprocessors
    blocks = min(blocks, at_once)
    (*first, _), second = both_passes(blocks, out.scale)
    args = *first, out.q, *stats, inp, *norm, np.float32(eps), N, C
    cu.launch(kernel, (blocks,), (threads, rows), args, shared_mem=shared_mem)
    args = *second, out.q, None, inp, *norm, *stats, N, C
    cu.launch(f"{name}_quantize_kernel", (blocks,), (cu.block(256),), args)
    note_written(out.scale, out.q)


def launch_recompute(cu: Source, name: str, out: Quantized, inp, norm, stats, N: int, C: int) -> None:
    """Sets q_T of out (C,N), by forward's scale."""
    kernel = f"{name}_quantize_kernel"
    args = *known(out.scale), None, out.q_T, inp, *norm, *stats, N, C
    cu.launch(kernel, (blocks_of(cu, kernel, N, C),), (cu.block(256),), args)
    note_written(out.scale, out.q_T)

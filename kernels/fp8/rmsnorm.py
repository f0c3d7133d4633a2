"""RMSNorm with a quantized output: the launchers of rmsnorm.cu."""

from kernels.fp8 import source
from kernels.fp8.norm import quantized_forward_blocks
from kernels.fp8.quantize import FP8_ROWS, blocks_of, both_passes, known, quantized_out
from kernels.fp8.quantized import Quantized, note_written
from kernels.launches import ROWS, describe
from kernels.rmsnorm import fused_residual_rmsnorm_forward, rmsnorm_forward, rmsnorm_recompute

import numpy as np

cu = source(__file__)


@rmsnorm_forward.register(Quantized)
def quantized_forward(out: Quantized, rstd, inp, weight, eps: float, B: int, T: int, C: int) -> None:
    """rmsnorm_forward. Sets q of out (B*T,C), and its scale."""
    launch_forward(None, out, rstd, inp, None, weight, eps, B * T, C)


@fused_residual_rmsnorm_forward.register(Quantized)
def quantized_residual_forward(
    residual, out: Quantized, rstd, inp1, inp2, weight, eps: float, B: int, T: int, C: int
) -> None:  # fmt: skip
    """fused_residual_rmsnorm_forward. Sets q of out (B*T,C), and its scale."""
    launch_forward(residual, out, rstd, inp1, inp2, weight, eps, B * T, C)


def launch_forward(residual, out: Quantized, rstd, inp1, inp2, weight, eps: float, N: int, C: int) -> None:
    """Launches both passes. residual and inp2 are None for rmsnorm_forward."""
    grid, block, shared_mem = quantized_forward_blocks(cu, "rmsnorm_forward_fp8_kernel", N, C)
    (*first, _), second = both_passes(*grid, out.scale)
    args = *first, out.q, residual, rstd, inp1, inp2, weight, np.float32(eps), N, C
    cu.launch("rmsnorm_forward_fp8_kernel", grid, block, args, shared_mem=shared_mem)
    args = *second, out.q, None, inp1 if residual is None else residual, weight, rstd, N, C
    cu.launch("rmsnorm_quantize_kernel", grid, (cu.block(256),), args)
    note_written(out.scale, out.q)


@rmsnorm_recompute.register(Quantized)
def quantized_recompute(out: Quantized, inp, weight, rstd, B: int, T: int, C: int) -> None:
    """rmsnorm_recompute. Sets q_T of out (C,B*T), by forward's scale."""
    args = *known(out.scale), None, out.q_T, inp, weight, rstd, B * T, C
    blocks = blocks_of(cu, "rmsnorm_quantize_kernel", B * T, C)
    cu.launch("rmsnorm_quantize_kernel", (blocks,), (cu.block(256),), args)
    note_written(out.scale, out.q_T)


describe(fused_residual_rmsnorm_forward, ROWS, "residual inp1 inp2: B,T,C; weight: C; rstd*: B,T", quantized_out,
         hard="T=40", **FP8_ROWS)
describe(rmsnorm_recompute, ROWS, "inp: B,T,C; weight: C; rstd*: B,T", quantized_out, hard="T=40 C=400", **FP8_ROWS)

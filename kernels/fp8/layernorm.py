"""LayerNorm with a quantized output: the launchers of layernorm.cu."""

from kernels.fp8 import source
from kernels.fp8.norm import quantized_forward_blocks
from kernels.fp8.quantize import FP8_ROWS, blocks_of, both_passes, known, quantized_out
from kernels.fp8.quantized import Quantized, note_written
from kernels.launches import ROWS, describe
from kernels.layernorm import EPS, NORM, fused_residual_forward, layernorm_forward, layernorm_recompute

cu = source(__file__)


@layernorm_forward.register(Quantized)
def quantized_forward(out: Quantized, stats, inp, norm, B: int, T: int, C: int) -> None:
    """layernorm_forward. Sets q of out (B*T,C), and its scale."""
    launch_forward(None, out, stats, inp, None, norm, B * T, C)


@fused_residual_forward.register(Quantized)
def quantized_residual_forward(residual, out: Quantized, stats, inp1, inp2, norm, B: int, T: int, C: int) -> None:
    """fused_residual_forward. Sets q of out (B*T,C), and its scale."""
    launch_forward(residual, out, stats, inp1, inp2, norm, B * T, C)


def launch_forward(residual, out: Quantized, stats, inp1, inp2, norm, N: int, C: int) -> None:
    """Launches both passes. residual and inp2 are None for layernorm_forward."""
    grid, block, shared_mem = quantized_forward_blocks(cu, "layernorm_forward_fp8_kernel", N, C)
    (*first, _), second = both_passes(*grid, out.scale)
    args = *first, out.q, residual, *stats, inp1, inp2, *norm, EPS, N, C
    cu.launch("layernorm_forward_fp8_kernel", grid, block, args, shared_mem=shared_mem)
    args = *second, out.q, None, inp1 if residual is None else residual, *norm, *stats, N, C
    cu.launch("layernorm_quantize_kernel", grid, (cu.block(256),), args)
    note_written(out.scale, out.q)


@layernorm_recompute.register(Quantized)
def quantized_recompute(out: Quantized, inp, norm, stats, B: int, T: int, C: int) -> None:
    """layernorm_recompute. Sets q_T of out (C,B*T), by forward's scale."""
    args = *known(out.scale), None, out.q_T, inp, *norm, *stats, B * T, C
    blocks = blocks_of(cu, "layernorm_quantize_kernel", B * T, C)
    cu.launch("layernorm_quantize_kernel", (blocks,), (cu.block(256),), args)
    note_written(out.scale, out.q_T)


describe(fused_residual_forward, ROWS, f"residual inp1 inp2: B,T,C; {NORM}", quantized_out, hard="T=40", **FP8_ROWS)
describe(layernorm_recompute, ROWS, f"inp: B,T,C; {NORM}", quantized_out, hard="T=40 C=400", **FP8_ROWS)

"""RMSNorm with a quantized output: the launchers of rmsnorm.cu. They set q of out (B*T,C), and its scale; or, where
backward computes out once more, q_T by forward's scale."""

from kernels.fp8 import source
from kernels.fp8.norm import launch_forward, launch_recompute
from kernels.fp8.quantize import FP8_ROWS, quantized_out
from kernels.fp8.quantized import Quantized
from kernels.launches import ROWS, describe
from kernels.rmsnorm import rmsnorm_forward, rmsnorm_recompute

cu = source(__file__)


@rmsnorm_forward.register(Quantized)
def quantized_forward(out: Quantized, rstd, inp, weight, eps: float, B: int, T: int, C: int) -> None:
    launch_forward(cu, "rmsnorm", out, [rstd], inp, [weight], eps, B * T, C)


@rmsnorm_recompute.register(Quantized)
def quantized_recompute(out: Quantized, inp, weight, rstd, B: int, T: int, C: int) -> None:
    launch_recompute(cu, "rmsnorm", out, inp, [weight], [rstd], B * T, C)


describe(rmsnorm_forward, ROWS, "inp: B,T,C; weight: C; rstd*: B,T", quantized_out, hard="T=40", **FP8_ROWS)
describe(rmsnorm_recompute, ROWS, "inp: B,T,C; weight: C; rstd*: B,T", quantized_out, hard="T=40 C=400", **FP8_ROWS)

"""LayerNorm with a quantized output: the launchers of layernorm.cu. They set q of out (B*T,C), and its scale; or, where
backward computes out once more, q_T by forward's scale."""

from kernels.fp8 import source
from kernels.fp8.norm import launch_forward, launch_recompute
from kernels.fp8.quantize import FP8_ROWS, quantized_out
from kernels.fp8.quantized import Quantized
from kernels.launches import ROWS, describe
from kernels.layernorm import EPS, NORM, layernorm_forward, layernorm_recompute

cu = source(__file__)


@layernorm_forward.register(Quantized)
def quantized_forward(out: Quantized, stats, inp, norm, B: int, T: int, C: int) -> None:
    launch_forward(cu, "layernorm", out, stats, inp, norm, EPS, B * T, C)


@layernorm_recompute.register(Quantized)
def quantized_recompute(out: Quantized, inp, norm, stats, B: int, T: int, C: int) -> None:
    launch_recompute(cu, "layernorm", out, inp, norm, stats, B * T, C)


describe(layernorm_forward, ROWS, f"inp: B,T,C; {NORM}", quantized_out, hard="T=40", **FP8_ROWS)
describe(layernorm_recompute, ROWS, f"inp: B,T,C; {NORM}", quantized_out, hard="T=40 C=400", **FP8_ROWS)

"""SwiGLU with quantized results: the launchers of swiglu.cu."""

import device
from kernels.fp8 import source
from kernels.fp8.quantize import FP8, blocks_of, launch_both_passes, quantized, quantized_out, recomputed
from kernels.fp8.quantized import Quantized
from kernels.launches import MATRIX, describe
from kernels.swiglu import swiglu_backward, swiglu_forward

cu = source(__file__)


@swiglu_forward.register(Quantized)
def quantized_forward(out: Quantized, inp, N: int, C: int) -> None:
    """swiglu_forward. Sets q of out (N,C), and its scale."""
    blocks = min(N, cu.blocks_at_once("swiglu_forward_fp8_kernel") * device.multiprocessors)
    launch_both_passes(cu, "swiglu_forward_fp8_kernel", blocks, out.scale, (out.q,), inp, N, C)


@swiglu_backward.register(Quantized)
def quantized_backward(dinp: Quantized, out, dout, inp, N: int, C: int) -> None:
    """swiglu_backward. Sets q and q_T of dinp (N,2C), and its scale. Sets out (N,C), or, if it is Quantized, its q_T,
    by forward's scale."""
    blocks = blocks_of(cu, "swiglu_backward_fp8_kernel", N, C)
    args = *recomputed(out), dout, inp, N, C
    launch_both_passes(cu, "swiglu_backward_fp8_kernel", blocks, dinp.scale, (dinp.q, dinp.q_T), *args)


describe(swiglu_forward, MATRIX, "inp: N,2*C", quantized_out, "fp8", **FP8)
describe(swiglu_backward, MATRIX, "dout: N,C; inp: N,2*C",
         lambda size, a: quantized_out(size, a) | {"dinp": quantized(size.N, 2 * size.C)}, "fp8",
         hard="N=80 C=272", **FP8)

"""SwiGLU, the gate of Llama's MLP: the launchers of swiglu.cu."""

import device
from device import ceil_div
from kernels.dispatch import dispatched
from kernels.launches import MATRIX, describe
from kernels.matmul import as_stored, matmul_backward_inp, matmul_forward, recomputed, tile_grid
from kernels.mlp_hopper import matmul_swiglu_backward_wgmma, matmul_swiglu_forward_wgmma, takes

cu = device.source(__file__)


def matmul_swiglu_forward(out, fch, inp, weight, B: int, T: int, C: int, H: int) -> None:
    """out (B,T,H) = silu(gate) * up. Sets fch (B,T,2H) = inp (B,T,C) @ weight (2H,C)^T, too, for backward: in each row
    H numbers of up, then H of gate."""
    if takes(B * T, 2 * H, C, weight) and H % 8 == 0:
        matmul_swiglu_forward_wgmma(out, fch, inp, weight, B * T, C, H)
    else:
        matmul_forward(fch, inp, weight, None, B, T, C, 2 * H)
        swiglu_forward(out, fch, B * T, H)


def matmul_swiglu_backward(dfch, out, dswiglu, dout, weight, fch, B: int, T: int, H: int, C: int) -> None:
    """The backward pass of SwiGLU and of the product behind it, which has given (B,T,C) from the SwiGLU (B,T,H) of
    fch (B,T,2H). dswiglu (B,T,H) = dout (B,T,C) @ weight (C,H), and the rest as swiglu_backward: sets dfch (B,T,2H)
    and out (B*T,H). dswiglu is memory for its numbers, and nobody may read it afterwards: it need not be written."""
    if H % 64 == 0 and takes(B * T, H, C, weight):
        matmul_swiglu_backward_wgmma(dfch, out, dout, weight, fch, B * T, H, C)
    else:
        matmul_backward_inp(dswiglu, dout, weight, B, T, H, C)
        swiglu_backward(dfch, out, dswiglu, fch, B * T, H)


@dispatched("out")
def swiglu_forward(out, inp, N: int, C: int) -> None:
    """out (N,C) = silu(gate) * up. A row of inp (N,2C) has C numbers of up, then C of gate."""
    block = cu.threads(128, ceil_div(C, cu.width))  # on an H200 64 to 256 take as long
    cu.launch("swiglu_forward_kernel", (N, ceil_div(C, cu.width * block)), (block,), (out, inp, C))


@dispatched("dinp")
def swiglu_backward(dinp, out, dout, inp, N: int, C: int) -> None:
    """Sets dinp (N,2C) to the gradient of inp (N,2C), from dout (N,C), the gradient of the output.

    Sets out (N,C) to the output of swiglu_forward once more, in the layout that matmul_backward_weight wants. The
    arrays must not overlap.
    """
    side, grid = cu.block(16), tile_grid(cu, N, C)
    cu.launch("swiglu_backward_kernel", grid, (side, side), (dinp, as_stored(out), dout, inp, N, C))


describe(swiglu_forward, MATRIX, "out: N,C; inp: N,2*C")
describe(swiglu_backward, MATRIX, "dinp inp: N,2*C; out dout: N,C", recomputed, hard="N=133 C=67")

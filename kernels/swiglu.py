"""SwiGLU, the gate of Llama's MLP: the launchers of swiglu.cu."""

import device
from device import ceil_div
from kernels.fp8 import MOST_BLOCKS, Coded, blocks_of, codings
from kernels.matmul import as_stored, tile_grid

cu = device.source(__file__)


def swiglu_forward(out, inp, N: int, C: int) -> None:
    """out (N,C) = silu(gate) * up. A row of inp (N,2C) has C numbers of up, then C of gate. out may be Coded:
    then its codes and its scale are set."""
    if isinstance(out, Coded):
        blocks = min(N, MOST_BLOCKS * device.multiprocessors)
        for coding in codings(blocks, out):
            args = *coding, out.codes, inp, N, C
            cu.launch("swiglu_forward_codes_kernel", (blocks,), (cu.block(256),), args)
        return
    block = cu.threads(128, ceil_div(C, cu.width))  # on an H200 64 to 256 take as long
    cu.launch("swiglu_forward_kernel", (N, ceil_div(C, cu.width * block)), (block,), (out, inp, C))


def swiglu_backward(dinp, out, dout, inp, N: int, C: int) -> None:
    """Sets dinp (N,2C) to the gradient of inp (N,2C), from dout (N,C), the gradient of the output.

    Sets out (N,C) to the output of swiglu_forward once more, in the layout that matmul_backward_weight wants. The
    arrays must not overlap. dinp may be Coded: then its codes and its scale are set. Then out may be Coded, too: its
    codes_T are set, by the scale of forward.
    """
    if isinstance(dinp, Coded):
        of_out = (None, out.codes_T, out.scale) if isinstance(out, Coded) else (out, None, None)
        blocks = blocks_of(N, C, 2)  # as the kernel's __launch_bounds__ say
        for coding in codings(blocks, dinp):
            args = *coding, dinp.codes, dinp.codes_T, *of_out, dout, inp, N, C
            cu.launch("swiglu_backward_codes_kernel", (blocks,), (cu.block(256),), args)
        return
    side, grid = cu.block(16), tile_grid(cu, N, C)
    cu.launch("swiglu_backward_kernel", grid, (side, side), (dinp, as_stored(out), dout, inp, N, C))

"""RMSNorm with the residual connection in front of it: the launchers of rmsnorm.cu."""

import numpy as np

from kernels.reduce import MOST_PARTIALS, add_partials
from llmc import device
from llmc.device import ceil_div

cu = device.source(__file__)


def rmsnorm_forward(out, rstd, inp, weight, eps: float, B: int, T: int, C: int) -> None:
    """out (B,T,C) = inp * rstd * weight, each row by itself; rstd (B,T) = 1 / sqrt(mean(inp^2) + eps) is set too."""
    grid, block, shared_mem = forward_launch(B * T, C)
    args = out, rstd, inp, weight, np.float32(eps), B * T, C
    cu.rmsnorm_forward_kernel(grid, block, args, shared_mem=shared_mem)


def fused_residual_rmsnorm_forward(
    residual, out, rstd, inp1, inp2, weight, eps: float, B: int, T: int, C: int
) -> None:
    """residual (B,T,C) = inp1 + inp2, then out and rstd = rmsnorm of it. The arrays must not overlap."""
    grid, block, shared_mem = forward_launch(B * T, C)
    args = residual, out, rstd, inp1, inp2, weight, np.float32(eps), B * T, C
    cu.fused_residual_rmsnorm_forward_kernel(grid, block, args, shared_mem=shared_mem)


def forward_launch(N: int, C: int) -> tuple[tuple, tuple, int]:
    """Grid, block and bytes of shared memory of the forward kernels: a warp a row, four rows a block where they fit."""
    row_bytes = 16 * ceil_div(C, 4)
    rows = max(1, min(4, device.shared_memory() // row_bytes))
    return (ceil_div(N, rows),), (cu.warp_size, rows), rows * row_bytes


def rmsnorm_backward(dinp, dweight, scratch, dout, inp, weight, rstd, B: int, T: int, C: int) -> None:
    """dinp (B,T,C) += the gradient of the rmsnorm's input; dweight (C) += that of its weight.

    dout (B,T,C) is the gradient of the output, inp the input, rstd what forward left; scratch holds (MOST_PARTIALS, C)
    floats.
    """
    vectors, row_bytes = ceil_div(C, 4), 2 * 16 * ceil_div(C, 4)
    passes = ceil_div(vectors, 256)  # over the columns, of as few whole warps as that takes
    block = cu.block(32 * ceil_div(vectors, 32 * passes))
    rows = max(1, min(4, (device.shared_memory() // 3 - 1024) // row_bytes))  # three blocks share a multiprocessor
    chunks = min(ceil_div(B * T, rows), 4 * device.multiprocessors(), MOST_PARTIALS)
    cu.rmsnorm_backward_kernel(
        (chunks,),
        (block,),
        (dinp, scratch, dout, inp, weight, rstd, B * T, C, rows),
        shared_mem=rows * row_bytes,
    )
    add_partials([dweight], scratch, chunks, C)


def rmsnorm_transposed(out_T, inp, weight, rstd, B: int, T: int, C: int) -> None:
    """out_T (C,B*T) = the output of rmsnorm_forward, transposed, recomputed from its input and the rstd it left."""
    side = cu.block(16)
    cu.rmsnorm_transposed_kernel(
        (ceil_div(C, 64), ceil_div(B * T, 64)), (side, side), (out_T, inp, weight, rstd, B * T, C)
    )

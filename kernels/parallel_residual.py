"""Norms of a residual stream to which up to two branches are added first: the launchers of parallel_residual.cu."""

import numpy as np

from kernels.dropout import Dropout
from kernels.reduce import MOST_PARTIALS, add_partials
from llmc import device
from llmc.device import ceil_div

cu = device.source(__file__)


def parallel_residual_forward(
    residual, out0, out1, mean, rstd, inp, proj0, bias0, proj1, bias1, weight0, shift0, weight1, shift1, eps: float,
    B: int, T: int, C: int, dropout0: Dropout | None = None, dropout1: Dropout | None = None,
) -> None:  # fmt: skip
    """residual (B,T,C) = inp + dropout0(proj0 + bias0) + dropout1(proj1 + bias1), and with n its normalised rows,
    out0 (B,T,C) = n * weight0 + shift0 and out1 (B,T,C) = n * weight1 + shift1. mean, rstd (B,T) are set too.

    proj0, proj1 (B,T,C) are the branches' projections without their biases (C). What does not exist is None: out1,
    weight1 and shift1 where both branches read out0; mean and the shifts for RMSNorm, which subtracts no mean; a bias;
    proj1; both projections and residual where the stream is inp itself. The arrays must not overlap.
    """
    grid, block, shared_mem = row_launch(cu, B * T, C)
    args = (
        residual, out0, out1, mean, rstd, inp, proj0, bias0, proj1, bias1, weight0, shift0, weight1, shift1,
        np.float32(eps), B * T, C,
    )  # fmt: skip
    if dropout0 or dropout1:
        args += random_and_sites(dropout0, dropout1)
        cu.parallel_residual_dropout_forward_kernel(grid, block, args, shared_mem=shared_mem)
    else:
        cu.parallel_residual_forward_kernel(grid, block, args, shared_mem=shared_mem)


def row_launch(cu: device.Source, N: int, C: int) -> tuple[tuple, tuple, int]:
    """Grid, block and bytes of shared memory for a kernel that gives each of N rows a warp and C floats of shared
    memory: four rows a block where they fit."""
    row_bytes = 16 * ceil_div(C, 4)
    rows = max(1, min(4, device.shared_memory() // row_bytes))
    return (ceil_div(N, rows),), (cu.warp_size, rows), rows * row_bytes


def parallel_residual_backward(
    dinp, dproj0, dproj1, dweight0, dshift0, dweight1, dshift1, dbias0, dbias1, scratch, dout0, dout1, inp,
    weight0, weight1, mean, rstd, B: int, T: int, C: int, dropout0: Dropout | None = None,
    dropout1: Dropout | None = None,
) -> None:  # fmt: skip
    """dinp (B,T,C) += the gradient of the norm's input; the gradients of weights and shifts (C) are added to.

    dproj0, dproj1 (B,T,C) = the new dinp through the dropout of their branch: the gradients of the projections. Where a
    branch has no dropout the new dinp is that gradient, and dproj is not set. dbias0, dbias1 (C) += the column sums of
    those gradients.

    dout0, dout1 (B,T,C) are the gradients of the outputs, inp is the norm's input (forward's residual), mean and rstd
    (B,T) what forward left; scratch holds (MOST_PARTIALS, S C) floats, S <= 6 the number of the gradients (C) wanted.
    None: what forward had as None, its gradients, and a bias gradient that is not wanted, dbias1 where dbias0 is. The
    arrays must not overlap.
    """
    outs = [out for out in (dweight0, dshift0, dweight1, dshift1) if out is not None]
    biases = [out for out in (dbias0, dbias1) if out is not None]
    dropped = dropout0 is not None or dropout1 is not None
    S = len(outs) + (len(biases) if dropped else min(1, len(biases)))  # without dropout both biases have the same sum

    vectors, row_bytes = ceil_div(C, 4), 16 * ceil_div(C, 4)
    passes = ceil_div(vectors, 256)  # over the columns, of as few whole warps as that takes
    block = cu.block(32 * ceil_div(vectors, 32 * passes))
    room = device.shared_memory() // 2 - 2048  # two blocks share a multiprocessor
    keep = room >= (S + 2) * row_bytes
    rows = max(1, min(4, (room - S * row_bytes * keep) // (2 * row_bytes)))
    chunks = min(ceil_div(B * T, rows), 2 * device.multiprocessors(), MOST_PARTIALS)
    shared_mem = (2 * rows + S * keep) * row_bytes
    args = dout0, dout1, inp, weight0, weight1, mean, rstd, B * T, C, S, rows, int(keep)
    if dropped:
        args = dinp, dproj0 if dropout0 else None, dproj1 if dropout1 else None, scratch, *args
        args += random_and_sites(dropout0, dropout1)
        cu.parallel_residual_dropout_backward_kernel((chunks,), (block,), args, shared_mem=shared_mem)
    else:
        cu.parallel_residual_backward_kernel((chunks,), (block,), (dinp, scratch, *args), shared_mem=shared_mem)
    add_partials(outs + biases, scratch, chunks, C, S)


def random_and_sites(dropout0: Dropout | None, dropout1: Dropout | None) -> tuple:
    """The last arguments of the kernels with dropout; a branch without it has the site -1."""
    random = (dropout0 or dropout1).random
    return random, dropout0.site if dropout0 else -1, dropout1.site if dropout1 else -1

"""RMSNorm with the residual connection in front of it: the launchers of rmsnorm.cu."""

import device
from device import ceil_div
from kernels.fp8 import MOST_BLOCKS, Coded, blocks_of, maxima_of
from kernels.norm import forward_blocks, forward_codes_blocks
from kernels.parallel_residual import recompute_norm
from kernels.reduce import MOST_PARTIALS, add_partials, partials_of

import numpy as np

cu = device.source(__file__)


def rmsnorm_forward(out, rstd, inp, weight, eps: float, B: int, T: int, C: int) -> None:
    """out (B,T,C) = inp * rstd * weight, each row by itself. Sets rstd (B,T) = 1 / sqrt(mean(inp^2) + eps), too.
    out may be Coded: then its codes and its scale are set."""
    launch_forward(None, out, rstd, inp, None, weight, eps, B * T, C)


def fused_residual_rmsnorm_forward(
    residual, out, rstd, inp1, inp2, weight, eps: float, B: int, T: int, C: int
) -> None:  # fmt: skip
    """residual (B,T,C) = inp1 + inp2. Then out and rstd = rmsnorm of residual as it is stored. out may be Coded. The
    arrays must not overlap."""
    launch_forward(residual, out, rstd, inp1, inp2, weight, eps, B * T, C)


def launch_forward(residual, out, rstd, inp1, inp2, weight, eps: float, N: int, C: int) -> None:
    """Launches the forward kernel. residual and inp2 are None for rmsnorm_forward."""
    if isinstance(out, Coded):
        grid, block, shared_mem = forward_codes_blocks(cu, N, C)
        maxima = maxima_of(*grid)
        args = out.scale, out.before, maxima, out.codes, residual, rstd, inp1, inp2, weight, np.float32(eps), N, C
        cu.launch("rmsnorm_forward_codes_kernel", grid, block, args, shared_mem=shared_mem)
        x = inp1 if residual is None else residual
        args = out.scale, out.before, maxima, 1, out.codes, None, x, weight, rstd, N, C
        cu.launch("rmsnorm_codes_kernel", grid, (cu.block(256),), args)
        return
    grid, block, shared_mem = forward_blocks(cu, N, C)
    args = residual, out, rstd, inp1, inp2, weight, np.float32(eps), N, C
    cu.launch("rmsnorm_forward_kernel", grid, block, args, shared_mem=shared_mem)


def rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd, B: int, T: int, C: int) -> None:
    """dinp (B,T,C) += the gradient of the rmsnorm's input; dweight (C) += that of its weight.

    The new dinp is also the gradient of what forward added in front. dout (B,T,C) is the gradient of the output, inp
    the input, rstd what forward set.
    """
    # A thread has one vector of a row, if MOST_THREADS of rmsnorm.cu allow that. A block has as many groups as make 256
    # threads, so that there are fewer partial sums. 512 threads share a multiprocessor: each needs some 110 registers.
    threads = min(512, 32 * ceil_div(C, 32 * cu.width))
    groups = cu.block(max(1, 256 // threads))
    keep = 4 * groups * C <= device.shared_memory - 4096
    groups = groups if keep else 1
    chunks = min(ceil_div(B * T, 2 * groups), 512 // (threads * groups) * device.multiprocessors, MOST_PARTIALS)
    partials = partials_of(chunks * C)
    cu.launch(
        "rmsnorm_backward_kernel",
        (chunks,),
        (cu.block(threads), groups),
        (dinp, partials, dout, inp, weight, rstd, B * T, C, int(keep)),
        shared_mem=4 * groups * C * keep,
    )
    add_partials([dweight], partials, chunks, C)


def rmsnorm_recompute(out, inp, weight, rstd, B: int, T: int, C: int) -> None:
    """out (B*T,C) = the output of rmsnorm_forward once more, from its input and the rstd that it set. out has the
    layout that matmul_backward_weight wants. It may be Coded: then its codes_T are set, by the scale of forward."""
    if isinstance(out, Coded):
        args = out.scale, None, None, 0, None, out.codes_T, inp, weight, rstd, B * T, C
        cu.launch("rmsnorm_codes_kernel", (blocks_of(B * T, C, MOST_BLOCKS),), (cu.block(256),), args)
    else:
        recompute_norm(out, inp, (weight, None), (None, rstd), B, T, C)

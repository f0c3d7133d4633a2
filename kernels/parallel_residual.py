"""The end of a branch, which is added to the residual stream, and the norms after it. One branch is added, or two in
parallel. These are the launchers of parallel_residual.cu."""

from collections.abc import Sequence

import device
from device import ceil_div
from kernels.dropout import Dropout, drop_a_fifth
from kernels.launches import MATRIX, ROWS, describe
from kernels.matmul import matmul_forward
from kernels.norm import MANY_AND_FEW, launch_forward
from kernels.reduce import MAX_PARTIALS, add_partials, partials_of

cu = device.source(__file__)


def branch_forward(
    out, inp, weight, bias, B: int, T: int, C: int, OC: int, residual, dropout: Dropout | None
) -> None:  # fmt: skip
    """out (B,T,OC) = residual (B,T,OC) + dropout(inp (B,T,C) @ weight (OC,C)^T + bias (OC)), the end of a branch.
    residual must not overlap out."""
    if dropout is None:
        matmul_forward(out, inp, weight, bias, B, T, C, OC, residual)
    else:
        matmul_forward(out, inp, weight, bias, B, T, C, OC)
        add_dropped(out, residual, dropout, B * T, OC)


def add_dropped(out, residual, dropout: Dropout, N: int, C: int) -> None:
    """out (N,C) = residual (N,C) + dropout(out)."""
    rows = 8  # of a block
    cu.launch("add_dropped_kernel", (ceil_div(N, rows),), (cu.warp_size, rows), (out, residual, N, C, *dropout))


def parallel_residual_forward(outs, stats, inp, norms, eps: float, B: int, T: int, C: int) -> None:
    """Let n be the normalised rows of inp (B,T,C): then out (B,T,C) = n * weight + shift for each out of outs and its
    norm (weight (C), shift (C)). There are one or two norms. With one, only the first out is written. Sets stats =
    mean (B,T), rstd (B,T), too. mean and the shifts are None for RMSNorm, which subtracts no mean. The arrays must not
    overlap."""
    (weight0, shift0), (weight1, shift1) = pair(norms, (None, None))
    out0, out1 = pair(outs[: len(norms)])
    tensors = out0, out1, *stats, inp, weight0, shift0, weight1, shift1
    launch_forward(cu, "parallel_residual", tensors, eps, B * T, C)


def pair(given: Sequence, absent=None) -> list:
    """The one or two that are given, and `absent` in the place of each that is missing."""
    return [*given, absent, absent][:2]


def parallel_residual_backward(
    dinp, dnorms, douts, inp, norms, stats, B: int, T: int, C: int, *, branches
) -> None:  # fmt: skip
    """dinp (B,T,C) += the gradient of the norms' input inp (B,T,C). douts (B,T,C) are the gradients of the outs, one
    for each norm. dnorms has (dweight (C), dshift (C)) for each norm; both are added to.

    For each branch that forward added in front, branches has (dproj (B,T,C), dbias (C), dropout). This sets dproj, the
    gradient of the branch's last product, to the new dinp through the dropout. Without a dropout the new dinp itself is
    this gradient, and dproj is not set. dbias += the column sums of the gradient.

    norms is forward's; stats is what it set. These may be None: what was None in forward, and its gradient; and a
    dbias that is not wanted, but if the first dbias is None, the second must be, too. The arrays must not overlap.
    """
    (dproj0, dbias0, dropout0), (dproj1, dbias1, dropout1) = pair(branches, (None, None, None))
    (weight0, _), (weight1, _) = pair(norms, (None, None))
    dout0, dout1 = pair(douts[: len(norms)])
    outs = [out for dnorm in dnorms for out in dnorm if out is not None]
    biases = [out for out in (dbias0, dbias1) if out is not None]
    dropped = dropout0 is not None or dropout1 is not None
    S = len(outs) + (len(biases) if dropped else min(1, len(biases)))  # without dropout both biases have the same sum

    width = cu.width
    vectors, row_bytes = ceil_div(C, width), 4 * width * ceil_div(C, width)
    passes = ceil_div(C, 2048)  # over the columns; the block has as few whole warps as these take
    threads = 32 * ceil_div(vectors, 32 * passes)
    # So many share a multiprocessor. In bf16 a thread has twice as many numbers, so up to twice as many registers.
    blocks = 2 if threads <= 1024 // width else 1
    room = device.shared_memory // blocks - 2048  # a block also needs 1024 bytes for CUDA and 544 for the sums of warps
    keep = room >= (S + 2) * row_bytes
    rows = max(1, min(4, (room - S * row_bytes * keep) // (2 * row_bytes)))
    groups = ceil_div(B * T, rows)
    chunks = min(groups, blocks * device.multiprocessors, MAX_PARTIALS)
    chunks = ceil_div(groups, ceil_div(groups, chunks))  # fewer partial sums; no block has more groups
    block, shared_mem = cu.block(threads), (2 * rows + S * keep) * row_bytes
    partials = partials_of(chunks * S * C, "norm partials")
    args = dout0, dout1, inp, weight0, weight1, *stats, B * T, C, S, rows, int(keep)
    if dropped:
        args = dinp, dproj0 if dropout0 else None, dproj1 if dropout1 else None, partials, *args
        args += random_and_sites(dropout0, dropout1)
        cu.launch("parallel_residual_dropout_backward_kernel", (chunks,), (block,), args, shared_mem=shared_mem)
    else:
        args = dinp, partials, *args
        cu.launch("parallel_residual_backward_kernel", (chunks,), (block,), args, shared_mem=shared_mem)
    add_partials(outs + biases, partials, chunks, C, S)


def random_and_sites(dropout0: Dropout | None, dropout1: Dropout | None) -> tuple:
    """The last arguments of the kernels with dropout; a branch without it has the site -1."""
    random = (dropout0 or dropout1).random
    return random, dropout0.site if dropout0 else -1, dropout1.site if dropout1 else -1


describe(add_dropped, MATRIX, "out residual: N,C", lambda size, a: {"dropout": drop_a_fifth()}, hard="N=133 C=67",
         twice={"add_dropped": "out"})
for variant, sizes, hard in MANY_AND_FEW:
    describe(parallel_residual_forward, sizes, "inp outs.out0 outs.out1: B,T,C; weight0 weight1 shift0 shift1: C; "
             "stats.mean* stats.rstd*: B,T", lambda size, a: {"norms": [(a.weight0, a.shift0), (a.weight1, a.shift1)]},
             variant, hard=hard)
for variant, drop in ("", lambda site: None), ("dropout", drop_a_fifth):
    describe(
        parallel_residual_backward, ROWS, "inp dinp dproj0 dproj1 douts.dout0 douts.dout1: B,T,C; weight0 weight1: C; "
        "dbias0* dbias1* dweight0* dweight1* dshift0* dshift1*: C; stats.mean* stats.rstd*: B,T",
        lambda size, a, drop=drop: {
            "norms": [(a.weight0, None), (a.weight1, None)],
            "dnorms": [(a.dweight0, a.dshift0), (a.dweight1, a.dshift1)],
            "branches": [(a.dproj0, a.dbias0, drop(0)), (a.dproj1, a.dbias1, drop(1))]},
        variant, hard="B=1 T=40 C=2100",
        twice={"parallel_residual_backward": "dinp", "parallel_residual_dropout_backward": "dinp"})

"""Sums in two stages that are the same on every run: the launchers of reduce.cu."""

import device
from device import ceil_div
from kernels.launches import describe

import numpy as np

cu = device.source(__file__)

MAX_PARTIALS = 512  # partial sums of a column at most
SQUARES = 1024       # partial sums of a norm at most


def rows_per_chunk(N: int, multiple: int) -> int:
    """Rows that one block adds up when N rows are shared out among at most 256 chunks: a multiple of `multiple`.

    For 4096 rows, an H200 took 15% longer with 512 chunks, which make too many partial sums, and 5% longer with 64,
    which make too few blocks.
    """
    return multiple * ceil_div(N, multiple * 256)


def add_partials(outs: list, partials, P: int, C: int, S: int | None = None) -> None:
    """outs[s] (C) += the sum over p of partials[p, s], for partials (P, S, C), S = len(outs) by default.

    There are one to six outs. One that is None is left out. If there are more than S outs, each of the rest gets the
    last sum.
    """
    # Few columns per block, so that there are blocks enough: with 32 x 32 an H100 took 12 to 40% longer, with 8 x 128
    # up to 33%.
    columns = min(8, cu.warp_size)
    padded = (*outs, *[None] * 5)[:6]
    cu.launch(
        "add_partials_kernel",
        (ceil_div(C, columns), len(outs)),
        (columns, cu.block(64)),
        (*padded, partials, P, C, S or len(outs)),
    )


def partials_of(count: int, purpose: str = "partials"):
    """Scratch for `count` partial sums, fp32. Norms have a purpose of their own, "norm partials". In backward their
    sums alternate with the others', so a kernel need not wait until the side stream has read the last ones."""
    return device.scratch(purpose, (count,), np.float32)


def column_sum(out, inp, N: int, C: int) -> None:
    """out (C) += the sum of the rows of inp (N,C)."""
    if N <= MAX_PARTIALS and device.floatX != device.BF16:  # so few rows serve as partial sums
        add_partials([out], inp, N, C)
        return
    # On an H200 128 and 256 threads take as long, 32 7% longer.
    block, rows = cu.threads(64, ceil_div(C, cu.width)), rows_per_chunk(N, multiple=8)
    chunks = ceil_div(N, rows)
    partials, grid = partials_of(chunks * C), (ceil_div(C, cu.width * block), chunks)
    cu.launch("column_partials_kernel", grid, (block,), (partials, inp, N, C, rows))
    add_partials([out], partials, chunks, C)


def global_norm(norm, scratch, arrays: list, largest: float, skip_nonfinite: bool) -> None:
    """norm[0] = the Euclidean norm of all floats in some flat arrays. norm[1] = min(1, largest / norm[0]), or 1 if
    largest is 0. norm[2] += 1 if norm[0] is not finite, and += 1 if norm[3] is not 0; then norm[3] = 0.

    norm[1] is NaN if norm[0] is not finite; without skip_nonfinite also as long as norm[2] is not 0. norm (4) is a
    device array; scratch holds at least SQUARES floats.
    """
    norm_of_squares(norm, scratch, sum_squares(scratch, arrays), largest, skip_nonfinite)


def sum_squares(scratch, arrays: list) -> int:
    """Sets the first floats of scratch, which holds at least SQUARES floats, to partial sums of the squares of all
    floats in some flat arrays. Returns how many partial sums there are."""
    block, partials, used = cu.block(512), scratch.reshape(-1), 0  # on an H200 256 take as long, 128 19% longer
    for x in arrays:
        blocks = max(1, min(SQUARES // len(arrays), ceil_div(x.size, cu.floats * block)))
        cu.launch("squares_partials_kernel", (blocks,), (block,), (partials[used:], x, x.size))
        used += blocks
    return used


def norm_of_squares(norm, scratch, count: int, largest: float, skip_nonfinite: bool) -> None:
    """The second half of global_norm, from the first `count` floats of scratch."""
    block, partials = cu.block(512), scratch.reshape(-1)
    args = norm, partials, count, np.float32(largest), int(skip_nonfinite)
    cu.launch("norm_kernel", (1,), (block,), args)


describe(global_norm, "n=4096", "x*: n",
         lambda size, a: {
             "norm": device.asarray(np.array([1, 1, 0, 0], np.float32)), "scratch": device.empty((SQUARES,)),
             "arrays": [a.x], "largest": 1.0, "skip_nonfinite": False},
         hard="n=10001", moved={"norm": lambda a: 4 * a.P})
describe(column_sum, "N=640 C=128", "out*: C; inp: N,C")
describe(add_partials, "P=40 C=128", "outs.out0* outs.out1*: C; partials*: P,2,C",
         moved={"add_partials": lambda a: 4 * a.P * a.C * sum(vars(a)[f"out{i}"] is not None for i in range(6))})

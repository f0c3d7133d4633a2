"""Products of linear layers and of attention. In fp16 these round their operands, which are fp32, to fp16: the
launchers of products.cu. In any other precision they are device.gemm and device.gemm_strided_batched."""

from __future__ import annotations

from typing import Any, NamedTuple

import device
from device import ceil_div
from kernels.launches import describe

import numpy as np

cu = device.source(__file__, needed=lambda: device.precision == "fp16")

MAX_AMAXES = 8  # on a multiprocessor, one from each block
FP32 = np.float32


class Operand(NamedTuple):
    """Room for an operand of a product, about scale[0] * numbers. numbers (n,): fp16. scale (2,), fp32: scale[0] is a
    power of two, or NaN if a number is not finite. As an operand b it has in scale[1] the scale of the product, for
    which it is multiplied by that of the operand a. block_amax: of all blocks, as the kernels need it."""

    numbers: Any
    scale: Any
    block_amax: Any


# What was rounded to the scratch for operands a, by the scratch's address: an array's address, and how many numbers.
held: dict[int, tuple[int, int]] = {}


def gemm(c, a, b, m: int, n: int, k: int, *options, again: bool = False, **named) -> None:
    """device.gemm. again: a has not changed since the last product, which took it, too, as its a: so it need not be
    rounded again."""
    if device.precision == "fp16":
        (a, named["scale_a"], _), (b, named["scale_b"], _) = rounded(a, b, m * k, k * n, again)
    device.gemm(c, a, b, m, n, k, *options, **named)


def gemm_strided_batched(c, a, b, m: int, n: int, k: int, count: int, *, again: bool = False, **named) -> None:
    """device.gemm_strided_batched. again: as for gemm."""
    if device.precision == "fp16":
        (a, named["scale_a"], _), (b, named["scale_b"], _) = rounded(a, b, count * m * k, count * k * n, again)
    device.gemm_strided_batched(c, a, b, m, n, k, count, **named)


def rounded(a, b, a_size: int, b_size: int, again: bool) -> tuple[Operand, Operand]:
    """The operands of a product, from fp32 arrays of so many numbers."""
    operand, given = scratch_of("a", a_size), (device.address(a), a_size)
    place = device.address(operand.numbers)
    if held.pop(place, None) != given or not again:
        round_to_fp16(operand, a, a_size)
    if not again:
        held[place] = given
    # The second product with an a is often one that runs on the side stream, so its b has scratch of its own.
    other = scratch_of("b again" if again else "b", b_size)
    round_to_fp16(other, b, b_size, operand.scale)
    return operand, other


def scratch_of(which: str, n: int) -> Operand:
    small = device.scratch(f"fp16 scale of {which}", (2 + amaxes(),), FP32)
    return Operand(device.scratch(f"fp16 {which}", (n,), np.float16), small[:2], small[2:])


def amaxes() -> int:
    """How many blocks a kernel has at most: their amaxes need room."""
    return MAX_AMAXES * device.multiprocessors


def round_to_fp16(out: Operand, inp, n: int, a_scale=None) -> None:
    """Sets out from the first n numbers of inp, fp32. a_scale: that of the product's operand a, if this is b."""
    block = cu.block(256)
    blocks = min(ceil_div(n, cu.floats * block), amaxes())
    cu.launch("fp16_amax_kernel", (blocks,), (block,), (out.block_amax, inp, n))
    args = out.numbers.view(np.uint16), out.scale, a_scale, out.block_amax, blocks, inp, n
    cu.launch("fp16_round_kernel", (blocks,), (block,), args)


def scratch_bytes(a: int, b: int, again: int) -> dict[str, int]:
    """The scratch for products: purpose, bytes. a, b, again: how many numbers the largest operand a has, the largest b,
    and the largest b beside an a that is there again."""
    sizes = {"a": a, "b": b, "b again": again}
    small = {f"fp16 scale of {which}": 4 * (2 + amaxes()) for which, n in sizes.items() if n}
    return small | {f"fp16 {which}": 2 * n for which, n in sizes.items()}


def operand_out(size, a) -> dict:
    return {"out": Operand(*(device.empty((n,), t) for n, t in ((size.n, np.float16), (2, FP32), (amaxes(), FP32))))}


describe(round_to_fp16, "n=4096", "inp* a_scale*: n", operand_out, hard="n=40003", precision="fp32")

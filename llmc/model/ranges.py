"""Ranges of a flat buffer: where parameters lie in it, how lists of ranges overlap, and how ranks share them out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import device
from device import ceil_div
from kernels.exchange import Range
from llmc.model.tensors import Config, layout


def length(ranges: list[Range]) -> int:
    return sum(end - start for start, end in ranges)


def overlaps(ranges: list[Range], others: list[Range]) -> list[Range]:
    """The overlaps of ranges with others. The ranges do not overlap one another, nor do the others."""
    both = [(max(a, c), min(b, d)) for a, b in ranges for c, d in others]
    return [(start, end) for start, end in both if start < end]


def without(ranges: list[Range], others: list[Range]) -> list[Range]:
    """The parts of ranges that do not overlap with others."""
    for start, end in others:
        parts = [part for a, b in ranges for part in ((a, min(b, start)), (max(a, end), b))]
        ranges = [(a, b) for a, b in parts if a < b]
    return ranges


# Where something lies in a flat buffer


@cache
def parameter_ranges(config: Config) -> list[Range]:
    """The range of each parameter in the flat buffers, of each layer by itself."""
    starts, _ = layout(config.parameters(), config.sizes(), align=1)
    found = []
    for name, symbols in config.parameters():
        start, shape = starts[name]
        layers = shape[0] if symbols[0] == "L" else 1
        length = math.prod(shape) // layers
        found += [(start + i * length, start + (i + 1) * length) for i in range(layers)]
    return found


def parts_in(flat, addresses: list[Range]) -> list[Range]:
    """The ranges of addresses that lie in a flat buffer, as ranges of this buffer."""
    base, size = device.address(flat), flat.itemsize
    return [((a - base) // size, (b - base) // size) for a, b in addresses if base <= a < base + flat.nbytes]


def range_in(tensor, flat) -> Range:
    """The range of a tensor in a flat buffer."""
    start = (device.address(tensor) - device.address(flat)) // flat.itemsize
    return start, start + tensor.size


def in_words(one: Range, flat) -> Range:
    """A range of a flat buffer in words of 4 bytes. With bf16 numbers it may then include a neighbour at either end, of
    the same shard. This neighbour may be copied before it is updated. That does no harm, because it is copied again
    with its own range before anything reads it."""
    return one[0] * flat.itemsize // 4, ceil_div(one[1] * flat.itemsize, 4)


# Each of N ranks adds up its share of some ranges. What another rank sends for this comes into a slot of its own, in
# which one share lies after another.


def share_of(one: Range, r: int, N: int) -> Range:
    """The r-th of N shares of a range. Shares are equal, in units of four floats, except for the rest at the end."""
    start, end = one
    vectors = ceil_div(end - start, 4)
    return min(end, start + 4 * (vectors * r // N)), min(end, start + 4 * (vectors * (r + 1) // N))


def share_length(one: Range, N: int) -> int:
    """The length of the longest share."""
    return 4 * ceil_div(one[1] - one[0], 4 * N)


def shares(ranges: list[Range], r: int, N: int) -> Iterator[tuple[Range, int]]:
    """Rank r's share of each range, and the place of this share in a slot."""
    place = 0
    for one in ranges:
        share = share_of(one, r, N)
        if share[0] < share[1]:
            yield share, place
        place += share_length(one, N)


def rounds(ranges: list[Range], slot: int, N: int) -> Iterator[list[Range]]:
    """Cuts ranges into lists of ranges, one for each round in which a rank's share fits into a slot of `slot` floats, a
    multiple of 4."""
    taken, left = [], slot
    for start, end in ranges:
        while start < end:
            one = start, min(end, start + left * N)
            taken.append(one)
            left, start = left - share_length(one, N), one[1]
            if left == 0:
                yield taken
                taken, left = [], slot
    if taken:
        yield taken

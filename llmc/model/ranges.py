"""Lists of ranges of a flat buffer."""

from __future__ import annotations

from kernels.exchange import Range


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

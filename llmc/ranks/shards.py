"""Shards: the part of the flat buffers that belongs to each rank. With -z a rank updates only its own."""

import device
from device import ceil_div
from llmc.model.ranges import Range, overlaps
from llmc.ranks import ranks


def shard_length(n: int) -> int:
    """How many of n numbers a rank's shard has: a multiple of 4, in bf16 of 8, so that each shard of the parameters
    begins at a multiple of 16 bytes. The last ranks may have fewer."""
    return device.width() * ceil_div(n, device.width() * ranks.size())


def shards_of(n: int) -> list[Range]:
    """The shard of each rank."""
    length = shard_length(n)
    return [(min(n, r * length), min(n, (r + 1) * length)) for r in range(ranks.size())]


def by_owner(ranges: list[Range], shards: list[Range]) -> list[tuple[int, Range]]:
    """The parts of ranges that are in some shards, each with the rank whose shard it is in."""
    return [(r, part) for r, shard in enumerate(shards) for part in overlaps(ranges, [shard])]

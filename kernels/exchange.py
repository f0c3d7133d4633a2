"""Sums over flat buffers, rows of a table that several GPUs hold, and a checksum: the launchers of exchange.cu."""

import device
from device import ceil_div
from kernels.encoder import random_batch
from kernels.launches import describe

import numpy as np

cu = device.source(__file__)

Range = tuple[int, int]  # of a flat buffer: start, end


def sum_buffers(
    to, sources, ranges: list[Range], blocks: int, share: int = 0, shares: int = 1,
    own: int = 0, places: list[int] | None = None,
) -> None:  # fmt: skip
    """Sets ranges of some flat buffers, fp32, to the sum of the same ranges of other buffers, which are added one after
    another. to, sources: the buffers' addresses, uint64 (n,); a buffer may be in both. The call does share number
    `share` of `shares` equal shares of the work, with `blocks` thread blocks. places: where each range begins in all
    sources except the own-th, if not at the same place as in `to`."""
    width = cu.width
    lengths = [ceil_div(end - start, width) for start, end in ranges]
    shifts = [place - start for place, (start, _) in zip(places or [start for start, _ in ranges], ranges, strict=True)]
    pieces = tuple(number for i, one in enumerate(ranges) for number in (sum(lengths[:i]), *one, shifts[i]))
    starts = [start for start, _ in ranges] + (places or [])
    aligned = all(start % 4 == 0 for start in starts) and all((end - start) % width == 0 for start, end in ranges)
    work = device.constant(pieces, np.int64), len(ranges), share, shares, int(aligned)
    cu.launch("sum_kernel", (blocks,), (512,), (to, to.size, sources, sources.size, own, *work))


def gather_rows(buffers, own: int, length: int, start: int, inp, order, count, N: int, C: int) -> None:
    """Copies the rows of a table (V, C) that a batch needs to the own-th of some flat buffers, of the type `floatX`.
    Each buffer has room for the whole table, from its number `start` on. But buffer r is valid only in its r-th
    `length` numbers, so each number comes from the buffer in which it is valid. buffers: their addresses, uint64. inp,
    order, count (N) int32: tokens, and sort_by_token of them."""
    rows = 8  # of a block
    cu.launch(
        "gather_rows_kernel", (ceil_div(N, rows),), (cu.warp_size, rows),
        (buffers, own, length, start, inp, order, count, N, C)
    )


def checksum(buffer) -> str:
    """A checksum of all bits of a flat buffer, fp32 or bf16: 16 hexadecimal digits."""
    total = device.zeros((1,), np.uint64)
    words = buffer.view(np.uint32) if buffer.nbytes % 4 == 0 else buffer.astype(np.uint32)
    cu.launch("checksum_kernel", (512,), (cu.block(128),), (total, words, words.size))
    return f"{int(device.to_host(total)[0]):016x}"


def addresses(*arrays):
    return device.asarray(np.array([device.address(x) for x in arrays], np.uint64))


def sum_bytes(a) -> int:
    pieces = device.to_host(a.pieces).reshape(-1, 4)
    return 4 * (a.num_to + a.num_from) * int((pieces[:, 2] - pieces[:, 1]).sum()) // a.shares


def gather_bytes(a) -> int:
    tokens = np.unique(device.to_host(a.inp)).astype(np.int64)
    places = a.start + a.C * tokens[:, None] + np.arange(a.C)
    return 2 * int((places // a.length != a.own).sum()) * device.floatX.itemsize  # of numbers that others have


describe(sum_buffers, "N=3 n=1000 blocks=2", "out*: n; parts*: N,n",
         lambda size, a: {"to": addresses(a.out), "sources": addresses(*a.parts), "ranges": [(0, size.n)]},
         moved={"sum": sum_bytes})
describe(gather_rows, "own=0 B=1 T=16 V=50 C=128", "mine other: V,C",
         lambda size, a: random_batch(size, a) | {
             "buffers": addresses(a.mine, a.other), "length": 4 * ceil_div(size.V * size.C, 8), "start": 0,
             "N": size.B * size.T},
         needs="own < 2", moved={"gather_rows": gather_bytes})
describe(checksum, "n=4096", "buffer*: n")

"""How each rank's gradients become the sum over all ranks, and parameters that one rank updates become everyone's.

A step's gradients are exchanged in its last batch. Without -z each layer's are summed on all ranks as soon as they are
complete, beside the rest of backward (`reduce_gradients`), and AdamW is the same everywhere. With -z a rank only gets
the sums, and only updates the parameters, of its own shard of the flat buffers. In a bitwise run every batch is summed
by itself, in the order that one GPU would follow (`add_batch`).
"""

import math

from llmc import collectives, device, ranks  # first: device sets what NumPy must find in the environment

import numpy as np  # isort: skip

from llmc.device import ceil_div
from llmc.model import Model
from llmc.tensors import layout

cu = device.source(__file__)

# Layer 0, and tensors outside of layers: their gradients are complete only when backward is done. adamw_update sums
# them over the ranks, while it updates the others.
LATE = (0, "wte", "wpe", "lnfw", "lnfb")

Range = tuple[int, int]  # of a flat buffer: start, end


def add_in_order(sums, own, parts, rank: int, N: int, n: int) -> None:
    """sums (n) += parts[r] for each rank r from 0 to N - 1, one after another, for parts (N, n). Of this rank own (n)
    is added instead, and its row of parts is not read. parts may be None where N is 1."""
    block = 256
    cu.add_in_order_kernel((ceil_div(n, 4 * block),), (block,), (sums, own, parts, rank, N, n))


def checksum(model: Model) -> str:
    """16 hexadecimal digits that tell a model's parameters from others, by all their bits."""
    total = device.zeros((1,), np.uint64)
    words = model.params_memory.view(np.uint32)
    cu.checksum_kernel((512,), (cu.block(128),), (total, words, words.size))
    return f"{int(device.to_host(total)[0]):016x}"


def ranges_of(model: Model, *parts: int | str) -> list[Range]:
    """Where in the flat buffers parameters lie: all of a layer, by its number, or one outside of layers, by its name.
    Names that the model does not have are left out."""
    starts, _ = layout(model.config.parameters(), model.config.sizes(), align=1)
    found = []
    for part in parts:
        for name, symbols in model.config.parameters():
            start, shape = starts[name]
            if name == part:
                found.append((start, start + math.prod(shape)))
            elif symbols[0] == "L" and isinstance(part, int):
                length = math.prod(shape[1:])
                found.append((start + part * length, start + (part + 1) * length))
    return found


def overlaps(ranges: list[Range], others: list[Range]) -> list[Range]:
    """What ranges have in common with others, neither of which overlap among themselves."""
    both = [(max(a, c), min(b, d)) for a, b in ranges for c, d in others]
    return [(start, end) for start, end in both if start < end]


def without(ranges: list[Range], others: list[Range]) -> list[Range]:
    """What ranges do not have in common with others."""
    for start, end in others:
        parts = [part for a, b in ranges for part in ((a, min(b, start)), (max(a, end), b))]
        ranges = [(a, b) for a, b in parts if a < b]
    return ranges


def reduce_gradients(model: Model, last: bool, part: int | str) -> None:
    """Where this is the step's last batch, starts summing gradients over all ranks, beside what follows: those of a
    layer, by its number, or of a tensor outside of layers, by its name. They must be complete. Those of LATE are left
    to adamw_update."""
    if last and not model.bitwise and part not in LATE:
        reduce_ranges(model, ranges_of(model, part))


def reduce_ranges(model: Model, ranges: list[Range]) -> None:
    """Starts summing gradients over all ranks. With -z only the owner of each shard gets its sums, and the gradients of
    the others become anything."""
    grads = model.grads_memory
    if model.sharded:
        owned = [(r, one) for r, shard in enumerate(model.shards) for one in overlaps(ranges, [shard])]
        collectives.reduce([(grads[start:end], r) for r, (start, end) in owned])
    elif ranks.size() > 1:
        collectives.all_reduce([grads[start:end] for start, end in ranges])


def add_batch(model: Model) -> None:
    """In a bitwise run, the end of a batch's backward: model.sums, this rank's shard, += the gradients of each rank's
    batch, in the order of the ranks."""
    if not model.bitwise:
        return
    (start, end), grads, N = model.shards[ranks.rank()], model.grads_memory, ranks.size()
    length = end - start
    parts = model.received[: N * length].reshape(N, length) if N > 1 else None
    others = [r for r in range(N) if r != ranks.rank()]
    sent = [(grads[slice(*model.shards[r])], r) for r in others if model.shards[r][0] < model.shards[r][1]]
    collectives.exchange(sent, [(parts[r], r) for r in others] if length else [])
    device.join_communication()
    if length:
        add_in_order(model.sums, grads[start:end], parts, ranks.rank(), N, length)


def gather_sums(model: Model) -> None:
    """Sets all gradients, on each rank, to the sums of a bitwise run's batches, which start again from 0."""
    start, end = model.shards[ranks.rank()]
    device.copy(model.grads_memory[start:end], model.sums[: end - start])
    device.fill_zero(model.sums)
    gather(model, model.grads_memory)
    device.join_communication()


def gather(model: Model, flat) -> None:
    """Starts making a flat buffer whole on each rank, from each one's shard."""
    collectives.broadcast([(flat[start:end], r) for r, (start, end) in enumerate(model.shards) if start < end])

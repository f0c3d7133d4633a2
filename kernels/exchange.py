"""How each rank's gradients become the sum over all ranks, and parameters that one rank updates become everyone's.

A step's gradients are exchanged in its last batch: most of them beside the rest of backward (`reduce_gradients`), those
that are complete only at its end by AdamW's update (`sum_late`). Without -z every rank gets all sums and makes the same
update. With -z a rank gets the sums of its own shard of the flat buffers and updates those parameters. The others take
them from it, most of them beside the next step's forward pass (`gather_beside_forward`). In a bitwise run every
batch is summed by itself, in the order that one GPU would follow (`add_batch`).

Where GPUs have one memory (model.of_ranks), copies and kernels of this file do all that. They take less from what is
computed beside them than NCCL's kernels do. Elsewhere llmc/collectives.py does it, as everywhere the norms' few numbers
(kernels/reduce.py) and what checkpoints need.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache

from llmc import collectives, device, ranks  # first: device sets what NumPy must find in the environment

import numpy as np  # isort: skip

from kernels.encoder import add_sparse, encoder_backward, encoder_backward_sparse
from llmc.device import ceil_div
from llmc.model import Model
from llmc.tensors import Config, layout

cu = device.source(__file__)

BLOCKS = 64  # of sum_kernel where it loads from other GPUs, or stores there; on four H200s 32 take as long, 132 longer
ATTENTION = "qkvw", "attprojw"  # whose gradients are complete at the end of a layer's backward, its MLP's before
Range = tuple[int, int]  # of a flat buffer: start, end


def sum_buffers(
    to, sources, ranges: list[Range], blocks: int, share: int = 0, shares: int = 1,
    own: int = 0, places: list[int] | None = None,
) -> None:  # fmt: skip
    """Sets ranges of some flat buffers, fp32, to the sum of others, which are added one after another. to, sources:
    their addresses, uint64 (n,); a buffer may be in both. The call does one of so many equal shares of the work, with
    so many thread blocks. places: where each range begins in all of sources but the own-th, if elsewhere than in
    `to`."""
    lengths = [ceil_div(end - start, 4) for start, end in ranges]
    shifts = [place - start for place, (start, _) in zip(places or [start for start, _ in ranges], ranges, strict=True)]
    pieces = tuple(number for i, one in enumerate(ranges) for number in (sum(lengths[:i]), *one, shifts[i]))
    aligned = all(number % 4 == 0 for one in ranges for number in one)
    work = device.constant(pieces, np.int64), len(ranges), share, shares, int(aligned)
    cu.sum_kernel((blocks,), (512,), (to, to.size, sources, sources.size, own, *work))


def barrier(words: list, rank: int) -> None:
    """Waits on the device until it has been called on all ranks; what each wrote before is then there for all. words:
    each rank's words, uint32 (ranks,), of which word r is for what rank r tells it; all are 0 before and after.

    Of two ranks the lower tells the higher, which resets that word and answers; then the lower resets its own. So no
    word is set anew before it has been reset, however often this is called, or replayed as a part of a graph."""
    lower, higher = range(rank), range(rank + 1, len(words))

    def tell(others: range) -> list:
        return [("write", words[r][rank : rank + 1], 1) for r in others]

    def hear(others: range) -> list:
        own = [words[rank][r : r + 1] for r in others]
        return [("wait", word, 1) for word in own] + [("write", word, 0) for word in own]

    device.memory_operations(tell(higher) + hear(lower) + tell(lower) + hear(higher))


def gather_rows(buffers, rank: int, length: int, start: int, inp, order, count, N: int, C: int) -> None:
    """Copies the rows of a table (V, C) that a batch takes from the ranks to which they belong. The table begins at
    float `start` of flat buffers, fp32, whose addresses are in buffers, uint64 (ranks,); of theirs rank r has the r-th
    `length` floats. inp, order, count (N) int32: tokens, and what sort_by_token makes of them."""
    rows = 8  # of a block
    cu.gather_rows_kernel(
        (ceil_div(N, rows),), (cu.warp_size, rows), (buffers, rank, length, start, inp, order, count, N, C)
    )


def checksum(model: Model) -> str:
    """16 hexadecimal digits that tell a model's parameters from others, by all their bits."""
    total = device.zeros((1,), np.uint64)
    words = model.params_memory.view(np.uint32)
    cu.checksum_kernel((512,), (cu.block(128),), (total, words, words.size))
    return f"{int(device.to_host(total)[0]):016x}"


@cache
def parameter_ranges(config: Config) -> list[tuple[str, int | None, Range]]:
    """Where in the flat buffers each parameter lies, with its name; layer by layer, by their numbers, or None for what
    is outside of layers."""
    starts, _ = layout(config.parameters(), config.sizes(), align=1)
    found = []
    for name, symbols in config.parameters():
        start, shape = starts[name]
        layers = range(shape[0]) if symbols[0] == "L" else [None]
        length = math.prod(shape) // len(layers)
        found += [(name, l, (start + i * length, start + (i + 1) * length)) for i, l in enumerate(layers)]
    return found


def ranges_of(model: Model, wanted: Callable[[str, int | None], bool]) -> list[Range]:
    """Where those parameters lie for which wanted(name, layer) holds."""
    return [one for name, l, one in parameter_ranges(model.config) if wanted(name, l)]


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


def share_of(one: Range, r: int, N: int) -> Range:
    """The r-th of N shares of a range: equal numbers of four floats, but for what is left over."""
    start, end = one
    vectors = ceil_div(end - start, 4)
    return min(end, start + 4 * (vectors * r // N)), min(end, start + 4 * (vectors * (r + 1) // N))


def share_length(one: Range, N: int) -> int:
    """The longest of the shares."""
    return 4 * ceil_div(one[1] - one[0], 4 * N)


def embedding(model: Model) -> list[Range]:
    """Where the token embedding lies."""
    return ranges_of(model, lambda name, _: name == "wte")


def late(model: Model) -> list[Range]:
    """Where sums are lacking when backward is done (`sum_late`): in the attention of layer 0, in what backward adds to
    (model.added_to: vectors, wpe), which is short and goes together then, and in the token embedding; of the latter,
    ranks that have one memory lack only rows."""
    matrices = ranges_of(model, lambda name, l: name == "wte" or l == 0 and name in ATTENTION)
    return without(matrices, model.added_to) + model.added_to


def reduce_gradients(model: Model, last: bool, part: int | str) -> None:
    """Where this is the step's last batch, starts summing gradients over all ranks, beside what follows. part is a
    matrix outside of layers, by its name; the embedding's may still lack the rows of this batch. Or it is a layer l, by
    its number, once backward is through its MLP: then the gradients of that MLP are summed, and those of layer l + 1's
    attention. What is `late` waits for the end of backward.

    It is called where weights' gradients are computed, in a block of `device.beside`, and waits for these alone."""
    def complete(name: str, l: int | None) -> bool:
        if l is None or isinstance(part, str):
            return name == part
        return l == part + (name in ATTENTION)

    if last and not model.bitwise:
        ranges = ranges_of(model, complete)
        if model.of_ranks:
            copy_and_sum(model, without(ranges, without(late(model), embedding(model))))
        else:
            reduce_ranges(model, without(ranges, late(model)))


def copy_and_sum(model: Model, ranges: list[Range]) -> None:
    """Starts summing gradients over ranks that have one memory, by copies: a GPU's copy engines make them, and leave
    its multiprocessors to the matmuls beside.

    Each rank is sent its share of the others' gradients, adds them up, and sends the sums to all; with -z only to those
    whose shard they are in. received has one room for each rank; a room holds one share of one bucket."""
    grads, received, N, rank = model.of_ranks.grads, model.of_ranks.received, ranks.size(), ranks.rank()
    others, room = [(rank + i) % N for i in range(1, N)], received.arrays[rank].size // N
    rooms = [device.address(received.arrays[rank]) + 4 * r * room for r in range(N)]
    rooms[rank] = device.address(grads.arrays[rank])
    sources = device.constant(tuple(rooms), np.uint64)

    def shares(bucket: list[Range], r: int) -> Iterator[tuple[Range, int]]:
        """Of each range rank r's share, and its place in a room."""
        place = 0
        for one in bucket:
            share = share_of(one, r, N)
            if share[0] < share[1]:
                yield share, place
            place += share_length(one, N)

    def work(_) -> None:
        for bucket in buckets(ranges, room, N):
            for other in others:
                for (start, end), place in shares(bucket, other):
                    there = received.arrays[other][rank * room + place :]
                    device.copy(there[: end - start], grads.arrays[rank][start:end])
            meet(model)
            sums, places = [list(each) for each in zip(*shares(bucket, rank), strict=True)] or ([], [])
            if sums:
                to = grads.addresses[rank : rank + 1]
                sum_buffers(to, sources, sums, device.multiprocessors(), own=rank, places=places)
            for other in others:
                for start, end in overlaps(sums, [model.shards[other]]) if model.sharded else sums:
                    device.copy(grads.arrays[other][start:end], grads.arrays[rank][start:end])
            meet(model)

    if ranges:
        device.communicate(work, last=True)


def buckets(ranges: list[Range], room: int, N: int) -> Iterator[list[Range]]:
    """Cuts ranges into buckets; of each, a rank's share is at most `room` floats, a multiple of 4."""
    bucket, left = [], room
    for start, end in ranges:
        while start < end:
            one = start, min(end, start + left * N)
            bucket.append(one)
            left, start = left - share_length(one, N), one[1]
            if left == 0:
                yield bucket
                bucket, left = [], room
    if bucket:
        yield bucket


def meet(model: Model) -> None:
    """A barrier of all ranks, in the work of device.communicate."""
    barrier(model.of_ranks.barrier_words.arrays, ranks.rank())


def wait_for_ranks(model: Model) -> None:
    """Where ranks have one memory, what follows in device.communicate is done once all have come to this point."""
    if model.of_ranks:
        device.communicate(lambda _: meet(model))


def reduce_ranges(model: Model, ranges: list[Range]) -> None:
    """Starts summing gradients over all ranks, which have no one memory. With -z only the owner of each shard gets its
    sums, and the gradients of the others become anything."""
    grads = model.grads_memory
    if model.sharded:
        owned = [(r, one) for r, shard in enumerate(model.shards) for one in overlaps(ranges, [shard])]
        collectives.reduce([(grads[start:end], r) for r, (start, end) in owned])
    else:
        collectives.all_reduce([grads[start:end] for start, end in ranges])


def embedding_backward(model: Model, dout, B: int, T: int, C: int, last: bool) -> None:
    """encoder_backward for model.batch: adds to the gradients of wte and, if there is one, wpe. (B, T) are the model's.

    In the last batch of a step, ranks that have one memory add nothing to wte's yet, a third of all in GPT-2 124M. They
    have summed it but for the rows of this batch (`reduce_gradients`), which they leave for `sum_late`."""
    grads, of_ranks, rank = model.grads, model.of_ranks, ranks.rank()
    wpe, batch = getattr(grads, "wpe", None), (model.inputs, model.order, model.count, B, T, C)
    if last and of_ranks and not model.bitwise:
        values, indices = of_ranks.wte_values.arrays[rank], of_ranks.wte_indices.arrays[rank]
        encoder_backward_sparse(values, indices, wpe, dout, *batch)
    else:
        encoder_backward(grads.wte, wpe, dout, *batch)


def sum_late(model: Model, ranges: list[Range]) -> None:
    """Starts summing gradients of `late` over all ranks, once all have come to this point.

    Ranks that have one memory each add up their share of the numbers, which they load from all GPUs, and store the sums
    there; with -z those of matrices only where their shard is. Of the embedding each whose shard has a part of it adds
    the rows of all ranks, which it loads from their GPUs, in the order of the ranks."""
    if not model.of_ranks:
        reduce_ranges(model, ranges)
        return
    of_ranks, N, rank = model.of_ranks, ranks.size(), ranks.rank()
    addresses, others = of_ranks.grads.addresses, without(ranges, embedding(model))
    vectors = overlaps(others, model.added_to)
    matrices = without(others, vectors)

    def work(_) -> None:
        meet(model)
        whole = vectors if model.sharded else others
        if whole:
            sum_buffers(addresses, addresses, whole, BLOCKS, rank, N)
        for r, shard in enumerate(model.shards) if model.sharded else []:
            owned = overlaps(matrices, [shard])
            if owned:
                sum_buffers(addresses[r : r + 1], addresses, owned, BLOCKS, rank, N)
        if overlaps(overlaps(ranges, embedding(model)), [model.shard]):
            for values, indices in zip(of_ranks.wte_values.arrays, of_ranks.wte_indices.arrays, strict=True):
                add_sparse(model.grads.wte, values, indices, model.B * model.T, model.config.channels)
        meet(model)  # from here on a rank may change what the others have read

    if ranges:
        device.communicate(work)


def add_batch(model: Model) -> None:
    """In a bitwise run, the end of a batch's backward: model.sums, this rank's shard, += the gradients of each rank's
    batch, in the order of the ranks."""
    if not model.bitwise:
        return
    (start, end), N, rank = model.shards[ranks.rank()], ranks.size(), ranks.rank()
    length, grads = end - start, model.grads_memory
    addresses = [device.address(grads)] * N
    if model.of_ranks:
        addresses = [device.address(array) for array in model.of_ranks.grads.arrays]
        wait_for_ranks(model)
    elif N > 1:
        parts = model.received[: N * length].reshape(N, length)
        others = [r for r in range(N) if r != rank]
        sent = [(grads[slice(*model.shards[r])], r) for r in others if model.shards[r][0] < model.shards[r][1]]
        collectives.exchange(sent, [(parts[r], r) for r in others] if length else [])
        for r in others:
            addresses[r] = device.address(parts) + 4 * (r * length - start)
    device.join_communication()
    if length:
        sums = device.address(model.sums) - 4 * start  # as if it were a whole flat buffer
        sum_buffers(
            device.constant((sums,), np.uint64), device.constant((sums, *addresses), np.uint64), [(start, end)],
            4 * device.multiprocessors(),
        )  # fmt: skip
    wait_for_ranks(model)  # which read this rank's gradients
    device.join_communication()


def gather_sums(model: Model) -> None:
    """Sets all gradients, on each rank, to the sums of a bitwise run's batches, which start again from 0."""
    start, end = model.shards[ranks.rank()]
    device.copy(model.grads_memory[start:end], model.sums[: end - start])
    device.fill_zero(model.sums)
    wait_for_ranks(model)
    gather(model, "grads", [(0, model.grads_memory.size)])
    wait_for_ranks(model)  # which read this rank's
    device.join_communication()


def gather_parameters(model: Model) -> None:
    """With -z, where each rank has updated its shard, gives every rank all parameters. All ranks must call it before
    anything reads parameters but a training step. That gathers them in the order in which forward takes them
    (`gather_first`, `gather_beside_forward`)."""
    if model.sharded:
        wait_for_ranks(model)
        gather(model, "params", [(0, model.params_memory.size)])
        device.join_communication()


def gather_first(model: Model, ranges: list[Range]) -> None:
    """Starts giving every rank the parameters with which forward begins (ranges: `taken_first`), once each has updated
    those in its shard. Other parameters may be updated meanwhile."""
    wait_for_ranks(model)
    if not model.of_ranks:
        gather(model, "params", ranges)
        return
    addresses, rank = model.of_ranks.params.addresses, ranks.rank()

    def work(_) -> None:
        for r, shard in enumerate(model.shards):
            owned = overlaps(ranges, [shard])
            if owned and r != rank:
                sum_buffers(addresses[rank : rank + 1], addresses[r : r + 1], owned, BLOCKS)

    device.communicate(work)


def gather_beside_forward(model: Model) -> None:
    """In front of a step's first forward pass: with -z the parameters that `gather_first` has not brought come beside
    it, from layer 0 on, and each layer waits for its own (`wait_for_parameters`). Of the embedding, ranks of one memory
    load the rows of model.batch here. Also lets all ranks know whether a gradient of the step before has overflowed
    (norm[3] of `adamw`), which its parameter's owner alone has seen."""
    if not model.sharded:
        return
    wait_for_ranks(model)
    of_ranks, rank = model.of_ranks, ranks.rank()
    if of_ranks:
        length, batch = model.shards[0][1], (model.inputs, model.order, model.count)
        rows = embedding(model)[0][0], *batch, model.B * model.T, model.config.channels
        device.communicate(lambda _: gather_rows(of_ranks.params.addresses, rank, length, *rows))
    model.coming["first"] = model.coming[0] = device.communicated()
    if not of_ranks:
        collectives.all_reduce([model.norm[3:]])
    elif rank == 0:  # for all: none reads or writes norm[3] before AdamW, in front of which they meet again
        norms = of_ranks.norm.addresses
        device.communicate(lambda _: sum_buffers(norms, norms, [(3, 4)], 1))


def wait_for_parameters(model: Model, part: int | str | None) -> None:
    """What follows in forward takes the matrices of layer `part`, or if that is None those outside of layers, which may
    be on their way from the ranks that have updated them. The encoder waits for "first", its rows of the embedding. All
    else with which forward begins (`taken_first`), layer 0 too, came at the end of the last update. At layer 0 all
    others set out: by then the encoder has read its rows, which come once more with the whole embedding."""
    if part in model.coming:
        device.join_communication(model.coming.pop(part))
        if part == 0:
            for other in (*range(1, model.config.num_layers), None):
                wanted = ranges_of(model, lambda _, l, other=other: l == other)
                gather(model, "params", without(wanted, taken_first(model)))
                model.coming[other] = device.communicated()


def taken_first(model: Model) -> list[Range]:
    """Where the parameters lie that are gathered before forward begins: all vectors, wpe, and the matrices of layer 0;
    and the token embedding, but for ranks of one memory."""
    vectors = without(model.added_to, embedding(model))
    matrices = ranges_of(model, lambda name, l: l == 0 or name == "wte" and not model.of_ranks)
    return without(matrices, vectors) + vectors


def gather(model: Model, name: str, ranges: list[Range]) -> None:
    """Starts setting ranges of a flat buffer, "params" or "grads", on each rank to what they are on the ranks whose
    shards they are in. Ranks of one memory have to wait for one another first (`wait_for_ranks`)."""
    flat, rank, N = getattr(model, f"{name}_memory"), ranks.rank(), ranks.size()
    owned = [(r, one) for r, shard in enumerate(model.shards) for one in overlaps(ranges, [shard])]
    if not model.of_ranks:
        collectives.broadcast([(flat[start:end], r) for r, (start, end) in owned])
        return

    def work(_) -> None:
        arrays = getattr(model.of_ranks, name).arrays
        for r, (start, end) in sorted(owned, key=lambda one: (one[0] - rank) % N):  # each from another one at a time
            if r != rank:
                device.copy(flat[start:end], arrays[r][start:end])

    device.communicate(work)

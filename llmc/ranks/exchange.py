"""How ranks exchange gradients and parameters: gradients are summed over all ranks, and with -z each rank sends the
parameters that it has updated to the others.

One object per run, Exchange, owns all that several ranks need. It knows no tensor by its name. From a step's recorded
launches (device/recording.py) it learns when each gradient is complete, so that its sum can begin, and which launch
reads a parameter first, so that this launch waits for it.

Gradients are summed in a step's last batch. They go into buckets in the order in which they are complete, and each
bucket is summed beside the rest of backward. AdamW's update sums the gradients that are complete only at backward's end
(`sum_late`). Without -z every rank gets all sums and makes the same update. With -z a rank gets the sums of its own
shard of the flat buffers and updates the parameters of this shard. The other ranks then get these: the parameters that
forward reads first at the end of the update (`gather_first`), the rest beside the next step's forward pass. In a
bitwise run every batch is summed by itself, in the order that one GPU would follow (`add_batch`).

With `--offload` (llmc/model/offload.py) most updates run beside the next step's forward pass, too. On a single rank and
without -z, each comes before the first launch that needs it; with -z, each comes before its gather.

GPUs with peer access do all this by copies, and by the kernels of kernels/exchange.cu, which slow the step down less
than NCCL's kernels do. Other devices use llmc/ranks/collectives.py. All devices use it for the few numbers of the norm
and for checkpoints.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import count

import device
from device import Hook, Launch, ceil_div
from kernels.encoder import add_sparse, encoder_backward_sparse
from kernels.exchange import checksum, gather_rows, sum_buffers
from llmc.model.adamw import AdamW
from llmc.model.batch import Batch
from llmc.model.model import Model
from llmc.model.offload import Piece
from llmc.model.ranges import Range, length, overlaps, without
from llmc.model.tensors import Config, layout, num_parameters
from llmc.model.weights import load_weights
from llmc.ranks import collectives, ranks

import numpy as np

# Of sum_kernel where it loads from other GPUs, or stores there; on four H200s 32 take as long, 132 longer.
BLOCKS = 64
SMALLEST_BUCKET = 1 << 22  # floats: fewer are not worth an exchange of their own
LARGEST_BUCKET = 1 << 23   # floats that peers sum at a time


def shard_length(n: int) -> int:
    """How many of n numbers a rank's shard has: a multiple of 4, in bf16 of 8, so that each shard of the parameters
    begins at a multiple of 16 bytes. The last ranks may have fewer."""
    return device.width() * ceil_div(n, device.width() * ranks.size())


def shards_of(n: int) -> list[Range]:
    """The range of each rank."""
    length = shard_length(n)
    return [(min(n, r * length), min(n, (r + 1) * length)) for r in range(ranks.size())]


def exchange_bytes(config: Config, B: int, T: int, bitwise: bool) -> dict[str, int]:
    """The bytes of each buffer that an Exchange allocates, by name. All hold fp32."""
    n, peers = num_parameters(config), collectives.peer_access()
    lengths = {"sums of batches": shard_length(n)} if bitwise else {}
    if peers and not bitwise:
        lengths["others' gradients"] = ranks.size() * shard_length(min(n, LARGEST_BUCKET))
        lengths["embedding's gradient"] = B * T * config.channels
    elif bitwise and ranks.size() > 1 and not peers:
        lengths["others' gradients"] = ranks.size() * shard_length(n)
    return {name: 4 * length for name, length in lengths.items()}


class Exchange:
    """The exchange of a model's gradients and parameters among all ranks. With a single rank there is nothing to
    exchange.

    sharded: a rank updates its own shard of the flat buffers. bitwise: it also has `sums`, the sums of its own shard's
    gradients over a step's batches. received is room for what other ranks send. peers: the buffers of all ranks, for
    ranks with peer access; among them the rows that a batch adds to the embedding's gradient, wte_values (B T, C) and
    wte_indices (B T,). rows: the exchange of the embedding's rows; None on a single rank.
    """

    def __init__(self, model: Model, adamw: AdamW, batch: Batch, sharded: bool = False, bitwise: bool = False):
        self.model, self.adamw, self.sharded = model, adamw, sharded
        buffers = {name: device.empty((size // 4,)) for name, size in
                   exchange_bytes(model.config, batch.B, batch.T, bitwise).items()}  # fmt: skip
        self.sums, self.received = buffers.get("sums of batches"), buffers.get("others' gradients")
        self.peers, self.plan = None, StepPlan()
        if collectives.peer_access():
            self.peers = collectives.map_memory(
                params=model.params_memory, grads=model.grads_memory, received=self.received,
                wte_values=buffers.get("embedding's gradient"),
                wte_indices=device.empty((batch.B * batch.T,), np.int32),
                barrier_words=device.zeros((ranks.size(),), np.uint32), norm=adamw.norm,
            )  # fmt: skip
        if bitwise:
            device.fill_zero(self.sums)
        self.rows = batch.rows = Rows(self, batch, adamw) if ranks.size() > 1 else None

    @property
    def bitwise(self) -> bool:
        return self.sums is not None

    @property
    def pending(self) -> list[Range]:
        """With `--offload`, the parameters that still lack the last step's update."""
        return self.adamw.offload.pending if self.adamw.offload else []

    @property
    def shards(self) -> list[Range]:
        """The range of the flat buffers that belongs to each rank."""
        return shards_of(self.model.params_memory.size)

    @property
    def shard(self) -> Range:
        """The part of the flat buffers that this rank updates."""
        return self.shards[ranks.rank()] if self.sharded else (0, self.model.params_memory.size)

    # A step

    def record(self, work: Callable[[bool, bool], None]) -> Callable[[bool, bool], None]:
        """A function that does `work`, the forward and backward pass on one batch, and the exchange that belongs to it.
        Its arguments say whether the batch is the first of a step, and whether it is the last. In a bitwise run it
        tells `work` that every batch is both. device.record says what `work` must do. All ranks must call the function
        alike."""

        def batch(first: bool, last: bool, updates: bool) -> None:
            work(first or self.bitwise, last or self.bitwise)

        recording = device.record(batch, [self.model.grads_memory], self.hooks)

        def forward_backward(first: bool, last: bool) -> None:
            updates = first and self.pending != []  # after a checkpoint, for example, nothing is pending
            planned = recording.follows_plan(first, last, updates)
            if first and not planned:
                self.gather_parameters()
            if ranks.size() > 1:
                self.rows.begin(first and planned, last)
                if first and not planned:
                    self.rows.share_overflow()
                    device.wait_comm()
            recording(first, last, updates)
            if updates:
                self.adamw.offload.pending = []
            if self.bitwise:
                self.add_batch()
            elif last and not planned:
                for ranges, _ in self.plan.buckets:
                    self.start_sum(ranges)

        return forward_backward

    def hooks(self, arguments: tuple[bool, bool, bool], launches: list[Launch]) -> list[Hook]:
        """The work that is done beside these launches of a batch: the exchange between ranks, and the updates that the
        step before has left to this one. arguments: whether the batch is the first of its step, whether it is the last,
        and whether there are such updates."""
        first, last, updates = arguments
        found: list[Hook] = []
        if updates and not self.sharded:
            found += self.hooks_of_update(launches)
        if ranks.size() == 1:
            return found
        if first and self.sharded:
            found += self.plan.gathers(self, launches, updates)
        if last and not self.bitwise:
            found += self.plan.sums(self, launches)
        ranks.check_same("the plan of the exchange", self.plan.fingerprint(), "start the same program on all machines")
        return found

    # Gradients

    def start_sum(self, ranges: list[Range]) -> None:
        """Starts summing a bucket of gradients over all ranks."""
        device.on_comm_stream(lambda _: self.sum_bucket(ranges), urgent=self.peers is None)

    def sum_bucket(self, ranges: list[Range]) -> None:
        """Sums a bucket of gradients over all ranks, in the work of device.on_comm_stream."""
        if self.peers:
            self.copy_and_sum(ranges)
        else:
            self.reduce(ranges)

    def reduce(self, ranges: list[Range]) -> None:
        """Starts summing gradients over ranks without peer access. With -z only the owner of each shard gets its sums.
        On the other ranks these gradients are then undefined."""
        grads = self.model.grads_memory
        if self.sharded:
            owned = [(r, one) for r, shard in enumerate(self.shards) for one in overlaps(ranges, [shard])]
            collectives.reduce([(grads[start:end], r) for r, (start, end) in owned])
        else:
            collectives.all_reduce([grads[start:end] for start, end in ranges])

    def copy_and_sum(self, ranges: list[Range]) -> None:
        """Sums gradients over ranks with peer access, by copies. A GPU's copy engines make these, so its
        multiprocessors are free for the matmuls that run at the same time.

        Each rank gets its share of the other ranks' gradients, adds them up, and sends the sums to all ranks; with -z
        only to the ranks that own them. received has one room for each rank. A room holds one share of one bucket."""
        grads, received, N, rank = self.peers.grads, self.peers.received, ranks.size(), ranks.rank()
        others, room = [(rank + i) % N for i in range(1, N)], received.arrays[rank].size // N
        rooms = [device.address(received.arrays[rank]) + 4 * r * room for r in range(N)]
        rooms[rank] = device.address(grads.arrays[rank])
        sources = device.constant(tuple(rooms), np.uint64)
        for bucket in buckets(ranges, room, N):
            for other in others:
                for (start, end), place in shares(bucket, other, N):
                    there = received.arrays[other][rank * room + place :]
                    device.copy(there[: end - start], grads.arrays[rank][start:end])
            self.meet()
            sums, places = [list(each) for each in zip(*shares(bucket, rank, N), strict=True)] or ([], [])
            if sums:
                to = grads.addresses[rank : rank + 1]
                sum_buffers(to, sources, sums, device.multiprocessors, own=rank, places=places)
            for other in others:
                for start, end in overlaps(sums, [self.shards[other]]) if self.sharded else sums:
                    device.copy(grads.arrays[other][start:end], grads.arrays[rank][start:end])
            self.meet()

    # AdamW's update

    def finish_sums(self, checked: list[Range]) -> None:
        """Before the norm of the gradients in the ranges `checked`: brings the sums of these that are still missing,
        and starts the others'."""
        if self.bitwise:
            self.gather_sums()
        first, missing = self.late(checked)
        self.sum_late(first)
        device.wait_comm()
        self.sum_late(missing)

    def late(self, checked: list[Range]) -> tuple[list[Range], list[Range]]:
        """The gradients that are complete only at backward's end: those that are summed before the norm, and those that
        are summed while parameters are updated."""
        late = self.plan.late if ranks.size() > 1 and not self.bitwise else []
        # With -z one rank's shard is mostly the embedding, so it has little to update before that is summed.
        first = late if self.sharded else overlaps(late, checked)
        return first, without(late, first)

    def updatable(self, checked: list[Range]) -> Iterator[list[Range]]:
        """After the norm of `checked`: yields the parameters that this rank can update next, until it has had all.

        With -z these are first the parameters that other ranks read first, and the other ranks get them while the rest
        is updated. A rank then lacks the others that it does not update, and it does not know whether another rank has
        left out a parameter. The next step brings both. Without -z a rank first updates what has its sums."""
        everything = [(0, self.model.params_memory.size)]
        if self.adamw.offload and not self.sharded:
            self.adamw.offload.pending = everything
            return
        early = self.plan.first if self.sharded else without(everything, self.late(checked)[1])
        yield early
        if self.sharded:
            self.gather_first(early)
        else:
            device.wait_comm()
        if self.adamw.offload and early:
            self.adamw.offload.pending = self.plan.later(self.rows.embedding)
            yield without(self.rows.embedding, early)
        else:
            yield without(everything, early)
        device.wait_comm()  # waits for what gather_first has started

    def hooks_of_update(self, launches: list[Launch]) -> list[Hook]:
        """With `--offload`, the hooks that update all parameters. Each comes before the first launch that reads
        one of its parameters, or that reads or writes one of their gradients."""
        params, grads, config = self.model.params_memory, self.model.grads_memory, self.model.config
        touched = [parts_in(params, one.reads) + parts_in(grads, one.reads + one.writes) for one in launches]
        first = {one: next((i for i, parts in enumerate(touched) if device.touch([one], parts)), len(launches))
                 for one in parameter_ranges(config)}  # fmt: skip
        order = sorted(first, key=lambda one: (first[one], one))
        pieces = self.adamw.pieces(self.model, order)

        def before(piece: Piece) -> int | None:
            """The first launch that needs a piece: it needs the first part, because the ranges are in that order."""
            launch = next(first[one] for one in order if one[0] <= piece[0].start < one[1])
            return launch if launch < len(launches) else None

        return [
            Hook(lambda _, i=i, piece=piece: self.adamw.pass_piece(self.model, piece, i, len(pieces)),
                      before=before(piece))
            for i, piece in enumerate(pieces)
        ]  # fmt: skip

    def lacks_sums(self, checked: list[Range]) -> bool:
        """Whether this rank has only its own shard's sums of the gradients in some ranges. Ranks with peer access sum
        the short ones for all."""
        known = without(self.model.added_to, self.rows.embedding) if self.peers else []
        return self.sharded and not self.bitwise and without(checked, known) != []

    def add_squares(self, partials) -> None:
        """Adds up partial sums over all ranks."""
        collectives.all_reduce([partials])
        device.wait_comm()

    def sum_late(self, ranges: list[Range]) -> None:
        """Starts summing gradients of `late` over all ranks, once all have come to this point.

        With peer access, each rank loads its share of the numbers from all GPUs, adds them up, and stores the sums on
        all GPUs. With -z it stores the sums of matrices only on the GPUs whose shards they are in. For the embedding,
        each rank whose shard has a part of it loads the rows of all ranks and adds them, in the order of the ranks."""
        if not ranges:
            return
        if not self.peers:
            self.reduce(ranges)
            return
        N, rank, addresses = ranks.size(), ranks.rank(), self.peers.grads.addresses
        embedding = self.rows.embedding
        others = without(ranges, embedding)
        vectors = overlaps(others, self.model.added_to)
        matrices = without(others, vectors)

        def work(_) -> None:
            self.meet()
            whole = vectors if self.sharded else others
            if whole:
                sum_buffers(addresses, addresses, whole, BLOCKS, rank, N)
            for r, shard in enumerate(self.shards) if self.sharded else []:
                owned = overlaps(matrices, [shard])
                if owned:
                    sum_buffers(addresses[r : r + 1], addresses, owned, BLOCKS, rank, N)
            if overlaps(overlaps(ranges, embedding), [self.shard]):
                self.rows.add(self.peers)
            self.meet()  # from here on a rank may change what the other ranks have read

        device.on_comm_stream(work)

    def add_batch(self) -> None:
        """In a bitwise run, the end of a batch's backward: sums, this rank's shard, += the gradients of each rank's
        batch, in the order of the ranks."""
        (start, end), N, rank = self.shards[ranks.rank()], ranks.size(), ranks.rank()
        length, grads = end - start, self.model.grads_memory
        addresses = [device.address(grads)] * N
        if self.peers:
            addresses = [device.address(array) for array in self.peers.grads.arrays]
            self.wait_for_ranks()
        elif N > 1:
            parts = self.received[: N * length].reshape(N, length)
            others = [r for r in range(N) if r != rank]
            sent = [(grads[slice(*self.shards[r])], r) for r in others if self.shards[r][0] < self.shards[r][1]]
            collectives.exchange(sent, [(parts[r], r) for r in others] if length else [])
            for r in others:
                addresses[r] = device.address(parts) + 4 * (r * length - start)
        device.wait_comm()
        if length:
            sums = device.address(self.sums) - 4 * start  # the address that a whole flat buffer would have
            sum_buffers(
                device.constant((sums,), np.uint64), device.constant((sums, *addresses), np.uint64), [(start, end)],
                4 * device.multiprocessors,
            )  # fmt: skip
        self.wait_for_ranks()  # until they have read this rank's gradients
        device.wait_comm()

    def gather_sums(self) -> None:
        """Sets all gradients, on each rank, to the sums of a bitwise run's batches, which start again from 0."""
        start, end = self.shards[ranks.rank()]
        device.copy(self.model.grads_memory[start:end], self.sums[: end - start])
        device.fill_zero(self.sums)
        self.wait_for_ranks()
        self.start_gather("grads", [(0, self.model.grads_memory.size)])
        self.wait_for_ranks()  # until they have read this rank's sums
        device.wait_comm()

    # Parameters

    def gather_parameters(self) -> None:
        """With `--offload`, first makes the pending updates. With -z, then gives every rank all parameters. All
        ranks must call it before anything reads parameters. Only a recorded step need not, because it does both by
        itself, in the order of its reads."""
        if self.pending:
            self.adamw.pass_through(self.model, self.pending)
            self.adamw.offload.pending = []
        if self.sharded:
            self.wait_for_ranks()
            self.start_gather("params", [(0, self.model.params_memory.size)])
            device.wait_comm()

    def gather_first(self, ranges: list[Range]) -> None:
        """Starts giving every rank the parameters with which forward begins (ranges: `plan.first`), once each rank has
        updated its part of them. Other parameters may be updated meanwhile."""
        self.wait_for_ranks()
        if not self.peers:
            self.start_gather("params", ranges)
            return
        addresses, rank = self.peers.params.addresses, ranks.rank()

        def work(_) -> None:
            for r, shard in enumerate(self.shards):
                owned = overlaps(ranges, [shard])
                if owned and r != rank:  # a sum of one buffer is a copy
                    words = [in_words(one, self.model.params_memory) for one in owned]
                    sum_buffers(addresses[rank : rank + 1], addresses[r : r + 1], words, BLOCKS)

        device.on_comm_stream(work)

    def update_and_gather(self, ranges: list[Range], pieces: list[tuple[int, Piece]], count: int) -> None:
        """With `--offload`, in the work of device.on_comm_stream: updates this rank's part of some ranges, and then gets
        the rest from the ranks that have updated it. pieces: of this rank's part, each with its number; there are
        `count` in all."""
        for number, piece in pieces:
            self.adamw.pass_piece(self.model, piece, number, count)
        if self.peers:
            self.meet()
        self.gather("params", ranges)

    def start_gather(self, name: str, ranges: list[Range]) -> None:
        """Starts to copy ranges of a flat buffer, "params" or "grads", from the ranks whose shards they are in to all
        ranks. Ranks with peer access must wait for one another first (`wait_for_ranks`)."""
        device.on_comm_stream(lambda _: self.gather(name, ranges))

    def gather(self, name: str, ranges: list[Range]) -> None:
        """start_gather, in the work of device.on_comm_stream."""
        flat, rank, N = getattr(self.model, f"{name}_memory"), ranks.rank(), ranks.size()
        owned = [(r, one) for r, shard in enumerate(self.shards) for one in overlaps(ranges, [shard])]
        if not self.peers:
            collectives.broadcast([(flat[start:end], r) for r, (start, end) in owned])
            return
        arrays = getattr(self.peers, name).arrays
        for r, (start, end) in sorted(owned, key=lambda one: (one[0] - rank) % N):  # each rank begins at another one
            if r != rank:
                device.copy(flat[start:end], arrays[r][start:end])

    # Ranks with peer access

    def wait_for_ranks(self) -> None:
        """With peer access: later work of device.on_comm_stream begins once all ranks have come to this point."""
        if self.peers:
            device.on_comm_stream(lambda _: self.meet())

    def meet(self) -> None:
        """A barrier of all ranks, in the work of device.on_comm_stream."""
        barrier(self.peers.barrier_words.arrays, ranks.rank())

    # Checkpoints

    def checksum(self) -> str:
        """A checksum of all bits of the model's parameters: 16 hexadecimal digits."""
        return checksum(self.model.params_memory)

    def load_checkpoint(
        self, adamw: AdamW, tensors: Mapping[str, np.ndarray] | None, moments: tuple | None
    ) -> None:  # fmt: skip
        """Gives all ranks a checkpoint that rank 0 has read: the parameters, as `read_model` gives them, and AdamW's m
        and v of all of them, (num_parameters,) each. All ranks must call it, the others with None."""
        model, first = self.model, adamw.first
        for own, values in zip((adamw.m, adamw.v), moments or (None, None), strict=True):
            for at, piece in collectives.shared(values, model.params_memory.size):
                for start, end in overlaps([(at, at + piece.size)], [adamw.shard]):
                    device.copy(own[start - first : end - first], piece[start - at : end - at])
        load_weights(model, adamw, tensors, collectives.shared)

    def whole_state(self, adamw: AdamW) -> tuple[Iterator, Iterator, Iterator]:
        """The parameters, fp32, and AdamW's m and v of all of them, for save_checkpoint: the pieces of each, on the
        host. With -z every rank must ask for all pieces, in this order."""
        if adamw.offload:
            device.synchronize()  # until all pieces are stored
        model, everything = self.model, [(0, self.model.params_memory.size)]
        shards = self.shards if self.sharded else everything

        def moment(own) -> Iterator:
            def read(start: int, piece) -> None:
                device.copy(piece, own[start - adamw.first :][: piece.size])

            return collectives.whole(read, shards)

        def read_params(start: int, piece) -> None:
            adamw.get_master(model, start, piece)

        params = collectives.whole(read_params, everything if adamw.low is None else shards)
        return params, moment(adamw.m), map(np.abs, moment(adamw.v))  # in bf16 v has signs


class Rows:
    """The rows of the embedding that a batch reads and changes. The embedding, a third of GPT-2 124M's bytes, is read
    first, and its gradient is complete last. A step would have to wait for all of it. Instead, ranks with peer access
    exchange only these rows. llmc/model/batch.py's embedding_forward and embedding_backward say where."""

    def __init__(self, exchange: Exchange, batch: Batch, adamw: AdamW):
        self.exchange, self.batch, self.norm, self.embedding = exchange, batch, adamw.norm, []
        self.comes = self.leaves = False

    def begin(self, comes: bool, last: bool) -> None:
        """Call it before a batch. comes: its rows of the embedding must still come from other ranks. last: it is the
        last of a step."""
        self.comes = comes and self.exchange.sharded
        self.leaves = last and bool(self.exchange.peers) and not self.exchange.bitwise

    def gather(self, wte, C: int) -> None:
        """In a step's first batch: copies the rows of wte (Vp,C) that the batch reads from the ranks that have updated
        them."""
        exchange, batch = self.exchange, self.batch
        self.embedding = [range_in(wte, exchange.model.params_memory)]
        if not self.comes:
            return
        exchange.wait_for_ranks()
        if exchange.peers:
            addresses, size, start = exchange.peers.params.addresses, exchange.shards[0][1], self.embedding[0][0]
            of_batch = batch.inputs, *batch.by_token, batch.B * batch.T, C
            device.on_comm_stream(lambda _: gather_rows(addresses, ranks.rank(), size, start, *of_batch))
        device.wait_comm()
        self.share_overflow()

    def share_overflow(self) -> None:
        """Tells all ranks whether a gradient of the step before has overflowed (norm[3] of `adamw`). With -z only the
        owner of its parameter has seen that. No rank reads or writes this number before AdamW, and all ranks meet again
        in front of AdamW. So one rank can sum it for all. With `--offload` the norm covers every gradient."""
        exchange = self.exchange
        if not exchange.sharded or exchange.adamw.offload:
            return
        if not exchange.peers:
            collectives.all_reduce([self.norm[3:]])
        elif ranks.rank() == 0:
            norms = exchange.peers.norm.addresses
            device.on_comm_stream(lambda _: sum_buffers(norms, norms, [(3, 4)], 1))

    def keep(self, dwpe, dout, C: int) -> None:
        """In the last batch of a step, on ranks with peer access: encoder_backward, but for the rows of this batch in
        the gradient of wte. The ranks sum the rest of it, and leave these rows for `sum_late`."""
        peers, rank, batch = self.exchange.peers, ranks.rank(), self.batch
        values, indices = peers.wte_values.arrays[rank], peers.wte_indices.arrays[rank]
        encoder_backward_sparse(values, indices, dwpe, dout, batch.inputs, *batch.by_token, batch.B, batch.T, C)

    def add(self, peers) -> None:
        """Adds the rows of all ranks' batches to the gradient of the embedding."""
        ((start, end),), model = self.embedding, self.exchange.model
        rows, C = self.batch.B * self.batch.T, model.config.channels
        for values, indices in zip(peers.wte_values.arrays, peers.wte_indices.arrays, strict=True):
            add_sparse(model.grads_memory[start:end], values, indices, rows, C)


class StepPlan:
    """What an Exchange learns from a step's launches. A bucket is a list of ranges of the flat buffers.

    first      the parameters that forward reads first, and all short ones; ranks get them at the end of the update
    gathered   the others, in the order in which forward reads them: buckets, and the first launch that reads each
    buckets    gradients in the order in which they are complete, and the launches after which each bucket is complete
    late       the gradients that are complete only at backward's end
    """

    def __init__(self):
        self.first: list[Range] = []
        self.gathered: list[tuple[list[Range], int | None]] = []
        self.buckets: list[tuple[list[Range], tuple[int, ...]]] = []
        self.late: list[Range] = []

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(vars(self)).encode()).hexdigest()[:16]

    def later(self, embedding: list[Range]) -> list[Range]:
        """With `--offload`, the ranges that are updated beside the next step. The embedding is not among them, because
        the step begins with rows of it from all ranks."""
        return [one for ranges, _ in self.gathered for one in ranges if one not in embedding]

    def gathers(self, exchange: Exchange, launches: list[Launch], updates: bool = False) -> list[Hook]:
        """Learns which parameters a step's launches read first. Returns the hooks that gather them. updates:
        with `--offload`, they also update these."""
        model, embedding = exchange.model, exchange.rows.embedding
        vectors = without(model.added_to, embedding)
        reads = [parts_in(model.params_memory, launch.reads) for launch in launches]
        readers = {one: [i for i, parts in enumerate(reads) if device.touch([one], parts)]
                   for one in parameter_ranges(model.config)}  # fmt: skip
        encoder = next(readers[one][0] for one in embedding)
        if exchange.peers:  # the encoder needs only its rows, which come first; the next reader needs the whole
            readers |= {one: readers[one][1:] for one in embedding}
        order = sorted(readers, key=lambda one: (readers[one] or [len(launches)], one))
        first, self.gathered, begun = [], [], 0
        for one in order:
            matrices = without([one], vectors)
            if not matrices:
                continue
            if begun < SMALLEST_BUCKET and not (exchange.peers and one in embedding):
                first += matrices
                begun += 0 if one in embedding else one[1] - one[0]
            elif self.gathered and length(self.gathered[-1][0]) < SMALLEST_BUCKET and readers[one]:
                self.gathered[-1][0].extend(matrices)
            else:
                self.gathered.append((matrices, next(iter(readers[one]), None)))
        self.first = first + vectors
        if not updates:
            return [
                Hook(lambda _, ranges=ranges: exchange.gather("params", ranges), (encoder,), reader)
                for ranges, reader in self.gathered
            ]
        adamw, numbers = exchange.adamw, count()
        pieces = [adamw.pieces(model, [one for one in ranges if one not in embedding]) for ranges, _ in self.gathered]
        numbered, total = [[(next(numbers), piece) for piece in each] for each in pieces], sum(map(len, pieces))
        return [
            Hook(lambda _, ranges=ranges, own=own: exchange.update_and_gather(ranges, own, total),
                      (encoder,), reader)
            for (ranges, reader), own in zip(self.gathered, numbered, strict=True)
        ]  # fmt: skip

    def sums(self, exchange: Exchange, launches: list[Launch]) -> list[Hook]:
        """Learns when gradients are complete. Returns the hooks that sum them."""
        model, embedding = exchange.model, exchange.rows.embedding if exchange.peers else []
        vectors = without(model.added_to, embedding)
        writes = [parts_in(model.grads_memory, launch.writes) for launch in launches]
        end = max(i for i, launch in enumerate(launches) if launch.name == "gemm" and not writes[i])
        complete = []
        for one in parameter_ranges(model.config):
            writers = [i for i, parts in enumerate(writes) if device.touch([one], parts)]
            matrices = without([one], vectors)
            is_zero = bool(writers) and all(launches[i].name == "fill_zero" for i in writers)
            if matrices and not is_zero:
                complete.append((max(writers, default=-1), matrices))
        self.buckets, bucket, after = [], [], []
        for writer, matrices in sorted(complete):
            needs = [writer] if writer >= 0 else []
            if matrices == embedding:  # of any length: `sum_late` sums the last batch's rows only
                self.buckets.append((matrices, tuple(needs)))
                continue
            bucket += matrices
            after += needs
            if writer < end and length(bucket) >= SMALLEST_BUCKET:
                self.buckets.append((bucket, tuple(after)))
                bucket, after = [], []
        self.late = bucket + without(vectors, bucket) + without(embedding, bucket)
        return [
            Hook(lambda _, ranges=ranges: exchange.sum_bucket(ranges), after, urgent=exchange.peers is None)
            for ranges, after in self.buckets
        ]


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


def share_of(one: Range, r: int, N: int) -> Range:
    """The r-th of N shares of a range. Shares are equal, in units of four floats, except for the rest at the end."""
    start, end = one
    vectors = ceil_div(end - start, 4)
    return min(end, start + 4 * (vectors * r // N)), min(end, start + 4 * (vectors * (r + 1) // N))


def share_length(one: Range, N: int) -> int:
    """The length of the longest share."""
    return 4 * ceil_div(one[1] - one[0], 4 * N)


def shares(bucket: list[Range], r: int, N: int) -> Iterator[tuple[Range, int]]:
    """Rank r's share of each range in a bucket, and the place of this share in a room."""
    place = 0
    for one in bucket:
        share = share_of(one, r, N)
        if share[0] < share[1]:
            yield share, place
        place += share_length(one, N)


def buckets(ranges: list[Range], room: int, N: int) -> Iterator[list[Range]]:
    """Cuts ranges into buckets. A rank's share of a bucket has at most `room` floats, a multiple of 4."""
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


def barrier(words: list, rank: int) -> None:
    """Waits on the device until all ranks have called it. All ranks then see what each wrote before. words: each rank's
    words, uint32 (ranks,). Rank r signals to a rank in that rank's word r. All words are 0 before and after.

    In each pair of ranks the lower signals first, and the higher resets that word and replies; then the lower resets
    its own. So no word is set anew before it has been reset, however often this is called, or replayed as a part of a
    graph."""
    lower, higher = range(rank), range(rank + 1, len(words))

    def signal(others: range) -> list:
        return [("write", words[r][rank : rank + 1], 1) for r in others]

    def hear(others: range) -> list:
        own = [words[rank][r : r + 1] for r in others]
        return [("wait", word, 1) for word in own] + [("write", word, 0) for word in own]

    device.memory_operations(signal(higher) + hear(lower) + signal(lower) + hear(higher))

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

GPUs with peer access do all this by copies, and by the kernels of kernels/exchange.cu, which slow the step down less
than NCCL's kernels do. Other devices use llmc/collectives.py. All devices use it for the few numbers of the norm and
for checkpoints.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

import device
from device import Insertion, Launch, ceil_div
from kernels.dropout import Dropout
from kernels.encoder import add_sparse, encoder_backward, encoder_backward_sparse, encoder_forward
from kernels.exchange import Range, checksum, gather_rows, sum_buffers
from llmc import collectives, ranks
from llmc.classifier import CHUNK
from llmc.model import Model
from llmc.tensors import Config, layout, num_parameters

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


def sizes_of_buffers(config: Config, B: int, T: int, bitwise: bool) -> dict[str, int]:
    """The buffers that an Exchange allocates, all of fp32, by the name of what they hold, in bytes."""
    n, peers = num_parameters(config), collectives.peer_access()
    lengths = {"sums of batches": shard_length(n)} if bitwise else {}
    if peers and not bitwise:
        lengths["others' gradients"] = ranks.size() * shard_length(min(n, LARGEST_BUCKET))
        lengths["embedding's gradient"] = B * T * config.channels
    elif bitwise and ranks.size() > 1 and not peers:
        lengths["others' gradients"] = ranks.size() * shard_length(n)
    return {name: 4 * length for name, length in lengths.items()}


def exchanging_model(
    kind: type[Model], config: Config, B: int, T: int, attention: str, sharded: bool = False, bitwise: bool = False,
    logit_rows: int | None = None,
) -> tuple[Model, Exchange]:  # fmt: skip
    """A model that all ranks train together, with room for batches of up to (B, T) on each, and its exchange. If it is
    sharded, each rank has the moments of its own shard. logit_rows: as for Model; None: chunks only if a rank has too
    little memory for all logits. Raises UserError as Model does."""
    sharded = sharded and ranks.size() > 1
    shard = shards_of(num_parameters(config))[ranks.rank()] if sharded else None
    beside = partial(sizes_of_buffers, config, T=T, bitwise=bitwise)
    if logit_rows is None:
        sizes = kind.sizes_of_buffers(config, B, T, attention, shard=shard) | beside(B)
        crowded = sum(sizes.values()) > device.memory()[0]
        logit_rows = CHUNK if any(ranks.all_gather(crowded)) else 0
    model = kind(config, B, T, attention, shard=shard, beside=beside, logit_rows=logit_rows)
    return model, Exchange(model, sharded, bitwise)


class Exchange:
    """The exchange of a model's gradients and parameters among all ranks. With a single rank it does nothing.

    shards: the range of the flat buffers that belongs to each rank (shard_length). With sharded a rank updates its own
    shard. With bitwise it also has `sums`: the sums of its own shard's gradients over a step's batches. received is
    room for what other ranks send. peers: the buffers of all ranks, for ranks with peer access; among them the rows
    that a batch adds to the embedding's gradient, wte_values (B T, C) and wte_indices (B T,).
    """

    def __init__(self, model: Model, sharded: bool = False, bitwise: bool = False):
        self.model, self.sharded, self.bitwise = model, sharded, bitwise
        self.shards = shards_of(model.params_memory.size)
        buffers = {name: device.empty((size // 4,)) for name, size in
                   sizes_of_buffers(model.config, model.B, model.T, bitwise).items()}  # fmt: skip
        self.sums, self.received = buffers.get("sums of batches"), buffers.get("others' gradients")
        self.peers = None
        if collectives.peer_access():
            self.peers = collectives.map_memory(
                params=model.params_memory, grads=model.grads_memory, received=self.received,
                wte_values=buffers.get("embedding's gradient"),
                wte_indices=device.empty((model.B * model.T,), np.int32),
                barrier_words=device.zeros((ranks.size(),), np.uint32), norm=model.norm,
            )  # fmt: skip
        if bitwise:
            device.fill_zero(self.sums)
        self.plan = StepPlan()
        if ranks.size() > 1:
            model.rows = Rows(self)

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

        def batch(first: bool, last: bool) -> None:
            work(first or self.bitwise, last or self.bitwise)

        recording = device.record(batch, [self.model.grads_memory], self.insertions)

        def forward_backward(first: bool, last: bool) -> None:
            planned = recording.follows_plan(first, last)
            if ranks.size() > 1:
                if first and not planned:
                    self.gather_parameters()
                self.model.rows.begin(first and planned, last)
                if first and not planned:
                    self.share_overflow()
                    device.join_communication()
            recording(first, last)
            if ranks.size() > 1:
                self.model.rows.end()
            if self.bitwise:
                self.add_batch()
            elif last and not planned:
                for ranges, _ in self.plan.buckets:
                    self.start_sum(ranges)

        return forward_backward

    def insertions(self, arguments: tuple[bool, bool], launches: list[Launch]) -> list[Insertion]:
        """What ranks exchange beside these launches of a batch that is the first, or the last, of its step."""
        first, last = arguments
        found: list[Insertion] = []
        if ranks.size() == 1:
            return found
        if first and self.sharded:
            found += self.plan.gathers(self, launches)
        if last and not self.bitwise:
            found += self.plan.sums(self, launches)
        ranks.check_same("the plan of the exchange", self.plan.fingerprint(), "start the same program on all machines")
        return found

    # Gradients

    def start_sum(self, ranges: list[Range]) -> None:
        """Starts summing a bucket of gradients over all ranks."""
        device.communicate(lambda _: self.sum_bucket(ranges), urgent=self.peers is None)

    def sum_bucket(self, ranges: list[Range]) -> None:
        """Sums a bucket of gradients over all ranks, in the work of device.communicate."""
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

    @property
    def late(self) -> list[Range]:
        """The gradients whose sums AdamW's update must start, because they are complete only at backward's end."""
        return self.plan.late if ranks.size() > 1 and not self.bitwise else []

    @property
    def known_to_all(self) -> list[Range]:
        """The gradients whose sums every rank has, even with -z: ranks with peer access sum the short ones for all."""
        return without(self.model.added_to, self.model.rows.embedding) if self.peers else []

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
        embedding = self.model.rows.embedding
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
                self.model.rows.add(self.peers)
            self.meet()  # from here on a rank may change what the other ranks have read

        device.communicate(work)

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
        device.join_communication()
        if length:
            sums = device.address(self.sums) - 4 * start  # the address that a whole flat buffer would have
            sum_buffers(
                device.constant((sums,), np.uint64), device.constant((sums, *addresses), np.uint64), [(start, end)],
                4 * device.multiprocessors,
            )  # fmt: skip
        self.wait_for_ranks()  # until they have read this rank's gradients
        device.join_communication()

    def gather_sums(self) -> None:
        """Sets all gradients, on each rank, to the sums of a bitwise run's batches, which start again from 0."""
        start, end = self.shards[ranks.rank()]
        device.copy(self.model.grads_memory[start:end], self.sums[: end - start])
        device.fill_zero(self.sums)
        self.wait_for_ranks()
        self.start_gather("grads", [(0, self.model.grads_memory.size)])
        self.wait_for_ranks()  # until they have read this rank's sums
        device.join_communication()

    # Parameters

    def gather_parameters(self) -> None:
        """With -z, after each rank has updated its shard: gives every rank all parameters. All ranks must call it
        before anything reads parameters. Only a recorded step need not, because it gathers them in the order of its
        reads."""
        if self.sharded:
            self.wait_for_ranks()
            self.start_gather("params", [(0, self.model.params_memory.size)])
            device.join_communication()

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

        device.communicate(work)

    def start_gather(self, name: str, ranges: list[Range]) -> None:
        """Starts to copy ranges of a flat buffer, "params" or "grads", from the ranks whose shards they are in to all
        ranks. Ranks with peer access must wait for one another first (`wait_for_ranks`)."""
        device.communicate(lambda _: self.gather(name, ranges))

    def gather(self, name: str, ranges: list[Range]) -> None:
        """start_gather, in the work of device.communicate."""
        flat, rank, N = getattr(self.model, f"{name}_memory"), ranks.rank(), ranks.size()
        owned = [(r, one) for r, shard in enumerate(self.shards) for one in overlaps(ranges, [shard])]
        if not self.peers:
            collectives.broadcast([(flat[start:end], r) for r, (start, end) in owned])
            return
        arrays = getattr(self.peers, name).arrays
        for r, (start, end) in sorted(owned, key=lambda one: (one[0] - rank) % N):  # each rank begins at another one
            if r != rank:
                device.copy(flat[start:end], arrays[r][start:end])

    def share_overflow(self) -> None:
        """Tells all ranks whether a gradient of the step before has overflowed (norm[3] of `adamw`). With -z only the
        owner of its parameter has seen that. No rank reads or writes this number before AdamW, and all ranks meet again
        in front of AdamW. So one rank can sum it for all."""
        if not self.sharded:
            return
        if not self.peers:
            collectives.all_reduce([self.model.norm[3:]])
        elif ranks.rank() == 0:
            norms = self.peers.norm.addresses
            device.communicate(lambda _: sum_buffers(norms, norms, [(3, 4)], 1))

    # Ranks with peer access

    def wait_for_ranks(self) -> None:
        """With peer access: later work of device.communicate begins once all ranks have come to this point."""
        if self.peers:
            device.communicate(lambda _: self.meet())

    def meet(self) -> None:
        """A barrier of all ranks, in the work of device.communicate."""
        barrier(self.peers.barrier_words.arrays, ranks.rank())

    # Checkpoints

    def checksum(self) -> str:
        """A checksum of all bits of the model's parameters: 16 hexadecimal digits."""
        return checksum(self.model.params_memory)

    def load_checkpoint(self, tensors: Mapping[str, np.ndarray] | None, moments: tuple | None) -> None:
        """Gives all ranks a checkpoint that rank 0 has read: the parameters, as `read_model` gives them, and AdamW's m
        and v of all of them, (num_parameters,) each. All ranks must call it, the others with None."""
        model = self.model
        if tensors is not None:
            model.load(tensors)
        collectives.broadcast([(model.params_memory, 0)])
        device.join_communication()
        if model.has_copy and ranks.size() > 1:
            self.scatter_master(tensors)
        for own, values in zip((model.m_memory, model.v_memory), moments or (None, None), strict=True):
            collectives.scatter(own, self.shard[0], model.params_memory.size, values)

    def scatter_master(self, tensors: Mapping[str, np.ndarray] | None) -> None:
        """Gives each rank its part of the master copy, from the parameters of a file that rank 0 has."""
        model, (begin, _) = self.model, self.shard
        device.fill_zero(model.master_memory)
        starts, _ = layout(model.config.parameters(), model.config.sizes(), align=1)
        in_file, _ = layout(model.config.file_tensors(), model.config.sizes(), align=1)
        for name, _ in model.config.parameters():
            start, length = starts[name][0], math.prod(in_file[name][1])
            ((first, end),) = overlaps([(start, start + length)], [self.shard]) or [(start, start)]
            own = model.master_memory[max(0, first - begin) : max(0, end - begin)]
            collectives.scatter(own, first - start, length, tensors[name].reshape(-1) if tensors else None)

    def whole_state(self) -> tuple:
        """The parameters, fp32, and AdamW's m and v of all of them, (num_parameters,) each, for save_checkpoint. If a
        rank has only its shard, they are pieces. Every rank must then ask for all pieces, in this order."""
        model = self.model

        def whole(own):
            return collectives.whole(own, self.shards) if own.size < model.params_memory.size else own

        return whole(model.master_memory), whole(model.m_memory), whole(model.v_memory)


class Rows:
    """The rows of the embedding that a batch reads and changes. The embedding, a third of GPT-2 124M's bytes, is read
    first, and its gradient is complete last. A step would have to wait for all of it. Instead, ranks with peer access
    exchange only these rows. A model script says where, by `embedding_forward` and `embedding_backward`."""

    def __init__(self, exchange: Exchange):
        self.exchange, self.embedding = exchange, []
        self.comes = self.leaves = False

    def begin(self, comes: bool, last: bool) -> None:
        """Call it before a batch. comes: its rows of the embedding must still come from other ranks. last: it is the
        last of a step."""
        self.comes = comes and self.exchange.sharded
        self.leaves = last and bool(self.exchange.peers) and not self.exchange.bitwise

    def end(self) -> None:
        """Call it after a batch. Other forward passes, such as a validation, exchange no rows."""
        self.comes = self.leaves = False

    def gather(self, wte, C: int) -> None:
        """In a step's first batch: copies the rows of wte (Vp,C) that the batch reads from the ranks that have updated
        them."""
        exchange, model = self.exchange, self.exchange.model
        self.embedding = [range_in(wte, model.params_memory)]
        if not self.comes:
            return
        exchange.wait_for_ranks()
        if exchange.peers:
            addresses, length, start = exchange.peers.params.addresses, exchange.shards[0][1], self.embedding[0][0]
            batch = model.inputs, model.order, model.count, model.B * model.T, C
            device.communicate(lambda _: gather_rows(addresses, ranks.rank(), length, start, *batch))
        device.join_communication()
        exchange.share_overflow()

    def add(self, peers) -> None:
        """Adds the rows of all ranks' batches to the gradient of the embedding."""
        model = self.exchange.model
        ((start, end),) = self.embedding
        C = model.config.channels
        for values, indices in zip(peers.wte_values.arrays, peers.wte_indices.arrays, strict=True):
            add_sparse(model.grads_memory[start:end], values, indices, model.B * model.T, C)


def embedding_forward(model: Model, out, wte, wpe, B: int, T: int, C: int, dropout: Dropout | None = None) -> None:
    """encoder_forward for model.inputs. Their rows of wte may still be on other ranks."""
    if model.rows:
        model.rows.gather(wte, C)
    encoder_forward(out, model.inputs, wte, wpe, B, T, C, dropout, model.positions)


def embedding_backward(model: Model, dwte, dwpe, dout, B: int, T: int, C: int) -> None:
    """encoder_backward for model.batch: adds to the gradients of wte and, if there is one, wpe. (B, T) are the model's.

    In the last batch of a step, ranks with peer access do not add this batch's rows to the gradient of wte yet. They
    sum the rest of it over all ranks, and leave these rows for `sum_late`."""
    batch = model.inputs, model.order, model.count, B, T, C
    if model.rows and model.rows.leaves:
        peers, rank = model.rows.exchange.peers, ranks.rank()
        values, indices = peers.wte_values.arrays[rank], peers.wte_indices.arrays[rank]
        encoder_backward_sparse(values, indices, dwpe, dout, *batch)
    else:
        encoder_backward(dwte, dwpe, dout, *batch)


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

    def gathers(self, exchange: Exchange, launches: list[Launch]) -> list[Insertion]:
        """Learns which parameters a step's launches read first. Returns the insertions that gather them."""
        model, embedding = exchange.model, exchange.model.rows.embedding
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
        return [
            Insertion(lambda _, ranges=ranges: exchange.gather("params", ranges), (encoder,), reader)
            for ranges, reader in self.gathered
        ]

    def sums(self, exchange: Exchange, launches: list[Launch]) -> list[Insertion]:
        """Learns when gradients are complete. Returns the insertions that sum them."""
        model, embedding = exchange.model, exchange.model.rows.embedding if exchange.peers else []
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
            Insertion(lambda _, ranges=ranges: exchange.sum_bucket(ranges), after, urgent=exchange.peers is None)
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


def length(ranges: list[Range]) -> int:
    return sum(end - start for start, end in ranges)


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

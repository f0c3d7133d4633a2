"""How ranks exchange gradients and parameters: gradients are summed over all ranks, and with -z each rank sends the
parameters that it has updated to the others.

One object per run, Exchange, owns all that several ranks need, and says in which order a step needs it. From a step's
recorded launches (device/recording.py) its plan (plan.py) learns when each gradient is complete, so that its sum can
begin, and which launch reads a parameter first, so that this launch waits for it. A transport moves the bytes: copies
between GPUs with peer access (peer_transport.py), else collectives (collective_transport.py).

Gradients are summed in a step's last batch. They go into buckets in the order in which they are complete, and each
bucket is summed beside the rest of backward. AdamW's update sums the tail: the gradients that are complete only at
backward's end. Without -z every rank gets all sums and makes the same update. With -z a rank gets the sums of its own
shard of the flat buffers and updates the parameters of this shard. The other ranks then get these: the parameters that
forward reads first at the end of the update (`gather_first`), the rest beside the next step's forward pass. In a
bitwise run every batch is summed by itself, in the order that one GPU would follow (`add_batch`).

With `--offload` most updates run beside the next step's forward pass, too (offloaded_updates.py). On a single rank and
without -z, each comes before the first launch that needs it; with -z, each comes before its gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import device
from device import Hook, Launch
from kernels.exchange import checksum, sum_buffers
from llmc.model.adamw import AdamW
from llmc.model.batch import Batch
from llmc.model.model import Model
from llmc.model.ranges import Range, overlaps, without
from llmc.model.tensors import Config, num_parameters
from llmc.model.weights import load_weights
from llmc.ranks import collectives, ranks
from llmc.ranks.collective_transport import CollectiveTransport
from llmc.ranks.embedding_rows import EmbeddingRows
from llmc.ranks.offloaded_updates import update_and_gather_hooks, update_hooks
from llmc.ranks.peer_transport import PeerTransport
from llmc.ranks.plan import StepPlan
from llmc.ranks.shards import shard_length, shards_of

import numpy as np


def transport_kind() -> type[CollectiveTransport] | type[PeerTransport]:
    return PeerTransport if collectives.peer_access() else CollectiveTransport


def exchange_bytes(config: Config, B: int, T: int, bitwise: bool) -> dict[str, int]:
    """The bytes of each buffer that an Exchange allocates, by name."""
    sums = {"sums of batches": 4 * shard_length(num_parameters(config))} if bitwise else {}
    return sums | transport_kind().buffer_bytes(config, B, T, bitwise)


class Exchange:
    """The exchange of a model's gradients and parameters among all ranks. With a single rank there is nothing to
    exchange.

    sharded: a rank updates its own shard of the flat buffers. sums: in a bitwise run, the sums of its own shard's
    gradients over a step's batches; else None. rows: the exchange of the embedding's rows; None on a single rank.
    """

    def __init__(self, model: Model, adamw: AdamW, batch: Batch, sharded: bool = False, bitwise: bool = False):
        self.model, self.adamw, self.sharded = model, adamw, sharded
        self.sums = device.zeros((shard_length(model.params_memory.size),)) if bitwise else None
        # With --offload the norm covers all gradients, so every rank sees an overflow by itself.
        shared_norm = adamw.grad_norm if sharded and not adamw.offload else None
        self.plan, self.transport = StepPlan(), transport_kind()(model, batch, shared_norm, sharded, bitwise)
        self.rows = batch.rows = EmbeddingRows(model, batch, self.transport) if ranks.size() > 1 else None

    @property
    def bitwise(self) -> bool:
        return self.sums is not None

    @property
    def pending(self) -> list[Range]:
        """With `--offload`, the parameters that still lack the last step's update."""
        return self.adamw.offload.pending if self.adamw.offload else []

    @property
    def everything(self) -> list[Range]:
        """The whole of a flat buffer."""
        return [(0, self.model.params_memory.size)]

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
                self.rows.needs_gather = first and planned and self.sharded
                self.rows.deferred = last and self.transport.sparse and not self.bitwise
                if first and not planned:
                    self.transport.share_overflow()
                    device.wait_comm()
            recording(first, last, updates)
            if updates:
                self.adamw.offload.pending = []
            if self.bitwise:
                self.add_batch()
            elif last and not planned:
                for hook in self.sum_hooks():
                    device.on_comm_stream(hook.work, hook.urgent)

        return forward_backward

    def hooks(self, arguments: tuple[bool, bool, bool], launches: list[Launch]) -> list[Hook]:
        """The work that is done beside these launches of a batch: the exchange between ranks, and the updates that the
        step before has left to this one. arguments: whether the batch is the first of its step, whether it is the last,
        and whether there are such updates."""
        first, last, updates = arguments
        found: list[Hook] = []
        if updates and not self.sharded:
            found += update_hooks(self.model, self.adamw, launches)
        if ranks.size() == 1:
            return found
        embedding, sparse = self.rows.embedding, self.transport.sparse
        if first and self.sharded:
            self.plan.learn_gathers(self.model, launches, embedding, sparse)
            found += self.gather_hooks(updates)
        if last and not self.bitwise:
            self.plan.learn_sums(self.model, launches, embedding if sparse else [])
            found += self.sum_hooks()
        ranks.check_same("the plan of the exchange", self.plan.fingerprint(), "start the same program on all machines")
        return found

    def gather_hooks(self, updates: bool) -> list[Hook]:
        """With -z, the work that gives all ranks the parameters of the plan's buckets. updates: they must be updated
        first."""
        transport, buckets = self.transport, self.plan.gather_buckets
        if updates:
            return update_and_gather_hooks(self.model, self.adamw, transport, buckets, self.rows.embedding)
        return [
            Hook(lambda _, ranges=ranges: transport.gather("params", ranges), after, before)
            for ranges, after, before in buckets
        ]

    def sum_hooks(self) -> list[Hook]:
        """The work that sums the gradients of the plan's buckets."""
        transport = self.transport
        return [
            Hook(lambda _, ranges=ranges: transport.sum_bucket(ranges), after, urgent=transport.urgent_sums)
            for ranges, after, _ in self.plan.sum_buckets
        ]

    # AdamW's update

    def finish_sums(self, checked: list[Range]) -> None:
        """Before the norm of the gradients in the ranges `checked`: brings the sums of these that are still missing,
        and starts the others'."""
        if self.bitwise:
            self.gather_sums()
        first, rest = self.tail(checked)
        self.transport.sum_tail(first, self.rows)
        device.wait_comm()
        self.transport.sum_tail(rest, self.rows)

    def tail(self, checked: list[Range]) -> tuple[list[Range], list[Range]]:
        """The gradients that are complete only at backward's end: those that are summed before the norm, and those that
        are summed while parameters are updated."""
        tail = self.plan.tail_grads if ranks.size() > 1 and not self.bitwise else []
        # With -z one rank's shard is mostly the embedding, so it has little to update before that is summed.
        first = tail if self.sharded else overlaps(tail, checked)
        return first, without(tail, first)

    def updatable(self, checked: list[Range]) -> Iterator[list[Range]]:
        """After the norm of `checked`: yields ranges of parameters to update, the soonest needed first, until this rank
        has had all that it updates now.

        With -z the parameters that forward reads first come first, and the other ranks get them while the rest is
        updated. A rank then still lacks the rest of the other ranks' parameters, and whether another rank has left out
        a parameter; the next step brings both. Without -z the parameters whose gradients are summed come first, while
        the tail is summed. With `--offload`, most updates are left to the next step (`pending`)."""
        offload = self.adamw.offload
        if offload and not self.sharded:
            offload.pending = self.everything
            return
        early = self.plan.first_params if self.sharded else without(self.everything, self.tail(checked)[1])
        yield early
        if self.sharded:
            self.transport.gather_first(early)
        else:
            device.wait_comm()
        if offload and early:
            embedding = self.rows.embedding  # the next step begins with rows of it from all ranks
            offload.pending = [one for bucket in self.plan.gather_buckets for one in bucket.ranges
                               if one not in embedding]  # fmt: skip
            yield without(embedding, early)
        else:
            yield without(self.everything, early)
        device.wait_comm()  # waits for what gather_first has started

    def lacks_sums(self, checked: list[Range]) -> bool:
        """Whether this rank has only its own shard's sums of the gradients in some ranges."""
        if not self.sharded or self.bitwise:
            return False
        return without(checked, self.transport.summed_on_all(self.rows)) != []

    def add_squares(self, partials) -> None:
        """Adds up partial sums over all ranks."""
        collectives.all_reduce([partials])
        device.wait_comm()

    # A bitwise run

    def add_batch(self) -> None:
        """After a batch's backward: adds the gradients of each rank's batch to `sums`, in the order of the ranks."""
        start, end = shards_of(self.model.params_memory.size)[ranks.rank()]
        addresses = self.transport.reach_gradients()
        device.wait_comm()
        if start < end:
            sums = device.address(self.sums) - 4 * start  # the address that a whole flat buffer would have
            sum_buffers(
                device.constant((sums,), np.uint64), device.constant((sums, *addresses), np.uint64), [(start, end)],
                4 * device.multiprocessors,
            )  # fmt: skip
        self.transport.wait_for_ranks()  # until they have read this rank's gradients
        device.wait_comm()

    def gather_sums(self) -> None:
        """Sets all gradients, on each rank, to the sums of a step's batches, which start again from 0."""
        start, end = shards_of(self.model.params_memory.size)[ranks.rank()]
        device.copy(self.model.grads_memory[start:end], self.sums[: end - start])
        device.fill_zero(self.sums)
        self.gather_all("grads")
        self.transport.wait_for_ranks()  # until they have read this rank's sums
        device.wait_comm()

    # All parameters

    def gather_parameters(self) -> None:
        """With `--offload`, first makes the pending updates. With -z, then gives every rank all parameters. All
        ranks must call it before anything reads parameters. Only a recorded step need not, because it does both by
        itself, in the order of its reads."""
        if self.pending:
            self.adamw.pass_through(self.model, self.pending)
            self.adamw.offload.pending = []
        if self.sharded:
            self.gather_all("params")
            device.wait_comm()

    def gather_all(self, name: str) -> None:
        """Starts to give every rank the whole of a flat buffer, "params" or "grads"."""
        self.transport.wait_for_ranks()
        device.on_comm_stream(lambda _: self.transport.gather(name, self.everything))

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
        model, everything = self.model, self.everything
        shards = shards_of(everything[0][1]) if self.sharded else everything

        def moment(own) -> Iterator:
            def read(start: int, piece) -> None:
                device.copy(piece, own[start - adamw.first :][: piece.size])

            return collectives.whole(read, shards)

        def read_params(start: int, piece) -> None:
            adamw.get_master(model, start, piece)

        params = collectives.whole(read_params, everything if adamw.low is None else shards)
        return params, moment(adamw.m), map(np.abs, moment(adamw.v))  # in bf16 v has signs

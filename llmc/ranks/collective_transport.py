"""How ranks without peer access exchange gradients and parameters: by the collectives of NCCL or gloo (collectives.py).

An Exchange (exchange.py) says what is exchanged and when; a transport moves the bytes. This one and PeerTransport
(peer_transport.py) have the same attributes and methods.
"""

from __future__ import annotations

import device
from llmc.model.batch import Batch
from llmc.model.model import Model
from llmc.model.ranges import Range
from llmc.model.tensors import Config, num_parameters
from llmc.ranks import collectives, ranks
from llmc.ranks.embedding_rows import EmbeddingRows
from llmc.ranks.shards import by_owner, shard_length, shards_of


class CollectiveTransport:
    """Moves ranges of a model's flat buffers between ranks. On a single rank it does nothing.

    shards      of each rank
    sharded     whether a rank needs the sums of its own shard alone
    grad_norm   AdamW's, if a rank may be the only one that sees a gradient overflow; else None
    received    in a bitwise run, room for the gradients that other ranks send
    """

    sparse = False      # the embedding is exchanged like all other parameters (embedding_rows.py)
    urgent_sums = True  # in sums beside backward, NCCL's kernels come before backward's

    def __init__(self, model: Model, batch: Batch, grad_norm, sharded: bool, bitwise: bool):
        self.model, self.grad_norm, self.sharded = model, grad_norm, sharded
        self.shards = shards_of(model.params_memory.size)
        size = self.buffer_bytes(model.config, batch.B, batch.T, bitwise).get("others' gradients")
        self.received = device.empty((size // 4,)) if size else None

    @staticmethod
    def buffer_bytes(config: Config, B: int, T: int, bitwise: bool) -> dict[str, int]:
        """The bytes of each buffer that a transport allocates, by name."""
        several = bitwise and ranks.size() > 1
        return {"others' gradients": 4 * ranks.size() * shard_length(num_parameters(config))} if several else {}

    # These are called in the work of device.on_comm_stream.

    def sum_bucket(self, ranges: list[Range]) -> None:
        """Sums gradients over all ranks. With -z only the owner of a shard gets its sums. On the other ranks these
        gradients are then undefined."""
        grads = self.model.grads_memory
        if self.sharded:
            collectives.reduce([(grads[start:end], r) for r, (start, end) in by_owner(ranges, self.shards)])
        else:
            collectives.all_reduce([grads[start:end] for start, end in ranges])

    def gather(self, name: str, ranges: list[Range]) -> None:
        """Copies ranges of a flat buffer, "params" or "grads", from the ranks whose shards they are in to all ranks."""
        flat = getattr(self.model, f"{name}_memory")
        collectives.broadcast([(flat[start:end], r) for r, (start, end) in by_owner(ranges, self.shards)])

    def meet(self) -> None:
        """Before another rank reads this one's memory, or stops to read it: a barrier of all ranks. Collectives need
        none."""

    # These start such work. Later work must wait for it with device.wait_comm.

    def wait_for_ranks(self) -> None:
        """`meet`, beside what follows."""

    def sum_tail(self, ranges: list[Range], rows: EmbeddingRows) -> None:
        """Sums the gradients that are complete only at backward's end. rows: of the embedding."""
        if ranges:
            self.sum_bucket(ranges)

    def summed_on_all(self, rows: EmbeddingRows) -> list[Range]:
        """The gradients in sum_tail whose sums all ranks get, with -z too."""
        return []

    def reach_gradients(self) -> list[int]:
        """In a bitwise run: makes all ranks' gradients in this rank's shard readable. Returns for each rank the address
        that the whole flat buffer would have."""
        N, rank, grads = ranks.size(), ranks.rank(), self.model.grads_memory
        (start, end), others = self.shards[rank], [r for r in range(N) if r != rank]
        sent = [(grads[slice(*self.shards[r])], r) for r in others if self.shards[r][0] < self.shards[r][1]]
        parts = [(self.received[r * (end - start) : (r + 1) * (end - start)], r) for r in others if start < end]
        collectives.exchange(sent, parts)
        addresses = [device.address(grads)] * N
        for part, r in parts:
            addresses[r] = device.address(part) - 4 * start
        return addresses

    def gather_first(self, ranges: list[Range]) -> None:
        """Gives all ranks the parameters with which forward begins, once each rank has updated its part of them. Other
        parameters may be updated meanwhile."""
        device.on_comm_stream(lambda _: self.gather("params", ranges))

    def gather_rows(self, batch: Batch, start: int, C: int) -> None:
        """Copies the rows (C,) that a batch reads from the embedding, which begins at the start-th parameter, from the
        ranks that have updated them. Here they have come with `gather_first`."""

    def share_overflow(self) -> None:
        """Tells all ranks whether a gradient of the step before has overflowed (grad_norm[3]). With -z only the owner
        of its parameter has seen that. Nobody reads or writes this number before AdamW, and all ranks meet before
        AdamW."""
        if self.grad_norm is not None:
            collectives.all_reduce([self.grad_norm[3:]])

"""How GPUs with peer access exchange gradients and parameters: by copies from GPU to GPU, and by the kernels of
kernels/exchange.cu. They slow the step down less than NCCL's kernels do.

PeerTransport has the attributes and methods of CollectiveTransport (collective_transport.py), whose docstrings say what
each is for. Here they say how it is done.
"""

from __future__ import annotations

import device
from kernels.exchange import gather_rows, sum_buffers
from llmc.model.batch import Batch
from llmc.model.model import Model
from llmc.model.ranges import Range, in_words, overlaps, rounds, shares, without
from llmc.model.tensors import Config, num_parameters
from llmc.ranks import collectives, ranks
from llmc.ranks.embedding_rows import EmbeddingRows
from llmc.ranks.shards import shard_length, shards_of

import numpy as np

# Of sum_kernel where it loads from other GPUs, or stores there; on four H200s 32 take as long, 132 longer.
BLOCKS = 64
MAX_ROUND = 1 << 23  # floats that ranks sum at a time


class PeerTransport:
    """Moves ranges of a model's flat buffers between GPUs with peer access.

    mapped: arrays of all ranks (collectives.Mapped): params, grads, and, if a rank must share its overflow, AdamW's
    grad_norm; received, which has a slot for each rank's gradients; wte_values (B T C,) and wte_indices (B T,), the
    rows that a batch adds to the embedding's gradient; barrier_words (ranks,).
    """

    sparse = True
    urgent_sums = False  # copy engines do most of the work, and nothing in the step waits for the sums

    def __init__(self, model: Model, batch: Batch, grad_norm, sharded: bool, bitwise: bool):
        self.model, self.grad_norm, self.sharded = model, grad_norm, sharded
        self.shards, self.rank = shards_of(model.params_memory.size), ranks.rank()
        received = values = indices = None
        if not bitwise:
            rows = batch.B * batch.T
            received = device.empty((ranks.size() * slot_length(model.config),))
            values, indices = device.empty((rows * model.config.channels,)), device.empty((rows,), np.int32)
        self.mapped = collectives.map_memory(
            params=model.params_memory, grads=model.grads_memory, grad_norm=grad_norm, received=received,
            wte_values=values, wte_indices=indices, barrier_words=device.zeros((ranks.size(),), np.uint32),
        )  # fmt: skip

    @staticmethod
    def buffer_bytes(config: Config, B: int, T: int, bitwise: bool) -> dict[str, int]:
        if bitwise:  # the few bytes of barrier_words are not counted
            return {}
        rows = B * T
        return {
            "others' gradients": 4 * ranks.size() * slot_length(config),
            "embedding's gradient": 4 * rows * config.channels + 4 * rows,
        }

    @property
    def shard(self) -> Range:
        """The part of the flat buffers whose sums this rank needs."""
        return self.shards[self.rank] if self.sharded else (0, self.model.params_memory.size)

    @property
    def others(self) -> list[int]:
        """The other ranks. Each rank begins with another one."""
        N = ranks.size()
        return [(self.rank + i) % N for i in range(1, N)]

    @property
    def sparse_gradients(self) -> list[tuple]:
        """For each rank the values and indices that its last batch adds to the embedding's gradient."""
        return list(zip(self.mapped.wte_values.arrays, self.mapped.wte_indices.arrays, strict=True))

    # These are called in the work of device.on_comm_stream.

    def sum_bucket(self, ranges: list[Range]) -> None:
        """Each rank copies their shares of its gradients to the other ranks, adds up the copies of its own share that
        have come, and sends the sums to all ranks; with -z only to the ranks that own them. A GPU's copy engines make
        the copies, so its multiprocessors are free for the matmuls that run at the same time."""
        grads, received, N, rank = self.mapped.grads, self.mapped.received, ranks.size(), self.rank
        slot = received.arrays[rank].size // N  # one for each rank; it holds one share of a round
        slots = [device.address(received.arrays[rank]) + 4 * r * slot for r in range(N)]
        slots[rank] = device.address(grads.arrays[rank])
        sources = device.constant(tuple(slots), np.uint64)
        for of_round in rounds(ranges, slot, N):
            for other in self.others:
                for (start, end), place in shares(of_round, other, N):
                    there = received.arrays[other][rank * slot + place :]
                    device.copy(there[: end - start], grads.arrays[rank][start:end])
            self.meet()
            sums, places = [list(each) for each in zip(*shares(of_round, rank, N), strict=True)] or ([], [])
            if sums:
                to = grads.addresses[rank : rank + 1]
                sum_buffers(to, sources, sums, device.multiprocessors, own=rank, places=places)
            for other in self.others:
                for start, end in overlaps(sums, [self.shards[other]]) if self.sharded else sums:
                    device.copy(grads.arrays[other][start:end], grads.arrays[rank][start:end])
            self.meet()

    def gather(self, name: str, ranges: list[Range]) -> None:
        arrays = getattr(self.mapped, name).arrays
        for other in self.others:
            for start, end in overlaps(ranges, [self.shards[other]]):
                device.copy(arrays[self.rank][start:end], arrays[other][start:end])

    def meet(self) -> None:
        barrier(self.mapped.barrier_words.arrays, self.rank)

    # These start such work.

    def wait_for_ranks(self) -> None:
        device.on_comm_stream(lambda _: self.meet())

    def sum_tail(self, ranges: list[Range], rows: EmbeddingRows) -> None:
        """Each rank loads its share of the numbers from all GPUs, adds them up, and stores the sums on all GPUs. With
        -z it stores the sums of matrices only on the GPUs whose shards they are in. For the embedding, each rank whose
        shard has a part of it loads the rows of all ranks and adds them."""
        if not ranges:
            return
        N, addresses = ranks.size(), self.mapped.grads.addresses
        others = without(ranges, rows.embedding)
        vectors = overlaps(others, self.model.added_to)
        matrices = without(others, vectors)

        def work(_) -> None:
            self.meet()
            whole = vectors if self.sharded else others
            if whole:
                sum_buffers(addresses, addresses, whole, BLOCKS, self.rank, N)
            for r, shard in enumerate(self.shards) if self.sharded else []:
                owned = overlaps(matrices, [shard])
                if owned:
                    sum_buffers(addresses[r : r + 1], addresses, owned, BLOCKS, self.rank, N)
            if overlaps(overlaps(ranges, rows.embedding), [self.shard]):
                rows.add()
            self.meet()  # from here on a rank may change what the other ranks have read

        device.on_comm_stream(work)

    def summed_on_all(self, rows: EmbeddingRows) -> list[Range]:
        return without(self.model.added_to, rows.embedding)

    def reach_gradients(self) -> list[int]:
        self.wait_for_ranks()
        return [device.address(array) for array in self.mapped.grads.arrays]

    def gather_first(self, ranges: list[Range]) -> None:
        """By a kernel, which starts faster than a copy."""
        addresses, rank = self.mapped.params.addresses, self.rank

        def work(_) -> None:
            for r, shard in enumerate(self.shards):
                owned = overlaps(ranges, [shard])
                if owned and r != rank:  # a sum of one buffer is a copy
                    words = [in_words(one, self.model.params_memory) for one in owned]
                    sum_buffers(addresses[rank : rank + 1], addresses[r : r + 1], words, BLOCKS)

        self.wait_for_ranks()
        device.on_comm_stream(work)

    def gather_rows(self, batch: Batch, start: int, C: int) -> None:
        addresses, length = self.mapped.params.addresses, self.shards[0][1]
        of_batch = *batch.sorted_inputs, batch.B * batch.T, C
        device.on_comm_stream(lambda _: gather_rows(addresses, self.rank, length, start, *of_batch))

    def share_overflow(self) -> None:
        """Rank 0 sums the numbers of all ranks, for all."""
        if self.grad_norm is not None and self.rank == 0:
            norms = self.mapped.grad_norm.addresses
            device.on_comm_stream(lambda _: sum_buffers(norms, norms, [(3, 4)], 1))


def slot_length(config: Config) -> int:
    """The floats that a rank receives from another one in a round."""
    return shard_length(min(num_parameters(config), MAX_ROUND))


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

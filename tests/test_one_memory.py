"""What ranks whose GPUs load and store in one another's memory do: exchange.py without NCCL or gloo.

The ranks are threads of this process here, on the CPU device, so that each sees the others' arrays. In place of
exchange.barrier they meet in Python, where all end if one fails. tests/test_ranks.py has processes and GPUs.
"""

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kernels import exchange
from kernels.adamw import adamw_update
from llmc import collectives, device, model, ranks
from llmc.dataloader import sort_by_token
from llmc.errors import UserError
from models import LLAMA_ODD, ODD, PYTHIA_ODD, kind_of

T = 8


class Threads:
    """N ranks as threads; `run(work)` is what work(rank) returns for each."""

    def __init__(self, N: int, monkeypatch):
        self.own, self.meeting, self.said = threading.local(), threading.Barrier(N, timeout=60), [None] * N
        self.N = N
        for module, name, stands in (
            (ranks, "size", lambda: N), (ranks, "rank", lambda: self.own.rank), (ranks, "all_gather", self.all_gather),
            (collectives, "one_memory", lambda: True), (collectives, "map_memory", self.map_memory),
            (collectives, "all_reduce", self.all_reduce), (exchange, "barrier", lambda *_: self.meeting.wait()),
        ):
            monkeypatch.setattr(module, name, stands)

    def all_gather(self, value) -> list:
        self.said[self.own.rank] = value
        self.meeting.wait()
        values = list(self.said)
        self.meeting.wait()
        return values

    def map_memory(self, **arrays) -> SimpleNamespace:
        of_ranks, mapped = self.all_gather(arrays), {}
        for name in arrays:
            found = [of_rank[name] for of_rank in of_ranks]
            if found[0] is not None:
                mapped[name] = collectives.Mapped(found, np.array([device.address(x) for x in found], np.uint64))
        return SimpleNamespace(**mapped)

    def all_reduce(self, arrays: list) -> None:
        for x in arrays:
            total = sum(np.copy(y) for y in self.all_gather(np.copy(x)))
            x[:] = total

    def run(self, work) -> list:
        results, errors = [None] * self.N, []

        def of_rank(r: int) -> None:
            self.own.rank = r
            try:
                results[r] = work(r)
            except BaseException as error:
                errors.append(error)
                self.meeting.abort()

        threads = [threading.Thread(target=of_rank, args=(r,)) for r in range(self.N)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


def train(
    config, B: int, batches: np.ndarray, grad_clip: float, spoilt: int | None = None, **flags
) -> np.ndarray:  # fmt: skip
    """The parameters after as many steps as batches has (steps, batches a step, 2, B, T), as a rank, or the only one,
    trains on them. The losses of batch `spoilt` have a gradient that is not finite."""
    of = kind_of(config)(config, B, T, "softmax", **flags)
    of.randomize(42)
    of.params.wte[::5] = -0.0  # which has the bits of 0 no more once 0 is added
    of.skip_nonfinite = False
    count, N, rank = batches.shape[1], ranks.size(), ranks.rank()
    for step, of_step in enumerate(batches, 1):
        for i in range(rank, count, N):
            alone = of.bitwise
            first, last = alone or i < N, alone or i + N >= count and N > 1
            tokens, targets = of_step[i]
            words = np.concatenate([tokens.ravel(), targets.ravel(), *sort_by_token(tokens), of.random_words(step, i)])
            device.copy_in(of.batch, words)
            if i < N:
                exchange.gather_beside_forward(of)
            if first:
                of.zero_grad()
            of.forward(B, T, training=True)
            of.loss(B, T, dloss=np.inf if i == spoilt else 1.0 / (count * B * T))
            of.backward(B, T, accumulate=not first, last=last)
            exchange.add_batch(of)
        adamw_update(of, 1e-2, 0.9, 0.999, 1e-8, 0.1, step, grad_clip)
    of.gather_parameters()
    return device.to_host(of.params_memory).view(np.uint32)  # all bits: -0 == 0


FLAGS = [
    ({}, 0.0), ({}, 0.1), ({"sharded": True}, 0.0), ({"sharded": True}, 0.1), ({"bitwise": True}, 0.0),
    ({"sharded": True, "bitwise": True}, 0.1),
]  # fmt: skip


@pytest.mark.parametrize("N, of_each", [(2, 3), (3, 1)])
@pytest.mark.parametrize("config", [ODD, LLAMA_ODD, replace(LLAMA_ODD, tied=True), PYTHIA_ODD], ids=str)
@pytest.mark.parametrize("flags, grad_clip", FLAGS, ids=str)
def test_ranks_with_one_memory_train_as_one(config, N, of_each, flags, grad_clip, monkeypatch, rng):
    """Two steps with several batches on each rank, or one. All ranks end with the same bits; they are one rank's to
    rounding, or, in a bitwise run, to the last bit. Gradients are exchanged in buckets smaller than a tensor."""
    device.use("cpu")
    B = 2
    batches = rng.integers(0, config.vocab_size, (2, of_each * N, 2, B, T), dtype=np.int32)
    one, start = (train(config, B, these, grad_clip, **flags) for these in (batches, batches[:0]))
    monkeypatch.setattr(model, "BUCKET", 100)
    found = Threads(N, monkeypatch).run(lambda rank: train(config, B, batches, grad_clip, **flags))
    assert all(np.array_equal(found[0], other) for other in found[1:])
    if "bitwise" in flags:
        assert np.array_equal(found[0], one)
    else:
        found, one, start = (bits.view(np.float32) for bits in (found[0], one, start))
        assert np.linalg.norm(found - one) < 1e-3 * np.linalg.norm(one - start)


@pytest.mark.parametrize("config", [ODD, LLAMA_ODD], ids=str)
@pytest.mark.parametrize("batch", [0, 3])
def test_a_nan_on_one_rank_keeps_all_from_updating(config, batch, monkeypatch, rng):
    """With -z, in any batch of a step: a rank that had not seen it would update its shard."""
    device.use("cpu")
    batches = rng.integers(0, config.vocab_size, (1, 4, 2, 2, T), dtype=np.int32)
    start = train(config, 2, batches[:0], 0.0)
    found = Threads(2, monkeypatch).run(lambda rank: train(config, 2, batches, 0.0, spoilt=batch, sharded=True))
    assert all(np.array_equal(params, start) for params in found)


@pytest.mark.parametrize("one_memory", [True, False])
def test_a_gradient_that_overflows_on_one_rank_is_known_to_all(one_memory, monkeypatch):
    """With -z only the owner of a parameter sees that AdamW leaves it out; the next step must hold back on all."""
    device.use("cpu")

    def flags_of(rank: int) -> tuple[float, float]:
        of = kind_of(ODD)(ODD, 2, T, "softmax", sharded=True)
        of.randomize(42)
        of.grads_memory[:] = 0
        if one_memory:
            of.of_ranks.wte_indices.arrays[rank][:] = -1  # no row for the embedding
        of.grads.layer[ODD.num_layers - 1].fcw[0, 0] = 1e30
        adamw_update(of, 1e-2, 0.9, 0.999, 1e-8, 0.0, 1)
        own = float(of.norm[3])
        exchange.gather_beside_forward(of)
        exchange.wait_for_ranks(of)
        return own, float(of.norm[3])

    threads = Threads(3, monkeypatch)
    monkeypatch.setattr(collectives, "one_memory", lambda: one_memory)
    own, of_all = zip(*threads.run(flags_of), strict=True)
    assert sorted(own) == [0, 0, 1] and of_all == (1, 1, 1)


class Driver(Threads):
    """Ranks whose GPUs have one memory, on the CPU device; rank 1's fail at something."""

    def __init__(self, N: int, monkeypatch, fails: str | None = None, hosts: tuple[str, ...] = ("here",)):
        super().__init__(N, monkeypatch)
        self.fails, self.asked, self.operations = fails, [], device.memory_operations
        # One that fails at being "here" knows by itself that it reaches no other.
        elsewhere = fails == "here"
        monkeypatch.setattr(ranks, "hosts", lambda: [*hosts, *["there"] * (elsewhere and self.own.rank == 1)])
        for name in ("memory_handle", "open_memory", "memory_operations"):
            monkeypatch.setattr(device, name, getattr(self, name))

    def asks(self, what: str) -> None:
        self.asked.append((self.own.rank, what))
        if what == self.fails and self.own.rank == 1:
            raise RuntimeError("cudaErrorNotSupported: not here")

    def memory_handle(self, array):
        self.asks("shares")
        return array, 0

    def open_memory(self, handle, like):
        self.asks("opens")
        return np.empty_like(like) if self.fails == "reaches" and self.own.rank == 1 else handle[0]

    def memory_operations(self, operations) -> None:
        self.asks("waits")
        self.operations(operations)


@pytest.mark.parametrize("why, env, asked", [
    ({}, {}, "shares opens waits"),
    ({}, {"NCCL_P2P_DISABLE": "0"}, "shares opens waits"),
    ({}, {"NCCL_P2P_DISABLE": "1"}, None),
    ({"hosts": ("here", "there")}, {}, None),
    ({"fails": "here"}, {}, None),
    ({"fails": "shares"}, {}, "shares"),
    ({"fails": "opens"}, {}, "shares opens waits"),
    ({"fails": "waits"}, {}, "shares opens waits"),
    ({"fails": "reaches"}, {}, "shares opens waits"),
], ids=str)  # fmt: skip
def test_ranks_have_one_memory_where_all_of_them_can_share_it(why, env, asked, monkeypatch):
    device.use("cpu")
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    driver = Driver(3, monkeypatch, **why)
    reached = asked is not None and "fails" not in why
    assert driver.run(lambda rank: collectives.reach_one_another()) == [reached] * 3
    for rank in range(3):
        own = (asked or "").split()
        if rank == 1 and why.get("fails") in own:  # where it fails it asks for nothing more
            own = own[: own.index(why["fails"]) + 1]
        assert list(dict.fromkeys(what for r, what in driver.asked if r == rank)) == own


@pytest.mark.parametrize("fails", ["shares", "opens"])
def test_memory_that_cannot_be_shared_after_all_is_one_line(fails, monkeypatch):
    device.use("cpu")
    map_memory, driver = collectives.map_memory, Driver(2, monkeypatch, fails)
    with pytest.raises(UserError, match=r"^GPUs cannot share their memory \(.*not here\): set NCCL_P2P_DISABLE=1 .*$"):
        driver.run(lambda rank: map_memory(params=device.zeros((4,)), absent=None))

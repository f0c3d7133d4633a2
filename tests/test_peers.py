"""What several ranks do together, in one process: the exchange of a recorded step, with peer access and without.

Ranks are threads on devices that do nothing before they must (lazy.py). tests/test_ranks.py has processes and GPUs.
"""

import re
import sys
from dataclasses import astuple, replace
from pathlib import Path
from types import ModuleType

import device
from device.errors import UserError
from llmc import collectives, exchange, ranks
from llmc.dataloader import sort_by_token
from llmc.exchange import exchanging_model
from llmc.model import Model
from llmc.update import adamw_update
from models import LLAMA_ODD, ODD, ONE_OF_EACH, kind_of

import numpy as np
import pytest
from lazy import LazyDevice, Threads

T = 8


def train(
    config, B: int, batches: np.ndarray, grad_clip: float, spoilt: int | None = None, kind=None, **flags
) -> np.ndarray:  # fmt: skip
    """The parameters after as many steps as batches has (steps, batches a step, 2, B, T), as a rank, or the only one,
    trains on them. The losses of batch `spoilt` have a gradient that is not finite."""
    of, shared = exchanging_model(kind or kind_of(config), config, B, T, "softmax", **flags)
    of.randomize(42)
    of.params_memory[::5] = -0.0  # which has the bits of 0 no more once 0 is added
    count, N, rank, spoils = batches.shape[1], ranks.size(), ranks.rank(), [False]

    def forward_backward(first: bool, last: bool) -> None:
        if first:
            of.zero_grad()
        of.forward(B, T, training=True)
        of.loss(B, T, dloss=np.inf if spoils[0] else 1.0 / (count * B * T))
        of.backward(B, T, accumulate=not first)

    recorded = shared.record(forward_backward)
    for step, of_step in enumerate(batches, 1):
        for i in range(rank, count, N):
            tokens, targets = of_step[i]
            words = np.concatenate([tokens.ravel(), targets.ravel(), *sort_by_token(tokens), of.random_words(step, i)])
            device.copy_in(of.batch, words)
            spoils[0] = i == spoilt
            recorded(i < N, i + N >= count)
        adamw_update(shared, 1e-2, 0.1, grad_clip, step)
    shared.gather_parameters()
    return device.to_host(of.params_memory).view(np.uint32)  # all bits: -0 == 0


class EagerDevice(LazyDevice):
    eagerly = True


FLAGS = [
    ({}, 0.0), ({}, 0.1), ({"sharded": True}, 0.0), ({"sharded": True}, 0.1), ({"bitwise": True}, 0.0),
    ({"sharded": True, "bitwise": True}, 0.1),
]  # fmt: skip


WAYS = [(2, 3, LazyDevice, True), (3, 2, EagerDevice, True), (3, 1, LazyDevice, False)]
EACH = [config for config, attention in ONE_OF_EACH if attention != "flash"]
CONFIGS = [*EACH, replace(LLAMA_ODD, tied=True)]


# The exchange knows no model: one goes all ways with all flags, the others in the ordinary run a single way with some.
@pytest.mark.parametrize("config, N, of_each, lazy, peers, flags, grad_clip", [
    pytest.param(config, *way, *flags, marks=[pytest.mark.long] * (
        config is not ODD and (way is not WAYS[0] or flags not in FLAGS[2::3])
    ))
    for config in CONFIGS for way in WAYS for flags in FLAGS
], ids=str)  # fmt: skip
def test_ranks_train_as_one(config, N, of_each, lazy, peers, flags, grad_clip, monkeypatch, rng):
    """Three steps, of which two follow the plan, with several batches on each rank, or one. All ranks end with the same
    bits; they are one rank's to rounding, or, in a bitwise run, to the last bit. Buckets are smaller than a tensor."""
    device.use("cpu")
    B = 2
    batches = rng.integers(0, config.vocab_size, (3, of_each * N, 2, B, T), dtype=np.int32)
    one, start = (train(config, B, these, grad_clip, **flags) for these in (batches, batches[:0]))
    monkeypatch.setattr(exchange, "LARGEST_BUCKET", 100)
    if lazy is LazyDevice:  # else all is one bucket
        monkeypatch.setattr(exchange, "SMALLEST_BUCKET", 500)
    found = Threads(N, monkeypatch, peers).run(lambda rank: train(config, B, batches, grad_clip, **flags), lazy)
    assert all(np.array_equal(found[0], other) for other in found[1:])
    if "bitwise" in flags:
        assert np.array_equal(found[0], one)
    else:
        found, one, start = (bits.view(np.float32) for bits in (found[0], one, start))
        assert np.linalg.norm(found - one) < 1e-3 * np.linalg.norm(one - start)


@pytest.mark.parametrize("flags", [{}, {"bitwise": True}], ids=str)
def test_a_step_gathers_parameters_once(flags, monkeypatch, rng):
    """However many batches it has: they change at its end."""
    gathered, threads = [], Threads(2, monkeypatch, peers=False)

    def broadcast(pieces: list) -> None:
        threads.broadcast(pieces)
        threads.together(lambda: gathered.append(sum(x.size for x, _ in pieces)))

    monkeypatch.setattr(collectives, "broadcast", broadcast)
    monkeypatch.setattr(exchange, "SMALLEST_BUCKET", 500)

    def floats_of(batches: int) -> int:
        gathered.clear()
        of_steps = rng.integers(0, ODD.vocab_size, (4, 2 * batches, 2, 1, T), dtype=np.int32)
        threads.run(lambda rank: train(ODD, 1, of_steps, 0.0, sharded=True, **flags), LazyDevice)
        return sum(gathered)

    assert floats_of(1) == floats_of(3) > 0


# What a script shares with others by name: the tensors of attention and of the loss; and two places of dropout that
# are called as a tensor is.
SHARED = {"logits", "losses", "partials", "qkv", "atty", "proj", "dkv_heads", "encoded", "fcproj"}


def renamed(kind: type[Model]) -> type[Model]:
    """The model of a script in which every tensor has another name."""
    script = sys.modules[kind.__module__]
    tables = kind.Config.PARAMETERS + kind.ACTIVATIONS + kind.ACTIVATION_GRADIENTS + getattr(script, "FILE", ())
    names = {row[0] for row in tables} - SHARED
    source = re.sub(r"\b\w+\b", lambda found: f"{found[0]}_of_another" if found[0] in names else found[0],
                    Path(script.__file__).read_text())  # fmt: skip
    module = ModuleType(f"{script.__name__}_of_another")
    sys.modules[module.__name__] = module
    exec(compile(source, script.__file__, "exec"), module.__dict__)
    return getattr(module, kind.__name__)


@pytest.mark.parametrize("N", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("flags", [{}, {"sharded": True}, {"bitwise": True}], ids=str)
@pytest.mark.parametrize("config", EACH, ids=str)
def test_nothing_outside_a_script_knows_a_tensor_by_its_name(config, flags, N, monkeypatch, rng):
    """With other names it trains to the same bits."""
    monkeypatch.setattr(exchange, "SMALLEST_BUCKET", 500)
    batches = rng.integers(0, config.vocab_size, (2, N, 2, 1, T), dtype=np.int32)
    kind = kind_of(config)
    theirs = renamed(kind)
    other = theirs.Config(*astuple(config))

    def both(rank: int) -> bool:
        found = [train(of, 1, batches, 0.1, kind=kind, **flags) for kind, of in ((kind, config), (theirs, other))]
        return np.array_equal(*found)

    assert all(Threads(N, monkeypatch).run(both, LazyDevice))


@pytest.mark.parametrize("config", [ODD, LLAMA_ODD], ids=str)
@pytest.mark.parametrize("batch", [0, 3])
def test_a_nan_on_one_rank_keeps_all_from_updating(config, batch, monkeypatch, rng):
    """With -z, in any batch of a step: a rank that had not seen it would update its shard."""
    device.use("cpu")
    batches = rng.integers(0, config.vocab_size, (1, 4, 2, 2, T), dtype=np.int32)
    start = train(config, 2, batches[:0], 0.0)
    found = Threads(2, monkeypatch).run(lambda rank: train(config, 2, batches, 0.0, spoilt=batch, sharded=True))
    assert all(np.array_equal(params, start) for params in found)


@pytest.mark.parametrize("peers", [True, False])
def test_a_gradient_that_overflows_on_one_rank_is_known_to_all(peers, monkeypatch):
    """With -z only the owner of a parameter sees that AdamW leaves it out; the next step must hold back on all."""
    device.use("cpu")

    def flags_of(rank: int) -> tuple[float, float]:
        of, shared = exchanging_model(kind_of(ODD), ODD, 2, T, "softmax", sharded=True)
        of.randomize(42)
        of.grads_memory[:] = 0
        of.grads.layer[ODD.num_layers - 1].fcw[0, 0] = 1e30
        adamw_update(shared, 1e-2, 0.0, 0.0, 1)
        own = float(of.norm[3])
        shared.wait_for_ranks()
        shared.share_overflow()
        shared.wait_for_ranks()
        return own, float(of.norm[3])

    own, of_all = zip(*Threads(3, monkeypatch, peers).run(flags_of), strict=True)
    assert sorted(own) == [0, 0, 1] and of_all == (1, 1, 1)


class Driver(Threads):
    """Ranks with peer access, on the CPU device; rank 1's fail at something."""

    def __init__(self, N: int, monkeypatch, fails: str | None = None, hosts: tuple[str, ...] = ("here",)):
        super().__init__(N, monkeypatch)
        self.fails, self.asked, self.operations = fails, [], device.memory_operations  # of another CpuDevice
        # One that fails at being "here" knows by itself that it reaches no other.
        elsewhere = fails == "here"
        monkeypatch.setattr(ranks, "hosts", lambda: [*hosts, *["there"] * (elsewhere and self.own.rank == 1)])
        for name in ("memory_handle", "open_memory", "memory_operations"):
            monkeypatch.setattr(device.CpuDevice, name, staticmethod(getattr(self, name)))

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
def test_ranks_have_peer_access_where_all_of_them_can_share_their_memory(why, env, asked, monkeypatch):
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

"""What several ranks do together, in one process: the exchange of a recorded step, with peer access and without.

Ranks are threads on devices that do nothing before they must (lazy.py). tests/test_ranks.py has processes and GPUs.
"""

import re
import sys
import tracemalloc
from dataclasses import astuple, replace
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import device
from device.errors import UserError
from llmc.data.batches import Batches
from llmc.files.checkpoint import load_checkpoint
from llmc.files.model_file import read_model
from llmc.model.model import Model
from llmc.model.ranges import length, parameter_ranges
from llmc.model.tensors import num_parameters
from llmc.model.weights import randomize
from llmc.ranks import collectives, exchange, peer_transport, plan, ranks
from llmc.run import program
from llmc.run.saver import Saver
from llmc.step.training import Training, make_training
from llmc.step.update import adamw_update
from models import EVEN, LLAMA_ODD, ODD, ONE_OF_EACH, kind_of, state_of
from train_gpt2_fp32 import training_step

import numpy as np
import pytest
from lazy import LazyDevice, Threads

T = 8
PAGE = Path(__file__).resolve().parents[1] / "doc" / "exchange.md"
PRECISIONS = ("fp32", "bf16")


def train(
    config, B: int, batches: np.ndarray, grad_clip: float, spoilt: int | None = None, kind=None, precision="fp32",
    checkpoint: Path | None = None, directory: Path | None = None, **flags,
) -> np.ndarray:  # fmt: skip
    """The parameters after as many steps as batches has (steps, batches a step, 2, B, T), as a rank, or the only one,
    trains on them, with dropout if the model has it. They are fp32 bits: in bf16 those of the master copy, and each
    rank has all of them rounded. The losses of batch `spoilt` have a gradient that is not finite. checkpoint: what to
    go on from; directory: where to save."""
    device.use_precision(precision)
    kind = kind or kind_of(config)
    training = make_training(
        kind, config, B, T, "softmax", grad_clip=grad_clip, weight_decay=0.1, dropout=(0.1, 3) if kind.DROPS else None,
        **flags,
    )  # fmt: skip
    of, adamw, first = training.model, training.adamw, 0
    if checkpoint:
        first = resume(training, checkpoint)
    else:
        randomize(of, adamw, 42)
        zeros = np.arange(of.params_memory.size) % 5 == 0  # -0 has the bits of 0 no more once 0 is added
        of.params_memory[zeros] = 0x8000 if of.has_copy else -0.0
        if of.has_copy:
            own = zeros[adamw.first :][: adamw.low.size]
            adamw.low[own], adamw.v[own] = 0, 0
    loader, loss = InOrder(batches), of.loss
    if spoilt is not None:
        of.loss = lambda acts, batch, dloss, accumulate: loss(
            acts, batch, np.inf if loader.last == spoilt else dloss, accumulate
        )
    of_rank = batches.shape[1] // ranks.size()
    train_step, ends = training_step(training, Batches(training.batch, training.acts.losses, loader, of_rank)), []
    last = first + len(batches)
    for step in range(first, last):
        train_step(step, 1e-2)
        ends.append(device.event())
        if len(ends) > 1:  # as in a run, there are two steps in flight
            ends[-2].wait()
    training.exchange.gather_parameters()
    if directory:
        save(training, directory, last)
    found, *_ = state_of(training)
    assert not of.has_copy or np.array_equal(device.to_host(of.params_memory), device.to_bf16(found))
    return found.view(np.uint32)  # all bits: -0 == 0


class InOrder:
    """A loader of the batches of all steps."""

    def __init__(self, batches: np.ndarray):
        self.batches, self.given = batches.reshape(-1, *batches.shape[2:]), 0

    def next_batch(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        self.last = self.given
        inputs[:], targets[:] = self.batches[self.last]
        self.skip()

    def skip(self) -> None:
        self.given += 1


def save(training: Training, directory: Path, step: int) -> None:
    """As a run does."""
    settings = SimpleNamespace(flags=SimpleNamespace(checkpoint_dir=directory, keep=0), first_step=0)
    saver = Saver(training, settings, {}, "run", None, SimpleNamespace(directory=directory))
    saver.save(step, {}, SimpleNamespace(skipped=0, in_a_row=0))
    assert saver.unsaved == {}


def resume(training: Training, checkpoint: Path) -> int:
    """Goes on from a checkpoint as a run does, and returns its step."""
    tensors = moments = None
    if ranks.rank() == 0:
        _, tensors, *moments, _ = load_checkpoint(checkpoint, type(training.model.config))
    training.exchange.load_checkpoint(training.adamw, tensors, moments)
    return int(checkpoint.name.removeprefix("step_"))


@pytest.fixture(autouse=True)
def no_last_checkpoint(monkeypatch):
    monkeypatch.setattr(program, "last_checkpoint", None)


class EagerDevice(LazyDevice):
    eagerly = True


FLAGS = [
    ({}, 0.0), ({}, 0.1), ({"sharded": True}, 0.0), ({"sharded": True}, 0.1), ({"bitwise": True}, 0.0),
    ({"sharded": True, "bitwise": True}, 0.1),
]  # fmt: skip


WAYS = [(2, 3, LazyDevice, True), (3, 2, EagerDevice, True), (3, 1, LazyDevice, False)]
EACH = [config for config, attention in ONE_OF_EACH if attention != "flash"]
CONFIGS = [*EACH, replace(LLAMA_ODD, tied=True)]


def is_ordinary(precision: str, config, way: tuple, flags: tuple) -> bool:
    """The exchange knows no model: in the ordinary run one goes all ways with all flags, in bf16 one of the ways, and
    the rest some of the ways with some flags."""
    some = flags in FLAGS[2::3]
    if config is ODD:
        return precision == "fp32" or way is WAYS[2] or some
    return precision == "fp32" and way is WAYS[0] and some


@pytest.mark.parametrize("precision, config, N, of_each, lazy, peers, flags, grad_clip", [
    pytest.param(each[0], each[1], *each[2], *each[3], marks=[] if is_ordinary(*each) else pytest.mark.long)
    for each in product(PRECISIONS, CONFIGS, WAYS, FLAGS)
], ids=str)  # fmt: skip
def test_ranks_train_as_one(precision, config, N, of_each, lazy, peers, flags, grad_clip, monkeypatch, rng):
    """Three steps, of which two follow the plan, with several batches on each rank, or one. All ranks end with the same
    bits; they are one rank's to rounding, or, in a bitwise run, to the last bit. Buckets are smaller than a tensor."""
    device.use("cpu")
    B = 2
    batches = rng.integers(0, config.vocab_size, (3, of_each * N, 2, B, T), dtype=np.int32)
    flags = flags | {"precision": precision}
    one, start = (train(config, B, these, grad_clip, **flags) for these in (batches, batches[:0]))
    monkeypatch.setattr(peer_transport, "MAX_ROUND", 100)
    if lazy is LazyDevice:  # else all is one bucket
        monkeypatch.setattr(plan, "MIN_BUCKET", 500)
    found = Threads(N, monkeypatch, peers).run(lambda rank: train(config, B, batches, grad_clip, **flags), lazy)
    assert all(np.array_equal(found[0], other) for other in found[1:])
    if "bitwise" in flags:
        assert np.array_equal(found[0], one)
    else:
        found, one, start = (bits.view(np.float32) for bits in (found[0], one, start))
        # A sum that is rounded otherwise may round a bf16 parameter the other way, by 2^-8 of itself.
        allowed = {"fp32": 1e-3, "bf16": 3e-2}[precision]
        assert np.linalg.norm(found - one) < allowed * np.linalg.norm(one - start)


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_moments_that_are_shared_out_change_no_bit(precision, bitwise, peers, monkeypatch, rng):
    monkeypatch.setattr(plan, "MIN_BUCKET", 500)
    batches, flags = rng.integers(0, ODD.vocab_size, (3, 4, 2, 2, T), dtype=np.int32), {"bitwise": bitwise}

    def trained(sharded: bool) -> list[np.ndarray]:
        work = lambda rank: train(ODD, 2, batches, 0.0, precision=precision, sharded=sharded, **flags)  # noqa: E731
        return Threads(2, monkeypatch, peers).run(work, LazyDevice)

    found = trained(False) + trained(True)
    assert all(np.array_equal(found[0], other) for other in found)


def test_a_step_of_gpt2_has_the_plan_that_the_book_shows(monkeypatch, rng):
    """That of doc/exchange.md, of GPT-2 124M, here with 32 times fewer channels."""
    page = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        exec(block, page)
    config = replace(ODD, num_layers=12, num_heads=2, channels=24)
    monkeypatch.setattr(plan, "MIN_BUCKET", (1 << 22) // 32**2)
    plans = []
    monkeypatch.setattr(exchange, "StepPlan", lambda kind=exchange.StepPlan: plans.append(kind()) or plans[-1])
    batches = rng.integers(0, config.vocab_size, (2, 2, 2, 1, T), dtype=np.int32)
    Threads(2, monkeypatch).run(lambda rank: train(config, 1, batches, 0.0, sharded=True), LazyDevice)

    layers = [(name, range(config.num_layers) if of[0] == "L" else [0]) for name, of in config.parameters()]
    names = [(name, layer) for name, of in layers for layer in of]
    found = dict(zip(parameter_ranges(config), names, strict=True))
    embedding, *buckets = plans[0].sum_buckets
    assert [found[one] for one in embedding.ranges] == [("wte", 0)]
    assert [[found[one] for one in bucket.ranges] for bucket in buckets] == page["buckets"]
    assert [found[one] for one in plans[0].tail_grads if one in found][: len(page["tail"])] == page["tail"]
    first = [found[one] for one in plans[0].first_params if one in found]
    assert first[:3] == [("qkvw", 0), ("attprojw", 0), ("fcw", 0)]
    gathered = [[found[one] for one in bucket.ranges] for bucket in plans[0].gather_buckets]
    assert gathered[:2] == [[("fcprojw", 0), ("qkvw", 1), ("attprojw", 1)], [("fcw", 1), ("fcprojw", 1)]]
    assert gathered[-1] == [("wte", 0)]


def test_a_step_without_products_is_summed_at_its_end():
    """A plan knows a step by what its launches read and write. It looks for products, but need not find any."""
    device.use("cpu")
    model, learned = kind_of(ODD)(ODD, T), plan.StepPlan()
    backward = device.Launch("a kernel", updates=[device.recording.range_of(model.grads_memory)])
    learned.learn_sums(model, [backward], [])
    assert not learned.sum_buckets and length(learned.tail_grads) == model.grads_memory.size


@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("peers", [False, True])
def test_the_memory_of_an_exchange_is_counted(peers, bitwise, monkeypatch):
    """All but the barrier's words, four bytes a rank."""
    N, B = 3, 2

    def of_rank(rank: int) -> int:
        training = make_training(kind_of(ODD), ODD, B, T, "softmax", sharded=True, bitwise=bitwise)
        own, allocated = device.current.device, []
        empty = own.empty
        own.empty = lambda *of: allocated.append(empty(*of)) or allocated[-1]
        exchange.Exchange(training.model, training.adamw, training.batch, True, bitwise)
        counted = exchange.exchange_bytes(ODD, B, T, bitwise)
        return sum(array.nbytes for array in allocated) - sum(counted.values())

    assert Threads(N, monkeypatch, peers).run(of_rank) == [4 * N * peers] * N


# Checkpoints


@pytest.mark.parametrize("flags", [{}, {"sharded": True}, {"bitwise": True}, {"sharded": True, "bitwise": True}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("precision, N", [
    ("fp32", 3), ("bf16", 3), ("bf16", 1), pytest.param("fp32", 1, marks=pytest.mark.long)
])  # fmt: skip
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not_stopped(
    precision, N, flags, tmp_path, monkeypatch, rng
):
    """On the same ranks, or of a bitwise run on any. A checkpoint holds the fp32 parameters, with which a run in
    another precision goes on."""
    monkeypatch.setattr(device, "STAGED", 3000)  # of 4,800 or more on a rank
    batches = rng.integers(0, ODD.vocab_size, (4, 6, 2, 1, T), dtype=np.int32)

    def trained(N: int, batches, **more) -> list[np.ndarray]:
        with monkeypatch.context() as patch:
            return Threads(N, patch, peers=False).run(lambda rank: train(ODD, 1, batches, 0.5, **flags | more))

    trained(N, batches[:2], precision=precision, directory=tmp_path)
    checkpoint = tmp_path / "step_00000002"
    whole = trained(N, batches, precision=precision)
    others = [1, 2, 3] if "bitwise" in flags else [N]
    found = [bits for n in others for bits in trained(n, batches[2:], precision=precision, checkpoint=checkpoint)]
    assert all(np.array_equal(bits, whole[0]) for bits in found)
    saved = np.concatenate([tensor.ravel() for tensor in read_model(checkpoint / "model.bin", type(ODD))[1].values()])
    for other in PRECISIONS:
        assert np.array_equal(trained(N, batches[:0], precision=other, checkpoint=checkpoint)[0], saved.view(np.uint32))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_shared_out_is_saved_and_loaded_without_a_whole_copy_on_any_rank(precision, tmp_path, monkeypatch):
    """To save, all ranks together, which are threads here, take the memory of a few pieces; to save or load, none makes
    room for more than a piece."""
    config, N, sizes, empty = replace(EVEN, num_layers=4), 3, [], device.CpuDevice.empty
    monkeypatch.setattr(device, "STAGED", 500)

    def counted(self, shape, *dtype):
        sizes.append(np.prod(shape))
        return empty(self, shape, *dtype)

    def of_rank(rank: int) -> int:
        device.use_precision(precision)
        training = make_training(kind_of(config), config, 1, T, "softmax", sharded=True)
        randomize(training.model, training.adamw, 42)
        ranks.all_gather(None)
        monkeypatch.setattr(device.CpuDevice, "empty", counted)
        save(training, tmp_path, 1)  # what is made once, such as a module, has been made
        ranks.all_gather(None)
        tracemalloc.start()
        ranks.all_gather(None)
        save(training, tmp_path, 2)
        ranks.all_gather(None)
        peak = tracemalloc.get_traced_memory()[1]
        ranks.all_gather(None)
        resume(training, tmp_path / "step_00000001")
        return peak

    peak = max(Threads(N, monkeypatch, peers=False).run(of_rank))
    tracemalloc.stop()
    n = num_parameters(config)
    assert (tmp_path / "step_00000002" / "optimizer.bin").stat().st_size > 8 * n
    assert max(sizes) == 500 and 0 < peak < 4 * n / 8, (max(sizes), peak)


@pytest.mark.parametrize("flags", [{}, {"bitwise": True}], ids=str)
def test_a_step_gathers_parameters_once(flags, monkeypatch, rng):
    """However many batches it has: they change at its end."""
    gathered, threads = [], Threads(2, monkeypatch, peers=False)

    def broadcast(pieces: list) -> None:
        threads.broadcast(pieces)
        threads.together(lambda: gathered.append(sum(x.size for x, _ in pieces)))

    monkeypatch.setattr(collectives, "broadcast", broadcast)
    monkeypatch.setattr(plan, "MIN_BUCKET", 500)

    def floats_of(batches: int) -> int:
        gathered.clear()
        of_steps = rng.integers(0, ODD.vocab_size, (4, 2 * batches, 2, 1, T), dtype=np.int32)
        threads.run(lambda rank: train(ODD, 1, of_steps, 0.0, sharded=True, **flags), LazyDevice)
        return sum(gathered)

    assert floats_of(1) == floats_of(3) > 0


# What a script shares with others by name: the output of its last norm, the tensors of attention and of the loss; and
# modules of kernels and places of dropout that are called as a tensor is.
SHARED = {"head", "dln", "ln", "logits", "losses", "qkv", "gelu", "swiglu", "proj", "fcproj"}


def renamed(kind: type[Model]) -> type[Model]:
    """The model of a script in which every tensor has another name."""
    script = sys.modules[kind.__module__]
    tables = kind.Config.PARAMETERS + kind.ACTIVATIONS + kind.GRADIENTS + getattr(script, "FILE", ())
    names = "|".join({row[0] for row in tables} - SHARED)
    source = re.sub(rf"\b({names})(_recomputed)?\b", r"\1_of_another\2", Path(script.__file__).read_text())
    module = ModuleType(f"{script.__name__}_of_another")
    sys.modules[module.__name__], module.__file__ = module, script.__file__
    exec(compile(source, script.__file__, "exec"), module.__dict__)
    return getattr(module, kind.__name__)


@pytest.mark.parametrize("precision, N", [
    ("fp32", 1), ("fp32", 2), ("bf16", 2), *(pytest.param(each, 3, marks=pytest.mark.long) for each in PRECISIONS)
])  # fmt: skip
@pytest.mark.parametrize("flags", [{}, {"sharded": True}, {"bitwise": True}], ids=str)
@pytest.mark.parametrize("config", EACH, ids=str)
def test_nothing_outside_a_script_knows_a_tensor_by_its_name(config, flags, precision, N, monkeypatch, rng):
    """With other names it trains to the same bits."""
    monkeypatch.setattr(plan, "MIN_BUCKET", 500)
    batches = rng.integers(0, config.vocab_size, (2, N, 2, 1, T), dtype=np.int32)
    kind = kind_of(config)
    theirs = renamed(kind)
    other = theirs.Config(*astuple(config))

    def both(rank: int) -> bool:
        kinds = (kind, config), (theirs, other)
        found = [train(of, 1, batches, 0.1, kind=kind, precision=precision, **flags) for kind, of in kinds]
        return np.array_equal(*found)

    assert all(Threads(N, monkeypatch).run(both, LazyDevice))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("config", [ODD, LLAMA_ODD], ids=str)
@pytest.mark.parametrize("batch", [0, 3])
def test_a_nan_on_one_rank_keeps_all_from_updating(config, batch, precision, monkeypatch, rng):
    """With -z, in any batch of a step: a rank that had not seen it would update its shard."""
    device.use("cpu")
    batches = rng.integers(0, config.vocab_size, (1, 4, 2, 2, T), dtype=np.int32)
    start = train(config, 2, batches[:0], 0.0, precision=precision)
    flags = {"spoilt": batch, "sharded": True, "precision": precision}
    found = Threads(2, monkeypatch).run(lambda rank: train(config, 2, batches, 0.0, **flags))
    assert all(np.array_equal(params, start) for params in found)


@pytest.mark.parametrize("peers", [True, False])
def test_a_gradient_that_overflows_on_one_rank_is_known_to_all(peers, monkeypatch):
    """With -z only the owner of a parameter sees that AdamW leaves it out; the next step must hold back on all."""
    device.use("cpu")

    def flags_of(rank: int) -> tuple[float, float]:
        training = make_training(kind_of(ODD), ODD, 2, T, "softmax", sharded=True)
        of, adamw, shared = training.model, training.adamw, training.exchange
        randomize(of, adamw, 42)
        of.grads_memory[:] = 0
        of.grads.layer[ODD.num_layers - 1].fcw[0, 0] = 1e30
        adamw_update(of, adamw, shared, 1e-2, 1)
        own = float(adamw.grad_norm[3])
        shared.transport.wait_for_ranks()
        shared.transport.share_overflow()
        shared.transport.wait_for_ranks()
        return own, float(adamw.grad_norm[3])

    own, of_all = zip(*Threads(3, monkeypatch, peers).run(flags_of), strict=True)
    assert sorted(own) == [0, 0, 1] and of_all == (1, 1, 1)


class Driver(Threads):
    """Ranks with peer access, on the CPU device; rank 1's fail at something."""

    def __init__(self, N: int, monkeypatch, fails: str | None = None, hosts: tuple[str, ...] = ("here",)):
        super().__init__(N, monkeypatch)
        self.fails = fails
        # One that fails at being "here" knows by itself that it reaches no other.
        elsewhere = fails == "here"
        monkeypatch.setattr(ranks, "hosts", lambda: [*hosts, *["there"] * (elsewhere and self.own.rank == 1)])
        for name in ("memory_handle", "open_memory"):
            monkeypatch.setattr(device.CpuDevice, name, staticmethod(getattr(self, name)))

    def asks(self, what: str) -> None:
        if what == self.fails and self.own.rank == 1:
            raise RuntimeError("cudaErrorNotSupported: not here")

    def memory_handle(self, array):
        self.asks("shares")
        return array, 0

    def open_memory(self, handle, like):
        self.asks("opens")
        return np.empty_like(like) if self.fails == "reaches" and self.own.rank == 1 else handle[0]


@pytest.mark.parametrize("why, env", [
    ({}, {}), ({}, {"NCCL_P2P_DISABLE": "1"}), ({"hosts": ("here", "there")}, {}),
    *(({"fails": what}, {}) for what in ("here", "shares", "opens", "reaches")),
], ids=str)  # fmt: skip
def test_ranks_have_peer_access_where_all_of_them_can_share_their_memory(why, env, monkeypatch):
    device.use("cpu")
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    driver = Driver(3, monkeypatch, **why)
    assert driver.run(lambda rank: collectives.reach_one_another()) == [not why and not env] * 3


@pytest.mark.parametrize("fails", ["shares", "opens"])
def test_memory_that_cannot_be_shared_after_all_is_one_line(fails, monkeypatch):
    device.use("cpu")
    map_memory, driver = collectives.map_memory, Driver(2, monkeypatch, fails)
    with pytest.raises(UserError, match=r"^GPUs cannot share their memory \(.*not here\): set NCCL_P2P_DISABLE=1 .*$"):
        driver.run(lambda rank: map_memory(params=device.zeros((4,)), absent=None))

"""What a backward pass gives the device to do beside the rest, a graph's second stream does at an unknown time until it
is joined. So in between nothing else may write what it reads or writes, nor read what it writes. The same is true of
the gradients that it hands over to be summed over several ranks."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_model import MODELS, ONE_OF_EACH, name_of

from kernels.adamw import adamw_update
from kernels.exchange import late, overlaps, without
from llmc import collectives, device, ranks
from llmc.batches import Batches
from llmc.model import build_from_random
from llmc.tensors import Config
from models import ODD, kind_of
from train_gpt2_fp32 import GPT2

# The parameters of each kernel and product that it writes: pointers that are not const.
WRITTEN = {"sgemm": {"c"}, "sgemm_strided_batched": {"c"}, "fill_zero": {"array"}} | {
    name: {one.split()[-1].lstrip("*") for one in parameters if "*" in one and "const" not in one}
    for path in (Path(__file__).resolve().parents[1] / "kernels").glob("*.cu")
    for name, parameters in device.kernel_declarations(path).items()
}


class Watch:
    """Stands for device.beside, device.join and the observer of device.observe; does none of the work."""

    def __init__(self):
        self.blocks = self.overlapped = 0
        self.inside, self.open = False, []  # the accesses of blocks that are not joined yet
        self.conflicts = set()

    @contextmanager
    def beside(self):
        self.blocks, self.inside = self.blocks + 1, True
        yield
        self.inside = False

    def join(self):
        self.open.clear()

    def __call__(self, name, arguments, work):
        for parameter, value in arguments.items():
            if not isinstance(value, np.ndarray):
                continue
            start = value.__array_interface__["data"][0]
            access = start, start + value.nbytes, parameter in WRITTEN[name], f"{name}'s {parameter}"
            if self.inside:
                self.open.append(access)
                continue
            self.overlapped += len(self.open) > 0
            self.conflicts |= {
                (what, access[3]) for first, last, written, what in self.open
                if first < access[1] and start < last and (written or access[2])
            }  # fmt: skip


def watched(config: Config, attention: str, B: int, dropout: float, monkeypatch) -> Watch:
    """A backward pass, of which nothing is computed."""
    device.use("cpu")
    watch, T = Watch(), 32
    model = kind_of(config)(config, B, T, attention)
    model.dropout = dropout
    monkeypatch.setattr(device, "beside", watch.beside)
    monkeypatch.setattr(device, "join", watch.join)
    with device.observe(watch):
        model.backward(B, T)
    return watch


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("B", [1, 32])  # from 1024 rows on, operands are transposed
@pytest.mark.parametrize("config, attention", MODELS, ids=name_of)
def test_what_is_done_beside_backward_is_left_alone_by_it(config, attention, B, dropout, monkeypatch):
    watch = watched(config, attention, B, dropout, monkeypatch)
    assert not watch.conflicts
    assert not watch.open  # all is joined in the end
    assert watch.blocks == 4 * config.num_layers + 1  # every weight's gradient
    assert watch.overlapped > 0


class LazyDevice(device.CpuDevice):
    """Does nothing before it must, as a GPU may; and what is given `beside`, only where it is joined."""

    def __init__(self):
        super().__init__()
        self.queue, self.late, self.inside, self.done = [], [], False, 0
        for name in ("copy_in", "copy_out", "fill_zero", "sgemm", "sgemm_strided_batched"):
            setattr(self, name, partial(self.put, getattr(self, name)))

    def put(self, work, *arguments, **options):
        (self.late if self.inside else self.queue).append(partial(work, *arguments, **options))

    def kernel(self, path, name):
        return partial(self.put, super().kernel(path, name))

    @contextmanager
    def beside(self):
        self.inside = True
        yield
        self.inside = False

    def join(self):
        self.queue, self.late = self.queue + self.late, []

    def do(self, count):
        while self.done < count:
            self.queue[self.done]()
            self.done += 1

    def synchronize(self):
        self.do(len(self.queue))

    def event(self):
        return SimpleNamespace(wait=partial(self.do, len(self.queue)))

    def to_host(self, array):
        self.synchronize()
        return super().to_host(array)


class Tokens:
    def __init__(self, vocab_size):
        self.rng, self.vocab_size = np.random.default_rng(0), vocab_size

    def next_batch(self, inputs, targets):
        inputs[:], targets[:] = self.rng.integers(0, self.vocab_size, (2, *inputs.shape))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("config, attention", ONE_OF_EACH, ids=name_of)
def test_a_device_that_lags_behind_trains_to_the_same_bits(config, attention, dropout, monkeypatch):
    """Steps of three batches, the next given to the device while it has the one before."""

    def trained(kind) -> list[np.ndarray]:
        monkeypatch.setattr(device, "CpuDevice", kind)
        device.use("cpu")
        model = build_from_random(kind_of(config), config, 2, 11, attention, seed=1)
        model.dropout = dropout
        batches, losses = Batches(model, Tokens(config.vocab_size), count=3), []
        train_step, ends = model.train_step(batches, weight_decay=0.1, grad_clip=1.0), []
        for step in range(4):
            train_step(step, 1e-2)
            ends.append(device.event())
            if step > 0:
                ends[step - 1].wait()
                losses.append(batches.mean_loss(step - 1))
        return [np.array(losses), *map(device.to_host, (model.params_memory, model.m_memory, model.v_memory))]

    real = device.CpuDevice
    try:
        lazy = trained(LazyDevice)
    finally:
        monkeypatch.undo()
    assert all(np.array_equal(*pair) for pair in zip(lazy, trained(real), strict=True))


def test_a_join_that_is_missing_is_noticed(monkeypatch):
    monkeypatch.setattr(Watch, "join", lambda self: None)
    config, attention = MODELS[0]
    assert watched(config, attention, 1, 0.0, monkeypatch).conflicts


@pytest.mark.parametrize("sharded, grad_clip", [(False, 0.0), (True, 0.0), (True, 1.0)])
@pytest.mark.parametrize("config, attention", MODELS, ids=name_of)
def test_every_gradient_is_sent_once_and_then_left_alone(config, attention, sharded, grad_clip, monkeypatch):
    """Of all that backward and AdamW do, for three ranks of which this is the second. AdamW reads a gradient once its
    sum has been waited for."""
    device.use("cpu")
    watch, sent, conflicts = Watch(), [], []
    monkeypatch.setattr(ranks, "size", lambda: 3)
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    model = kind_of(config)(replace(config, num_layers=4), 1, 16, attention, sharded=sharded)
    base = model.grads_memory.__array_interface__["data"][0]

    def note(arrays):
        for array in arrays:
            start = (array.__array_interface__["data"][0] - base) // 4
            if 0 <= start < model.grads_memory.size:
                sent.append((start, start + array.size))

    def observe(name, arguments, work):
        watch(name, arguments, work)
        for value in arguments.values():
            start = (value.__array_interface__["data"][0] - base) // 4 if isinstance(value, np.ndarray) else -1
            if 0 <= start < model.grads_memory.size and overlaps([(start, start + value.size)], sent[len(waited) :]):
                conflicts.append(name)
            if 0 <= start < model.grads_memory.size and name in ("adamw_kernel", "squares_partials_kernel"):
                read = [(start, start + (value.size if name == "adamw_kernel" else arguments["n"]))]
                conflicts.extend((name, one) for one in without(read, waited))

    waited = []
    monkeypatch.setattr(device, "join_communication", lambda: waited.extend(sent[len(waited) :]))
    monkeypatch.setattr(collectives, "all_reduce", note)
    monkeypatch.setattr(collectives, "reduce", lambda pieces: note([array for array, _ in pieces]))
    with device.observe(observe):
        model.backward(1, 16)
        assert not conflicts and not watch.open
        early = sum(end - start for start, end in sent)
        adamw_update(model, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, grad_clip)
        assert not conflicts
    whole = [(0, model.grads_memory.size)]
    assert sum(end - start for start, end in sent) == sum(end - start for start, end in overlaps(whole, sent))
    assert sorted(sent)[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(sorted(sent)))
    assert sorted(sent)[-1][1] == model.grads_memory.size
    assert early == model.grads_memory.size - sum(end - start for start, end in late(model))


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_step_gathers_parameters_once(bitwise, monkeypatch):
    """Before its first batch; they change at its end."""
    device.use("cpu")
    gathered, model = [], GPT2(ODD, 1, 16, bitwise=bitwise)
    monkeypatch.setattr("kernels.train_step.gather_beside_forward", lambda of: gathered.append(len(seen)))
    batches, seen = Batches(model, Tokens(ODD.vocab_size), 3), []
    monkeypatch.setattr(model, "backward", lambda *_, **flags: seen.append(flags))
    step = model.train_step(batches)
    step(0, 1e-3)
    step(1, 1e-3)
    assert gathered == [0, 3] and len(seen) == 6


def test_a_batch_that_is_not_the_last_sends_nothing(monkeypatch):
    device.use("cpu")
    monkeypatch.setattr(ranks, "size", lambda: 2)
    monkeypatch.setattr(collectives, "all_reduce", lambda arrays: arrays and pytest.fail("sent"))
    model = GPT2(ODD, 1, 16)
    with device.observe(lambda name, arguments, work: None):
        model.backward(1, 16, accumulate=False, last=False)

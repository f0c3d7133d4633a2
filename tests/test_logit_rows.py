"""The classifier by chunks of positions against the classifier of the whole batch, which test_model.py compares."""

import re
from dataclasses import replace

import device
from conftest import switch_device
from llmc.data.batches import fill_batch
from llmc.model.activations import Activations
from llmc.ranks import ranks
from llmc.step import memory
from llmc.step.memory import Plan, training_sizes
from llmc.step.training import make_training
from models import ODD, ONE_OF_EACH, build, flat_parameters, kind_of, make_batches, name_of
from oracle import BF16, assert_close, model_tolerance

import numpy as np
import pytest
from lazy import LazyDevice, Threads
from test_peers import T as RANKS_T
from test_peers import train as train_rank
from test_train import checkpoint_bytes, here, make_folder, run_here, steps_of  # noqa: F401

B, T, ROWS = 2, 11, 5  # chunks of 5, 5, 5, 5 and 2 positions
each_model = pytest.mark.parametrize("config, attention", ONE_OF_EACH, ids=name_of)


def trained(config, attention: str, logit_rows: int, kind=None) -> dict[str, np.ndarray]:
    """What a model with chunks of so many rows leaves behind: training's losses and gradients of two batches, the
    second added to the first, the losses without training, and the logits that follow a text."""
    if kind:
        device.current.device = kind()
    training = build(device, config, B, T, attention, flat_parameters(config), logit_rows=logit_rows)
    model, acts, batch = training.model, training.acts, training.batch

    def step(accumulate: bool) -> None:
        if not accumulate:
            model.zero_grad()
        model.forward(acts, batch)
        model.loss(acts, batch, 0.25, accumulate)
        model.backward(acts, batch, accumulate)

    recorded, found = device.record(step, [model.grads_memory]), {}
    for repeat in range(2):  # the second time in the order of the plan
        for i, tokens in enumerate(make_batches(config, 2, B, T)):
            fill_batch(batch, *tokens)
            recorded(i > 0)
            found[f"losses of training {i}, {repeat}"] = device.to_host(acts.losses).copy()
        found[f"gradients {repeat}"] = device.to_host(model.grads_memory).copy()
    model.forward(acts, batch)
    model.loss(acts, batch)
    found["losses"] = device.to_host(acts.losses).copy()
    return found


@each_model
def test_chunks_give_the_losses_and_gradients_of_the_whole(each_model_dev, config, attention):
    if attention == "flash" and each_model_dev.precision == "fp32" and each_model_dev.kind == "cuda":
        pytest.skip("flash attention is in TF32 or bf16")
    whole, chunks = (trained(config, attention, rows) for rows in (0, ROWS))
    allowed = BF16 if device.floatX == device.BF16 else model_tolerance(device)
    for name, want in whole.items():
        assert_close(name, chunks[name], want, allowed)


@pytest.mark.parametrize("config, attention", ONE_OF_EACH[::2], ids=name_of)
def test_chunks_give_the_same_bits_on_a_device_that_lags_behind(config, attention):
    want, found = (trained(config, attention, ROWS, kind) for kind in (device.CpuDevice, LazyDevice))
    device.use("cpu")
    assert all(np.array_equal(want[name], found[name]) for name in want)


@each_model
def test_chunks_take_the_memory_of_one(monkeypatch, config, attention):
    switch_device("cpu", monkeypatch)
    kind, config = kind_of(config), replace(config, vocab_size=5000)
    sizes = [
        training_sizes(kind, config, Plan(8, 32, attention, rows))["activations"] for rows in (256, 0, 128, 16)
    ]
    assert sizes[0] == sizes[1] == sizes[2] + 4 * 128 * 5120
    assert sizes[2] > sizes[3]  # in a Pythia other tensors lie there, too
    activations = Activations(kind(config, 32), 8, 32, attention, 16)
    assert activations.memory.nbytes == sizes[3] and activations.views().logits.shape == (16, 5120)


@pytest.mark.parametrize("others", [False, True])
def test_where_the_whole_does_not_fit_on_every_rank_all_take_chunks(monkeypatch, others):
    config, attention = ONE_OF_EACH[0]
    switch_device("cpu", monkeypatch)
    needed = sum(training_sizes(kind_of(config), config, Plan(B, T, attention)).values())
    monkeypatch.setattr(memory, "CHUNK", ROWS)
    asked = []
    monkeypatch.setattr(ranks, "all_gather", lambda crowded: [*asked, asked.append(crowded) or crowded, others])
    for free, rows in (needed, ROWS if others else B * T), (needed - 1, ROWS):
        monkeypatch.setattr(device.current.device, "memory", lambda free=free: (free, 64 << 30))
        training = make_training(kind_of(config), config, B, T, attention)
        assert (asked.pop(), training.activations.logit_rows) == (free < needed, rows)
        training = make_training(kind_of(config), config, B, T, attention, logit_rows=7)
        assert not asked and training.activations.logit_rows == 7


def test_a_run_says_and_keeps_its_chunks_and_may_change_them(tmp_path, run_here):  # noqa: F811
    folder = make_folder(tmp_path / "cpu.gpt2")
    common = "-g", "0", "-n", "2", "-x", "4", "--checkpoint-dir", "run"
    plain = run_here(folder, "-g", "0", "-x", "4")
    whole = run_here(folder, *common, "--logit-rows", "7")
    assert re.search(r"^\| logits +\| of 7 positions at a time +\|$", whole, re.M) and "positions" not in plain
    want, losses = checkpoint_bytes(folder, 4), steps_of(whole)
    assert losses == pytest.approx(steps_of(plain), rel=1e-5)
    (folder / "run" / "step_00000004").rename(folder / "step_00000004")
    out = run_here(folder, *common, "-y", "1")
    assert steps_of(out) == {step: losses[step] for step in (3, 4)} and checkpoint_bytes(folder, 4) == want
    (folder / "run" / "step_00000004").rename(folder / "again")
    out = run_here(folder, *common, "-y", "1", "--logit-rows", "0")
    assert "--logit-rows was 7 and is now 0" in out and steps_of(out) == pytest.approx(
        {step: losses[step] for step in (3, 4)}, rel=1e-5
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_train_by_chunks_as_one_does(precision, monkeypatch, rng):
    flags = {"logit_rows": 7, "bitwise": True, "precision": precision}
    batches = rng.integers(0, ODD.vocab_size, (3, 2, 2, B, RANKS_T), dtype=np.int32)

    def trained(N: int) -> list[np.ndarray]:
        return Threads(N, monkeypatch).run(lambda rank: train_rank(ODD, B, batches, 0.1, **flags))

    (one,) = trained(1)
    assert all(np.array_equal(one, other) for other in trained(2))

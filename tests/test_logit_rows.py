"""The classifier by chunks of positions against the classifier of the whole batch, which test_model.py compares."""

import re
from dataclasses import replace

import device
from conftest import switch_device
from llmc import exchange, ranks
from llmc.exchange import exchanging_model
from models import ONE_OF_EACH, kind_of
from oracle import BF16, assert_close, model_tolerance

import numpy as np
import pytest
from lazy import LazyDevice
from test_model import flat_parameters, make_batches, name_of, send
from test_train import checkpoint_bytes, make_folder, run, steps_of

B, T, ROWS = 2, 11, 5  # chunks of 5, 5, 5, 5 and 2 positions
each_model = pytest.mark.parametrize("config, attention", ONE_OF_EACH, ids=name_of)


def trained(config, attention: str, logit_rows: int, kind=None) -> dict[str, np.ndarray]:
    """What a model with chunks of so many rows leaves behind: training's losses and gradients of two batches, the
    second added to the first, the losses without training, and the logits that follow a text."""
    if kind:
        device.current.device = kind()
    model = kind_of(config)(config, B, T, attention, logit_rows=logit_rows)
    model.acts_memory.view(np.uint8).fill(255)  # NaN in any type
    model.put(0, flat_parameters(config))

    def step(accumulate: bool) -> None:
        if not accumulate:
            model.zero_grad()
        model.forward(B, T, training=True)
        model.loss(B, T, dloss=0.25)
        model.backward(B, T, accumulate)

    recorded, found = device.record(step, [model.grads_memory]), {}
    for repeat in range(2):  # the second time in the order of the plan
        for i, batch in enumerate(make_batches(config, 2, B, T)):
            send(device, model, *batch)
            recorded(i > 0)
            found[f"losses of training {i}, {repeat}"] = device.to_host(model.acts(B, T).losses).copy()
        found[f"gradients {repeat}"] = device.to_host(model.grads_memory).copy()
    model.forward(B, T)
    model.loss(B, T)
    found["losses"] = device.to_host(model.acts(B, T).losses).copy()
    return found


@each_model
def test_chunks_give_the_losses_and_gradients_of_the_whole(each_product, config, attention):
    if attention == "flash" and each_product.precision == "fp32" and each_product.kind == "cuda":
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
        kind.sizes_of_buffers(config, 8, 32, attention, logit_rows=rows)["activations"] for rows in (256, 0, 128, 16)
    ]
    assert sizes[0] == sizes[1] == sizes[2] + 4 * 128 * 5120
    assert sizes[2] > sizes[3]  # in a Pythia other tensors lie there, too
    model = kind(config, 8, 32, attention, logit_rows=16)
    assert model.acts_memory.nbytes == sizes[3] and model.acts(8, 32).logits.shape == (16, 5120)


@pytest.mark.parametrize("others", [False, True])
def test_where_the_whole_does_not_fit_on_every_rank_all_take_chunks(monkeypatch, others):
    config, attention = ONE_OF_EACH[0]
    switch_device("cpu", monkeypatch)
    needed = sum(kind_of(config).sizes_of_buffers(config, B, T, attention).values())
    monkeypatch.setattr(exchange, "CHUNK", ROWS)
    asked = []
    monkeypatch.setattr(ranks, "all_gather", lambda crowded: [*asked, asked.append(crowded) or crowded, others])
    for free, rows in (needed, ROWS * others), (needed - 1, ROWS):
        monkeypatch.setattr(device.current.device, "memory", lambda free=free: (free, 64 << 30))
        model, _ = exchanging_model(kind_of(config), config, B, T, attention)
        assert (asked.pop(), model.logit_rows) == (free < needed, rows)
        model, _ = exchanging_model(kind_of(config), config, B, T, attention, logit_rows=7)
        assert not asked and model.logit_rows == 7


def test_a_run_says_and_keeps_its_chunks_and_may_change_them(tmp_path):
    folder = make_folder(tmp_path / "cpu.gpt2")
    common = "-g", "0", "-n", "2", "-x", "4", "--checkpoint-dir", "run"
    plain = run(folder, "-g", "0", "-x", "4")
    whole = run(folder, *common, "--logit-rows", "7")
    assert re.search(r"^\| logits +\| of 7 positions at a time +\|$", whole, re.M) and "positions" not in plain
    want, losses = checkpoint_bytes(folder, 4), steps_of(whole)
    assert losses == pytest.approx(steps_of(plain), rel=1e-5)
    (folder / "run" / "step_00000004").rename(folder / "step_00000004")
    out = run(folder, *common, "-y", "1")
    assert steps_of(out) == {step: losses[step] for step in (3, 4)} and checkpoint_bytes(folder, 4) == want
    (folder / "run" / "step_00000004").rename(folder / "again")
    out = run(folder, *common, "-y", "1", "--logit-rows", "0")
    assert "--logit-rows was 7 and is now 0" in out and steps_of(out) == pytest.approx(
        {step: losses[step] for step in (3, 4)}, rel=1e-5
    )


def test_ranks_train_by_chunks_as_one_does(tmp_path):
    folder = make_folder(tmp_path / "cpu.gpt2")
    flags = "-g", "0", "-x", "3", "--logit-rows", "7", "--bitwise", "1", "-d", "64", "--checkpoint-dir", "run"
    losses = steps_of(run(folder, *flags))
    want = checkpoint_bytes(folder, 3)
    (folder / "run").rename(folder / "one")
    assert steps_of(run(folder, *flags, "--gpus", "2")) == losses and checkpoint_bytes(folder, 3) == want

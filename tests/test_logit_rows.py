"""The classifier by chunks of positions against the classifier of the whole batch, which test_model.py compares."""

from dataclasses import replace

import device
from conftest import switch_device
from llmc.data.batches import fill_batch
from llmc.model.activations import Activations
from llmc.ranks import ranks
from llmc.step import memory
from llmc.step.memory import Plan, training_sizes
from llmc.step.training import make_training
from models import ONE_OF_EACH, build, flat_parameters, kind_of, make_batches, name_of
from oracle import BF16, assert_close, model_tolerance

import numpy as np
import pytest

B, T, ROWS = 2, 11, 5  # chunks of 5, 5, 5, 5 and 2 positions
each_model = pytest.mark.parametrize("config, attention", ONE_OF_EACH, ids=name_of)


def trained(config, attention: str, logit_rows: int) -> dict[str, np.ndarray]:
    """What a model with chunks of so many rows leaves behind: training's losses and gradients of two batches, the
    second added to the first, and the losses without training."""
    training = build(device, config, B, T, attention, flat_parameters(config), logit_rows=logit_rows)
    model, acts, batch, found = training.model, training.acts, training.batch, {}
    model.zero_grad()
    for i, tokens in enumerate(make_batches(config, 2, B, T)):
        fill_batch(batch, *tokens)
        model.forward(acts, batch)
        model.loss(acts, batch, 0.25, accumulate=i > 0)
        found[f"losses of training {i}"] = device.to_host(acts.losses).copy()
        model.backward(acts, batch, accumulate=i > 0)
    found["gradients"] = device.to_host(model.grads_memory)
    model.forward(acts, batch)
    model.loss(acts, batch)
    return found | {"losses": device.to_host(acts.losses)}


@each_model
def test_chunks_give_the_losses_and_gradients_of_the_whole(each_model_dev, config, attention):
    if attention == "flash" and each_model_dev.precision == "fp32" and each_model_dev.kind == "cuda":
        pytest.skip("flash attention is in TF32 or bf16")
    whole, chunks = (trained(config, attention, rows) for rows in (0, ROWS))
    allowed = BF16 if device.floatX == device.BF16 else model_tolerance(device)
    for name, want in whole.items():
        assert_close(name, chunks[name], want, allowed)


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

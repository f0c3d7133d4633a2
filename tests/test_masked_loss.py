"""A loss of which some targets are not learned: the mean over those that are, however a step is cut into batches."""

import device
from llmc.data.batches import Batches, validate
from models import (
    FAMILIES,
    GPT2S,
    QWENS,
    GivenBatches,
    build,
    flat_parameters,
    name_parameters,
)
from oracle import assert_close, flat_parameters_of, model_tolerance, transformers_model
from support.runs import differing, train

import numpy as np
import pytest
import torch
from lazy import Threads

CONFIG, T = QWENS[0], 16


def marked_rows(config, *shape: int, share: float = 0.3) -> np.ndarray:
    """Inputs and targets (..., 2, T), most targets not learned."""
    rng = np.random.default_rng(shape)
    rows = rng.integers(0, config.vocab_size, (*shape, 2, T), dtype=np.int32)
    rows[..., 1, :][rng.random((*shape, T)) > share] = -1
    return rows


def cut(rows: np.ndarray, B: int) -> np.ndarray:
    """Rows (steps, N, 2, T) as batches (steps, N / B, 2, B, T)."""
    steps, N = rows.shape[:2]
    return rows.reshape(steps, N // B, B, 2, T).swapaxes(2, 3)


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_step_has_the_same_loss_and_gradient_however_it_is_cut(bitwise, monkeypatch):
    device.use("cpu")
    rows = marked_rows(CONFIG, 3, 8)
    rows[1, 2:4, 1] = -1  # one of four batches has nothing to learn
    options = {"bitwise": bitwise}
    found = {"one of 8": train(CONFIG, cut(rows, 8), **options), "four of 2": train(CONFIG, cut(rows, 2), **options)}
    two = train(CONFIG, cut(rows, 4), **options)
    both = Threads(2, monkeypatch, peers=False).run(lambda rank: train(CONFIG, cut(rows, 4), **options))
    if bitwise:
        assert differing(two, *both) == set()
    found |= {"two of 4": two, "two ranks of 4": both[0], "rank 1": both[1]}
    for name, each in found.items():
        for what in "loss 0", "loss 1", "loss 2", "m":
            assert_close(f"{name}: {what}", each[what], found["one of 8"][what], 1e-4)


@pytest.mark.parametrize("config", [family[0] for family in FAMILIES], ids=lambda config: config.NAME)
def test_loss_and_gradients_are_those_of_transformers_with_labels_of_minus_100(config, model_dev):
    rows = marked_rows(config, 1, 4)
    theirs = transformers_model(config)
    flat = flat_parameters_of(theirs, config).astype(np.float32)
    inputs, targets = (torch.as_tensor(rows[0, :, n], dtype=torch.long) for n in range(2))
    labels = torch.where(targets < 0, -100, targets)
    want = torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), labels.flatten())
    want.backward()
    gradients = name_parameters(flat_parameters_of(theirs, config, gradients=True), config)
    training = build(model_dev, config, 2, T, "softmax", flat)
    loader = GivenBatches(cut(rows, 2)[0])
    loader.marked = True
    sent = Batches(training.batch, training.acts.losses, loader, 2)
    training.model.zero_grad()
    for i in range(2):
        sent.read(0, i)
        sent.send(0, i)
        training.model.forward(training.acts, training.batch)
        training.model.loss(training.acts, training.batch, dloss=training.batch.dloss, accumulate=i > 0)
        training.model.backward(training.acts, training.batch, accumulate=i > 0)
        sent.fetch_losses(0, i)
    model_dev.synchronize()
    assert sent.mean_loss(0) == pytest.approx(want.item(), abs=5e-5)
    tolerance = 5e-5 if model_dev.kind == "cpu" else model_tolerance(model_dev)
    for name, _ in config.parameters():
        got = model_dev.to_host(getattr(training.model.grads, name))
        assert_close(f"gradient of {name}", got, getattr(gradients, name), tolerance)


def test_a_step_without_anything_to_learn_changes_nothing_at_first_and_is_finite(one_dev):
    rows = marked_rows(CONFIG, 1, 4)
    rows[:, :, 1] = -1
    found = train(CONFIG, cut(rows, 2), grad_clip=1.0)
    assert found["loss 0"] == 0 and not found["m"].any() and not found["v"].any()


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16", "fp8"])
def test_in_every_precision_a_batch_without_anything_to_learn_adds_nothing(one_dev, precision):
    rows = marked_rows(CONFIG, 1, 4)
    alone = train(CONFIG, cut(rows[:, :2], 2), precision=precision)
    rows[:, 2:, 1] = -1
    found = train(CONFIG, cut(rows, 2), precision=precision)
    assert found["loss 0"] == pytest.approx(alone["loss 0"], rel=1e-12)
    assert np.array_equal(found["m"], alone["m"])


def test_validation_is_the_mean_over_learned_targets(one_dev):
    config = GPT2S[0]
    rows = marked_rows(config, 1, 6)
    training = build(one_dev, config, 2, T, "softmax", flat_parameters(config))
    losses = []

    def measure(rows: np.ndarray):
        loader = GivenBatches(cut(rows, 2)[0])
        loader.marked, loader.reset = True, lambda: None
        batches = Batches(training.batch, training.acts.losses, loader)

        def forward_loss() -> None:
            training.model.forward(training.acts, training.batch)
            training.model.loss(training.acts, training.batch)
            losses.append(one_dev.to_host(training.acts.losses).astype(float).sum())

        return validate(batches, forward_loss, 3, lambda inputs, targets: int(targets.size + (targets < 0).sum() * 99))

    loss, bits = measure(rows)
    learned = (rows[:, :, 1] >= 0).sum()
    assert loss == pytest.approx(sum(losses) / learned, rel=1e-6)
    assert bits == pytest.approx(loss / np.log(2), rel=1e-12)
    rows[:, :, 1] = -1
    with pytest.raises(ValueError, match="nothing of the first 3 validation batches is learned"):
        measure(rows)

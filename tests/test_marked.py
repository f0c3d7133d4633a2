"""Tokens that are marked as not learned: the file, the batches, and the loss as the mean over what is learned."""

from math import log

import device
import oracle
from device.errors import UserError
from llmc.data.batches import Batches, fill_batch, validate
from llmc.data.dataloader import DataLoader
from llmc.data.token_file import MARK, UNMARKED, open_tokens, write_tokens
from llmc.model.batch import Batch
from models import LLAMA_ODD, ODD, PYTHIA_ODD, QWEN_ODD, build, flat_parameters, name_of, name_parameters, names_of
from oracle import assert_close
from support.runs import train
from train_gpt2_fp32 import training_step

import numpy as np
import pytest
import torch
from lazy import Threads

V, T = 101, 16


def write(path, tokens: np.ndarray, learned: np.ndarray) -> None:
    write_tokens(path, np.where(learned, 0, MARK) | tokens.astype(np.int32), V, marked=True)


def draw(rng, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and which are learned: uneven shares, so that means of means would differ."""
    return rng.integers(0, V, size), rng.random(size) < np.linspace(0, 0.8, size)


@pytest.fixture
def data(tmp_path, rng):
    tokens, learned = draw(rng, 16 * T + 1)
    learned[: 2 * T + 1] = False  # the first batch of two rows learns nothing
    write(tmp_path / "data_train.bin", tokens, learned)
    return tmp_path / "data", tokens, learned


def test_a_marked_file_has_a_number_of_its_own_and_the_top_bits(data):
    prefix, tokens, learned = data
    path = f"{prefix}_train.bin"
    words = np.fromfile(path, "<u4")
    assert words[:3].tolist() == [20261128, 1, len(tokens)] and len(words) == 256 + len(tokens)
    np.testing.assert_array_equal(words[256:] % 2**31, tokens)
    np.testing.assert_array_equal(words[256:] < 2**31, learned)
    assert open_tokens(path).marked and (open_tokens(path)[:] & UNMARKED).tolist() == tokens.tolist()
    words[1] = 2
    words.tofile(path)
    with pytest.raises(UserError, match="token file version 2; version 1 is needed"):
        open_tokens(path)


@pytest.mark.parametrize("seed", [None, 7])
def test_the_loader_gives_targets_that_are_learned_and_all_inputs(data, seed):
    prefix, tokens, learned = data
    write_tokens(f"{prefix}_val.bin", tokens, V)
    marked, plain = (DataLoader(prefix, split, 2, T, V, shuffle_seed=seed) for split in ("train", "val"))
    assert marked.marked and not plain.marked and marked.fingerprint != plain.fingerprint
    marks = dict(zip(map(tuple, np.lib.stride_tricks.sliding_window_view(tokens, T)[::T]),
                     np.lib.stride_tricks.sliding_window_view(learned[1:], T)[::T], strict=True))  # fmt: skip
    x, y, inputs, targets = np.empty((4, 2, T), np.int32)
    for _ in range(11):
        marked.next_batch(x, y)
        plain.next_batch(inputs, targets)
        np.testing.assert_array_equal(x, inputs)
        np.testing.assert_array_equal(y, np.where([marks[tuple(row)] for row in x], targets, -1))


def test_a_marked_token_outside_the_vocabulary_is_refused(data):
    with pytest.raises(UserError, match="outside the model's vocabulary"):
        DataLoader(data[0], "train", 2, T, int(data[1].max()))


def one_step(config, flat, prefix, B: int, count: int, **flags) -> dict[str, np.ndarray]:
    """The loss and the gradients of a step of so many batches on this rank."""
    training = build(device, config, B, T, "softmax", flat, **flags)
    sent = Batches(training.batch, training.acts.losses, DataLoader(prefix, "train", B, T, V), count)
    assert training_step(training, sent)(0, 0.0)
    device.synchronize()
    found = {"loss": np.array(sent.mean_loss(0)), "flat": device.to_host(training.model.grads_memory).copy()}
    return found | {name: device.to_host(getattr(training.model.grads, name)).copy() for name in names_of(config)}


CONFIGS = ODD, LLAMA_ODD, PYTHIA_ODD, QWEN_ODD


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_the_loss_is_the_mean_over_what_is_learned_however_the_step_is_cut(model_dev, config, data, monkeypatch):
    """One batch of 8, four of 2, two ranks of 4 and of two of 2, as transformers in float64 with labels of -100."""
    prefix, tokens, learned = data
    theirs = oracle.transformers_model(config)
    flat = oracle.flat_parameters_of(theirs, config).astype(np.float32)
    x, labels = tokens[: 8 * T].reshape(8, T), np.where(learned, tokens, -100)[1 : 8 * T + 1].reshape(8, T)
    logits = theirs(torch.tensor(x)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).flatten(), ignore_index=-100)
    loss.backward()
    want = name_parameters(oracle.flat_parameters_of(theirs, config, gradients=True), config)
    ways = {"one of 8": one_step(config, flat, prefix, 8, 1), "four of 2": one_step(config, flat, prefix, 2, 4),
            "bitwise": one_step(config, flat, prefix, 2, 4, bitwise=True)}  # fmt: skip
    for B, count, bitwise in ((4, 1, False), (2, 2, False), (2, 2, True)) if device.kind == "cpu" else ():
        with monkeypatch.context() as patch:
            work = lambda _: one_step(config, flat, prefix, B, count, sharded=False, bitwise=bitwise)  # noqa: B023, E731
            found, other = Threads(2, patch, True).run(work, device.CpuDevice)
            assert other["loss"] == found["loss"]
            ways[f"two ranks with {count} of {B}, {bitwise=}"] = found
    tolerance = 5e-5 if device.kind == "cpu" else oracle.model_tolerance(device)
    for way, got in ways.items():
        assert_close(f"loss of {way}", got["loss"], loss.detach().numpy(), tolerance)
        for name in names_of(config):
            assert_close(f"d{name} of {way}", got[name], getattr(want, name), tolerance)
    if device.kind == "cpu":
        assert found["loss"] == ways["bitwise"]["loss"]
        assert found["flat"].tobytes() == ways["bitwise"]["flat"].tobytes()


def test_a_file_whose_tokens_are_all_learned_has_the_bits_of_a_plain_one(one_dev, data):
    prefix, tokens, _ = data
    for recorded in True, False:
        device.use_recording(recorded)
        write_tokens(f"{prefix}_train.bin", tokens, V)
        plain = one_step(ODD, flat_parameters(ODD), prefix, 2, 3)
        write(f"{prefix}_train.bin", tokens, np.ones(len(tokens), bool))
        assert plain["flat"].tobytes() == one_step(ODD, flat_parameters(ODD), prefix, 2, 3)["flat"].tobytes()
    device.use_recording(True)


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16", "fp8"])
def test_in_every_precision_a_batch_that_learns_nothing_adds_nothing(one_dev, precision, rng):
    batches = rng.integers(0, V, (1, 2, 2, 2, T), dtype=np.int32)  # steps, batches, inputs and targets, B, T
    batches[:, 0, 1][rng.random((1, 2, T)) > 0.3] = batches[:, 1, 1] = -1
    alone, both = (train(QWEN_ODD, batches[:, :count], precision=precision) for count in (1, 2))
    assert both["loss 0"] == pytest.approx(alone["loss 0"], rel=1e-12) and both["m"].any()
    np.testing.assert_array_equal(both["m"], alone["m"])


def test_a_step_that_learns_nothing_has_no_loss_and_no_gradient(one_dev, data):
    prefix, tokens, _ = data
    write(f"{prefix}_train.bin", tokens, np.zeros(len(tokens), bool))
    found = one_step(ODD, flat_parameters(ODD), prefix, 2, 2)
    assert found["loss"] == 0 and not found["flat"].any()


def test_a_replayed_step_takes_its_own_number_of_targets(one_dev, data):
    """Several steps, each with another number, recorded and not: the same bits."""
    prefix, bits = data[0], []
    for recorded in True, False:
        device.use_recording(recorded)
        training = build(device, ODD, 2, T, "softmax", flat_parameters(ODD))
        sent = Batches(training.batch, training.acts.losses, DataLoader(prefix, "train", 2, T, V), 2)
        step_of, losses = training_step(training, sent), []
        for step in range(5):
            step_of(step, 1e-3)
            device.synchronize()
            losses.append(sent.mean_loss(step))
        bits.append((losses, device.to_host(training.model.params_memory).tobytes()))
    device.use_recording(True)
    assert bits[0] == bits[1] and len(set(bits[0][0])) == 5


def test_validation_is_the_mean_over_what_is_learned_and_counts_its_bytes_alone(one_dev, tmp_path, rng):
    tokens, learned = draw(rng, 4 * 2 * T + 1)
    nats, losses, batch = rng.uniform(1, 3, V), one_dev.zeros((2, T)), Batch(2, T)

    def forward_loss() -> None:
        targets = one_dev.to_host(batch.targets)
        one_dev.copy_in(losses, np.where(targets < 0, 0, nats[targets]).astype(np.float32))

    def measure(marks: np.ndarray):
        write(tmp_path / "data_val.bin", tokens, marks)
        batches = Batches(batch, losses, DataLoader(tmp_path / "data", "val", 2, T, V))
        return validate(batches, forward_loss, 4, lambda x, y: int(y.sum()))

    loss, bits = measure(learned)
    seen = tokens[1:][learned[1:]]
    assert loss == pytest.approx(nats[seen].mean(), rel=1e-6)
    assert bits == pytest.approx(nats[seen].sum() / log(2) / seen.sum(), rel=1e-6)
    with pytest.raises(UserError, match="nothing of the first 4 validation batches is learned"):
        measure(np.zeros_like(learned))


def test_fill_batch_sets_the_gradient_of_the_mean(one_dev):
    batch, targets = Batch(2, 3), np.array([[5, -1, 2], [-1, -1, 0]])
    fill_batch(batch, np.ones((2, 3), int), targets)
    assert one_dev.to_host(batch.dloss).tolist() == [np.float32(1 / 3)]

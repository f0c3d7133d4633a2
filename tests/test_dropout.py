"""Dropout: its random numbers, where and when they are drawn, and whole models that train with it."""

from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace

import device
import oracle
from kernels.dropout import Dropout
from llmc.data.batches import Batches
from llmc.run.validation import Validation
from llmc.step.training import Training
from models import (
    PYTHIA_HEADS_OF_64,
    PYTHIA_ODD,
    GivenBatches,
    build,
    flat_parameters,
    forward_backward,
    make_batches,
    name_of,
)
from oracle import assert_close, guarded, model_tolerance
from support.draws import cu, factors, words
from train_gpt2_fp32 import training_step
from train_pythia import PythiaConfig

import numpy as np
import pytest
import torch
import torch.nn.functional as F

# The random numbers

ZEROS, ONES = [0] * 4, [0xFFFFFFFF] * 4
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
# The known answers that the paper's authors publish with their code: counter, key, result.
KNOWN = [
    (ZEROS, ZEROS[:2], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (ONES, ONES[:2], [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (PI[:4], PI[4:], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 of counters (..., 4) under a key (2,), as the paper defines it."""
    c, key = [counter[..., k].astype(np.uint64) for k in range(4)], [int(word) for word in key]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        low = np.uint64(0xFFFFFFFF)
        c = [b >> np.uint64(32) ^ c[1] ^ np.uint64(key[0]), b & low,
             a >> np.uint64(32) ^ c[3] ^ np.uint64(key[1]), a & low]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return np.stack(c, -1).astype(np.uint32)


def test_philox_gives_the_papers_known_answers(dev):
    counters, keys, answers = (np.array(column, np.uint32) for column in zip(*KNOWN, strict=True))
    for counter, key, answer in zip(counters, keys, answers, strict=True):
        assert np.array_equal(philox(counter, key), answer)
    with guarded(dev) as memory:
        out = memory.write((3, 4), np.int32)
        args = out, memory.read(counters.view(np.int32)), memory.read(keys.view(np.int32)), 3
        cu.launch("philox_kernel", (1,), (32,), args)
    assert np.array_equal(dev.to_host(out).view(np.uint32), answers)


@pytest.mark.parametrize("N, C, rate, site", [
    (7, 64, 0.1, 0), (9, 5, 0.5, 1), (130, 131, 0.9, 24), (9, 64, 1 - 2.0**-40, 0),
])  # fmt: skip
def test_every_device_and_type_drops_what_philox_of_group_site_step_and_batch_decides(each_type, N, C, rate, site):
    seed, step, i = 0x123456789ABCDEF0, 3_000_000_000, 7
    groups = -(-C // 4)
    counter = np.array([0, site, step, i], np.uint32) * np.ones((N, groups, 1), np.uint32)
    counter[..., 0] = np.arange(N * groups).reshape(N, groups)
    drawn = philox(counter, [seed % 2**32, seed >> 32]).reshape(N, 4 * groups)[:, :C]
    kept = drawn.astype(np.float64) / 2**32 >= rate
    ours = factors(Dropout(words(rate, seed, step, i), site), N, C)
    assert np.array_equal(ours, np.where(kept, np.float32(1 / (1 - rate)), 0))


# Whole models. Layers are in test_parallel_residual.py, the embedding is in test_encoder.py.

PYTHIAS = [
    (PYTHIA_ODD, "softmax"), (PYTHIA_HEADS_OF_64, "flash"), (replace(PYTHIA_ODD, parallel=False), "softmax"),
    (replace(PYTHIA_ODD, norm="rms", tied_norm=True), "relu"),
]  # fmt: skip
each_model = pytest.mark.parametrize("config, attention", PYTHIAS, ids=name_of)
B, T = 2, 11


def training_with(config: PythiaConfig, attention: str, rate: float, count: int = 1) -> tuple[Training, Batches]:
    """What trains with dropout, and batches that are all the same."""
    dropout = (rate, 3) if rate else None
    training = build(device, config, B, T, attention, flat_parameters(config), dropout=dropout)
    return training, Batches(training.batch, training.acts.losses, same_batches(config), count)


def same_batches(config: PythiaConfig) -> GivenBatches:
    return GivenBatches(repeat(*make_batches(config, 1, B, T)))


def dropping(monkeypatch, config: PythiaConfig, random) -> None:
    """Makes oracle's definition of the model drop what ours drops with these words: of the second and fourth product of
    each layer, which add to the residual stream, and of the embedding."""
    C = config.channels
    embedding, *branches = (factors(Dropout(random, site), B, T, C) for site in range(1 + 2 * config.num_layers))
    products = iter([factor for branch in branches for factor in (1, branch)] + [1])  # the last are the logits
    define, tokens_of_rows = oracle.pythia, torch.arange(B * T).view(B, T)

    def linear(x, *weights):
        return F.linear(x, *weights) * next(products)

    def with_embedding_dropped(p, tokens, *others):
        rows = (p["wte"][tokens] * embedding).flatten(0, 1)
        return define({**p, "wte": rows}, tokens_of_rows, *others)

    monkeypatch.setattr(oracle, "F", SimpleNamespace(**{**vars(F), "linear": linear}))
    monkeypatch.setattr(oracle, "pythia", with_embedding_dropped)


@each_model
def test_loss_and_every_gradient_of_a_model_with_dropout_equal_autograds(model_dev, monkeypatch, config, attention):
    training, _ = training_with(config, attention, 0.25)
    (batch,) = make_batches(config, 1, B, T)
    _, loss = forward_backward(model_dev, training, *batch, 1 / (B * T))
    dropping(monkeypatch, config, training.batch.random)
    params = oracle.table_of(config, flat_parameters(config))
    _, want_loss, want = oracle.gradients(config, params, *batch, attention)
    tolerance = oracle.MODEL_TF32 if attention == "flash" else model_tolerance(model_dev)
    assert_close("loss", loss, want_loss, tolerance)
    for name, gradient in want.items():
        assert_close(f"d{name}", getattr(training.model.grads, name), gradient, tolerance)


@each_model
def test_only_training_drops(model_dev, config, attention):
    losses = []
    for rate in 0.0, 0.5:
        training, batches = training_with(config, attention, rate)
        settings = SimpleNamespace(B=B, T=T, val_batches=1)
        validation = Validation(training, settings, same_batches(config), None, None)
        losses.append(validation.batches.run(validation.forward_loss).copy())
        step_of = training_step(training, batches)
        for step in range(3):
            step_of(step, 0.0)
        losses.append(validation.batches.run(validation.forward_loss).copy())
    assert all(np.array_equal(losses[0], other) for other in losses[1:])


@each_model
def test_each_step_and_each_batch_of_it_drops_anew_and_a_repeated_step_drops_the_same(model_dev, config, attention):
    training, batches = training_with(config, attention, 0.5, count=3)
    step_of, seen = training_step(training, batches), []
    for step in [0, 1, 2, 3, 4, 2]:  # on a GPU the later ones are replayed
        step_of(step, 0.0)
        model_dev.synchronize()
        seen.append([batches.losses[step % 2, i].mean(dtype=np.float64) for i in range(3)])
    assert len(np.unique(seen[:5])) == 15  # the batch and the weights are always the same
    assert seen[5] == seen[2]

"""Dropout: its random numbers, where and when they are drawn, and whole models that train with it."""

import inspect
from dataclasses import replace
from functools import partial
from itertools import repeat
from types import SimpleNamespace

import oracle
from draws import cu, factors, words
from kernels.dropout import Dropout
from kernels.layernorm import fused_residual_forward, layernorm_backward
from kernels.reduce import MOST_PARTIALS
from kernels.rmsnorm import fused_residual_rmsnorm_forward, rmsnorm_backward
from llmc.batches import Batches
from llmc.exchange import Exchange
from llmc.model import Model, build_from_random, dropouts
from llmc.step import train_step
from llmc.tensors import Config
from models import EVEN, ODD, ONE_OF_EACH, PYTHIA_ODD, kind_of
from oracle import KERNEL_FP32, assert_close, exact, guarded, leaf, model_tolerance, normal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_model import GivenBatches, make_batches, name_of

FP32 = np.float32

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


@pytest.mark.parametrize("N, C, rate, site", [(7, 64, 0.1, 0), (9, 5, 0.5, 1), (130, 131, 0.9, 24)])
def test_every_device_and_type_drops_what_philox_of_group_site_step_and_batch_decides(each_type, N, C, rate, site):
    seed, step, i = 0x123456789ABCDEF0, 3_000_000_000, 7
    groups = -(-C // 4)
    counter = np.array([0, site, step, i], np.uint32) * np.ones((N, groups, 1), np.uint32)
    counter[..., 0] = np.arange(N * groups).reshape(N, groups)
    drawn = philox(counter, [seed % 2**32, seed >> 32]).reshape(N, 4 * groups)[:, :C]
    kept = drawn.astype(np.float64) / 2**32 >= rate
    ours = factors(Dropout(each_type.asarray(words(rate, seed, step, i)), site), N, C)
    assert np.array_equal(ours, np.where(kept, np.float32(1 / (1 - rate)), 0))


def assert_likely(square: float, freedom: int) -> None:
    """Fails for a sum of squares that a chi-square distribution hardly ever gives, be it too large or too small."""
    above = torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(square / 2).double())
    assert 1e-4 < above < 1 - 1e-4, f"chi-square {square:.1f} of {freedom} degrees of freedom"


def dropped(dev, N: int, C: int, rate: float = 0.3, site: int = 1, **which) -> np.ndarray:
    """1 for what is dropped of an (N, C) array, else 0."""
    return (factors(Dropout(dev.asarray(words(rate, **which)), site), N, C) == 0).double().numpy()


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.97])
def test_as_many_are_dropped_as_the_rate_says_in_every_row_column_and_lane_of_four(dev, rate):
    N, C = 500, 400
    x = dropped(dev, N, C, rate)
    for counts, of in ((x.sum(1), C), (x.sum(0), N), (x.reshape(-1, 4).sum(0), x.size / 4), (x.sum()[None], x.size)):
        assert_likely(((counts - of * rate) ** 2 / (of * rate * (1 - rate))).sum(), len(counts))


def test_how_many_of_eight_neighbours_are_dropped_is_distributed_binomially(dev):
    x = dropped(dev, 500, 400, 0.5).reshape(-1, 8)
    seen = np.bincount((x @ 2 ** np.arange(8)).astype(int), minlength=256)  # every pattern as often as every other
    assert_likely(((seen - len(x) / 256) ** 2 / (len(x) / 256)).sum(), 255)


def test_sites_steps_batches_seeds_rows_and_neighbours_are_independent(dev):
    N, C = 500, 400
    x = dropped(dev, N, C)
    others = {
        "site": dropped(dev, N, C, site=2), "step": dropped(dev, N, C, step=6), "batch": dropped(dev, N, C, i=1),
        "seed": dropped(dev, N, C, seed=4), "far seed": dropped(dev, N, C, seed=3 + 2**32),
        "neighbour": np.roll(x, 1, axis=1), "next group": np.roll(x, 4, axis=1), "row": np.roll(x, 1, axis=0),
    }  # fmt: skip
    for name, other in others.items():
        correlation = np.corrcoef(x.ravel(), other.ravel())[0, 1]
        assert abs(correlation) * (N * C) ** 0.5 < 4, name
    assert np.array_equal(x, dropped(dev, N, C))


def test_the_highest_rates_are_no_overflow(dev):
    rate = 1 - 2.0**-40
    x = factors(Dropout(dev.asarray(words(rate)), 0), 9, 64)
    assert not x.any()


# Layers with one branch. Two are in test_parallel_residual.py, the embedding in test_encoder.py.


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("B, T, C", [(2, 9, 64), (1, 5, 7)])
def test_a_fused_norm_drops_of_the_projection_and_its_bias_and_passes_the_gradient_back(each_type, norm, B, T, C):
    rng = np.random.default_rng([B, T, C])
    inp1, inp2, dout, before = (normal(rng, B, T, C) for _ in range(4))
    weight, bias, bias2 = (normal(rng, C) for _ in range(3))
    inp1 = exact(inp1 + np.copysign(FP32(1), inp1))
    layernorm, sums = norm == "layernorm", [normal(rng, C) for _ in range(3)]
    with guarded(each_type) as memory:
        drop = Dropout(memory.read(words(0.3)), 1)
        residual, out = memory.write((B, T, C)), memory.write((B, T, C))
        mean, rstd = memory.write((B, T), FP32), memory.write((B, T), FP32)
        dinp, dinp2, ours = memory.update(before), memory.write((B, T, C)), [memory.update(x, FP32) for x in sums]
        stream, w = (memory.read(inp1), memory.read(inp2)), memory.read(weight)
        if layernorm:
            ours_bias, ours_bias2 = memory.read(bias), memory.read(bias2)
            fused_residual_forward(
                residual, out, mean, rstd, *stream, w, ours_bias, B, T, C, bias2=ours_bias2, dropout=drop
            )
            scratch = memory.scratch((MOST_PARTIALS, 3 * C), FP32)
            layernorm_backward(
                dinp, *ours[:2], memory.read(dout), residual, w, mean, rstd, B, T, C,
                scratch=scratch, dbias2=ours[2], dinp2=dinp2, dropout=drop,
            )  # fmt: skip
        else:
            fused_residual_rmsnorm_forward(residual, out, rstd, *stream, w, 1e-5, B, T, C, dropout=drop)
            mean.fill(0)  # it has none
            scratch = memory.scratch((MOST_PARTIALS, C), FP32)
            rmsnorm_backward(
                dinp, ours[0], memory.read(dout), residual, w, rstd, B, T, C,
                scratch=scratch, dinp2=dinp2, dropout=drop,
            )  # fmt: skip
    inp1, inp2, weight, bias, bias2 = leaves = [leaf(x) for x in (inp1, inp2, weight, bias, bias2)]
    kept = factors(drop, B, T, C)
    added_up = inp1 + (inp2 + bias2 if layernorm else inp2) * kept
    x = added_up + (leaf(residual) - added_up).detach()  # as it is stored, with the gradient of what was added up
    want = F.layer_norm(x, (C,), weight, bias, 1e-5) if layernorm else F.rms_norm(x, (C,), weight, 1e-5)
    ((want * leaf(dout).detach()).sum() + (x * leaf(before).detach()).sum()).backward()
    assert_close("residual", residual, added_up, KERNEL_FP32)
    assert_close("out", out, want, KERNEL_FP32)
    assert_close("dinp", dinp, inp1.grad, KERNEL_FP32)
    assert_close("dinp2", dinp2, inp2.grad, KERNEL_FP32)
    for array, start, of in zip(ours[: 3 if layernorm else 1], sums, leaves[2:], strict=False):
        assert_close("sums", array, of.grad + leaf(start).detach(), KERNEL_FP32)


# Whole models

MODELS = [
    *ONE_OF_EACH, (ODD, "softmax"), (EVEN, "relu"), (replace(PYTHIA_ODD, parallel=False), "softmax"),
    (replace(PYTHIA_ODD, norm="rms", tied_norm=True), "relu"),
]  # fmt: skip
each_model = pytest.mark.parametrize("config, attention", MODELS, ids=name_of)
# Where the kind of model bears on nothing but its dropouts, others are for before a release.
first_models = pytest.mark.parametrize(
    "config, attention", [*MODELS[:3], *(pytest.param(*each, marks=pytest.mark.long) for each in MODELS[3:])],
    ids=name_of,
)  # fmt: skip
B, T = 2, 11


def build(config: Config, attention: str, rate: float, count: int = 1) -> tuple[Model, Batches]:
    """A model, and batches that are all the same."""
    model = build_from_random(kind_of(config), config, B, T, attention, seed=3)
    model.dropout, model.dropout_seed = rate, 3
    return model, Batches(model, GivenBatches(repeat(*make_batches(config, 1, B, T))), count)


def dropping(monkeypatch, config: Config, model: Model) -> None:
    """Makes oracle's definition of the model drop what ours drops: of the second and fourth product of each layer,
    which add to the residual stream, and of the embedding where the model drops there."""
    drop, C = dropouts(model, training=True), config.channels
    after = [(1, factors(d.attproj, B, T, C), 1, factors(d.fcproj, B, T, C)) for d in drop.layer]
    products = iter([factor for layer in after for factor in layer] + [1])  # the last are the logits

    def linear(x, weight, *bias):
        return F.linear(x, getattr(weight, "matrix", weight), *bias) * next(products)

    monkeypatch.setattr(oracle, "F", SimpleNamespace(**{**vars(F), "linear": linear}))
    define, drops_embedding = oracle.definition_of(config), "drop.encoded" in inspect.getsource(type(model).forward)
    embedded = factors(drop.encoded, B, T, C)

    def with_embedding_dropped(p, tokens, *others):
        rows = (p["wte"][tokens] + (p["wpe"][:T] if "wpe" in p else 0)) * embedded
        return define({**p, "wte": Rows(p["wte"], rows), "wpe": torch.zeros(T, C)}, tokens, *others)

    if drops_embedding:
        monkeypatch.setattr(oracle, define.__name__, with_embedding_dropped)


class Rows:
    """A matrix that has these rows where it is asked for some."""

    def __init__(self, matrix: torch.Tensor, rows: torch.Tensor):
        self.matrix, self.rows = matrix, rows

    def __getitem__(self, tokens) -> torch.Tensor:
        return self.rows


@each_model
def test_loss_and_every_gradient_of_a_model_with_dropout_equal_autograds(dev, monkeypatch, config, attention):
    model, batches = build(config, attention, 0.25)
    batches.send(6, 0)
    model.zero_grad()
    model.forward(B, T, training=True)
    model.loss(B, T, dloss=1 / (B * T))
    model.backward(B, T)
    dev.synchronize()
    dropping(monkeypatch, config, model)
    params = oracle.table_of(config, dev.to_host(model.params_memory))
    kind = "relu" if attention == "relu" else "softmax"
    _, loss, want = oracle.gradients(config, params, *batches.tokens(6, 0)[:2], kind)
    tolerance = oracle.MODEL_TF32 if attention == "flash" else model_tolerance(dev)
    assert_close("loss", dev.to_host(model.acts(B, T).losses).mean(dtype=np.float64), loss, tolerance)
    for name, gradient in want.items():
        assert_close(f"d{name}", getattr(model.grads, name), gradient, tolerance)


def compute_loss(model: Model) -> None:
    model.forward(B, T)
    model.loss(B, T, dloss=1.0)


@first_models
def test_only_training_drops(dev, config, attention):
    losses = []
    for rate in 0.0, 0.5:
        model, batches = build(config, attention, rate)
        forward_loss = dev.record(partial(compute_loss, model))
        before = batches.run(forward_loss).copy()
        step_of = train_step(Exchange(model), batches)
        for step in range(3):
            step_of(step, 0.0)
        losses += [before, batches.run(forward_loss).copy()]
    assert all(np.array_equal(losses[0], other) for other in losses[1:])


@first_models
def test_each_step_and_each_batch_of_it_drops_anew_and_a_repeated_step_drops_the_same(dev, config, attention):
    model, batches = build(config, attention, 0.5, count=3)
    step_of = train_step(Exchange(model), batches)
    seen = []
    for step in [0, 1, 2, 3, 4, 2]:  # on a GPU the later ones are replayed
        step_of(step, 0.0)
        dev.synchronize()
        seen.append([batches.losses[step % 2, i].mean(dtype=np.float64) for i in range(3)])
    assert len(np.unique(seen[:5])) == 15  # the batch and the weights are always the same
    assert seen[5] == seen[2]

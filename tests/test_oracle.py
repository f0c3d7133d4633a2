"""The oracle itself: its models agree with transformers', and the guards notice what they promise to."""

import math

import oracle
from models import FAMILIES, name_of

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("config", [each for family in FAMILIES for each in family], ids=name_of)
def test_plain_models_equal_transformers_in_logits_loss_and_gradients(config, rng):
    batch = rng.integers(0, config.vocab_size, (2, 2, config.max_seq_len - 1))
    model = oracle.opinionated(config)
    want_logits, want_loss = oracle.transformers_loss(model, *batch)
    want_loss.backward()
    params = oracle.table_of(config, oracle.flat_parameters_of(model, config))
    logits, loss, gradients = oracle.gradients(config, params, *batch)
    # transformers computes RoPE's angles, and RMSNorm as a whole, in fp32 whatever the model is in.
    tolerance = 1e-12 if config.NAME == "GPT-2" else 1e-6
    oracle.assert_close("logits", logits, want_logits, tolerance)
    oracle.assert_close("loss", loss, want_loss, tolerance)
    want = oracle.table_of(config, oracle.flat_parameters_of(model, config, gradients=True))
    assert list(want) == list(gradients) == [name for name, _ in config.parameters()]
    for name, gradient in gradients.items():
        oracle.assert_close(name, gradient, want[name], 100 * tolerance)


def test_relu_attention_divides_by_the_number_of_visible_positions():
    qkv = torch.ones(1, 3, 3 * 4, dtype=torch.float64)  # every score is 4 / sqrt(4) = 2, every value 1
    want = torch.full((1, 3, 4), 2.0, dtype=torch.float64)
    assert torch.equal(oracle.attention(qkv, num_heads=1, kind="relu"), want)


def test_relative_error_is_that_of_the_whole_tensor():
    assert oracle.relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    assert oracle.relative_error(np.zeros(2), np.zeros(2)) == 0
    assert oracle.relative_error(np.full(2, 1e-9), np.zeros(2)) > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_or_infinity_is_never_close(bad):
    with pytest.raises(AssertionError, match=r"x: relative error inf.*worst at \(1,\)"):
        oracle.assert_close("x", np.array([1.0, bad]), np.array([1.0, 1.0]), 1e30)


def test_guarded_arrays_start_as_asked_and_pass_when_used_as_asked(dev):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with oracle.guarded(dev, shift=1) as memory:
        inp, out, acc, ids = memory.read(values), memory.write((2, 3)), memory.update(values), memory.write(4, np.int32)
        memory.scratch(5)[:2] = 1
        assert np.isnan(oracle.to_numpy(out)).all()
        out[:] = inp
        acc += inp
        ids[:] = 7
    assert np.array_equal(oracle.to_numpy(out), values)
    assert np.array_equal(oracle.to_numpy(acc), 2 * values)


@pytest.mark.parametrize("side", [oracle.MARGIN - 1, oracle.MARGIN + 3])
def test_guarded_notices_a_write_outside(dev, side):
    memory = oracle.guarded(dev)
    memory.scratch(3, name="logits")
    _, buffer, *_ = memory.arrays[0]
    buffer[side] = 0
    with pytest.raises(AssertionError, match=f"logits: written outside, first at element {side - oracle.MARGIN} of 3"):
        memory.check()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_guarded_notices_an_unwritten_element(dev, dtype):
    memory = oracle.guarded(dev)
    memory.write(3, dtype)[:2] = 1
    with pytest.raises(AssertionError, match="1 of 3 unwritten or NaN, first at 2"):
        memory.check()


def test_guarded_notices_a_changed_input(dev):
    memory = oracle.guarded(dev)
    memory.read(np.ones(3, dtype=np.float32))[1] = 2
    with pytest.raises(AssertionError, match="input was changed, first at element 1"):
        memory.check()

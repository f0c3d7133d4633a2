"""Flash attention against softmax attention in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.flash_attention import flash_attention_backward, flash_attention_forward, supported
from llmc.errors import UserError
from oracle import KERNEL_TF32, assert_close, attention, guarded, to_numpy

# (B, T, NH, HS): a single position, less than a tile, whole tiles, and several with a ragged end.
SHAPES = [(1, 1, 1, 64), (2, 67, 3, 64), (1, 256, 2, 64), (1, 300, 1, 64), (3, 13, 1, 128), (1, 130, 2, 128)]


def run(dev, qkv: np.ndarray, dout: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """out (B,T,NH,HS), lse (B,NH,T) and dqkv (B,T,3,NH,HS), by the kernels."""
    B, T, _, NH, HS = qkv.shape
    C = NH * HS
    with guarded(dev) as memory:
        inp = memory.read(qkv, "qkv")
        out = memory.write((B, T, NH, HS), name="out")
        lse = memory.write((B, NH, T), name="lse")
        flash_attention_forward(out, lse, inp, B, T, C, NH)
    with guarded(dev) as memory:
        inp, grad = memory.read(qkv, "qkv"), memory.read(dout, "dout")
        out, lse = memory.read(to_numpy(out), "out"), memory.read(to_numpy(lse), "lse")
        dqkv = memory.write(qkv.shape, name="dqkv")
        flash_attention_backward(dqkv, memory.scratch((B, NH, T)), grad, out, lse, inp, B, T, C, NH)
    return to_numpy(out), to_numpy(lse), to_numpy(dqkv)


def reference(qkv: np.ndarray, dout: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same from PyTorch in float64."""
    B, T, _, NH, HS = qkv.shape
    leaf = torch.from_numpy(qkv.astype(np.float64)).requires_grad_()
    out = attention(leaf.reshape(B, T, 3 * NH * HS), NH, "softmax")
    out.backward(torch.from_numpy(dout.astype(np.float64)).reshape(B, T, NH * HS))
    q, k, _ = leaf.detach().permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-2, -1) / HS**0.5
    lse = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).logsumexp(-1)
    return out.detach().reshape(B, T, NH, HS).numpy(), lse.numpy(), leaf.grad.numpy()


def check(got: tuple, want: tuple) -> None:
    assert_close("out", got[0], want[0], KERNEL_TF32)
    # Backward uses lse as the logarithm that it is: its absolute error is the relative one of all probabilities.
    assert_close("exp(lse), relative", np.exp(got[1] - want[1]), np.ones_like(want[1]), KERNEL_TF32)
    for i, name in enumerate(("dq", "dk", "dv")):
        assert_close(name, got[2][:, :, i], want[2][:, :, i], KERNEL_TF32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flash_attention_matches_softmax_attention_in_float64(dev, rng, shape):
    B, T, NH, HS = shape
    qkv = rng.standard_normal((B, T, 3, NH, HS), dtype=np.float32)
    dout = rng.standard_normal((B, T, NH, HS), dtype=np.float32)
    check(run(dev, qkv, dout), reference(qkv, dout))


# From eight positions on: with fewer, dq and dk are differences of nearly equal numbers, and relative errors are large.
@settings(max_examples=8)
@given(B=st.integers(1, 3), T=st.integers(8, 200), NH=st.integers(1, 3), HS=st.sampled_from((64, 128)))
def test_flash_attention_matches_at_any_shape(dev, B, T, NH, HS):
    rng = np.random.default_rng([B, T, NH, HS])
    qkv = rng.standard_normal((B, T, 3, NH, HS), dtype=np.float32)
    dout = rng.standard_normal((B, T, NH, HS), dtype=np.float32)
    check(run(dev, qkv, dout), reference(qkv, dout))


def test_scores_that_grow_and_shrink_by_hundreds_keep_their_precision(dev, rng):
    # Along a row the largest score so far rises, from either end, by far more than exp can hold in a float. All factors
    # of the scores are exact in TF32, so that only the sums' order of magnitude is on trial.
    T, HS = 200, 64
    qkv = rng.standard_normal((1, T, 3, 2, HS), dtype=np.float32)
    qkv[:, :, :2] = 0.0
    qkv[:, :, 0, :, 0] = 8.0
    height = 8.0 * (np.arange(T) // 8)
    qkv[0, :, 1, 0, 0] = 8.0 * height
    qkv[0, :, 1, 1, 0] = -8.0 * height
    dout = rng.standard_normal((1, T, 2, HS), dtype=np.float32)
    got, want = run(dev, qkv, dout), reference(qkv, dout)
    assert_close("out", got[0], want[0], KERNEL_TF32)
    assert_close("lse", got[1], want[1], 1e-6)
    assert_close("dv", got[2][:, :, 2], want[2][:, :, 2], KERNEL_TF32)


def test_a_query_sees_no_later_key(dev, rng):
    T = 150
    qkv = rng.standard_normal((1, T, 3, 1, 64), dtype=np.float32)
    dout = rng.standard_normal((1, T, 1, 64), dtype=np.float32)
    out, lse, _ = run(dev, qkv, dout)
    for t in (0, 31, 32, 100):
        changed = qkv.copy()
        changed[:, t + 1 :, 1:] = 1e3
        other_out, other_lse, _ = run(dev, changed, dout)
        assert (other_out[:, : t + 1] == out[:, : t + 1]).all()
        assert (other_lse[..., : t + 1] == lse[..., : t + 1]).all()


@pytest.mark.parametrize("shape", [(2, 67, 3, 64), (1, 130, 2, 128)], ids=str)
def test_two_runs_agree_to_the_bit(dev, rng, shape):
    B, T, NH, HS = shape
    qkv = rng.standard_normal((B, T, 3, NH, HS), dtype=np.float32)
    dout = rng.standard_normal((B, T, NH, HS), dtype=np.float32)
    for first, second in zip(run(dev, qkv, dout), run(dev, qkv, dout), strict=True):
        assert (first.view(np.uint32) == second.view(np.uint32)).all()


def test_offsets_past_two_to_the_31_elements(dev):
    if dev.kind() != "cuda" or dev.memory()[0] < 40 << 30:
        pytest.skip("needs a GPU with 40 GiB free")
    # B * T * 3 * C is 2^31 and a bit; the last batch row must come out as it does alone.
    B, T, NH, HS = 911, 1024, 12, 64
    C = NH * HS
    alone = np.random.default_rng(0).standard_normal((1, T, 3, NH, HS), dtype=np.float32)
    dout_alone = np.random.default_rng(1).standard_normal((1, T, NH, HS), dtype=np.float32)
    want = run(dev, alone, dout_alone)
    qkv, dqkv = dev.zeros((B, T, 3, NH, HS)), dev.zeros((B, T, 3, NH, HS))
    out, dout = dev.zeros((B, T, NH, HS)), dev.zeros((B, T, NH, HS))
    lse, dsum = dev.zeros((B, NH, T)), dev.zeros((B, NH, T))
    dev.copy_in(qkv[-1:], alone)
    dev.copy_in(dout[-1:], dout_alone)
    flash_attention_forward(out, lse, qkv, B, T, C, NH)
    flash_attention_backward(dqkv, dsum, dout, out, lse, qkv, B, T, C, NH)
    for got, expected in zip((out, lse, dqkv), want, strict=True):
        assert (dev.to_host(got[-1:]) == expected).all()


@pytest.mark.parametrize("C, NH", [(96, 1), (768, 24), (100, 3), (1024, 4)])
def test_other_head_sizes_are_refused(dev, C, NH):
    assert not supported(C, NH)
    x = dev.zeros((1, 1, 3 * C))
    with pytest.raises(UserError, match="-a softmax"):
        flash_attention_forward(dev.zeros((1, 1, C)), dev.zeros((1, NH, 1)), x, 1, 1, C, NH)
    with pytest.raises(UserError, match="-a softmax"):
        flash_attention_backward(x, x, x, x, x, x, 1, 1, C, NH)


def test_head_sizes_64_and_128_are_supported():
    assert supported(768, 12) and supported(64, 1) and supported(1600, 25) and supported(256, 2)

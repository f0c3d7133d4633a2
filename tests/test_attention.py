"""attention.cu: softmax and ReLU attention against autograd through their definitions."""

import math

import device
import oracle
from kernels import attention as kernels_attention
from kernels.attention import Matrices, attention_backward, attention_forward
from oracle import BF16, KERNEL_FP32, assert_close, exact, guarded, kernel_tolerance, leaf, normal, to_numpy

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

KINDS = ["softmax", "relu"]

# In bf16 forward rounds the scores, att and out; backward rounds datt, dpreatt and dqkv. So the terms of the sums that
# make up dqkv have at most six errors: a score's counts twice, since softmax has the score in its own sum too, and it
# changes att by about its own share, as scores are about 1. One rounding is off by BF16 at most, on average by less
# than half of that, and the errors are independent: together sqrt(6) / 2 times BF16, as a share of what is added up.
ATTENTION_BF16 = 1.3 * BF16


@pytest.fixture
def dev(each_type):
    return each_type


def run(dev, qkv: np.ndarray, dout: np.ndarray, NH: int, NKV: int, kind: str) -> list[np.ndarray]:
    """out (B,T,C), qkvr, flat, att (B,NH,T,T) and dqkv for qkv (B,T,(NH+2*NKV)*HS), on the host."""
    B, T, C = dout.shape
    with guarded(dev) as memory:
        out, qkvr, att = (memory.write(shape) for shape in (dout.shape, qkv.size, (B, NH, T, T)))
        attention_forward(out, Matrices(qkvr, att, kind == "relu"), memory.read(qkv), B, T, NH, NKV, C // NH)
    with guarded(dev) as memory:
        dqkv, kept = memory.write(qkv.shape), Matrices(*map(memory.read, map(to_numpy, (qkvr, att))), kind == "relu")
        attention_backward(dqkv, memory.read(dout), None, kept, None, B, T, NH, NKV, C // NH)  # no out, no qkv
    return [to_numpy(array) for array in (out, qkvr, att, dqkv)]


def make_inputs(B: int, T: int, NH: int, NKV: int, HS: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([B, T, NH, NKV, HS])
    return normal(rng, B, T, (NH + 2 * NKV) * HS), normal(rng, B, T, NH * HS)


def split_heads(qkv: np.ndarray, NH: int, NKV: int) -> list[np.ndarray]:
    """q (B,NH,T,HS), k and v (B,NKV,T,HS) of qkv (B,T,(NH+2*NKV)*HS)."""
    B, T = qkv.shape[:2]
    return np.split(qkv.reshape(B, T, NH + 2 * NKV, -1).transpose(0, 2, 1, 3), [NH, NH + NKV], axis=1)


def sizes_of_sums(qkv: np.ndarray, dout: np.ndarray, NH: int, NKV: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """out and dqkv in float64 as they would be if all that is added up for them were positive."""
    B, T = qkv.shape[:2]
    q, k, v = (x.astype(np.float64).repeat(NH // x.shape[1], axis=1) for x in split_heads(qkv, NH, NKV))
    dout = dout.astype(np.float64).reshape(B, T, NH, -1).transpose(0, 2, 1, 3)
    scale = 1 / math.sqrt(q.shape[-1])
    scores = torch.tensor(scale * q @ k.swapaxes(-1, -2))
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    if kind == "softmax":
        att = scores.masked_fill(future, -math.inf).softmax(-1).numpy()
    else:
        att = (scores.relu().tril() / torch.arange(1, T + 1).view(T, 1)).numpy()
    datt = abs(dout) @ abs(v).swapaxes(-1, -2)
    if kind == "softmax":
        dscores = scale * att * (datt + (att * datt).sum(-1, keepdims=True))
    else:
        dscores = scale * (att > 0) * datt / np.arange(1, T + 1)[:, None]

    def in_rows(x):
        return x.transpose(0, 2, 1, 3).reshape(B, T, -1)

    def of_group(x):
        return x.reshape(B, NKV, NH // NKV, T, -1).sum(2)

    dq, dk, dv = dscores @ abs(k), dscores.swapaxes(-1, -2) @ abs(q), att.swapaxes(-1, -2) @ abs(dout)
    return in_rows(att @ abs(v)), np.concatenate([in_rows(x) for x in (dq, of_group(dk), of_group(dv))], axis=-1)


def assert_sums_close(name: str, got: np.ndarray, want, sizes: np.ndarray) -> None:
    """assert_close; in bf16 with errors as shares of what is added up, since a few numbers may cancel to none."""
    if device.floatX == device.BF16:
        assert_close(name, got - to_numpy(want) + sizes, sizes, ATTENTION_BF16)
    else:
        assert_close(name, got, want, kernel_tolerance(device))


@pytest.mark.parametrize("kind", KINDS)
@given(B=st.integers(1, 3), T=st.integers(1, 45), group=st.integers(1, 4), NKV=st.integers(1, 4), HS=st.integers(1, 20))
@example(B=2, T=1, group=1, NKV=2, HS=4)
@example(B=1, T=130, group=1, NKV=1, HS=3)
@example(B=2, T=16, group=3, NKV=1, HS=8)
@example(B=1, T=37, group=2, NKV=3, HS=5)
def test_attention_equals_autograd_through_its_definition(each_product, kind, B, T, group, NKV, HS):
    NH = group * NKV
    qkv, dout = make_inputs(B, T, NH, NKV, HS)
    qkv64 = leaf(qkv)
    want = oracle.attention(qkv64, NH, kind, NKV)
    (want * leaf(dout).detach()).sum().backward()
    out, qkvr, att, dqkv = run(each_product, qkv, dout, NH, NKV, kind)
    out_sizes, dqkv_sizes = sizes_of_sums(qkv, dout, NH, NKV, kind)
    assert_sums_close(f"{kind} out", out, want, out_sizes)
    assert_sums_close(f"{kind} dqkv", dqkv, qkv64.grad, dqkv_sizes)
    assert np.array_equal(qkvr, np.concatenate([part.ravel() for part in split_heads(qkv, NH, NKV)]))
    assert not np.triu(att, 1).any(), "what lies in the future must be exactly 0"


def test_softmax_of_extreme_scores_neither_overflows_nor_vanishes(dev):
    T, rows = 50, 100
    scores = exact(np.random.default_rng(0).uniform(-1000, 1000, (rows, T)).astype(np.float32))
    scores[T:] = exact(-1000 - np.abs(scores[T:]))
    with guarded(dev) as memory:
        att = memory.update(scores)
        kernels_attention.launch_by_att_row("softmax_forward_kernel", rows, (att, np.float32(0.125), rows, T))
    future = torch.ones(T, T, dtype=torch.bool).triu(1).repeat(2, 1)
    want = (0.125 * leaf(scores)).masked_fill(future, -math.inf).softmax(-1)
    assert_close("att of extreme scores", att, want, KERNEL_FP32)


def test_softmax_rows_are_found_beyond_two_to_the_31_elements(dev):
    T = 1024
    rows = (2**31 // T + 3) // T * T + T  # whole matrices, the last of them wholly beyond
    if dev.kind != "cuda" or dev.memory()[0] < 4.2 * rows * T:
        pytest.skip("needs 9 GB of GPU memory")
    att = dev.zeros((rows, T), dev.floatX)
    scores = normal(np.random.default_rng(0), T, T)
    dev.copy(att[-T:], guarded(dev).read(scores))
    kernels_attention.launch_by_att_row("softmax_forward_kernel", rows, (att, np.float32(0.125), rows, T))
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    assert_close("first att", att[:T], leaf(np.zeros((T, T))).masked_fill(future, -math.inf).softmax(-1), KERNEL_FP32)
    want = (0.125 * leaf(scores)).masked_fill(future, -math.inf).softmax(-1)
    assert_close("last att", att[-T:], want, KERNEL_FP32)

"""attention.cu: softmax and ReLU attention against autograd through their definitions."""

import math

import device
import oracle
from kernels import attention as kernels_attention
from kernels.attention import Matrices, attention_backward, attention_forward
from oracle import BF16, KERNEL_FP32, assert_close, exact, guarded, kernel_tolerance, normal, to_numpy
from support.kernels import autograd, launch, shapes, update, write

import numpy as np
import pytest
import torch

# In bf16 forward rounds the scores, att and out; backward rounds datt, dpreatt and dqkv. So the terms of the sums that
# make up dqkv have at most six errors: a score's counts twice, since softmax has the score in its own sum too, and it
# changes att by about its own share, as scores are about 1. One rounding is off by BF16 at most, on average by less
# than half of that, and the errors are independent: together sqrt(6) / 2 times BF16, as a share of what is added up,
# which is about as large as the tensor's largest number. The worst of many was 1.26 times BF16 off.
ATTENTION_BF16 = 2 * BF16


@pytest.fixture
def smooth(each_product, kind):
    """Skips what a rounding changes by more than itself."""
    if device.precision == "fp16" and kind == "relu":
        pytest.skip("a score near 0 may be rounded to the other side, where ReLU has another slope")


def causal_softmax(scores: np.ndarray, scale: float) -> torch.Tensor:
    """Of matrices (rows,T), whose rows are positions 0 to T - 1 over and over."""
    rows, T = scores.shape
    future = torch.ones(T, T, dtype=torch.bool).triu(1).repeat(rows // T, 1)
    return (scale * torch.from_numpy(scores).double()).masked_fill(future, -math.inf).softmax(-1)


@pytest.mark.usefixtures("smooth")
@pytest.mark.parametrize("kind", ["softmax", "relu"])
@shapes(
    (2, 1, 1, 2, 4), (1, 130, 1, 1, 3), (2, 16, 3, 1, 8), (1, 37, 2, 3, 5),
    B=(1, 3), T=(1, 45), group=(1, 4), NKV=(1, 4), HS=(1, 20),
)  # fmt: skip
def test_attention_equals_autograd_through_its_definition(each_product, kind, B, T, group, NKV, HS):
    NH, relu = group * NKV, kind == "relu"
    rng, sizes = np.random.default_rng([B, T, NH, NKV, HS]), (B, T, NH, NKV, HS)
    qkv, dout = normal(rng, B, T, (NH + 2 * NKV) * HS), normal(rng, B, T, NH * HS)
    kept = Matrices(write(qkv.size), write(B, NH, T, T), relu)
    out, qkvr, att = launch(attention_forward, write(*dout.shape), kept, qkv, *sizes)
    qkvr, att = to_numpy(qkvr), to_numpy(att)
    kept = Matrices(qkvr, att, relu)
    (dqkv,) = launch(attention_backward, write(*qkv.shape), dout, None, kept, None, *sizes)  # no out, no qkv
    want, dqkv64 = autograd(lambda qkv: oracle.attention(qkv, NH, kind, NKV), dout, qkv)
    tolerance = ATTENTION_BF16 if device.floatX == device.BF16 else kernel_tolerance(device)
    assert_close(f"{kind} out", out, want, tolerance)
    assert_close(f"{kind} dqkv", dqkv, dqkv64, tolerance)
    heads = np.split(qkv.reshape(B, T, NH + 2 * NKV, HS).transpose(0, 2, 1, 3), [NH, NH + NKV], axis=1)
    assert np.array_equal(qkvr, np.concatenate([part.ravel() for part in heads]))
    assert not np.triu(att, 1).any(), "what lies in the future must be exactly 0"


def softmax(att, rows: int, T: int) -> None:
    kernels_attention.launch_by_att_row("softmax_forward_kernel", rows, (att, np.float32(0.125), rows, T))


@pytest.mark.usefixtures("each_type")
def test_softmax_of_extreme_scores_neither_overflows_nor_vanishes():
    T, rows = 50, 100
    scores = exact(np.random.default_rng(0).uniform(-1000, 1000, (rows, T)).astype(np.float32))
    scores[T:] = exact(-1000 - np.abs(scores[T:]))
    (att,) = launch(softmax, update(scores), rows, T)
    assert_close("att of extreme scores", att, causal_softmax(scores, 0.125), KERNEL_FP32)


def test_softmax_rows_are_found_beyond_two_to_the_31_elements(each_type):
    dev, T = each_type, 1024
    rows = (2**31 // T + 3) // T * T + T  # whole matrices, the last of them wholly beyond
    if dev.kind != "cuda" or dev.memory()[0] < 4.2 * rows * T:
        pytest.skip("needs 9 GB of GPU memory")
    att = dev.zeros((rows, T), dev.floatX)
    scores = normal(np.random.default_rng(0), T, T)
    dev.copy(att[-T:], guarded(dev).read(scores))
    softmax(att, rows, T)
    assert_close("first att", att[:T], causal_softmax(np.zeros((T, T)), 1), KERNEL_FP32)
    assert_close("last att", att[-T:], causal_softmax(scores, 0.125), KERNEL_FP32)

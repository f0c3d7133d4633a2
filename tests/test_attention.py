"""attention.cu: softmax and ReLU attention against autograd through their definitions."""

import math

import device
import oracle
from kernels import attention as kernels_attention
from kernels.attention import Matrices, attention_backward, attention_forward
from kernels.cached_attention import Cached
from kernels.flash_attention import Flash
from oracle import (
    BF16,
    KERNEL_FP32,
    assert_close,
    exact,
    guarded,
    kernel_tolerance,
    leaf,
    normal,
    relative_error,
    to_numpy,
)

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


any_shape = given(
    B=st.integers(1, 3), T=st.integers(1, 45), group=st.integers(1, 4), NKV=st.integers(1, 4), HS=st.integers(1, 20)
)


def examples(test):
    for B, T, group, NKV, HS in [
        (2, 16, 1, 3, 8), (1, 37, 1, 2, 5), (3, 9, 1, 1, 12), (2, 1, 1, 2, 4), (1, 130, 1, 1, 3),
        (2, 16, 3, 1, 8), (1, 37, 2, 3, 5), (2, 21, 3, 3, 6),
    ]:  # fmt: skip
        test = example(B=B, T=T, group=group, NKV=NKV, HS=HS)(test)
    return test


def run_forward(dev, qkv: np.ndarray, NH: int, NKV: int, kind: str) -> tuple:
    """out (B,T,C), qkvr, flat, and att (B,NH,T,T) for qkv (B,T,(NH+2*NKV)*HS), on the host."""
    B, T, width = qkv.shape
    HS = width // (NH + 2 * NKV)
    with guarded(dev) as memory:
        out, qkvr = memory.write((B, T, NH * HS)), memory.write(qkv.size)
        att = memory.write((B, NH, T, T))
        kept = Matrices(qkvr, att, kind == "relu")
        attention_forward(out, kept, memory.read(qkv), B, T, NH, NKV, HS)
    return tuple(to_numpy(array) for array in (out, qkvr, att))


def run_backward(dev, dout: np.ndarray, qkvr: np.ndarray, att: np.ndarray, NKV: int, kind: str) -> np.ndarray:
    """dqkv (B,T,(NH+2*NKV)*HS), on the host."""
    B, T, C = dout.shape
    NH, HS = att.shape[1], C // att.shape[1]
    with guarded(dev) as memory:
        dqkv = memory.write((B, T, (NH + 2 * NKV) * HS))
        kept = Matrices(memory.read(qkvr), memory.read(att), kind == "relu")
        attention_backward(dqkv, memory.read(dout), None, kept, None, B, T, NH, NKV, HS)  # takes neither out nor qkv
    return to_numpy(dqkv)


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
@any_shape
@examples
def test_attention_equals_autograd_through_its_definition(each_product, kind, B, T, group, NKV, HS):
    NH = group * NKV
    qkv, dout = make_inputs(B, T, NH, NKV, HS)
    qkv64 = leaf(qkv)
    want = oracle.attention(qkv64, NH, kind, NKV)
    (want * leaf(dout).detach()).sum().backward()
    out, qkvr, att = run_forward(each_product, qkv, NH, NKV, kind)
    dqkv = run_backward(each_product, dout, qkvr, att, NKV, kind)
    out_sizes, dqkv_sizes = sizes_of_sums(qkv, dout, NH, NKV, kind)
    assert_sums_close(f"{kind} out", out, want, out_sizes)
    assert_sums_close(f"{kind} dqkv", dqkv, qkv64.grad, dqkv_sizes)
    assert np.array_equal(qkvr, np.concatenate([part.ravel() for part in split_heads(qkv, NH, NKV)]))
    assert not np.triu(att, 1).any(), "what lies in the future must be exactly 0"


def run_both(dev, qkv: np.ndarray, dout: np.ndarray, NH: int, NKV: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """out (B,T,C) and dqkv (B,T,(NH+2*NKV)*HS), on the host."""
    out, qkvr, att = run_forward(dev, qkv, NH, NKV, kind)
    return out, run_backward(dev, dout, qkvr, att, NKV, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("NH, NKV", [(9, 3), (6, 2), (4, 1)])
def test_gradients_of_shared_keys_and_values_are_the_sum_over_their_query_heads(product_dev, kind, NH, NKV):
    B, T, HS, group = 2, 21, 8, NH // NKV
    qkv, dout = make_inputs(B, T, NH, NKV, HS)
    q, k, v = split_heads(qkv, NH, NKV)
    repeated = np.concatenate([q, k.repeat(group, axis=1), v.repeat(group, axis=1)], axis=1)
    repeated = np.ascontiguousarray(repeated.transpose(0, 2, 1, 3)).reshape(B, T, -1)
    out, dqkv = run_both(product_dev, qkv, dout, NH, NKV, kind)
    want_out, want = run_both(product_dev, repeated, dout, NH, NH, kind)
    tolerance = kernel_tolerance(product_dev)
    assert_close("out with shared keys", out, want_out, tolerance)
    for name, ours, theirs in zip("qkv", split_heads(dqkv, NH, NKV), split_heads(want, NH, NH), strict=True):
        theirs = theirs if name == "q" else theirs.reshape(B, NKV, group, T, HS).sum(2, dtype=np.float64)
        assert_close(f"d{name} with shared keys", ours, theirs, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_with_shared_keys_agree_to_the_bit(each_product, kind):
    qkv, dout = make_inputs(2, 70, 6, 2, 16)
    first, second = (run_both(each_product, qkv, dout, 6, 2, kind) for _ in range(2))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_does_not_see_later_ones(dev, kind):
    qkv, _ = make_inputs(1, 24, 2, 2, 7)
    changed = qkv.copy()
    changed[:, 17:] = 1e3
    out, after = (run_forward(dev, x, 2, 2, kind)[0] for x in (qkv, changed))
    assert_close("earlier outputs", after[:, :17], out[:, :17], KERNEL_FP32)
    assert not np.allclose(after[:, 17:], out[:, 17:])


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


# The four faults of the ReLU attention that was published first, each made here on purpose: the tests above would not
# let any of them pass. q, k, v, att and their gradients are (B, NH, T, HS) and (B, NH, T, T).


def relu_attention_with(fault: str, qkv: torch.Tensor, NH: int) -> torch.Tensor:
    B, T, C3 = qkv.shape
    q, k, v = qkv.view(B, T, 3, NH, C3 // 3 // NH).permute(2, 0, 3, 1, 4)
    scale = 1.0 if fault == "no scale" else 1 / math.sqrt(q.shape[-1])
    att = (scale * q @ k.transpose(-2, -1)).relu() / torch.arange(1, T + 1, dtype=qkv.dtype).view(T, 1)
    if fault != "no causal mask":
        att = att.tril()
    if fault == "one element a row":
        att = att * torch.eye(T, dtype=qkv.dtype)
    if fault == "row sum in backward":
        att = SubtractRowSum.apply(att)
    return (att @ v).transpose(1, 2).reshape(B, T, C3 // 3)


class SubtractRowSum(torch.autograd.Function):
    """Leaves att as it is; backward takes off the sum over the row of att * datt, as only softmax must."""

    @staticmethod
    def forward(ctx, att):
        ctx.save_for_backward(att)
        return att.clone()

    @staticmethod
    def backward(ctx, datt):
        (att,) = ctx.saved_tensors
        return datt - (att * datt).sum(-1, keepdim=True)


@pytest.mark.parametrize("fault", ["one element a row", "no causal mask", "no scale", "row sum in backward"])
@pytest.mark.parametrize("B, T, NH, HS", [(2, 16, 3, 8), (1, 37, 2, 5)])
def test_each_fault_of_the_published_relu_attention_would_be_caught(product_dev, fault, B, T, NH, HS):
    tolerance = kernel_tolerance(product_dev)
    qkv, dout = make_inputs(B, T, NH, NH, HS)
    out, qkvr, att = run_forward(product_dev, qkv, NH, NH, "relu")
    dqkv = run_backward(product_dev, dout, qkvr, att, NH, "relu")

    def errors_against(fault):
        qkv64 = leaf(qkv)
        theirs = relu_attention_with(fault, qkv64, NH)
        (theirs * leaf(dout).detach()).sum().backward()
        return relative_error(theirs, out), relative_error(qkv64.grad, dqkv)

    assert max(errors_against("none")) <= tolerance
    forward, backward = errors_against(fault)
    assert backward > 10 * tolerance
    assert forward <= tolerance if fault == "row sum in backward" else forward > 10 * tolerance


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


def test_what_is_kept_decides_the_kind_of_attention(each_type):
    """All kinds give the same output and, where they keep something for backward, the same gradient."""
    B, T, NH, NKV, HS = 2, 19, 4, 2, 64
    qkv, dout = make_inputs(B, T, NH, NKV, HS)
    shape, outs, gradients, launched = (B, T, NH, HS), {}, {}, {}
    for kind in ("softmax", "relu", "flash", "cached", "cached relu"):
        with guarded(each_type) as memory:
            inp, out, relu = memory.read(qkv), memory.write(shape), kind.endswith("relu")
            if kind == "flash":
                kept = Flash(memory.write((B, NH, T), np.float32))
            elif kind.startswith("cached"):
                cache = [memory.write((B, NKV, T, HS)) for _ in range(2)]
                kept = Cached(*cache, memory.read(np.zeros(B, np.int32)), relu)
            else:
                kept = Matrices(memory.write(qkv.size), memory.write((B, NH, T, T)), relu)
            names = launched[kind] = []
            with device.observe(lambda name, arguments, work, names=names: (names.append(name), work())):
                attention_forward(out, kept, inp, B, T, NH, NKV, HS)
                if not isinstance(kept, Cached):
                    dqkv = memory.write(qkv.shape)
                    attention_backward(dqkv, memory.read(dout), out, kept, inp, B, T, NH, NKV, HS)
                    gradients[kind] = to_numpy(dqkv)
        outs[kind] = to_numpy(out)
    tolerance = 5 * BF16 if each_type.floatX == each_type.BF16 else 1e-3  # flash attention's products are in TF32
    for kind, like in (("flash", "softmax"), ("cached", "softmax"), ("cached relu", "relu")):
        assert relative_error(outs[kind], outs[like]) <= tolerance, kind
    assert relative_error(gradients["flash"], gradients["softmax"]) <= tolerance
    assert relative_error(outs["relu"], outs["softmax"]) > 10 * tolerance
    of = {"softmax": "softmax_", "relu": "relu_", "flash": "flash_", "cached": "cached_", "cached relu": "cached_"}
    for kind, names in launched.items():
        assert any(name.startswith(of[kind]) for name in names)
        assert not any(name.startswith(other) for name in names for other in set(of.values()) - {of[kind]})

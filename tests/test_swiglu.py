"""swiglu.cu against PyTorch's silu."""

from kernels.swiglu import swiglu_backward, swiglu_forward
from oracle import KERNEL_FP32, assert_close, exact, guarded, leaf, normal, to_numpy

import numpy as np
import pytest
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st


@pytest.fixture
def dev(each_type):
    return each_type


any_shape = given(N=st.integers(1, 150), C=st.integers(1, 150))


def examples(test):
    for N, C in [(16, 64), (5, 7), (65, 130), (3, 1025), (128, 84), (1, 1)]:
        test = example(N=N, C=C)(test)
    return test


def make(N: int, C: int) -> tuple[np.ndarray, np.ndarray]:
    """inp (N,2C) and dout (N,C); some gates are far out, where the sigmoid is 0 or 1 to the last bit."""
    rng = np.random.default_rng([N, C])
    inp = normal(rng, N, 2 * C)
    inp[:: max(1, N // 4), C:] *= 20
    return exact(inp), normal(rng, N, C)


def swiglu(inp, C: int):
    return F.silu(inp[:, C:]) * inp[:, :C]


@any_shape
@examples
def test_swiglu_forward_gates_the_first_half_of_a_row_by_the_second(dev, N, C):
    inp, _ = make(N, C)
    with guarded(dev) as memory:
        out = memory.write((N, C))
        swiglu_forward(out, memory.read(inp), N, C)
    assert_close("swiglu", out, swiglu(leaf(inp), C), KERNEL_FP32)


@any_shape
@examples
def test_swiglu_backward_sets_both_gradients_and_recomputes_the_output(dev, N, C):
    inp, dout = make(N, C)
    with guarded(dev) as memory:
        dinp, again = memory.write((N, 2 * C)), memory.recomputed(N, C)
        swiglu_backward(dinp, again, memory.read(dout), memory.read(inp), N, C)
    inp64 = leaf(inp)
    out = swiglu(inp64, C)
    (out * leaf(dout).detach()).sum().backward()
    assert_close("dup", dinp[:, :C], inp64.grad[:, :C], KERNEL_FP32)
    assert_close("dgate", dinp[:, C:], inp64.grad[:, C:], KERNEL_FP32)
    assert_close("swiglu again", again, out, KERNEL_FP32)


def test_swiglu_of_huge_gates_is_up_times_gate_or_zero(dev):
    gate = exact(np.float32([-3e38, -1e4, -89, -88, 88, 89, 1e4, 3e38]))  # e^88 is finite in fp32, e^89 is not
    inp = np.concatenate([np.full(8, 0.5, np.float32), gate])[None]
    with guarded(dev) as memory:
        out, dinp, again = memory.write((1, 8)), memory.write((1, 16)), memory.recomputed(1, 8)
        x, dout = memory.read(inp), memory.read(np.full((1, 8), 0.5, np.float32))
        swiglu_forward(out, x, 1, 8)
        swiglu_backward(dinp, again, dout, x, 1, 8)
    silu = np.maximum(gate, 0)
    np.testing.assert_allclose(to_numpy(out)[0], 0.5 * silu, rtol=1e-6, atol=1e-35)
    np.testing.assert_allclose(to_numpy(again)[0], 0.5 * silu, rtol=1e-6, atol=1e-35)
    np.testing.assert_allclose(to_numpy(dinp)[0, :8], 0.5 * silu, rtol=1e-6, atol=1e-35)
    np.testing.assert_allclose(to_numpy(dinp)[0, 8:], 0.25 * (silu > 0), rtol=1e-6, atol=1e-35)

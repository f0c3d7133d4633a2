"""gelu.cu against PyTorch's gelu in both forms, with the bias in front of it."""

from kernels.gelu import gelu_backward, gelu_forward, matmul_gelu_forward
from oracle import KERNEL_FP32, assert_close, exact, guarded, kernel_tolerance, leaf, normal, to_numpy

import numpy as np
import pytest
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

FP32 = np.float32


@pytest.fixture
def dev(each_type):
    return each_type


# In a model C is 4 times an odd number of channels, or more, and the bias then need not begin at 16 bytes.
each_form = pytest.mark.parametrize("form", ["tanh", "none"])  # PyTorch's name of the erf form is "none"
any_shape = given(N=st.integers(1, 150), C=st.integers(1, 150), shift=st.integers(0, 3))


def examples(test):
    for N, C, shift in [(16, 64, 0), (5, 7, 1), (65, 130, 2), (3, 1025, 0), (128, 84, 3), (16391, 2, 0)]:
        test = example(N=N, C=C, shift=shift)(test)
    return test


def make(N: int, C: int) -> tuple:
    """inp (N,C), bias (C) and dout (N,C); some inputs are far out, where tanh is 1 to the last bit."""
    rng = np.random.default_rng([N, C])
    inp = normal(rng, N, C)
    inp[1 :: max(1, N // 4)] *= 20
    return exact(inp), normal(rng, C), normal(rng, N, C)


@each_form
@any_shape
@examples
def test_gelu_forward_adds_the_bias_first(dev, form, N, C, shift):
    inp, bias, _ = make(N, C)
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        out = memory.write((N, C))
        gelu_forward(out, memory.read(inp), parameters.read(bias), N, C, form == "none")
    assert_close("gelu", out, F.gelu(leaf(inp) + leaf(bias), approximate=form), KERNEL_FP32)


@each_form
@any_shape
@examples
def test_gelu_backward_replaces_the_gradient_adds_the_bias_gradient_and_recomputes_the_output(
    dev, form, N, C, shift
):
    inp, bias, dout = make(N, C)
    before = normal(np.random.default_rng(C), C)
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        dinp, dbias = memory.update(dout), parameters.update(before, FP32)
        again = memory.recomputed(N, C)
        gelu_backward(dinp, dbias, again, dinp, memory.read(inp), parameters.read(bias), N, C, form == "none")
    inp64, bias64 = leaf(inp), leaf(bias)
    out = F.gelu(inp64 + bias64, approximate=form)
    (out * leaf(dout).detach()).sum().backward()
    assert_close("dinp", dinp, inp64.grad, KERNEL_FP32)
    # Compared together with what is added up: a column's gradients may cancel to next to nothing.
    added_up = inp64.grad.abs().sum(0) + leaf(before).abs()
    assert_close("dbias", leaf(dbias) + added_up, bias64.grad + leaf(before) + added_up, KERNEL_FP32)
    assert_close("gelu again", again, out, KERNEL_FP32)


@each_form
@pytest.mark.parametrize("B, T, C, OC", [(2, 13, 20, 80), (1, 1, 40, 12), (1, 5, 7, 9)])
def test_product_bias_and_gelu_are_one_call_that_keeps_the_product_without_the_bias(each_product, form, B, T, C, OC):
    rng = np.random.default_rng([B, T, C, OC])
    inp, weight, bias = exact(normal(rng, B, T, C) / C**0.5), normal(rng, OC, C), normal(rng, OC)
    with guarded(each_product) as memory, guarded(each_product, shift=OC % each_product.width()) as parameters:
        out, fch = memory.write((B, T, OC)), memory.write((B, T, OC))
        ours_weight, ours_bias = parameters.read(weight), parameters.read(bias)
        matmul_gelu_forward(out, fch, memory.read(inp), ours_weight, ours_bias, B, T, C, OC, erf=form == "none")
    assert_close("fch", fch, leaf(inp) @ leaf(weight).T, kernel_tolerance(each_product))
    assert_close("gelu", out, F.gelu(leaf(fch) + leaf(bias), approximate=form), KERNEL_FP32)  # of fch as it is stored


@each_form
def test_gelu_of_huge_numbers_is_themselves_or_zero(dev, form):
    inp = np.array([[-8192, -80, -20, 20, 80, 8192]], FP32)
    with guarded(dev) as memory:
        out, x, bias = memory.write((1, 6)), memory.read(inp), memory.read(np.zeros(6, np.float32))
        dinp, dbias = memory.update(np.ones((1, 6), FP32)), memory.update(np.zeros(6, FP32), FP32)
        gelu_forward(out, x, bias, 1, 6, form == "none")
        gelu_backward(dinp, dbias, memory.recomputed(1, 6), dinp, x, bias, 1, 6, form == "none")
    assert to_numpy(out).tolist() == [[0, 0, 0, 20, 80, 8192]]
    assert to_numpy(dinp).tolist() == [[0, 0, 0, 1, 1, 1]]


@each_form
@pytest.mark.parametrize("C", [64, 7])
def test_without_a_bias_gelu_is_that_of_a_bias_of_zeros(dev, form, C):
    inp, _, dout = make(20, C)
    results = []
    for zeros in np.zeros(C, np.float32), None:
        with guarded(dev) as memory:
            x, out, dinp, again = memory.read(inp), memory.write((20, C)), memory.update(dout), memory.recomputed(20, C)
            bias, dbias = (None, None) if zeros is None else (memory.read(zeros), memory.update(zeros, FP32))
            gelu_forward(out, x, bias, 20, C, form == "none")
            gelu_backward(dinp, dbias, again, dinp, x, bias, 20, C, form == "none")
        results.append([dev.to_host(array).tobytes() for array in (out, dinp, again)])
    assert results[0] == results[1]

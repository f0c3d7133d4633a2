"""gelu.cu against PyTorch's gelu in both forms, with the bias before it."""

import device
from kernels.gelu import gelu_backward, gelu_forward, matmul_gelu_forward, matvec_gelu
from oracle import KERNEL_FP32, assert_close, exact, kernel_tolerance, leaf, normal, to_numpy
from support.kernels import FP32, autograd, gradient, launch, parameter, recomputed, shapes, single_row, update, write

import numpy as np
import pytest
import torch
import torch.nn.functional as F

on_each_type = pytest.mark.usefixtures("each_type")
each_form = pytest.mark.parametrize("form", ["tanh", "none"])  # PyTorch's name of the erf form is "none"
# In a model C is 4 times an odd number of channels, or more, and the bias then need not begin at 16 bytes.
any_shape = shapes(
    (16, 64, 0), (5, 7, 1), (65, 130, 2), (3, 1025, 0), (128, 84, 3), (16391, 2, 0),
    N=(1, 150), C=(1, 150), shift=(0, 3),
)  # fmt: skip


def make(N: int, C: int) -> tuple:
    """inp (N,C), bias (C) and dout (N,C); some inputs are far out, where tanh is 1 to the last bit."""
    rng = np.random.default_rng([N, C])
    inp = normal(rng, N, C)
    inp[1 :: max(1, N // 4)] *= 20
    return exact(inp), normal(rng, C), normal(rng, N, C)


def gelu(inp, bias, form: str) -> torch.Tensor:
    return F.gelu(inp + bias, approximate=form)


def backward(dout: np.ndarray, dbias: np.ndarray | None, inp: np.ndarray, bias, form: str, shift: int = 0) -> list:
    """dinp, dbias and the output once more."""
    dinp, dbias, (N, C) = update(dout), None if dbias is None else gradient(dbias), inp.shape
    bias = None if bias is None else parameter(bias)
    return launch(gelu_backward, dinp, dbias, recomputed(N, C), dinp, inp, bias, N, C, form == "none", shift=shift)


@on_each_type
@each_form
@any_shape
def test_gelu_forward_adds_the_bias_first(form, N, C, shift):
    inp, bias, _ = make(N, C)
    (out,) = launch(gelu_forward, write(N, C), inp, parameter(bias), N, C, form == "none", shift=shift)
    assert_close("gelu", out, gelu(leaf(inp), leaf(bias), form), KERNEL_FP32)


@on_each_type
@each_form
@any_shape
def test_gelu_backward_replaces_the_gradient_adds_the_bias_gradient_and_recomputes_the_output(form, N, C, shift):
    inp, bias, dout = make(N, C)
    before = normal(np.random.default_rng(C), C)
    dinp, dbias, again = backward(dout, before, inp, bias, form, shift)
    out, dinp64, dbias64 = autograd(lambda *inputs: gelu(*inputs, form), dout, inp, bias)
    assert_close("dinp", dinp, dinp64, KERNEL_FP32)
    # Compared together with what is added up: a column's gradients may cancel to next to nothing.
    added_up = dinp64.abs().sum(0) + leaf(before).abs()
    assert_close("dbias", leaf(dbias) + added_up, dbias64 + leaf(before) + added_up, KERNEL_FP32)
    assert_close("gelu again", again, out, KERNEL_FP32)


@each_form
@pytest.mark.parametrize("B, T, C, OC", [(2, 13, 20, 80), (1, 1, 40, 12), (1, 5, 7, 9)])
def test_product_bias_and_gelu_are_one_call_that_keeps_the_product_without_the_bias(
    each_product, launches, form, B, T, C, OC
):
    rng = np.random.default_rng([B, T, C, OC])
    inp, weight, bias = exact(normal(rng, B, T, C) / C**0.5), normal(rng, OC, C), normal(rng, OC)
    out, fch = launch(
        matmul_gelu_forward, write(B, T, OC), write(B, T, OC), inp, parameter(weight), parameter(bias), B, T, C, OC,
        erf=form == "none", shift=OC % device.width(),
    )  # fmt: skip
    assert_close("fch", fch, leaf(inp) @ leaf(weight).T, kernel_tolerance(device))
    assert_close("gelu", out, gelu(leaf(fch), leaf(bias), form), KERNEL_FP32)  # of fch as it is stored
    one = {"tanh": "matvec_gelu_kernel", "none": "matvec_gelu_erf_kernel"}[form]
    assert list(launches) == [one] if B * T == 1 else one not in launches


@on_each_type
@each_form
@pytest.mark.parametrize("biased", [True, False])
@single_row
def test_the_product_of_a_single_row_has_gelu_in_its_kernel(form, biased, C, OC):
    rng = np.random.default_rng([C, OC])
    inp, weight, bias = exact(normal(rng, C) / C**0.5), parameter(normal(rng, OC, C)), parameter(normal(rng, OC))
    arguments = inp, weight, bias if biased else None, C, OC, form == "none"
    out, fch = launch(matvec_gelu, write(OC), write(OC), *arguments, shift=OC % device.width())
    product = leaf(weight.values) @ leaf(inp)
    # Terms of a sum cancel: of few outputs the largest may be far below the sum of their sizes.
    assert_close("fch", fch, product, kernel_tolerance(device) * max(1.0, 1 / float(product.abs().max())))
    assert_close("gelu", out, gelu(leaf(fch), leaf(bias.values) * biased, form), KERNEL_FP32)


@on_each_type
@each_form
def test_gelu_of_huge_numbers_is_themselves_or_zero(form):
    inp, ones, zeros = np.array([[-8192, -80, -20, 20, 80, 8192]], FP32), np.ones((1, 6), FP32), np.zeros(6, FP32)
    (out,) = launch(gelu_forward, write(1, 6), inp, zeros, 1, 6, form == "none")
    dinp, *_ = backward(ones, zeros, inp, zeros, form)
    assert to_numpy(out).tolist() == [[0, 0, 0, 20, 80, 8192]]
    assert to_numpy(dinp).tolist() == [[0, 0, 0, 1, 1, 1]]


@on_each_type
@each_form
@pytest.mark.parametrize("C", [64, 7])
def test_without_a_bias_gelu_is_that_of_a_bias_of_zeros(form, C):
    inp, _, dout = make(20, C)
    results = []
    for zeros in np.zeros(C, FP32), None:
        (out,) = launch(gelu_forward, write(20, C), inp, zeros, 20, C, form == "none")
        dinp, *_, again = backward(dout, zeros, inp, zeros, form)
        results.append([device.to_host(array).tobytes() for array in (out, dinp, again)])
    assert results[0] == results[1]

"""matmul.py and matmul.cu: linear layers against PyTorch's."""

import device
from kernels.matmul import (
    ROWS_WORTH_TRANSPOSING,
    matmul_backward_bias,
    matmul_backward_inp,
    matmul_backward_weight,
    matmul_forward,
    matvec,
    transpose,
)
from oracle import BF16, KERNEL_FP32, assert_close, guarded, kernel_tolerance, leaf, normal, to_numpy
from support.kernels import FP32, gradient, launch, parameter, shapes, single_row, update, write

import numpy as np
import pytest

on_each_type = pytest.mark.usefixtures("each_type")
on_each_product = pytest.mark.usefixtures("each_product")
SHAPES = [(2, 8, 64, 192), (1, 5, 7, 11), (3, 33, 50, 130), (1, 3, 9, 1100)]
# The first two are those of fcprojw, with 4 channels and with 5. For the last, backward transposes the other factor.
TRANSPOSED = [(1, ROWS_WORTH_TRANSPOSING, 16, 4), (1, ROWS_WORTH_TRANSPOSING + 3, 20, 5),
              (2, ROWS_WORTH_TRANSPOSING, 5, 70)]  # fmt: skip
LIMITS = {"B": (1, 3), "T": (1, 40), "C": (1, 70), "OC": (1, 200)}


def make(B: int, T: int, C: int, OC: int) -> tuple:
    """inp (B,T,C), weight (OC,C), bias (OC) and dout (B,T,OC)."""
    rng = np.random.default_rng([B, T, C, OC])
    return normal(rng, B, T, C), normal(rng, OC, C), normal(rng, OC), normal(rng, B, T, OC)


@on_each_product
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("on_a_stream", [True, False])
@shapes(*SHAPES, **LIMITS)
def test_matmul_forward_multiplies_and_adds_the_bias_and_the_residual_stream(biased, on_a_stream, B, T, C, OC):
    inp, weight, bias, stream = make(B, T, C, OC)
    ours_bias, residual = parameter(bias) if biased else None, stream if on_a_stream else None
    (out,) = launch(
        matmul_forward, write(B, T, OC), inp, parameter(weight), ours_bias, B, T, C, OC, residual=residual,
        shift=OC % device.width(),
    )  # fmt: skip
    product, tolerance = (leaf(inp) @ leaf(weight).T).detach(), kernel_tolerance(device)
    want = product + leaf(bias).detach() * biased + leaf(stream).detach() * on_a_stream
    if device.kind == "cuda" and device.floatX == device.BF16 and (biased or on_a_stream):
        # Some of cuBLAS's algorithms round the product before they add anything.
        tolerance += float((1 + BF16) * BF16 * (product.abs().max() + biased * abs(bias).max()) / want.abs().max())
    assert_close("out", out, want, tolerance)


@on_each_type
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("on_a_stream", [True, False])
@single_row
def test_matvec_multiplies_a_single_row_and_adds_the_bias_and_the_residual_stream(biased, on_a_stream, C, OC):
    inp, weight, bias, stream = make(1, 1, C, OC)
    ours_bias, residual = parameter(bias) if biased else None, stream[0, 0] if on_a_stream else None
    arguments = inp[0, 0], parameter(weight), ours_bias, residual, C, OC
    (out,) = launch(matvec, write(OC), *arguments, shift=OC % device.width())
    want = (leaf(weight) @ leaf(inp[0, 0]) + leaf(bias) * biased + leaf(stream[0, 0]) * on_a_stream).detach()
    # Terms of a sum cancel: of few outputs the largest may be far below the sum of their sizes.
    assert_close("out", out, want, kernel_tolerance(device) * max(1.0, C**0.5 / float(want.abs().max())))


@on_each_product
@shapes(*SHAPES, *TRANSPOSED, **LIMITS)
def test_matmul_backward_sets_the_gradient_of_its_input(B, T, C, OC):
    _, weight, _, dout = make(B, T, C, OC)
    shift = OC % device.width()
    (dinp,) = launch(matmul_backward_inp, write(B, T, C), dout, parameter(weight), B, T, C, OC, shift=shift)
    assert_close("dinp", dinp, leaf(dout) @ leaf(weight), kernel_tolerance(device))


@on_each_product
@pytest.mark.parametrize("T", [5, ROWS_WORTH_TRANSPOSING])
def test_matmul_backward_adds_to_the_gradient_of_an_input_that_had_another_reader(T):
    """In a few shapes: in bf16 cuBLAS may split the sum over OC, and round its parts."""
    sizes = 1, T, 12, 7
    before, weight, _, dout = make(*sizes)
    (dinp,) = launch(matmul_backward_inp, update(before), dout, weight, *sizes, accumulate=True)
    assert_close("dinp", dinp, leaf(before) + leaf(dout) @ leaf(weight), kernel_tolerance(device))


@on_each_product
@pytest.mark.parametrize("comes_transposed", [True, False])
@shapes(*SHAPES, *TRANSPOSED, **LIMITS)
def test_matmul_backward_adds_to_the_gradient_of_its_weight_or_sets_it(comes_transposed, B, T, C, OC):
    inp, before, _, dout = make(B, T, C, OC)
    with guarded(device) as memory, guarded(device, shift=C % device.width()) as gradients:
        added, written = gradients.update(before, FP32), gradients.write((OC, C), FP32)
        ours = memory.read(inp.reshape(B * T, C).T).T if comes_transposed else memory.read(inp)
        matmul_backward_weight(added, memory.read(dout), ours, B, T, C, OC, accumulate=True)
        matmul_backward_weight(written, memory.read(dout), ours, B, T, C, OC, accumulate=False)
    want = leaf(dout).reshape(B * T, OC).T @ leaf(inp).reshape(B * T, C)
    assert_close("dweight set", written, want, kernel_tolerance(device))
    assert_close("dweight added to", added, want + leaf(before), kernel_tolerance(device))


@on_each_type
@shapes(*SHAPES, **LIMITS)
def test_matmul_backward_adds_to_the_gradient_of_its_bias(B, T, C, OC):
    _, _, before, dout = make(B, T, C, OC)
    (dbias,) = launch(matmul_backward_bias, gradient(before), dout, B, T, OC, shift=OC % device.width())
    assert_close("dbias", dbias, leaf(dout).sum((0, 1)) + leaf(before), KERNEL_FP32)


@on_each_type
@shapes((64, 256, 0), (64, 256, 1), (9, 7, 0), (31, 513, 2), N=(1, 100), C=(1, 300), shift=(0, 3))
def test_transpose_is_exact(N, C, shift):
    inp = normal(np.random.default_rng([N, C]), N, C)
    (out,) = launch(transpose, write(C, N), parameter(inp), N, C, shift=shift)
    assert np.array_equal(to_numpy(out), inp.T)


@on_each_product
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("stream", [0, 1])
def test_what_is_added_to_a_product_is_added_before_the_sum_is_rounded(T, stream):
    """Sums that lie half-way between two numbers of bf16: a bias that came later would lift none of them. The residual
    stream is larger than the product, of which its own rounding would leave less."""
    if device.kind == "cuda" and T > 1:
        pytest.skip("some of cuBLAS's algorithms round the product before they add anything")
    C, OC = 2, 8
    inp, weight = np.ones((1, T, C), FP32), np.tile(np.array([1 - stream, BF16], FP32), (OC, 1))
    residual = np.full((1, T, OC), stream, FP32) if stream else None
    for bias, want in ((2.0**-20, 1 + 2 * BF16), (-(2.0**-20), 1.0)):  # added to 1 + 2^-8
        (out,) = launch(
            matmul_forward, write(1, T, OC), inp, weight, np.full(OC, bias, FP32), 1, T, C, OC, residual=residual
        )
        assert (to_numpy(out) == (want if device.floatX == device.BF16 else FP32(1 + BF16 + bias))).all()

"""matmul.py and matmul.cu: linear layers against PyTorch's."""

from kernels.matmul import (
    MIN_OUTPUTS_FOR_8_LANES,
    ROWS_WORTH_TRANSPOSING,
    matmul_backward_bias,
    matmul_backward_inp,
    matmul_backward_weight,
    matmul_forward,
    matvec,
    transpose,
)
from oracle import BF16, KERNEL_FP32, assert_close, guarded, kernel_tolerance, leaf, normal, to_numpy

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

FP32 = np.float32


@pytest.fixture
def dev(each_type):
    return each_type


@pytest.fixture
def product_dev(each_product):
    return each_product


any_shape = given(B=st.integers(1, 3), T=st.integers(1, 40), C=st.integers(1, 70), OC=st.integers(1, 200))


def examples(test):
    for B, T, C, OC in [(2, 8, 64, 192), (1, 5, 7, 11), (3, 33, 50, 130), (1, 3, 9, 1100)]:
        test = example(B=B, T=T, C=C, OC=OC)(test)
    return test


def make(B: int, T: int, C: int, OC: int) -> tuple:
    """inp (B,T,C), weight (OC,C), bias (OC) and dout (B,T,OC)."""
    rng = np.random.default_rng([B, T, C, OC])
    return normal(rng, B, T, C), normal(rng, OC, C), normal(rng, OC), normal(rng, B, T, OC)


@any_shape
@examples
def test_matmul_forward_multiplies_and_adds_the_bias_where_there_is_one(product_dev, B, T, C, OC):
    inp, weight, bias, _ = make(B, T, C, OC)
    for b in (bias, None):
        with guarded(product_dev) as memory, guarded(product_dev, shift=OC % product_dev.width()) as parameters:
            out = memory.write((B, T, OC))
            ours_bias = None if b is None else parameters.read(b)
            matmul_forward(out, memory.read(inp), parameters.read(weight), ours_bias, B, T, C, OC)
        product, tolerance = (leaf(inp) @ leaf(weight).T).detach(), kernel_tolerance(product_dev)
        want = product + (0 if b is None else leaf(b).detach())
        if product_dev.kind == "cuda" and product_dev.floatX == product_dev.BF16 and b is not None:
            # Some of cuBLAS's algorithms round the product before they add the bias.
            tolerance += float((1 + BF16) * BF16 * product.abs().max() / want.abs().max())
        assert_close("out", out, want, tolerance)


@given(C=st.integers(1, 5000), OC=st.integers(1, 200))
@example(C=768, OC=50)
@example(C=11, OC=7)
@example(C=5000, OC=3)  # several warps an output
@example(C=19, OC=MIN_OUTPUTS_FOR_8_LANES + 3)  # several outputs a warp
def test_matvec_multiplies_a_single_row_and_adds_the_bias_where_there_is_one(dev, C, OC):
    inp, weight, bias, _ = make(1, 1, C, OC)
    for b in (bias, None):
        with guarded(dev) as memory, guarded(dev, shift=OC % dev.width()) as parameters:
            out = memory.write((OC,))
            ours_bias = None if b is None else parameters.read(b)
            matvec(out, memory.read(inp[0, 0]), parameters.read(weight), ours_bias, C, OC)
        want = (leaf(weight) @ leaf(inp[0, 0])).detach() + (0 if b is None else leaf(b).detach())
        # Terms of a sum cancel: of few outputs the largest may be far below the sum of their sizes.
        assert_close("out", out, want, kernel_tolerance(dev) * max(1.0, C**0.5 / float(want.abs().max())))


@any_shape
@examples
@example(B=1, T=ROWS_WORTH_TRANSPOSING, C=16, OC=4)  # fcprojw of a model with 4 channels, and below with 5
@example(B=1, T=ROWS_WORTH_TRANSPOSING + 3, C=20, OC=5)
@example(B=2, T=ROWS_WORTH_TRANSPOSING, C=5, OC=70)
def test_matmul_backward_sets_the_gradient_of_its_input(product_dev, B, T, C, OC):
    _, weight, _, dout = make(B, T, C, OC)
    with guarded(product_dev) as memory, guarded(product_dev, shift=OC % product_dev.width()) as parameters:
        dinp = memory.write((B, T, C))
        matmul_backward_inp(dinp, memory.read(dout), parameters.read(weight), B, T, C, OC)
    assert_close("dinp", dinp, leaf(dout) @ leaf(weight), kernel_tolerance(product_dev))


@pytest.mark.parametrize("T", [5, ROWS_WORTH_TRANSPOSING])
def test_matmul_backward_adds_to_the_gradient_of_an_input_that_had_another_reader(product_dev, T):
    """In a few shapes: in bf16 cuBLAS may split the sum over OC, and round its parts."""
    B, C, OC = 1, 12, 7
    _, weight, _, dout = make(B, T, C, OC)
    before = normal(np.random.default_rng(T), B, T, C)
    with guarded(product_dev) as memory:
        dinp = memory.update(before)
        matmul_backward_inp(dinp, memory.read(dout), memory.read(weight), B, T, C, OC, accumulate=True)
    assert_close("dinp", dinp, leaf(before) + leaf(dout) @ leaf(weight), kernel_tolerance(product_dev))


@pytest.mark.parametrize("comes_transposed", [True, False])
@any_shape
@examples
@example(B=1, T=ROWS_WORTH_TRANSPOSING, C=16, OC=4)
@example(B=1, T=ROWS_WORTH_TRANSPOSING + 3, C=5, OC=70)
def test_matmul_backward_adds_to_the_gradient_of_its_weight_or_sets_it(product_dev, comes_transposed, B, T, C, OC):
    inp, _, _, dout = make(B, T, C, OC)
    before = normal(np.random.default_rng(OC), OC, C)
    with guarded(product_dev) as memory, guarded(product_dev, shift=C % product_dev.width()) as gradients:
        added, written = gradients.update(before, FP32), gradients.write((OC, C), FP32)
        rows = inp.reshape(B * T, C)
        ours = memory.read(rows.T).T if comes_transposed else memory.read(inp)
        matmul_backward_weight(added, memory.read(dout), ours, B, T, C, OC, accumulate=True)
        matmul_backward_weight(written, memory.read(dout), ours, B, T, C, OC, accumulate=False)
    want = leaf(dout).reshape(B * T, OC).T @ leaf(inp).reshape(B * T, C)
    assert_close("dweight set", written, want, kernel_tolerance(product_dev))
    assert_close("dweight added to", added, want + leaf(before), kernel_tolerance(product_dev))


@any_shape
@examples
def test_matmul_backward_adds_to_the_gradient_of_its_bias(dev, B, T, C, OC):
    dout, before = make(B, T, C, OC)[3], normal(np.random.default_rng(OC), OC)
    with guarded(dev) as memory, guarded(dev, shift=OC % dev.width()) as gradients:
        dbias = gradients.update(before, FP32)
        matmul_backward_bias(dbias, memory.read(dout), B, T, OC)
    assert_close("dbias", dbias, leaf(dout).sum((0, 1)) + leaf(before), KERNEL_FP32)


@given(N=st.integers(1, 100), C=st.integers(1, 300), shift=st.integers(0, 3))
@example(N=64, C=256, shift=0)
@example(N=64, C=256, shift=1)
@example(N=9, C=7, shift=0)
@example(N=31, C=513, shift=2)
def test_transpose_is_exact(dev, N, C, shift):
    inp = normal(np.random.default_rng([N, C]), N, C)
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        out = memory.write((C, N))
        transpose(out, parameters.read(inp), N, C)
    assert np.array_equal(to_numpy(out), inp.T)


def test_a_bias_is_added_before_the_product_is_rounded(product_dev):
    """Sums that lie half-way between two numbers of bf16: a bias that came later would lift none of them."""
    if product_dev.kind == "cuda":
        pytest.skip("some of cuBLAS's algorithms round the product before they add the bias")
    B, T, C, OC = 1, 4, 2, 8
    inp, weight = np.ones((B, T, C), FP32), np.tile(np.array([1, BF16], FP32), (OC, 1))  # 1 + 2^-8
    for bias, want in ((2.0**-20, 1 + 2 * BF16), (-(2.0**-20), 1.0)):
        with guarded(product_dev) as memory:
            out, ours_bias = memory.write((B, T, OC)), memory.read(np.full(OC, bias, FP32))
            matmul_forward(out, memory.read(inp), memory.read(weight), ours_bias, B, T, C, OC)
        if product_dev.floatX != product_dev.BF16:
            want = FP32(1 + BF16 + bias)
        assert (to_numpy(out) == want).all()

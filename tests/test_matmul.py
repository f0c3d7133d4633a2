"""matmul.py and matmul.cu: linear layers against PyTorch's."""

import device
from kernels.matmul import (
    MANY_OUTPUTS,
    ROWS_WORTH_TRANSPOSING,
    as_stored,
    matmul_backward_bias,
    matmul_backward_inp,
    matmul_backward_weight,
    matmul_forward,
    matvec,
    transpose,
    transposes,
    weight_is_transposed,
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
@example(C=19, OC=MANY_OUTPUTS + 3)  # several outputs a warp
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
    B, C, OC = 1, 12, 7
    _, weight, _, dout = make(B, T, C, OC)
    before = normal(np.random.default_rng(T), B, T, C)
    with guarded(product_dev) as memory:
        dinp = memory.update(before)
        matmul_backward_inp(dinp, memory.read(dout), memory.read(weight), B, T, C, OC, accumulate=True)
    assert_close("dinp", dinp, leaf(before) + leaf(dout) @ leaf(weight), kernel_tolerance(product_dev))


def names_of(launcher, *arguments) -> list[str]:
    """What a launcher gives to the device, by name."""
    names = []

    def observer(name, arguments, launch) -> None:
        names.append(name)
        launch()

    with device.observe(observer):
        launcher(*arguments)
    return names


def test_a_large_weight_is_not_transposed(dev, monkeypatch):
    B, T, C, OC = 1, ROWS_WORTH_TRANSPOSING, 4, 8
    _, weight, _, dout = make(B, T, C, OC)
    for most, small in ((C * OC + 1, True), (C * OC, False)):
        monkeypatch.setattr("kernels.matmul.MOST_WEIGHTS_A_ROW", most / (B * T))
        with guarded(dev) as memory:
            dinp, inputs = memory.write((B, T, C)), (memory.read(dout), memory.read(weight))
            launched = names_of(matmul_backward_inp, dinp, *inputs, B, T, C, OC)
        assert ("transpose_kernel" in launched) == weight_is_transposed(B * T, C, OC) == (small and transposes())
        assert_close("dinp", dinp, leaf(dout) @ leaf(weight), kernel_tolerance(dev))


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


def test_a_bias_is_added_to_products_of_operands_that_tf32_holds(product_dev, rng):
    """With 10 bits of mantissa in each operand, TF32 and fp32 multiply alike, and only the sum is rounded."""
    B, T, C, OC = 2, 24, 96, 40
    inp, weight, bias = (to_tf32(normal(rng, *shape)) for shape in ((B, T, C), (OC, C), (OC,)))
    with guarded(product_dev) as memory:
        out, ours_bias = memory.write((B, T, OC)), memory.read(bias)
        matmul_forward(out, memory.read(inp), memory.read(weight), ours_bias, B, T, C, OC)
    tolerance = kernel_tolerance(product_dev) if product_dev.floatX == product_dev.BF16 else KERNEL_FP32
    if product_dev.kind == "cuda" and product_dev.floatX == product_dev.BF16:
        tolerance += BF16  # as above
    assert_close("out", out, leaf(inp) @ leaf(weight).T + leaf(bias), tolerance)


def to_tf32(values: np.ndarray) -> np.ndarray:
    """fp32 values cut to the 10 bits of mantissa that TF32 has."""
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(FP32)


def test_a_recomputed_matrix_must_lie_in_memory_as_its_product_wants_it(dev):
    by_rows, by_columns = dev.empty((6, 4), dev.floatX), dev.empty((4, 6), dev.floatX).T
    right, wrong = (by_columns, by_rows) if transposes() else (by_rows, by_columns)
    stored = as_stored(right)
    assert stored.flags.c_contiguous and stored.shape == ((4, 6) if transposes() else (6, 4))
    assert device.address(stored) == device.address(right)
    with pytest.raises(ValueError, match="transposes"):
        as_stored(wrong)

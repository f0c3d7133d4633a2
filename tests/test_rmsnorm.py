"""rmsnorm.cu against PyTorch's rms_norm, with the residual connection in front of it."""

from kernels.reduce import MAX_PARTIALS
from kernels.rmsnorm import fused_residual_rmsnorm_forward, rmsnorm_backward, rmsnorm_forward, rmsnorm_recompute
from oracle import KERNEL_FP32, assert_close, exact, guarded, leaf, normal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

EPS = 1e-5
FP32 = np.float32


@pytest.fixture
def dev(each_type):
    return each_type


# A weight stands anywhere in the parameter buffer, so it need not begin at 16 bytes even where C is a multiple of 8.
any_shape = given(B=st.integers(1, 4), T=st.integers(1, 30), C=st.integers(1, 150), shift=st.integers(0, 3))


def examples(test):
    for B, T, C, shift in [(2, 8, 64, 0), (1, 5, 7, 1), (3, 43, 130, 2), (1, 9, 576, 3), (1, 3, 4098, 0), (1, 1, 1, 0)]:
        test = example(B=B, T=T, C=C, shift=shift)(test)
    return test


def make(B: int, T: int, C: int) -> tuple[np.random.Generator, np.ndarray]:
    """x (B,T,C) away from 0: a row of few numbers that are all near 0 would magnify the rounding of its input."""
    rng = np.random.default_rng([B, T, C])
    x = normal(rng, B, T, C)
    return rng, exact(x + np.copysign(FP32(0.5), x))


def reciprocal_rms(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return (x.square().mean(-1) + eps).rsqrt()


@any_shape
@examples
def test_rmsnorm_forward_sets_output_and_rstd(dev, B, T, C, shift):
    rng, x = make(B, T, C)
    weight = normal(rng, C)
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        out, rstd = memory.write((B, T, C)), memory.write((B, T), FP32)
        rmsnorm_forward(out, rstd, memory.read(x), parameters.read(weight), EPS, B, T, C)
    x = leaf(x)
    assert_close("rstd", rstd, reciprocal_rms(x), KERNEL_FP32)
    assert_close("out", out, F.rms_norm(x, (C,), leaf(weight), EPS), KERNEL_FP32)


@any_shape
@examples
def test_fused_residual_rmsnorm_forward_adds_the_projection_before_the_rmsnorm(dev, B, T, C, shift):
    rng, inp1 = make(B, T, C)
    inp2, weight = normal(rng, B, T, C) / 4, normal(rng, C)
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        residual, out, rstd = memory.write((B, T, C)), memory.write((B, T, C)), memory.write((B, T), FP32)
        inputs = memory.read(inp1), memory.read(inp2), parameters.read(weight)
        fused_residual_rmsnorm_forward(residual, out, rstd, *inputs, EPS, B, T, C)
    assert_close("residual", residual, leaf(inp1) + leaf(inp2), KERNEL_FP32)
    x = leaf(residual)  # as it is stored
    assert_close("residual rstd", rstd, reciprocal_rms(x), KERNEL_FP32)
    assert_close("residual out", out, F.rms_norm(x, (C,), leaf(weight), EPS), KERNEL_FP32)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.1])
def test_eps_is_added_to_the_mean_of_squares(dev, eps):
    x, weight = exact(1e-2 * normal(np.random.default_rng(0), 1, 6, 33)), np.ones(33, FP32)
    x[0, 2] = 0  # eps alone is left
    with guarded(dev) as memory:
        out, rstd = memory.write((1, 6, 33)), memory.write((1, 6), FP32)
        rmsnorm_forward(out, rstd, memory.read(x), memory.read(weight), eps, 1, 6, 33)
    assert_close("small rstd", rstd, reciprocal_rms(leaf(x), eps), KERNEL_FP32)
    assert_close("small out", out, F.rms_norm(leaf(x), (33,), eps=eps), KERNEL_FP32)


@any_shape
@examples
def test_rmsnorm_is_recomputed(dev, B, T, C, shift):
    rng, x = make(B, T, C)
    weight, rstd = normal(rng, C), reciprocal_rms(leaf(x)).detach().float().numpy()
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        out = memory.recomputed(B * T, C)
        rmsnorm_recompute(out, memory.read(x), parameters.read(weight), memory.read(rstd, FP32), B, T, C)
    assert_close("recomputed", out, F.rms_norm(leaf(x), (C,), leaf(weight), EPS).reshape(B * T, C), KERNEL_FP32)


def check_backward(dev, B: int, T: int, C: int, shift: int = 0) -> None:
    rng, x = make(B, T, C)
    dout, before = normal(rng, B, T, C), normal(rng, B, T, C)
    weight, dweight = normal(rng, C), normal(rng, C)
    x64, weight64 = leaf(x), leaf(weight)
    (F.rms_norm(x64, (C,), weight64, EPS) * leaf(dout).detach()).sum().backward()
    rstd = reciprocal_rms(x64).detach().float().numpy()
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        ours_dinp, ours_dweight = memory.update(before), parameters.update(dweight, FP32)
        inputs = memory.read(dout), memory.read(x), parameters.read(weight), memory.read(rstd, FP32)
        rmsnorm_backward(ours_dinp, ours_dweight, *inputs, B, T, C)
    assert_close("dinp", ours_dinp, x64.grad + leaf(before), KERNEL_FP32)
    assert_close("dweight", ours_dweight, weight64.grad + leaf(dweight), KERNEL_FP32)


@any_shape
@examples
def test_rmsnorm_backward_adds_to_the_residual_gradient_and_to_the_weights(dev, B, T, C, shift):
    check_backward(dev, B, T, C, shift)


@pytest.mark.parametrize("T, C", [(1501, 5), (1500, 8)])
def test_rmsnorm_backward_gives_a_block_more_rows_than_it_takes_at_once(dev, T, C):
    assert 3 * T > 4 * MAX_PARTIALS
    check_backward(dev, 3, T, C)


@pytest.mark.parametrize("too_many", [0, 1, 16])
def test_rmsnorm_backward_keeps_its_sums_elsewhere_where_shared_memory_is_too_small(
    dev, columns_that_fit, launches, too_many
):  # fmt: skip
    """C: more than MAX_THREADS threads take at once. T: on the CPU a block takes rows twice."""
    C = columns_that_fit(1, 4096, few=2064) + too_many
    check_backward(dev, 1, 9, C)
    assert launches["rmsnorm_backward_kernel"]["keep"] == (not too_many)


def test_a_row_of_zeros_has_a_finite_gradient(dev):
    x, dout, weight = np.zeros((1, 1, 6), FP32), np.ones((1, 1, 6), FP32), np.full(6, 2, FP32)
    rstd = np.full((1, 1), EPS**-0.5, FP32)
    with guarded(dev) as memory:
        dinp, dweight = memory.update(np.zeros((1, 1, 6), FP32)), memory.update(np.zeros(6, FP32), FP32)
        inputs = memory.read(dout), memory.read(x), memory.read(weight), memory.read(rstd, FP32)
        rmsnorm_backward(dinp, dweight, *inputs, 1, 1, 6)
    assert_close("dinp", dinp, np.full((1, 1, 6), 2 * EPS**-0.5), KERNEL_FP32)
    assert not dev.to_host(dweight).any()

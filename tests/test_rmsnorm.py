"""rmsnorm.cu against PyTorch's rms_norm."""

from kernels.reduce import MAX_PARTIALS
from kernels.rmsnorm import rmsnorm_backward, rmsnorm_forward, rmsnorm_recompute
from oracle import KERNEL_FP32, assert_close, exact, leaf, normal
from support.kernels import FP32, autograd, fp32, gradient, launch, parameter, recomputed, shapes, update, write

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("each_type")

EPS = 1e-5
any_shape = shapes(
    (2, 8, 64, 0), (1, 5, 7, 1), (3, 43, 130, 2), (1, 9, 576, 3), (1, 3, 4098, 0), (1, 1, 1, 0),
    B=(1, 4), T=(1, 30), C=(1, 150), shift=(0, 3),
)  # fmt: skip


def make(B: int, T: int, C: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    """x (B,T,C) away from 0: a row of few numbers that are all near 0 would magnify the rounding of its input. And a
    weight (C)."""
    rng = np.random.default_rng([B, T, C])
    x = normal(rng, B, T, C)
    return rng, exact(x + np.copysign(FP32(0.5), x)), normal(rng, C)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def reciprocal_rms(x, eps: float = EPS) -> np.ndarray:
    return (leaf(x).square().mean(-1) + eps).rsqrt().detach().numpy()


@any_shape
def test_rmsnorm_forward_sets_output_and_rstd(B, T, C, shift):
    _, x, weight = make(B, T, C)
    outputs = write(B, T, C), write(B, T, dtype=FP32)
    out, rstd = launch(rmsnorm_forward, *outputs, x, parameter(weight), EPS, B, T, C, shift=shift)
    assert_close("rstd", rstd, reciprocal_rms(x), KERNEL_FP32)
    assert_close("out", out, rms_norm(leaf(x), leaf(weight)), KERNEL_FP32)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.1])
def test_eps_is_added_to_the_mean_of_squares(eps):
    x, weight = exact(1e-2 * normal(np.random.default_rng(0), 1, 6, 33)), np.ones(33, FP32)
    x[0, 2] = 0  # eps alone is left
    out, rstd = launch(rmsnorm_forward, write(1, 6, 33), write(1, 6, dtype=FP32), x, weight, eps, 1, 6, 33)
    assert_close("small rstd", rstd, reciprocal_rms(x, eps), KERNEL_FP32)
    assert_close("small out", out, rms_norm(leaf(x), leaf(weight), eps), KERNEL_FP32)


@any_shape
def test_rmsnorm_is_recomputed(B, T, C, shift):
    _, x, weight = make(B, T, C)
    rstd = fp32(reciprocal_rms(x))
    (out,) = launch(rmsnorm_recompute, recomputed(B * T, C), x, parameter(weight), rstd, B, T, C, shift=shift)
    assert_close("recomputed", out, rms_norm(leaf(x), leaf(weight)).reshape(B * T, C), KERNEL_FP32)


def check_backward(B: int, T: int, C: int, shift: int = 0) -> None:
    rng, x, weight = make(B, T, C)
    dout, before, dweight_before = normal(rng, B, T, C), normal(rng, B, T, C), normal(rng, C)
    dinp, dweight = launch(
        rmsnorm_backward, update(before), gradient(dweight_before), dout, x, parameter(weight),
        fp32(reciprocal_rms(x)), B, T, C, shift=shift,
    )  # fmt: skip
    _, dx64, dweight64 = autograd(rms_norm, dout, x, weight)
    assert_close("dinp", dinp, dx64 + leaf(before), KERNEL_FP32)
    assert_close("dweight", dweight, dweight64 + leaf(dweight_before), KERNEL_FP32)


@any_shape
def test_rmsnorm_backward_adds_to_the_residual_gradient_and_to_the_weights(B, T, C, shift):
    check_backward(B, T, C, shift)


@pytest.mark.parametrize("T, C", [(1501, 5), (1500, 8)])
def test_rmsnorm_backward_gives_a_block_more_rows_than_it_takes_at_once(T, C):
    assert 3 * T > 4 * MAX_PARTIALS
    check_backward(3, T, C)


@pytest.mark.parametrize("too_many", [0, 1, 16])
def test_rmsnorm_backward_keeps_its_sums_elsewhere_where_shared_memory_is_too_small(
    columns_that_fit, launches, too_many
):  # fmt: skip
    """C: more than MAX_THREADS threads take at once. T: on the CPU a block takes rows twice."""
    check_backward(1, 9, columns_that_fit(1, 4096, few=2064) + too_many)
    assert launches["rmsnorm_backward_kernel"]["keep"] == (not too_many)


def test_a_row_of_zeros_has_a_finite_gradient():
    x, dout, weight = np.zeros((1, 1, 6), FP32), np.ones((1, 1, 6), FP32), np.full(6, 2, FP32)
    rstd = fp32(np.full((1, 1), EPS**-0.5, FP32))
    dinp, dweight = launch(rmsnorm_backward, update(x), gradient(weight), dout, x, weight, rstd, 1, 1, 6)
    assert_close("dinp", dinp, np.full((1, 1, 6), 2 * EPS**-0.5), KERNEL_FP32)
    assert_close("dweight", dweight, weight, 0)

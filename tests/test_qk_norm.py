"""qk_norm.cu against PyTorch's rms_norm and rotations of complex numbers."""

import device
from kernels.qk_norm import qk_norm_backward, qk_norm_forward
from kernels.reduce import MAX_PARTIALS
from kernels.rope import rope_table
from oracle import KERNEL_FP32, assert_close, exact, leaf, normal, to_numpy
from support.kernels import FP32, autograd, fp32, gradient, launch, parameter, rotated, shapes, update, write

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("each_type")

EPS = 1e-6
any_shape = shapes(
    (2, 5, 3, 3, 32, 0), (1, 3, 8, 2, 64, 0), (1, 3, 2, 2, 64, 1), (2, 4, 1, 1, 2, 0), (1, 6, 2, 1, 3, 2),
    (1, 2, 1, 2, 131, 0), (1, 2, 1, 1, 140, 3),
    B=(1, 3), T=(1, 12), NKV=(1, 3), group=(1, 4), half=(2, 40), shift=(0, 3),
)  # fmt: skip


def make(B: int, T: int, NH: int, NKV: int, HS: int) -> tuple:
    """qkv (B,T,NH+2*NKV,HS) away from 0: a head of few numbers that are all near 0 would magnify their rounding. And
    the weights of queries and keys."""
    rng = np.random.default_rng([B, T, NH, HS])
    x = normal(rng, B, T, NH + 2 * NKV, HS)
    return rng, exact(x + np.copysign(FP32(0.5), x)), [normal(rng, HS), normal(rng, HS)]


def defined(x: torch.Tensor, qweight: torch.Tensor, kweight: torch.Tensor, NKV: int) -> torch.Tensor:
    HS = x.shape[3]
    q, k, v = x.split([x.shape[2] - 2 * NKV, NKV, NKV], dim=2)
    q, k = F.rms_norm(q, (HS,), qweight, EPS), F.rms_norm(k, (HS,), kweight, EPS)
    return rotated(torch.cat([q, k, v], dim=2), NKV, HS)


def reciprocal_rms(x: np.ndarray, NKV: int) -> np.ndarray:
    return (leaf(x)[:, :, : x.shape[2] - NKV].square().mean(-1) + EPS).rsqrt().detach().numpy()


@any_shape
def test_queries_and_keys_are_normalised_and_turned_and_values_copied(B, T, NKV, group, half, shift):
    NH, HS = NKV * group, 2 * half
    _, x, weights = make(B, T, NH, NKV, HS)
    out, rstd = launch(
        qk_norm_forward, write(*x.shape), write(B, T, NH + NKV, dtype=FP32), x, [parameter(each) for each in weights],
        fp32(rope_table(T + 1, HS, 1e4)), EPS, B, T, NH, NKV, HS, shift=shift,
    )  # fmt: skip
    assert_close("rstd", rstd, reciprocal_rms(x, NKV), KERNEL_FP32)
    assert_close("out", out, defined(*map(leaf, (x, *weights)), NKV), KERNEL_FP32)
    assert (to_numpy(out)[:, :, NH + NKV :] == x[:, :, NH + NKV :]).all()


def check_backward(B: int, T: int, NKV: int, group: int, HS: int, shift: int = 0) -> None:
    NH = NKV * group
    rng, x, weights = make(B, T, NH, NKV, HS)
    dout, before = normal(rng, *x.shape), [normal(rng, HS) for _ in weights]
    dqkv = update(dout)
    dqkv, *dweights = launch(
        qk_norm_backward, dqkv, [gradient(each) for each in before], dqkv, x, [parameter(each) for each in weights],
        fp32(reciprocal_rms(x, NKV)), fp32(rope_table(T + 1, HS, 1e4)), B, T, NH, NKV, HS, shift=shift,
    )  # fmt: skip
    _, dx64, *dweights64 = autograd(lambda *inputs: defined(*inputs, NKV), dout, x, *weights)
    assert_close("dqkv", dqkv, dx64, KERNEL_FP32)
    for name, got, want, start in zip("qk", dweights, dweights64, before, strict=True):
        assert_close(f"d{name}weight", got, want + leaf(start), KERNEL_FP32)
    assert (to_numpy(dqkv)[:, :, NH + NKV :] == dout[:, :, NH + NKV :]).all()


@any_shape
def test_qk_norm_backward_is_the_gradient_and_adds_to_the_weights(B, T, NKV, group, half, shift):
    check_backward(B, T, NKV, group, 2 * half, shift)


def test_qk_norm_backward_gives_a_warp_many_heads():
    T = 700 * device.width() // 4
    assert 3 * T * 3 > 2 * device.width() * MAX_PARTIALS
    check_backward(3, T, 1, 2, 6)


def test_qk_norm_backward_has_fewer_heads_at_once_where_shared_memory_is_too_small(columns_that_fit):
    HS = columns_that_fit(2 * 3, 0, few=304)
    assert 2 * device.width() * 2 * 4 * HS > device.shared_memory
    check_backward(1, 2, 1, 1, HS)


def test_a_head_of_zeros_has_a_finite_gradient():
    zeros, dqkv = np.zeros((1, 1, 3, 6), FP32), update(np.ones((1, 1, 3, 6), FP32))
    weight, rstd, table = np.full(6, 2, FP32), np.full((1, 1, 2), EPS**-0.5), rope_table(1, 6, 1e4)
    sums = gradient(weight), gradient(weight)
    args = dqkv, sums, dqkv, zeros, (weight, weight), fp32(rstd), fp32(table)
    dqkv, *sums = launch(qk_norm_backward, *args, 1, 1, 1, 1, 6)
    assert_close("dq and dk", dqkv[:, :, :2], np.full((1, 1, 2, 6), 2 * EPS**-0.5), KERNEL_FP32)
    for total in sums:
        assert_close("dweight", total, weight, 0)


def test_a_gradient_in_another_place_than_that_of_the_output_is_refused():
    dqkv, dout, weight = (device.zeros(shape) for shape in ((1, 1, 3, 6), (1, 1, 3, 6), (6,)))
    with pytest.raises(ValueError, match="works in place"):
        qk_norm_backward(dqkv, (weight, weight), dout, dout, (weight, weight), weight, weight, 1, 1, 1, 1, 6)

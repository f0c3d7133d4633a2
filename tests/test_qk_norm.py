"""qk_norm.cu against PyTorch's rms_norm and rotations of complex numbers."""

from kernels.qk_norm import qk_norm_backward, qk_norm_forward
from kernels.reduce import MAX_PARTIALS
from kernels.rope import rope_table
from oracle import KERNEL_FP32, assert_close, exact, guarded, leaf, normal, to_numpy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from test_rope import turned

EPS = 1e-6
FP32 = np.float32


@pytest.fixture
def dev(each_type):
    return each_type


# Weights stand anywhere in the parameter buffer, so they need not begin at 16 bytes even where HS is a multiple of 8.
any_shape = given(
    B=st.integers(1, 3), T=st.integers(1, 12), NKV=st.integers(1, 3), group=st.integers(1, 4), half=st.integers(2, 40),
    shift=st.integers(0, 3),
)  # fmt: skip


def examples(test):
    for B, T, NKV, group, half, shift in [
        (2, 5, 3, 3, 32, 0), (1, 3, 8, 2, 64, 0), (1, 3, 2, 2, 64, 1), (2, 4, 1, 1, 2, 0), (1, 6, 2, 1, 3, 2),
        (1, 2, 1, 2, 131, 0), (1, 2, 1, 1, 140, 3),
    ]:  # fmt: skip
        test = example(B=B, T=T, NKV=NKV, group=group, half=half, shift=shift)(test)
    return test


def make(B: int, T: int, NH: int, NKV: int, HS: int) -> tuple[np.random.Generator, np.ndarray]:
    """qkv (B,T,NH+2*NKV,HS) away from 0: a head of few numbers that are all near 0 would magnify their rounding."""
    rng = np.random.default_rng([B, T, NH, HS])
    x = normal(rng, B, T, NH + 2 * NKV, HS)
    return rng, exact(x + np.copysign(FP32(0.5), x))


def defined(x: torch.Tensor, qweight: torch.Tensor, kweight: torch.Tensor, table: np.ndarray, NKV: int) -> torch.Tensor:
    NH, HS = x.shape[2] - 2 * NKV, x.shape[3]
    q, k, v = x.split([NH, NKV, NKV], dim=2)
    q, k = F.rms_norm(q, (HS,), qweight, EPS), F.rms_norm(k, (HS,), kweight, EPS)
    return turned(torch.cat([q, k, v], dim=2), table, NKV)


def reciprocal_rms(x, NKV: int) -> torch.Tensor:
    return (leaf(x)[:, :, : x.shape[2] - NKV].square().mean(-1) + EPS).rsqrt()


@any_shape
@examples
def test_queries_and_keys_are_normalised_and_turned_and_values_copied(dev, B, T, NKV, group, half, shift):
    NH, HS = NKV * group, 2 * half
    rng, x = make(B, T, NH, NKV, HS)
    qweight, kweight, table = normal(rng, HS), normal(rng, HS), rope_table(T + 1, HS, 1e4)
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        out, rstd = memory.write(x.shape), memory.write((B, T, NH + NKV), FP32)
        weights = parameters.read(qweight), parameters.read(kweight)
        qk_norm_forward(out, rstd, memory.read(x), weights, memory.read(table, FP32), EPS, B, T, NH, NKV, HS)
    assert_close("rstd", rstd, reciprocal_rms(x, NKV), KERNEL_FP32)
    assert_close("out", out, defined(leaf(x), leaf(qweight), leaf(kweight), table, NKV), KERNEL_FP32)
    assert (to_numpy(out)[:, :, NH + NKV :] == x[:, :, NH + NKV :]).all()


def check_backward(dev, B: int, T: int, NKV: int, group: int, HS: int, shift: int = 0) -> None:
    NH = NKV * group
    rng, x = make(B, T, NH, NKV, HS)
    dout, table = normal(rng, *x.shape), rope_table(T + 1, HS, 1e4)
    qweight, kweight, dqweight, dkweight = (normal(rng, HS) for _ in range(4))
    x64, q64, k64 = leaf(x), leaf(qweight), leaf(kweight)
    (defined(x64, q64, k64, table, NKV) * leaf(dout).detach()).sum().backward()
    rstd = reciprocal_rms(x, NKV).detach().float().numpy()
    with guarded(dev) as memory, guarded(dev, shift) as parameters:
        dqkv = memory.update(dout)
        ours_dq, ours_dk = parameters.update(dqweight, FP32), parameters.update(dkweight, FP32)
        weights = parameters.read(qweight), parameters.read(kweight)
        qk_norm_backward(
            dqkv, (ours_dq, ours_dk), dqkv, memory.read(x), weights, memory.read(rstd, FP32), memory.read(table, FP32),
            B, T, NH, NKV, HS,
        )  # fmt: skip
    assert_close("dqkv", dqkv, x64.grad, KERNEL_FP32)
    assert_close("dqweight", ours_dq, q64.grad + leaf(dqweight), KERNEL_FP32)
    assert_close("dkweight", ours_dk, k64.grad + leaf(dkweight), KERNEL_FP32)
    assert (to_numpy(dqkv)[:, :, NH + NKV :] == dout[:, :, NH + NKV :]).all()


@any_shape
@examples
def test_qk_norm_backward_is_the_gradient_and_adds_to_the_weights(dev, B, T, NKV, group, half, shift):
    check_backward(dev, B, T, NKV, group, 2 * half, shift)


def test_qk_norm_backward_gives_a_warp_many_heads(dev):
    T = 700 * dev.width() // 4
    assert 3 * T * 3 > 2 * dev.width() * MAX_PARTIALS
    check_backward(dev, 3, T, 1, 2, 6)


def test_qk_norm_backward_has_fewer_heads_at_once_where_shared_memory_is_too_small(dev, columns_that_fit):
    HS = columns_that_fit(2 * 3, 0, few=304)
    assert 2 * dev.width() * 2 * 4 * HS > dev.shared_memory
    check_backward(dev, 1, 2, 1, 1, HS)


def test_a_head_of_zeros_has_a_finite_gradient(dev):
    zeros, dout = np.zeros((1, 1, 3, 6), FP32), np.ones((1, 1, 3, 6), FP32)
    weight, rstd = np.full(6, 2, FP32), np.full((1, 1, 2), EPS**-0.5, FP32)
    with guarded(dev) as memory:
        dqkv, sums = memory.update(dout), [memory.update(np.zeros(6, FP32), FP32) for _ in range(2)]
        weights, table = (memory.read(weight), memory.read(weight)), memory.read(rope_table(1, 6, 1e4), FP32)
        qk_norm_backward(dqkv, sums, dqkv, memory.read(zeros), weights, memory.read(rstd, FP32), table, 1, 1, 1, 1, 6)
    assert_close("dq and dk", dqkv[:, :, :2], np.full((1, 1, 2, 6), 2 * EPS**-0.5), KERNEL_FP32)
    assert not any(dev.to_host(total).any() for total in sums)


def test_a_gradient_in_another_place_than_that_of_the_output_is_refused(dev):
    dqkv, dout, weight = dev.zeros((1, 1, 3, 6)), dev.zeros((1, 1, 3, 6)), dev.zeros((6,))
    with pytest.raises(ValueError, match="works in place"):
        qk_norm_backward(dqkv, (weight, weight), dout, dout, (weight, weight), weight, weight, 1, 1, 1, 1, 6)

"""adamw.cu against torch.optim.AdamW, ten steps at a time."""

import device
from kernels.adamw import adamw, cu
from oracle import KERNEL_FP32, assert_close, exact, guarded, leaf, to_numpy

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

STEPS = 10
FP32 = np.float32


@pytest.fixture
def dev(each_type):
    return each_type


def copy_of(memory: guarded, params: np.ndarray):
    """The device's bf16 copy of these parameters, where it keeps one."""
    return memory.update(exact(params)) if device.floatX == device.BF16 else None


def check(dev, n: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, scale: float):
    rng = np.random.default_rng(n)
    start, grads = rng.standard_normal(n, FP32), rng.standard_normal((STEPS, n), FP32)
    grads *= np.exp(rng.standard_normal(n, FP32))  # from large to small, as a model's are
    with guarded(dev, shift=n % 4) as memory, guarded(dev, shift=n // 4 % 4) as copies:
        params, rounded = memory.update(start, FP32), copy_of(copies, start)
        m, v = memory.update(np.zeros(n, FP32), FP32), memory.update(np.zeros(n, FP32), FP32)
        norm = memory.read(np.array([0, scale, 0, 0], FP32), FP32)
        for t in range(1, STEPS + 1):
            grad = memory.read(grads[t - 1], FP32)
            adamw(params, grad, m, v, norm, n, lr, beta1, beta2, eps, weight_decay, t, rounded=rounded)
    want = leaf(start)
    optimizer = torch.optim.AdamW([want], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    for grad in grads:
        want.grad = leaf(grad).detach() * float(np.float32(scale))
        optimizer.step()
    assert_close("params", params, want, KERNEL_FP32)
    assert_close("m", m, optimizer.state[want]["exp_avg"], KERNEL_FP32)
    assert_close("v", v, optimizer.state[want]["exp_avg_sq"], KERNEL_FP32)
    if rounded is not None:
        assert np.array_equal(dev.to_host(rounded), device.to_bf16(dev.to_host(params)))


@given(n=st.integers(1, 3000), weight_decay=st.sampled_from([0.0, 0.1]), scale=st.sampled_from([1.0, 0.03]))
@example(n=1024, weight_decay=0.1, scale=1.0)
@example(n=7, weight_decay=0.0, scale=1.0)
@example(n=2049, weight_decay=0.1, scale=0.5)
@example(n=1, weight_decay=0.0, scale=1.0)
def test_ten_steps_equal_pytorchs_adamw_on_scaled_gradients(dev, n, weight_decay, scale):
    check(dev, n, 0.1, 0.9, 0.999, 1e-8, weight_decay, scale)  # a rate at which ten steps go as far as the start


@pytest.mark.parametrize("beta1, beta2, eps", [(0.8, 0.95, 1e-3), (0.0, 0.5, 1e-8)])
def test_betas_and_epsilon_have_pytorchs_meaning(dev, beta1, beta2, eps):
    check(dev, 333, 0.05, beta1, beta2, eps, 0.01, 1.0)


def test_a_step_whose_gradients_have_no_scale_changes_nothing(dev):
    start = np.random.default_rng(0).standard_normal((3, 1030), FP32)
    with guarded(dev) as memory:
        params, m, v = (memory.update(values, FP32) for values in start)
        rounded, norm = copy_of(memory, 2 * start[0]), memory.read(np.array([1, np.nan, 0, 0], FP32), FP32)
        grads = memory.read(start[0], FP32)
        adamw(params, grads, m, v, norm, 1030, 0.1, 0.9, 0.999, 1e-8, 0.1, 1, rounded=rounded)
    for ours, before in zip((params, m, v), start, strict=True):
        assert np.array_equal(dev.to_host(ours), before)
    assert rounded is None or np.array_equal(to_numpy(rounded), exact(2 * start[0]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e19])
def test_a_gradient_whose_square_is_not_finite_leaves_its_parameter_alone_and_says_so(dev, value):
    start = np.random.default_rng(0).standard_normal((3, 1030), FP32)
    start[2] **= 2
    grads, spoiled = np.random.default_rng(1).standard_normal(1030, FP32), np.array([0, 517, 1023])
    whole = 1030 // cu.floats * cu.floats  # a thread each
    grads[spoiled] = value
    with guarded(dev) as memory:
        params, m, v = (memory.update(values, FP32) for values in start)
        rounded, norm = copy_of(memory, 2 * start[0]), memory.update(np.array([1, 1, 0, 0], FP32), FP32)
        grads = memory.read(grads, FP32)
        adamw(params, grads, m, v, norm, 1030, 0.1, 0.9, 0.999, 1e-8, 0.1, 1, rounded=rounded)
    for ours, before in zip((params, m, v), start, strict=True):
        same = (dev.to_host(ours) == before)[:whole].reshape(-1, cu.floats)
        assert same[spoiled // cu.floats].all() and not np.delete(same, spoiled // cu.floats, axis=0).any()
        assert np.isfinite(dev.to_host(ours)).all()
    if rounded is not None:
        left_out = np.isin(np.arange(1030) // cu.floats, spoiled // cu.floats)
        assert np.array_equal(to_numpy(rounded), exact(np.where(left_out, 2 * start[0], dev.to_host(params))))
    assert dev.to_host(norm)[3] == 1

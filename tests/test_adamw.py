"""adamw.cu against torch.optim.AdamW, ten steps at a time."""

from kernels.adamw import adamw
from oracle import KERNEL_FP32, assert_close, guarded, leaf, normal

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

STEPS = 10


def check(dev, n: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, scale: float):
    rng = np.random.default_rng(n)
    start, grads = normal(rng, n), normal(rng, STEPS, n)
    grads *= np.exp(normal(rng, n))  # from large to small, as a model's are
    with guarded(dev, shift=n % 4) as memory:
        params = memory.update(start)
        m, v = memory.update(np.zeros(n, np.float32)), memory.update(np.zeros(n, np.float32))
        norm = memory.read(np.array([0, scale, 0, 0], np.float32))
        for t in range(1, STEPS + 1):
            grad = memory.read(grads[t - 1])
            adamw(params, grad, m, v, norm, n, lr, beta1, beta2, eps, weight_decay, t)
    want = leaf(start)
    optimizer = torch.optim.AdamW([want], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    for grad in grads:
        want.grad = leaf(grad).detach() * float(np.float32(scale))
        optimizer.step()
    assert_close("params", params, want, KERNEL_FP32)
    assert_close("m", m, optimizer.state[want]["exp_avg"], KERNEL_FP32)
    assert_close("v", v, optimizer.state[want]["exp_avg_sq"], KERNEL_FP32)


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
    start = [normal(np.random.default_rng(0), 1030) for _ in range(3)]
    with guarded(dev) as memory:
        params, m, v = (memory.update(values) for values in start)
        norm = memory.read(np.array([1, np.nan, 0, 0], np.float32))
        adamw(params, memory.read(start[0]), m, v, norm, 1030, 0.1, 0.9, 0.999, 1e-8, 0.1, 1)
    for ours, before in zip((params, m, v), start, strict=True):
        assert np.array_equal(dev.to_host(ours), before)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e19])
def test_a_gradient_whose_square_is_not_finite_leaves_its_parameter_alone_and_says_so(dev, value):
    start = [normal(np.random.default_rng(0), 1030) for _ in range(3)]
    grads, spoiled = normal(np.random.default_rng(1), 1030), np.array([0, 517, 1027])
    grads[spoiled] = value
    with guarded(dev) as memory:
        params, m, v = (memory.update(values) for values in start)
        v = memory.update(np.square(start[2]))
        norm = memory.update(np.array([1, 1, 0, 0], np.float32))
        adamw(params, memory.read(grads), m, v, norm, 1030, 0.1, 0.9, 0.999, 1e-8, 0.1, 1)
    for ours, before in zip((params, m, v), (*start[:2], np.square(start[2])), strict=True):
        same = (dev.to_host(ours) == before)[:1028].reshape(-1, 4)  # a thread has four
        assert same[spoiled // 4].all() and not np.delete(same, spoiled // 4, axis=0).any()
        assert np.isfinite(dev.to_host(ours)).all()
    assert dev.to_host(norm)[3] == 1

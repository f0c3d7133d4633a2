"""adamw.cu against torch.optim.AdamW, ten steps at a time; and a master copy that is taken apart and joined again."""

import device
from kernels.adamw import adamw, cu, join, split
from oracle import KERNEL_FP32, assert_close, guarded, leaf
from support.kernels import FP32

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("each_type")

STEPS = 10


class State:
    """Parameters and their state on the device, which begin with these values. In bf16 memory holds the master copy as
    `split` stores it. `halves` may have another shift than memory."""

    def __init__(self, memory: guarded, halves: guarded, master: np.ndarray, m: np.ndarray, v: np.ndarray):
        n = self.n = master.size
        self.m, self.v, self.low = memory.update(m, FP32), memory.update(v, FP32), None
        if device.floatX == device.BF16:
            self.params, self.low = (halves.scratch((n,), np.uint16) for _ in range(2))
            split(self.params, device.asarray(master), n, low=self.low, v=self.v)
        else:
            self.params = memory.update(master, FP32)

    def update(self, grads, norm, *recipe: float) -> None:
        adamw(self.params, grads, self.m, self.v, norm, self.n, *recipe, low=self.low)

    def values(self) -> list[np.ndarray]:
        """The parameters as AdamW updates them, m and v."""
        master = self.params
        if self.low is not None:
            master = device.zeros((self.n,))
            join(master, self.params, self.low, self.v, self.n)
        master, m, v = map(device.to_host, (master, self.m, self.v))
        if self.low is not None:
            assert np.array_equal(device.to_host(self.params), device.to_bf16(master))
            v = abs(v)
        return [master, m, v]


def check(n: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, scale: float):
    rng = np.random.default_rng(n)
    start, grads = rng.standard_normal(n, FP32), rng.standard_normal((STEPS, n), FP32)
    grads *= np.exp(rng.standard_normal(n, FP32))  # from large to small, as a model's are
    with guarded(device, shift=n % 4) as memory, guarded(device, shift=n // 4 % 4) as halves:
        state = State(memory, halves, start, np.zeros(n, FP32), np.zeros(n, FP32))
        norm = memory.read(np.array([0, scale, 0, 0], FP32), FP32)
        for t in range(1, STEPS + 1):
            state.update(memory.read(grads[t - 1], FP32), norm, lr, beta1, beta2, eps, weight_decay, t)
    want = leaf(start)
    optimizer = torch.optim.AdamW([want], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    for grad in grads:
        want.grad = leaf(grad).detach() * float(np.float32(scale))
        optimizer.step()
    params, m, v = state.values()
    assert_close("params", params, want, KERNEL_FP32)
    assert_close("m", m, optimizer.state[want]["exp_avg"], KERNEL_FP32)
    assert_close("v", v, optimizer.state[want]["exp_avg_sq"], KERNEL_FP32)


@given(n=st.integers(1, 3000), weight_decay=st.sampled_from([0.0, 0.1]), scale=st.sampled_from([1.0, 0.03]))
@example(n=1024, weight_decay=0.1, scale=1.0)
@example(n=7, weight_decay=0.0, scale=1.0)
@example(n=2049, weight_decay=0.1, scale=0.5)
@example(n=1, weight_decay=0.0, scale=1.0)
def test_ten_steps_equal_pytorchs_adamw_on_scaled_gradients(n, weight_decay, scale):
    check(n, 0.1, 0.9, 0.999, 1e-8, weight_decay, scale)  # a rate at which ten steps go as far as the start


@pytest.mark.parametrize("beta1, beta2, eps", [(0.8, 0.95, 1e-3), (0.0, 0.5, 1e-8)])
def test_betas_and_epsilon_have_pytorchs_meaning(beta1, beta2, eps):
    check(333, 0.05, beta1, beta2, eps, 0.01, 1.0)


def some_state(memory: guarded) -> tuple[State, list[np.ndarray]]:
    start = np.random.default_rng(0).standard_normal((3, 1030), FP32)
    start[2] **= 2
    return State(memory, memory, *start), list(start)


def test_a_step_whose_gradients_have_no_scale_changes_nothing():
    with guarded(device) as memory:
        state, start = some_state(memory)
        norm, grads = memory.read(np.array([1, np.nan, 0, 0], FP32), FP32), memory.read(start[0], FP32)
        state.update(grads, norm, 0.1, 0.9, 0.999, 1e-8, 0.1, 1)
    assert all(np.array_equal(*pair) for pair in zip(state.values(), start, strict=True))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e19])
def test_a_gradient_whose_square_is_not_finite_leaves_its_parameter_alone_and_says_so(value):
    grads, spoiled = np.random.default_rng(1).standard_normal(1030, FP32), np.array([0, 517, 1023])
    whole = 1030 // cu.floats * cu.floats  # a thread each
    grads[spoiled] = value
    with guarded(device) as memory:
        state, start = some_state(memory)
        norm = memory.update(np.array([1, 1, 0, 0], FP32), FP32)
        state.update(memory.read(grads, FP32), norm, 0.1, 0.9, 0.999, 1e-8, 0.1, 1)
    for ours, before in zip(state.values(), start, strict=True):
        same = (ours == before)[:whole].reshape(-1, cu.floats)
        assert same[spoiled // cu.floats].all() and not np.delete(same, spoiled // cu.floats, axis=0).any()
        assert np.isfinite(ours).all()
    assert device.to_host(norm)[3] == 1


# Last halves at and beside ties and the ends, and some between.
LAST = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF, 0x1234, 0xCDEF]


@pytest.mark.parametrize("first_v", [0.0, -0.0, 1.5, -1e-40, np.inf])
def test_a_master_copy_that_is_split_is_joined_to_the_same_bits(first_v):
    """With all first halves: ties that are rounded up and down, subnormal numbers, -0, infinity, the largest numbers,
    which are rounded to infinity, and NaN."""
    bits = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | np.array(LAST, np.uint32)).reshape(-1)
    values, n = bits.view(FP32), bits.size
    with guarded(device) as memory:
        params, rounded, low = (memory.scratch((n,), np.uint16) for _ in range(3))
        v = memory.update(np.full(n, first_v, FP32), FP32)
        given, joined = device.asarray(values), device.zeros((n,))
        split(params, given, n, low=low, v=v)
        split(rounded, given, n)
        join(joined, params, low, v, n)
    assert np.array_equal(device.to_host(params), device.to_host(rounded))
    assert np.array_equal(device.to_host(params), device.to_bf16(values))
    nan, found = np.isnan(values), device.to_host(joined)
    assert np.array_equal(found.view(np.uint32)[~nan], bits[~nan]) and np.isnan(found[nan]).all()
    assert np.array_equal(abs(device.to_host(v)).view(np.uint32), np.full(n, abs(FP32(first_v))).view(np.uint32))

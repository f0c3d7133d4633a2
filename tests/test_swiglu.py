"""swiglu.cu against PyTorch's silu."""

from kernels.swiglu import swiglu_backward, swiglu_forward
from oracle import KERNEL_FP32, assert_close, exact, leaf, normal, to_numpy
from support.kernels import FP32, autograd, launch, recomputed, shapes, write

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("each_type")

any_shape = shapes((16, 64), (5, 7), (65, 130), (3, 1025), (128, 84), (1, 1), N=(1, 150), C=(1, 150))


def make(N: int, C: int) -> tuple[np.ndarray, np.ndarray]:
    """inp (N,2C) and dout (N,C); some gates are far out, where the sigmoid is 0 or 1 to the last bit."""
    rng = np.random.default_rng([N, C])
    inp = normal(rng, N, 2 * C)
    inp[:: max(1, N // 4), C:] *= 20
    return exact(inp), normal(rng, N, C)


def swiglu(inp: torch.Tensor) -> torch.Tensor:
    up, gate = inp.chunk(2, dim=1)
    return F.silu(gate) * up


@any_shape
def test_swiglu_forward_gates_the_first_half_of_a_row_by_the_second(N, C):
    inp, _ = make(N, C)
    (out,) = launch(swiglu_forward, write(N, C), inp, N, C)
    assert_close("swiglu", out, swiglu(leaf(inp)), KERNEL_FP32)


@any_shape
def test_swiglu_backward_sets_both_gradients_and_recomputes_the_output(N, C):
    inp, dout = make(N, C)
    dinp, again = launch(swiglu_backward, write(N, 2 * C), recomputed(N, C), dout, inp, N, C)
    out, dinp64 = autograd(swiglu, dout, inp)
    assert_close("dup", dinp[:, :C], dinp64[:, :C], KERNEL_FP32)
    assert_close("dgate", dinp[:, C:], dinp64[:, C:], KERNEL_FP32)
    assert_close("swiglu again", again, out, KERNEL_FP32)


def test_swiglu_of_huge_gates_is_up_times_gate_or_zero():
    gate = exact(np.float32([-3e38, -1e4, -89, -88, 88, 89, 1e4, 3e38]))  # e^88 is finite in fp32, e^89 is not
    inp, dout = np.concatenate([np.full(8, 0.5, FP32), gate])[None], np.full((1, 8), 0.5, FP32)
    (out,) = launch(swiglu_forward, write(1, 8), inp, 1, 8)
    dinp, again = launch(swiglu_backward, write(1, 16), recomputed(1, 8), dout, inp, 1, 8)
    silu = np.maximum(gate, 0)
    for got in out, again, dinp[:, :8]:
        np.testing.assert_allclose(to_numpy(got)[0], 0.5 * silu, rtol=1e-6, atol=1e-35)
    np.testing.assert_allclose(to_numpy(dinp)[0, 8:], 0.25 * (silu > 0), rtol=1e-6, atol=1e-35)

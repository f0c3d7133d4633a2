"""layernorm.cu against PyTorch's layer_norm."""

import device
from kernels import layernorm
from kernels.layernorm import layernorm_backward, layernorm_forward, layernorm_recompute
from kernels.reduce import MAX_PARTIALS
from oracle import KERNEL_FP32, assert_close, exact, leaf, normal
from support.kernels import FP32, autograd, fp32, gradient, launch, parameter, recomputed, shapes, update, write

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("each_type")

# Rows of two or three numbers may be nearly constant: layernorm then magnifies the rounding of its input without bound.
any_shape = shapes(
    (2, 8, 64), (1, 5, 7), (3, 43, 130), (1, 9, 768), (2, 64, 64), (1, 65, 129), (1, 3, 1601), (1, 3, 2101),
    B=(1, 4), T=(1, 30), C=(5, 150),
)  # fmt: skip


def make(B: int, T: int, C: int) -> tuple:
    """x (B,T,C), weight and bias (C)."""
    rng = np.random.default_rng([B, T, C])
    return rng, exact(2 * normal(rng, B, T, C) + 3), normal(rng, C), normal(rng, C)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps=1e-5)


def mean_and_rstd(x) -> tuple[np.ndarray, np.ndarray]:
    x = leaf(x).detach()
    return x.mean(-1).numpy(), (x.var(-1, correction=0) + 1e-5).rsqrt().numpy()


@any_shape
def test_layernorm_forward_sets_output_mean_and_rstd(B, T, C):
    _, x, weight, bias = make(B, T, C)
    stats, norm = [write(B, T, dtype=FP32) for _ in range(2)], [parameter(weight), parameter(bias)]
    out, mean, rstd = launch(layernorm_forward, write(B, T, C), stats, x, norm, B, T, C, shift=C % device.width())
    for name, got, want in zip(("mean", "rstd"), (mean, rstd), mean_and_rstd(x), strict=True):
        assert_close(name, got, want, KERNEL_FP32)
    assert_close("out", out, layer_norm(leaf(x), leaf(weight), leaf(bias)), KERNEL_FP32)


@pytest.mark.parametrize("T", [16, 17])
def test_few_rows_have_a_kernel_of_their_own_and_a_large_mean_costs_no_kernel_digits(launches, T):
    x = exact(1000 + 8 * normal(np.random.default_rng(T), 1, T, 777))
    stats, norm = [write(1, T, dtype=FP32) for _ in range(2)], [parameter(np.ones(777, np.float32)), None]
    *_, rstd = launch(layernorm_forward, write(1, T, 777), stats, x, norm, 1, T, 777)
    assert_close("rstd", rstd, mean_and_rstd(x)[1], KERNEL_FP32)
    few = T == 16 and layernorm.cu.warp_size > 1  # a block of the CPU has one thread, and a row more than one vector
    assert list(launches) == ["layernorm_few_rows_kernel" if few else "layernorm_forward_kernel"]


@pytest.mark.parametrize("shift", [0, 1])
@any_shape
def test_layernorm_is_recomputed(shift, B, T, C):
    _, x, weight, bias = make(B, T, C)
    norm, stats = [parameter(weight), parameter(bias)], [fp32(each) for each in mean_and_rstd(x)]
    (out,) = launch(layernorm_recompute, recomputed(B * T, C), x, norm, stats, B, T, C, shift=shift)
    assert_close("recomputed", out, layer_norm(leaf(x), leaf(weight), leaf(bias)).reshape(B * T, C), KERNEL_FP32)


def check_backward(B: int, T: int, C: int, with_bias2: bool = True) -> None:
    rng, x, weight, bias = make(B, T, C)
    dout, before = normal(rng, B, T, C), normal(rng, B, T, C)
    biases = [normal(rng, C) for _ in range(3 if with_bias2 else 2)]
    dweight, dbias, *dbias2 = (gradient(each) for each in biases)
    dinp, *sums = launch(
        layernorm_backward, update(before), (dweight, dbias), dout, x, (parameter(weight), None),
        [fp32(each) for each in mean_and_rstd(x)], B, T, C, dbias2=dbias2[0] if dbias2 else None,
        shift=C % device.width(),
    )  # fmt: skip
    _, dx64, *sums64 = autograd(layer_norm, dout, x, weight, bias)
    dx64 = dx64 + leaf(before).detach()
    assert_close("dinp", dinp, dx64, KERNEL_FP32)
    sums64.append(dx64.sum((0, 1)))
    for name, got, want, start in zip(("dweight", "dbias", "dbias2"), sums, sums64, biases, strict=False):
        assert_close(name, got, want + leaf(start), KERNEL_FP32)


@any_shape
def test_layernorm_backward_adds_to_the_residual_gradient_and_sums_it_for_the_bias_before(B, T, C):
    check_backward(B, T, C)


def test_layernorm_backward_takes_no_bias_before_the_first_layer():
    check_backward(2, 13, 20, with_bias2=False)


@pytest.mark.parametrize("T, C", [(5461, 5), (1500, 8)])
def test_layernorm_backward_gives_a_block_more_rows_than_it_has_warps(T, C):
    assert 3 * T > 8 * MAX_PARTIALS or device.kind == "cpu" and 3 * T > 8 * 4 * device.multiprocessors
    check_backward(3, T, C)


@pytest.mark.parametrize("lacking", [0, 3])
def test_layernorm_backward_takes_fewer_rows_at_once_where_shared_memory_is_too_small(columns_that_fit, lacking):
    C = columns_that_fit(2 * 3, 1024, few=528) - lacking
    assert min(8, C // 128) * 2 * 4 * C > device.shared_memory
    check_backward(1, 9, C)

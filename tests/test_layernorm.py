"""layernorm.cu against PyTorch's layer_norm, with the residual connection in front of it."""

from kernels.layernorm import fused_residual_forward, layernorm_backward, layernorm_forward, layernorm_recompute
from kernels.reduce import MAX_PARTIALS
from oracle import KERNEL_FP32, assert_close, exact, guarded, leaf, normal

import numpy as np
import pytest
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

FP32 = np.float32


@pytest.fixture
def dev(each_type):
    return each_type


# Rows of two or three numbers may be nearly constant: layernorm then magnifies the rounding of its input without bound.
any_shape = given(B=st.integers(1, 4), T=st.integers(1, 30), C=st.integers(5, 150))


def layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias, eps=1e-5)


@any_shape
@example(B=2, T=8, C=64)
@example(B=1, T=5, C=7)
@example(B=3, T=11, C=130)
@example(B=1, T=9, C=768)
@example(B=1, T=3, C=1601)
def test_layernorm_forward_sets_output_mean_and_rstd(dev, B, T, C):
    rng = np.random.default_rng([B, T, C])
    x, weight, bias = exact(2 * normal(rng, B, T, C) + 3), normal(rng, C), normal(rng, C)
    with guarded(dev) as memory, guarded(dev, shift=C % dev.width()) as parameters:
        out, mean, rstd = memory.write((B, T, C)), memory.write((B, T), FP32), memory.write((B, T), FP32)
        norm = parameters.read(weight), parameters.read(bias)
        layernorm_forward(out, (mean, rstd), memory.read(x), norm, B, T, C)
    x = leaf(x)
    assert_close("mean", mean, x.mean(-1), KERNEL_FP32)
    assert_close("rstd", rstd, (x.var(-1, correction=0) + 1e-5).rsqrt(), KERNEL_FP32)
    assert_close("out", out, layer_norm(x, leaf(weight), leaf(bias)), KERNEL_FP32)


@any_shape
@example(B=2, T=8, C=64)
@example(B=1, T=5, C=7)
@example(B=3, T=11, C=130)
@example(B=1, T=9, C=768)
def test_fused_residual_forward_adds_the_projection_before_the_layernorm(dev, B, T, C):
    rng = np.random.default_rng([B, T, C])
    inp1, inp2, weight, bias = (normal(rng, *shape) for shape in [(B, T, C)] * 2 + [(C,)] * 2)
    with guarded(dev) as memory, guarded(dev, shift=C % dev.width()) as parameters:
        residual, out = memory.write((B, T, C)), memory.write((B, T, C))
        mean, rstd = memory.write((B, T), FP32), memory.write((B, T), FP32)
        norm = parameters.read(weight), parameters.read(bias)
        fused_residual_forward(residual, out, (mean, rstd), memory.read(inp1), memory.read(inp2), norm, B, T, C)
    assert_close("residual", residual, leaf(inp1) + leaf(inp2), KERNEL_FP32)
    x = leaf(residual)  # as it is stored
    assert_close("residual mean", mean, x.mean(-1), KERNEL_FP32)
    assert_close("residual rstd", rstd, (x.var(-1, correction=0) + 1e-5).rsqrt(), KERNEL_FP32)
    assert_close("residual out", out, layer_norm(x, leaf(weight), leaf(bias)), KERNEL_FP32)


def mean_and_rstd(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What forward keeps of x (B,T,C)."""
    x = x.astype(np.float64)
    return x.mean(-1).astype(FP32), (1 / np.sqrt(x.var(-1) + 1e-5)).astype(FP32)


@any_shape
@example(B=2, T=64, C=64)
@example(B=1, T=5, C=7)
@example(B=3, T=43, C=130)
@example(B=1, T=65, C=129)
def test_layernorm_is_recomputed(dev, B, T, C):
    rng = np.random.default_rng([B, T, C])
    x, weight, bias = normal(rng, B, T, C), normal(rng, C), normal(rng, C)
    with guarded(dev) as memory, guarded(dev, shift=C % dev.width()) as parameters:
        out, norm = memory.recomputed(B * T, C), (parameters.read(weight), parameters.read(bias))
        stats = [memory.read(values, FP32) for values in mean_and_rstd(x)]
        layernorm_recompute(out, memory.read(x), norm, stats, B, T, C)
    assert_close("recomputed", out, layer_norm(leaf(x), leaf(weight), leaf(bias)).reshape(B * T, C), KERNEL_FP32)


def check_backward(dev, B: int, T: int, C: int, with_bias2: bool) -> None:
    rng = np.random.default_rng([B, T, C])
    x, dout, before = (normal(rng, B, T, C) for _ in range(3))
    weight, dweight, dbias, dbias2 = (normal(rng, C) for _ in range(4))
    x64, weight64, bias64 = leaf(x), leaf(weight), leaf(np.zeros(C))
    (layer_norm(x64, weight64, bias64) * leaf(dout).detach()).sum().backward()
    with guarded(dev) as memory, guarded(dev, shift=C % dev.width()) as parameters:
        ours_dinp = memory.update(before)
        ours_dweight, ours_dbias = parameters.update(dweight, FP32), parameters.update(dbias, FP32)
        ours_dbias2 = parameters.update(dbias2, FP32) if with_bias2 else None
        stats = [memory.read(values, FP32) for values in mean_and_rstd(x)]
        inputs = memory.read(dout), memory.read(x), (parameters.read(weight), None), stats
        layernorm_backward(ours_dinp, (ours_dweight, ours_dbias), *inputs, B, T, C, dbias2=ours_dbias2)
    dinp = x64.grad + leaf(before).detach()
    assert_close("dinp", ours_dinp, dinp, KERNEL_FP32)
    assert_close("dweight", ours_dweight, weight64.grad + leaf(dweight), KERNEL_FP32)
    assert_close("dbias", ours_dbias, bias64.grad + leaf(dbias), KERNEL_FP32)
    if with_bias2:
        assert_close("dbias2", ours_dbias2, dinp.sum((0, 1)) + leaf(dbias2), KERNEL_FP32)


@any_shape
@example(B=2, T=8, C=64)
@example(B=1, T=5, C=7)
@example(B=3, T=11, C=130)
@example(B=1, T=9, C=768)
def test_layernorm_backward_adds_to_the_residual_gradient_and_sums_it_for_the_bias_before(dev, B, T, C):
    check_backward(dev, B, T, C, with_bias2=True)


def test_layernorm_backward_takes_no_bias_before_the_first_layer(dev):
    check_backward(dev, 2, 13, 20, with_bias2=False)


@pytest.mark.parametrize("T, C", [(5461, 5), (1500, 8)])
def test_layernorm_backward_gives_a_block_more_rows_than_it_has_warps(dev, T, C):
    assert 3 * T > 8 * MAX_PARTIALS or dev.kind == "cpu" and 3 * T > 8 * 4 * dev.multiprocessors
    check_backward(dev, 3, T, C, with_bias2=True)


@pytest.mark.parametrize("lacking", [0, 3])
def test_layernorm_backward_takes_fewer_rows_at_once_where_shared_memory_is_too_small(dev, columns_that_fit, lacking):
    C = columns_that_fit(2 * 3, 1024, few=528) - lacking
    assert min(8, C // 128) * 2 * 4 * C > dev.shared_memory
    check_backward(dev, 1, 9, C, with_bias2=True)

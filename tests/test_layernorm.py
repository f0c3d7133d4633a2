"""layernorm.cu against PyTorch's layer_norm, with the residual connection in front of it."""

import numpy as np
import pytest
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.layernorm import fused_residual_forward, layernorm_backward, layernorm_forward
from kernels.reduce import MOST_PARTIALS, rows_per_chunk
from oracle import KERNEL_FP32, assert_close, guarded, leaf, normal

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
    x, weight, bias = 2 * normal(rng, B, T, C) + 3, normal(rng, C), normal(rng, C)
    with guarded(dev, shift=C % 4) as memory:
        out, mean, rstd = memory.write((B, T, C)), memory.write((B, T)), memory.write((B, T))
        layernorm_forward(out, mean, rstd, memory.read(x), memory.read(weight), memory.read(bias), B, T, C)
    x = leaf(x)
    assert_close("mean", mean, x.mean(-1), KERNEL_FP32)
    assert_close("rstd", rstd, (x.var(-1, correction=0) + 1e-5).rsqrt(), KERNEL_FP32)
    assert_close("out", out, layer_norm(x, leaf(weight), leaf(bias)), KERNEL_FP32)


@any_shape
@example(B=2, T=8, C=64)
@example(B=1, T=5, C=7)
@example(B=3, T=11, C=130)
@example(B=1, T=9, C=768)
def test_fused_residual_forward_adds_projection_and_its_bias_before_the_layernorm(dev, B, T, C):
    rng = np.random.default_rng([B, T, C])
    inp1, inp2, bias2, weight, bias = (normal(rng, *shape) for shape in [(B, T, C)] * 2 + [(C,)] * 3)
    with guarded(dev, shift=C % 4) as memory:
        residual, out = memory.write((B, T, C)), memory.write((B, T, C))
        mean, rstd = memory.write((B, T)), memory.write((B, T))
        inputs = (memory.read(values) for values in (inp1, inp2, bias2, weight, bias))
        fused_residual_forward(residual, out, mean, rstd, *inputs, B, T, C)
    x = leaf(inp1) + leaf(inp2) + leaf(bias2)
    assert_close("residual", residual, x, KERNEL_FP32)
    assert_close("residual mean", mean, x.mean(-1), KERNEL_FP32)
    assert_close("residual rstd", rstd, (x.var(-1, correction=0) + 1e-5).rsqrt(), KERNEL_FP32)
    assert_close("residual out", out, layer_norm(x, leaf(weight), leaf(bias)), KERNEL_FP32)


def check_backward(dev, B: int, T: int, C: int, with_bias2: bool) -> None:
    rng = np.random.default_rng([B, T, C])
    x, dout, before = (normal(rng, B, T, C) for _ in range(3))
    weight, bias, dweight, dbias, dbias2 = (normal(rng, C) for _ in range(5))
    x64, weight64, bias64 = leaf(x), leaf(weight), leaf(bias)
    want = layer_norm(x64, weight64, bias64)
    (want * leaf(dout).detach()).sum().backward()
    mean = x64.detach().mean(-1)
    rstd = (x64.detach().var(-1, correction=0) + 1e-5).rsqrt()
    with guarded(dev, shift=C % 4) as memory:
        ours_dinp, ours_dweight, ours_dbias = memory.update(before), memory.update(dweight), memory.update(dbias)
        ours_dbias2 = memory.update(dbias2) if with_bias2 else None
        out_T, scratch = memory.write((C, B * T)), memory.scratch((MOST_PARTIALS, 3 * C))
        inputs = (memory.read(values) for values in (dout, x, weight, bias, mean.numpy().astype(np.float32),
                                                     rstd.numpy().astype(np.float32)))  # fmt: skip
        layernorm_backward(ours_dinp, ours_dweight, ours_dbias, ours_dbias2, out_T, scratch, *inputs, B, T, C)
    dinp = x64.grad + leaf(before).detach()
    assert_close("dinp", ours_dinp, dinp, KERNEL_FP32)
    assert_close("dweight", ours_dweight, weight64.grad + leaf(dweight), KERNEL_FP32)
    assert_close("dbias", ours_dbias, bias64.grad + leaf(dbias), KERNEL_FP32)
    assert_close("out_T", out_T, want.reshape(B * T, C).T, KERNEL_FP32)
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


@pytest.mark.parametrize("B, T, C", [(1, 16391, 3), (3, 1371, 5)])
def test_layernorm_backward_shares_many_rows_out_among_its_blocks(dev, B, T, C):
    rows = rows_per_chunk(B * T, at_least=8)
    assert rows > 8 and B * T % rows and -(-B * T // rows) <= MOST_PARTIALS
    assert B * T < 10000 or rows > 32  # a block then comes back for more rows than its shared memory holds
    check_backward(dev, B, T, C, with_bias2=True)

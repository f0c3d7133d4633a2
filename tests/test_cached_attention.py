"""cached_attention.cu against attention of the whole text in float64."""

import device
from device import ceil_div
from kernels.cached_attention import TILE_KEYS, Cached, cached_attention_forward, number_of_splits
from oracle import BF16, KERNEL_FP32, assert_close, attention, guarded, leaf, normal, to_numpy
from support.kernels import FP32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("each_type")


def run(qkv, T: int, positions, context: int, NH: int, relu: bool = False, splits: int = 1):
    """The last T rows of each text of qkv (B,rows,NH+2*NKV,HS), the first at its position; keys and values before them
    are in the cache, and NaN is behind them. Returns out (B,T,NH,HS) and both caches (B,NKV,context,HS)."""
    B, _, heads, HS = qkv.shape
    NKV = (heads - NH) // 2
    caches = np.full((2, B, NKV, context, HS), np.nan, FP32)
    new = np.zeros((B, T, heads, HS), FP32)
    for b, p in enumerate(positions):
        caches[:, b, :, :p] = qkv[b, :p, NH:].reshape(p, 2, NKV, HS).transpose(1, 2, 0, 3)
        new[b] = qkv[b, p : p + T]
    with guarded(device) as memory:
        out, inp = memory.write((B, T, NH, HS)), memory.read(new)
        keys, values = (memory.scratch(caches[0].shape) for _ in range(2))
        for array, cache in zip((keys, values), caches, strict=True):
            device.copy_in(array, device.to_floatX(cache))
        kept = Cached(keys, values, memory.read(np.array(positions, np.int32)), relu)
        cached_attention_forward(out, kept, inp, B, T, NH, NKV, HS, splits)
    return to_numpy(out), to_numpy(keys), to_numpy(values)


def check(B, T, positions, context, NKV, group, HS, relu, splits) -> None:
    NH, rng = NKV * group, np.random.default_rng([B, T, context, HS, group])
    rows = max(positions) + T
    qkv = normal(rng, B, rows, NH + 2 * NKV, HS)
    want = attention(leaf(qkv).flatten(2), NH, "relu" if relu else "softmax", NKV).reshape(B, rows, NH, HS)
    out, keys, values = run(qkv, T, positions, context, NH, relu, splits)
    for b, p in enumerate(positions):
        # Only the result is rounded to bf16. ReLU's sums cancel: the error is of the size of their terms.
        allowed = BF16 if device.floatX == device.BF16 else 4 * KERNEL_FP32
        assert_close("out", out[b], want[b, p : p + T].detach().numpy(), allowed)
        for cache, first in (keys, NH), (values, NH + NKV):
            written = qkv[b, : p + T, first : first + NKV].swapaxes(0, 1)
            assert np.array_equal(cache[b, :, : p + T], written)
            assert np.isnan(cache[b, :, p + T :]).all()


@given(
    B=st.integers(1, 3), T=st.integers(1, 5), NKV=st.integers(1, 3), group=st.integers(1, 9), HS=st.integers(1, 40),
    spare=st.integers(0, 100), relu=st.booleans(), splits=st.integers(1, 4), data=st.data(),
)  # fmt: skip
def test_attention_from_a_position_on_is_that_of_the_whole_text(B, T, NKV, group, HS, spare, relu, splits, data):
    positions = data.draw(st.lists(st.integers(0, 90), min_size=B, max_size=B))
    check(B, T, positions, max(positions) + T + spare, NKV, group, HS, relu, splits)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [
    (1, 1, [0], 1, 1, 1, 1, 1), (2, 1, [63, 64], 200, 2, 1, 64, 4), (1, 1, [255], 256, 2, 4, 64, 4),
    (1, 1, [130], 256, 1, 6, 128, 2), (3, 2, [1, 0, 67], 70, 1, 3, 64, 1), (1, 66, [3], 69, 1, 1, 20, 1),
    (1, 1, [100], 101, 1, 2, 516, 1),
], ids=str)  # fmt: skip
def test_shapes_that_models_have(shape, relu):
    *sizes, splits = shape
    check(*sizes, relu, splits)


@pytest.mark.parametrize("relu", [False, True])
def test_the_same_queries_in_any_order_and_company_give_the_same_bits(rng, relu):
    NH, HS, context = 4, 64, 140
    qkv = normal(rng, 2, 130, NH + 4, HS)
    together, *_ = run(qkv, 1, [129, 70], context, NH, relu, splits=3)
    for b, p in enumerate((129, 70)):
        alone, *_ = run(qkv[b : b + 1], 1, [p], context, NH, relu, splits=3)
        assert np.array_equal(together[b : b + 1], alone)


def test_splits_share_out_the_whole_context_and_none_is_empty(monkeypatch):
    for multiprocessors in 4, 132:
        monkeypatch.setattr(device.current.device, "multiprocessors", multiprocessors)
        for B, NH, NKV in ((1, 12, 12), (1, 32, 8), (1, 1, 1), (16, 32, 8), (300, 12, 12)):
            for context in (1, 64, 65, 1000, 1024, 8192, 131072):
                splits = number_of_splits(B, NH, NKV, context)
                span = ceil_div(ceil_div(context, splits), TILE_KEYS) * TILE_KEYS
                assert (splits - 1) * span < context <= splits * span
    monkeypatch.setattr(device.current.device, "multiprocessors", 132)
    assert number_of_splits(1, 12, 12, 1024) == 16 and number_of_splits(64, 32, 8, 1024) == 1

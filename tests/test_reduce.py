"""reduce.cu: sums in two stages, against float64 sums. What is added up is positive: a sum of a few numbers that
happened to cancel would have no digits to compare."""

from kernels.reduce import add_partials, column_sum, global_norm
from oracle import KERNEL_FP32, assert_close, guarded, leaf, normal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

FP32 = np.float32


@pytest.fixture
def dev(each_type):
    return each_type


@given(N=st.integers(1, 300), C=st.integers(1, 150))
@example(N=64, C=64)
@example(N=7, C=5)
@example(N=129, C=300)
@example(N=16391, C=3)  # more rows than MAX_PARTIALS chunks of the least size hold
def test_column_sum_adds_the_sum_of_the_rows(dev, N, C):
    rng = np.random.default_rng([N, C])
    inp, before = abs(normal(rng, N, C)), abs(normal(rng, C))
    with guarded(dev) as memory, guarded(dev, shift=C % 4) as parameters:
        out = parameters.update(before, FP32)
        column_sum(out, memory.read(inp), N, C)
    assert_close("column sum", out, leaf(inp).sum(0) + leaf(before), KERNEL_FP32)


@given(P=st.integers(1, 80), C=st.integers(1, 100), outs=st.integers(1, 3), missing=st.integers(0, 3))
@example(P=512, C=33, outs=3, missing=1)
def test_add_partials_adds_to_each_output_that_is_there(dev, P, C, outs, missing):
    rng = np.random.default_rng([P, C])
    partials, before = abs(normal(rng, P, outs, C)), abs(normal(rng, outs, C))
    with guarded(dev) as memory, guarded(dev, shift=C % 4) as parameters:
        ours = [parameters.update(before[s], FP32) if s != missing else None for s in range(outs)]
        add_partials(ours, memory.read(partials, FP32), P, C)
    for s, out in enumerate(ours):
        if out is not None:
            assert_close("sum of partials", out, leaf(partials).sum(0)[s] + leaf(before)[s], KERNEL_FP32)


@given(n=st.integers(1, 5000), largest=st.sampled_from([0.0, 0.1, 1.0, 1e6]), parts=st.integers(1, 5))
@example(n=4096, largest=1.0, parts=1)
@example(n=1, largest=1.0, parts=1)
@example(n=2_200_003, largest=1.0, parts=1)  # more than 1024 blocks take in one pass
@example(n=3_300_003, largest=1.0, parts=3)
def test_global_norm_gives_the_norm_and_the_factor_that_clips_it(dev, n, largest, parts):
    rng = np.random.default_rng(n)
    x, cuts = normal(rng, n), np.sort(rng.integers(0, n, parts - 1))
    with guarded(dev, shift=n % 4) as memory:
        norm, parts = memory.update(np.zeros(4, FP32), FP32), [memory.read(part, FP32) for part in np.split(x, cuts)]
        global_norm(norm, memory.scratch((32, 32), FP32), parts, largest, False)
    want = np.linalg.norm(x.astype(np.float64))
    assert_close("norm", norm[:1], np.array([want]), KERNEL_FP32)
    factor = min(1.0, largest / want) if largest > 0 else 1.0
    assert_close("clip factor", norm[1:2], np.array([factor]), KERNEL_FP32)
    assert not dev.to_host(norm)[2:].any()


@pytest.mark.parametrize("largest", [0.0, 1.0])
def test_a_gradient_of_zeros_is_not_scaled(dev, largest):
    with guarded(dev) as memory:
        norm = memory.update(np.zeros(4, FP32), FP32)
        global_norm(norm, memory.scratch(1024, FP32), [memory.read(np.zeros(9, FP32), FP32)], largest, False)
    assert dev.to_host(norm).tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("largest", [0.0, 1.0])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf, 1e20])  # the square of the last is too large
def test_after_a_norm_that_is_not_finite_gradients_have_no_factor(dev, spoiled, skip, largest):
    bad, good = np.ones((2, 1000), np.float32)
    bad[567] = spoiled
    seen, norm, scratch = [], dev.zeros((4,)), dev.empty((1024,))
    for x in (good, bad, good, bad):
        global_norm(norm, scratch, [dev.asarray(good), dev.asarray(x)], largest, skip)
        seen.append(dev.to_host(norm))
    assert [float(norm[2]) for norm in seen] == [0, 1, 1, 2]
    assert [bool(np.isfinite(norm[0])) for norm in seen] == [True, False, True, False]
    assert [bool(np.isfinite(norm[1])) for norm in seen] == [True, False, skip, False]


@pytest.mark.parametrize("skip", [False, True])
def test_a_parameter_that_was_left_out_counts_as_a_norm_that_is_not_finite(dev, skip):
    norm = dev.asarray(np.array([0, 0, 0, 1], np.float32))
    global_norm(norm, dev.empty((1024,)), [dev.asarray(np.ones(4, np.float32))], 0.0, skip)
    assert dev.to_host(norm)[[0, 2, 3]].tolist() == [2, 1, 0] and bool(np.isfinite(dev.to_host(norm)[1])) == skip

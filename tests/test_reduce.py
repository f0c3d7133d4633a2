"""reduce.cu: sums in two stages, against float64 sums. What is added up is positive: a sum of a few numbers that
happened to cancel would have no digits to compare."""

import device
from kernels.reduce import add_partials, column_sum, global_norm
from oracle import KERNEL_FP32, assert_close, leaf, normal
from support.kernels import FP32, Place, fp32, gradient, launch, scratch, shapes, update

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("each_type")

ZEROS = update(np.zeros(4, FP32), FP32)


# Last: more rows than MAX_PARTIALS chunks of the least size hold.
@shapes((64, 64), (7, 5), (129, 300), (16391, 3), N=(1, 300), C=(1, 150))
def test_column_sum_adds_the_sum_of_the_rows(N, C):
    rng = np.random.default_rng([N, C])
    inp, before = abs(normal(rng, N, C)), abs(normal(rng, C))
    (out,) = launch(column_sum, gradient(before), inp, N, C, shift=C % 4)
    assert_close("column sum", out, leaf(inp).sum(0) + leaf(before), KERNEL_FP32)


@shapes((512, 33, 3, 1), P=(1, 80), C=(1, 100), outs=(1, 3), missing=(0, 3))
def test_add_partials_adds_to_each_output_that_is_there(P, C, outs, missing):
    rng = np.random.default_rng([P, C])
    partials, before = abs(normal(rng, P, outs, C)), abs(normal(rng, outs, C))
    ours = [gradient(before[s]) if s != missing else None for s in range(outs)]
    found = launch(add_partials, ours, fp32(partials), P, C, shift=C % 4)
    want = leaf(partials).sum(0) + leaf(before)
    for s, out in zip([s for s in range(outs) if s != missing], found, strict=True):
        assert_close("sum of partials", out, want[s], KERNEL_FP32)


@given(n=st.integers(1, 5000), largest=st.sampled_from([0.0, 0.1, 1.0, 1e6]), parts=st.integers(1, 5))
@example(n=4096, largest=1.0, parts=1)
@example(n=1, largest=1.0, parts=1)
@example(n=2_200_003, largest=1.0, parts=1)  # more than 1024 blocks take in one pass
@example(n=3_300_003, largest=1.0, parts=3)
def test_global_norm_gives_the_norm_and_the_factor_that_clips_it(n, largest, parts):
    rng = np.random.default_rng(n)
    x, cuts = normal(rng, n), np.sort(rng.integers(0, n, parts - 1))
    parts = [Place("read", part, FP32, parameter=True) for part in np.split(x, cuts)]
    norm, _ = launch(global_norm, ZEROS, scratch(32, 32, dtype=FP32), parts, largest, False, shift=n % 4)
    want = np.linalg.norm(x.astype(np.float64))
    assert_close("norm", norm[:1], np.array([want]), KERNEL_FP32)
    factor = min(1.0, largest / want) if largest > 0 else 1.0
    assert_close("clip factor", norm[1:2], np.array([factor]), KERNEL_FP32)
    assert not device.to_host(norm)[2:].any()


@pytest.mark.parametrize("largest", [0.0, 1.0])
def test_a_gradient_of_zeros_is_not_scaled(largest):
    norm, _ = launch(global_norm, ZEROS, scratch(1024, dtype=FP32), [fp32(np.zeros(9))], largest, False)
    assert device.to_host(norm).tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("largest", [0.0, 1.0])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf, 1e20])  # the square of the last is too large
def test_after_a_norm_that_is_not_finite_gradients_have_no_factor(spoiled, skip, largest):
    bad, good = np.ones((2, 1000), np.float32)
    bad[567] = spoiled
    seen, norm, scratch = [], device.zeros((4,)), device.empty((1024,))
    for x in (good, bad, good, bad):
        global_norm(norm, scratch, [device.asarray(good), device.asarray(x)], largest, skip)
        seen.append(device.to_host(norm))
    assert [float(norm[2]) for norm in seen] == [0, 1, 1, 2]
    assert [bool(np.isfinite(norm[0])) for norm in seen] == [True, False, True, False]
    assert [bool(np.isfinite(norm[1])) for norm in seen] == [True, False, skip, False]


@pytest.mark.parametrize("skip", [False, True])
def test_a_parameter_that_was_left_out_counts_as_a_norm_that_is_not_finite(skip):
    norm = device.asarray(np.array([0, 0, 0, 1], np.float32))
    global_norm(norm, device.empty((1024,)), [device.asarray(np.ones(4, np.float32))], 0.0, skip)
    assert device.to_host(norm)[[0, 2, 3]].tolist() == [2, 1, 0] and bool(np.isfinite(device.to_host(norm)[1])) == skip

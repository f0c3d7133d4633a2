"""No kernel hides a number that is not finite: what another number would change, a NaN spoils.

Each launcher of dev/microscope/launches.py runs with one element of one of its arrays changed. The arrays that a finite
number changes must hold something that is not finite once the element is a NaN, as a GPU (0x7fffffff) and a CPU make
them.
"""

from itertools import cycle

import device
from dev.microscope.launches import LAUNCHES
from device import to_bf16
from device.fp8 import from_e4m3
from kernels.cached_attention import Cached, cached_attention_forward
from kernels.fp8.quantized import Quantized
from oracle import normal, to_numpy

import numpy as np
import pytest
from test_fp8 import dev as fp8_dev  # noqa: F401  a fixture

NANS = {"nan of a GPU": 0x7FFFFFFF, "quiet nan": 0x7FC00000, "negative nan": 0xFFFFFFFF}
INFINITIES = {"inf": 0x7F800000, "-inf": 0xFF800000}
ELEMENTS = 3  # to try, of each array: one for each NaN
# AdamW leaves gradients that are not finite out of the update on purpose (tests/test_adamw.py). A NaN in q, k or v has
# already made lse or out of its row a NaN when flash attention's backward comes (kernels/flash_attention.cu).
LEFT_OUT = {("adamw", "grads"), ("flash_attention_backward", "qkv"), ("flash_attention_backward:128", "qkv")}
# The gradient of the scores. The launcher computes the gradients of q, k and v from it.
IN_BETWEEN = {"datt"}


def results(call, name: str = "", at: int = 0, bits: int = 0) -> dict[str, np.ndarray]:
    """The float arrays of a call after it, by name, where each begins with the same contents but for an element of
    `name`, which is `bits` of a float."""
    device.synchronize()
    for each, content in call.before.items():
        if each == name:
            content = content.copy()
            content.view(np.uint32).reshape(-1)[at] = bits
        device.copy_in(call.watched[each], content)
    call()
    device.synchronize()
    return {each: device.to_host(array) for each, array in call.watched.items()}


def prepared(name: str):
    """A call of a launcher, with the arrays that it is given and what they hold before it."""
    launch = LAUNCHES[name]
    call = launch.prepare(launch.sizes)
    call.watched = dict(call.arrays)
    if name == "global_norm":
        call.watched["norm"] = call.arguments["norm"]
    call.before = {each: device.to_host(array).copy() for each, array in call.watched.items()}
    return call


def found(call, rng) -> dict[str, list[tuple[int, str, set[str], set[str], set[str]]]]:
    """For each array that is read, some elements: one of NANS, the outputs that it spoils, those that one of INFINITIES
    spoils, and those that a finite number changes."""
    usual, rows = results(call), {}
    for name in call.arrays:
        content = call.before[name]
        elements = rng.integers(content.size, size=ELEMENTS)
        for at, nan, infinity in zip(elements, cycle(NANS), cycle(INFINITIES.values()), strict=False):
            other = results(call, name, at, 0x40400000)  # 3
            changed = {each for each, values in other.items() if not np.array_equal(values, usual[each])} - IN_BETWEEN
            if np.array_equal(usual[name], content):  # is not written to
                changed.discard(name)
            if changed:
                after = [results(call, name, at, bits).items() for bits in (NANS[nan], infinity)]
                spoilt = [{each for each, values in arrays if not np.isfinite(values).all()} for arrays in after]
                rows.setdefault(name, []).append((at, nan, *spoilt, changed))
    return rows


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [name for name, launch in LAUNCHES.items() if not launch.precision])
def test_what_is_not_finite_is_handed_on(product_dev, name, rng):
    for array, elements in found(prepared(name), rng).items():
        if (name, array) in LEFT_OUT:
            continue
        for at, nan, outputs, _, changed in elements:
            assert changed <= outputs, f"{nan} in {array}[{at}] changes {changed} and spoils {outputs}"
        # An infinity may rightly come to nothing, as where the weight of a score of -inf is 0.
        assert any(changed & outputs for *_, outputs, changed in elements), array


QUANTIZE = [name for name, launch in LAUNCHES.items() if "fp8" in name or name == "quantize"]


def dequantized(call) -> dict[str, np.ndarray]:
    """What a call of a launcher of kernels/fp8/ has written, by name: float arrays, and quantized ones times their
    scales."""
    call()
    found = {}
    for name, value in call.arguments.items():
        if isinstance(value, Quantized):
            scale = device.to_host(value.scale.scale)[0]
            for each in "q", "q_T":
                found[f"{name}.{each}"] = from_e4m3(device.to_host(getattr(value, each))) * scale
    return found | {name: device.to_floats(array) for name, array in call.arrays.items()}


def dequantized_after(call, array: str, at: int, value: float) -> dict[str, np.ndarray]:
    """The same, where an array has this value at one place."""
    for each, content in call.before.items():
        values = device.to_floats(content).copy()
        if each == array:
            values.reshape(-1)[at] = value
        device.copy_in(call.arrays[each], to_bf16(values) if content.dtype == device.BF16 else values)
    return dequantized(call)


@pytest.mark.parametrize("name", QUANTIZE)
def test_what_is_not_finite_is_seen_in_a_quantized_result(fp8_dev, name, rng):  # noqa: F811
    """If a finite number at a place changes a result, a NaN there spoils it. So does an infinity, if the result's scale
    is computed here: by a known scale, which is NaN in a model, it would be clipped."""
    device.use_precision("bf16")
    call, seen = LAUNCHES[name].prepare(LAUNCHES[name].sizes), set()
    call.before = {each: device.to_host(value).copy() for each, value in call.arrays.items()}
    for array, content in call.before.items():
        for at in rng.integers(content.size, size=ELEMENTS):
            usual = dequantized_after(call, array, at, device.to_floats(content).reshape(-1)[at])
            other = dequantized_after(call, array, at, 30.0)
            changed = {each for each in other if each != array and not np.array_equal(other[each], usual[each])}
            scaled = {each for each in changed if each.endswith(".q")}
            for value, expected in (np.nan, changed), (np.inf, scaled):
                results = dequantized_after(call, array, at, value).items()
                spoiled = {each for each, values in results if not np.isfinite(values).all()}
                assert expected <= spoiled, (array, at, value)
            seen |= changed
    assert seen


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("relu", [False, True])
def test_cached_attention_shows_a_nan_where_a_query_sees_it_and_nowhere_else(product_dev, rng, relu, splits):
    dev = product_dev
    NH, HS = 2, 20
    qkv = normal(rng, 1, 130, 3 * NH, HS)
    for s, of in ((5, NH), (100, 2 * NH), (129, 0)):  # a key, a value, a query, of the first head
        broken = qkv.copy()
        broken[0, s, of, 3] = np.nan
        NKV, caches = NH, np.zeros((2, 1, NH, 192, HS), np.float32)
        caches[:, 0, :, :129] = broken[0, :129, NH:].reshape(129, 2, NKV, HS).transpose(1, 2, 0, 3)
        keys, values = (dev.asarray(cache) for cache in caches)
        out = dev.zeros((1, 1, NH, HS))
        new, starts = dev.asarray(broken[:, 129:].copy()), dev.asarray(np.array([129], np.int32))
        cached_attention_forward(out, Cached(keys, values, starts, relu), new, 1, 1, NH, NKV, HS, splits)
        found = np.isnan(to_numpy(out)[0, 0])
        assert found[0].all() if of < 2 * NH else found[0, 3] and found[0].sum() == 1
        assert not found[1].any()

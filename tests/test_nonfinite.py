"""No kernel hides a number that is not finite: what another number would change, a NaN spoils.

Each launcher that kernels/launches.py describes runs with one element of one of its arrays changed. The arrays that a
finite number changes must hold something that is not finite once the element is a NaN, as a GPU (0x7fffffff) and a CPU
make them.
"""

import device
from dev.microscope.launches import LAUNCHES
from device.errors import UserError
from device.fp8 import from_e4m3
from kernels.cached_attention import Cached, cached_attention_forward
from kernels.fp8.quantized import Quantized
from oracle import normal, to_numpy

import numpy as np
import pytest

# The bits of floats. The upper half of them is a bf16.
NANS = 0x7FFFFFFF, 0x7FC00000, 0xFFFFFFFF  # of a GPU, a quiet and a negative one
INFINITIES = 0x7F800000, 0xFF800000, 0x7F800000
THREE = 0x40400000

QUANTIZE = [name for name in LAUNCHES if "fp8" in name or name == "quantize"]


def results(call, name: str = "", at: int = 0, bits: int = 0) -> dict[str, np.ndarray]:
    """What a call leaves in its arrays, as floats, by name; of quantized ones times their scales. The arrays begin with
    the same contents each time, but for an element of `name`, which is `bits` of a float."""
    device.synchronize()
    for each, content in call.before.items():
        if each == name:
            content = content.copy()
            content.view(f"u{content.itemsize}").reshape(-1)[at] = bits >> 32 - 8 * content.itemsize
        device.copy_in(call.watched[each], content)
    call()
    device.synchronize()
    found = {each: device.to_floats(array) for each, array in call.watched.items()}
    for each, value in call.arguments.items():
        if isinstance(value, Quantized):
            scale = device.to_host(value.scale.scale)[0]
            found |= {f"{each}.{q}": from_e4m3(device.to_host(getattr(value, q))) * scale for q in ("q", "q_T")}
    return found


def spoilt(values: dict[str, np.ndarray]) -> set[str]:
    return {name for name, array in values.items() if not np.isfinite(array).all()}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [name for name, launch in LAUNCHES.items() if not launch.precision] + QUANTIZE)
def test_what_is_not_finite_is_handed_on(product_dev, name, rng):
    """An infinity may rightly come to nothing, as where the weight of a score of -inf is 0, or where a known scale
    clips it. But it spoils what a kernel quantizes by a scale of its own."""
    if name in QUANTIZE:
        try:
            device.use_precision("fp8")
        except UserError:
            pytest.skip("this GPU has no fp8")
        device.use_precision("bf16")  # of what they quantize
    call, seen = LAUNCHES[name].prepare({}), set()
    call.watched = call.arrays | ({"norm": call.arguments["norm"]} if name == "global_norm" else {})
    call.before = {each: device.to_host(array).copy() for each, array in call.watched.items()}
    given, usual = {each: device.to_floats(array) for each, array in call.arrays.items()}, results(call)
    for array in [each for each in call.arrays if each not in LAUNCHES[name].hides]:
        rows = []  # the results that a finite number at a place changes, and those that an infinity there spoils
        for at, nan, infinity in zip(rng.integers(given[array].size, size=len(NANS)), NANS, INFINITIES, strict=True):
            other = results(call, array, at, THREE)
            changed = {each for each in other if not np.array_equal(other[each], usual[each])}
            if np.array_equal(usual[array], given[array]):  # is not written to
                changed.discard(array)
            if changed:
                by_nan, by_infinity = (spoilt(results(call, array, at, bits)) for bits in (nan, infinity))
                assert changed <= by_nan, f"{nan:#x} in {array}[{at}] changes {changed} and spoils {by_nan}"
                assert {each for each in changed if each.endswith(".q")} <= by_infinity, f"{array}[{at}]"
                rows.append((changed, by_infinity))
        assert name in QUANTIZE or not rows or any(changed & spoiled for changed, spoiled in rows), array
        seen |= set().union(*(changed for changed, _ in rows))
    assert seen or name not in QUANTIZE


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("relu", [False, True])
def test_cached_attention_shows_a_nan_where_a_query_sees_it_and_nowhere_else(product_dev, rng, relu, splits):
    NH, HS = 2, 20
    qkv = normal(rng, 1, 130, 3 * NH, HS)
    for s, of in ((5, NH), (100, 2 * NH), (129, 0)):  # a key, a value, a query, of the first head
        broken = qkv.copy()
        broken[0, s, of, 3] = np.nan
        caches = np.zeros((2, 1, NH, 192, HS), np.float32)
        caches[:, 0, :, :129] = broken[0, :129, NH:].reshape(129, 2, NH, HS).transpose(1, 2, 0, 3)
        starts, out = np.array([129], np.int32), device.zeros((1, 1, NH, HS))
        keys, values, new, starts = map(device.asarray, (*caches, broken[:, 129:].copy(), starts))
        cached_attention_forward(out, Cached(keys, values, starts, relu), new, 1, 1, NH, NH, HS, splits)
        found = np.isnan(to_numpy(out)[0, 0])
        assert found[0].all() if of < 2 * NH else found[0, 3] and found[0].sum() == 1
        assert not found[1].any()

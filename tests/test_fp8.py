"""The kernels of kernels/fp8/: matrices quantized to e4m3, and products of them."""

from collections.abc import Callable

import device
import kernels.matmul as matmul
from conftest import DEVICES
from device import BF16, from_bf16, to_bf16
from device.fp8 import NUMBERS, from_e4m3
from kernels import norm as norms
from kernels.fp8 import gelu
from kernels.fp8.loading import load_layers
from kernels.fp8.quantize import quantize, quantize_by_scale
from kernels.fp8.quantized import GradientScale, Quantized, QuantizedWeight, Scale, WeightGradient, WeightOnly
from kernels.gelu import gelu_backward, gelu_forward
from kernels.layernorm import layernorm_forward, layernorm_recompute
from kernels.qk_norm import qk_norm_backward
from kernels.rmsnorm import rmsnorm_forward, rmsnorm_recompute
from kernels.rope import rope_table
from kernels.swiglu import swiglu_backward, swiglu_forward
from llmc.model import fp8
from oracle import KERNEL_FP32, assert_close, guarded, normal
from support.fp8 import assert_quantized, dequantized, in_fp8, quantized_by_pytorch, scale_of

import numpy as np
import pytest
import torch

load_layers()
needs_gpu = pytest.mark.skipif("cuda" not in DEVICES, reason="no GPU here")
EXACT_DEVICES = [each for each in DEVICES if each != "cpu"]  # on "cpu" g++ may round the same formula differently


dev = pytest.fixture(params=DEVICES)(in_fp8)


def quantized(q, q_T, scale, previous_amax=None) -> Quantized:
    named = Scale("matrix", scale) if previous_amax is None else GradientScale("matrix", scale, previous_amax)
    return Quantized(q, q_T, named)


def test_the_numbers_of_e4m3_are_pytorchs():
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(NUMBERS, theirs, equal_nan=True)


@pytest.mark.parametrize("N, C", [(16, 16), (128, 64), (80, 144), (208, 272)])
@pytest.mark.parametrize("spread", [0.0, 5.0])
def test_a_quantized_matrix_has_the_nearest_numbers_and_its_amax_the_largest_exponent(dev, rng, N, C, spread):
    values = to_bf16(normal(rng, N, C) * np.exp(spread * normal(rng, N, C)))
    wide = from_bf16(values)
    with guarded(dev) as memory:
        inp, scale = memory.read(wide), memory.write((1,), np.float32)
        out = quantized(memory.write((N, C), np.uint8), memory.write((C, N), np.uint8), scale)
        quantize(out, inp, N, C)
        known = quantized(None, memory.write((C, N), np.uint8), scale)
        quantize_by_scale(known, inp, N, C)
    assert 0x70 <= (dev.to_host(out.q) & 0x7F).max() <= 0x7E  # between 224 and 448
    assert_quantized(out, wide)
    assert_quantized(known, wide)


@pytest.mark.parametrize("last", [None, 1.0, -3.0, 0.0, np.nan, np.inf])
@pytest.mark.parametrize("guess", [2.0, 0.5, 3.0, 0.0, -1.0, np.nan, np.inf, 1.0])
def test_a_quantized_matrix_and_its_scale_do_not_depend_on_the_guess(dev, rng, guess, last):
    """guess: of the right scale, and of the right ratio. last: the largest value of the layer before."""
    values = to_bf16(normal(rng, 80, 272))
    wide = from_bf16(values)
    expected = scale_of(np.abs(wide).max())
    with guarded(dev) as memory:
        inp, largest = memory.read(wide), np.float32(np.abs(wide).max())
        q, q_T = memory.write((80, 272), np.uint8), memory.write((272, 80), np.uint8)
        if last is None:
            out = quantized(q, q_T, memory.update(np.float32([guess * expected]), np.float32))
        else:  # not guarded, because the ratio may become infinite
            pair = np.float32([guess * expected, guess * largest])
            out = quantized(q, q_T, dev.asarray(pair), dev.asarray(np.float32([last])))
        quantize(out, inp, 80, 272)
    assert_quantized(out, wide, expected)
    if last is not None:
        assert dev.to_host(out.scale.previous_amax)[0] == largest
        ratio = dev.to_host(out.scale.scale)[1]
        averaged = last == 1.0 and guess in (0.5, 1.0)  # the ratio before was near enough
        with np.errstate(divide="ignore"):
            new = largest / np.float32(last)
        np.testing.assert_allclose(ratio, new * ((1 + guess) / 2 if averaged else 1), rtol=1e-6)


def writes_again(dev, out: Quantized, inp: np.ndarray) -> bool:
    """Whether the second launch that quantizes this matrix touches it."""
    left = []

    def observer(name, arguments, work) -> None:
        out.q.fill(0)
        work()
        left.append(bool(out.q.any()))

    with device.observe(observer):
        quantize(out, dev.asarray(to_bf16(inp)), *inp.shape)
    assert left[0]
    return left[1]


def test_a_matrix_is_not_quantized_again_if_the_guess_was_right(dev, rng):
    inp, out = normal(rng, 48, 80), quantized(dev.empty((48, 80), np.uint8), None, dev.zeros((1,)))
    assert [writes_again(dev, out, inp) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_gradients_scale_is_guessed_from_the_amax_of_the_layer_before(dev, rng, factor):
    """So if all matrices grow or shrink alike, only the first is quantized twice."""
    layers, before = [normal(rng, 48, 80) * size for size in (1, 30, 1e-3)], dev.asarray(np.ones(1, np.float32))
    made = [quantized(dev.empty((48, 80), np.uint8), None, dev.zeros((2,)), before) for _ in layers]
    for size in 1.0, factor:
        again = [writes_again(dev, *pair) for pair in zip(made, np.float32(size) * np.array(layers), strict=True)]
    assert again == [True, False, False]


def both_ways(dev, run: Callable, shapes: dict[str, tuple], guess: float, again: bool = True) -> tuple:
    """Calls run(memory, **outputs) with outputs of these shapes in bf16, then with quantized ones, which must hold the
    same numbers. guess: of their scale. Backward makes the output once more, as `again`: in bf16, or quantized by a
    known scale, which clips some. Returns what run returned both times, and the numbers."""
    with guarded(dev) as memory:
        plain = {name: memory.write(shape) for name, shape in shapes.items()}
        rest = run(memory, **plain)
    wide = {name: device.to_floats(array) for name, array in plain.items()}
    scales = {name: scale_of(np.abs(values).max()) / (4 if name == "again" else 1) for name, values in wide.items()}
    with guarded(dev) as memory:
        made = {}
        for name, (N, C) in shapes.items():
            scale = np.float32([scales[name]])
            transposed = None if name == "out" else memory.write((C, N), np.uint8)
            if name == "again":
                known = quantized(None, transposed, memory.read(scale, np.float32))
                made[name] = known if again else memory.write((N, C))
            else:
                old = memory.update(np.float32(guess) * scale, np.float32)
                made[name] = quantized(memory.write((N, C), np.uint8), transposed, old)
        quantized_rest = run(memory, **made)
    for name, found in made.items():
        if isinstance(found, Quantized):
            assert_quantized(found, wide[name], scales[name])
        else:
            assert np.array_equal(device.to_floats(found), wide[name])
    return rest, quantized_rest, wide


def in_place(dinp, dout):
    """dout, in the memory of dinp if this is in bf16: there backward works in place."""
    if isinstance(dinp, Quantized):
        return dout
    device.copy(dinp, dout)
    return dinp


exact_devices = pytest.mark.parametrize("dev", EXACT_DEVICES, indirect=True)
each_guess = pytest.mark.parametrize("guess", [2.0, 1.0, np.nan])
each_form = pytest.mark.parametrize("erf", [False, True], ids=["tanh", "erf"])


@exact_devices
@pytest.mark.parametrize("N, C", [(16, 16), (80, 144), (208, 1104)])
@each_guess
@pytest.mark.parametrize("again", [True, False])
def test_swiglu_quantizes_the_numbers_that_it_would_store(dev, rng, N, C, guess, again):
    inp, dout = normal(rng, N, 2 * C), normal(rng, N, C)

    def run(memory, out, dinp, again) -> None:
        swiglu_forward(out, memory.read(inp), N, C)
        swiglu_backward(dinp, again, memory.read(dout), memory.read(inp), N, C)

    both_ways(dev, run, {"out": (N, C), "dinp": (N, 2 * C), "again": (N, C)}, guess, again)


@exact_devices
@pytest.mark.parametrize("N, C, tiles", [(16, 16, 1), (80, 144, 1), (400, 1104, 3)])
@pytest.mark.parametrize("guess, again, biased", [(2.0, True, True), (1.0, False, True), (np.nan, True, False)])
@each_form
def test_gelu_quantizes_the_numbers_that_it_would_store(
    dev, monkeypatch, rng, N, C, tiles, guess, again, biased, erf
):  # fmt: skip
    """tiles: of a chunk."""
    monkeypatch.setattr(gelu, "rows_per_chunk", lambda N, multiple: tiles * multiple)
    (inp, dout), (bias, before) = normal(rng, 2, N, C), normal(rng, 2, C)

    def run(memory, out, dinp, again):
        x, b, dbias = memory.read(inp), memory.read(bias) if biased else None, memory.update(before, np.float32)
        gelu_forward(out, x, b, N, C, erf)
        gelu_backward(dinp, dbias, again, in_place(dinp, memory.read(dout)), x, b, N, C, erf)
        return dev.to_host(dbias)

    dbias, added, wide = both_ways(dev, run, {"out": (N, C), "dinp": (N, C), "again": (N, C)}, guess, again)
    # The sums are of the same fp32 numbers, in another order. dinp has them as bf16.
    dinp = wide["dinp"]
    assert (np.abs(added - dbias) <= N * 2.0**-24 * (np.abs(before) + np.abs(dinp).sum(0))).all()
    assert (np.abs(added - before - dinp.sum(0, np.float64)) <= 2.0**-8 * np.abs(dinp).sum(0)).all()


@exact_devices
@pytest.mark.parametrize("N, C", [(16, 16), (80, 144), (208, 1104)])
@each_guess
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("start", [0, 1])
def test_norms_quantize_the_numbers_that_they_would_store(dev, monkeypatch, rng, N, C, guess, name, start):
    """start: that of the parameters, which need not lie at a multiple of 16 bytes."""
    monkeypatch.setattr(norms, "FEW_ROWS", 0)  # their kernels round otherwise
    inp, params = normal(rng, N, C), normal(rng, 2, start + C)

    def run(memory, out, again):
        x, weight, bias = map(memory.read, (inp, *params))
        norm, rstd = (weight[start:], bias[start:]), memory.write((N,), np.float32)
        mean = memory.write((N,), np.float32) if name == "layernorm" else None
        if name == "layernorm":
            layernorm_forward(out, (mean, rstd), x, norm, 1, N, C)
            layernorm_recompute(again, x, norm, (mean, rstd), 1, N, C)
        else:
            rmsnorm_forward(out, rstd, x, norm[0], 1e-5, 1, N, C)
            rmsnorm_recompute(again, x, norm[0], rstd, 1, N, C)
        return [dev.to_host(each) for each in (mean, rstd) if each is not None]

    kept, found, _ = both_ways(dev, run, {"out": (N, C), "again": (N, C)}, guess)
    assert all(np.array_equal(*pair) for pair in zip(kept, found, strict=True))


@exact_devices
@pytest.mark.parametrize("B, T, NH, NKV, HS, start", [
    (1, 16, 2, 1, 16, 0), (2, 56, 4, 2, 48, 1), (5, 16, 3, 3, 128, 0), (3, 352, 8, 4, 32, 0), (1, 32, 2, 1, 20, 0),
    (1, 16, 1, 1, 144, 0), (16, 5, 6, 2, 128, 1),
])  # fmt: skip
@each_guess
def test_qk_norm_quantizes_the_numbers_that_it_would_store(dev, rng, B, T, NH, NKV, HS, start, guess):
    """start: that of the weights."""
    N, C = B * T, (NH + 2 * NKV) * HS
    (inp, dout), weights, before = normal(rng, 2, N, C), normal(rng, 2, start + HS), normal(rng, 2, HS)
    rstd = 1 / np.sqrt((inp.reshape(N, -1, HS)[:, : NH + NKV] ** 2).mean(-1))

    def run(memory, dinp):
        sums = [memory.update(each, np.float32) for each in before]
        d, table = in_place(dinp, memory.update(dout)), memory.read(rope_table(T, HS, 1e4), np.float32)
        given = memory.read(inp), [memory.read(each)[start:] for each in weights], memory.read(rstd, np.float32)
        qk_norm_backward(dinp, sums, d, *given, table, B, T, NH, NKV, HS)
        return sums

    sums, added, _ = both_ways(dev, run, {"dinp": (N, C)}, guess)
    for ours, plain in zip(added, sums, strict=True):  # the sums are of the same numbers, in another order
        assert_close("dweight", ours, dev.to_host(plain), KERNEL_FP32)


@pytest.mark.parametrize("exponent", [-126, -9, 0, 3, 100, 121])
def test_every_number_of_bf16_is_rounded_by_the_rule(dev, exponent):
    """A scale is a power of two, so no other numbers are ever rounded."""
    values = np.arange(65536, dtype=np.uint16)
    scale = np.float32(2.0**exponent)
    q = dev.empty((256, 256), np.uint8)
    out = quantized(q, None, dev.asarray(scale.reshape(1)))
    quantize_by_scale(out, dev.asarray(values.reshape(256, 256)), 256, 256)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = quantized_by_pytorch(from_bf16(values), scale)
    found, nan = dev.to_host(q).reshape(-1), np.isnan(from_bf16(values))
    assert np.array_equal(found[~nan], expected[~nan]) and (found[nan] == 0x7F).all()


EXTREMES = {"NaN": np.nan, "infinity": np.inf, "-infinity": -np.inf, "outlier": 1e30, "largest": -3.3e38}


def extreme(values: np.ndarray, what: str) -> np.ndarray:
    """A matrix, changed in this way, in bf16."""
    if what in ("zeros", "tiny"):
        values[:] = {"zeros": -0.0, "tiny": 1e-40}[what]
    elif what == "a row of zeros":
        values[3] = 0.0
    else:
        values[5, 7] = EXTREMES[what]
    return to_bf16(values)


@pytest.mark.parametrize("what", ["zeros", "tiny", "a row of zeros", *EXTREMES])
def test_extremes_are_quantized_or_shown(dev, rng, what):
    bits = extreme(normal(rng, 32, 48), what)
    q, q_T, known = (dev.empty(shape, np.uint8) for shape in ((32, 48), (48, 32), (48, 32)))
    scale, inp, wide = dev.empty((1,)), dev.asarray(bits), from_bf16(bits)
    quantize(quantized(q, q_T, scale), inp, 32, 48)
    quantize_by_scale(quantized(None, known, scale), inp, 32, 48)
    found = dev.to_host(q)
    if what in ("NaN", "infinity", "-infinity"):
        assert np.isnan(dev.to_host(scale)).all() and (found == 0x7F).all()
    else:
        assert_quantized(quantized(q, None, scale), wide)
    assert np.array_equal(dev.to_host(q_T), found.T) and np.array_equal(dev.to_host(known), found.T)


FACTORS = {"inp": ("out", "dweight"), "weight": ("out", "dinp"), "dout": ("dinp", "dweight")}  # and their products


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("what", ["zeros", "a row of zeros", "NaN", "infinity", "-infinity", "outlier"])
def test_the_products_of_extremes_are_those_of_the_quantized_matrices_and_hide_nothing(dev, rng, factor, what):
    """What is not finite spoils all of both products of its factor, but not the third."""
    N, C, OC = 32, 48, 64
    given = {name: to_bf16(normal(rng, *shape)) for name, shape in
             (("inp", (N, C)), ("weight", (OC, C)), ("dout", (N, OC)))}  # fmt: skip
    given[factor], bias = extreme(from_bf16(given[factor]), what), to_bf16(normal(rng, OC))
    inp, array, dout = map(dev.asarray, given.values())
    q = quantized(dev.empty((OC, C), np.uint8), dev.empty((C, OC), np.uint8), dev.empty((1,)))
    scales = Scale("input", dev.empty((1,))), GradientScale("gradient", dev.empty((2,)), dev.empty((1,)))
    weight = QuantizedWeight(array, q, *scales)
    dweight = WeightGradient(dev.empty((OC, C)), weight)
    out, dinp = dev.empty((N, OC), BF16), dev.empty((N, C), BF16)
    matmul.matmul_forward(out, inp, weight, dev.asarray(bias), 1, N, C, OC)
    matmul.matmul_backward_inp(dinp, dout, weight, 1, N, C, OC)
    matmul.matmul_backward_weight(dweight, dout, inp, 1, N, C, OC, accumulate=False)
    found = {"out": device.to_floats(out) - from_bf16(bias), "dinp": device.to_floats(dinp),
             "dweight": dev.to_host(dweight.array)}  # fmt: skip

    finite = {name: np.isfinite(from_bf16(bits)).all() for name, bits in given.items()}
    for name, one in found.items():
        a, b = (each for each in FACTORS if name in FACTORS[each])
        if not (finite[a] and finite[b]):
            assert np.isnan(one).all()
            continue
        a, b = (dequantized(from_bf16(given[each])) for each in (a, b))
        a, b = {"out": (a, b.T), "dinp": (b, a), "dweight": (b.T, a)}[name]
        allowed = TOLERANCE[dev.kind] * (np.abs(a) @ np.abs(b)) + 2.0**-7 * (np.abs(a @ b) + (name == "out"))
        assert (np.abs(one - a @ b) <= allowed).all()
        assert what != "zeros" or name not in FACTORS[factor] or not one.any()


def random_quantized(dev, rng, N: int, C: int):
    """Random numbers of e4m3 without NaN, and a scale, on the device; and the matrix, float64."""
    q = rng.integers(0, 256, (N, C)).astype(np.uint8)
    q[(q & 0x7F) == 0x7F] = 0
    scale = np.float32(2.0 ** rng.integers(-12, 0))
    return dev.asarray(q), dev.asarray(scale.reshape(1)), from_e4m3(q).astype(np.float64) * scale


# Of the sum of absolute values. fp32 sums have 24 bits. Hopper's keep some 14: of the 32 terms that it adds at a time,
# each loses up to 2^-13 of the largest. The largest error on an H100 was 2^-10.2. A result in bf16 has 8 bits. If the
# product is added to such a c, cublasLt first rounds the product to bf16.
TOLERANCE = {"cpu": 2.0**-20, "cuda": 2.0**-9}


@pytest.mark.parametrize("m, n, k", [(16, 16, 16), (48, 80, 112), (256, 128, 512), (80, 272, 4096)])
@pytest.mark.parametrize("result", ["bf16", "bf16 and bias", "bf16 +=", "fp32", "fp32 +="])
def test_products_are_within_the_bound_of_their_sums(dev, rng, m, n, k, result):
    (a, scale_a, wide_a), (b, scale_b, wide_b) = (random_quantized(dev, rng, rows, k) for rows in (m, n))
    before, bias = to_bf16(normal(rng, m, n)), to_bf16(normal(rng, n)) if "bias" in result else None
    start = before if "bf16" in result else from_bf16(before)
    c, adds = dev.asarray(start), "+=" in result
    of_bias = None if bias is None else dev.asarray(bias)
    dev.gemm(c, a, b, m, n, k, trans_b=True, add=c if adds else None, bias=of_bias, scale_a=scale_a, scale_b=scale_b)
    found = dev.to_host(c)
    found = from_bf16(found) if found.dtype == BF16 else found
    product = wide_a @ wide_b.T
    expected = product + adds * from_bf16(before) + (0 if bias is None else from_bf16(bias))
    allowed = TOLERANCE[dev.kind] * (np.abs(wide_a) @ np.abs(wide_b.T) + np.abs(expected))
    allowed += 2.0**-8 * (np.abs(expected) + adds * np.abs(product)) if "bf16" in result else 0
    assert (np.abs(found - expected) <= allowed).all(), np.max(np.abs(found - expected) / allowed)


@pytest.mark.parametrize("dev", [pytest.param("cuda", marks=needs_gpu)], indirect=True)
@pytest.mark.parametrize("m, n, k", [(1024, 2048, 512), (2048, 1024, 8192), (4096, 1536, 1536)])
@pytest.mark.parametrize("result", ["bf16", "bf16 and bias", "fp32"])
def test_whichever_algorithm_is_the_fastest_the_bits_are_the_same(dev, rng, m, n, k, result):
    c = dev.empty((m, n), BF16 if "bf16" in result else np.float32)
    plans = device.current.device.blas.lt.plans
    plans.clear()

    def operand(rows: int) -> tuple:
        q, scale = dev.empty((rows, k), np.uint8), dev.empty((1,))
        quantize(quantized(q, None, scale), dev.asarray(to_bf16(normal(rng, rows, k))), rows, k)
        return q, scale

    def operands() -> dict:
        (a, scale_a), (b, scale_b) = operand(m), operand(n)
        bias = dev.asarray(to_bf16(normal(rng, n))) if "bias" in result else None
        return {"a": a, "b": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}

    def multiply(factors: dict) -> np.ndarray:
        dev.gemm(c, m=m, n=n, k=k, trans_b=True, **factors)
        return dev.to_host(c)

    multiply(operands())
    (plan,) = plans.values()
    assert plan.timed
    usable = plan.algorithms
    for _ in range(3):  # other matrices than those with which the algorithms were compared
        given, results = operands(), []
        for algorithm in usable:
            plan.algorithms = [algorithm]
            results.append(multiply(given))
        assert all(np.array_equal(found, results[0]) for found in results)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("exponents, found", [((100, 100), np.inf), ((-126, -126), 0.0), ((60, -60), 32.0)])
def test_a_product_of_extreme_scales_overflows_or_vanishes_without_a_word(dev, exponents, found):
    ones, c = dev.asarray(np.full((16, 16), 0x38, np.uint8)), dev.zeros((16, 16))
    scale_a, scale_b = (dev.asarray(np.array([2.0**each], np.float32)) for each in exponents)
    for add in None, c:
        dev.gemm(c, ones, ones, 16, 16, 16, trans_b=True, add=add, scale_a=scale_a, scale_b=scale_b)
    assert (dev.to_host(c) == found).all()


@pytest.mark.parametrize("B, C, OC", [
    (1, 16, 16), (1, 112, 50), (1, 4096, 3), (1, 48, matmul.MIN_OUTPUTS_FOR_8_LANES + 3), (3, 80, 272), (33, 128, 16),
])  # fmt: skip
def test_a_product_of_a_weight_that_is_only_quantized_takes_its_numbers_and_the_input_as_it_is(dev, rng, B, C, OC):
    q, scale, wide = random_quantized(dev, rng, OC, C)
    inp, bias, residual = normal(rng, B, C), normal(rng, OC), normal(rng, B, OC)
    for given in (bias, residual), (bias, None), (None, residual), (None, None):
        with guarded(dev) as memory:
            out, (b, r) = memory.write((B, OC)), (None if each is None else memory.read(each) for each in given)
            matmul.matmul_forward(out, memory.read(inp), WeightOnly(q, scale), b, B, 1, C, OC, r)
        product, added = inp.astype(np.float64) @ wide.T, sum(each for each in given if each is not None)
        # Some of cuBLAS's algorithms round the product before they add the bias or the residual stream.
        allowed = 2.0**-20 * (np.abs(inp) @ np.abs(wide.T)) + 2.0**-8 * (np.abs(product + added) + np.abs(product))
        assert (np.abs(device.to_floats(out) - product - added) <= allowed).all()


@pytest.mark.parametrize("C, OC, producer_quantizes, worth", [
    (2048, 16384, True, True), (8192, 2048, True, True), (2048, 2048, False, True), (768, 3072, True, True),
    (576, 3072, True, False), (3072, 768, True, True), (2048, 1024, False, False), (2048, 1024, True, True),
    (2040, 16384, True, False),
])  # fmt: skip
def test_a_weight_is_quantized_where_its_products_gain_more_than_that_costs(C, OC, producer_quantizes, worth):
    assert fp8.worth_quantizing(C, OC, producer_quantizes) == worth

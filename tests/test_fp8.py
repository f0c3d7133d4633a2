"""Products of codes in e4m3 (`--precision fp8`): the codes are exact, and models train with them."""

import shutil
import sys
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import device
import generate
import kernels.fp8 as fp8
import kernels.matmul as matmul
from conftest import DEVICES
from dev.microscope.launches import room_for_codes
from device import BF16, from_bf16, to_bf16
from device.fp8 import DECODED, from_e4m3
from kernels import gelu
from kernels.fp8 import Coded, Codes, Gradient, Weight, encode
from kernels.gelu import gelu_backward, gelu_forward
from kernels.layernorm import fused_residual_forward, layernorm_forward, layernorm_recompute
from kernels.qk_norm import qk_norm_backward
from kernels.rmsnorm import fused_residual_rmsnorm_forward, rmsnorm_forward, rmsnorm_recompute
from kernels.rope import rope_table
from kernels.swiglu import swiglu_backward, swiglu_forward
from llmc.data.batches import Batches
from llmc.model import activations, offload, weights
from llmc.model.activations import Cache
from llmc.model.model import coded_matrices
from llmc.model.tensors import FOR, FROM, readers
from llmc.model.weights import load_weights
from llmc.ranks import exchange
from llmc.run.validation import Validation
from llmc.step.generation import Writer
from llmc.step.update import adamw_update
from models import (
    GivenBatches,
    build,
    flat_parameters,
    forward_backward,
    kind_of,
    make_batches,
    name_of,
    name_parameters,
    state_of,
)
from oracle import KERNEL_FP32, assert_close, guarded, normal
from train_gpt2_fp32 import GPT2, GPT2Config, training_step
from train_llama3 import Llama3, Llama3Config
from train_pythia import PythiaConfig
from train_qwen3 import Qwen3Config

import numpy as np
import pytest
import torch
from lazy import LazyDevice, Threads
from test_generation import forward_from, random_texts
from test_offload import on
from test_peers import EagerDevice, no_last_checkpoint, train  # noqa: F401  a fixture
from test_peers import T as RANKS_T
from test_train import Turing, make_folder, samples_of

LARGEST = 448.0

# maxT, V, L, heads, C: each has weights of several shapes, and rows that are no multiples of a tile.
CONFIGS = [
    GPT2Config(32, 101, 2, 2, 48), Llama3Config(32, 101, 2, 4, 2, 64, 80, tied=False),
    PythiaConfig(32, 101, 2, 2, 32, tied_norm=True), Qwen3Config(32, 101, 2, 4, 2, 48, 96, head_size=16),
]  # fmt: skip
B, T = 2, 24

# Whole models take long. In the ordinary run one trains in every way, and none in warps of 32 on the CPU.
ONE_CONFIG = [pytest.param(each, marks=[] if each is CONFIGS[1] else pytest.mark.long) for each in CONFIGS]
needs_gpu = pytest.mark.skipif("cuda" not in DEVICES, reason="no GPU here")
EXACT_DEVICES = [each for each in DEVICES if each != "cpu"]  # on "cpu" g++ may round the same formula differently
FEW_DEVICES = [pytest.param(each, marks=pytest.mark.long if "warp32" in each else []) for each in DEVICES]


@pytest.fixture(params=DEVICES)
def dev(request, monkeypatch):
    """The device in fp8, for which all weights are large enough."""
    monkeypatch.setenv("LLMC_CPU_WARP", "32" if "warp32" in request.param else "1")
    device.use(request.param.partition("-")[0])
    if device.use_precision("bf16") and device.kind == "cuda" and device.current.device.compute_capability < 89:
        pytest.skip("this GPU has no fp8")
    device.use_precision("fp8")
    monkeypatch.setattr(fp8, "LEAST_GAIN", 0)
    yield device
    device.synchronize()


def scale_of(largest: float) -> np.float32:
    """The least power of two, from 2^-126 on, with which `largest` is at most 448."""
    return np.float32(2.0 ** max(-126, np.ceil(np.log2(max(np.float64(largest), 1e-300) / LARGEST))))


def codes_by_pytorch(values: np.ndarray, scale: float) -> np.ndarray:
    """values / scale in e4m3, clipped, as PyTorch rounds."""
    scaled = torch.from_numpy(values / np.float32(scale)).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def test_the_numbers_of_codes_are_pytorchs():
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(DECODED, theirs, equal_nan=True)


@pytest.mark.parametrize("N, C", [(16, 16), (64, 128), (80, 144), (208, 272)])
@pytest.mark.parametrize("spread", [0.0, 5.0])
def test_codes_are_the_nearest_and_the_largest_number_has_the_largest_exponent(dev, rng, N, C, spread):
    values = to_bf16(normal(rng, N, C) * np.exp(spread * normal(rng, N, C)))
    wide = from_bf16(values)
    expected_scale = scale_of(np.abs(wide).max())
    with guarded(dev) as memory:
        inp, scale = memory.read(wide), memory.write((1,), np.float32)
        codes, codes_T = memory.write((N, C), np.uint8), memory.write((C, N), np.uint8)
        encode(codes, codes_T, scale, inp, N, C)
        known = memory.write((C, N), np.uint8)
        encode(None, known, scale, inp, N, C, known=True)
    assert dev.to_host(scale)[0] == expected_scale
    expected = codes_by_pytorch(wide, expected_scale)
    assert 0x70 <= (expected & 0x7F).max() <= 0x7E  # between 224 and 448
    assert np.array_equal(dev.to_host(codes), expected)
    assert np.array_equal(dev.to_host(codes_T), expected.T) and np.array_equal(dev.to_host(known), expected.T)


@pytest.mark.parametrize("guess", [2.0, 0.5, 3.0, 0.0, -1.0, np.nan, np.inf, 1.0])
def test_codes_and_scale_do_not_depend_on_what_the_scale_was_before(dev, rng, guess):
    """guess: of the right scale."""
    values = to_bf16(normal(rng, 48, 80))
    wide = from_bf16(values)
    expected = scale_of(np.abs(wide).max())
    with guarded(dev) as memory:
        inp, scale = memory.read(wide), memory.update(np.float32([guess * expected]), np.float32)
        codes, codes_T = memory.write((48, 80), np.uint8), memory.write((80, 48), np.uint8)
        encode(codes, codes_T, scale, inp, 48, 80)
    assert_codes(dev, Coded(codes, codes_T, scale), wide, expected)


def test_codes_are_not_made_again_if_the_scale_was_right(dev, rng):
    """The second launch does not touch them."""
    inp, codes, scale = dev.asarray(to_bf16(normal(rng, 48, 80))), dev.empty((48, 80), np.uint8), dev.zeros((1,))
    found = []

    def observer(name, arguments, work) -> None:
        if name == "encode_kernel":
            found.append(dev.to_host(codes).any())
            dev.fill_zero(codes)
        work()

    for _ in range(2):
        with device.observe(observer):
            encode(codes, None, scale, inp, 48, 80)
        found.append(dev.to_host(codes).any())
    assert found[1:] == [True, True, True, True, False]


@pytest.mark.parametrize("dev", EXACT_DEVICES, indirect=True)
@pytest.mark.parametrize("N, C", [(16, 16), (80, 144), (208, 1104)])
@pytest.mark.parametrize("guess", [2.0, 1.0, np.nan])
@pytest.mark.parametrize("again", [True, False])
def test_swiglu_makes_the_codes_of_the_numbers_that_it_would_store(dev, rng, N, C, guess, again):
    """guess: of the scale. again: whether the output, made once more, is coded, too, by a scale that clips some."""
    inp, dout = (dev.asarray(to_bf16(normal(rng, *shape))) for shape in ((N, 2 * C), (N, C)))
    out, dinp, out_again = dev.empty((N, C), BF16), dev.empty((N, 2 * C), BF16), dev.empty((N, C), BF16)
    swiglu_forward(out, inp, N, C)
    swiglu_backward(dinp, out_again, dout, inp, N, C)
    wide, dwide = (from_bf16(dev.to_host(one)) for one in (out, dinp))
    scale, dscale = (scale_of(np.abs(one).max()) for one in (wide, dwide))
    with guarded(dev) as memory:
        guesses = (memory.update(np.float32([guess * one]), np.float32) for one in (scale, dscale))
        made = Coded(memory.write((N, C), np.uint8), None, next(guesses))
        dmade = Coded(memory.write((N, 2 * C), np.uint8), memory.write((2 * C, N), np.uint8), next(guesses))
        known = memory.read(np.float32([scale / 4]), np.float32)
        of_out = Coded(None, memory.write((C, N), np.uint8), known) if again else memory.write((N, C))
        swiglu_forward(made, inp, N, C)
        swiglu_backward(dmade, of_out, dout, inp, N, C)
    assert_codes(dev, made, wide, scale)
    assert_codes(dev, dmade, dwide, dscale)
    if again:
        assert_codes(dev, of_out, wide, scale / 4)
    else:
        assert np.array_equal(dev.to_host(of_out), dev.to_host(out))


def assert_codes(dev, found: Coded, values: np.ndarray, scale: np.float32) -> None:
    """Those layouts that are there hold the codes of the values by this scale."""
    expected = codes_by_pytorch(values, scale)
    assert dev.to_host(found.scale)[0] == scale and not (found.codes is None and found.codes_T is None)
    assert found.codes is None or np.array_equal(dev.to_host(found.codes), expected)
    assert found.codes_T is None or np.array_equal(dev.to_host(found.codes_T), expected.T)


each_form = pytest.mark.parametrize("erf", [False, True], ids=["tanh", "erf"])


@pytest.mark.parametrize("dev", EXACT_DEVICES, indirect=True)
@pytest.mark.parametrize("N, C, rows", [(16, 16, 64), (80, 144, 64), (208, 1104, 128)])
@pytest.mark.parametrize("guess, again, biased", [(2.0, True, True), (1.0, False, True), (np.nan, True, False)])
@each_form
def test_gelu_makes_the_codes_of_the_numbers_that_it_would_store(
    dev, monkeypatch, rng, N, C, rows, guess, again, biased, erf
):  # fmt: skip
    """rows: of a chunk. guess, again: as above."""
    monkeypatch.setattr(gelu, "rows_per_chunk", lambda N, multiple: rows)
    inp, dinp = (dev.asarray(to_bf16(normal(rng, N, C))) for _ in range(2))
    bias, before = dev.asarray(to_bf16(normal(rng, C))) if biased else None, normal(rng, C)
    kept, out, out_again = dev.to_host(dinp).copy(), dev.empty((N, C), BF16), dev.empty((N, C), BF16)
    dbias = dev.asarray(before)
    gelu_forward(out, inp, bias, N, C, erf)
    gelu_backward(dinp, dbias, out_again, dinp, inp, bias, N, C, erf)
    wide, dwide = (from_bf16(dev.to_host(one)) for one in (out, dinp))
    scale, dscale = (scale_of(np.abs(one).max()) for one in (wide, dwide))
    with guarded(dev) as memory:
        guesses = (memory.update(np.float32([guess * one]), np.float32) for one in (scale, dscale))
        made = Coded(memory.write((N, C), np.uint8), None, next(guesses))
        dmade = Coded(memory.write((N, C), np.uint8), memory.write((C, N), np.uint8), next(guesses))
        known = memory.read(np.float32([scale / 4]), np.float32)
        of_out = Coded(None, memory.write((C, N), np.uint8), known) if again else memory.write((N, C))
        added = memory.update(before, np.float32)
        gelu_forward(made, inp, bias, N, C, erf)
        gelu_backward(dmade, added, of_out, memory.read(from_bf16(kept)), inp, bias, N, C, erf)
    assert_codes(dev, made, wide, scale)
    assert_codes(dev, dmade, dwide, dscale)
    if again:
        assert_codes(dev, of_out, wide, scale / 4)
    else:
        assert np.array_equal(dev.to_host(of_out), dev.to_host(out_again))
    # The sums are of the same fp32 numbers, in another order. dwide has them as bf16.
    allowed = N * 2.0**-24 * (np.abs(before) + np.abs(dwide).sum(0))
    assert (np.abs(dev.to_host(added) - dev.to_host(dbias)) <= allowed).all()
    assert (np.abs(dev.to_host(added) - before - dwide.sum(0, np.float64)) <= 2.0**-8 * np.abs(dwide).sum(0)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@each_form
def test_gelu_shows_what_is_not_finite_in_all_codes_and_in_its_columns_sum(dev, rng, value, erf):
    N, C = 80, 144
    wide, bias = normal(rng, N, C), dev.zeros((C,), BF16)
    fine = dev.asarray(to_bf16(wide))
    wide[70, 7] = value
    spoiled = dev.asarray(to_bf16(wide))
    for inp, dout in (fine, spoiled), (spoiled, fine):
        made, of_out, dmade = (room_for_codes(N, C) for _ in range(3))
        dbias = dev.zeros((C,))
        gelu_forward(made, inp, bias, N, C, erf)
        gelu_backward(dmade, dbias, of_out, dout, inp, bias, N, C, erf)
        for found, spoilt in (made, inp is spoiled), (dmade, True):
            assert np.isnan(dev.to_host(found.scale)[0]) == spoilt
            assert (dev.to_host(found.codes) == 0x7F).all() == spoilt
        assert np.array_equal(np.isfinite(dev.to_host(dbias)), np.arange(C) != 7)


def run_norm(name: str, fused: bool, out, again, residual, stats, inp, params, N: int, C: int) -> None:
    """Forward, with the residual connection in front if `fused`, to out, residual and stats. Then out once more, to
    `again`. inp: two inputs, of which only fused takes the second. params: weight and bias."""
    x, (weight, _), eps = residual if fused else inp[0], params, 1e-5
    if name == "rmsnorm":
        if fused:
            fused_residual_rmsnorm_forward(residual, out, stats[1], *inp, weight, eps, 1, N, C)
        else:
            rmsnorm_forward(out, stats[1], inp[0], weight, eps, 1, N, C)
        rmsnorm_recompute(again, x, weight, stats[1], 1, N, C)
    else:
        if fused:
            fused_residual_forward(residual, out, stats, *inp, params, 1, N, C)
        else:
            layernorm_forward(out, stats, inp[0], params, 1, N, C)
        layernorm_recompute(again, x, params, stats, 1, N, C)


@pytest.mark.parametrize("dev", EXACT_DEVICES, indirect=True)
@pytest.mark.parametrize("N, C", [(16, 16), (80, 144), (208, 1104)])
@pytest.mark.parametrize("guess", [2.0, 1.0, np.nan])
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("fused, start", [(True, 0), (False, 1)])
def test_norms_make_the_codes_of_the_numbers_that_they_would_store(dev, rng, N, C, guess, name, fused, start):
    """guess: of the scale. start: that of the parameters, which need not lie at a multiple of 16 bytes. The output
    is made once more by a scale that clips some."""
    inp = [dev.asarray(to_bf16(normal(rng, N, C))) for _ in range(2)]
    params = [dev.asarray(to_bf16(normal(rng, start + C)))[start:] for _ in range(2)]
    out, again, residual = (dev.zeros((N, C), BF16) for _ in range(3))
    stats = [dev.zeros((N,)) for _ in range(2)]
    run_norm(name, fused, out, again, residual, stats, inp, params, N, C)
    wide = from_bf16(dev.to_host(out))
    scale = scale_of(np.abs(wide).max())
    with guarded(dev) as memory:
        made = Coded(memory.write((N, C), np.uint8), None, memory.update(np.float32([guess * scale]), np.float32))
        known = memory.read(np.float32([scale / 4]), np.float32)
        made_again = Coded(None, memory.write((C, N), np.uint8), known)
        stream = memory.write((N, C)) if fused else None
        kept = [memory.write((N,), np.float32) if name == "layernorm" else None, memory.write((N,), np.float32)]
        run_norm(name, fused, made, made_again, stream, kept, inp, params, N, C)
    assert_codes(dev, made, wide, scale)
    assert_codes(dev, made_again, wide, scale / 4)
    assert np.array_equal(dev.to_host(again), dev.to_host(out))
    for found, expected in zip([stream, *kept], [residual, *stats], strict=True):
        assert found is None or np.array_equal(dev.to_host(found), dev.to_host(expected))


@pytest.mark.parametrize("dev", EXACT_DEVICES, indirect=True)
@pytest.mark.parametrize("B, T, NH, NKV, HS, start", [
    (1, 16, 2, 1, 16, 0), (2, 56, 4, 2, 48, 1), (5, 16, 3, 3, 128, 0), (3, 352, 8, 4, 32, 0), (1, 32, 2, 1, 20, 0),
    (1, 16, 1, 1, 144, 0),
])  # fmt: skip
@pytest.mark.parametrize("guess", [2.0, 1.0, np.nan])
def test_qk_norm_makes_the_codes_of_the_numbers_that_it_would_store(dev, rng, B, T, NH, NKV, HS, start, guess):
    """guess: of the scale. start: that of the weights."""
    N, C = B * T, (NH + 2 * NKV) * HS
    inp, dout = (to_bf16(normal(rng, N, C)) for _ in range(2))
    qweight, kweight = (dev.asarray(to_bf16(normal(rng, start + HS)))[start:] for _ in range(2))
    heads = from_bf16(inp).reshape(N, -1, HS)[:, : NH + NKV]
    kept = dev.asarray(inp), qweight, kweight, dev.asarray((1 / np.sqrt((heads**2).mean(-1))).astype(np.float32))
    table, before = dev.asarray(rope_table(T, HS, 1e4)), normal(rng, 2, HS)
    dinp, sums = dev.asarray(dout), [dev.asarray(each) for each in before]
    qk_norm_backward(dinp, *sums, dinp, *kept, table, B, T, NH, NKV, HS)
    wide = from_bf16(dev.to_host(dinp))
    scale = scale_of(np.abs(wide).max())
    with guarded(dev) as memory:
        old = memory.update(np.float32([guess * scale]), np.float32)
        made = Coded(memory.write((N, C), np.uint8), memory.write((C, N), np.uint8), old)
        added = [memory.update(each, np.float32) for each in before]
        qk_norm_backward(made, *added, memory.update(from_bf16(dout)), *kept, table, B, T, NH, NKV, HS)
    assert_codes(dev, made, wide, scale)
    for ours, plain in zip(added, sums, strict=True):  # the sums are of the same numbers, in another order
        assert_close("dweight", ours, dev.to_host(plain), KERNEL_FP32)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_norm_of_what_is_not_finite_has_no_codes_but_nan(dev, rng, name, fused, value):
    N, C = 32, 48
    inp = normal(rng, 2, N, C)
    inp[0, 5, 7] = value
    inp, params = [dev.asarray(to_bf16(each)) for each in inp], [dev.asarray(to_bf16(normal(rng, C))) for _ in range(2)]
    made = Coded(dev.empty((N, C), np.uint8), dev.empty((C, N), np.uint8), dev.asarray(np.ones(1, np.float32)))
    run_norm(name, fused, made, made, dev.empty((N, C), BF16), dev.empty((2, N)), inp, params, N, C)
    assert np.isnan(dev.to_host(made.scale)).all()
    assert (dev.to_host(made.codes) == 0x7F).all() and (dev.to_host(made.codes_T) == 0x7F).all()


@pytest.mark.parametrize("exponent", [-126, -9, 0, 3, 100, 121])
def test_every_number_of_bf16_has_the_code_of_the_rule(dev, exponent):
    """A scale is a power of two, so no other numbers are ever rounded."""
    values = np.arange(65536, dtype=np.uint16)
    scale = np.float32(2.0**exponent)
    codes = dev.empty((256, 256), np.uint8)
    encode(codes, None, dev.asarray(scale.reshape(1)), dev.asarray(values.reshape(256, 256)), 256, 256, known=True)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = codes_by_pytorch(from_bf16(values), scale)
    found, nan = dev.to_host(codes).reshape(-1), np.isnan(from_bf16(values))
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
def test_extremes_are_coded_or_shown(dev, rng, what):
    bits = extreme(normal(rng, 32, 48), what)
    codes, codes_T, known = (dev.empty(shape, np.uint8) for shape in ((32, 48), (48, 32), (48, 32)))
    scale, inp, wide = dev.empty((1,)), dev.asarray(bits), from_bf16(bits)
    encode(codes, codes_T, scale, inp, 32, 48)
    encode(None, known, scale, inp, 32, 48, known=True)
    found = dev.to_host(codes)
    if what in ("NaN", "infinity", "-infinity"):
        assert np.isnan(dev.to_host(scale)).all() and (found == 0x7F).all()
    else:
        expected = scale_of(np.abs(wide).max())
        assert dev.to_host(scale)[0] == expected and np.array_equal(found, codes_by_pytorch(wide, expected))
    assert np.array_equal(dev.to_host(codes_T), found.T) and np.array_equal(dev.to_host(known), found.T)


FACTORS = {"inp": ("out", "dweight"), "weight": ("out", "dinp"), "dout": ("dinp", "dweight")}  # and their products


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("what", ["zeros", "a row of zeros", "NaN", "infinity", "-infinity", "outlier"])
def test_the_products_of_extremes_are_those_of_their_codes_and_hide_nothing(dev, rng, factor, what):
    """What is not finite spoils all of both products of its factor, but not the third."""
    N, C, OC = 32, 48, 64
    given = {name: to_bf16(normal(rng, *shape)) for name, shape in
             (("inp", (N, C)), ("weight", (OC, C)), ("dout", (N, OC)))}  # fmt: skip
    given[factor], bias = extreme(from_bf16(given[factor]), what), to_bf16(normal(rng, OC))
    inp, array, dout = map(dev.asarray, given.values())
    codes, transposed, *scales = (dev.empty(*each) for each in
        (((OC, C), np.uint8), ((C, OC), np.uint8), ((1,),), ((1,),), ((1,),)))  # fmt: skip
    weight, dweight = Weight(array, codes, transposed, *scales), Gradient(dev.empty((OC, C)), *scales[1:])
    out, dinp = dev.empty((N, OC), BF16), dev.empty((N, C), BF16)
    matmul.matmul_forward(out, inp, weight, dev.asarray(bias), 1, N, C, OC)
    matmul.matmul_backward_inp(dinp, dout, weight, 1, N, C, OC)
    matmul.matmul_backward_weight(dweight, dout, inp, 1, N, C, OC, accumulate=False)
    found = {"out": device.to_floats(out) - from_bf16(bias), "dinp": device.to_floats(dinp),
             "dweight": dev.to_host(dweight.array)}  # fmt: skip

    def decoded(bits: np.ndarray) -> np.ndarray:
        wide = from_bf16(bits)
        divisor = scale_of(np.abs(wide).max())
        return from_e4m3(codes_by_pytorch(wide, divisor)).astype(np.float64) * divisor

    finite = {name: np.isfinite(from_bf16(bits)).all() for name, bits in given.items()}
    for name, one in found.items():
        a, b = (each for each in FACTORS if name in FACTORS[each])
        if not (finite[a] and finite[b]):
            assert np.isnan(one).all()
            continue
        a, b = decoded(given[a]), decoded(given[b])
        a, b = {"out": (a, b.T), "dinp": (b, a), "dweight": (b.T, a)}[name]
        allowed = TOLERANCE[dev.kind] * (np.abs(a) @ np.abs(b)) + 2.0**-7 * (np.abs(a @ b) + (name == "out"))
        assert (np.abs(one - a @ b) <= allowed).all()
        assert what != "zeros" or name not in FACTORS[factor] or not one.any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["attprojw", "fcprojw"])
def test_a_step_with_a_weight_that_is_not_finite_says_so_and_changes_nothing(large_weights, name, value):
    config = CONFIGS[1]
    device.use_precision("fp8")
    flat = flat_parameters(config)
    getattr(name_parameters(flat, config), name)[1, 5, 7] = value
    training = build(device, config, B, T, "softmax", flat)
    ((inputs, targets),) = make_batches(config, 1, B, T)
    before, _, _ = state_of(training)
    _, loss = forward_backward(device, training, inputs, targets, 1 / (B * T))
    adamw_update(training.model, training.adamw, training.exchange, 1e-2, 1)
    after, m, v = state_of(training)
    assert np.isnan(loss) and np.isnan(training.adamw.norm[0])
    assert np.array_equal(before, after, equal_nan=True) and not m.any() and not v.any()


def coded(dev, rng, N: int, C: int):
    """Random codes without NaN, and a scale, on the device; and the matrix, float64."""
    codes = rng.integers(0, 256, (N, C)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale = np.float32(2.0 ** rng.integers(-12, 0))
    return dev.asarray(codes), dev.asarray(scale.reshape(1)), from_e4m3(codes).astype(np.float64) * scale


# Of the sum of absolute values. fp32 sums have 24 bits. Hopper's keep some 14: of the 32 terms that it adds at a time,
# each loses up to 2^-13 of the largest. The largest error on an H100 was 2^-10.2. A result in bf16 has 8 bits. If the
# product is added to such a c, cublasLt first rounds the product to bf16.
TOLERANCE = {"cpu": 2.0**-20, "cuda": 2.0**-9}


@pytest.mark.parametrize("m, n, k", [(16, 16, 16), (48, 80, 112), (256, 128, 512), (80, 272, 4096)])
@pytest.mark.parametrize("result", ["bf16", "bf16 and bias", "bf16 +=", "fp32", "fp32 +="])
def test_products_are_within_the_bound_of_their_sums(dev, rng, m, n, k, result):
    (a, scale_a, wide_a), (b, scale_b, wide_b) = coded(dev, rng, m, k), coded(dev, rng, n, k)
    before, bias = to_bf16(normal(rng, m, n)), to_bf16(normal(rng, n)) if "bias" in result else None
    start = before if "bf16" in result else from_bf16(before)
    c, beta = dev.asarray(start), float("+=" in result)
    of_bias = None if bias is None else dev.asarray(bias)
    dev.gemm(c, a, b, m, n, k, trans_b=True, beta=beta, bias=of_bias, scale_a=scale_a, scale_b=scale_b)
    found = dev.to_host(c)
    found = from_bf16(found) if found.dtype == BF16 else found
    product = wide_a @ wide_b.T
    expected = product + beta * from_bf16(before) + (0 if bias is None else from_bf16(bias))
    allowed = TOLERANCE[dev.kind] * (np.abs(wide_a) @ np.abs(wide_b.T) + np.abs(expected))
    allowed += 2.0**-8 * (np.abs(expected) + beta * np.abs(product)) if "bf16" in result else 0
    assert (np.abs(found - expected) <= allowed).all(), np.max(np.abs(found - expected) / allowed)


@pytest.mark.parametrize("dev", [pytest.param("cuda", marks=needs_gpu)], indirect=True)
@pytest.mark.parametrize("m, n, k", [(1024, 2048, 512), (2048, 1024, 8192), (4096, 1536, 1536)])
@pytest.mark.parametrize("result", ["bf16", "bf16 and bias", "fp32"])
def test_whichever_algorithm_is_the_fastest_the_bits_are_the_same(dev, rng, m, n, k, result):
    c = dev.empty((m, n), BF16 if "bf16" in result else np.float32)
    plans = device.current.device.blas.lt.plans
    plans.clear()

    def encoded(rows: int) -> tuple:
        codes, scale = dev.empty((rows, k), np.uint8), dev.empty((1,))
        encode(codes, None, scale, dev.asarray(to_bf16(normal(rng, rows, k))), rows, k)
        return codes, scale

    def operands() -> dict:
        (a, scale_a), (b, scale_b) = encoded(m), encoded(n)
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
    for beta in 0.0, 1.0:
        dev.gemm(c, ones, ones, 16, 16, 16, trans_b=True, beta=beta, scale_a=scale_a, scale_b=scale_b)
    assert (dev.to_host(c) == found).all()


def gradients(precision: str, config, attention: str = "softmax", **options) -> tuple[np.ndarray, float]:
    """The gradients of a batch, and its loss."""
    device.use_precision(precision)
    training = build(device, config, B, T, attention, flat_parameters(config), **options)
    ((inputs, targets),) = make_batches(config, 1, B, T)
    _, loss = forward_backward(device, training, inputs, targets, 1 / (B * T))
    return device.to_host(training.model.grads_memory), loss


def rounded(values, largest: float, dtype: torch.dtype) -> torch.Tensor:
    """A matrix rounded to a type of one byte and back, with the scale of torchao's tensorwise recipe."""
    wide = torch.from_numpy(from_bf16(np.asarray(values)).reshape(values.shape))
    scale = largest / wide.abs().max().clamp(min=1e-12)
    return (wide * scale).clamp(-largest, largest).to(dtype).float() / scale


class Torchao:
    """torchao's tensorwise recipe: e4m3 for inputs and weights, e5m2 for gradients, and scales that divide the largest
    number exactly. Sums are fp32."""

    def __init__(self):
        self.dout = None

    def forward(self, out, inp, weight: Weight, bias, N: int, C: int, OC: int) -> None:
        inp, weight = (rounded(x, 448, torch.float8_e4m3fn) for x in (inp.reshape(N, C), weight.array))
        product = (inp @ weight.T).numpy() + (0 if bias is None else from_bf16(bias))
        out.reshape(N, OC)[:] = to_bf16(product)

    def backward_inp(self, dinp, dout, weight: Weight, N: int, C: int, OC: int, beta: float) -> None:
        self.dout = rounded(dout.reshape(N, OC), 57344, torch.float8_e5m2)
        product = (self.dout @ rounded(weight.array, 448, torch.float8_e4m3fn)).numpy()
        dinp.reshape(N, C)[:] = to_bf16(product + (from_bf16(dinp).reshape(N, C) if beta else 0))

    def backward_weight(self, dweight: Gradient, dout, inp, N: int, C: int, OC: int, beta: float) -> None:
        product = (self.dout.T @ rounded(inp.reshape(N, C), 448, torch.float8_e4m3fn)).numpy()
        dweight.array[:] = product + (dweight.array if beta else 0)


@pytest.mark.parametrize("dev", FEW_DEVICES, indirect=True)
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_models_gradients_are_as_good_as_by_the_recipe_of_torchao(dev, monkeypatch, config):
    exact, loss = gradients("fp32", config)
    found, of_codes = gradients("fp8", config)
    recomputed, _ = gradients("fp8", config, recompute=True)
    assert np.array_equal(found, recomputed)
    assert abs(of_codes - loss) < 0.01 * loss

    def error(of: np.ndarray) -> float:
        return float(np.linalg.norm(of - exact) / np.linalg.norm(exact))

    monkeypatch.setattr(activations, "coded", lambda array, dweight, scale: array)
    monkeypatch.setattr(activations, "apart", lambda table, coded: table)
    encoded, _ = gradients("fp8", config)
    # For the CPU see EXACT_DEVICES. Elsewhere only the order in which GELU's bias' gradient is added up differs.
    allowed = 1e-3 if dev.kind == "cpu" else 1e-6
    assert np.linalg.norm(found - encoded) <= allowed * np.linalg.norm(found)
    in_bf16, _ = gradients("bf16", config)
    assert error(found) > 2 * error(in_bf16)  # so codes were multiplied
    if dev.kind == "cpu":  # where the recipe can stand in for the products
        recipe = Torchao()
        monkeypatch.setattr(matmul, "fp8_forward", recipe.forward)
        monkeypatch.setattr(matmul, "fp8_backward_inp", recipe.backward_inp)
        monkeypatch.setattr(matmul, "fp8_backward_weight", recipe.backward_weight)
        theirs, _ = gradients("fp8", config)
        assert error(found) < 1.2 * error(theirs), (error(found), error(theirs))


@pytest.mark.parametrize("config", [*CONFIGS, replace(CONFIGS[2], tied_norm=False, parallel=False)], ids=name_of)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_weights_gradient_is_the_product_of_its_factors_codes(large_weights, monkeypatch, config, recompute):
    """No script has encoded another gradient of as many columns meanwhile. And the codes of the input that backward has
    recomputed are those of forward. With dropout, if the model has it."""
    device.use_precision("fp8")
    script, seen, multiply = sys.modules[kind_of(config).__module__], {}, matmul.matmul_backward_weight

    def forward(out, inp, weight: Weight, bias, N: int, C: int, OC: int) -> None:
        fp8.fp8_forward(out, inp, weight, bias, N, C, OC)
        if isinstance(inp, Coded):
            codes = inp.codes
        else:
            codes, wide = device.scratch("fp8 input", (N, C), np.uint8), from_bf16(inp.reshape(N, C))
            assert weight.inp_scale[0] == scale_of(np.abs(wide).max())
            assert np.array_equal(codes, codes_by_pytorch(wide, weight.inp_scale))
        seen[device.address(weight.inp_scale)] = codes.copy()

    def checked(dweight, dout, inp, B: int, T: int, C: int, OC: int, accumulate: bool) -> None:
        multiply(dweight, dout, inp, B, T, C, OC, accumulate)
        inp_T = inp.codes_T if isinstance(inp, Coded) else device.scratch("fp8 input_T", (C, B * T), np.uint8)
        if not isinstance(dout, Coded):
            dout_T, wide = device.scratch(f"fp8 dout_T {OC}", (OC, B * T), np.uint8), from_bf16(dout.reshape(B * T, OC))
            assert dweight.dout_scale[0] == scale_of(np.abs(wide).max())
            assert np.array_equal(dout_T, codes_by_pytorch(wide, dweight.dout_scale).T)
        codes = seen.pop(device.address(dweight.inp_scale))
        assert np.abs(inp_T.T.astype(int) - codes).max() <= 1 and (inp_T.T != codes).mean() < 0.01  # EXACT_DEVICES
        coded.append((isinstance(inp, Coded), isinstance(dout, Coded)))

    coded = []
    monkeypatch.setattr(matmul, "fp8_forward", forward)
    monkeypatch.setattr(script, "matmul_backward_weight", checked)
    gradients("fp8", config, recompute=recompute, dropout=(0.1, 3) if kind_of(config).DROPS else None)
    table = kind_of(config).ACTIVATIONS + kind_of(config).GRADIENTS
    made, dmade = (readers(table, prefix).values() for prefix in (FOR, FROM))
    of_layer = [(name in made, name in dmade) for name in ("fcprojw", "fcw", "attprojw", "qkvw")]
    assert not seen and coded == config.num_layers * of_layer


@pytest.mark.parametrize("dev", FEW_DEVICES, indirect=True)
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_steps_are_repeated_to_the_bit(dev, config):
    found = []
    for recorded, offloaded in (True, False), (False, False), (True, True):
        device.use_recording(recorded)
        training = build(dev, config, B, T, "softmax", flat_parameters(config), offload=offloaded)
        batches = Batches(training.batch, training.acts.losses, GivenBatches(make_batches(config, 6, B, T)), 2)
        train_step = training_step(training, batches)
        for step in range(3):
            train_step(step, 1e-2)
        training.exchange.gather_parameters()  # offloaded, they still lack an update
        device.synchronize()
        found.append(dev.to_host(training.model.params_memory).copy())
    device.use_recording(True)
    assert all(np.array_equal(found[0], each) for each in found[1:])
    assert np.isfinite(from_bf16(found[0])).all()


def test_a_weight_is_encoded_once_a_step_and_in_each_other_pass(dev):
    """In the first batch, though backward runs its layer again. A pass between two steps, as in validation, sees the
    weights that the last step has made."""
    config = CONFIGS[1]
    training = build(dev, config, B, T, "softmax", flat_parameters(config), recompute=True)
    model, (p, *_) = training.model, training.model.params.layer
    batches = Batches(training.batch, training.acts.losses, GivenBatches(make_batches(config, 6, B, T)), 2)
    device.use_recording(False)
    train_step = training_step(training, batches)
    device.use_recording(True)
    for step in range(3):
        before, launches = dev.to_host(p.fcw.array).copy(), []

        def observer(name, arguments, work, launches=launches) -> None:
            launches.append(dev.address(arguments["inp"]) if name == "encode_kernel" else 0)
            work()

        with device.observe(observer):
            train_step(step, 1e-2)
        assert launches.count(dev.address(p.fcw.array)) == 2  # by the scale of before, and by its own
        scale = dev.to_host(p.fcw.scale)[0]
        assert np.array_equal(dev.to_host(p.fcw.codes), codes_by_pytorch(from_bf16(before), scale))
        model.forward(training.acts, training.batch)
        after, scale = from_bf16(dev.to_host(p.fcw.array)), dev.to_host(p.fcw.scale)[0]
        assert np.array_equal(dev.to_host(p.fcw.codes), codes_by_pytorch(after, scale))
        assert not np.array_equal(after, from_bf16(before))
    plain = training.model.without_codes()
    plain.weights_are_new()  # it has none to encode
    assert plain.params.layer[0].fcw.shape == p.fcw.array.shape and not plain.coded() and training.model.coded()


@pytest.fixture
def large_weights(monkeypatch):
    """All weights are large enough, and pieces and buckets are smaller than they."""
    device.use("cpu")
    monkeypatch.setattr(fp8, "LEAST_GAIN", 0)
    monkeypatch.setattr(offload, "PIECE", 4800)
    monkeypatch.setattr(exchange, "SMALLEST_BUCKET", 500)


def drawn(rng, config, count: int) -> np.ndarray:
    """The batches of three steps, for test_peers.train."""
    return rng.integers(0, config.vocab_size, (3, count, 2, B, RANKS_T), dtype=np.int32)


@pytest.mark.parametrize("kind, flags", [
    (device.CpuDevice, {"recompute": True}), (device.CpuDevice, {"offload": True}), (LazyDevice, {}),
    (EagerDevice, {}), (LazyDevice, {"recompute": True, "offload": True}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("config", ONE_CONFIG, ids=name_of)
def test_a_run_has_the_same_bits_recomputed_offloaded_or_out_of_order(large_weights, config, kind, flags, rng):
    """Three steps of two batches. Two of the steps follow the plan."""
    batches = drawn(rng, config, 2)
    want = train(config, B, batches, 0.1, precision="fp8")
    assert np.isfinite(want.view(np.float32)).all()
    assert not np.array_equal(want, train(config, B, batches, 0.1, precision="bf16"))
    assert np.array_equal(on(kind, config, B, batches, 0.1, precision="fp8", **flags), want)


def losses_between_steps(kind: type[device.CpuDevice], config) -> np.ndarray:
    """The losses of a batch in validations: two before each of four steps of two batches."""
    device.current.device = kind()
    device.use_precision("fp8")
    training = build(device, config, B, T, "softmax", flat_parameters(config), recompute=True)
    settings, found = SimpleNamespace(B=B, T=T, val_batches=1), []
    batches = Batches(training.batch, training.acts.losses, GivenBatches(make_batches(config, 8, B, T)), 2)
    train_step, one = training_step(training, batches), make_batches(config, 1, B, T)
    validation = Validation(training, settings, GivenBatches(cycle(one)), None, None)
    for step in range(4):
        for _ in range(2):
            found.append(validation.batches.run(validation.forward_loss).copy())
        train_step(step, 1e-2)
    device.synchronize()
    device.use("cpu")
    return np.array(found)


@pytest.mark.parametrize("kind", [LazyDevice, EagerDevice])
def test_a_validation_that_is_replayed_sees_the_weights_of_the_last_step(large_weights, kind):
    want = losses_between_steps(device.CpuDevice, CONFIGS[1])
    assert np.array_equal(want[::2], want[1::2]) and len({losses.tobytes() for losses in want}) == 4
    assert np.array_equal(losses_between_steps(kind, CONFIGS[1]), want)


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("flags", [
    {}, {"sharded": True}, {"sharded": True, "offload": True}, {"bitwise": True},
], ids=str)  # fmt: skip
def test_all_ranks_end_with_the_same_bits_and_a_bitwise_run_with_those_of_one(
    large_weights, flags, peers, monkeypatch, rng
):  # fmt: skip
    """Each rank encodes all of its parameters, after those of other ranks have arrived."""
    config = CONFIGS[1]
    batches = drawn(rng, config, 2)
    one, start = (train(config, B, these, 0.1, precision="fp8", bitwise="bitwise" in flags)
                  for these in (batches, batches[:0]))  # fmt: skip
    work = lambda rank: train(config, B, batches, 0.1, precision="fp8", **flags)  # noqa: E731
    found = Threads(2, monkeypatch, peers).run(work, LazyDevice)
    assert np.array_equal(found[0], found[1])
    if "bitwise" in flags:
        assert np.array_equal(found[0], one)
    else:
        found, one, start = (bits.view(np.float32) for bits in (found[0], one, start))
        assert np.linalg.norm(found - one) < 0.1 * np.linalg.norm(one - start)


@pytest.mark.parametrize("B, C, OC", [
    (1, 16, 16), (1, 112, 50), (1, 4096, 3), (1, 48, matmul.MANY_OUTPUTS + 3), (3, 80, 272), (33, 128, 16),
])  # fmt: skip
def test_a_product_of_a_weight_that_has_codes_alone_takes_their_numbers_and_the_input_as_it_is(dev, rng, B, C, OC):
    codes, scale, wide = coded(dev, rng, OC, C)
    inp, bias = normal(rng, B, C), normal(rng, OC)
    for b in bias, None:
        with guarded(dev) as memory:
            out, ours_bias = memory.write((B, OC)), None if b is None else memory.read(b)
            matmul.matmul_forward(out, memory.read(inp), Codes(codes, scale), ours_bias, B, 1, C, OC)
        product, added = inp.astype(np.float64) @ wide.T, 0.0 if b is None else b
        # Some of cuBLAS's algorithms round the product before they add the bias.
        allowed = 2.0**-20 * (np.abs(inp) @ np.abs(wide.T)) + 2.0**-8 * (np.abs(product + added) + np.abs(product))
        assert (np.abs(device.to_floats(out) - product - added) <= allowed).all()


@pytest.mark.parametrize("dev", FEW_DEVICES, indirect=True)
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_text_is_written_with_the_numbers_of_the_weights_codes(dev, monkeypatch, config):
    """The logits are those of a bf16 model with these numbers: of a prompt and of a token, in one text and in three."""
    monkeypatch.setattr(weights, "STAGED", 1000)
    flat = flat_parameters(config)
    rounded, texts = flat.copy(), random_texts(config, 3, 17)
    for name in coded_matrices(kind_of(config), config):
        for matrix in getattr(name_parameters(rounded, config), name):
            wide = from_bf16(to_bf16(matrix))
            divisor = scale_of(np.abs(wide).max())
            matrix[:] = from_e4m3(codes_by_pytorch(wide, divisor)) * divisor

    def logits(precision: str, flat: np.ndarray) -> np.ndarray:
        device.use_precision(precision)
        found = []
        for B in 1, 3:
            model = kind_of(config)(config, T, inference=True)
            load_weights(model, None, vars(name_parameters(flat, config)))
            writer = Writer(Cache(model, B, T, "softmax"))
            for start, length in (0, 16), (16, 1):
                found.append(forward_from(writer, texts[:B], [start] * B, [length] * B))
        return np.concatenate(found)

    found, want, other = logits("fp8", flat), logits("bf16", rounded), logits("bf16", flat)
    assert np.linalg.norm(found - want) <= (dev.kind == "cuda") * 0.2 * np.linalg.norm(other - want)
    assert np.linalg.norm(other - want) > 0.01 * np.linalg.norm(want)


def test_a_product_of_rows_that_do_not_fit_takes_the_weight_itself(dev, rng):
    N, C, OC = 5, 32, 48
    weight, inp, out = (dev.asarray(to_bf16(normal(rng, *shape))) for shape in ((OC, C), (N, C), (N, OC)))
    never = Weight(weight, None, None, None, None, None)
    expected = dev.empty((N, OC), BF16)
    matmul.matmul_forward(expected, inp, weight, None, 1, N, C, OC)
    matmul.matmul_forward(out, inp, never, None, 1, N, C, OC)
    assert np.array_equal(dev.to_host(out), dev.to_host(expected))


@pytest.mark.parametrize("C, OC, made, does", [
    (2048, 16384, True, True), (8192, 2048, True, True), (2048, 2048, False, True), (768, 3072, True, True),
    (576, 3072, True, False), (3072, 768, True, True), (2048, 1024, False, False), (2048, 1024, True, True),
    (2040, 16384, True, False),
])  # fmt: skip
def test_a_weight_takes_codes_where_the_products_gain_more_than_encoding_costs(C, OC, made, does):
    assert fp8.pays(C, OC, made) == does


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_batch_of_rows_that_do_not_fit_takes_no_codes(large_weights, config):
    found = []
    for precision in "fp8", "bf16":
        device.use_precision(precision)
        training = build(device, config, B, T, "softmax", flat_parameters(config))
        ((inputs, targets),) = make_batches(config, 1, B, T)
        forward_backward(device, training, inputs[:1, :5], targets[:1, :5], 1 / 5)
        found.append(device.to_host(training.model.grads_memory))
    assert np.array_equal(*found)


FILES = "model.bin", "optimizer.bin"


@pytest.mark.parametrize("N, flags, others", [
    (1, {}, [{"recompute": True}, {"offload": True}]), (2, {"sharded": True}, [{"recompute": True, "offload": True}]),
    (2, {"bitwise": True}, [{"sharded": True}]),
], ids=str)  # fmt: skip
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    large_weights, N, flags, others, tmp_path, monkeypatch, rng
):  # fmt: skip
    """Also with other flags. Its checkpoint holds fp32 numbers, which a run in any precision takes over."""
    config, (first, then) = CONFIGS[0], (slice(2), slice(2, None))
    batches = rng.integers(0, config.vocab_size, (4, 2, 2, B, RANKS_T), dtype=np.int32)

    def trained(steps: slice, **more) -> np.ndarray:
        work = lambda rank: train(config, B, batches[steps], 0.1, **{"precision": "fp8"} | flags | more)  # noqa: E731
        with monkeypatch.context() as patch:
            one, *of_ranks = Threads(N, patch, peers=False).run(work)
        assert all(np.array_equal(one, other) for other in of_ranks)
        return one

    trained(first, directory=tmp_path)
    whole, checkpoint = trained(slice(None)), tmp_path / "step_00000002"
    for other in flags, *others:
        assert np.array_equal(trained(then, checkpoint=checkpoint, **other), whole)
    for precision in "bf16", "fp32":
        assert not np.array_equal(trained(then, checkpoint=checkpoint, precision=precision), whole)
        trained(slice(0), checkpoint=checkpoint, precision=precision, directory=tmp_path / precision)
        there = tmp_path / precision / checkpoint.name
        assert all((there / name).read_bytes() == (checkpoint / name).read_bytes() for name in FILES)
        assert np.array_equal(trained(then, checkpoint=there), whole)


CODED = "layers=2,heads=2,channels=32"  # of GPT-2
FLAGS = ["-e", CODED, "-i", "data", "-b", "2", "-t", "32", "-d", "64", "-v", "0", "-s", "0", "--device", "cpu",
         "--checkpoint-dir", "run", "-l", "1e-2"]  # fmt: skip


def test_a_run_changes_to_fp8_and_back(tmp_path, trainer_here, monkeypatch, capsys):
    """Its samples are the text of its bf16 weights, also where a sample computes 16 rows anew."""
    monkeypatch.setattr(fp8, "LEAST_GAIN", 0)
    folder = make_folder(tmp_path / "cpu.gpt2")
    out, _ = trainer_here(GPT2, folder, [*FLAGS, "-x", "2", "--precision", "bf16"])
    assert "codes in e4m3" not in out
    out, _ = trainer_here(GPT2, folder, [*FLAGS, "-x", "4", "-y", "1", "--precision", "fp8", "-s", "4", "-g", "200"])
    assert "the run was in bf16 and goes on in fp8" in out and "| codes in e4m3         | 0 MiB" in out
    assert "| large ones of layers in e4m3, others in bf16" in out
    (sample,) = samples_of(out)
    for precision, said in ("bf16", "with them rounded to bf16"), ("fp8", "become e4m3, the others bf16"):
        generate.main(["-e", "run", "-g", "200", "--ignore-eot", "--device", "cpu", "--precision", precision])
        text, log = capsys.readouterr()
        assert said in log and (text == sample + "\n" if precision == "bf16" else len(text) == 201)
    for precision in "bf16", "fp32":
        out, _ = trainer_here(GPT2, folder, [*FLAGS, "-x", "5", "-y", "1", "--precision", precision])
        assert f"the run was in fp8 and goes on in {precision}" in out
        shutil.rmtree(folder / "run" / "step_00000005")


def test_a_run_without_large_weights_says_so(tmp_path, trainer_here):
    folder = make_folder(tmp_path / "cpu.llama3")
    flags = ["-e", "tiny", "-i", "data", "-b", "2", "-s", "0", "-v", "0", "--device", "cpu", "-x", "1"]
    found = []
    for precision in "fp8", "bf16":
        out, _ = trainer_here(Llama3, folder, [*flags, "-t", "8", "--precision", precision])
        found += [line.partition(" ms")[0] for line in out.splitlines() if line.startswith("step ")]
        assert ("| bf16: in e4m3 no matrix would be faster" in out) == (precision == "fp8")
    losses = [line.partition("(")[0] for line in found]
    assert losses[0] == losses[1] and "train loss" in losses[0]
    _, error = trainer_here(Llama3, folder, [*flags, "-t", "7", "--precision", "fp8"], code=1)
    assert error == (
        "error: --precision fp8 needs a multiple of 16 positions a batch, and B*T = 14: change -b or -t, or "
        "use --precision bf16\n"
    )


class Ampere(Turing):
    compute_capability = 80


def test_a_gpu_without_it_is_refused_in_one_line(tmp_path, trainer_here, monkeypatch):
    monkeypatch.setattr(device, "use", lambda kind, number: setattr(device.current, "device", Ampere()))
    folder = make_folder(tmp_path / "cpu.llama3")
    _, error = trainer_here(Llama3, folder, ["-e", "tiny", "-i", "data", "--precision", "fp8"], code=1)
    assert error == (
        "error: --precision fp8 needs a GPU of compute capability 8.9 or later, and Tesla T4 is of 8.0: "
        "use --precision bf16\n"
    )

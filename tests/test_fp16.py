"""--precision fp16: products of fp32 matrices whose operands are rounded to fp16 first, each by a scale of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import device
from conftest import DEVICES, refusal
from kernels.fp16.products import Operand, amaxes, gemm, gemm_strided_batched, round_to_fp16, rounded
from kernels.matmul import matmul_backward_inp, matmul_backward_weight
from llmc.model.activations import choose_attention
from llmc.step.update import adamw_update
from models import TINY, build, described, flat_parameters, forward_backward, make_batches, name_parameters, state_of
from oracle import guarded, normal
from support.kernels import shapes
from train_gpt2_fp32 import GPT2Config

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
FP32 = np.float32
B, T = 2, 32


@pytest.fixture(autouse=True)
def in_fp16(request):
    """Where a test takes a device."""
    if {"dev", "one_dev"} & set(request.fixturenames):
        request.getfixturevalue("dev" if "dev" in request.fixturenames else "one_dev")
        device.use_precision("fp16")


def in_tf32(values: np.ndarray) -> np.ndarray:
    """As tensor cores read them: rounded to 10 bits of mantissa; float64."""
    bits = values.view(np.uint32) + np.uint32(0x1000) & np.uint32(0xFFFFE000)
    return bits.view(FP32).astype(np.float64)


def rounded_alone(values: np.ndarray, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The numbers and the scales that round_to_fp16 makes of an array, which begins at `shift` numbers of a buffer."""
    with guarded(device) as memory, guarded(device, shift) as parameters:
        out, small = memory.write((values.size + 1 >> 1,), FP32), memory.write((2,), FP32)
        operand = Operand(out.view(np.float16)[: values.size], small, memory.scratch((amaxes(),), FP32))
        round_to_fp16(operand, parameters.read(values, FP32), values.size)
        if values.size % 2:  # what follows it is no number of the operand
            device.fill_zero(out.view(np.float16)[values.size :])
    return device.to_host(operand.numbers), device.to_host(small)


@shapes((1, 0), (7, 1), (4096, 0), (50001, 3), n=(1, 3000), shift=(0, 3))
def test_an_operand_is_rounded_to_the_nearest_numbers_of_fp16_by_a_power_of_two(dev, n, shift):
    rng = np.random.default_rng([n, shift])
    for size in 1.0, 3e-15, 1e20, 2e38, 1e-37:
        values = np.clip(normal(rng, n), -1.5, 1.5) * 2.0 ** rng.integers(-26, 1, n)  # down to fp16's subnormal numbers
        values = (values * size * (rng.random(n) < 0.9)).astype(FP32)  # and zeros
        numbers, scale = rounded_alone(values, shift)
        amax = np.abs(values).max()
        assert scale[0] == scale[1] == 2.0 ** max(-63, np.frexp(amax or 1e-45)[1] - 15)
        assert np.array_equal(numbers, (values / np.float64(scale[0])).astype(np.float16))
        assert np.abs(numbers).max() <= 2**15


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_spoils_a_whole_product(dev, value):
    rng = np.random.default_rng(1)
    a, b = normal(rng, 5, 40), normal(rng, 7, 40)
    a[3, 33] = value
    for x, y in (a, b), (b, a):
        c = device.asarray(np.zeros((len(x), len(y)), FP32))
        gemm(c, device.asarray(x), device.asarray(y), len(x), len(y), 40, trans_b=True)
        assert np.isnan(device.to_host(c)).all()


def spread(rng, *shape: int) -> np.ndarray:
    """Numbers of sizes from 2^-15 to 2^15."""
    return (normal(rng, *shape) * 2.0 ** rng.integers(-15, 16, shape)).astype(FP32)


def with_outlier(rng, *shape: int) -> np.ndarray:
    values = normal(rng, *shape)
    values[1, 2] = 1e6
    return values


def with_zeros(rng, *shape: int) -> np.ndarray:
    return normal(rng, *shape) * (rng.random(shape, FP32) < 0.1)


SCALES = (1, 1), (1e-20, 1), (1, 1e-20), (1e20, 1e-20), (1e12, 1e12), (1e-15, 1e-15)


@pytest.mark.parametrize("make", [normal, spread, with_outlier, with_zeros])
@pytest.mark.parametrize("trans_a, trans_b", [(False, True), (False, False), (True, False), (True, True)])
def test_the_error_of_a_product_is_at_most_one_and_a_half_times_that_of_tf32(dev, make, trans_a, trans_b):
    """In all, and in each row: a number that is a million times as large as the others costs these nothing."""
    m, n, k, rng = 33, 50, 257, np.random.default_rng(5)
    for scales in SCALES:
        a, b = (make(rng, *shape) * FP32(scale) for shape, scale in zip(((m, k), (k, n)), scales, strict=True))
        with guarded(device) as memory:
            c = memory.write((m, n), FP32)
            stored = (memory.read(np.ascontiguousarray(x.T if turned else x), FP32)
                      for x, turned in ((a, trans_a), (b, trans_b)))  # fmt: skip
            gemm(c, *stored, m, n, k, trans_a, trans_b)
        want = a.astype(np.float64) @ b
        off, off_tf32 = (x - want for x in (device.to_host(c), in_tf32(a) @ in_tf32(b)))
        rows = [np.linalg.norm(x, axis=1) for x in (off, off_tf32)]
        assert np.linalg.norm(off) <= 1.5 * np.linalg.norm(off_tf32) and (rows[0] <= 1.5 * rows[1]).all(), scales


def test_products_of_many_matrices_have_a_scale_for_all_of_them(dev):
    count, m, n, k, rng = 5, 9, 11, 37, np.random.default_rng(2)
    a, b = normal(rng, count, m, k), normal(rng, count, k, n)
    with guarded(device) as memory:
        c = memory.write((count, m, n), FP32)
        gemm_strided_batched(c, memory.read(a, FP32), memory.read(b, FP32), m, n, k, count)
    want = a.astype(np.float64) @ b
    off, off_tf32 = (np.linalg.norm(x - want) for x in (device.to_host(c), in_tf32(a) @ in_tf32(b)))
    assert off <= 1.5 * off_tf32


def test_a_gradient_is_rounded_once_for_both_of_its_products_and_anew_in_any_other_case(dev, launches):
    rng, (N, C, OC) = np.random.default_rng(3), (6, 16, 24)
    dout, weight, inp = (device.asarray(normal(rng, *shape)) for shape in ((N, OC), (OC, C), (N, C)))
    dinp, dweight, seen = device.empty((N, C)), device.empty((OC, C)), []

    def count(name, arguments, work) -> None:
        seen.extend([arguments["n"]] * (name == "fp16_round_kernel"))
        work()

    def products(*changes) -> np.ndarray:
        seen.clear()
        with device.observe(count):
            for values, inp_too in changes:
                device.copy_in(dout, values)
                if inp_too:
                    matmul_backward_inp(dinp, dout, weight, 1, N, C, OC)
                matmul_backward_weight(dweight, dout, inp, 1, N, C, OC, accumulate=False)
        return device.to_host(dweight)

    one, other = normal(rng, N, OC), normal(rng, N, OC)
    want = other.astype(np.float64).T @ device.to_host(inp)
    assert np.allclose(products((one, True), (other, True)), want, atol=0.02) and len(seen) == 2 * 3
    assert np.allclose(products((one, True), (other, False)), want, atol=0.02) and len(seen) == 3 + 2


def test_an_operand_that_another_product_has_taken_the_place_of_is_rounded_again(dev):
    rng = np.random.default_rng(4)
    a, other, b = (device.asarray(normal(rng, 8, 8)) for _ in range(3))
    want = device.to_host(rounded(a, b, 64, 64, False)[0].numbers)
    rounded(other, b, 64, 64, False)
    assert np.array_equal(device.to_host(rounded(a, b, 64, 64, True)[0].numbers), want)


def losses_of(config, attention: str, precision: str, steps: int) -> np.ndarray:
    """Of steps on three batches, over and over."""
    device.use_precision(precision)
    training = build(device, config, B, T, attention, flat_parameters(config))
    model, adamw, exchange, batches = training.model, training.adamw, training.exchange, make_batches(config, 3, B, T)
    found = []
    for step in range(steps):
        found.append(forward_backward(device, training, *batches[step % 3], 1 / (B * T))[1])
        adamw_update(model, adamw, exchange, 1e-3, step + 1)
    return np.array(found)


@pytest.mark.parametrize("name, attention", [("gpt2", "relu"), *((name, "softmax") for name in TINY)])
def test_losses_stay_within_a_third_of_a_percent_of_those_in_fp32(one_dev, name, attention):
    _, config = described(name, 101, T)
    fp32, fp16 = (losses_of(config, attention, precision, 30) for precision in ("fp32", "fp16"))
    assert np.abs(fp16 / fp32 - 1).max() < 0.003 and fp32[-1] < 0.95 * fp32[0] and not np.array_equal(fp16, fp32)


@pytest.mark.parametrize("name", ["attprojw", "fcprojw"])
def test_a_step_with_a_weight_that_is_not_finite_says_so_and_changes_nothing(one_dev, name):
    config = GPT2Config(32, 101, 2, 2, 32)
    flat = flat_parameters(config)
    getattr(name_parameters(flat, config), name)[1, 5, 7] = np.nan
    training = build(device, config, B, T, "softmax", flat)
    before, *_ = state_of(training)
    ((inputs, targets),) = make_batches(config, 1, B, T)
    _, loss = forward_backward(device, training, inputs, targets, 1 / (B * T))
    adamw_update(training.model, training.adamw, training.exchange, 1e-2, 1)
    assert np.isnan(loss) and np.isnan(device.to_host(training.adamw.grad_norm)[0])
    assert np.array_equal(before, state_of(training)[0], equal_nan=True)


# As on a T4


def test_flash_attention_is_left_to_gpus_that_have_tf32(monkeypatch):
    device.use("cpu")
    device.use_precision("fp16")
    monkeypatch.setattr(device.current.device, "kind", "cuda")
    for capability, attention in (75, "softmax"), (80, "flash"):
        monkeypatch.setattr(device.current.device, "compute_capability", capability)
        assert choose_attention("auto", 64) == attention
        assert capability == 80 or "it needs a GPU of compute capability 8.0" in refusal(choose_attention, "flash", 64)


def losses_on_a_t4() -> dict[str, list[float]]:
    return {
        f"{name} {precision}": losses_of(described(name, 101, T)[1], "softmax", precision, 10).tolist()
        for name in ("gpt2", "llama3") for precision in ("fp32", "fp16")
    }  # fmt: skip


def print_losses() -> None:
    device.use("cuda")
    assert device.compute_capability == 75 and device.shared_memory == 64 << 10 and not device.tf32
    print(json.dumps(losses_on_a_t4()))


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no GPU")
def test_what_a_t4_runs_has_the_losses_that_this_gpu_has():
    """Kernels from PTX of compute capability 7.5, and the launchers' choices for it."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "LLMC_COMPUTE_CAPABILITY": "75"}
    command = [sys.executable, "-c", "import test_fp16; test_fp16.print_losses()"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    device.use("cuda")
    assert found == {name: pytest.approx(losses, rel=1e-4) for name, losses in losses_on_a_t4().items()}

"""Models in fp8 (`--precision fp8`): how they train, what their files hold, and how they write text.
tests/test_equivalence.py has the bits."""

import shutil
import sys
from dataclasses import replace

import device
import generate
import kernels.fp8.matmul as fp8_matmul
import kernels.matmul as matmul
from conftest import DEVICES, LONG_WARPS
from device import from_bf16, to_bf16
from kernels.fp8 import quantized
from kernels.fp8.quantized import Quantized, QuantizedWeight, WeightGradient
from llmc.data.batches import Batches
from llmc.model import fp8
from llmc.model.activations import Cache
from llmc.model.fp8 import in_bf16, quantized_matrices
from llmc.model.weights import load_weights
from llmc.step.generation import Writer
from llmc.step.training import Training
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
from support.folders import make_folder, samples_of
from support.fp8 import assert_quantized, dequantized, in_fp8, scale_of
from support.texts import forward_from, random_texts
from train_gpt2_fp32 import GPT2, GPT2Config, training_step
from train_llama3 import Llama3, Llama3Config
from train_pythia import PythiaConfig
from train_qwen3 import Qwen3Config

import numpy as np
import pytest
import torch

# maxT, V, L, heads, C: each has weights of several shapes, and rows that are no multiples of a tile.
CONFIGS = [
    GPT2Config(32, 101, 2, 2, 48), Llama3Config(32, 101, 2, 4, 2, 64, 80, tied=False),
    PythiaConfig(32, 101, 2, 2, 32, tied_norm=True), Qwen3Config(32, 101, 2, 4, 2, 48, 96, head_size=16),
]  # fmt: skip
B, T = 2, 24

dev = pytest.fixture(params=["cpu", LONG_WARPS, *DEVICES[2:]])(in_fp8)


@pytest.fixture
def in_fp8_on_cpu(monkeypatch):
    """All weights are large enough."""
    device.use("cpu")
    device.use_precision("fp8")
    monkeypatch.setattr(fp8, "MIN_GAIN", 0)


def make(config, **options) -> Training:
    return build(device, config, B, T, "softmax", flat_parameters(config), **options)


def run(training: Training) -> float:
    """Forward and backward of a batch, and its loss."""
    ((inputs, targets),) = make_batches(training.model.config, 1, B, T)
    return forward_backward(device, training, inputs, targets, 1 / (B * T))[1]


def gradients(precision: str, config, **options) -> tuple[np.ndarray, float]:
    """The gradients of a batch, and its loss."""
    device.use_precision(precision)
    training = make(config, **options)
    loss = run(training)
    return device.to_host(training.model.grads_memory), loss


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["attprojw", "fcprojw"])
def test_a_step_with_a_weight_that_is_not_finite_says_so_and_changes_nothing(in_fp8_on_cpu, name, value):
    config = CONFIGS[1]
    flat = flat_parameters(config)
    getattr(name_parameters(flat, config), name)[1, 5, 7] = value
    training = build(device, config, B, T, "softmax", flat)
    before, _, _ = state_of(training)
    loss = run(training)
    adamw_update(training.model, training.adamw, training.exchange, 1e-2, 1)
    after, m, v = state_of(training)
    assert np.isnan(loss) and np.isnan(training.adamw.grad_norm[0])
    assert np.array_equal(before, after, equal_nan=True) and not m.any() and not v.any()


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

    def forward(self, out, inp, weight: QuantizedWeight, bias, B: int, T: int, C: int, OC: int, residual=None) -> None:
        inp, weight = (rounded(x, 448, torch.float8_e4m3fn) for x in (inp.reshape(B * T, C), weight.bf16))
        product = (inp @ weight.T).numpy() + (0 if bias is None else from_bf16(bias))
        out.reshape(B * T, OC)[:] = to_bf16(product + (0 if residual is None else from_bf16(residual).reshape(-1, OC)))

    def backward_inp(self, dinp, dout, weight: QuantizedWeight, B: int, T: int, C: int, OC: int, accumulate=False):
        self.dout = rounded(dout.reshape(B * T, OC), 57344, torch.float8_e5m2)
        product = (self.dout @ rounded(weight.bf16, 448, torch.float8_e4m3fn)).numpy()
        dinp.reshape(B * T, C)[:] = to_bf16(product + (from_bf16(dinp).reshape(B * T, C) if accumulate else 0))

    def backward_weight(self, dweight: WeightGradient, dout, inp, B: int, T: int, C: int, OC: int, accumulate: bool):
        product = (self.dout.T @ rounded(inp.reshape(B * T, C), 448, torch.float8_e4m3fn)).numpy()
        dweight.array[:] = product + (dweight.array if accumulate else 0)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_models_gradients_are_as_good_as_by_the_recipe_of_torchao(dev, monkeypatch, config):
    exact, loss = gradients("fp32", config)
    found, quantized_loss = gradients("fp8", config)
    recomputed, _ = gradients("fp8", config, recompute=True)
    assert np.array_equal(found, recomputed)
    assert abs(quantized_loss - loss) < 0.01 * loss

    def error(of: np.ndarray) -> float:
        return float(np.linalg.norm(of - exact) / np.linalg.norm(exact))

    monkeypatch.setattr(fp8, "quantize_views", lambda acts, model, rows: None)
    monkeypatch.setattr(fp8, "out_of_place", lambda tables, kind, config, rows: tables)
    by_products, _ = gradients("fp8", config)
    # For the CPU see test_fp8.EXACT_DEVICES. Elsewhere only the order in which GELU's bias' gradient is added up
    # differs.
    allowed = 1e-3 if dev.kind == "cpu" else 1e-6
    assert np.linalg.norm(found - by_products) <= allowed * np.linalg.norm(found)
    in_bf16, _ = gradients("bf16", config)
    assert error(found) > 2 * error(in_bf16)  # so quantized matrices were multiplied
    if dev.kind == "cpu":  # where the recipe can stand in for the products
        recipe = Torchao()
        monkeypatch.setitem(matmul.matmul_forward.registry, QuantizedWeight, recipe.forward)
        monkeypatch.setitem(matmul.matmul_backward_inp.registry, QuantizedWeight, recipe.backward_inp)
        monkeypatch.setitem(matmul.matmul_backward_weight.registry, WeightGradient, recipe.backward_weight)
        theirs, _ = gradients("fp8", config)
        print(f"bf16 {error(in_bf16):.4f}, fp8 {error(found):.4f}, by torchao's recipe {error(theirs):.4f}")
        assert error(found) < 1.2 * error(theirs)


@pytest.mark.parametrize("config", [*CONFIGS, replace(CONFIGS[2], tied_norm=False, parallel=False)], ids=name_of)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_weights_gradient_is_the_product_of_its_quantized_factors(in_fp8_on_cpu, monkeypatch, config, recompute):
    """The input that backward has recomputed is quantized as that of forward. With dropout, if the model has it."""
    script, seen, multiply = sys.modules[kind_of(config).__module__], {}, matmul.matmul_backward_weight

    def forward(out, inp, weight: QuantizedWeight, bias, B: int, T: int, C: int, OC: int, residual=None) -> None:
        fp8_matmul.quantized_forward(out, inp, weight, bias, B, T, C, OC, residual)
        if isinstance(inp, Quantized):
            q = inp.q
        else:
            q, wide = device.scratch("fp8 input", (B * T, C), np.uint8), from_bf16(inp.reshape(B * T, C))
            assert_quantized(Quantized(q, None, weight.input_scale), wide)
        seen[weight] = q.copy()

    def checked(dweight, dout, inp, B: int, T: int, C: int, OC: int, accumulate: bool) -> None:
        multiply(dweight, dout, inp, B, T, C, OC, accumulate)
        weight, N = dweight.weight, B * T
        inp_T = inp.q_T if isinstance(inp, Quantized) else device.scratch("fp8 input_T", (C, N), np.uint8)
        if not isinstance(dout, Quantized):
            dout_T, wide = device.scratch(f"fp8 dout_T {OC}", (OC, N), np.uint8), from_bf16(dout.reshape(N, OC))
            assert_quantized(Quantized(None, dout_T, weight.grad_scale), wide)
        q = seen.pop(weight)
        assert np.abs(inp_T.T.astype(int) - q).max() <= 1 and (inp_T.T != q).mean() < 0.01  # EXACT_DEVICES
        taken.append((isinstance(inp, Quantized), isinstance(dout, Quantized)))

    taken = []
    monkeypatch.setitem(matmul.matmul_forward.registry, QuantizedWeight, forward)
    monkeypatch.setattr(script, "matmul_backward_weight", checked)
    gradients("fp8", config, recompute=recompute, dropout=(0.1, 3) if kind_of(config).DROPS else None)
    linear = kind_of(config).LINEAR
    layer = [tuple(name is not None for name in linear.get(weight, (None, None)))
             for weight in ("fcprojw", "fcw", "attprojw", "qkvw")]  # fmt: skip
    assert not seen and taken == config.num_layers * layer


@pytest.mark.parametrize("wrong, says", [
    ("weight before inp", "needs the gradient of the output of fcw of layer 1, quantized, but nobody has quantized it"),
    ("weight after another inp", "but the gradient of the output of fcw of layer 0 has overwritten it"),
])  # fmt: skip
def test_a_quantized_gradient_that_is_not_there_any_more_is_an_error_that_names_it(in_fp8_on_cpu, wrong, says):
    """As in a new model's script, where the calls of two layers stand in the wrong order."""
    N = B * T
    quantized.held.clear()
    training = make(CONFIGS[1])
    run(training)
    (p0, p1), (_, g1), (OC, C) = training.model.params.layer, training.model.grads.layer, (160, 64)
    dout, dinp, inp = (np.zeros((N, columns), device.BF16) for columns in (OC, C, C))
    if wrong == "weight after another inp":
        for p in (p1, p0):
            matmul.matmul_backward_inp(dinp, dout, p.fcw, B, T, C, OC)
    with pytest.raises(ValueError, match=says):
        matmul.matmul_backward_weight(g1.fcw, dout, inp, B, T, C, OC, False)


def test_a_weight_is_quantized_once_a_step_and_in_each_other_pass(dev):
    """In the first batch, though backward runs its layer again. A pass between two steps, as in validation, sees the
    weights that the last step has made."""
    config = CONFIGS[1]
    training = make(config, recompute=True)
    model, (p, *_) = training.model, training.model.params.layer
    batches = Batches(training.batch, training.acts.losses, GivenBatches(make_batches(config, 6, B, T)), 2)
    device.use_recording(False)
    train_step = training_step(training, batches)
    device.use_recording(True)
    for step in range(3):
        before, launches = dev.to_host(p.fcw.bf16).copy(), []

        def observer(name, arguments, work, launches=launches) -> None:
            launches.append(dev.address(arguments["inp"]) if name == "quantize_kernel" else 0)
            work()

        with device.observe(observer):
            train_step(step, 1e-2)
        assert launches.count(dev.address(p.fcw.bf16)) == 2  # both passes
        assert_quantized(p.fcw.quantized, from_bf16(before))
        model.mark_stale()
        model.forward(training.acts, training.batch)
        after = dev.to_host(p.fcw.bf16)
        assert_quantized(p.fcw.quantized, from_bf16(after))
        assert not np.array_equal(after, before)
    plain = in_bf16(model)
    plain.mark_stale()  # it has no quantized weights
    assert plain.params.layer[0].fcw.shape == p.fcw.bf16.shape and not plain.fp8 and model.fp8


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_quantized_weights_and_scales_fill_their_memory(in_fp8_on_cpu, config):
    model = kind_of(config)(config, T)
    last, memory = model.fp8.weights[-1], model.fp8.memory
    assert device.address(last.grad_scale.scale) + 16 == device.address(memory) + memory.size


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_gradients_scale_is_guessed_from_the_layer_after_it(in_fp8_on_cpu, config):
    """All layers of a matrix share the amax from which it is guessed, and no other matrix does. Inputs are not guessed
    so."""
    training, found = make(config), {}

    def observer(name, arguments, work) -> None:
        work()
        amax = arguments.get("previous_amax")
        if arguments.get("second_pass") and amax is not None:
            found.setdefault(device.address(amax), []).append((device.address(arguments["scale"]), amax[0]))
            assert arguments["scale"][0] == scale_of(amax[0])

    run(training)
    with device.observe(observer):
        run(training)
    names = quantized_matrices(kind_of(config), config)
    matrices = [[getattr(p, name) for p in training.model.params.layer] for name in names]
    expected = {device.address(layers[0].grad_scale.previous_amax): layers for layers in matrices}
    assert len(expected) == len(matrices) and found.keys() == expected.keys()
    for address, layers in expected.items():
        scales, amaxes = zip(*reversed(found[address]), strict=True)
        assert scales == tuple(device.address(weight.grad_scale.scale) for weight in layers)
        for weight, mine, theirs in zip(layers, amaxes, amaxes[1:], strict=False):
            assert np.isclose(weight.grad_scale.scale[1], mine / theirs, rtol=0.5)  # a mean with what was there


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_text_is_written_with_the_numbers_of_the_quantized_weights(dev, monkeypatch, config):
    """The logits are those of a bf16 model with these numbers: of a prompt and of a token, in one text and in three."""
    monkeypatch.setattr(device, "STAGED", 1000)
    flat = flat_parameters(config)
    rounded, texts = flat.copy(), random_texts(config, 3, 17)
    for name in quantized_matrices(kind_of(config), config):
        for matrix in getattr(name_parameters(rounded, config), name):
            matrix[:] = dequantized(from_bf16(to_bf16(matrix)))

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


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_batch_of_rows_that_do_not_fit_is_not_quantized(in_fp8_on_cpu, config):
    found = []
    for precision in "fp8", "bf16":
        device.use_precision(precision)
        training = make(config)
        ((inputs, targets),) = make_batches(config, 1, B, T)
        forward_backward(device, training, inputs[:1, :5], targets[:1, :5], 1 / 5)
        found.append(device.to_host(training.model.grads_memory))
    assert np.array_equal(*found)


QUANTIZED = "layers=2,heads=2,channels=32"  # of GPT-2
FLAGS = ["-e", QUANTIZED, "-i", "data", "-b", "2", "-t", "32", "-d", "64", "-v", "0", "-s", "0", "--device", "cpu",
         "--checkpoint-dir", "run", "-l", "1e-2"]  # fmt: skip


def test_a_run_changes_to_fp8_and_back(tmp_path, trainer_here, monkeypatch, capsys):
    """Its samples are the text of its bf16 weights, also where a sample computes 16 rows anew."""
    monkeypatch.setattr(fp8, "MIN_GAIN", 0)
    folder = make_folder(tmp_path / "cpu.gpt2")
    out, _ = trainer_here(GPT2, folder, [*FLAGS, "-x", "2", "--precision", "bf16"])
    assert "quantized weights" not in out
    out, _ = trainer_here(GPT2, folder, [*FLAGS, "-x", "4", "-y", "1", "--precision", "fp8", "-s", "4", "-g", "200"])
    assert "the run was in bf16 and goes on in fp8" in out and "| quantized weights     | 0 MiB" in out
    assert "| large ones of layers in e4m3, others in bf16" in out
    (sample,) = samples_of(out)
    assert len(sample) > 32  # more than the model sees at once
    for precision, said in ("bf16", "with them rounded to bf16"), ("fp8", "become e4m3, the others bf16"):
        generate.main(["-e", "run", "-g", "200", "--ignore-eot", "--device", "cpu", "--precision", precision])
        text, log = capsys.readouterr()
        assert said in log and len(text) == 201 and (text.startswith(sample) or precision == "fp8")
    for precision in "bf16", "fp32":
        out, _ = trainer_here(GPT2, folder, [*FLAGS, "-x", "5", "-y", "1", "--precision", precision])
        assert f"the run was in fp8 and goes on in {precision}" in out
        shutil.rmtree(folder / "run" / "step_00000005")


def test_a_run_without_in_fp8_on_cpu_says_so(tmp_path, trainer_here):
    folder = make_folder(tmp_path / "cpu.llama3")
    flags = ["-e", "tiny", "-i", "data", "-b", "2", "-s", "0", "-v", "0", "--device", "cpu", "-x", "1"]
    found = []
    for precision in "fp8", "bf16":
        out, _ = trainer_here(Llama3, folder, [*flags, "-t", "8", "--precision", precision])
        found += [line.partition(" ms")[0] for line in out.splitlines() if line.startswith("step ")]
        assert ("| bf16: no matrix is large enough for e4m3" in out) == (precision == "fp8")
    losses = [line.partition("(")[0] for line in found]
    assert losses[0] == losses[1] and "train loss" in losses[0]
    _, error = trainer_here(Llama3, folder, [*flags, "-t", "7", "--precision", "fp8"], code=1)
    assert error == (
        "error: --precision fp8 needs a multiple of 16 positions a batch, and B*T = 14: change -b or -t, or "
        "use --precision bf16\n"
    )

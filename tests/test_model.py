"""The whole models against their definition in float64: logits, loss, every gradient, and ten AdamW steps."""

import functools
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import device
import oracle
from device.errors import UserError
from llmc.data.batches import Batches, fill_batch
from llmc.model import fp8
from llmc.model.activations import Activations, batch_sizes, choose_attention, training_tables
from llmc.model.model import Model
from llmc.model.tensors import ALIGNMENT, Config, layout, num_parameters, owners, ranges, type_of, without
from llmc.model.weights import randomize
from llmc.step.update import adamw_update
from models import (
    EVEN,
    LLAMA_ODD,
    ODD,
    ONE_OF_EACH,
    PYTHIA_HEADS_OF_64,
    PYTHIA_ODD,
    SOME,
    VARIANTS,
    GivenBatches,
    build,
    flat_parameters,
    forward_backward,
    kind_of,
    make_batches,
    name_of,
    name_parameters,
    names_of,
)
from oracle import assert_close, guarded, model_tolerance
from train_gpt2_fp32 import GPT2, training_step

import numpy as np
import pytest

PYTHIAS = [
    PYTHIA_ODD, PYTHIA_HEADS_OF_64, replace(PYTHIA_ODD, norm="rms", tied_norm=True),
    replace(PYTHIA_ODD, channels=240, parallel=False),  # 4C is more than the padded vocabulary
]  # fmt: skip


each_model = pytest.mark.parametrize("config, attention", VARIANTS, ids=name_of)
some_models = pytest.mark.parametrize("config, attention", SOME, ids=name_of)
CONFIGS = [*dict.fromkeys([EVEN, *(config for config, _ in ONE_OF_EACH), *PYTHIAS])]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=name_of)


def batch_shape(config: Config) -> tuple[int, int]:
    return (1, 71) if config.head_size == 64 else (2, 11)


def tolerance(dev, attention: str) -> float:
    return oracle.MODEL_TF32 if attention == "flash" else model_tolerance(dev)


def gradients_of(dev, model: Model) -> dict[str, np.ndarray]:
    return {name: dev.to_host(getattr(model.grads, name)) for name in names_of(model.config)}


@each_model
def test_logits_loss_and_every_gradient_equal_pytorchs(product_dev, monkeypatch, config, attention):
    flat, (B, T) = flat_parameters(config), batch_shape(config)
    ((inputs, targets),) = make_batches(config, 1, B, T)
    allowed = tolerance(product_dev, attention)
    names = "empty", "copy_in", "to_host", "synchronize"
    unguarded = SimpleNamespace(**{name: getattr(product_dev, name) for name in names})
    with guarded(unguarded) as memory:
        with monkeypatch.context() as patch:
            patch.setattr(product_dev.current.device, "empty", memory.scratch)
            training = build(product_dev, config, B, T, attention, flat)
        logits, loss = forward_backward(product_dev, training, inputs, targets, 1 / (B * T))
    want_logits, want_loss, want = oracle.gradients(config, oracle.table_of(config, flat), inputs, targets, attention)
    assert_close("logits", logits, want_logits, allowed)
    assert_close("loss", np.array(loss), want_loss, allowed)
    for name, gradient in gradients_of(product_dev, training.model).items():
        assert_close(f"d{name}", gradient, want[name], allowed)
    assert np.isfinite(product_dev.to_host(training.model.grads_memory)).all()
    for name, shape in config.parameters():
        if shape[0] == "Vp":
            assert not product_dev.to_host(getattr(training.model.grads, name))[config.vocab_size :].any()


def test_backward_refuses_a_batch_that_fill_batch_has_not_filled_as_a_whole(one_dev):
    """Order and count of other inputs make another gradient of wte."""
    B, T = 2, 8
    training = build(one_dev, ODD, B, T, "softmax", flat_parameters(ODD))
    model, acts, batch = training.model, training.acts, training.batch
    (one, other) = make_batches(ODD, 2, B, T)
    forward_backward(one_dev, training, *other, 1.0)
    want = one_dev.to_host(model.grads_memory)
    for inputs in other[0], one[0]:  # also if they were filled before
        fill_batch(batch, *one)
        one_dev.copy_in(batch.inputs, inputs)
        model.zero_grad()
        model.forward(acts, batch)
        model.loss(acts, batch, 1.0)
        with pytest.raises(UserError, match="fill the batch with fill_batch"):
            model.backward(acts, batch)
    forward_backward(one_dev, training, *other, 1.0)
    np.testing.assert_array_equal(one_dev.to_host(model.grads_memory), want)
    for wrong in other[0][:1], other[0].astype(np.float32), other[0][0]:
        with pytest.raises(UserError, match="a batch takes integers"):
            fill_batch(batch, wrong, other[1])


@functools.cache
def trained_by_pytorch(config: Config, attention: str, weight_decay: float) -> tuple[list, dict]:
    """Losses of ten steps, and the parameters after them, which all devices are compared with."""
    return oracle.train(
        config, oracle.table_of(config, flat_parameters(config)), make_batches(config, 10, *batch_shape(config)),
        attention, learning_rate=1e-3, weight_decay=weight_decay, decayed=config.matrices,
    )  # fmt: skip


@pytest.mark.parametrize(
    "config, attention, weight_decay",
    [(ODD, "relu", 0.0), *((*each, 0.1) for each in ONE_OF_EACH)]
    + [pytest.param(*each, 0.1, marks=pytest.mark.long) for each in VARIANTS if each not in ONE_OF_EACH],
    ids=name_of,
)
def test_ten_steps_of_adamw_equal_pytorchs(model_dev, config, attention, weight_decay):
    flat, (B, T) = flat_parameters(config), batch_shape(config)
    batches = make_batches(config, 10, B, T)
    training = build(model_dev, config, B, T, attention, flat, weight_decay=weight_decay)
    sent = Batches(training.batch, training.acts.losses, GivenBatches(batches))
    step_of, losses = training_step(training, sent), []
    for step in range(len(batches)):
        step_of(step, 1e-3)
        model_dev.synchronize()
        losses.append(sent.mean_loss(step))
    want_losses, want = trained_by_pytorch(config, attention, weight_decay)
    allowed = tolerance(model_dev, attention)
    assert_close("losses of ten steps", np.array(losses), np.array(want_losses), allowed)
    for name in names_of(config):
        ours, theirs = model_dev.to_host(getattr(training.model.params, name)), want[name].numpy()
        if name == "qkvb" and attention != "relu":
            # Softmax is blind to what moves all scores of a row: the key bias has gradient 0. What rounding makes of
            # that, AdamW scales up to whole steps in any direction.
            # RoPE turns part of it differently for every key, and then moves not all scores alike.
            C, HS = config.channels, config.head_size
            blind = np.arange(C, 2 * C)[np.arange(C) % HS >= config.sizes().get("R", 0)]
            ours, theirs = (np.delete(values, blind, axis=1) for values in (ours, theirs))
        assert_close(f"{name} after ten steps", ours, theirs, oracle.after_steps(allowed))


@some_models
def test_accumulated_gradients_of_small_batches_are_those_of_one_large_batch(model_dev, config, attention):
    flat, (B, T), count = flat_parameters(config), batch_shape(config), 3
    batches = make_batches(config, count, B, T)
    training = build(model_dev, config, B, T, attention, flat)
    for i, (inputs, targets) in enumerate(batches):
        forward_backward(model_dev, training, inputs, targets, 1 / (count * B * T), accumulate=i > 0)
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    _, _, want = oracle.gradients(config, oracle.table_of(config, flat), inputs, targets, attention)
    for name, gradient in gradients_of(model_dev, training.model).items():
        assert_close(f"accumulated d{name}", gradient, want[name], tolerance(model_dev, attention))


@some_models
def test_an_update_is_by_the_recipe_with_gradients_clipped_to_the_given_norm(model_dev, config, attention):
    flat, (B, T) = flat_parameters(config), batch_shape(config)
    ((inputs, targets),) = make_batches(config, 1, B, T)
    training = build(model_dev, config, B, T, attention, flat, beta1=0.8, beta2=0.96, eps=0.5)
    model, adamw = training.model, training.adamw
    forward_backward(model_dev, training, inputs, targets, 1 / (B * T))
    grads = model_dev.to_host(model.grads_memory).astype(np.float64)
    norm = np.linalg.norm(grads)
    adamw.recipe = adamw.recipe._replace(grad_clip=0.5 * norm)
    adamw_update(model, adamw, training.exchange, 0.1, 1)
    assert_close("norm of all gradients", model_dev.to_host(adamw.grad_norm)[:1], np.array([norm]), 1e-5)
    grads *= 0.5
    assert_close("m", adamw.m, 0.2 * grads, 1e-5)
    assert_close("v", adamw.v, 0.04 * grads**2, 1e-5)
    assert_close("parameters", model.params_memory, flat - 0.1 * grads / (np.abs(grads) + 0.5), 1e-5)


@pytest.mark.parametrize("config, attention, skip", [
    (*ONE_OF_EACH[0], False), *((*each, True) for each in ONE_OF_EACH),
    *(pytest.param(*each, False, marks=pytest.mark.long) for each in ONE_OF_EACH[1:]),
], ids=name_of)  # fmt: skip
def test_a_step_that_is_not_finite_changes_no_parameter(model_dev, config, attention, skip):
    B, T, steps = 1, 5, 6
    training = build(model_dev, config, B, T, attention, flat_parameters(config), skip_nonfinite=skip)
    model, adamw = training.model, training.adamw
    sent = Batches(training.batch, training.acts.losses, GivenBatches(make_batches(config, steps, B, T)))
    step_of, buffers = training_step(training, sent), (model.params_memory, adamw.m, adamw.v)
    weight, changes = model.params.lnfw[:1], []
    for step in range(steps):
        kept = model_dev.to_host(weight)
        if step == 3:
            model_dev.copy_in(weight, np.full(1, np.nan, np.float32))
        before = [model_dev.to_host(buffer) for buffer in buffers]
        step_of(step, 1e-3)
        model_dev.synchronize()
        after = [model_dev.to_host(buffer) for buffer in buffers]
        changes.append([not np.array_equal(*pair, equal_nan=True) for pair in zip(before, after, strict=True)])
        assert np.isfinite(sent.mean_loss(step)) == (step != 3)
        if step == 3:
            model_dev.copy_in(weight, kept)
            model_dev.synchronize()
    assert changes == [[step < 3 or skip and step > 3] * 3 for step in range(steps)]
    assert model_dev.to_host(adamw.grad_norm)[2] == 1


@pytest.mark.parametrize("config, attention", ONE_OF_EACH, ids=name_of)
def test_what_is_not_finite_in_backward_alone_is_noticed_too(model_dev, config, attention):
    """A NaN in something that forward has kept for backward, a layer at a time."""
    B, T, flat = 1, 5, flat_parameters(config)
    training = build(model_dev, config, B, T, attention, flat)
    model, acts, batch, adamw = training.model, training.acts, training.batch, training.adamw
    fill_batch(batch, *make_batches(config, 1, B, T)[0])
    table, _ = training_tables(kind_of(config), attention)
    kept = [row[0] for row in without(table, config.absent) if row[1][0] == "L"]
    for name in kept:
        for layer in range(config.num_layers):
            model.zero_grad()
            model.forward(acts, batch)
            model.loss(acts, batch, 1 / (B * T))
            spoiled = getattr(acts.layer[layer], name).reshape(-1)[:1]
            model_dev.copy_in(spoiled, np.full(1, np.nan, np.float32))
            model.backward(acts, batch)
            adamw_update(model, adamw, training.exchange, 1e-3, 1)
            norm, _, _, left_out = model_dev.to_host(adamw.grad_norm)
            params = model_dev.to_host(model.params_memory)
            assert np.isfinite(params).all()
            if np.isfinite(norm):
                assert left_out, (name, layer)
            else:
                assert np.array_equal(params, flat), (name, layer)
            model_dev.copy_in(model.params_memory, flat)
            for buffer in (adamw.m, adamw.v, adamw.grad_norm):
                assert np.isfinite(model_dev.to_host(buffer)[2:]).all()
                model_dev.fill_zero(buffer)
            model_dev.synchronize()


@pytest.mark.parametrize("config, attention", ONE_OF_EACH, ids=name_of)
def test_a_smaller_batch_in_the_same_buffers_gives_what_a_fresh_model_gives(model_dev, config, attention):
    flat, (B, T) = flat_parameters(config), batch_shape(config)
    ((inputs, targets),) = make_batches(config, 1, B, T)
    large = build(model_dev, config, B, T, attention, flat)
    forward_backward(model_dev, large, inputs, targets, 1 / (B * T))
    for b, t in [(1, 1), (1, 5), (B, T - 1), (B, T)]:
        results = []
        for training in (large, build(model_dev, config, b, t, attention, flat)):
            logits, _ = forward_backward(model_dev, training, inputs[:b, :t], targets[:b, :t], 1 / (b * t))
            results.append((logits, model_dev.to_host(training.model.grads_memory)))
        (logits, grads), (fresh_logits, fresh_grads) = results
        assert np.array_equal(logits, fresh_logits), (b, t)
        assert np.array_equal(grads, fresh_grads), (b, t)


@pytest.mark.parametrize("config, attention", ONE_OF_EACH[::2], ids=name_of)
def test_recomputation_runs_no_product_whose_output_nobody_needs(config, attention, monkeypatch):
    """Those of the projections back into the residual stream that only the next layer's input needs: the MLP's, and
    where attention and MLP are in parallel the attention's."""
    device.use("cpu")
    counts, gemm = [], device.current.device.gemm

    def counted(*args, **keywords):
        counts[-1] += 1
        return gemm(*args, **keywords)

    monkeypatch.setattr(device.current.device, "gemm", counted, raising=False)
    for recompute in False, True:
        training = build(device, config, 2, 11, attention, flat_parameters(config), recompute=recompute)
        counts.append(0)
        training.model.forward(training.acts, training.batch)
        counts.append(0)
        training.model.backward(training.acts, training.batch)
    forward, backward, _, recomputing = counts
    of_a_layer = forward // config.num_layers
    not_again = 2 if getattr(config, "parallel", False) else 1
    assert recomputing - backward == config.num_layers * (of_a_layer - not_again)


@each_config
def test_every_activation_starts_at_a_256_byte_boundary_and_overlaps_only_what_it_takes_the_place_of(
    config, monkeypatch
):
    device.use("cpu")
    kind, sizes = kind_of(config), batch_sizes(config, 2, 16, 0)
    monkeypatch.setattr(fp8, "MIN_GAIN", 0)
    tables = []
    for precision, name in product(("bf16", "fp8"), ("flash", "softmax")):
        device.use_precision(precision)
        tables += fp8.out_of_place(training_tables(kind, name), kind, config, 2 * 16)
    device.use_precision("fp32")
    for table, floatX in product(tables, (np.dtype("f4"), device.BF16)):
        table = without(table, config.absent)
        starts, length = layout(table, sizes, ALIGNMENT, floatX=floatX)
        sizes_of = {row[0]: int(np.prod(starts[row[0]][1])) * type_of(row, floatX).itemsize for row in table}
        behind = 16 if config.channels % (16 // floatX.itemsize) == 0 else floatX.itemsize  # another C: one by one
        places, place_of = {}, {}  # of each tensor that takes no other's place: its start, and the end of all there
        for row in table:
            name, start, (owner, *others) = row[0], starts[row[0]][0], owners(row) or [row[0]]
            place = place_of[name] = place_of.get(owner, owner)
            assert start % (256 if owner == name else behind) == 0
            assert start == (starts[others[0]][0] + sizes_of[others[0]] if others else starts[owner][0])
            first, end = places.get(place, (start, start))
            places[place] = first, max(end, start + sizes_of[name])
        ordered = list(places.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(ordered))
        assert length == ordered[-1][1]


@each_config
def test_an_update_covers_every_parameter_once_and_decays_only_matrices(config):
    found = ranges(config.parameters(), config.sizes(), config.matrices)
    assert [start for start, _, _ in found] == [0] + [end for _, end, _ in found[:-1]]
    assert found[-1][1] == num_parameters(config)
    decays = np.concatenate([np.full(end - start, decayed) for start, end, decayed in found])
    params = name_parameters(decays, config)
    for name in names_of(config):
        matrix = name in ("wte", "wpe", "lm_head", "qkvw", "attprojw", "fcw", "fcprojw")
        assert (getattr(params, name) == matrix).all(), name


@pytest.mark.parametrize(
    "config", [replace(EVEN, num_layers=4, vocab_size=250), LLAMA_ODD, PYTHIA_HEADS_OF_64], ids=name_of
)
def test_random_weights_are_the_originals_and_depend_on_the_seed(model_dev, monkeypatch, config):
    def parameters(seed: int) -> np.ndarray:
        model = kind_of(config)(config, 8, inference=True)
        randomize(model, None, seed)
        return model_dev.to_host(model.params_memory)

    params, again, other = (parameters(seed) for seed in (1, 1, 2))
    assert np.array_equal(params, again) and not np.array_equal(params, other)
    monkeypatch.setattr("device.STAGED", 1000)  # in many pieces the numbers are the same
    assert np.array_equal(params, parameters(1))
    params = name_parameters(params, config)
    large, small = {
        "GPT-2": (0.02, 0.02 / 8**0.5), "Pythia": ((2 / 5 / 128) ** 0.5, 2 / (2 * 128**0.5)),
    }.get(config.NAME, (0.02, 0.02))  # of 4 layers, of 2 layers of 128 channels, and of any
    for name, shape in config.parameters():
        tensor = getattr(params, name)
        if shape[0] == "Vp":
            assert not tensor[config.vocab_size :].any(), name
            tensor = tensor[: config.vocab_size]
        if name in config.matrices:
            deviation = small if name in ("attprojw", "fcprojw") else large
            assert tensor.std() == pytest.approx(deviation, rel=0.05), name
        else:
            assert (tensor == (0 if name.endswith("b") else 1)).all(), name


def test_flash_attention_is_refused_in_fp32(dev, monkeypatch):
    monkeypatch.setattr(device.current.device, "kind", "cuda")
    with pytest.raises(UserError, match="-a flash computes in TF32 or bf16: .*; use -a softmax"):
        choose_attention("flash", 64)
    assert choose_attention("auto", 64) == "softmax"


def test_a_script_that_misnames_its_tensors_or_sizes_is_told_so(dev, monkeypatch):
    class Misnamed(GPT2):
        @classmethod
        def first_weights(cls, config):
            return {"attprojw": 0.02}, {"ln": 1.0}

    with pytest.raises(ValueError, match="Misnamed: first_weights names ln, which is none of PARAMETERS"):
        randomize(Misnamed(ODD, 1), None, 1)
    monkeypatch.setattr(Misnamed, "ACTIVATIONS", (*GPT2.ACTIVATIONS, ("ln3", ("B", "T", "CC"))))
    with pytest.raises(ValueError, match=r"ln3 \('B', 'T', 'CC'\): sizes\(\) has no 'CC'"):
        Activations(Misnamed(ODD, 1), 1, 1, "softmax")

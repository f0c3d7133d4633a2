"""The whole model against GPT-2 in float64: logits, loss, every gradient, and ten AdamW steps."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import oracle
import train_gpt2_fp32 as trainer
from kernels.encoder import sort_by_token
from kernels.flash_attention import supported
from llmc.checkpoint import GPT2Config, num_parameters, write_model
from llmc.errors import UserError
from llmc.tokenizer import Tokenizer
from oracle import assert_close, guarded, model_tolerance, normal

NAMES = [name for name, _ in trainer.PARAMETERS]

# maxT, V, Vp, L, NH, C: nothing here is a multiple of 4 or 32 that need not be.
ODD = GPT2Config(32, 101, 128, 2, 3, 21)
EVEN = GPT2Config(32, 256, 256, 1, 2, 64)
HEADS_OF_64 = GPT2Config(80, 101, 128, 2, 2, 128)
MODELS = [(ODD, "softmax"), (ODD, "relu"), (EVEN, "softmax"), (EVEN, "relu"), (HEADS_OF_64, "flash")]
each_model = pytest.mark.parametrize(
    "config, attention", MODELS, ids=[f"{attention}-C{config.channels}" for config, attention in MODELS]
)


def definition(attention: str) -> str:
    return "relu" if attention == "relu" else "softmax"  # flash attention computes softmax


def batch_shape(config: GPT2Config) -> tuple[int, int]:
    return (1, 71) if config is HEADS_OF_64 else (2, 11)


def tolerance(dev, attention: str) -> float:
    return oracle.MODEL_TF32 if attention == "flash" else model_tolerance(dev)


def flat_parameters(config: GPT2Config) -> np.ndarray:
    """GPT-2's initial weights, all of them disturbed, so that a tensor in another's place shows; the padding is 0."""
    rng = np.random.default_rng(config.channels)
    flat = 0.05 * normal(rng, num_parameters(config))
    params = name_parameters(flat, config)
    for name in ("ln1w", "ln2w", "lnfw"):
        getattr(params, name)[:] += 1
    params.wte[config.vocab_size :] = 0
    return flat


def name_parameters(flat: np.ndarray, config: GPT2Config):
    return trainer.name_tensors(flat, trainer.PARAMETERS, trainer.tensor_sizes(config, 1, 1), align=1)


def oracle_table(flat: np.ndarray, config: GPT2Config) -> dict[str, torch.Tensor]:
    params = name_parameters(flat.astype(np.float64), config)
    return {name: torch.from_numpy(getattr(params, name)) for name in NAMES}


def build(dev, config: GPT2Config, B: int, T: int, attention: str, flat: np.ndarray) -> trainer.GPT2:
    """A model of these parameters, with NaN wherever the trainer does not write first."""
    if attention == "flash" and not supported(config.channels, config.num_heads):
        pytest.skip("no flash attention for this head size")
    model = trainer.GPT2(config, B, T, attention)
    for memory in (model.acts_memory, model.grads_memory, model.grads_acts_memory):
        memory[:] = np.nan
    dev.copy_in(model.params_memory, flat)
    dev.synchronize()
    return model


def make_batches(config: GPT2Config, count: int, B: int, T: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng([B, T])
    return [tuple(rng.integers(0, config.vocab_size, (2, B, T), dtype=np.int32)) for _ in range(count)]


def send(dev, model: trainer.GPT2, inputs: np.ndarray, targets: np.ndarray) -> None:
    order, count = sort_by_token(inputs)
    arrays = model.inputs, model.targets, model.order, model.count
    for array, values in zip(arrays, (inputs, targets, order, count), strict=True):
        dev.copy_in(array, np.ascontiguousarray(values))
    dev.synchronize()


def forward_backward(dev, model: trainer.GPT2, inputs, targets, dloss: float, accumulate: bool = False):
    """Logits (B,T,V) and mean loss; the gradients are in the model."""
    B, T = inputs.shape
    send(dev, model, inputs, targets)
    if not accumulate:
        trainer.gpt2_zero_grad(model)
    trainer.gpt2_forward(model, B, T)
    logits = dev.to_host(model.acts(B, T).logits)[..., : model.config.vocab_size]
    trainer.gpt2_loss(model, B, T, dloss)
    trainer.gpt2_backward(model, B, T, accumulate)
    return logits, dev.to_host(model.acts(B, T).losses).mean(dtype=np.float64)


def gradients_of(dev, model: trainer.GPT2) -> dict[str, np.ndarray]:
    return {name: dev.to_host(getattr(model.grads, name)) for name in NAMES}


@each_model
def test_logits_loss_and_every_gradient_equal_pytorchs(product_dev, monkeypatch, config, attention):
    flat, (B, T) = flat_parameters(config), batch_shape(config)
    ((inputs, targets),) = make_batches(config, 1, B, T)
    allowed = tolerance(product_dev, attention)
    names = "empty", "copy_in", "synchronize"
    unguarded = SimpleNamespace(**{name: getattr(product_dev, name) for name in names})
    with guarded(unguarded) as memory:
        with monkeypatch.context() as patch:
            patch.setattr(product_dev, "empty", lambda shape: memory.scratch(shape))
            model = build(product_dev, config, B, T, attention, flat)
        logits, loss = forward_backward(product_dev, model, inputs, targets, 1 / (B * T))
    want_logits, want_loss, want = oracle.gpt2_gradients(
        oracle_table(flat, config), inputs, targets, config.num_heads, config.vocab_size, definition(attention)
    )
    assert_close("logits", logits, want_logits, allowed)
    assert_close("loss", np.array(loss), want_loss, allowed)
    for name, gradient in gradients_of(product_dev, model).items():
        assert_close(f"d{name}", gradient, want[name], allowed)
    assert np.isfinite(product_dev.to_host(model.grads_memory)).all()
    assert not product_dev.to_host(model.grads.wte)[config.vocab_size :].any()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@each_model
def test_ten_steps_of_adamw_equal_pytorchs(product_dev, config, attention, weight_decay):
    flat, (B, T) = flat_parameters(config), batch_shape(config)
    batches = make_batches(config, 10, B, T)
    model = build(product_dev, config, B, T, attention, flat)
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        losses.append(forward_backward(product_dev, model, inputs, targets, 1 / (B * T))[1])
        trainer.gpt2_update(model, 1e-3, 0.9, 0.999, 1e-8, weight_decay, step + 1)
    want_losses, want = oracle.gpt2_train(
        oracle_table(flat, config), batches, config.num_heads, config.vocab_size, definition(attention),
        learning_rate=1e-3, weight_decay=weight_decay, decayed=trainer.MATRICES,
    )  # fmt: skip
    allowed = tolerance(product_dev, attention)
    assert_close("losses of ten steps", np.array(losses), np.array(want_losses), allowed)
    for name in NAMES:
        ours, theirs = product_dev.to_host(getattr(model.params, name)), want[name].numpy()
        if name == "qkvb" and attention != "relu":
            # Softmax is blind to what moves all scores of a row: the key bias has gradient 0. What rounding makes of
            # that, AdamW scales up to whole steps in any direction.
            C = config.channels
            ours, theirs = (np.delete(values, np.s_[C : 2 * C], axis=1) for values in (ours, theirs))
        assert_close(f"{name} after ten steps", ours, theirs, allowed)


@each_model
def test_accumulated_gradients_of_small_batches_are_those_of_one_large_batch(product_dev, config, attention):
    flat, (B, T), count = flat_parameters(config), batch_shape(config), 3
    batches = make_batches(config, count, B, T)
    model = build(product_dev, config, B, T, attention, flat)
    for i, (inputs, targets) in enumerate(batches):
        forward_backward(product_dev, model, inputs, targets, 1 / (count * B * T), accumulate=i > 0)
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    _, _, want = oracle.gpt2_gradients(
        oracle_table(flat, config), inputs, targets, config.num_heads, config.vocab_size, definition(attention)
    )
    for name, gradient in gradients_of(product_dev, model).items():
        assert_close(f"accumulated d{name}", gradient, want[name], tolerance(product_dev, attention))


@each_model
def test_gradients_are_clipped_to_the_given_norm(product_dev, config, attention):
    flat, (B, T) = flat_parameters(config), batch_shape(config)
    ((inputs, targets),) = make_batches(config, 1, B, T)
    model = build(product_dev, config, B, T, attention, flat)
    forward_backward(product_dev, model, inputs, targets, 1 / (B * T))
    grads = product_dev.to_host(model.grads_memory).astype(np.float64)
    norm = np.linalg.norm(grads)
    trainer.gpt2_update(model, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, grad_clip=0.5 * norm)
    assert_close("norm of all gradients", product_dev.to_host(model.grads_acts.norm)[:1], np.array([norm]), 1e-5)
    assert_close("m of clipped gradients", model.m_memory, 0.1 * 0.5 * grads, 1e-5)


@each_model
def test_a_smaller_batch_in_the_same_buffers_gives_what_a_fresh_model_gives(product_dev, config, attention):
    flat, (B, T) = flat_parameters(config), batch_shape(config)
    ((inputs, targets),) = make_batches(config, 1, B, T)
    large = build(product_dev, config, B, T, attention, flat)
    forward_backward(product_dev, large, inputs, targets, 1 / (B * T))
    for b, t in [(1, 1), (1, 5), (B, T - 1), (B, T)]:
        results = []
        for model in (large, build(product_dev, config, b, t, attention, flat)):
            logits, _ = forward_backward(product_dev, model, inputs[:b, :t], targets[:b, :t], 1 / (b * t))
            results.append((logits, product_dev.to_host(model.grads_memory)))
        (logits, grads), (fresh_logits, fresh_grads) = results
        assert np.array_equal(logits, fresh_logits), (b, t)
        assert np.array_equal(grads, fresh_grads), (b, t)


@each_model
def test_generation_takes_the_logits_of_the_next_token(product_dev, config, attention):
    flat, (B, T) = flat_parameters(config), batch_shape(config)
    model = build(product_dev, config, B, T, attention, flat)
    context = make_batches(config, 1, 1, T)[0][0][0]
    for t in (1, 6, T):
        want, _ = oracle.gpt2(
            oracle_table(flat, config), context[None, :t], context[None, :t], config.num_heads, config.vocab_size,
            definition(attention),
        )  # fmt: skip
        logits = trainer.next_logits(model, context[:t])
        assert_close("next logits", logits, want[0, -1], tolerance(product_dev, attention))


def test_generation_goes_on_when_the_text_is_longer_than_the_model_sees(dev, capsys):
    model = build(dev, ODD, 2, 11, "softmax", flat_parameters(ODD))
    tokenizer = Tokenizer([bytes([32 + i]) for i in range(94)] + [b"the"] * 7, eot=100)
    texts = []
    for tokens in (tokenizer, tokenizer, None):
        trainer.generate(model, tokens, trainer.Sampler(1337), 30)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("generating:\n---\n") and texts[0].endswith("\n---\n")
    ids = [int(word) for word in texts[2].split("---")[1].split()]
    assert len(ids) == 30 and all(0 <= token < 101 for token in ids)


def test_parameter_tensors_follow_one_another_as_in_the_model_file():
    flat = np.arange(num_parameters(ODD))
    params = name_parameters(flat, ODD)
    assert list(oracle.TRANSFORMERS_NAMES) == NAMES
    assert np.array_equal(np.concatenate([getattr(params, name).ravel() for name in NAMES]), flat)
    assert params.qkvw.shape == (2, 63, 21) and np.shares_memory(params.layer[1].qkvw, params.qkvw)
    assert np.array_equal(params.layer[1].fcb, params.fcb[1])


def test_every_activation_starts_at_a_256_byte_boundary_and_none_overlap():
    for table in (trainer.ACTIVATIONS + trainer.MATRIX_ACTIVATIONS, trainer.ACTIVATIONS + trainer.FLASH_ACTIVATIONS):
        places, length = trainer.layout(table, trainer.tensor_sizes(ODD, 2, 11), trainer.ALIGNMENT)
        ends = [0]
        for start, shape in places.values():
            assert start % 64 == 0 and start >= ends[-1]
            ends.append(start + int(np.prod(shape)))
        assert length == ends[-1]


@pytest.mark.parametrize("config", [ODD, EVEN, HEADS_OF_64])
def test_an_update_covers_every_parameter_once_and_decays_only_matrices(config):
    ranges = trainer.parameter_ranges(config, trainer.MATRICES)
    assert [start for start, _, _ in ranges] == [0] + [end for _, end, _ in ranges[:-1]]
    assert ranges[-1][1] == num_parameters(config)
    decays = np.concatenate([np.full(end - start, decayed) for start, end, decayed in ranges])
    params = name_parameters(decays, config)
    for name in NAMES:
        assert (getattr(params, name) == (name in ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw"))).all(), name


@pytest.mark.parametrize("attention", ["softmax", "relu", "flash"])
def test_a_model_that_does_not_fit_says_what_it_needs_before_anything_is_allocated(dev, monkeypatch, attention):
    def no_allocation(*args):
        raise AssertionError("allocated")

    monkeypatch.setattr(dev, "memory", lambda: (5 << 20, 64 << 30))
    for name in ("empty", "zeros"):
        monkeypatch.setattr(dev, name, no_allocation)
    with pytest.raises(UserError, match=r"B=64, T=32 needs \d+ MiB.* 5 MiB are free on .*: lower -b or -t") as caught:
        trainer.GPT2(ODD, 64, 32, attention)
    assert "\n" not in str(caught.value)


def test_a_model_for_inference_has_no_gradients_and_needs_less_memory(dev):
    training, inference = (trainer.GPT2(EVEN, 8, 32, "softmax", inference=only) for only in (False, True))
    assert not hasattr(inference, "grads")
    assert sum(inference.megabytes.values()) < sum(training.megabytes.values())


def test_random_weights_are_gpt2s_and_depend_on_the_seed(dev):
    config = GPT2Config(64, 250, 256, 4, 2, 64)
    params, again, other = (
        dev.to_host(trainer.gpt2_build_from_random(config, 1, 8, "softmax", seed).params_memory) for seed in (1, 1, 2)
    )
    assert np.array_equal(params, again) and not np.array_equal(params, other)
    params = name_parameters(params, config)
    for name, deviation in {
        "wte": 0.02, "wpe": 0.02, "qkvw": 0.02, "fcw": 0.02, "attprojw": 0.02 / 8**0.5, "fcprojw": 0.02 / 8**0.5,
    }.items():  # fmt: skip
        assert getattr(params, name)[: config.vocab_size].std() == pytest.approx(deviation, rel=0.05), name
    assert not params.wte[250:].any()
    for name in NAMES:
        if name.endswith("b"):
            assert not getattr(params, name).any(), name
    assert all((getattr(params, name) == 1).all() for name in ("ln1w", "ln2w", "lnfw"))


def test_a_model_file_is_built_into_the_model_it_holds(dev, tmp_path):
    flat = flat_parameters(ODD)
    write_model(tmp_path / "model.bin", ODD, flat)
    model = trainer.gpt2_build_from_checkpoint(tmp_path / "model.bin", 2, 11, "relu")
    assert model.config == ODD
    assert np.array_equal(dev.to_host(model.params_memory), flat)


def test_flash_attention_is_refused_where_products_are_not_in_tf32(monkeypatch):
    monkeypatch.setattr(trainer.device, "kind", lambda: "cuda")
    monkeypatch.setattr(trainer.device, "tf32", lambda: False)
    with pytest.raises(UserError, match="-a flash computes in TF32: .*; use -a softmax"):
        trainer.choose_attention("flash", HEADS_OF_64)
    assert trainer.choose_attention("auto", HEADS_OF_64) == "softmax"

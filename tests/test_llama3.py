"""Llama 3 against transformers' LlamaForCausalLM: logits, loss, every gradient, and ten AdamW steps."""

from collections.abc import Callable
from dataclasses import replace

import oracle
from llmc.data.batches import Batches
from llmc.model.model import Model
from llmc.model.tensors import Config
from models import GivenBatches, build, forward_backward, make_batches, name_parameters
from oracle import assert_close, model_tolerance
from train_gpt2_fp32 import training_step
from train_llama3 import Llama3, Llama3Config

import numpy as np
import pytest
import torch

SMALL = Llama3Config(16, 101, 2, 6, 2, 48, 67, tied=False)  # heads of 8
CONFIGS = {
    "6/1": replace(SMALL, num_kv_heads=1),
    "6/2, tied": replace(SMALL, tied=True),
    "6/3, scaled by 8": replace(SMALL, num_kv_heads=3, rope_scaling=8.0),
    "6/6, tied, scaled by 32": replace(SMALL, num_kv_heads=6, tied=True, rope_scaling=32.0),
    "9/3": replace(SMALL, num_heads=9, num_kv_heads=3, channels=54),
}
B, T = 2, 13


def assert_all_close(what: str, ours: np.ndarray, theirs: np.ndarray, config: Config, tolerance: float) -> None:
    """Compares flat buffers (num_parameters,) tensor by tensor."""
    got, want = name_parameters(ours, config), name_parameters(theirs, config)
    for name, _ in config.parameters():
        assert_close(f"{what} {name}", getattr(got, name), getattr(want, name), tolerance)


def assert_is_transformers(model_dev, config: Config, blind: Callable[[np.ndarray], None] | None = None) -> None:
    """Compares logits, loss, every gradient and ten AdamW steps. blind: zeroes those parameters (num_parameters,) of
    which the gradient is 0: what rounding makes of that, AdamW scales up to whole steps in any direction."""
    allowed = model_tolerance(model_dev)
    theirs = oracle.transformers_model(config)
    flat = oracle.flat_parameters_of(theirs, config)
    batches = make_batches(config, 10, B, T)
    training = build(model_dev, config, B, T, "softmax", flat.astype(np.float32), weight_decay=0.1)
    model = training.model

    logits, loss = forward_backward(model_dev, training, *batches[0], 1 / (B * T))
    want_logits, want_loss = oracle.transformers_loss(theirs, *batches[0])
    want_loss.backward()
    assert_close("logits", logits, want_logits, allowed)
    assert_close("loss", np.array(loss), want_loss, allowed)
    gradients = oracle.flat_parameters_of(theirs, config, gradients=True)
    assert_all_close("d", model_dev.to_host(model.grads_memory), gradients, config, allowed)

    matrices = [parameter for parameter in theirs.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in theirs.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8,
    )  # fmt: skip
    sent = Batches(training.batch, training.acts.losses, GivenBatches(batches))
    step_of = training_step(training, sent)
    for step, batch in enumerate(batches):
        step_of(step, 1e-3)
        model_dev.synchronize()
        optimizer.zero_grad()
        _, want_loss = oracle.transformers_loss(theirs, *batch)
        want_loss.backward()
        optimizer.step()
        assert_close("losses of ten steps", np.array(sent.mean_loss(step)), want_loss, allowed)
    stepped, ours = oracle.flat_parameters_of(theirs, config), model_dev.to_host(model.params_memory).copy()
    if blind:
        blind(stepped), blind(ours)
    assert_all_close("after ten steps:", ours, stepped, config, oracle.after_steps(allowed))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_llama_is_transformers_in_logits_loss_gradients_and_ten_steps(model_dev, config):
    assert_is_transformers(model_dev, config)


def assert_a_large_one_is_transformers(model_dev, kind: type[Model], config: Config, B: int, T: int) -> None:
    """Compares logits, loss and every gradient, with each attention. On the CPU it would take minutes: skipped."""
    if model_dev.kind != "cuda":
        pytest.skip("takes minutes on the CPU")
    theirs = oracle.transformers_model(config)
    flat = oracle.flat_parameters_of(theirs, config).astype(np.float32)
    theirs.cuda()
    ((inputs, targets),) = make_batches(config, 1, B, T)
    tokens = (torch.as_tensor(ids, dtype=torch.long, device="cuda") for ids in (inputs, targets))
    want_logits, want_loss = oracle.transformers_loss(theirs, *tokens)
    want_loss.backward()
    theirs.cpu()
    gradients = oracle.flat_parameters_of(theirs, config, gradients=True)
    # transformers normalises in fp32 whatever the model is in; and gradients pass through some 30 layers.
    allowed = 2 * model_tolerance(model_dev)
    for attention in ("softmax", "flash") if model_dev.tf32 else ("softmax",):
        training = build(model_dev, config, B, T, attention, flat)
        assert isinstance(training.model, kind)
        logits, loss = forward_backward(model_dev, training, inputs, targets, 1 / (B * T))
        assert_close(f"{attention} logits", logits, want_logits, allowed)
        assert_close(f"{attention} loss", np.array(loss), want_loss, allowed)
        assert_all_close(f"{attention} d", model_dev.to_host(training.model.grads_memory), gradients, config, allowed)


def test_smollm2_135m_is_transformers_in_logits_loss_and_every_gradient(model_dev):
    assert_a_large_one_is_transformers(model_dev, Llama3, Llama3Config.described("smollm2-135m"), B=2, T=129)

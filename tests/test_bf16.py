"""Whole models in bf16: as near to float64 as PyTorch's own."""

from copy import deepcopy

import oracle
from conftest import DEVICES, TYPES, on
from llmc.model.tensors import Config
from models import build, forward_backward, make_batches, name_parameters
from train_gpt2_fp32 import GPT2Config
from train_llama3 import Llama3Config
from train_pythia import PythiaConfig
from train_qwen3 import Qwen3Config

import numpy as np
import pytest

MODELS = {
    "GPT-2": (GPT2Config(40, 250, 2, 2, 128), "softmax"),
    "GPT-2, flash": (GPT2Config(40, 250, 2, 2, 128), "flash"),
    "Llama 3": (Llama3Config(40, 250, 2, 6, 2, 96, 200, tied=False), "softmax"),
    "Pythia": (PythiaConfig(40, 250, 2, 3, 96), "softmax"),
    "Qwen3": (Qwen3Config(40, 250, 2, 4, 2, 96, 200, head_size=32), "softmax"),
}
each_model = pytest.mark.parametrize(("config", "attention"), MODELS.values(), ids=MODELS)
B, T, SAMPLES = 2, 33, 4


dev = on(TYPES[len(DEVICES) :])


def transformers_gradients(model, config: Config, batch) -> tuple[float, np.ndarray]:
    """The loss, and the gradients in our order."""
    model.zero_grad()
    _, loss = oracle.transformers_loss(model, *batch)
    loss.backward()
    return loss.item(), oracle.flat_parameters_of(deepcopy_in_double(model), config, gradients=True)


def deepcopy_in_double(model):
    gradients = [parameter.grad.double() for parameter in model.parameters()]
    model = deepcopy(model).double()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return model


@each_model
def test_gradients_are_as_near_to_float64_as_those_of_a_bf16_model_of_transformers(dev, config, attention):
    """The root of the mean square over some batches, tensor by tensor, on parameters that bf16 holds exactly."""
    exact = oracle.transformers_model(config).bfloat16().double()
    theirs = deepcopy(exact).bfloat16()
    flat = oracle.flat_parameters_of(exact, config).astype(np.float32)
    training = build(dev, config, B, T, attention, flat)
    errors = {}
    for batch in make_batches(config, SAMPLES, B, T):
        want_loss, want = transformers_gradients(exact, config, batch)
        their_loss, their = transformers_gradients(theirs, config, batch)
        _, loss = forward_backward(dev, training, *batch, 1 / (B * T))
        assert abs(loss - want_loss) <= 1.2 * abs(their_loss - want_loss) + 2e-3 * want_loss
        gradients = (x.astype(np.float64) for x in (want, dev.to_host(training.model.grads_memory), their))
        tensors = [name_parameters(flat, config) for flat in gradients]
        for name, _ in config.parameters():
            values, *others = (getattr(each, name) for each in tensors)
            off = [np.square(other - values).sum() / np.square(values).sum() for other in others]
            errors.setdefault(name, []).append(off)
    found = {name: np.sqrt(np.mean(squares, axis=0)) for name, squares in errors.items()}
    worse = {name: (ours, their) for name, (ours, their) in found.items() if ours > 1.2 * their}
    assert not worse, worse

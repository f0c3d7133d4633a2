"""Batches of which most tensors have more than 2^31 elements, on a GPU with room for them: they must give what one
small batch gives that they repeat."""

import device
from llmc.model.activations import batch_sizes, training_tables
from llmc.model.tensors import num_parameters, shape_of
from models import build, forward_backward, kind_of, make_batches, names_of
from oracle import assert_close, normal
from train_gpt2_fp32 import GPT2Config
from train_llama3 import Llama3Config
from train_pythia import PythiaConfig

import numpy as np
import pytest

B, T, COPIES = 8, 256, 88
# Both round the same numbers to TF32, but add products up in different orders: a sum may then round to its neighbour,
# which is 1e-3 of it away.
TOLERANCE = 2e-3
CONFIGS = {  # of one layer, with heads of 64 channels
    "gpt2": GPT2Config(T, 12000, 1, 64, 4096),
    "llama3": Llama3Config(T, 12000, 1, 64, 16, 4096, 8192),
    "pythia": PythiaConfig(T, 12000, 1, 64, 4096),
}


def losses_and_gradients(config, attention: str, copies: int) -> tuple[np.ndarray, dict]:
    """Of so many copies of a batch, one after another."""
    parameters = 0.02 * normal(np.random.default_rng(1), num_parameters(config))
    training = build(device, config, B * copies, T, attention, parameters, logit_rows=0)
    inputs, targets = (np.tile(part, (copies, 1)) for part in make_batches(config, 1, B, T)[0])
    forward_backward(device, training, inputs, targets, 1 / inputs.size)
    gradients = {name: device.to_host(getattr(training.model.grads, name)) for name in names_of(config)}
    return device.to_host(training.acts.losses), gradients


@pytest.fixture
def gpu():
    if device.use() != "cuda" or device.memory()[0] < 116 << 30:
        pytest.skip("needs a GPU with 116 GiB free")
    device.use_precision("tf32")
    yield
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("attention", ["softmax", "relu", "flash"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_batch_of_more_than_two_to_the_31_elements_gives_what_its_part_gives(gpu, config, attention):
    tables = training_tables(kind_of(config), attention)
    sizes = batch_sizes(config, B * COPIES, T, 0)
    large = {row[0] for table in tables for row in table if np.prod(shape_of(row[1], sizes)) > 2**31}
    assert large >= {"logits", "fch", "dfch"} | (set() if attention == "flash" else {"att"})
    losses, gradients = losses_and_gradients(config, attention, 1)
    many_losses, many_gradients = losses_and_gradients(config, attention, COPIES)
    assert_close("losses", many_losses, np.tile(losses, (COPIES, 1)), TOLERANCE)
    for name, want in gradients.items():
        assert_close(f"d{name}", many_gradients[name], want, TOLERANCE)

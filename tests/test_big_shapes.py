"""Batches of which most tensors have more than 2^31 elements, on a GPU with room for them: they must give what one
small batch gives that they repeat."""

import device
from llmc.data.batches import Batches
from llmc.model.activations import batch_sizes, training_tables
from llmc.model.tensors import num_parameters, shape_of
from llmc.step.training import make_training
from models import kind_of
from oracle import assert_close
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


class OneBatch:
    """Always the same B sequences, over and over."""

    def __init__(self, vocab_size: int):
        self.tokens = np.random.default_rng(0).integers(0, vocab_size, (B, T + 1))

    def next_batch(self, inputs, targets) -> None:
        inputs[:], targets[:] = (np.resize(part, inputs.shape) for part in (self.tokens[:, :-1], self.tokens[:, 1:]))


def losses_and_gradients(config, attention: str, batch_size: int, parameters: np.ndarray) -> tuple[np.ndarray, dict]:
    training = make_training(kind_of(config), config, batch_size, T, attention, logit_rows=0)
    model, acts, batch = training.model, training.acts, training.batch
    device.copy_in(model.params_memory, parameters)
    batches = Batches(batch, acts.losses, OneBatch(config.vocab_size))
    batches.read(0, 0)
    batches.send(0, 0)
    model.zero_grad()
    model.forward(acts, batch)
    model.loss(acts, batch, dloss=1 / (batch_size * T))
    model.backward(acts, batch)
    batches.fetch_losses(0, 0)
    device.synchronize()
    return batches.losses[0, 0], {
        name: device.to_host(getattr(model.grads, name)) for name, _ in config.parameters()
    }


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
    parameters = np.random.default_rng(1).standard_normal(num_parameters(config), dtype=np.float32)
    parameters *= np.float32(0.02)
    losses, gradients = losses_and_gradients(config, attention, B, parameters)
    many_losses, many_gradients = losses_and_gradients(config, attention, B * COPIES, parameters)
    assert_close("losses", many_losses, np.tile(losses, (COPIES, 1)), TOLERANCE)
    for name, want in gradients.items():
        assert_close(f"d{name}", many_gradients[name], want, TOLERANCE)

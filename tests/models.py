"""The tests' list of models, tiny ones of each kind for the tests that run for all of them, and a pass over a batch."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from dev.scripts import model_kinds
from kernels.flash_attention import HEAD_SIZES
from llmc.data.batches import fill_batch
from llmc.files.model_file import read_model
from llmc.model.batch import Batch
from llmc.model.model import Model
from llmc.model.tensors import Config, name_tensors, num_parameters
from llmc.model.weights import load_weights, put
from llmc.step.training import Training, make_training
from oracle import normal
from train_gpt2_fp32 import GPT2, GPT2Config
from train_llama3 import Llama3, Llama3Config
from train_pythia import Pythia, PythiaConfig
from train_qwen3 import Qwen3, Qwen3Config

import numpy as np
import pytest

# maxT, V, L, NH, C: nothing here is a multiple of 4 or 32 that need not be.
ODD = GPT2Config(32, 101, 2, 3, 21)
EVEN = GPT2Config(32, 256, 1, 2, 64)
HEADS_OF_64 = GPT2Config(80, 101, 2, 2, 128)
LLAMA_ODD = Llama3Config(32, 101, 2, 6, 2, 36, 41, tied=False)  # heads of 6
GROUPS_OF_64 = Llama3Config(80, 101, 1, 4, 2, 256, 90, tied=False)
PYTHIA_ODD = PythiaConfig(32, 101, 2, 3, 21, rotary=0.6)  # heads of 7; RoPE rotates 4 of the 7 channels
PYTHIA_HEADS_OF_64 = PythiaConfig(80, 101, 2, 2, 128)
QWEN_ODD = Qwen3Config(32, 101, 2, 6, 2, 21, 41, head_size=10, tied=False)
QWEN_HEADS_OF_64 = Qwen3Config(80, 101, 1, 4, 2, 96, 90, head_size=64)

# With an attention that each can have.
ONE_OF_EACH = [
    (ODD, "relu"), (HEADS_OF_64, "flash"), (LLAMA_ODD, "softmax"), (GROUPS_OF_64, "flash"), (PYTHIA_ODD, "softmax"),
    (PYTHIA_HEADS_OF_64, "flash"), (QWEN_ODD, "softmax"), (QWEN_HEADS_OF_64, "flash"),
]  # fmt: skip
# All that models of a kind differ in.
VARIANTS = [
    (ODD, "softmax"), (ODD, "relu"), (EVEN, "softmax"), (EVEN, "relu"), (HEADS_OF_64, "flash"),
    *((replace(LLAMA_ODD, num_kv_heads=NKV), "softmax") for NKV in (1, 2, 3, 6)),
    (replace(LLAMA_ODD, tied=True, rope_scaling=32.0), "relu"),
    (replace(LLAMA_ODD, num_heads=9, num_kv_heads=3, channels=54, norm_eps=1e-3), "softmax"),
    (GROUPS_OF_64, "flash"), (replace(GROUPS_OF_64, num_kv_heads=4, tied=True), "flash"),
    *((replace(PYTHIA_ODD, norm=norm, tied_norm=tied, parallel=parallel), "softmax")
      for norm in ("layer", "rms") for tied, parallel in ((False, True), (True, True), (False, False))),
    (replace(PYTHIA_ODD, channels=24, norm_eps=1e-3, gelu="erf", rope_theta=50.0), "relu"),
    (replace(PYTHIA_ODD, channels=24, rotary=1.0, parallel=False), "relu"),
    (PYTHIA_HEADS_OF_64, "flash"), (replace(PYTHIA_HEADS_OF_64, tied_norm=True), "flash"),
    *((replace(QWEN_ODD, num_kv_heads=NKV), "softmax") for NKV in (1, 2)),
    (replace(QWEN_ODD, num_kv_heads=6, channels=66, head_size=4, tied=True, norm_eps=1e-3, rope_theta=50.0), "relu"),
    (QWEN_HEADS_OF_64, "flash"), (replace(QWEN_HEADS_OF_64, num_kv_heads=4, channels=300, tied=False), "flash"),
]  # fmt: skip

# The same, those beyond ONE_OF_EACH only before a release: for claims that no variant bears on more than another.
SOME = [each if each in ONE_OF_EACH else pytest.param(*each, marks=pytest.mark.long) for each in VARIANTS]

# The kinds, and one of each as -e describes it.
TINY: dict[str, tuple[type[Model], str]] = {
    "gpt2": (GPT2, "layers=2,heads=2,channels=32"),
    "llama3": (Llama3, "layers=2,heads=4,kv_heads=2,channels=40,hidden=44"),
    "pythia": (Pythia, "layers=2,heads=2,channels=32"),
    "qwen3": (Qwen3, "layers=2,heads=4,kv_heads=2,channels=36,hidden=44,head_size=12"),
}

# What is imported from transformers and exported to them.
GPT2S = [GPT2Config(17, 53, 2, 3, 24), GPT2Config(8, 128, 1, 1, 5), GPT2Config(32, 257, 3, 2, 128)]
LLAMAS = [
    Llama3Config(17, 53, 2, 6, 2, 48, 40, rope_theta=1e4, tied=True),
    Llama3Config(64, 300, 2, 6, 1, 48, 56, rope_theta=5e5, rope_scaling=8.0, tied=False),
    Llama3Config(33, 128, 1, 6, 6, 36, 64, rope_theta=1e5, norm_eps=1e-3, tied=True),
    Llama3Config(64, 257, 3, 4, 2, 64, 33, rope_theta=1e3, rope_scaling=32.0, tied=False),
    Llama3Config(64, 257, 1, 4, 2, 64, 32, rope_theta=1e3, rope_scaling=8.0, tied=False, original_length=100),
]
PYTHIAS = [
    PythiaConfig(17, 53, 2, 3, 24, rotary=0.5, gelu="erf"),
    PythiaConfig(40, 300, 2, 3, 21, rotary=0.6, parallel=False),  # heads of 7; RoPE rotates 4 of the 7 channels
    PythiaConfig(33, 128, 1, 2, 32, rotary=1.0, rope_theta=500.0, norm_eps=1e-3),
    PythiaConfig(64, 257, 3, 4, 128, gelu="erf", parallel=False),
]
QWENS = [
    Qwen3Config(17, 53, 2, 6, 2, 48, 40, head_size=8),
    Qwen3Config(40, 300, 3, 6, 1, 21, 56, head_size=10, tied=False, norm_eps=1e-3),
    Qwen3Config(33, 128, 1, 6, 6, 36, 64, head_size=4, rope_theta=500.0),
]
FAMILIES = [GPT2S, LLAMAS, PYTHIAS, QWENS]


def described(name: str, V: int, maxT: int) -> tuple[str, Config]:
    """The model of TINY of this name, with that vocabulary and length: what -e takes, and its sizes."""
    kind, description = TINY[name]
    description += f",maxT={maxT}"
    return description, kind.Config.described(description, V)


def kind_of(config: Config) -> type[Model]:
    return next(kind for kind in model_kinds() if kind.Config is type(config))


def name_of(value) -> str:
    """What a parameter of a test is called."""
    if not isinstance(value, Config):
        return str(value)
    groups = f"-{value.num_heads}of{value.num_kv_heads}" if hasattr(value, "num_kv_heads") else ""
    form = [value.norm, *(f for f in ("tied_norm", "parallel") if getattr(value, f))] if hasattr(value, "norm") else []
    return "-".join([value.NAME.replace(" ", ""), f"C{value.channels}{groups}", *form])


def names_of(config: Config) -> list[str]:
    return [name for name, _ in config.parameters()]


def name_parameters(flat: np.ndarray, config: Config) -> SimpleNamespace:
    return name_tensors(flat, config.parameters(), config.sizes(), align=1)


def flat_parameters(config: Config) -> np.ndarray:
    """Initial weights, all of them disturbed, so that a tensor in another's place shows; the padding is 0."""
    rng = np.random.default_rng(config.channels)
    flat = 0.05 * normal(rng, num_parameters(config))
    params = name_parameters(flat, config)
    for name in kind_of(config).first_weights(config)[1].keys() & set(names_of(config)):
        getattr(params, name)[:] += 1
    if hasattr(params, "fcb"):
        params.fcb[:] *= 40  # so wide that the two forms of GELU differ
    for name, shape in config.parameters():
        if shape[0] == "Vp":
            getattr(params, name)[config.vocab_size :] = 0
    return flat


def build(dev, config: Config, B: int, T: int, attention: str, flat: np.ndarray, **options) -> Training:
    """What trains a model of these parameters, with NaN wherever the trainer does not write first."""
    if attention == "flash" and config.head_size not in HEAD_SIZES:
        pytest.skip("no flash attention for this head size")
    training = make_training(kind_of(config), config, B, T, attention, **options)
    activations = training.activations
    for memory in activations.memory, activations.grads_memory, training.model.grads_memory:
        memory.view(np.uint8).fill(255)  # which is NaN in any type
    put(training.model, training.adamw, 0, dev.asarray(flat))
    return training


def build_from_file(kind: type[Model], path: Path, B: int, T: int, attention: str, **options) -> Training:
    """What trains the model in a file."""
    config, tensors = read_model(path, kind.Config)
    training = make_training(kind, config, B, T, attention, **options)
    load_weights(training.model, training.adamw, tensors)
    return training


def state_of(training: Training) -> list[np.ndarray]:
    """The parameters, fp32, as AdamW updates them, and its m and v, as a checkpoint has them."""
    return [np.concatenate(list(pieces)) for pieces in training.exchange.whole_state(training.adamw)]


def write_record(checkpoint: Path, record: dict) -> None:
    """Writes a checkpoint's state.json anew, with a right checksum."""
    crc32 = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    (checkpoint / "state.json").write_text(json.dumps(record | {"crc32": crc32}))


def make_batches(config: Config, count: int, B: int, T: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng([B, T])
    return [tuple(rng.integers(0, config.vocab_size, (2, B, T), dtype=np.int32)) for _ in range(count)]


class GivenBatches:
    """A loader of these batches, one after the other."""

    def __init__(self, batches: Iterable):
        self.rest = iter(batches)

    def next_batch(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        inputs[:], targets[:] = next(self.rest)


def forward_backward(dev, training: Training, inputs, targets, dloss: float, accumulate: bool = False):
    """Logits (B,T,V) and mean loss of a batch, which may be smaller than the training's; the gradients are in the
    model."""
    model, acts, batch, (B, T) = training.model, training.acts, training.batch, inputs.shape
    if (B, T) != (batch.B, batch.T):
        acts, batch = training.activations.views(B, T), Batch(B, T)
    fill_batch(batch, inputs, targets)
    if not accumulate:
        model.zero_grad()
    model.forward(acts, batch)
    model.loss(acts, batch)
    logits = dev.to_host(acts.logits).reshape(B, T, -1)[..., : model.config.vocab_size]
    model.loss(acts, batch, dloss, accumulate)
    model.backward(acts, batch, accumulate)
    return logits, dev.to_host(acts.losses).mean(dtype=np.float64)


MODELS = model_kinds()

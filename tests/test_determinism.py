"""The same run twice is the same run to the last bit: losses, gradients, parameters and samples of six steps."""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import device
from dev.scripts import small_model
from llmc.data.batches import Batches
from llmc.data.dataloader import DataLoader
from llmc.data.token_file import write_tokens
from llmc.model.activations import Cache
from llmc.model.tensors import Config
from llmc.model.weights import randomize
from llmc.step.generation import Writer, print_sample
from llmc.step.sampler import Sampler
from llmc.step.training import make_training
from models import TINY, kind_of
from train_gpt2_fp32 import training_step

import numpy as np
import pytest

STEPS, B, T = 6, 2, 21
# Wide enough that products are shared out among threads, and layernorm's rows among blocks; heads of 64.
MODELS = {
    f"{name}-{attention}": (kind.Config.described(small_model(kind.Config), 317), attention)
    for name, (kind, _) in TINY.items() for attention in ("softmax", "flash")
}  # fmt: skip
MODELS["gpt2-relu"] = MODELS["gpt2-softmax"][0], "relu"
ORDINARY = [name for name in MODELS if name.startswith("gpt2") or name.endswith("softmax")]  # the others are long


def digest_of_run(config: Config, attention: str) -> dict[str, str]:
    """What six steps from seed 7 lead to, as hexadecimal digests, on the device in use."""
    training = make_training(kind_of(config), config, B, T, attention, weight_decay=0.1, grad_clip=1.0)
    model, losses = training.model, np.zeros(STEPS)
    randomize(model, training.adamw, 7)
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(7).integers(0, config.vocab_size, 1000) ** 2 % config.vocab_size
        write_tokens(Path(folder) / "tokens.bin", tokens)
        loader = DataLoader(Path(folder) / "tokens.bin", "train", B, T, config.vocab_size, shuffle_seed=7)
        batches = Batches(training.batch, training.acts.losses, loader)
        step_of = training_step(training, batches)
        for step in range(STEPS):
            step_of(step, 1e-3)
            device.synchronize()
            losses[step] = batches.mean_loss(step)
    assert losses[-1] < losses[0]
    with contextlib.redirect_stdout(io.StringIO()) as samples:
        print_sample(Writer(Cache(model, 1, T, attention, training.activations.memory)), None, Sampler(7), 12)
    results = {
        "losses": losses.tobytes(),
        "gradients": device.to_host(model.grads_memory).tobytes(),
        "parameters": device.to_host(model.params_memory).tobytes(),
        "samples": samples.getvalue().encode(),
    }
    return {name: hashlib.sha256(data).hexdigest() for name, data in results.items()}


@pytest.mark.parametrize("name", [
    name if name in ORDINARY else pytest.param(name, marks=pytest.mark.long) for name in MODELS
])  # fmt: skip
def test_two_runs_are_bit_identical(model_dev, name):
    assert digest_of_run(*MODELS[name]) == digest_of_run(*MODELS[name])


def digests_of_runs() -> dict[str, dict[str, str]]:
    device.use("cpu")
    names = [name for name in ORDINARY if name not in ("gpt2-relu", "qwen3-softmax")]
    return {name: digest_of_run(*MODELS[name]) for name in names}


def test_a_run_on_the_cpu_does_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setenv("LLMC_CPU_WARP", "1")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    env |= dict.fromkeys(("LLMC_CPU_THREADS", "OPENBLAS_NUM_THREADS"), "5")  # here: as many as cores, and 1
    found = subprocess.run([sys.executable, __file__], env=env, check=True, capture_output=True).stdout
    assert json.loads(found) == digests_of_runs()


if __name__ == "__main__":
    print(json.dumps(digests_of_runs()))

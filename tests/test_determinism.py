"""The same run twice is the same run to the last bit: losses, gradients, parameters and samples of 20 steps."""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from llmc import device

import numpy as np  # isort: skip
import pytest

import train_gpt2_fp32 as trainer
from llmc.checkpoint import GPT2Config
from llmc.dataloader import DataLoader, write_tokens
from llmc.sampler import Sampler

ATTENTIONS = ["softmax", "relu", "flash"]
STEPS, B, T = 20, 2, 21
# Wide enough that products are shared out among threads, and layernorm's rows among blocks.
CONFIG = GPT2Config(64, 317, 384, 2, 2, 128)  # heads of 64, which flash attention takes


def digest_of_run(attention: str) -> dict[str, str]:
    """What 20 steps from seed 7 lead to, as hexadecimal digests, on the device in use."""
    model = trainer.gpt2_build_from_random(CONFIG, B, T, attention, seed=7)
    losses = np.zeros(STEPS)
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(7).integers(0, CONFIG.vocab_size, 1000) ** 2 % CONFIG.vocab_size
        write_tokens(Path(folder) / "tokens.bin", tokens)
        loader = DataLoader(Path(folder) / "tokens.bin", "train", B, T, CONFIG.vocab_size, shuffle_seed=7)
        batches = trainer.Batches(model, loader)
        for step in range(STEPS):
            batches.send(step, 0)
            trainer.gpt2_zero_grad(model)
            trainer.gpt2_forward(model, B, T)
            trainer.gpt2_loss(model, B, T, 1 / (B * T))
            trainer.gpt2_backward(model, B, T)
            batches.fetch_losses(step, 0)
            trainer.gpt2_update(model, 1e-3, 0.9, 0.999, 1e-8, 0.1, step + 1, grad_clip=1.0)
            device.synchronize()
            losses[step] = batches.mean_loss(step)
    assert losses[-1] < losses[0]
    with contextlib.redirect_stdout(io.StringIO()) as samples:
        trainer.generate(model, None, Sampler(7), 12)
    results = {
        "losses": losses.tobytes(),
        "gradients": device.to_host(model.grads_memory).tobytes(),
        "parameters": device.to_host(model.params_memory).tobytes(),
        "samples": samples.getvalue().encode(),
    }
    return {name: hashlib.sha256(data).hexdigest() for name, data in results.items()}


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_two_runs_are_bit_identical(product_dev, attention):
    assert digest_of_run(attention) == digest_of_run(attention)


def test_a_run_on_the_cpu_does_not_depend_on_the_number_of_threads():
    digests = []
    for threads in "1", "2", "5":
        env = {**os.environ, "LLMC_CPU_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "LLMC_CPU_WARP": "1"}
        env["PYTHONPATH"] = str(Path(trainer.__file__).parent)
        program = [sys.executable, __file__]
        digests.append(json.loads(subprocess.run(program, env=env, check=True, capture_output=True).stdout))
    assert digests[0] == digests[1] == digests[2]


if __name__ == "__main__":
    device.use("cpu")
    print(json.dumps({attention: digest_of_run(attention) for attention in ATTENTIONS}))

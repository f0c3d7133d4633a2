"""The whole model against transformers, through llm.c's files: the counterpart of llm.c's test_gpt2_fp32.

A model `.bin` and its debug state, as dev/write_reference.py makes them (in float64), are loaded; logits, loss and
every gradient are compared, tensor by tensor. Where llm.c's published starter pack lies in the repository or in
LLMC_STARTER_PACK, it is put to the same test, and ten AdamW steps must have its losses.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import oracle
from conftest import refusal
from dev.bench import train_torch
from dev.debug_state import read_debug_state
from dev.write_reference import main, random_model, write_reference
from device import cpp
from device.errors import UserError
from llmc.data.token_file import write_tokens
from llmc.data.tokenizer import write_tokenizer
from llmc.files.model_file import read_model_header
from llmc.run.logger import read_log
from llmc.step.update import adamw_update
from models import build, build_from_file, forward_backward, make_batches, name_parameters, names_of
from oracle import assert_close, model_tolerance
from train_gpt2_fp32 import GPT2, GPT2Config
from train_llama3 import Llama3
from train_qwen3 import Qwen3

import numpy as np
import pytest
import torch

PUBLISHED_LOSSES = (
    5.270007, 4.059707, 3.375123, 2.800783, 2.315382, 1.849029, 1.394656, 0.999147, 0.624080, 0.376511,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[1]
TINY = ["-e", "layers=2,heads=3,channels=48,maxT=20", "--vocab-size", "301", "-b", "3", "-t", "17"]


def check_reference(dev, prefix: Path, attention: str, steps: int = 1) -> list[float]:
    """Loads `<prefix>.bin` and its debug state, asserts that all tensors agree, and returns the losses of so many
    steps."""
    allowed, losses = model_tolerance(dev), []
    config = read_model_header(f"{prefix}.bin", GPT2Config)
    state = read_debug_state(f"{prefix}_debug_state.bin", config)
    B, T = state.x.shape
    training = build_from_file(GPT2, f"{prefix}.bin", B, T, attention, weight_decay=0.01)
    model, wanted = training.model, name_parameters(state.grads, config)
    dev.copy_in(model.grads_memory, np.full(model.grads_memory.size, np.nan, np.float32))
    for step in range(steps):
        logits, loss = forward_backward(dev, training, state.x, state.y, 1.0 / (B * T))
        losses.append(loss)
        if step == 0:
            assert_close("logits", logits, state.logits, allowed)
            assert loss == pytest.approx(state.loss, rel=allowed)
            for name in names_of(config):
                gradient = dev.to_host(getattr(model.grads, name))
                assert_close(f"d{name}", gradient, getattr(wanted, name), allowed)
            assert not dev.to_host(model.grads.wte)[config.vocab_size :].any()
        adamw_update(model, training.adamw, training.exchange, 1e-4, step + 1)
    return losses


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    prefix = tmp_path_factory.mktemp("reference") / "tiny"
    main([*TINY, "-o", str(prefix)])
    return prefix


def test_a_tiny_model_agrees_with_transformers_in_every_tensor(dev, tiny):
    dev.use_precision("fp32")
    check_reference(dev, tiny, "softmax")


@pytest.mark.long
def test_gpt2_124M_agrees_with_transformers_in_every_tensor(dev):
    """At B1 T64 on the CPU; at B4 T1024 on CUDA, in TF32 where it has that, and there with flash attention too."""
    if dev.kind == "cpu" and cpp.warp_size() > 1:
        pytest.skip("takes minutes with warps of 32 on the CPU; the tiny model covers them")
    B, T, config = *((4, 1024) if dev.kind == "cuda" else (1, 64)), GPT2Config.described("d12")
    theirs = random_model(config, 1337).to("cuda" if torch.cuda.is_available() else "cpu").double()
    with TemporaryDirectory() as directory:  # pytest would keep the gigabyte
        prefix = Path(directory) / "gpt2_124M"
        write_reference(theirs, config, str(prefix), B, T, 1337)
        for attention in ("softmax", "flash") if dev.tf32 else ("softmax",):
            check_reference(dev, prefix, attention)


@pytest.mark.parametrize("kind, description, changes, B, T", [
    (Llama3, "smollm2-135m", {}, 2, 129),
    (Qwen3, "qwen3-0.6b", {"vocab_size": 20_000}, 1, 129),  # PyTorch's logits are in float64
], ids=str)  # fmt: skip
def test_a_published_model_is_transformers_in_logits_loss_and_every_gradient(
    model_dev, kind, description, changes, B, T
):
    """Compares logits, loss and every gradient, with each attention. On the CPU it would take minutes: skipped."""
    if model_dev.kind != "cuda":
        pytest.skip("takes minutes on the CPU")
    config = replace(kind.Config.described(description), **changes)
    theirs = oracle.transformers_model(config)
    flat = oracle.flat_parameters_of(theirs, config).astype(np.float32)
    theirs.cuda()
    ((inputs, targets),) = make_batches(config, 1, B, T)
    tokens = (torch.as_tensor(ids, dtype=torch.long, device="cuda") for ids in (inputs, targets))
    want_logits, want_loss = oracle.transformers_loss(theirs, *tokens)
    want_loss.backward()
    theirs.cpu()
    want = name_parameters(oracle.flat_parameters_of(theirs, config, gradients=True), config)
    # transformers normalises in fp32 whatever the model is in; and gradients pass through some 30 layers.
    allowed = 2 * model_tolerance(model_dev)
    for attention in ("softmax", "flash") if model_dev.tf32 else ("softmax",):
        training = build(model_dev, config, B, T, attention, flat)
        assert isinstance(training.model, kind)
        logits, loss = forward_backward(model_dev, training, inputs, targets, 1 / (B * T))
        assert_close(f"{attention} logits", logits, want_logits, allowed)
        assert_close(f"{attention} loss", np.array(loss), want_loss, allowed)
        for name, _ in config.parameters():
            gradient = model_dev.to_host(getattr(training.model.grads, name))
            assert_close(f"{attention} d{name}", gradient, getattr(want, name), allowed)


def test_a_reference_does_not_overwrite_a_model_unasked(tmp_path):
    (tmp_path / "mine.bin").write_bytes(b"precious")
    with pytest.raises(UserError, match="exists already"):
        main([*TINY, "-o", str(tmp_path / "mine")])
    assert (tmp_path / "mine.bin").read_bytes() == b"precious"


def test_the_published_starter_pack_gives_the_published_losses(dev):
    places = [os.environ.get("LLMC_STARTER_PACK"), ROOT]
    needed = ("gpt2_124M.bin", "gpt2_124M_debug_state.bin")
    found = [Path(p) for p in places if p and all((Path(p) / name).is_file() for name in needed)]
    if not found:
        pytest.skip(f"{' and '.join(needed)} are neither in the repository nor in LLMC_STARTER_PACK")
    if dev.kind == "cpu" and cpp.warp_size() > 1:
        pytest.skip("takes minutes with warps of 32 on the CPU")
    losses = check_reference(dev, found[0] / "gpt2_124M", "softmax", steps=10)
    assert losses == pytest.approx(PUBLISHED_LOSSES, abs=0.01)


@pytest.mark.parametrize("script, model", [
    ("train_gpt2_fp32", "layers=2,heads=2,channels=32,maxT=64"),
    ("train_llama3", "layers=2,heads=4,kv_heads=2,channels=32,hidden=44,scaling=8"),
    pytest.param("train_llama3", "layers=2,heads=4,kv_heads=1,channels=32,hidden=44,tied=0", marks=pytest.mark.long),
    pytest.param("train_pythia", "layers=2,heads=4,channels=32", marks=pytest.mark.long),
    pytest.param("train_pythia", "layers=2,heads=2,channels=32,parallel=0,gelu=erf", marks=pytest.mark.long),
])  # fmt: skip
def test_pytorch_trains_the_same_model_from_the_same_weights(script, model, tmp_path, rng, monkeypatch, trainer_here):
    write_tokenizer(tmp_path / "data_tokenizer.bin", [bytes([65 + n]) for n in range(61)], 60)
    for split in ("train", "val"):
        tokens = rng.integers(0, 61, 2000) ** 2 // 61  # some more often than others: there is something to learn
        write_tokens(tmp_path / f"data_{split}.bin", tokens.astype(np.uint16))
    flags = [
        "-e", model, "-a", "softmax", "-i", "data", "-b", "2", "-t", "16", "-d", "64", "-x", "9", "-v", "3", "-g", "0",
        "-l", "1e-2", "-k", "cosine", "-u", "2", "-c", "0.1", "--grad-clip", "0.5", "--device", "cpu",
    ]  # fmt: skip
    kind = train_torch.SCRIPTS[script]
    trainer_here(kind, tmp_path, [*flags, "-o", "ours.log"])
    monkeypatch.setattr(sys, "argv", ["train_torch.py", "--script", script, *flags, "-o", "torchs.log"])
    train_torch.main()
    ours, torchs = (read_log(tmp_path / f"{name}.log") for name in ("ours", "torchs"))
    assert ours.keys() == torchs.keys() == {"trl", "tel", "bpb"}
    for name, (steps, losses) in ours.items():
        np.testing.assert_array_equal(torchs[name][0], steps)
        np.testing.assert_allclose(torchs[name][1], losses, atol=3e-4)
        assert losses[-1] < losses[0] - 0.1


def test_in_bf16_pytorch_trains_under_autocast(tmp_path, rng, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        write_tokens(tmp_path / f"data_{split}.bin", rng.integers(0, 61, 2000).astype(np.uint16))
    losses = []
    for precision in "fp32", "bf16":
        flags = f"-e layers=1,heads=2,channels=32,maxT=16 -b 2 -t 16 -x 4 -l 1e-2 --device cpu --precision {precision}"
        monkeypatch.setattr(sys, "argv", ["train_torch.py", *flags.split(), "-i", "data", "-o", "log"])
        train_torch.main()
        losses.append(read_log(tmp_path / "log")["trl"][1])
    fp32, bf16 = losses
    assert fp32 != pytest.approx(bf16, abs=1e-5) and fp32 == pytest.approx(bf16, abs=1e-2)
    assert refusal(train_torch.main, ["--precision", "fp8"]).startswith("--precision fp8: PyTorch itself has none")
    write_tokens(tmp_path / "data_val.bin", np.arange(99), marked=True)
    assert "some tokens are marked" in refusal(train_torch.main, [*flags.split(), "-i", "data"])

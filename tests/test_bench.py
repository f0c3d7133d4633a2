"""dev/bench as it is run, on a model so small that its times do not matter."""

import re
import sys
from pathlib import Path

import device
from conftest import refusal
from dev.bench import ceilings, start, step, text, workload
from device.errors import UserError
from llmc.files.model_file import read_model
from models import state_of
from train_gpt2_fp32 import GPT2, GPT2Config

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
BATCH = ["-b", "2", "-t", "8", "--vocab-size", "300", "--device", "cpu"]
TINY = {
    "train_gpt2_fp32": ["train_gpt2_fp32", "-e", "layers=1,heads=1,channels=16", *BATCH],
    "train_llama3": ["train_llama3", "-e", "layers=1,heads=2,kv_heads=1,channels=16,hidden=24", *BATCH],
    "train_pythia": ["train_pythia", "-e", "layers=1,heads=2,channels=16", *BATCH],
}


@pytest.mark.parametrize("script", [next(iter(TINY)), *(pytest.param(s, marks=pytest.mark.long) for s in [*TINY][1:])])
def test_bench_times_every_trainer_on_the_same_model(script, capsys):
    step.main([*TINY[script], "--steps", "3", "--peers", "eager,eager-sdpa", "--rounds", "2"])
    printed = capsys.readouterr().out
    rounds, _, fastest = printed.partition("trainer")[2].partition("the fastest of 2 rounds:")
    of_rounds = [(line[:40].strip(), float(line[40:].split()[0])) for line in rounds.splitlines()[1:] if line]
    rows = {line[:40].strip(): line[40:].split() for line in fastest.splitlines()[1:]}
    names = ["llm.cupy (softmax)", "PyTorch eager, default AdamW", "PyTorch eager, SDPA, fused AdamW"]
    assert [name for name, _ in of_rounds] == [*names, *names]  # in turn
    assert {name: float(row[0]) for name, row in rows.items()} == {
        name: min(ms for its, ms in of_rounds if its == name) for name in names
    }
    ours, eager, sdpa = rows.values()
    for found in rows.values():
        ms, rate, ratio = float(found[0]), float(found[1]), float(found[-2])
        assert rate == pytest.approx(1000 * 2 * 8 / ms, rel=0.01 + 0.01 / ms)
        assert ratio == pytest.approx(ms / float(ours[0]), abs=0.01 + 0.02 * ratio / float(ours[0]))
    # The same weights and tokens: the loss before the first update is the same, to rounding.
    assert float(eager[-1]) == pytest.approx(float(ours[-1]), abs=2e-5)
    assert float(sdpa[-1]) == pytest.approx(float(ours[-1]), abs=2e-5)
    for name in ("ceilings: fp32 matrix product", "AdamW's bytes at copy speed", "  sum "):
        assert name in printed


def test_in_bf16_pytorch_starts_from_the_same_weights_in_fp32(capsys, monkeypatch):
    monkeypatch.setattr(step, "measure_ceilings", lambda: ceilings.Ceilings(1e12, 1e9, ""))
    step.main([*TINY["train_gpt2_fp32"], "--precision", "bf16", "--steps", "1", "--peers", "eager", "--rounds", "1"])
    printed = capsys.readouterr().out
    ours, eager = (line.split() for line in printed.partition("trainer")[2].splitlines()[1:])
    assert float(eager[-1]) == pytest.approx(float(ours[-1]), abs=2e-3)
    assert ours[:4] == ["llm.cupy", "(softmax", "--precision", "bf16)"]


def test_a_peer_that_needs_torchao_says_so(capsys, monkeypatch):
    monkeypatch.setattr(step, "measure_ceilings", lambda: ceilings.Ceilings(1e12, 1e9, ""))
    monkeypatch.setitem(sys.modules, "torchao", None)
    flags = ["--precision", "fp8", "--steps", "1", "--peers", "compile-cudnn-fp8", "--rounds", "1"]
    step.main([*TINY["train_llama3"], *flags])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(step.TRAINERS["compile-cudnn-fp8"]) and last.endswith("pip install torchao")


def test_text_times_a_token_beside_transformers(monkeypatch, capsys):
    device.use("cpu")
    monkeypatch.setattr(text, "measure_copy", lambda: 1e9)
    flags = ["train_llama3", "-e", "layers=1,heads=2,kv_heads=1,channels=16,hidden=24", "-b", "2", "-t", "32"]
    text.main([*flags, "--vocab-size", "300", "--device", "cpu", "--first", "3", "--tokens", "12"])
    rows = {line[:60].strip(): line[60:].split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert list(rows) == [text.TRAINERS[name] for name in ("ours", "generate", "limit")]
    # A layer's weights and the classifier's, and the keys and values of two texts at position 9, in a GB/s.
    weights = 2 * 16 + 64 * 16 - 32 * 16 + 16 * 16 + 48 * 16 + 24 * 16 + 16 + 384 * 16
    limit = 1e-6 * 4 * (weights + 2 * 2 * 9 * 8)
    assert float(rows[text.TRAINERS["limit"]][0]) == pytest.approx(limit, abs=6e-4)
    refused = refusal(text.main, [*flags, "--device", "cpu", "--precision", "fp8", "--peers", "generate"])
    assert refused == "--peers generate: on cpu in fp8 there is no peer ('' for none)"


def test_transformers_writes_with_our_weights(monkeypatch):
    """What `text` times beside ours has the same weights: it writes the same tokens."""
    from transformers import GenerationMixin

    device.use("cpu")
    args = workload.make_parser("", trains=False).parse_args([*TINY["train_gpt2_fp32"], "-t", "32"])
    asked, written = workload.workload_of(args, ""), []
    cache, prompts = workload.cache_for_text(asked), text.prompts_of(asked, 5)
    texts, samplers = prompts.tolist(), text.samplers_of(1, 2)
    ours = [tokens for tokens in text.Writer(cache, temperature=0.0).tokens(texts, samplers, 8)]
    generate = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate",
                        lambda *given, **named: written.append(generate(*given, **named)) or written[-1])  # fmt: skip
    text.time_transformers("generate", workload.tensors_of(cache.model, cache.model.params_memory), asked, prompts, 8)
    longest = max(written, key=lambda tokens: tokens.shape[1])
    assert longest[:, 5:].T.tolist() == ours


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_that_a_run_starts_from_is_the_same_file_in_any_precision(precision, tmp_path):
    device.use("cpu")
    args = workload.make_parser("").parse_args([*TINY["train_gpt2_fp32"], "--precision", precision])
    asked = workload.workload_of(args, str(tmp_path))
    workload.write_random_model(asked, tmp_path / "model.bin")
    _, tensors = read_model(tmp_path / "model.bin", GPT2Config)
    training = asked.build()
    params, *_ = state_of(training)
    assert np.array_equal(np.concatenate([tensor.ravel() for tensor in tensors.values()]), params)


def test_bench_start_stops_its_watch_at_the_first_finished_step():
    speak = "import time; print('val loss 1'); print('step    1/1: train loss 1', flush=True); time.sleep(1)"
    assert 0 < start.seconds_to_first_step([sys.executable, "-c", speak], {}) < 1
    with pytest.raises(UserError, match="finished no step: error: no such file"):
        start.seconds_to_first_step([sys.executable, "-c", "print('error: no such file')"], {})


# What a step must do


@pytest.mark.parametrize("precision, size", [("fp32", 4), ("bf16", 2)])
def test_the_limit_of_gpt2_124m_counts_what_a_step_must_do(precision, size, monkeypatch):
    """For B 1, T 16, where every product runs at the ceiling."""
    device.use("cpu")
    device.use_precision(precision)
    monkeypatch.setattr(ceilings, "product_seconds", lambda m, n, k, dtype=None: 2 * m * n * k / 1e12)
    config = GPT2Config(1024, 50257, 12, 12, 768)
    ms = ceilings.limits(GPT2, config, 1, 16, ceilings.Ceilings(product=1e12, copy=1e9, description=""))
    weights = 12 * 12 * 768**2 + 50304 * 768
    assert ms["linear products in their own shapes"] == pytest.approx(1000 * 6 * 16 * weights / 1e12)
    assert ms["AdamW's bytes at copy speed"] == pytest.approx(1000 * 28 * 124475904 / 1e9)
    assert ms["causal attention at the ceiling"] == pytest.approx(1000 * 7 * 12 * 16 * 16 * 768 / 1e12)
    # qkv, the heads' outputs, two residuals, the MLP's hidden channels; in fp32 always, of each row mean and rstd
    # twice, and lse a head. In front of the first layer there is a residual more, and behind the last a norm.
    kept_bytes = 12 * 16 * (size * (3 + 1 + 2 + 4) * 768 + 4 * (4 + 12)) + 16 * (size * 768 + 4 * 2)
    assert ms["kept activations across memory once"] == pytest.approx(1000 * 4 * kept_bytes / 1e9)
    assert ms["logits across memory once"] == pytest.approx(1000 * 2 * size * 16 * 50304 / 1e9)


# The columns of doc/speed.md


def test_the_columns_of_the_page_can_be_measured_by_their_commands(monkeypatch):
    device.use("cpu")
    monkeypatch.setattr(device.current.device, "tf32", True)
    parser = workload.make_parser("")
    columns = re.findall(r"`(train_\w+ -e [^`]+)`", (ROOT / "doc" / "speed.md").read_text())
    assert len(columns) > 20
    for flags in columns:
        assert str(workload.workload_of(parser.parse_args(flags.split()), "")) == flags

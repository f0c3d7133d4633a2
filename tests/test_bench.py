"""dev/bench.py and dev/profile.py as they are run, on a model so small that its times do not matter."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dev import bench
from llmc import device
from llmc.checkpoint import GPT2Config

ROOT = Path(__file__).parent.parent
TINY = ["-e", "layers=1,heads=1,channels=16", "-b", "2", "-t", "8", "--vocab-size", "300", "--device", "cpu"]

# Speaks like llm.c's trainer for the GPU: a usage without good flags, lines with milliseconds with them.
LLMC = """#!{python}
import os, struct, sys
if sys.argv[1:] == ["--help"]:
    sys.exit("Usage: train [options]\\n  -i <string> train\\n  -j <string> val\\n  -b <int> B\\n  -t <int> T\\n")
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert flags == {{"-i": "train.bin", "-j": "val.bin", "-b": "2", "-t": "8"}}, flags
magic, version, count = struct.unpack("3i", open("train.bin", "rb").read(12))
assert magic == 20240520 and os.path.exists("gpt2_124M.bin")
steps = (count - 1) // 16
for step in range(steps):
    print(f"step {{step + 1:4}}/{{steps}}: train loss 5.0 ({{1000.0 if step == 0 else 12.5}} ms, 1280 tok/s)")
"""


def run(script, *args, cwd):
    command = [sys.executable, ROOT / "dev" / script, *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_bench_times_every_trainer_on_the_same_model(tmp_path):
    llmc = tmp_path / "train_gpt2fp32cu"
    llmc.write_text(LLMC.format(python=sys.executable))
    llmc.chmod(0o755)
    result = run("bench.py", *TINY, "--steps", "3", "--peers", "eager,eager-sdpa", "--llmc", llmc, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    table = result.stdout.partition("trainer")[2]
    rows = {line[:40].strip(): line[40:].split() for line in table.splitlines()[1:] if line.strip()}
    assert list(rows) == [
        "llm.cupy (softmax)", "PyTorch eager, default AdamW", "PyTorch eager, SDPA, fused AdamW",
        "llm.c train_gpt2fp32cu",
    ]  # fmt: skip
    ours, eager, sdpa, theirs = rows.values()
    for row in rows.values():
        ms, rate, ratio = float(row[0]), float(row[1]), float(row[-2])
        assert rate == pytest.approx(1000 * 2 * 8 / ms, rel=0.01 + 0.01 / ms)
        assert ratio == pytest.approx(ms / float(ours[0]), abs=0.01 + 0.02 * ratio / float(ours[0]))
    assert theirs[0] == "12.50"
    # The same weights and tokens: the loss before the first update is the same, to rounding.
    assert float(eager[-1]) == pytest.approx(float(ours[-1]), abs=2e-5)
    assert float(sdpa[-1]) == pytest.approx(float(ours[-1]), abs=2e-5)
    for name in ("ceilings: fp32 matrix product", "AdamW's bytes at copy speed", "sum, products at the ceiling"):
        assert name in result.stdout


@pytest.mark.parametrize("attention", ["softmax", "relu"])
def test_profile_counts_every_kernel_of_a_step(attention, tmp_path):
    result = run("profile.py", *TINY, "-a", attention, "--steps", "2", "--out", "step.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    table = result.stdout.partition("us a call")[2]
    rows = {line[:48].strip(): line[48:].split() for line in table.splitlines()[1:]}
    calls = {
        "encoder_forward": 1, "layernorm_backward": 3, "gelu_backward": 1, "fused_classifier": 1, "adamw": 1,
        "matmul_forward 16 x 384 x 16": 1, "matmul_backward_weight 384 x 16 x 16": 1, f"{attention}_forward_kernel": 1,
        "attention_forward 8 x 8 x 16 x2": 1,
    }  # fmt: skip
    assert {name: int(rows[name][0]) for name in calls} == calls
    assert rows["adamw"][4:6] == [f"{7 * 4 * 25840 / 1e6:.4g}", "MB"]
    assert rows["matmul_forward 16 x 384 x 16"][4:6] == [f"{2 * 16 * 384 * 16 / 1e9:.4g}", "GFLOP"]
    assert "not counted" not in result.stdout
    times = [float(row[2]) for row in rows.values() if len(row) > 3 and row[0].isdigit()]
    assert times == sorted(times, reverse=True)
    assert float(rows["sum"][0]) == pytest.approx(sum(times), abs=0.0005 * len(times) + 0.001)
    assert float(rows["a training step, with the batch and the losses"][0]) > 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["step.png"]


def test_wrong_flags_are_refused_in_one_line(tmp_path):
    for script, args, words in [
        ("bench.py", ["--llmc", "missing"], "missing: no such program"),
        ("bench.py", ["--peers", "eager,jax"], "--peers jax"),
        ("bench.py", ["-a", "flash"], "-a flash takes heads of"),
        ("profile.py", ["--out", "step.jpg"], "--out step.jpg"),
        ("profile.py", ["--out", "missing/step.png"], "no directory missing"),
    ]:
        result = run(script, *TINY, *args, cwd=tmp_path)
        assert result.returncode == 1
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and words in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_most_frequent_token_has_its_share():
    for V in (257, 50257):
        tokens = bench.zipf_tokens(200_000, V)
        count = np.bincount(tokens, minlength=V)
        assert len(count) == V
        assert count.max() / len(tokens) == pytest.approx(0.037, abs=0.002)  # 5 standard deviations


def test_the_limit_of_gpt2_124m_counts_what_a_step_must_do(monkeypatch):
    device.use("cpu")
    monkeypatch.setattr(bench, "product_seconds", lambda *args: 0.001)
    config = GPT2Config(1024, 50257, 50304, 12, 12, 768)
    ceilings = bench.Ceilings(product=1e12, copy=1e9, description="")
    ms = dict(bench.limits(config, 1, 16, ceilings))
    weights = 12 * 12 * 768**2 + 50304 * 768
    assert ms["linear products at the ceiling"] == pytest.approx(1000 * 6 * 16 * weights / 1e12)
    assert ms["AdamW's bytes at copy speed"] == pytest.approx(1000 * 28 * 124475904 / 1e9)
    assert ms["causal attention at the ceiling"] == pytest.approx(1000 * 7 * 12 * 16 * 16 * 768 / 1e12)
    assert ms["linear products in their own shapes"] == pytest.approx(3 * (4 * 12 + 1))  # 1 ms each

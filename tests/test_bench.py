"""dev/bench as it is run, on a model so small that its times do not matter."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import device
from conftest import refusal
from dev.bench import attention, ceilings, step, text, workload
from train_gpt2_fp32 import GPT2, GPT2Config

import pytest

ROOT = Path(__file__).parent.parent
BATCH = ["-b", "2", "-t", "8", "--vocab-size", "300", "--device", "cpu"]
TINY = {
    script: [script, "-e", f"layers=1,{sizes}", *BATCH]
    for script, sizes in {
        "train_gpt2_fp32": "heads=1,channels=16", "train_llama3": "heads=2,kv_heads=1,channels=16,hidden=24",
        "train_pythia": "heads=2,channels=16",
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("script", [next(iter(TINY)), *(pytest.param(s, marks=pytest.mark.long) for s in [*TINY][1:])])
def test_bench_times_every_trainer_on_the_same_model(script, capsys, monkeypatch):
    monkeypatch.setattr(device.CpuDevice, "memory", lambda self: (1 << 26, 1 << 26))  # ceilings take less time
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
    ours = rows[names[0]]
    for found in rows.values():
        ms, rate, ratio = float(found[0]), float(found[1]), float(found[-2])
        assert rate == pytest.approx(1000 * 2 * 8 / ms, rel=0.01 + 0.01 / ms)
        assert ratio == pytest.approx(ms / float(ours[0]), abs=0.01 + 0.02 * ratio / float(ours[0]))
        # The same weights and tokens: the loss before the first update is the same, to rounding.
        assert float(found[-1]) == pytest.approx(float(ours[-1]), abs=2e-5)
    for name in ("ceilings: fp32 matrix product", "AdamW's bytes at copy speed", "  sum "):
        assert name in printed


@pytest.fixture
def step_alone(monkeypatch, capsys):
    """step_alone(script, *flags) times one step of each trainer. Returns the table's lines."""

    def step_alone(script: str, *flags: str) -> list[str]:
        step.main([*TINY[script], "--steps", "1", "--rounds", "1", *flags])
        return capsys.readouterr().out.partition("trainer")[2].splitlines()[1:]

    monkeypatch.setattr(step, "measure_ceilings", lambda: ceilings.Ceilings(1e12, 1e9, ""))
    return step_alone


def test_in_bf16_pytorch_starts_from_the_same_weights_in_fp32(step_alone):
    ours, eager = map(str.split, step_alone("train_gpt2_fp32", "--precision", "bf16", "--peers", "eager"))
    assert float(eager[-1]) == pytest.approx(float(ours[-1]), abs=2e-3)
    assert ours[:4] == ["llm.cupy", "(softmax", "--precision", "bf16)"]


def test_share_prints_one_row_for_the_table_of_the_page(capsys, monkeypatch):
    """On the CPU, whose peak is not known; then as if it were."""
    table = re.search(r"^\| GPU \|.*--share.*\n\|( -+:? \|)+$", (ROOT / "doc" / "speed.md").read_text(), re.M)[0]
    for percent, shown in (None, "peak not known"), (12.34, "12.3%"):
        monkeypatch.setattr(step, "percent_of_peak", lambda flops, ms: percent)  # noqa: B023
        step.main([*TINY["train_gpt2_fp32"], "--steps", "1", "--share"])
        (row,) = capsys.readouterr().out.splitlines()
        assert row.count("|") == table.partition("\n")[0].count("|")
        name, driver, cuda, commit, asked, rate, mfu, mebibytes = row.strip("| ").split(" | ")
        assert (name, driver, cuda, mfu) == (device.name, "-", "-", shown)
        assert re.fullmatch(r"-|[0-9a-f]{7,}(-dirty)?", commit)
        parsed = workload.make_parser("").parse_args(shlex.split(asked.strip("`")))
        assert str(workload.workload_of(parsed, "")) == asked.strip("`")
        assert float(rate.replace(",", "")) > 0 and re.fullmatch(r"-?[\d,]+", mebibytes)
    assert step.said_by("no-such-program") == step.said_by("false") == "-"
    refused = refusal(step.main, ["--share", "--peers", "eager"])
    assert refused == "--share times ours alone, once: leave --peers and --rounds out"


def test_a_peer_that_needs_torchao_says_so(step_alone, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    *_, last = step_alone("train_llama3", "--precision", "fp8", "--peers", "compile-cudnn-fp8")
    assert last.startswith(step.TRAINERS["compile-cudnn-fp8"]) and last.endswith("pip install torchao")


def test_text_times_a_token_beside_transformers_that_writes_with_our_weights(monkeypatch, capsys):
    from transformers import GenerationMixin

    writer_tokens, generate, ours, theirs = text.Writer.tokens, GenerationMixin.generate, [], []

    def noted(writer, *given):
        for tokens in writer_tokens(writer, *given):
            ours.append(tokens)
            yield tokens

    monkeypatch.setattr(text, "measure_copy", lambda: 1e9)
    monkeypatch.setattr(text.Writer, "tokens", noted)
    monkeypatch.setattr(GenerationMixin, "generate",
                        lambda *given, **named: theirs.append(generate(*given, **named)) or theirs[-1])  # fmt: skip
    flags = [*TINY["train_llama3"], "-t", "32", "--first", "3", "--tokens", "12"]
    text.main(flags)
    rows = {line[:60].strip(): line[60:].split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert list(rows) == [text.TRAINERS[name] for name in ("ours", "generate", "limit")]
    assert max(theirs, key=lambda tokens: tokens.shape[1])[:, 3:].T.tolist() == ours
    # A layer's weights and the classifier's, and the keys and values of two texts at position 9, in a GB/s.
    weights = 2 * 16 + 64 * 16 - 32 * 16 + 16 * 16 + 48 * 16 + 24 * 16 + 16 + 384 * 16
    limit = 1e-6 * 4 * (weights + 2 * 2 * 9 * 8)
    assert float(rows[text.TRAINERS["limit"]][0]) == pytest.approx(limit, abs=6e-4)
    refused = refusal(text.main, [*flags, "--precision", "fp8", "--peers", "generate"])
    assert refused == "--peers generate: on cpu in fp8 there is no peer ('' for none)"


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
    # twice, and lse per head. Before the first layer there is a residual more, and after the last a norm.
    kept_bytes = 12 * 16 * (size * (3 + 1 + 2 + 4) * 768 + 4 * (4 + 12)) + 16 * (size * 768 + 4 * 2)
    assert ms["kept activations across memory once"] == pytest.approx(1000 * 4 * kept_bytes / 1e9)
    assert ms["logits across memory once"] == pytest.approx(1000 * 2 * size * 16 * 50304 / 1e9)


def test_the_columns_of_the_page_can_be_measured_by_their_commands(monkeypatch):
    device.use("cpu")
    monkeypatch.setattr(device.current.device, "tf32", True)
    parser = workload.make_parser("")
    columns = re.findall(r"`(train_\w+ -e [^`]+)`", (ROOT / "doc" / "speed.md").read_text())
    assert len(columns) > 20
    for flags in columns:
        assert str(workload.workload_of(parser.parse_args(flags.split()), "")) == flags


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.long)])
def test_scaling_times_a_step_of_several_processes(gpus):
    flags = [*TINY["train_gpt2_fp32"], "--bitwise", "1", "--precision", "bf16"]
    command = [sys.executable, ROOT / "dev" / "bench", "scaling", *flags, "--steps", "3", "--gpus", str(gpus)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    asked, took = done.stdout.split(f", {gpus} GPU")
    assert done.stderr == "" and "--precision bf16 --bitwise 1" in asked
    assert re.fullmatch(r"s?: \d+\.\d\d ms, -?\d+ MiB, all gradients' sum \d+\.\d\d ms\n", took)


def test_the_attention_alone_is_timed_by_the_layer(monkeypatch):
    device.use("cpu")
    monkeypatch.setattr(attention, "RUNS", 3)
    assert min(attention.our_us(B=1, T=16, NH=1, HS=64)) > 0
    milliseconds = iter((3, 6, 900))
    monkeypatch.setattr(type(device.event()), "since", lambda end, begin: next(milliseconds))
    assert attention.median_us(lambda: None, device.event) == 6000 / attention.LAYERS

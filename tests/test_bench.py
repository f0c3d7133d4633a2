"""dev/bench.py and its kin as they are run, on a model so small that its times do not matter; what is kept of their
measurements, and that doc/speed.md shows it."""

import json
import subprocess
import sys
from pathlib import Path

import device
from dev import bench, bench_llmc, bench_start, bench_text, ceilings, kept, workload
from device.errors import UserError
from llmc.checkpoint import read_model
from train_gpt2_fp32 import GPT2, GPT2Config
from train_llama3 import Llama3, Llama3Config

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
BATCH = ["-b", "2", "-t", "8", "--vocab-size", "300", "--device", "cpu"]
TINY = {
    "train_gpt2_fp32": ["train_gpt2_fp32", "-e", "layers=1,heads=1,channels=16", *BATCH],
    "train_llama3": ["train_llama3", "-e", "layers=1,heads=2,kv_heads=1,channels=16,hidden=24", *BATCH],
    "train_pythia": ["train_pythia", "-e", "layers=1,heads=2,channels=16", *BATCH],
}

# Speaks like llm.c's trainer for the GPU: a usage without good flags, lines with milliseconds with them.
LLMC = """#!{python}
import struct, sys
if sys.argv[1:] == ["--help"]:
    sys.exit("Usage: train [options]\\n  -i <string> train\\n  -j <string> val\\n  -b <int> B\\n  -t <int> T\\n{usage}")
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
model = flags.pop("-e", "gpt2_124M.bin")
assert struct.unpack("2i", open(model, "rb").read(8)) == (20240326, {version})
assert flags == {{"-i": "train.bin", "-j": "val.bin", "-b": "2", "-t": "8"}}, flags
magic, version, count = struct.unpack("3i", open("train.bin", "rb").read(12))
assert magic == 20240520 and version == 1
steps = (count - 1) // 16
for step in range(steps):
    print(f"step {{step + 1:4}}/{{steps}}: train loss 5.25 ({{1000.0 if step == 0 else 12.5}} ms, 1280 tok/s)")
"""


@pytest.fixture
def measurements(tmp_path, monkeypatch):
    """No kept measurements but those that a test makes, on the CPU."""
    device.use("cpu")
    monkeypatch.setattr(kept, "DIRECTORY", tmp_path / "measurements")
    return tmp_path / "measurements"


def row(ms, mebibytes=100.0, trainer="ours", commit="0123456"):
    return kept.make_row("train_gpt2_fp32 -e d12 -b 4 -t 64", trainer, ms, mebibytes, 256, commit)


def run(script, *args, cwd):
    command = [sys.executable, ROOT / "dev" / script, *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", [next(iter(TINY)), *(pytest.param(s, marks=pytest.mark.long) for s in [*TINY][1:])])
def test_bench_times_every_trainer_on_the_same_model(script, capsys):
    bench.main([*TINY[script], "--steps", "3", "--peers", "eager,eager-sdpa", "--rounds", "2"])
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
    for name in ("ceilings: fp32 matrix product", "AdamW's bytes at copy speed", "sum, products at the ceiling"):
        assert name in printed


def test_in_bf16_pytorch_starts_from_the_same_weights_in_fp32(capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure_ceilings", lambda: ceilings.Ceilings(1e12, 1e9, ""))
    bench.main([*TINY["train_gpt2_fp32"], "--precision", "bf16", "--steps", "1", "--peers", "eager", "--rounds", "1"])
    printed = capsys.readouterr().out
    ours, eager = (line.split() for line in printed.partition("trainer")[2].splitlines()[1:])
    assert float(eager[-1]) == pytest.approx(float(ours[-1]), abs=2e-3)
    assert ours[:4] == ["llm.cupy", "(softmax", "--precision", "bf16)"]


def test_products_are_timed_in_the_types_that_a_step_in_bf16_has(monkeypatch):
    device.use("cpu")
    device.use_precision("bf16")
    seen = []
    monkeypatch.setattr(ceilings, "seconds", lambda work, **named: (work(), 1.0)[1])
    with device.observe(lambda name, a, work: seen.append([str(a[x].dtype) for x in "abc"])):
        ceilings.product_seconds(3, 4, 5)
        ceilings.product_seconds(3, 4, 5, np.dtype(np.float32))
    assert seen == [["uint16"] * 3, ["uint16", "uint16", "float32"]]
    for name in "seconds", "product_seconds":
        monkeypatch.setattr(ceilings, name, lambda *_, **named: 1.0)
    assert ceilings.measure_ceilings().description.startswith("ceilings: bf16 matrix product 2048^3 ")


def test_bench_text_times_a_token_beside_transformers_and_keeps_it(measurements, monkeypatch, capsys):
    monkeypatch.setattr(bench_text, "measure_copy", lambda: 1e9)
    flags = ["train_llama3", "-e", "layers=1,heads=2,kv_heads=1,channels=16,hidden=24", "-b", "2", "-t", "32"]
    flags += ["--vocab-size", "300", "--device", "cpu", "--first", "3", "--tokens", "12"]
    bench_text.main([*flags, "--keep", "--commit", "0123456"])
    rows = {line[:60].strip(): line[60:].split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert list(rows) == [kept.TRAINERS[name] for name in ("text", "text-generate", "text-limit")]
    found = {trainer: row for (_, trainer), row in kept.kept_rows(device.name).items()}
    for trainer, row in found.items():
        ms = float(rows[kept.TRAINERS[trainer]][0])
        assert row["ms"] == pytest.approx(ms, abs=6e-4)
        assert row["tokens_per_second"] == pytest.approx(2000 / ms, rel=0.1)
    # A layer's weights and the classifier's, and the keys and values of two texts at position 9, in a GB/s.
    weights = 2 * 16 + 64 * 16 - 32 * 16 + 16 * 16 + 48 * 16 + 24 * 16 + 16 + 384 * 16
    assert found["text-limit"]["ms"] == pytest.approx(1e-6 * 4 * (weights + 2 * 2 * 9 * 8), rel=0.01)


def test_transformers_writes_with_our_weights(monkeypatch):
    """What bench_text times beside ours has the same weights: it writes the same tokens."""
    from transformers import GenerationMixin

    device.use("cpu")
    args = workload.make_parser("", trains=False).parse_args([*TINY["train_gpt2_fp32"], "-t", "32"])
    asked, written = workload.workload_of(args, ""), []
    model, prompts = bench_text.build_model(asked), bench_text.prompts_of(asked, 5)
    texts, samplers = prompts.tolist(), bench_text.samplers_of(1, 2)
    ours = [tokens for tokens in bench_text.Writer(model, 2, temperature=0.0).tokens(texts, samplers, 8)]
    generate = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate",
                        lambda *given, **named: written.append(generate(*given, **named)) or written[-1])  # fmt: skip
    bench_text.time_transformers("generate", bench_text.tensors_of(model), asked, prompts, 8)
    longest = max(written, key=lambda tokens: tokens.shape[1])
    assert longest[:, 5:].T.tolist() == ours


@pytest.mark.parametrize("precision, usage, version", [
    ("tf32", "", 3), ("bf16", "  -e <string> a model", 5), ("bf16", "", None),
])  # fmt: skip
def test_bench_llmc_takes_the_milliseconds_that_the_trainer_prints(tmp_path, precision, usage, version):
    binary = tmp_path / "train_gpt2cu"
    binary.write_text(LLMC.format(python=sys.executable, usage=usage, version=version))
    binary.chmod(0o755)
    flags = [*TINY["train_gpt2_fp32"][1:], "--precision", precision, "--steps", "3"]
    result = run("bench_llmc.py", binary, *flags, cwd=tmp_path)
    if version is None:
        assert result.returncode == 1 and "takes no -e, so it trains in fp32 alone" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    assert "12.50 ms a step, 1280 tokens/s" in result.stdout and "first loss 5.25" in result.stdout


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_that_a_run_starts_from_is_the_same_file_in_any_precision(precision, tmp_path):
    device.use("cpu")
    args = workload.make_parser("").parse_args([*TINY["train_gpt2_fp32"], "--precision", precision])
    asked = workload.workload_of(args, str(tmp_path))
    workload.write_random_model(asked, tmp_path / "model.bin")
    _, tensors = read_model(tmp_path / "model.bin", GPT2Config)
    master = asked.build().model.master_memory
    assert np.array_equal(np.concatenate([tensor.ravel() for tensor in tensors.values()]), master)


def test_bench_start_stops_its_watch_at_the_first_finished_step():
    speak = "import time; print('val loss 1'); print('step    1/1: train loss 1', flush=True); time.sleep(1)"
    assert 0 < bench_start.seconds_to_first_step([sys.executable, "-c", speak], {}) < 1
    with pytest.raises(UserError, match="finished no step: error: no such file"):
        bench_start.seconds_to_first_step([sys.executable, "-c", "print('error: no such file')"], {})


@pytest.mark.parametrize(
    ("main", "args", "words"),
    [
        (bench_llmc.main, ["missing"], "missing: no such program"),
        (bench.main, ["--peers", "eager,jax"], "--peers jax"),
        (bench.main, ["--peers", "compile-cudnn"], "--peers compile-cudnn: there are CUDA graphs and cuDNN only on"),
        (bench.main, ["-a", "flash"], "-a flash takes heads of"),
        (bench.main, ["-e", "gpt2_124M.bin"], "-e gpt2_124M.bin: name one of d12"),
        (bench_text.main, ["--peers", "compile"], "--peers compile: choose from"),
        (bench_text.main, ["--tokens", "6"], "--tokens 6: the first 5 steps are not counted"),
        (bench_text.main, ["--first", "900"], "--first 900 and --tokens 100 are more than -t 8: raise -t"),
    ],
)
def test_wrong_flags_are_refused(main, args, words):
    with pytest.raises(UserError, match=words):
        main([*TINY["train_gpt2_fp32"][1:], *args])


def test_cudnn_has_no_attention_but_in_16_bits(monkeypatch):
    device.use("cpu")
    monkeypatch.setattr(device.current.device, "kind", "cuda")
    with pytest.raises(UserError, match="--peers compile-cudnn: cuDNN's attention takes 16 bits: add --precision bf16"):
        bench.usable_peers("compile-cudnn", "tf32", "auto", print)


def test_what_is_wrong_is_said_in_one_line(tmp_path):
    result = run("bench.py", "--device", "cpu", "--peers", "jax", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("error: --peers jax") and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_most_frequent_token_has_its_share():
    for V in (257, 50257):
        tokens = workload.zipf_tokens(200_000, V)
        count = np.bincount(tokens, minlength=V)
        assert len(count) == V
        assert count.max() / len(tokens) == pytest.approx(0.037, abs=0.002)  # 5 standard deviations


# What a step must do


def limits_of(kind, config, monkeypatch, precision="fp32"):
    """The parts of the limit for B 1, T 16, where every product takes 1 ms by itself."""
    device.use("cpu")
    device.use_precision(precision)
    monkeypatch.setattr(ceilings, "product_seconds", lambda *shape: 0.001)
    model = object.__new__(kind)  # without its buffers
    model.config, model.B, model.T = config, 1, 16
    return ceilings.limits(ceilings.work_of(model), ceilings.Ceilings(product=1e12, copy=1e9, description=""))


def test_the_limit_of_gpt2_124m_counts_what_a_step_must_do(monkeypatch):
    ms = limits_of(GPT2, GPT2Config(1024, 50257, 12, 12, 768), monkeypatch)
    weights = 12 * 12 * 768**2 + 50304 * 768
    assert ms["linear products at the ceiling"] == pytest.approx(1000 * 6 * 16 * weights / 1e12)
    assert ms["AdamW's bytes at copy speed"] == pytest.approx(1000 * 28 * 124475904 / 1e9)
    assert ms["causal attention at the ceiling"] == pytest.approx(1000 * 7 * 12 * 16 * 16 * 768 / 1e12)
    assert ms["linear products in their own shapes"] == pytest.approx(3 * (4 * 12 + 1))  # 1 ms each
    # qkv, the heads' outputs, two residuals, the MLP's hidden channels; of each row mean and rstd twice, lse a head.
    kept_floats = 12 * 16 * ((3 + 1 + 2 + 4) * 768 + 4 + 12)
    assert ms["kept activations across memory once"] == pytest.approx(1000 * 16 * kept_floats / 1e9)


def test_in_bf16_the_limit_counts_two_bytes_but_for_what_is_fp32(monkeypatch):
    ms = limits_of(GPT2, GPT2Config(1024, 50257, 12, 12, 768), monkeypatch, "bf16")
    assert ms["AdamW's bytes at copy speed"] == pytest.approx(1000 * 30 * 124475904 / 1e9)
    kept_bytes = 12 * 16 * (2 * (3 + 1 + 2 + 4) * 768 + 4 * (4 + 12))  # mean, rstd and lse are fp32
    assert ms["kept activations across memory once"] == pytest.approx(1000 * 4 * kept_bytes / 1e9)
    assert ms["logits across memory once"] == pytest.approx(1000 * 2 * 2 * 16 * 50304 / 1e9)


@pytest.mark.parametrize("tied", [True, False])
def test_the_limit_of_a_llama_counts_what_a_step_must_do(tied, monkeypatch):
    config = Llama3Config.described(f"layers=2,heads=4,kv_heads=2,channels=64,hidden=96,tied={int(tied)},vocab=300")
    ms = limits_of(Llama3, config, monkeypatch)
    layer = (4 + 2 * 2) * 16 * 64 + 64 * 64 + 3 * 96 * 64
    assert ms["linear products at the ceiling"] == pytest.approx(1000 * 6 * 16 * (2 * layer + 384 * 64) / 1e12)
    assert ms["linear products in their own shapes"] == pytest.approx(3 * (4 * 2 + 1))
    parameters = (1 if tied else 2) * 384 * 64 + 2 * (layer + 2 * 64) + 64
    assert ms["AdamW's bytes at copy speed"] == pytest.approx(1000 * 28 * parameters / 1e9)
    kept_floats = 2 * 16 * (128 + 64 + 2 * 64 + 2 * 96 + 2 + 4)  # two rstd a row, lse a head
    assert ms["kept activations across memory once"] == pytest.approx(1000 * 16 * kept_floats / 1e9)


# Kept measurements


def test_a_run_is_kept_and_compared_with_what_is_kept(measurements, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure_ceilings", lambda: ceilings.Ceilings(1e12, 1e9, "ceilings"))
    arguments = [*TINY["train_gpt2_fp32"], "--steps", "2", "--peers", "", "--commit", "abc1234"]
    bench.main([*arguments, "--keep"])
    (path,) = measurements.iterdir()
    assert path.name == f"cpu-{device.name.split()[1]}-cores.json"
    rows = {row["trainer"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["limit", "ours"]
    assert rows["ours"]["workload"] == "train_gpt2_fp32 -e layers=1,heads=1,channels=16 -b 2 -t 8 --vocab-size 300"
    assert rows["ours"]["commit"] == "abc1234" and "NumPy" in rows["ours"]["versions"]
    assert rows["ours"]["tokens_per_second"] == pytest.approx(16_000 / rows["ours"]["ms"], rel=0.001)

    path.write_text(json.dumps({"rows": [row | {"ms": 1e-6} for row in rows.values()]}))
    capsys.readouterr()
    bench.main([*arguments, "--compare"])
    assert f"slower: {rows['ours']['workload']}, llm.cupy: " in capsys.readouterr().out


def test_keeping_replaces_the_rows_of_the_same_workload_and_trainer_alone(measurements):
    kept.keep("Some GPU", [row(10.0), row(20.0, trainer="eager")])
    kept.keep("Some GPU", [row(9.0, commit="89abcde")])
    rows = kept.kept_rows("Some GPU")
    assert [(trainer, rows[key]["ms"], rows[key]["commit"]) for key in rows for trainer in [key[1]]] == [
        ("eager", 20.0, "0123456"), ("ours", 9.0, "89abcde")
    ]  # fmt: skip
    first = (measurements / "some-gpu.json").read_text()
    kept.keep("Some GPU", list(rows.values()))
    assert (measurements / "some-gpu.json").read_text() == first


def test_more_than_two_percent_is_worse(measurements):
    kept.keep("Some GPU", [row(10.0)])
    before = kept.kept_rows("Some GPU")
    assert kept.worse_than(before, [row(10.19, 101.0)]) == [
        "nothing has become slower or larger than kept by more than 2%"
    ]
    slower, larger = kept.worse_than(before, [row(10.3, 103.0)])
    assert slower.startswith("slower: train_gpt2_fp32 -e d12 -b 4 -t 64, llm.cupy: 10.3 ms, 3.0% more than 10 of ")
    assert larger.startswith("larger: ") and "103 MiB, 3.0% more than 100 of " in larger and "(0123456)" in larger
    assert kept.worse_than(before, [row(99.0, trainer="eager")]) == ["not kept so far: 1 of 1 rows"]
    assert len(kept.worse_than(before, [row(9.0, float("nan")), row(99.0, trainer="eager")])) == 2


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_what_the_tables_show_is_measured_under_the_name_that_it_is_kept_by(kind, monkeypatch):
    device.use("cpu")
    monkeypatch.setattr(device.current.device, "tf32", True)
    parser = workload.make_parser("")
    for flags, peers in kept.published(kind):
        assert str(workload.workload_of(parser.parse_args(flags.split()), "")) == flags
        assert set(peers.split(",")) <= {"", *bench.PEERS}


def test_the_suite_is_what_the_tables_show(monkeypatch):
    device.use("cpu")
    timed = []
    monkeypatch.setattr(bench, "measure_ceilings", lambda: ceilings.Ceilings(1, 1, ""))
    monkeypatch.setattr(bench, "bench", lambda workload, args, _: timed.append((str(workload), args.peers)) or [])
    bench.main(["--device", "cpu", "--suite"])
    assert timed == kept.published("cpu")
    timed.clear()
    bench.main(["--device", "cpu", "--suite", "--peers", ""])
    assert timed == [(flags, "") for flags, _ in kept.published("cpu")]
    timed.clear()
    bench.main(["train_llama3", "--device", "cpu"])
    assert timed == [(flags, None) for flags, _ in kept.published("cpu") if "llama3" in flags]


def test_each_workload_of_a_suite_has_the_ceilings_of_its_own_precision(monkeypatch):
    device.use("cpu")
    flags = TINY["train_gpt2_fp32"]
    timed, asked = [], [("fp32", 1), ("bf16", 1), ("fp32", 2), ("bf16", 1)]
    monkeypatch.setattr(bench, "asked_for", lambda parser, args: [
        parser.parse_args([*flags, "--precision", precision, "-b", str(B)]) for precision, B in asked
    ])  # fmt: skip
    monkeypatch.setattr(bench, "measure_ceilings", lambda: ceilings.Ceilings(1, 1, device.precision))
    monkeypatch.setattr(bench, "bench", lambda *a: timed.append((device.precision, a[2].description)) or [])
    bench.main(["--device", "cpu", "--suite"])
    assert timed == [(precision, precision) for precision, _ in asked[:3]]  # the same workload but once


def test_a_table_of_which_nothing_is_kept_is_left_out(measurements):
    column = kept.Column("B 4", "train_gpt2_fp32 -e d12 -b 4 -t 64")
    table = kept.Table("some", "Some GPU", (column,), above="In bf16:\n\n")
    assert kept.render(table) == ""
    kept.keep("Some GPU", [row(3.456)])
    assert kept.render(table).startswith("In bf16:\n\n|")


def test_the_tables_show_what_is_kept():
    text = (ROOT / "doc" / "speed.md").read_text()
    assert kept.with_tables(text) == text, "run: python dev/bench.py --tables"


def test_a_table_has_a_cell_for_each_measurement(measurements):
    table = kept.Table("some", "Some GPU", (kept.Column("B 4", "train_gpt2_fp32 -e d12 -b 4 -t 64"),
                                            kept.Column("B 8", "train_gpt2_fp32 -e d12 -b 8 -t 64")))  # fmt: skip
    kept.keep("Some GPU", [row(3.456), row(1234.0, None, "eager"), row(2.5, None, "limit")])
    lines = kept.render(table).splitlines()
    assert lines[3:6] == [
        "| **llm.cupy** | **3.46** · 74 k · 100 |  |",
        "| PyTorch eager | 1234 · 207 |  |",
        "| limit: products as they run alone, the rest at copy speed | 2.50 |  |",
    ]
    assert lines[-1].endswith(" at 0123456.")

"""The trainers run as programs: what they print and log, how they stop and resume, what they say to bad input."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import device
from conftest import DEVICES
from device import CpuDevice, CudaDevice
from llmc.data.token_file import open_tokens, write_tokens
from llmc.data.tokenizer import write_tokenizer
from llmc.files.model_file import write_model
from llmc.model.tensors import num_parameters
from llmc.run.arguments import parse_arguments
from llmc.run.logger import read_log
from llmc.run.schedule import LearningRateSchedule
from llmc.run.settings import Settings, resumed_flags
from models import TINY, described
from support.evaluations import write_evaluation
from support.folders import V, checkpoint_bytes, make_folder, samples_of, steps_of
from train_gpt2_fp32 import GPT2, GPT2Config

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["-i", "data", "-b", "2", "-t", "16"]
ONE_LAYER = GPT2Config(32, V, 1, 2, 20)
KINDS = ["cpu", "cuda"] if "cuda" in DEVICES else ["cpu"]


@pytest.fixture(params=KINDS)
def folder(request, tmp_path) -> Path:
    """A directory with training and validation tokens and their tokenizer, of which one token follows from another.

    It bears the name of the device on which `start` runs the trainer.
    """
    return make_folder(tmp_path / f"{request.param}.gpt2")


@pytest.fixture(params=[f"{kind}.{model}" for kind in KINDS for model in TINY])
def any_folder(request, tmp_path) -> Path:
    """`folder` for each model's trainer in turn."""
    return make_folder(tmp_path / request.param)


def program(folder: Path, *flags: str) -> tuple[type, list[str]]:
    """The kind of model of `folder`, and its trainer's flags."""
    on, _, model = folder.name.partition(".")
    return TINY[model][0], ["--device", on, "-e", described(model, V, 64)[0], *SMALL, *flags]


def start(folder: Path, *flags: str) -> subprocess.Popen:
    kind, given = program(folder, *flags)
    command = [sys.executable, ROOT / kind.Config.SCRIPT, *given]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def run_here(trainer_here):
    """run_here(folder, *flags) does what `start` does, in this process. Returns what it prints."""

    def run_here(folder: Path, *flags: str) -> str:
        kind, given = program(folder, *flags)
        out, error = trainer_here(kind, folder, given)
        assert error == ""
        return out

    return run_here


@pytest.fixture
def refuse_here(folder, trainer_here):
    """The one line on stderr of a run that must not start, and must leave nothing behind."""

    def refuse_here(*flags: str, code: int = 1) -> str:
        before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
        kind, given = program(folder, "-o", "run.log", *flags)
        out, error = trainer_here(kind, folder, given, code)
        assert error.count("\n") == 1 and error.startswith("error: ") and not steps_of(out), error
        assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before
        return error

    return refuse_here


def table_of(out: str) -> dict[str, str]:
    """What the start-up table says."""
    return {name.strip(): value for name, value in re.findall(r"^\| (.{21}) \| (.*?) *\|$", out, re.M)}


def val_losses(out: str) -> np.ndarray:
    return np.array(re.findall(r"^val loss (\d+\.\d{6})(?:, |$)", out, re.M), float)


def test_a_run_prints_and_logs_what_llmc_does_and_its_loss_falls(any_folder, run_here):
    folder = any_folder
    description, config = described(folder.name.partition(".")[2], V, 64)
    out = run_here(folder, "-x", "40", "-v", "10", "-m", "3", "-s", "20", "-g", "30", "-l", "1e-2", "-o", "run.log")
    rule = "+-----------------------+----------------------------------------------------+"
    lines = out.splitlines()
    assert lines[:3] == [rule, f"| {'Parameter':21} | {'Value':50} |", rule]
    table = table_of(out)
    assert table["device"].startswith("CPU") == folder.name.startswith("cpu") and table["attention"] == "softmax"
    assert table["train data"] == table["val data"] == "data" and table["tokenizer"] == "data_tokenizer.bin"
    assert (table["batch size B"], table["sequence length T"], table["steps"]) == ("2", "16", "40")
    assert table["model"] == description and table["vocabulary"] == "61, padded to 128"
    assert f"| parameters            | {num_parameters(config):<50} |" in lines
    assert table["train tokens"] == "2000 (62 batches)" and table["val tokens"] == "400 (12 batches)"
    assert table["train left out"] == table["val left out"] == "15 tokens"

    printed = re.findall(r"^val loss (\d+\.\d{6}), (\d+\.\d{4}) bits/byte$", out, re.M)
    validations, bits = np.array(printed, float).T
    targets = open_tokens(folder / "data_val.bin")[1 : 3 * 2 * 16 + 1]  # of three batches; a token is a byte, eot none
    np.testing.assert_allclose(bits, validations / np.log(2) * len(targets) / (targets != V - 1).sum(), atol=6e-5)
    losses = steps_of(out)
    assert list(losses) == list(range(1, 41)) and len(validations) == 5
    assert abs(losses[1] - np.log(V)) < 0.3 and abs(validations[0] - np.log(V)) < 0.3
    assert losses[40] < losses[1] - 0.8 and validations[-1] < validations[0] - 0.8  # from ln 61, 4.1

    texts = samples_of(out)
    assert len(texts) == 2 and all(0 < len(text) <= 30 for text in texts)  # one may end before
    assert re.fullmatch(r"total average iteration time: \d+\.\d{6} ms", lines[-1])

    log = read_log(folder / "run.log")
    assert log["trl"][0].tolist() == list(range(40)) and log["tel"][0].tolist() == [0, 10, 20, 30, 40]
    np.testing.assert_allclose(log["trl"][1], list(losses.values()), atol=6e-5)
    np.testing.assert_allclose(log["tel"][1], validations, atol=6e-5)
    np.testing.assert_allclose(log["bpb"][1], bits, atol=1e-9)
    assert re.match(r"s:0 tel:\d\.\d{4}\ns:0 bpb:\d\.\d{4}\ns:0 trl:\d\.\d{4}\n", (folder / "run.log").read_text())


def test_a_run_lasts_one_epoch_starts_from_a_model_file_and_prints_ids_where_there_is_no_tokenizer(folder, run_here):
    params = 0.02 * np.random.default_rng(0).standard_normal(num_parameters(ONE_LAYER), dtype=np.float32)
    write_model(folder / "model.bin", ONE_LAYER, params, bf16=True)
    (folder / "data_tokenizer.bin").unlink()
    out = run_here(folder, "-e", "model.bin", "-a", "relu", "-b", "5", "-t", "20", "-g", "9", "-o", "run.log")
    assert out.count("model.bin: its weights are bf16 and become fp32\n") == 1
    assert re.search(r"^val loss \d+\.\d{6}$", out, re.M) and "byte" not in out
    log = read_log(folder / "run.log")
    assert log.keys() == {"tel", "trl", "sam"}
    assert log["sam"][0].tolist() == [19] and 0 < log["sam"][1][0] < 60  # seconds
    assert list(steps_of(out)) == list(range(1, (2000 - 1) // 100 + 1))
    (ids,) = samples_of(out)
    assert len(ids.split()) == 9 and all(0 <= int(token) < V for token in ids.split())


@pytest.mark.parametrize("old", [False, True])
def test_an_epoch_is_recorded_and_an_old_checkpoint_keeps_that_of_llmc(old, folder, run_here, monkeypatch):
    """llm.c counts the 2000 tokens as 20 batches of 100. The last one lacks its last target."""
    recorded = Settings.recorded
    if old:
        monkeypatch.setattr(Settings, "recorded", lambda self: recorded(self) | {"max_steps": None})
    flags = ["-b", "5", "-t", "20", "-s", "0", "-v", "0", "--checkpoint-dir", "run"]
    run_here(folder, *flags, "-x", "10", "-k", "cosine")
    out = run_here(folder, *flags, "-y", "1", *([] if old else ["-x", "19"]))
    assert list(steps_of(out)) == list(range(11, 21 if old else 20))


def test_validation_takes_each_batch_of_several_files_once_and_says_what_no_batch_takes(folder, run_here):
    tokens = open_tokens(folder / "data_val.bin")[:]
    (folder / "data_val.bin").unlink()
    for n, size in enumerate((33, 20, 64, 97, 5)):  # of 1, 0, 1, 3 and 0 batches
        write_tokens(folder / f"data_val_{n}.bin", tokens[100 * n % 300 :][:size])
    flags = ["-x", "0", "-s", "0", "-m", "1000"]
    out = run_here(folder, *flags)
    assert table_of(out)["val tokens"] == "194 in 3 files (5 batches)"
    assert table_of(out)["val left out"] == "56 tokens, 25 of them in 2 files shorter than a batch"
    one, two, three = (val_losses(run_here(folder, *flags, "-j", f"data_val_{n}.bin")) for n in (0, 2, 3))
    np.testing.assert_allclose(val_losses(out), (one + two + 3 * three) / 5, atol=2e-6)


def test_hellaswag_is_scored_when_validating_the_schedule_sets_each_rate_and_clipping_prints_the_norm(folder, run_here):
    examples = []
    for i in range(3):  # the right ending, number i, goes on as the data does
        endings = [[i + 21, i + 28] if ending == i else [i + 5, i + 50 - ending] for ending in range(4)]
        examples.append((i, [i, i + 7, i + 14], endings))
    write_evaluation(folder / "questions.bin", examples)
    flags = "-b 4 -x 40 -v 20 -g 0 -o run.log -l 2e-2 -k cosine -u 3 -q 0.1 -c 0.1 --grad-clip 1".split()
    out = run_here(folder, *flags, "--hellaswag", "questions.bin")
    scores = re.findall(r"^val loss .*\nHellaSwag accuracy (\d\.\d{4}) of 3$", out, re.M)
    assert len(scores) == 3 and scores[-1] == "1.0000"
    log = read_log(folder / "run.log")["eval"]
    assert log[0].tolist() == [0, 20, 40] and [f"{score:.4f}" for score in log[1]] == scores
    schedule = LearningRateSchedule("cosine", 2e-2, 3, 40, 0.1)
    rates = re.findall(r", lr (\d\.\d\de[+-]\d\d), ", out)
    assert rates == [f"{schedule.get_learning_rate(step):.2e}" for step in range(40)]
    norms = [float(norm) for norm in re.findall(r", norm (\d+\.\d{4}), ", out)]
    assert len(norms) == 40 and min(norms) > 0


# All that could be lost between two steps: moments, the place in shuffled data, accumulation, a schedule.
LONG = ["-d", "64", "-k", "cosine", "-u", "2", "-l", "3e-3", "-c", "0.1", "--grad-clip", "0.5", "--seed", "3",
        "-v", "4", "-m", "2", "-s", "5", "-g", "5", "--checkpoint-dir", "run"]  # fmt: skip


def test_a_run_resumed_at_any_step_is_bit_identical_to_one_that_never_stopped(any_folder, run_here):
    """Of GPT-2 at any step, of the others at one; with dropout if the model has it."""
    folder = any_folder
    kind, _ = program(folder)
    flags = [*LONG, "-x", "7", *["--dropout", "0.25"] * kind.DROPS]
    whole = run_here(folder, *flags, "-n", "1", "-o", "whole.log")
    want, losses, texts = checkpoint_bytes(folder, 7), steps_of(whole), samples_of(whole)
    (folder / "run").rename(folder / "whole")
    for step in range(1, 7) if kind is GPT2 else [4]:
        shutil.copytree(folder / "whole" / f"step_{step:08d}", folder / "run" / f"step_{step:08d}")
        shutil.copy(folder / "whole.log", folder / "resumed.log")
        out = run_here(folder, *flags, "-y", "1", "-o", "resumed.log")
        assert steps_of(out) == {later: loss for later, loss in losses.items() if later > step}
        assert checkpoint_bytes(folder, 7) == want
        assert samples_of(out) == (texts if step <= 5 else texts[1:])  # of steps 5 and 7
        log = read_log(folder / "resumed.log")
        assert log["trl"][0].tolist() == list(range(7))
        assert np.array_equal(log["trl"][1], read_log(folder / "whole.log")["trl"][1])
        shutil.rmtree(folder / "run")


@pytest.mark.parametrize("any_folder", [f"{kind}.pythia" for kind in KINDS], indirect=True)
def test_dropout_changes_the_training_loss_and_not_the_validation_loss(any_folder, run_here):
    plain, dropped = (run_here(any_folder, "-x", "1", *flags) for flags in ([], ["--dropout", "0.25"]))
    assert table_of(dropped)["dropout"] == "0.25" and "dropout" not in plain
    assert val_losses(plain)[0] == val_losses(dropped)[0] and steps_of(plain) != steps_of(dropped)


def test_the_type_of_raw_tokens_is_recorded_and_an_old_checkpoint_takes_the_flag(folder, run_here, refuse_here):
    want = steps_of(run_here(folder, *LONG, "-x", "5"))
    shutil.rmtree(folder / "run")
    for split in ("train", "val"):
        path = folder / f"data_{split}.bin"
        path.write_bytes(open_tokens(path)[:].tobytes())
    assert "data_train.bin" in (error := refuse_here()) and "--raw-tokens" in error
    run_here(folder, *LONG, "-x", "3", "--raw-tokens", "uint16")
    out = run_here(folder, *LONG, "-x", "5", "-y", "1")
    assert steps_of(out) == {step: want[step] for step in (4, 5)}
    flags = parse_arguments(GPT2Config, ["--raw-tokens", "uint16"])
    assert resumed_flags(flags, {"seed": 3}).raw_tokens == "uint16"


def test_a_run_stopped_by_a_signal_saves_and_is_resumed_bit_identically(folder, run_here):
    whole, last = run_here(folder, *LONG, "-x", "100"), 0
    want = checkpoint_bytes(folder, 100)
    shutil.rmtree(folder / "run")
    for name in "SIGTERM", "SIGINT":
        process, seen, before = start(folder, *LONG, "-x", "100", "-y", "1"), "", last
        for line in process.stdout:
            seen += line
            if line.startswith(f"step {before + 3:4}/"):
                process.send_signal(getattr(signal, name))
                break
        out, error = seen + process.stdout.read(), process.stderr.read()
        assert (process.wait(timeout=100), error) == (128 + getattr(signal, name), "")
        last = int(re.search(rf"^stopped by {name} after (\d+) of 100 steps$", out, re.M)[1])
        assert list(steps_of(out)) == list(range(before + 1, last + 1)) and before + 3 <= last < 100
        after = out[out.index(f"step {last:4}/") :]  # it saves at once, but for a validation or sample under way
        after = re.sub(r"^(val .*|generating:\n---\n(.*\n)*?---)\n", "", after, flags=re.M).splitlines()
        assert [line.partition(" ")[0] for line in after] == ["step", "saved", "stopped", "total"], after
        assert (folder / "run" / f"step_{last:08d}").is_dir()
    out = run_here(folder, *LONG, "-x", "100", "-y", "1")
    assert list(steps_of(out)) == list(range(last + 1, 101))
    assert samples_of(out) == samples_of(whole)[-len(samples_of(out)) :]
    assert checkpoint_bytes(folder, 100) == want


def test_v_0_and_s_0_need_no_validation_data_and_log_every_prints_and_logs_fewer_steps(folder, run_here):
    (folder / "data_val.bin").unlink()
    for data in "data", "data_train.bin":
        out = run_here(folder, "-i", data, *"-x 10 -v 0 -s 0 --log-every 4 -o run.log".split())
        assert list(steps_of(out)) == [1, 4, 8, 10] and "val loss" not in out and samples_of(out) == []
        log = read_log(folder / "run.log")
        assert log.keys() == {"trl"} and log["trl"][0].tolist() == [0, 3, 7, 9]
        (folder / "run.log").unlink()


def test_y_1_goes_on_or_starts_from_the_beginning_and_y_2_goes_on_or_refuses(folder, run_here, refuse_here):
    save = ["-g", "0", "--checkpoint-dir", "run"]
    out = run_here(folder, *save, "-x", "1", "-y", "1")
    assert "no checkpoint in run yet: starting from the beginning" in out and list(steps_of(out)) == [1]
    assert list(steps_of(run_here(folder, *save, "-x", "5", "-y", "2", "-n", "1", "-nk", "2"))) == [2, 3, 4, 5]
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["step_00000004", "step_00000005"]
    error = refuse_here(*save, "-x", "2", "-y", "1")
    assert "the checkpoint in run has already done step 5, and -x is 2: raise -x" in error


USAGE = [
    ("-b 0", "-b/--batch-size: 0 must be at least 1"), ("-u -1", "-u/--warmup: -1 must be 0 or more"),
    ("-t many", "-t/--sequence-length: 'many' must be a whole number"), ("-k cosin", "-k/--schedule: .*cosin"),
    ("-l nan", "-l/--learning-rate: nan must be"), ("-q 2", "-q/--final-fraction: 2 must lie between 0 and 1"),
    ("--beta1 1", "--beta1: 1 must be 0 or more, and below 1"), ("--eps 0", "--eps: 0 must be at least 1.2e-38"),
    ("-y 3", "-y/--resume: 3 must be 0, 1 or 2"), ("-f 2", "argument -f: 2 must be 0 or 1"),
    ("--precision fp12", "--precision: .*fp12.*fp32.*tf32.*fp16.*bf16"), ("--no-such-flag", "--no-such-flag"),
    ("--checkpoint-dir ''", "must not be empty: name something, or leave the flag out"),
]  # fmt: skip
VALUES = [
    ("-t 65", r"-t 65 is above the model's longest sequence, 64: lower -t"),
    ("-i data_train.bin", r"-i data_train.bin names files of training data: .* with -j"),
    ("-d 3200", r"takes 100 batches \(-d 3200\), and data has 62, .*: lower -d, or .* with -x"),
    ("-i nowhere", r"nowhere_train.bin: no such file; get data"),
    ("-e nonsense", r"nonsense: no such file or directory; .*-e d12"),
    ("-e layers=2,heads=3", r"-e layers=2,heads=3: channels=… is missing; .*channels=768"),
    ("-e .", r"\.: neither a model.bin nor a checkpoint in it; name a .bin or a --checkpoint-dir"),
    ("-b 1000000000000", r"needs \d+ MiB of memory, .*at most -b \d+ or -b \d+ --recompute( or .*)? fits"),
    ("-o .", r"\.: cannot be written .*\(-o\)"), ("-n 5", r"-y, -n and --best need.*--checkpoint-dir"),
    ("--checkpoint-dir data_train.bin", r"data_train.bin.*checkpoint"),
    ("-v 0 --best --checkpoint-dir run", "^error: -v 0 switches validation off, and --best and --hellaswag need it: "),
    ("-v 0 --hellaswag questions.bin", "^error: -v 0 switches validation off, and --best and --hellaswag need it: "),
    ("--checkpoint-dir mount/run -y 2", "^error: -y 2: there is no checkpoint in mount/run; -y 1 would start from "),
]  # fmt: skip


@pytest.mark.parametrize("flags, message, code", [*((*row, 2) for row in USAGE), *((*row, 1) for row in VALUES)])
def test_what_is_wrong_is_refused_in_one_line_before_anything_is_written(flags, message, code, refuse_here):
    assert re.search(message, refuse_here(*shlex.split(flags), code=code))


@pytest.mark.parametrize("flags, precision", [
    ("", "tf32"), ("-f 0", "fp32"), ("-f 1", "tf32"), ("--precision fp32", "fp32"),
])  # fmt: skip
def test_f_of_llmc_is_another_way_to_give_the_precision(flags, precision):
    args = parse_arguments(GPT2Config, flags.split())
    assert args.precision == precision and ("precision" in args.given) == bool(flags)


@pytest.mark.parametrize("flags, line", [
    ("-x 4 -u 10 -l 1", "the run ends within its 10 warm-up steps (-u): the learning rate ends at 0.4, not 1"),
    ("-x 4 -u 4 -k cosine", "the warm-up (-u) takes the whole run, so the learning rate does not decay (-k)"),
    ("-x 10 -u 9 -k wsd -l 1 -q 0.5", "the warm-up (-u) ends at step 9, after wsd's decay has begun at step 8: "
     "the learning rate falls at once from 1 to 0.646447"),
    ("-x 9 -x 1 -q 0.1", "-x stands behind another value of the same flag: the last counts\n"
     "-q does nothing: -k constant does not decay"), ("-x 1 -z", "-z does nothing: there is one GPU"),
    ("-x 1 -v 0 -m 3", "-m does nothing: -v 0 switches validation off"),
    ("-x 1 -v 0 -j x", "-j does nothing: -v 0 switches validation off"),
    ("-x 1 -s 0 -g 9", "-g does nothing: -s 0 samples never"),
    ("-x 1 -s 9 -g 0", "-s does nothing: -g 0 samples no token"),
    ("-x 1 --raw-tokens uint16", "--raw-tokens does nothing: each file of tokens says its own type"),
    ("-x 4 -u 4", ""), ("-x 10 -u 8 -k wsd -q 0.1", ""), ("-x 0 -u 5 -k linear -s 0 -g 0 -v 1 -m 1", ""),
])  # fmt: skip
def test_a_flag_that_does_nothing_or_not_what_it_says_gets_a_line(flags, line, folder, run_here):
    out = run_here(folder, *flags.split())
    assert out.partition("+-----")[0] == (line and line + "\n")


def test_without_t_a_sequence_is_as_long_as_the_model_takes_and_at_most_1024(folder, trainer_here):
    write_model(folder / "short.bin", ONE_LAYER, np.zeros(num_parameters(ONE_LAYER), np.float32))
    small = "layers=1,heads=1,channels=8"
    for model, T in ("short.bin", 32), (f"{small},maxT=20", 20), (small, 1024):
        flags = f"-i data -b 1 -x 1 -v 0 -s 0 --device {folder.stem} -e {model} --checkpoint-dir run{T}"
        for again in "", " -y 1":
            out, _ = trainer_here(GPT2, folder, (flags + again).split())
            assert table_of(out)["sequence length T"] == str(T)


def use_gpu(monkeypatch, capability: int) -> None:
    """Runs take the CPU device for a GPU of this compute capability when they choose a precision."""

    class Gpu(CpuDevice):
        compute_capability, blas = capability, SimpleNamespace(use_precision=lambda precision: None)
        use_precision = CudaDevice.use_precision

    monkeypatch.setattr(device, "use", lambda kind, number: setattr(device.current, "device", Gpu()))


@pytest.mark.parametrize("precision, needed, has, instead", [
    ("fp16", "7.5", 70, "fp32"), ("bf16", "8.0", 70, "fp32"), ("bf16", "8.0", 75, "fp16 or fp32"),
    ("fp8", "8.9", 75, "fp16 or fp32"), ("fp8", "8.9", 80, "bf16"),
])  # fmt: skip
def test_a_precision_that_a_gpu_lacks_is_refused_in_one_line(refuse_here, monkeypatch, precision, needed, has, instead):
    use_gpu(monkeypatch, has)
    said = refuse_here("--precision", precision)
    assert said.startswith(f"error: --precision {precision} needs a GPU of compute capability {needed} or later, and ")
    assert said.endswith(f" is of {has / 10}: use --precision {instead}\n")


@pytest.mark.parametrize("has, flags, says", [
    (75, [], True), (75, ["--precision", "fp32"], False), (75, ["--precision", "fp16"], False), (70, [], False),
    (80, [], False),
])  # fmt: skip
def test_a_gpu_with_tensor_cores_for_fp16_alone_says_so_once_nobody_asks(
    has, flags, says, folder, trainer_here, monkeypatch
):
    use_gpu(monkeypatch, has)
    out, error = trainer_here(GPT2, folder, [*program(folder)[1], "-x", "1", "-s", "0", "-v", "0", *flags])
    line = "CPU.* has no TF32; --precision fp16 multiplies on its tensor cores"
    assert bool(re.search(line, error)) == says and "TF32" not in error.replace("has no TF32", "") and steps_of(out)


def test_a_model_with_rows_of_padding_is_trained_on_data_of_fewer_tokens(folder, refuse_here, run_here):
    for rows in 64, V - 1:
        config = GPT2Config(32, rows, 1, 2, 20)
        write_model(folder / f"{rows}.bin", config, np.zeros(num_parameters(config), np.float32))
    (text,) = samples_of(run_here(folder, "-e", "64.bin", "-x", "1", "-g", "99"))
    assert 80 < len(text) < 99  # of a uniform model, which samples padding too
    assert "has 61 tokens and the model 60.bin 60: use data" in refuse_here("-e", "60.bin")


def test_validation_data_of_another_tokenizer_is_refused(folder, refuse_here, run_here):
    shutil.copy(folder / "data_val.bin", folder / "other_val.bin")
    run_here(folder, "-j", "other", "-x", "1", "-g", "0")  # of which nobody knows
    shutil.copy(folder / "data_tokenizer.bin", folder / "other_tokenizer.bin")
    run_here(folder, "-j", "other_val.bin", "-x", "1", "-g", "0")
    write_tokenizer(folder / "other_tokenizer.bin", [bytes([33 + i]) for i in range(V)], eot=V - 1)
    for name in ("other", "other_val.bin"):
        error = refuse_here("-j", name)
        assert all(part in error for part in (f"-j {name}", "other_tokenizer.bin", "-i data", "data_tokenizer.bin"))


def test_a_checkpoint_holds_its_tokenizer_and_a_resumed_run_goes_on_with_it(folder, run_here):
    flags = ("--checkpoint-dir", "run", "-g", "9")
    data = (folder / "data_tokenizer.bin").read_bytes()
    run_here(folder, *flags, "-x", "1")
    (folder / "data_tokenizer.bin").unlink()
    write_tokenizer(folder / "gpt2_tokenizer.bin", [bytes([33 + i]) for i in range(V)], eot=V - 1)
    out = run_here(folder, *flags, "-x", "2", "-y", "1")
    assert "run/step_00000001/model_tokenizer.bin" in out
    for step in (1, 2):
        assert (folder / "run" / f"step_0000000{step}" / "model_tokenizer.bin").read_bytes() == data


def test_without_a_compiler_the_log_of_an_earlier_run_stays(folder, refuse_here, monkeypatch):
    (folder / "run.log").write_text("s:0 tel:1.0000\n")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "the compiler that CXX names, no-such-compiler" in refuse_here("--device", "cpu")

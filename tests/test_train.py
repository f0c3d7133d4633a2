"""The trainers run as programs: what it prints and logs, how it stops and resumes, what it says to bad input."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import device
from conftest import DEVICES
from device import CpuDevice, CudaDevice
from llmc.data.dataloader import open_tokens, write_tokens
from llmc.data.tokenizer import write_tokenizer
from llmc.files.checkpoint import write_model
from llmc.files.files import EVALUATION, make_header
from llmc.model.tensors import Config, num_parameters
from llmc.run.arguments import parse_arguments
from llmc.run.logger import read_log
from llmc.run.schedule import LearningRateSchedule
from llmc.run.settings import resumed_flags
from models import TINY, described
from train_gpt2_fp32 import GPT2Config

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "train_gpt2_fp32.py"
V = 61
MODELS = {name: (ROOT / kind.Config.SCRIPT, *described(name, V, 64)) for name, (kind, _) in TINY.items()}
SMALL = ["-i", "data", "-b", "2", "-t", "16"]
ONE_LAYER = GPT2Config(32, V, 1, 2, 20)
STEP = re.compile(r"step +(\d+)/(\d+): train loss (\d+\.\d{6}) \((\d+\.\d\d) ms, (\d+) tok/s\)(.*)")


KINDS = ["cpu", "cuda"] if "cuda" in DEVICES else ["cpu"]


@pytest.fixture(params=KINDS)
def folder(request, tmp_path) -> Path:
    """A directory with training and validation tokens and their tokenizer, of which one token follows from another.

    It bears the name of the device on which `start` runs the trainer.
    """
    return make_folder(tmp_path / f"{request.param}.gpt2")


@pytest.fixture(params=[f"{kind}.{model}" for kind in KINDS for model in MODELS])
def any_folder(request, tmp_path) -> Path:
    """`folder` for each model's trainer in turn."""
    return make_folder(tmp_path / request.param)


def make_folder(tmp_path: Path) -> Path:
    tmp_path.mkdir()
    rng = np.random.default_rng(0)
    for split, count in ("train", 2000), ("val", 400):
        tokens = (np.arange(count) * 7 + rng.integers(0, 2, count)) % V
        write_tokens(tmp_path / f"data_{split}.bin", tokens)
    write_tokenizer(tmp_path / "data_tokenizer.bin", [bytes([32 + i]) for i in range(V)], eot=V - 1)
    return tmp_path


def write_zeros(path: Path, config: Config = ONE_LAYER, bf16: bool = False) -> None:
    """A model whose parameters are all 0."""
    write_model(path, config, np.zeros(num_parameters(config), np.float32), bf16)


def program(folder: Path, *flags: str) -> list:
    """A trainer and its flags."""
    kind, _, model = folder.name.partition(".")
    script, description, _ = MODELS[model]
    return [script, "--device", kind, "-e", description, *SMALL, *flags]


def start(folder: Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, *program(folder, *flags)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, *flags: str) -> str:
    process = start(folder, *flags)
    out, error = process.communicate(timeout=100)
    assert (process.returncode, error) == (0, ""), error
    return out


@pytest.fixture
def here(trainer_here):
    """here(folder, *flags) does what `start` does, in this process."""

    def here(folder: Path, *flags: str) -> None:
        _, *given = program(folder, *flags)
        trainer_here(TINY[folder.name.partition(".")[2]][0], folder, given)

    return here


@pytest.fixture
def run_here(here, capsys):
    """`run` in this process."""

    def run_here(folder: Path, *flags: str) -> str:
        here(folder, *flags)
        out, error = capsys.readouterr()
        assert error == ""
        return out

    return run_here


def steps_of(out: str) -> dict[int, float]:
    """Step, counted from 1, to training loss."""
    return {int(match[1]): float(match[3]) for match in STEP.finditer(out)}


def samples_of(out: str) -> list[str]:
    return re.findall(r"^generating:\n---\n(.*?)\n---$", out, re.M | re.S)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_prints_and_logs_what_llmc_does_and_its_loss_falls(any_folder):
    folder = any_folder
    _, description, config = MODELS[folder.name.partition(".")[2]]
    out = run(folder, "-x", "40", "-v", "10", "-m", "3", "-s", "20", "-g", "30", "-l", "1e-2", "-o", "run.log")
    rule = "+-----------------------+----------------------------------------------------+"
    lines = out.splitlines()
    assert lines[:3] == [rule, f"| {'Parameter':21} | {'Value':50} |", rule]
    table = dict(re.findall(r"^\| (.{21}) \| (.*?) *\|$", out, re.M))
    table = {name.strip(): value for name, value in table.items()}
    assert table["device"].startswith("CPU") == folder.name.startswith("cpu") and table["attention"] == "softmax"
    assert table["train data"] == table["val data"] == "data" and table["tokenizer"] == "data_tokenizer.bin"
    assert (table["batch size B"], table["sequence length T"], table["steps"]) == ("2", "16", "40")
    assert table["model"] == description and table["vocabulary"] == "61, padded to 128"
    assert f"| parameters            | {num_parameters(config):<50} |" in lines
    assert table["train tokens"] == "2000 (62 batches)" and table["val tokens"] == "400 (12 batches)"

    printed = re.findall(r"^val loss (\d+\.\d{6}), (\d+\.\d{4}) bits/byte$", out, re.M)
    validations, bits = np.array(printed, float).T
    targets = open_tokens(folder / "data_val.bin")[1 : 3 * 2 * 16 + 1]  # of three batches; a token is a byte, eot none
    np.testing.assert_allclose(bits, validations / np.log(2) * len(targets) / (targets != V - 1).sum(), atol=6e-5)
    losses = steps_of(out)
    assert list(losses) == list(range(1, 41)) and len(validations) == 5
    assert abs(losses[1] - np.log(V)) < 0.3 and abs(validations[0] - np.log(V)) < 0.3
    assert losses[40] < losses[1] - 0.8 and validations[-1] < validations[0] - 0.8  # from ln 61, 4.1

    texts = samples_of(out)
    assert [len(text) for text in texts] == [30, 30]
    assert re.fullmatch(r"total average iteration time: \d+\.\d{6} ms", lines[-1])

    log = read_log(folder / "run.log")
    assert log["trl"][0].tolist() == list(range(40)) and log["tel"][0].tolist() == [0, 10, 20, 30, 40]
    np.testing.assert_allclose(log["trl"][1], list(losses.values()), atol=6e-5)
    np.testing.assert_allclose(log["tel"][1], validations, atol=6e-5)
    np.testing.assert_allclose(log["bpb"][1], bits, atol=1e-9)
    assert re.match(r"s:0 tel:\d\.\d{4}\ns:0 bpb:\d\.\d{4}\ns:0 trl:\d\.\d{4}\n", (folder / "run.log").read_text())


def test_a_run_lasts_one_epoch_starts_from_a_model_file_and_prints_ids_where_there_is_no_tokenizer(folder):
    params = 0.02 * np.random.default_rng(0).standard_normal(num_parameters(ONE_LAYER), dtype=np.float32)
    write_model(folder / "model.bin", ONE_LAYER, params)
    (folder / "data_tokenizer.bin").unlink()
    out = run(folder, "-e", "model.bin", "-a", "relu", "-b", "5", "-t", "20", "-g", "9", "-o", "run.log")
    assert re.search(r"^val loss \d+\.\d{6}$", out, re.M) and "byte" not in out
    log = read_log(folder / "run.log")
    assert log.keys() == {"tel", "trl", "sam"}
    assert log["sam"][0].tolist() == [20] and 0 < log["sam"][1][0] < 60  # seconds
    assert list(steps_of(out)) == list(range(1, 2000 // 100 + 1))
    (ids,) = samples_of(out)
    assert len(ids.split()) == 9 and all(0 <= int(token) < V for token in ids.split())


def test_hellaswag_is_scored_and_logged_whenever_validating(folder):
    examples = []
    for i in range(3):  # the right ending, number i, goes on as the data does
        context = [i, i + 7, i + 14]
        endings = [[i + 21, i + 28] if ending == i else [i + 5, i + 50 - ending] for ending in range(4)]
        stream = [len(context), *context, *(number for ending in endings for number in (len(ending), *ending))]
        examples += [65535, 2 * (5 + len(stream)), i, i, 4, *stream]
    header = make_header(EVALUATION, 1, 3, 2 * len(examples) // 3)
    (folder / "questions.bin").write_bytes(header.tobytes() + np.array(examples, "<u2").tobytes())
    out = run(folder, "-b", "4", "-x", "40", "-v", "20", "-l", "1e-2", "-g", "0", "--hellaswag", "questions.bin",
              "-o", "run.log")  # fmt: skip
    scores = re.findall(r"^val loss .*\nHellaSwag accuracy (\d\.\d{4}) of 3$", out, re.M)
    assert len(scores) == 3 and scores[-1] == "1.0000"
    log = read_log(folder / "run.log")["eval"]
    assert log[0].tolist() == [0, 20, 40] and [f"{score:.4f}" for score in log[1]] == scores


def test_the_schedule_flags_set_the_rate_of_each_step_and_clipping_prints_the_norm(folder, run_here):
    out = run_here(
        folder, "-x", "8", "-l", "1e-2", "-k", "cosine", "-u", "3", "-q", "0.1", "-c", "0.1", "--grad-clip", "1",
        "-g", "0",
    )  # fmt: skip
    schedule = LearningRateSchedule("cosine", 1e-2, 3, 8, 0.1)
    rates = re.findall(r", lr (\d\.\d\de[+-]\d\d), ", out)
    assert rates == [f"{schedule.get_learning_rate(step):.2e}" for step in range(8)]
    norms = [float(norm) for norm in re.findall(r", norm (\d+\.\d{4}), ", out)]
    assert len(norms) == 8 and min(norms) > 0


# All that could be lost between two steps: moments, the place in shuffled data, accumulation, a schedule.
LONG = ["-d", "64", "-k", "cosine", "-u", "2", "-l", "3e-3", "-c", "0.1", "--grad-clip", "0.5", "--seed", "3",
        "-v", "4", "-m", "2", "-s", "5", "-g", "5", "--checkpoint-dir", "run"]  # fmt: skip


def checkpoint_bytes(folder: Path, step: int) -> list[bytes]:
    return [(folder / "run" / f"step_{step:08d}" / name).read_bytes() for name in ("model.bin", "optimizer.bin")]


def test_a_run_resumed_at_any_step_is_bit_identical_to_one_that_never_stopped(any_folder, run_here):
    folder = any_folder
    whole = run_here(folder, *LONG, "-x", "7", "-n", "1", "-o", "whole.log")
    want, losses, texts = checkpoint_bytes(folder, 7), steps_of(whole), samples_of(whole)
    (folder / "run").rename(folder / "whole")
    for step in range(1, 7):
        shutil.copytree(folder / "whole" / f"step_{step:08d}", folder / "run" / f"step_{step:08d}")
        shutil.copy(folder / "whole.log", folder / "resumed.log")
        out = run_here(folder, *LONG, "-x", "7", "-y", "1", "-o", "resumed.log")
        assert steps_of(out) == {later: loss for later, loss in losses.items() if later > step}
        assert checkpoint_bytes(folder, 7) == want
        assert samples_of(out) == (texts if step <= 5 else texts[1:])  # of steps 5 and 7
        log = read_log(folder / "resumed.log")
        assert log["trl"][0].tolist() == list(range(7))
        assert np.array_equal(log["trl"][1], read_log(folder / "whole.log")["trl"][1])
        shutil.rmtree(folder / "run")


def test_the_type_of_raw_tokens_is_recorded_and_an_old_checkpoint_takes_the_flag(folder, run_here, refuse_here):
    want = steps_of(run_here(folder, *LONG, "-x", "5"))
    shutil.rmtree(folder / "run")
    for split in ("train", "val"):
        path = folder / f"data_{split}.bin"
        path.write_bytes(open_tokens(path).tobytes())
    assert "data_train.bin" in (error := refuse_here()) and "--raw-tokens" in error
    run_here(folder, *LONG, "-x", "3", "--raw-tokens", "uint16")
    out = run_here(folder, *LONG, "-x", "5", "-y", "1")
    assert steps_of(out) == {step: want[step] for step in (4, 5)}
    flags = parse_arguments(GPT2Config, ["--raw-tokens", "uint16"])
    assert resumed_flags(flags, {"seed": 3}).raw_tokens == "uint16"


@pytest.mark.parametrize("any_folder", [f"{kind}.pythia" for kind in KINDS], indirect=True)
def test_a_run_with_dropout_is_resumed_bit_identically_and_validates_without(any_folder, run_here):
    folder = any_folder
    plain = run_here(folder, *LONG, "-x", "5")
    shutil.rmtree(folder / "run")
    whole = run_here(folder, *LONG, "-x", "5", "-n", "1", "--dropout", "0.25")
    row = f"| {'dropout':21} | {'0.25':50} |"
    assert row in whole.splitlines() and "dropout" not in plain
    first = [re.search(r"^val loss .*$", out, re.M)[0] for out in (plain, whole)]
    assert first[0] == first[1] and steps_of(plain)[1] != steps_of(whole)[1]
    want, losses = checkpoint_bytes(folder, 5), steps_of(whole)
    for later in (3, 4, 5):
        shutil.rmtree(folder / "run" / f"step_{later:08d}")
    out = run(folder, *LONG, "-x", "5", "-y", "1", "--dropout", "0.25")
    assert steps_of(out) == {step: losses[step] for step in (3, 4, 5)}
    assert checkpoint_bytes(folder, 5) == want


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_run_stopped_by_a_signal_saves_and_is_resumed_bit_identically(folder, run_here, name):
    whole = run_here(folder, *LONG, "-x", "60")
    want = checkpoint_bytes(folder, 60)
    shutil.rmtree(folder / "run")
    process = start(folder, *LONG, "-x", "60")
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith("step    3/"):
            process.send_signal(getattr(signal, name))
            break
    out, error = seen + process.stdout.read(), process.stderr.read()
    assert (process.wait(timeout=100), error) == (128 + getattr(signal, name), "")
    stopped = re.search(rf"^stopped by {name} after (\d+) of 60 steps$", out, re.M)
    assert stopped and 3 <= int(stopped[1]) < 60, out
    after = out[out.index(f"step {int(stopped[1]):4}/") :]  # it saves at once, but for a validation or sample under way
    after = re.sub(r"^(val .*|generating:\n---\n(.*\n)*?---)\n", "", after, flags=re.M).splitlines()
    words = [line.partition(" ")[0] for line in after]
    assert words == ["step", "saved", "stopped", "total"], after
    assert [path.name for path in (folder / "run").iterdir()] == [f"step_{int(stopped[1]):08d}"]
    out = run(folder, *LONG, "-x", "60", "-y", "1")
    assert list(steps_of(out)) == list(range(int(stopped[1]) + 1, 61))
    assert samples_of(out) == samples_of(whole)[-len(samples_of(out)) :]
    assert checkpoint_bytes(folder, 60) == want


def test_a_reader_who_leaves_early_and_an_ascii_terminal_are_no_errors(folder):
    process = start(folder, "-x", "10000", "-g", "0")
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(timeout=100), process.stderr.read()) == (0, "")
    write_tokenizer(folder / "data_tokenizer.bin", [bytes([200 + i % 50]) for i in range(V)], eot=V - 1)
    command = [sys.executable, SCRIPT, "--device", "cpu", "-e", MODELS["gpt2"][1], *SMALL, "-x", "1", "-g", "20"]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert samples_of(done.stdout) and "?" in samples_of(done.stdout)[0]


def test_v_0_and_s_0_switch_validation_and_samples_off_and_then_there_need_be_no_validation_data(
    folder, run_here, refuse_here
):
    (folder / "data_val.bin").unlink()
    for data in "data", "data_train.bin":
        out = run_here(folder, "-i", data, "-x", "2", "-v", "0", "-s", "0", "-o", "run.log")
        assert list(steps_of(out)) == [1, 2] and "val loss" not in out and samples_of(out) == []
        assert read_log(folder / "run.log").keys() == {"trl"}
        (folder / "run.log").unlink()
    for flag in ["--best"], ["--hellaswag", "questions.bin"]:
        error = refuse_here("-v", "0", "--checkpoint-dir", "run", *flag)
        assert error == "error: -v 0 switches validation off, and --best and --hellaswag need it: leave them out\n"


def test_only_the_newest_checkpoints_are_kept(folder, run_here):
    run_here(folder, "-x", "5", "-n", "1", "-nk", "2", "-g", "0", "--checkpoint-dir", "run")
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["step_00000004", "step_00000005"]


def test_resuming_where_there_is_no_checkpoint_starts_from_the_beginning_and_says_so(folder, run_here):
    out = run_here(folder, "-x", "1", "-g", "0", "--checkpoint-dir", "run", "-y", "1")
    assert "no checkpoint in run yet: starting from the beginning" in out and list(steps_of(out)) == [1]


def refuse(folder: Path, *flags: str, code: int = 1) -> str:
    """The one line on stderr of a run that must not start, and must leave nothing behind."""
    before = files(folder)
    process = start(folder, "-o", "run.log", *flags)
    out, error = process.communicate(timeout=100)
    assert process.returncode == code, (process.returncode, error)
    assert error.count("\n") == 1 and error.startswith("error: "), error
    assert files(folder) == before
    assert not re.search("^step ", out, re.M)
    return error


def test_y_2_goes_on_or_refuses(folder, run_here):
    error = refuse(folder, "-x", "1", "--checkpoint-dir", "mount/run", "-y", "2")
    assert error == "error: -y 2: there is no checkpoint in mount/run; -y 1 would start from the beginning\n"
    assert not (folder / "mount").exists()
    save = ["-g", "0", "--checkpoint-dir", "run"]
    run_here(folder, *save, "-x", "1")
    assert list(steps_of(run_here(folder, *save, "-x", "2", "-y", "2"))) == [2]


@pytest.fixture
def refuse_here(folder, here, capsys):
    """`refuse` in this process, in `folder` or another one."""

    def refuse_here(*flags: str, code: int = 1, at: Path = folder) -> str:
        before = files(at)
        with pytest.raises(SystemExit) as end:
            here(at, "-o", "run.log", *flags)
        out, error = capsys.readouterr()
        if code == 1:
            error += f"{end.value.code}\n"  # Python prints it as it ends, and exits with 1
        else:
            assert end.value.code == code
        assert error.count("\n") == 1 and error.startswith("error: "), error
        assert files(at) == before
        assert not re.search("^step ", out, re.M)
        return error

    return refuse_here


USAGE = [
    (["-b", "0"], "-b/--batch-size: 0 must be at least 1"),
    (["-t", "many"], "-t/--sequence-length: 'many' must be a whole number"),
    (["-l", "fast"], "-l/--learning-rate: .*fast"),
    (["-l", "nan"], "-l/--learning-rate: nan must be"),
    (["-q", "2"], "-q/--final-fraction: 2 must lie between 0 and 1"),
    (["--dropout", "1"], "--dropout: 1 must be 0 or more, and below 1"),
    (["--beta1", "1"], "--beta1: 1 must be 0 or more, and below 1"),
    (["--beta2", "-0.5"], "--beta2: -0.5 must be 0 or more, and below 1"),
    (["--eps", "0"], "--eps: 0 must be at least 1.2e-38"),
    (["-y", "3"], "-y/--resume: 3 must be 0, 1 or 2"),
    (["-a", "magic"], "-a/--attention: .*magic.*relu"),
    (["--precision", "fp16"], "--precision: .*fp16.*fp32.*tf32.*bf16"),
    (["-f", "2"], "argument -f: 2 must be 0 or 1"),
    (["--no-such-flag"], "--no-such-flag"),
]


@pytest.mark.parametrize("flags, message", USAGE, ids=[" ".join(flags) for flags, _ in USAGE])
def test_a_wrong_flag_is_refused_in_one_line_with_code_2(refuse_here, flags, message):
    assert re.search(message, refuse_here(*flags, code=2))


@pytest.mark.parametrize("flags, code", [(["-b", "0"], 2), (["-t", "65"], 1)])
def test_a_process_that_refuses_exits_with_that_code(folder, flags, code):
    refuse(folder, *flags, code=code)


@pytest.mark.parametrize(
    "flags, precision, given",
    [
        ([], "tf32", False), (["-f", "0"], "fp32", True), (["-f", "1"], "tf32", True),
        (["--precision", "fp32"], "fp32", True), (["--precision", "tf32"], "tf32", True),
    ],
)  # fmt: skip
def test_f_of_llmc_is_another_way_to_give_the_precision(flags, precision, given):
    args = parse_arguments(GPT2Config, flags)
    assert args.precision == precision and ("precision" in args.given) == given


@pytest.mark.parametrize("flags", [["-f", "0"], ["--precision", "fp32"]])
def test_flash_attention_in_fp32_is_refused(refuse_here, flags):
    error = refuse_here("-a", "flash", *flags)
    assert "error: -a flash computes in TF32 or bf16: leave --precision fp32 out, or use -a softmax" in error


VALUES = [
    (["-t", "65"], r"-t 65 is above the model's longest sequence, 64: lower -t"),
    (["-b", "200"], r"data_train.bin: 2000 tokens are too few for one batch of B 200, T 16.*lower -b or -t"),
    (["-d", "33"], r"-d 33 is not a multiple of B\*T = 32"),
    (["-i", "data_train.bin"], r"-i data_train.bin names files of training data: .* with -j"),
    (["-d", "3200"], r"-d 3200 is more than the 2000 tokens of data, .*: lower -d, or .* with -x"),
    (["-i", "nowhere"], r"nowhere_train.bin: no such file; get data"),
    (["-e", "nonsense"], r"nonsense: no such file or directory; .*-e d12"),
    (["-e", "layers=2,heads=3"], r"-e layers=2,heads=3: channels=… is missing; .*channels=768"),
    (["-e", "layers=2,heads=3,channels=32"], r"32 channels cannot be split among 3 heads"),
    (["-e", "."], r"\.: neither a model.bin nor a checkpoint in it; name a .bin or a --checkpoint-dir"),
    (["-d", str(32 << 40), "-x", "1"], r"-d 35184372088832 makes 1099511627776 batches a step .*: lower -d$"),
    (["-b", "1000000000000"], r"needs \d+ MiB of memory, .*at most -b \d+ fits"),
    (["-a", "flash"], r"-a flash takes heads of 64 or 128 channels, this model's have 16: use -a softmax"),
    (["-o", "."], r"\.: cannot be written .*\(-o\)"),
    (["-n", "5"], r"-y, -n and --best need.*--checkpoint-dir"),
    (["--checkpoint-dir", "data_train.bin"], r"data_train.bin.*checkpoint"),
    (["--hellaswag", "nowhere.bin"], r"-b must be at least 4 for HellaSwag"),
]


@pytest.mark.parametrize("flags, message", VALUES, ids=[" ".join(flags) for flags, _ in VALUES])
def test_a_wrong_value_is_refused_in_one_line_with_code_1_before_anything_is_written(refuse_here, flags, message):
    assert re.search(message, refuse_here(*flags))


DAMAGES = {
    "a token outside the vocabulary": ("data_val.bin", 1024, b"\x3d\x00", r"data_val.bin: token 61 .*vocabulary"),
    "an error page for the tokenizer": ("data_tokenizer.bin", 0, b"<!DOCTYPE html>\n", r"data_tokenizer.bin: not"),
    "a model with senseless sizes": ("model.bin", 16, b"\xff\xff\xff\xff", r"model.bin: num_layers is -1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_its_name_and_the_remedy(folder, refuse_here, damage):
    write_zeros(folder / "model.bin")
    name, offset, data, message = DAMAGES[damage]
    with open(folder / name, "r+b") as file:
        file.seek(offset)
        file.write(data)
    error = refuse_here(*(["-e", "model.bin"] if name == "model.bin" else []))
    assert re.search(message, error), error


@pytest.mark.parametrize("bf16, precision, line", [
    (True, "fp32", "model.bin: its weights are bf16 and become fp32"),
    (False, "bf16", "model.bin: its weights are fp32; forward and backward take them rounded to bf16"),
], ids=["bf16 to fp32", "fp32 to bf16"])  # fmt: skip
def test_a_model_file_of_another_type_is_trained_from_and_a_line_says_what_becomes_of_it(
    folder, run_here, bf16, precision, line
):
    write_model(folder / "model.bin", ONE_LAYER, np.full(num_parameters(ONE_LAYER), 0.01, np.float32), bf16)
    out = run_here(folder, "-e", "model.bin", "--precision", precision, "-x", "1", "-g", "0")
    assert out.count(f"{line}\n") == 1 and len(steps_of(out)) == 1


class Turing(CpuDevice):
    """A GPU that has neither TF32 nor bf16."""

    compute_capability = 75
    blas = SimpleNamespace(use_precision=lambda precision: None)
    use_precision = CudaDevice.use_precision

    def __init__(self):
        super().__init__()
        self.name = "Tesla T4"


def test_bf16_on_a_gpu_without_it_is_refused_in_one_line(refuse_here, monkeypatch):
    monkeypatch.setattr(device, "use", lambda kind, number: setattr(device.current, "device", Turing()))
    assert refuse_here("--precision", "bf16") == (
        "error: --precision bf16 needs a GPU of compute capability 8.0 or later, and Tesla T4 is of 7.5: "
        "use --precision fp32\n"
    )


def test_a_model_with_rows_of_padding_is_trained_on_data_of_fewer_tokens(folder, refuse_here, run_here):
    for rows, refused in ((64, False), (V - 1, True)):
        write_zeros(folder / "model.bin", GPT2Config(32, rows, 1, 2, 20))
        if refused:
            assert f"has 61 tokens and the model model.bin {rows}: use data" in refuse_here("-e", "model.bin")
        else:
            (text,) = samples_of(run_here(folder, "-e", "model.bin", "-x", "1", "-g", "99"))
            assert 80 < len(text) < 99  # of a uniform model, which samples padding too


def test_validation_data_of_another_tokenizer_is_refused(folder, refuse_here, run_here):
    shutil.copy(folder / "data_val.bin", folder / "other_val.bin")
    run_here(folder, "-j", "other", "-x", "1", "-g", "0")  # of which nobody knows
    shutil.copy(folder / "data_tokenizer.bin", folder / "other_tokenizer.bin")
    run_here(folder, "-j", "other_val.bin", "-x", "1", "-g", "0")
    write_tokenizer(folder / "other_tokenizer.bin", [bytes([33 + i]) for i in range(V)], eot=V - 1)
    for name in ("other", "other_val.bin"):
        error = refuse_here("-j", name)
        assert all(part in error for part in (f"-j {name}", "other_tokenizer.bin", "-i data", "data_tokenizer.bin"))


def test_a_checkpoint_holds_its_tokenizer_and_a_resumed_run_goes_on_with_it(folder):
    flags = ("--checkpoint-dir", "run", "-g", "9")
    data = (folder / "data_tokenizer.bin").read_bytes()
    run(folder, *flags, "-x", "1")
    (folder / "data_tokenizer.bin").unlink()
    write_tokenizer(folder / "gpt2_tokenizer.bin", [bytes([33 + i]) for i in range(V)], eot=V - 1)
    out = run(folder, *flags, "-x", "2", "-y", "1")
    assert "run/step_00000001/model_tokenizer.bin" in out
    for step in (1, 2):
        assert (folder / "run" / f"step_0000000{step}" / "model_tokenizer.bin").read_bytes() == data
    (folder / "run" / "step_00000002" / "model_tokenizer.bin").write_bytes(data[:-1] + b"x")
    error = refuse(folder, *flags, "-x", "3", "-y", "1")
    assert "step_00000002/model_tokenizer.bin: damaged" in error and "step_00000001" in error


def test_resuming_beyond_the_last_step_is_refused(folder, run_here):
    run_here(folder, "-x", "3", "-g", "0", "--checkpoint-dir", "run")
    error = refuse(folder, "-x", "2", "--checkpoint-dir", "run", "-y", "1")
    assert "the checkpoint in run has already done step 3, and -x is 2: raise -x" in error


def test_without_a_compiler_the_log_of_an_earlier_run_stays(folder, monkeypatch):
    (folder / "run.log").write_text("s:0 tel:1.0000\n")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "the compiler that CXX names, no-such-compiler" in refuse(folder, "--device", "cpu")


LLAMA_VALUES = [
    (["-e", "layers=2,heads=6,kv_heads=4,channels=48,hidden=64"], r"-e: 6 heads cannot share 4 key/value heads evenly"),
    (["-e", "layers=2,heads=6,kv_heads=2,channels=30,hidden=64"], r"-e: heads of 30 / 6 channels are odd"),
    (["-e", "layers=2,heads=6,kv_heads=2,channels=48,hidden=64,width=5"], r"width=5 is no part of a model's"),
    (["-e", "gpt2.bin"], r"gpt2.bin: not a Llama 3 model \(found a GPT-2 model, .*use train_gpt2_fp32.py for it"),
]


@pytest.mark.parametrize("flags, message", LLAMA_VALUES, ids=[" ".join(flags) for flags, _ in LLAMA_VALUES])
def test_what_makes_no_llama_is_refused_in_one_line_before_anything_is_written(tmp_path, refuse_here, flags, message):
    folder = make_folder(tmp_path / "cpu.llama3")
    write_zeros(folder / "gpt2.bin", MODELS["gpt2"][2])
    assert re.search(message, refuse_here(*flags, at=folder))

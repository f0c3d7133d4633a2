"""What `make train` runs: one run after another, each to its end, whatever has happened to the one before."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from llmc.data.token_file import write_tokens
from llmc.files.checkpoint_dir import read_record
from models import write_record
from support.folders import make_folder, steps_of

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAGS = [
    "--device", "cpu", "-e", "layers=1,heads=2,channels=32", "-i", "data", "-b", "2", "-t", "16", "-v", "1000",
    "-g", "0", "-x", "4",
]  # fmt: skip
LONG = ["-n", "1", "-x", "1000"]  # saves each step


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path / "folder")


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A folder with a run that was killed after three steps."""
    folder = make_folder(tmp_path_factory.mktemp("killed") / "folder")
    process, _ = begin(folder, *LONG, steps=3)
    stop(process)
    return folder


@pytest.fixture
def stopped(killed, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(killed, tmp_path / "folder"))


def command(flags: tuple[str, ...], script: str = "train_gpt2_fp32.py") -> list:
    return [sys.executable, "-u", ROOT / "dev" / "make_train.py", script, *FLAGS, *flags]


def train(folder: Path, *flags: str, code: int = 0, **script: str) -> str:
    """What a run prints that comes to its end, and the line that it says if it must end with a code."""
    done = subprocess.run(command(flags, **script), cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == code and done.stderr.count("\n") == (code > 0), done
    return done.stdout + done.stderr


def begin(folder: Path, *flags: str, steps: int = 1) -> tuple[subprocess.Popen, str]:
    """Starts a run and reads what it prints until so many steps have ended. Returns the run, which goes on, and the
    text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process, out = subprocess.Popen(command(flags), cwd=folder, text=True, **pipes), ""
    for line in process.stdout:
        out += line
        if len(steps_of(out)) == steps:
            break
    return process, out


def stop(process: subprocess.Popen, number: int = signal.SIGKILL) -> str:
    """What a run prints after this signal."""
    process.send_signal(number)
    out, error = process.communicate(timeout=100)
    assert error == ""
    return out


def first_step(out: str) -> int:
    return min(steps_of(out))


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def runs(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs").iterdir())


def test_a_run_ends_with_the_command_that_samples_from_it_and_the_next_starts_in_a_directory_of_its_own(folder):
    (folder / "runs" / "gpt2_fp32_6").mkdir(parents=True)
    for n in (7, 8):
        out = train(folder)
        printed = re.search(r"^to sample from it:\n\n    (.*)\n$", out, re.M)[1]
        assert printed == f"{sys.executable} generate.py -e runs/gpt2_fp32_{n}/step_00000004"
        assert first_step(out) == 1 and runs(folder) == [f"gpt2_fp32_{i}" for i in range(6, n + 1)]
        assert not list((folder / "runs").glob("*/unfinished.json"))
    command = printed.replace("generate.py", str(ROOT / "generate.py")) + " --device cpu -g 5"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and "5 tokens in" in done.stderr
    train(folder, script="train_pythia.py")
    assert runs(folder) == ["gpt2_fp32_6", "gpt2_fp32_7", "gpt2_fp32_8", "pythia_1"]


def test_a_run_that_was_stopped_goes_on_where_it_was(stopped):
    for number in signal.SIGINT, signal.SIGKILL:
        last = max(int(path.name.removeprefix("step_")) for path in (stopped / "runs").glob("*/step_????????"))
        process, out = begin(stopped, *LONG)
        assert first_step(out) == last + 1 and runs(stopped) == ["gpt2_fp32_1"]
        assert ("the same `make train` goes on with it" in stop(process, number)) == (number == signal.SIGINT)


def keep(folder: Path) -> None:
    pass


def remake_data(folder: Path) -> None:
    write_tokens(folder / "data_train.bin", np.arange(2000) % 50)


def damage(folder: Path) -> None:
    for path in (folder / "runs" / "gpt2_fp32_1").glob("*/model.bin"):
        path.write_bytes(path.read_bytes()[:5000] + b"damage" + path.read_bytes()[5006:])


def forget_the_place(folder: Path) -> None:
    """A checkpoint with a right checksum, whose state does not say where a run goes on."""
    for path in (folder / "runs" / "gpt2_fp32_1").glob("step_????????"):
        write_record(path, read_record(path) | {"state": {}})


@pytest.mark.parametrize("change, flags", [
    (keep, ["-l", "1e-2"]), (remake_data, []), (damage, []), (forget_the_place, []),
])  # fmt: skip
def test_a_run_that_cannot_go_on_is_left_as_it_is_and_the_next_starts_beside_it(stopped, change, flags):
    change(stopped)
    before = files(stopped / "runs")
    process, out = begin(stopped, *LONG, *flags)
    stop(process)
    assert first_step(out) == 1 and runs(stopped) == ["gpt2_fp32_1", "gpt2_fp32_2"]
    assert before.items() <= files(stopped / "runs").items()
    assert ("runs/gpt2_fp32_1 is left as it is: " in out) == (change != keep)


def test_a_run_that_is_still_running_is_left_alone(stopped):
    first, _ = begin(stopped, *LONG)
    second, out = begin(stopped, *LONG)
    assert first.poll() is None and first_step(out) == 1 and runs(stopped) == ["gpt2_fp32_1", "gpt2_fp32_2"]
    stop(first)
    stop(second)


@pytest.mark.parametrize(("flags", "code"), [(["-b", "0"], 2), (["-i", "nowhere"], 1)])
def test_what_is_refused_leaves_no_directory(folder, flags, code):
    assert "error: " in train(folder, *flags, code=code)
    assert not (folder / "runs").exists() or runs(folder) == []


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again_in_its_directory(folder):
    (folder / "runs" / "gpt2_fp32_7").mkdir(parents=True)
    (folder / "runs" / "gpt2_fp32_7" / "unfinished.json").write_text(json.dumps(FLAGS))
    assert "-e runs/gpt2_fp32_7/step_00000004\n" in train(folder)


@pytest.mark.parametrize("link", ["runs", "runs/gpt2_fp32_1"])
def test_what_a_link_leads_to_stays_as_it_is(stopped, link):
    (stopped / link).rename(stopped / "elsewhere")
    (stopped / link).symlink_to(stopped / "elsewhere")
    before = files(stopped / "elsewhere")
    out = train(stopped, "-x", "1", code=int(link == "runs"))
    assert files(stopped / "elsewhere") == before
    assert "runs: a link; " in out if link == "runs" else runs(stopped) == ["gpt2_fp32_1", "gpt2_fp32_2"]

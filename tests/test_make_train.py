"""What `make train` runs: one run after another, each to its end, whatever has happened to the one before."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

from llmc.files.checkpoint_dir import read_record
from models import write_record
from support.folders import write_data

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAGS = [
    "--device", "cpu", "-e", "layers=1,heads=2,channels=32", "-i", "data", "-b", "2", "-t", "16", "-v", "1000",
    "-g", "0", "-x", "4",
]  # fmt: skip
KILL_AT = 3  # step


@pytest.fixture
def folder(tmp_path) -> Path:
    write_data(tmp_path, np.random.default_rng(0))
    return tmp_path


def start(folder: Path, *flags: str, script: str = "train_gpt2_fp32.py") -> subprocess.Popen:
    command = [sys.executable, "-u", ROOT / "dev" / "make_train.py", script, *FLAGS, *flags]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(folder: Path, *flags: str, code: int = 0, **options) -> str:
    process = start(folder, *flags, **options)
    out, error = process.communicate(timeout=100)
    assert process.returncode == code and error.count("\n") == (code > 0), (process.returncode, error)
    return out + error


def stop(folder: Path, *flags: str, number: int = signal.SIGKILL) -> str:
    """What a run prints that gets a signal in the midst of it, having saved each step."""
    process, out = start(folder, "-n", "1", "-x", "1000", *flags), ""
    for line in process.stdout:
        out += line
        if line.startswith(f"step {KILL_AT:4}/"):
            process.send_signal(number)
            break
    rest, error = process.communicate(timeout=100)
    assert error == ""
    return out + rest


def first_step(out: str) -> int:
    return int(re.search(r"^step +(\d+)/", out, re.M)[1])


def until_its_first_step(process: subprocess.Popen) -> str:
    """What a run prints until then."""
    out = ""
    for line in process.stdout:
        out += line
        if line.startswith("step "):
            break
    return out


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def runs(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs").iterdir())


def test_a_run_ends_with_the_command_that_samples_from_it_and_the_next_starts_in_a_directory_of_its_own(folder):
    for n in (1, 2):
        out = train(folder)
        printed = re.search(r"^to sample from it:\n\n    (.*)\n$", out, re.M)[1]
        assert printed == f"{sys.executable} generate.py -e runs/gpt2_fp32_{n}/step_00000004"
        assert first_step(out) == 1 and runs(folder) == [f"gpt2_fp32_{i}" for i in range(1, n + 1)]
        assert not list((folder / "runs").glob("*/unfinished.json"))
    command = printed.replace("generate.py", str(ROOT / "generate.py")) + " --device cpu -g 5"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and "5 tokens in" in done.stderr
    train(folder, script="train_pythia.py")
    assert runs(folder) == ["gpt2_fp32_1", "gpt2_fp32_2", "pythia_1"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_stopped_goes_on_where_it_was(folder, number):
    out = stop(folder, number=number)
    assert ("the same `make train` goes on with it" in out) == (number != signal.SIGKILL)
    (newest,) = sorted((folder / "runs" / "gpt2_fp32_1").glob("step_????????"))[-1:]
    again = start(folder, "-n", "1", "-x", "1000")
    out = until_its_first_step(again)
    again.kill()
    again.communicate()
    assert first_step(out) == int(newest.name.removeprefix("step_")) + 1 and runs(folder) == ["gpt2_fp32_1"]


def change_flags(folder: Path) -> list[str]:
    return ["-l", "1e-2"]


def remake_data(folder: Path) -> list[str]:
    write_data(folder, np.random.default_rng(1))
    return []


def damage(folder: Path) -> list[str]:
    for path in (folder / "runs" / "gpt2_fp32_1").glob("*/model.bin"):
        path.write_bytes(path.read_bytes()[:5000] + b"damage" + path.read_bytes()[5006:])
    return []


def forget_the_place(folder: Path) -> list[str]:
    """A checkpoint with a right checksum, whose state does not say where a run goes on."""
    for path in (folder / "runs" / "gpt2_fp32_1").glob("step_????????"):
        write_record(path, read_record(path) | {"state": {}})
    return []


@pytest.mark.parametrize("change", [change_flags, remake_data, damage, forget_the_place])
def test_a_run_that_cannot_go_on_is_left_as_it_is_and_the_next_starts_beside_it(folder, change):
    stop(folder)
    flags = change(folder)
    before = files(folder / "runs")
    process = start(folder, "-n", "1", "-x", "1000", *flags)
    out = until_its_first_step(process)
    process.kill()
    assert process.communicate()[1] == "" and first_step(out) == 1 and runs(folder) == ["gpt2_fp32_1", "gpt2_fp32_2"]
    assert before.items() <= files(folder / "runs").items()
    assert ("runs/gpt2_fp32_1 is left as it is: " in out) == (change != change_flags)


def test_a_run_that_is_still_running_is_left_alone(folder):
    first = start(folder, "-x", "100000")
    until_its_first_step(first)
    second = start(folder, "-x", "100000")
    out = until_its_first_step(second)
    assert first.poll() is None and first_step(out) == 1 and runs(folder) == ["gpt2_fp32_1", "gpt2_fp32_2"]
    for process in (first, second):
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("flags", "code"), [(["-b", "0"], 2), (["-i", "nowhere"], 1)])
def test_what_is_refused_leaves_no_directory(folder, flags, code):
    assert "error: " in train(folder, *flags, code=code)
    assert not (folder / "runs").exists() or runs(folder) == []


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again_in_its_directory(folder):
    (folder / "runs" / "gpt2_fp32_7").mkdir(parents=True)
    (folder / "runs" / "gpt2_fp32_7" / "unfinished.json").write_text(json.dumps(FLAGS))
    assert "-e runs/gpt2_fp32_7/step_00000004\n" in train(folder)
    assert "-e runs/gpt2_fp32_8/step_00000004\n" in train(folder)


@pytest.mark.parametrize("link", ["runs", "runs/gpt2_fp32_1"])
def test_what_a_link_leads_to_stays_as_it_is(folder, link):
    stop(folder)
    (folder / link).rename(folder / "elsewhere")
    (folder / link).symlink_to(folder / "elsewhere")
    before = files(folder / "elsewhere")
    out = train(folder, "-x", "1", code=int(link == "runs"))
    assert files(folder / "elsewhere") == before
    assert "runs: a link; " in out if link == "runs" else runs(folder) == ["gpt2_fp32_1", "gpt2_fp32_2"]

"""The Makefile: what it would install and run on other machines, read from `make -n`."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from dev import make_train
from dev.scripts import model_kinds
from llmc.run.arguments import make_parser

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def write_program(path: Path, does: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)


@pytest.fixture
def make(tmp_path):
    """make(*arguments, smi=None) returns what make prints, on a machine whose nvidia-smi prints `smi`, or fails where
    that is None. With refused=True it must fail, and what it says on stderr is returned."""

    def make(*arguments, smi=None, refused=False) -> str:
        write_program(tmp_path / "tools" / "nvidia-smi", "exit 9" if smi is None else f"echo '{smi}'")
        # Without what a make that runs the tests has put there.
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        env["PATH"] = f"{tmp_path}/tools{os.pathsep}{env['PATH']}"
        command = ["make", "--no-print-directory", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 * refused and not (refused and done.stdout), done
        return done.stderr if refused else done.stdout

    return make


def test_plain_make_lists_every_target(make):
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert re.findall(r"^  make (\S+) +\S", make(), re.MULTILINE) == targets


SMI = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0     |"
GPU = "GPU {0}: NVIDIA H200 (UUID: GPU-{0})"


@pytest.mark.parametrize("smi, wheels", [
    ("| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05   CUDA Version: 12.2     |", ["cupy-cuda12x[ctk]"]),
    ("| NVIDIA-SMI 590.44.01    KMD Version: 590.44.01     CUDA UMD Version: 13.1   |", ["cupy-cuda13x[ctk]"]),
    ("CUDA Version                              : 12.8", ["cupy-cuda12x[ctk]"]),
    ("\n".join([SMI, GPU.format(0)]), ["cupy-cuda13x[ctk]"]),
    ("\n".join([SMI, *map(GPU.format, range(2))]), ["cupy-cuda13x[ctk]", "nvidia-nccl-cu13"]),
    (None, []), ("| NVIDIA-SMI 450.80.02   Driver Version: 450.80.02   CUDA Version: 11.0     |", []),
])  # fmt: skip
def test_training_gets_the_cupy_wheel_of_the_driver_and_nccl_for_several_gpus(smi, wheels, make, tmp_path):
    plan = make("-n", "train", f"VENV={tmp_path}/new", smi=smi)
    assert "pip install" in plan and sorted(re.findall(r"cupy-cuda\S*\]|nvidia-nccl-cu\d+", plan)) == wheels


def test_the_tests_get_what_they_need_after_make_train_too_and_without_a_gpu_cupy_and_nvrtc_to_compile_with(
    make, tmp_path
):
    (tmp_path / ".ready-to-train").touch()
    installs, touches = make("-n", "setup", f"VENV={tmp_path}").splitlines()
    assert "-r requirements-dev.txt" in installs and touches.startswith("touch ")
    assert '"cupy-cuda13x~=14.0;' in installs and '"nvidia-cuda-nvrtc~=13.0;' in installs


def test_an_environment_of_another_python_than_the_one_that_is_named_is_said(make, tmp_path):
    """Not made anew: what the user has installed there would be lost."""
    for name, version in ("set/bin/python", "3.11.7"), ("same", "3.11.7"), ("other", "3.12.1"):
        write_program(tmp_path / name, f"echo Python {version}")
    (tmp_path / "set" / ".ready-to-train").touch()
    venv = f"VENV={tmp_path}/set"
    make("train", venv, f"PYTHON={tmp_path}/same")
    make("train", venv)
    assert make("train", venv, f"PYTHON={tmp_path}/other", refused=True).startswith(
        f"error: {tmp_path}/set has Python 3.11.7, and PYTHON={tmp_path}/other is another: remove {tmp_path}/set, "
        "or name one with VENV=\n"
    )


@pytest.mark.parametrize("target", ["/nonexistent/python3.9", "/bin/false"])  # gone, or without packages
def test_an_environment_whose_python_has_been_replaced_is_said(target, make, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(target)
    (tmp_path / ".ready-to-train").touch()
    said = make("train", f"VENV={tmp_path}", refused=True)
    assert said.startswith(f"error: the Python of {tmp_path} is gone, or has no packages any more: remove ")


@pytest.mark.parametrize("pip", [True, False])
def test_a_python_without_ensurepip_lends_the_environment_its_own_pip(pip, make, tmp_path):
    """As on Colab: venv fails after it has made most of the environment."""
    if subprocess.run([sys._base_executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("this Python has no pip of its own")
    real, venv = shlex.quote(sys.executable), tmp_path / "venv"
    write_program(tmp_path / "python", f"""case "$*" in
    "-m venv --without-pip "*) {f'exec {real} "$@"' if pip else f'exec {real} -m venv --without-pip "$5"'} ;;
    "-m venv "*) {real} -m venv --without-pip "$3"; echo "ensurepip is not available" >&2; exit 1 ;;
    *) exec {real} "$@" ;;
esac""")  # fmt: skip
    arguments = f"{venv}/.ready-to-train", f"VENV={venv}", f"PYTHON={tmp_path}/python", "PIP_INSTALL=echo $(PY) -m pip"
    said = make(*arguments, refused=not pip)
    assert (venv / ".ready-to-train").exists() == pip
    if pip:
        assert f"note: {tmp_path}/python makes no environment with a pip: {venv} uses the pip and" in said
        program = "import sys, pip; print(sys.prefix)"
        prefix = subprocess.run([venv / "bin" / "python", "-c", program], capture_output=True, text=True).stdout
        assert prefix == f"{venv}\n"
    else:
        assert f"\nerror: no pip for {venv}: install venv for {tmp_path}/python (" in said


@pytest.mark.parametrize(("script", "smi", "model"), [
    ("train_gpt2_fp32.py", None, "tiny"), ("train_llama3.py", None, "tiny"), ("train_llama3", SMI, "smollm2-135m"),
])  # fmt: skip
def test_train_runs_the_script_that_is_asked_for(script, smi, model, make):
    printed = make("train", "PYTHON=echo", "VENV=", f"SCRIPT={script}", "ARGS=-x 5", smi=smi)
    command = printed.splitlines()[-1].split()  # echo, for Python, says what it was to run
    where, name = "cpu" if smi is None else "cuda", f"{script.removesuffix('.py')}.py"
    assert command == ["dev/make_train.py", "--first-run", where, name, "-x", "5"]
    config = next(kind.Config for kind in model_kinds() if kind.Config.SCRIPT == name)
    flags = make_train.first_run(config, where, None)
    assert flags[flags.index("-e") + 1] == model and flags[flags.index("-i") + 1] == "data/python_docs"
    assert ("--device cuda" in " ".join(flags)) == (where == "cuda")
    make_parser(config).parse_args(flags)


def test_a_model_that_is_named_is_what_the_first_run_trains(make, monkeypatch):
    plan = make("-n", "train", "PYTHON=python", "VENV=", "MODEL=mine.bin", smi=SMI)
    assert "dev/make_train.py --first-run cuda --model mine.bin train_gpt2_fp32.py" in plan
    fetched = []
    monkeypatch.setattr(make_train.subprocess, "run", lambda command: SimpleNamespace(returncode=fetched.pop()))
    for kind in model_kinds():
        for where in "cuda", "cpu":
            for model in "mine.bin", "tiny", next(iter(kind.Config.PRESETS.values())):
                fetched[:] = [0] if model == "mine.bin" else []  # random weights need no starter pack
                flags = make_train.first_run(kind.Config, where, model)
                assert flags[flags.index("-e") + 1] == model and flags.count("-e") == 1
                parser, own = make_parser(kind.Config), ["-x", "7", "--model", "other", "-n", "5"]
                parser.parse_args(merged := make_train.in_place_of(flags, own, kind.Config))
                assert merged[-len(own) :] == own and parser.repeated == []

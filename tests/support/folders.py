"""Folders that trainers run in, and what they print and save there."""

import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmc.data.token_file import write_tokens
from llmc.data.tokenizer import write_tokenizer

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
V = 61
STEP = re.compile(r"step +(\d+)/(\d+): train loss (nan|\d+\.\d{6}) \((\d+\.\d\d) ms, (\d+) tok/s\)(.*)")


def make_folder(folder: Path) -> Path:
    """Makes a directory with training and validation tokens, which a model can learn, and their tokenizer."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split, count in ("train", 2000), ("val", 400):
        tokens = (np.arange(count) * 7 + rng.integers(0, 2, count)) % V
        write_tokens(folder / f"data_{split}.bin", tokens)
    write_tokenizer(folder / "data_tokenizer.bin", [bytes([32 + i]) for i in range(V)], eot=V - 1)
    return folder


def write_data(folder: Path, rng: np.random.Generator) -> None:
    """Writes random tokens and a tokenizer of bytes."""
    for split, count in ("train", 2000), ("val", 400):
        write_tokens(folder / f"data_{split}.bin", rng.integers(0, 257, count))
    write_tokenizer(folder / "data_tokenizer.bin", [*(bytes([i]) for i in range(256)), b"end"], 256)


def start_trainer(
    folder: Path, *more: str, flags: Sequence[str], script: str = "train_gpt2_fp32.py", **options
) -> subprocess.Popen:
    """Starts a trainer in a folder."""
    command = [sys.executable, "-u", str(ROOT / script), *flags, *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, text=True, **pipes | options)


def output_of_trainer(folder: Path, *more: str, code: int = 0, **options) -> tuple[str, str]:
    """stdout and stderr of a trainer that must end with this code."""
    process = start_trainer(folder, *more, **options)
    out, error = process.communicate(timeout=200)
    assert process.returncode == code, (process.returncode, out[-2000:], error)
    assert "Traceback" not in error
    return out, error


def limit_files(size: int) -> dict:
    """Options of `start_trainer`, with which it can make no file larger, as on a disk that is full."""
    return {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))}


def checkpoint_bytes(folder: Path, step: int) -> list[bytes]:
    return [(folder / "run" / f"step_{step:08d}" / name).read_bytes() for name in ("model.bin", "optimizer.bin")]


def steps_of(out: str) -> dict[int, float]:
    """Step, counted from 1, to training loss."""
    return {int(match[1]): float(match[3]) for match in STEP.finditer(out)}


def samples_of(out: str) -> list[str]:
    return re.findall(r"^generating:\n---\n(.*?)\n---$", out, re.M | re.S)

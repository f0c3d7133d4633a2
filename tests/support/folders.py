"""Folders that trainers run in, and what they print and save there."""

import re
from pathlib import Path

from llmc.data.token_file import write_tokens
from llmc.data.tokenizer import write_tokenizer

import numpy as np

V = 61
STEP = re.compile(r"step +(\d+)/(\d+): train loss (\d+\.\d{6}) \((\d+\.\d\d) ms, (\d+) tok/s\)(.*)")


def make_folder(folder: Path) -> Path:
    """Makes a directory with training and validation tokens, which a model can learn, and their tokenizer."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split, count in ("train", 2000), ("val", 400):
        tokens = (np.arange(count) * 7 + rng.integers(0, 2, count)) % V
        write_tokens(folder / f"data_{split}.bin", tokens)
    write_tokenizer(folder / "data_tokenizer.bin", [bytes([32 + i]) for i in range(V)], eot=V - 1)
    return folder


def checkpoint_bytes(folder: Path, step: int) -> list[bytes]:
    return [(folder / "run" / f"step_{step:08d}" / name).read_bytes() for name in ("model.bin", "optimizer.bin")]


def steps_of(out: str) -> dict[int, float]:
    """Step, counted from 1, to training loss."""
    return {int(match[1]): float(match[3]) for match in STEP.finditer(out)}


def samples_of(out: str) -> list[str]:
    return re.findall(r"^generating:\n---\n(.*?)\n---$", out, re.M | re.S)

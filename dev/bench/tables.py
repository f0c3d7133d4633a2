"""The tables of doc/speed.md: what --suite times, printed so that it can be pasted there.

A column is a workload, by the flags that measure it again, with the peers that run on it.
"""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
Table = tuple[tuple[str, str], ...]  # columns: flags, peers

BF16 = "--precision bf16"
SMALL = "-b 12 -t 64 --vocab-size 257"
STEPS: dict[str, tuple[Table, ...]] = {
    "cuda": (
        (
            ("train_gpt2_fp32 -e d12 -b 4 -t 1024",
             "eager,eager-sdpa,compile,compile-sdpa,compile-graphs,compile-sdpa-bf16"),
            ("train_gpt2_fp32 -e d12 -b 16 -t 1024", "compile"),
            ("train_gpt2_fp32 -e d12 -b 4 -t 64", "compile-graphs"),
            ("train_gpt2_fp32 -e d12 -b 4 -t 1024 -a softmax", ""),
        ),
        (
            ("train_llama3 -e smollm2-135m -b 4 -t 1024", "compile,compile-graphs"),
            ("train_gpt2_fp32 -e layers=30,heads=9,channels=576 -b 4 -t 1024 --vocab-size 49152", ""),
            ("train_llama3 -e llama3.2-1b -b 2 -t 1024", "compile"),
            ("train_pythia -e pythia-160m -b 4 -t 1024", "compile-graphs"),
            ("train_qwen3 -e qwen3-0.6b -b 2 -t 1024", "compile"),
        ),
        (
            (f"train_gpt2_fp32 -e d12 -b 4 -t 1024 {BF16}",
             "eager,eager-sdpa,compile,compile-sdpa,compile-graphs,compile-cudnn,compile-graphs-cudnn"),
            (f"train_gpt2_fp32 -e d12 -b 16 -t 1024 {BF16}",
             "compile,compile-graphs,compile-cudnn,compile-graphs-cudnn"),
            (f"train_gpt2_fp32 -e d12 -b 4 -t 64 {BF16}", "compile,compile-graphs"),
            (f"train_gpt2_fp32 -e d12 -b 4 -t 1024 {BF16} --logit-rows 512", ""),
        ),
        (
            (f"train_llama3 -e smollm2-135m -b 4 -t 1024 {BF16}", "compile,compile-graphs"),
            (f"train_llama3 -e llama3.2-1b -b 2 -t 1024 {BF16}", "compile,compile-cudnn"),
            (f"train_pythia -e pythia-160m -b 4 -t 1024 {BF16}", "compile-graphs"),
            (f"train_qwen3 -e qwen3-0.6b -b 2 -t 1024 {BF16}", "compile-cudnn,compile-graphs-cudnn"),
        ),
    ),
    "cpu": (
        (
            ("train_gpt2_fp32 -e d12 -b 4 -t 64", "eager,eager-sdpa,compile-sdpa"),
            ("train_llama3 -e smollm2-135m -b 1 -t 256", "eager-sdpa,compile-sdpa"),
            (f"train_gpt2_fp32 -e tiny {SMALL}", "eager,eager-sdpa,compile-sdpa"),
            (f"train_llama3 -e tiny {SMALL}",
             "eager,eager-sdpa,compile-sdpa"),
            (f"train_pythia -e tiny {SMALL}", "eager,compile"),
        ),
    ),
}  # fmt: skip
TEXTS: dict[str, tuple[Table, ...]] = {
    "cuda": (
        (
            ("train_gpt2_fp32 -e d12 -b 1 -t 1024 --precision fp32", "compile,generate"),
            (f"train_gpt2_fp32 -e d12 -b 1 -t 1024 {BF16}", "compile,generate"),
            (f"train_llama3 -e smollm2-135m -b 1 -t 1024 {BF16}", "compile,generate"),
            (f"train_llama3 -e llama3.2-1b -b 1 -t 1024 {BF16}", "compile,generate"),
            (f"train_llama3 -e llama3.2-1b -b 16 -t 1024 {BF16}", "compile"),
        ),
    ),
    "cpu": (),
}


@dataclass(frozen=True)
class Cell:
    """What a trainer took on a workload. ms: of a step of so many tokens; mebibytes: of memory, not a number where that
    is not known. A limit has milliseconds alone."""

    workload: str
    trainer: str
    ms: float
    tokens: int = 0
    mebibytes: float = float("nan")

    def __str__(self) -> str:
        """Milliseconds, tokens a second, MiB."""
        digits = 0 if self.ms >= 999.5 else 1 if self.ms >= 9.995 else 2
        parts = [f"{self.ms:.{digits}f}"]
        if self.tokens:
            rate = 1000 * self.tokens / self.ms
            parts.append(f"{rate / 1000:.0f} k" if rate >= 9500 else f"{rate:.0f}")
        return " · ".join(parts + ([f"{self.mebibytes:.0f}"] if np.isfinite(self.mebibytes) else []))


def markdown(cells: list[Cell]) -> str:
    """A table of what was timed: a row for each trainer, a column for each workload, and below it the date and the
    commit, where git tells it."""
    by_place = {(cell.trainer, cell.workload): cell for cell in cells}
    trainers, workloads = (list(dict.fromkeys(names)) for names in zip(*by_place, strict=True))
    rows = [["", *(f"`{workload}`" for workload in workloads)], ["---"] * (1 + len(workloads))]
    rows += [[name, *(str(by_place.get((name, workload), "")) for workload in workloads)] for name in trainers]
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
    )
    commit = f" at {git.stdout.strip()}" if git.returncode == 0 else ""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", f"Measured {time.strftime('%Y-%m-%d')}{commit}."])

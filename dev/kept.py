"""Kept measurements: one JSON file for each machine in dev/measurements/, the tables of doc/speed.md, and what has
become slower since.

A row is one trainer on one workload: `workload` are the flags of dev/bench.py that measure it again, `trainer` is one
of TRAINERS. `limit` is no trainer but what no step can be faster than on that machine. Rows whose trainer begins with
"text" are dev/bench_text.py's: milliseconds of a step that writes a token of each text.
"""

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import device
from device.errors import UserError
from llmc.files import replacing

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / "dev" / "measurements"
TOLERANCE = 0.02  # of a kept figure: a smaller difference is noise

TRAINERS = {
    "ours": "llm.cupy",
    "eager": "PyTorch eager",
    "eager-sdpa": "PyTorch eager, SDPA",
    "compile": "PyTorch compile",
    "compile-sdpa": "PyTorch compile, SDPA",
    "compile-graphs": "PyTorch compile, CUDA graphs",
    "compile-cudnn": "PyTorch compile, cuDNN's attention",
    "compile-graphs-cudnn": "PyTorch compile, CUDA graphs, cuDNN's attention",
    "compile-sdpa-bf16": "PyTorch compile, SDPA, products in bf16, as nanoGPT trains",
    "limit": "limit",
    "text": "llm.cupy",
    "text-compile": "transformers, static cache, compile with CUDA graphs",
    "text-generate": "transformers' generate",
    "text-limit": "limit: weights, keys and values at the speed of a copy",
}


@dataclass(frozen=True)
class Column:
    """A workload of doc/speed.md: its title, the flags of dev/bench.py, and the peers that --suite runs on it."""

    title: str
    workload: str
    peers: str = ""


@dataclass(frozen=True)
class Table:
    """A table of doc/speed.md, of one machine. variants: further flags with which ours is shown and run as well, on the
    first column's workload. above: what the page says before it. program: of dev/, which measures it."""

    name: str
    machine: str
    columns: tuple[Column, ...]
    variants: tuple[str, ...] = ()
    above: str = ""
    program: str = "bench.py"


BF16 = "--precision bf16"
SMALL = "-b 12 -t 64 --vocab-size 257"
TABLES = (
    Table(
        "gpt2", "NVIDIA H200",
        (
            Column("GPT-2 124M, B 4, T 1024", "train_gpt2_fp32 -e d12 -b 4 -t 1024",
                   "eager,eager-sdpa,compile,compile-sdpa,compile-graphs,compile-sdpa-bf16"),
            Column("B 16, T 1024", "train_gpt2_fp32 -e d12 -b 16 -t 1024", "compile"),
            Column("B 4, T 64", "train_gpt2_fp32 -e d12 -b 4 -t 64", "compile-graphs"),
        ),
        ("-a softmax",),
    ),
    Table(
        "llama3", "NVIDIA H200",
        (
            Column("SmolLM2 135M, B 4, T 1024", "train_llama3 -e smollm2-135m -b 4 -t 1024",
                   "compile,compile-graphs"),
            Column("a GPT-2 of that shape", "train_gpt2_fp32 -e layers=30,heads=9,channels=576 -b 4 -t 1024 "
                   "--vocab-size 49152"),
            Column("Llama 3.2 1B, B 2, T 1024", "train_llama3 -e llama3.2-1b -b 2 -t 1024", "compile"),
        ),
    ),
    Table(
        "pythia", "NVIDIA H200",
        (
            Column("Pythia 160M, B 4, T 1024", "train_pythia -e pythia-160m -b 4 -t 1024", "compile-graphs"),
        ),
    ),
    Table(
        "qwen3", "NVIDIA H200",
        (
            Column("Qwen3 0.6B, B 2, T 1024", "train_qwen3 -e qwen3-0.6b -b 2 -t 1024", "compile"),
        ),
    ),
    Table(
        "gpt2-bf16", "NVIDIA H200",
        (
            Column("GPT-2 124M, B 4, T 1024", f"train_gpt2_fp32 -e d12 -b 4 -t 1024 {BF16}",
                   "eager,eager-sdpa,compile,compile-sdpa,compile-graphs,compile-cudnn,compile-graphs-cudnn"),
            Column("B 16, T 1024", f"train_gpt2_fp32 -e d12 -b 16 -t 1024 {BF16}",
                   "compile,compile-graphs,compile-cudnn,compile-graphs-cudnn"),
            Column("B 4, T 64", f"train_gpt2_fp32 -e d12 -b 4 -t 64 {BF16}", "compile,compile-graphs"),
        ),
        ("--logit-rows 512",),
        above="The same in bf16 (`--precision bf16`), PyTorch under autocast with fp32 weights. Its fastest\n"
        "way is CUDA graphs with cuDNN's attention (`--peers compile-graphs-cudnn`):\n\n",
    ),
    Table(
        "others-bf16", "NVIDIA H200",
        (
            Column("SmolLM2 135M, B 4, T 1024", f"train_llama3 -e smollm2-135m -b 4 -t 1024 {BF16}",
                   "compile,compile-graphs"),
            Column("Llama 3.2 1B, B 2, T 1024", f"train_llama3 -e llama3.2-1b -b 2 -t 1024 {BF16}",
                   "compile,compile-cudnn"),
            Column("Pythia 160M, B 4, T 1024", f"train_pythia -e pythia-160m -b 4 -t 1024 {BF16}", "compile-graphs"),
            Column("Qwen3 0.6B, B 2, T 1024", f"train_qwen3 -e qwen3-0.6b -b 2 -t 1024 {BF16}",
                   "compile-cudnn,compile-graphs-cudnn"),
        ),
    ),
    Table(
        "cpu", "CPU, 2 cores",
        (
            Column("GPT-2 124M, B 4, T 64", "train_gpt2_fp32 -e d12 -b 4 -t 64", "eager,eager-sdpa,compile-sdpa"),
            Column("SmolLM2 135M, B 1, T 256", "train_llama3 -e smollm2-135m -b 1 -t 256", "eager-sdpa,compile-sdpa"),
            Column("small GPT-2", f"train_gpt2_fp32 -e layers=4,heads=4,channels=128 {SMALL}",
                   "eager,eager-sdpa,compile-sdpa"),
            Column("small Llama", "train_llama3 -e layers=4,heads=4,kv_heads=2,channels=128,hidden=352,maxT=64 "
                   f"{SMALL}", "eager,eager-sdpa,compile-sdpa"),
            Column("small Pythia", f"train_pythia -e layers=4,heads=4,channels=128,maxT=64 {SMALL}", "eager,compile"),
        ),
    ),
    Table(
        "text", "NVIDIA H200",
        (
            Column("GPT-2 124M, fp32", "train_gpt2_fp32 -e d12 -b 1 -t 1024 --precision fp32", "compile,generate"),
            Column("bf16", f"train_gpt2_fp32 -e d12 -b 1 -t 1024 {BF16}", "compile,generate"),
            Column("SmolLM2 135M, bf16", f"train_llama3 -e smollm2-135m -b 1 -t 1024 {BF16}", "compile,generate"),
            Column("Llama 3.2 1B, bf16", f"train_llama3 -e llama3.2-1b -b 1 -t 1024 {BF16}", "compile,generate"),
            Column("16 texts of it", f"train_llama3 -e llama3.2-1b -b 16 -t 1024 {BF16}", "compile"),
        ),
        program="bench_text.py",
    ),
)  # fmt: skip


def published(kind: str, program: str = "bench.py") -> list[tuple[str, str]]:
    """The workloads of a program's tables for "cuda" or "cpu", as its flags, each with its peers."""
    found = []
    for table in TABLES:
        if table.program == program and table.machine.startswith("CPU") == (kind == "cpu"):
            found += [(column.workload, column.peers) for column in table.columns]
            found += [(f"{table.columns[0].workload} {variant}", "") for variant in table.variants]
    return found


# The file of a machine


def file_of(machine: str) -> Path:
    """dev/measurements/nvidia-h200.json for "NVIDIA H200"."""
    return DIRECTORY / f"{'-'.join(re.findall('[a-z0-9]+', machine.lower()))}.json"


def kept_rows(machine: str) -> dict[tuple[str, str], dict]:
    """What is kept of a machine, by workload and trainer."""
    path = file_of(machine)
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["workload"], row["trainer"]): row for row in rows}


def keep(machine: str, rows: list[dict]) -> None:
    """Puts rows in the place of kept ones of the same workload and trainer."""
    kept = kept_rows(machine) | {(row["workload"], row["trainer"]): row for row in rows}
    lines = ",\n".join("    " + json.dumps(kept[key]) for key in sorted(kept))  # a line each, so that diffs are read
    DIRECTORY.mkdir(exist_ok=True)
    with replacing(file_of(machine)) as file:
        file.write(f'{{\n  "machine": {json.dumps(machine)},\n  "rows": [\n{lines}\n  ]\n}}\n'.encode())


def make_row(workload: str, trainer: str, ms: float, mebibytes: float | None, tokens: int, commit: str) -> dict:
    """A row to keep. ms: of a step of so many tokens; mebibytes: of memory, None or not a number where not known."""
    known = mebibytes is not None and np.isfinite(mebibytes)
    return {
        "workload": workload, "trainer": trainer,
        "ms": float(f"{ms:.4g}"), "tokens_per_second": round(1000 * tokens / ms),
        "MiB": round(mebibytes) if known else None,
        "date": time.strftime("%Y-%m-%d"), "commit": commit, "versions": versions(),
    }  # fmt: skip


def versions() -> str:
    """What the figures depend on besides the source: the packages in use, CUDA and the driver, or the processor."""
    found = [f"NumPy {np.__version__}"]
    for module, name in (("torch", "PyTorch"), ("transformers", "transformers")):
        if module in sys.modules:
            found.append(f"{name} {sys.modules[module].__version__}")
    if device.kind == "cuda":
        import cupy

        number = cupy.cuda.runtime.runtimeGetVersion()
        found += [f"CuPy {cupy.__version__}", f"CUDA {number // 1000}.{number % 1000 // 10}"]
        driver = search("/proc/driver/nvidia/version", r"\s(\d+\.\d+[.\d]*)\s")
        return ", ".join(found + ([f"driver {driver}"] if driver else []))
    processor = search("/proc/cpuinfo", r"model name\s*: (.*)")
    return ", ".join(found + ([processor] if processor else []))


def search(path: str, pattern: str) -> str | None:
    """The first match's group in a file of the system's, where there is such a file."""
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return found and found[1]


def commit_at_hand() -> str:
    """The commit that is checked out, with a + where files other than measurements and doc/speed.md differ from it.

    Raises UserError where git does not tell.
    """
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (
                ["rev-parse", "--short=7", "HEAD"],
                ["status", "--porcelain", "-uno", "--", ".", ":!dev/measurements", ":!doc/speed.md"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        raise UserError("--keep: git does not tell which commit this is; name it with --commit") from None
    return commit + "+" * bool(changes)


def worse_than(kept: dict[tuple[str, str], dict], rows: list[dict]) -> list[str]:
    """What has become slower or larger than kept by more than TOLERANCE, a line each; and at the end, where there are
    any, how many rows have nothing to be compared with."""
    lines, new = [], 0
    for row in rows:
        before = kept.get((row["workload"], row["trainer"]))
        new += before is None
        for unit, word in (("ms", "slower"), ("MiB", "larger")):
            if before and row[unit] and before[unit] and row[unit] > (1 + TOLERANCE) * before[unit]:
                more = 100 * (row[unit] / before[unit] - 1)
                lines.append(
                    f"{word}: {row['workload']}, {TRAINERS.get(row['trainer'], row['trainer'])}: {row[unit]:g} {unit}, "
                    f"{more:.1f}% more than {before[unit]:g} of {before['date']} ({before['commit']})"
                )
    if not lines and new < len(rows):
        lines.append(f"nothing has become slower or larger than kept by more than {100 * TOLERANCE:g}%")
    if new:
        lines.append(f"not kept so far: {new} of {len(rows)} rows")
    return lines


# doc/speed.md


def update_tables() -> None:
    """Writes the tables of doc/speed.md anew from what is kept."""
    path = ROOT / "doc" / "speed.md"
    text = with_tables(path.read_text())
    with replacing(path) as file:
        file.write(text.encode())


def with_tables(text: str) -> str:
    """The text with each `<!-- speed:NAME -->` … `<!-- /speed:NAME -->` filled with that table."""
    for table in TABLES:
        start, end = f"<!-- speed:{table.name} -->", f"<!-- /speed:{table.name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise UserError(f"doc/speed.md: {start} and {end} must each stand there once")
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{render(table)}{end}{rest.partition(end)[2]}"
    return text


def render(table: Table) -> str:
    """The table in Markdown: a row for each trainer that is measured on one of the workloads, a column for each
    workload, under it the flags of dev/bench.py. Below, when and at which commits. Nothing where nothing is kept."""
    kept = kept_rows(table.machine)
    names = TRAINERS | {
        "ours": "**llm.cupy**", "text": "**llm.cupy**",
        "limit": "limit: products as they run alone, the rest at copy speed",
    }  # fmt: skip
    shown = [(trainer, name, "") for trainer, name in names.items()]
    shown[1:1] = [("ours", f"the same with `{variant}`", f" {variant}") for variant in table.variants]
    rows = [
        ["", *(column.title for column in table.columns)],
        ["---"] * (1 + len(table.columns)),
        [f"`python dev/{table.program}` …", *(f"`{column.workload}`" for column in table.columns)],
    ]
    found = []
    for trainer, name, variant in shown:
        cells = [kept.get((column.workload + variant, trainer)) for column in table.columns]
        found += [cell for cell in cells if cell]
        if any(cells):
            rows.append([name, *(cell_of(cell, bold=name.startswith("**")) for cell in cells)])
    if not found:
        return ""
    when = "; ".join(sorted({f"{row['date']} at {row['commit']}" for row in found}))
    return table.above + "".join(f"| {' | '.join(row)} |\n" for row in rows) + f"\nMeasured {when}.\n"


def cell_of(row: dict | None, bold: bool) -> str:
    """Milliseconds, tokens a second, MiB where known; a limit has milliseconds alone."""
    if row is None:
        return ""
    digits = 0 if row["ms"] >= 999.5 else 1 if row["ms"] >= 9.995 else 2
    ms = f"{row['ms']:.{digits}f}"
    if row["trainer"].endswith("limit"):
        return ms
    rate = row["tokens_per_second"]
    parts = [f"**{ms}**" if bold else ms, f"{rate / 1000:.0f} k" if rate >= 9500 else f"{rate}"]
    return " · ".join(parts + ([f"{row['MiB']}"] if row["MiB"] else []))

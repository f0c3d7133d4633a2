"""Times a model script from its start to its first finished step: with nothing compiled yet, then again.

    python dev/bench start
    python dev/bench start train_llama3 -e smollm2-135m

The model lies in a file, as it does when training goes on from one: making random weights would take longer.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import device
from dev.bench.workload import Workload, make_parser, workload_of, write_data, write_random_model
from device.errors import UserError

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def seconds_to_first_step(command: list[str], environment: dict[str, str]) -> float:
    """Runs a training and returns when its first step was printed. Raises UserError where there is none."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
        errors="replace",
    )
    last, took = "no output", None
    for line in process.stdout:
        last = line.strip() or last
        if took is None and line.startswith("step "):
            took = time.perf_counter() - started
    process.wait()
    if took is None:
        raise UserError(f"{' '.join(command)} finished no step: {last}")
    return took


def time_start(workload: Workload, directory: Path) -> None:
    model = directory / "model.bin"
    write_data(workload)
    write_random_model(workload, model)
    started = time.perf_counter()
    np.fromfile(model, np.float32)
    reading = time.perf_counter() - started
    caches = dict.fromkeys(("CUPY_CACHE_DIR", "CUDA_CACHE_PATH", "LLMC_CACHE_DIR"), str(directory / "cache"))
    command = [
        sys.executable, str(ROOT / workload.kind.Config.SCRIPT), "-e", str(model), *workload.script_flags(),
        "-x", "1", "-m", "1", "-g", "0",
    ]  # fmt: skip
    print(f"{device.name}, {workload}: to the first finished step, of which {reading:.2f} s to read the model")
    for name in ("nothing compiled before", "kernels cached"):
        print(f"  {name:36} {seconds_to_first_step(command, caches):10.2f} s", flush=True)


def main(arguments: list[str] | None = None) -> None:
    args = make_parser("Time a model script from its start to its first finished step.").parse_args(arguments)
    device.use(args.device)
    with tempfile.TemporaryDirectory() as directory:
        time_start(workload_of(args, directory), Path(directory))


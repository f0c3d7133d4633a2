"""Times one of llm.c's trainers on what dev/bench times ours on: the same GPT-2, weights and tokens.

    python dev/bench llmc ../llm.c/train_gpt2fp32cu -b 4 -t 1024
    python dev/bench llmc ../llm.c/train_gpt2cu --precision bf16    # as llm.c builds it by default

Milliseconds are the median of those that it prints, after the first few. Memory is what the device, or on the CPU the
machine, has less of while it runs: on a GPU with its CUDA context, some 500 MiB that dev/bench leaves out.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import device
from dev.bench.workload import LEARNING_RATE, Workload, make_parser, workload_of, write_random_model, zipf_tokens
from device.errors import UserError
from llmc.data.dataloader import write_tokens
from llmc.run.arguments import positive

import numpy as np


def llmc_command(binary: Path, directory: Path, workload: Workload, steps: int) -> list[str]:
    """The command that runs an llm.c trainer, in a directory with the model and token files in it. Its usage tells
    which of llm.c's trainers it is; the one for the CPU has no flags. Raises UserError for what it cannot run."""
    usage = subprocess.run([binary, "--help"], cwd=directory / "empty", capture_output=True, text=True, timeout=60)
    flags = set(re.findall(r"^\s*-(\w) ", usage.stdout + usage.stderr, re.M))
    if device.precision == "bf16" and "e" not in flags:
        raise UserError(f"{binary}: takes no -e, so it trains in fp32 alone: leave --precision bf16 out")
    if not flags:
        if (workload.B, workload.T) != (4, 64):
            raise UserError(f"{binary}: takes no flags, so it can only be run at -b 4 -t 64")
        return [str(binary)]
    # Before it took patterns of files with a header (-i, -j), it took a prefix of files without one.
    data = ["-i", "train.bin", "-j", "val.bin"] if "j" in flags else ["-i", "raw"]
    wanted = {
        "b": workload.B, "t": workload.T, "l": LEARNING_RATE, "v": 10**6, "m": 1, "s": 10**6, "g": 1, "x": steps,
        "f": int(device.tf32), "e": model_file(),
    }  # fmt: skip
    return [str(binary), *data, *(word for flag, value in wanted.items() if flag in flags
                                  for word in (f"-{flag}", str(value)))]  # fmt: skip


def model_file() -> str:
    """What llm.c calls its model file in the precision in use."""
    return "gpt2_124M_bf16.bin" if device.precision == "bf16" else "gpt2_124M.bin"


def write_files(directory: Path, workload: Workload, steps: int) -> None:
    """The model and the tokens, under all the names by which llm.c's trainers look for them."""
    (directory / "empty").mkdir()
    write_random_model(workload, directory / model_file(), device.precision == "bf16")
    tokens = zipf_tokens(steps * workload.B * workload.T + 1, workload.config.vocab_size)
    for split in ("train", "val"):
        write_tokens(directory / f"{split}.bin", tokens)
        tokens.astype("<i4").tofile(directory / f"raw_{split}.bin")
    for place in ("dev/data/tinyshakespeare", "data"):  # where the trainer for the CPU looks
        (directory / place).mkdir(parents=True)
        for split in ("train", "val"):
            (directory / place / f"tiny_shakespeare_{split}.bin").symlink_to(directory / f"{split}.bin")


def run_llmc(binary: Path, workload: Workload, directory: Path, steps: int | None) -> None:
    """Runs an llm.c trainer and prints what it took. Raises UserError where it prints no milliseconds."""
    warm_up, count = (1, steps or 5) if device.kind == "cpu" else (10, steps or 45)
    write_files(directory, workload, warm_up + count)
    command = llmc_command(binary, directory, workload, warm_up + count)
    free, _ = device.memory()
    least, milliseconds, losses, printed = free, [], [], []
    # C's stdout would be flushed in blocks of some pages where it is no terminal.
    process = subprocess.Popen(
        ["stdbuf", "-oL", *command], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    )
    try:
        for line in process.stdout:
            printed.append(line)
            least = min(least, device.memory()[0])
            found = re.match(r"step +\d+.*?([\d.]+) ms", line)
            if found:
                milliseconds.append(float(found[1]))
                losses += re.findall(r"loss ([\d.]+)", line)
            if len(milliseconds) >= warm_up + count:
                break
    finally:
        process.kill()
        process.wait()
    timed = milliseconds[warm_up:]
    if not timed:
        last = next((line.rstrip() for line in reversed(printed) if line.strip()), "nothing")
        raise UserError(f"{binary}: printed no milliseconds after {warm_up} steps; its last line: {last}")
    ms = float(np.median(timed))
    first_loss = f", first loss {losses[0]}" if losses else ""
    print(
        f"llm.c {binary.name}, {workload}: {ms:.2f} ms a step, {1000 * workload.B * workload.T / ms:.0f} tokens/s, "
        f"{(free - least) / 2**20:.0f} MiB{first_loss}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("Time one of llm.c's GPT-2 trainers.", any_script=False)
    parser.add_argument("--steps", type=positive, metavar="N", help="steps to time (45; on the CPU 5)")
    parser.add_argument("binary", type=Path, help="the trainer, built in llm.c, with make train_gpt2fp32cu for one")
    args = parser.parse_args(arguments)
    binary = args.binary.resolve()
    if not (binary.is_file() and os.access(binary, os.X_OK)):
        raise UserError(f"{args.binary}: no such program; build one in llm.c, with make train_gpt2fp32cu")
    device.use(args.device)
    with tempfile.TemporaryDirectory() as name:
        run_llmc(binary, workload_of(args, name), Path(name), args.steps)


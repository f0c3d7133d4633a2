"""Times one of llm.c's trainers for a GPU on what dev/bench times ours on: the same GPT-2, weights and tokens.

    python dev/bench llmc ../llm.c/train_gpt2fp32cu -b 4 -t 1024
    python dev/bench llmc ../llm.c/train_gpt2cu --precision bf16    # as llm.c builds it by default

Milliseconds are the median of those that it prints, after the first few. Memory is what the device has less of while it
runs, with its CUDA context, some 500 MiB that dev/bench leaves out.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import device
from dev.bench.workload import LEARNING_RATE, Workload, make_parser, workload_of, write_random_model, zipf_tokens
from device.errors import UserError
from llmc.data.token_file import write_tokens
from llmc.run.arguments import positive

import numpy as np

WARM_UP = 10  # steps


def llmc_command(binary: Path, directory: Path, workload: Workload, steps: int) -> list[str]:
    """The command that runs an llm.c trainer, in a directory with the model and token files in it, with the flags that
    its usage has. Raises UserError for what it cannot run."""
    usage = subprocess.run(
        [binary, "--help"], cwd=directory, capture_output=True, encoding="utf-8", errors="replace", timeout=60
    )
    flags = set(re.findall(r"^\s*-(\w) ", usage.stdout + usage.stderr, re.M))
    if device.floatX == device.BF16 and "e" not in flags:
        raise UserError(f"{binary}: takes no -e, so it trains in fp32 alone: leave --precision bf16 out")
    wanted = {
        "i": "train.bin", "j": "val.bin", "b": workload.B, "t": workload.T, "l": LEARNING_RATE, "v": 10**6, "m": 1,
        "s": 10**6, "g": 1, "x": steps, "f": int(device.tf32), "e": model_file(),
    }  # fmt: skip
    given = [(f"-{flag}", str(value)) for flag, value in wanted.items() if flag in flags]
    return [str(binary), *(word for pair in given for word in pair)]


def model_file() -> str:
    """What llm.c calls its model file in the precision in use."""
    return "gpt2_124M_bf16.bin" if device.floatX == device.BF16 else "gpt2_124M.bin"


def write_files(directory: Path, workload: Workload, steps: int) -> None:
    """The model and the tokens. llm.c's trainers look for the model by its name."""
    write_random_model(workload, directory / model_file(), device.floatX == device.BF16)
    tokens = zipf_tokens(steps * workload.B * workload.T + 1, workload.config.vocab_size)
    for split in ("train", "val"):
        write_tokens(directory / f"{split}.bin", tokens)


def run_llmc(binary: Path, workload: Workload, directory: Path, steps: int) -> None:
    """Runs an llm.c trainer and prints what it took. Raises UserError where it prints no milliseconds."""
    write_files(directory, workload, WARM_UP + steps)
    command = llmc_command(binary, directory, workload, WARM_UP + steps)
    free, _ = device.memory()
    least, milliseconds, losses, last = free, [], [], "nothing"
    # C's stdout would be flushed in blocks of some pages where it is no terminal.
    with subprocess.Popen(
        ["stdbuf", "-oL", *command], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
        errors="replace",
    ) as process:
        for line in process.stdout:
            last = line.strip() or last
            least = min(least, device.memory()[0])
            if found := re.match(r"step +\d+.*?([\d.]+) ms", line):
                milliseconds.append(float(found[1]))
                losses += re.findall(r"loss ([\d.]+)", line)
    timed = milliseconds[WARM_UP:]
    if not timed:
        raise UserError(f"{binary}: printed no milliseconds after {WARM_UP} steps; its last line: {last}")
    ms = float(np.median(timed))
    first_loss = f", first loss {losses[0]}" if losses else ""
    print(
        f"llm.c {binary.name}, {workload}: {ms:.2f} ms a step, {1000 * workload.B * workload.T / ms:.0f} tokens/s, "
        f"{(free - least) / 2**20:.0f} MiB{first_loss}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("Time one of llm.c's GPT-2 trainers.", any_script=False)
    parser.add_argument("--steps", type=positive, default=45, metavar="N", help="steps to time (%(default)s)")
    parser.add_argument("binary", type=Path, help="the trainer, built in llm.c, with make train_gpt2fp32cu for one")
    args = parser.parse_args(arguments)
    binary = args.binary.resolve()
    if not (binary.is_file() and os.access(binary, os.X_OK)):
        raise UserError(f"{args.binary}: no such program; build one in llm.c, with make train_gpt2fp32cu")
    device.use(args.device)
    with tempfile.TemporaryDirectory() as name:
        run_llmc(binary, workload_of(args, name), Path(name), args.steps)


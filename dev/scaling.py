"""Times a training step on one GPU and on several: what `dev/bench.py --gpus N` prints.

A row is a workload; its columns are milliseconds a step on 1, 2, 4, ... GPUs, each with a batch of (B, T), memory on a
GPU, and how much of N times one GPU's speed N have (efficiency): one GPU's time over theirs. Last comes how long NCCL,
or on the CPU gloo, takes to sum all gradients with nothing beside. Every number of GPUs is a program of its own, this
file, one after another on the same machine.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import json
import subprocess
import tempfile
import time

import device
from dev.timing import Ours, time_steps
from dev.workload import further_flags, make_parser, workload_of, write_data
from device.errors import UserError
from llmc import collectives, ranks
from llmc.arguments import positive
from llmc.program import run_program

# What is timed where nothing is said of the model and the batch.
WORKLOADS = (
    "train_gpt2_fp32 -e d12 -b 4 -t 1024",
    "train_gpt2_fp32 -e d12 -b 16 -t 1024",
    "train_llama3 -e smollm2-135m -b 4 -t 1024",
    "train_gpt2_fp32 -e d12 -b 4 -t 1024 -z 0",
    "train_gpt2_fp32 -e d12 -b 4 -t 1024 --bitwise 1",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=positive, metavar="N", help="time 1, 2, 4, ... up to N GPUs, one process each")
    add("--steps", type=positive, metavar="N", help="steps to time (as many as take 10 s, 5 to 100; with --gpus 100)")


def print_scaling(args: argparse.Namespace, said: bool) -> None:
    """The table: of the workload that was asked for, or else of WORKLOADS with the attention and the precision that
    were. Raises UserError where one cannot run."""
    counts = sorted({*(1 << i for i in range(args.gpus.bit_length()) if 1 << i < args.gpus), args.gpus})
    sizes = ("-b", args.batch_size), ("-e", args.model), ("-t", args.sequence_length), ("--vocab-size", args.vocab_size)
    given = [f"{flag} {value}" for flag, value in sizes if value is not None]
    flags = further_flags(args)
    workloads = [" ".join([args.script, *given, *flags])] if said else [" ".join([w, *flags]) for w in WORKLOADS]
    width = max(map(len, workloads))
    head = [f"{n} GPU{'s' * (n > 1)}" for n in counts]
    print(f"{'':{width}} " + " ".join(f"{text:>29}" for text in head) + "   all gradients' sum", flush=True)
    for workload in workloads:
        print(f"{workload:{width}}", end=" ", flush=True)
        one = None
        for n in counts:
            found = measure(workload.split() + ["--device", args.device, "--steps", str(args.steps or 100)], n)
            one = one or found["ms"]
            text = f"{found['ms']:.2f} ms, {found['mebibytes']:.0f} MiB"
            text += f", {100 * one / found['ms']:.1f}%" if n > 1 else ""
            print(f"{text:>29}", end=" ", flush=True)
        print(f"  {found['sum_ms']:.2f} ms", flush=True)


def measure(flags: list[str], gpus: int) -> dict:
    """What `main` prints for these flags."""
    command = [sys.executable, str(Path(__file__).resolve()), *flags, "--gpus", str(gpus)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        print(flush=True)  # ends the row
        raise UserError(f"{' '.join(flags)} does not run on {gpus} GPU{'s' * (gpus > 1)}: see above")
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = make_parser("Time a training step on several GPUs, for dev/bench.py --gpus; prints JSON.")
    add_arguments(parser)
    args = parser.parse_args()
    ranks.start(args.gpus)
    device.use(args.device, ranks.local_rank())
    collectives.start()
    with tempfile.TemporaryDirectory() as directory:
        workload = workload_of(args, directory)
        write_data(workload)
        free, _ = device.memory()
        ours = Ours(workload)
        mebibytes = (free - device.memory()[0]) / 2**20  # CuPy keeps what it has asked the driver for
        ms, loss = time_steps(ours, args.steps or 100)
        sum_ms = time_sum(ours.model.grads_memory)
    found = ranks.all_gather({"ms": ms, "mebibytes": mebibytes, "sum_ms": sum_ms, "loss": loss})
    print(json.dumps({name: max(of_rank[name] for of_rank in found) for name in found[0]}))
    ranks.finish()


def time_sum(array, calls: int = 10) -> float:
    """Milliseconds that the sum of an array over the ranks takes; 0 for one rank."""
    for count in (1, calls):
        device.synchronize()
        ranks.all_gather(None)  # all begin together
        started = time.perf_counter()
        for _ in range(count):
            collectives.all_reduce([array])
        device.join_communication()
        device.synchronize()
    return 1000 * (time.perf_counter() - started) / calls if ranks.size() > 1 else 0.0


if __name__ == "__main__":
    run_program(main)

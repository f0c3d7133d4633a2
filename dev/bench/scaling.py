"""Times a training step on one GPU and on several.

    python dev/bench scaling --gpus 4                        # WORKLOADS on 1, 2 and 4 GPUs
    python dev/bench scaling train_llama3 -e smollm2-135m --gpus 2
    python dev/bench scaling -b 16 --gpus 2 --only           # on 2 alone, as JSON

A row is a workload; its columns are milliseconds a step on 1, 2, 4, ... GPUs, each with a batch of (B, T), memory on a
GPU, and how much of N times one GPU's speed N have (efficiency): one GPU's time over theirs. Last comes how long NCCL,
or on the CPU gloo, takes to sum all gradients with nothing beside. Every number of GPUs is a program of its own, this
one with --only, one after another on the same machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import device
from dev.bench.workload import Ours, further_flags, make_parser, time_steps, workload_of, write_data
from device.errors import UserError
from llmc.ranks import collectives, ranks
from llmc.run.arguments import Parser, positive

# What is timed where no model is named (-e).
WORKLOADS = (
    "train_gpt2_fp32 -e d12 -b 4 -t 1024",
    "train_gpt2_fp32 -e d12 -b 16 -t 1024",
    "train_llama3 -e smollm2-135m -b 4 -t 1024",
    "train_gpt2_fp32 -e d12 -b 4 -t 1024 -z 0",
    "train_gpt2_fp32 -e d12 -b 4 -t 1024 --bitwise 1",
)


def print_scaling(args: argparse.Namespace) -> None:
    """The table: of the model that was asked for, or else of WORKLOADS with the attention and the precision that
    were. Raises UserError where one cannot run."""
    counts = sorted({*(1 << i for i in range(args.gpus.bit_length()) if 1 << i < args.gpus), args.gpus})
    sizes = ("-b", args.batch_size), ("-e", args.model), ("-t", args.sequence_length), ("--vocab-size", args.vocab_size)
    given = [f"{flag} {value}" for flag, value in sizes if value is not None]
    flags = further_flags(args)
    asked_for = [" ".join([args.script, *given])] if args.model else WORKLOADS
    workloads = [" ".join([workload, *flags]) for workload in asked_for]
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
    """What `time_only` prints for these flags."""
    command = [sys.executable, str(Path(__file__).parent), "scaling", *flags, "--gpus", str(gpus), "--only"]
    result = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
    if result.returncode:
        print(flush=True)  # ends the row
        raise UserError(f"{' '.join(flags)} does not run on {gpus} GPU{'s' * (gpus > 1)}: see above")
    return json.loads(result.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("Time a training step on one GPU and on several.")
    add = parser.add_argument
    add("--gpus", type=positive, default=1, metavar="N", help="time 1, 2, 4, ... up to N GPUs, one process each")
    add("--only", action="store_true", help="time N GPUs alone, and print JSON")
    add("--steps", type=positive, metavar="N", help="steps to time (100)")
    args = parser.parse_args(arguments)
    (time_only if args.only else print_scaling)(args)


def time_only(args: argparse.Namespace) -> None:
    """Prints what a step takes on so many GPUs, as JSON: each figure the largest of all ranks."""
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
        sum_ms = time_sum(ours.training.model.grads_memory)
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
        device.wait_comm()
        device.synchronize()
    return 1000 * (time.perf_counter() - started) / calls if ranks.size() > 1 else 0.0


EVERY, COPIED = 0.01, 4096  # seconds, bytes


def keep_awake(arguments: list[str] | None = None) -> None:
    """Keeps the links between GPUs awake until it is interrupted, by copies of 4 KB from each GPU to the next.

    NVLink sleeps when it has not been used for 50 ms (`nvidia-smi nvlink -gLowPwrInfo`). Awake it draws power, however
    little is sent, and a GPU at its limit of power then computes slower. A step on one GPU beside this program takes as
    long as it would among several GPUs that had nothing to exchange (doc/gpus.md).
    """
    Parser(description="Keep the links between GPUs awake until Ctrl-C.").parse_args(arguments)
    if device.use() == "cpu":
        raise UserError(f"CUDA does not work here ({device.why_not_cuda}), and the CPU has no links to keep awake")
    import cupy
    from cupy.cuda import runtime

    count, buffers, streams = runtime.getDeviceCount(), [], []
    if count < 2:
        raise UserError("one GPU has no link to another")
    for gpu in range(count):
        if not runtime.deviceCanAccessPeer(gpu, (gpu + 1) % count):
            raise UserError(f"GPU {gpu} does not reach the memory of GPU {(gpu + 1) % count}: they have no link")
        with cupy.cuda.Device(gpu):
            runtime.deviceEnablePeerAccess((gpu + 1) % count)
            buffers.append(cupy.zeros((2, COPIED), cupy.uint8))
            streams.append(cupy.cuda.Stream(non_blocking=True))
    print(f"the links between {count} GPUs are awake until Ctrl-C", flush=True)
    while True:
        for gpu, stream in enumerate(streams):
            with cupy.cuda.Device(gpu):
                there, here = buffers[(gpu + 1) % count][0], buffers[gpu][1]
                runtime.memcpyAsync(there.data.ptr, here.data.ptr, COPIED, runtime.memcpyDeviceToDevice, stream.ptr)
        time.sleep(EVERY)

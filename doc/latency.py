"""Measures on a GPU how long its memories take to answer, and what a copy makes of few warps and of many.

    python doc/latency.py             # prints the tables
    python doc/latency.py --keep      # and keeps them in doc/latency.json, from which page 2's picture is drawn

Latency: one thread follows a chain in random order through 8 KiB, which L1 or shared memory hold, 16 MiB, which L2
holds, and 512 MiB, of which it meets no place twice; a step takes the time from asking to having. Copy: 512 MiB with 1
to 64 warps on each multiprocessor, one load of 16 bytes on its way for each thread. Last, on Hopper, two rungs of the
copy's ladder (doc/ladder/copy.cu), with one load a thread and with four. They ask for shared memory that they do not
use, so that a multiprocessor holds only so many blocks. --keep does not keep these.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json

import device
from dev.bench.ceilings import seconds
from device.errors import UserError
from llmc.run.arguments import Parser
from llmc.run.program import run_program

import numpy as np

cu = device.source(__file__)
ladder = device.Source(Path(__file__).with_name("ladder") / "copy.cu")
KEPT = Path(__file__).with_name("latency.json")

CHAINS = {"shared memory": 8 << 10, "L1": 8 << 10, "L2": 16 << 20, "device memory": 512 << 20}  # bytes
STEPS = 20_000
COPIED = 512 << 20  # bytes
WARPS = (1, 2, 4, 8, 16, 32, 48, 64)
RUNGS = {"float4_a_thread_kernel": 1, "four_loads_kernel": 4}  # of the ladder, and their loads a thread
BLOCKS = (1, 2, 3, 4, 6, 8)  # of 256 threads, on a multiprocessor


def chain(places: int, stride: int) -> np.ndarray:
    """next (places * stride): a single cycle through every stride-th place, in random order; the others are 0."""
    order = np.random.default_rng(1).permutation(places) * stride
    next_place = np.zeros(places * stride, np.int32)
    next_place[order] = np.roll(order, -1)
    return next_place


def latency(kind: str) -> float:
    """Seconds of a step. Lines are 128 bytes, so that one of 32 places is visited and no line twice in a round."""
    stride = 32 if kind in ("L2", "device memory") else 1
    next_place = device.asarray(chain(CHAINS[kind] // 4 // stride, stride))
    place = device.zeros((1,), np.int32)  # where a call has ended, the next one goes on

    def follow(steps: int) -> float:
        if kind == "shared memory":
            arguments = (place, next_place, next_place.size, steps)
            return seconds(lambda: cu.launch("shared_chain_kernel", (1,), (1,), arguments), calls=1, rounds=9)
        return seconds(lambda: cu.launch("chain_kernel", (1,), (1,), (place, next_place, steps)), calls=1, rounds=9)

    return (follow(2 * STEPS) - follow(STEPS)) / STEPS  # the launch and the way into shared memory cancel


def copy_speed(warps: int) -> float:
    """Bytes a second, read and written, with so many warps on each multiprocessor."""
    inp, out = device.zeros((COPIED // 4,)), device.zeros((COPIED // 4,))
    blocks = device.multiprocessors * device.ceil_div(warps, 16)
    threads = 32 * min(16, warps)
    return 2 * COPIED / seconds(lambda: cu.launch("copy_kernel", (blocks,), (threads,), (out, inp, inp.size)), calls=2)


def rung_speed(kernel: str, blocks: int, floats: int) -> float:
    """Bytes a second, read and written, of a rung of the copy's ladder with so many blocks on each multiprocessor."""
    inp, out = device.zeros((floats,)), device.zeros((floats,))
    shared = 0 if blocks == 8 else (228 << 10) // blocks - (2 << 10)  # of a multiprocessor's 228 KiB; 9.0
    arguments = (floats // (1024 * RUNGS[kernel]),), (256,), (out, inp, floats), shared
    return 8 * floats / seconds(lambda: ladder.launch(kernel, *arguments), calls=4)


def main() -> None:
    parser = Parser(description="Measure a GPU's latencies.")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    args = parser.parse_args()
    if device.use() != "cuda":
        why = device.why_not_cuda
        raise UserError(f"latency: a GPU's memories are measured on a GPU, and CUDA does not work here ({why})")
    kept = {"device": device.name, "multiprocessors": device.multiprocessors, "ns": {}, "GB/s": {}}
    print(device.name)
    for kind in CHAINS:
        kept["ns"][kind] = round(1e9 * latency(kind), 1)
        print(f"{kind:14} {kept['ns'][kind]:7.1f} ns", flush=True)
    for warps in WARPS:
        speed = kept["GB/s"][str(warps)] = round(copy_speed(warps) / 1e9)
        asked_for = device.multiprocessors * warps * 32 * 16 / 1e6
        print(f"{warps:2} warps a multiprocessor, {asked_for:5.2f} MB asked for: {speed:5} GB/s", flush=True)
    for floats in (1 << 26, 1 << 28) if device.compute_capability == 90 else ():
        for kernel, loads in RUNGS.items():
            print(f"{kernel}, {floats} floats", flush=True)
            for blocks in BLOCKS:
                speed = rung_speed(kernel, blocks, floats) / 1e9
                print(f"{blocks:2} blocks a multiprocessor, {4 * blocks * loads:3} KiB asked for: {speed:5.0f} GB/s")
    if args.keep:
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    run_program(main)

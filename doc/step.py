"""Measures on a GPU what page 11 says of a training step, and keeps it in doc/step.json.

    python doc/step.py

A step of GPT-2 124M with its launches given one by one, recorded as a graph, and recorded with all work on one stream;
how long the host is busy with it; and from PyTorch's profiler, which sees the kernels of a replayed graph too, when
each kernel of one step ran and on which stream. Names are cut short, times are microseconds from the step's begin.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json
import tempfile
import time

import device
from device import recording
from llmc.data.batches import Batches
from llmc.model.weights import randomize
from llmc.run.program import run_program
from llmc.step.training import make_training
from train_gpt2_fp32 import GPT2, GPT2Config, training_step

import numpy as np

KEPT = Path(__file__).with_name("step.json")
WARM_UP, TIMED = 6, 20


class RandomTokens:
    """A loader of random tokens."""

    def __init__(self, vocab_size: int):
        self.random, self.vocab_size = np.random.default_rng(1), vocab_size

    def next_batch(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        inputs[:], targets[:] = self.random.integers(0, self.vocab_size, (2, *inputs.shape), dtype=np.int32)


def timed_step(B: int, T: int) -> tuple:
    """A function that trains for one step, and what it trains."""
    config = GPT2Config.described("d12")
    training = make_training(GPT2, config, B, T, "flash")
    randomize(training.model, training.adamw, seed=1)
    batches = Batches(training.batch, training.acts.losses, RandomTokens(config.vocab_size))
    return training_step(training, batches), training


def milliseconds(step_of) -> tuple[float, float]:
    """The median of a step, and of what the host is busy with one before it can go on."""
    whole, host = [], []
    for step in range(WARM_UP + TIMED):
        device.synchronize()
        started = time.perf_counter()
        step_of(step, 1e-4)
        given = time.perf_counter()
        device.synchronize()
        whole.append(1e3 * (time.perf_counter() - started))
        host.append(1e3 * (given - started))
    return round(float(np.median(whole[WARM_UP:])), 2), round(float(np.median(host[WARM_UP:])), 2)


def times(B: int, T: int) -> dict[str, tuple[float, float]]:
    found = {}
    place = recording.place
    for name, recorded, one_stream in (
        ("launched one by one", False, False),
        ("recorded, one stream", True, True),
        ("recorded, two streams", True, False),
    ):
        device.use_recording(recorded)
        recording.place = (lambda launches, gradients: [False] * len(launches)) if one_stream else place
        step_of, training = timed_step(B, T)
        found[name] = milliseconds(step_of)
        del step_of, training
    return found


def timeline(B: int, T: int) -> list[list]:
    """[name, stream, begin, duration] of each kernel and copy of one step in the middle of a run."""
    import torch

    step_of, training = timed_step(B, T)
    for step in range(WARM_UP):
        step_of(step, 1e-4)
    device.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for step in range(WARM_UP, WARM_UP + 3):
            step_of(step, 1e-4)
        device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        found.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text("utf-8"))["traceEvents"]
    events = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events.sort(key=lambda e: e["ts"])
    copies = [e["ts"] for e in events if e["name"].startswith("Memcpy HtoD")]
    begin, end = copies[1], copies[2]
    streams = sorted({e["args"]["stream"] for e in events})
    return [
        [e["name"][:60], streams.index(e["args"]["stream"]), round(e["ts"] - begin, 1), round(e["dur"], 1)]
        for e in events if begin <= e["ts"] < end
    ]  # fmt: skip


def copy_times() -> dict[str, float]:
    """Microseconds that the host is busy with one copy to the device, of a batch and of a large array."""
    found = {}
    for name, count in (("batch", 4 * 4 * 1024 + 6), ("64 MiB", 16 << 20)):
        there = device.empty((count,), np.int32)
        for kind, here in (("pinned", device.pinned((count,), np.int32)), ("pageable", np.empty(count, np.int32))):
            here[:] = 1
            taken = []
            for _ in range(30):
                device.synchronize()
                started = time.perf_counter()
                device.copy_in(there, here)
                given = time.perf_counter()
                device.synchronize()
                taken.append((given - started, time.perf_counter() - started))
            busy, whole = np.median(taken, axis=0)
            found[f"{name}, {kind}"] = round(1e6 * float(busy), 1), round(1e6 * float(whole), 1)
    return found


def main() -> None:
    device.use("cuda")
    found = {"device": device.name, "copies": copy_times()}
    found["times"] = {f"B {B}, T {T}": times(B, T) for B, T in ((4, 1024), (4, 64), (1, 64))}
    device.use_recording(True)
    found["timeline"] = timeline(4, 1024)
    text = json.dumps(found, indent=1)
    KEPT.write_text(text.replace("[\n   ", "[").replace(",\n   ", ", ").replace("\n  ]", "]") + "\n", "utf-8")
    print(json.dumps({name: part for name, part in found.items() if name != "timeline"}, indent=1))
    print(len(found["timeline"]), "kernels and copies in", KEPT)


if __name__ == "__main__":
    run_program(main)

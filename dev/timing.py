"""Our training step as the benchmarks time it, beside those of other trainers."""

import time

import device
from dev.kept import TRAINERS
from dev.workload import LEARNING_RATE, Workload
from llmc.batches import Batches
from llmc.report import StepTimer
from llmc.step import train_step

import numpy as np

# A trainer's launch(step) returns a mark whose wait() gives the time when the step ended; then loss(step) is known.


class Ours:
    """The training step of the model script."""

    def __init__(self, workload: Workload):
        self.exchange = workload.build()
        self.model = self.exchange.model
        self.name = f"{TRAINERS['ours']} ({' '.join((self.model.attention, *workload.flags))})"
        self.batches = Batches(self.model, workload.loader())
        device.compile_all()
        self.train_step = train_step(self.exchange, self.batches)

    def launch(self, step: int):
        self.train_step(step, LEARNING_RATE)
        return device.event()

    def loss(self, step: int) -> float:
        return self.batches.mean_loss(step)


def time_steps(trainer, steps: int | None) -> tuple[float, float]:
    """The median milliseconds of a step after the first few, and the loss of the very first step. Without `steps`, as
    many are timed as take ten seconds, at least 5 and at most 100."""
    cpu = device.kind == "cpu"
    warm_up = 2 if cpu else 10
    timer, milliseconds, running, first_loss = StepTimer(), [], None, None

    def finish() -> None:
        nonlocal first_loss
        if running is not None:
            step, started, end = running
            milliseconds.append(timer.add(started, end.wait()))
            loss = trainer.loss(step)
            first_loss = loss if step == 0 else first_loss

    def enough() -> bool:
        timed = milliseconds[warm_up:]
        return len(timed) >= (steps or 100) or steps is None and len(timed) >= 5 and sum(timed) > 10_000

    step = 0
    while not enough():
        started = time.perf_counter()
        end = trainer.launch(step)
        finish()  # the step before, while the device works on this one
        running = step, started, end
        if cpu:
            finish()
            running = None
        step += 1
    device.synchronize()
    return float(np.median(milliseconds[warm_up:])), first_loss

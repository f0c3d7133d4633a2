"""What a run prints and logs of its steps."""

from __future__ import annotations

from collections import deque
from math import isfinite

import device
from llmc.data.batches import Batches
from llmc.model.tensors import flops_per_token
from llmc.ranks import ranks
from llmc.run.logger import Logs, Report
from llmc.run.peak import percent_of_peak
from llmc.run.saver import NonfiniteGuard, Saver
from llmc.run.settings import Settings
from llmc.run.stop import StopRequest
from llmc.run.table import Sections, print_table
from llmc.step.training import Training

import numpy as np


class Reporter:
    """Prints and logs each step while the device works on the next one.

    running: the step that the device works on: its number, the position before it, the events of its begin and end.
    norms (2,4): adamw.grad_norm after the updates of two steps; step n's is in norms[n % 2].
    """

    def __init__(
        self, training: Training, batches: Batches, settings: Settings, skipped: int, report: Report | None = None
    ):
        self.training, self.batches, self.settings = training, batches, settings
        self.logs, self.timer = Logs(settings, report), StepTimer()
        self.guard = NonfiniteGuard(settings.flags.skip_nonfinite, skipped)
        self.running, self.norms = None, device.pinned((2, 4), np.float32)

    def begin(self, table: Sections) -> None:
        """Prints the start-up table."""
        with self.logs.output:
            print_table(table)

    def launched(self, step: int, position: dict, saver: Saver) -> None:
        """Call it when the device has been given all of a step. Reports the step before, while the device works on
        this one. position: before this step."""
        device.copy_out(self.norms[step % 2], self.training.adamw.grad_norm)
        running = step, position, self.batches.begin, device.event()
        self.finish(saver, position)
        self.running = running

    def finish(self, saver: Saver, after: dict) -> None:
        """Waits for the step that the device works on, if any, and reports it. after: the position after that step.
        Raises UserError as NonfiniteGuard.not_finite does."""
        if self.running is None:
            return
        s, (step, before, begin, end) = self.settings, self.running
        ms = end.since(begin)
        self.timer.add(ms)
        ranks.step_took(ms / 1000)
        norm, _, _, own_overflow = map(float, self.norms[step % 2])
        overflow = any(ranks.all_gather(own_overflow))  # with -z a rank knows only of its own shard
        self.running, loss = None, self.batches.mean_loss(step)
        rate, speed = s.learning_rate(step), 1000 * s.step_tokens / ms
        flops = s.step_tokens * flops_per_token(self.training.model.config, s.T)
        percent = percent_of_peak(flops / ranks.size(), ms)
        shown = norm if s.flags.grad_clip else None
        if s.reports(step):
            print_step(step + 1, s.steps, loss, shown, rate, ms, self.timer.recent_average(), speed, percent)
            self.logs.log(
                step, train_loss=loss, norm=shown, learning_rate=rate, tokens_per_second=speed, percent_of_peak=percent
            )
        if isfinite(norm) and not overflow:
            self.guard.in_a_row = 0
            return
        with ranks.long_work():  # it may save a checkpoint
            if overflow:
                kept = "parameters with such a gradient are left as they were, and the others have taken the step"
                self.guard.not_finite(step, loss, kept, step + 1, after, saver)
            else:
                self.guard.not_finite(step, loss, "all parameters are left as they were", step, before, saver)

    def end(self, stop: StopRequest) -> None:
        """Prints how the run has ended."""
        if stop.stopped_before is not None:
            print(f"stopped by {stop.name} after {stop.stopped_before} of {self.settings.steps} steps")
        if self.guard.skipped:
            print(f"steps whose loss or gradients were not finite: {self.guard.skipped}")
        print(f"total average iteration time: {self.timer.average():.6f} ms")


class StepTimer:
    """How long steps take on average. The first step, which also compiles, counts only while there is no other."""

    def __init__(self):
        self.steps, self.total, self.last = 0, 0.0, deque(maxlen=20)

    def add(self, milliseconds: float) -> None:
        """Notes how long a step has taken."""
        if self.steps == 1:
            self.total = 0.0
            self.last.clear()
        self.steps, self.total = self.steps + 1, self.total + milliseconds
        self.last.append(milliseconds)

    def average(self) -> float:
        """The average of all steps."""
        return self.total / max(1, self.steps - 1)

    def recent_average(self) -> float:
        """The average of the last steps."""
        return sum(self.last) / max(1, len(self.last))


def print_step(
    step: int, steps: int, loss: float, norm: float | None, learning_rate: float, ms: float, average_ms: float,
    tokens_per_second: float, percent_of_peak: float | None,
) -> None:  # fmt: skip
    """Prints a line for a finished step, counted from 1. norm: of the gradients, if it was computed. average_ms: the
    recent average of a step, for the time left. percent_of_peak: the model FLOPs utilisation, if it is known."""
    parts = [f"step {step:4}/{steps}: train loss {loss:.6f} ({ms:.2f} ms, {tokens_per_second:.0f} tok/s)"]
    if norm is not None:
        parts.append(f"norm {norm:.4f}")
    parts.append(f"lr {learning_rate:.2e}")
    if percent_of_peak is not None:
        parts.append(f"MFU {percent_of_peak:.1f}% of {device.precision.replace('tf', 'TF')} peak")
    parts.append(f"{duration(average_ms / 1000 * (steps - step))} left")
    print(", ".join(parts), flush=True)


def print_validation(loss: float, bits_per_byte: float | None) -> None:
    """Prints a line for a validation, with bits per byte if they are known."""
    print(f"val loss {loss:.6f}" + ("" if bits_per_byte is None else f", {bits_per_byte:.4f} bits/byte"), flush=True)


def duration(seconds: float) -> str:
    """Such as 1h05m or 2m07s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"

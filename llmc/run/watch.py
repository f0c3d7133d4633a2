"""What a run tells of its steps."""

from __future__ import annotations

from math import isfinite

import device
from llmc.data.batches import Batches
from llmc.model.tensors import flops_per_token
from llmc.ranks import ranks
from llmc.run.logger import Logs
from llmc.run.report import StepTimer, StopRequest, percent_of_peak, print_step, print_table
from llmc.run.saver import Guard, Saver
from llmc.run.settings import Settings
from llmc.step.training import Training

import numpy as np


class Watch:
    """Reports each step while the device works on the next one.

    running: the step that the device works on: its number, the position before it, the events of its begin and end.
    norms (2,4): of two steps, what the update left in AdamW's norm.
    """

    def __init__(self, training: Training, batches: Batches, settings: Settings, skipped: int):
        self.training, self.batches, self.settings = training, batches, settings
        self.logs, self.timer, self.guard = Logs(settings), StepTimer(), Guard(settings.flags.skip_nonfinite, skipped)
        self.running, self.norms = None, device.pinned((2, 4), np.float32)

    def begin(self, table: list[list[tuple[str, object]]]) -> None:
        """Prints the start-up table."""
        with self.logs.output:
            print_table(table)

    def launched(self, step: int, position: dict, saver: Saver) -> None:
        """Call it when the device has been given all of a step. Reports the step before. position: before this step."""
        device.copy_out(self.norms[step % 2], self.training.adamw.norm)
        running = step, position, self.batches.begin, device.event()
        self.finish(saver, position)
        self.running = running

    def finish(self, saver: Saver, after: dict) -> None:
        """Waits for the step that the device works on, if any, and reports it. after: the position after that step.
        Raises UserError as Guard.not_finite does."""
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
        if stop.heeded is not None:
            print(f"stopped by {stop.name} after {stop.heeded} of {self.settings.steps} steps")
        if self.guard.skipped:
            print(f"steps whose loss or gradients were not finite: {self.guard.skipped}")
        print(f"total average iteration time: {self.timer.average():.6f} ms")

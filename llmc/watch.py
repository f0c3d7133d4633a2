"""What a run tells of its steps, and what it does about one that was not finite."""

from __future__ import annotations

import sys
from math import isfinite

import device
from device.errors import UserError
from llmc import program, ranks
from llmc.batches import Batches
from llmc.exchange import Exchange
from llmc.logger import Logger, TensorBoard
from llmc.report import Output, StepTimer, StopRequest, percent_of_peak, print_step, print_table
from llmc.saver import Saver
from llmc.settings import Settings
from llmc.tensors import flops_per_token

import numpy as np

MOST_SKIPPED = 20  # steps in a row that are not finite; if there are more, the data is not the cause


class Logs:
    """Where a run's figures go: the log, TensorBoard's events, and the reader of its output. The reader may leave, if
    the run has one of the others, or checkpoints."""

    def __init__(self, settings: Settings):
        flags = settings.flags
        self.tensorboard = TensorBoard(flags.tensorboard, settings.first_step)
        device.compile_all()
        self.logger = Logger(flags.log, settings.first_step)
        places = flags.log, flags.checkpoint_dir, flags.tensorboard
        self.output = Output(sys.stdout, " and ".join(str(place) for place in places if place))

    def log(self, step: int, **figures: float | None) -> None:
        """Writes these of logger.FIGURES to both. None is left out."""
        self.logger.log(step, **figures)
        self.tensorboard.log(step, **figures)

    def log_sample(self, step: int, text: str) -> None:
        self.tensorboard.log_sample(step, text)

    def close(self) -> None:
        self.logger.close()
        self.tensorboard.close()

    def raise_what_is_lost(self) -> None:
        """Raises UserError if lines or events could not be written."""
        for reports, what in ((self.logger, "lines"), (self.tensorboard, "events")):
            if reports.lost:
                raise UserError(f"{reports.path} lacks {reports.lost} {what} that could not be written")


class Guard:
    """Counts the steps whose loss or gradients were not finite."""

    def __init__(self, skips: bool, skipped: int):
        self.skips, self.skipped, self.in_a_row = skips, skipped, 0

    def not_finite(self, step: int, loss: float, kept: str, save_as: int, position: dict, saver: Saver) -> None:
        """Counts a step. Raises UserError if such steps are not skipped, or if there are too many in a row. The device
        may be working on the next step by now. If such steps are not skipped, that step changes no parameter. If they
        are skipped and that step is finite, the state that is saved contains it already.

        Before it raises, it saves the state of the run, as of step `save_as`, and removes no older checkpoint, because
        the parameters may be the cause."""
        what = f"step {step + 1}: its loss ({loss:g}) or gradients are not finite, so {kept}"
        self.in_a_row += 1
        if self.skips and self.in_a_row < MOST_SKIPPED:
            self.skipped += 1
            print(f"{what}; {self.skipped} such steps so far", flush=True)
            return
        saver.exchange.gather_parameters()
        saver.save(save_as, position, self)
        skipping = (
            f"that is so in {MOST_SKIPPED} steps in a row" if self.skips else "--skip-nonfinite leaves such steps out"
        )
        newest, good = program.last_checkpoint, saver.good
        reached = f"; the state that it came to: {newest}" if newest != good else ""
        raise UserError(
            f"{what}. Possible causes: a learning rate that is too high (-l, -u), gradients that are not clipped "
            f"(--grad-clip 1), damaged weights or data; {skipping}; last good checkpoint: {good or 'none'}{reached}"
        )


class Watch:
    """Reports each step while the device works on the next one.

    running: the step that the device works on: its number, the position before it, when it was launched, its end.
    norms (2,4): of two steps, what the update left in model.norm.
    """

    def __init__(self, exchange: Exchange, batches: Batches, settings: Settings, skipped: int):
        self.exchange, self.batches, self.settings = exchange, batches, settings
        self.logs, self.timer, self.guard = Logs(settings), StepTimer(), Guard(settings.flags.skip_nonfinite, skipped)
        self.running, self.norms = None, device.pinned((2, 4), np.float32)

    def begin(self, table: list[list[tuple[str, object]]]) -> None:
        """Prints the start-up table."""
        with self.logs.output:
            print_table(table)

    def launched(self, step: int, position: dict, saver: Saver) -> None:
        """Call it when the device has been given all of a step. Reports the step before. position: before this step."""
        device.copy_out(self.norms[step % 2], self.exchange.model.norm)
        running = step, position, self.batches.started, device.event()
        self.finish(saver, position)
        self.running = running

    def finish(self, saver: Saver, after: dict) -> None:
        """Waits for the step that the device works on, if any, and reports it. after: the position after that step.
        Raises UserError as Guard.not_finite does."""
        if self.running is None:
            return
        s, (step, before, started, end) = self.settings, self.running
        ms = self.timer.add(started, end.wait())
        norm, _, _, own_overflow = map(float, self.norms[step % 2])
        overflow = any(ranks.all_gather(own_overflow))  # with -z a rank knows only of its own shard
        self.running, loss = None, self.batches.mean_loss(step)
        rate, speed = s.learning_rate(step), 1000 * s.step_tokens / ms
        flops = s.step_tokens * flops_per_token(self.exchange.model.config, s.T)
        percent = percent_of_peak(flops / ranks.size(), ms)
        shown = norm if s.grad_clip else None
        print_step(step + 1, s.steps, loss, shown, rate, ms, self.timer.recent_average(), speed, percent)
        self.logs.log(
            step, train_loss=loss, norm=shown, learning_rate=rate, tokens_per_second=speed, percent_of_peak=percent
        )
        if isfinite(norm) and not overflow:
            self.guard.in_a_row = 0
        elif overflow:
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

"""When and how a run saves checkpoints, and removes old ones; and what it does about a step that was not finite."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from math import inf
from pathlib import Path

from device.errors import UserError
from llmc.data.find_tokenizer import tokenizer_files
from llmc.files.checkpoint import save_checkpoint
from llmc.files.checkpoint_dir import BEST, kept_loss, prune_checkpoints
from llmc.files.directory import Lock
from llmc.ranks import ranks
from llmc.run import program
from llmc.run.settings import Settings
from llmc.step.training import Training

MAX_SKIPPED = 20  # steps in a row that are not finite; if there are more, the data is not the cause


class Saver:
    """Writes a run's checkpoints, and removes old ones if there are too many.

    state: what each checkpoint records of the run. tokenizer: the contents of the tokenizer's files, which each
    checkpoint gets. lock: the directory's, on the rank that writes; None on the others. saved_step: the step of the
    newest checkpoint. good: the newest checkpoint that was saved while steps were finite. unsaved: which checkpoints
    ("last", "best") could not be written when they were last due, and why.
    """

    def __init__(
        self, training: Training, settings: Settings, flags: dict, run: str, tokenizer: Path | None, lock: Lock | None
    ):
        self.training, self.settings, self.lock = training, settings, lock
        self.state = {"run": run, "flags": flags}
        self.tokenizer = tokenizer_files(tokenizer, "model_") if tokenizer else {}
        self.saved_step, self.unsaved, self.good = settings.first_step, {}, None

    def lowest_loss(self, measure: Callable[[], dict]) -> float:
        """The validation loss of the checkpoint that --best has kept before this run was resumed; infinity if there is
        none. measure: says of which data and batches a loss is now."""
        if not self.settings.flags.best:
            return inf
        return ranks.of_rank_0(lambda: kept_loss(self.settings.flags.checkpoint_dir, self.state["run"], measure()))

    def save(self, step: int, position: dict, guard: NonfiniteGuard) -> None:
        """Writes a checkpoint of the run as it was before `step`, if it has trained since the last one and has a
        directory for checkpoints. Then removes old ones of this run if there are too many, but not while steps are
        being skipped. If this fails, the run goes on, and tries again when the next checkpoint is due. All ranks must
        call it alike."""
        flags = self.settings.flags
        if not flags.checkpoint_dir or step == self.saved_step:
            return
        path = self.write("last", step, position | self.state | {"skipped": guard.skipped})
        if path is None:
            return
        self.saved_step, program.last_checkpoint = step, path
        if guard.in_a_row:
            return
        self.good = path
        if ranks.rank() > 0:
            return
        try:
            prune_checkpoints(self.lock.directory, flags.keep, self.state["run"])
        except UserError as error:
            print(f"an old checkpoint stays: {error}", flush=True)

    def save_best(
        self, step: int, position: dict, guard: NonfiniteGuard, loss: float, measure: Callable[[], dict]
    ) -> float:
        """Writes the checkpoint BEST, of the run as it is before `step`, in the place of the old BEST. Returns the loss
        of the BEST that is there then: the new one, or if that could not be written, the old one. loss: the validation
        loss now. measure: says of which data and batches it is. All ranks must call it alike."""
        found = {"val_loss": loss} | measure()
        path = self.write("best", step, position | self.state | {"skipped": guard.skipped, "best": found}, BEST)
        if path is not None:  # if there is no other checkpoint yet, a run resumes from this one
            self.good, program.last_checkpoint = self.good or path, program.last_checkpoint or path
        try:
            return self.lowest_loss(measure)
        except UserError as error:  # unknown; a loss that is not below this one cannot be the lowest
            print(f"not read back: {error}", flush=True)
            return loss

    def write(self, what: str, step: int, state: dict, name: str | None = None) -> Path | None:
        """Writes a checkpoint under this name, or the name of its step. Returns its path; None if that fails. what: its
        key in `unsaved`."""
        config = self.training.model.config
        params, m, v = self.training.exchange.whole_state(self.training.adamw)

        def write() -> tuple[str, str]:
            """The path, and what went wrong."""
            try:
                path = save_checkpoint(
                    self.lock.directory, step, config, params, m, v, state, self.tokenizer, name
                )
                return str(path), ""
            except UserError as error:
                return "", str(error)

        written = write() if ranks.rank() == 0 else ("", "")
        if self.training.exchange.sharded:
            for _ in chain(params, m, v):  # all ranks must come to the end of the pieces
                pass
        path, why = ranks.all_gather(written)[0]
        self.unsaved.pop(what, None)
        if why:
            self.unsaved[what] = why
            print(f"not saved: {why}", flush=True)
            return None
        print(f"saved {path}", flush=True)
        return Path(path)

    def release(self) -> None:
        """Lets another run have the directory."""
        if self.lock is not None:
            self.lock.release()

    def raise_what_is_unsaved(self, speaks: bool) -> None:
        """If the last checkpoint or the best one could not be written: raises UserError if this rank speaks for all,
        else exits with status 1."""
        if self.unsaved and not speaks:
            sys.exit(1)
        for what, why in self.unsaved.items():
            raise UserError(f"the {what} checkpoint could not be written: {why}")


class NonfiniteGuard:
    """Counts the steps whose loss or gradients were not finite, and ends the run if it does not skip them.

    skips: whether the run skips them (--skip-nonfinite). skipped: how many it has skipped. in_a_row: how many of the
    last steps.
    """

    def __init__(self, skips: bool, skipped: int):
        self.skips, self.skipped, self.in_a_row = skips, skipped, 0

    def not_finite(self, step: int, loss: float, kept: str, save_as: int, position: dict, saver: Saver) -> None:
        """Counts a step that was not finite. Raises UserError if the run does not skip such steps, or if there are too
        many in a row.

        loss: the step's. kept: which parameters are as before the step, for the message. Before it raises, it saves the
        run as a checkpoint of step `save_as`, at this position. It removes no older checkpoint, because the parameters
        may be the cause.

        The next step is already launched. Without --skip-nonfinite it changes nothing. With it, its update may already
        be in the state that is saved.
        """
        what = f"step {step + 1}: its loss ({loss:g}) or gradients are not finite, so {kept}"
        self.in_a_row += 1
        if self.skips and self.in_a_row < MAX_SKIPPED:
            self.skipped += 1
            print(f"{what}; {self.skipped} such steps so far", flush=True)
            return
        saver.training.exchange.gather_parameters()
        saver.save(save_as, position, self)
        skipping = (
            f"that is so in {MAX_SKIPPED} steps in a row" if self.skips else "--skip-nonfinite leaves such steps out"
        )
        newest, good = program.last_checkpoint, saver.good
        reached = f"; the state that it came to: {newest}" if newest != good else ""
        raise UserError(
            f"{what}. Possible causes: a learning rate that is too high (-l, -u), gradients that are not clipped "
            f"(--grad-clip 1), damaged weights or data; {skipping}; last good checkpoint: {good or 'none'}{reached}"
        )

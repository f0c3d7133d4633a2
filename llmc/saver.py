"""When and how a run saves checkpoints, and removes old ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from device.errors import UserError
from llmc import program, ranks
from llmc.checkpoint import BEST, prune_checkpoints, save_checkpoint
from llmc.exchange import Exchange
from llmc.lock import Lock
from llmc.settings import Settings
from llmc.tokenizer import tokenizer_files

if TYPE_CHECKING:
    from llmc.watch import Guard


class Saver:
    """Writes a run's checkpoints, and removes old ones if there are too many.

    state: what each checkpoint records of the run. tokenizer: the tokenizer's files, which each checkpoint holds. lock:
    of the directory, on the rank that writes. saved_step: of the newest checkpoint. good: the newest one that was saved
    while steps were finite. unsaved: which checkpoints could not be written when they were last due (the last one, the
    best one, or both), and why.
    """

    def __init__(
        self, exchange: Exchange, settings: Settings, flags: dict, run: str, tokenizer: Path | None, lock: Lock | None
    ):
        self.exchange, self.settings, self.lock = exchange, settings, lock
        self.state = {"run": run, "flags": flags}
        self.tokenizer = tokenizer_files(tokenizer, "model_") if tokenizer else {}
        self.saved_step, self.unsaved, self.good = settings.first_step, {}, None

    def save(self, step: int, position: dict, guard: Guard) -> None:
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
            prune_checkpoints(flags.checkpoint_dir, flags.keep, self.state["run"])
        except UserError as error:
            print(f"an old checkpoint stays: {error}", flush=True)

    def save_best(self, step: int, position: dict, guard: Guard, found: dict) -> bool:
        """Writes the checkpoint BEST, of the run as it is before `step`, in the place of the old BEST. found: its
        validation loss, and of which data. Returns whether it could be written. All ranks must call it alike."""
        state = position | self.state | {"skipped": guard.skipped, "best": found}
        path = self.write("best", step, state, BEST)
        if path is not None:  # if there is no other checkpoint yet, a run resumes from this one
            self.good, program.last_checkpoint = self.good or path, program.last_checkpoint or path
        return path is not None

    def write(self, what: str, step: int, state: dict, name: str | None = None) -> Path | None:
        """Writes a checkpoint under this name, or the name of its step. Returns its path; None if that fails. what: its
        key in `unsaved`."""
        directory, config = self.settings.flags.checkpoint_dir, self.exchange.model.config
        params, m, v = self.exchange.whole_state()

        def write() -> tuple[str, str]:
            """The path, and what went wrong."""
            try:
                path = save_checkpoint(directory, step, config, params, m, v, state, self.tokenizer, name)
                return str(path), ""
            except UserError as error:
                return "", str(error)

        written = write() if ranks.rank() == 0 else ("", "")
        if self.exchange.sharded:
            pieces = [each for each in (params, m, v) if isinstance(each, Iterator)]
            for _ in chain(*pieces):  # all ranks must come to the end of the pieces
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

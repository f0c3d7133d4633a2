"""When and how a run saves: checkpoints that are due, and those that are too many."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from device.errors import UserError
from llmc import program, ranks
from llmc.checkpoint import prune_checkpoints, save_checkpoint
from llmc.exchange import Exchange
from llmc.lock import Lock
from llmc.settings import Settings
from llmc.tokenizer import tokenizer_files

if TYPE_CHECKING:
    from llmc.watch import Guard


class Saver:
    """Writes a run's checkpoints, and removes those that are too many.

    state: what each of them records of the run. tokenizer: the tokenizer's files, which each of them holds. lock: of
    the directory, on the rank that writes. saved_step: of the newest checkpoint; good: the newest that was saved while
    steps were finite; unsaved: why the one that was last due could not be written.
    """

    def __init__(
        self, exchange: Exchange, settings: Settings, flags: dict, run: str, tokenizer: Path | None, lock: Lock | None
    ):
        self.exchange, self.settings, self.lock = exchange, settings, lock
        self.state = {"run": run, "flags": flags}
        self.tokenizer = tokenizer_files(tokenizer, "model_") if tokenizer else {}
        self.saved_step, self.unsaved, self.good = settings.first_step, "", None

    def save(self, step: int, position: dict, guard: Guard) -> None:
        """Writes a checkpoint of where the run was before `step`, if it has trained since the last one and is told
        where to, and removes those of this run that are too many, but for a time when steps are being skipped. Where
        that fails the run goes on, and the next checkpoint that is due is tried all the same. All ranks must call it
        alike."""
        flags, config = self.settings.flags, self.exchange.model.config
        if not flags.checkpoint_dir or step == self.saved_step:
            return
        state = position | self.state | {"skipped": guard.skipped}
        params, m, v = self.exchange.whole_state()

        def write() -> tuple[str, str]:
            """The path, and what went wrong."""
            try:
                path = save_checkpoint(flags.checkpoint_dir, step, config, params, m, v, state, self.tokenizer)
                return str(path), ""
            except UserError as error:
                return "", str(error)

        written = write() if ranks.rank() == 0 else ("", "")
        if self.exchange.sharded:
            pieces = [each for each in (params, m, v) if isinstance(each, Iterator)]
            for _ in chain(*pieces):  # what is left of them, to which all ranks must come
                pass
        path, self.unsaved = ranks.all_gather(written)[0]
        if self.unsaved:
            print(f"not saved: {self.unsaved}", flush=True)
            return
        self.saved_step, program.last_checkpoint = step, Path(path)
        print(f"saved {path}", flush=True)
        if guard.in_a_row:
            return
        self.good = Path(path)
        if ranks.rank() > 0:
            return
        try:
            prune_checkpoints(flags.checkpoint_dir, flags.keep, self.state["run"])
        except UserError as error:
            print(f"an old checkpoint stays: {error}", flush=True)

    def release(self) -> None:
        """Lets another run have the directory."""
        if self.lock is not None:
            self.lock.release()

    def raise_what_is_unsaved(self, speaks: bool) -> None:
        """Where the last checkpoint could not be written, raises UserError if this rank speaks for all, else exits with
        status 1."""
        if self.unsaved and not speaks:
            sys.exit(1)
        if self.unsaved:
            raise UserError(f"the last checkpoint could not be written: {self.unsaved}")

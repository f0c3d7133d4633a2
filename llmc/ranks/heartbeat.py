"""How ranks notice that one of them hangs.

Each rank tells those with which it is connected, a few times within SILENCE seconds, how many things it has done of
those that all ranks do alike: values that it has shared, collectives that it has begun. A rank that is stopped, or
whose machine is gone, says nothing. A rank that hangs says the same again and again; the others soon wait for it, and
have done more than it has.

Work that one rank may do for long while the others wait for it, such as writing a checkpoint, is long_work: then there
is no such deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from device.errors import UserError

SILENCE = 30  # seconds, LLMC_HANG_AFTER
STANDSTILL = 2, 10  # times SILENCE, and times the slowest step: after the longer of both a rank hangs that does nothing


def hang_after(env: Mapping[str, str]) -> float:
    """The seconds after which a silent rank hangs. Raises UserError if LLMC_HANG_AFTER is no such number."""
    wish = env.get("LLMC_HANG_AFTER") or str(SILENCE)
    try:
        seconds = float(wish)
        if not 1 <= seconds <= 1e6:
            raise ValueError(wish)
    except ValueError:
        raise UserError(f"LLMC_HANG_AFTER is {wish}; it must be a number of seconds, at least 1") from None
    return seconds


class Heartbeat:
    """What a rank knows of how it and the ranks that it is connected with get on.

    heard: when each was heard last. counts: how many things each has done, this one too. busy: the ranks in long work.
    slowest: seconds of the slowest step so far; 0 before the first, which may take any time. moved: when some count has
    changed last, or a rank was in long work. clock: in seconds.
    """

    def __init__(self, rank: int, silence: float, clock: Callable[[], float] = time.monotonic):
        self.rank, self.silence, self.clock = rank, silence, clock
        self.heard: dict[int, float] = {}
        self.counts, self.busy, self.slowest, self.moved = {rank: 0}, set(), 0.0, clock()

    def hear(self, r: int, count: int | None = None, busy: bool = False) -> None:
        """Something has come from rank r: its count, or any other message."""
        self.heard[r] = self.clock()
        if count is not None:
            self.note(r, count, busy)

    def note(self, r: int, count: int, busy: bool) -> None:
        if busy or count != self.counts.get(r):
            self.moved = self.clock()
        self.counts[r] = count
        (self.busy.add if busy else self.busy.discard)(r)

    def progress(self) -> None:
        """This rank has done something that all do."""
        self.note(self.rank, self.counts[self.rank] + 1, self.rank in self.busy)

    @contextmanager
    def long_work(self) -> Iterator[None]:
        """Within it this rank may keep the others waiting."""
        outer = self.rank in self.busy
        self.note(self.rank, self.counts[self.rank], True)
        try:
            yield
        finally:
            self.note(self.rank, self.counts[self.rank], True)
            if not outer:
                self.busy.discard(self.rank)

    def begin_anew(self) -> None:
        """All deadlines begin now: this process was stopped itself, and has heard nothing meanwhile."""
        self.heard, self.moved = dict.fromkeys(self.heard, self.clock()), self.clock()

    def silent(self) -> int | None:
        """A rank that hangs because it says nothing."""
        return next((r for r, when in sorted(self.heard.items()) if self.clock() - when > self.silence), None)

    def standing(self) -> tuple[list[int], float] | None:
        """The ranks that hang because they do nothing, and for how many seconds. All ranks if none has done less than
        the others."""
        seconds = self.clock() - self.moved
        times, steps = STANDSTILL
        if self.busy or not self.slowest or seconds <= max(times * self.silence, steps * self.slowest):
            return None
        least = min(self.counts.values())
        return [r for r, count in sorted(self.counts.items()) if count == least], seconds

"""The processes that train one model together, as the rest of the program sees them: how many there are, which one this
is, what all of them know, and how they end.

Each process has a number, its rank, and one GPU (on the CPU device they share the cores). torchrun, Slurm's srun, Open
MPI's mpirun or, for `--gpus`, launcher.py starts the processes, and sets each one's rank, the number of ranks, and the
address at which rank 0 listens (environment.py). A process stays connected to rank 0 for the whole run (group.py), for
small values that all must know (`all_gather`), and so that all end if one cannot go on. Gradients go another way
(exchange.py).
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from device.errors import UserError
from llmc.ranks.environment import find_place
from llmc.ranks.group import GRACE, Group
from llmc.ranks.handshake import find_secret
from llmc.ranks.launcher import join_launcher, launch

_group: Group | None = None


def meet() -> None:
    """Joins the other ranks, if several have been started, and returns once all are there. From then on the prints of
    all ranks except 0 are dropped. Raises UserError if the ranks cannot meet."""
    global _group
    place, listener = find_place(os.environ), join_launcher()
    if _group is not None or place is None:
        return
    if place.rank > 0:
        sys.stdout = nowhere = open(os.devnull, "w", encoding="utf-8")
        atexit.register(nowhere.close)
    _group = Group(place, find_secret(os.environ), listener)


def start(count: int | None) -> None:
    """`meet`. But if no ranks have been started and count is more than 1, starts `count` processes on this machine, and
    exits when they have ended. Raises UserError also if ranks have been started, but not `count` of them."""
    meet()
    if _group is None and (count or 1) > 1:
        sys.exit(launch(count))
    if _group is not None and count not in (None, _group.size):
        raise UserError(f"--gpus {count}: {_group.size} processes have been started already; leave --gpus out")


def rank() -> int:
    """This process's number, from 0 on."""
    return _group.rank if _group else 0


def size() -> int:
    """How many processes train together."""
    return _group.size if _group else 1


def local_rank() -> int:
    """This process's number on its machine."""
    return _group.place.local_rank if _group else 0


def address() -> str:
    """Where rank 0 listens at the start: an address of its machine."""
    return _group.place.address if _group else "127.0.0.1"


def hosts() -> list[str]:
    """The machine of each rank, by name."""
    return _group.hosts if _group else [socket.gethostname()]


def all_gather(value) -> list:
    """Returns on each rank the list of all ranks' values, in the order of the ranks. A value is anything that JSON can
    hold. All ranks must call it alike."""
    return _group.all_gather(value) if _group else [value]


def of_rank_0(work: Callable[[], object]):
    """Does work on rank 0 only, and returns its result on each rank: anything that JSON can hold."""
    return all_gather(work() if rank() == 0 else None)[0]


def check_same(what: str, value, remedy: str) -> None:
    """Raises UserError on all ranks, naming the first rank whose value differs from rank 0's."""
    values = all_gather(value)
    for r, other in enumerate(values):
        if other != values[0]:
            raise UserError(f"rank {r} on {hosts()[r]}: {what} is {other}, and rank 0's is {values[0]}; {remedy}")


def finish() -> None:
    """Takes leave of the other ranks, once all have come to this point."""
    global _group
    if _group:
        all_gather(None)
        _group.leave()
        _group = None


def progress() -> None:
    """Call it when this rank begins something that all ranks do alike, in the same order, and wait for."""
    if _group:
        _group.heart.progress()


def long_work() -> AbstractContextManager[None]:
    """Within it this rank may do something for long while the others wait for it. It does not count as hanging."""
    return _group.heart.long_work() if _group else nullcontext()


def step_took(seconds: float) -> None:
    """Call it after each step: the slowest so far says how long a step may take."""
    if _group:
        _group.heart.slowest = max(_group.heart.slowest, seconds)


def fail(text: str, status: int = 1) -> None:
    """Call it in a process that cannot go on. If the process is alone, this returns. If it is one of several, all end
    here, and rank 0 prints the text, if there is one. The others end with status 1, or with 0 if rank 0 does."""
    if _group is not None:
        _group.end(text, status)


def wait_for_other_failure() -> None:
    """Call it when something has failed in which other ranks take part. If one of them is the reason, this process ends
    here, with all others."""
    if _group is not None:
        time.sleep(2 * GRACE)

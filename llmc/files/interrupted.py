"""Calls about files that are interrupted, and made again.

Python itself repeats an interrupted call to open, read, write or sync a file (PEP 475). It does not repeat those that
look up, list, make, rename or remove one, because a local disk never interrupts them. NFS and FUSE do.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps

CALLS = {name: getattr(os, name) for name in (
    "stat", "lstat", "fstat", "listdir", "scandir", "mkdir", "rename", "replace", "link", "unlink", "remove", "rmdir",
    "truncate", "utime", "chmod",
)}  # fmt: skip


class Entries(AbstractContextManager):
    """What os.scandir returns, but read to its end, so that nothing interrupts it half way."""

    def __init__(self, path=".") -> None:
        with CALLS["scandir"](path) as entries:
            self._entries = iter([*entries])

    def __iter__(self) -> "Entries":
        return self

    def __next__(self) -> os.DirEntry:
        return next(self._entries)

    def __exit__(self, *exception) -> None:
        pass

    close = __exit__


def repeat_interrupted_calls() -> None:
    """From now on Python repeats these calls, too, whoever makes them: pathlib, shutil, tempfile and we."""
    for name, call in CALLS.items():
        if getattr(os, name) is call:
            setattr(os, name, repeated(Entries if call is CALLS["scandir"] else call))


def repeated(call: Callable) -> Callable:
    """A function that calls `call` until it is not interrupted. In between, Python handles the signal."""

    @wraps(call)
    def again(*args, **kwargs):
        while True:
            try:
                return call(*args, **kwargs)
            except InterruptedError:
                pass

    return again

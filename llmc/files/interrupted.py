"""Calls about files that are interrupted, and made again.

Python itself repeats an interrupted call to open, read, write or sync a file (PEP 475). It does not repeat those that
look up, list, make, rename or remove one, because a local disk never interrupts them. NFS and FUSE do.
"""

import os
from collections.abc import Callable
from functools import wraps

CALLS = (
    "stat", "lstat", "fstat", "listdir", "scandir", "mkdir", "rename", "replace", "link", "unlink", "remove", "rmdir",
    "truncate", "utime", "chmod",
)  # fmt: skip


def repeat_interrupted_calls() -> None:
    """From now on Python repeats these calls, too, whoever makes them: pathlib, shutil, tempfile and we."""
    for name in CALLS:
        setattr(os, name, repeated(getattr(os, name)))


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

"""Locks: if two runs would write to the same place, the second one waits, and is then refused."""

import errno
import fcntl
import os
import socket
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path

from device.errors import UserError
from llmc.files.directory import Directory, make_directory, remove_directories, why
from llmc.ranks import ranks

PATIENCE = 30  # seconds; a job that is queued again may start while the old one is still ending
BEGINNING = b"process "  # of what is in a lock's file; a power cut may leave a part of it, or zeros
TAKEN = (errno.EAGAIN, errno.EACCES)


class Lock:
    """This process's claim to a place to which one run at a time may write. It lasts until `release` is called, until
    this object is gone, or until the process ends, in any way.

    The lock is an flock on a file of its own, `path`. The other files of the place are replaced by renames, and a lock
    on them would not survive this. The file names process and host, and `release` removes it. If a killed process has
    left the file behind, it is not locked, and the next run takes it over. A link, or a file with something else in it,
    stays as it is, and the lock is refused.

    directory: the open directory of `path`. The holder of the lock writes below it.

    place and flag: the name of the place in messages, and the flag that names it. make: make the directory of `path` if
    it is missing; `release` removes it again if it is empty.

    While another process has the lock, this one waits, at most PATIENCE seconds, and says so on stderr. Raises
    UserError if the wait was in vain, or if the file cannot be written. On a file system without locks it says that
    there is none, and goes on.
    """

    def __init__(self, path: Path, place: str | Path, flag: str, make: bool = False) -> None:
        started, said, made = time.monotonic(), False, []
        undo = partial(remove_directories, made)
        try:
            while True:
                if make:
                    made += make_directory(path.parent)  # again, if the other run has removed it
                self.directory = Directory(path.parent)
                file = os.fdopen(self.directory.open(path.name, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
                content = os.pread(file.fileno(), 400, 0)
                text = content.strip(b"\0")
                if text[: len(BEGINNING)] != BEGINNING[: len(text)]:
                    file.close()
                    raise OSError(errno.EEXIST, f"{path.name} there is no lock of ours")
                if _lock(file.fileno(), self.directory, path.name, place):
                    break
                holder = content.decode(errors="replace").strip() or "another process"
                file.close()
                if time.monotonic() - started > PATIENCE:
                    raise UserError(f"{place} is in use by {holder}: wait for it to end, or choose another {flag}")
                if not said:
                    said = True
                    ranks.say(f"{place} is in use by {holder}: waiting up to {PATIENCE} s for it to end")
                time.sleep(0.2)
            self.release = undo = weakref.finalize(self, _release, file, self.directory, path.name, made)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            undo()
            raise UserError(f"{place}: cannot be written ({why(error)}); choose another {flag}") from None


def _lock(descriptor: int, directory: Directory, name: str, place: str | Path) -> bool:
    """Whether this process now has the lock on an open file, and the file still has its name and its place."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in TAKEN:
            return False
        ranks.say(f"{place}: cannot be locked ({why(error)}): make sure that no other run writes there")
        return True
    try:
        directory.check_in_place()
        return os.path.samestat(os.fstat(descriptor), directory.stat(name))
    except OSError:  # the run that had the lock has just removed the file, or the directory
        return False


def _release(file, directory: Directory, name: str, made: list[Path]) -> None:
    with suppress(OSError):
        if os.path.samestat(os.fstat(file.fileno()), directory.stat(name)):  # not another's, if somebody removed ours
            directory.remove(name)  # while it is locked
    file.close()
    remove_directories(made)

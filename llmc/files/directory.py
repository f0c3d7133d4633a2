"""A directory that a user has named: how it is made, how we write below it, and how one run at a time has it.

Whoever can put a file into a directory, or into an archive that we unpack, can put a link there. If we followed it, we
would write to any file of the user's. So a directory is opened once, and everything below it, its lock too, is named
relative to the open directory.
"""

import errno
import fcntl
import fnmatch
import io
import os
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import BinaryIO

from device.errors import UserError, say

PATIENCE = 30  # seconds for a lock; a job that is queued again may start while the old one is still ending
BEGINNING = b"process "  # of what is in a lock's file; a power cut may leave a part of it, or zeros
TAKEN = (errno.EAGAIN, errno.EACCES)


class File(io.FileIO):
    """An open file. An error in reading it has its name.

    A call to close that fails has closed the file all the same. Of a file that was only read, or if a signal came in
    between, it has lost nothing, and so is no error.
    """

    def readinto(self, buffer) -> int | None:
        with named(self.name):
            return super().readinto(buffer)

    def readall(self) -> bytes | None:
        with named(self.name):
            return super().readall()

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            if self.mode != "rb" and error.errno != errno.EINTR:
                raise


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """An OSError of the block has this file name, so that a message can name it."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def close(descriptor: int) -> None:
    """Closes a descriptor that was read from, or whose file is on disk: then an error means nothing."""
    with suppress(OSError):
        os.close(descriptor)


class Directory:
    """An open directory. Its path may contain links. Below it, no link is followed.

    above: the open directory in which this one lies. If it is given, the last part of the path must be no link. Raises
    OSError, as all methods do, if the system refuses.
    """

    def __init__(self, path: str | Path, above: "Directory | None" = None):
        self.path = Path(path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if above is None:
            self.descriptor = os.open(path, flags)
        else:
            self.descriptor = os.open(self.path.name, flags | os.O_NOFOLLOW, dir_fd=above.descriptor)
        self.close = weakref.finalize(self, close, self.descriptor)

    def check_in_place(self) -> None:
        """Raises OSError if another directory, which would not have our lock, or none is at the path by now."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.stat(self.path), os.fstat(self.descriptor)):
                return
        raise OSError(errno.ESTALE, f"{self.path} was removed or replaced under the run: put it back")

    def names(self) -> list[str]:
        """What is in the directory, in ascending order."""
        with named(self.path):
            return sorted(os.listdir(self.descriptor))

    def stat(self, name: str) -> os.stat_result:
        """What the system says of a file; of a link itself, not of its target."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def is_directory(self, name: str) -> bool:
        """Whether there is a directory, and no link to one, of this name."""
        with suppress(FileNotFoundError):
            return stat.S_ISDIR(self.stat(name).st_mode)
        return False

    def open(self, name: str, flags: int) -> int:
        """Opens a regular file that has no other name, for example to write to it. Returns the descriptor."""
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, f"{name} is a symbolic link") from None
            raise
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:  # 0: somebody has removed it just now
            return descriptor
        close(descriptor)
        raise OSError(errno.EINVAL, f"{name} is not a regular file with a single name")

    @contextmanager
    def new_file(self, name: str) -> Iterator[BinaryIO]:
        """A new file, which is on disk at the end of the block. Nothing may have its name."""

        def create(name: str, flags: int) -> int:
            return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=self.descriptor)

        with io.BufferedRandom(File(name, "x+b", opener=create)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def replacing(self, name: str) -> Iterator[BinaryIO]:
        """A new file, which gets its name when it is complete and on disk. If the block fails, it leaves nothing
        behind, and a file that had the name keeps it."""
        part = f"{name}.{os.getpid()}.part"
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=self.descriptor)  # of a killed process that had our number
        try:
            with self.new_file(part) as file:
                yield file
            self.rename(part, name)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=self.descriptor)
            raise
        self.sync()

    def make(self, name: str) -> "Directory":
        """A new directory in this one."""
        os.mkdir(name, dir_fd=self.descriptor)
        return Directory(self.path / name, self)

    def rename(self, name: str, new: str) -> None:
        """Renames a file, a link or a directory."""
        os.rename(name, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Removes a file, a link, or a directory with everything in it."""
        if not self.is_directory(name):
            os.unlink(name, dir_fd=self.descriptor)
            return
        inner = Directory(self.path / name, self)
        for each in inner.names():
            inner.remove(each)
        inner.close()
        os.rmdir(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Returns when the names in the directory are on disk."""
        os.fsync(self.descriptor)


def why(error: OSError) -> str:
    """The reason for a message."""
    reason = error.strerror or str(error)
    return reason[:1].lower() + reason[1:]


def exists(path: str | Path) -> bool:
    """Whether a file, a directory or a link is there. os.path.lexists takes an error of the disk for a no; this raises
    OSError."""
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have such a name
        os.lstat(path)
        return True
    return False


def glob(pattern: str) -> list[str]:
    """What glob.glob finds, sorted. Where a directory cannot be listed that leaves it out; this raises OSError."""
    if not has_magic(pattern):
        return [pattern] if exists(pattern) else []
    place, last = os.path.split(pattern)
    found = []
    for folder in glob(place) if place else [""]:
        with suppress(FileNotFoundError, NotADirectoryError):
            there = [name for name in os.listdir(folder or ".") if name[:1] != "." or last[:1] == "."]
            found += [os.path.join(folder, name) for name in fnmatch.filter(there, last)]
    return sorted(found)


def make_directory(directory: Path) -> list[Path]:
    """Makes a directory and the directories above it, if they are missing, and syncs their names. Returns those that it
    made, the innermost first. Raises OSError if it cannot."""
    missing = []
    for place in (directory, *directory.parents):
        if place.is_dir():
            break
        if os.path.lexists(place):
            raise NotADirectoryError(errno.ENOTDIR, "a link to nowhere" if not place.exists() else "not a directory")
        missing.append(place)
    directory.mkdir(parents=True, exist_ok=True)
    for place in missing:
        Directory(place.parent).sync()
    return missing


def remove_directories(directories: list[Path]) -> None:
    """Removes the directories that are empty, in their order."""
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()


class Lock:
    """A place is locked while this process writes there: one run at a time may. The lock lasts until `release` is
    called, until this object is gone, or until the process ends, in any way.

    The lock is an flock on a file of its own, `path`. The other files of the place are replaced by renames, and a lock
    on them would not survive this. The file names process and host, and `release` removes it. If a killed process has
    left the file, it is not locked, and the next run takes it over. A link, or a file with other contents, stays as it
    is, and the lock is refused.

    directory: the open directory of `path`. The holder of the lock writes below it.

    place and flag: the name of the place in messages, and the flag that names it. make: whether to make the directory
    of `path` if it is missing; then `release` removes it again if it is empty.

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
                file = File(self.directory.open(path.name, os.O_RDWR | os.O_CREAT), "r+b")
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
                    say(f"{place} is in use by {holder}: waiting up to {PATIENCE} s for it to end")
                time.sleep(0.2)
            self.release = undo = weakref.finalize(self, _release, file, self.directory, path.name, made)
            os.ftruncate(file.fileno(), 0)
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
        say(f"{place}: cannot be locked ({why(error)}): make sure that no other run writes there")
        return True
    try:
        directory.check_in_place()
        return os.path.samestat(os.fstat(descriptor), directory.stat(name))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return False  # the run that had the lock has just removed the file, or the directory


def _release(file, directory: Directory, name: str, made: list[Path]) -> None:
    with suppress(OSError):
        if os.path.samestat(os.fstat(file.fileno()), directory.stat(name)):  # not another's, if somebody removed ours
            directory.remove(name)  # while it is locked
    file.close()
    remove_directories(made)

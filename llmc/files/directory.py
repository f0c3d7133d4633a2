"""A directory that a user has named, and how we write below it: to no link, and to no other directory.

Whoever can put a file into a directory, or into an archive that we unpack, can put a link there. If we followed it, we
would write to any file of the user's. So a directory is opened once, and everything below it is named relative to the
open directory.
"""

import errno
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


class Directory:
    """An open directory. The path of it may contain links. Below it, no link is followed.

    above: the open directory that has this one; then the path's last part must be no link. Raises OSError, as all
    methods do, if the system refuses.
    """

    def __init__(self, path: str | Path, above: "Directory | None" = None):
        self.path = Path(path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if above is None:
            self.descriptor = os.open(path, flags)
        else:
            self.descriptor = os.open(self.path.name, flags | os.O_NOFOLLOW, dir_fd=above.descriptor)
        self.close = weakref.finalize(self, os.close, self.descriptor)

    def check_in_place(self) -> None:
        """Raises OSError if another directory, or none, is at the path by now. It would not have our lock."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self.descriptor)):
                return
        except OSError:
            pass
        raise OSError(errno.ESTALE, f"{self.path} was removed or replaced under the run: put it back")

    def names(self) -> list[str]:
        """What is in the directory, in ascending order."""
        return sorted(os.listdir(self.descriptor))

    def stat(self, name: str) -> os.stat_result:
        """Of the file or the link itself."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def is_directory(self, name: str) -> bool:
        """Whether there is a directory, and no link to one, of this name."""
        with suppress(OSError):
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
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{name} is not a regular file with a single name")

    @contextmanager
    def new_file(self, name: str) -> Iterator[BinaryIO]:
        """A new file, which is on disk at the end of the block. Nothing may have its name."""

        def create(name: str, flags: int) -> int:
            return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=self.descriptor)

        with open(name, "w+b", opener=create) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def replacing(self, name: str) -> Iterator[BinaryIO]:
        """A new file, which gets its name when it is complete and on disk. If the block fails, it leaves nothing
        behind, and what had the name keeps it."""
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
        """Removes a file, a link, or a directory with all that is in it."""
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


def make_directory(directory: Path) -> list[Path]:
    """Makes a directory if it is missing, and syncs its name. Returns the directories that it made, the innermost
    first. Raises OSError if it cannot."""
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

"""Files that begin with 256 integers, and files that are written whole or not at all.

Every `.bin` of llm.c starts with a header of 256 little-endian 32-bit integers. The first one, the magic number, says
what follows (magic.py).
"""

import errno
import io
import os
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from device.errors import UserError
from device.progress import telling
from llmc.files.directory import Directory, File, make_directory, named, remove_directories, why
from llmc.files.interrupted import repeated
from llmc.files.magic import contents, script_of

import numpy as np

HEADER_BYTES = 256 * 4


def make_header(*values: int) -> np.ndarray:
    """A header, int32 (256,): the given values, then zeros."""
    header = np.zeros(256, dtype="<i4")
    header[: len(values)] = values
    return header


def open_file(path: str | Path) -> BinaryIO:
    """Opens an input file. Raises OSError also if it is not a regular file: perhaps nobody ever writes to a pipe, and a
    pipe cannot be mapped or read twice."""
    with named(path):
        file = io.BufferedReader(File(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "not a regular file")
    return file


def read_file(path: str | Path) -> bytes:
    """All of an input file. Raises OSError as `open_file` does."""
    with open_file(path) as file:
        return file.read()


def map_file(path: str | Path, dtype: str, offset: int) -> np.ndarray:
    """The numbers of a file from `offset` on, 1-dimensional: a read-only memory map. Raises OSError as `open_file`
    does."""
    with named(path), open_file(path) as file:
        return repeated(np.memmap)(file, dtype, "r", offset)


def file_size(path: str | Path, remedy: str) -> int:
    """The size of a file in bytes. Raises UserError if there is no readable, regular file."""
    try:
        with open_file(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path}: {why(error)}; {remedy}") from None


def first_word(path: str | Path) -> int | None:
    """The first number of a file, which says what it is. None if there is no such file."""
    try:
        with open_file(path) as file:
            return int.from_bytes(file.read(4), "little")
    except OSError:
        return None


def check_no_pointer(path: str | Path) -> None:
    """Raises UserError if Git LFS has left its pointer to a file in place of the file. A file that cannot be opened
    passes: the caller, who reads it next, says so."""
    with suppress(OSError), open_file(path) as file:
        if file.read(23) == b"version https://git-lfs":
            raise UserError(f"{path}: a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`")


def read_header(path: str | Path, magic: int, remedy: str, header_bytes: int = HEADER_BYTES) -> np.ndarray:
    """The header of a file of one kind, int32 (header_bytes / 4,).

    Raises UserError, which ends in `remedy`, if the file is missing, unreadable, shorter than a header, or of another
    kind.
    """
    size = file_size(path, remedy)
    check_no_pointer(path)
    with open_file(path) as file:
        header = np.frombuffer(file.read(min(size, header_bytes) // 4 * 4), "<i4").copy()
    if size >= HEADER_BYTES and header[0] != magic:
        found, other = contents(int(header[0])) or f"magic number {header[0]}", script_of(int(header[0]))
        if other and script_of(magic):
            remedy = f"use {other} for it"
        raise UserError(f"{path}: not {contents(magic)} (found {found}, expected magic number {magic}); {remedy}")
    if size < header_bytes:
        raise UserError(f"{path}: {size} bytes is too short for {contents(magic)}; {remedy}")
    return header


def check_size(path: str | Path, expected: int, remedy: str) -> None:
    """Raises UserError if a file has another size, in bytes."""
    size = file_size(path, remedy)
    if size != expected:
        raise UserError(f"{path}: {size} bytes, but its header asks for {expected}: truncated or damaged; {remedy}")


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a binary file beside `path` for writing and renames it to `path` once it is complete and on disk.

    If the block fails, it leaves nothing behind, and the old file at `path` stays as it was. Raises UserError if the
    system refuses to write.
    """
    path = Path(path)
    try:
        with Directory(path.parent).replacing(path.name) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({why(error)})") from error


def write_arrays(file: BinaryIO, arrays: Iterable[np.ndarray]) -> dict[str, int]:
    """Writes arrays one after the other. Returns the size of all in bytes, and their CRC-32."""
    crc = size = 0
    for array in arrays:
        data = memoryview(np.ascontiguousarray(array)).cast("B")
        file.write(data)
        crc = zlib.crc32(data, crc)
        size += len(data)
    return {"bytes": size, "crc32": crc}


def crc32_of(path: Path) -> int:
    """The CRC-32 of a file. If that takes long, stderr says how far it is."""
    crc = size = done = 0
    with open_file(path) as file, telling(lambda: f"checking {path}: {done >> 20} of {size >> 20} MiB"):
        size = os.fstat(file.fileno()).st_size
        while chunk := file.read(1 << 24):
            crc, done = zlib.crc32(chunk, crc), done + len(chunk)
    return crc


def check_directory(directory: str | Path, contents: str, flag: str) -> None:
    """Raises UserError if nothing can be written to the `directory`, which need not exist. To find out, it writes a
    file there and removes it. contents, flag: for the message, what is to be written, and the flag that names the
    directory."""
    made = []
    try:
        made = make_directory(Path(directory))
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        reason = error.strerror.lower()
        raise UserError(f"{directory}: {contents} cannot be written there ({reason}); choose another {flag}") from None
    finally:
        remove_directories(made)

"""Files that begin with 256 integers, and files that are written whole or not at all.

Every `.bin` of llm.c starts with a header of 256 little-endian 32-bit integers, the first of which says what follows.
The number of a model's files stands in its script.
"""

import codecs
import errno
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from device.errors import UserError
from device.progress import telling
from llmc.files.directory import Directory, make_directory, remove_directories, why

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
HEADER_BYTES = 256 * 4

DEBUG_STATE, TOKENIZER, TOKENS, EVALUATION = 20240327, 20240328, 20240520, 20240522
TOKENS_32 = 20240801

CONTENTS = {
    DEBUG_STATE: "a debug state",
    TOKENIZER: "a tokenizer",
    TOKENS: "GPT-2 tokens",
    EVALUATION: "a multiple-choice evaluation set",
    TOKENS_32: "tokens of 32 bits",
}

MARKS = (  # byte order marks; UTF-32's begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip


def make_header(*values: int) -> np.ndarray:
    """A header, int32 (256,): the given values, then zeros."""
    header = np.zeros(256, dtype="<i4")
    header[: len(values)] = values
    return header


def open_file(path: str | Path) -> BinaryIO:
    """Opens an input file. Raises OSError also if it is not a regular file: perhaps nobody ever writes to a pipe, and a
    pipe cannot be mapped or read twice."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def file_size(path: str | Path, remedy: str) -> int:
    """The size of a file in bytes. Raises UserError if there is no readable, regular file."""
    try:
        with open_file(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror.lower()}; {remedy}") from None


def first_word(path: str | Path) -> int | None:
    """The first number of a file, which says what it is. None if there is no such file."""
    try:
        with open_file(path) as file:
            return int.from_bytes(file.read(4), "little")
    except OSError:
        return None


def check_no_pointer(path: str | Path) -> None:
    """Raises UserError if Git LFS has left its pointer to a file in place of the file. Whoever reads a file that cannot
    be opened says so."""
    with suppress(OSError), open_file(path) as file:
        if file.read(23) == b"version https://git-lfs":
            raise UserError(f"{path}: a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`")


def contents(magic: int) -> str | None:
    """The name of the kind of files that begin with this number. None if it is none of ours."""
    name, _ = script_of(magic)
    return CONTENTS.get(magic) or name and f"a {name} model"


@cache
def script_of(magic: int | None) -> tuple[str | None, str | None]:
    """The name of the models whose files begin with this number, and the script that trains them. It is found in the
    script's text, because scripts stand above this file, which must not import them."""
    for path in sorted(ROOT.glob("train_*.py")):
        text = path.read_text()
        if name := re.search(r'^ +NAME, .*? = "(.*?)"', text, re.M):
            if re.search(rf"\bMAGIC, .*\b{magic}\b", text):
                return name[1], path.name
    return None, None


def read_header(path: str | Path, magic: int, remedy: str, header_bytes: int = HEADER_BYTES) -> np.ndarray:
    """The header of a file of one kind, int32 (header_bytes / 4,).

    Raises UserError, ending in `remedy`, where the file is missing, unreadable, shorter than a header, or of another
    kind.
    """
    size = file_size(path, remedy)
    check_no_pointer(path)
    header = np.fromfile(path, dtype="<i4", count=min(size, header_bytes) // 4)
    if size >= HEADER_BYTES and header[0] != magic:
        found, (_, other) = contents(int(header[0])) or f"magic number {header[0]}", script_of(int(header[0]))
        if other and script_of(magic)[1]:
            remedy = f"use {other} for it"
        raise UserError(f"{path}: not {contents(magic)} (found {found}, expected magic number {magic}); {remedy}")
    if size < header_bytes:
        raise UserError(f"{path}: {size} bytes is too short for {contents(magic)}; {remedy}")
    return header


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


def crc32_of(path: Path) -> int:
    """The CRC-32 of a file. If that takes long, stderr says how far it is."""
    crc = size = done = 0
    with open_file(path) as file, telling(lambda: f"checking {path}: {done >> 20} of {size >> 20} MiB"):
        size = os.fstat(file.fileno()).st_size
        while chunk := file.read(1 << 24):
            crc, done = zlib.crc32(chunk, crc), done + len(chunk)
    return crc


def check_directory(directory: str | Path, contents: str, flag: str) -> None:
    """Raises UserError if `contents` cannot be written to the `directory` that `flag` names, which need not exist. To
    find out, it writes a file there. It leaves nothing behind."""
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

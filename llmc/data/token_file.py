"""A file of tokens: its formats, how it is read, and how it is written.

A token file is llm.c's: int32[256] header, then the tokens. If the vocabulary has at most 65536 tokens, the header is
(20240520, 1, number of tokens) and the tokens are uint16. If it has more, the header is (20240801, 7, number of tokens)
and the tokens are uint32. Or the file is NumPy's `.npy`, with integers. The first bytes of a file say which it is. Raw
tokens have no such bytes, so --raw-tokens names their type.

Of conversations a model learns the answers alone. Their files are our own: the header is (20261128, 1, number of
tokens, T), and a token is int32. The top bit marks a token that is not learned: then it is negative, and `UNMARKED`
takes the mark away. If T is not 0, each conversation begins a row of T tokens.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from device.errors import UserError, first_line
from device.progress import telling
from llmc.files.directory import close, why
from llmc.files.files import HEADER_BYTES, check_size, file_size, make_header, open_file, read_header, replacing
from llmc.files.magic import TOKENS, TOKENS_32, TOKENS_MARKED, contents

import numpy as np

REMEDY = "get data with dev/download_starter_pack.sh or make it with a script in dev/data/"
TEXT_REMEDY = "to make tokens of text: python dev/data/text.py TEXT -o PREFIX; then train with -i PREFIX"
MAX_TOKENS = 2**31 - 1  # of a file; its header counts them in 32 bits
PIECE = 1 << 23         # tokens that are read at a time from a file that is read whole
FINGERPRINTED = 2048    # tokens, at the beginning, the middle and the end of a shard

NPY = b"\x93NUMPY"  # NumPy's files begin with it
RAW_TOKENS = ("uint8", "uint16", "uint32", "int32", "int64")
MARK, UNMARKED = np.int32(-(2**31)), np.int32(2**31 - 1)
# By magic number the version, and the type of a token.
FORMATS = {TOKENS: (1, np.dtype("<u2")), TOKENS_32: (7, np.dtype("<u4")), TOKENS_MARKED: (1, np.dtype("<i4"))}


class Tokens:
    """The tokens of a file, `size` of them: `tokens[5:9]` reads four. They are read and not mapped, because the system
    ends a process whose mapped file is cut. The file is open from the first read until `close`.

    marked: whether tokens that are not learned are marked. row: the T of such a file's header; else 0. identity: what
    the file was when this object was made (`identity_of`). A read raises UserError if the system refuses it, or if the
    file has changed since.
    """

    def __init__(self, path: str | Path, dtype: np.dtype, offset: int, size: int, marked: bool = False, row: int = 0):
        self.path, self.dtype, self.offset, self.size, self.file = path, np.dtype(dtype), offset, size, -1
        self.marked, self.row = marked, row
        self.identity = identity_of(os.stat(path))

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, _ = places.indices(self.size)
        itemsize = self.dtype.itemsize
        try:
            if self.file < 0:
                with open_file(self.path) as file:
                    self.file = os.dup(file.fileno())
            wanted = max(0, stop - start) * itemsize
            data = os.pread(self.file, wanted, self.offset + start * itemsize)
            whole = len(data) == wanted and identity_of(os.fstat(self.file)) == self.identity
        except OSError as error:
            raise UserError(f"{self.path}: {why(error)}, so its tokens cannot be read") from None
        if not whole:
            raise UserError(f"{self.path}: it has changed since it was opened, so its tokens are not what they were")
        return np.frombuffer(data, self.dtype)

    def close(self) -> None:
        """Closes the file, until something is read from it again."""
        if self.file >= 0:
            descriptor, self.file = self.file, -1
            close(descriptor)

    def __del__(self) -> None:
        self.close()

    def pieces(self) -> Iterator[np.ndarray]:
        """All tokens, a few at a time."""
        for start in range(0, self.size, PIECE):
            yield self[start : start + PIECE]
        self.close()

    def sha256(self) -> str:
        """Of all tokens, as they are stored. If that takes long, stderr says how far it is."""
        found, done = hashlib.sha256(), 0
        with telling(lambda: f"hashing {self.path}: {done >> 20} of {self.size >> 20} million tokens"):
            for piece in self.pieces():
                found.update(piece)
                done += piece.size
        return found.hexdigest()


def identity_of(status: os.stat_result) -> list[int]:
    """What changes if a file is written to or replaced: its size, the time of its last change in ns, and its inode."""
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def open_tokens(path: str | Path, raw_tokens: str | None = None) -> Tokens:
    """The tokens of one file: uint16 or uint32; of a `.npy` its integers; without a header, of the type raw_tokens.

    Raises UserError if the file is missing, empty, of another kind or version, or not as long as its header says.
    """
    size = file_size(path, REMEDY)
    with open_file(path) as file:
        head = file.read(len(NPY))
    if head == NPY:
        return _open_npy(path, size)
    magic = int.from_bytes(head[:4], "little")
    if contents(magic) is None:
        dtype = _raw_type(path, size, raw_tokens)
        return Tokens(path, dtype, 0, size // dtype.itemsize)
    header = read_header(path, magic if magic in FORMATS else TOKENS, REMEDY)
    version, dtype = FORMATS[magic]
    if header[1] != version:
        raise UserError(f"{path}: token file version {header[1]}; version {version} is needed: {REMEDY}")
    if header[2] < 1:
        raise UserError(f"{path}: its header says that it holds {header[2]} tokens; {REMEDY}")
    check_size(path, HEADER_BYTES + dtype.itemsize * int(header[2]), REMEDY)
    marked = magic == TOKENS_MARKED
    if marked and header[3] < 0:
        raise UserError(f"{path}: its header says that its rows have {header[3]} tokens; {REMEDY}")
    return Tokens(path, dtype, HEADER_BYTES, int(header[2]), marked, int(header[3]) if marked else 0)


def _open_npy(path: str | Path, size: int) -> Tokens:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy raises many kinds for a damaged header
        why = first_line(error)
        raise UserError(f"{path}: NumPy cannot map it ({why}): truncated, damaged or no array of numbers") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        shape = " x ".join(map(str, tokens.shape)) or "1"
        raise UserError(f"{path}: {shape} of {tokens.dtype}; tokens are one row of integers")
    if tokens.size == 0 or size != tokens.offset + tokens.nbytes:
        raise UserError(f"{path}: {size} bytes, but its header asks for {tokens.size} tokens of {tokens.dtype}")
    return Tokens(path, tokens.dtype, tokens.offset, tokens.size)


def _raw_type(path: str | Path, size: int, raw_tokens: str | None) -> np.dtype:
    """The type of the tokens in a file without a header. Raises UserError if the user has not named it."""
    if raw_tokens is None:
        raise UserError(
            f"{path}: its first bytes are not those of a token file; if it is tokens without any header, name their "
            f"type with --raw-tokens ({', '.join(RAW_TOKENS)}); {TEXT_REMEDY}"
        )
    dtype = np.dtype(raw_tokens).newbyteorder("<")
    if size == 0 or size % dtype.itemsize:
        raise UserError(f"{path}: {size} bytes are no whole number of --raw-tokens {raw_tokens}; {REMEDY}")
    return dtype


def write_tokens(
    path: str | Path, tokens: Iterable[int] | np.ndarray, vocab_size: int = 1 << 16, marked: bool = False, row: int = 0
) -> None:
    """Writes tokens, each 0..vocab_size-1, as a token file with a header; `path` appears whole or not at all.

    The size of the vocabulary decides how tokens are stored, whichever tokens there are. So all shards of a dataset are
    alike. marked: the tokens are int32, with marks; row: of `Tokens`. Raises UserError for a token that is not in the
    vocabulary, and for more tokens than a header can count.
    """
    tokens = tokens if isinstance(tokens, np.ndarray) else np.fromiter(tokens, dtype=np.int64)
    if tokens.size > MAX_TOKENS:
        raise UserError(f"{path}: {tokens.size} tokens, and a token file has at most {MAX_TOKENS}: write shards")
    ids = tokens & UNMARKED if marked else tokens
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise UserError(f"{path}: tokens {ids.min()}..{ids.max()} are not all within 0..{vocab_size - 1}")
    magic, version, dtype = (TOKENS_MARKED, *FORMATS[TOKENS_MARKED]) if marked else token_format(vocab_size)
    with replacing(path) as file:
        file.write(make_header(magic, version, tokens.size, row).tobytes())
        file.write(np.ascontiguousarray(tokens, dtype).data)  # without another copy


def token_format(vocab_size: int) -> tuple[int, int, np.dtype]:
    """How the tokens of a vocabulary are stored: magic number and version of the files, type of a token."""
    magic = TOKENS if vocab_size <= 1 << 16 else TOKENS_32
    return magic, *FORMATS[magic]


def fingerprint(shards: Iterable[Tokens]) -> str:
    """16 hexadecimal digits that identify these tokens, computed from the shards' sizes and a few blocks of each."""
    seen = hashlib.sha256()
    for tokens in shards:
        middle = max(0, tokens.size // 2 - FINGERPRINTED // 2)
        seen.update(tokens.size.to_bytes(8, "little"))
        for start in (0, middle, max(0, tokens.size - FINGERPRINTED)):
            seen.update(tokens[start : start + FINGERPRINTED].astype("<u4").tobytes())
        tokens.close()
    return seen.hexdigest()[:16]

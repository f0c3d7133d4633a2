"""Token files, and the batches that we cut from them.

A token file is llm.c's: int32[256] header, then the tokens. If the vocabulary has at most 65536 tokens, the header is
(20240520, 1, number of tokens) and the tokens are uint16. If it has more, the header is (20240801, 7, number of tokens)
and the tokens are uint32. Or it is NumPy's `.npy`, with integers. The first bytes of a file say which it is. Raw tokens
have no such bytes, so --raw-tokens names their type. A dataset is one file or several (shards).

A shard is divided into consecutive windows of T tokens. A row of a batch is one window: T inputs, and as targets the
tokens that follow each. A batch is B windows in order. So without shuffling a batch is B*T + 1 consecutive tokens, each
batch starts B*T tokens after the one before, and no batch spans two shards. llm.c walks through the data in the same
way. With a shuffle seed the order of shards, and of the windows in each, is drawn anew in every epoch.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from glob import escape, glob
from pathlib import Path

from device.errors import UserError, first_line
from device.progress import telling
from llmc.files.files import (
    HEADER_BYTES,
    TOKENS,
    TOKENS_32,
    contents,
    file_size,
    make_header,
    open_file,
    read_header,
    replacing,
)

import numpy as np

REMEDY = "get data with dev/download_starter_pack.sh or make it with a script in dev/data/"
TEXT_REMEDY = "to make tokens of text: python dev/data/text.py TEXT -o PREFIX; then train with -i PREFIX"
CHECKED_AT_OPENING = 1 << 28  # bytes; larger files are checked for bad tokens when they are read
MOST_TOKENS = 2**31 - 1       # of a file; its header counts them in 32 bits
AT_ONCE = 1 << 23             # tokens of a file that is read whole
FINGERPRINTED = 2048          # tokens, at the beginning, the middle and the end of a shard

NPY = b"\x93NUMPY"  # NumPy's files begin with it
RAW_TOKENS = ("uint8", "uint16", "uint32", "int32", "int64")
SUFFIXES = (".bin", ".npy")
FORMATS = {TOKENS: (1, np.dtype("<u2")), TOKENS_32: (7, np.dtype("<u4"))}  # magic number: version, a token


def find_token_files(name: str | Path, split: str) -> list[Path]:
    """The token files that `name` stands for, in order.

    A file stands for itself. Anything else is a prefix: `<prefix>_<split>.bin`, or if there is no such file, the shards
    `<prefix>_<split>_*.bin`. Or it is a folder with `<split>.bin` in it, as in nanoGPT. A `.npy` may take the place of
    each `.bin`. If there is none of these, the name is a pattern. Raises UserError if there is nothing.
    """
    if Path(name).is_file():
        return [Path(name)]
    if files := _files_of_split(name, split):
        return files
    if _is_pattern(name):
        if files := sorted(glob(str(name))):
            return [Path(file) for file in files]
        raise UserError(f"{name}: no file matches; {REMEDY}")
    if str(name).endswith(SUFFIXES):
        raise UserError(f"{name}: no such file; {REMEDY}")
    if Path(name).is_dir():
        raise UserError(f"{name}: a folder without {split}.bin; name a dataset in it (-i {name}/PREFIX); {TEXT_REMEDY}")
    raise UserError(f"{name}_{split}.bin: no such file; {REMEDY}")


def check_both_splits(name: str | Path, raw_tokens: str | None) -> None:
    """Raises UserError if this names the same files for training and validation, by a file or a pattern. A prefix or a
    folder names both. If the files hold no tokens, the message says what they are."""
    if Path(name).is_file() or _is_pattern(name):
        for file in find_token_files(name, "train"):
            open_tokens(file, raw_tokens)
        raise UserError(f"-i {name} names files of training data: name those for validation with -j")


def _is_pattern(name: str | Path) -> bool:
    there = Path(name).is_dir() or any(_files_of_split(name, split) for split in ("train", "val"))
    return not there and any(character in str(name) for character in "*?[")


def _files_of_split(name: str | Path, split: str) -> list[Path]:
    """The files of a prefix or a folder; none if there are none. Raises UserError if it has both kinds of them."""
    for found in f"{name}_{split}", f"{name}_{split}_*", f"{name}/{split}":
        head, shards = found.removesuffix("*"), "*" * found.endswith("_*")
        kinds = [sorted(glob(escape(head) + shards + suffix)) for suffix in SUFFIXES]
        if all(kinds):
            raise UserError(f"{kinds[0][0]} and {kinds[1][0]}: which of them? Name files or a pattern with -i and -j")
        if any(kinds):
            return [Path(file) for file in kinds[0] or kinds[1]]
    return []


class Tokens:
    """The tokens of a file, `size` of them: `tokens[5:9]` reads four. They are read and not mapped, because the system
    ends a process whose mapped file is cut. The file is open from the first read until `close`.

    identity: the file's size, time of change and inode, when it was first opened. Raises UserError if it cannot be
    read, or is not what it was then.
    """

    def __init__(self, path: str | Path, dtype: np.dtype, offset: int, size: int):
        self.path, self.dtype, self.offset, self.size, self.file = path, np.dtype(dtype), offset, size, -1
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
            raise UserError(f"{self.path}: {error.strerror.lower()}, so its tokens cannot be read") from None
        if not whole:
            raise UserError(f"{self.path}: it has changed since it was opened, so its tokens are not what they were")
        return np.frombuffer(data, self.dtype)

    def close(self) -> None:
        """Closes the file, until something is read from it again."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def __del__(self) -> None:
        self.close()

    def pieces(self) -> Iterator[np.ndarray]:
        """All tokens, a few at a time."""
        for start in range(0, self.size, AT_ONCE):
            yield self[start : start + AT_ONCE]
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
    """The tokens of one file: uint16 or uint32, of a `.npy` its integers, or without a header raw_tokens.

    Raises UserError if the file is missing, empty, of another kind or version, or not as long as its header says.
    """
    size = file_size(path, REMEDY)
    with open(path, "rb") as file:
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
    expected = HEADER_BYTES + dtype.itemsize * int(header[2])
    if size != expected:
        raise UserError(f"{path}: {size} bytes, but its header asks for {expected}: truncated or damaged; {REMEDY}")
    return Tokens(path, dtype, HEADER_BYTES, int(header[2]))


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


def write_tokens(path: str | Path, tokens: Iterable[int] | np.ndarray, vocab_size: int = 1 << 16) -> None:
    """Writes tokens, each 0..vocab_size-1, as a token file with a header; `path` appears whole or not at all.

    The vocabulary decides how a token is stored, not the tokens themselves, so that all shards of a dataset are alike.
    Raises UserError for a token that is not in the vocabulary, and for more tokens than a header can count.
    """
    tokens = tokens if isinstance(tokens, np.ndarray) else np.fromiter(tokens, dtype=np.int64)
    if tokens.size > MOST_TOKENS:
        raise UserError(f"{path}: {tokens.size} tokens, and a token file has at most {MOST_TOKENS}: write shards")
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        raise UserError(f"{path}: tokens {tokens.min()}..{tokens.max()} are not all within 0..{vocab_size - 1}")
    magic, version, dtype = token_format(vocab_size)
    with replacing(path) as file:
        file.write(make_header(magic, version, tokens.size).tobytes())
        file.write(np.ascontiguousarray(tokens, dtype).data)  # without another copy


def token_format(vocab_size: int) -> tuple[int, int, np.dtype]:
    """How the tokens of a vocabulary are stored: magic number and version of the files, type of a token."""
    magic = TOKENS if vocab_size <= 1 << 16 else TOKENS_32
    return magic, *FORMATS[magic]


def sort_by_token(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """order: the positions of tokens (any shape), sorted by token; those of equal tokens stay in their order. count: at
    the first place of a token in this order, how many positions hold the token; 0 elsewhere. int32 (tokens.size,)."""
    flat = tokens.reshape(-1)
    if flat.max() < 1 << 16:
        flat = flat.astype(np.uint16)  # NumPy's stable sort of 16-bit values is a radix sort
    order = np.argsort(flat, kind="stable").astype(np.int32)
    in_order = flat[order]
    first = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
    count = np.zeros(flat.size, np.int32)
    count[first] = np.diff(np.r_[first, flat.size])
    return order, count


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


class DataLoader:
    """Serves batches of B rows of T tokens from the files that `name` stands for (`find_token_files`), without end.

    raw_tokens: the type of the tokens in files without a header.

    shuffle_seed: None: batches come in the order of the data. A number (64 bits count): they are shuffled, and the
    order depends on the seed and the epoch only.

    files: the files of the data that have at least one batch. num_tokens: tokens in all of them. num_batches:
    num_tokens // (B*T), which llm.c calls an epoch. (The walk itself starts again after the last whole batch of the
    last shard, which may come a little sooner. So if num_tokens is a multiple of B*T, validation over all batches takes
    the first one twice, as in llm.c.) fingerprint: of the data (`fingerprint`). hashes: of each file its identity and
    the SHA-256 of its tokens, if they are known (`identify`).

    Raises UserError, with the name of the file, if one cannot be read, if all are shorter than a batch (B*T + 1
    tokens), or if one has a token that is not below vocab_size. `next_batch` checks large files for such tokens, batch
    by batch.
    """

    def __init__(
        self, name: str | Path, split: str, B: int, T: int, vocab_size: int, shuffle_seed: int | None = None,
        raw_tokens: str | None = None,
    ) -> None:  # fmt: skip
        self.B, self.T, self.vocab_size, self.shuffle_seed = B, T, vocab_size, shuffle_seed
        files = {file: open_tokens(file, raw_tokens) for file in find_token_files(name, split)}
        for file, tokens in files.items():
            if tokens.size * tokens.dtype.itemsize <= CHECKED_AT_OPENING:
                for piece in tokens.pieces():
                    self._check_tokens(file, piece)
        longest = max(files, key=lambda file: files[file].size)
        if files[longest].size < B * T + 1:
            raise UserError(
                f"{longest}: {files[longest].size} tokens are too few for one batch of B {B}, T {T}, "
                f"which takes {B * T + 1}; lower -b or -t, or use more data"
            )
        self.files, self.shards = zip(*((f, t) for f, t in files.items() if t.size >= B * T + 1), strict=True)
        self.num_tokens = sum(tokens.size for tokens in self.shards)
        self.num_batches = self.num_tokens // (B * T)
        self.fingerprint, self.hashes, self._shard = fingerprint(self.shards), None, 0
        self.reset()

    def reset(self) -> None:
        """Back to the first batch of the first epoch."""
        self._seek(epoch=0, place=0, batch=0)

    def next_batch(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        """Fills inputs and targets, int32 (B, T) each, with the next batch."""
        T = self.T
        file, tokens = self.files[self._shard], self.shards[self._shard]
        windows = self._windows[self._batch * self.B : (self._batch + 1) * self.B]
        for row, window in enumerate(windows):
            row_tokens = tokens[window * T : window * T + T + 1]
            self._check_tokens(file, row_tokens)
            inputs[row] = row_tokens[:-1]
            targets[row] = row_tokens[1:]
        self.skip()

    def skip(self) -> None:
        """Passes over the next batch."""
        if self._batch + 1 < self._batches_in(self._shard):
            self._batch += 1
        elif self._place + 1 < len(self.shards):
            self._seek(self._epoch, self._place + 1, batch=0)
        else:
            self._seek(self._epoch + 1, place=0, batch=0)

    def state(self) -> dict:
        """The place of the next batch, and what identifies the data and the order to which it belongs, for JSON."""
        hashes = {"files": self.hashes} if self.hashes else {}
        return {"epoch": self._epoch, "place": self._place, "batch": self._batch} | self._identity() | hashes

    def load_state(self, state: dict) -> None:
        """Goes to the place that `state()` named. Raises UserError if the data, B, T or the seed are not the same as
        then."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise UserError(
                    f"cannot resume: {name} of the training data was {state[name]} and is now {value}; "
                    "use the same data (-i), -b, -t and --seed as before"
                )
        if state["place"] < len(self.shards):
            self._seek(state["epoch"], state["place"], batch=0)
        if state["place"] >= len(self.shards) or state["batch"] >= self._batches_in(self._shard):
            raise UserError("cannot resume: the checkpoint goes on at a batch that the data does not have: damaged")
        self._batch, self.hashes = state["batch"], state.get("files")

    def identify(self) -> None:
        """Computes the SHA-256 of each file, if it is not known or the file has changed since. Raises UserError if a
        checkpoint has recorded another one. Older checkpoints have recorded none."""
        known, now = self.hashes, []
        if known is not None and len(known) != len(self.shards):
            raise UserError(f"cannot resume: the training data had {len(known)} files and now has {len(self.shards)}")
        for n, tokens in enumerate(self.shards):
            *before, recorded = known[n] if known else (None, None)
            found = recorded if before == tokens.identity else tokens.sha256()
            if recorded not in (None, found):
                raise UserError(
                    f"cannot resume: {tokens.path} has other tokens than when the checkpoint was saved; use the same "
                    "data (-i) as before"
                )
            now.append([*tokens.identity, found])
        self.hashes = now

    def _identity(self) -> dict:
        same = {"num_tokens": self.num_tokens, "B": self.B, "T": self.T, "shuffle_seed": self.shuffle_seed}
        return same | {"fingerprint": self.fingerprint}

    def _batches_in(self, shard: int) -> int:
        return (self.shards[shard].size - 1) // (self.B * self.T)

    def _seek(self, epoch: int, place: int, batch: int) -> None:
        """Goes to a batch of the shard at `place` in an epoch. Draws the epoch's order of its windows."""
        self.shards[self._shard].close()  # there may be more files than a process can have open
        self._epoch, self._place, self._batch = epoch, place, batch
        self._shard = int(self._order(len(self.shards), epoch, 0)[place])
        num_windows = (self.shards[self._shard].size - 1) // self.T
        self._windows = self._order(num_windows, epoch, 1 + self._shard)

    def _order(self, n: int, epoch: int, stream: int) -> np.ndarray | range:
        """0..n-1, shuffled if there is a seed. RandomState, because NumPy will never change its sequences."""
        if self.shuffle_seed is None:
            return range(n)
        seed = [self.shuffle_seed & 0xFFFFFFFF, self.shuffle_seed >> 32 & 0xFFFFFFFF, epoch, stream]
        return np.random.RandomState(seed).permutation(n)

    def _check_tokens(self, file: Path, tokens: np.ndarray) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            token = low if low < 0 else high
            raise UserError(
                f"{file}: token {token} is outside the model's vocabulary of {self.vocab_size}; "
                "use data and model (-e) that were made with the same tokenizer"
            )

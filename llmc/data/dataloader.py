"""Batches of tokens, which we cut from token files.

A dataset is one file or several (shards). A shard is divided into consecutive windows of T tokens. A row of a batch is
one window: T inputs, and as targets the tokens that follow each. A batch is B windows in order. So without shuffling a
batch is B*T + 1 consecutive tokens, each batch starts B*T tokens after the one before, and no batch spans two shards.
llm.c walks through the data in the same way. With a shuffle seed the order of shards, and of the windows in each, is
drawn anew in every epoch.
"""

from pathlib import Path

from device.errors import UserError
from kernels.encoder import sort_by_token as sort_by_token  # scripts of users import it from here
from llmc.data.find_data import find_token_files
from llmc.data.token_file import UNMARKED, fingerprint, open_tokens

import numpy as np

CHECKED_AT_OPENING = 1 << 28  # bytes; larger files are checked for bad tokens when they are read


class DataLoader:
    """Serves batches of B rows of T tokens from the files that `name` stands for (`find_token_files`), without end.

    raw_tokens: the type of the tokens in files without a header.

    shuffle_seed: if it is None, batches come in the order of the data. If it is a number (64 bits count), they are
    shuffled, and the order depends only on the seed and the epoch.

    files: the files of the data that have at least one batch. num_tokens: tokens in all of them. num_batches: the
    batches that they have, each counted once: an epoch. unused: the tokens of these files that an epoch takes neither
    as input nor as target. short: the tokens of each file that is shorter than a batch. marked: whether a file says
    which tokens are learned. fingerprint: identifies the data (`fingerprint`). hashes: for each file its identity and
    the SHA-256 of its tokens, if they are known (`identify`).

    Raises UserError, with the name of the file, if one cannot be read, if all are shorter than a batch (B*T + 1
    tokens), if one has rows of another T, or if one has a token that is not below vocab_size. `next_batch` checks large
    files for such tokens, batch by batch.
    """

    def __init__(
        self, name: str | Path, split: str, B: int, T: int, vocab_size: int, shuffle_seed: int | None = None,
        raw_tokens: str | None = None,
    ) -> None:  # fmt: skip
        self.B, self.T, self.vocab_size, self.shuffle_seed = B, T, vocab_size, shuffle_seed
        files = {file: open_tokens(file, raw_tokens) for file in find_token_files(name, split)}
        for file, tokens in files.items():
            if tokens.row not in (0, T):
                raise UserError(f"{file}: each conversation begins a row of {tokens.row} tokens: use -t {tokens.row}")
            if tokens.size * tokens.dtype.itemsize <= CHECKED_AT_OPENING:
                for piece in tokens.pieces():
                    self._check_tokens(file, piece & UNMARKED if tokens.marked else piece)
        longest = max(files, key=lambda file: files[file].size)
        if files[longest].size < B * T + 1:
            raise UserError(
                f"{longest}: {files[longest].size} tokens, and that is too few for one batch of B {B}, T {T}, "
                f"which takes {B * T + 1}; lower -b or -t, or use more data"
            )
        self.files, self.shards = zip(*((f, t) for f, t in files.items() if t.size >= B * T + 1), strict=True)
        self.marked = any(tokens.marked for tokens in self.shards)
        self.short = [tokens.size for tokens in files.values() if tokens.size < B * T + 1]
        self.num_tokens = sum(tokens.size for tokens in self.shards)
        self.num_batches = sum(map(self._batches_in, range(len(self.shards))))
        self.unused = self.num_tokens - self.num_batches * B * T - len(self.shards)
        self.fingerprint, self.hashes, self._shard = fingerprint(self.shards), None, 0
        self.reset()

    def reset(self) -> None:
        """Back to the first batch of the first epoch."""
        self._seek(epoch=0, place=0, batch=0)

    def next_batch(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        """Fills inputs and targets, int32 (B, T) each, with the next batch. A target that is not learned is -1."""
        T = self.T
        file, tokens = self.files[self._shard], self.shards[self._shard]
        windows = self._windows[self._batch * self.B : (self._batch + 1) * self.B]
        for row, window in enumerate(windows):
            row_tokens = found = tokens[window * T : window * T + T + 1]
            if tokens.marked:
                row_tokens, found = found & UNMARKED, np.maximum(found, -1)
            self._check_tokens(file, row_tokens)
            inputs[row] = row_tokens[:-1]
            targets[row] = found[1:]
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
        """The place of the next batch, and what identifies the data and their order, for JSON."""
        hashes = {"files": self.hashes} if self.hashes else {}
        return {"epoch": self._epoch, "place": self._place, "batch": self._batch} | self._identity() | hashes

    def load_state(self, state: dict) -> None:
        """Goes to the place that an earlier `state()` named. Raises UserError if the data, B, T or the seed are not the
        same as then."""
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
        """Sets `hashes`. Computes the SHA-256 of a file only if it is not known or the file has changed since. Raises
        UserError if a checkpoint has recorded another one. Older checkpoints have recorded none."""
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

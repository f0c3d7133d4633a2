"""Large sets of texts: those that Hugging Face has, and how their tokens are written as shards, which may be stopped at
any point and goes on from there."""

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dev.data.common import library, refuse_to_replace
from device.errors import UserError, counted, first_line, say
from llmc.data.token_file import token_format, write_tokens
from llmc.files.directory import Lock, why
from llmc.files.files import replacing

import numpy as np


def open_work(work: Path) -> Lock:
    """Locks the folder in which a dataset is made, and makes it if it is missing. Raises UserError if it is a link, or
    has what is not of such work: a run removes it in the end."""
    there = os.listdir(work) if work.is_dir() else []
    other = sorted(work / name for name in there if not re.fullmatch("lock|[0-9a-f]{16}", name))
    if work.is_symlink() or other:
        refuse_to_replace((other or [work])[0], "-o")
    return Lock(work / "lock", work, "-o", make=True)


def remove_work(work: Path, lock: Lock) -> None:
    """Removes what a run has made there, and the folder if nothing else is in it. Says so if the system refuses: the
    dataset is complete without it."""
    try:
        for path in work.glob("[0-9a-f]" * 16):
            shutil.rmtree(path)
        lock.release()
        if work.exists():
            work.rmdir()
    except OSError as error:
        say(f"{work}: cannot be removed ({why(error)})")


def load_texts(name: str, split: str, config: str | None, fields: Iterable[str]) -> Any:
    """A datasets.Dataset with these columns: a split of a dataset on the Hugging Face hub, or of one that datasets
    saved in the folder `name`.

    Downloads go to that library's cache, which goes on with them after an interruption. Without a connection, what is
    in that cache is taken. Raises UserError where the library is not installed or the texts cannot be had.
    """
    if "[" in split:
        raise UserError(f"--split {split}: name a whole split")
    saved, offline = Path(name).is_dir(), None
    datasets = library("datasets", name if saved else f"{name}, a data set of the Hugging Face hub,")
    if not saved:
        say(f"{name}: no such file or directory; asking the Hugging Face hub for a data set of this name")
        try:
            library("huggingface_hub", name).HfApi().dataset_info(name, timeout=5)
        except Exception as error:  # of many kinds
            offline = error
        datasets.config.HF_HUB_OFFLINE = offline is not None  # else load_dataset would try again and again
    try:
        texts = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, name=config, split=split)
    except Exception as error:  # of many kinds, from the network, the hub, Arrow and the file system
        why = f"cannot be loaded ({first_line(offline or error)})"
        raise UserError(f"{name}: {why}; check the name, --split and the connection") from None
    if saved and not isinstance(texts, dict):
        texts = {split if split == "train" else str(texts.split): texts}
    if saved and split not in texts:
        raise UserError(f"--split {split}: {name} has no such split, but {', '.join(texts)}")
    texts = texts[split] if saved else texts
    if missing := [field for field in fields if field not in texts.column_names]:
        raise UserError(f"{name}: has no column {missing[0]}, but {', '.join(texts.column_names)}")
    return texts


class ShardWriter:
    """Writes the tokens of items, such as texts, as `<prefix>_<split>_<number>.bin`, each of shard_tokens tokens but
    the last, and beside them `<prefix>_<split>.progress.json`, by which a run that was stopped goes on:

    "done", "skip"   the shards hold so many items, and of the one after them so many tokens
    "shards"         how many there are

    shard_tokens and vocab_size are each time the same for a prefix. done: items that are not needed any more.
    """

    def __init__(self, prefix: Path, split: str, shard_tokens: int, vocab_size: int) -> None:
        self.prefix, self.split, self.shard_tokens, self.vocab_size = prefix, split, shard_tokens, vocab_size
        self.dtype = token_format(vocab_size)[2]
        self.progress_file = prefix.with_name(f"{prefix.name}_{split}.progress.json")
        progress = json.loads(self.progress_file.read_text("utf-8")) if self.progress_file.exists() else {}
        self.done, self.skip, self.shards = (progress.get(name, 0) for name in ("done", "skip", "shards"))
        self.pending: list[np.ndarray] = []  # tokens that are in no shard yet
        self.pending_size = 0

    def add(self, item: int, tokens: np.ndarray) -> None:
        """Takes the tokens of the next item, all of them; those that a shard holds already are left out."""
        if item < self.done:
            return
        at = self.skip if item == self.done else 0
        while at < tokens.size:
            piece = tokens[at : at + self.shard_tokens - self.pending_size]
            at += piece.size
            self.pending.append(piece)
            self.pending_size += piece.size
            if self.pending_size == self.shard_tokens:
                self._write(*((item, at) if at < tokens.size else (item + 1, 0)))

    def finish(self, items: int) -> None:
        """Writes what is left. items: how many there are in all."""
        if self.pending_size:
            self._write(items, 0)

    def _write(self, done: int, skip: int) -> None:
        tokens = np.concatenate(self.pending)
        path = self.prefix.with_name(f"{self.prefix.name}_{self.split}_{self.shards:06d}.bin")
        write_tokens(path, tokens, self.vocab_size)
        self.pending, self.pending_size = [], 0
        self.done, self.skip, self.shards = done, skip, self.shards + 1
        with replacing(self.progress_file) as file:
            file.write(json.dumps({"done": done, "skip": skip, "shards": self.shards}).encode())
        print(f"{path}: {counted(tokens.size, 'token')}", flush=True)

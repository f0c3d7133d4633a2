"""Large sets of texts: those that Hugging Face has, and how their tokens are written as shards, which may be stopped at
any point and goes on from there."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dev.data.common import library, refuse_to_replace
from device.errors import UserError, counted, first_line, say
from llmc.data.token_file import token_format, write_tokens
from llmc.files.directory import Lock, why

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


def write_shards(texts: Iterable[np.ndarray], prefix: Path, split: str, shard_tokens: int, vocab_size: int) -> None:
    """Writes the tokens of texts as `<prefix>_<split>_<number>.bin`, each of shard_tokens tokens but the last. A shard
    that is there stays, so a run that was stopped goes on at the first that is missing."""
    for number, tokens in enumerate(in_shards(texts, shard_tokens, token_format(vocab_size)[2])):
        path = prefix.with_name(f"{prefix.name}_{split}_{number:06d}.bin")
        if not path.exists():
            write_tokens(path, tokens, vocab_size)
            print(f"{path}: {counted(tokens.size, 'token')}", flush=True)


def in_shards(texts: Iterable[np.ndarray], shard_tokens: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The tokens of texts, so many at a time."""
    held, free = [], shard_tokens
    for text in texts:
        while text.size:
            held.append(text[:free].astype(dtype))
            text, free = text[free:], free - held[-1].size
            if not free:
                yield np.concatenate(held)
                held, free = [], shard_tokens
    if held:
        yield np.concatenate(held)

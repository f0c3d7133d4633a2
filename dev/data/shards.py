"""Large sets of texts, written as shards of tokens: how a shard is written, and the texts that Hugging Face has.

The work is done a shard at a time and can be stopped at any point: beside the shards, a progress file says how much of
the texts they hold, and the next run goes on from there.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dev.data.common import encode_texts, library, load_tokenizer, make_folder, write_vocabulary
from device.errors import UserError, first_line
from llmc.data.dataloader import token_format, write_tokens
from llmc.files.files import replacing
from llmc.run.arguments import Parser, a_path, positive

import numpy as np

TEXTS_AT_ONCE = 1024  # enough to keep all cores busy, few enough to hold


def make_parser(description: str, out: Path) -> argparse.ArgumentParser:
    parser = Parser(description=description)
    parser.add_argument("--shard-tokens", metavar="N", type=positive, default=10**8, help="tokens each (%(default)s)")
    parser.add_argument("--texts", metavar="N", type=positive, help="only the first N texts of a split")
    parser.add_argument("--tokenizer", metavar="FILE", type=a_path, help="a .bin or a tokenizer.json (GPT-2's)")
    parser.add_argument("--out", metavar="PREFIX", type=a_path, default=out, help="(%(default)s)")
    return parser


def load_texts(
    name: str, split: str, config: str | None = None, files: list[str] | None = None, fields: Iterable[str] = ("text",)
) -> Any:
    """A datasets.Dataset with these columns: a split of a dataset on the Hugging Face hub, or of one that datasets
    saved in the folder `name`, or what local files hold.

    files: .parquet or .jsonl (one object a line), read instead of the hub's. Downloads go to that library's cache,
    which goes on with them after an interruption. Raises UserError where the library is not installed or the texts
    cannot be had.
    """
    if "[" in split:
        raise UserError(f"--split {split}: name a whole split")
    saved = Path(name).is_dir()
    datasets = library("datasets", name if saved else f"{name}, a data set of the Hugging Face hub,")
    try:
        if files is not None:
            name = files[0]
            reader = "parquet" if name.endswith(".parquet") else "json"
            texts = datasets.load_dataset(reader, data_files=files, split="train")
        else:
            texts = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, name=config, split=split)
            texts = texts[split] if isinstance(texts, dict) else texts
    except Exception as error:  # of many kinds, from the network, the hub, Arrow and the file system
        why = f"cannot be loaded ({first_line(error)})"
        raise UserError(f"{name}: {why}; check the name, the connection or the files") from None
    if missing := [field for field in fields if field not in texts.column_names]:
        raise UserError(f"{name}: has no column {missing[0]}, but {', '.join(texts.column_names)}")
    return texts


def write_shards(texts: Any, args: argparse.Namespace, split: str, first_split: str | None = None) -> None:
    """Tokenizes texts into shards of args.shard_tokens tokens.

    texts: has a length, and a slice of it has a list of strings under "text". Before each text goes the token
    that begins one. first_split: what shard number 0 is for, where that is not `split`. Goes on where a run that was
    stopped left off. Raises UserError where that run had other settings.
    """
    tokenizer = load_tokenizer(args.tokenizer)
    num_texts = min(len(texts), args.texts or len(texts))
    settings = {"texts": num_texts, "shard_tokens": args.shard_tokens, "vocabulary": tokenizer.vocab_size}
    make_folder(args.out.parent)
    writer = ShardWriter(args.out, split, settings, first_split)
    if writer.done == num_texts:
        print(f"{writer.progress_file}: all {num_texts:,} texts are done already")
        return
    write_vocabulary(args.out, tokenizer, args.tokenizer)
    with library("tqdm", "this").tqdm(total=num_texts, initial=writer.done, unit=" texts", mininterval=1) as bar:
        for start in range(writer.done, num_texts, TEXTS_AT_ONCE):
            batch = texts[start : min(start + TEXTS_AT_ONCE, num_texts)]["text"]
            for i, ids in enumerate(encode_texts(tokenizer, batch), start):
                writer.add(i, np.array(ids, writer.dtype))
            bar.update(len(batch))
    writer.finish(num_texts)


class ShardWriter:
    """Writes the tokens of items, such as texts, as `<prefix>_<split>_<number>.bin`, each of "shard_tokens" tokens but
    the last, and beside them `<prefix>_<split>.progress.json`, by which a run that was stopped goes on:

    "done", "skip"   the shards hold so many items, and of the one after them so many tokens
    "shards"         how many there are
    and the settings, among them "shard_tokens" and "vocabulary", the number of tokens in it

    first_split: what shard number 0 is for, where that is not `split`. done: items that are not needed any more.
    Raises UserError where the progress is of other settings.
    """

    def __init__(self, prefix: Path, split: str, settings: dict[str, int], first_split: str | None = None) -> None:
        self.prefix, self.split, self.first_split, self.settings = prefix, split, first_split or split, settings
        self.dtype = token_format(settings["vocabulary"])[2]
        self.progress_file = prefix.with_name(f"{prefix.name}_{split}.progress.json")
        self.done, self.skip, self.shards = _read_progress(self.progress_file, settings)
        self.pending: list[np.ndarray] = []  # tokens that are in no shard yet
        self.pending_size = 0

    def add(self, item: int, tokens: np.ndarray) -> None:
        """Takes the tokens of the next item, all of them; those that a shard holds already are left out."""
        if item < self.done:
            return
        at = self.skip if item == self.done else 0
        while at < tokens.size:
            piece = tokens[at : at + self.settings["shard_tokens"] - self.pending_size]
            at += piece.size
            self.pending.append(piece)
            self.pending_size += piece.size
            if self.pending_size == self.settings["shard_tokens"]:
                self._write(*((item, at) if at < tokens.size else (item + 1, 0)))

    def finish(self, items: int) -> None:
        """Writes what is left. items: how many there are in all."""
        if self.pending_size:
            self._write(items, 0)

    def _write(self, done: int, skip: int) -> None:
        tokens = np.concatenate(self.pending)
        name = self.first_split if self.shards == 0 else self.split
        path = self.prefix.with_name(f"{self.prefix.name}_{name}_{self.shards:06d}.bin")
        write_tokens(path, tokens, self.settings["vocabulary"])
        self.pending, self.pending_size = [], 0
        self.done, self.skip, self.shards = done, skip, self.shards + 1
        with replacing(self.progress_file) as file:
            progress = {"done": done, "skip": skip, "shards": self.shards}
            file.write(json.dumps(self.settings | progress).encode())
        print(f"{path}: {tokens.size:,} tokens", flush=True)


def _read_progress(path: Path, settings: dict[str, int]) -> tuple[int, int, int]:
    """Texts done, tokens done of the one after them, shards written."""
    try:
        progress = json.loads(path.read_text())
        for name, value in settings.items():
            if progress[name] != value:
                raise UserError(
                    f"{path}: begun with {name} {progress[name]}, now {value}; "
                    "use the same settings or another --out, or remove that file to begin anew"
                )
        return progress["done"], progress["skip"], progress["shards"]
    except FileNotFoundError:
        return 0, 0, 0
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise UserError(f"{path}: damaged; remove it to begin anew") from None

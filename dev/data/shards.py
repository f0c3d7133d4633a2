"""Large sets of texts from Hugging Face, written as shards of tokens.

The work is done a shard at a time and can be stopped at any point: beside the shards, a progress file says how much of
the texts they hold, and the next run goes on from there.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from common import encode_texts, load_tokenizer, make_folder, write_vocabulary
from tqdm import tqdm

from llmc.arguments import Parser, positive
from llmc.dataloader import token_format, write_tokens
from llmc.errors import UserError
from llmc.files import replacing

TEXTS_AT_ONCE = 1024  # enough to keep all cores busy, few enough to hold


def make_parser(description: str, out: Path) -> argparse.ArgumentParser:
    parser = Parser(description=description)
    parser.add_argument("--shard-tokens", metavar="N", type=positive, default=10**8, help="in a shard (%(default)s)")
    parser.add_argument("--texts", metavar="N", type=positive, help="only the first N texts of a split")
    parser.add_argument("--tokenizer", metavar="FILE", type=Path, help="a .bin or a tokenizer.json (default: GPT-2's)")
    parser.add_argument("--out", metavar="PREFIX", type=Path, default=out, help="(%(default)s)")
    return parser


def load_texts(name: str, split: str, config: str | None = None, files: list[str] | None = None) -> Any:
    """A datasets.Dataset with a column "text": a split of a dataset on the Hugging Face hub, or what local files hold.

    files: .parquet or .jsonl (one object a line), read instead of the hub's. Downloads go to that library's cache,
    which goes on with them after an interruption. Raises UserError where the library is not installed or the texts
    cannot be had.
    """
    try:
        import datasets
    except ImportError:
        raise UserError("this needs Hugging Face's datasets library; install it with: pip install datasets") from None
    try:
        if files is None:
            texts = datasets.load_dataset(name, name=config, split=split)
        else:
            name = files[0]
            reader = "parquet" if name.endswith(".parquet") else "json"
            texts = datasets.load_dataset(reader, data_files=files, split="train")
    except Exception as error:  # of many kinds, from the network, the hub, Arrow and the file system
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{name}: cannot be loaded ({reason[0]}); check the connection or the files") from error
    if "text" not in texts.column_names:
        raise UserError(f"{name}: has no column text, but {', '.join(texts.column_names)}")
    return texts


def write_shards(texts: Any, args: argparse.Namespace, split: str, first_split: str | None = None) -> None:
    """Tokenizes texts into `<prefix>_<split>_<number>.bin`, each of args.shard_tokens tokens but the last.

    texts: has a length, and a slice of it has a list of strings under "text". Before each text goes the token
    that begins one. first_split: what shard number 0 is for, where that is not `split`. Goes on where a run that was
    stopped left off. Raises UserError where that run had other settings.
    """
    tokenizer = load_tokenizer(args.tokenizer)
    _, _, dtype = token_format(tokenizer.vocab_size)
    num_texts = min(len(texts), args.texts or len(texts))
    settings = {"texts": num_texts, "shard_tokens": args.shard_tokens, "vocabulary": tokenizer.vocab_size}
    make_folder(args.out.parent)
    progress_file = args.out.with_name(f"{args.out.name}_{split}.progress.json")
    done, skip, shard = _read_progress(progress_file, settings)
    if done == num_texts:
        print(f"{progress_file}: all {num_texts:,} texts are done already")
        return
    write_vocabulary(args.out, tokenizer)

    def write_shard(tokens: np.ndarray, done: int, skip: int) -> None:
        name = first_split if first_split and shard == 0 else split
        path = args.out.with_name(f"{args.out.name}_{name}_{shard:06d}.bin")
        write_tokens(path, tokens, tokenizer.vocab_size)
        with replacing(progress_file) as file:
            file.write(json.dumps(settings | {"done": done, "skip": skip, "shards": shard + 1}).encode())
        tqdm.write(f"{path}: {tokens.size:,} tokens")

    pending: list[np.ndarray] = []  # tokens that are in no shard yet
    pending_size = 0
    with tqdm(total=num_texts, initial=done, unit=" texts", mininterval=1) as bar:
        for start in range(done, num_texts, TEXTS_AT_ONCE):
            batch = texts[start : min(start + TEXTS_AT_ONCE, num_texts)]["text"]
            for i, ids in enumerate(encode_texts(tokenizer, batch), start):
                tokens = np.array(ids, dtype)[skip:]
                skip = 0
                pending.append(tokens)
                pending_size += tokens.size
                while pending_size >= args.shard_tokens:
                    joined = np.concatenate(pending)
                    rest = joined[args.shard_tokens :].copy()  # all of it from text i
                    in_shard = len(ids) - rest.size
                    write_shard(joined[: args.shard_tokens], *((i, in_shard) if rest.size else (i + 1, 0)))
                    shard += 1
                    pending, pending_size = [rest], rest.size
            bar.update(len(batch))
    if pending_size:
        write_shard(np.concatenate(pending), num_texts, 0)


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

"""Your own text as a dataset: files, folders or a data set of the Hugging Face hub, to shards of tokens.

    python dev/data/text.py my_texts -o data/mine --train-tokenizer 16384

Writes data/mine_{train,val}_<number>.bin, data/mine_tokenizer.bin, data/mine_tokenizer.json if the tokenizer has one,
and data/mine_summary.json. Of equal texts one stays. A hash of each text decides whether it is for validation.

Hugging Face's datasets keeps texts and tokens in data/mine_work, and goes on from there after a stop. All files are
moved from there when they are complete. Without datasets, the memory holds plain text that --tokenizer bytes encodes.
"""

import argparse
import csv
import ctypes
import glob
import hashlib
import json
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from
os.environ.setdefault("TQDM_MININTERVAL", "2")

from dev.data import common
from dev.data.shards import ShardWriter, load_texts, open_work, remove_work
from device.errors import UserError, first_line
from llmc.data.find_tokenizer import open_tokenizer
from llmc.data.hf_tokenizer import MAX_VOCAB_SIZE, without_surrogates
from llmc.data.tokenizer import END_OF_TEXT, Tokenizer
from llmc.files.files import file_size, replacing
from llmc.run.arguments import Parser, a_path, limited, number, positive, whole_number

import numpy as np

KINDS = {
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".jsonl": "lines", ".ndjson": "lines",
    ".json": "list", ".csv": ",", ".tsv": "\t", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
LEAST = 4096               # tokens for validation, or a tenth of all
LEARNED = 1 << 30          # bytes of text that a vocabulary is learned from, at most, about
MAX_CHARACTERS = 400_000  # in a document: what tiktoken is sure to split, even if all of it is white space

File = tuple[str, str, int, int]  # path, kind, size in bytes, time of the last change in ns
share = limited(number, ((lambda x: 0 < x < 1), "be above 0 and below 1"))
characters = limited(whole_number, ((lambda n: 100 <= n <= MAX_CHARACTERS), f"be from 100 to {MAX_CHARACTERS}"))
vocabulary = limited(whole_number, ((lambda n: 257 <= n < MAX_VOCAB_SIZE), f"be from 257 to {MAX_VOCAB_SIZE - 1}"))


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description="Make a dataset of files and folders of text.")
    add = parser.add_argument
    add("paths", metavar="PATH", nargs="+", help=f"a file or folder of {' '.join(KINDS)}, also packed as"
        f" {' '.join(common.PACKED)}; what datasets saved; OWNER/NAME[:CONFIG] of the Hugging Face hub")  # fmt: skip
    add("-o", "--out", metavar="PREFIX", type=a_path, required=True, help="such as data/mine")
    tokenizers = parser.add_mutually_exclusive_group()
    tokenizers.add_argument("--tokenizer", metavar="NAME|FILE", default="gpt2", help="or bytes, .json, .bin (gpt2)")
    tokenizers.add_argument("--train-tokenizer", metavar="N", type=vocabulary, help="learn N tokens from the text")
    add("--special-tokens", action="store_true", help="encode the names of special tokens as these tokens (as text)")
    add("--field", metavar="NAME", nargs="+", default=["text"], help="the text in records; several are joined (text)")
    add("--suffix", metavar=".X", nargs="+", default=[], help="read such files as text, too; none: without a suffix")
    add("--encoding", metavar="NAME", default="utf-8", help="of all files (%(default)s)")
    add("--split", metavar="NAME", default="train", help="of a data set that has several (%(default)s)")
    add("--val", metavar="F", type=share, default=0.01, help="share of the documents for validation (%(default)s)")
    add("--longest", metavar="N", type=characters, help="of a document, else it is cut (100000; of little text a 50th)")
    add("--shard-tokens", metavar="N", type=positive, default=10**8, help="tokens each (%(default)s)")
    add("--workers", metavar="N", type=positive, default=len(os.sched_getaffinity(0)), help="processes (%(default)s)")
    return parser


def suffix_of(path: str) -> tuple[str, str]:
    """The suffix of a file's name, or "none", and the one that says how it is packed, or ""."""
    stem, last = os.path.splitext(path.lower())
    return (os.path.splitext(stem)[1] or "none", last) if last in common.PACKED else (last or "none", "")


def find_files(args: argparse.Namespace, skipped: Counter) -> list[File]:
    """The files that args.paths stand for, those of a folder in the order of their names, without hidden ones. Counts
    the suffixes of files that are skipped. Raises UserError for what is not there or no file."""
    kinds, found, files = KINDS | {suffix.lower(): "text" for suffix in args.suffix}, [], []

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: {error.strerror.lower()}") from None

    for path in args.paths:
        saved = any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))
        if saved or (not os.path.lexists(path) and re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", path)):
            name, _, config = (path, "", "") if saved else path.partition(":")
            rows = load_texts(name, args.split, config or None, fields=args.field)
            found += [(file["filename"], "arrow") for file in rows.cache_files]
        elif os.path.isdir(path):
            for folder, folders, names in os.walk(path, onerror=refuse):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                names += [name for name in folders if os.path.islink(os.path.join(folder, name))]
                found += [(os.path.join(folder, name), None) for name in sorted(names) if not name.startswith(".")]
        elif suffix_of(path)[0] not in kinds and os.path.isfile(path):
            raise UserError(f"{path}: what is in it? --suffix {suffix_of(path)[0]} reads such files as text")
        else:
            found.append((path, kinds.get(suffix_of(path)[0], "text")))
    for path, kind in found:
        if not (kind := kind or kinds.get(suffix_of(path)[0])) or (os.path.islink(path) and os.path.isdir(path)):
            skipped["".join(suffix_of(path))] += 1
        else:
            files.append((path, kind, file_size(path, "name files and folders of text"), os.stat(path).st_mtime_ns))
    return files


def records_of(path: str, kind: str, fields: tuple[str, ...], blocks: Callable[[], Iterator[str]]) -> Iterator[Any]:
    """The records of a file. Raises what Python's modules and datasets do where it is damaged."""
    if kind in ("parquet", "arrow"):
        datasets = common.library("datasets", path)
        rows = datasets.load_dataset(kind, data_files=glob.escape(path), split="train", streaming=True)
        check_fields(path, fields, rows.column_names)
        yield from rows.select_columns(list(fields))
    elif kind in (",", "\t"):
        csv.field_size_limit(common.LONGEST)
        for record in csv.DictReader(common.lines_of(path, blocks()), delimiter=kind, strict=True):
            if None in record or None in record.values():
                raise ValueError("not as many fields as the first line names")
            yield record
    elif kind == "list" and next(filter(None, map(str.lstrip, blocks())), "")[:1] == "[":
        yield from json.loads(common.bounded(path, blocks()))
    else:
        yield from map(json.loads, filter(str.strip, common.lines_of(path, blocks())))


def check_fields(path: str, fields: tuple[str, ...], names: Iterable[str]) -> None:
    if missing := [name for name in fields if name not in names]:
        raise UserError(f"{path}: no field {missing[0]}, but {', '.join(map(str, names))}: name one with --field")


def texts_of(path: str, kind: str, fields: tuple[str, ...], encoding: str) -> Iterator[Iterable[str]]:
    """The texts in a file, each in blocks. Raises UserError where a record has none."""
    blocks = partial(common.blocks_of, path, encoding, "name the encoding of all files with --encoding")
    if kind == "text":
        yield blocks()
        return
    names, done = {}, 0  # the fields that records have, in order; records
    try:
        for record in records_of(path, kind, fields, blocks):
            record = {fields[0]: record} if isinstance(record, str) else dict(record)
            names |= dict.fromkeys(record)
            text = "\n\n".join(record[name] for name in fields if record.get(name) not in (None, ""))
            yield [without_surrogates(text).replace("\r\n", "\n").replace("\r", "\n")]
            done += 1
    except UserError:
        raise
    except Exception as error:  # of many kinds, also where a record is no object or a field no text
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{path}, record {done + 1}: no text in {' or '.join(fields)} ({why})") from None
    if done:
        check_fields(path, fields, names)
    else:
        yield [""]  # one blank text


def cut(blocks: Iterable[str], longest: int) -> Iterator[str]:
    """A text in parts of at most `longest` characters. A part ends after its last empty line, else after its last line
    or word, however the text comes in blocks."""
    text = ""
    for block in blocks:
        text, start = text + block, 0
        while len(text) - start > longest:
            found = ((text.rfind(mark, start + longest // 2, start + longest), mark) for mark in ("\n\n", "\n", " "))
            end = next((at + len(mark) for at, mark in found if at > 0), start + longest)
            yield text[start:end]
            start = end
        text = text[start:]
    yield text


def documents(files: list[File], fields: tuple[str, ...], encoding: str, longest: int) -> Iterator[dict[str, Any]]:
    """All documents, their bytes of UTF-8 (0 if blank), and their hashes: 16 bytes of BLAKE2b."""
    for path, kind, *_ in files:
        for text in (text for blocks in texts_of(path, kind, fields, encoding) for text in cut(blocks, longest)):
            data = text.encode()
            high, low = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), "<i8").tolist()
            yield {"text": text, "high": high, "low": low, "bytes": len(data) if text.strip() else 0}


def read(args: argparse.Namespace, files: list[File], work: Path) -> Any:
    """All documents: a datasets.Dataset, or its columns if that library is neither needed nor there."""
    longest = args.longest or min(100_000, max(1000, sum(size for _, _, size, _ in files) // 50))
    what = {"files": files, "fields": tuple(args.field), "encoding": args.encoding, "longest": longest}
    try:
        datasets = common.library("datasets", "all but plain text with --tokenizer bytes")
    except UserError:
        if args.tokenizer != "bytes" or args.train_tokenizer or {kind for _, kind, *_ in files} != {"text"}:
            raise
        rows = list(documents(**what))
        return {name: [row[name] for row in rows] for name in rows[0]}
    datasets.utils.logging.set_verbosity_error()
    kinds = {"text": datasets.Value("string")} | dict.fromkeys(("high", "low", "bytes"), datasets.Value("int64"))
    return datasets.Dataset.from_generator(
        documents, datasets.Features(kinds), str(work), gen_kwargs=what, num_proc=min(args.workers, len(files)),
        fingerprint=work.name,
    )  # fmt: skip


def for_validation(hashes: np.ndarray, sizes: np.ndarray, share: float, least: int) -> np.ndarray:
    """The documents with the lowest hashes, bool (N,): a share of all, and more until they have `least` or a tenth of
    the sizes. Never the last one."""
    order = np.argsort(hashes)
    before = np.cumsum(sizes[order]) - sizes[order]
    result = np.zeros(len(order), bool)
    result[order] = (hashes[order] < np.uint64(share * 2**64)) | (before < min(least, sizes.sum() / 10))
    result[order[-1]] = False
    return result


def learn(size: int, rows: Any) -> str:
    """A tokenizer.json: byte-level BPE as GPT-2's (Radford et al., 2019), learned from texts. Raises UserError if too
    few pairs occur twice."""
    tokenizers = common.library("tokenizers", "--train-tokenizer")
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=[END_OF_TEXT], max_token_length=255,
        initial_alphabet=learned.pre_tokenizer.alphabet(), show_progress=sys.stderr.isatty(),
    )  # fmt: skip
    learned.train_from_iterator((batch["text"] for batch in rows.iter(100)), trainer)
    if (found := learned.get_vocab_size()) < size:
        raise UserError(f"--train-tokenizer {size}: pairs that occur twice are enough for {found} tokens: lower it")
    return learned.to_str(pretty=True)


@lru_cache(1)
def tokenizer_at(path: str) -> tuple[Tokenizer, re.Pattern]:
    """A tokenizer, and a pattern for the names of its special tokens."""
    tokenizer = open_tokenizer(path)
    return tokenizer, re.compile("|".join(re.escape(tokenizer.tokens[id].decode()) for id in sorted(tokenizer.special)))


def encode(batch: dict[str, list], path: str, special: bool) -> dict[str, list]:
    """The tokens of texts, how many they are, and the first name of a special token in each text, or ""."""
    tokenizer, names = tokenizer_at(path)
    ids = [np.array(tokens, np.uint32) for tokens in common.encode_texts(tokenizer, batch["text"], 1, special)]
    return {"ids": ids, "count": list(map(len, ids)), "special": [(names.search(t) or [""])[0] for t in batch["text"]]}


def encode_all(rows: Any, kept: np.ndarray, workers: int, work: Path, **how: Any) -> Any:
    """The tokens of some documents, as `read` returns documents."""
    if isinstance(rows, dict):
        return encode({"text": [rows["text"][i] for i in kept]}, **how)
    processes = min(workers, len(kept))
    return rows.select(kept).map(
        encode, batched=True, batch_size=100, remove_columns=rows.column_names, fn_kwargs=how, desc="encoding",
        num_proc=processes if processes > 1 else None,  # for 1 it would fork, for None it works here
        new_fingerprint=f"{work.name}_tokens",
    )  # fmt: skip


def tokens_of(done: Any, which: np.ndarray) -> Iterator[np.ndarray]:
    if isinstance(done, dict):
        return (done["ids"][i] for i in which)
    return (ids for batch in done.select(which).with_format("numpy", columns=["ids"]).iter(100) for ids in batch["ids"])


def make(args: argparse.Namespace, files: list[File], given: Tokenizer | None, prefix: Path) -> dict[str, Any]:
    """Makes `prefix`_*, the files of the dataset. Returns the summary. Raises UserError if there is too little text."""
    rows = read(args, files, prefix.parent)
    high, low, sizes = (np.array(rows[name][:], np.int64).view(np.uint64) for name in ("high", "low", "bytes"))
    order = np.lexsort((low, high))  # equal ones stay in the order of the documents
    again = np.zeros(len(order), bool)
    again[order[1:]] = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
    kept = np.flatnonzero(~again & (sizes > 0))
    summary: dict[str, Any] = {"duplicates": int((again & (sizes > 0)).sum()), "blank": int((sizes == 0).sum())}
    if len(kept) < 2:
        raise UserError(f"{args.paths[0]}: too little text: {len(kept)} documents ({summary}); add text")
    high, sizes = high[kept], sizes[kept]
    source, binary = (prefix.with_name(f"{prefix.name}_tokenizer.{suffix}") for suffix in ("json", "bin"))
    if not binary.is_file():  # it is written last
        if given is None:
            some = (high < 2.0**64 * LEARNED / sizes.sum()) & ~for_validation(high, sizes, args.val, 16 * LEAST)
            with replacing(source) as file:
                file.write(learn(args.train_tokenizer, rows.select(kept[some])).encode())
        common.write_vocabulary(prefix, given or open_tokenizer(source), Path(args.tokenizer))
    path = str(source if source.is_file() else binary)
    done = encode_all(rows, kept, args.workers, prefix.parent, path=path, special=args.special_tokens)
    tokens, vocab_size = np.array(done["count"][:]), tokenizer_at(path)[0].vocab_size
    val = for_validation(high, tokens, args.val, LEAST)
    for split, which in ("train", np.flatnonzero(~val)), ("val", np.flatnonzero(val)):
        writer = ShardWriter(prefix, split, args.shard_tokens, vocab_size)
        for item, ids in enumerate(tokens_of(done, which)):
            writer.add(item, ids.astype(writer.dtype))
        writer.finish(len(which))
        for name, of in ("documents", np.ones_like(sizes)), ("bytes", sizes), ("tokens", tokens):
            summary.setdefault(name, {})[split] = int(of[which].sum())
    return summary | {"vocabulary": vocab_size, "special tokens": Counter(filter(None, done["special"][:]))}


def main() -> None:
    args, skipped = make_parser().parse_args(), Counter()
    out, work, end = args.out, args.out.with_name(f"{args.out.name}_work"), f"{args.out.name}_summary.json"
    if out.is_dir() or not out.name:
        raise UserError(f"-o {out}: must be a prefix of file names, such as data/mine")
    files = find_files(args, skipped)
    if not files:
        raise UserError(f"{args.paths[0]}: no text there; skipped {dict(skipped)}: --suffix .x reads files as text")
    given = None if args.train_tokenizer else common.load_tokenizer(args.tokenizer)
    lock = open_work(work)
    options = {name: value for name, value in vars(args).items() if name not in ("workers", "out")}
    known = [Path(name).read_bytes() for name in (__file__, args.tokenizer) if os.path.isfile(name)]
    about = hashlib.sha256(b"".join([json.dumps([options, files]).encode(), *known])).hexdigest()
    prefix = work / about[:16] / out.name
    if not prefix.with_name(end).is_file():
        name, ends = glob.escape(out.name), ("train*.bin", "val*.bin", "tokenizer.*")
        for path in (path for end in ends for path in out.parent.glob(f"{name}_{end}")):
            if path.absolute().with_suffix("") != Path(args.tokenizer).absolute().with_suffix(""):
                raise UserError(f"{path} belongs to another dataset: choose another -o, or remove it")
        prefix.parent.mkdir(exist_ok=True)
        try:
            summary = make(args, files, given, prefix) | {"skipped": dict(sorted(skipped.items())), "options": options}
        except Exception as error:  # datasets' are of many kinds
            cause = error.__cause__ or error
            kind, why = type(cause).__name__, first_line(cause)
            if kind == "RemoteTraceback":  # of another process: a text
                kind, why = re.findall(r"(?m)^(?:\w+\.)*(\w+): (.+)", str(cause))[0]
            if kind not in ("UserError", "Unsuitable"):
                raise UserError(f"{work}: {why}; the same command goes on from there") from None
            remove_work(work)
            raise UserError(why) from None
        with replacing(prefix.with_name(end)) as file:
            file.write(json.dumps(summary, indent=1).encode())
    for path in sorted(prefix.parent.glob(f"{glob.escape(out.name)}_*"), key=lambda path: (path.name == end, path)):
        if path.suffix in (".bin", ".json") and ".progress." not in path.name:
            os.replace(path, out.with_name(path.name))
    remove_work(work)
    lock.release()
    for name, of in (summary := json.loads(out.with_name(end).read_text())).items():
        print(f"{name:14} {', '.join(f'{key} {n}' for key, n in of.items()) if isinstance(of, dict) else of}")
    if summary["special tokens"] and not args.special_tokens:
        print("These names of special tokens are encoded as text: --special-tokens encodes them as the tokens.")
    flags = f"-e d6 -b 4 -t {min(256, 1 << (summary['tokens']['val'] // 5).bit_length() >> 1)} -x 1000"
    print(f"\n    python train_gpt2_fp32.py -i {shlex.quote(str(out))} {flags}")


if __name__ == "__main__":
    # A stop may come at any time. All processes end with this one (PR_SET_PDEATHSIG), and Ctrl-C is for it alone.
    kill = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)
    os.register_at_fork(after_in_child=lambda: (signal.signal(signal.SIGINT, signal.SIG_IGN), kill()))
    said = b"\ninterrupted; run the same command again to go on\n"
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, said), os._exit(1)))
    common.run(main)

"""Your own text as a dataset: files and folders, in any language, to shards of tokens and the tokenizer for them.

    python dev/data/text.py my_texts -o data/mine --train-tokenizer 16384

Reads what documents.py reads. Writes data/mine_{train,val}_<number>.bin, data/mine_tokenizer.bin, where the tokenizer
has one data/mine_tokenizer.json, and data/mine_summary.json; at the end it says how to train on them.

Documents of the same text are one. Which of them are for validation is decided by a hash of each text alone, so that
texts that are added later move none across. The work is done in stages:

    read      every document is hashed: 16 bytes of BLAKE2b, its length
    sort out  the hashes are compared, those of a range at a time, and each document gets its place: train, val, or none
    learn     with --train-tokenizer, a vocabulary is learned from the training documents
    encode    the documents are read again and encoded, into shards

In data/mine_work lies what has been done, by which a run that was stopped goes on. All files are moved from there when
they are complete; until then there is no data/mine_train_000000.bin that could be taken for the whole.

The memory that this takes does not grow with the texts, but with the number of files, whose names it holds. It has
UNIT bytes of text in each process, a shard, and COMPARED hashes; for learning, the different words of LEARNED bytes of
text, which are drawn by hash where there is more. The output is the same for any number of processes.
"""

import argparse
import codecs
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

from dev.data.common import Unsuitable, changes_of, encode_texts, make_folder, run, write_vocabulary
from dev.data.documents import (
    BLOCK,
    EXAMPLES,
    File,
    Notes,
    Part,
    find_files,
    listed,
    optional,
    read_documents,
    units_of,
)
from dev.data.recommend import LEAST_TOKENS, recommend
from dev.data.shards import ShardWriter
from device.errors import UserError
from llmc.data.dataloader import open_tokens, token_format
from llmc.data.tokenizer import END_OF_TEXT, MOST_TOKENS, NEIGHBOURS, Tokenizer, byte_tokenizer, gpt2_tokenizer
from llmc.files.checkpoint import check_saved
from llmc.files.files import replacing
from llmc.run.arguments import Parser, a_path, limited, number, positive, whole_number

import numpy as np
from tqdm import tqdm

NOWHERE, TRAIN, VAL = 0, 1, 2  # a document's place; nowhere is for what another has been before
SPLITS = {"train": TRAIN, "val": VAL}  # in the order in which they are published: without val, nothing is trained
TRIED = (                      # --val and --longest, unless they are given: the first that leave enough to both splits
    (0.01, 100_000), (0.01, 10_000), (0.01, 1_000), (0.1, 1_000), (0.1, 100),
)  # fmt: skip
DEFAULTS = dict(zip(("val", "longest"), TRIED[0], strict=True))
ENOUGH = 8 * LEAST_TOKENS      # bytes of text, for a split to have LEAST_TOKENS, about
COMPARED = 1 << 23             # hashes at a time
LEARNED = 1 << 30              # bytes of text that a vocabulary is learned from, at most, about
ENCODED = 16                   # documents at a time
LONGEST_TOKEN = 255            # bytes, as a tokenizer .bin has it
MOST_CHARACTERS = 400_000      # in a document: what tiktoken is sure to split, even where all of it is white space


share = limited(number, ((lambda x: 0 < x < 1), "be above 0 and below 1"))


def within(low: int, high: int) -> Callable[[str], int]:
    """A type of flag: a whole number from low to high."""
    return limited(whole_number, ((lambda n: low <= n <= high), f"be from {low} to {high}"))


def encoding_name(text: str) -> str:
    """A type of flag: the name of an encoding of text."""
    try:
        "".encode(text)  # which refuses what Python calls a codec but is for something else than text
        return codecs.lookup(text).name
    except (LookupError, UnicodeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text} is no encoding that Python knows") from None


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description="Make a dataset of files and folders of text.")
    add = parser.add_argument
    what = "a file, or a folder of .parquet, .txt, .md, .rst, .html, .jsonl and text without a suffix, also as .gz"
    add("paths", metavar="PATH", nargs="+", help=what)
    add("-o", "--out", metavar="PREFIX", type=a_path, required=True, help="such as data/mine")
    tokenizers = parser.add_mutually_exclusive_group()
    what = "gpt2, bytes, or a tokenizer.json or .bin (gpt2)"
    tokenizers.add_argument("--tokenizer", metavar="NAME|FILE", default="gpt2", help=what)
    what = "learn a vocabulary of N tokens from the text: the bytes, the end-of-text token, and the learned ones"
    size = within(257, MOST_TOKENS - 1)
    tokenizers.add_argument("--train-tokenizer", metavar="N", type=size, help=what)
    add("--field", metavar="NAME", default="text", help="where .jsonl and .parquet have the text (%(default)s)")
    what = "encoding of .txt and .html that are not UTF-8, such as cp1251 (guessed for each)"
    add("--encoding", metavar="NAME", type=encoding_name, help=what)
    (val, longest), (most, least) = TRIED[0], TRIED[-1]
    what = f"share of the documents for validation ({val}; up to {most} if there is little text)"
    add("--val", metavar="F", type=share, help=what)
    what = f"characters; a longer document is cut at empty lines ({longest}; down to {least} if there is little text)"
    add("--longest", metavar="N", type=within(100, MOST_CHARACTERS), help=what)
    add("--shard-tokens", metavar="N", type=positive, default=10**8, help="tokens each (%(default)s)")
    add("--workers", metavar="N", type=positive, default=len(os.sched_getaffinity(0)), help="processes (%(default)s)")
    return parser


# The stages' work on one unit, in whatever process


def hash_unit(
    parts: list[Part], field: str, longest: int, encoding: str | None
) -> tuple[np.ndarray, np.ndarray, Notes]:
    """Of each document in a unit the hash, uint64 (N, 2), and the numbers of characters and of bytes in UTF-8, int64
    (N, 2); and what is to be said of its files."""
    hashes, lengths, notes = bytearray(), array("q"), Notes()
    for text in read_documents(parts, field, longest, notes, encoding):
        data = text.encode()
        hashes += hashlib.blake2b(data, digest_size=16).digest()
        lengths.extend((len(text), len(data)))
    return np.frombuffer(hashes, "<u8").reshape(-1, 2), np.array(lengths).reshape(-1, 2), notes


def texts_of_unit(
    parts: list[Part], field: str, longest: int, encoding: str | None, places: np.ndarray
) -> Iterator[tuple[str, int]]:
    """The documents of a unit with their places, without those that have none. Raises UserError where it does not hold
    as many documents any more as it did."""
    found = 0
    for found, text in enumerate(read_documents(parts, field, longest, Notes(), encoding), 1):
        if found <= places.size and places[found - 1] != NOWHERE:
            yield text, int(places[found - 1])
    if found != places.size:
        raise UserError(f"{parts[0].path} or a file after it has changed meanwhile; run this again with another -o")


def encode_unit(
    parts: list[Part], field: str, longest: int, encoding: str | None, places: np.ndarray, tokenizer: Path,
    out: dict[int, Path],
) -> None:  # fmt: skip
    """Writes the tokens of a unit's documents, by their place, to the files `out`: nothing but tokens, of the type that
    the vocabulary has. Raises Unsuitable where they do not spell the documents."""
    encoder = load_tokenizer(tokenizer)
    dtype = token_format(encoder.vocab_size)[2]
    threads = 1 if multiprocessing.parent_process() else None
    try:
        with ExitStack() as stack:
            files = {place: stack.enter_context(open(path, "wb")) for place, path in out.items()}
            texts = (item for item in texts_of_unit(parts, field, longest, encoding, places) if item[1] in files)
            while batch := list(islice(texts, ENCODED)):
                tokens = encode_texts(encoder, [text for text, _ in batch], threads)
                for (_, place), ids in zip(batch, tokens, strict=True):
                    files[place].write(np.array(ids, dtype).tobytes())
    except OSError as error:
        where = error.filename or tokenizer.parent
        raise UserError(f"{where}: cannot be written ({str(error.strerror).lower()})") from None


@lru_cache(1)
def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


def start_worker() -> None:
    """Prepares a process, which is to end where the main one does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def in_order(workers: int, work: Callable, jobs: Iterable[tuple]) -> Iterator[Any]:
    """What work(*job) returns for each job, in order, done by so many processes; few results wait at a time."""
    if workers == 1:
        yield from (work(*job) for job in jobs)
        return
    waiting: deque = deque()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker) as pool:
        try:
            for job in jobs:
                before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which processes inherit: Ctrl-C is not for them
                waiting.append(pool.submit(work, *job))
                signal.signal(signal.SIGINT, before)
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            why = "a process was killed, perhaps for want of memory"
            raise UserError(f"{why}: run the same command again, with fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


# The stages


class Job:
    """A dataset that is being made in the folder `work`, of units that are read in order, with the share `val` of the
    documents for validation and none of them longer than `longest`."""

    def __init__(
        self, args: argparse.Namespace, units: list[list[Part]], work: Path, val: float, longest: int
    ) -> None:
        self.args, self.units, self.work, self.val = args, units, work, val
        self.prefix = work / args.out.name
        self.workers = max(1, min(args.workers, len(units)))
        self.reading = args.field, longest, args.encoding
        self.sizes = [sum(part.size for part in unit) for unit in units]
        self.read_files = [work / f"read_{longest}" / f"{number:06d}.npz" for number in range(len(units))]

    def progress(self, what: str, done: int = 0) -> tqdm:
        """A bar for the bytes of all units, of which the first `done` are done."""
        total, initial = sum(self.sizes), sum(self.sizes[:done])
        return tqdm(total=total, initial=initial, unit="B", unit_scale=True, desc=what, mininterval=1, delay=1)

    def read(self) -> None:
        """Hashes all documents, into a file for each unit."""
        make_folder(self.work / f"read_{self.reading[1]}")
        done = sum(file.is_file() for file in self.read_files)  # which are written in order
        results = in_order(self.workers, hash_unit, ((unit, *self.reading) for unit in self.units[done:]))
        with self.progress("reading", done) as bar:
            for number, (hashes, lengths, notes) in enumerate(results, done):
                with replacing(self.read_files[number]) as file:
                    np.savez(file, hashes=hashes, lengths=lengths, notes=np.array(json.dumps(vars(notes))))
                bar.update(self.sizes[number])

    def sort_out(self, found: Notes) -> tuple[dict, Notes]:
        """Gives every document its place. Returns the figures of the summary, and what is to be said of the files;
        found: what was before the reading. Raises Unsuitable where there are no documents."""
        notes = Notes(**vars(found))
        self.ends = [0]  # the number of documents before each unit, and in all
        for file in self.read_files:
            with np.load(file) as unit:
                self.ends.append(self.ends[-1] + len(unit["lengths"]))
                notes.add(Notes(**json.loads(str(unit["notes"]))))
        count = self.ends[-1]
        if not count:
            why = f" (skipped: {notes.reasons()})" if notes.skipped else ""
            raise Unsuitable(
                f"{named(self.args.paths)}: no text there{why}; name files or folders that hold some: a file that is "
                "named is read as plain text, whatever its name"
            )
        path = self.work / "places"
        with replacing(path) as file:
            os.posix_fallocate(file.fileno(), 0, count)  # a disk that is full says so here
            places = np.memmap(file, np.uint8, "r+", shape=(count,))
            ranges = -(-count // COMPARED)
            for number in tqdm(range(ranges), desc="comparing", mininterval=1, delay=1):
                self._compare(places, number, ranges)
            places.flush()
        self.places = np.memmap(path, np.uint8, "r", shape=(count,))
        totals = np.zeros((3, 3), np.int64)  # of each place: documents, characters, bytes
        for number, file in enumerate(self.read_files):
            with np.load(file) as unit:
                for place in (NOWHERE, TRAIN, VAL):
                    lengths = unit["lengths"][self.places_of(number) == place]
                    totals[place] += len(lengths), *lengths.sum(axis=0)
        figures = {
            what: {split: int(totals[place, column]) for split, place in SPLITS.items()}
            for column, what in enumerate(("documents", "characters", "bytes"))
        }
        return figures | {"duplicates": int(totals[NOWHERE, 0])}, notes

    def check_splits(self, documents: dict[str, int], characters: int) -> None:
        """Raises Unsuitable where a split has no document. characters: in both splits."""
        for split in documents:
            if not documents[split]:
                finely = f", or cut what there is more finely: --val 0.1 --longest {characters // 200}"
                raise Unsuitable(
                    f"{named(self.args.paths)}: none of {self.ends[-1]} documents falls to {split} by --val "
                    f"{self.val:g}; add text{finely if characters >= 100 * 200 else ''}"
                )

    def _compare(self, places: np.ndarray, number: int, ranges: int) -> None:
        """Gives places to the documents of a range of hashes: those whose hash leaves this number."""
        hashes, positions = [], []
        for start, file in zip(self.ends, self.read_files, strict=False):
            with np.load(file) as unit:
                found = np.flatnonzero(unit["hashes"][:, 0] % np.uint64(ranges) == number)
                hashes.append(unit["hashes"][found])
                positions.append(found + start)
        hashes, positions = np.concatenate(hashes), np.concatenate(positions)
        order = np.lexsort(hashes.T)  # equal ones stay in the order of the documents
        again = order[1:][np.all(hashes[order[1:]] == hashes[order[:-1]], axis=1)]
        place = np.where(hashes[:, 0] < np.uint64(self.val * 2**64), VAL, TRAIN)
        place[again] = NOWHERE
        places[positions] = place

    def places_of(self, number: int) -> np.ndarray:
        """The places of a unit's documents, uint8 (N,)."""
        return np.array(self.places[self.ends[number] : self.ends[number + 1]])

    def make_tokenizer(self, given: Tokenizer | None, train_bytes: int) -> Tokenizer:
        """Writes the files of the tokenizer: of the one that is given, or of one that is learned. Returns the one to
        encode with."""
        binary, source = (self.prefix.with_name(f"{self.prefix.name}_tokenizer.{kind}") for kind in ("bin", "json"))
        if not binary.is_file():  # which is the last to be written
            if given is None:
                with replacing(source) as file:
                    file.write(self._learn(train_bytes).encode())
                given = Tokenizer.load(source)
                write_vocabulary(self.prefix, given)
            else:
                write_vocabulary(self.prefix, given, Path(self.args.tokenizer))
        self.tokenizer_file = source if source.is_file() else binary
        return Tokenizer.load(self.tokenizer_file)

    def _learn(self, train_bytes: int) -> str:
        """A tokenizer.json: byte-level BPE as GPT-2's (Radford et al., 2019), learned from the training documents, or
        where they are more than LEARNED bytes, from some that their hashes choose. Raises Unsuitable where they do not
        have so many pairs that occur twice."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers

        size, chosen = self.args.train_tokenizer, min(1.0, LEARNED / train_bytes)
        library = Library(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size, min_frequency=2, special_tokens=[END_OF_TEXT], max_token_length=LONGEST_TOKEN,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=sys.stderr.isatty(),
        )  # fmt: skip

        def texts() -> Iterator[str]:
            with self.progress("learning the vocabulary") as bar:
                for number, unit in enumerate(self.units):
                    places = self.places_of(number)
                    with np.load(self.read_files[number]) as read:
                        places[read["hashes"][:, 1] / 2.0**64 >= chosen] = NOWHERE
                    for text, place in texts_of_unit(unit, *self.reading, places):
                        if place == TRAIN:
                            yield text
                    bar.update(self.sizes[number])
            print(f"merging pairs into {size:,} tokens", flush=True)

        library.train_from_iterator(texts(), trainer)
        if library.get_vocab_size() < size:
            raise Unsuitable(
                f"--train-tokenizer {size}: the text has pairs that occur twice for {library.get_vocab_size()} tokens "
                "only; lower it to that or less, or add text"
            )
        return library.to_str(pretty=True)

    def encode(self, tokenizer: Tokenizer) -> None:
        """Writes the shards of both splits."""
        settings = {
            "units": len(self.units), "shard_tokens": self.args.shard_tokens, "vocabulary": tokenizer.vocab_size
        }  # fmt: skip
        writers = {split: ShardWriter(self.prefix, split, settings) for split in SPLITS}
        first = min(writer.done for writer in writers.values())

        def wanted(number: int) -> dict[str, Path]:
            """The splits whose shards lack this unit, and where it is encoded to."""
            return {
                split: self.work / f"{number:06d}_{split}.tokens"
                for split, writer in writers.items() if number >= writer.done
            }  # fmt: skip

        def jobs() -> Iterator[tuple]:
            for number in range(first, len(self.units)):
                out = {SPLITS[split]: path for split, path in wanted(number).items()}
                yield self.units[number], *self.reading, self.places_of(number), self.tokenizer_file, out

        with self.progress("encoding", first) as bar:
            for number, _ in enumerate(in_order(self.workers, encode_unit, jobs()), first):
                for split, path in wanted(number).items():
                    if path.stat().st_size:
                        writers[split].add(number, np.memmap(path, writers[split].dtype, "r"))
                    path.unlink()
                bar.update(self.sizes[number])
        for writer in writers.values():
            writer.finish(len(self.units))


def named(paths: list[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


# The whole


def given_tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer that the flags name, None where one is to be learned. Raises UserError where it cannot encode."""
    if args.train_tokenizer:
        optional("tokenizers", "--train-tokenizer")
        return None
    if args.tokenizer in ("gpt2", "bytes"):
        return gpt2_tokenizer() if args.tokenizer == "gpt2" else byte_tokenizer()
    if not Path(args.tokenizer).is_file():
        raise UserError(f"--tokenizer {args.tokenizer}: no such file; name one, or gpt2 or bytes")
    check_saved(Path(args.tokenizer))
    tokenizer = Tokenizer.load(args.tokenizer)
    tokenizer.encode("a")
    return tokenizer


def settings_of(args: argparse.Namespace, files: list[File]) -> dict[str, Any]:
    """What decides the output, by flag."""
    listed = hashlib.sha256()
    for file in files:
        listed.update(json.dumps(file).encode())
    tokenizer = args.tokenizer
    if Path(tokenizer).is_file():
        tokenizer += f" (sha256 {hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()[:16]})"
    return {
        "PATH": f"{len(files)} files (sha256 {listed.hexdigest()[:16]})",
        "--tokenizer": None if args.train_tokenizer else tokenizer,
        **{f"--{name.replace('_', '-')}": getattr(args, name) or DEFAULTS.get(name)
           for name in ("train_tokenizer", "field", "encoding", "val", "longest", "shard_tokens")},
    }  # fmt: skip


def check_settings(place: str, remove: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises UserError where a dataset was made, or begun, with other settings. remove: what to, to begin anew."""
    for name, value in now.items():
        if before.get(name) != value:
            raise UserError(
                f"{place} was made with {name} {before.get(name)}, now {value}: use the same options, choose another "
                f"-o, or remove {remove} to begin anew"
            )


def check_free(out: Path, tokenizer: Path) -> None:
    """Raises UserError where there are files that -i would take for this dataset's, but for those of the tokenizer that
    is given."""
    for end in ("train*.bin", "val*.bin", "tokenizer.*"):
        for path in out.parent.glob(f"{out.name}_{end}"):
            if path.absolute() not in (tokenizer, tokenizer.with_suffix(".bin")):
                raise UserError(f"{path} belongs to another dataset: choose another -o, or remove it")


def read_json(path: Path) -> dict[str, Any]:
    """An object with settings that a run has written. Raises UserError where it is damaged."""
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content["settings"], dict):
            return content
    except OSError as error:
        raise UserError(f"{path}: {error.strerror.lower()}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f"{path}: damaged; remove it to begin anew")


def write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(content, indent=1).encode())


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """Keeps other runs out of a folder. Raises UserError where one is at work there."""
    make_folder(work)
    try:
        file = open(work / "lock", "wb")
    except OSError as error:
        raise UserError(f"{work}: cannot be written to ({error.strerror.lower()}); choose another -o") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{work}: another run is at work there; wait for it, or choose another -o") from None
        yield


def clear(work: Path) -> None:
    """Removes what is in the folder, but for the lock."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def publish(work: Path, out: Path) -> None:
    """Moves all files of a dataset to their places, validation and the summary last, and removes the folder."""
    summary = f"{out.name}_summary.json"
    try:
        for name in (*read_json(work / summary)["files"], summary):
            if (work / name).is_file():  # else it was moved before an interruption
                os.replace(work / name, out.with_name(name))
        shutil.rmtree(work)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be moved or removed ({error.strerror.lower()})") from None


def bytes_in(shard: Path, lengths: np.ndarray) -> int:
    """The bytes of text that the tokens of a shard stand for. lengths: those of each token."""
    tokens = open_tokens(shard)
    return sum(int(lengths[tokens[at : at + BLOCK]].sum()) for at in range(0, tokens.size, BLOCK))


def print_guesses(guessed: dict[str, list[str]], file: Path) -> None:
    """Says which encodings were guessed. file: where all of them are listed."""
    if not guessed:
        return

    def files_by(encodings: dict[str, str]) -> str:
        by: dict[str, list[str]] = {}
        for path, encoding in encodings.items():
            by.setdefault(encoding, []).append(path)
        return listed((encoding, len(paths), paths[:EXAMPLES]) for encoding, paths in sorted(by.items()))

    print(f"guessed     {len(guessed):,} encodings: {files_by({path: guess[0] for path, guess in guessed.items()})}")
    if unsure := {path: " or ".join(guess) for path, guess in guessed.items() if len(guess) > 1}:
        print(f"            with little confidence: {files_by(unsure)}")
    print(f"            all are listed in {file}; where they are wrong, name the right one with --encoding")


def print_summary(out: Path, summary: dict[str, Any]) -> None:
    def split(of: dict[str, int]) -> str:
        return f"{sum(of.values()):,} ({', '.join(f'{name} {number:,}' for name, number in of.items())})"

    characters, tokens = sum(summary["characters"].values()), sum(summary["tokens"].values())
    print(f"documents   {split(summary['documents'])}; duplicates removed: {summary['duplicates']:,}")
    if "split" in summary:
        by, instead = summary["split"]
        print(f"split       by {by}, since {instead} leaves too little text to train or to validate on")
    notes = Notes(*(summary.get(what, {}) for what in ("skipped", "skipped_files", "guessed")))
    print(f"skipped     {notes.reasons() or 'nothing'}")
    print_guesses(notes.guessed, out.with_name(f"{out.name}_summary.json"))
    print(f"characters  {split(summary['characters'])}")
    print(f"bytes       {split(summary['bytes'])}, in UTF-8")
    if "normalizer" in summary:
        decoded = split(summary["decoded"])
        print(f"normalizer  {summary['normalizer']} changes texts before they are encoded: {decoded} bytes after it")
    print(f"tokens      {split(summary['tokens'])}, {characters / tokens:.2f} characters a token")
    print(f"vocabulary  {summary['vocabulary']:,}")
    print(f"files       {', '.join(str(out.with_name(file)) for file in summary['files'])}")
    print()
    for line in recommend(out, summary["vocabulary"], *summary["tokens"].values()):
        print(line)


def main() -> None:
    args = make_parser().parse_args()
    out = args.out
    if out.is_dir() or not out.name or any(character in str(out) for character in "*?["):
        raise UserError(f"-o {out}: must be a prefix of file names, such as data/mine")
    found = Notes()
    files = find_files(args.paths, found)
    given = given_tokenizer(args)
    settings = settings_of(args, files)
    summary_file, work = (out.with_name(f"{out.name}_{end}") for end in ("summary.json", "work"))
    if summary_file.is_file():
        made = read_json(summary_file)
        if all(out.with_name(file).is_file() for file in made["files"]):
            check_settings(f"{out}_*", f"{out}_*.bin and .json", made["settings"], settings)
            shutil.rmtree(work, ignore_errors=True)  # where a run was stopped at its very end
            print(f"{out}_*: all of it is there already")
            return print_summary(out, made)
    if not (work / summary_file.name).is_file():
        check_free(out, Path(args.tokenizer).absolute())
    units = units_of(files, args.field, args.encoding)
    with locked(work):
        if (work / "settings.json").is_file():
            check_settings(str(work), "it", read_json(work / "settings.json")["settings"], settings)
        else:
            clear(work)  # of what was left where a run was stopped while it removed its folder
        write_json(work / "settings.json", {"settings": settings})
        try:
            if not (work / summary_file.name).is_file():
                make(args, units, work, given, settings, found)
        except Unsuitable:
            shutil.rmtree(work)
            raise
        publish(work, out)
    print_summary(out, read_json(summary_file))


def make(
    args: argparse.Namespace, units: list[list[Part]], work: Path, given: Tokenizer | None, settings: dict[str, Any],
    found: Notes,
) -> None:  # fmt: skip
    """Makes all files of the dataset in the folder `work`, the summary last."""
    tried = list(dict.fromkeys((args.val or val, args.longest or longest) for val, longest in TRIED))
    left = {}  # by each of them, bytes in the smaller split
    for choice in tried:
        job = Job(args, units, work, *choice)
        job.read()
        summary, notes = job.sort_out(found)
        left[choice] = min(summary["bytes"].values())
        if left[choice] >= ENOUGH:
            break
    best = max(left, key=left.get)
    if best != choice:
        job = Job(args, units, work, *best)
        summary, notes = job.sort_out(found)
    job.check_splits(summary["documents"], sum(summary["characters"].values()))
    summary |= {"skipped": notes.skipped, "skipped_files": notes.examples, "guessed": notes.guessed}
    if best != tried[0]:
        summary["split"] = [f"--val {val:g} --longest {longest}" for val, longest in (best, tried[0])]
    tokenizer = job.make_tokenizer(given, summary["bytes"]["train"])
    job.encode(tokenizer)
    shards = {split: sorted(work.glob(f"{args.out.name}_{split}_*.bin")) for split in SPLITS}
    tokens = {split: sum(open_tokens(path).size for path in paths) for split, paths in shards.items()}
    if min(tokens.values()) < LEAST_TOKENS:
        split = min(tokens, key=tokens.get)
        raise Unsuitable(
            f"{named(args.paths)}: too little text: {tokens[split]} tokens for {split}, and a batch takes "
            f"{LEAST_TOKENS}; add text{', or raise --val' if split == 'val' else ''}"
        )
    names = [f"{args.out.name}_{end}" for end in ("tokenizer.json", *NEIGHBOURS, "tokenizer.bin")]
    names = [name for name in names if (work / name).is_file()]
    names += [path.name for paths in shards.values() for path in paths]
    rest = {"tokens": tokens, "vocabulary": tokenizer.vocab_size, "files": names, "settings": settings}
    if changes := changes_of(tokenizer):
        lengths = tokenizer.text_bytes(tokenizer.vocab_size)
        decoded = {split: sum(bytes_in(path, lengths) for path in paths) for split, paths in shards.items()}
        rest |= {"normalizer": changes, "decoded": decoded}
    write_json(work / f"{args.out.name}_summary.json", summary | rest)


if __name__ == "__main__":
    run(main)

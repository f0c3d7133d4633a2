"""Your own text as a dataset: files, folders or a data set of the Hugging Face hub, to shards of tokens.

    python dev/data/text.py my_texts -o data/mine --train-tokenizer 16384

Writes data/mine_{train,val}_<number>.bin, data/mine_tokenizer.bin, data/mine_tokenizer.json if the tokenizer has one,
and data/mine_summary.json. Of equal texts one stays. A hash of each text decides whether it is for validation.

Hugging Face's datasets keeps texts and tokens in data/mine_work, and goes on from there after a stop. All files are
moved from there when they are complete. Without datasets, the memory holds plain text that --tokenizer bytes encodes.
"""

import argparse
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
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from
os.environ.setdefault("TQDM_MININTERVAL", "2")

from dev.data import common
from dev.data.documents import KINDS, UNDECODABLE, UNDECODABLE_REMEDY, File, documents
from dev.data.shards import load_texts, open_work, remove_work, write_shards
from device.errors import UserError, counted, first_line, say
from llmc.data.find_tokenizer import model_tokenizers, named_tokenizer, open_tokenizer
from llmc.data.hf_tokenizer import MAX_VOCAB_SIZE, read_json
from llmc.data.tokenizer import END_OF_TEXT, Tokenizer
from llmc.files.files import file_size, first_word, replacing
from llmc.files.magic import script_of
from llmc.run.arguments import Parser, a_path, limited, number, positive, whole_number

import numpy as np

NO_TEXT = {suffix: f"{what}, no text: {remedy}" for what, remedy, suffixes in (
    ("a PDF", "pdftotext makes text of it", ".pdf"),
    ("a document of a word processor", "`pandoc -t plain` makes text of it", ".docx .odt .rtf"),
    ("an e-book", "`pandoc -t plain` makes text of it", ".epub .fb2"),
    ("an Office document", "`libreoffice --convert-to txt` makes text of it", ".doc .ppt .pptx .odp"),
    ("a spreadsheet", "`libreoffice --convert-to csv` makes a table of it", ".xls .xlsx .ods"),
    ("an archive", "unpack it (unzip, tar -xf, 7z x) and name its folder", ".zip .tar .tgz .7z .rar"),
    ("an image", "tesseract reads text in it", ".png .jpg .jpeg .gif .tif .tiff .bmp .webp"),
) for suffix in suffixes.split()}  # fmt: skip
LEAST = 4096               # tokens for validation, or a tenth of all
LEARNED = 1 << 30          # bytes of text that a vocabulary is learned from, at most, about
LONGEST = 100_000          # characters in a document, if no flag says otherwise
MAX_CHARACTERS = 400_000  # in a document: what tiktoken is sure to split, even if all of it is white space

share = limited(number, ((lambda x: 0 < x < 1), "be above 0 and below 1"))
characters = limited(whole_number, ((lambda n: 100 <= n <= MAX_CHARACTERS), f"be from 100 to {MAX_CHARACTERS}"))
vocabulary = limited(whole_number, ((lambda n: 257 <= n < MAX_VOCAB_SIZE), f"be from 257 to {MAX_VOCAB_SIZE - 1}"))


def suffix(text: str) -> str:
    """A suffix of files of text, with its dot, or "none"."""
    lower = text.lower()
    if lower in NO_TEXT:
        raise argparse.ArgumentTypeError(f"{text}: {NO_TEXT[lower]}")
    if lower != "none" and not re.fullmatch(r"\.[^./\s]+", lower) or lower in common.PACKED:
        raise argparse.ArgumentTypeError(f"{text!r} must be one suffix with its dot, such as .py, or none")
    return lower


def separator(text: str) -> str:
    """What stands between the columns of a table."""
    text = "\t" if text in ("tab", "\\t") else text
    if len(text) != 1 or text in '"\r\n':
        raise argparse.ArgumentTypeError(f"{text!r} must be one character, such as ';', or tab")
    return text


def make_parser() -> Parser:
    parser = Parser(description="Make a dataset of files and folders of text.")
    add = parser.add_argument
    add("paths", metavar="PATH", nargs="+", help=f"a file or folder of {' '.join(KINDS)}, also packed as"
        f" {' '.join(common.PACKED)}; what datasets saved; OWNER/NAME[:CONFIG] of the Hugging Face hub")  # fmt: skip
    add("-o", "--out", metavar="PREFIX", type=a_path, required=True, help="such as data/mine")
    tokenizers = parser.add_mutually_exclusive_group()
    tokenizers.add_argument("--tokenizer", metavar="NAME|FILE", default="gpt2", help="or bytes, file, folder (gpt2)")
    tokenizers.add_argument("--train-tokenizer", metavar="N", type=vocabulary, help="learn N tokens from the text")
    add("--special-tokens", action="store_true", help="encode the names of special tokens as these tokens (as text)")
    add("--field", metavar="NAME", nargs="+", default=["text"], help="the text in records; several are joined (text)")
    add("--suffix", metavar=".X", type=suffix, nargs="+", default=[], help="read such files as text, too; none: without"
        " a suffix")  # fmt: skip
    add("--separator", metavar="X", type=separator, help="between the columns of .csv and .tsv, both with quotes: a"
        " character or tab (.csv: comma; .tsv: tab, no quotes)")  # fmt: skip
    add("--encoding", metavar="NAME", default="utf-8", help="of all files (%(default)s)")
    add("--skip-undecodable", action="store_true", help="leave out files of another encoding (they are refused)")
    add("--split", metavar="NAME", default="train", help="of a data set that has several (%(default)s)")
    add("--val", metavar="F", type=share, default=0.01, help="share of the documents for validation (%(default)s)")
    add("--longest", metavar="N", type=characters, help="of a document, else it is cut (100000; of few files of text a"
        " 50th)")  # fmt: skip
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
    kinds, found, files = KINDS | dict.fromkeys(args.suffix, "text"), [], []
    if args.separator:
        kinds[".csv"] = kinds[".tsv"] = args.separator

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: {error.strerror.lower()}") from None

    for path in args.paths:
        saved = any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))
        nowhere = not os.path.lexists(path) and not os.path.isdir(path.partition("/")[0])
        if saved or (nowhere and re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", path)):
            name, _, config = (path, "", "") if saved else path.partition(":")
            rows = load_texts(name, args.split, config or None, fields=args.field)
            found += [(file["filename"], "arrow") for file in rows.cache_files]
        elif os.path.isdir(path):
            for folder, folders, names in os.walk(path, onerror=refuse):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                names += [name for name in folders if os.path.islink(os.path.join(folder, name))]
                found += [(os.path.join(folder, name), None) for name in sorted(names) if not name.startswith(".")]
        elif suffix_of(path)[0] not in kinds and os.path.isfile(path):
            of = suffix_of(path)[0]
            raise UserError(f"{path}: {NO_TEXT.get(of, f'what is in it? --suffix {of} reads such files as text')}")
        else:
            found.append((path, kinds.get(suffix_of(path)[0], "text")))
    for path, kind in found:
        if not (kind := kind or kinds.get(suffix_of(path)[0])) or (os.path.islink(path) and os.path.isdir(path)):
            skipped["".join(suffix_of(path))] += 1
        else:
            files.append((path, kind, file_size(path, "name files and folders of text"), os.stat(path).st_mtime_ns))
    return files


def say_idle(args: argparse.Namespace, given: set[str], files: list[File]) -> None:
    """Says which of the given flags change nothing, for no file is of the kind that they are about."""
    kinds = {kind for _, kind, *_ in files}
    idle = {
        "--field": kinds == {"text"},
        "--split": "arrow" not in kinds,
        "--separator": args.separator not in kinds,
        "--encoding": kinds <= {"parquet", "arrow"},
    }
    idle |= {f"--suffix {name}": True for name in {*args.suffix} - {suffix_of(path)[0] for path, *_ in files}}
    for flag in idle:
        if idle[flag] and flag.split()[0].lstrip("-") in given:
            say(f"{flag} changes nothing: no file here is of its kind")


def read(args: argparse.Namespace, files: list[File], work: Path) -> Any:
    """All documents: a datasets.Dataset, or its columns if that library is neither needed nor there."""
    of_text = args.longest or min(LONGEST, max(1000, sum(size for _, _, size, _ in files) // 50))
    longest = (of_text, args.longest or LONGEST)
    what = {"files": files, "fields": tuple(args.field), "encoding": args.encoding, "longest": longest}
    try:
        datasets = common.library("datasets", "all but plain text with --tokenizer bytes")
    except UserError:
        if args.tokenizer != "bytes" or args.train_tokenizer or {kind for _, kind, *_ in files} != {"text"}:
            raise
        rows = list(documents(**what))
        return {name: [row[name] for row in rows] for name in rows[0]}
    datasets.utils.logging.set_verbosity_error()
    types = dict.fromkeys(("text", "note", "place"), "string") | dict.fromkeys(("high", "low", "bytes"), "int64")
    features = {name: datasets.Value(type) for name, type in (types | {"inner": "bool"}).items()}
    return datasets.Dataset.from_generator(
        documents, datasets.Features(features), str(work), gen_kwargs=what, num_proc=min(args.workers, len(files)),
        fingerprint=work.name,
    )  # fmt: skip


def notes_of(rows: Any, sizes: np.ndarray, skip_undecodable: bool) -> dict[str, dict[str, int]]:
    """How many documents have each note, of those that are left out and of those that are kept. The first is named.
    Raises UserError if a file is undecodable, unless such files are skipped."""
    counts, firsts = Counter(), {}
    for index, note in enumerate(rows["note"][:]):
        if note:
            of = "kept" if sizes[index] else "left out", note
            counts[of] += 1
            if counts[of] <= 3:
                firsts.setdefault(of, []).append(index)
    wrong = "left out", UNDECODABLE
    if counts[wrong] and not skip_undecodable:
        files = ", ".join(rows["place"][index] for index in firsts[wrong])
        more = f" and {counted(counts[wrong] - 3, 'more file')}" if counts[wrong] > 3 else ""
        raise UserError(f"{files}{more}: {UNDECODABLE_REMEDY}")
    result: dict[str, dict[str, int]] = {"left out": {}, "kept": {}}
    for fate, note in firsts:
        result[fate][f"{note} (first: {rows['place'][firsts[fate, note][0]]})"] = counts[fate, note]
    return result


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
    """A tokenizer, and a pattern for the names of its special tokens, the longest first."""
    tokenizer = open_tokenizer(path)
    names = sorted((tokenizer.tokens[id].decode() for id in tokenizer.special), key=len, reverse=True)
    return tokenizer, re.compile("|".join(map(re.escape, names)))


def encode(batch: dict[str, list], path: str, special: bool) -> dict[str, list]:
    """The tokens of texts. "count": how many they are. "begin", "end": whether the token that begins or ends a text was
    added. "special": how often the texts have the names of special tokens, as JSON beside the first text."""
    (tokenizer, names), texts = tokenizer_at(path), batch["text"]
    ids = [np.array(tokens, np.uint32) for tokens in common.encode_texts(tokenizer, texts, 1, special, batch["inner"])]
    begin, end = (tokenizer.tokens[id].decode() for id in (tokenizer.bos, tokenizer.eot))
    counts = Counter(name for text in texts for name in names.findall(text))
    return {
        "ids": ids, "count": list(map(len, ids)), "special": [json.dumps(counts)] + [""] * (len(texts) - 1),
        "begin": [not (special and text.startswith(begin)) for text in texts],
        "end": [
            begin != end and of[-1] == tokenizer.eot and not (special and text.rstrip().endswith(end))
            for text, of in zip(texts, ids, strict=True)
        ],
    }  # fmt: skip


def encode_all(rows: Any, kept: np.ndarray, workers: int, work: Path, **how: Any) -> Any:
    """The tokens of some documents, as `read` returns documents."""
    if isinstance(rows, dict):
        return encode({name: [rows[name][i] for i in kept] for name in ("text", "inner")}, **how)
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
    notes = notes_of(rows, sizes, args.skip_undecodable)
    order = np.lexsort((low, high))  # equal ones stay in the order of the documents
    again = np.zeros(len(order), bool)
    again[order[1:]] = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
    keep = ~again & (sizes > 0)
    kept, inner = np.flatnonzero(keep), np.array(rows["inner"][:], bool)
    blank = int((sizes == 0).sum()) - sum(notes["left out"].values())
    summary: dict[str, Any] = {"duplicates": int((again & (sizes > 0)).sum()), "blank": blank} | notes
    if len(kept) < 2:
        found = f"{counted(len(kept), 'document')} ({listed(summary)})"
        raise UserError(f"{args.paths[0]}: too little text: {found}; add text, or cut it with --longest")
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
    tokens, tokenizer = np.array(done["count"][:]), tokenizer_at(path)[0]
    begin = np.array(done["begin"][:], bool) & inner[kept]
    end = np.array(done["end"][:], bool) & np.append(inner & keep, False)[kept + 1]
    val = for_validation(high, tokens, args.val, LEAST)
    for split, which in ("train", np.flatnonzero(~val)), ("val", np.flatnonzero(val)):
        # A part of a text has no token that begins or ends a text where the text goes on. But if one token does both,
        # it ends the document before, and so it stays where that is of another text.
        first, last = begin[which].astype(int), end[which].astype(int)
        if tokenizer.bos == tokenizer.eot:
            first &= np.diff(kept[which], prepend=-1) == 1
        tokens[which] -= first + last
        texts = (ids[a : len(ids) - b] for ids, a, b in zip(tokens_of(done, which), first, last, strict=True))
        write_shards(texts, prefix, split, args.shard_tokens, tokenizer.vocab_size)
        for name, of in ("documents", np.ones_like(sizes)), ("bytes", sizes), ("tokens", tokens):
            summary.setdefault(name, {})[split] = int(of[which].sum())
    special = sum((Counter(json.loads(counts)) for counts in filter(None, done["special"][:])), Counter())
    return summary | {"vocabulary": tokenizer.vocab_size, "special tokens": special}


def listed(of: dict) -> str:
    """Such as "train 90, val 10". Inner dictionaries that are empty are left out."""
    parts = ((key, listed(value) if isinstance(value, dict) else value) for key, value in of.items())
    return ", ".join(f"{key} {value}" for key, value in parts if value != "")


def training_command(tokenizer: Path, out: Path, flags: str) -> str:
    """What trains a small model on the data, or the model whose tokenizer they have, if it is beside the tokenizer."""
    script, model = "train_gpt2_fp32.py", "d6"
    for path in sorted(tokenizer.parent.glob("*.bin")):
        if tokenizer in model_tokenizers(path) and (found := script_of(first_word(path))):
            script, model = found, str(path)
    return f"python {script} -i {shlex.quote(str(out))} -e {shlex.quote(model)} {flags}"


def main() -> None:
    parser, skipped = make_parser(), Counter()
    args = parser.parse_args()
    out, work, end = args.out, args.out.with_name(f"{args.out.name}_work"), f"{args.out.name}_summary.json"
    if out.is_dir() or not out.name:
        raise UserError(f"-o {out}: must be a prefix of file names, such as data/mine")
    files = find_files(args, skipped)
    no_text = {suffix_of(f"x{suffix}")[0] for suffix in skipped} & NO_TEXT.keys()
    no_text = [f"{suffix} is {NO_TEXT[suffix]}" for suffix in sorted(no_text)]
    if not files:
        remedy = no_text[0] if no_text else "--suffix .x reads files as text"
        raise UserError(f"{args.paths[0]}: no text there; skipped: {listed(skipped) or 'nothing'}; {remedy}")
    say_idle(args, parser.given, files)
    args.tokenizer = str(named_tokenizer(Path(args.tokenizer)))
    given = None if args.train_tokenizer else common.load_tokenizer(args.tokenizer)
    lock = open_work(work)
    options = {name: value for name, value in vars(args).items() if name not in ("workers", "out")}
    known = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    known += [Path(args.tokenizer).read_bytes()] if os.path.isfile(args.tokenizer) else []
    about = hashlib.sha256(b"".join([json.dumps([options, files]).encode(), *known])).hexdigest()
    prefix = work / about[:16] / out.name
    if not prefix.with_name(end).is_file():
        name, ends = glob.escape(out.name), ("train*.bin", "val*.bin", "tokenizer.*", "summary.json")
        for path in (path for end in ends for path in out.parent.glob(f"{name}_{end}")):
            if path.absolute().with_suffix("") != Path(args.tokenizer).absolute().with_suffix(""):
                common.refuse_to_replace(path, "-o")
        prefix.parent.mkdir(exist_ok=True)
        try:
            summary = make(args, files, given, prefix) | {"skipped": dict(sorted(skipped.items())), "options": options}
        except Exception as error:  # datasets' are of many kinds
            cause = error.__cause__ or error
            kind, reason = type(cause).__name__, first_line(cause)
            if kind == "RemoteTraceback":  # of another process: a text
                kind, reason = re.findall(r"(?m)^(?:\w+\.)*(\w+): (.+)", str(cause))[0]
            if kind not in ("UserError", "Unsuitable"):
                raise UserError(f"{work}: {reason}; the same command goes on from there") from None
            remove_work(work, lock)  # it is of no use
            raise UserError(reason) from None
        with replacing(prefix.with_name(end)) as file:
            file.write(json.dumps(summary, indent=1).encode())
    there = prefix.parent.glob(f"{glob.escape(out.name)}_*")
    made = [path for path in there if path.suffix in (".bin", ".json", ".jinja")]
    common.move(sorted(made, key=lambda path: (path.name == end, path)), out.parent, "-o")
    remove_work(work, lock)
    summary = read_json(out.with_name(end), "the data are made; start this again for the summary")
    for name, of in summary.items():
        if of != {} and name != "options":
            print(f"{name:14} {listed(of) if isinstance(of, dict) else of}")
    for line in no_text:
        print(f"{line}.")
    if summary["special tokens"] and not args.special_tokens:
        print("These names of special tokens are encoded as text: --special-tokens encodes them as the tokens.")
    T = min(256, 1 << (summary["tokens"]["val"] // 5).bit_length() >> 1)
    print(f"\n    {training_command(Path(args.tokenizer), out, f'-b 4 -t {T} -x 1000')}")


if __name__ == "__main__":
    # A stop may come at any time. All processes end with this one (PR_SET_PDEATHSIG), and Ctrl-C is for it alone.
    kill = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)
    os.register_at_fork(after_in_child=lambda: (signal.signal(signal.SIGINT, signal.SIG_IGN), kill()))
    said = b"\ninterrupted; run the same command again to go on\n"
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, said), os._exit(1)))
    common.run(main)

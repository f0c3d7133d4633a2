"""What the dataset scripts share: fetching, encoding, writing, and how a program of theirs ends."""

import codecs
import filecmp
import hashlib
import http.client
import importlib
import io
import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from dev.foreign import try_tokenizer
from device.errors import UserError, counted, first_line
from llmc.data.find_tokenizer import open_tokenizer, tokenizer_files
from llmc.data.hf_tokenizer import without_surrogates
from llmc.data.tokenizer import Tokenizer, byte_tokenizer, gpt2_tokenizer, write_tokenizer
from llmc.files.checkpoint_dir import check_saved
from llmc.files.directory import why
from llmc.files.files import open_file, replacing
from llmc.run.program import run_program

DATA = Path(__file__).resolve().parents[2] / "data"
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "zstd", ".lz4": "lz4"}  # suffix: what unpacks it
BLOCK = 1 << 20  # bytes that are read at once
LONGEST = 1 << 28  # characters of a line, or of a list, held in several copies; a .txt is read in parts
# What a file begins with, and what it then is. UTF-32's mark begins with UTF-16's, so it comes first.
MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"), (b"%PDF", "a PDF"), (b"\x1f\x8b", "gzip"),
    (b"PK\3\4", "a zip archive, such as a .docx"),
)  # fmt: skip


class Unsuitable(UserError):
    """A tokenizer cannot spell the texts."""


class Undecodable(UserError):
    """A file is not text of the encoding asked for. what: the error without its remedy."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what = what


def refuse_to_replace(path: Path, flag: str = "--out") -> NoReturn:
    raise UserError(f"{path} belongs to another dataset: choose another {flag}, or remove it")


def library(name: str, what: str) -> Any:
    """A package that only some need. Raises UserError if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{what} needs {name}; install it with: pip install {name}") from None


def run(main: Callable[[], None]) -> None:
    """Runs a program that goes on where it was interrupted; what the user must mend becomes one line on stderr."""
    run_program(main, interrupted="interrupted; run the same command again to go on")


def download(url: str, path: Path, sha256: str) -> None:
    """Fetches a file, unless it is there, showing how far it is. Raises UserError where that fails or stops halfway, or
    where the file does not have this SHA-256."""
    if path.exists():
        print(f"{path} is there already")
        return
    make_folder(path.parent)
    found = hashlib.sha256()
    with replacing(path) as file:
        shown = time.monotonic()
        for chunk, total in receive(url):
            file.write(chunk)
            found.update(chunk)
            if time.monotonic() - shown > 1:
                shown = time.monotonic()
                print(f"{path.name}: {file.tell():,}{'' if total is None else f' of {total:,}'} bytes", flush=True)
        if found.hexdigest() != sha256:
            raise UserError(f"{url}: what the server sent is bad: its SHA-256 is not {sha256}; try again later")
    print(f"{path}: {path.stat().st_size:,} bytes")


class NoWayBack(urllib.request.HTTPRedirectHandler):
    """Follows no redirect from https to anything else."""

    def redirect_request(self, request, file, code, message, headers, url):
        if request.type == "https" and not url.startswith("https:"):
            raise UserError(f"{request.full_url}: it leads to {url}, and only https is used; try again later")
        return super().redirect_request(request, file, code, message, headers, url)


def receive(url: str) -> Iterator[tuple[bytes, int | None]]:
    """The pieces of what a URL stands for, each with the size of the whole, or None where the server does not say."""
    try:
        with urllib.request.build_opener(NoWayBack).open(url, timeout=60) as response:
            done, total = 0, response.length
            while chunk := response.read(1 << 16):
                done += len(chunk)
                yield chunk, total
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{url}: {getattr(error, 'reason', error)}; check the connection and run this again") from None
    if total is not None and done != total:
        raise UserError(f"{url}: stopped after {done:,} of {total:,} bytes; run this again")


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it where they are missing. Raises UserError where the system refuses to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror.lower()}); choose another place (--out)") from None


def move(files: Iterable[Path], folder: Path, flag: str) -> None:
    """Moves files to a folder, in this order. Raises UserError, before it moves any, if one has there the name of a
    file with other contents."""
    moves = [(file, folder / file.name) for file in files]
    for file, place in moves:
        if os.path.lexists(place) and not (place.is_file() and filecmp.cmp(file, place, shallow=False)):
            refuse_to_replace(place, flag)
    try:
        for file, place in moves:
            os.replace(file, place)
    except OSError as error:
        raise UserError(f"{place}: cannot be written ({why(error)}); {file} is whole") from None


def unpacked(path: str | Path) -> BinaryIO:
    how = PACKED.get(os.path.splitext(str(path).lower())[1])
    if how in ("zstd", "lz4"):
        return library("pyarrow", f"{path}: this").input_stream(str(path), compression=how)
    return importlib.import_module(how).open(path) if how else open_file(path)


def blocks_of(
    path: str | Path, encoding: str, remedy: str = "save it as UTF-8", translate: bool = True
) -> Iterator[str]:
    """The characters of a file. translate: put "\n" for every line end. Raises Undecodable if they are not of this
    encoding, and UserError if the file cannot be read."""
    done, block, begins = 0, b"a", ""
    try:
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), translate)
        wide = b"\0" in "a".encode(encoding)  # such as UTF-16; in other texts no byte is zero
        with unpacked(path) as file:
            while block:
                block, held = file.read(BLOCK), len(decoder.getstate()[0])
                if not done:
                    begins = next((f", it begins as {name}" for mark, name in MARKS if block.startswith(mark)), "")
                zero = -1 if wide else block.find(b"\0")
                text = decoder.decode(block, not block)
                if zero >= 0:
                    raise UnicodeError
                yield text if done else text.removeprefix("\ufeff")
                done += len(block)
    except UnicodeError as error:
        wrong = error.start - held if isinstance(error, UnicodeDecodeError) else max(zero, 0)
        at = done + (min(wrong, zero) if zero >= 0 else wrong)
        raise Undecodable(f"{path}: not {encoding.upper()} text (at byte {at}{begins})", remedy) from None
    except LookupError:
        raise UserError(f"--encoding {encoding}: Python knows no such encoding of text") from None
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or first_line(error)).lower()}") from None
    except UserError:
        raise
    except Exception as error:  # what the modules that unpack raise
        raise UserError(f"{path}: cannot be unpacked ({first_line(error)})") from None


def bounded(where: str | Path, parts: Iterable[str]) -> str:
    """The parts of a text in one. Raises UserError if they are more than LONGEST characters."""
    held, size = [], 0
    for part in parts:
        held.append(part)
        if (size := size + len(part)) > LONGEST:
            raise UserError(f"{where}: longer than {LONGEST:,} characters: split it, or save its text as .txt")
    return "".join(held)


def lines_of(path: str | Path, blocks: Iterable[str]) -> Iterator[str]:
    """The lines of a text that comes in blocks. Raises UserError for one of more than LONGEST characters."""
    line, number = [], 1  # its parts, for it may be of many blocks
    for part in (part for block in blocks for part in re.findall("[^\n]*\n|[^\n]+", block)):
        line.append(part)
        if part.endswith("\n") or sum(map(len, line)) > LONGEST:
            yield bounded(f"{path}, line {number}", line)
            line, number = [], number + 1
    yield bounded(f"{path}, line {number}", line)


def load_tokenizer(name: str | Path | None) -> Tokenizer:
    """The tokenizer of a `.bin` or a `tokenizer.json`, that of bytes, or GPT-2's, to encode with. Says where it changes
    texts."""
    if name in ("bytes", "gpt2", None):
        return byte_tokenizer() if name == "bytes" else gpt2_tokenizer()
    check_saved(Path(name))
    try_tokenizer(Path(name))
    tokenizer = open_tokenizer(name)
    if Path(name).suffix != ".json" and not tokenizer.as_gpt2:
        tokenizer.encode("a")  # which says why it cannot
    if Path(name).suffix != ".json" and tokenizer.vocab_size not in (257, 50257):
        print(f"{name}: a .bin does not say how text is split: it is split as GPT-2's")
    if tokenizer.normalizer:
        state = json.loads(tokenizer.normalizer.__getstate__())
        changes = " + ".join(part["type"] for part in state.get("normalizers", [state]))
        print(f"{name}: its normalizer ({changes}) changes texts before they are encoded")
    return tokenizer


def encode(
    tokenizer: Tokenizer, texts: list[str], num_threads: int | None = None, special: bool = False
) -> list[list[int]]:
    """The tokens of texts. special: the names of special tokens in them stand for these. Raises Unsuitable if a text
    cannot be had back from its tokens."""
    if special:
        encoded = [tokenizer.encode(text) for text in texts]
    else:
        encoded = tokenizer.encode_ordinary_batch(texts, num_threads)
    for text, ids in zip(texts, encoded, strict=True):
        _check_spelling(tokenizer, text, ids, special)
    return encoded


def _check_spelling(tokenizer: Tokenizer, text: str, ids: list[int], special: bool) -> None:
    """Raises Unsuitable unless the tokens of a text spell it. What a normalizer has changed may differ, for the
    tokenizer's file asks for that, and a space before the text, which some tokenizers put there. So may white space
    beside special tokens, which may take it."""
    spelled = b"".join([tokenizer.tokens[token] for token in ids])
    if spelled == text.encode(errors="surrogatepass"):
        return
    text = tokenizer.normal(without_surrogates(text))
    wanted = text.encode()
    if spelled in (wanted, b" " + wanted) or (special and b"".join(spelled.split()) == b"".join(wanted.split())):
        return
    at = len(wanted[: len(os.path.commonprefix([spelled, wanted]))].decode(errors="ignore"))
    raise Unsuitable(
        f"--tokenizer: it cannot spell {text[at : at + 1]!r} in {text[max(0, at - 20) : at + 20]!r}: a text of "
        f"{len(wanted):,} bytes comes back from its tokens with {len(spelled):,}; use a tokenizer that has all 256 "
        "bytes, such as GPT-2's, or let dev/data/text.py learn one (--train-tokenizer)"
    )


def encode_texts(
    tokenizer: Tokenizer, texts: list[str], num_threads: int | None = None, special: bool = False,
    inner: list[bool] | None = None,
) -> list[list[int]]:  # fmt: skip
    """The tokens of texts as a dataset holds them: before each the token that begins a text, and after it, if that is
    another one, the token that ends a text, unless they are there already. inner: which texts are parts that go on with
    the text before; the tokenizer puts no space before these. Raises Unsuitable as `encode` does."""
    begin, end = [tokenizer.bos], [tokenizer.eot] * (tokenizer.eot != tokenizer.bos)

    def whole(ids: list[int]) -> list[int]:
        first, last = (ids[:1], ids[-1:]) if special else ([], [])
        return begin * (first != begin) + ids + end * (last != end)

    encoded = encode(tokenizer, texts, num_threads, special)
    if inner and tokenizer.inside is not tokenizer:
        within = iter(encode(tokenizer.inside, list(compress(texts, inner)), num_threads, special))
        encoded = [next(within) if part else ids for ids, part in zip(encoded, inner, strict=True)]
    return [whole(ids) for ids in encoded]


def write_vocabulary(prefix: Path, tokenizer: Tokenizer, source: Path | None = None) -> None:
    """Writes `<prefix>_tokenizer.bin`, so that whoever reads the data can turn it back into text. Before it writes what
    belongs to the tokenizer's file, `source`: of a .json `<prefix>_tokenizer.json`, which encodes prompts as the data,
    and the files beside it."""
    if source is not None and source.suffix in (".json", ".bin"):
        for name, content in tokenizer_files(source, f"{prefix.name}_").items():
            with replacing(prefix.with_name(name)) as file:
                file.write(content)
    path = prefix.with_name(f"{prefix.name}_tokenizer.bin")
    known = tokenizer.bos, tokenizer.special, tokenizer.space, tokenizer.as_gpt2
    write_tokenizer(path, tokenizer.tokens, tokenizer.eot, *known)
    print(f"{path.name}: {counted(tokenizer.vocab_size, 'token')} in the vocabulary")

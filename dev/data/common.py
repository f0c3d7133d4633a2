"""What the dataset scripts share: fetching, encoding, writing, and how a program of theirs ends."""

import http.client
import io
import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from device.errors import UserError
from llmc.data.dataloader import write_tokens
from llmc.data.tokenizer import Tokenizer, gpt2_tokenizer, tokenizer_files, without_surrogates, write_tokenizer
from llmc.files.files import open_file, replacing
from llmc.run.program import run_program

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "data"


class Unsuitable(UserError):
    """What the texts do not allow with these options: what has been done is of no use."""


def run(main: Callable[[], None]) -> None:
    """Runs a program that goes on where it was interrupted; what the user must mend becomes one line on stderr."""
    run_program(main, interrupted="interrupted; run the same command again to go on", interrupted_code=1)


def download(url: str, path: Path) -> None:
    """Fetches a file, unless it is there, showing how far it is. Raises UserError where that fails or stops halfway."""
    if path.exists():
        print(f"{path} is there already")
        return
    make_folder(path.parent)
    with replacing(path) as file:
        shown = time.monotonic()
        for chunk, total in receive(url):
            file.write(chunk)
            if time.monotonic() - shown > 1:
                shown = time.monotonic()
                print(f"{path.name}: {file.tell():,}{'' if total is None else f' of {total:,}'} bytes", flush=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


def receive(url: str) -> Iterator[tuple[bytes, int | None]]:
    """The pieces of what a URL stands for, each with the size of the whole, or None where the server does not say."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
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


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises UserError where there is none."""
    try:
        with open_file(path) as file:
            return io.TextIOWrapper(file, encoding="utf-8").read()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror.lower()}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (at byte {error.start})") from None


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of a `.bin` or a `tokenizer.json`, or GPT-2's. Says where it changes texts."""
    tokenizer = gpt2_tokenizer() if path is None else Tokenizer.load(path)
    if changes := changes_of(tokenizer):
        print(f"{path}: its normalizer ({changes}) changes texts before they are encoded")
    return tokenizer


def changes_of(tokenizer: Tokenizer) -> str:
    """What the tokenizer's normalizer does to a text, in the tokenizers library's words; "" where it has none."""
    if tokenizer.normalizer is None:
        return ""
    state = json.loads(tokenizer.normalizer.__getstate__())
    return " + ".join(part["type"] for part in state.get("normalizers", [state]))


def encode(tokenizer: Tokenizer, texts: list[str], num_threads: int | None = None) -> list[list[int]]:
    """The tokens of texts. Raises Unsuitable where a text cannot be had back from its tokens."""
    encoded = tokenizer.encode_ordinary_batch(texts, num_threads)
    for text, ids in zip(texts, encoded, strict=True):
        _check_spelling(tokenizer, text, ids)
    return encoded


def _check_spelling(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    """Raises Unsuitable unless the tokens of a text spell it. What a normalizer has changed may differ, for the
    tokenizer's file asks for that, and a space before the text, which some tokenizers put there."""
    spelled = b"".join([tokenizer.tokens[token] for token in ids])
    if spelled == text.encode(errors="surrogatepass"):
        return
    text = without_surrogates(text)
    text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    wanted = text.encode()
    if spelled in (wanted, b" " + wanted):
        return
    at = len(wanted[: len(os.path.commonprefix([spelled, wanted]))].decode(errors="ignore"))
    raise Unsuitable(
        f"--tokenizer: it cannot spell {text[at : at + 1]!r} in {text[max(0, at - 20) : at + 20]!r}: a text of "
        f"{len(wanted):,} bytes comes back from its tokens with {len(spelled):,}; use a tokenizer that has all 256 "
        "bytes, such as GPT-2's, or let dev/data/text.py learn one (--train-tokenizer)"
    )


def encode_texts(tokenizer: Tokenizer, texts: list[str], num_threads: int | None = None) -> list[list[int]]:
    """The tokens of texts as a dataset holds them: before each the token that begins a text. Raises Unsuitable as
    `encode` does."""
    return [[tokenizer.bos, *tokens] for tokens in encode(tokenizer, texts, num_threads)]


def write_vocabulary(prefix: Path, tokenizer: Tokenizer, source: Path | None = None) -> None:
    """Writes `<prefix>_tokenizer.bin`, so that whoever reads the data can turn it back into text, and where the
    tokenizer is of a .json, `source`, before it `<prefix>_tokenizer.json`, which encodes prompts as the data.

    Its end-of-text token, which the trainer begins its samples with, is the one that stands before each text.
    """
    if source is not None and source.suffix == ".json":
        for name, content in tokenizer_files(source, f"{prefix.name}_").items():
            with replacing(prefix.with_name(name)) as file:
                file.write(content)
    path = prefix.with_name(f"{prefix.name}_tokenizer.bin")
    write_tokenizer(path, tokenizer.tokens, tokenizer.bos)
    print(f"{path}: {tokenizer.vocab_size:,} tokens in the vocabulary")


def write_dataset(
    prefix: Path, tokenizer: Tokenizer, train: list[int], val: list[int], source: Path | None = None
) -> None:
    """Writes what `write_vocabulary` does, `<prefix>_train.bin` and, last of all, `<prefix>_val.bin`."""
    make_folder(prefix.parent)
    write_vocabulary(prefix, tokenizer, source)
    for split, tokens in (("train", train), ("val", val)):
        path = prefix.with_name(f"{prefix.name}_{split}.bin")
        write_tokens(path, np.array(tokens, dtype=np.int64), tokenizer.vocab_size)
        print(f"{path}: {len(tokens):,} tokens")

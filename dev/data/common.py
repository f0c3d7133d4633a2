"""What the dataset scripts share: fetching, encoding, writing, and how a program of theirs ends."""

import http.client
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tiktoken

from llmc.dataloader import write_tokens
from llmc.errors import UserError
from llmc.files import replacing
from llmc.tokenizer import Tokenizer, gpt2_encoding, token_bytes, write_tokenizer

DATA = Path(__file__).resolve().parents[2] / "data"


def run(main: Callable[[], None]) -> None:
    """Runs a program; what the user must mend becomes one line on stderr and exit status 1."""
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to go on")


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
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror.lower()}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (at byte {error.start})") from None


def encoding_of(tokenizer: Path | None) -> tiktoken.Encoding:
    """The encoding of a tokenizer `.bin`, or GPT-2's."""
    return gpt2_encoding() if tokenizer is None else Tokenizer.load(tokenizer).encoding


def write_encoding(path: Path, encoding: tiktoken.Encoding) -> None:
    """Writes the tokenizer `.bin` of an encoding, so that whoever reads the data can turn it back into text."""
    write_tokenizer(path, token_bytes(encoding), encoding.eot_token)
    print(f"{path}: {encoding.n_vocab:,} tokens in the vocabulary")


def write_dataset(prefix: Path, encoding: tiktoken.Encoding, train: list[int], val: list[int]) -> None:
    """Writes `<prefix>_tokenizer.bin`, `<prefix>_train.bin` and, last of all, `<prefix>_val.bin`."""
    make_folder(prefix.parent)
    write_encoding(prefix.with_name(f"{prefix.name}_tokenizer.bin"), encoding)
    for split, tokens in (("train", train), ("val", val)):
        path = prefix.with_name(f"{prefix.name}_{split}.bin")
        write_tokens(path, np.array(tokens, dtype=np.int64))
        print(f"{path}: {len(tokens):,} tokens")

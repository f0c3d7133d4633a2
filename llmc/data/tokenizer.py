"""Tokens to text and back, with llm.c's tokenizer `.bin`.

The file is: uint32[256] header (20240328, version, number of tokens, end-of-text token), then each token as one length
byte (1..255) and its bytes. Version 1 leaves out the end-of-text token, which is GPT-2's 50256.

The file is also enough to encode like GPT-2: byte-pair encoding merges in the order in which the tokens were learned,
and this is the order of the ids. The file does not say how text is split before merging. Other models split it
differently. For them a `tokenizer.json` says how (hf_tokenizer.py).
"""

import codecs
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from device.errors import UserError, escaped, first_line
from llmc.files.files import HEADER_BYTES, make_header, read_file, read_header, replacing
from llmc.files.magic import TOKENIZER

import numpy as np

END_OF_TEXT = "<|endoftext|>"

# How GPT-2 splits text before merging (Radford et al., 2019): contractions, then words, numbers and the rest, each with
# the space before it, then the remaining white space.
GPT2_PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

STARTER = Path("gpt2_tokenizer.bin")  # of the starter pack
REMEDY = "fetch gpt2_tokenizer.bin with dev/download_starter_pack.sh, or make one with a script in dev/data/"


class Tokenizer:
    """The bytes of every token; eot, the token that ends a text; and bos, the token that begins a text, which in a
    `.bin` is the same. special: the tokens that stand for no text."""

    rows = None  # of the model's embedding, if it has fewer than there are tokens
    normalizer = None  # the tokenizers library's, in a `.json` that has one: it changes a text before it is encoded
    lead = ""  # a space, if a `.json` puts one before a text and removes it when it decodes

    def __init__(self, tokens: list[bytes], eot: int) -> None:
        self.tokens, self.eot, self.bos, self.special = tokens, eot, eot, {eot}

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def fits(self, vocab_size: int, own: bool = False) -> bool:
        """Whether this can be the tokenizer of a model with vocab_size rows in its embedding. own: whether it is known
        to be the model's. Then there may be more tokens than rows, as where a [PAD] was added. If it is not known, that
        is a mistake, and so is more padding than half as many rows as tokens. (Vocabularies are padded to a multiple of
        64 or 128, or by a percent or two.)"""
        if own:
            return max(self.bos, self.eot) < vocab_size
        return self.vocab_size <= vocab_size and 2 * vocab_size <= 3 * self.vocab_size

    def say_rows(self, path: Path, vocab_size: int) -> None:
        """Prints a line if there are more tokens than rows in the model's embedding, and remembers the rows."""
        if vocab_size < self.vocab_size:
            self.rows, name = vocab_size, self.tokens[vocab_size].decode(errors="replace")
            count = f"{self.vocab_size - vocab_size} of {self.vocab_size} tokens"
            say_once(f"{path}: the model has no row for {count}, the first {name!r}: texts with them are refused")

    def decode(self, token: int) -> bytes:
        """The bytes of a token, which need not be whole characters. A token of the model's padding has none."""
        if token < 0:
            raise UserError(f"token {token} is not one of this tokenizer's {self.vocab_size}; use the data's own")
        return self.tokens[token] if token < self.vocab_size else b""

    def text_bytes(self, vocab_size: int) -> np.ndarray:
        """How many bytes of UTF-8 text each token of a model of vocab_size tokens stands for, int64 (vocab_size,).
        Special tokens and the model's padding stand for none. A `.bin` names only the token that ends a text as
        special, so there any other special token counts as the text of its name."""
        found = [0 if n in self.special else len(token) for n, token in enumerate(self.tokens[:vocab_size])]
        return np.array(found + [0] * (vocab_size - len(found)), np.int64)

    def normal(self, text: str) -> str:
        """A text as its tokens spell it. A `.json` may change it."""
        return text

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that the user gave. The name of a special token in it is ordinary text; a `.json` takes
        it for that token, as transformers does.

        Raises UserError if the vocabulary lacks one of the 256 single bytes, because it then cannot spell every text.
        """
        with in_one_line("tiktoken cannot encode a text"):
            return self.encoding.encode_ordinary(text) if text else []  # an empty text needs no vocabulary

    def encode_ordinary_batch(self, texts: list[str], num_threads: int | None = None) -> list[list[int]]:
        """The tokens of the texts of a dataset. The name of a special token in them is ordinary text.

        num_threads: by default as many as there are cores. (The tokenizers library, which reads a .json, obeys
        TOKENIZERS_PARALLELISM=false in the environment instead.)
        """
        with in_one_line("tiktoken cannot encode a text"):
            return self.encoding.encode_ordinary_batch(texts, num_threads=num_threads or os.cpu_count() or 1)

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        """The ids of the tokens, without the one that ends a text. Raises UserError if two tokens have the same bytes:
        then only the `.json` says how to encode."""
        ranks = {token: rank for rank, token in enumerate(self.tokens) if rank != self.eot}
        if again := self.vocab_size - 1 - len(ranks):
            raise UserError(f"{again} tokens have the bytes of another, so a .bin cannot encode: use the .json")
        return ranks

    @cached_property
    def encoding(self) -> Any:
        """This vocabulary as a tiktoken.Encoding, which splits text as GPT-2 does."""
        import tiktoken  # only where text is encoded: NumPy is enough to import a model's script

        missing = [byte for byte in range(256) if bytes([byte]) not in self.ranks]
        if missing:
            raise UserError(f"this tokenizer has no token for byte {missing[0]}, so it can decode but not encode")
        return tiktoken.Encoding(
            "tokenizer", pat_str=GPT2_PATTERN, mergeable_ranks=self.ranks, special_tokens={END_OF_TEXT: self.eot}
        )


# Tokenizer files


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer `.bin` of version 1 or 2. Raises UserError if the file is missing, damaged or something
    else."""
    _, version, vocab_size, eot = (int(n) for n in read_header(path, TOKENIZER, REMEDY)[:4])
    eot = 50256 if version == 1 else eot
    if version not in (1, 2):
        raise UserError(f"{path}: tokenizer version {version}; version 1 or 2 is needed: {REMEDY}")
    if not 0 <= eot < vocab_size:
        raise UserError(f"{path}: end-of-text token {eot} is not among its {vocab_size} tokens; {REMEDY}")
    body, tokens, at = read_file(path)[HEADER_BYTES:], [], 0
    for token in range(vocab_size):
        length = body[at] if at < len(body) else 0
        tokens.append(body[at + 1 : at + 1 + length])
        at += 1 + length
        if length == 0 or at > len(body):
            raise UserError(f"{path}: damaged at token {token} of {vocab_size}; {REMEDY}")
    if at != len(body):
        raise UserError(f"{path}: {len(body) - at} bytes too long for its {vocab_size} tokens; {REMEDY}")
    return Tokenizer(tokens, eot)


def write_tokenizer(path: str | Path, tokens: list[bytes], eot: int) -> None:
    """Writes a tokenizer `.bin`, version 2, from the bytes of every token; `path` appears whole or not at all.

    Raises UserError for a token that is empty or longer than 255 bytes.
    """
    if not 0 <= eot < len(tokens):
        raise ValueError(f"end-of-text token {eot} is not among {len(tokens)}")
    with replacing(path) as file:
        file.write(make_header(TOKENIZER, 2, len(tokens), eot).tobytes())
        for number, token in enumerate(tokens):
            if not 1 <= len(token) <= 255:
                wrong = f"token {number} has {len(token)}; use a tokenizer without such a token"
                raise UserError(f"{path}: a tokenizer .bin holds tokens of 1 to 255 bytes, and {wrong}")
            file.write(bytes([len(token)]) + token)


# Vocabularies that need no file of the user's


def byte_tokenizer() -> Tokenizer:
    """256 tokens, one a byte, and end of text as number 256: a vocabulary that needs no download."""
    return Tokenizer([bytes([byte]) for byte in range(256)] + [END_OF_TEXT.encode()], eot=256)


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's: from gpt2_tokenizer.bin in the current directory if it is there, else as tiktoken downloads it.

    Raises UserError if neither is available.
    """
    if STARTER.is_file() and (tokenizer := read_tokenizer(STARTER)).vocab_size == 50257:
        return tokenizer
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except OSError:  # the exceptions of requests are OSErrors
        remedy = "connect to the internet, or put gpt2_tokenizer.bin (dev/download_starter_pack.sh) here"
        raise UserError(f"GPT-2's vocabulary cannot be downloaded; {remedy}") from None
    return Tokenizer([encoding.decode_single_token_bytes(n) for n in range(encoding.n_vocab)], encoding.eot_token)


# Text as it comes


class StreamDecoder:
    """Turns tokens into text that can be printed as they come.

    If a character's bytes are spread over tokens, it waits until the character is whole. Bytes that are not UTF-8
    become U+FFFD. Control characters other than white space are left out for a terminal, which would obey them.
    """

    def __init__(self, tokenizer: Tokenizer, terminal: bool = True) -> None:
        self._tokenizer, self._shown, self._lead = tokenizer, printable if terminal else str, tokenizer.lead
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes; it may be empty."""
        return self._text(self._tokenizer.decode(token))

    def flush(self) -> str:
        """What is left of a character that was never completed."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, final: bool = False) -> str:
        if text := self._utf8.decode(data, final):
            text, self._lead = text.removeprefix(self._lead), ""
        return self._shown(text)


def printable(text: str) -> str:
    """The text without the control characters that a terminal would obey."""
    return "".join(c for c in text if c in "\t\n\v\f\r" or unicodedata.category(c) != "Cc")


# Messages


@contextmanager
def in_one_line(what: str, remedy: str = "") -> Iterator[None]:
    """Turns the exceptions of a tokenizer's library into a UserError. They are plain Exceptions, or panics of Rust,
    which are BaseExceptions and have no importable type."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what} ({first_line(error)}){remedy}") from None


@cache
def say_once(line: str) -> None:
    """A line on stderr, once; programs open a tokenizer several times."""
    print(escaped(line), file=sys.stderr)

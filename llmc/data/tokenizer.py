"""Tokens to text and back, with llm.c's tokenizer `.bin`.

The file is: uint32[256] header (20240328, version, number of tokens, end-of-text token), then each token as one length
byte (1..255) and its bytes. Version 1 leaves out the end-of-text token, which is GPT-2's 50256. In a file of ours the
header goes on, where llm.c reads nothing: the token that begins a text plus 1, or 0 if it is the one that ends it;
where the tokenizer puts a space (`Tokenizer.space`); 1 if it does not encode like GPT-2; and the number of special
tokens, whose ids follow the tokens as uint32.

The file is also enough to encode like GPT-2: byte-pair encoding merges in the order in which the tokens were learned,
and this is the order of the ids. The file does not say how text is split before merging. Other models split it
differently. For them a `tokenizer.json` says how (hf_tokenizer.py).
"""

import codecs
import os
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import accumulate
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


NO_SPACE, BEFORE_A_TEXT, AFTER_SPECIAL = range(3)  # where a tokenizer puts a space that is not in the text


class Tokenizer:
    """The bytes of every token; eot, the token that ends a text; bos, the token that begins a text, often the same;
    ends, all tokens that end a text; and special, the tokens that stand for no text. space: where the tokenizer puts a
    space of its own: nowhere, before a text, or there and after each special token in it. as_gpt2: whether it encodes
    as GPT-2 does, merging by the order of the ids."""

    path = "a .bin"  # where it comes from, for messages
    rows = None  # of the model's embedding, if it has fewer than there are tokens
    normalizer = None  # the tokenizers library's, in a `.json` that has one: it changes a text before it is encoded

    def __init__(
        self, tokens: list[bytes], eot: int, bos: int | None = None, special: Iterable[int] = (),
        space: int = NO_SPACE, as_gpt2: bool = True,
    ) -> None:  # fmt: skip
        self.tokens, self.eot, self.bos = tokens, eot, eot if bos is None else bos
        self.ends = {self.eot, self.bos}  # a model that has seen no eot goes on with the next text
        self.special, self.space, self.as_gpt2 = {*self.ends, *special}, space, as_gpt2

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

    def text_bytes(self, vocab_size: int) -> Callable[[np.ndarray, np.ndarray], int]:
        """A function that counts the bytes of UTF-8 text that targets stand for, given their inputs, both int32 of the
        same shape with tokens of a model of vocab_size tokens. Special tokens and the model's padding stand for none,
        nor does a space that the tokenizer puts. (A text's own space in the same place is taken for that one.)"""
        sizes, spaced, after = (np.zeros(vocab_size, kind) for kind in (np.int64, bool, bool))
        for n, token in enumerate(self.tokens[:vocab_size]):
            sizes[n], spaced[n] = (0, False) if n in self.special else (len(token), token.startswith(b" "))
            after[n] = n == self.bos if self.space == BEFORE_A_TEXT else n in self.special
        spaced &= self.space != NO_SPACE
        return lambda inputs, targets: int(sizes[targets].sum() - np.count_nonzero(after[inputs] & spaced[targets]))

    def normal(self, text: str) -> str:
        """A text as its tokens spell it. A `.json` may change it."""
        return text

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that the user gave. The name of a special token in it is that token, as in transformers.

        Raises UserError if the vocabulary lacks one of the 256 single bytes, because it then cannot spell every text.
        """
        with in_one_line("tiktoken cannot encode a text"):
            return self.encoding.encode(text, allowed_special="all") if text else []  # needs no vocabulary if empty

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text as `encode` makes them, and the place of each in the text: the index of its first
        character, and the index after its last."""
        ids = self.encode(text)
        first = self.encoding.decode_with_offsets(ids)[1] if ids else []
        begun = (sum(byte & 0xC0 != 0x80 for byte in self.decode(token)) for token in ids)  # characters, in each
        return ids, list(zip(first, accumulate(begun), strict=True))

    def encode_ordinary_batch(self, texts: list[str], num_threads: int | None = None) -> list[list[int]]:
        """The tokens of the texts of a dataset. The name of a special token in them is ordinary text.

        num_threads: by default as many as there are cores. (The tokenizers library, which reads a .json, obeys
        TOKENIZERS_PARALLELISM=false in the environment instead.)
        """
        with in_one_line("tiktoken cannot encode a text"):
            return self.encoding.encode_ordinary_batch(texts, num_threads=num_threads or os.cpu_count() or 1)

    @cached_property
    def inside(self) -> "Tokenizer":
        """The tokenizer of a part that goes on with a text. It puts no space of its own before it."""
        return self

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        """The ids of the tokens, without the special ones. Raises UserError if only the `.json` says how to encode: if
        the text is split in another way than GPT-2's, or if two tokens have the same bytes."""
        if not self.as_gpt2:
            other = "its model's text is split in another way than GPT-2's"
            raise UserError(f"{self.path}: {other}, so a .bin cannot encode: use the .json")
        ranks = {token: rank for rank, token in enumerate(self.tokens) if rank not in self.special}
        if again := self.vocab_size - len(self.special) - len(ranks):
            other = f"{again} tokens have the bytes of another"
            raise UserError(f"{self.path}: {other}, so a .bin cannot encode: use the .json")
        return ranks

    @cached_property
    def encoding(self) -> Any:
        """This vocabulary as a tiktoken.Encoding, which splits text as GPT-2 does."""
        import tiktoken  # only where text is encoded: NumPy is enough to import a model's script

        missing = [byte for byte in range(256) if bytes([byte]) not in self.ranks]
        if missing:
            raise UserError(f"this tokenizer has no token for byte {missing[0]}, so it can decode but not encode")
        names = {self.tokens[token].decode(errors="replace"): token for token in self.special}
        return tiktoken.Encoding(
            "tokenizer", pat_str=GPT2_PATTERN, mergeable_ranks=self.ranks, special_tokens=names
        )


# Tokenizer files


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer `.bin` of version 1 or 2. Raises UserError if the file is missing, damaged or something
    else."""
    _, version, vocab_size, eot, bos, space, other, num_special = map(int, read_header(path, TOKENIZER, REMEDY)[:8])
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
    if num_special == 0 and at != len(body):
        raise UserError(f"{path}: {len(body) - at} bytes too long for its {vocab_size} tokens; {REMEDY}")
    special = np.frombuffer(body, "<u4", offset=at).tolist() if at + 4 * num_special == len(body) else [-1]
    if not all(0 <= token < vocab_size for token in (max(bos - 1, 0), *special)) or space not in range(3):
        raise UserError(f"{path}: damaged in its header or after its tokens; {REMEDY}")
    tokenizer = Tokenizer(tokens, eot, bos - 1 if bos else None, special, space, not other)
    tokenizer.path = str(path)
    return tokenizer


def write_tokenizer(
    path: str | Path, tokens: list[bytes], eot: int, bos: int | None = None, special: Iterable[int] = (),
    space: int = NO_SPACE, as_gpt2: bool = True,
) -> None:  # fmt: skip
    """Writes a tokenizer `.bin`, version 2, of what makes a `Tokenizer`; `path` appears whole or not at all. Leaves out
    special tokens that are not among the tokens.

    Raises UserError for a token that is empty or longer than 255 bytes.
    """
    if not 0 <= eot < len(tokens):
        raise ValueError(f"end-of-text token {eot} is not among {len(tokens)}")
    begins = 0 if bos in (None, eot) else bos + 1
    others = sorted(token for token in special if token < len(tokens) and token not in (eot, bos))
    with replacing(path) as file:
        header = make_header(TOKENIZER, 2, len(tokens), eot, begins, space, int(not as_gpt2), len(others))
        file.write(header.tobytes())
        for number, token in enumerate(tokens):
            if not 1 <= len(token) <= 255:
                wrong = f"token {number} has {len(token)}; use a tokenizer without such a token"
                raise UserError(f"{path}: a tokenizer .bin holds tokens of 1 to 255 bytes, and {wrong}")
            file.write(bytes([len(token)]) + token)
        file.write(np.array(others, "<u4").tobytes())


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
        self._tokenizer, self._shown = tokenizer, printable if terminal else str
        self._lead = " " if tokenizer.space else ""  # not the text's
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


@contextmanager
def without_panic() -> Iterator[None]:
    """Keeps from stderr what Rust reports of a panic in a library, and shows what else comes there in the end."""
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    panic = False
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException as error:
            panic = type(error).__name__ == "PanicException"
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            if not panic:
                os.write(2, held.read())


@cache
def say_once(line: str) -> None:
    """A line on stderr, once; programs open a tokenizer several times."""
    print(escaped(line), file=sys.stderr)

"""Tokens to text and back.

A tokenizer `.bin` is llm.c's: uint32[256] header (20240328, version, number of tokens, end-of-text token), then each
token as one length byte (1..255) and its bytes. Version 1 leaves out the end-of-text token, which is GPT-2's 50256.

The file is enough to encode as well: byte-pair encoding merges in the order in which its tokens were learned, and that
is the order of the ids.
"""

import codecs
import unicodedata
from functools import cached_property
from pathlib import Path

import tiktoken

from llmc.errors import UserError
from llmc.files import HEADER_BYTES, TOKENIZER, make_header, read_header, replacing

END_OF_TEXT = "<|endoftext|>"

# How GPT-2 splits text before merging (Radford et al., 2019): contractions, then words, numbers and the rest, each with
# the space before it, then the remaining white space.
GPT2_PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

REMEDY = "fetch gpt2_tokenizer.bin with dev/download_starter_pack.sh, or make one with a script in dev/data/"


class Tokenizer:
    """The bytes of every token, and the token that ends a text."""

    def __init__(self, tokens: list[bytes], eot: int) -> None:
        self.tokens, self.eot = tokens, eot

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a tokenizer `.bin`, version 1 or 2. Raises UserError where it is missing, damaged or something else."""
        _, version, vocab_size, eot = (int(n) for n in read_header(path, TOKENIZER, REMEDY)[:4])
        if version not in (1, 2):
            raise UserError(f"{path}: tokenizer version {version}; version 1 or 2 is needed: {REMEDY}")
        if version == 1:
            eot = 50256
        if not 0 <= eot < vocab_size:
            raise UserError(f"{path}: end-of-text token {eot} is not among its {vocab_size} tokens; {REMEDY}")
        body = Path(path).read_bytes()[HEADER_BYTES:]
        tokens, at = [], 0
        for token in range(vocab_size):
            length = body[at] if at < len(body) else 0
            tokens.append(body[at + 1 : at + 1 + length])
            at += 1 + length
            if length == 0 or at > len(body):
                raise UserError(f"{path}: damaged at token {token} of {vocab_size}; {REMEDY}")
        if at != len(body):
            raise UserError(f"{path}: {len(body) - at} bytes too long for its {vocab_size} tokens; {REMEDY}")
        return cls(tokens, eot)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def decode(self, token: int) -> bytes:
        """The bytes of a token, which need not be whole characters. Raises UserError for a token out of range."""
        if not 0 <= token < self.vocab_size:
            raise UserError(f"token {token} is not one of this tokenizer's {self.vocab_size}; use the data's own")
        return self.tokens[token]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; a special token's name in it is text like any other.

        Raises UserError where the vocabulary lacks one of the 256 single bytes, and so cannot spell every text.
        """
        return self.encoding.encode_ordinary(text)

    @cached_property
    def encoding(self) -> tiktoken.Encoding:
        """This vocabulary as a tiktoken encoding, which splits text as GPT-2 does."""
        ranks = {token: rank for rank, token in enumerate(self.tokens) if rank != self.eot}
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            raise UserError(f"this tokenizer has no token for byte {missing[0]}, so it can decode but not encode")
        return tiktoken.Encoding(
            "tokenizer", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.eot}
        )


class StreamDecoder:
    """Turns tokens into text that can be printed as they come.

    A character whose bytes are spread over tokens is held back until it is whole; bytes that are no UTF-8 become
    U+FFFD. Control characters other than white space are left out, since a terminal would obey them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        return _printable(self._utf8.decode(self._tokenizer.decode(token)))

    def flush(self) -> str:
        """What is left of a character that was never completed."""
        return _printable(self._utf8.decode(b"", final=True))


def _printable(text: str) -> str:
    return "".join(c for c in text if c in "\t\n\v\f\r" or unicodedata.category(c) != "Cc")


def write_tokenizer(path: str | Path, tokens: list[bytes], eot: int) -> None:
    """Writes a tokenizer `.bin`, version 2, from the bytes of every token; `path` appears whole or not at all."""
    if not 0 <= eot < len(tokens):
        raise ValueError(f"end-of-text token {eot} is not among {len(tokens)}")
    with replacing(path) as file:
        file.write(make_header(TOKENIZER, 2, len(tokens), eot).tobytes())
        for token in tokens:
            if not 1 <= len(token) <= 255:
                raise ValueError(f"a token takes 1 to 255 bytes, not {len(token)}")
            file.write(bytes([len(token)]) + token)


def find_tokenizer(data: str | Path, directory: str | Path = ".") -> Path | None:
    """The tokenizer for a dataset given as prefix, file or glob: its own `<prefix>_tokenizer.bin`, else
    `gpt2_tokenizer.bin` in `directory`, else None."""
    prefix = str(data)
    for split in ("_train", "_val"):
        head, found, tail = prefix.rpartition(split)
        if found and "/" not in tail:
            prefix = head
    for path in (Path(f"{prefix}_tokenizer.bin"), Path(directory) / "gpt2_tokenizer.bin"):
        if path.is_file():
            return path
    return None


def byte_encoding() -> tiktoken.Encoding:
    """256 tokens, one a byte, and end of text as number 256: a vocabulary that needs no download."""
    return Tokenizer([bytes([byte]) for byte in range(256)] + [END_OF_TEXT.encode()], eot=256).encoding


def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's encoding: from gpt2_tokenizer.bin in the current directory where it is, else as tiktoken downloads it.

    Raises UserError where neither can be had.
    """
    if Path("gpt2_tokenizer.bin").is_file():
        tokenizer = Tokenizer.load("gpt2_tokenizer.bin")
        if tokenizer.vocab_size == 50257:
            return tokenizer.encoding
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError:  # what requests raises is one
        raise UserError(
            "GPT-2's vocabulary cannot be downloaded; connect to the internet, or put gpt2_tokenizer.bin "
            "(dev/download_starter_pack.sh) in the current directory"
        ) from None


def token_bytes(encoding: tiktoken.Encoding) -> list[bytes]:
    """The bytes of every token of an encoding, in order of the ids: what `write_tokenizer` takes."""
    return [encoding.decode_single_token_bytes(token) for token in range(encoding.n_vocab)]

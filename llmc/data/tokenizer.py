"""Tokens to text and back.

A tokenizer `.bin` is llm.c's: uint32[256] header (20240328, version, number of tokens, end-of-text token), then each
token as one length byte (1..255) and its bytes. Version 1 leaves out the end-of-text token, which is GPT-2's 50256.

The file is also enough to encode like GPT-2: byte-pair encoding merges in the order in which the tokens were learned,
and this is the order of the ids. The file does not say how text is split before merging. Other models split it
differently. For them a `tokenizer.json`, the file of Hugging Face's tokenizers library, says how, and this library
encodes.
"""

import codecs
import importlib.util
import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from device.errors import UserError, escaped, first_line
from llmc.files.files import HEADER_BYTES, TOKENIZER, check_no_pointer, make_header, open_file, read_header, replacing

import numpy as np

END_OF_TEXT = "<|endoftext|>"

# How GPT-2 splits text before merging (Radford et al., 2019): contractions, then words, numbers and the rest, each with
# the space before it, then the remaining white space.
GPT2_PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

TEXT_ENDS = (END_OF_TEXT, "<|end_of_text|>")  # names that say what the token is for
OTHER_ENDS = ("</s>", "<eos>", "<|im_end|>")  # tokens that may end a text, or a part of one

# Files that go along with a tokenizer.json; x_config.json beside x_tokenizer.json. The .json may name the token that
# ends a text.
NEIGHBOURS = (
    "tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json", "chat_template.jinja"
)  # fmt: skip
STARTER = Path("gpt2_tokenizer.bin")  # of the starter pack

BYTES_OF_UTF8 = [*range(192), *range(194, 245)]  # all that a text can hold
MOST_TOKENS = 1 << 20  # no vocabulary is as large, except in a damaged file

REMEDY = "fetch gpt2_tokenizer.bin with dev/download_starter_pack.sh, or make one with a script in dev/data/"
JSON_REMEDY = "take the model's own tokenizer.json from the Hugging Face hub"
SUPPORTED = "byte-level BPE is supported, as of GPT-2, Llama 3 or Pythia, and byte fallback, as of Llama 2 or Mistral"
CUTTING = re.compile(r'"(type": "(Whitespace|WhitespaceSplit|Bert\w+|CharDelimiterSplit)|behavior": "Removed)"')
SAMPLE = "It's the  12th\tof\n\nMay, naïve café 你好 🙂 (b)"


class Tokenizer:
    """The bytes of every token, the token that ends a text, and the token that begins one; in a `.bin` these two are
    the same. special: the tokens that stand for no text."""

    rows = None  # of the model's embedding, if it has fewer than there are tokens
    normalizer = None  # a `.json` may have one, of the tokenizers library: it changes a text before it is encoded
    lead = ""  # what a `.json` puts before a text and takes from it when it decodes: a space or nothing

    def __init__(self, tokens: list[bytes], eot: int) -> None:
        self.tokens, self.eot, self.bos, self.special = tokens, eot, eot, {eot}

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """Reads a tokenizer: a `.json` as HuggingFaceTokenizer does, else a `.bin` of version 1 or 2.

        Raises UserError if the file is missing, damaged or something else.
        """
        if Path(path).suffix == ".json":
            return HuggingFaceTokenizer(path)
        _, version, vocab_size, eot = (int(n) for n in read_header(path, TOKENIZER, REMEDY)[:4])
        eot = 50256 if version == 1 else eot
        if version not in (1, 2):
            raise UserError(f"{path}: tokenizer version {version}; version 1 or 2 is needed: {REMEDY}")
        if not 0 <= eot < vocab_size:
            raise UserError(f"{path}: end-of-text token {eot} is not among its {vocab_size} tokens; {REMEDY}")
        body, tokens, at = Path(path).read_bytes()[HEADER_BYTES:], [], 0
        for token in range(vocab_size):
            length = body[at] if at < len(body) else 0
            tokens.append(body[at + 1 : at + 1 + length])
            at += 1 + length
            if length == 0 or at > len(body):
                raise UserError(f"{path}: damaged at token {token} of {vocab_size}; {REMEDY}")
        if at != len(body):
            raise UserError(f"{path}: {len(body) - at} bytes too long for its {vocab_size} tokens; {REMEDY}")
        return Tokenizer(tokens, eot)

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
            count = f"{self.vocab_size - vocab_size} of {self.vocab_size}"
            _say(f"{path}: the model has no row for {count} tokens, the first {name!r}: texts with them are refused")

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
        with _in_one_line("tiktoken cannot encode a text"):
            return self.encoding.encode_ordinary(text) if text else []  # an empty text needs no vocabulary

    def encode_ordinary_batch(self, texts: list[str], num_threads: int | None = None) -> list[list[int]]:
        """The tokens of the texts of a dataset. The name of a special token in them is ordinary text.

        num_threads: by default as many as there are cores. (The tokenizers library, which reads a .json, obeys
        TOKENIZERS_PARALLELISM=false in the environment instead.)
        """
        with _in_one_line("tiktoken cannot encode a text"):
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


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`. It encodes as transformers does, through the same library.

    The file spells its tokens in GPT-2's letters for bytes, or as Llama 2's does: ▁ stands for a space, and <0x0A> for
    the byte of a character that has no token. A text begins with the token that the file puts there, such as Llama 3's
    <|begin_of_text|>, else with the token that ends the text before. That is the one named <|endoftext|> or
    <|end_of_text|>, else the end of sequence that tokenizer_config.json, config.json or generation_config.json names
    (in a chat model that would end a turn), else </s>, <eos> or <|im_end|>.
    """

    encoding = None  # tiktoken's is for a .bin, which does not say how text is split

    def __init__(self, path: str | Path) -> None:
        """Raises UserError if the file is missing, damaged or of another kind, if no end is known, or if the tokenizers
        library is missing."""
        content = read_json(path)
        with _in_one_line(f"{path}: the tokenizers library cannot read it", f"; {JSON_REMEDY}"):
            self._path, self._fallback, self._library = path, _falls_back(path, content), _open_library(path)
            self.normalizer = self._library.normalizer
            tokens = self._spelled_tokens()
            super().__init__(tokens, _end_of_text(Path(path), tokens))
            self.bos = next(iter(self._library.encode("").ids), self.eot)
            if self.bos >= len(tokens):
                raise UserError(f"{path}: it begins a text with token {self.bos} of {len(tokens)}; {JSON_REMEDY}")
            added_tokens = self._library.get_added_tokens_decoder()
            self.special |= {self.bos, *(token for token, added in added_tokens.items() if added.special)}
            self._check_spelling()

    def _spelled_tokens(self) -> list[bytes]:
        """The bytes of every token, in the order of the ids. An id that is not used gets a name. Prints a line if some
        byte has no token."""
        ids = self._library.get_vocab(with_added_tokens=True)
        size = max(ids.values(), default=-1) + 1
        if not 0 < size < MOST_TOKENS:
            raise UserError(f"{self._path}: tokens with ids up to {size - 1} are no vocabulary; {JSON_REMEDY}")
        spellings = [f"<0x{byte:02X}>" for byte in range(256)] if self._fallback else byte_letters()
        byte_of = {spelling: byte for byte, spelling in enumerate(spellings)}
        self._missing = [byte for byte in BYTES_OF_UTF8 if spellings[byte] not in ids]
        if self._missing:
            count, first = len(self._missing), self._missing[0]
            _say(f"{self._path}: it has no token for {count} bytes, the first {first:#04x}: texts lose them")
        tokens = [b"<|unused %d|>" % token for token in range(size)]
        for spelling, token in ids.items():
            found = [byte_of.get(part) for part in ([spelling] if self._fallback else spelling)]
            text = spelling.replace("▁", " ") if self._fallback else spelling
            tokens[token] = text.encode() if None in found else bytes(found)
        if not self._fallback:  # added tokens are not spelled in letters for bytes
            for token, added in self._library.get_added_tokens_decoder().items():
                tokens[token] = added.content.encode()
        return tokens

    def _check_spelling(self) -> None:
        """Raises UserError unless the tokens of a text spell it. Finds out whether the library's decoder drops a space
        in front."""
        sample = "".join(c for c in SAMPLE if not set(c.encode()) & set(self._missing))
        ids = self._library.encode(sample, add_special_tokens=False).ids
        spelled, wanted = b"".join(self.tokens[token] for token in ids), self.normal(sample).encode()
        if spelled not in (wanted, b" " + wanted):
            found = f"{wanted.decode()!r} comes back as {spelled.decode(errors='replace')!r}"
            raise UserError(f"{self._path}: its tokens do not spell a text: {found}; {SUPPORTED}")
        decoded = self._library.decode(ids, skip_special_tokens=False)
        self.lead = " " * (spelled == b" " + decoded.encode())

    def normal(self, text: str) -> str:
        text = self.normalizer.normalize_str(text) if self.normalizer else text
        return text.replace("▁", " ") if self._fallback else text

    def encode(self, text: str) -> list[int]:
        with _in_one_line(f"{self._path}: the tokenizers library cannot encode a text"):
            return self._library.encode(without_surrogates(text), add_special_tokens=False).ids

    def encode_ordinary_batch(self, texts: list[str], num_threads: int | None = None) -> list[list[int]]:
        self._library.encode_special_tokens = True  # as text
        texts = [without_surrogates(text) for text in texts]
        try:
            with _in_one_line(f"{self._path}: the tokenizers library cannot encode a text"):
                return [found.ids for found in self._library.encode_batch_fast(texts, add_special_tokens=False)]
        finally:
            self._library.encode_special_tokens = False


@contextmanager
def _in_one_line(what: str, remedy: str = "") -> Iterator[None]:
    """Turns the exceptions of a library into a UserError. They are plain Exceptions, or panics of Rust, which are
    BaseExceptions and have no importable type."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what} ({first_line(error)}){remedy}") from None


def read_json(path: str | Path, remedy: str = JSON_REMEDY) -> dict:
    """The object in a JSON file. Raises UserError if there is none."""
    try:
        with open_file(path) as file:
            content = json.loads(file.read())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror.lower()}; {remedy}") from None
    except (ValueError, RecursionError):
        check_no_pointer(path)
        raise UserError(f"{path}: not JSON, or damaged; {remedy}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; {remedy}")
    return content


def _falls_back(path: str | Path, content: dict) -> bool:
    """Whether the tokens of a tokenizer.json are spelled as Llama 2's; else as GPT-2's. Raises UserError if its decoder
    is of neither kind, if its pre-tokenizer leaves characters out, or for an id that no model has. (The library would
    number that token anew.)"""
    added = content.get("added_tokens")
    ids = [part.get("id") for part in added if isinstance(part, dict)] if isinstance(added, list) else []
    if (highest := max((token for token in ids if isinstance(token, int)), default=0)) >= MOST_TOKENS:
        raise UserError(f"{path}: it adds a token with the id {highest}, which no model has; {JSON_REMEDY}")
    if CUTTING.search(json.dumps(content.get("pre_tokenizer"))):
        raise UserError(f"{path}: its pre-tokenizer leaves characters out; {SUPPORTED}")
    kinds = re.findall(r'"type": "(\w+)"', json.dumps(content.get("decoder")))
    if not {"ByteLevel", "ByteFallback"} & set(kinds):
        raise UserError(f"{path}: its decoder is {' + '.join(kinds) or 'missing'}; {SUPPORTED}")
    return "ByteFallback" in kinds


def _open_library(path: str | Path):
    """The tokenizers library's own object for a tokenizer.json. Switches off what draws or cuts, and prints a line."""
    try:
        import tokenizers  # here, because a .bin does not need it
    except ImportError:
        raise UserError(f"{path}: this needs the tokenizers library; install it with: pip install tokenizers") from None
    library = tokenizers.Tokenizer.from_file(str(path))
    dropout = getattr(library.model, "dropout", None)  # of BPE alone
    if dropout:
        library.model.dropout = None
    on = {f"dropout of {dropout}": dropout, "truncation": library.truncation, "padding": library.padding}
    if off := [name for name, value in on.items() if value]:
        _say(f"{path}: switched off here: {', '.join(off)}")
    library.no_truncation()
    library.no_padding()
    return library


@cache
def _say(line: str) -> None:
    """A line on stderr, once; programs open a tokenizer several times."""
    print(escaped(line), file=sys.stderr)


def _end_of_text(path: Path, tokens: list[bytes]) -> int:
    """The token that ends a text. Raises UserError if neither the vocabulary nor a file beside it says which."""
    ids, named = {token: number for number, token in enumerate(tokens)}, []
    for name in NEIGHBOURS:
        beside = path.with_name(path.name.rpartition("tokenizer.json")[0] + name)
        if name.endswith(".json") and beside.is_file():
            end, several = (read_json(beside).get(key) for key in ("eos_token", "eos_token_id"))
            named.append(end.get("content") if isinstance(end, dict) else end)  # an AddedToken, written out
            named += several[:1] if isinstance(several, list) else [several]  # chat models have several
    for end in (*TEXT_ENDS, *named, *OTHER_ENDS):
        token = ids.get(end.encode(errors="surrogatepass")) if isinstance(end, str) else end
        if type(token) is int and 0 <= token < len(tokens):
            return token
    raise UserError(
        f"{path}: it does not say which token ends a text; put the model's tokenizer_config.json, which names this "
        "token as eos_token, beside it"
    )


def without_surrogates(text: str) -> str:
    """Text that UTF-8 can hold. Python's strings may have halves of characters (surrogates); these become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def byte_letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's vocabulary: the byte's own if it is printable Latin-1, else the
    next free one from 256 on (Radford et al., 2019, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


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


# The tokenizer of a dataset, and of a model


def find_tokenizer(data: str | Path, model: Path | None = None, name: str = "") -> Path | None:
    """The tokenizer for a dataset, which is a prefix, a file or a glob: its own, else that of the `model` which trains
    on it (a .bin first). A new GPT-2 (its `name`, and no file) takes the starter pack's from the current directory. For
    other models this would be a guess, so a line says how to name it."""
    files = sorted(model_tokenizers(model), key=lambda path: path.suffix != ".bin") if model else []
    found = own_tokenizer(data) or next(iter(files), None)
    if found is None and STARTER.is_file():
        if name == "GPT-2" and model is None:
            return STARTER
        what = f"{data}: no tokenizer is beside it or the model; if {STARTER} is its, copy it to <prefix>_tokenizer.bin"
        print(escaped(what))
    return found


def own_tokenizer(data: str | Path) -> Path | None:
    """The tokenizer that lies beside a dataset, `<prefix>_tokenizer.bin` or `.json`, if any."""
    return next(filter(Path.is_file, _own_tokenizers(data, ".bin", ".json")), None)


def _own_tokenizers(data: str | Path, *suffixes: str) -> list[Path]:
    """Where a dataset's own tokenizer may be. `data` may be a prefix that contains the name of a split."""
    heads = [str(data)]
    for split in ("_train", "_val"):
        head, found, tail = str(data).rpartition(split)
        if found and "/" not in tail:
            heads.append(head)
    return [Path(f"{head}_tokenizer{suffix}") for head in sorted(heads, key=len, reverse=True) for suffix in suffixes]


def tokenizer_files(path: Path, prefix: str) -> dict[str, bytes]:
    """The files of a tokenizer, by the names that they get with another prefix. They are the file itself; beside an
    `x_tokenizer.bin` the `x_tokenizer.json` that says how a prompt is encoded; beside a .json the NEIGHBOURS. Empty
    files are left out. Raises UserError if one cannot be read."""
    own = f"tokenizer{path.suffix}"
    named = path.name.endswith(own)
    old = path.name.removesuffix(own) if named else ""
    others = ("tokenizer.json", *NEIGHBOURS) if named or path.suffix == ".json" else ()
    places = {name: path.with_name(old + name) for name in others} | {own: path}
    try:
        files = {prefix + name: file.read_bytes() for name, file in places.items() if file.is_file()}
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror.lower()}") from None
    return {name: content for name, content in files.items() if content}


def check_tokenizer(path: Path, tokenizer: Tokenizer, model: Path, vocab_size: int) -> None:
    """Raises UserError if the tokenizer in `path`, of data, is not that of a model of vocab_size tokens. It must have
    as many tokens, apart from padding. And if a `.bin` lies beside the model (`model_tokenizers`), its tokens must be
    those. Then it may have more tokens than the model has rows, and a line says so."""
    known = next((file for file in model_tokenizers(model) if file.suffix == ".bin"), None)
    theirs = Tokenizer.load(known).tokens if known else []
    same = known and all(a == b for a, b in zip(tokenizer.tokens, theirs, strict=False))  # apart from padding
    wrong = f"has other tokens than {known}, the tokenizer of the model {model}" if known and not same else ""
    if not tokenizer.fits(vocab_size, own=bool(same)):
        wrong = f"has {tokenizer.vocab_size} tokens and the model {model} {vocab_size}"
    if wrong:
        raise UserError(f"{path} {wrong}: use data (-i) and a model (-e) of the same tokenizer")
    tokenizer.say_rows(path, vocab_size)


def model_tokenizers(model: Path, trained: Mapping[str, Any] | None = None) -> list[Path]:
    """The tokenizer files for a model that exist, the best first. Beside the model, as in a checkpoint, they are
    `<model>_tokenizer.json`, `tokenizer.json` and `<model>_tokenizer.bin`, and of `gpt2_*.bin` the starter pack's
    `gpt2_tokenizer.bin`. A .json says how a prompt is encoded.

    trained: the flags that a checkpoint has recorded. Old checkpoints hold no tokenizer; for them the .json and the
    .bin of their data follow."""
    names = [f"{model.stem}_tokenizer.json", "tokenizer.json", f"{model.stem}_tokenizer.bin"]
    files = [model.with_name(name) for name in names + [STARTER.name] * model.name.startswith("gpt2_")]
    if trained and "tokenizer" not in trained and trained.get("data"):
        files += _own_tokenizers(trained["data"], ".json", ".bin")
    return list(filter(Path.is_file, files))


def load_model_tokenizer(
    model: Path, vocab_size: int, file: Path | None = None, trained: Mapping[str, Any] | None = None,
    encodes: bool = False,
) -> Tokenizer:  # fmt: skip
    """The tokenizer of a model of vocab_size tokens: the one that the user names, a file, "gpt2" or "bytes"; else the
    best of `model_tokenizers`. encodes: whether text must be encoded exactly. A .bin is enough to decode, and comes
    first if the tokenizers library, which reads a .json, is missing.

    Raises UserError if there is none; for a file that is not for this model; and for a .json that cannot be read.
    """
    named = {"gpt2": gpt2_tokenizer, "bytes": byte_tokenizer}.get(str(file))
    files = model_tokenizers(model, trained)
    if not encodes and not importlib.util.find_spec("tokenizers"):
        files.sort(key=lambda path: path.suffix == ".json")
    file = file or next(iter(files), None)
    if file is None:
        wrong = f"{model}: no file beside it says which tokenizer it has"
        if trained and "tokenizer" in trained:
            wrong = f"{model.parent} was trained without a tokenizer"
        raise UserError(f"{wrong}: name it with --tokenizer FILE, or --tokenizer gpt2 or bytes")
    tokenizer = named() if named else Tokenizer.load(file)
    own = file in model_tokenizers(model)
    if not tokenizer.fits(vocab_size, own):
        sizes = f"{file} has {tokenizer.vocab_size} tokens and {model} {vocab_size}"
        raise UserError(f"{sizes}: name the model's own tokenizer with --tokenizer")
    tokenizer.say_rows(file, vocab_size)
    if not own and file in files:
        print(f"tokenizer: {escaped(file)}, which lies where the data of {model} was", file=sys.stderr)
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """256 tokens, one a byte, and end of text as number 256: a vocabulary that needs no download."""
    return Tokenizer([bytes([byte]) for byte in range(256)] + [END_OF_TEXT.encode()], eot=256)


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's: from gpt2_tokenizer.bin in the current directory if it is there, else as tiktoken downloads it.

    Raises UserError if neither is available.
    """
    if STARTER.is_file() and (tokenizer := Tokenizer.load(STARTER)).vocab_size == 50257:
        return tokenizer
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except OSError:  # the exceptions of requests are OSErrors
        remedy = "connect to the internet, or put gpt2_tokenizer.bin (dev/download_starter_pack.sh) here"
        raise UserError(f"GPT-2's vocabulary cannot be downloaded; {remedy}") from None
    return Tokenizer([encoding.decode_single_token_bytes(n) for n in range(encoding.n_vocab)], encoding.eot_token)

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
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from device.errors import UserError, first_line
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

BYTES_OF_UTF8 = [*range(192), *range(194, 245)]  # all that a text can hold

MOST_TOKENS = 1 << 20  # no vocabulary is as large, except in a damaged file

REMEDY = "fetch gpt2_tokenizer.bin with dev/download_starter_pack.sh, or make one with a script in dev/data/"
JSON_REMEDY = "take the model's own tokenizer.json from the Hugging Face hub"
CUTTING = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit")  # pre-tokenizers
SUPPORTED = "byte-level BPE is supported, as of GPT-2, Llama 3, SmolLM2 or Pythia"


class Tokenizer:
    """The bytes of every token, the token that ends a text, and the token that begins one; in a `.bin` these two are
    the same. special: the tokens that stand for no text."""

    rows = None  # of the model's embedding, if it has fewer than there are tokens
    normalizer = None  # a `.json` may have one, of the tokenizers library: it changes a text before it is encoded

    def __init__(self, tokens: list[bytes], eot: int) -> None:
        self.tokens, self.eot, self.bos, self.special = tokens, eot, eot, {eot}

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """Reads a tokenizer: a `.json` as `HuggingFaceTokenizer.load` does, else a `.bin` of version 1 or 2.

        Raises UserError if the file is missing, damaged or something else.
        """
        if Path(path).suffix == ".json":
            return HuggingFaceTokenizer.load(path)
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
        return Tokenizer(tokens, eot)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def fits(self, vocab_size: int, own: bool = False) -> bool:
        """Whether this can be the tokenizer of a model with vocab_size rows in its embedding. Rows without a token are
        padding. own: whether the tokenizer is known to be the model's. Then there may be more tokens than rows, as
        where a [PAD] was added. If it is not known, that is a mistake, and so is too much padding: more than half as
        many rows as there are tokens. (Vocabularies are padded to a multiple of 64 or 128, or by a percent or two.)"""
        if own:
            return max(self.bos, self.eot) < vocab_size
        return self.vocab_size <= vocab_size and 2 * vocab_size <= 3 * self.vocab_size

    def say_rows(self, path: Path, vocab_size: int) -> None:
        """Prints a line if there are more tokens than rows in the model's embedding, and remembers the rows."""
        if vocab_size < self.vocab_size:
            self.rows = vocab_size
            name = self.tokens[vocab_size].decode(errors="replace")
            _say(
                f"{path}: the model has no row for {self.vocab_size - vocab_size} of {self.vocab_size} tokens, the "
                f"first {name!r}: texts with them are refused"
            )

    def decode(self, token: int) -> bytes:
        """The bytes of a token, which need not be whole characters. A token of the model's padding has none. Raises
        UserError for a token below 0."""
        if token < 0:
            raise UserError(f"token {token} is not one of this tokenizer's {self.vocab_size}; use the data's own")
        return self.tokens[token] if token < self.vocab_size else b""

    def text_bytes(self, vocab_size: int) -> np.ndarray:
        """How many bytes of UTF-8 text each token of a model of vocab_size tokens stands for, int64 (vocab_size,).
        Special tokens and the model's padding stand for none.

        The token that ends a text is special. A `.json` may call other tokens special, too. A `.bin` names no others,
        so there any other special token counts as the text of its name.
        """
        lengths = np.zeros(vocab_size, np.int64)
        found = [0 if n in self.special else len(token) for n, token in enumerate(self.tokens[:vocab_size])]
        lengths[: len(found)] = found
        return lengths

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that the user gave. The name of a special token in it is ordinary text.

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
    def encoding(self) -> Any:
        """This vocabulary as a tiktoken.Encoding, which splits text as GPT-2 does."""
        import tiktoken  # only where text is encoded: NumPy is enough to import a model's script

        ranks = {token: rank for rank, token in enumerate(self.tokens) if rank != self.eot}
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            raise UserError(f"this tokenizer has no token for byte {missing[0]}, so it can decode but not encode")
        return tiktoken.Encoding(
            "tokenizer", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.eot}
        )


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, made by `load`. It encodes as transformers does, through the same library.

    A text begins with the token that the file puts there, such as Llama 3's <|begin_of_text|>. If the file puts none
    there, it begins with the token that ends the text before.
    """

    encoding = None  # tiktoken's is for a .bin, which does not say how text is split

    def __init__(self, path: str | Path, library, tokens: list[bytes], eot: int) -> None:
        super().__init__(tokens, eot)
        self._path, self._library, self.normalizer = path, library, library.normalizer
        self.bos = next(iter(library.encode("").ids), eot)
        if self.bos >= len(tokens):
            raise UserError(f"{path}: it begins a text with token {self.bos} and has {len(tokens)}; {JSON_REMEDY}")
        added_tokens = library.get_added_tokens_decoder()
        self.special |= {self.bos, *(token for token, added in added_tokens.items() if added.special)}

    @classmethod
    def load(cls, path: str | Path) -> "HuggingFaceTokenizer":
        """Reads a `tokenizer.json` of the byte-level kind, and finds the token that ends a text.

        This is the token named <|endoftext|> or <|end_of_text|>. If there is none, it is the end of sequence that
        tokenizer_config.json, config.json or generation_config.json names. (In a chat model that would end a turn.) If
        they name none, it is </s>, <eos> or <|im_end|>.

        Raises UserError if the file is missing, damaged or of another kind, if no end is known, or if the tokenizers
        library is missing.
        """
        content = _read_json(path)
        _check_byte_level(path, content)
        with _in_one_line(f"{path}: the tokenizers library cannot read it", f"; {JSON_REMEDY}"):
            library = _open_library(path)
            tokens = _spelled_tokens(path, library)
            return cls(path, library, tokens, _end_of_text(Path(path), tokens))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that the user gave. The name of a special token in it stands for that token, as in
        transformers."""
        with self._encoding():
            return self._library.encode(without_surrogates(text), add_special_tokens=False).ids

    def encode_ordinary_batch(self, texts: list[str], num_threads: int | None = None) -> list[list[int]]:
        self._library.encode_special_tokens = True  # as text
        texts = [without_surrogates(text) for text in texts]
        try:
            with self._encoding():
                return [found.ids for found in self._library.encode_batch_fast(texts, add_special_tokens=False)]
        finally:
            self._library.encode_special_tokens = False

    def _encoding(self):
        return _in_one_line(f"{self._path}: the tokenizers library cannot encode a text")


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


def _read_json(path: str | Path) -> dict:
    """The object in a JSON file. Raises UserError if there is none."""
    try:
        with open_file(path) as file:
            content = json.loads(file.read())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror.lower()}; {JSON_REMEDY}") from None
    except (ValueError, RecursionError):
        check_no_pointer(path)
        raise UserError(f"{path}: not JSON, or damaged; {JSON_REMEDY}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object; {JSON_REMEDY}")
    return content


def _check_byte_level(path: str | Path, content: dict) -> None:
    """Raises UserError unless a tokenizer.json spells its tokens in GPT-2's letters for bytes, one letter a byte."""

    def parts_of(part: dict) -> list[dict]:
        """The parts of a sequence, or the single part."""
        parts = part.get("pretokenizers") or part.get("decoders")
        parts = parts if isinstance(parts, list) else [part]
        return [part for part in parts if isinstance(part, dict) and "type" in part]

    def kinds(part: dict) -> list[str]:
        return [str(each["type"]) for each in parts_of(part)]

    names = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    parts = {name: {} if content.get(name) is None else content[name] for name in names}
    model = parts["model"]
    if not all(isinstance(part, dict) for part in parts.values()) or "vocab" not in model:
        raise UserError(f"{path}: not a tokenizer of the tokenizers library; {JSON_REMEDY}")
    added = content.get("added_tokens")
    ids = [part.get("id") for part in added if isinstance(part, dict)] if isinstance(added, list) else []
    highest = max((token for token in ids if isinstance(token, int)), default=0)
    if highest >= MOST_TOKENS:  # the library would number it anew
        raise UserError(f"{path}: it adds a token with the id {highest}, which no model has; {JSON_REMEDY}")
    kind = model.get("type", "BPE" if "merges" in model else None)  # the library's first releases left the type out
    decoders, pre_tokenizers = kinds(parts["decoder"]), kinds(parts["pre_tokenizer"])
    splits = parts_of(parts["pre_tokenizer"])
    cuts = any(part["type"] in CUTTING or part.get("behavior") == "Removed" for part in splits)
    wrong = [
        f"its model is {kind}" if kind != "BPE" else "",
        "it falls back to bytes" if model.get("byte_fallback") else "",
        "it marks parts of words" if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix") else "",
        f"its decoder is {' + '.join(decoders) or 'missing'}" if decoders != ["ByteLevel"] else "",
        f"its pre-tokenizer is {' + '.join(pre_tokenizers) or 'missing'}" if "ByteLevel" not in pre_tokenizers else "",
        "its pre-tokenizer leaves characters out" if cuts else "",
    ]
    if any(wrong):
        raise UserError(f"{path}: {', '.join(filter(None, wrong))}; only {SUPPORTED}")


def _open_library(path: str | Path):
    """The tokenizers library's own object for a tokenizer.json."""
    try:
        import tokenizers  # here, because a .bin does not need it
    except ImportError:
        raise UserError(
            f"{path}: this needs Hugging Face's tokenizers library; install it with: pip install tokenizers"
        ) from None
    library = tokenizers.Tokenizer.from_file(str(path))
    off = []
    if library.model.dropout:
        off.append(f"BPE's dropout of {library.model.dropout:g}")
        library.model.dropout = None
    if library.truncation:
        off.append(f"truncation to {library.truncation['max_length']} tokens")
        library.no_truncation()
    if library.padding:
        off.append("padding")
        library.no_padding()
    if off:
        _say(f"{path}: switched off here: {', '.join(off)}")
    letters = byte_letters()
    missing = [byte for byte in BYTES_OF_UTF8 if library.token_to_id(letters[byte]) is None]
    if missing:
        _say(f"{path}: it has no token for {len(missing)} bytes, the first {missing[0]:#04x}: texts lose them")
    return library


@cache
def _say(line: str) -> None:
    """A line on stderr, once; programs open a tokenizer several times."""
    print(line, file=sys.stderr)


def _spelled_tokens(path: str | Path, library) -> list[bytes]:
    """The bytes of every token of a tokenizer.json, in the order of the ids. An id that is not used gets a name."""
    ids = library.get_vocab(with_added_tokens=True)
    vocab_size = max(ids.values(), default=-1) + 1
    if not 0 < vocab_size < MOST_TOKENS:
        raise UserError(f"{path}: {len(ids)} tokens with ids up to {vocab_size - 1} are no vocabulary; {JSON_REMEDY}")
    tokens = [b"<|unused %d|>" % token for token in range(vocab_size)]
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    for spelling, token in ids.items():
        letters = [byte_of.get(letter) for letter in spelling]
        tokens[token] = spelling.encode() if None in letters else bytes(letters)
    for token, added in library.get_added_tokens_decoder().items():
        tokens[token] = added.content.encode()
    return tokens


def _end_of_text(path: Path, tokens: list[bytes]) -> int:
    """The token that ends a text. Raises UserError if neither the vocabulary nor a file beside it says which."""
    ids = {token: number for number, token in enumerate(tokens)}
    for end in _ends_of_text(path):
        token = ids.get(end.encode(errors="surrogatepass")) if isinstance(end, str) else end
        if type(token) is int and 0 <= token < len(tokens):
            return token
    raise UserError(
        f"{path}: it does not say which token ends a text; put the model's tokenizer_config.json, which names this "
        "token as eos_token, beside it"
    )


def _ends_of_text(path: Path) -> Iterator[Any]:
    """The names and ids of tokens that may end a text, the likeliest first. They come unchecked from the files
    beside."""
    yield from TEXT_ENDS
    prefix = path.name.rpartition("tokenizer.json")[0]
    for neighbour in NEIGHBOURS:
        neighbour = path.with_name(prefix + neighbour)
        if neighbour.suffix == ".json" and neighbour.is_file():
            content = _read_json(neighbour)
            name, token = content.get("eos_token"), content.get("eos_token_id")
            yield name.get("content") if isinstance(name, dict) else name  # an AddedToken, written out
            yield token[0] if isinstance(token, list) and token else token  # chat models have several
    yield from OTHER_ENDS


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
        self._tokenizer, self._shown = tokenizer, printable if terminal else str
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes; it may be empty."""
        return self._shown(self._utf8.decode(self._tokenizer.decode(token)))

    def flush(self) -> str:
        """What is left of a character that was never completed."""
        return self._shown(self._utf8.decode(b"", final=True))


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
                raise UserError(
                    f"{path}: a tokenizer .bin holds tokens of 1 to 255 bytes, and token {number} has {len(token)}; "
                    "use a tokenizer without such a token"
                )
            file.write(bytes([len(token)]) + token)


def find_tokenizer(data: str | Path, directory: str | Path = ".", model: Path | None = None) -> Path | None:
    """The tokenizer for a dataset, which is a prefix, a file or a glob: its own (`own_tokenizer`); else the one beside
    the `model` that trains on it, `<model>_tokenizer.bin` or `.json`; else `gpt2_tokenizer.bin` in `directory`; else
    None."""
    beside = [model.with_name(f"{model.stem}_tokenizer{suffix}") for suffix in (".bin", ".json")] if model else []
    files = (own_tokenizer(data), *beside, Path(directory) / "gpt2_tokenizer.bin")
    return next((path for path in files if path and path.is_file()), None)


def own_tokenizer(data: str | Path) -> Path | None:
    """The tokenizer that lies beside a dataset, `<prefix>_tokenizer.bin` or `<prefix>_tokenizer.json`, if any."""
    return next((path for path in _own_tokenizers(data, ".bin", ".json") if path.is_file()), None)


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
    `x_tokenizer.bin` the `x_tokenizer.json` that says how a prompt is encoded; beside a .json the files that may say
    which token ends a text. Empty files are left out. Raises UserError if one cannot be read."""
    own = f"tokenizer{path.suffix}"
    old = path.name.removesuffix(own) if path.name.endswith(own) else ""
    places = {name: path.with_name(old + name) for name in ("tokenizer.json", *NEIGHBOURS)}
    if path.suffix == ".bin" and not path.name.endswith(own):
        places = {}
    files = {}
    for name, file in ({own: path} | {name: file for name, file in places.items() if name != own}).items():
        try:
            files[prefix + name] = file.read_bytes() if file.is_file() else b""
        except OSError as error:
            raise UserError(f"{file}: {error.strerror.lower()}") from None
    return {name: content for name, content in files.items() if content}


def check_tokenizer(path: Path, tokenizer: Tokenizer, model: Path, vocab_size: int) -> None:
    """Raises UserError if the tokenizer in `path`, of data, is not that of a model of vocab_size tokens. It must have
    as many tokens, apart from padding. And if a `.bin` lies beside the model (`model_tokenizers`), its tokens must be
    those. Then it may have more tokens than the model has rows, and a line says so."""
    known = next((file for file in model_tokenizers(model) if file.suffix == ".bin"), None)
    theirs = Tokenizer.load(known).tokens if known else []
    same = known and all(a == b for a, b in zip(tokenizer.tokens, theirs, strict=False))  # apart from padding
    if not tokenizer.fits(vocab_size, own=bool(same)):
        raise UserError(
            f"{path} has {tokenizer.vocab_size} tokens and the model {model} {vocab_size}: use data (-i) and a model "
            "(-e) of the same tokenizer"
        )
    if known and not same:
        raise UserError(
            f"{path} has other tokens than {known}, the tokenizer of the model {model}: use data (-i) and a model (-e) "
            "of the same tokenizer"
        )
    tokenizer.say_rows(path, vocab_size)


def model_tokenizers(model: Path, trained: Mapping[str, Any] | None = None) -> list[Path]:
    """The tokenizer files for a model that exist, the best first. Beside the model, as in a checkpoint, they are
    `<model>_tokenizer.json`, `tokenizer.json` and `<model>_tokenizer.bin`, and of `gpt2_*.bin` the starter pack's
    `gpt2_tokenizer.bin`. A .json says how a prompt is encoded.

    trained: the flags that a checkpoint has recorded. Old checkpoints hold no tokenizer; for them the .json and the
    .bin of their data follow."""
    files = [model.with_name(name) for name in (f"{model.stem}_tokenizer.json", "tokenizer.json")]
    files.append(model.with_name(f"{model.stem}_tokenizer.bin"))
    if model.name.startswith("gpt2_"):
        files.append(model.with_name("gpt2_tokenizer.bin"))
    if trained and "tokenizer" not in trained and trained.get("data"):
        files += _own_tokenizers(trained["data"], ".json", ".bin")
    return [path for path in files if path.is_file()]


def load_model_tokenizer(
    model: Path,
    vocab_size: int,
    file: Path | None = None,
    trained: Mapping[str, Any] | None = None,
    encodes: bool = False,
) -> Tokenizer:
    """The tokenizer of a model of vocab_size tokens: the one that the user names, a file, "gpt2" or "bytes"; else the
    best of `model_tokenizers`. If the model's own has more tokens than the model has rows, a line says so.

    trained: the flags that the model's checkpoint has recorded, if any. encodes: whether text must be encoded exactly.
    A .bin is enough to decode, and comes first if the tokenizers library, which reads a .json, is missing.

    Raises UserError if there is none; for a file that is not for this model; and for a .json that cannot be read.
    """
    named = {"gpt2": gpt2_tokenizer, "bytes": byte_tokenizer}.get(str(file))
    files = model_tokenizers(model, trained)
    if not encodes and not importlib.util.find_spec("tokenizers"):
        files.sort(key=lambda path: path.suffix == ".json")
    file = file or next(iter(files), None)
    if file is None:
        asked = "name it with --tokenizer FILE, or --tokenizer gpt2 or bytes"
        if trained and "tokenizer" in trained:
            raise UserError(f"{model.parent} was trained without a tokenizer: {asked}")
        raise UserError(f"{model}: no file beside it says which tokenizer it has; {asked}")
    tokenizer = named() if named else Tokenizer.load(file)
    own = file in model_tokenizers(model)
    if not tokenizer.fits(vocab_size, own):
        raise UserError(
            f"{file} has {tokenizer.vocab_size} tokens and {model} {vocab_size}: "
            "name the model's own tokenizer with --tokenizer"
        )
    tokenizer.say_rows(file, vocab_size)
    if not own and file in files:
        print(f"tokenizer: {file}, which lies where the data of {model} was", file=sys.stderr)
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """256 tokens, one a byte, and end of text as number 256: a vocabulary that needs no download."""
    return Tokenizer([bytes([byte]) for byte in range(256)] + [END_OF_TEXT.encode()], eot=256)


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's: from gpt2_tokenizer.bin in the current directory if it is there, else as tiktoken downloads it.

    Raises UserError if neither is available.
    """
    if Path("gpt2_tokenizer.bin").is_file():
        tokenizer = Tokenizer.load("gpt2_tokenizer.bin")
        if tokenizer.vocab_size == 50257:
            return tokenizer
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except OSError:  # the exceptions of requests are OSErrors
        raise UserError(
            "GPT-2's vocabulary cannot be downloaded; connect to the internet, or put gpt2_tokenizer.bin "
            "(dev/download_starter_pack.sh) in the current directory"
        ) from None
    return Tokenizer([encoding.decode_single_token_bytes(n) for n in range(encoding.n_vocab)], encoding.eot_token)

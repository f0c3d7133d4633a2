"""A tokenizer.json: the file of Hugging Face's tokenizers library, which encodes and decodes with it."""

import json
import re
from contextlib import nullcontext
from copy import copy
from functools import cached_property
from pathlib import Path

from device.errors import UserError
from llmc.data.tokenizer import (
    AFTER_SPECIAL,
    BEFORE_A_TEXT,
    END_OF_TEXT,
    GPT2_PATTERN,
    NO_SPACE,
    Tokenizer,
    in_one_line,
    say_once,
    without_panic,
)
from llmc.files.files import check_no_pointer, open_file

TEXT_ENDS = (END_OF_TEXT, "<|end_of_text|>")  # names that say what the token is for
OTHER_ENDS = ("</s>", "<eos>", "<|im_end|>")  # tokens that may end a text, or a part of one

# Files that go along with a tokenizer; x_config.json beside x_tokenizer.json. Those in JSON may name tokens that end a
# text.
NEIGHBOURS = (
    "tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json", "chat_template.jinja"
)  # fmt: skip
OLDER = ("tokenizer.model", "vocab.json", "merges.txt")  # from before there was tokenizer.json

BYTES_OF_UTF8 = [*range(192), *range(194, 245)]  # all that a text can hold
MAX_VOCAB_SIZE = 1 << 20  # no vocabulary is as large, except in a damaged file

JSON_REMEDY = "take the model's own tokenizer.json from the Hugging Face hub"
SUPPORTED = "byte-level BPE is supported, as of GPT-2, Llama 3 or Pythia, and byte fallback, as of Llama 2 or Mistral"
CUTTING = re.compile(r'"(type": "(Whitespace|WhitespaceSplit|Bert\w+|CharDelimiterSplit)|behavior": "Removed)"')
SAMPLE = "It's the  12th\tof\n\nMay, naïve café 你好 🙂 (b)"
SPACES = (  # what puts a space before a text, and what does not
    ('"add_prefix_space":true', '"add_prefix_space":false'), ('"prepend_scheme":"[a-z]+"', '"prepend_scheme":"never"'),
    ('{"type":"Prepend","prepend":"[^"]*"}', '{"type":"Sequence","normalizers":[]}'),
)  # fmt: skip
BY_REGEX = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
GPT2_SPLITS = (  # how a pre-tokenizer may say it
    BY_REGEX,
    {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": GPT2_PATTERN}, "behavior": "Isolated", "invert": False},
        BY_REGEX | {"use_regex": False},
    ]},
)  # fmt: skip


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`. It encodes as transformers does, through the same library.

    The file spells its tokens in GPT-2's letters for bytes, or as Llama 2's does: ▁ stands for a space, and <0x0A> for
    the byte of a character that has no token. A text begins with the token that the file puts there, such as Llama 3's
    <|begin_of_text|>, else with the token that ends the text before. That is the one named <|endoftext|> or
    <|end_of_text|>, else the end of sequence that tokenizer_config.json, config.json or generation_config.json names
    (in a chat model that would end a turn), else </s>, <eos> or <|im_end|>.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises UserError if the file is missing, damaged or of another kind, if no end is known, or if the tokenizers
        library is missing."""
        content = read_json(path)
        panics = without_panic() if content.get("normalizer") else nullcontext()
        with in_one_line(f"{path}: the tokenizers library cannot read it", f"; {JSON_REMEDY}"), panics:
            self.path, self._fallback, self._library = str(path), _falls_back(path, content), _open_library(path)
            self.normalizer = self._library.normalizer
            tokens, added_tokens = self._spelled_tokens(), self._library.get_added_tokens_decoder()
            eot, bos = _end_of_text(Path(path), tokens), self._begin_of_text()
            if bos is not None and bos >= len(tokens):
                raise UserError(f"{path}: it begins a text with token {bos} of {len(tokens)}; {JSON_REMEDY}")
            special = (token for token, added in added_tokens.items() if added.special)
            super().__init__(tokens, eot, bos, special, as_gpt2=self._splits_as_gpt2(content))
            self._check_spelling()

    def _spelled_tokens(self) -> list[bytes]:
        """The bytes of every token, in the order of the ids. An id that is not used gets a name. Prints a line if some
        byte has no token."""
        ids = self._library.get_vocab(with_added_tokens=True)
        size = max(ids.values(), default=-1) + 1
        if not 0 < size < MAX_VOCAB_SIZE:
            raise UserError(f"{self.path}: tokens with ids up to {size - 1} are no vocabulary; {JSON_REMEDY}")
        spellings = [f"<0x{byte:02X}>" for byte in range(256)] if self._fallback else byte_letters()
        byte_of = {spelling: byte for byte, spelling in enumerate(spellings)}
        self._missing = [byte for byte in BYTES_OF_UTF8 if spellings[byte] not in ids]
        if self._missing:
            count, first = len(self._missing), self._missing[0]
            say_once(f"{self.path}: it has no token for {count} bytes, the first {first:#04x}: texts lose them")
        tokens = [b"<|unused %d|>" % token for token in range(size)]
        for spelling, token in ids.items():
            found = [byte_of.get(part) for part in ([spelling] if self._fallback else spelling)]
            text = spelling.replace("▁", " ") if self._fallback else spelling
            tokens[token] = text.encode() if None in found else bytes(found)
        if not self._fallback:  # added tokens are not spelled in letters for bytes
            for token, added in self._library.get_added_tokens_decoder().items():
                tokens[token] = added.content.encode()
        return tokens

    def _begin_of_text(self) -> int | None:
        """The token that the file puts before a text, if it does. (One after the text is none.)"""
        alone = self._library.encode("a", add_special_tokens=False).ids
        ids = self._library.encode("a").ids
        return ids[0] if ids[: len(alone)] != alone else None

    def _splits_as_gpt2(self, content: dict) -> bool:
        """Whether a `.bin` of these tokens encodes as this file does."""
        split, model = self._library.pre_tokenizer, content["model"]
        state = split.__getstate__().decode().replace('"trim_offsets":false', '"trim_offsets":true') if split else "{}"
        if self._fallback or self.normalizer or json.loads(state) not in GPT2_SPLITS or "merges" not in model:
            return False
        parts = (merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ()))
        merged = [model["vocab"].get("".join(pair), -1) for pair in parts]
        return not model.get("ignore_merges") and merged == sorted(merged)

    @cached_property
    def inside(self) -> Tokenizer:
        if self.space == NO_SPACE:
            return self
        content, other = self._library.to_str(), copy(self)
        for puts, does_not in SPACES:
            content = re.sub(puts, does_not, content)
        other._library = type(self._library).from_str(content)
        other.normalizer = other._library.normalizer
        return other

    def _check_spelling(self) -> None:
        """Raises UserError unless the tokens of a text spell it. Finds out where the tokenizer puts spaces."""
        sample = "".join(c for c in SAMPLE if not set(c.encode()) & set(self._missing))
        wanted = self.normal(sample).encode()
        spelled, after_end = map(self._spelling, (sample, self.tokens[self.eot].decode(errors="replace") + sample))
        if spelled not in (wanted, b" " + wanted):
            found = f"{wanted.decode()!r} comes back as {spelled.decode(errors='replace')!r}"
            raise UserError(f"{self.path}: its tokens do not spell a text: {found}; {SUPPORTED}")
        everywhere = after_end == self.tokens[self.eot] + spelled
        self.space = NO_SPACE if spelled == wanted else AFTER_SPECIAL if everywhere else BEFORE_A_TEXT

    def _spelling(self, text: str) -> bytes:
        return b"".join(self.tokens[token] for token in self._library.encode(text, add_special_tokens=False).ids)

    def normal(self, text: str) -> str:
        """The text as the normalizer changes it, without the space that it may put before a text."""
        if self.normalizer and text:
            puts_space = self.normalizer.normalize_str("a")[:1] in ("▁", " ")
            text = self.normalizer.normalize_str(text)[puts_space:]
        return text.replace("▁", " ") if self._fallback else text

    def encode(self, text: str) -> list[int]:
        with in_one_line(f"{self.path}: the tokenizers library cannot encode a text"):
            return self._library.encode(without_surrogates(text), add_special_tokens=False).ids

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        with in_one_line(f"{self.path}: the tokenizers library cannot encode a text"):
            found = self._library.encode(without_surrogates(text), add_special_tokens=False)
        return found.ids, found.offsets

    def encode_ordinary_batch(self, texts: list[str], num_threads: int | None = None) -> list[list[int]]:
        self._library.encode_special_tokens = True  # as text
        texts = [without_surrogates(text) for text in texts]
        try:
            with in_one_line(f"{self.path}: the tokenizers library cannot encode a text"):
                return [found.ids for found in self._library.encode_batch_fast(texts, add_special_tokens=False)]
        finally:
            self._library.encode_special_tokens = False


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
    """True if the tokens of a tokenizer.json are spelled as Llama 2's are; False if as GPT-2's are. Raises UserError if
    its decoder is of another kind, if its pre-tokenizer leaves characters out, or for an id that no model has. (The
    library would number that token anew.)"""
    added = content.get("added_tokens")
    ids = [part.get("id") for part in added if isinstance(part, dict)] if isinstance(added, list) else []
    if (highest := max((token for token in ids if isinstance(token, int)), default=0)) >= MAX_VOCAB_SIZE:
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
        say_once(f"{path}: switched off here: {', '.join(off)}")
    library.no_truncation()
    library.no_padding()
    return library


def _end_of_text(path: Path, tokens: list[bytes]) -> int:
    """The token that ends a text. Raises UserError if neither the vocabulary nor a file beside it says which."""
    first, others = ([name.encode() for name in names] for names in (TEXT_ENDS, OTHER_ENDS))
    ids = {token: number for number, token in enumerate(tokens)}
    named = [ids[name] for name in first if name in ids] or named_ends(path, tokens)
    for end in [*named, *(ids[name] for name in others if name in ids)]:
        return end
    raise UserError(
        f"{path}: it does not say which token ends a text; put the model's tokenizer_config.json, which names this "
        "token as eos_token, beside it"
    )


def named_ends(path: Path, tokens: list[bytes]) -> list[int]:
    """The tokens that end a text by the files beside a tokenizer's file. (Chat models have several.) Raises UserError
    if one of these files is damaged."""
    ids, found = {token: number for number, token in enumerate(tokens)}, []
    for name, beside in neighbours(path).items():
        if name != "tokenizer.json" and name.endswith(".json") and beside.is_file():
            end, several = (read_json(beside).get(key) for key in ("eos_token", "eos_token_id"))
            found.append(end.get("content") if isinstance(end, dict) else end)  # an AddedToken, written out
            found += several if isinstance(several, list) else [several]
    numbers = (ids.get(end.encode(errors="surrogatepass")) if isinstance(end, str) else end for end in found)
    return [end for end in numbers if type(end) is int and 0 <= end < len(tokens)]


def neighbours(path: Path) -> dict[str, Path]:
    """Where the files that go along with a tokenizer's file are, by name: of an x_tokenizer.json or x_tokenizer.bin
    x_config.json and others, of a .json of another name config.json, and of another .bin none."""
    own = f"tokenizer{path.suffix}"
    if path.suffix != ".json" and not path.name.endswith(own):
        return {}
    prefix = path.name.removesuffix(own) if path.name.endswith(own) else ""
    return {name: path.with_name(prefix + name) for name in ("tokenizer.json", *NEIGHBOURS)}


def without_surrogates(text: str) -> str:
    """Text that UTF-8 can hold. Python's strings may have halves of characters (surrogates); these become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def byte_letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's vocabulary: the byte's own if it is printable Latin-1, else the
    next free one from 256 on (Radford et al., 2019, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]

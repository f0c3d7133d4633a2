"""Tables of tensors: how a flat buffer is divided among them, and what can be counted from them.

A table is a tuple of rows (name, shape, options), in the order of the buffer. A shape is a tuple of symbols, such as
("B", "T", "3C"), which a dict of sizes turns into numbers; a symbol may begin with a factor. A tensor whose shape
begins with "L" has one part for each layer. One whose shape begins with "L+1" is a list, with one part more after the
last layer. The sizes say for how many parts there is room: if for one, all layers share it. Options:

a               an earlier tensor: this one lies at its address. It is there when a's content is no longer needed
a, b            in a's block, right after b. A block is as long as its tensors need
"fp32"          this tensor is fp32 in any precision; the others are of the type of the run, which is bf16 in bf16
"head"          the last such parameter that a model has is its classifier's weight
"recomputed"    backward computes the tensor again, as the input of the product for a weight's gradient. The view for
                that, NAME_recomputed (rows, channels), has the layout that the product wants; in fp32 this is a
                transposed one (kernels/matmul.py: transposes)
"""

import math
import os
import re
from dataclasses import MISSING, fields
from functools import lru_cache
from types import SimpleNamespace

from device.errors import UserError
from kernels.matmul import transposes

import numpy as np

Table = tuple[tuple, ...]

ALIGNMENT = 256  # bytes: the start of every activation is a multiple
FP32, HEAD, RECOMPUTED = WORDS = "fp32", "head", "recomputed"
MAX_SIZE = 2**31 - 1  # of any size: files' headers hold 32-bit integers

# By the type of a field: how its value is written in a model's description.
SPELLINGS = {int: r"\d{1,99}", bool: r"\d{1,99}", float: r"\d+\.?\d*([eE][+-]?\d+)?", str: r"[a-z]+"}


def shape_of(symbols: tuple[str, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    """The numbers that a table's shape stands for."""
    return tuple(factor * (sizes[symbol] if symbol else 1) for factor, symbol in map(factor_of, symbols))


@lru_cache
def factor_of(symbol: str) -> tuple[int, str]:
    """The factor that a symbol begins with, or 1; and the rest."""
    factor, rest = re.fullmatch(r"(\d*)(.*)", symbol).groups()
    return int(factor or 1), rest


def without(table: Table, absent: frozenset[str]) -> Table:
    """The rows of a table but for those of the given names."""
    return tuple(row for row in table if row[0] not in absent)


def owners(row: tuple) -> list[str]:
    """The tensor names in a row's options: the owner of its block, and, if there is a second name, the tensor after
    which it lies there."""
    return [word for word in row[2:] if word not in WORDS]


def layout(
    table: Table, sizes: dict[str, int], align: int, absent: frozenset[str] = frozenset(),
    floatX: np.dtype | None = None,
) -> tuple[dict[str, tuple[int, tuple]], int]:  # fmt: skip
    """For each tensor that is not absent its start in the buffer and its shape; and the length of the buffer. Starts
    and length count elements; or bytes, if the run's type floatX is given."""
    shapes, within, places = {}, {}, {}  # within: whose place a tensor lies in, and its start and end there
    for row in without(table, absent):
        name, symbols, *_ = row
        try:
            shapes[name] = shape_of(symbols, sizes)
        except KeyError as error:
            raise ValueError(f"{name} {symbols}: sizes() has no {error}") from None
        owner, *others = owners(row) or [name]
        place, start, _ = within.get(owner, (owner, 0, 0))
        for other in others:
            start = within[other][2]
        end = start + math.prod(shapes[name]) * (type_of(row, floatX).itemsize if floatX else 1)
        within[name] = place, start, end
        places[place] = max(end, places.get(place, 0))
    begins, end = {}, 0
    for name, size in places.items():
        begins[name] = -(-end // align) * align
        end = begins[name] + size
    return {name: (begins[within[name][0]] + within[name][1], shape) for name, shape in shapes.items()}, end


def type_of(row: tuple, floatX: np.dtype) -> np.dtype:
    """The type of a row's tensor, in a run whose type is floatX."""
    return np.dtype(np.float32) if FP32 in row[2:] else floatX


def name_tensors(
    buffer, table: Table, sizes: dict[str, int], align: int = ALIGNMENT, absent: frozenset[str] = frozenset(),
    floatX: np.dtype | None = None,
) -> SimpleNamespace:  # fmt: skip
    """The tensors of a table as views into a flat buffer: `.wte`; for a tensor with a part for each layer both `.qkvw`
    (all layers) and `.layer[l].qkvw`; for one with a part more the list `.residual`, and `.layer[l].residual` before
    layer l. A tensor that all layers share is in each `.layer[l]`, too. Absent tensors are None. If the run's type
    floatX is given, the buffer is one of bytes."""
    starts, _ = layout(table, sizes, align, absent, floatX)

    def view(row: tuple):
        at, shape = starts[row[0]]
        if not floatX:
            return buffer[at : at + math.prod(shape)].reshape(shape)
        dtype = type_of(row, floatX)
        return buffer[at : at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    tensors, layers = {}, [SimpleNamespace() for _ in range(sizes["layers"])]
    for row in table:
        name, (first, *_) = row[:2]
        tensors[name] = tensor = view(row) if name in starts else None
        if first == "L+1" and name in starts:
            tensors[name] = [tensor[l % sizes["L+1"]] for l in range(len(layers) + 1)]
        if RECOMPUTED in row:
            tensors[f"{name}_recomputed"] = again = recomputed_view(tensor)
        for l, layer in enumerate(layers):
            parts = tensor is not None and first in ("L", "L+1")
            setattr(layer, name, tensor[l % sizes[first]] if parts else tensor)
            if RECOMPUTED in row:
                setattr(layer, f"{name}_recomputed", again)
    return SimpleNamespace(**tensors, layer=layers)


def recomputed_view(tensor):
    """The view (rows, channels) of a tensor's memory to which backward writes it again."""
    flat, channels = tensor.reshape(-1), tensor.shape[-1]
    return flat.reshape(channels, -1).T if transposes() else flat.reshape(-1, channels)


def ranges(table: Table, sizes: dict[str, int], names: tuple[str, ...]) -> list[tuple[int, int, bool]]:
    """Cuts an unaligned buffer into few consecutive ranges: (start, end, whether its tensors have the given names)."""
    starts, _ = layout(table, sizes, align=1)
    found = []
    for name, (start, shape) in starts.items():
        end, named = start + math.prod(shape), name in names
        if found and found[-1][2] == named:
            start = found.pop()[0]
        found.append((start, end, named))
    return found


class Config:
    """The sizes that fix every tensor of a model. A subclass is a frozen dataclass of them, among which are
    max_seq_len, vocab_size, num_layers, num_heads and channels, and says:

    NAME, SCRIPT       what the model is called, and the program that trains it
    MAGIC              the number that its files begin with; it and NAME must be literals (llmc/files/magic.py)
    HEADER_BYTES       the length of their header, where header() is not the one below
    BF16_VERSION       the version of llm.c's files that hold such a model in bf16, where it has them
    PARAMETERS         the table of all parameters that such models can have, in the order of the buffer
    DESCRIPTION        the words of `-e layers=4,heads=4`, each with its field
    PRESETS            named models (`-e d12`), each such a description: the first is what `make train` trains on a GPU,
                       "tiny" what it trains on a CPU
    DEFAULT_MODEL      the file that -e stands for by default; it need not be there
    DEFAULT_TOKENIZER  the file of the tokenizer that all these models have, if there is one; it need not be there
    DEFAULTS           further fields that a description may leave out; vocab_size where the data has no tokenizer
    CHOICES            the words that a field of type str can be
    FETCH              where such a model can be had, for messages: "make one with train_x.py" if nowhere
    """

    NAME: str
    SCRIPT: str
    MAGIC: int
    HEADER_BYTES = 2048
    BF16_VERSION: int | None = None
    PARAMETERS: Table
    DESCRIPTION: dict[str, str]
    PRESETS: dict[str, str]
    DEFAULT_MODEL: str
    DEFAULT_TOKENIZER: str | None = None
    DEFAULTS: dict[str, object]
    CHOICES: dict[str, tuple[str, ...]] = {}
    FETCH: str

    @classmethod
    def fetch_or_start(cls) -> str:
        """Where such a model can be had, or how to do without, for a message of a program that trains."""
        first, *others = cls.PRESETS
        listed = f" ({', '.join(others)})" if others else ""
        return f"{cls.FETCH}, or start from random weights with -e {first}{listed}"

    @property
    def kv_heads(self) -> int:
        """The heads of keys and values. Where they are fewer than those of queries, a subclass has num_kv_heads."""
        return getattr(self, "num_kv_heads", self.num_heads)

    @property
    def head_size(self) -> int:
        """The channels of a head. Where they are a size of their own, a subclass has a field of this name, with a
        default."""
        return self.channels // self.num_heads

    @property
    def absent(self) -> frozenset[str]:
        """The tensors of the tables that this model does not have."""
        return frozenset()

    def parameters(self) -> Table:
        """The parameters' names and shapes, in the order of the buffer."""
        return tuple((name, shape) for name, shape, *_ in without(self.PARAMETERS, self.absent))

    @property
    def head(self) -> str:
        """The classifier's weight."""
        return [name for name, _, *words in without(self.PARAMETERS, self.absent) if HEAD in words][-1]

    @property
    def matrices(self) -> tuple[str, ...]:
        """The parameters that weight decay applies to, and that start as random numbers."""
        return tuple(name for name, shape in self.parameters() if len(shape) == 2 + (shape[0] == "L"))

    @property
    def products(self) -> tuple[str, ...]:
        """The parameters whose gradient is set in a step's first batch, by a matrix product. Backward adds to the
        other gradients, which are zeroed before; also to that of an embedding that is no classifier's weight."""
        layers = {name for name, shape in self.parameters() if shape[0] == "L"}
        return tuple(name for name in self.matrices if name in layers or name == self.head)

    def file_tensors(self) -> Table:
        """The tensors in a model file, in its order. One that is no parameter is 0 there; one with fewer rows than the
        parameter has its first rows."""
        return self.parameters()

    def sizes(self) -> dict[str, int]:
        """What the symbols in the tables stand for, but for the batch's. These are the sizes that every model has; a
        subclass adds its own."""
        C, NH, HS, V = self.channels, self.num_heads, self.head_size, self.vocab_size
        return {
            "V": V, "Vp": padded(V), "maxT": self.max_seq_len, "NH": NH, "HS": HS, "C": C, "NKV": self.kv_heads,
            "Q": NH * HS, "QKV": (NH + 2 * self.kv_heads) * HS,
            "L": self.num_layers, "L+1": self.num_layers + 1, "layers": self.num_layers,
        }  # fmt: skip

    def rows(self) -> list[tuple[str, object]]:
        """The sizes as the start-up table shows them: after those that every model has, the others by their names."""
        usual = "max_seq_len", "vocab_size", "num_layers", "num_heads", "channels"
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in usual}
        shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in values.items()}
        return [
            ("layers/heads/channels", f"{self.num_layers}, {self.num_heads}, {self.channels}"),
            *((name.replace("_", " "), value) for name, value in shown.items()),
        ]

    def header(self) -> np.ndarray:
        """The model file's header, 32-bit words. This one is our own, for a model that llm.c has no file for:
        int32[256]: MAGIC, version 1, and in their order the fields that are whole numbers, flags, or words, these by
        their places in CHOICES; float64[128]: the fields that are floats."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        whole = [self.CHOICES[f.name].index(x) if f.type is str else x for f, x in values if f.type is not float]
        given = [x for f, x in values if f.type is float]
        ints, floats = np.zeros(256, "<i4"), np.zeros(128, "<f8")
        ints[: 2 + len(whole)] = self.MAGIC, 1, *whole
        floats[: len(given)] = given
        return np.concatenate([ints, floats.view("<i4")])

    @classmethod
    def from_header(cls, header: np.ndarray, source: str) -> "Config":
        """The sizes that a model file's header holds, int32 (HEADER_BYTES / 4,). Raises UserError, naming `source`, for
        another version; the sizes are not checked yet."""
        if header[1] != 1:
            raise UserError(f"{source}: model version {header[1]}; version 1 is needed: {cls.FETCH}")
        ints, floats, values = iter(header[2:256].tolist()), iter(header[256:].view("<f8").tolist()), {}
        for field in fields(cls):
            value = next(floats) if field.type is float else next(ints)
            if field.type is str:
                words = dict(enumerate(cls.CHOICES[field.name]))
                value = words.get(value, str(value))
            values[field.name] = field.type(value)
        return cls(**values)

    def check(self, source: str) -> None:
        """Raises UserError, naming `source`, for sizes that make no model."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise UserError(f"{source}: {field.name} is {value}; it must be at least 1")
            if field.type is int and value > MAX_SIZE:
                raise UserError(f"{source}: {field.name} is {value}; it must be at most {MAX_SIZE}")
            zero = field.default == 0  # what can be left out by a 0, and is by default
            if field.type is float and not (0 < value < math.inf or zero and value == 0):
                raise UserError(f"{source}: {field.name} is {value}; it must be a positive number{' or 0' * zero}")
            if field.type is str and value not in self.CHOICES[field.name]:
                raise UserError(f"{source}: {field.name} is {value}; it can be {' or '.join(self.CHOICES[field.name])}")
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"{source}: {self.num_heads} heads cannot share {self.kv_heads} key/value heads evenly: kv_heads must "
                "divide heads"
            )
        if "head_size" not in (field.name for field in fields(self)) and self.channels % self.num_heads:
            raise UserError(
                f"{source}: {self.channels} channels cannot be split among {self.num_heads} heads evenly"
            )

    @classmethod
    def described(cls, text: str, vocab_size: int | None = None) -> "Config | None":
        """The model that `-e` describes: a preset's name, or `layers=4,heads=4,channels=128`; None if it is neither (a
        file, then). vocab_size: of the tokenizer, where there is one.

        Raises UserError for a description with a missing, unknown or senseless part.
        """
        words = cls.PRESETS.get(text, text)
        if "=" not in words or text not in cls.PRESETS and os.path.exists(text):
            return None
        values = {field.name: field.default for field in fields(cls) if field.default is not MISSING} | cls.DEFAULTS
        values |= {"vocab_size": vocab_size} if vocab_size else {}
        types = {field.name: field.type for field in fields(cls)}
        example = next(iter(cls.PRESETS.values()))
        for word in words.split(","):
            name, _, value = word.partition("=")
            field = cls.DESCRIPTION.get(name)
            if field is None or not re.fullmatch(SPELLINGS[types[field]], value):
                raise UserError(f"-e {text}: {word} is no part of a model's description, such as {example}")
            if field == "vocab_size" and vocab_size:
                continue
            values[field] = bool(int(value)) if types[field] is bool else types[field](value)
        missing = [name for name, field in cls.DESCRIPTION.items() if field not in values]
        if missing:
            raise UserError(f"-e {text}: {missing[0]}=… is missing; a model is described as {example}")
        config = cls(**values)
        config.check("-e")
        return config


def padded(vocab_size: int) -> int:
    """The vocabulary rounded up to a multiple of 128, as in llm.c's files. Products are fast where rows begin at a
    multiple of 16 bytes (doc/05-linear-layers.md has the times), and tiles of tensor cores come out even."""
    return -(-vocab_size // 128) * 128


def num_parameters(config: Config) -> int:
    """How many parameters a model has, padding of the vocabulary included."""
    return layout(config.parameters(), config.sizes(), align=1)[1]


def flops_per_token(config: Config, T: int) -> float:
    """Forward and backward FLOPs per token, as model FLOPs utilisation counts them: 6 for each parameter, and
    12 L NH HS T for attention, although causal attention needs only half of these."""
    return 6.0 * num_parameters(config) + 12.0 * config.num_layers * config.num_heads * config.head_size * T

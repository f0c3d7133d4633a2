"""A model's buffers, whatever the model: allocated once, named by its tables, filled from a file or at random."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import SimpleNamespace

import device
from device.errors import UserError
from kernels.cached_attention import number_of_splits
from kernels.dropout import Dropout
from llmc.attention import CACHE, CACHED_ACTIVATIONS
from llmc.attention import TABLES as attention_tables
from llmc.checkpoint import conversion, read_model
from llmc.classifier import classifier_loss
from llmc.tensors import ALIGNMENT, Config, Table, layout, name_tensors, num_parameters, ranges, without

import numpy as np

STAGED = 1 << 24  # floats of a random weight that the host makes at a time
RANDOM_WORDS = 6  # of random numbers' keys and counters: see random_words


class Model:
    """A model with room for batches of up to (B, T). Its buffers, each allocated once:

    params_memory, grads_memory, m_memory, v_memory   (num_parameters,): the parameters, in the order of their table,
                                                      their gradients and AdamW's two moments
    master_memory                                     (num_parameters,): the parameters as AdamW updates them
    acts_memory, grads_acts_memory                    activations and their gradients, and scratch: bytes

    Parameters, activations and the gradients of activations have the type `floatX` that the device has when the model
    is made, unless a row of the tables names another type. All else is fp32. In bf16 params_memory is master_memory,
    rounded to nearest. The master copy is needed because learning rates are so small that most bf16 parameters would
    never change. In fp32 the two are the same buffer.

    The tensors in the buffers: params, grads, grads_acts, and acts(B, T) for a batch of that size. skip_nonfinite says
    whether training goes on after a step that is not finite.
    norm (4,) holds: the norm of the gradients; the factor that clips them; how many steps were not finite; and whether
    AdamW left out a parameter of this rank (kernels/adamw.py), which the next step tells all ranks.

    With several ranks, each has a model. If they are sharded (llmc/exchange.py), a rank has the moments, and in bf16
    the master copy, of its own part of the parameters only. rows exchanges the embedding's rows among ranks.

    By chunks, the logits of only logit_rows positions exist at a time. If logit_rows is 0, all exist. For chunks,
    forward and the loss keep (llmc/classifier.py): classified, the classifier's input and weight, and dloss, the
    gradient of a loss.

    Text is written a token at a time. forward then runs on the new tokens only, and they begin at a position: row t of
    sequence b is at positions[b] + t. positions, int32 (B,) on the device, is None in training. The keys and values of
    all positions stay. All other activations have room for one layer. Logits are computed for one row of each sequence:
    `last` (B,) says which of the B T rows. A model for inference alone has room for this, and has neither gradients nor
    moments. A model that trains can write one text, in the memory of its activations (`writing`).

    A batch comes in one copy, to batch (4 B T + RANDOM_WORDS,). Its parts are inputs and targets (B T,), the tokens and
    the token after each; order and count (B T,), which llmc/dataloader.py's sort_by_token makes for the embedding's
    gradient; and random (RANDOM_WORDS,), which random_words makes for dropout. dropout is the share of activations
    that training drops; dropout_seed decides which.

    A subclass is one kind of model. It says:
    Config                    the class of its sizes
    MATRICES                  the parameters that weight decay applies to, and that start as random numbers
    PRODUCTS                  those whose gradient backward sets in a step's first batch, by a matrix product; the other
                              gradients are zeroed before, and backward adds to them
    ACTIVATIONS, ACTIVATION_GRADIENTS
                              the tables of activations and of their gradients, scratch included; `partials` (P, width)
                              has MOST_PARTIALS rows (kernels/reduce.py), as wide as the launchers' docstrings ask
    first_weights, and where it has some, constants
    forward(B, T, training), backward(B, T, accumulate)

    llmc/attention.py has the rows of the tensors inside attention; they follow those of the two tables.

    Raises UserError if the device has too little memory, and ValueError if a name above is not one of the Config's
    PARAMETERS.
    """

    Config: type[Config]
    MATRICES: tuple[str, ...]
    PRODUCTS: tuple[str, ...]
    ACTIVATIONS: Table
    ACTIVATION_GRADIENTS: Table

    def __init__(
        self, config: Config, B: int, T: int, attention: str = "softmax", inference: bool = False,
        shard: tuple[int, int] | None = None, beside: Callable[[int], dict[str, int]] = lambda b: {},
        logit_rows: int = 0,
    ):  # fmt: skip
        """shard: the part of the parameters whose moments this model has; None for all. beside: the buffers that others
        will allocate for batches of b, by name, in bytes, like `sizes_of_buffers`. logit_rows: the number of positions
        whose logits exist at a time; 0 for all."""
        self.config, self.B, self.T, self.attention, self.rows = config, B, T, attention, None
        self.logit_rows = logit_rows if logit_rows < B * T else 0
        self.classified, self.dloss = None, 0.0
        self.floatX = device.floatX
        self.check_names("MATRICES and PRODUCTS", (*self.MATRICES, *self.PRODUCTS))
        self.acts_table, grads_acts_table = self.tables(attention)
        sizes, absent = batch_sizes(config, B, T, self.logit_rows), config.absent

        def bytes_of(b: int) -> dict[str, int]:
            return self.sizes_of_buffers(config, b, T, attention, inference, shard, logit_rows) | beside(b)

        self.megabytes = {name: round(size / 2**20) for name, size in bytes_of(B).items()}
        free, _ = device.memory()
        if sum(bytes_of(B).values()) > free:
            fitting = bisect_right(range(1, B), free, key=lambda b: sum(bytes_of(b).values()))
            remedy = f"at most -b {fitting} fits" if fitting else "-b 1 does not fit either, so lower -t"
            if inference:
                most = f"at most {fitting} texts fit at once, so lower --samples or give fewer prompts"
                remedy = most if fitting else "not even one text fits, so lower -t"
            raise UserError(
                f"the model at B={B}, T={T} needs {sum(self.megabytes.values())} MiB of memory, and {free >> 20} MiB "
                f"are free on {device.name}: {remedy}, or choose a smaller model (-e)"
            )
        own = self.sizes_of_buffers(config, B, T, attention, inference, shard, logit_rows)
        types = {"parameters": self.floatX, "activations": np.uint8, "activation gradients": np.uint8}
        buffers = {}
        for name, size in own.items():
            dtype = np.dtype(types.get(name, np.float32))
            length = size // dtype.itemsize
            buffers[name] = device.empty((length + length % 2,), dtype)[:length]  # whole words
        self.params_memory = buffers["parameters"]
        self.master_memory = buffers.get("master copy", self.params_memory)
        self.first = shard[0] if shard else 0
        self.acts_memory = buffers["activations"]
        self.params = name_tensors(self.params_memory, config.PARAMETERS, sizes, 1, absent)
        self.constant = SimpleNamespace(
            **{name: device.asarray(values) for name, values in self.constants(config, T).items()}
        )
        self.batch = device.zeros((4 * B * T + RANDOM_WORDS,), np.int32)
        self.inputs, self.targets, self.order, self.count = self.batch[: 4 * B * T].reshape(4, B * T)
        self.random = self.batch[4 * B * T :]
        self.dropout, self.dropout_seed = 0.0, 0
        self.views_of = {}
        self.starts, self.last = device.zeros((B,), np.int32), device.zeros((B,), np.int32)
        self.positions = self.starts if inference else None
        if inference:
            return
        self.grads_memory, self.m_memory, self.v_memory = (
            buffers[name] for name in ("gradients", "AdamW m", "AdamW v")
        )
        self.grads_acts_memory = buffers["activation gradients"]
        self.grads = name_tensors(self.grads_memory, config.PARAMETERS, sizes, 1, absent)
        self.grads_acts = name_tensors(
            self.grads_acts_memory, grads_acts_table, sizes, absent=absent, floatX=self.floatX
        )
        self.norm, self.skip_nonfinite = device.zeros((4,)), False
        device.fill_zero(self.m_memory)
        device.fill_zero(self.v_memory)
        self.decay_ranges = ranges(config.parameters(), sizes, self.MATRICES)
        self.added_to = [
            (start, end) for start, end, product in ranges(config.parameters(), sizes, self.PRODUCTS) if not product
        ]

    def check_names(self, where: str, names: tuple[str, ...]) -> None:
        """Raises ValueError for a name, given `where` in the script, that is none of PARAMETERS."""
        unknown = set(names) - {name for name, *_ in self.config.PARAMETERS}
        if unknown:
            raise ValueError(f"{type(self).__name__}: {min(unknown)}, in {where}, is none of PARAMETERS")

    @classmethod
    def sizes_of_buffers(
        cls, config: Config, B: int, T: int, attention: str, inference: bool = False,
        shard: tuple[int, int] | None = None, logit_rows: int = 0,
    ) -> dict[str, int]:  # fmt: skip
        """The buffers that a model allocates, by the name of what they hold, in bytes."""
        sizes, n, X = batch_sizes(config, B, T, logit_rows), num_parameters(config), device.floatX
        if inference:
            return {"parameters": X.itemsize * n, "activations": cls.writing_bytes(config, B, T)}
        activations, gradients = (
            layout(table, sizes, ALIGNMENT, config.absent, X)[1] for table in cls.tables(attention)
        )
        found = {"parameters": X.itemsize * n, "activations": max(activations, cls.writing_bytes(config, 1, T))}
        moments = 4 * (shard[1] - shard[0] if shard else n)
        master = {"master copy": moments} if X == device.BF16 else {}
        return found | master | {
            "gradients": 4 * n, "AdamW m": moments, "AdamW v": moments, "activation gradients": gradients,
        }  # fmt: skip

    @classmethod
    def tables(cls, attention: str) -> tuple[Table, Table]:
        """The tables of activations and of their gradients with this kind of attention. A tensor that the attention's
        table has too is the model's own."""
        activations, gradients = attention_tables[attention]
        own = frozenset(name for name, *_ in cls.ACTIVATIONS)
        return cls.ACTIVATIONS + without(activations, own), cls.ACTIVATION_GRADIENTS + gradients

    @classmethod
    def writing_table(cls) -> Table:
        """The table of activations for a model that writes text. All layers use the memory of one."""
        own = frozenset(name for name, *_ in cls.ACTIVATIONS)
        return CACHE + cls.ACTIVATIONS + without(CACHED_ACTIVATIONS, own)

    @classmethod
    def writing_bytes(cls, config: Config, B: int, T: int) -> int:
        """The bytes of activations for writing B texts of up to T tokens. The larger of two sizes: that of the
        forward pass that reads a whole prompt, and that of the pass for a single token."""
        table, X = cls.writing_table(), device.floatX
        sizes = [writing_sizes(config, B, rows, T) for rows in (T, 1)]
        return max(layout(table, each, ALIGNMENT, config.absent, X)[1] for each in sizes)

    def acts(self, B: int, T: int) -> SimpleNamespace:
        """The activations for a batch of (B, T), as views into the buffer. They are made at the first call."""
        writes = self.positions is not None
        if (B, T, writes) not in self.views_of:
            for other in self.views_of.keys() - {(self.B, self.T, False), (B, 1, True)}:
                del self.views_of[other]  # each prompt has another length
            table = self.writing_table() if writes else self.acts_table
            sizes = (
                writing_sizes(self.config, B, T, self.T) if writes else
                batch_sizes(self.config, B, T, self.logit_rows)
            )  # fmt: skip
            named = name_tensors(self.acts_memory, table, sizes, absent=self.config.absent, floatX=self.floatX)
            if writes:
                named.layer *= self.config.num_layers
            self.views_of[B, T, writes] = named
        return self.views_of[B, T, writes]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within the block, forward begins at `positions`. So a model that trains writes text, in the memory of a
        training step's activations."""
        before, self.positions = self.positions, self.starts
        try:
            yield
        finally:
            self.positions = before

    def zero_grad(self) -> None:
        """Zeroes the gradients to which backward adds. Backward sets those of PRODUCTS, unless it accumulates."""
        for start, end in self.added_to:
            device.fill_zero(self.grads_memory[start:end])

    def loss(self, B: int, T: int, dloss: float = 0.0) -> None:
        """Sets acts(B, T).losses (B,T) to the cross-entropy of the logits and `targets`. For training, dloss is the
        gradient of each single loss, and the logits become their own gradient. By chunks, backward then does both."""
        classifier_loss(self, B, T, dloss)

    def random_words(self, step: int, i: int) -> np.ndarray:
        """The words that decide which activations batch i of a step drops, as kernels/dropout.cuh reads them: the
        seed's two words, step, batch, the rate as a threshold for random words, and the bits of the float 1 / (1 -
        rate)."""
        seed, threshold = self.dropout_seed % 2**64, min(round(self.dropout * 2**32), 2**32 - 1)
        scale = np.float32(1 / (1 - self.dropout)).view(np.uint32)
        return np.array([seed % 2**32, seed >> 32, step, i, threshold, scale], np.uint32).view(np.int32)

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Sets the parameters to those of a file, which `read_model` gives. Rows that the file lacks become 0."""
        starts, _ = layout(self.config.parameters(), self.config.sizes(), align=1)
        self.zero_parameters()
        for name, _ in self.config.parameters():
            values = tensors[name].reshape(-1)
            for at in range(0, values.size, STAGED):
                self.put(starts[name][0] + at, values[at : at + STAGED])

    def zero_parameters(self) -> None:
        device.fill_zero(self.params_memory)
        device.fill_zero(self.master_memory)

    def put(self, start: int, values: np.ndarray) -> None:
        """Sets consecutive parameters, from the start-th on, to fp32 values on the host."""
        if not values.size:
            return
        rounded = device.to_bf16(values) if self.floatX == device.BF16 else values
        device.copy_in(self.params_memory[start:], rounded)
        if self.has_copy:
            begin, end = max(start, self.first), min(start + values.size, self.first + self.master_memory.size)
            if begin < end:
                device.copy_in(self.master_memory[begin - self.first :], values[begin - start : end - start])
        device.synchronize()  # from now on the caller may change the values

    @property
    def has_copy(self) -> bool:
        """Whether params_memory is a copy of master_memory, rounded to bf16."""
        return self.master_memory is not self.params_memory

    def master_and_copy(self, start: int, end: int) -> tuple:
        """A range of the parameters as AdamW updates them, fp32, and their copy that it rounds from these, or None."""
        if not self.has_copy:
            return self.params_memory[start:end], None
        return self.master_memory[start - self.first : end - self.first], self.params_memory[start:end]

    def randomize(self, seed: int) -> None:
        """Sets the initial weights of a model before training, from a seed. MATRICES get normal random numbers, with
        the deviations that first_weights gives. The padding of the vocabulary gets 0. For the rest first_weights says
        what.

        The host makes them a piece at a time.
        """
        deviations, constants = self.first_weights(self.config)
        self.check_names("first_weights", (*deviations, *constants))
        self.zero_parameters()
        done, total, shown = 0, self.params_memory.size, time.monotonic()
        random, staged = np.random.default_rng(seed), np.empty(min(STAGED, total), np.float32)
        sizes = self.config.sizes()
        starts, _ = layout(self.config.parameters(), sizes, align=1)
        for name, symbols in self.config.parameters():
            first, shape = starts[name]
            used = prod(shape) // sizes["Vp"] * sizes["V"] if symbols[0] == "Vp" else prod(shape)  # the rest stays 0
            for start in range(0, prod(shape), STAGED):
                piece = staged[: min(STAGED, prod(shape) - start)]
                if name in deviations:
                    random.standard_normal(out=piece, dtype=np.float32)
                    piece *= np.float32(deviations[name])
                elif name in constants:
                    piece.fill(constants[name])
                else:
                    break
                self.put(first + start, piece[: max(0, used - start)])
                done += piece.size
                if time.monotonic() - shown > 5:
                    shown = time.monotonic()
                    print(f"random weights: {100 * done // total}% of {total:,}", flush=True)

    # What a kind of model says of itself

    @classmethod
    def constants(cls, config: Config, T: int) -> dict[str, np.ndarray]:
        """Arrays that are made once and never change, for sequences of up to T."""
        return {}

    @classmethod
    def first_weights(cls, config: Config) -> tuple[dict[str, float], dict[str, float]]:
        """The deviations of MATRICES, which start as normal random numbers; and the first values of others, if not
        0."""
        raise NotImplementedError


def batch_sizes(config: Config, B: int, T: int, logit_rows: int) -> dict[str, int]:
    """The numbers for the tables' symbols that depend on the batch. R: the rows of the logits."""
    return config.sizes() | {"B": B, "T": T, "R": min(B * T, logit_rows or B * T)}


def writing_sizes(config: Config, B: int, T: int, context: int) -> dict[str, int]:
    """The same for a pass that reads the next T tokens of each of B texts. A text has room for `context` tokens."""
    splits = number_of_splits(B, config.num_heads, config.kv_heads, context) if T == 1 else 1
    return batch_sizes(config, B, T, B) | {
        "L": 1, "R": B, "layers": config.num_layers, "context": context, "S": splits if splits > 1 else 0,
    }  # fmt: skip


def dropouts(model: Model, training: bool) -> SimpleNamespace:
    """The places where a model drops: `.encoded`, the embedding, and for each layer `.layer[l].attproj` and
    `.layer[l].fcproj`, which attention and MLP add to the residual stream. Each is a Dropout; or None, if the model
    does not train, or trains without dropout."""

    def at(site: int) -> Dropout | None:
        return Dropout(model.random, site) if training and model.dropout else None

    layers = range(model.config.num_layers)
    return SimpleNamespace(
        encoded=at(0), layer=[SimpleNamespace(attproj=at(1 + 2 * l), fcproj=at(2 + 2 * l)) for l in layers]
    )


def build_from_file(
    kind: type[Model], path: str | Path, B: int, T: int, attention: str, inference: bool = False
) -> Model:
    """The model in a `.bin`. Raises UserError as `read_model` does. If its weights are converted, stderr says so."""
    config, tensors = read_model(path, kind.Config)
    converted = conversion(path, kind.Config)
    if converted:
        print(converted, file=sys.stderr, flush=True)
    model = kind(config, B, T, attention, inference)
    model.load(tensors)
    return model


def build_from_random(kind: type[Model], config: Config, B: int, T: int, attention: str, seed: int) -> Model:
    """A model with the initial weights of its kind."""
    model = kind(config, B, T, attention)
    model.randomize(seed)
    return model

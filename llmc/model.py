"""A model's six buffers, whatever the model: allocated once, named by its tables, filled from a file or at random."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from llmc import collectives, device, ranks  # first: device sets what NumPy must find in the environment

import numpy as np  # isort: skip

from llmc.checkpoint import read_model
from llmc.errors import UserError
from llmc.tensors import ALIGNMENT, Config, Table, layout, name_tensors, num_parameters, ranges

STAGED = 1 << 24  # floats of a weight that are made on the host at a time
BUCKET = 1 << 23  # floats of gradients, at most, that ranks of one memory sum at a time; GPT-2 124M's layers fit
RANDOM_WORDS = 6  # of random numbers' keys and counters: see random_words


class Model:
    """A model with room for batches of up to (B, T). Its buffers, each fp32 and allocated once:

    params_memory, grads_memory, m_memory, v_memory   (num_parameters,): the parameters, in the order of their table,
                                                      their gradients and AdamW's two moments
    acts_memory, grads_acts_memory                    activations and their gradients, and scratch

    The tensors in them: params, grads, grads_acts, and acts(B, T) for a batch of that size. A model for inference alone
    has neither gradients nor moments. norm (4,): a norm of gradients, the factor that clips them, how many steps were
    not finite, and whether AdamW left a parameter of this rank out, which the next step tells all ranks
    (kernels/adamw.py). skip_nonfinite says whether training goes on after such a step.

    Several ranks (llmc/ranks.py) have each a model. shards are the ranges of the flat buffers that belong to each rank,
    of a length that is a multiple of 4 but for the last. Of a sharded model a rank has the moments of its own shard
    alone; of a bitwise one also sums, those of its own shard over a step's batches. received is room for what other
    ranks send. Ranks that have one memory (llmc/collectives.py) see the buffers of all in of_ranks, among them what is
    new in the embedding's gradient: wte_values (B T, C) and wte_indices (B T,). coming has, by what
    wait_for_parameters waits for, the marks (of device.communicated) behind which parameters are there that are on
    their way. All that is kernels/exchange.py's.

    A batch comes in one copy, to batch (4 B T + RANDOM_WORDS,). Its parts are inputs, targets, order, count (B T,) and
    random (RANDOM_WORDS,): tokens, what follows each, what sort_by_token makes of them for the embedding's gradient,
    and what random_words makes for dropout. dropout is the share of activations that training drops, by dropout_seed.

    A subclass is one kind of model. It says:
    Config                    the class of its sizes
    MATRICES                  the parameters that weight decay applies to, and that start as random numbers
    PRODUCTS                  those whose gradient begins as a matrix product, which sets it unless told to accumulate
    ACTIVATIONS, ACTIVATION_GRADIENTS
                              the tables of activations and of their gradients, scratch included; `partials` holds at
                              least 1024 floats
    ATTENTION_TABLES          how both go on, for each kind of attention
    first_weights, and where it has some, constants
    choose_attention(kind, C, NH), forward(B, T, training), loss(B, T, dloss), backward(B, T, accumulate, last),
    train_step(batches, weight_decay, grad_clip), gather_parameters(), checksum()

    Raises UserError where the device has too little memory.
    """

    Config: type[Config]
    MATRICES: tuple[str, ...]
    PRODUCTS: tuple[str, ...]
    ACTIVATIONS: Table
    ACTIVATION_GRADIENTS: Table
    ATTENTION_TABLES: dict[str, tuple[Table, Table]]

    def __init__(
        self, config: Config, B: int, T: int, attention: str = "softmax", inference: bool = False,
        sharded: bool = False, bitwise: bool = False,
    ):  # fmt: skip
        self.config, self.B, self.T, self.attention = config, B, T, attention
        self.sharded, self.bitwise = sharded and ranks.size() > 1, bitwise
        self.acts_table, grads_acts_table = self.tables(attention)
        sizes, absent = config.sizes() | {"B": B, "T": T}, config.absent
        lengths = self.lengths(config, B, T, attention, inference, self.sharded, bitwise)
        self.megabytes = {name: round(4 * length / 2**20) for name, length in lengths.items()}
        free, _ = device.memory()
        if 4 * sum(lengths.values()) > free:
            fitting = bisect_right(
                range(1, B), free,
                key=lambda b: 4 * sum(self.lengths(config, b, T, attention, inference, self.sharded, bitwise).values()),
            )  # fmt: skip
            remedy = f"at most -b {fitting} fits" if fitting else "-b 1 does not fit either, so lower -t"
            raise UserError(
                f"the model at B={B}, T={T} needs {sum(self.megabytes.values())} MiB of memory, and {free >> 20} MiB "
                f"are free on {device.name()}: {remedy}, or choose a smaller model (-e)"
            )
        buffers = {name: device.empty((length,)) for name, length in lengths.items()}
        self.params_memory = buffers["parameters"]
        self.acts_memory = buffers["activations"]
        self.params = name_tensors(self.params_memory, config.PARAMETERS, sizes, 1, absent)
        self.constant = SimpleNamespace(
            **{name: device.asarray(values) for name, values in self.constants(config, T).items()}
        )
        self.batch = device.zeros((4 * B * T + RANDOM_WORDS,), np.int32)
        self.inputs, self.targets, self.order, self.count = self.batch[: 4 * B * T].reshape(4, B * T)
        self.random = self.batch[4 * B * T :]
        self.dropout, self.dropout_seed = 0.0, 0
        self.views_of, self.coming = {}, {}
        if inference:
            return
        self.grads_memory, self.m_memory, self.v_memory = (
            buffers[name] for name in ("gradients", "AdamW m", "AdamW v")
        )
        self.grads_acts_memory = buffers["activation gradients"]
        self.grads = name_tensors(self.grads_memory, config.PARAMETERS, sizes, 1, absent)
        self.grads_acts = name_tensors(self.grads_acts_memory, grads_acts_table, sizes, absent=absent)
        self.norm, self.skip_nonfinite = device.zeros((4,)), False
        self.sums, self.received = buffers.get("sums of batches"), buffers.get("others' gradients")
        self.shards = shards_of(self.params_memory.size)
        self.shard = self.shards[ranks.rank()] if self.sharded else (0, self.params_memory.size)  # of the moments here
        self.of_ranks = None
        if collectives.one_memory():
            self.of_ranks = collectives.map_memory(
                params=self.params_memory, grads=self.grads_memory, received=self.received,
                wte_values=buffers.get("embedding's gradient"), wte_indices=device.empty((B * T,), np.int32),
                barrier_words=device.zeros((ranks.size(),), np.uint32), norm=self.norm,
            )  # fmt: skip
        if bitwise:
            device.fill_zero(self.sums)
        device.fill_zero(self.m_memory)
        device.fill_zero(self.v_memory)
        self.decay_ranges = ranges(config.parameters(), sizes, self.MATRICES)
        self.added_to = [
            (start, end) for start, end, product in ranges(config.parameters(), sizes, self.PRODUCTS) if not product
        ]

    @classmethod
    def lengths(
        cls, config: Config, B: int, T: int, attention: str, inference: bool = False, sharded: bool = False,
        bitwise: bool = False,
    ) -> dict[str, int]:  # fmt: skip
        """The buffers that a model allocates, by the name of what they hold, in floats."""
        sizes, n = config.sizes() | {"B": B, "T": T}, num_parameters(config)
        activations, gradients = (layout(t, sizes, ALIGNMENT, config.absent)[1] for t in cls.tables(attention))
        if inference:
            return {"parameters": n, "activations": activations}
        moments = shard_length(n) if sharded else n
        exchanged = {"sums of batches": shard_length(n)} if bitwise else {}
        if collectives.one_memory() and not bitwise:
            exchanged["others' gradients"] = ranks.size() * shard_length(min(n, BUCKET))
            exchanged["embedding's gradient"] = B * T * config.channels
        elif bitwise and ranks.size() > 1 and not collectives.one_memory():
            exchanged["others' gradients"] = ranks.size() * shard_length(n)
        return {
            "parameters": n, "activations": activations, "gradients": n, "AdamW m": moments, "AdamW v": moments,
            "activation gradients": gradients,
        } | exchanged  # fmt: skip

    @classmethod
    def tables(cls, attention: str) -> tuple[Table, Table]:
        """The tables of activations and of their gradients with this kind of attention."""
        activations, gradients = cls.ATTENTION_TABLES[attention]
        return cls.ACTIVATIONS + activations, cls.ACTIVATION_GRADIENTS + gradients

    def acts(self, B: int, T: int) -> SimpleNamespace:
        """The activations as they lie in the buffer for a batch of (B, T), made at the first request."""
        if (B, T) not in self.views_of:
            for other in self.views_of.keys() - {(self.B, self.T)}:
                del self.views_of[other]  # a text that is being written asks for each length once
            sizes = self.config.sizes() | {"B": B, "T": T}
            self.views_of[B, T] = name_tensors(
                self.acts_memory, self.acts_table, sizes, absent=self.config.absent
            )
        return self.views_of[B, T]

    def zero_grad(self) -> None:
        """Zeroes the gradients to which backward adds. Those of PRODUCTS it sets, unless told to accumulate."""
        for start, end in self.added_to:
            device.fill_zero(self.grads_memory[start:end])

    def load_checkpoint(self, tensors: Mapping[str, np.ndarray] | None, moments: tuple | None) -> None:
        """Takes over a checkpoint that rank 0 has read: the parameters, as `read_model` gives them, and AdamW's m and v
        of all of them, (num_parameters,) each. All ranks must call it, the others with None."""
        if tensors is not None:
            self.load(tensors)
        collectives.broadcast([(self.params_memory, 0)])
        device.join_communication()
        for own, values in zip((self.m_memory, self.v_memory), moments or (None, None), strict=True):
            collectives.scatter(own, self.shard[0], self.params_memory.size, values)

    def whole_moments(self) -> tuple:
        """AdamW's m and v of all parameters, (num_parameters,) each, as save_checkpoint takes them: where a rank has
        only its shard, as pieces, all of which every rank must ask for."""
        if not self.sharded:
            return self.m_memory, self.v_memory
        return tuple(collectives.whole(own, self.shards) for own in (self.m_memory, self.v_memory))

    def random_words(self, step: int, i: int) -> np.ndarray:
        """What decides in batch i of a step which activations are dropped, as kernels/dropout.cuh reads it: the seed's
        two words, step, batch, the rate as a threshold for random words, and the bits of the float 1 / (1 - rate)."""
        seed, threshold = self.dropout_seed % 2**64, min(round(self.dropout * 2**32), 2**32 - 1)
        scale = np.float32(1 / (1 - self.dropout)).view(np.uint32)
        return np.array([seed % 2**32, seed >> 32, step, i, threshold, scale], np.uint32).view(np.int32)

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Takes over the parameters of a file, as `read_model` gives them; rows that it lacks become 0."""
        for name, _ in self.config.parameters():
            parameter, values = getattr(self.params, name), tensors[name]
            if values.size < parameter.size:
                device.fill_zero(parameter)
            device.copy_in(parameter, values)
        device.synchronize()

    def randomize(self, seed: int) -> None:
        """Takes the initial weights of a model that is to be trained, from a seed: normal numbers for MATRICES, of the
        deviations that first_weights gives, 0 for the padding of the vocabulary, and else what first_weights says.

        They are made on the host a piece at a time.
        """
        deviations, constants = self.first_weights(self.config)
        device.fill_zero(self.params_memory)
        done, total, shown = 0, self.params_memory.size, time.monotonic()
        random, staged = np.random.default_rng(seed), np.empty(min(STAGED, total), np.float32)
        for name, shape in self.config.parameters():
            parameter = getattr(self.params, name)
            flat = parameter.reshape(-1)
            for start in range(0, flat.size, STAGED):
                piece = staged[: min(STAGED, flat.size - start)]
                if name in deviations:
                    random.standard_normal(out=piece, dtype=np.float32)
                    piece *= np.float32(deviations[name])
                elif name in constants:
                    piece.fill(constants[name])
                else:
                    break
                device.copy_in(flat[start:], piece)
                device.synchronize()  # before the next piece takes its place
                done += piece.size
                if time.monotonic() - shown > 5:
                    shown = time.monotonic()
                    print(f"random weights: {100 * done // total}% of {total:,}", flush=True)
            if shape[0] == "Vp":
                device.fill_zero(parameter[self.config.vocab_size :])

    # What a kind of model says of itself

    @classmethod
    def constants(cls, config: Config, T: int) -> dict[str, np.ndarray]:
        """Arrays that are made once and never change, for sequences of up to T."""
        return {}

    @classmethod
    def first_weights(cls, config: Config) -> tuple[dict[str, float], dict[str, float]]:
        """The deviations of MATRICES, which start as normal random numbers, and what others start as, if not 0."""
        raise NotImplementedError


def shard_length(n: int) -> int:
    """How many of n numbers a rank has where they are shared out: a multiple of 4; the last ranks may have fewer."""
    return 4 * device.ceil_div(n, 4 * ranks.size())


def shards_of(n: int) -> list[tuple[int, int]]:
    """The range of each rank."""
    length = shard_length(n)
    return [(min(n, r * length), min(n, (r + 1) * length)) for r in range(ranks.size())]


def build_from_file(
    kind: type[Model], path: str | Path, B: int, T: int, attention: str, inference: bool = False
) -> Model:
    """The model in a `.bin`. Raises UserError as `read_model` does."""
    config, tensors = read_model(path, kind.Config)
    model = kind(config, B, T, attention, inference)
    model.load(tensors)
    return model


def build_from_random(kind: type[Model], config: Config, B: int, T: int, attention: str, seed: int) -> Model:
    """A model with the initial weights of its kind."""
    model = kind(config, B, T, attention)
    model.randomize(seed)
    return model

"""The parts that train a model, and the memory that they take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import device
from device.errors import UserError
from llmc.model.activations import Activations, cache_bytes, cache_scratch, training_bytes, training_scratch
from llmc.model.adamw import AdamW, Recipe
from llmc.model.batch import Batch
from llmc.model.model import Model
from llmc.model.ranges import Range
from llmc.model.tensors import Config, num_parameters
from llmc.ranks import ranks
from llmc.ranks.exchange import Exchange, exchange_bytes, shards_of

CHUNK = 1024  # positions whose logits exist at a time, if those of a whole batch do not fit


@dataclass
class Training:
    """The parts of training on batches of (B, T). acts: the activations' views for a whole batch. megabytes: of each
    buffer, by what it holds."""

    model: Model
    activations: Activations
    acts: SimpleNamespace
    batch: Batch
    adamw: AdamW
    exchange: Exchange
    megabytes: dict[str, int]


def make_training(
    kind: type[Model], config: Config, B: int, T: int, attention: str, *, sharded: bool = False, bitwise: bool = False,
    logit_rows: int | None = None, recompute: bool = False, dropout: tuple[float, int] | None = None, **recipe: float,
) -> Training:  # fmt: skip
    """The parts for a model that all ranks train together, with batches of (B, T) on each. The parameters are not set
    yet. sharded: each rank keeps AdamW's state of its own shard only. logit_rows: the number of positions whose
    logits exist at a time; 0: all; None: all, if every rank has enough memory, else CHUNK. recompute: whether backward
    runs each layer's forward pass again, so that of a layer only its input is kept. dropout: rate and seed. recipe:
    what differs from Recipe's defaults.

    Raises UserError if the device has too little memory.
    """
    sharded = sharded and ranks.size() > 1
    shard = shards_of(num_parameters(config))[ranks.rank()] if sharded else None

    def sizes(b: int, rows: int) -> dict[str, int]:
        own = training_sizes(kind, config, b, T, attention, shard, rows, recompute)
        return own | exchange_bytes(config, b, T, bitwise)

    if logit_rows is None:
        crowded = sum(sizes(B, 0).values()) > device.memory()[0]
        logit_rows = CHUNK if any(ranks.all_gather(crowded)) else 0
    megabytes = check_memory(lambda b: sizes(b, logit_rows), B, T)
    model = kind(config, T)
    activations, batch = Activations(model, B, T, attention, logit_rows, recompute), Batch(B, T, dropout)
    adamw = AdamW(model, shard, Recipe(**recipe))
    exchange = Exchange(model, adamw, batch, sharded, bitwise)
    return Training(model, activations, activations.views(), batch, adamw, exchange, megabytes)


def training_sizes(
    kind: type[Model], config: Config, B: int, T: int, attention: str, shard: Range | None, logit_rows: int,
    recompute: bool = False,
) -> dict[str, int]:  # fmt: skip
    """The bytes of each buffer that training allocates, by name, without those of the exchange (exchange_bytes)."""
    n, X = num_parameters(config), device.floatX
    activations, gradients = training_bytes(kind, config, B, T, attention, logit_rows, recompute)
    moments = 4 * (shard[1] - shard[0] if shard else n)
    master = {"master copy": moments} if X == device.BF16 else {}
    return {"parameters": X.itemsize * n, "activations": activations} | master | {
        "gradients": 4 * n, "AdamW m": moments, "AdamW v": moments, "activation gradients": gradients,
        "scratch": sum(training_scratch(config, B, T, attention).values()),
    }  # fmt: skip


def inference_sizes(kind: type[Model], config: Config, B: int, T: int) -> dict[str, int]:
    """The same for a model that writes B texts of up to T tokens."""
    return {
        "parameters": device.floatX.itemsize * num_parameters(config),
        "activations": cache_bytes(kind, config, B, T),
        "scratch": sum(cache_scratch(config, B, T).values()),
    }


def check_memory(sizes: Callable[[int], dict[str, int]], B: int, T: int, texts: bool = False) -> dict[str, int]:
    """The MiB of each buffer. sizes(b): their bytes for batches of b sequences, or texts. Raises UserError, with the
    flag to lower, if the device has too little memory for B."""
    megabytes = {name: round(size / 2**20) for name, size in sizes(B).items()}
    free, _ = device.memory()
    if sum(sizes(B).values()) > free:
        fitting = bisect_right(range(1, B), free, key=lambda b: sum(sizes(b).values()))  # the largest b that fits, or 0
        remedy = f"at most -b {fitting} fits" if fitting else "-b 1 does not fit either, so lower -t"
        if texts:
            most = f"at most {fitting} texts fit at once, so lower --samples or give fewer prompts"
            remedy = most if fitting else "not even one text fits, so lower -t"
        raise UserError(
            f"the model at B={B}, T={T} needs {sum(megabytes.values())} MiB of memory, and {free >> 20} MiB are free "
            f"on {device.name}: {remedy}, or choose a smaller model (-e)"
        )
    return megabytes

"""The parts that train a model."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from llmc.model.activations import Activations
from llmc.model.adamw import AdamW, Recipe
from llmc.model.batch import Batch
from llmc.model.model import Model
from llmc.model.tensors import Config, num_parameters
from llmc.ranks import ranks
from llmc.ranks.exchange import Exchange
from llmc.ranks.shards import shards_of
from llmc.step.memory import Plan, check_memory, in_chunks, room_for_buffers, training_sizes


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
    logit_rows: int | None = None, recompute: bool = False, offload: bool = False,
    dropout: tuple[float, int] | None = None, **recipe: float,
) -> Training:  # fmt: skip
    """The parts for a model that all ranks train together, with batches of (B, T) on each. The parameters are not set
    yet. sharded: each rank keeps AdamW's state of its own shard only. logit_rows: the number of positions whose
    logits exist at a time; 0: all; None: all, if every rank has enough memory, else fewer (memory.py: CHUNK).
    recompute: backward runs each layer's forward pass again, and of a layer only its input is kept. offload: AdamW's
    state lies on the host. dropout: rate and seed. recipe: what differs from Recipe's defaults.

    Raises UserError if the device or the host has too little memory.
    """
    sharded = sharded and ranks.size() > 1
    shard = shards_of(num_parameters(config))[ranks.rank()] if sharded else None
    plan = Plan(B, T, attention, logit_rows or 0, recompute, offload, bitwise, shard)
    if logit_rows is None:
        crowded = sum(training_sizes(kind, config, plan).values()) > room_for_buffers()
        plan = in_chunks(plan) if any(ranks.all_gather(crowded)) else plan
    megabytes = check_memory(kind, config, plan)
    model = kind(config, T)
    activations = Activations(model, B, T, attention, plan.logit_rows, recompute)
    batch, adamw = Batch(B, T, dropout), AdamW(model, shard, Recipe(**recipe), offload)
    exchange = Exchange(model, adamw, batch, sharded, bitwise)
    return Training(model, activations, activations.views(), batch, adamw, exchange, megabytes)

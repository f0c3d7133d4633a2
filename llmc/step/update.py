"""A step of AdamW, on one rank or several."""

from __future__ import annotations

import device
from kernels.adamw import adamw as adamw_launch
from kernels.reduce import SQUARES, norm_of_squares, sum_squares
from llmc.model.adamw import AdamW
from llmc.model.model import Model
from llmc.model.ranges import Range, overlaps
from llmc.model.tensors import ranges
from llmc.ranks.exchange import Exchange

import numpy as np


def adamw_update(model: Model, adamw: AdamW, exchange: Exchange, lr: float, t: int) -> None:
    """One AdamW step on the parameters of a model, from its gradients; t counts steps from 1.

    The norm of the gradients goes to adamw.norm[0]. If it is not finite, nothing changes; without skip_nonfinite,
    nothing changes in the steps after it either. Without grad_clip the norm covers only the gradients to which backward
    adds. These are few: of norms, of biases, and of embeddings that no classifier shares. A NaN on its way through the
    layers reaches them, too. One case remains: a weight's gradient overflows by itself. Then AdamW leaves its parameter
    as it is.

    With several ranks, `exchange` brings the gradients' sums that are still missing, and says which parameters this
    rank can update next. All ranks must call this function.
    """
    checked = [(0, model.grads_memory.size)] if adamw.recipe.grad_clip else model.added_to
    exchange.finish_sums(checked)
    update_norm(model, adamw, exchange, checked)
    ranges_of_decay = decayed(model, adamw)
    for ready in exchange.updatable(checked):
        for start, end, decay in ranges_of_decay:
            for begin, stop in overlaps([(start, end)], ready):
                update_range(model, adamw, begin, stop, lr, decay, t)


def decayed(model: Model, adamw: AdamW) -> list[tuple[int, int, float]]:
    """The ranges of this rank's parameters: (start, end, their weight decay)."""
    cut = [(0, model.params_memory.size, False)]
    if adamw.recipe.weight_decay:
        cut = ranges(model.config.parameters(), model.config.sizes(), model.config.matrices)
    return [
        (begin, stop, adamw.recipe.weight_decay if is_matrix else 0.0)
        for start, end, is_matrix in cut
        for begin, stop in overlaps([(start, end)], [adamw.shard])
    ]


def update_range(model: Model, adamw: AdamW, start: int, end: int, lr: float, decay: float, t: int) -> None:
    """AdamW's kernel on a range of the parameters."""
    own, recipe = slice(start - adamw.first, end - adamw.first), adamw.recipe
    params, rounded = model.params_memory[start:end], None
    if adamw.master is not None:
        params, rounded = adamw.master[own], params
    adamw_launch(
        params, model.grads_memory[start:end], adamw.m[own], adamw.v[own], adamw.norm, end - start, lr,
        recipe.beta1, recipe.beta2, recipe.eps, decay, t, rounded=rounded,
    )  # fmt: skip


def update_norm(model: Model, adamw: AdamW, exchange: Exchange, checked: list[Range]) -> None:
    """Sets adamw.norm from the gradients in some ranges (kernels/reduce.py: global_norm). If each rank has the sums of
    its own shard only, the ranks also sum their partial sums of squares."""
    partials, sharded = device.scratch("partials", (SQUARES,), np.float32), exchange.lacks_sums(checked)
    if sharded:
        checked = overlaps(checked, [adamw.shard])
        device.fill_zero(partials)
    used = sum_squares(partials, [model.grads_memory[start:end] for start, end in checked])
    if sharded:
        used = SQUARES
        exchange.add_squares(partials)
    norm_of_squares(adamw.norm, partials, used, adamw.recipe.grad_clip, adamw.recipe.skip_nonfinite)

"""A step of AdamW, on one rank or several."""

from __future__ import annotations

import device
from kernels.reduce import SQUARES, norm_of_squares, sum_squares
from llmc.model.adamw import AdamW
from llmc.model.model import Model
from llmc.model.ranges import Range, overlaps
from llmc.ranks.exchange import Exchange

import numpy as np


def adamw_update(model: Model, adamw: AdamW, exchange: Exchange, lr: float, t: int) -> None:
    """One AdamW step on the parameters of a model, from its gradients; t counts steps from 1.

    The norm of the gradients goes to adamw.grad_norm[0]. If it is not finite, nothing changes; without skip_nonfinite,
    nothing changes in the steps after it either.

                         the norm covers                      a gradient outside of it that is not finite
    grad_clip            all gradients                        there is none
    offload              all gradients                        there is none. (Most parameters are updated beside the
                                                              next step, too late to learn of one.)
    neither              those to which backward adds:        AdamW leaves its parameter as it is. This is a weight's
                         of norms, biases, and embeddings     gradient that overflows by itself: a NaN that goes
                         that no classifier shares            through the layers reaches the norms, too.

    With several ranks, `exchange` brings the gradients' sums that are still missing, and says which parameters this
    rank can update next. All ranks must call this function.
    """
    recipe = adamw.recipe
    checked = [(0, model.grads_memory.size)] if recipe.grad_clip or adamw.offload else model.added_to
    exchange.finish_sums(checked)
    update_norm(model, adamw, exchange, checked)
    if adamw.offload:
        adamw.offload.set_rates(lr, recipe.beta1, recipe.beta2, t)
    for ready in exchange.updatable(checked):
        if adamw.offload:
            adamw.pass_through(model, ready)
        else:
            adamw.update(model, ready, lr, t)


def update_norm(model: Model, adamw: AdamW, exchange: Exchange, checked: list[Range]) -> None:
    """Sets adamw.grad_norm from the gradients in some ranges (kernels/reduce.py: global_norm). If each rank has the
    sums of its own shard only, the ranks also sum their partial sums of squares."""
    partials, sharded = device.scratch("partials", (SQUARES,), np.float32), exchange.lacks_sums(checked)
    if sharded:
        checked = overlaps(checked, [adamw.shard])
        device.fill_zero(partials)
    used = sum_squares(partials, [model.grads_memory[start:end] for start, end in checked])
    if sharded:
        used = SQUARES
        exchange.add_squares(partials)
    norm_of_squares(adamw.grad_norm, partials, used, adamw.recipe.grad_clip, adamw.recipe.skip_nonfinite)

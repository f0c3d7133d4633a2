"""The state of AdamW. llmc/step/update.py has a step of it."""

from __future__ import annotations

from typing import NamedTuple

import device
from llmc.model.model import Model
from llmc.model.ranges import Range


class Recipe(NamedTuple):
    """How AdamW updates parameters.

    weight_decay          applies to the model's matrices alone
    grad_clip             the largest norm of the gradients; larger ones are scaled down to it. 0: they stay as they are
    beta1, beta2          what m and v keep of themselves in a step
    eps                   what is added to the root of v
    skip_nonfinite        whether training goes on after a step that is not finite
    """

    weight_decay: float = 0.0
    grad_clip: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    skip_nonfinite: bool = False


class AdamW:
    """The state of AdamW for the parameters of a model, or for a rank's shard of them, and its recipe.

    m, v (length,)        the moments, fp32
    master (length,)      in bf16 the parameters as AdamW updates them, fp32. It is needed because learning rates are so
                          small that most bf16 parameters would never change. In fp32 None.
    first                 the place of the shard's first parameter among all of them
    norm (4,)             the norm of the gradients; the factor that clips them; how many steps were not finite; and
                          whether a parameter of this rank was left out (kernels/adamw.py), which the next step tells
                          all ranks
    """

    def __init__(self, model: Model, shard: Range | None, recipe: Recipe):
        self.recipe = recipe
        self.first, end = shard or (0, model.params_memory.size)
        length = end - self.first
        self.m, self.v, self.norm = device.zeros((length,)), device.zeros((length,)), device.zeros((4,))
        self.master = device.empty((length,)) if model.has_copy else None

    @property
    def shard(self) -> Range:
        return self.first, self.first + self.m.size

"""The state of AdamW, and its update of ranges of the parameters. llmc/step/update.py has a step of it."""

from __future__ import annotations

from typing import NamedTuple

import device
from kernels.adamw import adamw as adamw_launch
from kernels.adamw import join, split
from llmc.model.model import Model
from llmc.model.offload import Offload, Piece
from llmc.model.ranges import Range, overlaps
from llmc.model.tensors import ranges

import numpy as np


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

    In bf16 AdamW updates a master copy of the parameters, which is fp32. It is needed because learning rates are so
    small that most bf16 parameters would never change. kernels/adamw.cu says how the copy is kept, in 2 bytes more for
    each parameter.

    m, v (length,)        the moments, fp32; in bf16 v with signs
    low (length,)         in bf16 the last 16 bits of the master copy, uint16; in fp32 None
    first                 the place of the shard's first parameter among all of them
    offload               with `--offload`: m, v and low lie in page-locked memory of the host, and pass through this
                          for their updates. Else None
    grad_norm (4,)        the norm of the gradients; the factor that clips them; how many steps were not finite; and
                          whether a parameter of this rank was left out (kernels/adamw.py), which the next step tells
                          all ranks
    """

    def __init__(self, model: Model, shard: Range | None, recipe: Recipe, offload: bool = False):
        self.recipe = recipe
        self.first, end = shard or (0, model.params_memory.size)
        length = end - self.first
        zeros, empty = (device.large_pinned, device.large_pinned) if offload else (device.zeros, device.empty)
        self.m, self.v, self.grad_norm = zeros((length,)), zeros((length,)), device.zeros((4,))
        self.low = empty((length,), np.uint16) if model.has_copy else None
        there = [x for x in (self.m, self.v, self.low) if x is not None]
        self.offload = Offload(there, self.first) if offload else None

    @property
    def shard(self) -> Range:
        return self.first, self.first + self.m.size

    def update(self, model: Model, wanted: list[Range], lr: float, t: int) -> None:
        """Updates those of some ranges of the parameters that are in the shard; t counts steps from 1."""
        for start, end, decay in self.decayed(model):
            for begin, stop in overlaps([(start, end)], wanted):
                own = slice(begin - self.first, stop - self.first)
                low = self.low[own] if self.low is not None else None
                self.launch(model, begin, stop, decay, self.m[own], self.v[own], low, lr, t)

    def decayed(self, model: Model) -> list[tuple[int, int, float]]:
        """The ranges of the shard: (start, end, their weight decay)."""
        cut = [(0, model.params_memory.size, False)]
        if self.recipe.weight_decay:
            cut = ranges(model.config.parameters(), model.config.sizes(), model.config.matrices)
        return [
            (begin, stop, self.recipe.weight_decay if is_matrix else 0.0)
            for start, end, is_matrix in cut
            for begin, stop in overlaps([(start, end)], [self.shard])
        ]

    def pass_through(self, model: Model, wanted: list[Range]) -> None:
        """The same with `--offload`, with the rates that offload.set_rates has set."""
        pieces = self.pieces(model, wanted)

        def work(_) -> None:
            for number, piece in enumerate(pieces):
                self.pass_piece(model, piece, number, len(pieces))

        device.on_comm_stream(work)
        device.wait_comm()

    def pieces(self, model: Model, wanted: list[Range]) -> list[Piece]:
        """Cuts those of some ranges of the parameters that are in the shard into pieces, in the given order."""
        ranges_of_decay = self.decayed(model)
        parts = ((*both, decay) for one in wanted for start, end, decay in ranges_of_decay
                 for both in overlaps([(start, end)], [one]))  # fmt: skip
        return self.offload.pieces(parts)

    def pass_piece(self, model: Model, piece: Piece, number: int, count: int) -> None:
        """Updates a piece (Offload.pass_through)."""

        def update(start: int, end: int, decay: float, m, v, low=None) -> None:
            self.launch(model, start, end, decay, m, v, low, rates=self.offload.rates)

        self.offload.pass_through(piece, update, number, count)

    def launch(self, model: Model, start: int, end: int, decay: float, m, v, low, lr=0.0, t=1, rates=None) -> None:
        """Launches the kernel on a range of the parameters. m, v and, in bf16, low: the range's state."""
        recipe = self.recipe
        adamw_launch(
            model.params_memory[start:end], model.grads_memory[start:end], m, v, self.grad_norm, end - start, lr,
            recipe.beta1, recipe.beta2, recipe.eps, decay, t, low=low, rates=rates,
        )  # fmt: skip

    def set_master(self, model: Model, start: int, values) -> None:
        """In bf16: sets those of consecutive parameters that are in the shard, from the start-th on, to fp32 values on
        the device."""
        for begin, stop in overlaps([(start, start + values.size)], [self.shard]):
            there, (low, v) = self.master_parts(begin, stop)
            own = model.params_memory[begin:stop], values[begin - start : stop - start]
            split(*own, stop - begin, low=low, v=v)
            for x, copy in zip(there, (low, v), strict=True):
                device.copy(x, copy)

    def get_master(self, model: Model, start: int, values) -> None:
        """Sets fp32 values on the device to consecutive parameters of the shard, from the start-th on, as AdamW
        updates them."""
        end = start + values.size
        if self.low is None:
            device.copy(values, model.params_memory[start:end])
        else:
            _, (low, v) = self.master_parts(start, end)
            join(values, model.params_memory[start:end], low, v, end - start)

    def master_parts(self, start: int, end: int) -> tuple[list, list]:
        """low and v of a range of the shard, and copies of both on the device, because with `--offload` they lie on the
        host."""
        there = [x[start - self.first : end - self.first] for x in (self.low, self.v)]
        here = [device.empty(x.shape, x.dtype) for x in there]
        for copy, x in zip(here, there, strict=True):
            device.copy(copy, x)
        return there, here

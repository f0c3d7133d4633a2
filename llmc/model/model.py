"""A model: its sizes, its parameters and their gradients. Its script says the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import SimpleNamespace

import device
from llmc.model.fp8 import Fp8, quantized_matrices
from llmc.model.tensors import Config, Table, layout, name_tensors, ranges, shape_of, without

import numpy as np


class Model:
    """A model of one kind. Each of its two buffers is allocated once, in the order of the table of parameters:

    params_memory (num_parameters,)   the parameters, of the type `floatX` that the device has when the model is made.
                                      In bf16, AdamW rounds these from a master copy in fp32, whose last 16 bits it
                                      has (llmc/model/adamw.py).
    grads_memory (num_parameters,)    their gradients, fp32. A model for inference has none.
    params, grads                     the tensors in them, as name_tensors and `group_parameters` name them
    constant                          arrays that never change, for sequences of up to T
    fp8                               what else a model has in fp8 (llmc/model/fp8.py); else None

    A subclass is a kind of model. It says:
    Config                    the class of its sizes
    ACTIVATIONS, GRADIENTS    the tables of activations, and of their gradients
    LINEAR                    tensors that only a layer's products with one weight read: by the weight's name the
                              product's input and the gradient of its output, each None if something else reads it
    SIZES                     symbols of the tables: `sizes` has their numbers, as its passes unpack them
    DROPS                     whether it can train with dropout
    forward(acts, batch)      from the tokens to acts.ln[L], the output of the last norm
    loss(acts, batch, dloss, accumulate)
                              sets acts.losses (B,T) to the cross-entropy of batch.targets. With dloss, the gradient of
                              each single loss, it also sets acts.dln to the gradient of acts.ln[L], and adds to the
                              gradient of the classifier's weight; or sets it, without accumulate.
    backward(acts, batch, accumulate)
                              adds the gradients of all other parameters, from what forward and loss left in acts.
                              Without accumulate it sets those of config.products. It calls acts.recompute_layer
                              before the backward pass of each layer.
    layer_recompute(acts, batch, l)
                              runs the forward pass of layer l again, from acts.residual[l], as far as backward needs it
    group_parameters, first_weights, and where it needs them, group_activations and constants
    """

    Config: type[Config]
    ACTIVATIONS: Table
    GRADIENTS: Table
    LINEAR: dict[str, tuple[str | None, str | None]]
    SIZES: tuple[str, ...]
    DROPS = False
    forward: Callable[..., None]
    loss: Callable[..., None]
    backward: Callable[..., None]
    layer_recompute: Callable[..., None]

    def __init__(self, config: Config, T: int, inference: bool = False):
        self.config = config
        self.sizes = shape_of(self.SIZES, config.sizes())
        constants = self.constants(config, T).items()
        self.constant = SimpleNamespace(**{name: device.asarray(values) for name, values in constants})
        quantized = quantized_matrices(type(self), config)  # a model for inference has no others of these
        self.params_memory, self.params = self.allocate(device.floatX, quantized if inference else ())
        self.grads_memory, self.grads = (None, None) if inference else self.allocate(np.float32)
        self.fp8 = Fp8(self) if quantized else None

    def allocate(self, dtype: np.dtype, absent: Iterable[str] = ()) -> tuple:
        """A buffer with a number for each parameter that is not absent, and the tensors in it."""
        _, n = layout(without(self.config.parameters(), absent), self.config.sizes(), align=1)
        memory = device.empty((n + n % 2,), dtype)[:n]  # bf16 too fills whole 32-bit words
        return memory, self.tensors_in(memory, absent)

    def tensors_in(self, memory, absent: Iterable[str] = ()) -> SimpleNamespace:
        """The tensors in such a buffer."""
        config = self.config
        tensors = name_tensors(memory, config.PARAMETERS, config.sizes(), 1, config.absent.union(absent))
        tensors.head = getattr(tensors, config.head)
        self.group_parameters(tensors, config)
        return tensors

    @property
    def has_copy(self) -> bool:
        """Whether the parameters are rounded to bf16 from a master copy."""
        return self.params_memory.dtype == device.BF16

    @property
    def added_to(self) -> list[tuple[int, int]]:
        """The ranges of grads_memory that backward adds to, from a step's first batch on."""
        return added_ranges(self.config)

    def zero_grad(self) -> None:
        """Begins a step. Zeroes the gradients that backward adds to; in the first batch backward sets the others."""
        for start, end in self.added_to:
            device.fill_zero(self.grads_memory[start:end])
        self.mark_stale()

    def mark_stale(self) -> None:
        """Says that the parameters have changed: the next forward pass makes anew what passes keep of them."""
        if self.fp8:
            self.fp8.mark_stale()

    @staticmethod
    def group_parameters(tensors: SimpleNamespace, config: Config) -> None:
        """Adds to the views of parameters, or of their gradients, the groups that the pass takes: norm[l], of the norm
        before layer l, and of the last one."""
        raise NotImplementedError

    @staticmethod
    def group_activations(acts: SimpleNamespace, config: Config) -> None:
        """Adds groups to the views of activations, where the tables' names are not enough."""

    @classmethod
    def constants(cls, config: Config, T: int) -> dict[str, np.ndarray]:
        """Arrays that are made once, for sequences of up to T, and never change."""
        return {}

    @classmethod
    def first_weights(cls, config: Config) -> tuple[dict[str, float], dict[str, float]]:
        """Two dicts by name: the standard deviation of each of config.matrices, which start as normal random numbers,
        and the value with which each other parameter starts that does not start as 0."""
        raise NotImplementedError


@cache
def added_ranges(config: Config) -> list[tuple[int, int]]:
    """The ranges of a model's gradients that are not those of config.products."""
    cut = ranges(config.parameters(), config.sizes(), config.products)
    return [(start, end) for start, end, product in cut if not product]

"""A model: its sizes, its parameters and their gradients. Its script says the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import device
from llmc.model.tensors import Config, Table, name_tensors, num_parameters, ranges

import numpy as np


class Model:
    """A model of one kind. Each of its two buffers is allocated once, in the order of the table of parameters:

    params_memory (num_parameters,)   the parameters, of the type `floatX` that the device has when the model is made.
                                      In bf16, AdamW updates a master copy in fp32 (llmc/model/adamw.py) and rounds
                                      these from it.
    grads_memory (num_parameters,)    their gradients, fp32. A model for inference has none.
    params, grads                     the tensors in them, as name_tensors and `group_parameters` name them
    constant                          arrays that never change, for sequences of up to T

    A subclass is a kind of model. It says:
    Config                    the class of its sizes
    MATRICES                  the parameters that weight decay applies to, and that start as random numbers
    PRODUCTS                  those whose gradient is set in a step's first batch, by a matrix product. The other
                              gradients are zeroed before, and backward adds to them.
    ACTIVATIONS, GRADIENTS    the tables of activations, and of their gradients
    DROPS                     whether it can train with dropout
    forward(acts, batch)      from the tokens to acts.ln, the output of the last norm
    loss(acts, batch, dloss, accumulate)
                              sets acts.losses (B,T) to the cross-entropy of batch.targets. With dloss, the gradient of
                              each single loss, it also sets acts.dln to the gradient of acts.ln, and adds to the
                              gradient of the classifier's weight; or sets it, without accumulate.
    backward(acts, batch, accumulate)
                              adds the gradients of all other parameters, from what forward and loss left in acts.
                              Without accumulate it sets those of PRODUCTS.
    sizes                     a tuple of sizes, as its passes unpack it
    group_parameters, group_activations, first_weights, and where it has some, constants

    Raises ValueError if a name above is not one of the Config's PARAMETERS.
    """

    Config: type[Config]
    MATRICES: tuple[str, ...]
    PRODUCTS: tuple[str, ...]
    ACTIVATIONS: Table
    GRADIENTS: Table
    DROPS = False
    sizes: tuple[int, ...]
    forward: Callable[..., None]
    loss: Callable[..., None]
    backward: Callable[..., None]

    def __init__(self, config: Config, T: int, inference: bool = False):
        self.config = config
        self.check_names("MATRICES and PRODUCTS", (*self.MATRICES, *self.PRODUCTS))
        constants = self.constants(config, T).items()
        self.constant = SimpleNamespace(**{name: device.asarray(values) for name, values in constants})
        self.params_memory, self.params = self.allocate(device.floatX)
        self.grads_memory, self.grads = (None, None) if inference else self.allocate(np.float32)

    def allocate(self, dtype: np.dtype) -> tuple:
        """A buffer with a number for each parameter, and the tensors in it."""
        n = num_parameters(self.config)
        memory = device.empty((n + n % 2,), dtype)[:n]  # bf16 too fills whole 32-bit words
        tensors = name_tensors(memory, self.config.PARAMETERS, self.config.sizes(), 1, self.config.absent)
        self.group_parameters(tensors, self.config)
        return memory, tensors

    @classmethod
    def check_names(cls, where: str, names: tuple[str, ...]) -> None:
        """Raises ValueError for a name, given `where` in the script, that is none of PARAMETERS."""
        unknown = set(names) - {name for name, *_ in cls.Config.PARAMETERS}
        if unknown:
            raise ValueError(f"{cls.__name__}: {min(unknown)}, in {where}, is none of PARAMETERS")

    @property
    def has_copy(self) -> bool:
        """Whether the parameters are rounded to bf16 from a master copy, which AdamW has."""
        return self.params_memory.dtype == device.BF16

    @property
    def added_to(self) -> list[tuple[int, int]]:
        """The ranges of grads_memory that backward adds to, from a step's first batch on."""
        return added_ranges(self.config, self.PRODUCTS)

    def zero_grad(self) -> None:
        """Zeroes the gradients that backward adds to. In a step's first batch backward sets the others, PRODUCTS."""
        for start, end in self.added_to:
            device.fill_zero(self.grads_memory[start:end])

    # What a kind of model says of itself

    @staticmethod
    def group_parameters(tensors: SimpleNamespace, config: Config) -> None:
        """Adds to the views of parameters, or of their gradients, the groups that the pass takes: norm[l], of the norm
        in front of layer l, and of the last one; and head, the classifier's weight."""
        raise NotImplementedError

    @staticmethod
    def group_activations(acts: SimpleNamespace, config: Config) -> None:
        """Does the same for the views of activations: norm[l], what norm l keeps for backward; and residual[l], the
        residual stream in front of layer l, and behind the last one."""
        raise NotImplementedError

    @classmethod
    def constants(cls, config: Config, T: int) -> dict[str, np.ndarray]:
        """Arrays that are made once, for sequences of up to T, and never change."""
        return {}

    @classmethod
    def first_weights(cls, config: Config) -> tuple[dict[str, float], dict[str, float]]:
        """Two dicts by name: the standard deviation of each of MATRICES, which start as normal random numbers, and the
        value with which each other parameter starts that does not start as 0."""
        raise NotImplementedError


@cache
def added_ranges(config: Config, products: tuple[str, ...]) -> list[tuple[int, int]]:
    """The ranges of a model's gradients that are not those of `products`."""
    cut = ranges(config.parameters(), config.sizes(), products)
    return [(start, end) for start, end, product in cut if not product]

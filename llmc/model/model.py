"""A model: its sizes, its parameters and their gradients. Its script says the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import copy
from functools import cache
from types import SimpleNamespace

import device
from kernels.fp8 import Codes, Gradient, Scale, Weight, pays
from llmc.model.tensors import Config, Table, layout, name_tensors, ranges, readers, shape_of, without

import numpy as np


class Model:
    """A model of one kind. Each of its two buffers is allocated once, in the order of the table of parameters:

    params_memory (num_parameters,)   the parameters, of the type `floatX` that the device has when the model is made.
                                      In bf16, AdamW rounds these from a master copy in fp32, whose last 16 bits it
                                      has (llmc/model/adamw.py).
    grads_memory (num_parameters,)    their gradients, fp32. A model for inference has none.
    codes                             in fp8, bytes: codes and scales of the matrices whose products take codes. A
                                      model for inference has no place for these matrices in params_memory
    params, grads                     the tensors in them, as name_tensors and `group_parameters` name them
    constant                          arrays that never change, for sequences of up to T

    A subclass is a kind of model. It says:
    Config                    the class of its sizes
    ACTIVATIONS, GRADIENTS    the tables of activations, and of their gradients
    SIZES                     symbols of the tables: `sizes` has their numbers, as its passes unpack them
    DROPS                     whether it can train with dropout
    forward(acts, batch)      from the tokens to acts.ln, the output of the last norm
    loss(acts, batch, dloss, accumulate)
                              sets acts.losses (B,T) to the cross-entropy of batch.targets. With dloss, the gradient of
                              each single loss, it also sets acts.dln to the gradient of acts.ln, and adds to the
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
        self.codes = device.empty((codes_bytes(type(self), config, 1 if inference else 2),), np.uint8)
        self.params_memory, self.params = self.allocate(device.floatX, self.coded() if inference else ())
        self.grads_memory, self.grads = (None, None) if inference else self.allocate(np.float32)
        self.take_codes()
        device.reserve({"decoded weight": decoded_bytes(type(self), config) * inference})

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

    def without_codes(self) -> Model:
        """This model, but its products take no codes: for samples, whose passes have any number of rows."""
        model = copy(self)
        model.codes, model.params = self.codes[:0], self.tensors_in(self.params_memory)
        return model

    def take_codes(self) -> None:
        """Puts a Weight and its Gradient (kernels/fp8.py) in the place of each matrix whose products take codes, or,
        in a model for inference, a Codes."""
        end = 0

        def room(*shape: int, dtype=np.uint8):
            nonlocal end
            start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
            return self.codes[start:end].view(dtype).reshape(shape)

        for name, (OC, C) in self.coded().items():
            before = room(4, dtype=np.float32)[:1] if self.grads else None
            for l, p in enumerate(self.params.layer):
                codes, scale = room(OC, C), room(4, dtype=np.float32)[:1]
                if not self.grads:
                    setattr(p, name, Codes(codes, scale))
                    continue
                transposed, g = room(C, OC), self.grads.layer[l]
                # In a layer that is run again, inputs have the scales of forward. So their guess needs no other layer.
                scales = Scale(room(4, dtype=np.float32)[:1]), Scale(room(4, dtype=np.float32)[:2], before)
                setattr(p, name, Weight(getattr(p, name), codes, transposed, scale, *scales))
                setattr(g, name, Gradient(getattr(g, name), *scales))

    def coded(self) -> dict[str, tuple[int, int]]:
        """The matrices whose products take codes (coded_matrices)."""
        return coded_matrices(type(self), self.config) if self.codes.size else {}

    @property
    def has_copy(self) -> bool:
        """Whether the parameters are rounded to bf16 from a master copy."""
        return self.params_memory.dtype == device.BF16

    @property
    def added_to(self) -> list[tuple[int, int]]:
        """The ranges of grads_memory that backward adds to, from a step's first batch on."""
        return added_ranges(self.config)

    def begin_batch(self, first: bool) -> None:
        """Call it before the forward pass of each batch of a step. In the first one it zeroes gradients, and forward
        encodes weights. In the others forward takes the same codes."""
        if first:
            self.zero_grad()
        self.weights_are_new(first)

    def zero_grad(self) -> None:
        """Zeroes the gradients that backward adds to. In a step's first batch backward sets the others."""
        for start, end in self.added_to:
            device.fill_zero(self.grads_memory[start:end])

    def weights_are_new(self, new: bool = True) -> None:
        """Says whether forward must encode the weights whose products take codes, because they have changed."""
        for name in self.coded():
            for p in self.params.layer:
                getattr(p, name).is_new = new

    # What a kind of model says of itself

    @staticmethod
    def group_parameters(tensors: SimpleNamespace, config: Config) -> None:
        """Adds to the views of parameters, or of their gradients, the groups that the pass takes: norm[l], of the norm
        in front of layer l, and of the last one."""
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


def coded_matrices(kind: type[Model], config: Config) -> dict[str, tuple[int, int]]:
    """The parameters whose products take codes: name, and shape (OC,C) in a layer."""
    if device.precision != "fp8":
        return {}
    starts, _ = layout(config.parameters(), config.sizes(), align=1)
    made = readers(kind.ACTIVATIONS + kind.GRADIENTS).values()
    of_layers = {name: starts[name] for name in config.products if len(starts[name][1]) == 3}
    return {
        name: (OC, C)
        for name, (start, (_, OC, C)) in of_layers.items()
        if pays(C, OC, name in made) and start % 8 == 0
    }


def codes_bytes(kind: type[Model], config: Config, layouts: int = 2) -> int:
    """The bytes of Model.codes: for each layout of a matrix one a number, 16 for each of a layer's three scales, and
    16 for a matrix's Scale.before. A model for inference has one layout and one scale."""
    matrices, trained = coded_matrices(kind, config).values(), layouts == 2
    of_layer = sum(layouts * OC * C + (48 if trained else 16) for OC, C in matrices)
    return config.num_layers * of_layer + 16 * trained * len(matrices)


def decoded_bytes(kind: type[Model], config: Config) -> int:
    """The bytes of the scratch for a decoded weight: of the largest one, in bf16."""
    return 2 * max((OC * C for OC, C in coded_matrices(kind, config).values()), default=0)


@cache
def added_ranges(config: Config) -> list[tuple[int, int]]:
    """The ranges of a model's gradients that are not those of config.products."""
    cut = ranges(config.parameters(), config.sizes(), config.products)
    return [(start, end) for start, end, product in cut if not product]

"""What a model in fp8 has besides bf16: which of its matrices are quantized, their memory, and views for its passes.

A layer's matrix is quantized if that saves time. Its products then take quantized operands (kernels/fp8/). If only such
products read an activation or a gradient, the kernel that computes it quantizes it, too; Model.LINEAR says which these
are. A product quantizes its other operands itself.
"""

from __future__ import annotations

import math
from copy import copy
from types import SimpleNamespace
from typing import Any

import device
from kernels.adamw import split
from kernels.fp8.loading import load_layers
from kernels.fp8.quantize import quantize, scratch_bytes
from kernels.fp8.quantized import (
    MULTIPLE,
    GradientScale,
    Quantized,
    QuantizedWeight,
    Scale,
    WeightGradient,
    WeightOnly,
)
from llmc.model.tensors import Config, Table, layout, owners

import numpy as np

# To quantize a weight (OC,C) saves a layer's three products time in proportion to C OC. It costs time in proportion to
# C for their inputs, and to OC for the gradients of their outputs, about as 8 to 6. So a weight is worth quantizing if
# C OC / (8 C + 6 OC) is above MIN_GAIN; or above WITHOUT_PRODUCERS times that, if quantize_kernel does it all.
#
# A step on an H100 (80 GB HBM3, 2026-11-28), by what is quantized; in brackets the highest MIN_GAIN for it:
#   GPT-2 124M, B 16      no weight 29.9 ms, fc (96) 28.3, and qkv (89) 27.8, and fcproj (81) 26.1, and attproj 26.2
#   Qwen3-0.6B, B 8       without attproj (93) 62.5 ms, with it 62.1
#   SmolLM2-135M, B 16    no weight 42.2 ms, fc (77) 40.9, all (from 41 on) 39.5
# By time alone smaller weights would be quantized. But the loss moves: with attproj that of Qwen3 was up to 0.71% above
# bf16's, without it 0.38%; with all weights that of SmolLM2 differed by up to 0.76% (doc/tried.md).
MIN_GAIN, WITHOUT_PRODUCERS = 80, 1.35


class Fp8:
    """The quantized weights of a model in fp8. They stand in the views of its parameters and gradients: a
    QuantizedWeight and its WeightGradient in the place of each quantized matrix, or, without gradients, a WeightOnly.

    memory    bytes: q, q_T and scales of all quantized matrices; q and one scale in a model for inference
    weights   all QuantizedWeights
    """

    def __init__(self, model: Any):
        kind, config, inference = type(model), model.config, model.grads is None
        load_layers()
        self.memory = device.empty((quantized_bytes(kind, config, inference),), np.uint8)
        self.weights: list[QuantizedWeight] = []
        end = 0

        def take(*shape: int, dtype=np.uint8):
            nonlocal end
            start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
            return self.memory[start:end].view(dtype).reshape(shape)

        def floats(count: int):
            return take(4, dtype=np.float32)[:count]

        for name, (OC, C) in quantized_matrices(kind, config).items():
            previous_amax = None if inference else floats(1)
            for l, p in enumerate(model.params.layer):
                q, scale = take(OC, C), floats(1)
                if inference:
                    setattr(p, name, WeightOnly(q, scale))
                    continue
                where, g = f"{name} of layer {l}", model.grads.layer[l]
                weight = QuantizedWeight(
                    getattr(p, name), Quantized(q, take(C, OC), Scale(f"weight {where}", scale)),
                    # In a layer that is run again, inputs have the scales of forward. So the guess is the last scale.
                    Scale(f"input of {where}", floats(1)),
                    GradientScale(f"gradient of the output of {where}", floats(2), previous_amax),
                )  # fmt: skip
                setattr(p, name, weight)
                setattr(g, name, WeightGradient(getattr(g, name), weight))
                self.weights.append(weight)
        device.reserve({"dequantized weight": dequantized_bytes(kind, config) * inference})

    def mark_stale(self) -> None:
        """Says that the weights have changed, so the next forward pass must quantize them."""
        for weight in self.weights:
            weight.stale = True


def quantize_views(acts: SimpleNamespace, model: Any, rows: int) -> None:
    """Puts a Quantized view in the place of each activation and gradient of `rows` positions that only quantized
    products read, in each layer."""
    if rows % MULTIPLE:
        return
    for name, (inp, dout) in linear(type(model), model.config).items():
        for a, g in zip(acts.layer, model.grads.layer, strict=True):
            weight = getattr(g, name).weight
            for view, scale in (
                (inp, weight.input_scale), (f"{inp}_recomputed", weight.input_scale), (dout, weight.grad_scale)
            ):  # fmt: skip
                if hasattr(a, str(view)):
                    setattr(a, view, quantized_view(getattr(a, view), scale))


def in_bf16(model: Any) -> Any:
    """The same model, but its products are in bf16: for samples, whose passes have any number of rows."""
    model = copy(model)
    model.fp8, model.params = None, model.tensors_in(model.params_memory)
    return model


def put_quantized(model: Any, name: str, at: int, values: Any) -> None:
    """Sets numbers of a matrix of a model for inference, from the at-th on, to fp32 values on the device. They come in
    order: the last of a layer's numbers quantizes its weight."""
    OC, C = quantized_matrices(type(model), model.config)[name]
    while values.size:
        l, first = divmod(at, OC * C)
        part, whole = values[: OC * C - first], device.scratch("dequantized weight", (OC * C,), device.floatX)
        split(whole[first : first + part.size], part, part.size)
        if first + part.size == OC * C:
            weight = getattr(model.params.layer[l], name)
            quantize(Quantized(weight.q, None, Scale(f"weight {name} of layer {l}", weight.scale)), whole, OC, C)
        at, values = at + part.size, values[part.size :]


def quantized_view(array: Any, scale: Scale | GradientScale) -> Quantized:
    """The memory of a bf16 array (..., C), as q and q_T of the same shape."""
    C = array.shape[-1]
    q, q_T = array.reshape(-1).view(np.uint8).reshape(2, -1)
    return Quantized(q.reshape(-1, C), q_T.reshape(C, -1), scale)


def worth_quantizing(C: int, OC: int, producer_quantizes: bool) -> bool:
    """Whether a weight (OC,C) is quantized. producer_quantizes: whether a layer's kernel quantizes the input of its
    product, or the gradient of its output."""
    least = MIN_GAIN if producer_quantizes else WITHOUT_PRODUCERS * MIN_GAIN
    return C % MULTIPLE == 0 and OC % MULTIPLE == 0 and C * OC >= least * (8 * C + 6 * OC)


def quantized_matrices(kind: type, config: Config) -> dict[str, tuple[int, int]]:
    """The layers' matrices that are quantized: name, shape (OC,C). Empty in another precision than fp8."""
    if device.precision != "fp8":
        return {}
    starts, _ = layout(config.parameters(), config.sizes(), align=1)
    matrices = {name: starts[name] for name in config.products if len(starts[name][1]) == 3}
    return {
        name: (OC, C)
        for name, (start, (_, OC, C)) in matrices.items()
        if worth_quantizing(C, OC, name in kind.LINEAR) and start % 8 == 0
    }


def linear(kind: type, config: Config) -> dict[str, tuple[str | None, str | None]]:
    """Model.LINEAR of the quantized matrices."""
    matrices = quantized_matrices(kind, config)
    return {name: tensors for name, tensors in kind.LINEAR.items() if name in matrices}


def out_of_place(
    tables: tuple[Table, Table], kind: type, config: Config, rows: int
) -> tuple[Table, Table]:  # fmt: skip
    """The tables of a model's activations and gradients, for `rows` positions. A kernel that quantizes runs twice, so
    it must find its input intact: a quantized gradient that would take its owner's memory lies after the owner."""
    gradients = {dout for _, dout in linear(kind, config).values()} if rows % MULTIPLE == 0 else ()

    def moved(row: tuple) -> tuple:
        return (*row, *owners(row)) if row[0] in gradients and len(owners(row)) == 1 else row

    activations, others = (tuple(map(moved, table)) for table in tables)
    return activations, others


def quantized_bytes(kind: type, config: Config, inference: bool = False) -> int:
    """The bytes of Fp8.memory. A number takes two bytes, for q and q_T, and each of a weight's three scales 16. In a
    model for inference a number takes one byte, and a weight has one scale."""
    matrices, scales = len(quantized_matrices(kind, config)), 1 if inference else 3
    numbers = quantized_count(kind, config) * (1 if inference else 2)
    return numbers + 16 * matrices * (scales * config.num_layers + (not inference))  # 1 more: previous_amax


def quantized_count(kind: type, config: Config) -> int:
    """How many parameters are quantized."""
    return config.num_layers * sum(OC * C for OC, C in quantized_matrices(kind, config).values())


def dequantized_bytes(kind: type, config: Config) -> int:
    """The bytes of the scratch for the largest dequantized weight, in bf16."""
    return 2 * max((OC * C for OC, C in quantized_matrices(kind, config).values()), default=0)


def training_scratch(kind: type, config: Config, rows: int) -> dict[str, int]:
    """The scratch of products of `rows` positions in a training step: purpose, bytes."""
    matrices = quantized_matrices(kind, config)
    if not matrices or rows % MULTIPLE:
        return {}
    inputs, gradients = (
        [shape for name, shape in matrices.items() if not kind.LINEAR.get(name, (None, None))[place]]
        for place in (0, 1)
    )
    return scratch_bytes(rows, inputs, gradients)

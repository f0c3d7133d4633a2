"""What products in fp8 take and keep: quantized matrices, their scales, and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import device

MULTIPLE = 16  # of rows and columns of all quantized matrices


class Scale(NamedTuple):
    """The scale (1,), fp32, of a weight or an input. Before it is quantized anew, its last scale is the guess
    (quantize.cuh: Quantizer). name: of the matrix, for messages."""

    name: str
    scale: Any

    previous_amax = None


class GradientScale(NamedTuple):
    """The scale of a gradient. scale (2,), fp32: the scale, and a running mean of the ratio of its amax to
    previous_amax. previous_amax (1,), fp32: the amax of the layer quantized before. All layers of a matrix share it.

    At first all this may be anything. A guess decides only how long quantizing takes."""

    name: str
    scale: Any
    previous_amax: Any


class Quantized(NamedTuple):
    """A matrix (N,C), about scale * q. q (N,C) and its transposed copy q_T (C,N) are uint8, e4m3. One of the two may be
    None."""

    q: Any
    q_T: Any
    scale: Scale | GradientScale


# The scale of the matrix in each array of e4m3, by the array's address: several matrices use the same memory in turn.
held: dict[int, Scale | GradientScale] = {}


def note_written(scale: Scale | GradientScale, *arrays) -> None:
    """Notes that these arrays of e4m3 now hold the matrix of this scale. An array may be None."""
    held.update((device.address(array), scale) for array in arrays if array is not None)


def check_written(scale: Scale | GradientScale, array) -> None:
    """Raises ValueError if an array of e4m3 does not hold the matrix of this scale, but another one."""
    found = held.get(device.address(array))
    if found is not scale:
        what = f"the {found.name} has overwritten it" if found else "nobody has quantized it"
        raise ValueError(
            f"a product needs the {scale.name}, quantized, but {what}: call matmul_backward_weight of a weight after "
            "its matmul_backward_inp, and before that of another weight"
        )


@dataclass(eq=False)
class QuantizedWeight:
    """A weight in training whose products take quantized operands.

    bf16 (OC,C)               the weight
    quantized                 q (OC,C) and q_T (C,OC)
    input_scale, grad_scale   of its product's input in the last forward pass, and of the gradient of its product's
                              output in the last backward pass
    stale                     whether q is of an earlier weight. Then the next forward product quantizes it
    """

    bf16: Any
    quantized: Quantized
    input_scale: Scale
    grad_scale: GradientScale
    stale: bool = True


class WeightGradient(NamedTuple):
    """The gradient of a QuantizedWeight. array (OC,C): fp32."""

    array: Any
    weight: QuantizedWeight


class WeightOnly(NamedTuple):
    """A weight of a model that only writes text: q (OC,C), e4m3, and scale (1,). Inputs stay bf16."""

    q: Any
    scale: Any

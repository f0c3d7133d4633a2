"""A launch between guard zones, and what PyTorch computes in float64 in its place."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import device
import oracle
from kernels.matmul import MIN_OUTPUTS_FOR_8_LANES
from oracle import guarded, leaf

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

FP32 = np.float32


def shapes(*examples: tuple, **limits: tuple[int, int]) -> Callable:
    """A decorator: the test runs with these examples, whose numbers come in the order of the limits, and with numbers
    drawn between the limits."""

    def decorate(test: Callable) -> Callable:
        for numbers in examples:
            test = example(**dict(zip(limits, numbers, strict=True)))(test)
        return given(**{name: st.integers(*ends) for name, ends in limits.items()})(test)

    return decorate


# Sizes of a weight (OC,C) for the kernels of matvec.cuh.
single_row = shapes(
    (768, 50), (11, 7),
    (5000, 3),  # several warps per output
    (19, MIN_OUTPUTS_FOR_8_LANES + 3),  # several outputs per warp
    C=(1, 5000), OC=(1, 200),
)  # fmt: skip


@dataclass(eq=False)
class Place:
    """An array of a launch. mode: a method of oracle.guarded, which says what the launch may do. parameter: it is one,
    or its gradient, which stands anywhere in a flat buffer and need not begin at 16 bytes."""

    mode: str
    values: np.ndarray | tuple[int, ...]  # or the shape
    dtype: type | None = None  # by default floatX
    parameter: bool = False


def write(*shape: int, dtype=None) -> Place:
    return Place("write", shape, dtype)


def update(values: np.ndarray, dtype=None) -> Place:
    return Place("update", values, dtype)


def scratch(*shape: int, dtype=None) -> Place:
    return Place("scratch", shape, dtype)


def recomputed(N: int, C: int) -> Place:
    """A matrix (N, C) that backward writes once more, in the layout that its weight's product wants."""
    return Place("recomputed", (N, C))


def fp32(values: np.ndarray) -> Place:
    return Place("read", values.astype(FP32), FP32)


def parameter(values: np.ndarray) -> Place:
    return Place("read", values, parameter=True)


def gradient(before: np.ndarray) -> Place:
    """Of a parameter: the launch adds to it."""
    return Place("update", before, FP32, parameter=True)


def launch(launcher: Callable, *arguments, shift: int = 0, **named) -> list:
    """Calls a launcher with device arrays where the arguments have arrays, which the launch may only read, or places.
    Returns the arrays that it may write, in the order of the arguments. shift: where parameters begin."""
    outputs = {}
    with guarded(device) as memory, guarded(device, shift) as parameters:

        def placed(argument):
            if isinstance(argument, np.ndarray):
                return memory.read(argument)
            if isinstance(argument, (tuple, list)):
                each = [placed(one) for one in argument]
                return type(argument)(*each) if hasattr(argument, "_fields") else each
            if not isinstance(argument, Place):
                return argument
            if argument in outputs:  # a launch in place
                return outputs[argument]
            if argument.mode == "recomputed":
                array = memory.recomputed(*argument.values)
            else:
                method = getattr(parameters if argument.parameter else memory, argument.mode)
                array = method(argument.values, argument.dtype)
            if argument.mode != "read":
                outputs[argument] = array
            return array

        launcher(*placed(arguments), **dict(zip(named, placed(list(named.values())), strict=True)))
    return list(outputs.values())


def autograd(definition: Callable, dout: np.ndarray, *inputs: np.ndarray) -> tuple[torch.Tensor, ...]:
    """The result of definition in float64, and the gradient of each input where that of the result is dout."""
    leaves = [leaf(values) for values in inputs]
    out = definition(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, leaf(dout).detach())


def rotated(qkv: torch.Tensor, NKV: int, R: int, theta: float = 1e4) -> torch.Tensor:
    """qkv (B,T,heads,HS) after RoPE of the first R channels of each head but the last NKV, which are values."""
    qk, v = qkv.tensor_split([qkv.shape[2] - NKV], dim=2)
    return torch.cat([oracle.turned(qk, SimpleNamespace(rope_theta=theta), R), v], dim=2)

"""Matrix products of numbers of one byte (`--precision fp8`): the launchers of fp8.cu.

A product takes codes in e4m3 of its two factors, and a scale of each from its largest number at the time. Sums are in
fp32 or a little less wide (device/cublaslt.py). Tensor cores multiply codes twice as fast as bf16, but they want both
factors contiguous along the sum. So a weight, and the gradient of a product's result, are encoded twice, once
transposed. Encoding costs time, and small products would lose by it (`pays`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import device
from device import ceil_div

import numpy as np

cu = device.source(__file__, lambda: device.precision == "fp8")

BLOCKS = 1056  # of absmax_kernel at most: eight for each multiprocessor of an H100
MULTIPLE = 16  # of rows and columns of all matrices

# An H100 gains 3.6e-15 s for each multiplication and addition of a layer's three products, and moves 2.6e12 bytes a
# second when it encodes: 8 a number of the input (forward reads it twice and writes a byte, backward, which knows the
# scale, reads it once and writes a byte), 6 a number of the result's gradient (twice read, two bytes written). So a
# weight (OC,C) pays if C OC / (8 C + 6 OC) is above this.
LEAST_GAIN = 108


@dataclass
class Weight:
    """A weight whose products take codes.

    array (OC,C)                      the weight, bf16
    codes (OC,C), transposed (C,OC)   its codes
    scale, inp_scale (1,)             of the weight, and of the input of its product in the last forward pass
    is_new                            whether the weight has changed since it was encoded. Then its next forward product
                                      encodes it
    """

    array: Any
    codes: Any
    transposed: Any
    scale: Any
    inp_scale: Any
    is_new: bool = True


class Gradient(NamedTuple):
    """The gradient of a Weight. array (OC,C): fp32. inp_scale (1,): the Weight's."""

    array: Any
    inp_scale: Any


class Codes(NamedTuple):
    """A weight of a model that only writes text: codes (OC,C) and scale (1,). A product of one row reads the codes, and
    one of several rows first decodes them (kernels/matmul.py). Inputs stay bf16."""

    codes: Any
    scale: Any


def pays(C: int, OC: int) -> bool:
    """Whether products with a weight (OC,C) take codes."""
    return C % MULTIPLE == 0 and OC % MULTIPLE == 0 and C * OC >= LEAST_GAIN * (8 * C + 6 * OC)


def takes_codes(weight, N: int) -> bool:
    """Whether a product of N rows takes codes of a weight, or of its gradient: not if it is a plain array."""
    return isinstance(weight, (Weight, Gradient)) and N % MULTIPLE == 0


def plain(weight):
    """The array of a Weight or a Gradient; an array is its own."""
    return weight.array if isinstance(weight, (Weight, Gradient)) else weight


def scratch_of_fp8(N: int, weights: list[tuple[int, int]]) -> dict[str, int]:
    """The scratch for products of N rows with Weights of these shapes (OC,C): purpose, bytes."""
    if not weights or N % MULTIPLE:
        return {}
    inputs = N * max(C for _, C in weights)
    of_dout = {f"fp8 {what} {OC}": size for OC, _ in weights
               for what, size in (("dout", N * OC), ("dout_T", N * OC), ("scale", 4))}  # fmt: skip
    return {"fp8 input": inputs, "fp8 input_T": inputs, "fp8 maxima": 4 * BLOCKS} | of_dout


def encode(codes, codes_T, scale, inp, N: int, C: int, *, known=None) -> None:
    """codes (N,C) and codes_T (C,N): e4m3 codes of inp (N,C), bf16. Either may be None. scale (1,) = that of inp, or,
    with known (1,), that is the scale, and codes beyond the largest one are clipped to it. N and C are multiples of
    MULTIPLE, and all arrays lie at multiples of 16 bytes."""
    block, blocks, maxima = cu.block(256), 0, None
    if known is None:
        blocks = min(BLOCKS, ceil_div(N * C, cu.width * block))
        maxima = device.scratch("fp8 maxima", (blocks,), np.float32)
        cu.launch("absmax_kernel", (blocks,), (block,), (maxima, inp, N * C))
    args = codes, codes_T, scale, maxima, blocks, known, inp, N, C
    cu.launch("encode_kernel", (ceil_div(C, 128), ceil_div(N, 64)), (block,), args)


def fp8_forward(out, inp, weight: Weight, bias, N: int, C: int, OC: int) -> None:
    """out (N,OC) = inp (N,C) @ weight (OC,C)^T + bias (OC), or None. Sets weight.inp_scale, and the weight's codes and
    scale if it is new."""
    if weight.is_new:
        encode(weight.codes, weight.transposed, weight.scale, weight.array, OC, C)
        weight.is_new = False
    codes = device.scratch("fp8 input", (N, C), np.uint8)
    encode(codes, None, weight.inp_scale, inp, N, C)
    scales = {"scale_a": weight.inp_scale, "scale_b": weight.scale}
    device.gemm(out, codes, weight.codes, N, OC, C, trans_b=True, bias=bias, **scales)


def fp8_backward_inp(dinp, dout, weight: Weight, N: int, C: int, OC: int, beta: float) -> None:
    """dinp (N,C) = dout (N,OC) @ weight (OC,C) + beta dinp. Leaves the codes of dout, also transposed, for
    fp8_backward_weight, which must follow before another gradient with as many columns is encoded."""
    codes, transposed, scale = codes_of_dout(N, OC)
    encode(codes, transposed, scale, dout, N, OC)
    device.gemm(dinp, codes, weight.transposed, N, C, OC, trans_b=True, beta=beta, scale_a=scale, scale_b=weight.scale)


def fp8_backward_weight(dweight: Gradient, inp, N: int, C: int, OC: int, beta: float) -> None:
    """dweight (OC,C) = dout (N,OC)^T @ inp (N,C) + beta dweight, from the codes that fp8_backward_inp has left."""
    inp_T = device.scratch("fp8 input_T", (C, N), np.uint8)
    encode(None, inp_T, None, inp, N, C, known=dweight.inp_scale)
    _, dout_T, scale = codes_of_dout(N, OC)
    scales = {"scale_a": scale, "scale_b": dweight.inp_scale}
    device.gemm(dweight.array, dout_T, inp_T, OC, C, N, trans_b=True, beta=beta, **scales)


def codes_of_dout(N: int, OC: int) -> tuple:
    """Room for the codes (N,OC), the transposed codes (OC,N) and the scale (1,) of a gradient with OC columns.
    Gradients of other widths have their own: there the next codes need not wait for a product on the side stream."""
    codes = device.scratch(f"fp8 dout {OC}", (N, OC), np.uint8)
    transposed = device.scratch(f"fp8 dout_T {OC}", (OC, N), np.uint8)
    return codes, transposed, device.scratch(f"fp8 scale {OC}", (1,), np.float32)

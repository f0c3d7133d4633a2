"""Matrix products of numbers of one byte (`--precision fp8`): the launchers of fp8.cu.

A product takes codes in e4m3 of its two factors, and a scale of each from its largest number at the time. Sums are in
fp32 or a little less wide (device/cublaslt.py). Tensor cores multiply codes twice as fast as bf16, but they want both
factors contiguous along the sum. So backward needs transposed codes, too. Encoding costs time, and small products would
lose by it (`pays`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import device
from device import ceil_div

import numpy as np

cu = device.source(__file__, lambda: device.precision == "fp8")

MOST_BLOCKS = 4  # that encode on a multiprocessor at once. A launch has no more: they share the matrix
MOST_MAXIMA = 8  # on a multiprocessor, one from each block: a norm's kernel has so many blocks, which are small
MULTIPLE = 16  # of rows and columns of all matrices
TILE_ROWS, TILE_COLUMNS = 128, 64  # of a CodeTile<> (fp8.cuh)

# A weight (OC,C) saves a layer's three products time in proportion to C OC. Codes of their inputs cost time in
# proportion to C, those of their results' gradients in proportion to OC, about as 8 to 6. So a weight pays if
# C OC / (8 C + 6 OC) is above LEAST_GAIN; or above IF_ENCODED times that, if encode_kernel makes all these codes.
# Before GELU's and the norms' kernels made codes, an H100 took 28.85 ms for a step of GPT-2 124M, 16384 rows, with
# weights above 95 alone, 28.6 above 85, 28.5 above 80, and no less with all. The projection of Qwen3-0.6B's attention
# has 93. With it a step takes 63.2 ms, not 64.2. But the loss was up to 0.71% above that of bf16, without it 0.38%
# (doc/18-one-byte.md).
LEAST_GAIN, IF_ENCODED = 80, 1.35


class Scale(NamedTuple):
    """scale (1,): the scale of a weight or an input. before is None.

    Or, of a gradient, scale (2,): its scale, and a running mean of a ratio: the gradient's largest absolute value, over
    that of the same matrix in the layer that was encoded before. And before (1,): the largest value of that layer. All
    layers of a matrix share it.

    At first all this may be anything. It only decides how long encoding takes (fp8.cuh: Coding)."""

    scale: Any
    before: Any = None


@dataclass
class Weight:
    """A weight whose products take codes.

    array (OC,C)                      the weight, bf16
    codes (OC,C), transposed (C,OC)   its codes
    scale (1,)                        of the weight
    inp_scale, dout_scale             of its product's input in the last forward pass, and of its result's gradient in
                                      the last backward pass
    is_new                            whether the weight has changed since it was encoded. Then its next forward product
                                      encodes it
    """

    array: Any
    codes: Any
    transposed: Any
    scale: Any
    inp_scale: Scale
    dout_scale: Scale
    is_new: bool = True


class Gradient(NamedTuple):
    """The gradient of a Weight. array (OC,C): fp32. inp_scale, dout_scale: the Weight's."""

    array: Any
    inp_scale: Scale
    dout_scale: Scale


class Coded(NamedTuple):
    """A matrix (N,C) that is there as codes (N,C), as transposed codes_T (C,N), or as both. scale, before:
    those of a Scale."""

    codes: Any
    codes_T: Any
    scale: Any
    before: Any = None


class Codes(NamedTuple):
    """A weight of a model that only writes text: codes (OC,C) and scale (1,). A product of one row reads the codes, and
    one of several rows first decodes them (kernels/matmul.py). Inputs stay bf16."""

    codes: Any
    scale: Any


def pays(C: int, OC: int, made: bool) -> bool:
    """Whether products with a weight (OC,C) take codes. made: whether a kernel makes codes of the input, or of the
    result's gradient."""
    least = LEAST_GAIN if made else IF_ENCODED * LEAST_GAIN
    return C % MULTIPLE == 0 and OC % MULTIPLE == 0 and C * OC >= least * (8 * C + 6 * OC)


def takes_codes(weight, N: int) -> bool:
    """Whether a product of N rows takes codes of a weight, or of its gradient: not if it is a plain array."""
    return isinstance(weight, (Weight, Gradient)) and N % MULTIPLE == 0


def coded(array, dweight, scale: str):
    """What a kernel makes in the place of an array of C columns that only products with one weight read: a Coded if
    they take codes, else the array. scale: which one of the weight's Gradient, "inp_scale" or "dout_scale"."""
    C = array.shape[-1]
    if not takes_codes(dweight, array.size // C):
        return array
    codes, codes_T = array.reshape(-1).view(np.uint8).reshape(2, -1)
    return Coded(codes.reshape(-1, C), codes_T.reshape(C, -1), *getattr(dweight, scale))


def plain(weight):
    """The array of a Weight or a Gradient; an array is its own."""
    return weight.array if isinstance(weight, (Weight, Gradient)) else weight


def scratch_of_fp8(N: int, of_inputs: list[tuple[int, int]], of_douts: list[tuple[int, int]]) -> dict[str, int]:
    """The scratch for products of N rows: purpose, bytes. of_inputs, of_douts: the shapes (OC,C) of the Weights whose
    products encode their input, and their result's gradient."""
    if not of_inputs + of_douts or N % MULTIPLE:
        return {}
    inputs = N * max((C for _, C in of_inputs), default=0)
    of_dout = {f"fp8 {what} {OC}": N * OC for OC, _ in of_douts for what in ("dout", "dout_T")}
    maxima = 4 * (MOST_MAXIMA * device.multiprocessors + 1)
    return {"fp8 input": inputs, "fp8 input_T": inputs, "fp8 maxima": maxima} | of_dout


def codings(blocks: int, out: Coded) -> Iterator[tuple]:
    """The first four arguments of a kernel that makes the codes of out, for each of its two launches (fp8.cuh:
    Coding)."""
    maxima = maxima_of(blocks)
    yield from ((out.scale, out.before, maxima, correct) for correct in (0, 1))


def maxima_of(blocks: int):
    """Coding's maxima, for a launch with so many blocks."""
    return device.scratch("fp8 maxima", (blocks + 1,), np.float32)


def encode(out: Coded, inp, N: int, C: int, *, known: bool = False) -> None:
    """Encodes inp (N,C), bf16, in e4m3. Sets out's codes (N,C) and codes_T (C,N); one of the two may be None. Also sets
    its scale and before, as Scale says: their old values change only the time that this takes. If the scale is known,
    it is read and not set, and numbers for which it is too small are clipped. N and C are multiples of MULTIPLE, and
    all arrays lie at multiples of 16 bytes."""
    blocks = blocks_of(N, C, MOST_BLOCKS)
    for coding in [(out.scale, None, None, 0)] if known else codings(blocks, out):
        cu.launch("encode_kernel", (blocks,), (cu.block(256),), (*coding, out.codes, out.codes_T, inp, N, C))


def blocks_of(N: int, C: int, at_once: int) -> int:
    """The blocks that share the tiles of an (N,C) matrix, if a multiprocessor runs `at_once` of them at once."""
    return min(ceil_div(N, TILE_ROWS) * ceil_div(C, TILE_COLUMNS), at_once * device.multiprocessors)


def fp8_forward(out, inp, weight: Weight, bias, N: int, C: int, OC: int) -> None:
    """out (N,OC) = inp (N,C) @ weight (OC,C)^T + bias (OC), or None. Sets weight.inp_scale, unless inp is Coded, and
    the weight's codes and scale if it is new."""
    if weight.is_new:
        encode(Coded(weight.codes, weight.transposed, weight.scale), weight.array, OC, C)
        weight.is_new = False
    if not isinstance(inp, Coded):
        array, inp = inp, Coded(device.scratch("fp8 input", (N, C), np.uint8), None, *weight.inp_scale)
        encode(inp, array, N, C)
    scales = {"scale_a": inp.scale, "scale_b": weight.scale}
    device.gemm(out, inp.codes, weight.codes, N, OC, C, trans_b=True, bias=bias, **scales)


def fp8_backward_inp(dinp, dout, weight: Weight, N: int, C: int, OC: int, beta: float) -> None:
    """dinp (N,C) = dout (N,OC) @ weight (OC,C) + beta dinp. If dout is not Coded, this leaves its codes, also
    transposed, for fp8_backward_weight, which must follow before another gradient with as many columns is encoded."""
    if not isinstance(dout, Coded):
        array, dout = dout, codes_of_dout(weight.dout_scale, N, OC)
        encode(dout, array, N, OC)
    scales = {"scale_a": dout.scale, "scale_b": weight.scale}
    device.gemm(dinp, dout.codes, weight.transposed, N, C, OC, trans_b=True, beta=beta, **scales)


def fp8_backward_weight(dweight: Gradient, dout, inp, N: int, C: int, OC: int, beta: float) -> None:
    """dweight (OC,C) = dout (N,OC)^T @ inp (N,C) + beta dweight. If dout is not Coded, fp8_backward_inp has left its
    codes."""
    if not isinstance(dout, Coded):
        dout = codes_of_dout(dweight.dout_scale, N, OC)
    if not isinstance(inp, Coded):
        array, inp = inp, Coded(None, device.scratch("fp8 input_T", (C, N), np.uint8), *dweight.inp_scale)
        encode(inp, array, N, C, known=True)
    scales = {"scale_a": dout.scale, "scale_b": inp.scale}
    device.gemm(dweight.array, dout.codes_T, inp.codes_T, OC, C, N, trans_b=True, beta=beta, **scales)


def codes_of_dout(scale: Scale, N: int, OC: int) -> Coded:
    """Room for the codes of a gradient with OC columns. Gradients of other widths have their own: there the next codes
    need not wait for a product on the side stream."""
    codes = device.scratch(f"fp8 dout {OC}", (N, OC), np.uint8)
    return Coded(codes, device.scratch(f"fp8 dout_T {OC}", (OC, N), np.uint8), *scale)

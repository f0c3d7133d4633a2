"""Linear layers: matrix products (`device.gemm`), and the launchers of matmul.cu."""

import device
from device import ceil_div
from kernels.fp8 import Codes, fp8_backward_inp, fp8_backward_weight, fp8_forward, plain, takes_codes
from kernels.reduce import column_sum

cu = device.source(__file__)

MANY_OUTPUTS = 16384  # with so many, matvec uses 8 lanes for an output


def matmul_forward(out, inp, weight, bias, B: int, T: int, C: int, OC: int) -> None:
    """out (B,T,OC) = inp (B,T,C) @ weight (OC,C)^T + bias (OC). bias is None if there is none. weight may be a Weight
    or a Codes of kernels/fp8.py; with a Weight inp may be Coded.

    The product adds the bias before it rounds. In bf16 this matters for a projection that a norm's kernel adds to the
    residual stream. A number of the stream and one of `out` have 8 significant bits each, so their sum often lies
    half-way between two numbers of bf16. A bias that came later, however small, would decide how all these sums are
    rounded. The first biases that GPT-2 124M learned, 5e-7, changed its loss over 100 times as much as their gradient
    predicts.
    """
    if takes_codes(weight, B * T):
        fp8_forward(out, inp, weight, bias, B * T, C, OC)
    elif B * T == 1:
        matvec(out, inp, plain(weight), bias, C, OC)
    else:
        whole = decoded(weight, C, OC) if isinstance(weight, Codes) else plain(weight)
        device.gemm(out, inp, whole, B * T, OC, C, trans_b=True, bias=bias)


def matvec(out, inp, weight, bias, C: int, OC: int) -> None:
    """out (OC) = inp (C) @ weight (OC,C)^T + bias (OC). bias may be None. weight may be a Codes of kernels/fp8.py."""
    # A warp computes an output; several warps do if outputs are few and rows long, 8 lanes do if outputs are many.
    # So all threads have enough to load. An H200 takes 3.3 us for a weight (768, 3072) in fp32, 4.1 with one warp
    # an output; cuBLAS takes 5.1. For (50304, 768) in bf16 it takes 21 us, 29 with one warp an output; cuBLAS takes 21.
    # With codes, several warps compute each of 2048 outputs, too: a token of Llama 3.2 1B takes 0.84 ms, not 0.92.
    codes = isinstance(weight, Codes)
    few = OC < (1024 if device.floatX == device.BF16 and not codes else 3072)
    warps = min(4, C // (4 * 32 * cu.width)) if few else 1  # with four vectors a thread or more
    small = (min(cu.warp_size, 8), 8) if OC >= MANY_OUTPUTS else (cu.warp_size, 4)
    block = (cu.block(32 * warps), 1) if warps > 1 else small
    name, arrays = ("matvec_codes_kernel", weight) if codes else ("matvec_kernel", (weight,))
    cu.launch(name, (ceil_div(OC, block[1]),), block, (out, inp, *arrays, bias, C, OC))


def decoded(weight: Codes, C: int, OC: int):
    """The numbers (OC,C) of a Codes, in scratch."""
    out = device.scratch("decoded weight", (OC, C), device.floatX)
    cu.launch("decode_kernel", (ceil_div(OC * C, cu.width * 256),), (256,), (out, *weight, OC * C))
    return out


def transposes() -> bool:
    """Whether the kernels that recompute a layer's input for its weight's gradient write it transposed (common.cuh:
    TRANSPOSES). In bf16 they write it as in forward: there cuBLAS is as fast with either."""
    return device.floatX != device.BF16


# cuBLAS multiplies TF32 matrices faster if neighbours in an operand's memory are also neighbours along the dimension
# that the product sums over. For a weight's gradient this dimension is B*T, and in the memory of dout and of the input
# neighbours are channels. With the input transposed an H200 is up to 1.6 times as fast. From ROWS_WORTH_TRANSPOSING
# rows on, this is worth a transposition.
#
# For the input's gradient we would transpose the weight. The cost grows with the weight; the gain also grows with the
# rows. With 2048 rows a step of GPT-2 124M takes an H200 1.2% less if it transposes weights, of 288 to 1152 numbers for
# each row. A step of Qwen3-0.6B, with 1024 to 2048, takes 1.2% more. So a weight is transposed only if it has fewer
# than MOST_WEIGHTS_A_ROW numbers for each row.
ROWS_WORTH_TRANSPOSING = 1024
MOST_WEIGHTS_A_ROW = 1280


def weight_is_transposed(N: int, C: int, OC: int) -> bool:
    """Whether matmul_backward_inp transposes a weight (OC,C) for N rows."""
    return transposes() and N >= ROWS_WORTH_TRANSPOSING and C * OC < MOST_WEIGHTS_A_ROW * N


def matmul_backward_inp(dinp, dout, weight, B: int, T: int, C: int, OC: int, accumulate: bool = False) -> None:
    """dinp (B,T,C) = dout (B,T,OC) @ weight (OC,C), or += with accumulate, for an input that had another reader.

    weight may be a Weight of kernels/fp8.py. Then dout is Coded, or this encodes it. matmul_backward_weight takes these
    codes, so it must follow for the same dout, before another dout with OC columns is encoded.
    """
    beta = float(accumulate)
    if takes_codes(weight, B * T):
        fp8_backward_inp(dinp, dout, weight, B * T, C, OC, beta)
    elif weight_is_transposed(B * T, C, OC):
        weight_T = device.scratch("weight_T", (C, OC), device.floatX)
        transpose(weight_T, weight, OC, C)
        device.gemm(dinp, dout, weight_T, B * T, C, OC, trans_b=True, beta=beta)
    else:
        device.gemm(dinp, dout, plain(weight), B * T, C, OC, beta=beta)


def matmul_backward_weight(dweight, dout, inp, B: int, T: int, C: int, OC: int, accumulate: bool) -> None:
    """dweight (OC,C) += dout (B,T,OC)^T @ inp (B,T,C); or = without accumulate, so that nobody zeroes or reads dweight.

    inp may be a view (B*T,C) of a matrix that lies in memory transposed, as (C,B*T). A kernel that recomputes an input
    for backward writes it so if transposes() says so. Another input is transposed here if there are enough rows.
    dweight may be a Gradient of kernels/fp8.py, and dout and inp then Coded.
    """
    beta = float(accumulate)
    if takes_codes(dweight, B * T):
        fp8_backward_weight(dweight, dout, inp, B * T, C, OC, beta)
    elif not inp.flags.c_contiguous:
        device.gemm(dweight, dout, inp.T, OC, C, B * T, trans_a=True, trans_b=True, beta=beta)
    elif transposes() and B * T >= ROWS_WORTH_TRANSPOSING:
        inp_T = device.scratch("input_T", (C, B * T), device.floatX)
        transpose(inp_T, inp, B * T, C)
        device.gemm(dweight, dout, inp_T, OC, C, B * T, trans_a=True, trans_b=True, beta=beta)
    else:
        device.gemm(plain(dweight), dout, inp, OC, C, B * T, trans_a=True, beta=beta)


def matmul_backward_bias(dbias, dout, B: int, T: int, OC: int) -> None:
    """dbias (OC) += the column sums of dout (B,T,OC)."""
    column_sum(dbias, dout, B * T, OC)


def transpose(out, inp, N: int, C: int) -> None:
    """out (C,N) = inp (N,C)^T."""
    side = cu.block(16)
    cu.launch("transpose_kernel", tile_grid(cu, N, C), (side, side), (out, inp, N, C))


def as_stored(out):
    """The matrix (N,C) that a kernel recomputes, as it lies in memory: (C,N) if transposes(), else (N,C). Raises
    ValueError if it lies the other way."""
    stored = out.T if transposes() else out
    if not stored.flags.c_contiguous:
        raise ValueError("a recomputed input has the layout that kernels.matmul.transposes() names")
    return stored


def tile_grid(cu, N: int, C: int) -> tuple[int, int]:
    """A block for each Tile (common.cuh) of an (N,C) matrix."""
    return ceil_div(C, 16 * cu.width if cu.warp_size > 1 else 64), ceil_div(N, 64)

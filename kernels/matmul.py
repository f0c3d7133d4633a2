"""Linear layers: matrix products (`device.gemm`), and the launchers of matmul.cu."""

import device
from device import ceil_div
from kernels.reduce import column_sum

cu = device.source(__file__)

MANY_OUTPUTS = 16384  # from here on, matvec gives an output 8 lanes


def matmul_forward(out, inp, weight, bias, B: int, T: int, C: int, OC: int) -> None:
    """out (B,T,OC) = inp (B,T,C) @ weight (OC,C)^T + bias (OC). bias is None if a later kernel adds it, or if
    there is none."""
    if B * T == 1 and device.kind == "cuda":  # on a CPU, NumPy reads a weight as fast as the cores can
        matvec(out, inp, weight, bias, C, OC)
        return
    if device.floatX == device.BF16:  # the product adds the bias: a kernel for that takes 42 us for GPT-2's qkv, B 16
        device.gemm(out, inp, weight, B * T, OC, C, trans_b=True, bias=bias)
        return
    device.gemm(out, inp, weight, B * T, OC, C, trans_b=True)
    if bias is not None:
        block = cu.threads(256, ceil_div(OC, cu.width))
        cu.launch("add_bias_kernel", (B * T, ceil_div(OC, cu.width * block)), (block,), (out, bias, OC))


def projection_forward(out, inp, weight, bias, B: int, T: int, C: int, OC: int):
    """matmul_forward for a product that a norm's kernel adds to the residual stream. Returns the bias if that kernel
    must add it, too, as it does in fp32 at no cost; or None.

    In bf16 the product adds it. A number of the stream and one of `out` have 8 bits each, so their sum often lies
    half-way between two numbers of bf16. A bias that came with them would decide how all these sums are rounded,
    however small it is. The first biases that GPT-2 124M learned, 5e-7, moved its loss more than 100 times as far as
    their gradient says.
    """
    in_product = device.floatX == device.BF16
    matmul_forward(out, inp, weight, bias if in_product else None, B, T, C, OC)
    return None if in_product else bias


def matvec(out, inp, weight, bias, C: int, OC: int) -> None:
    """out (OC) = inp (C) @ weight (OC,C)^T + bias (OC). bias may be None."""
    # A warp computes an output. If outputs are few and rows long, several warps share one. If outputs are many, 8 lanes
    # do. So all threads have enough to load. An H200 takes 3.3 us for a weight (768, 3072) in fp32, 4.1 with one warp
    # an output; cuBLAS takes 5.1. For (50304, 768) in bf16 it takes 21 us, 29 with one warp an output; cuBLAS takes 21.
    few = OC < (1024 if device.floatX == device.BF16 else 3072)
    warps = min(4, C // (4 * 32 * cu.width)) if few else 1  # with four vectors a thread or more
    one = (min(cu.warp_size, 8), 8) if OC >= MANY_OUTPUTS else (cu.warp_size, 4)
    block = (cu.block(32 * warps), 1) if warps > 1 else one
    cu.launch("matvec_kernel", (ceil_div(OC, block[1]),), block, (out, inp, weight, bias, C, OC))


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


def matmul_backward_inp(
    dinp, dout, weight, weight_T, B: int, T: int, C: int, OC: int, accumulate: bool = False
) -> None:
    """dinp (B,T,C) = dout (B,T,OC) @ weight (OC,C), or += with accumulate, for an input that had another reader.
    weight_T (C,OC) is scratch for the transposed weight; None: do not transpose."""
    if weight_T is None or not transposes() or B * T < ROWS_WORTH_TRANSPOSING or C * OC >= MOST_WEIGHTS_A_ROW * B * T:
        device.gemm(dinp, dout, weight, B * T, C, OC, beta=float(accumulate))
    else:
        transpose(weight_T, weight, OC, C)
        device.gemm(dinp, dout, weight_T, B * T, C, OC, trans_b=True, beta=float(accumulate))


def matmul_backward_weight(dweight, dout, inp, inp_T, B: int, T: int, C: int, OC: int, accumulate: bool) -> None:
    """dweight (OC,C) += dout (B,T,OC)^T @ inp (B,T,C); or = without accumulate, so that nobody zeroes or reads dweight.
    inp_T (C,B*T) is scratch for the transposed input."""
    if not transposes() or B * T < ROWS_WORTH_TRANSPOSING:
        device.gemm(dweight, dout, inp, OC, C, B * T, trans_a=True, beta=float(accumulate))
    else:
        transpose(inp_T, inp, B * T, C)
        matmul_backward_weight_transposed(dweight, dout, inp_T, B, T, C, OC, accumulate)


def matmul_backward_weight_transposed(
    dweight, dout, inp_T, B: int, T: int, C: int, OC: int, accumulate: bool
) -> None:
    """matmul_backward_weight for an input that is already transposed, inp_T (C,B*T). If transposes() is false, inp_T
    (B*T,C) is the input as it is."""
    device.gemm(dweight, dout, inp_T, OC, C, B * T, trans_a=True, trans_b=transposes(), beta=float(accumulate))


def matmul_backward_bias(dbias, scratch, dout, B: int, T: int, OC: int) -> None:
    """dbias (OC) += the column sums of dout (B,T,OC); scratch holds (MOST_PARTIALS, OC) floats."""
    column_sum(dbias, scratch, dout, B * T, OC)


def transpose(out, inp, N: int, C: int) -> None:
    """out (C,N) = inp (N,C)^T."""
    side = cu.block(16)
    cu.launch("transpose_kernel", tile_grid(cu, N, C), (side, side), (out, inp, N, C))


def tile_grid(cu, N: int, C: int) -> tuple[int, int]:
    """A block for each Tile (common.cuh) of an (N,C) matrix."""
    return ceil_div(C, 16 * cu.width if cu.warp_size > 1 else 64), ceil_div(N, 64)

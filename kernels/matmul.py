"""Linear layers: cuBLAS's products (NumPy's on the CPU), and the launchers of matmul.cu."""

import device
from device import ceil_div
from kernels.reduce import column_sum

cu = device.source(__file__)

MANY_OUTPUTS = 16384  # of a product of a single row


def matmul_forward(out, inp, weight, bias, B: int, T: int, C: int, OC: int) -> None:
    """out (B,T,OC) = inp (B,T,C) @ weight (OC,C)^T + bias (OC); bias None where a following kernel adds it, or none."""
    if B * T == 1 and device.kind == "cuda":  # on a CPU, NumPy's product reads a weight as fast as the cores can
        matvec(out, inp, weight, bias, C, OC)
        return
    if device.floatX == device.BF16:  # the product adds the bias: a kernel that does takes 42 us for GPT-2's qkv, B 16
        device.gemm(out, inp, weight, B * T, OC, C, trans_b=True, bias=bias)
        return
    device.gemm(out, inp, weight, B * T, OC, C, trans_b=True)
    if bias is not None:
        block = cu.threads(256, ceil_div(OC, cu.width))
        cu.add_bias_kernel((B * T, ceil_div(OC, cu.width * block)), (block,), (out, bias, OC))


def matvec(out, inp, weight, bias, C: int, OC: int) -> None:
    """out (OC) = inp (C) @ weight (OC,C)^T + bias (OC), or without one where that is None."""
    # A warp an output. Few outputs of long rows have several, and many of them 8 lanes each, so that all threads have
    # enough to load. An H200 takes for (768, 3072) in fp32 3.3 instead of 4.1 us, cuBLAS 5.1; for (50304, 768) in bf16
    # 21 instead of 29, cuBLAS 21.
    few = OC < (1024 if device.floatX == device.BF16 else 3072)
    warps = min(4, C // (4 * 32 * cu.width)) if few else 1  # with four vectors a thread or more
    one = (min(cu.warp_size, 8), 8) if OC >= MANY_OUTPUTS else (cu.warp_size, 4)
    block = (cu.block(32 * warps), 1) if warps > 1 else one
    cu.matvec_kernel((ceil_div(OC, block[1]),), block, (out, inp, weight, bias, C, OC))


def transposes() -> bool:
    """Whether backward gives matmul_backward_weight_transposed its input transposed, as the kernels that recompute it
    write it (common.cuh: TRANSPOSES). In bf16 it lies as in forward: there cuBLAS is as fast with either."""
    return device.floatX != device.BF16


# cuBLAS multiplies TF32 matrices faster where an operand's neighbours in memory are also neighbours along the dimension
# that is summed over. For a weight's gradient that is B*T, across which both dout and the input lie; with the input
# transposed an H200 is up to 1.6 times as fast. From this many rows on, that is worth a transposition. For the input's
# gradient it is a weight that would be transposed, at a cost that grows with the weight, for a gain that grows with the
# rows too: of 2048 rows, a weight (3072, 2048) takes 13 us to save 1, and (16384, 2048) 69 to save 3.
ROWS_WORTH_TRANSPOSING = 1024
MOST_WEIGHTS_A_ROW = 3072


def matmul_backward_inp(
    dinp, dout, weight, weight_T, B: int, T: int, C: int, OC: int, accumulate: bool = False
) -> None:
    """dinp (B,T,C) = dout (B,T,OC) @ weight (OC,C), or += where accumulate: the input had another reader. weight_T:
    scratch for the transposed weight (C,OC); None to do without."""
    if weight_T is None or not transposes() or B * T < ROWS_WORTH_TRANSPOSING or C * OC >= MOST_WEIGHTS_A_ROW * B * T:
        device.gemm(dinp, dout, weight, B * T, C, OC, beta=float(accumulate))
    else:
        transpose(weight_T, weight, OC, C)
        device.gemm(dinp, dout, weight_T, B * T, C, OC, trans_b=True, beta=float(accumulate))


def matmul_backward_weight(dweight, dout, inp, inp_T, B: int, T: int, C: int, OC: int, accumulate: bool) -> None:
    """dweight (OC,C) += dout (B,T,OC)^T @ inp (B,T,C), or = where not accumulate, which spares zeroing and reading it.
    inp_T (C,B*T) is scratch for the transposed input."""
    if not transposes() or B * T < ROWS_WORTH_TRANSPOSING:
        device.gemm(dweight, dout, inp, OC, C, B * T, trans_a=True, beta=float(accumulate))
    else:
        transpose(inp_T, inp, B * T, C)
        matmul_backward_weight_transposed(dweight, dout, inp_T, B, T, C, OC, accumulate)


def matmul_backward_weight_transposed(
    dweight, dout, inp_T, B: int, T: int, C: int, OC: int, accumulate: bool
) -> None:
    """matmul_backward_weight where the input is there transposed, inp_T (C,B*T), or inp_T (B*T,C) as it is where
    transposes() is false."""
    device.gemm(dweight, dout, inp_T, OC, C, B * T, trans_a=True, trans_b=transposes(), beta=float(accumulate))


def matmul_backward_bias(dbias, scratch, dout, B: int, T: int, OC: int) -> None:
    """dbias (OC) += the column sums of dout (B,T,OC); scratch holds (MOST_PARTIALS, OC) floats."""
    column_sum(dbias, scratch, dout, B * T, OC)


def transpose(out, inp, N: int, C: int) -> None:
    """out (C,N) = inp (N,C)^T."""
    side = cu.block(16)
    cu.transpose_kernel(tile_grid(cu, N, C), (side, side), (out, inp, N, C))


def tile_grid(cu, N: int, C: int) -> tuple[int, int]:
    """A block for each Tile (common.cuh) of an (N,C) matrix."""
    return ceil_div(C, 16 * cu.width if cu.warp_size > 1 else 64), ceil_div(N, 64)

"""Linear layers: cuBLAS's products (NumPy's on the CPU), and the launchers of matmul.cu."""

from kernels.reduce import column_sum
from llmc import device
from llmc.device import ceil_div

cu = device.source(__file__)


def matmul_forward(out, inp, weight, bias, B: int, T: int, C: int, OC: int) -> None:
    """out (B,T,OC) = inp (B,T,C) @ weight (OC,C)^T + bias (OC); bias None where a following kernel adds it, or none."""
    device.sgemm(out, inp, weight, B * T, OC, C, trans_b=True)
    if bias is not None:
        block = 256
        cu.add_bias_kernel((B * T, ceil_div(OC, 4 * block)), (block,), (out, bias, OC))


# From this many rows on, a product gains more from a transposed weight than the transposition costs.
ROWS_WORTH_TRANSPOSING = 1024


def matmul_backward_inp(dinp, dout, weight, weight_T, B: int, T: int, C: int, OC: int) -> None:
    """dinp (B,T,C) = dout (B,T,OC) @ weight (OC,C). weight_T: scratch of (C,OC) floats, or None.

    cuBLAS multiplies TF32 matrices fastest when both lie along the contraction, so the weight is transposed first.
    """
    if weight_T is None or B * T < ROWS_WORTH_TRANSPOSING:
        device.sgemm(dinp, dout, weight, B * T, C, OC)
    else:
        transpose(weight_T, weight, OC, C)
        device.sgemm(dinp, dout, weight_T, B * T, C, OC, trans_b=True)


def matmul_backward_weight(dweight, dout, inp_T, B: int, T: int, C: int, OC: int, accumulate: bool) -> None:
    """dweight (OC,C) += dout (B,T,OC)^T @ inp, or = where not accumulate, which spares zeroing and reading it.

    The input comes transposed, inp_T (C,B*T), for the same reason: the product is up to 1.6 times as fast.
    """
    device.sgemm(dweight, dout, inp_T, OC, C, B * T, trans_a=True, trans_b=True, beta=float(accumulate))


def matmul_backward_bias(dbias, scratch, dout, B: int, T: int, OC: int) -> None:
    """dbias (OC) += the column sums of dout (B,T,OC); scratch holds (MOST_PARTIALS, OC) floats."""
    column_sum(dbias, scratch, dout, B * T, OC)


def transpose(out, inp, N: int, C: int) -> None:
    """out (C,N) = inp (N,C)^T."""
    side = device.block(16)
    cu.transpose_kernel((ceil_div(C, 64), ceil_div(N, 64)), (side, side), (out, inp, N, C))

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


def matmul_backward_inp(dinp, dout, weight, B: int, T: int, C: int, OC: int) -> None:
    """dinp (B,T,C) = dout (B,T,OC) @ weight (OC,C)."""
    device.sgemm(dinp, dout, weight, B * T, C, OC)


def matmul_backward_weight(dweight, dout, inp_T, B: int, T: int, C: int, OC: int, accumulate: bool) -> None:
    """dweight (OC,C) += dout (B,T,OC)^T @ inp, or = where not accumulate, which spares zeroing and reading it.

    The input comes transposed, inp_T (C,B*T): cuBLAS multiplies TF32 matrices that lie along the contraction, here over
    B*T, up to 1.6 times as fast, and the kernels that end just before can write it so for nothing.
    """
    device.sgemm(dweight, dout, inp_T, OC, C, B * T, trans_a=True, trans_b=True, beta=float(accumulate))


def matmul_backward_bias(dbias, scratch, dout, B: int, T: int, OC: int) -> None:
    """dbias (OC) += the column sums of dout (B,T,OC); scratch holds (MOST_PARTIALS, OC) floats."""
    column_sum(dbias, scratch, dout, B * T, OC)


def transpose(out, inp, N: int, C: int) -> None:
    """out (C,N) = inp (N,C)^T."""
    block = 256
    cu.transpose_kernel((ceil_div(C, block), ceil_div(N, 8)), (block,), (out, inp, N, C))

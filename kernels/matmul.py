"""Linear layers: matrix products (`gemm`), and the launchers of matmul.cu."""

import device
from device import ceil_div
from device.sources import Source
from kernels.dispatch import dispatched
from kernels.fp16.products import gemm
from kernels.launches import MATRIX, describe
from kernels.reduce import column_sum

cu = device.source(__file__)

MIN_OUTPUTS_FOR_8_LANES = 16384  # from so many on, matvec uses 8 lanes for an output


@dispatched("weight")
def matmul_forward(out, inp, weight, bias, B: int, T: int, C: int, OC: int, residual=None) -> None:
    """out (B,T,OC) = inp (B,T,C) @ weight (OC,C)^T + bias (OC) + residual (B,T,OC). bias and residual, the stream in
    front of a branch that ends with this product, are None if there are none. residual must not overlap out.

    The product adds both before it rounds. In bf16 this matters for the bias. A number of the stream and one of a
    product that was rounded first have 8 significant bits each, so their sum often lies half-way between two numbers of
    bf16. A bias that came later, however small, would decide how all these sums are rounded. The first biases that
    GPT-2 124M learned, 5e-7, changed its loss over 100 times as much as their gradient predicts.
    """
    if B * T == 1:
        matvec(out, inp, weight, bias, residual, C, OC)
    else:
        gemm(out, inp, weight, B * T, OC, C, trans_b=True, add=residual, bias=bias)


def matvec(out, inp, weight, bias, residual, C: int, OC: int) -> None:
    """out (OC) = inp (C) @ weight (OC,C)^T + bias (OC) + residual (OC). bias and residual may be None."""
    block = matvec_block(cu, C, OC)
    cu.launch("matvec_kernel", (ceil_div(OC, block[1]),), block, (out, inp, weight, bias, residual, C, OC))


def matvec_block(cu: Source, C: int, OC: int, few: int | None = None) -> tuple[int, int]:
    """The block of a kernel with the body of matvec.cuh. A warp computes an output. If outputs are fewer than `few` and
    rows long, several warps do; if outputs are many, 8 lanes do. So all threads have enough to load. Without `few`
    the best for weights of type floatX is taken."""
    few = few or (1024 if device.floatX == device.BF16 else 3072)
    # An H200 takes 3.3 us for a weight (768, 3072) in fp32, 4.1 with one warp per output; cuBLAS takes 5.1. For (50304,
    # 768) in bf16 it takes 21 us, 29 with one warp per output; cuBLAS takes 21.
    warps = min(4, C // (4 * 32 * cu.width)) if OC < few else 1  # with four vectors per thread or more
    if warps > 1:
        return cu.block(32 * warps), 1
    return (min(cu.warp_size, 8), 8) if OC >= MIN_OUTPUTS_FOR_8_LANES else (cu.warp_size, 4)


def transposes() -> bool:
    """Whether the kernels that recompute a layer's input for its weight's gradient write it transposed (tile.cuh:
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
# than MAX_WEIGHTS_PER_ROW numbers for each row.
ROWS_WORTH_TRANSPOSING = 1024
MAX_WEIGHTS_PER_ROW = 1280


def worth_transposing(N: int) -> bool:
    """Whether a product sums faster over N rows of an input that is transposed. In fp16 it is as in bf16."""
    return transposes() and device.precision != "fp16" and N >= ROWS_WORTH_TRANSPOSING


def weight_is_transposed(N: int, C: int, OC: int) -> bool:
    """Whether matmul_backward_inp transposes a weight (OC,C) for N rows."""
    return worth_transposing(N) and C * OC < MAX_WEIGHTS_PER_ROW * N


@dispatched("weight")
def matmul_backward_inp(dinp, dout, weight, B: int, T: int, C: int, OC: int, accumulate: bool = False) -> None:
    """dinp (B,T,C) = dout (B,T,OC) @ weight (OC,C), or += with accumulate, for an input that had another reader.

    Call matmul_backward_weight for the same dout next: it may reuse what this has made of dout.
    """
    add = dinp if accumulate else None
    if weight_is_transposed(B * T, C, OC):
        weight_T = device.scratch("weight_T", (C, OC), device.floatX)
        transpose(weight_T, weight, OC, C)
        gemm(dinp, dout, weight_T, B * T, C, OC, trans_b=True, add=add)
    else:
        gemm(dinp, dout, weight, B * T, C, OC, add=add)


@dispatched("dweight")
def matmul_backward_weight(dweight, dout, inp, B: int, T: int, C: int, OC: int, accumulate: bool) -> None:
    """dweight (OC,C) += dout (B,T,OC)^T @ inp (B,T,C); or = without accumulate, so that nobody zeroes or reads dweight.

    inp may be a view (B*T,C) of a matrix that lies in memory transposed, as (C,B*T). A kernel that recomputes an input
    for backward writes it so if transposes() says so. Another input is transposed here if there are enough rows.
    """
    add = dweight if accumulate else None
    if not inp.flags.c_contiguous:
        gemm(dweight, dout, inp.T, OC, C, B * T, trans_a=True, trans_b=True, add=add, again=True)
    elif worth_transposing(B * T):
        inp_T = device.scratch("input_T", (C, B * T), device.floatX)
        transpose(inp_T, inp, B * T, C)
        gemm(dweight, dout, inp_T, OC, C, B * T, trans_a=True, trans_b=True, add=add)
    else:
        gemm(dweight, dout, inp, OC, C, B * T, trans_a=True, add=add, again=True)


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
    """A block for each Tile (tile.cuh) of an (N,C) matrix."""
    return ceil_div(C, 16 * cu.width if cu.warp_size > 1 else 64), ceil_div(N, 64)


def recomputed(size, a) -> dict:
    """For descriptions: an array out (N,C) as as_stored wants it."""
    return {"out": a.out.reshape(a.out.shape[::-1]).T if transposes() else a.out}


describe(matmul_forward, "B=2 T=8 C=64 OC=128", "out residual: B,T,OC; inp: B,T,C; weight: OC,C; bias: OC")
describe(matvec, "C=256 OC=64", "out bias residual: OC; inp: C; weight: OC,C", hard="C=1100 OC=5",
         moved={"matvec": lambda a: a.weight.nbytes})
describe(matmul_backward_bias, "B=2 T=320 OC=128", "dbias*: OC; dout: B,T,OC")
describe(transpose, MATRIX, "out: C,N; inp: N,C", hard="N=133 C=67")

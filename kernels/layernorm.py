"""Layernorm with the residual connection in front of it: the launchers of layernorm.cu."""

import device
from device import ceil_div
from kernels.dropout import Dropout
from kernels.parallel_residual import norm_transposed, parallel_residual_backward, parallel_residual_forward
from kernels.reduce import MOST_PARTIALS, add_partials

cu = device.source(__file__)

EPS = 1e-5  # as layernorm.cu has it


def layernorm_forward(out, mean, rstd, inp, weight, bias, B: int, T: int, C: int) -> None:
    """out (B,T,C) = (inp - mean) * rstd * weight + bias, each row by itself. Sets mean and rstd (B,T), too."""
    launch_forward(out, mean, rstd, inp, weight, bias, B * T, C)


def fused_residual_forward(
    residual, out, mean, rstd, inp1, inp2, weight, bias, B: int, T: int, C: int,
    *, bias2, dropout: Dropout | None = None,
) -> None:  # fmt: skip
    """residual (B,T,C) = inp1 + dropout(inp2 + bias2). Then out, mean and rstd = layernorm of residual as it is stored.

    inp2 (B,T,C) is a projection, and bias2 (C) its bias, which has not been added yet. In bf16 it has been added, so
    bias2 is None (projection_forward of kernels/matmul.py). With dropout the arrays must not overlap.
    """
    if dropout:  # a parallel residual with a single branch
        parallel_residual_forward(
            residual, [out], mean, rstd, inp1, [(weight, bias)], EPS, B, T, C, branches=[(inp2, bias2, dropout)]
        )
        return
    assert (bias2 is None) == (device.floatX == device.BF16)
    launch_forward(out, mean, rstd, inp1, weight, bias, B * T, C, residual=residual, inp2=inp2, bias2=bias2)


def launch_forward(
    out, mean, rstd, inp1, weight, bias, N: int, C: int, *, residual=None, inp2=None, bias2=None
) -> None:
    """Launches the forward kernel for layernorm_forward, and for fused_residual_forward, which gives inp2."""
    # A thread for each vector, in whole warps. In fp32 a vector is four channels. With eight channels a thread, an H200
    # took 2 to 3% longer up to C = 768, and as long from 1024 on.
    width = cu.width
    block = cu.block(min(1024, 32 * ceil_div(C, 32 * width)))
    cu.launch(
        "layernorm_forward_kernel",
        (N,),
        (block,),
        (out, mean, rstd, residual, inp1, inp2, bias2, weight, bias, C),
        shared_mem=4 * width * ceil_div(C, width),
    )


def layernorm_backward(
    dinp, dweight, dbias, dout, inp, weight, mean, rstd, B: int, T: int, C: int,
    *, scratch, dbias2=None, dinp2=None, dropout: Dropout | None = None,
) -> None:  # fmt: skip
    """dinp (B,T,C) += the gradient of the layernorm's input; dweight, dbias (C) += those of its parameters.

    The new dinp is also the gradient of the projection that forward added in front, bias2 included. If `dropout`
    followed the projection, dinp2 (B,T,C) = the new dinp through that dropout, and this is its gradient. dbias2 (C) +=
    the column sums of the projection's gradient; None if it has no bias. dout (B,T,C) is the gradient of the output,
    inp the input; scratch holds (MOST_PARTIALS, 3C) floats.
    """
    if dropout:
        parallel_residual_backward(
            dinp, [(dweight, dbias)], [dout], inp, [(weight, None)], mean, rstd, B, T, C,
            branches=[(dinp2, dbias2, dropout)], scratch=scratch,
        )  # fmt: skip
        return
    width = cu.width
    warp, row_bytes = cu.warp_size, 2 * 4 * width * ceil_div(C, width)  # of dout and of n, in vectors
    # Each warp takes a row, and a thread then has four channels or more.
    warps = cu.block(warp * min(8, ceil_div(C, 128))) // warp
    warps = max(1, min(warps, (device.shared_memory - 1024) // row_bytes))  # static shared memory: 384 bytes
    # Four blocks a multiprocessor, so that some compute while others wait for memory. With two an H200 took 6% longer,
    # with eight as long.
    chunks = min(ceil_div(B * T, warps), 4 * device.multiprocessors, MOST_PARTIALS)
    cu.launch(
        "layernorm_backward_kernel",
        (chunks,),
        (warps * warp,),
        (dinp, scratch, dout, inp, weight, mean, rstd, B * T, C),
        shared_mem=warps * row_bytes,
    )
    add_partials([dweight, dbias, dbias2], scratch, chunks, C)


def layernorm_transposed(out_T, inp, weight, bias, mean, rstd, B: int, T: int, C: int) -> None:
    """out_T (C,B*T) = the transposed output of layernorm_forward, recomputed from its input, and from the mean and rstd
    that it set. If matmul.transposes() is false, out_T (B*T,C) = the output itself."""
    norm_transposed(out_T, inp, (weight, bias), mean, rstd, B, T, C)

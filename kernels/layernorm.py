"""Layernorm: the launchers of layernorm.cu.

Its weight and bias come as a pair, `norm`; so do the mean and rstd of the rows, `stats`, which forward keeps for
backward.
"""

import device
from device import ceil_div
from kernels.dispatch import dispatched
from kernels.launches import ROWS, describe
from kernels.matmul import recomputed
from kernels.norm import MANY_AND_FEW, launch_forward, recompute_norm
from kernels.reduce import MAX_PARTIALS, add_partials, partials_of

cu = device.source(__file__)

EPS = 1e-5


@dispatched("out")
def layernorm_forward(out, stats, inp, norm, B: int, T: int, C: int) -> None:
    """out (B,T,C) = (inp - mean) * rstd * weight + bias, each row by itself, with norm = weight (C), bias (C). Sets
    stats = mean (B,T), rstd (B,T), too."""
    launch_forward(cu, "layernorm", (out, *stats, inp, *norm), EPS, B * T, C)


def layernorm_backward(dinp, dnorm, dout, inp, norm, stats, B: int, T: int, C: int, *, dbias2=None) -> None:
    """dinp (B,T,C) += the gradient of the layernorm's input; dnorm = dweight (C), dbias (C) += those of its parameters.

    The new dinp is also the gradient of what forward added in front. dbias2 (C) += its column sums, which are the
    gradient of that product's bias; None if it has no bias. dout (B,T,C) is the gradient of the output, inp the input,
    stats what forward set.
    """
    width = cu.width
    warp, row_bytes = cu.warp_size, 2 * 4 * width * ceil_div(C, width)  # of dout and of n, in vectors
    # Each warp takes a row, and a thread then has four channels or more.
    warps = cu.block(warp * min(8, ceil_div(C, 128))) // warp
    warps = max(1, min(warps, (device.shared_memory - 1024) // row_bytes))  # static shared memory: 384 bytes
    # Four blocks per multiprocessor: some compute while others wait for memory. With two an H200 took 6% longer, with
    # eight as long.
    chunks = min(ceil_div(B * T, warps), 4 * device.multiprocessors, MAX_PARTIALS)
    partials = partials_of(chunks * 3 * C, "norm partials")
    cu.launch(
        "layernorm_backward_kernel",
        (chunks,),
        (warps * warp,),
        (dinp, partials, dout, inp, norm[0], *stats, B * T, C),
        shared_mem=warps * row_bytes,
    )
    add_partials([*dnorm, dbias2], partials, chunks, C)


@dispatched("out")
def layernorm_recompute(out, inp, norm, stats, B: int, T: int, C: int) -> None:
    """out (B*T,C) = the output of layernorm_forward once more, from its input and the stats that it set. out has the
    layout that matmul_backward_weight wants."""
    recompute_norm(out, inp, norm, stats, B, T, C)


NORM = "norm.weight norm.bias: C; stats.mean* stats.rstd*: B,T"
for variant, sizes, hard in MANY_AND_FEW:
    describe(layernorm_forward, sizes, f"out inp: B,T,C; {NORM}", variant=variant, hard=hard)
describe(layernorm_backward, ROWS, f"dinp dout inp: B,T,C; {NORM}; dnorm.dweight* dnorm.dbias* dbias2*: C",
         hard="B=1 T=200 C=300", twice={"layernorm_backward": "dinp"})
describe(layernorm_recompute, "B=2 T=32 C=64", f"out: B*T,C; inp: B,T,C; {NORM}", recomputed)

"""RMSNorm: the launchers of rmsnorm.cu."""

import device
from device import ceil_div
from kernels.dispatch import dispatched
from kernels.launches import ROWS, describe
from kernels.matmul import recomputed
from kernels.norm import MANY_AND_FEW, launch_forward, recompute_norm
from kernels.reduce import MAX_PARTIALS, add_partials, partials_of

cu = device.source(__file__)


@dispatched("out")
def rmsnorm_forward(out, rstd, inp, weight, eps: float, B: int, T: int, C: int) -> None:
    """out (B,T,C) = inp * rstd * weight, each row by itself. Sets rstd (B,T) = 1 / sqrt(mean(inp^2) + eps), too."""
    launch_forward(cu, "rmsnorm", (out, rstd, inp, weight), eps, B * T, C)


def rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd, B: int, T: int, C: int) -> None:
    """dinp (B,T,C) += the gradient of the rmsnorm's input; dweight (C) += that of its weight.

    The new dinp is also the gradient of what forward added in front. dout (B,T,C) is the gradient of the output, inp
    the input, rstd what forward set.
    """
    # A thread has one vector of a row, if MAX_THREADS of rmsnorm.cu allow that. A block has as many groups as make 256
    # threads, so that there are fewer partial sums. 512 threads share a multiprocessor: each needs some 110 registers.
    threads = min(512, 32 * ceil_div(C, 32 * cu.width))
    groups = cu.block(max(1, 256 // threads))
    keep = 4 * groups * C <= device.shared_memory - 4096
    groups = groups if keep else 1
    chunks = min(ceil_div(B * T, 2 * groups), 512 // (threads * groups) * device.multiprocessors, MAX_PARTIALS)
    partials = partials_of(chunks * C, "norm partials")
    cu.launch(
        "rmsnorm_backward_kernel",
        (chunks,),
        (cu.block(threads), groups),
        (dinp, partials, dout, inp, weight, rstd, B * T, C, int(keep)),
        shared_mem=4 * groups * C * keep,
    )
    add_partials([dweight], partials, chunks, C)


@dispatched("out")
def rmsnorm_recompute(out, inp, weight, rstd, B: int, T: int, C: int) -> None:
    """out (B*T,C) = the output of rmsnorm_forward once more, from its input and the rstd that it set. out has the
    layout that matmul_backward_weight wants."""
    recompute_norm(out, inp, (weight, None), (None, rstd), B, T, C)


for variant, sizes, hard in MANY_AND_FEW:
    describe(rmsnorm_forward, sizes, "out inp: B,T,C; weight: C; rstd*: B,T", variant=variant, hard=hard)
describe(rmsnorm_backward, ROWS, "dinp dout inp: B,T,C; weight dweight*: C; rstd*: B,T", hard="B=1 T=31 C=261",
         twice={"rmsnorm_backward": "dinp"})
describe(rmsnorm_recompute, "B=2 T=32 C=64", "out: B*T,C; inp: B,T,C; weight: C; rstd*: B,T", recomputed)

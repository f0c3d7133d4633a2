"""What all norms share: the launch of their forward kernels, and the launcher that computes an output once more."""

import device
from device import ceil_div
from device.sources import Source
from kernels.launches import describe
from kernels.matmul import as_stored, recomputed, tile_grid

import numpy as np

cu = device.source(__file__)

FEW_ROWS = 16  # so few that their kernel's time is that of loads and barriers, not of memory
MAX_THREADS = 512  # a thread may need 128 registers, and a multiprocessor has 65,536. norm.cu's MAX_WARPS has as many
# For `describe`: the variant, the sizes, and the hard ones.
MANY_AND_FEW = ("", "B=2 T=16 C=128", "B=1 T=17 C=2101"), ("few rows", "B=1 T=1 C=128", "B=1 T=3 C=1101")


def forward_blocks(source: Source, N: int, C: int) -> tuple[tuple, tuple, int]:
    """The grid, the block and the bytes of shared memory with which `source` launches a kernel with norm_forward's body
    for rows (N,C). A block has four rows, and a warp for each. If rows are long, a block has one row, and a thread 16
    channels."""
    # An H100 takes 10% less to 7% more time for LayerNorm than with a kernel and blocks of its own, and 4% less to 18%
    # more for the parallel residual (fp32, dropout). This is 0.3% of a step at most.
    rows, threads = (4, 32) if C <= 1024 else (1, 32 * ceil_div(C, 512))
    block = source.block(min(MAX_THREADS, threads)), rows
    return (ceil_div(N, rows),), block, rows * 4 * source.width * ceil_div(C, source.width)


def launch_forward(source: Source, name: str, tensors: tuple, eps: float, N: int, C: int) -> None:
    """Launches the forward kernel of a norm for rows (N,C): "layernorm", "rmsnorm" or "parallel_residual". tensors are
    the kernel's. If rows are few, norm.cu has it, and each thread has one vector of a row. Else `source` has it."""
    if N <= FEW_ROWS and C <= cu.block(MAX_THREADS) * cu.width:
        block, args = cu.block(32 * ceil_div(C, 32 * cu.width)), (*tensors, np.float32(eps), C)
        cu.launch(f"{name}_few_rows_kernel", (N,), (block,), args)
    else:
        grid, block, shared_mem = forward_blocks(source, N, C)
        args = *tensors, np.float32(eps), N, C
        source.launch(f"{name}_forward_kernel", grid, block, args, shared_mem=shared_mem)


def recompute_norm(out, inp, norm, stats, B: int, T: int, C: int) -> None:
    """out (B*T,C) = the output of a norm once more, from what forward read, inp (B,T,C), the stats that it set (mean
    (B,T), rstd (B,T)), and norm (weight (C), shift (C)). out has the layout that matmul_backward_weight wants. mean and
    shift are None for RMSNorm."""
    side = cu.block(16)
    args = as_stored(out), inp, *norm, *stats, B * T, C
    cu.launch("norm_transposed_kernel", tile_grid(cu, B * T, C), (side, side), args)


describe(recompute_norm, "B=2 T=32 C=64",
         "out: B*T,C; inp: B,T,C; norm.weight norm.shift: C; stats.mean* stats.rstd*: B,T",
         recomputed, hard="T=67 C=67")

"""RMSNorm of each head of queries and keys, with RoPE after it: the launchers of qk_norm.cu."""

import device
from device import ceil_div
from kernels.reduce import MOST_PARTIALS, add_partials, partials_of

import numpy as np

cu = device.source(__file__)


def qk_norm_forward(
    out, rstd, inp, qweight, kweight, table, eps: float, B: int, T: int, NH: int, NKV: int, HS: int, positions=None
) -> None:
    """Sets out (B,T,NH+2*NKV,HS) from inp, of the same shape: normalises each of its NH query and NKV key heads by
    itself, multiplies it by qweight (HS) or kweight (HS), and rotates it; copies the value heads. inp and out must not
    overlap.

    Also sets rstd (B,T,NH+NKV) = 1 / sqrt(mean(inp^2) + eps) of the query and key heads. HS is even. table is
    `rope_table` of HS, for as many positions as there are. Row t of sequence b is at position t; or at positions[b] +
    t, if positions, int32 (B,), is given.
    """
    heads = cu.width  # of a block, which then has 128 threads
    args = out, rstd, inp, qweight, kweight, table, positions, np.float32(eps), B * T, T, NH, NKV, HS
    cu.launch("qk_norm_forward_kernel", (ceil_div(B * T * (NH + 2 * NKV), heads),), (lanes(), heads), args)


def qk_norm_backward(
    dqkv, dqweight, dkweight, inp, qweight, kweight, rstd, table, B: int, T: int, NH: int, NKV: int, HS: int
) -> None:
    """dqkv (B,T,NH+2*NKV,HS), the gradient of forward's out, becomes that of its inp, in place; dqweight, dkweight (HS)
    += those of the weights. The value heads of dqkv stay as they are.

    inp, the weights and table are forward's, rstd is what it set.
    """
    width = cu.width
    row_bytes = 2 * 4 * width * ceil_div(HS, width)  # of the sums of LANES lanes
    at_once = max(1, min(2 * width, device.shared_memory // row_bytes))  # heads of a block, which has 256 threads
    chunks = min(ceil_div(B * T * (NH + NKV), at_once), 4 * device.multiprocessors, MOST_PARTIALS)
    partials = partials_of(chunks * 2 * HS)
    cu.launch(
        "qk_norm_backward_kernel",
        (chunks,),
        (lanes(), at_once),
        (dqkv, partials, inp, qweight, kweight, rstd, table, B * T, T, NH, NKV, HS),
        shared_mem=at_once * row_bytes,
    )
    add_partials([dqweight, dkweight], partials, chunks, HS)


def lanes() -> int:
    """How many lanes of a warp take a head: LANES of qk_norm.cu."""
    return min(cu.warp_size, 128 // cu.width)

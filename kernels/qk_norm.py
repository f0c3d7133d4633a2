"""RMSNorm of each head of queries and keys, with RoPE after it: the launchers of qk_norm.cu."""

import device
from device import ceil_div
from kernels.fp8 import Coded, codings, encode
from kernels.reduce import MOST_PARTIALS, add_partials, partials_of

import numpy as np

cu = device.source(__file__)


def qk_norm_forward(
    out, rstd, inp, weights, table, eps: float, B: int, T: int, NH: int, NKV: int, HS: int, positions=None
) -> None:
    """Sets out (B,T,NH+2*NKV,HS) from inp, of the same shape: normalises each of its NH query and NKV key heads by
    itself, multiplies it by the first of the weights (HS) or the second, and rotates it; copies the value heads. inp
    and out must not overlap.

    Also sets rstd (B,T,NH+NKV) = 1 / sqrt(mean(inp^2) + eps) of the query and key heads. HS is even. table is
    `rope_table` of HS, for as many positions as there are. Row t of sequence b is at position t; or at positions[b] +
    t, if positions, int32 (B,), is given.
    """
    heads = cu.width  # of a block, which then has 128 threads
    args = out, rstd, inp, *weights, table, positions, np.float32(eps), B * T, T, NH, NKV, HS
    cu.launch("qk_norm_forward_kernel", (ceil_div(B * T * (NH + 2 * NKV), heads),), (lanes() * heads,), args)


def qk_norm_backward(
    dinp, dweights, dout, inp, weights, rstd, table, B: int, T: int, NH: int, NKV: int, HS: int
) -> None:
    """dout is the gradient of forward's out. Sets dinp (B,T,NH+2*NKV,HS) to that of its inp, in place: both are the
    same memory. The value heads stay as they are. dweights (HS) += the gradients of the weights.

    inp, the weights and table are forward's, rstd is what it set. dinp may be Coded: then its codes and its scale are
    set, and it must not overlap dout, which may be overwritten, too.
    """
    if not isinstance(dinp, Coded) and device.address(dinp) != device.address(dout):
        raise ValueError("qk_norm's gradient is made in the place of that of its output")
    width, N, heads = cu.width, B * T, NH + 2 * NKV
    row_bytes = 2 * 4 * width * ceil_div(HS, width)  # of the sums of LANES lanes
    args = inp, *weights, rstd, table, N, T, NH, NKV
    if isinstance(dinp, Coded) and HS == 128:
        most = 2 * device.multiprocessors  # two blocks each, as the kernel's __launch_bounds__ say
        chunks = min(ceil_div(N, 64) * heads, most, MOST_PARTIALS)
        partials, block = partials_of(chunks * 2 * HS), cu.block(256)
        shared_mem = block // lanes() * row_bytes + 4 * 64 * HS * device.floatX.itemsize
        for coding in codings(chunks, dinp):
            coded = *coding, dinp.codes, dinp.codes_T, partials, dout
            cu.launch("qk_norm_backward_codes_kernel", (chunks,), (block,), (*coded, *args), shared_mem=shared_mem)
    else:
        at_once = max(1, min(2 * width, device.shared_memory // row_bytes))  # heads of a block, which has 256 threads
        chunks = min(ceil_div(N * (NH + NKV), at_once), 4 * device.multiprocessors, MOST_PARTIALS)
        partials, block = partials_of(chunks * 2 * HS), lanes() * at_once
        in_place = dout, partials, *args, HS
        cu.launch("qk_norm_backward_kernel", (chunks,), (block,), in_place, shared_mem=at_once * row_bytes)
        if isinstance(dinp, Coded):
            encode(dinp, dout, N, heads * HS)
    add_partials([*dweights], partials, chunks, HS)


def lanes() -> int:
    """How many lanes of a warp take a head: LANES of qk_norm.cu."""
    return min(cu.warp_size, 128 // cu.width)

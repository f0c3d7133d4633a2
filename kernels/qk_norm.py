"""RMSNorm of each head of queries and keys, with RoPE after it: the launchers of qk_norm.cu."""

import device
from device import ceil_div
from device.sources import Source
from kernels.dispatch import dispatched
from kernels.launches import describe
from kernels.reduce import MAX_PARTIALS, add_partials, partials_of
from kernels.rope import angles

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
    cu.launch("qk_norm_forward_kernel", (ceil_div(B * T * (NH + 2 * NKV), heads),), (lanes(cu) * heads,), args)


@dispatched("dinp")
def qk_norm_backward(
    dinp, dweights, dout, inp, weights, rstd, table, B: int, T: int, NH: int, NKV: int, HS: int
) -> None:
    """dout is the gradient of forward's out. Sets dinp (B,T,NH+2*NKV,HS) to that of its inp, in place: both are the
    same memory. The value heads stay as they are. dweights (HS) += the gradients of the weights.

    inp, the weights and table are forward's, rstd is what it set.
    """
    if device.address(dinp) != device.address(dout):
        raise ValueError("qk_norm_backward works in place: dinp must be dout's memory")
    at_once = max(1, min(2 * cu.width, device.shared_memory // sums_bytes(cu, HS)))  # heads of a block of 256 threads
    chunks = min(ceil_div(B * T * (NH + NKV), at_once), 4 * device.multiprocessors, MAX_PARTIALS)
    partials = partials_of(chunks * 2 * HS)
    args = dout, partials, inp, *weights, rstd, table, B * T, T, NH, NKV, HS
    shared_mem = at_once * sums_bytes(cu, HS)
    cu.launch("qk_norm_backward_kernel", (chunks,), (lanes(cu) * at_once,), args, shared_mem=shared_mem)
    add_partials([*dweights], partials, chunks, HS)


def lanes(cu: Source) -> int:
    """How many lanes of a warp take a head: LANES of qk_norm.cuh."""
    return min(cu.warp_size, 128 // cu.width)


def sums_bytes(cu: Source, HS: int) -> int:
    """The shared memory for the sums of the lanes of a head (qk_norm.cuh: WeightSums)."""
    return 2 * 4 * cu.width * ceil_div(HS, cu.width)


WEIGHTS = "rstd*: B,T,NH+NKV; weights.qweight weights.kweight: HS"
GRADIENTS = "dweights.dqweight* dweights.dkweight*: HS"
describe(qk_norm_forward, "B=2 T=16 NH=4 NKV=2 HS=32", f"out inp: B,T,NH+2*NKV,HS; {WEIGHTS}", angles,
         needs="HS % 2 == 0")
describe(qk_norm_backward, "B=2 T=16 NH=4 NKV=2 HS=32", f"dinp inp: B,T,NH+2*NKV,HS; {WEIGHTS}; {GRADIENTS}",
         lambda size, a: angles(size, a) | {"dout": a.dinp}, needs="HS % 2 == 0",
         moved={"qk_norm_backward": lambda a: 3 * a.inp.nbytes * (a.NH + a.NKV) // (a.NH + 2 * a.NKV)})

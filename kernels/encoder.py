"""Token and position embeddings: the launchers of encoder.cu."""

import numpy as np

from llmc import device
from llmc.device import ceil_div

cu = device.source(__file__)


def encoder_forward(out, inp, wte, wpe, B: int, T: int, C: int) -> None:
    """out (B,T,C) = wte[inp] + wpe[t]; inp (B,T) int32 token ids, wte (Vp,C), wpe (maxT,C)."""
    positions = 8
    cu.encoder_forward_kernel(
        (ceil_div(B * T, positions),), (device.warp_size(), positions), (out, inp, wte, wpe, B * T, T, C)
    )


def encoder_backward(dwte, dwpe, dout, inp, order, count, B: int, T: int, C: int) -> None:
    """dwte (Vp,C) += rows of dout (B,T,C) summed by token; dwpe (maxT,C) += dout summed over B.

    order and count (B*T) int32 are `sort_by_token` of inp (B,T).
    """
    columns = device.block(min(256, ceil_div(C, 4)))
    cu.wte_backward_kernel((B * T,), (columns, device.block(4)), (dwte, dout, inp, order, count, C))
    block = 128
    cu.wpe_backward_kernel((T, ceil_div(C, block)), (block,), (dwpe, dout, B, T, C))


def sort_by_token(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """order: the positions of tokens (any shape), sorted by token, equal ones in their order; count: at the place in
    that order where a token begins, how many positions hold it, and 0 elsewhere. int32 (tokens.size,)."""
    flat = tokens.reshape(-1)
    if flat.max() < 1 << 16:
        flat = flat.astype(np.uint16)  # NumPy's stable sort of 16-bit values is a radix sort
    order = np.argsort(flat, kind="stable").astype(np.int32)
    in_order = flat[order]
    first = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
    count = np.zeros(flat.size, np.int32)
    count[first] = np.diff(np.r_[first, flat.size])
    return order, count

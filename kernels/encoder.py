"""Token and position embeddings: the launchers of encoder.cu."""

import device
from device import ceil_div
from kernels.dropout import Dropout, drop_a_fifth
from kernels.launches import ROWS, describe, random_tokens

import numpy as np

cu = device.source(__file__)


def encoder_forward(
    out, inp, wte, wpe, B: int, T: int, C: int, dropout: Dropout | None = None, positions=None
) -> None:
    """out (B,T,C) = dropout(wte[inp] + wpe[t]); inp (B,T) int32 token ids, wte (Vp,C), wpe (maxT,C).

    If wpe is None, out = dropout(wte[inp]), for a model that embeds no positions. If positions, int32 (B,), is given,
    out = wte[inp] + wpe[positions[b] + t], without dropout.
    """
    rows = 8  # of a block; on an H200 2 to 16 take as long
    grid, block = (ceil_div(B * T, rows),), (cu.warp_size, rows)
    if dropout:
        cu.launch("encoder_dropout_forward_kernel", grid, block, (out, inp, wte, wpe, B * T, T, C, *dropout))
    else:
        cu.launch("encoder_forward_kernel", grid, block, (out, inp, wte, wpe, positions, B * T, T, C))


def encoder_backward(dwte, dwpe, dout, inp, order, count, B: int, T: int, C: int) -> None:
    """dwte (Vp,C) += rows of dout (B,T,C) summed by token; dwpe (maxT,C) += dout summed over B.

    dout is the gradient of the sum before dropout. The backward pass of the first norm sets it. dwpe
    is None if there is no wpe. order and count (B*T) int32 are `sort_by_token` of inp (B,T).
    """
    cu.launch("wte_backward_kernel", (B * T,), block_of_tokens(C), (dwte, dout, inp, order, count, C))
    if dwpe is not None:
        wpe_backward(dwpe, dout, B, T, C)


def encoder_backward_sparse(values, indices, dwpe, dout, inp, order, count, B: int, T: int, C: int) -> None:
    """The same, but does not touch dwte: sets values (B*T,C) and indices (B*T) int32 to the rows for it and their
    tokens. A token is -1 if there is no row. `add_sparse` adds the rows."""
    cu.launch("wte_backward_sparse_kernel", (B * T,), block_of_tokens(C), (values, indices, dout, inp, order, count, C))
    if dwpe is not None:
        wpe_backward(dwpe, dout, B, T, C)


def add_sparse(dwte, values, indices, N: int, C: int) -> None:
    """dwte (Vp,C) += the rows of values (N,C) and indices (N), which encoder_backward_sparse has set, also on another
    GPU."""
    rows = 16  # of a block; few blocks keep the links between GPUs busy, and leave room for other kernels
    cu.launch("add_sparse_kernel", (min(64, ceil_div(N, rows)),), (cu.warp_size, rows), (dwte, values, indices, N, C))


def block_of_tokens(C: int) -> tuple[int, int]:
    """The block that sums a token's rows: threads over the channels, a vector each, and rows of threads over its
    positions."""
    # In fp32 four rows of threads share a frequent token's positions: two took 1.8 times as long on an H200, one 3.4
    # times. In bf16 a row has half as many threads, so there are eight.
    width = cu.width
    return cu.block(min(1024 // width, ceil_div(C, width))), cu.block(width)


def wpe_backward(dwpe, dout, B: int, T: int, C: int) -> None:
    """dwpe (maxT,C) += dout (B,T,C) summed over B."""
    block = 128  # on an H200 64 and 256 take as long
    cu.launch("wpe_backward_kernel", (T, ceil_div(C, block)), (block,), (dwpe, dout, B, T, C))


def sort_by_token(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (order, count), int32 (tokens.size,) each, for tokens of any shape. order: the positions sorted by their
    tokens; positions with equal tokens stay in their order. count: for the first position of each token in this order,
    how many positions have the token; 0 for the others."""
    flat = tokens.reshape(-1)
    if flat.max() < 1 << 16:
        flat = flat.astype(np.uint16)  # NumPy's stable sort of 16-bit values is a radix sort
    order = np.argsort(flat, kind="stable").astype(np.int32)
    in_order = flat[order]
    first = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
    count = np.zeros(flat.size, np.int32)
    count[first] = np.diff(np.r_[first, flat.size])
    return order, count


def random_batch(size, a) -> dict:
    inp = random_tokens(size.V, size.B, size.T)
    order, count = map(device.asarray, sort_by_token(inp))
    return {"inp": device.asarray(inp), "order": order, "count": count, "indices": device.zeros((inp.size,), np.int32)}


def distinct(count) -> int:
    return int(np.count_nonzero(device.to_host(count)))


def forward_bytes(a) -> int:
    return 2 * a.out.nbytes + (0 if a.wpe is None else a.T * a.C * a.wpe.itemsize)


describe(encoder_forward, ROWS + " V=50", "out: B,T,C; wte: V,C; wpe: T,C", random_batch,
         moved={"encoder_forward": forward_bytes, "encoder_dropout_forward": forward_bytes})
describe(encoder_forward, ROWS + " V=50", "out: B,T,C; wte: V,C; wpe: T,C",
         lambda size, a: random_batch(size, a) | {"dropout": drop_a_fifth()}, "dropout")
describe(encoder_backward, ROWS + " V=50", "dwte*: V,C; dwpe*: T,C; dout: B,T,C", random_batch,
         hard="B=1 T=9 C=2100 V=5",
         moved={"wte_backward": lambda a: a.dout.nbytes + 8 * distinct(a.count) * a.C,
                "wpe_backward": lambda a: a.dout.nbytes + 8 * a.T * a.C})
describe(encoder_backward_sparse, ROWS + " V=50", "values*: B*T,C; dwpe*: T,C; dout: B,T,C", random_batch,
         moved={"wte_backward_sparse": lambda a: a.dout.nbytes + 4 * distinct(a.count) * a.C})
describe(add_sparse, "N=64 V=100 C=128", "dwte*: V,C; values*: N,C",
         lambda size, a: {"indices": device.asarray(np.arange(size.N, dtype=np.int32))}, needs="N <= V",
         moved={"add_sparse": lambda a: 12 * int((device.to_host(a.indices) >= 0).sum()) * a.C})

"""Attention from a position on, with a cache of keys and values: the launchers of cached_attention.cu."""

import math

import device
from device import ceil_div

import numpy as np

cu = device.source(__file__)

THREADS, TILE_KEYS = 128, 64  # as cached_attention.cu has them
HEADS = 4  # query heads of a block, if they share keys


def cached_attention_forward(
    out, parts, stats, keys, values, qkv, positions, B: int, T: int, context: int, NH: int, NKV: int, HS: int,
    relu: bool = False, splits: int = 1,
) -> None:  # fmt: skip
    """out (B,T,NH,HS) = causal attention of qkv (B,T,NH+2*NKV,HS), which has T new positions of each sequence. Those of
    sequence b begin at positions[b], int32 (B,), and positions[b] + T is at most context. A query sees the new keys and
    values up to its own position, and all earlier ones. The earlier ones are in keys and values (B,NKV,context,HS). The
    new ones are written there, too. Query head h uses key and value head h // (NH / NKV); NKV divides NH.

    splits: how many blocks share the keys of a query, from number_of_splits. If it is above 1, parts
    (B,T,NH,splits,HS) and stats (B,T,NH,splits,2), fp32, are scratch; else they may be None.
    """
    shared, heads = (1, 1) if NH == NKV else (ceil_div(NH // NKV, HEADS), HEADS)
    vectors = ceil_div(HS, cu.width)
    block = cu.block(THREADS)
    slots = max(1, block // vectors)
    kernel = "cached_attention_kernel" if heads == 1 else "cached_attention_shared_kernel"
    cu.launch(
        kernel,
        (B * T, NKV * shared, splits), (block,),
        (out, parts, stats, keys, values, qkv, positions, T, context, NH, NKV, HS, int(relu),
         np.float32(1.0 / math.sqrt(HS)), splits, slots),
        shared_mem=4 * heads * slots * vectors * cu.width,
    )  # fmt: skip
    if splits > 1:
        block = cu.block(min(1024, 32 * ceil_div(HS, 32)))
        cu.launch("add_splits_kernel", (B * T * NH,), (block,), (out, parts, stats, HS, int(relu), splits))


def number_of_splits(B: int, NH: int, NKV: int, context: int) -> int:
    """How many blocks share the keys of a sequence's single new query. A GPU then has two blocks for each
    multiprocessor, if there are enough keys. The number does not depend on the position."""
    blocks = B * NKV * ceil_div(NH // NKV, HEADS)
    tiles = ceil_div(context, TILE_KEYS)
    wanted = min(tiles, ceil_div(2 * device.multiprocessors, blocks))
    return ceil_div(tiles, ceil_div(tiles, wanted))  # so each split has a part of the context

"""Attention from a position on, with a cache of keys and values: the launchers of cached_attention.cu."""

import math

import device
from device import ceil_div

import numpy as np

cu = device.source(__file__)

THREADS, TILE_KEYS = 128, 64  # as cached_attention.cu has them
HEADS = 4  # of queries that share keys, of a block


def cached_attention_forward(
    out, parts, stats, keys, values, qkv, positions, B: int, T: int, context: int, NH: int, NKV: int, HS: int,
    relu: bool = False, splits: int = 1,
) -> None:  # fmt: skip
    """out (B,T,NH,HS) = causal attention of the queries in qkv (B,T,NH+2*NKV,HS): T new positions of each sequence, the
    first of sequence b at positions[b], int32 (B,). A query sees the new keys and values up to its own, and all before
    the new ones, which are in keys and values (B,NKV,context,HS). The new ones are written there, too. positions[b] + T
    is at most context. Query head h uses key and value head h // (NH / NKV); NKV divides NH.

    Where splits, as number_of_splits gives it, is above 1, that many blocks share the keys of a query, and parts
    (B,T,NH,splits,HS) and stats (B,T,NH,splits,2), fp32, are scratch; else these may be None.
    """
    shared, heads = (1, 1) if NH == NKV else (ceil_div(NH // NKV, HEADS), HEADS)
    vectors = ceil_div(HS, cu.width)
    block = cu.block(THREADS)
    slots = max(1, block // vectors)
    kernel = cu.cached_attention_kernel if heads == 1 else cu.cached_attention_shared_kernel
    kernel(
        (B * T, NKV * shared, splits), (block,),
        (out, parts, stats, keys, values, qkv, positions, T, context, NH, NKV, HS, int(relu),
         np.float32(1.0 / math.sqrt(HS)), splits, slots),
        shared_mem=4 * heads * slots * vectors * cu.width,
    )  # fmt: skip
    if splits > 1:
        block = cu.block(min(1024, 32 * ceil_div(HS, 32)))
        cu.add_splits_kernel((B * T * NH,), (block,), (out, parts, stats, HS, int(relu), splits))


def number_of_splits(B: int, NH: int, NKV: int, context: int) -> int:
    """Among how many blocks to share the keys of a sequence's single new query, so that a GPU has two blocks for each
    multiprocessor, if there are keys for them: the same whatever the position."""
    blocks = B * NKV * ceil_div(NH // NKV, HEADS)
    tiles = ceil_div(context, TILE_KEYS)
    wanted = min(tiles, ceil_div(2 * device.multiprocessors, blocks))
    return ceil_div(tiles, ceil_div(tiles, wanted))  # none is without keys

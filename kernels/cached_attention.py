"""Attention from a position on, with a cache of keys and values: the launchers of cached_attention.cu."""

import math
from typing import NamedTuple

import device
from device import ceil_div
from kernels.launches import describe

import numpy as np

cu = device.source(__file__)

THREADS, TILE_KEYS = 128, 64  # as cached_attention.cu has them
HEADS = 4  # query heads of a block, if they share keys


class Cached(NamedTuple):
    """What stays of a layer's attention for the next tokens of a text."""

    keys: object       # (B,NKV,context,HS)
    values: object     # (B,NKV,context,HS)
    positions: object  # int32 (B,): where the new positions of each sequence begin
    relu: bool = False


def cached_attention_forward(
    out, kept: Cached, qkv, B: int, T: int, NH: int, NKV: int, HS: int, splits: int | None = None
) -> None:  # fmt: skip
    """out (B,T,NH,HS) = causal attention of qkv (B,T,NH+2*NKV,HS), which has T new positions of each sequence. Those of
    sequence b begin at positions[b], and positions[b] + T is at most context. A query sees the new keys and values up
    to its own position, and all earlier ones. The earlier ones are in keys and values. The new ones are written there,
    too. Query head h uses key and value head h // (NH / NKV); NKV divides NH.

    splits: how many blocks share the keys of a query; by default number_of_splits for a single new position, else 1.
    """
    keys, values, positions, relu = kept
    context = keys.shape[2]
    splits = splits or (number_of_splits(B, NH, NKV, context) if T == 1 else 1)
    parts = stats = None
    if splits > 1:
        parts = device.scratch("parts", (B, T, NH, splits, HS), np.float32)  # sums over the keys of a split
        stats = device.scratch("stats", (B, T, NH, splits, 2), np.float32)   # and their largest score, and denominator
    shared, heads = (1, 1) if NH == NKV else (ceil_div(NH // NKV, HEADS), HEADS)
    vectors = ceil_div(HS, cu.width)
    block = cu.block(THREADS)
    slots = max(1, block // vectors)
    kernel = "cached_attention_kernel" if heads == 1 else "cached_attention_shared_kernel"
    cu.launch(
        kernel,
        (B * T, NKV * shared, splits + (T == 1)), (block,),
        (out, parts, stats, keys, values, qkv, positions, T, context, NH, NKV, HS, int(relu),
         np.float32(1.0 / math.sqrt(HS)), splits, slots),
        shared_mem=4 * heads * slots * vectors * cu.width,
    )  # fmt: skip
    if splits > 1:
        block = cu.block(min(1024, 32 * ceil_div(HS, 32)))
        args = out, parts, stats, positions, T, context, NH, HS, int(relu), splits
        cu.launch("add_splits_kernel", (B * T * NH,), (block,), args)


def scratch_of_cache(B: int, context: int, NH: int, NKV: int, HS: int) -> dict[str, int]:
    """The scratch that attention takes for a single new position: purpose, bytes."""
    splits = number_of_splits(B, NH, NKV, context)
    return {"parts": 4 * B * NH * splits * HS, "stats": 8 * B * NH * splits} if splits > 1 else {}


def number_of_splits(B: int, NH: int, NKV: int, context: int) -> int:
    """How many blocks share the keys of a sequence's single new query. A GPU then has two such blocks for each
    multiprocessor, if there are enough keys. The number does not depend on the position."""
    blocks = B * NKV * ceil_div(NH // NKV, HEADS)
    tiles = ceil_div(context, TILE_KEYS)
    wanted = min(tiles, ceil_div(2 * device.multiprocessors, blocks))
    return ceil_div(tiles, ceil_div(tiles, wanted))  # so each split has a part of the context


def bytes_moved(a) -> int:
    earlier = int(device.to_host(a.positions).sum())
    return a.qkv.nbytes + 2 * earlier * a.NKV * a.HS * a.keys.itemsize


for variant, heads, hard in (
    ("", "NH=2 NKV=2", "T=2 splits=1 HS=20"), ("shared", "NH=4 NKV=1", "NH=5 splits=2 context=300 position=190")
):  # fmt: skip
    describe(
        cached_attention_forward, f"B=2 T=1 position=199 context=256 HS=64 splits=4 {heads}",
        "out: B,T,NH*HS; keys values: B,NKV,context,HS; qkv: B,T,NH+2*NKV,HS",
        lambda size, a: {"kept": Cached(a.keys, a.values, device.asarray(np.full(size.B, size.position, np.int32)))},
        variant, hard=hard, needs="NH % NKV == 0; position + T <= context",
        moved={"cached_attention": bytes_moved, "cached_attention_shared": bytes_moved})

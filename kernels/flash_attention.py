"""Causal attention without (T, T) matrices, in TF32 or bf16: the launchers of flash_attention.cu, and of
flash_attention_hopper.cu for GPUs that have wgmma."""

from pathlib import Path
from typing import NamedTuple

import device
from device import ceil_div
from device.errors import UserError

import numpy as np

cu = device.source(__file__)
hopper = device.source(Path(__file__).with_name("flash_attention_hopper.cu"), needed=lambda: has_wgmma())

HEAD_SIZES = (64, 128)
THREADS = 128
ROWS = {64: 128, 128: 64}  # of a block, as in flash_attention.cu, by the size of heads; forward in bf16 always has 128
# For the kernels of flash_attention_hopper.cu, by the size of heads: rows of a block, and how many tiles it holds of
# each array that it streams.
WGMMA = {
    "forward": {64: (128, 3), 128: (64, 3)},
    "backward_query": {64: (64, 3), 128: (128, 3)},
    "backward_key": {64: (64, 4), 128: (128, 3)},
}
WGMMA_TILE = 64  # rows of a tile


class Flash(NamedTuple):
    """What flash attention keeps of a layer for backward."""

    lse: object  # (B,NH,T), fp32: log of the softmax's denominator


def has_wgmma() -> bool:
    """Whether the device in use computes in bf16, has Hopper's matrix product, and has a compiler that knows it."""
    return device.kind == "cuda" and device.floatX == device.BF16 and not device.why_not_kernels(hopper.path)


def flash_attention_forward(
    out, lse, qkv, B: int, T: int, NH: int, NKV: int, HS: int, wgmma: bool | None = None
) -> None:  # fmt: skip
    """out (B,T,NH,HS) = causal attention of qkv (B,T,NH+2*NKV,HS): each position's NH queries, NKV keys and NKV values,
    of HS channels. Query head h uses key and value head h // (NH / NKV); NKV divides NH.

    Sets lse (B,NH,T), too, for backward: log(sum(exp(q . k / sqrt(HS)))) over the keys that a query sees. wgmma, in
    bf16 only: whether to use this instruction; None: if the GPU has it. The CPU device can do both. Raises UserError if
    the size of heads is not in HEAD_SIZES, and on a GPU without TF32 (before compute capability 8.0).
    """
    check(HS)
    arguments = out, lse, qkv, T, NH, NKV
    if wgmma or wgmma is None and has_wgmma():
        launch_wgmma("forward", 1, B, T, NH, HS, arguments)
        return
    rows, operands = (128, 1) if device.floatX == device.BF16 else (ROWS[HS], 0)
    launch("forward", rows, operands, B, T, NH, HS, arguments)


def flash_attention_backward(
    dqkv, dout, out, lse, qkv, B: int, T: int, NH: int, NKV: int, HS: int, wgmma: bool | None = None
) -> None:  # fmt: skip
    """Sets dqkv (B,T,NH+2*NKV,HS) to the gradient of qkv, from dout (B,T,NH,HS) and from what forward wrote for the
    same qkv: out (B,T,NH,HS) and lse (B,NH,T). Backward finds a NaN in qkv only by what forward made of it. wgmma: as
    in flash_attention_forward.
    """
    check(HS)
    dsum = device.scratch("dsum", (B, NH, T), np.float32)  # of dout * out over each head's channels
    dkv_heads = None
    if NKV < NH:  # each query head's share of the gradients of its key and value head
        dkv_heads = device.scratch("dkv_heads", (B, T, 2, NH, HS), np.float32)
    of_queries = dqkv, dsum, dout, out, lse, qkv, T, NH, NKV
    of_keys = dqkv, dkv_heads, dsum, dout, lse, qkv, T, NH, NKV
    if wgmma or wgmma is None and has_wgmma():
        launch_wgmma("backward_query", 2, B, T, NH, HS, of_queries)
        launch_wgmma("backward_key", 2, B, T, NH, HS, of_keys, floats=2)
    else:
        operands = 3 if device.floatX == device.BF16 else 1
        launch("backward_query", ROWS[HS], operands, B, T, NH, HS, of_queries)
        launch("backward_key", ROWS[HS], 2, B, T, NH, HS, of_keys)
    if NKV < NH:
        heads = B * T * 2 * NKV
        block = HS // cu.width, cu.width * THREADS // HS
        grid = (ceil_div(heads, block[1]),)
        cu.launch("flash_attention_group_sum_kernel", grid, block, (dqkv, dkv_heads, heads, NH, NKV, HS))


def scratch_of_flash(B: int, T: int, NH: int, NKV: int, HS: int) -> dict[str, int]:
    """The scratch that backward takes: purpose, bytes."""
    return {"dsum": 4 * B * NH * T} | ({"dkv_heads": 8 * B * T * NH * HS} if NKV < NH else {})


def launch(name: str, rows: int, operands: int, B: int, T: int, NH: int, HS: int, arguments: tuple) -> None:
    """Launches a block for each head of each sequence and each tile of `rows` queries or keys. operands: of how many
    arrays a block keeps its rows in dynamic shared memory."""
    shared = operands * rows * HS * device.floatX.itemsize
    kernel, grid = f"flash_attention_{name}_kernel_{HS}", (B * NH, ceil_div(T, rows))
    cu.launch(kernel, grid, (THREADS,), arguments, shared_mem=shared)


def launch_wgmma(
    name: str, operands: int, B: int, T: int, NH: int, HS: int, arguments: tuple, floats: int = 0
) -> None:  # fmt: skip
    """The same with a warpgroup for each 64 rows. In shared memory a block also has tiles of two more arrays, and
    `floats` fp32 numbers for each row of a tile."""
    rows, tiles = WGMMA[name][HS]
    shared = (operands * rows + 2 * tiles * WGMMA_TILE) * HS * device.floatX.itemsize + floats * tiles * WGMMA_TILE * 4
    kernel, grid = f"flash_attention_{name}_wgmma_kernel_{HS}", (B * NH, ceil_div(T, rows))
    hopper.launch(kernel, grid, (2 * rows,), arguments, shared_mem=shared)


def check(HS: int) -> None:
    """Raises UserError if there are no kernels for heads of HS channels, or for this GPU."""
    if HS not in HEAD_SIZES:
        raise UserError(f"flash attention takes heads of 64 or 128 channels, not {HS}: use -a softmax")
    if device.kind == "cuda" and device.compute_capability < 80:
        raise UserError("flash attention needs TF32, a GPU of compute capability 8.0 or later: use -a softmax")

"""Causal attention without (T, T) matrices, in TF32 or bf16: the launchers of flash_attention.cu, and of
flash_attention_hopper.cu for GPUs that have wgmma."""

from pathlib import Path
from typing import NamedTuple

import device
from device import ceil_div
from device.errors import UserError
from kernels.launches import FLOPS, MOVED, describe

import numpy as np

cu = device.source(__file__)
hopper = device.source(Path(__file__).with_name("flash_attention_hopper.cu"), needed=lambda: has_wgmma())

HEAD_SIZES = (64, 128)
THREADS = 128
ROWS = {64: 128, 128: 64}  # of a block, as in flash_attention.cu, by the size of heads; forward in bf16 always has 128
TILE = 64  # rows of the tiles that a block of flash_attention_hopper.cu streams
# For these kernels, by the size of heads: how many warpgroups of a block compute, each for 64 rows, and how many tiles
# the block holds of each of the two arrays that it streams.
WGMMA = {
    "forward": {64: (4, 4), 128: (3, 3)},
    "backward_query": {64: (3, 3), 128: (2, 3)},
    "backward_key": {64: (2, 3), 128: (2, 3)},
}


class Flash(NamedTuple):
    """What flash attention keeps of a layer for backward."""

    lse: object  # (B,NH,T), fp32: log of the softmax's denominator


def has_wgmma() -> bool:
    """Whether the device in use computes in bf16 and has Hopper's matrix product."""
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
        qkv_map = tensor_map(qkv, B, T, (NH + 2 * NKV) * HS)
        launch_wgmma("forward", 1, B, T, NH, NKV, HS, (out, lse, qkv_map))
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
    wgmma = has_wgmma() if wgmma is None else wgmma
    dkv_heads = None
    if has_shares(B, T, NH, NKV, HS, wgmma):
        dkv_heads = device.scratch("dkv_heads", (B, T, 2, NH, HS), np.float32)
    if wgmma:
        qkv_map, dout_map = tensor_map(qkv, B, T, (NH + 2 * NKV) * HS), tensor_map(dout, B, T, NH * HS)
        launch_wgmma("backward_query", 2, B, T, NH, NKV, HS, (dqkv, dsum, dout_map, dout, out, lse, qkv_map))
        arrays = dqkv, dkv_heads, dsum, dout_map, lse, qkv_map
        launch_wgmma("backward_key", 2, B, T, NH, NKV, HS, arrays, floats=2, whole_groups=dkv_heads is None)
    else:
        sizes = T, NH, NKV
        launch("backward_query", ROWS[HS], 1, B, T, NH, HS, (dqkv, dsum, dout, out, lse, qkv, *sizes))
        operands = 1 if device.floatX == device.BF16 else 2
        launch("backward_key", ROWS[HS], operands, B, T, NH, HS, (dqkv, dkv_heads, dsum, dout, lse, qkv, *sizes))
    if dkv_heads is not None:
        heads = B * T * 2 * NKV
        block = HS // cu.width, cu.width * THREADS // HS
        grid = (ceil_div(heads, block[1]),)
        cu.launch("flash_attention_group_sum_kernel", grid, block, (dqkv, dkv_heads, heads, NH, NKV, HS))


def scratch_of_flash(B: int, T: int, NH: int, NKV: int, HS: int) -> dict[str, int]:
    """The scratch that backward takes: purpose, bytes."""
    shares = has_shares(B, T, NH, NKV, HS, has_wgmma())
    return {"dsum": 4 * B * NH * T} | ({"dkv_heads": 8 * B * T * NH * HS} if shares else {})


def has_shares(B: int, T: int, NH: int, NKV: int, HS: int, wgmma: bool) -> bool:
    """Whether backward sets each query head's share of the gradients of its key and value head (`dkv_heads`), and then
    adds up the shares. With Hopper's kernels it does so only if blocks that take whole groups of heads are too few:
    without shares a step of Qwen3-0.6B at B 8 takes an H100 2.9% less, one of Llama 3.2 1B 1.0%."""
    return NKV < NH and not (wgmma and B * NKV * ceil_div(T, 64 * WGMMA["backward_key"][HS][0]) >= min_blocks())


def min_blocks() -> int:
    """How many blocks of backward_key are enough to take whole groups of heads: two a multiprocessor, which runs one at
    a time. Blocks of late keys are short, and fill the gaps that long ones leave. On an H100 this is 264."""
    return 2 * device.multiprocessors


def l2_budget() -> int:
    """The bytes of L2 that a group of heads may fill with the arrays that their blocks stream: 64%. On an H100 this is
    32 of 50 MiB, which leaves room for the rows that the blocks own, and for what they write."""
    return device.l2_bytes * 16 // 25


def launch(name: str, rows: int, operands: int, B: int, T: int, NH: int, HS: int, arguments: tuple) -> None:
    """Launches a block for each head of each sequence and each tile of `rows` queries or keys. operands: of how many
    arrays a block keeps its rows in dynamic shared memory."""
    shared = operands * rows * HS * device.floatX.itemsize
    kernel, grid = f"flash_attention_{name}_kernel_{HS}", (B * NH, ceil_div(T, rows))
    cu.launch(kernel, grid, (THREADS,), arguments, shared_mem=shared)


def launch_wgmma(
    name: str, operands: int, B: int, T: int, NH: int, NKV: int, HS: int, arrays: tuple, floats: int = 0,
    whole_groups: bool = False,
) -> None:  # fmt: skip
    """Launches a kernel of flash_attention_hopper.cu: a block for each tile of each query head, or of each key
    head with whole_groups. Its warpgroups compute, but for one, which loads. In shared memory a block also has tiles of
    two more arrays, `floats` fp32 numbers for each of their rows, and mbarriers."""
    warpgroups, stages = WGMMA[name][HS]
    rows, heads = 64 * warpgroups, B * (NKV if whole_groups else NH)
    shared = (operands * rows + 2 * stages * TILE) * HS * 2 + floats * stages * TILE * 4 + 8 * (4 * stages + 1)
    # So many heads at a time that L2 holds the keys and values, or queries and dout, of them all.
    group = max(1, l2_budget() // (2 * T * HS * 2)) * (1 if whole_groups else NH // NKV)
    grid, block = (heads * ceil_div(T, rows),), (128 * (warpgroups + 1),)
    arguments = *arrays, T, NH, NKV, heads, group
    hopper.launch(f"flash_attention_{name}_wgmma_kernel_{HS}", grid, block, arguments, shared_mem=shared)


def tensor_map(array, B: int, T: int, columns: int) -> device.TensorMap:
    """For copies of boxes of an array (B, T, columns)."""
    return device.tensor_map(array, (B, T, columns), (1, TILE, TILE))


def check(HS: int) -> None:
    """Raises UserError if there are no kernels for heads of HS channels, or for this GPU."""
    if HS not in HEAD_SIZES:
        raise UserError(f"flash attention takes heads of 64 or 128 channels, not {HS}: use -a softmax")
    if device.kind == "cuda" and device.compute_capability < 80:
        raise UserError("flash attention needs TF32, a GPU of compute capability 8.0 or later: use -a softmax")


for HS, wgmma, hard in (64, False, "T=161 NH=1"), (64, True, "T=261"), (128, False, ""), (128, True, "T=261 NH=1"):
    call = {"given": {"wgmma": wgmma}, "variant": "wgmma" * wgmma + "128" * (HS == 128), "needs": "NH % NKV == 0",
            "hard": hard, "precision": "bf16" * wgmma}
    sizes, arrays = f"B=1 T=80 NH=2 NKV=1 HS={HS}", "out: B,T,NH*HS; lse*: B,NH,T; qkv: B,T,NH+2*NKV,HS"
    describe(flash_attention_forward, sizes, arrays, **call)
    describe(flash_attention_backward, sizes, f"dqkv: B,T,NH+2*NKV,HS; dout: B,T,NH*HS; {arrays}", **call,
             hides="qkv")  # has made lse or out of its row a NaN (flash_attention.cu)
FLOPS |= {"flash_attention_forward": lambda a: 2 * a.T * a.out.size,
          "flash_attention_backward_query": lambda a: 3 * a.T * a.out.size,
          "flash_attention_backward_key": lambda a: 4 * a.T * a.dout.size}
# Reads each query head's share, writes the sums of each group's.
MOVED["flash_attention_group_sum"] = lambda a: a.dkv_heads.nbytes + a.dkv_heads.size * a.NKV // a.NH * a.dqkv.itemsize

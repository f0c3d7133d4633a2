"""Causal attention. The first two functions choose a kind by what it keeps: flash, cached, or matrices. The kind with
whole (T, T) matrices, softmax or ReLU, is here: batched products, and the launchers of attention.cu."""

import math
from typing import NamedTuple

import device
from device import ceil_div
from kernels.cached_attention import Cached, cached_attention_forward
from kernels.flash_attention import Flash, flash_attention_backward, flash_attention_forward, scratch_of_flash
from kernels.fp16.products import gemm_strided_batched
from kernels.launches import describe

import numpy as np

cu = device.source(__file__)


class Matrices(NamedTuple):
    """What attention with matrices keeps of a layer for backward."""

    qkvr: object  # q (B,NH,T,HS), then k and v (B,NKV,T,HS)
    att: object   # (B,NH,T,T)
    relu: bool = False


def attention_forward(out, kept, qkv, B: int, T: int, NH: int, NKV: int, HS: int) -> None:
    """out (B,T,NH,HS) = causal attention of qkv (B,T,NH+2*NKV,HS): each position's NH queries, NKV keys and NKV values,
    of HS channels. Query head h uses key and value head h // (NH / NKV); NKV divides NH.

    What is kept decides the kind: Matrices or Flash for backward, Cached for the next tokens of a text.
    """
    if isinstance(kept, Flash):
        flash_attention_forward(out, kept.lse, qkv, B, T, NH, NKV, HS)
    elif isinstance(kept, Cached):
        cached_attention_forward(out, kept, qkv, B, T, NH, NKV, HS)
    else:
        matrix_attention_forward(out, kept, qkv, B, T, NH, NKV, HS)


def attention_backward(dqkv, dout, out, kept, qkv, B: int, T: int, NH: int, NKV: int, HS: int) -> None:
    """Sets dqkv (B,T,NH+2*NKV,HS) to the gradient of qkv, from dout (B,T,NH,HS), the gradient of out, and from what
    attention_forward wrote for the same qkv: out (B,T,NH,HS), and kept."""
    if isinstance(kept, Flash):
        flash_attention_backward(dqkv, dout, out, kept.lse, qkv, B, T, NH, NKV, HS)
    else:
        matrix_attention_backward(dqkv, dout, kept, B, T, NH, NKV, HS)


def scratch_of_attention(kind: str, B: int, T: int, NH: int, NKV: int, HS: int) -> dict[str, int]:
    """The scratch that a training step's attention takes: purpose, bytes."""
    if kind == "flash":
        return scratch_of_flash(B, T, NH, NKV, HS)
    rows, X = B * T * HS, device.floatX.itemsize
    return {"heads": X * rows * NH, "dqkvr": X * rows * (NH + 2 * NKV), "datt": X * B * NH * T * T}


def matrix_attention_forward(out, kept: Matrices, qkv, B: int, T: int, NH: int, NKV: int, HS: int) -> None:
    """attention_forward with matrices: sets kept, too."""
    qkvr, att, relu = kept
    heads = device.scratch("heads", (B, NH, T, HS), qkv.dtype)  # att @ v; unpermuted, it is out
    G, C = NH // NKV, NH * HS
    launch_by_row("permute_kernel", B * T, C, HS, (qkvr, qkv, B, T, NH, NKV, HS))
    q, k, v = split(qkvr, B * T * C, B * T * NKV * HS)
    # The G query heads of a group are neighbours: a product takes them for one head with G * T queries. causal names
    # the operand that is 0, or not needed, above the diagonal: a or c.
    gemm_strided_batched(att, q, k, G * T, T, HS, B * NKV, trans_b=True, causal="c")
    forward = "relu_forward_kernel" if relu else "softmax_forward_kernel"
    launch_by_att_row(forward, B * NH * T, (att, np.float32(1.0 / math.sqrt(HS)), B * NH * T, T))
    gemm_strided_batched(heads, att, v, G * T, HS, T, B * NKV, causal="a")
    launch_by_row("unpermute_kernel", B * T, C, HS, (out, heads, T, NH, HS))


def matrix_attention_backward(dqkv, dout, kept: Matrices, B: int, T: int, NH: int, NKV: int, HS: int) -> None:
    """attention_backward with matrices."""
    qkvr, att, relu = kept
    heads = device.scratch("heads", (B, NH, T, HS), dout.dtype)  # dout, permuted
    dqkvr = device.scratch("dqkvr", qkvr.shape, qkvr.dtype)
    datt = device.scratch("datt", (B, NH, T, T), att.dtype)
    G, C = NH // NKV, NH * HS
    q, k, v = split(qkvr, B * T * C, B * T * NKV * HS)
    dq, dk, dv = split(dqkvr, B * T * C, B * T * NKV * HS)
    launch_by_row("unpermute_backward_kernel", B * T, C, HS, (heads, dout, T, NH, HS))
    gemm_strided_batched(datt, heads, v, G * T, T, HS, B * NKV, trans_b=True, causal="c")
    # Adds up the heads of a group, too, because it sums over G * T; so does the product of dk.
    gemm_strided_batched(dv, att, heads, T, HS, G * T, B * NKV, trans_a=True, causal="a")
    backward = "relu_backward_kernel" if relu else "softmax_backward_kernel"
    launch_by_att_row(backward, B * NH * T, (datt, att, np.float32(1.0 / math.sqrt(HS)), B * NH * T, T))
    gemm_strided_batched(dq, datt, k, G * T, HS, T, B * NKV, causal="a")
    gemm_strided_batched(dk, datt, q, T, HS, G * T, B * NKV, trans_a=True, causal="a", again=True)
    launch_by_row("permute_backward_kernel", B * T, C, HS, (dqkv, dqkvr, B, T, NH, NKV, HS))


def split(qkvr, q_size: int, kv_size: int) -> tuple:
    """q, k and v of qkvr: flat views of q_size numbers, kv_size and kv_size."""
    flat, v_start = qkvr.reshape(-1), q_size + kv_size
    return flat[:q_size], flat[q_size:v_start], flat[v_start : v_start + kv_size]


def launch_by_row(kernel: str, rows: int, C: int, HS: int, args: tuple) -> None:
    """Launches a permutation: a grid row for each position, threads over its C channels, 16 bytes each if HS allows."""
    width = cu.width if HS % cu.width == 0 else 1
    # On an H200 all of attention took 2% longer with 64, and 7% with 32.
    block = cu.threads(128, ceil_div(C, width))
    cu.launch(kernel, (rows, ceil_div(C, width * block)), (block,), (*args, width))


def launch_by_att_row(kernel: str, rows: int, args: tuple) -> None:
    """Launches a kernel in which a warp takes a row of the (T, T) matrices."""
    warps = 8
    cu.launch(kernel, (ceil_div(rows, warps),), (cu.warp_size, warps), args)


for relu, kind in (False, "softmax"), (True, "relu"):
    call = {"given": lambda size, a, relu=relu: {"kept": Matrices(a.qkvr, a.att, relu)},
            "variant": "relu" * relu, "hard": "T=37", "needs": "NH % NKV == 0"}
    sizes, arrays = "B=1 T=32 NH=4 NKV=4 HS=32", "out: B,T,NH*HS; qkvr qkv: B,T,NH+2*NKV,HS; att: B,NH,T,T"
    # Of a causal matrix half is read, and all is written, zeros and all.
    describe(attention_forward, sizes, arrays, **call, moved={f"{kind}_forward": lambda a: 1.5 * a.att.nbytes})
    describe(attention_backward, sizes, f"dqkv: B,T,NH+2*NKV,HS; dout: B,T,NH*HS; {arrays}", **call,
             moved={f"{kind}_backward": lambda a: 2 * a.att.nbytes})

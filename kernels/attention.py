"""Causal attention by whole (T, T) matrices, softmax or ReLU: the launchers of attention.cu around batched products."""

import math

import device
from device import ceil_div

import numpy as np

cu = device.source(__file__)


def attention_forward(
    out, qkvr, att, out_r, qkv, B: int, T: int, NH: int, NKV: int, HS: int, relu: bool = False
) -> None:
    """out (B,T,NH,HS) = causal attention of qkv (B,T,NH+2*NKV,HS): each position's NH queries, NKV keys and NKV values,
    of HS channels. Query head h uses key and value head h // (NH / NKV); NKV divides NH.

    Sets qkvr, which is q (B,NH,T,HS), then k and v (B,NKV,T,HS), and att (B,NH,T,T). Backward needs both. out_r
    (B,NH,T,HS) is scratch for att v, which is out before its axes are permuted. It may have the memory of qkv.
    """
    G, C = NH // NKV, NH * HS
    launch_by_row("permute_kernel", B * T, C, HS, (qkvr, qkv, B, T, NH, NKV, HS))
    q, k, v = split(qkvr, B * T * C, B * T * NKV * HS)
    # The G query heads of a group are neighbours: a product takes them for one head with G * T queries.
    device.gemm_strided_batched(att, q, k, G * T, T, HS, B * NKV, trans_b=True, causal="c")
    forward = "relu_forward_kernel" if relu else "softmax_forward_kernel"
    launch_by_att_row(forward, B * NH * T, (att, np.float32(1.0 / math.sqrt(HS)), B * NH * T, T))
    device.gemm_strided_batched(out_r, att, v, G * T, HS, T, B * NKV, causal="a")
    launch_by_row("unpermute_kernel", B * T, C, HS, (out, out_r, T, NH, HS))


def attention_backward(
    dqkv, dqkvr, datt, dout_r, dout, qkvr, att, B: int, T: int, NH: int, NKV: int, HS: int, relu: bool = False
) -> None:
    """Sets dqkv (B,T,NH+2*NKV,HS) from dout (B,T,NH,HS), and from forward's qkvr and att.

    Scratch: dqkvr, laid out as qkvr; datt (B,NH,T,T); and dout_r (B,NH,T,HS), for dout permuted.
    """
    G, C = NH // NKV, NH * HS
    q, k, v = split(qkvr, B * T * C, B * T * NKV * HS)
    dq, dk, dv = split(dqkvr, B * T * C, B * T * NKV * HS)
    launch_by_row("unpermute_backward_kernel", B * T, C, HS, (dout_r, dout, T, NH, HS))
    device.gemm_strided_batched(datt, dout_r, v, G * T, T, HS, B * NKV, trans_b=True, causal="c")
    # Adds up the heads of a group.
    device.gemm_strided_batched(dv, att, dout_r, T, HS, G * T, B * NKV, trans_a=True, causal="a")
    backward = "relu_backward_kernel" if relu else "softmax_backward_kernel"
    launch_by_att_row(backward, B * NH * T, (datt, att, np.float32(1.0 / math.sqrt(HS)), B * NH * T, T))
    device.gemm_strided_batched(dq, datt, k, G * T, HS, T, B * NKV, causal="a")
    device.gemm_strided_batched(dk, datt, q, T, HS, G * T, B * NKV, trans_a=True, causal="a")
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

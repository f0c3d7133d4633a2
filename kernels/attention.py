"""Causal attention by whole (T, T) matrices, softmax or ReLU: the launchers of attention.cu around batched products."""

import math

import numpy as np

from llmc import device
from llmc.device import ceil_div

cu = device.source(__file__)


def attention_forward(out, qkvr, att, scratch, qkv, B: int, T: int, C: int, NH: int, relu: bool = False) -> None:
    """out (B,T,C) = causal attention of qkv (B,T,3C), which holds each position's q, k and v, all heads.

    qkvr (3,B,NH,T,HS) and att (B,NH,T,T) are set and kept for backward; scratch holds (B,T,C) floats.
    """
    HS = C // NH
    launch_by_row(cu.permute_kernel, B * T, C, HS, (qkvr, qkv, B, T, NH, HS))
    q, k, v = split(qkvr, B * T * C)
    device.sgemm_strided_batched(att, q, k, T, T, HS, B * NH, trans_b=True)
    forward = cu.relu_forward_kernel if relu else cu.softmax_forward_kernel
    launch_by_att_row(forward, B * NH * T, (att, np.float32(1.0 / math.sqrt(HS)), B * NH * T, T))
    device.sgemm_strided_batched(scratch, att, v, T, HS, T, B * NH)
    launch_by_row(cu.unpermute_kernel, B * T, C, HS, (out, scratch, T, NH, HS))


def attention_backward(
    dqkv, dqkvr, datt, scratch, dout, qkvr, att, B: int, T: int, C: int, NH: int, relu: bool = False
) -> None:
    """dqkv (B,T,3C) is set from dout (B,T,C) and what forward kept.

    dqkvr (3,B,NH,T,HS), datt (B,NH,T,T) and scratch (B,T,C) are scratch.
    """
    HS = C // NH
    q, k, v = split(qkvr, B * T * C)
    dq, dk, dv = split(dqkvr, B * T * C)
    launch_by_row(cu.unpermute_backward_kernel, B * T, C, HS, (scratch, dout, T, NH, HS))
    device.sgemm_strided_batched(datt, scratch, v, T, T, HS, B * NH, trans_b=True)
    device.sgemm_strided_batched(dv, att, scratch, T, HS, T, B * NH, trans_a=True)
    backward = cu.relu_backward_kernel if relu else cu.softmax_backward_kernel
    launch_by_att_row(backward, B * NH * T, (datt, att, np.float32(1.0 / math.sqrt(HS)), B * NH * T, T))
    device.sgemm_strided_batched(dq, datt, k, T, HS, T, B * NH)
    device.sgemm_strided_batched(dk, datt, q, T, HS, T, B * NH, trans_a=True)
    launch_by_row(cu.permute_backward_kernel, B * T, C, HS, (dqkv, dqkvr, B, T, NH, HS))


def split(qkvr, n: int) -> list:
    """q, k and v: three views of n floats each."""
    flat = qkvr.reshape(-1)
    return [flat[i * n : (i + 1) * n] for i in range(3)]


def launch_by_row(kernel, rows: int, C: int, HS: int, args: tuple) -> None:
    """Launch a permutation: a grid row for each position, threads over its C channels, 16 bytes each if HS allows."""
    block, width = 64, 4 if HS % 4 == 0 else 1
    kernel((rows, ceil_div(C, width * block)), (block,), (*args, width))


def launch_by_att_row(kernel, rows: int, args: tuple) -> None:
    """Launch a kernel in which a warp takes a row of the (T, T) matrices."""
    warps = 8
    kernel((ceil_div(rows, warps),), (device.warp_size(), warps), args)

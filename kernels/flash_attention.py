"""Causal attention without (T, T) matrices, in TF32 or bf16: the launchers of flash_attention.cu."""

import device
from device import ceil_div
from device.errors import UserError

cu = device.source(__file__)

HEAD_SIZES = (64, 128)
THREADS = 128
ROWS = {64: 128, 128: 64}  # of a block, as flash_attention.cu has it, by the size of heads; forward in bf16 has 128


def flash_attention_forward(out, lse, qkv, B: int, T: int, NH: int, NKV: int, HS: int) -> None:
    """out (B,T,NH,HS) = causal attention of qkv (B,T,NH+2*NKV,HS): each position's NH queries, NKV keys and NKV values,
    of HS channels. Query head h uses key and value head h // (NH / NKV); NKV divides NH.

    lse (B,NH,T) is set too, for backward: log(sum(exp(q . k / sqrt(HS)))) over the keys a query sees.
    Raises UserError for heads of another size than HEAD_SIZES, and on a GPU without TF32 (before
    compute capability 8.0).
    """
    forward, _, _ = kernels(HS)
    rows, operands = (128, 1) if device.floatX == device.BF16 else (ROWS[HS], 0)
    launch(forward, rows, operands, B, T, NH, HS, (out, lse, qkv, T, NH, NKV))


def flash_attention_backward(
    dqkv, dkv_heads, dsum, dout, out, lse, qkv, B: int, T: int, NH: int, NKV: int, HS: int
) -> None:
    """dqkv (B,T,NH+2*NKV,HS) is set to the gradient of qkv, from dout (B,T,NH,HS) and what forward wrote: out
    (B,T,NH,HS) and lse (B,NH,T). Those must be of this qkv: a NaN in it is found by what forward made of it.

    dsum (B,NH,T) is scratch: it is set to the sums of dout * out over each head's channels. dkv_heads (B,T,2,NH,HS) is
    scratch for each query head's share of the gradients of its key and value head; where NKV = NH the share is the
    whole, and dkv_heads, which may be None, is not used.
    """
    _, backward_query, backward_key = kernels(HS)
    operands = 3 if device.floatX == device.BF16 else 1
    launch(backward_query, ROWS[HS], operands, B, T, NH, HS, (dqkv, dsum, dout, out, lse, qkv, T, NH, NKV))
    launch(backward_key, ROWS[HS], 2, B, T, NH, HS, (dqkv, dkv_heads, dsum, dout, lse, qkv, T, NH, NKV))
    if NKV < NH:
        heads = B * T * 2 * NKV
        block = HS // cu.width, cu.width * THREADS // HS
        group_sum = cu.flash_attention_group_sum_kernel
        group_sum((ceil_div(heads, block[1]),), block, (dqkv, dkv_heads, heads, NH, NKV, HS))


def launch(kernel, rows: int, operands: int, B: int, T: int, NH: int, HS: int, arguments: tuple) -> None:
    """A block for each head of each sequence and each tile of so many queries or keys. operands: of how many arrays it
    has its rows in shared memory that it does not declare itself."""
    shared = operands * rows * HS * device.floatX.itemsize
    kernel((B * NH, ceil_div(T, rows)), (THREADS,), arguments, shared_mem=shared)


def kernels(HS: int) -> tuple:
    """The kernels for heads of HS channels: forward, backward by queries, backward by keys."""
    if HS not in HEAD_SIZES:
        raise UserError(f"flash attention takes heads of 64 or 128 channels, not {HS}: use -a softmax")
    if device.kind == "cuda" and device.compute_capability < 80:
        raise UserError("flash attention needs TF32, a GPU of compute capability 8.0 or later: use -a softmax")
    if HS == 64:
        return (
            cu.flash_attention_forward_kernel_64,
            cu.flash_attention_backward_query_kernel_64,
            cu.flash_attention_backward_key_kernel_64,
        )
    return (
        cu.flash_attention_forward_kernel_128,
        cu.flash_attention_backward_query_kernel_128,
        cu.flash_attention_backward_key_kernel_128,
    )

"""Causal attention without (T, T) matrices, in TF32: the launchers of flash_attention.cu."""

from llmc import device
from llmc.device import ceil_div
from llmc.errors import UserError

cu = device.source(__file__)

HEAD_SIZES = (64, 128)
THREADS = 128
TILE_FLOATS = 2048  # as in flash_attention.cu: a warp has TILE_FLOATS / HS queries or keys
OPERAND_BYTES = 4 * 2 * 4 * TILE_FLOATS  # two arrays of them, for four warps, in shared memory


def supported(C: int, NH: int) -> bool:
    """Whether there are kernels for heads of C / NH channels."""
    return C % NH == 0 and C // NH in HEAD_SIZES


def flash_attention_forward(out, lse, qkv, B: int, T: int, C: int, NH: int) -> None:
    """out (B,T,C) = causal attention of qkv (B,T,3C), which holds each position's q, k and v, all heads.

    lse (B,NH,T) is set too, for backward: log(sum(exp(q . k / sqrt(HS)))) over the keys a query sees.
    Raises UserError for heads of another size than 64 or 128 channels, and on a GPU without TF32 (before
    compute capability 8.0).
    """
    forward, _, _ = kernels(C, NH)
    forward(grid(B, T, C, NH), (THREADS,), (out, lse, qkv, T, NH))


def flash_attention_backward(dqkv, dsum, dout, out, lse, qkv, B: int, T: int, C: int, NH: int) -> None:
    """dqkv (B,T,3C) is set to the gradient of qkv, from dout (B,T,C) and what forward wrote: out (B,T,C), lse (B,NH,T).

    dsum (B,NH,T) is scratch: it is set to the sums of dout * out over each head's channels.
    """
    _, backward_query, backward_key = kernels(C, NH)
    size, block = grid(B, T, C, NH), (THREADS,)
    backward_query(size, block, (dqkv, dsum, dout, out, lse, qkv, T, NH), shared_mem=OPERAND_BYTES)
    backward_key(size, block, (dqkv, dsum, dout, lse, qkv, T, NH), shared_mem=OPERAND_BYTES)


def grid(B: int, T: int, C: int, NH: int) -> tuple[int, int]:
    """A block for each head of each sequence and each tile of queries or keys."""
    rows = THREADS // 32 * TILE_FLOATS // (C // NH)
    return B * NH, ceil_div(T, rows)


def kernels(C: int, NH: int) -> tuple:
    """The kernels for heads of C / NH channels: forward, backward by queries, backward by keys."""
    if not supported(C, NH):
        raise UserError(f"flash attention takes heads of 64 or 128 channels, not {C} / {NH}: use -a softmax")
    if device.kind() == "cuda" and device.compute_capability() < 80:
        raise UserError("flash attention needs TF32, a GPU of compute capability 8.0 or later: use -a softmax")
    if C // NH == 64:
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

"""Causal self-attention as a layer of a model: its kinds, the tensors that each needs, and the choice among them.

softmax and relu make (T, T) matrices (attention.py). flash is softmax without them, in TF32 or bf16
(flash_attention.py). With every kind, a model that writes text keeps keys and values in a cache
(cached_attention.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import device
from device.errors import UserError
from kernels.attention import attention_backward, attention_forward
from kernels.cached_attention import cached_attention_forward
from kernels.flash_attention import HEAD_SIZES, flash_attention_backward, flash_attention_forward

if TYPE_CHECKING:
    from llmc.model import Model

# These rows follow those of a model's own ACTIVATIONS and ACTIVATION_GRADIENTS. The model's own table has `atty`
# (L,B,T,Q), the heads' outputs side by side. Q = NH HS. This is C if the heads divide the channels among them. A model
# that recomputes qkv for backward has a row for it, too: (B,T,QKV).

FLASH_ACTIVATIONS = (
    ("qkv",         ("L", "B", "T", "QKV")),         # each position's queries, keys and values
    ("lse",         ("L", "B", "NH", "T"), "fp32"),  # log of the softmax's denominator
)  # fmt: skip

FLASH_GRADIENTS = (
    ("dsum",        ("B", "NH", "T"), "fp32"),       # of datty * atty over a head's channels
    ("dkv_heads",   ("B", "T", "2Q"), "fp32"),       # each query head's share of dk and dv, if heads share keys
)  # fmt: skip

MATRIX_ACTIVATIONS = (
    ("qkvr",        ("L", "QKV", "B", "T")),         # q (B, NH, T, HS), then k and v (B, NKV, T, HS)
    ("att",         ("L", "B", "NH", "T", "T")),
    ("qkv",         ("B", "T", "QKV")),              # scratch: q, k, v before they are permuted
    ("atty_r",      ("B", "NH", "T", "HS"), "qkv"),  # forward: the heads' outputs, one head after another
    ("datty_r",     ("B", "NH", "T", "HS"), "qkv"),  # backward: their gradients
)  # fmt: skip

MATRIX_GRADIENTS = (
    ("dqkvr",       ("QKV", "B", "T")),
    ("datt",        ("B", "NH", "T", "T")),
)  # fmt: skip

# When a model writes text, these rows come before its ACTIVATIONS (Model.acts). `context` is the T of the model, so the
# cache keeps its place for any T of a batch. S is the number of splits of a single query's keys, or 0.
CACHE = (
    ("keys",        ("layers", "B", "NKV", "context", "HS")),
    ("values",      ("layers", "B", "NKV", "context", "HS")),
)  # fmt: skip

# And these rows come behind them.
CACHED_ACTIVATIONS = (
    ("qkv",         ("B", "T", "QKV")),
    ("parts",       ("B", "T", "NH", "S", "HS"), "fp32"),  # sums over the keys of a split
    ("stats",       ("B", "T", "NH", "2S"), "fp32"),       # and their largest scores and sums of exponentials
    ("last",        ("B", "C")),                           # of each sequence, the row whose logits we need
)  # fmt: skip


def choose_attention(kind: str, HS: int) -> str:
    """The attention that -a `kind` means for a model with heads of HS channels. "auto" is flash attention if it has
    kernels for such heads, and products are in TF32 or bf16 on a GPU; else softmax. Raises UserError for a kind that
    cannot run."""
    if kind == "flash" and HS not in HEAD_SIZES:
        raise UserError(f"-a flash takes heads of 64 or 128 channels, this model's have {HS}: use -a softmax")
    if kind == "flash" and device.kind == "cuda" and device.precision == "fp32":
        raise UserError(
            "-a flash computes in TF32 or bf16: it needs a GPU of compute capability 8.0 or later, and no --precision "
            "fp32; use -a softmax"
        )
    if kind == "auto":
        return "flash" if HS in HEAD_SIZES and device.kind == "cuda" and device.precision != "fp32" else "softmax"
    return kind


TABLES = {
    "softmax": (MATRIX_ACTIVATIONS, MATRIX_GRADIENTS),
    "relu": (MATRIX_ACTIVATIONS, MATRIX_GRADIENTS),
    "flash": (FLASH_ACTIVATIONS, FLASH_GRADIENTS),
}  # of activations and of their gradients


def attention_input(model: Model, l: int, B: int, T: int):
    """The array (B,T,QKV) from which layer l's attention takes its queries, keys and values. If the table has one for
    each layer, they stay for backward; else they are scratch."""
    acts = model.acts(B, T)
    return getattr(acts.layer[l], "qkv", acts.qkv)


def causal_attention_forward(model: Model, l: int, B: int, T: int) -> None:
    """Sets layer l's atty (B,T,Q) to the attention of its attention_input, and also what backward needs. When the model
    writes text, queries also see the keys and values in the layer's cache, and the new ones are added to it."""
    acts, NH, NKV, HS = model.acts(B, T), model.config.num_heads, model.config.kv_heads, model.config.head_size
    a, qkv = acts.layer[l], attention_input(model, l, B, T)
    if model.positions is not None:
        splits = acts.parts.shape[3] or 1
        cached_attention_forward(
            a.atty, acts.parts, acts.stats, acts.keys[l], acts.values[l], qkv, model.positions, B, T, model.T, NH, NKV,
            HS, model.attention == "relu", splits,
        )  # fmt: skip
    elif model.attention == "flash":
        flash_attention_forward(a.atty, a.lse, qkv, B, T, NH, NKV, HS)
    else:
        attention_forward(a.atty, a.qkvr, a.att, acts.atty_r, qkv, B, T, NH, NKV, HS, model.attention == "relu")


def causal_attention_backward(dqkv, datty, model: Model, l: int, B: int, T: int) -> None:
    """Sets dqkv (B,T,QKV) to the gradient of layer l's attention_input, from datty (B,T,Q), the gradient of its
    atty."""
    acts, gacts, config = model.acts(B, T), model.grads_acts, model.config
    a, NH, NKV, HS = acts.layer[l], config.num_heads, config.kv_heads, config.head_size
    if model.attention == "flash":
        flash_attention_backward(
            dqkv, gacts.dkv_heads, gacts.dsum, datty, a.atty, a.lse, attention_input(model, l, B, T), B, T, NH, NKV, HS
        )
    else:
        attention_backward(
            dqkv, gacts.dqkvr, gacts.datt, acts.datty_r, datty, a.qkvr, a.att, B, T, NH, NKV, HS,
            model.attention == "relu",
        )  # fmt: skip

"""The memory of a model's activations, and views into it that a pass takes: in training, and when writing text.

The views decide what stays. In training each layer keeps its own activations for backward; or, with --recompute, only
the residual in front of it, and all layers share the memory of one. When a model writes text, they share it, too, and
only keys and values stay.
"""

from __future__ import annotations

from types import SimpleNamespace

import device
from device.errors import UserError
from kernels.attention import Matrices, scratch_of_attention
from kernels.cached_attention import Cached, scratch_of_cache
from kernels.flash_attention import HEAD_SIZES, Flash
from kernels.matmul import weight_is_transposed, worth_transposing
from kernels.mlp_hopper import has_wgmma, rows_of_partials
from kernels.reduce import MAX_PARTIALS, SQUARES
from llmc.model import fp8, fp16
from llmc.model.batch import Batch
from llmc.model.model import Model
from llmc.model.tensors import ALIGNMENT, Config, Table, layout, name_tensors, shape_of, without

import numpy as np

# The rows of attention, by its kind. They follow those of a model's own ACTIVATIONS, which have `atty` (L,B,T,Q), the
# heads' outputs side by side. Q = NH HS, which is C if the heads divide the channels among them. A model that
# recomputes qkv for backward has a row for it, too: (B,T,QKV).

FLASH_ATTENTION = (
    ("qkv",         ("L", "B", "T", "QKV")),         # each position's queries, keys and values
    ("lse",         ("L", "B", "NH", "T"), "fp32"),  # log of the softmax's denominator
)  # fmt: skip

MATRIX_ATTENTION = (
    ("qkvr",        ("L", "QKV", "B", "T")),         # q (B, NH, T, HS), then k and v (B, NKV, T, HS)
    ("att",         ("L", "B", "NH", "T", "T")),
    ("qkv",         ("B", "T", "QKV")),              # q, k, v before they are permuted
)  # fmt: skip

CACHE = (
    ("keys",        ("layers", "B", "NKV", "context", "HS")),
    ("values",      ("layers", "B", "NKV", "context", "HS")),
)  # fmt: skip

# And behind a model's own rows, when it writes text.
LAST_ROWS = (
    ("qkv",         ("B", "T", "QKV")),
    ("last",        ("B", "C")),                     # of each sequence, the row whose logits are needed
)  # fmt: skip

KINDS = {"softmax": MATRIX_ATTENTION, "relu": MATRIX_ATTENTION, "flash": FLASH_ATTENTION}


def choose_attention(kind: str, HS: int) -> str:
    """The attention that -a `kind` means for a model with heads of HS channels. "auto" is flash attention if it has
    kernels for such heads, and products are in TF32 or bf16 on a GPU; else softmax. Raises UserError for a kind that
    cannot run."""
    if kind == "flash" and HS not in HEAD_SIZES:
        raise UserError(f"-a flash takes heads of 64 or 128 channels, this model's have {HS}: use -a softmax")
    lacks_flash = device.kind == "cuda" and (device.precision == "fp32" or device.has_fp16_alone())
    if kind == "flash" and lacks_flash:
        raise UserError(
            "-a flash computes in TF32 or bf16: it needs a GPU of compute capability 8.0 or later, and no --precision "
            "fp32; use -a softmax"
        )
    if kind == "auto":
        return "flash" if HS in HEAD_SIZES and device.kind == "cuda" and not lacks_flash else "softmax"
    return kind


class Activations:
    """The memory of a model that trains on batches of up to (B, T).

    memory, grads_memory   activations, and their gradients: bytes
    logit_rows             the number of positions whose logits exist at a time (`--logit-rows`)
    recompute              whether backward runs the forward pass of each layer again (`--recompute`)
    """

    def __init__(
        self, model: Model, B: int, T: int, attention: str, logit_rows: int = 0, recompute: bool = False
    ) -> None:  # fmt: skip
        self.model, self.B, self.T, self.attention = model, B, T, attention
        self.logit_rows, self.recompute = min(logit_rows or B * T, B * T), recompute
        sizes = training_bytes(type(model), model.config, B, T, attention, logit_rows, recompute)
        self.memory, self.grads_memory = (device.empty((size,), np.uint8) for size in sizes)
        device.reserve(training_scratch(type(model), model.config, B, T, attention, self.logit_rows))

    def views(self, b: int | None = None, t: int | None = None) -> SimpleNamespace:
        """The tensors for a batch of (b, t), at most (B, T), as a pass takes them: by the names of the tables, as
        group_norms and `group_activations` group them, and in each layer `attention`, what its attention keeps.
        recompute_layer is what backward calls before it goes back through a layer."""
        model, config, relu = self.model, self.model.config, self.attention == "relu"
        sizes = batch_sizes(config, b or self.B, t or self.T, self.logit_rows, self.recompute)
        tables = training_tables(type(model), self.attention)
        activations, gradients = fp8.out_of_place(tables, type(model), config, sizes["B"] * sizes["T"])
        acts = named(self.memory, activations, config, sizes)
        grads = named(self.grads_memory, gradients, config, sizes)
        vars(acts).update(vars(grads) | {"layer": acts.layer})
        acts.recompute_layer = type(model).layer_recompute if self.recompute else kept
        for a, g in zip(acts.layer, grads.layer, strict=True):
            vars(a).update(vars(g))
            a.attention = Flash(a.lse) if self.attention == "flash" else Matrices(a.qkvr, a.att, relu)
        fp8.quantize_views(acts, model, sizes["B"] * sizes["T"])
        group_norms(acts)
        model.group_activations(acts, config)
        return acts


def group_norms(acts: SimpleNamespace) -> None:
    """Makes acts.ln a list: ln[l] is the output of the norm of residual[l], which layer l reads, and ln[L] that of the
    last norm."""
    acts.ln = [*(a.ln for a in acts.layer), acts.ln]


def kept(model: Model, acts: SimpleNamespace, batch: Batch, l: int) -> None:
    """Recomputes nothing: each layer's activations are still there."""


class Cache:
    """Room for B texts of up to `context` tokens: keys and values of all their positions, and what one forward pass
    makes. attention: "relu", or anything else for softmax. memory: bytes on the device, if they have been allocated.

    The tokens of the next pass begin at positions (B,) of each text, int32 on the device. last (B,), int32, says of
    which rows of a prompt's (B T,) we need the logits. token: the views for a single token of each text.
    """

    def __init__(self, model: Model, B: int, context: int, attention: str, memory=None):
        self.model, self.B, self.context, self.attention = model, B, context, attention
        size = cache_bytes(type(model), model.config, B, context)
        self.memory = device.empty((size,), np.uint8) if memory is None else memory
        self.positions, self.last = device.zeros((B,), np.int32), device.zeros((B,), np.int32)
        device.reserve(cache_scratch(model.config, B, context))
        self.token = self.views(1)

    def views(self, T: int) -> tuple[SimpleNamespace, Batch]:
        """Activations and batch of a pass over the next T tokens of each text."""
        model, config = self.model, self.model.config
        acts = named(self.memory, cache_table(type(model)), config, cache_sizes(config, self.B, T, self.context))
        for a, keys, values in zip(acts.layer, acts.keys, acts.values, strict=True):
            a.attention = Cached(keys, values, self.positions, self.attention == "relu")
        group_norms(acts)
        model.group_activations(acts, config)
        return acts, Batch(self.B, T, positions=self.positions)


def named(memory, table: Table, config: Config, sizes: dict[str, int]) -> SimpleNamespace:
    return name_tensors(memory, table, sizes, ALIGNMENT, config.absent, device.floatX)


def batch_sizes(config: Config, B: int, T: int, logit_rows: int, recompute: bool = False) -> dict[str, int]:
    """What all symbols of the tables stand for, for a batch of (B, T). chunk: the rows of the logits. recompute: all
    layers share the memory of one."""
    sizes = config.sizes() | {"B": B, "T": T, "chunk": min(B * T, logit_rows or B * T)}
    return sizes | ({"L": 1} if recompute else {})


def cache_sizes(config: Config, B: int, T: int, context: int) -> dict[str, int]:
    """The same for a pass over the next T tokens of each of B texts, with room for one layer and one residual."""
    return batch_sizes(config, B, T, B) | {"L": 1, "L+1": 1, "context": context}


def training_tables(kind: type[Model], attention: str) -> tuple[Table, Table]:
    """The tables of activations and of their gradients. A row that the model has, too, is the model's."""
    own = frozenset(name for name, *_ in kind.ACTIVATIONS)
    return kind.ACTIVATIONS + without(KINDS[attention], own), kind.GRADIENTS


def cache_table(kind: type[Model]) -> Table:
    """The table of a model that writes text: the cache keeps its place for a batch of any T."""
    own = frozenset(name for name, *_ in kind.ACTIVATIONS)
    return CACHE + kind.ACTIVATIONS + without(LAST_ROWS, own)


def training_bytes(
    kind: type[Model], config: Config, B: int, T: int, attention: str, logit_rows: int = 0, recompute: bool = False
) -> tuple[int, int]:
    """The bytes of activations, and of their gradients. The first also suffice for a Cache of one text, for samples."""
    sizes = batch_sizes(config, B, T, logit_rows, recompute)
    tables = fp8.out_of_place(training_tables(kind, attention), kind, config, B * T)
    activations, gradients = (table_bytes(table, config, sizes) for table in tables)
    return max(activations, cache_bytes(kind, config, 1, T)), gradients


def table_bytes(table: Table, config: Config, sizes: dict[str, int]) -> int:
    return layout(table, sizes, ALIGNMENT, config.absent, device.floatX)[1]


def cache_bytes(kind: type[Model], config: Config, B: int, context: int) -> int:
    """The bytes of a Cache: the larger of what a pass over a whole prompt needs, and one over a single token."""
    return max(table_bytes(cache_table(kind), config, cache_sizes(config, B, T, context)) for T in (context, 1))


def training_scratch(
    kind: type[Model], config: Config, B: int, T: int, attention: str, logit_rows: int = 0
) -> dict[str, int]:  # fmt: skip
    """The scratch that launchers take for themselves in a training step (device.scratch): purpose, bytes."""
    sizes, X = config.sizes(), device.floatX.itemsize
    shapes = [shape_of(symbols, sizes) for _, symbols in config.parameters() if symbols[0] == "L"]
    matrices = [shape[1:] for shape in shapes if len(shape) == 3]
    transposed = [OC * C for OC, C in matrices if weight_is_transposed(B * T, C, OC)]
    # A norm's kernel sums up to six columns of C, qk_norm's two of HS, and a bias' gradient one as long as the bias.
    longest = max(shape[1] for shape in shapes if len(shape) == 2)
    widest = max(2 * config.head_size, longest)
    found = {
        "norm partials": 4 * MAX_PARTIALS * 6 * config.channels,
        "partials": 4 * max(MAX_PARTIALS * widest, has_wgmma() * rows_of_partials(B * T) * longest, SQUARES),
        "input_T": X * B * T * max(config.channels, sizes["Q"]) if worth_transposing(B * T) else 0,
        "weight_T": X * max(transposed, default=0),
    }
    found |= fp8.training_scratch(kind, config, B * T) | fp16.training_scratch(config, B, T, attention, logit_rows)
    return found | scratch_of_attention(attention, B, T, config.num_heads, config.kv_heads, config.head_size)


def cache_scratch(config: Config, B: int, context: int) -> dict[str, int]:
    """The same for a Cache."""
    of_attention = scratch_of_cache(B, context, config.num_heads, config.kv_heads, config.head_size)
    return of_attention | fp16.cache_scratch(config, B, context)

"""No kernel hides a number that is not finite: where PyTorch's result holds one, so does ours.

One element of one input at a time becomes a NaN, as arithmetic makes them on a GPU (0x7fffffff) and on a CPU, or an
infinity. The definitions are written out in PyTorch, so that each input of a launcher can be spoiled by itself.
"""

import math
from types import SimpleNamespace

from kernels.adamw import adamw
from kernels.attention import attention_backward, attention_forward
from kernels.cached_attention import cached_attention_forward
from kernels.classifier import fused_classifier
from kernels.encoder import encoder_backward, encoder_forward
from kernels.flash_attention import flash_attention_backward, flash_attention_forward
from kernels.gelu import gelu_backward, gelu_forward
from kernels.layernorm import fused_residual_forward, layernorm_backward, layernorm_forward, layernorm_transposed
from kernels.matmul import matmul_backward_bias, matmul_backward_inp, matmul_backward_weight, matmul_forward, transpose
from kernels.parallel_residual import norm_transposed, parallel_residual_backward, parallel_residual_forward
from kernels.qk_norm import qk_norm_backward, qk_norm_forward
from kernels.reduce import MOST_PARTIALS, global_norm
from kernels.rmsnorm import fused_residual_rmsnorm_forward, rmsnorm_backward, rmsnorm_forward, rmsnorm_transposed
from kernels.rope import rope_backward, rope_forward, rope_table
from kernels.swiglu import swiglu_backward, swiglu_forward
from llmc.dataloader import sort_by_token
from oracle import attention, normal, to_numpy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

PATTERNS = {
    "nan of a GPU": 0x7FFFFFFF, "quiet nan": 0x7FC00000, "negative nan": 0xFFFFFFFF, "inf": 0x7F800000,
    "-inf": 0xFF800000,
}  # fmt: skip

B, T, C, OC, NH, V, VP = 2, 9, 24, 20, 3, 11, 16
N, HS = B * T, C // NH
EPS = 1e-5
TOKENS = np.arange(N, dtype=np.int32).reshape(B, T) % V
WORDS = torch.from_numpy(TOKENS).long()


def normalise(x, eps=EPS, centred=True):
    mean = x.mean(-1, keepdim=True) if centred else 0.0
    return (x - mean) * ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()


def norm_gradients(dinp, dout, inp, weight, mean, rstd):
    """dinp, dweight and dshift of a norm, whose mean may be 0 and left out of the means (RMSNorm)."""
    n, g = (inp - (0 if mean is None else mean[..., None])) * rstd[..., None], dout * weight
    dx = g - n * (g * n).mean(-1, keepdim=True) - (0 if mean is None else g.mean(-1, keepdim=True))
    return dinp + rstd[..., None] * dx, (dout * n).sum((0, 1)), dout.sum((0, 1))


def through(function, inputs: list, dout):
    """What autograd makes of dout at the inputs of a function."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, dout)


# Launchers by name: the shapes of the inputs that are spoiled; ours, a function of a maker of outputs (`new`) and the
# inputs on the device, that returns what it wrote; and the definition, of tensors. What a launcher adds to is an input.
CASES: dict[str, SimpleNamespace] = {}


def case(shapes: dict[str, tuple], definition, variant: object = ""):
    """Adds the function that follows, which is named after its launcher."""

    def add(launch):
        name = f"{launch.__name__.removeprefix('ours_')} {variant}".strip()
        CASES[name] = SimpleNamespace(shapes=shapes, launch=launch, definition=definition)
        return launch

    return add


ROWS, VECTOR, STATS = (B, T, C), (C,), (B, T)


@case({"wte": (V, C), "wpe": (T, C)}, lambda i: [i.wte[WORDS] + i.wpe])
def ours_encoder_forward(new, i):
    out = new(ROWS)
    encoder_forward(out, new(TOKENS), i.wte, i.wpe, B, T, C)
    return [out]


@case(
    {"dwte": (V, C), "dwpe": (T, C), "dout": ROWS},
    lambda i: [i.dwte.index_add(0, WORDS.view(-1), i.dout.view(N, C)), i.dwpe + i.dout.sum(0)],
)
def ours_encoder_backward(new, i):
    order, count = sort_by_token(TOKENS)
    encoder_backward(i.dwte, i.dwpe, i.dout, new(TOKENS), new(order), new(count), B, T, C)
    return [i.dwte, i.dwpe]


@case({"inp": ROWS, "weight": VECTOR, "bias": VECTOR}, lambda i: [normalise(i.inp) * i.weight + i.bias])
def ours_layernorm_forward(new, i):
    out = new(ROWS)
    layernorm_forward(out, new(STATS), new(STATS), i.inp, i.weight, i.bias, B, T, C)
    return [out]


@case(
    {"inp1": ROWS, "inp2": ROWS, "bias2": VECTOR, "weight": VECTOR, "bias": VECTOR},
    lambda i: [i.inp1 + i.inp2 + i.bias2, normalise(i.inp1 + i.inp2 + i.bias2) * i.weight + i.bias],
)
def ours_fused_residual_forward(new, i):
    residual, out = new(ROWS), new(ROWS)
    fused_residual_forward(
        residual, out, new(STATS), new(STATS), i.inp1, i.inp2, i.weight, i.bias, B, T, C, bias2=i.bias2
    )
    return [residual, out]


@case(
    {"dinp": ROWS, "dout": ROWS, "inp": ROWS, "weight": VECTOR, "mean": STATS, "rstd": STATS},
    lambda i: norm_gradients(i.dinp, i.dout, i.inp, i.weight, i.mean, i.rstd),
)
def ours_layernorm_backward(new, i):
    dweight, dbias, dbias2 = new(np.zeros(C)), new(np.zeros(C)), new(np.zeros(C))
    layernorm_backward(
        i.dinp, dweight, dbias, i.dout, i.inp, i.weight, i.mean, i.rstd, B, T, C,
        scratch=new((MOST_PARTIALS, 3 * C)), dbias2=dbias2,
    )  # fmt: skip
    return [i.dinp, dweight, dbias]


@case(
    {"inp": ROWS, "weight": VECTOR, "bias": VECTOR, "mean": STATS, "rstd": STATS},
    lambda i: [(i.inp - i.mean[..., None]) * i.rstd[..., None] * i.weight + i.bias],
)
def ours_layernorm_transposed(new, i):
    out_T = new((C, N))
    layernorm_transposed(out_T, i.inp, i.weight, i.bias, i.mean, i.rstd, B, T, C)
    return [out_T]


@case({"inp": ROWS, "weight": VECTOR}, lambda i: [normalise(i.inp, centred=False) * i.weight])
def ours_rmsnorm_forward(new, i):
    out = new(ROWS)
    rmsnorm_forward(out, new(STATS), i.inp, i.weight, EPS, B, T, C)
    return [out]


@case(
    {"inp1": ROWS, "inp2": ROWS, "weight": VECTOR},
    lambda i: [i.inp1 + i.inp2, normalise(i.inp1 + i.inp2, centred=False) * i.weight],
)
def ours_fused_residual_rmsnorm_forward(new, i):
    residual, out = new(ROWS), new(ROWS)
    fused_residual_rmsnorm_forward(residual, out, new(STATS), i.inp1, i.inp2, i.weight, EPS, B, T, C)
    return [residual, out]


@case(
    {"dinp": ROWS, "dout": ROWS, "inp": ROWS, "weight": VECTOR, "rstd": STATS},
    lambda i: norm_gradients(i.dinp, i.dout, i.inp, i.weight, None, i.rstd)[:2],
)
def ours_rmsnorm_backward(new, i):
    dweight = new(np.zeros(C))
    rmsnorm_backward(i.dinp, dweight, i.dout, i.inp, i.weight, i.rstd, B, T, C, scratch=new((MOST_PARTIALS, C)))
    return [i.dinp, dweight]


@case({"inp": ROWS, "weight": VECTOR, "rstd": STATS}, lambda i: [i.inp * i.rstd[..., None] * i.weight])
def ours_rmsnorm_transposed(new, i):
    out_T = new((C, N))
    rmsnorm_transposed(out_T, i.inp, i.weight, i.rstd, B, T, C)
    return [out_T]


@case(
    {"inp": ROWS, "weight": VECTOR, "shift": VECTOR, "mean": STATS, "rstd": STATS},
    lambda i: [(i.inp - i.mean[..., None]) * i.rstd[..., None] * i.weight + i.shift],
)
def ours_norm_transposed(new, i):
    out_T = new((C, N))
    norm_transposed(out_T, i.inp, (i.weight, i.shift), i.mean, i.rstd, B, T, C)
    return [out_T]


def parallel_definition(i):
    x = i.inp + i.proj0 + i.bias0 + i.proj1
    return [x, normalise(x) * i.weight0 + i.shift0, normalise(x) * i.weight1]


@case(
    {"inp": ROWS, "proj0": ROWS, "bias0": VECTOR, "proj1": ROWS, "weight0": VECTOR, "shift0": VECTOR,
     "weight1": VECTOR}, parallel_definition,
)  # fmt: skip
def ours_parallel_residual_forward(new, i):
    outs = [new(ROWS) for _ in range(3)]
    parallel_residual_forward(
        outs[0], outs[1:], new(STATS), new(STATS), i.inp, [(i.weight0, i.shift0), (i.weight1, None)], EPS, B, T, C,
        branches=[(i.proj0, i.bias0, None), (i.proj1, None, None)],
    )  # fmt: skip
    return outs


def parallel_gradients(i):
    one = norm_gradients(i.dinp, i.dout0, i.inp, i.weight0, i.mean, i.rstd)
    two = norm_gradients(torch.zeros(ROWS), i.dout1, i.inp, i.weight1, i.mean, i.rstd)
    return [one[0] + two[0], *one[1:], *two[1:], (one[0] + two[0]).sum((0, 1))]


@case(
    {"dinp": ROWS, "dout0": ROWS, "dout1": ROWS, "inp": ROWS, "weight0": VECTOR, "weight1": VECTOR, "mean": STATS,
     "rstd": STATS}, parallel_gradients,
)  # fmt: skip
def ours_parallel_residual_backward(new, i):
    sums = [new(np.zeros(C)) for _ in range(5)]
    parallel_residual_backward(
        i.dinp, [sums[:2], sums[2:4]], [i.dout0, i.dout1], i.inp, [(i.weight0, None), (i.weight1, None)], i.mean,
        i.rstd, B, T, C, branches=[(None, sums[4], None)], scratch=new((MOST_PARTIALS, 5 * C)),
    )  # fmt: skip
    return [i.dinp, *sums]


@case({"inp": (N, C), "weight": (OC, C), "bias": (OC,)}, lambda i: [F.linear(i.inp, i.weight, i.bias)])
def ours_matmul_forward(new, i):
    out = new((N, OC))
    matmul_forward(out, i.inp, i.weight, i.bias, B, T, C, OC)
    return [out]


@case({"dout": (N, OC), "weight": (OC, C)}, lambda i: [i.dout @ i.weight])
def ours_matmul_backward_inp(new, i):
    dinp = new((N, C))
    matmul_backward_inp(dinp, i.dout, i.weight, new((C, OC)), B, T, C, OC)
    return [dinp]


@case({"dweight": (OC, C), "dout": (N, OC), "inp": (N, C)}, lambda i: [i.dweight + i.dout.T @ i.inp])
def ours_matmul_backward_weight(new, i):
    matmul_backward_weight(i.dweight, i.dout, i.inp, new((C, N)), B, T, C, OC, accumulate=True)
    return [i.dweight]


@case({"dbias": (OC,), "dout": (N, OC)}, lambda i: [i.dbias + i.dout.sum(0)])
def ours_matmul_backward_bias(new, i):
    matmul_backward_bias(i.dbias, new((MOST_PARTIALS, OC)), i.dout, B, T, OC)
    return [i.dbias]


@case({"inp": (N, C)}, lambda i: [i.inp.T])
def ours_transpose(new, i):
    out = new((C, N))
    transpose(out, i.inp, N, C)
    return [out]


def gelu(x, form: str):
    return torch.where(x == -math.inf, 0.0, F.gelu(x, approximate=form))  # and not -inf * 0


for form in "tanh", "none":

    @case({"inp": (N, C), "bias": VECTOR}, lambda i, form=form: [gelu(i.inp + i.bias, form)], form)
    def ours_gelu_forward(new, i, form=form):
        out = new((N, C))
        gelu_forward(out, i.inp, i.bias, N, C, erf=form == "none")
        return [out]

    @case(
        {"dout": (N, C), "inp": (N, C), "bias": VECTOR},
        lambda i, form=form: [
            *through(lambda x, b: F.gelu(x + b, approximate=form), [i.inp, i.bias], i.dout),
            gelu(i.inp + i.bias, form),
        ],
        form,
    )
    def ours_gelu_backward(new, i, form=form):
        dbias, out_T = new(np.zeros(C)), new((C, N))
        gelu_backward(i.dout, dbias, out_T, new((MOST_PARTIALS, C)), i.inp, i.bias, N, C, erf=form == "none")
        return [i.dout, dbias, out_T]


def swiglu(x):
    up, gate = x.chunk(2, -1)
    return F.silu(gate) * up


@case({"inp": (N, 2 * C)}, lambda i: [swiglu(i.inp)])
def ours_swiglu_forward(new, i):
    out = new((N, C))
    swiglu_forward(out, i.inp, N, C)
    return [out]


@case({"dout": (N, C), "inp": (N, 2 * C)}, lambda i: [*through(swiglu, [i.inp], i.dout), swiglu(i.inp)])
def ours_swiglu_backward(new, i):
    dinp, out_T = new((N, 2 * C)), new((C, N))
    swiglu_backward(dinp, out_T, i.dout, i.inp, N, C)
    return [dinp, out_T]


def cross_entropy(logits):
    return F.cross_entropy(logits[:, :V], WORDS.view(-1), reduction="none")


@case(
    {"logits": (N, VP)},
    lambda i: [cross_entropy(i.logits), *through(lambda x: cross_entropy(x).sum(), [i.logits], None)],
)
def ours_fused_classifier(new, i):
    losses = new((N,))
    fused_classifier(i.logits, losses, 1.0, new(TOKENS), B, T, V, VP)
    return [losses, i.logits]


def apart(dqkv, NH: int, NKV: int) -> list:
    """dq, dk and dv of (B, T, NH + 2 * NKV, HS)."""
    return [dqkv[:, :, :NH], dqkv[:, :, NH : NH + NKV], dqkv[:, :, NH + NKV :]]


for kind, NKV in ("softmax", NH), ("softmax", 1), ("relu", NH), ("relu", 1):
    all_heads, variant = (B, T, NH + 2 * NKV, HS), f"{kind} {NKV}"

    @case({"qkv": all_heads}, lambda i, a=(kind, NKV): [attention(i.qkv.flatten(2), NH, *a)], variant)
    def ours_attention_forward(new, i, relu=kind == "relu", NKV=NKV):
        out, qkvr = new(ROWS), new(tuple(i.qkv.shape))
        attention_forward(out, qkvr, new((B, NH, T, T)), new(ROWS), i.qkv, B, T, NH, NKV, HS, relu)
        return [out]

    @case(
        {"dout": ROWS, "qkv": all_heads},
        lambda i, a=(kind, NKV): apart(*through(lambda x: attention(x.flatten(2), NH, *a), [i.qkv], i.dout), NH, a[1]),
        variant,
    )
    def ours_attention_backward(new, i, relu=kind == "relu", NKV=NKV):
        (qkvr, dqkvr, dqkv), att = (new(tuple(i.qkv.shape)) for _ in range(3)), new((B, NH, T, T))
        attention_forward(new(ROWS), qkvr, att, new(ROWS), i.qkv, B, T, NH, NKV, HS, relu)
        attention_backward(
            dqkv, dqkvr, new((B, NH, T, T)), new(ROWS), i.dout, qkvr, att, B, T, NH, NKV, HS, relu
        )
        return apart(dqkv, NH, NKV)


def flash_gradients(qkv, dout, out, lse) -> list:
    """dq, dk and dv of one head of keys and values, from what forward left."""
    NH, T, scale = lse.shape[1], lse.shape[2], qkv.shape[-1] ** -0.5
    q, k, v = (x.transpose(1, 2) for x in qkv.split([NH, 1, 1], 2))
    out, dout = (x.unflatten(2, (NH, -1)).transpose(1, 2) for x in (out, dout))
    hidden = torch.ones(T, T, dtype=bool).triu(1)
    p = (scale * q @ k.transpose(2, 3) - lse[..., None]).masked_fill(hidden, -math.inf).exp()
    ds = p * (dout @ v.transpose(2, 3) - (dout * out).sum(-1, keepdim=True))
    return [scale * ds @ k, scale * (ds.transpose(2, 3) @ q).sum(1), (p.transpose(2, 3) @ dout).sum(1)]


for head_size, heads, length in (64, 2, 71), (128, 1, 37):
    channels, all_heads = heads * head_size, (B, length, heads + 2, head_size)
    finite = [normal(np.random.default_rng(1), *shape) for shape in (all_heads, (B, length, channels))]

    @case({"qkv": all_heads}, lambda i, NH=heads: [attention(i.qkv.flatten(2), NH, "softmax", 1)], head_size)
    def ours_flash_attention_forward(new, i, C=channels, NH=heads, T=length):
        out, lse = new((B, T, C)), new((B, NH, T))
        flash_attention_forward(out, lse, i.qkv, B, T, NH, 1, C // NH)
        return [out]

    @case(
        {"dout": (B, length, channels), "qkv": all_heads},
        lambda i, NH=heads: apart(
            *through(lambda x: attention(x.flatten(2), NH, "softmax", 1), [i.qkv], i.dout), NH, 1
        ),
        head_size,
    )
    def ours_flash_attention_backward(new, i, C=channels, NH=heads, T=length):
        out, lse, dqkv = new((B, T, C)), new((B, NH, T)), new(tuple(i.qkv.shape))
        flash_attention_forward(out, lse, i.qkv, B, T, NH, 1, C // NH)
        dkv_heads, dsum = new((B, T, 2, C)), new((B, NH, T))
        flash_attention_backward(dqkv, dkv_heads, dsum, i.dout, out, lse, i.qkv, B, T, NH, 1, C // NH)
        return apart(dqkv, NH, 1)

    @case(
        {"out": (B, length, channels), "lse": (B, heads, length)},
        lambda i, finite=finite: flash_gradients(*map(torch.from_numpy, finite), i.out, i.lse),
        head_size,
    )
    def ours_flash_attention_backward_after_forward(new, i, C=channels, NH=heads, T=length, finite=finite):
        qkv, dout = map(new, finite)
        dqkv = new(tuple(qkv.shape))
        dkv_heads, dsum = new((B, T, 2, C)), new((B, NH, T))
        flash_attention_backward(dqkv, dkv_heads, dsum, dout, i.out, i.lse, qkv, B, T, NH, 1, C // NH)
        return apart(dqkv, NH, 1)


def rotated(qkv, direction: float):
    """Neighbours in q and k turned together, the heads of v as they are."""
    cos, sin = torch.from_numpy(rope_table(T, HS, 1e4))[:, None].unbind(-1)
    even, odd = qkv[..., ::2], qkv[..., 1::2]
    turned = torch.stack([even * cos - direction * odd * sin, odd * cos + direction * even * sin], -1).flatten(-2)
    return torch.cat([turned[:, :, : 2 * NH], qkv[:, :, 2 * NH :]], 2)


for direction, rope in (1, rope_forward), (-1, rope_backward):

    @case({"qkv": (B, T, 3 * NH, HS)}, lambda i, direction=direction: [rotated(i.qkv, direction)], direction)
    def ours_rope(new, i, rope=rope):
        rope(i.qkv, new(rope_table(T, HS, 1e4)), B, T, NH, NH, HS)
        return [i.qkv]


HEADS = (B, T, 3 * NH, HS)


def heads_normalised(inp, qweight, kweight):
    q, k, v = inp.split(NH, 2)
    q, k = normalise(q, centred=False) * qweight, normalise(k, centred=False) * kweight
    return rotated(torch.cat([q, k, v], 2), 1)


@case({"inp": HEADS, "qweight": (HS,), "kweight": (HS,)}, lambda i: [heads_normalised(i.inp, i.qweight, i.kweight)])
def ours_qk_norm_forward(new, i):
    out, table = new(HEADS), new(rope_table(T, HS, 1e4))
    qk_norm_forward(out, new((B, T, 2 * NH)), i.inp, i.qweight, i.kweight, table, EPS, B, T, NH, NH, HS)
    return [out]


@case(
    {"dqkv": HEADS, "inp": HEADS, "qweight": (HS,), "kweight": (HS,)},
    lambda i: through(heads_normalised, [i.inp, i.qweight, i.kweight], i.dqkv),
)
def ours_qk_norm_backward(new, i):
    out, rstd, table = new(HEADS), new((B, T, 2 * NH)), new(rope_table(T, HS, 1e4))
    dqweight, dkweight, scratch = new((HS,)), new((HS,)), new((MOST_PARTIALS, 2 * HS))
    qk_norm_forward(out, rstd, i.inp, i.qweight, i.kweight, table, EPS, B, T, NH, NH, HS)
    qk_norm_backward(
        i.dqkv, dqweight, dkweight, i.inp, i.qweight, i.kweight, rstd, table, B, T, NH, NH, HS, scratch=scratch
    )
    return [i.dqkv, dqweight, dkweight]


def adamw_definition(i):
    m, v = 0.9 * i.m + 0.1, 0.999 * i.v.square() + 0.001  # of gradients of 1: for others see test_adamw.py
    return [i.params - 0.1 * (m / (v.sqrt() + 1e-8) + 0.1 * i.params), m, v]


@case({"params": (N,), "m": (N,), "v": (N,)}, adamw_definition)
def ours_adamw(new, i):
    v = new(np.square(to_numpy(i.v)))
    adamw(i.params, new(np.ones(N)), i.m, v, new(np.ones(4)), N, 0.1, 0.9, 0.999, 1e-8, 0.1, 1)
    return [i.params, i.m, v]


@case({"x": (N,)}, lambda i: [i.x.norm()])
def ours_global_norm(new, i):
    norm = new((4,))
    global_norm(norm, new((1024,)), [i.x], 0.01, skip_nonfinite=True)
    return [norm[0]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_finite_is_handed_on(product_dev, name, pattern, rng):
    dev, what = product_dev, CASES[name]

    def new(values):
        """An array on the device with these values, or zeros of this shape."""
        values = np.zeros(values, np.float32) if isinstance(values, tuple) else np.asarray(values)
        values = values.astype(np.int32 if values.dtype.kind == "i" else np.float32)
        array = dev.empty(values.shape, values.dtype)
        dev.copy_in(array, np.ascontiguousarray(values))
        dev.synchronize()
        return array

    for spoiled, shape in what.shapes.items():
        inputs = {name: normal(rng, *shape) for name, shape in what.shapes.items()}
        at = int(rng.integers(math.prod(shape)))
        inputs[spoiled].view(np.uint32).reshape(-1)[at] = PATTERNS[pattern]
        tensors = SimpleNamespace(**{name: torch.from_numpy(values.copy()) for name, values in inputs.items()})
        outs = what.launch(new, SimpleNamespace(**{name: new(values) for name, values in inputs.items()}))
        dev.synchronize()
        for number, (out, want) in enumerate(zip(outs, what.definition(tensors), strict=True)):
            if not torch.isfinite(want).all():
                assert not np.isfinite(to_numpy(out)).all(), f"{spoiled}[{at}], output {number}"


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("relu", [False, True])
def test_cached_attention_shows_a_nan_where_a_query_sees_it_and_nowhere_else(product_dev, rng, relu, splits):
    dev = product_dev
    NH, HS = 2, 20
    qkv = normal(rng, 1, 130, 3 * NH, HS)
    for s, of in ((5, NH), (100, 2 * NH), (129, 0)):  # a key, a value, a query, of the first head
        broken = qkv.copy()
        broken[0, s, of, 3] = np.nan
        NKV, caches = NH, np.zeros((2, 1, NH, 192, HS), np.float32)
        caches[:, 0, :, :129] = broken[0, :129, NH:].reshape(129, 2, NKV, HS).transpose(1, 2, 0, 3)
        keys, values = (dev.asarray(cache) for cache in caches)
        out, parts, stats = dev.zeros((1, 1, NH, HS)), dev.zeros((NH, 3, HS)), dev.zeros((NH, 3, 2))
        new, starts = dev.asarray(broken[:, 129:].copy()), dev.asarray(np.array([129], np.int32))
        cached_attention_forward(
            out, parts, stats, keys, values, new, starts, 1, 1, 192, NH, NKV, HS, relu, splits
        )
        found = np.isnan(to_numpy(out)[0, 0])
        assert found[0].all() if of < 2 * NH else found[0, 3] and found[0].sum() == 1
        assert not found[1].any()

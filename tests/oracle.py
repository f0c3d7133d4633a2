"""What kernels and models are checked against, and how closely.

Three parts: relative error with its tolerances; device memory that notices what a kernel should not have done; and
every model in float64, once in plain PyTorch (with ReLU attention too) and once as transformers has it.
A table of parameters is a dict from our tensor names to float64 tensors in the shapes of the model's table:
wte (Vp, C), wpe (maxT, C), ln1w (L, C), qkvw (L, 3C, C) ... lnfb (C).
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import device
from dev.hf.common import flat_parameters_of as flat_parameters_of
from kernels.fp16 import products as fp16
from kernels.matmul import transposes
from llmc.model.tensors import Config, name_tensors
from train_gpt2_fp32 import GPT2Config
from train_llama3 import Llama3Config
from train_pythia import PythiaConfig
from train_qwen3 import Qwen3Config

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    import transformers  # imported where it is used: it takes three seconds, and most tests need none of it

# Largest relative Frobenius error against float64. fp32 rounds at 6e-8: the sum over a row that a kernel takes keeps
# well inside 1e-5, and a model's gradient has passed through some hundred of those. TF32 keeps 10 bits of each factor
# of a product (it rounds at 5e-4) and sums in fp32, so the errors of single products average out within a tensor.
KERNEL_FP32 = 1e-5
MODEL_FP32 = 1e-4
KERNEL_TF32 = 1e-3
# bf16 keeps 8 bits, the first of which is not stored: the nearest such number is off by this share at most.
BF16 = 2.0**-8
MODEL_TF32 = 5e-3
# AdamW moves a parameter by the learning rate whatever the size of its gradient, so where that is smaller than its
# rounding error, the direction is rounding's. Of TF32's errors some 0.7% of a tensor are left after ten steps of 1e-3.
STEPPED_TF32 = 1e-2


def to_numpy(array) -> np.ndarray:
    """The host copy of a numpy array, CuPy array or PyTorch tensor; that of bf16 is fp32."""
    if isinstance(array, torch.Tensor):
        return array.detach().cpu().numpy()
    host = array.get() if hasattr(array, "get") else np.asarray(array)
    return device.from_bf16(host) if host.dtype == device.BF16 else host


def relative_error(got, want) -> float:
    """|got - want| / |want|, Frobenius norms in float64; infinite where got holds a NaN or infinity.

    Where want is all zeros, the norm of got itself. Shapes must be equal.
    """
    got, want = to_numpy(got).astype(np.float64), to_numpy(want).astype(np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    assert np.isfinite(want).all(), "the expected values are not finite"
    if not np.isfinite(got).all():
        return math.inf
    error, scale = np.linalg.norm(got - want), np.linalg.norm(want)
    return float(error / scale if scale > 0 else error)


# (test file, device, tensor) -> (largest relative error seen, tolerance): what `pytest --errors` prints.
largest_errors: dict[tuple[str, str, str], tuple[float, float]] = {}


def note_error(name: str, error: float, tolerance: float) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split("/")[-1]
    devices = "cpu-warp32", "cuda-tf32", "cuda-fp16", "cuda", "cpu-fp16", "cpu"
    on = next((d for d in devices if d in test.partition("[")[2]), "-")
    key = test.split("::")[0], on, name
    largest_errors[key] = max(largest_errors.get(key, (0.0, tolerance)), (error, tolerance))


def kernel_tolerance(device) -> float:
    """What a launcher that multiplies matrices may be off by on this device."""
    return KERNEL_TF32 if device.tf32 or device.precision == "fp16" else KERNEL_FP32


def model_tolerance(device) -> float:
    return MODEL_TF32 if device.tf32 or device.precision == "fp16" else MODEL_FP32


def after_steps(tolerance: float) -> float:
    """What parameters may be off by after ten AdamW steps, where gradients may by `tolerance`."""
    return STEPPED_TF32 if tolerance == MODEL_TF32 else tolerance


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """fp32 numbers of the standard normal distribution, which `floatX` holds exactly."""
    return exact(rng.standard_normal(shape, dtype=np.float32))


def exact(values: np.ndarray) -> np.ndarray:
    """fp32 values, rounded to what the device's type `floatX` holds."""
    in_use = device.current.device
    return device.from_bf16(device.to_bf16(values)) if in_use and in_use.floatX == device.BF16 else values


def leaf(values) -> torch.Tensor:
    """A float64 tensor of these values, which collects a gradient."""
    return torch.tensor(to_numpy(values), dtype=torch.float64, requires_grad=True)


def assert_close(name: str, got, want, tolerance: float) -> None:
    """Fails where the relative error of got, as a whole tensor, is above the tolerance; says where got is worst.

    In a bf16 tensor each number may instead be off by its own rounding, and by the tolerance as a share of the tensor's
    largest number."""
    if getattr(got, "dtype", None) == device.BF16:
        assert_rounded(name, to_numpy(got), to_numpy(want), tolerance)
        return
    error = relative_error(got, want)
    if error <= tolerance:
        note_error(name, error, tolerance)
        return
    got, want = to_numpy(got).astype(np.float64), to_numpy(want).astype(np.float64)
    distance = np.where(np.isfinite(got), np.abs(got - want), np.inf)
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(distance), distance.shape))
    raise AssertionError(
        f"{name}: relative error {error:.3g}, tolerance {tolerance:.3g}; "
        f"worst at {worst}: {got[worst]!r}, expected {want[worst]!r}"
    )


def assert_rounded(name: str, got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    want = want.astype(np.float64)
    allowed = BF16 * np.abs(want) + tolerance * np.abs(want).max(initial=0.0)
    distance = np.where(np.isfinite(got), np.abs(got - want), np.inf)
    worst = np.unravel_index(np.argmax(distance - allowed), distance.shape) if got.size else ()
    assert not got.size or distance[worst] <= allowed[worst], (
        f"{name}: more than one rounding off at {tuple(map(int, worst))}: {got[worst]!r}, expected {want[worst]!r}"
    )
    note_error(name, relative_error(got, want), BF16)


# Both are quiet NaNs of float32: whatever a kernel computes from them is NaN too, so reading outside an array, or an
# output before it is written, shows in the result. Their payloads tell them from NaNs that arithmetic makes.
GUARD = 0x7FC0DEAD
POISON = 0x7FC0BEEF
MARGIN = 4096  # elements on either side: more than a block of threads, or a row, can overshoot by


def pattern(nan: int, size: int) -> int:
    """GUARD or POISON for elements of 4 bytes; of 2, a NaN of bf16; or of 1, which may be any part of a number."""
    return {4: nan, 2: nan >> 16 | nan & 0x3F, 1: nan & 0xFF}[size]


class guarded:
    """Device arrays between guard zones, checked when the block ends. Those of floats are of the type `floatX` that the
    device has, unless another is given.

        with guarded(dev) as memory:
            inp = memory.read(x)                # an input: must still be x afterwards
            out = memory.write((B, T, C))       # an output: every element must be written
            dinp = memory.update(start)         # read and written: starts as given
            layernorm_forward(out, ..., inp)
        assert_close("out", out, want, KERNEL_FP32)

    Each array is a view into the middle of a larger buffer, as the model's tensors are. The zones around it hold GUARD
    and must still do so afterwards. With shift, views start so many elements off the alignment of device.empty, as a
    tensor does that stands in the parameter buffer behind one of odd size.

    Within the block a launcher that asks device.scratch gets a new array each time, as `scratch` below makes it.
    """

    def __init__(self, dev, shift: int = 0):
        self.dev = dev
        self.shift = shift
        self.arrays = []  # (name, buffer, where the view starts, host copy of what was put there, mode)

    def read(self, values, dtype=None, name: str | None = None):
        """A device array with these values (float32 or int32), which may only be read."""
        return self._place(self._bits(values, dtype), "read", name)

    def update(self, values, dtype=None, name: str | None = None):
        """A device array that starts with these values, for gradients that accumulate."""
        return self._place(self._bits(values, dtype), "update", name)

    def write(self, shape, dtype=None, name: str | None = None):
        """A device array of POISON, of which every element must be written (with something that is not a NaN)."""
        return self._place(self._poison(shape, dtype), "write", name)

    def scratch(self, shape, dtype=None, name: str | None = None):
        """A device array of POISON, of which any part may be written."""
        return self._place(self._poison(shape, dtype), "scratch", name)

    def recomputed(self, N: int, C: int):
        """`write` for a matrix (N, C) that backward recomputes, in the layout that its weight's product wants."""
        return self.write((C, N)).T if transposes() else self.write((N, C))

    def check(self) -> None:
        """Asserts all that the methods above promise. Leaving the with block calls it."""
        self.dev.synchronize()
        for name, buffer, start, before, mode in self.arrays:
            after = self.dev.to_host(buffer).view(before.dtype)
            end = len(after) - MARGIN
            changed = np.flatnonzero(after != before) - start
            outside = changed[(changed < 0) | (changed >= end - start)]
            assert not len(outside), f"{name}: written outside, first at element {outside[0]} of {end - start}"
            if mode == "read":
                assert not len(changed), f"{name}: an input was changed, first at element {changed[0]}"
            if mode in ("write", "update"):
                inside = after[start:end]
                if buffer.dtype == device.BF16:
                    bad = np.isnan(device.from_bf16(inside))
                else:
                    bad = np.isnan(inside.view(np.float32)) if buffer.dtype == np.float32 else inside == POISON
                assert not bad.any(), f"{name}: {bad.sum()} of {bad.size} unwritten or NaN, first at {bad.argmax()}"

    def __enter__(self):
        self.outer = device.scratch
        device.scratch = lambda purpose, shape, dtype: self._place(self._poison(shape, dtype), "scratch", purpose, 0)
        fp16.held.clear()  # which is what earlier launchers left in scratch
        return self

    def __exit__(self, kind, value, traceback):
        device.scratch = self.outer
        if kind is None:
            self.check()

    def _poison(self, shape, dtype) -> np.ndarray:
        dtype = np.dtype(dtype or self.dev.floatX)
        return np.full(shape, pattern(POISON, dtype.itemsize), f"u{dtype.itemsize}").view(dtype)

    def _bits(self, values, dtype) -> np.ndarray:
        """The values as the device has them. Those of bf16 must be exact: `exact` makes them so."""
        values = np.ascontiguousarray(values)
        assert values.dtype in (np.float32, np.int32), f"kernels take float32 and int32, not {values.dtype}"
        if values.dtype == np.int32 or (dtype or self.dev.floatX) != device.BF16:
            return values
        assert np.array_equal(exact(values), values, equal_nan=True), f"values {values.shape} are not exact in bf16"
        return device.to_bf16(values)

    def _place(self, values: np.ndarray, mode: str, name: str | None, shift: int | None = None):
        start, size = MARGIN + (self.shift if shift is None else shift), values.itemsize
        host = np.full(start + values.size + MARGIN, pattern(GUARD, size), dtype=f"u{size}")
        host[start : start + values.size] = values.reshape(-1).view(host.dtype)
        buffer = self.dev.empty(host.shape, values.dtype)
        self.dev.copy_in(buffer, host.view(values.dtype))
        self.dev.synchronize()
        self.arrays.append((name or f"array {len(self.arrays)} {values.shape} ({mode})", buffer, start, host, mode))
        return buffer[start : start + values.size].reshape(values.shape)


def attention(qkv: torch.Tensor, num_heads: int, kind: str, num_kv_heads: int | None = None) -> torch.Tensor:
    """Causal self-attention of qkv (B, T, (NH + 2 NKV) HS), the heads of q, of k and of v side by side, to (B, T, C).

    kind "softmax" or "flash", the same, or "relu": att[t, s] = max(0, scale * q_t . k_s) / (t + 1) for s <= t.
    NKV is NH by default; query head h takes key and value head h // (NH / NKV).
    """
    NH, NKV = num_heads, num_kv_heads or num_heads
    B, T, width = qkv.shape
    heads = qkv.view(B, T, NH + 2 * NKV, width // (NH + 2 * NKV)).transpose(1, 2)  # (B, heads, T, HS)
    q, k, v = heads.split((NH, NKV, NKV), dim=1)
    k, v = (x.repeat_interleave(NH // NKV, dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    if kind in ("softmax", "flash"):
        att = scores.masked_fill(future, -math.inf).softmax(-1)
    elif kind == "relu":
        att = scores.relu().masked_fill(future, 0.0) / torch.arange(1, T + 1, dtype=scores.dtype).view(T, 1)
    else:
        raise ValueError(f"no attention of kind {kind!r}")
    return (att @ v).transpose(1, 2).reshape(B, T, NH * q.shape[-1])


def turned(x: torch.Tensor, config: Config, R: int) -> torch.Tensor:
    """x (B, T, heads, HS) after RoPE: of each head the first R channels, by pairs of neighbours, a complex number each,
    turn with the position. Llama 3.1 scales the frequencies."""
    f = config.rope_theta ** -(torch.arange(0, R, 2).double() / R)
    if getattr(config, "rope_scaling", 0):
        low, high, length = 1, 4, config.original_length
        share = ((length * f / (2 * math.pi) - low) / (high - low)).clamp(0, 1)  # of the frequency as it was
        f = (1 - share) * f / config.rope_scaling + share * f
    angles = torch.arange(x.shape[1]).double()[:, None, None] * f  # (T, 1, R/2)
    pairs = torch.view_as_complex(x[..., :R].unflatten(-1, (-1, 2)).contiguous())
    pairs = torch.view_as_real(pairs * torch.polar(torch.ones(()).double(), angles))
    return torch.cat([pairs.flatten(-2), x[..., R:]], dim=-1)


def gpt2(p: dict[str, torch.Tensor], tokens: torch.Tensor, config: GPT2Config, kind: str) -> torch.Tensor:
    """GPT-2's forward pass: logits (B, T, Vp)."""
    C = config.channels
    x = p["wte"][tokens] + p["wpe"][: tokens.shape[1]]
    for l in range(config.num_layers):
        h = F.layer_norm(x, (C,), p["ln1w"][l], p["ln1b"][l], eps=1e-5)
        h = attention(F.linear(h, p["qkvw"][l], p["qkvb"][l]), config.num_heads, kind)
        x = x + F.linear(h, p["attprojw"][l], p["attprojb"][l])
        h = F.layer_norm(x, (C,), p["ln2w"][l], p["ln2b"][l], eps=1e-5)
        h = F.gelu(F.linear(h, p["fcw"][l], p["fcb"][l]), approximate="tanh")
        x = x + F.linear(h, p["fcprojw"][l], p["fcprojb"][l])
    return F.linear(F.layer_norm(x, (C,), p["lnfw"], p["lnfb"], eps=1e-5), p["wte"])


def llama3(p: dict[str, torch.Tensor], tokens: torch.Tensor, config: Config, kind: str) -> torch.Tensor:
    """The forward pass of Llama 3, and of Qwen3, which normalises q and k: logits (B, T, Vp). Channels of q and k are
    in Meta's order."""
    NH, NKV, HS = config.num_heads, config.num_kv_heads, config.head_size

    def norm(x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, config.norm_eps)

    x = p["wte"][tokens]
    for l in range(config.num_layers):
        heads = F.linear(norm(x, p["ln1w"][l]), p["qkvw"][l]).unflatten(-1, (NH + 2 * NKV, HS))
        q, k, v = heads.split((NH, NKV, NKV), dim=2)
        if "qnormw" in p:
            q, k = norm(q, p["qnormw"][l]), norm(k, p["knormw"][l])
        q, k = turned(q, config, HS), turned(k, config, HS)
        h = attention(torch.cat([q, k, v], dim=2).flatten(2), NH, kind, NKV)
        x = x + F.linear(h, p["attprojw"][l])
        up, gate = F.linear(norm(x, p["ln2w"][l]), p["fcw"][l]).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, p["fcprojw"][l])
    return F.linear(norm(x, p["lnfw"]), p["wte" if config.tied else "lm_head"])


def pythia(p: dict[str, torch.Tensor], tokens: torch.Tensor, config: PythiaConfig, kind: str) -> torch.Tensor:
    """Pythia's forward pass: logits (B, T, Vp)."""
    C, NH, HS = config.channels, config.num_heads, config.head_size

    def norm(x, name, *l):
        if config.norm == "rms":
            return F.rms_norm(x, (C,), p[f"{name}w"][l], config.norm_eps)
        return F.layer_norm(x, (C,), p[f"{name}w"][l], p[f"{name}b"][l], eps=config.norm_eps)

    def attend(x, l):
        heads = F.linear(x, p["qkvw"][l], p["qkvb"][l]).unflatten(-1, (3 * NH, HS))
        qk, v = heads.split((2 * NH, NH), dim=2)
        qk = turned(qk, config, int(config.rotary * HS))
        h = attention(torch.cat([qk, v], dim=2).flatten(2), NH, kind)
        return F.linear(h, p["attprojw"][l], p["attprojb"][l])

    def mlp(x, l):
        h = F.gelu(F.linear(x, p["fcw"][l], p["fcb"][l]), approximate="none" if config.gelu == "erf" else "tanh")
        return F.linear(h, p["fcprojw"][l], p["fcprojb"][l])

    x = p["wte"][tokens]
    for l in range(config.num_layers):
        if config.parallel:
            x = x + attend(norm(x, "ln1", l), l) + mlp(norm(x, "ln1" if config.tied_norm else "ln2", l), l)
        else:
            x = x + attend(norm(x, "ln1", l), l)
            x = x + mlp(norm(x, "ln2", l), l)
    return F.linear(norm(x, "lnf"), p["lm_head"])


def forward(
    config: Config, params: dict[str, torch.Tensor], tokens, targets, kind: str = "softmax"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits (B, T, V) without the padded vocabulary, and the mean loss of the targets (B, T)."""
    definition = {GPT2Config: gpt2, Llama3Config: llama3, PythiaConfig: pythia, Qwen3Config: llama3}[type(config)]
    tokens, targets = (torch.as_tensor(np.asarray(ids), dtype=torch.long) for ids in (tokens, targets))
    logits = definition(params, tokens, config, kind)[..., : config.vocab_size]
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients(
    config: Config, params: dict[str, torch.Tensor], tokens, targets, kind: str = "softmax"
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, loss, and the gradient of the loss for every parameter."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    logits, loss = forward(config, leaves, tokens, targets, kind)
    found = torch.autograd.grad(loss, list(leaves.values()))
    return logits.detach(), loss.detach(), dict(zip(leaves, found, strict=True))


def train(
    config: Config, params: dict[str, torch.Tensor], batches, kind: str = "softmax",
    learning_rate: float = 3e-4, weight_decay: float = 0.0, decayed=None,
) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """One AdamW step a batch of (tokens, targets): the loss before each, and the parameters after the last.

    decayed: names of the tensors that weight decay applies to; None for all.
    """
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in params.items()}
    groups = [
        {"params": [tensor], "weight_decay": weight_decay if decayed is None or name in decayed else 0.0}
        for name, tensor in leaves.items()
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for tokens, targets in batches:
        optimizer.zero_grad()
        _, loss = forward(config, leaves, tokens, targets, kind)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach() for name, tensor in leaves.items()}


def table_of(config: Config, flat: np.ndarray) -> dict[str, torch.Tensor]:
    """Parameters, (num_parameters,) in the order of their table, by name in float64."""
    tensors = name_tensors(flat.astype(np.float64), config.parameters(), config.sizes(), align=1)
    return {name: torch.from_numpy(getattr(tensors, name)) for name, _ in config.parameters()}


# transformers' models


def transformers_model(config: Config, seed: int = 0) -> transformers.PreTrainedModel:
    """transformers' model of these sizes in float64 with random weights, eager attention and no dropout."""
    from dev.write_reference import random_model

    return random_model(config, seed).double()


def opinionated(config: Config) -> transformers.PreTrainedModel:
    """transformers_model with larger matrices. Weights as they start out would make all tokens about as likely, or have
    each repeat itself, and rotations would matter little."""
    model = transformers_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 10
    return model


def transformers_loss(model: transformers.PreTrainedModel, tokens, targets) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's logits (B, T, V) for tokens (B, T), and the mean loss of the targets, ready for .backward()."""
    tokens, targets = (torch.as_tensor(ids, dtype=torch.long, device=model.device) for ids in (tokens, targets))
    logits = model(tokens).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sample(
    logits: np.ndarray, coin: float, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> int:
    """Draws an index from softmax(logits / temperature), logits fp32 (V,), among the top_k largest where that is given,
    and of these the likeliest that together have a share top_p: the first whose cumulative sum is above the coin, which
    is in [0, 1), as a share of the whole sum.

    Temperature 0, or what is 0 in fp32, takes the largest logit. Logits that tie with the last that is in stay in.
    """
    if np.float32(temperature) == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.size:
        threshold = np.partition(logits, -top_k)[-top_k]
        logits = np.where(logits >= threshold, logits, -np.inf)
    with np.errstate(over="ignore"):  # by a small temperature; -inf is right
        scaled = (logits - logits.max()) / np.float32(temperature)
    if top_p < 1:
        ordered = np.sort(scaled)[::-1]
        cumulative = np.cumsum(np.exp(ordered.astype(np.float64)))
        last = np.searchsorted(cumulative, np.float32(top_p) * cumulative[-1])
        scaled = np.where(scaled >= ordered[last], scaled, -np.inf)
    cumulative = np.cumsum(np.exp(scaled.astype(np.float64) - scaled.max()))
    return min(int(np.searchsorted(cumulative, coin * cumulative[-1], side="right")), logits.size - 1)

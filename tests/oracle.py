"""What kernels and models are checked against, and how closely.

Three parts: relative error with its tolerances; device memory that notices what a kernel should not have done; and
GPT-2 in float64, once in plain PyTorch (with ReLU attention too) and once as Hugging Face's GPT2LMHeadModel.
A table of parameters is a dict from llm.c's tensor names to float64 tensors in the shapes of the model file:
wte (Vp, C), wpe (maxT, C), ln1w (L, C), qkvw (L, 3C, C) ... lnfb (C).
"""

import math
import os

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

# Largest relative Frobenius error against float64. fp32 rounds at 6e-8: the sum over a row that a kernel takes keeps
# well inside 1e-5, and a model's gradient has passed through some hundred of those. TF32 keeps 10 bits of each factor
# of a product (it rounds at 5e-4) and sums in fp32, so the errors of single products average out within a tensor.
KERNEL_FP32 = 1e-5
MODEL_FP32 = 1e-4
KERNEL_TF32 = 1e-3
MODEL_TF32 = 5e-3


def to_numpy(array) -> np.ndarray:
    """The host copy of a numpy array, CuPy array or PyTorch tensor."""
    if isinstance(array, torch.Tensor):
        return array.detach().cpu().numpy()
    return array.get() if hasattr(array, "get") else np.asarray(array)


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
    on = next((d for d in ("cpu-warp32", "cuda-tf32", "cuda", "cpu") if d in test.partition("[")[2]), "-")
    key = test.split("::")[0], on, name
    largest_errors[key] = max(largest_errors.get(key, (0.0, tolerance)), (error, tolerance))


def kernel_tolerance(device) -> float:
    """What a launcher that multiplies matrices may be off by on this device."""
    return KERNEL_TF32 if device.tf32() else KERNEL_FP32


def model_tolerance(device) -> float:
    return MODEL_TF32 if device.tf32() else MODEL_FP32


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """fp32 numbers of the standard normal distribution."""
    return rng.standard_normal(shape, dtype=np.float32)


def leaf(values) -> torch.Tensor:
    """A float64 tensor of these values, which collects a gradient."""
    return torch.tensor(to_numpy(values), dtype=torch.float64, requires_grad=True)


def assert_close(name: str, got, want, tolerance: float) -> None:
    """Fails where the relative error of got, as a whole tensor, is above the tolerance; says where got is worst."""
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


# Both are quiet NaNs of float32: whatever a kernel computes from them is NaN too, so reading outside an array, or an
# output before it is written, shows in the result. Their payloads tell them from NaNs that arithmetic makes.
GUARD = 0x7FC0DEAD
POISON = 0x7FC0BEEF
MARGIN = 4096  # elements on either side: more than a block of threads, or a row, can overshoot by


class guarded:
    """Device arrays between guard zones, checked when the block ends.

        with guarded(dev) as memory:
            inp = memory.read(x)                # an input: must still be x afterwards
            out = memory.write((B, T, C))       # an output: every element must be written
            dinp = memory.update(start)         # read and written: starts as given
            layernorm_forward(out, ..., inp)
        assert_close("out", out, want, KERNEL_FP32)

    Each array is a view into the middle of a larger buffer, as the model's tensors are. The zones around it hold GUARD
    and must still do so afterwards. With shift, views start so many elements off the alignment of device.empty, as a
    tensor does that stands in the parameter buffer behind one of odd size.
    """

    def __init__(self, dev, shift: int = 0):
        self.dev = dev
        self.shift = shift
        self.arrays = []  # (name, buffer, host copy of what was put there, mode)

    def read(self, values, name: str | None = None):
        """A device array with these values (float32 or int32), which may only be read."""
        return self._place(np.ascontiguousarray(values), "read", name)

    def update(self, values, name: str | None = None):
        """A device array that starts with these values, for gradients that accumulate."""
        return self._place(np.ascontiguousarray(values), "update", name)

    def write(self, shape, dtype=np.float32, name: str | None = None):
        """A device array of POISON, of which every element must be written (with something that is not a NaN)."""
        return self._place(self._poison(shape, dtype), "write", name)

    def scratch(self, shape, dtype=np.float32, name: str | None = None):
        """A device array of POISON, of which any part may be written."""
        return self._place(self._poison(shape, dtype), "scratch", name)

    def check(self) -> None:
        """Asserts all that the methods above promise. Leaving the with block calls it."""
        self.dev.synchronize()
        for name, buffer, before, mode in self.arrays:
            after = to_numpy(buffer).view(np.uint32)
            start, end = MARGIN + self.shift, len(after) - MARGIN
            changed = np.flatnonzero(after != before) - start
            outside = changed[(changed < 0) | (changed >= end - start)]
            assert not len(outside), f"{name}: written outside, first at element {outside[0]} of {end - start}"
            if mode == "read":
                assert not len(changed), f"{name}: an input was changed, first at element {changed[0]}"
            if mode in ("write", "update"):
                inside = after[start:end]
                bad = np.isnan(inside.view(np.float32)) if buffer.dtype == np.float32 else inside == POISON
                assert not bad.any(), f"{name}: {bad.sum()} of {bad.size} unwritten or NaN, first at {bad.argmax()}"

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:
            self.check()

    @staticmethod
    def _poison(shape, dtype) -> np.ndarray:
        return np.full(shape, POISON, dtype=np.uint32).view(dtype)

    def _place(self, values: np.ndarray, mode: str, name: str | None):
        assert values.dtype in (np.float32, np.int32), f"kernels take float32 and int32, not {values.dtype}"
        start = MARGIN + self.shift
        host = np.full(start + values.size + MARGIN, GUARD, dtype=np.uint32)
        host[start : start + values.size] = values.reshape(-1).view(np.uint32)
        buffer = self.dev.empty(host.shape, values.dtype)
        self.dev.copy_in(buffer, host.view(values.dtype))
        self.dev.synchronize()
        self.arrays.append((name or f"array {len(self.arrays)} {values.shape} ({mode})", buffer, host, mode))
        return buffer[start : start + values.size].reshape(values.shape)


def attention(qkv: torch.Tensor, num_heads: int, kind: str) -> torch.Tensor:
    """Causal self-attention of qkv (B, T, 3C), heads side by side in q, k and v, to (B, T, C).

    kind "softmax", or "relu": att[t, s] = max(0, scale * q_t . k_s) / (t + 1) for s <= t.
    """
    B, T, C3 = qkv.shape
    q, k, v = qkv.view(B, T, 3, num_heads, C3 // 3 // num_heads).permute(2, 0, 3, 1, 4)  # each (B, NH, T, HS)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    if kind == "softmax":
        att = scores.masked_fill(future, -math.inf).softmax(-1)
    elif kind == "relu":
        att = scores.relu().masked_fill(future, 0.0) / torch.arange(1, T + 1, dtype=scores.dtype).view(T, 1)
    else:
        raise ValueError(f"no attention of kind {kind!r}")
    return (att @ v).transpose(1, 2).reshape(B, T, C3 // 3)


def gpt2(
    params: dict[str, torch.Tensor], tokens, targets, num_heads: int, vocab_size: int, kind: str = "softmax"
) -> tuple[torch.Tensor, torch.Tensor]:
    """GPT-2's forward pass: logits (B, T, V) without the padded vocabulary, and the mean loss of the targets (B, T)."""
    p = params
    tokens, targets = (torch.as_tensor(np.asarray(ids), dtype=torch.long) for ids in (tokens, targets))
    L, C = p["ln1w"].shape
    x = p["wte"][tokens] + p["wpe"][: tokens.shape[1]]
    for l in range(L):  # noqa: E741, llm.c's letter
        h = F.layer_norm(x, (C,), p["ln1w"][l], p["ln1b"][l], eps=1e-5)
        h = attention(F.linear(h, p["qkvw"][l], p["qkvb"][l]), num_heads, kind)
        x = x + F.linear(h, p["attprojw"][l], p["attprojb"][l])
        h = F.layer_norm(x, (C,), p["ln2w"][l], p["ln2b"][l], eps=1e-5)
        h = F.gelu(F.linear(h, p["fcw"][l], p["fcb"][l]), approximate="tanh")
        x = x + F.linear(h, p["fcprojw"][l], p["fcprojb"][l])
    x = F.layer_norm(x, (C,), p["lnfw"], p["lnfb"], eps=1e-5)
    logits = F.linear(x, p["wte"])[..., :vocab_size]
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt2_gradients(
    params: dict[str, torch.Tensor], tokens, targets, num_heads: int, vocab_size: int, kind: str = "softmax"
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, loss, and the gradient of the loss for every parameter."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    logits, loss = gpt2(leaves, tokens, targets, num_heads, vocab_size, kind)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return logits.detach(), loss.detach(), dict(zip(leaves, gradients, strict=True))


def gpt2_train(
    params: dict[str, torch.Tensor], batches, num_heads: int, vocab_size: int, kind: str = "softmax",
    learning_rate: float = 3e-4, weight_decay: float = 0.0, decayed=None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
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
        _, loss = gpt2(leaves, tokens, targets, num_heads, vocab_size, kind)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach() for name, tensor in leaves.items()}


# Our tensors in the terms of transformers. Its Conv1D keeps weights as (in, out): the transpose of ours.
TRANSFORMERS_NAMES = {
    "wte": "transformer.wte.weight",
    "wpe": "transformer.wpe.weight",
    "ln1w": "transformer.h.{}.ln_1.weight",
    "ln1b": "transformer.h.{}.ln_1.bias",
    "qkvw": "transformer.h.{}.attn.c_attn.weight",
    "qkvb": "transformer.h.{}.attn.c_attn.bias",
    "attprojw": "transformer.h.{}.attn.c_proj.weight",
    "attprojb": "transformer.h.{}.attn.c_proj.bias",
    "ln2w": "transformer.h.{}.ln_2.weight",
    "ln2b": "transformer.h.{}.ln_2.bias",
    "fcw": "transformer.h.{}.mlp.c_fc.weight",
    "fcb": "transformer.h.{}.mlp.c_fc.bias",
    "fcprojw": "transformer.h.{}.mlp.c_proj.weight",
    "fcprojb": "transformer.h.{}.mlp.c_proj.bias",
    "lnfw": "transformer.ln_f.weight",
    "lnfb": "transformer.ln_f.bias",
}
TRANSPOSED = {"qkvw", "attprojw", "fcw", "fcprojw"}


def transformers_gpt2(
    max_seq_len: int, vocab_size: int, num_layers: int, num_heads: int, channels: int, seed: int = 0
) -> GPT2LMHeadModel:
    """Hugging Face's GPT-2 in float64 with random weights, eager attention and no dropout.

    Biases and layernorm weights, which start at 0 and 1, get noise as well, so that a tensor in another's place shows.
    """
    config = GPT2Config(
        n_positions=max_seq_len, vocab_size=vocab_size, n_layer=num_layers, n_head=num_heads, n_embd=channels,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config).double()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
    return model


def transformers_loss(model: GPT2LMHeadModel, tokens, targets) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's logits (B, T, V) for tokens (B, T), and the mean loss of the targets, ready for .backward()."""
    tokens, targets = (torch.as_tensor(np.asarray(ids), dtype=torch.long) for ids in (tokens, targets))
    logits = model(tokens).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parameters_of(model: GPT2LMHeadModel, padded_vocab_size: int) -> dict[str, torch.Tensor]:
    """The model's parameters as our table; the rows of the padded vocabulary are zeros."""
    return _table(model, padded_vocab_size, lambda parameter: parameter.detach())


def gradients_of(model: GPT2LMHeadModel, padded_vocab_size: int) -> dict[str, torch.Tensor]:
    """The gradients that backward left in the model, as our table."""
    return _table(model, padded_vocab_size, lambda parameter: parameter.grad)


def load_parameters(model: GPT2LMHeadModel, params: dict[str, torch.Tensor]) -> None:
    """Copies our table into the model, the padded vocabulary left out."""
    with torch.no_grad():
        for name, parameters in _tensors(model):
            rows = params[name] if "{}" in TRANSFORMERS_NAMES[name] else [params[name]]
            for parameter, values in zip(parameters, rows, strict=True):
                values = torch.as_tensor(values)
                parameter.copy_(values.T if name in TRANSPOSED else values[: len(parameter)])


def _table(model, padded_vocab_size, value_of) -> dict[str, torch.Tensor]:
    table = {}
    for name, parameters in _tensors(model):
        values = [value_of(p).T if name in TRANSPOSED else value_of(p) for p in parameters]
        table[name] = torch.stack(values) if "{}" in TRANSFORMERS_NAMES[name] else values[0].clone()
    padding = padded_vocab_size - len(table["wte"])
    table["wte"] = F.pad(table["wte"], (0, 0, 0, padding))
    return table


def _tensors(model):
    """(our name, the model's parameters for it: one, or one a layer), in the order of the model file."""
    parameters = dict(model.named_parameters())
    for name, theirs in TRANSFORMERS_NAMES.items():
        layers = range(model.config.n_layer) if "{}" in theirs else [0]
        yield name, [parameters[theirs.format(layer)] for layer in layers]

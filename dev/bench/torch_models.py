"""The models in PyTorch: what dev/bench times ours against, and what `dev/bench torch` trains beside them.

GPT-2 is written plainly here. The others are transformers' own. All have `loss` and `load`.
"""

import math

import llmc.model.tensors
from dev.data.common import library
from dev.hf.common import config_json, named_tensors, transformers_parameters
from llmc.model.tensors import Config
from train_gpt2_fp32 import GPT2Config

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.initialization import no_init_weights


def build_torch_model(config: Config, attention: str, padded: bool = False) -> nn.Module:
    """The PyTorch model of these sizes, in fp32; its weights are whatever they are until `load`. It has:

    forward(tokens)         the logits (B, T, V) of int64 tokens (B, T)
    loss(tokens, targets)   the mean cross-entropy of int64 targets (B, T)
    load(tensors)           takes over our parameters, on the host, by name: in a mapping, as `read_model` gives them,
                            or as attributes, as a Model has them

    attention: "eager" by (T, T) matrices, or "sdpa" with PyTorch's fused kernel.
    padded: give the vocabulary its padding too, in the logits as well. Products are faster then, but the padding takes
    part in the softmax, with logits that start at 0: for GPT-2 the loss starts 0.001 higher.

    Raises UserError for a model that transformers has not.
    """
    return (GPT2 if isinstance(config, GPT2Config) else Transformers)(config, attention, padded)


def num_rows(config: Config, padded: bool) -> int:
    """The rows of the embedding."""
    return llmc.model.tensors.padded(config.vocab_size) if padded else config.vocab_size


def fill(parameter: torch.Tensor, values: np.ndarray) -> None:
    """Sets a parameter's first rows; others are the padding of the vocabulary and become 0."""
    parameter[: len(values)] = torch.tensor(np.asarray(values))
    parameter[len(values) :] = 0


def take_float8(model: nn.Module) -> None:
    """Makes the products of a model's layers those of torchao's tensorwise recipe: operands of a byte, each tensor
    scaled by its largest value at the time. Left as they are: the head, sizes that are no multiple of 16, and weights
    that torchao calls too small to gain. Raises UserError where torchao is not installed."""
    library("torchao", "a step in float8")
    from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe, convert_to_float8_training

    chosen, recipe = _auto_filter_for_recipe("tensorwise", ["lm_head"]), Float8LinearConfig.from_recipe_name
    convert_to_float8_training(model, module_filter_fn=chosen, config=recipe("tensorwise"))


class Attention(nn.Module):
    """Causal self-attention of the kinds that `build_torch_model` names."""

    def __init__(self, config: GPT2Config, kind: str):
        super().__init__()
        self.num_heads, self.head_size, self.kind = config.num_heads, config.head_size, kind
        self.c_attn = nn.Linear(config.channels, 3 * config.channels)
        self.c_proj = nn.Linear(config.channels, config.channels)

    def forward(self, x: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.num_heads, self.head_size).permute(2, 0, 3, 1, 4)
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_size)  # (B, NH, T, T)
            y = scores.masked_fill(future, -math.inf).softmax(-1) @ v  # (B, NH, T, HS)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config: GPT2Config, kind: str):
        super().__init__()
        C = config.channels
        self.ln_1, self.ln_2 = nn.LayerNorm(C, eps=1e-5), nn.LayerNorm(C, eps=1e-5)
        self.attn = Attention(config, kind)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(C, 4 * C), "c_proj": nn.Linear(4 * C, C)})

    def forward(self, x: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), future)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2, as `build_torch_model` says. Its parts have the names that transformers gives them; its weights are those
    of torch.nn.Linear, (out, in), as ours."""

    def __init__(self, config: GPT2Config, attention: str, padded: bool):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(num_rows(config, padded), config.channels)
        self.wpe = nn.Embedding(config.max_seq_len, config.channels)
        self.h = nn.ModuleList(Block(config, attention) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.channels, eps=1e-5)
        future = torch.ones(config.max_seq_len, config.max_seq_len, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        T = tokens.shape[1]
        x = self.wte(tokens) + self.wpe.weight[:T]
        for block in self.h:
            x = block(x, self.future[:T, :T])
        return F.linear(self.ln_f(x), self.wte.weight)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def load(self, tensors) -> None:
        own = dict(self.named_parameters())
        for name, tensor, _ in named_tensors(self.config, tensors):
            name = name.removeprefix("transformer.")
            fill(own[name], tensor.T if name.startswith("h.") else tensor)


class Transformers(nn.Module):
    """transformers' own class of that kind of model, as `build_torch_model` says."""

    def __init__(self, config: Config, attention: str, padded: bool):
        super().__init__()
        self.config = config
        settings = config_json(config) | {"vocab_size": num_rows(config, padded), "use_cache": False}
        settings |= {"attn_implementation": attention}
        with no_init_weights():  # a billion random numbers take a while, and `load` replaces them
            theirs = transformers.AutoConfig.for_model(**settings)
            self.transformer = transformers.AutoModelForCausalLM.from_config(theirs)
        self.transformer.tie_weights()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.transformer(tokens).logits

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def load(self, tensors) -> None:
        own = transformers_parameters(self.transformer)
        for name, tensor, shape in named_tensors(self.config, tensors):
            fill(own[name], tensor.reshape(shape))

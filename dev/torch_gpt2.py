"""GPT-2 in PyTorch, written plainly: what dev/bench.py times ours against, and a reference to train beside it.

Its parts have the names that transformers gives them; its weights are those of torch.nn.Linear, (out, in), as ours.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dev.huggingface import named_tensors
from llmc.checkpoint import GPT2Config


class Attention(nn.Module):
    """Causal self-attention. kind: "softmax" with (T, T) matrices, "sdpa" with PyTorch's fused kernel, or "relu" as -a
    relu."""

    def __init__(self, config: GPT2Config, kind: str):
        super().__init__()
        self.num_heads, self.kind = config.num_heads, kind
        self.c_attn = nn.Linear(config.channels, 3 * config.channels)
        self.c_proj = nn.Linear(config.channels, config.channels)

    def forward(self, x: torch.Tensor, future: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(C // self.num_heads)  # (B, NH, T, T)
            if self.kind == "softmax":
                att = scores.masked_fill(future, -math.inf).softmax(-1)
            else:
                att = scores.relu().masked_fill(future, 0.0) / lengths
            y = att @ v  # (B, NH, T, HS)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config: GPT2Config, kind: str):
        super().__init__()
        C = config.channels
        self.ln_1, self.ln_2 = nn.LayerNorm(C, eps=1e-5), nn.LayerNorm(C, eps=1e-5)
        self.attn = Attention(config, kind)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(C, 4 * C), "c_proj": nn.Linear(4 * C, C)})

    def forward(self, x: torch.Tensor, future: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), future, lengths)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """The model. attention: "softmax", "sdpa" or "relu".

    padded: give the vocabulary its padding too. Products are faster then, but the padding takes part in the softmax,
    with logits that start at 0: for GPT-2 the loss starts 0.001 higher.
    """

    def __init__(self, config: GPT2Config, attention: str = "softmax", padded: bool = False):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size if padded else config.vocab_size, config.channels)
        self.wpe = nn.Embedding(config.max_seq_len, config.channels)
        self.h = nn.ModuleList(Block(config, attention) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.channels, eps=1e-5)
        maxT = config.max_seq_len
        self.register_buffer("future", torch.ones(maxT, maxT, dtype=torch.bool).triu(1), persistent=False)
        self.register_buffer("lengths", torch.arange(1.0, maxT + 1).view(maxT, 1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits (B, T, rows of wte) of int64 tokens (B, T)."""
        T = tokens.shape[1]
        x = self.wte(tokens) + self.wpe.weight[:T]
        for block in self.h:
            x = block(x, self.future[:T, :T], self.lengths[:T])
        return F.linear(self.ln_f(x), self.wte.weight)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of int64 targets (B, T)."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def load(self, params: np.ndarray) -> None:
        """Takes over the parameters of a model file, fp32 (num_parameters,); padding of the vocabulary becomes 0."""
        own = dict(self.named_parameters())
        for name, tensor in named_tensors(self.config, np.ascontiguousarray(params)):
            values = torch.from_numpy(tensor.T if name.startswith("h.") else tensor)
            own[name][: len(values)] = values
        own["wte.weight"][self.config.vocab_size :] = 0

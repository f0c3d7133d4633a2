"""Qwen3 at Hugging Face."""

from dev.hf.family import Family, Reordered, Settings
from dev.hf.llama3 import Llama3Family
from train_qwen3 import Qwen3Config

import numpy as np


class Qwen3Family(Family):
    Config = Qwen3Config
    TYPE, PREFIX = "qwen3", "model."
    NAMES = Llama3Family.NAMES | {
        "qnormw": ("model.layers.{}.self_attn.q_norm.weight",),
        "knormw": ("model.layers.{}.self_attn.k_norm.weight",),
    }
    REQUIRED = (
        ("hidden_act", "silu", ("silu",)),
        ("attention_bias", False, (False,)),
        ("use_sliding_window", False, (False,)),
    )

    @staticmethod
    def parts(config: Qwen3Config, name: str, tensor) -> list:
        if name in ("qnormw", "knormw"):  # from pairs to halves, as in q and k
            return [Reordered(tensor, np.arange(config.head_size).reshape(-1, 2).T.reshape(-1))]
        return Llama3Family.parts(config, name, tensor)

    @staticmethod
    def config_json(config: Qwen3Config) -> dict:
        own = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}
        return own | Llama3Family.common_json(config)

    @staticmethod
    def read_config(given: Settings) -> Qwen3Config:
        NH, HS = given.size("num_attention_heads"), given.size("head_dim", 128)
        NKV = given.size("num_key_value_heads", NH)
        if NH % NKV:
            given.refuse("num_key_value_heads", NKV, f"a divisor of num_attention_heads, {NH},")
        theta, _, _, _ = given.rope(("default",))
        return Qwen3Config(
            given.size("max_position_embeddings"), given.size("vocab_size"), given.size("num_hidden_layers"), NH, NKV,
            given.size("hidden_size"), given.size("intermediate_size"), HS,
            bool(given.get("tie_word_embeddings", False)), theta, given.number("rms_norm_eps", 1e-6),
        )  # fmt: skip

"""Pythia at Hugging Face, which calls it GPT-NeoX."""

from dev.hf.family import Family, Reordered, Settings
from device.errors import UserError
from train_pythia import PythiaConfig

import numpy as np


class PythiaFamily(Family):
    Config = PythiaConfig
    TYPE, PREFIX = "gpt_neox", "gpt_neox."
    GELUS = {"gelu_pytorch_tanh": "tanh", "gelu": "erf", "gelu_new": "tanh", "gelu_fast": "tanh"}
    NAMES = {
        "wte": ("gpt_neox.embed_in.weight",),
        "lm_head": ("embed_out.weight",),
        "ln1w": ("gpt_neox.layers.{}.input_layernorm.weight",),
        "ln1b": ("gpt_neox.layers.{}.input_layernorm.bias",),
        "qkvw": ("gpt_neox.layers.{}.attention.query_key_value.weight",),
        "qkvb": ("gpt_neox.layers.{}.attention.query_key_value.bias",),
        "attprojw": ("gpt_neox.layers.{}.attention.dense.weight",),
        "attprojb": ("gpt_neox.layers.{}.attention.dense.bias",),
        "ln2w": ("gpt_neox.layers.{}.post_attention_layernorm.weight",),
        "ln2b": ("gpt_neox.layers.{}.post_attention_layernorm.bias",),
        "fcw": ("gpt_neox.layers.{}.mlp.dense_h_to_4h.weight",),
        "fcb": ("gpt_neox.layers.{}.mlp.dense_h_to_4h.bias",),
        "fcprojw": ("gpt_neox.layers.{}.mlp.dense_4h_to_h.weight",),
        "fcprojb": ("gpt_neox.layers.{}.mlp.dense_4h_to_h.bias",),
        "lnfw": ("gpt_neox.final_layer_norm.weight",),
        "lnfb": ("gpt_neox.final_layer_norm.bias",),
    }
    RENAMED = {"lm_head.weight": "embed_out.weight"}  # transformers 5 calls it otherwise in memory
    REQUIRED = (
        ("hidden_act", "gelu", tuple(GELUS)),
        ("use_parallel_residual", True, (True, False)),
        ("attention_bias", True, (True,)),
        ("tie_word_embeddings", False, (False,)),
        ("sliding_window", None, (None,)),
    )

    @staticmethod
    def parts(config: PythiaConfig, name: str, tensor) -> list:
        """Theirs has the rows of a head's q, k and v one after the other, then those of the next head."""
        if name not in ("qkvw", "qkvb"):
            return [tensor]
        NH, R = config.num_heads, config.sizes()["R"]
        rows = np.arange(3 * config.channels).reshape(3, NH, -1)  # of q, k, v; of a head; of a channel
        turned = rows[:2, :, :R].reshape(2, NH, R // 2, 2).swapaxes(2, 3).reshape(2, NH, R)  # from pairs to halves
        rows[:2, :, :R] = turned.copy()
        return [Reordered(tensor, rows.swapaxes(0, 1).reshape(-1))]

    @classmethod
    def config_json(cls, config: PythiaConfig) -> dict:
        if config.norm != "layer" or config.tied_norm:
            raise UserError(
                f"transformers' GPT-NeoX has neither RMSNorm nor one norm for both branches; this model has "
                f"norm={config.norm}, tied_norm={int(config.tied_norm)}"
            )
        return {
            "architectures": ["GPTNeoXForCausalLM"],
            "max_position_embeddings": config.max_seq_len,
            "hidden_size": config.channels,
            "intermediate_size": 4 * config.channels,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "hidden_act": next(theirs for theirs, ours in cls.GELUS.items() if ours == config.gelu),
            "layer_norm_eps": config.norm_eps,
            "rotary_pct": config.rotary,
            "rotary_emb_base": config.rope_theta,
            "use_parallel_residual": config.parallel,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }

    @classmethod
    def read_config(cls, given: Settings) -> PythiaConfig:
        C, hidden, NH = given.size("hidden_size"), given.size("intermediate_size"), given.size("num_attention_heads")
        if hidden != 4 * C:
            given.refuse("intermediate_size", hidden, f"4 times hidden_size, {C},")
        if (HS := given.get("head_dim")) not in (None, C // NH):
            given.refuse("head_dim", HS, f"hidden_size / num_attention_heads, {C} / {NH},")
        theta, _, _, rotary = given.rope(("default",), 0.25, ("rotary_emb_base", "rotary_pct"))
        return PythiaConfig(
            given.size("max_position_embeddings"), given.size("vocab_size"), given.size("num_hidden_layers"),
            NH, C, rotary, theta, given.number("layer_norm_eps", 1e-5),
            parallel=given.get("use_parallel_residual", True), gelu=cls.GELUS[given.get("hidden_act", "gelu")],
        )  # fmt: skip

"""GPT-2 at Hugging Face, whose Conv1D keeps a weight as (in, out), the transpose of ours."""

import re

from dev.hf.family import Family, Settings
from device.errors import UserError
from train_gpt2_fp32 import GPT2Config


class GPT2Family(Family):
    Config = GPT2Config
    TYPE, PREFIX = "gpt2", "transformer."
    NAMES = {
        "wte": ("transformer.wte.weight",),
        "wpe": ("transformer.wpe.weight",),
        "ln1w": ("transformer.h.{}.ln_1.weight",),
        "ln1b": ("transformer.h.{}.ln_1.bias",),
        "qkvw": ("transformer.h.{}.attn.c_attn.weight",),
        "qkvb": ("transformer.h.{}.attn.c_attn.bias",),
        "attprojw": ("transformer.h.{}.attn.c_proj.weight",),
        "attprojb": ("transformer.h.{}.attn.c_proj.bias",),
        "ln2w": ("transformer.h.{}.ln_2.weight",),
        "ln2b": ("transformer.h.{}.ln_2.bias",),
        "fcw": ("transformer.h.{}.mlp.c_fc.weight",),
        "fcb": ("transformer.h.{}.mlp.c_fc.bias",),
        "fcprojw": ("transformer.h.{}.mlp.c_proj.weight",),
        "fcprojb": ("transformer.h.{}.mlp.c_proj.bias",),
        "lnfw": ("transformer.ln_f.weight",),
        "lnfb": ("transformer.ln_f.bias",),
    }
    REQUIRED = (
        ("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
        ("layer_norm_epsilon", 1e-5, (1e-5,)),
        ("scale_attn_weights", True, (True,)),
        ("scale_attn_by_inverse_layer_idx", False, (False,)),
        ("add_cross_attention", False, (False,)),
        ("sliding_window", None, (None,)),
    )

    @staticmethod
    def parts(config: GPT2Config, name: str, tensor) -> list:
        return [tensor.T if tensor.ndim == 2 and name not in ("wte", "wpe") else tensor]

    @staticmethod
    def config_json(config: GPT2Config) -> dict:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": config.max_seq_len,
            "n_embd": config.channels,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": None,  # 4C
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }

    @staticmethod
    def read_config(given: Settings) -> GPT2Config:
        """The sizes as the tensors show them, which they do but for the heads."""
        wte, wpe = (given.shapes.get(f"transformer.{name}.weight", ()) for name in ("wte", "wpe"))
        if len(wte) != 2 or len(wpe) != 2:
            raise UserError(
                f"{given.source}: no GPT-2 (it lacks the embeddings wte.weight and wpe.weight); another model needs a "
                "config.json"
            )
        layers = [int(found[1]) for name in given.shapes if (found := re.match(r"transformer\.h\.(\d+)\.", name))]
        heads = given.heads or given.size("n_head", default=max(1, wte[1] // 64))
        return GPT2Config(wpe[0], wte[0], 1 + max(layers, default=-1), heads, wte[1])

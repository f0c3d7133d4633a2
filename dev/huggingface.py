"""GPT-2, Llama 3 and Pythia as Hugging Face's transformers names, lays out and describes them.

The two sides cut and order the same numbers differently. Theirs has one tensor a layer, ours one with a part for each
layer. Ours has q, k and v in one tensor, and Llama's up and gate. Their Conv1D keeps a weight of GPT-2 as (in, out),
the transpose of ours. Their RoPE turns channels i and i + R/2 of a head together, where R of its channels are turned,
ours 2i and 2i + 1, so the rows of q and k are in another order. Their Pythia, called GPT-NeoX, has the rows of a head's
q, k and v one after the other, then those of the next head. They do not pad the vocabulary.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import groupby

from device.errors import UserError
from kernels.rope import HIGH, LOW
from llmc.tensors import Config
from train_gpt2_fp32 import GPT2Config
from train_llama3 import Llama3Config
from train_pythia import PythiaConfig

import numpy as np

# Our tensor, and theirs in the order in which it holds them; {} stands for the layer.

GPT2_NAMES = {
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

LLAMA3_NAMES = {
    "wte": ("model.embed_tokens.weight",),
    "lm_head": ("lm_head.weight",),
    "ln1w": ("model.layers.{}.input_layernorm.weight",),
    "qkvw": (
        "model.layers.{}.self_attn.q_proj.weight",
        "model.layers.{}.self_attn.k_proj.weight",
        "model.layers.{}.self_attn.v_proj.weight",
    ),
    "attprojw": ("model.layers.{}.self_attn.o_proj.weight",),
    "ln2w": ("model.layers.{}.post_attention_layernorm.weight",),
    "fcw": ("model.layers.{}.mlp.up_proj.weight", "model.layers.{}.mlp.gate_proj.weight"),
    "fcprojw": ("model.layers.{}.mlp.down_proj.weight",),
    "lnfw": ("model.norm.weight",),
}

PYTHIA_NAMES = {
    "wte": ("gpt_neox.embed_in.weight",),
    "lm_head": ("embed_out.weight",),  # in files; transformers 5 calls its own parameter lm_head
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

PYTHIA_GELUS = {"tanh": "gelu_pytorch_tanh", "erf": "gelu"}


def named_tensors(config: Config, tensors) -> Iterator[tuple[str, object, tuple[int, ...]]]:
    """The parameters of a model, or their gradients, as transformers sees them: for each of its tensors the name, a
    view into ours that has the numbers in its order, and its shape.

    tensors: ours by name, in a mapping or as attributes: NumPy's or CuPy's arrays or PyTorch's tensors, those with a
    part for each layer as (L, ...), the vocabulary padded or not. An axis of theirs may be split into several in a
    view: `view.reshape(shape)` is their tensor, and `view[...] = theirs.reshape(view.shape)` sets ours. A view may be
    a Reordered, which can do just that.
    """
    tensors = tensors if isinstance(tensors, Mapping) else vars(tensors)
    names, parts = {
        GPT2Config: (GPT2_NAMES, gpt2_parts),
        Llama3Config: (LLAMA3_NAMES, llama3_parts),
        PythiaConfig: (PYTHIA_NAMES, pythia_parts),
    }[type(config)]
    for layered, rows in groupby(config.parameters(), lambda row: row[1][0] == "L"):
        ours = [name for name, _ in rows]
        for layer in range(config.num_layers) if layered else (None,):
            for name in ours:
                tensor = tensors[name][layer] if layered else tensors[name]
                for theirs, view in zip(names[name], parts(config, name, tensor), strict=True):
                    split = tuple(view.shape)
                    yield theirs.format(layer), view, (math.prod(split[:-1]), split[-1]) if len(split) > 2 else split


class Reordered:
    """The rows of a tensor in another order, which no view can give."""

    def __init__(self, tensor, order: np.ndarray):
        self.tensor, self.order = tensor, order
        self.shape, self.nbytes = tensor.shape, tensor.nbytes
        self.size = math.prod(tensor.shape)

    def reshape(self, *shape):
        return self.tensor[self.order].reshape(*shape)

    def __setitem__(self, everything, values) -> None:
        self.tensor[self.order] = values

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.tensor[self.order], dtype)


def transformers_parameters(model) -> dict:
    """The parameters of a transformers model by the names that they have in files."""
    return {
        "embed_out.weight" if model.config.model_type == "gpt_neox" and name == "lm_head.weight" else name: parameter
        for name, parameter in model.named_parameters()
    }


def gpt2_parts(config: GPT2Config, name: str, tensor) -> list:
    """One of our tensors, of one layer, as views in the order of theirs."""
    if name == "wte":
        return [tensor[: config.vocab_size]]
    return [tensor.T if tensor.ndim == 2 and name != "wpe" else tensor]


def llama3_parts(config: Llama3Config, name: str, tensor) -> list:
    """One of our tensors, of one layer, as views in the order of theirs: q as (NH, 2, HS/2, C), k as (NKV, 2, HS/2, C),
    where the halves of a head lie apart that ours has as pairs."""
    if name in ("wte", "lm_head"):
        return [tensor[: config.vocab_size]]
    if name == "qkvw":
        HS, q_rows = config.channels // config.num_heads, config.channels
        kv_rows = config.num_kv_heads * HS
        q, k, v = tensor[:q_rows], tensor[q_rows : q_rows + kv_rows], tensor[q_rows + kv_rows :]
        return [*(rows.reshape(-1, HS // 2, 2, config.channels).swapaxes(1, 2) for rows in (q, k)), v]
    if name == "fcw":
        return [tensor[: config.hidden], tensor[config.hidden :]]
    return [tensor]


def pythia_parts(config: PythiaConfig, name: str, tensor) -> list:
    """One of our tensors, of one layer, as views in the order of theirs."""
    if name in ("wte", "lm_head"):
        return [tensor[: config.vocab_size]]
    if name not in ("qkvw", "qkvb"):
        return [tensor]
    NH, R = config.num_heads, config.rotary_channels
    rows = np.arange(3 * config.channels).reshape(3, NH, -1)  # of q, k, v; of a head; of a channel
    turned = rows[:2, :, :R].reshape(2, NH, R // 2, 2).swapaxes(2, 3).reshape(2, NH, R)  # from pairs to halves
    rows[:2, :, :R] = turned.copy()
    return [Reordered(tensor, rows.swapaxes(0, 1).reshape(-1))]


def config_json(config: Config, eot: int | None = None, bos: int | None = None) -> dict:
    """A model in the terms of transformers: what its config.json holds and its config class takes. eot and bos: the
    tokens that end and begin a text, where they are known. Raises UserError for a model that transformers has not."""
    common = {
        "vocab_size": config.vocab_size,
        "bos_token_id": bos,
        "eos_token_id": eot,
        "torch_dtype": "float32",
    }
    if isinstance(config, Llama3Config):
        return common | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": config.max_seq_len,
            "hidden_size": config.channels,
            "intermediate_size": config.hidden,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.channels // config.num_heads,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_scaling": rope_scaling(config.rope_scaling, config.original_length),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": config.tied,
        }
    if isinstance(config, PythiaConfig):
        if config.norm != "layer" or config.tied_norm:
            raise UserError(
                f"transformers' GPT-NeoX has neither RMSNorm nor one norm for both branches; this model has "
                f"norm={config.norm}, tied_norm={int(config.tied_norm)}"
            )
        return common | {
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "max_position_embeddings": config.max_seq_len,
            "hidden_size": config.channels,
            "intermediate_size": 4 * config.channels,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "hidden_act": PYTHIA_GELUS[config.gelu],
            "layer_norm_eps": config.norm_eps,
            "rotary_pct": config.rotary,
            "rotary_emb_base": config.rope_theta,
            "use_parallel_residual": config.parallel,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }
    return common | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
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


def rope_scaling(factor: float, original_length: int) -> dict | None:
    """Llama 3.1's scaling of RoPE by a factor, in the terms of transformers; None for the factor 0. original_length:
    positions that the model was first trained on."""
    if factor == 0:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": original_length,
    }

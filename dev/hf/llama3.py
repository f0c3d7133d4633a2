"""Llama 3 at Hugging Face, and a Mistral that computes the same."""

from dev.hf.family import Family, Settings
from kernels.rope import HIGH, LOW
from train_llama3 import Llama3Config


class Llama3Family(Family):
    Config = Llama3Config
    TYPE, PREFIX = "llama", "model."
    NAMES = {
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
    REQUIRED = (
        ("hidden_act", "silu", ("silu",)),
        ("attention_bias", False, (False,)),
        ("mlp_bias", False, (False,)),
        ("pretraining_tp", 1, (1,)),
        ("sliding_window", None, (None,)),
    )
    ALSO = {"mistral": (("sliding_window", 4096, (None,)),)}  # a Mistral whose attention reaches back to the beginning

    @staticmethod
    def parts(config: Llama3Config, name: str, tensor) -> list:
        """q is (NH, 2, HS/2, C), k (NKV, 2, HS/2, C): their halves of a head lie apart, ours are pairs."""
        if name == "qkvw":
            HS = config.head_size
            q_rows, kv_rows = config.num_heads * HS, config.num_kv_heads * HS
            q, k, v = tensor[:q_rows], tensor[q_rows : q_rows + kv_rows], tensor[q_rows + kv_rows :]
            return [*(rows.reshape(-1, HS // 2, 2, config.channels).swapaxes(1, 2) for rows in (q, k)), v]
        if name == "fcw":
            return [tensor[: config.hidden], tensor[config.hidden :]]
        return [tensor]

    @staticmethod
    def common_json(config) -> dict:
        """What Qwen3's config.json has, too."""
        return {
            "max_position_embeddings": config.max_seq_len,
            "hidden_size": config.channels,
            "intermediate_size": config.hidden,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "tie_word_embeddings": config.tied,
        }

    @staticmethod
    def config_json(config: Llama3Config) -> dict:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": config.original_length,
        }
        own = {"architectures": ["LlamaForCausalLM"], "mlp_bias": False}
        return own | Llama3Family.common_json(config) | ({"rope_scaling": scaling} if config.rope_scaling else {})

    @staticmethod
    def read_config(given: Settings) -> Llama3Config:
        C, NH = given.size("hidden_size"), given.size("num_attention_heads")
        NKV, HS = given.size("num_key_value_heads", NH), given.size("head_dim", max(1, C // NH))
        if NH % NKV:
            given.refuse("num_key_value_heads", NKV, f"a divisor of num_attention_heads, {NH},")
        if HS != C // NH:
            given.refuse("head_dim", HS, f"hidden_size / num_attention_heads, {C} / {NH},")
        eps = given.number("rms_norm_eps", 1e-6)
        theta, scaling, length, _ = given.rope(("default", "llama3"))
        return Llama3Config(
            given.size("max_position_embeddings"), given.size("vocab_size"), given.size("num_hidden_layers"), NH, NKV,
            C, given.size("intermediate_size"), theta, scaling, eps, bool(given.get("tie_word_embeddings", False)),
            length,
        )  # fmt: skip

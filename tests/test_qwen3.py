"""Qwen3's sizes, and what its config.json says."""

from dataclasses import replace
from pathlib import Path

from dev.bench.ceilings import Ceilings, limits
from dev.hf.family import Settings
from dev.hf.qwen3 import Qwen3Family
from device.errors import UserError
from llmc.model.tensors import num_parameters
from train_qwen3 import Qwen3, Qwen3Config

import pytest

SMALL = Qwen3Config(16, 101, 2, 6, 2, 48, 67, head_size=8, tied=False)


def test_the_presets_have_the_originals_numbers_of_parameters():
    """As the models' pages at Hugging Face count them, in billions, with the embedding once."""
    counts = {"qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-4b": 4.022}
    for preset, count in counts.items():
        assert round(num_parameters(Qwen3Config.described(preset)) / 1e9, 3) == count


def test_the_limit_of_a_step_counts_attention_by_the_size_of_its_heads(dev):
    B, T = 2, 8
    parts = limits(Qwen3, replace(SMALL, head_size=16), B, T, Ceilings(product=1e3, copy=1e9, description=""))
    assert parts["causal attention at the ceiling"] == 7 * 2 * B * T * T * 6 * 16


@pytest.mark.parametrize("description, message", [
    ("layers=1,heads=4,kv_heads=3,channels=32,hidden=8", "4 heads cannot share 3 key/value heads evenly"),
    ("layers=1,heads=4,kv_heads=2,channels=32,hidden=8,head_size=7", "heads of 7 channels are odd"),
])  # fmt: skip
def test_heads_that_make_no_model_are_refused(description, message):
    with pytest.raises(UserError, match=message):
        Qwen3Config.described(description)


# What the config.json of Qwen/Qwen3-0.6B says, but for what only matters to who generates.
PUBLISHED = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def read(settings: dict) -> Qwen3Config:
    given = Settings(Path("here"), settings)
    given.check(Qwen3Family.REQUIRED)
    return Qwen3Family.read_config(given)


def test_the_published_config_json_is_the_preset():
    assert read(PUBLISHED) == Qwen3Config.described("qwen3-0.6b")


@pytest.mark.parametrize("settings, message", [
    ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window is True .*; False is supported"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*; full_attention alone is supported"),
    ({"layer_types": 7}, "layer_types is 7 .*; full_attention alone is supported"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn' .*; default is"),
    ({"attention_bias": True}, "attention_bias is True"), ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"num_key_value_heads": 5}, "num_key_value_heads is 5 .*; a divisor of num_attention_heads, 16, is supported"),
])  # fmt: skip
def test_what_computes_something_else_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        read(PUBLISHED | settings)

"""Models to and from Hugging Face's transformers: the same weights, the same logits, or one line that says why not."""

import errno
import json
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import conftest
import generate
from dev.hf import export_hf, import_hf
from dev.hf.common import families, named_tensors, transformers_parameters
from device.errors import UserError
from generate import kind_of
from llmc import checkpoint
from llmc.checkpoint import read_model, write_model
from llmc.model import build_from_file
from llmc.tensors import Config, num_parameters, shape_of
from llmc.tokenizer import Tokenizer, load_model_tokenizer, write_tokenizer
from models import FAMILIES, GPT2S, LLAMAS, PYTHIAS
from oracle import MODEL_FP32, MODEL_TF32, assert_close, flat_parameters_of, opinionated, transformers_model
from train_gpt2_fp32 import GPT2Config
from train_pythia import PythiaConfig

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import errors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2ForQuestionAnswering,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    GPTNeoXForSequenceClassification,
    GPTNeoXForTokenClassification,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
)
from transformers import GPT2Config as HFConfig

CONFIGS = [config for family in FAMILIES for config in family]
FIRST = [family[0] for family in FAMILIES]
MASK = torch.ones(1, 1, 17, 17, dtype=torch.uint8).tril()  # a causal one, as old files hold
ROOT = Path(__file__).resolve().parents[1]


def name_of(config: Config) -> str:
    if isinstance(config, GPT2Config):
        return f"GPT-2 {config.num_heads} of {config.channels}"
    if isinstance(config, PythiaConfig):
        order = "parallel" if config.parallel else "sequential"
        return f"Pythia {config.num_heads} of {config.channels} {order} {config.gelu}"
    length = "" if getattr(config, "original_length", 8192) == 8192 else f" from {config.original_length} positions"
    return f"{config.NAME} {config.num_heads}-{config.num_kv_heads} {'tied' if config.tied else 'untied'}{length}"


def class_of(config: Config) -> str:
    """transformers' class of such a model."""
    return type(transformers_model(config)).__name__


every_config = pytest.mark.parametrize("config", CONFIGS, ids=name_of)
each_family = pytest.mark.parametrize("theirs", FIRST, ids=name_of, indirect=True)
each_tied = pytest.mark.parametrize("theirs", FIRST[:2], ids=name_of, indirect=True)
only_gpt2 = pytest.mark.parametrize("theirs", GPT2S[:1], ids=name_of, indirect=True)
only_pythia = pytest.mark.parametrize("theirs", PYTHIAS[:1], ids=name_of, indirect=True)
only_llama = pytest.mark.parametrize("theirs", LLAMAS[:1], ids=name_of, indirect=True)


def make_model(config: Config):
    """transformers' model, fp32. Where positions are rotations, matrices are large enough for them to matter to the
    logits."""
    return (transformers_model if isinstance(config, GPT2Config) else opinionated)(config).float()


def flat(model, config: Config) -> np.ndarray:
    """The parameters of a transformers model, fp32 (num_parameters,) in the order of our table."""
    return flat_parameters_of(model, config).astype(np.float32)


def assert_parameters(config: Config, tensors: dict[str, np.ndarray], model) -> None:
    """Every number is the same, and what is not transformers' is 0."""
    theirs = transformers_parameters(model)
    for name, view, shape in named_tensors(config, tensors):
        np.testing.assert_array_equal(view.reshape(shape), theirs.pop(name).detach().float().numpy(), name)
    assert not theirs
    for name, tensor in tensors.items():
        if name not in dict(config.parameters()):
            assert not tensor.any(), name
    assert not tensors["wte"][config.vocab_size :].any()


def tensors_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in transformers_parameters(model).items()}


@pytest.fixture
def theirs(request):
    return make_model(getattr(request, "param", GPT2S[0]))


@pytest.fixture
def saved(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def imported(source, tmp_path, *flags: str) -> tuple[Config, dict[str, np.ndarray]]:
    path = tmp_path / "imported.bin"
    import_hf.main([str(source), "-o", str(path), *flags])
    return read_model(path, kind_of(path).Config)


def supported_types() -> str:
    """What the refusal of another model_type names."""
    *others, last = families()
    return f"{', '.join(others)} or {last} is supported"


def refusal(source, tmp_path) -> str:
    message = conftest.refusal(imported, source, tmp_path)
    assert not (tmp_path / "imported.bin").exists() and not list(tmp_path.glob("*.part"))
    return message


def change(path: Path, **settings) -> None:
    """Sets fields of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def our_logits(dev, path: Path, config: Config, tokens: np.ndarray) -> np.ndarray:
    B, T = tokens.shape
    model = build_from_file(kind_of(path), path, B, T, "softmax")
    dev.copy_in(model.inputs, tokens)
    model.forward(B, T)
    return dev.to_host(model.acts(B, T).logits).reshape(B, T, -1)[..., : config.vocab_size]


def assert_logits(dev, path: Path, config: Config, model, rng) -> None:
    """Our model in `path` has transformers' logits in float64."""
    tokens = rng.integers(0, config.vocab_size, (2, config.max_seq_len - 1), dtype=np.int32)
    with torch.no_grad():
        wanted = model.double().eval()(torch.tensor(tokens).long()).logits
    assert_close("logits", our_logits(dev, path, config, tokens), wanted, MODEL_TF32 if dev.tf32 else MODEL_FP32)


@every_config
def test_an_exported_model_has_the_same_logits_in_transformers(config, dev, tmp_path, rng):
    params = flat(make_model(config), config)
    params[config.vocab_size * config.channels : config.sizes()["Vp"] * config.channels] = 7  # must not matter
    write_model(tmp_path / "model.bin", config, params)
    export_hf.main([str(tmp_path / "model.bin"), "-o", str(tmp_path / "out")])
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tied = exported.get_output_embeddings().weight is exported.get_input_embeddings().weight
    assert tied == getattr(config, "tied", isinstance(config, GPT2Config))
    assert type(exported).__name__ == class_of(config)
    assert exported.dtype == torch.float32
    assert_logits(dev, tmp_path / "model.bin", config, exported, rng)


@every_config
def test_an_imported_model_has_the_logits_it_had_in_transformers(config, dev, tmp_path, rng):
    theirs = make_model(config)
    theirs.save_pretrained(tmp_path / "saved")
    imported(tmp_path / "saved", tmp_path)
    assert_logits(dev, tmp_path / "imported.bin", config, theirs, rng)


@every_config
def test_what_transformers_saves_is_imported_and_exported_again_bit_by_bit(config, tmp_path):
    theirs = make_model(config)
    theirs.save_pretrained(tmp_path / "saved")
    read, tensors = imported(tmp_path / "saved", tmp_path)
    assert read == config
    assert_parameters(config, tensors, theirs)
    export_hf.main([str(tmp_path / "imported.bin")])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "imported")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    before = (tmp_path / "imported.bin").read_bytes()
    imported(tmp_path / "imported", tmp_path)
    assert (tmp_path / "imported.bin").read_bytes() == before


def exported_in_bf16(model: Path, out: Path) -> dict[str, bytes]:
    """What the export of a model in bf16 writes, by the file's name."""
    export_hf.main([str(model), "-o", str(out), "--dtype", "bf16"])
    return {path.name: path.read_bytes() for path in out.iterdir()}


@every_config
def test_a_bf16_model_of_transformers_is_imported_and_exported_again_bit_by_bit(config, tmp_path):
    """Directly, and where llm.c has such a file, by way of its version 5."""
    theirs = make_model(config).bfloat16()
    theirs.save_pretrained(tmp_path / "saved")
    assert imported(tmp_path / "saved", tmp_path)[0] == config
    model, before = tmp_path / "imported.bin", load_file(tmp_path / "saved" / "model.safetensors")
    out = exported_in_bf16(model, tmp_path / "out")
    after, settings = load_file(tmp_path / "out" / "model.safetensors"), json.loads(out["config.json"])
    assert before.keys() == after.keys() and settings["torch_dtype"] == "bfloat16"
    for name, tensor in before.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(after[name].view(torch.int16), tensor.view(torch.int16))
    if config.header()[1] == 3:
        export_hf.main([str(model), "-o", str(tmp_path / "v5.bin"), "--dtype", "bf16"])
        body = (tmp_path / "v5.bin").stat().st_size - config.HEADER_BYTES
        assert body == (model.stat().st_size - config.HEADER_BYTES) // 2
        assert exported_in_bf16(tmp_path / "v5.bin", tmp_path / "again") == out
        export_hf.main([str(tmp_path / "v5.bin"), "-o", str(tmp_path / "v3.bin")])
        assert (tmp_path / "v3.bin").read_bytes() == model.read_bytes()
    else:
        with pytest.raises(UserError, match=r"v5.bin: llm.c has no file in bf16 for such a .*: leave --dtype bf16 out"):
            export_hf.main([str(model), "-o", str(tmp_path / "v5.bin"), "--dtype", "bf16"])
        assert not list(tmp_path.glob("v5*"))


@pytest.mark.parametrize("config", FIRST, ids=name_of)
def test_weights_exported_in_bf16_are_those_that_transformers_rounds(config, dev, tmp_path, rng, monkeypatch):
    """The same logits as of a model that it has saved in bf16, to the bit; ours, of the rounded weights in fp32, are
    near to those of transformers."""
    monkeypatch.setattr(checkpoint, "ROUNDED", 7)
    theirs = make_model(config)
    write_model(tmp_path / "model.bin", config, flat(theirs, config))
    exported_in_bf16(tmp_path / "model.bin", tmp_path / "out")
    theirs.bfloat16().save_pretrained(tmp_path / "saved")
    loaded, saved = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("out", "saved"))
    assert loaded.dtype == torch.bfloat16 and type(loaded).__name__ == class_of(config)
    tokens = torch.tensor(rng.integers(0, config.vocab_size, (2, config.max_seq_len - 1)))
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, saved(tokens).logits)
    imported(tmp_path / "out", tmp_path)
    assert_logits(dev, tmp_path / "imported.bin", config, loaded, rng)


@pytest.mark.parametrize("out", ["out", "v5.bin"])
def test_an_export_in_bf16_takes_the_memory_of_a_tensor_at_most(out, tmp_path, monkeypatch, rng):
    config = GPT2Config(8, 128, 16, 2, 64)
    monkeypatch.setattr(checkpoint, "ROUNDED", 1000)
    write_random(tmp_path / "model.bin", config, rng)
    export_hf.main([str(tmp_path / "model.bin"), "-o", str(tmp_path / f"first_{out}"), "--dtype", "bf16"])
    tracemalloc.start()
    export_hf.main([str(tmp_path / "model.bin"), "-o", str(tmp_path / out), "--dtype", "bf16"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < peak < num_parameters(config)  # a quarter of its bytes


def test_a_model_file_that_is_exported_has_its_tokenizer_and_replaces_nothing(with_tokenizer, tmp_path):
    imported(with_tokenizer, tmp_path)
    export_hf.main([str(tmp_path / "imported.bin"), "-o", str(tmp_path / "other.bin")])
    assert (tmp_path / "other.bin").read_bytes() == (tmp_path / "imported.bin").read_bytes()
    for name in ("tokenizer.json", "tokenizer.bin", "tokenizer_config.json"):
        assert (tmp_path / f"other_{name}").read_bytes() == (tmp_path / f"imported_{name}").read_bytes()
    (tmp_path / "mine_tokenizer.json").write_text("precious")
    for name, there in ("imported.bin", "imported.bin"), ("mine.bin", "mine_tokenizer.json"):
        with pytest.raises(UserError, match=f"{there} exists already: remove it, or name another"):
            export_hf.main([str(tmp_path / "other.bin"), "-o", str(tmp_path / name), "--dtype", "bf16"])
    assert (tmp_path / "mine_tokenizer.json").read_text() == "precious" and not (tmp_path / "mine.bin").exists()


def test_an_unknown_dtype_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        export_hf.main([str(tmp_path / "model.bin"), "--dtype", "fp16"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "argument --dtype: invalid choice: 'fp16'" in said and "bf16" in said


@pytest.mark.parametrize("config", FIRST, ids=name_of)
def test_named_tensors_are_views_that_can_be_set_of_numpy_and_of_pytorch(config, rng):
    sizes = config.sizes()
    zeros = {name: np.zeros(shape_of(shape, sizes), np.float32) for name, shape in config.parameters()}
    theirs = {name: p.detach() for name, p in transformers_parameters(make_model(config)).items()}
    in_torch = {name: torch.from_numpy(tensor.copy()) for name, tensor in zeros.items()}
    for name, view, shape in named_tensors(config, zeros):
        assert shape == tuple(theirs[name].shape)
        view[...] = theirs[name].numpy().reshape(view.shape)
    for name, view, _ in named_tensors(config, in_torch):
        view[...] = theirs[name].reshape(view.shape)
    assert_parameters(config, zeros, make_model(config))
    for name, tensor in zeros.items():
        np.testing.assert_array_equal(in_torch[name].numpy(), tensor)


@pytest.mark.parametrize(("channels", "heads"), [(768, 12), (1024, 16), (1280, 20), (1600, 25)])
def test_a_lone_file_of_any_width_of_gpt2_gets_its_heads(channels, heads, tmp_path):
    with torch.device("meta"):  # shapes without numbers, which would take a while to draw
        model = GPT2LMHeadModel(HFConfig(n_positions=5, vocab_size=7, n_layer=1, n_head=heads, n_embd=channels))
    tensors = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    config, _ = imported(tmp_path / "model.safetensors", tmp_path)
    assert config == GPT2Config(5, 7, 1, heads, channels)


@only_gpt2
def test_heads_that_no_config_says_can_be_given_and_are_else_a_guess_that_is_said(theirs, tmp_path, capsys):
    save_file(tensors_of(theirs), tmp_path / "model.safetensors")
    capsys.readouterr()
    assert imported(tmp_path / "model.safetensors", tmp_path)[0].num_heads == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "model.safetensors: no config.json says" in said and "1 of 24 channels" in said and "--heads" in said
    assert imported(tmp_path / "model.safetensors", tmp_path, "--heads", "3")[0].num_heads == 3
    theirs.config.save_pretrained(tmp_path)
    assert imported(tmp_path / "model.safetensors", tmp_path)[0].num_heads == 3
    assert not capsys.readouterr().err


@only_llama
def test_a_llama_says_its_heads_itself(saved, tmp_path):
    with pytest.raises(UserError, match="--heads"):
        imported(saved, tmp_path, "--heads", "3")
    (saved / "config.json").unlink()
    assert "another model needs a config.json" in refusal(saved, tmp_path)


@pytest.mark.parametrize(
    "theirs, buffers",
    [
        (GPT2S[0], {"h.{}.attn.bias": MASK, "h.{}.attn.masked_bias": torch.tensor(-1e4)}),
        (LLAMAS[0], {"layers.{}.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        (PYTHIAS[0], {
            "layers.{}.attention.bias": MASK,
            "layers.{}.attention.masked_bias": torch.tensor(-1e9),
            "layers.{}.attention.rotary_emb.inv_freq": torch.ones(2),
        }),
    ],
    ids=lambda value: name_of(value) if isinstance(value, Config) else "buffers",
    indirect=["theirs"],
)  # fmt: skip
def test_names_without_prefix_and_the_buffers_of_old_files_are_understood(theirs, buffers, request, tmp_path):
    type(theirs.base_model)(theirs.config).save_pretrained(tmp_path / "old")  # for its config.json
    old = {name.removeprefix(f"{theirs.base_model_prefix}."): tensor for name, tensor in tensors_of(theirs).items()}
    assert not old.keys() & tensors_of(theirs).keys() - {"lm_head.weight", "embed_out.weight"}
    for layer in range(theirs.config.num_hidden_layers):
        old |= {name.format(layer): buffer.clone() for name, buffer in buffers.items()}
    save_file(old, tmp_path / "old" / "model.safetensors")
    config, tensors = imported(tmp_path / "old", tmp_path)
    assert config == request.node.callspec.params["theirs"]
    assert_parameters(config, tensors, theirs)


@each_family
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_precisions_become_fp32(dtype, theirs, tmp_path):
    theirs.to(dtype).save_pretrained(tmp_path / "saved")
    assert_parameters(*imported(tmp_path / "saved", tmp_path), theirs)


@each_family
def test_weights_that_are_no_floats_are_refused(saved, tmp_path):
    path = saved / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "layers.1" in name or "h.1" in name)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path)
    assert f"{name} is of type I8" in refusal(saved, tmp_path)


@each_family
@pytest.mark.parametrize("indexed", [True, False])
def test_a_model_in_several_files_is_put_together(indexed, theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    if not indexed:
        (tmp_path / "saved" / "model.safetensors.index.json").unlink()
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 2
    assert_parameters(*imported(tmp_path / "saved", tmp_path), theirs)
    (tmp_path / "imported.bin").unlink()
    for missing in (files[1], files[-1]):
        aside = missing.rename(tmp_path / "aside")
        assert f"{missing} is missing" in refusal(tmp_path / "saved", tmp_path)
        aside.rename(missing)
    if indexed:
        (tmp_path / "saved" / "model.safetensors.index.json").write_text("{}")
        assert "no weight_map" in refusal(tmp_path / "saved", tmp_path)


@each_family
@pytest.mark.parametrize(("dtype", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_a_large_model_is_exported_as_several_files(dtype, itemsize, theirs, tmp_path, monkeypatch):
    monkeypatch.setattr(export_hf, "FILE_BYTES", 5000 * itemsize)
    theirs.to(torch.bfloat16 if dtype == "bf16" else torch.float32).save_pretrained(tmp_path / "saved")
    imported(tmp_path / "saved", tmp_path)
    export_hf.main([str(tmp_path / "imported.bin"), "-o", str(tmp_path / "out"), "--dtype", dtype])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and {path.name for path in files} == set(index["weight_map"].values())
    assert [path.name for path in files] == [f"model-{n:05}-of-{len(files):05}.safetensors" for n, _ in
                                             enumerate(files, start=1)]  # fmt: skip
    assert index["metadata"]["total_size"] == itemsize * sum(p.numel() for p in theirs.parameters())
    for path in files:
        with safe_open(path, "pt") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]
            assert sum(sizes) <= 5000 * itemsize or len(sizes) == 1
            assert all(index["weight_map"][name] == path.name for name in file.keys())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, parameter in theirs.named_parameters():
        assert again.dtype == parameter.dtype and torch.equal(again.get_parameter(name), parameter), name
    before = (tmp_path / "imported.bin").read_bytes()
    imported(tmp_path / "out", tmp_path)
    assert (tmp_path / "imported.bin").read_bytes() == before


@each_tied
def test_an_untied_classifier_is_refused_and_a_tied_one_is_not(saved, tmp_path):
    tensors = load_file(saved / "model.safetensors")
    tensors["lm_head.weight"] = next(tensors[name] for name in tensors if "embed" in name or "wte" in name).clone()
    save_file(tensors, saved / "model.safetensors")
    imported(saved, tmp_path)
    (tmp_path / "imported.bin").unlink()
    tensors["lm_head.weight"][3, 2] += 1
    save_file(tensors, saved / "model.safetensors")
    assert "lm_head.weight" in refusal(saved, tmp_path)


@only_llama
def test_an_untied_llama_needs_its_classifier(saved, tmp_path):
    change(saved / "config.json", tie_word_embeddings=False)
    assert "tensor lm_head.weight is missing" in refusal(saved, tmp_path)


@only_gpt2
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model_type", "mixtral"), ("activation_function", "relu"), ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True), ("add_cross_attention", True),
        ("n_head", 5), ("n_head", "3"), ("n_head", 0), ("quantization_config", {"quant_method": "bitsandbytes"}),
    ],
)  # fmt: skip
def test_a_model_that_computes_something_else_is_refused(setting, value, saved, tmp_path):
    change(saved / "config.json", **{setting: value})
    message = refusal(saved, tmp_path)
    assert "saved" in message and ("5 heads" if value == 5 else setting) in message


@only_llama
@pytest.mark.parametrize(
    ("setting", "value", "supported"),
    [
        ("model_type", "mixtral", supported_types()),
        ("hidden_act", "gelu", "silu is supported"),
        ("attention_bias", True, "False is supported"),
        ("mlp_bias", True, "False is supported"),
        ("pretraining_tp", 2, "1 is supported"),
        ("quantization_config", {"quant_method": "bitsandbytes", "bits": 4}, "none is supported"),
        ("head_dim", 16, "hidden_size / num_attention_heads, 48 / 6, is supported"),
        ("num_key_value_heads", 4, "a divisor of num_attention_heads, 6, is supported"),
        ("num_attention_heads", 5, "48 channels cannot be split among 5 heads"),
        ("num_attention_heads", 48, "are odd, and RoPE turns pairs"),
        ("hidden_size", 0, "a whole number from 1 on is supported"),
        ("hidden_size", "48", "a whole number from 1 on is supported"),
        ("max_position_embeddings", 2**31, "a whole number below 2**31 is supported"),
        ("rms_norm_eps", 10**39, "a number is supported"),
        ("rms_norm_eps", 1e300, "a number is supported"),
        ("intermediate_size", None, "a whole number from 1 on is supported"),
        ("rms_norm_eps", "1e-5", "a number is supported"),
        ("rms_norm_eps", -1e-5, "norm_eps is -1e-05; it must be a positive number"),
    ],
    ids=str,
)
def test_a_llama_that_computes_something_else_is_refused(setting, value, supported, saved, tmp_path):
    change(saved / "config.json", **{setting: value})
    if setting == "num_attention_heads":
        change(saved / "config.json", num_key_value_heads=1, head_dim=None)
    message = refusal(saved, tmp_path)
    assert "saved" in message and supported in message
    assert setting in message or supported.startswith(("48 channels", "are odd", "norm_eps"))


def save_mistral(folder: Path, config: Config) -> MistralForCausalLM:
    """A Mistral without a window, of a Llama's sizes and weights."""
    llama = make_model(config)
    given = {name: value for name, value in llama.config.to_dict().items() if name not in ("model_type", "dtype")}
    mistral = MistralForCausalLM(MistralConfig(**given | {"sliding_window": None}))
    mistral.load_state_dict(llama.state_dict())
    mistral.save_pretrained(folder)
    return mistral


@pytest.mark.parametrize("config", LLAMAS[:2], ids=name_of)
@pytest.mark.parametrize("settings", [{}, {"head_dim": None}], ids=str)
def test_a_mistral_without_a_window_is_imported_as_the_llama_that_it_is(config, settings, dev, tmp_path, rng):
    theirs = save_mistral(tmp_path / "saved", config)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "mistral"
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    read, tensors = imported(tmp_path / "saved", tmp_path)
    assert read == config
    assert_parameters(config, tensors, theirs)
    assert_logits(dev, tmp_path / "imported.bin", config, theirs, rng)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sliding_window": 4096}, "sliding_window is 4096 in its config.json; none is supported"),
        ({"sliding_window": 1}, "sliding_window is 1 in its config.json; none is supported"),
        ({}, "sliding_window is 4096 in its config.json; none is supported"),  # which transformers takes it to be
        ({"sliding_window": None, "head_dim": 16},
         "head_dim is 16 in its config.json; hidden_size / num_attention_heads, 48 / 6, is supported"),
        ({"sliding_window": None, "hidden_act": "gelu"}, "hidden_act is 'gelu' in its config.json; silu is supported"),
        ({"sliding_window": None, "attention_bias": True}, "attention_bias is True in its config.json; False is"),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistral_that_computes_something_else_is_refused(settings, said, tmp_path):
    save_mistral(tmp_path / "saved", LLAMAS[0])
    path = tmp_path / "saved" / "config.json"
    content = json.loads(path.read_text())
    del content["sliding_window"]
    path.write_text(json.dumps(content | settings))
    assert said in refusal(tmp_path / "saved", tmp_path)


SCALED = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip
NOT_SCALED = replace(LLAMAS[0], rope_theta=7e4)
SCALED_BY_8 = replace(NOT_SCALED, rope_scaling=8.0)


@only_llama
@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, NOT_SCALED),
        ({"rope_parameters": {"rope_theta": 70000}}, NOT_SCALED),
        ({"rope_theta": 7e4}, NOT_SCALED),
        ({"rope_theta": 7e4, "rope_scaling": {"type": "default"}}, NOT_SCALED),
        ({}, replace(NOT_SCALED, rope_theta=1e4)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7e4} | SCALED}, SCALED_BY_8),
        ({"rope_theta": 7e4, "rope_scaling": {"rope_type": "llama3"} | SCALED}, SCALED_BY_8),
        ({"rope_theta": 7e4, "rope_scaling": {"type": "llama3"} | SCALED}, SCALED_BY_8),
        ({"rope_theta": 7e4, "rope_scaling": {"rope_type": "llama3"} | SCALED | {"factor": 32}},
         replace(NOT_SCALED, rope_scaling=32.0)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7e4} | SCALED
          | {"original_max_position_embeddings": 4096}}, replace(SCALED_BY_8, original_length=4096)),
        ({"rope_theta": 7e4, "rope_scaling": {"type": "default", "original_max_position_embeddings": 4096}},
         NOT_SCALED),
    ],
    ids=str,
)  # fmt: skip
def test_rope_is_understood_as_every_release_of_transformers_writes_it(settings, config, saved, tmp_path):
    change(saved / "config.json", **({"rope_parameters": None} | settings))
    assert imported(saved, tmp_path)[0] == config


@only_llama
@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("field", "value", "supported"),
    [
        ("rope_type", "yarn", "default or llama3"), ("rope_type", "linear", "default or llama3"),
        ("low_freq_factor", 2.0, "1 is"), ("high_freq_factor", 8.0, "4 is"),
        ("original_max_position_embeddings", 0, "a whole number from 1 on is"),
        ("original_max_position_embeddings", 2**31, "a whole number below 2**31 is"),
        ("original_max_position_embeddings", 4096.5, "a whole number from 1 on is"),
        ("original_max_position_embeddings", None, "a whole number from 1 on is"),
        ("factor", 0.5, "a number from 1 on"), ("factor", "8", "a number"), ("rope_theta", "big", "a number"),
        ("rope_theta", 10**39, "a number"), ("factor", 1e300, "a number"),
        ("partial_rotary_factor", 0.5, "1 is"),
    ],
)  # fmt: skip
def test_rope_that_turns_otherwise_is_refused(where, field, value, supported, saved, tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5} | SCALED | {field: value}
    change(saved / "config.json", **({"rope_parameters": None} | {where: rope}))
    message = refusal(saved, tmp_path)
    assert f"{where}.{field} is {value!r}" in message and supported in message


@only_pythia
@pytest.mark.parametrize(
    ("setting", "value", "supported"),
    [
        ("hidden_act", "relu", "gelu_pytorch_tanh or gelu or gelu_new or gelu_fast is supported"),
        ("attention_bias", False, "True is supported"),
        ("use_parallel_residual", "yes", "True or False is supported"),
        ("tie_word_embeddings", True, "False is supported"),
        ("quantization_config", {"quant_method": "bitsandbytes"}, "none is supported"),
        ("intermediate_size", 95, "4 times hidden_size, 24, is supported"),
        ("layer_norm_eps", "1e-5", "a number is supported"),
        ("num_hidden_layers", None, "a whole number from 1 on is supported"),
        ("num_attention_heads", 5, "24 channels cannot be split among 5 heads"),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0}, "default is supported"),
        ("rope_parameters", {"rope_theta": "big"}, "a number is supported"),
        ("rope_parameters", {"partial_rotary_factor": "all"}, "a number is supported"),
        ("rope_parameters", {"partial_rotary_factor": 0.4}, "it must be 2, 4, …"),  # 3 channels of 8
        ("rope_parameters", {"partial_rotary_factor": 0.1}, "it must be 2, 4, …"),
    ],
    ids=str,
)
def test_a_pythia_that_computes_something_else_is_refused(setting, value, supported, saved, tmp_path):
    change(saved / "config.json", **{setting: value})
    message = refusal(saved, tmp_path)
    assert "saved" in message and supported in message
    assert setting in message or "heads" in message or "rotary" in message


@only_pythia
@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({"rotary_pct": 0.75, "rotary_emb_base": 500}, replace(PYTHIAS[0], rotary=0.75, rope_theta=500.0)),
        ({}, replace(PYTHIAS[0], rotary=0.25)),
        ({"rope_parameters": {"rope_theta": 70.0}, "rotary_pct": 1}, replace(PYTHIAS[0], rotary=1.0, rope_theta=70.0)),
        ({"rope_parameters": {"partial_rotary_factor": 0.75, "rope_type": "default"}, "rotary_pct": 0.25},
         replace(PYTHIAS[0], rotary=0.75)),
    ],
    ids=str,
)  # fmt: skip
def test_rotary_is_understood_as_every_release_of_transformers_writes_it(settings, config, saved, tmp_path):
    change(saved / "config.json", **({"rope_parameters": None} | settings))
    assert imported(saved, tmp_path)[0] == config


@only_pythia
@pytest.mark.parametrize(
    ("act", "gelu"),
    [("gelu", "erf"), ("gelu_new", "tanh"), ("gelu_fast", "tanh"), ("gelu_pytorch_tanh", "tanh"), (None, "erf")],
)
def test_a_pythia_has_the_gelu_that_its_config_asks_for(act, gelu, saved, tmp_path):
    change(saved / "config.json", hidden_act=act)
    assert imported(saved, tmp_path)[0].gelu == gelu


@pytest.mark.parametrize("variant", [{"norm": "rms"}, {"tied_norm": True}], ids=str)
def test_a_pythia_that_transformers_does_not_have_is_not_exported(variant, tmp_path, rng):
    write_random(tmp_path / "model.bin", replace(PYTHIAS[0], **variant), rng)
    with pytest.raises(UserError, match="neither RMSNorm nor one norm for both"):
        export_hf.main([str(tmp_path / "model.bin")])
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"]


@only_pythia
def test_a_model_that_no_file_names_is_neither_imported_nor_exported(
    saved, tmp_path, monkeypatch, rng
):
    monkeypatch.delitem(families(), "gpt_neox")
    assert supported_types() in refusal(saved, tmp_path) and "gpt_neox" not in supported_types()
    write_random(tmp_path / "model.bin", PYTHIAS[0], rng)
    with pytest.raises(UserError, match="no file in dev/hf/ says what .* call a Pythia .train_pythia.py"):
        export_hf.main([str(tmp_path / "model.bin")])
    assert not (tmp_path / "model").exists()


def test_damaged_or_foreign_files_are_refused(saved, tmp_path):
    path = saved / "model.safetensors"
    assert "no such file" in refusal(tmp_path / "nowhere", tmp_path)
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if "h.1.ln_1.bias" not in name}, path)
    assert "h.1.ln_1.bias is missing" in refusal(saved, tmp_path)
    save_file(tensors | {"transformer.h.1.attn.c_attn.weight": torch.zeros(72, 24)}, path)
    assert "is (72, 24); a GPT-2 of these sizes has it as (24, 72)" in refusal(saved, tmp_path)
    save_file(tensors | {"transformer.h.0.crossattention.c_attn.weight": torch.zeros(3)}, path)
    assert "none of GPT-2's" in refusal(saved, tmp_path)
    save_file({"a": torch.zeros(3)}, path)
    assert "no GPT-2" in refusal(saved, tmp_path)
    path.write_bytes(b"\0" * 100)
    assert "not a whole safetensors file" in refusal(saved, tmp_path)
    path.unlink()
    assert "no model.safetensors" in refusal(saved, tmp_path)
    save_file(tensors, path)
    (saved / "config.json").write_text("[")
    assert "config.json: not a JSON object" in refusal(saved, tmp_path)


@pytest.mark.parametrize(
    ("config", "kind", "head"),
    [
        (GPT2S[0], GPT2ForSequenceClassification, "score.weight"),
        (GPT2S[0], GPT2ForTokenClassification, "classifier.bias"),
        (GPT2S[0], GPT2ForQuestionAnswering, "qa_outputs.bias"),
        (LLAMAS[0], LlamaForSequenceClassification, "score.weight"),
        (PYTHIAS[0], GPTNeoXForSequenceClassification, "score.weight"),
        (PYTHIAS[0], GPTNeoXForTokenClassification, "classifier.bias"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_classifier_is_said_to_be_one_with_the_class_that_is_needed(config, kind, head, tmp_path):
    kind(make_model(config).config).save_pretrained(tmp_path / "saved")
    needed = class_of(config)
    words = f"saved: tensor {head} is the head of a classifier; a language model, {needed}, is needed"
    assert words in refusal(tmp_path / "saved", tmp_path)
    if kind.__name__.startswith("GPT2"):  # which needs no config.json
        (tmp_path / "saved" / "config.json").unlink()
        assert words in refusal(tmp_path / "saved", tmp_path)


@only_llama
def test_a_damaged_llama_is_refused(saved, tmp_path):
    path = saved / "model.safetensors"
    tensors = load_file(path)
    k = "model.layers.1.self_attn.k_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != k}, path)
    assert f"{k} is missing" in refusal(saved, tmp_path)
    save_file(tensors | {k: torch.zeros(48, 48)}, path)
    assert "is (48, 48); a Llama 3 of these sizes has it as (16, 48)" in refusal(saved, tmp_path)
    save_file(tensors | {"model.layers.2.mlp.up_proj.weight": torch.zeros(40, 48)}, path)
    assert "tensor model.layers.2.mlp.up_proj.weight is none of Llama 3's" in refusal(saved, tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert "not a whole safetensors file" in refusal(saved, tmp_path)


@each_family
def test_an_import_that_fails_leaves_the_model_that_was_there(saved, tmp_path, monkeypatch):
    imported(saved, tmp_path)
    before = (tmp_path / "imported.bin").read_bytes()

    def fail(tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(import_hf, "read", fail)
    with pytest.raises(UserError, match="imported.bin: cannot be written .no space left"):
        imported(saved, tmp_path)
    assert (tmp_path / "imported.bin").read_bytes() == before
    assert not list(tmp_path.glob("*.part"))


@each_family
def test_a_long_import_shows_how_far_it_is(saved, tmp_path, monkeypatch, capsys):
    seconds = iter(range(0, 10_000, 2))
    monkeypatch.setattr(import_hf.time, "monotonic", lambda: next(seconds))
    imported(saved, tmp_path)
    shown = [line for line in capsys.readouterr().out.splitlines() if "% of" in line]
    percent = [int(line.partition("%")[0]) for line in shown]
    assert len(shown) > 2 and percent == sorted(percent) and percent[-1] <= 100


@each_family
def test_an_export_never_replaces_what_is_there(saved, tmp_path):
    imported(saved, tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        export_hf.main([str(tmp_path / "imported.bin"), "-o", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    assert not list(tmp_path.glob("*.part"))


# By name

COMMIT = "0123456789" * 4


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """huggingface_hub's cache, empty. The tests do not connect (tests/conftest.py)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def keep(cache: Path, name: str, folder: Path) -> Path:
    """Puts a folder's files where huggingface_hub keeps those that it has fetched."""
    place = cache / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(folder, place / "snapshots" / COMMIT))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hugging Face that has the files of the folder `repository`, with all that was asked of it."""
    asked = []

    def snapshot_download(name, revision=None, allow_patterns=None, tqdm_class=None):
        asked.append((name, revision, allow_patterns, tqdm_class))
        place = tmp_path / "fetched" / COMMIT
        place.mkdir(parents=True, exist_ok=True)
        for file in allow_patterns:
            if (tmp_path / "repository" / file).is_file():
                shutil.copy(tmp_path / "repository" / file, place)
        return str(place)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


@each_family
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_a_model_that_was_fetched_before_is_imported_by_name_without_a_connection(
    shard, theirs, cache, tmp_path, monkeypatch
):
    """Some versions of huggingface_hub ask the server whenever a commit is named. So nobody names one here."""
    real = huggingface_hub.snapshot_download

    def snapshot_download(name, revision=None, **settings):
        assert revision is None
        return real(name, **settings)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    theirs.save_pretrained(tmp_path / "saved", max_shard_size=shard)
    keep(cache, "some-one/a.model", tmp_path / "saved")
    assert_parameters(*imported("some-one/a.model", tmp_path), theirs)


def test_a_model_by_name_brings_its_tokenizer_along(with_tokenizer, cache, tmp_path):
    keep(cache, "old-name", with_tokenizer)
    imported("old-name", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / f"imported_{name}").read_bytes() == (with_tokenizer / name).read_bytes()
    assert Tokenizer.load(tmp_path / "imported_tokenizer.bin").eot == 320


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_only_what_the_import_reads_is_fetched(shard, terminal, hub, tmp_path, monkeypatch, capsys):
    theirs = make_model(LLAMAS[0])
    theirs.save_pretrained(tmp_path / "repository", max_shard_size=shard)
    weights = sorted(path.name for path in (tmp_path / "repository").glob("model*.safetensors"))
    for name in ("consolidated.safetensors", "pytorch_model.bin", "README.md", "tokenizer.model"):
        (tmp_path / "repository" / name).write_text("of no use")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert_parameters(*imported("a/model", tmp_path), theirs)
    first, second = hub
    assert first[:2] == ("a/model", None) and second[:2] == ("a/model", COMMIT)
    assert sorted(first[2]) == [
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert second[2] == weights and second[3] is (None if terminal else import_hf.RareBar)
    said = capsys.readouterr().out
    assert "fetching a/model from Hugging Face\n" in said
    assert f"fetching a/model: {weights[0]}" + (" and " if len(weights) > 1 else "\n") in said


def test_the_weights_of_a_model_that_cannot_be_imported_are_not_fetched(hub, tmp_path):
    save_mistral(tmp_path / "repository", LLAMAS[0])
    change(tmp_path / "repository" / "config.json", sliding_window=4096)
    assert refusal("a/mistral", tmp_path).startswith("a/mistral: sliding_window is 4096 in its config.json")
    change(tmp_path / "repository" / "config.json", model_type="bert")
    assert refusal("a/bert", tmp_path).startswith("a/bert: model_type is 'bert' in its config.json")
    change(tmp_path / "repository" / "config.json", model_type="llama", head_dim=16)
    assert refusal("a/llama", tmp_path).startswith("a/llama: head_dim is 16 in its config.json")
    change(tmp_path / "repository" / "config.json", head_dim=1, num_attention_heads=48, num_key_value_heads=1)
    assert "are odd, and RoPE turns pairs" in refusal("a/llama", tmp_path)
    assert len(hub) == 4


def test_nothing_is_fetched_for_a_place_that_is_none(hub, tmp_path):
    for path in tmp_path / "gone" / "model.bin", Path(__file__) / "model.bin":
        with pytest.raises(UserError, match="model.bin: .* is not a directory: make it, or name another file with -o"):
            import_hf.main(["a/model", "-o", str(path)])
    with pytest.raises(UserError, match="test_hf.py: exists and is not a model: name another file with -o"):
        import_hf.main(["a/model", "-o", __file__])
    assert not hub


def test_a_model_without_safetensors_is_refused_by_its_name(hub, tmp_path):
    make_model(LLAMAS[0]).save_pretrained(tmp_path / "repository", max_shard_size="20KB")
    (tmp_path / "repository" / "model-00002-of-00007.safetensors").unlink()
    assert refusal("a/model", tmp_path).startswith("a/model: its model-00002-of-00007.safetensors was not found; if ")
    (tmp_path / "repository" / "model.safetensors.index.json").unlink()
    shutil.rmtree(tmp_path / "fetched")
    assert refusal("a/model", tmp_path).startswith("a/model: its model.safetensors was not found; if the model has ")


@pytest.mark.parametrize("name", ["a/model", "model"])
def test_a_directory_wins_over_a_name(name, saved, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    saved.rename(name)
    imported(name, tmp_path)
    (tmp_path / "imported.bin").unlink()
    shutil.rmtree(name)
    Path(name).symlink_to("gone")
    assert refusal(name, tmp_path) == f"{name}: no such file or directory" and not hub


@pytest.mark.parametrize("name", ["./gone", "gone/", "../gone", "/gone", "a/b/c", "~/gone", "gone.safetensors", "a/ö"])
def test_what_can_be_no_name_is_a_file_that_is_missing(name, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(name, tmp_path).endswith(": no such file or directory") and not hub


def test_a_name_that_cannot_be_fetched_is_refused_in_one_line(cache, tmp_path, monkeypatch):
    message = refusal("a/model", tmp_path)
    assert message.startswith("a/model: no such file or directory, and the model can be neither found in ")
    assert str(cache) in message and message.endswith("connect, or fetch it elsewhere and name its directory")
    assert refusal("a--model", tmp_path).endswith("no such file or directory, and no name of a model at Hugging Face")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refusal("a/model", tmp_path).endswith("to fetch a model of that name: pip install huggingface_hub")


def answer(kind: str, status: int) -> Exception:
    """An error of huggingface_hub's for what a server answers."""
    response = SimpleNamespace(headers={}, request=None, status_code=status)
    return getattr(errors, kind)(f"{status} Client Error. (Request ID: x)\n\nmore of it", response=response)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (answer("RepositoryNotFoundError", 401), "no such model at Hugging Face: check the name, or if the model is"),
        (answer("GatedRepoError", 403), "gated: ask for access at https://huggingface.co/a/model, then log in with"),
        (answer("HfHubHTTPError", 401), "not for this token (401 client error. (request id: x)): log in again"),
        (answer("HfHubHTTPError", 429), "cannot be fetched (429 client error. (request id: x)): try again"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot be written (no space left on device): make room"),
        (OSError(errno.EACCES, "Permission denied"), "cannot be written (permission denied): make room there, or set"),
        (RuntimeError("Data processing error: No space left on device (os error 28)"), "(os error 28)): make room"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "cannot be fetched (connection reset by"),
        (RuntimeError(), "cannot be fetched (runtimeerror): try again, or fetch it elsewhere and name its directory"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_keeps_a_model_from_being_fetched_is_one_line_with_the_remedy(error, said, tmp_path, monkeypatch):
    def snapshot_download(*args, **settings):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    message = refusal("a/model", tmp_path)
    assert message.startswith("a/model: ") and said in message


def test_a_progress_bar_for_a_file_grows_rarely():
    file = StringIO()
    for _ in import_hf.RareBar(range(10_000), file=file):
        pass
    assert len(file.getvalue()) < 1000


# The tokenizer


@pytest.fixture
def bpe(tmp_path) -> Path:
    """A small byte-pair vocabulary, learned from this file by tokens' frequency, as a tokenizer file."""
    import tiktoken._educational as educational

    text = Path(__file__).read_text(encoding="utf-8")[:12_000]
    learned = educational.bpe_train(text, 320, export_hf.GPT2_PATTERN, visualise=None)
    tokens = sorted(learned, key=learned.get) + [b"<|endoftext|>"]
    write_tokenizer(tmp_path / "bpe.bin", tokens, len(tokens) - 1)
    return tmp_path / "bpe.bin"


def write_random(path: Path, config: Config, rng) -> None:
    write_model(path, config, rng.standard_normal(num_parameters(config), np.float32))


SAMPLES = ["", " ", "It's the tokenizer's  own test,\n\n  isn't it?", "Größe 日本語 🙂 \t\x00\x7f"]


@pytest.mark.parametrize("family", FIRST, ids=name_of)
def test_an_exported_tokenizer_splits_text_as_ours_does(family, bpe, tmp_path, rng):
    tokenizer = Tokenizer.load(bpe)
    write_random(tmp_path / "model.bin", replace(family, vocab_size=tokenizer.vocab_size), rng)
    export_hf.main([str(tmp_path / "model.bin"), "-o", str(tmp_path / "out"), "--tokenizer", str(bpe)])
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.eos_token_id == tokenizer.eot
    assert (len(exported), exported.eos_token_id) == (tokenizer.vocab_size, tokenizer.eot)
    for text in [*SAMPLES, Path(__file__).read_text(encoding="utf-8").replace("<|endoftext|>", "")]:
        tokens = tokenizer.encode(text)
        assert exported.encode(text) == tokens
        assert exported.decode(tokens) == text
    assert exported.encode("a<|endoftext|>b") == [*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode("b")]


@pytest.fixture
def with_tokenizer(bpe, tmp_path) -> Path:
    """A Llama as transformers saves one, of more tokens than its tokenizer has, which begins every text with one."""
    from tokenizers import Tokenizer as Library
    from tokenizers.processors import TemplateProcessing

    make_model(replace(LLAMAS[0], vocab_size=330)).save_pretrained(tmp_path / "saved")
    library = Library.from_str(export_hf.tokenizer_json(Tokenizer.load(bpe)))
    library.add_special_tokens(["<|begin_of_text|>"])
    begin = library.token_to_id("<|begin_of_text|>")
    library.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    library.save(str(tmp_path / "saved" / "tokenizer.json"))
    (tmp_path / "saved" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "chat_template": "x"}')
    return tmp_path / "saved"


def save_padded(folder: Path, config: Config, bpe: Path, gap: int) -> None:
    """A model of transformers with more rows than tokens, and its tokenizer.json, whose last token leaves out `gap`
    ids before it."""
    make_model(config).save_pretrained(folder)
    content = json.loads(export_hf.tokenizer_json(Tokenizer.load(bpe)))
    content["model"]["vocab"]["ĠĠĠĠĠĠ"] = Tokenizer.load(bpe).vocab_size + gap
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("family", "rows", "gap"),
    [(GPT2S[0], 1024, 0), (LLAMAS[0], 340, 0), (PYTHIAS[0], 384, 0), (LLAMAS[0], 340, 15)],
    ids=lambda value: name_of(value) if isinstance(value, Config) else str(value),
)
def test_a_padded_model_is_imported_fine_tuned_sampled_and_exported(
    family, rows, gap, bpe, tmp_path, monkeypatch, capsys
):
    config = replace(family, vocab_size=rows, max_seq_len=32)
    save_padded(tmp_path / "saved", config, bpe, gap)
    first = Tokenizer.load(tmp_path / "saved" / "tokenizer.json")
    assert first.vocab_size == 322 + gap < rows
    imported(tmp_path / "saved", tmp_path)

    monkeypatch.syspath_prepend(ROOT / "dev" / "data")
    import text

    (tmp_path / "in").mkdir()
    for number in range(20):
        (tmp_path / "in" / f"{number}.txt").write_text(f"{number}: the model, its tokens and their padding. " * 9)
    flags = ["in", "-o", "data/mine", "--tokenizer", "imported_tokenizer.json", "--val", "0.3", "--workers", "1"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text, "recommend", lambda *args: [])
    monkeypatch.setattr(sys, "argv", ["text.py", *flags])
    text.main()

    flags = "-e imported.bin -i data/mine -b 1 -t 32 -x 1 -m 2 -g 40 --device cpu --checkpoint-dir run".split()
    command = [sys.executable, ROOT / config.SCRIPT, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bits/byte" in done.stdout

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpoint = tmp_path / "run" / "step_00000001"
    capsys.readouterr()
    generate.main(["-e", str(checkpoint), "--prompt", "the model isn't", "-g", "40", "--device", "cpu"])
    written = capsys.readouterr()
    assert written.out.startswith("the model isn't") and written.err.startswith("40 tokens in")
    trained = load_model_tokenizer(checkpoint / "model.bin", rows, encodes=True)
    assert [trained.encode(text) for text in SAMPLES] == [first.encode(text) for text in SAMPLES]
    export_hf.main([str(checkpoint), "-o", "out"])
    assert AutoModelForCausalLM.from_pretrained("out").config.vocab_size == rows
    exported = AutoTokenizer.from_pretrained("out")
    assert [exported.encode(text) for text in SAMPLES] == [first.encode(text) for text in SAMPLES]
    assert exported.convert_tokens_to_ids("ĠĠĠĠĠĠ") == 321 + gap

    shutil.copy(checkpoint / "model.bin", "mine.bin")
    export_hf.main(["mine.bin"])
    assert "no tokenizer is written: none is beside mine.bin; name its file with --tokenizer" in capsys.readouterr().err
    assert not Path("mine/tokenizer.json").exists()
    shutil.copy(checkpoint / "model_tokenizer.bin", "mine_tokenizer.bin")
    export_hf.main(["mine.bin", "-o", "bin"])
    assert AutoTokenizer.from_pretrained("bin").encode("the model") == first.encode("the model")


def test_a_tokenizer_goes_along_with_its_model_there_and_back(with_tokenizer, tmp_path, capsys):
    capsys.readouterr()
    config, _ = imported(with_tokenizer, tmp_path)
    beside = tmp_path / "imported_tokenizer.json"
    assert beside.read_bytes() == (with_tokenizer / "tokenizer.json").read_bytes()
    first = Tokenizer.load(with_tokenizer / "tokenizer.json")
    for tokenizer in (Tokenizer.load(beside), load_model_tokenizer(tmp_path / "imported.bin", config.vocab_size)):
        assert (tokenizer.tokens, tokenizer.eot, tokenizer.bos) == (first.tokens, 320, 321)
        for text in SAMPLES:
            assert tokenizer.encode(text) == first.encode(text)
    binary = Tokenizer.load(tmp_path / "imported_tokenizer.bin")
    assert binary.fits(config.vocab_size) and (binary.tokens[:322], binary.eot) == (first.tokens, 320)
    export_hf.main([str(tmp_path / "imported.bin"), "-o", str(tmp_path / "out")])
    assert not capsys.readouterr().err
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (with_tokenizer / name).read_bytes()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert (exported.bos_token_id, exported.eos_token_id) == (321, 320)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("text") == [321, *first.encode("text")]


def test_a_tokenizer_beside_a_model_may_be_named_like_the_librarys_own(with_tokenizer, tmp_path):
    imported(with_tokenizer, tmp_path)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "imported.bin").rename(tmp_path / "checkpoint" / "model.bin")
    shutil.copy(with_tokenizer / "tokenizer.json", tmp_path / "checkpoint")
    export_hf.main([str(tmp_path / "checkpoint"), "-o", str(tmp_path / "out")])
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["bos_token"]) == ("<|endoftext|>", "<|begin_of_text|>")


def test_a_model_is_imported_where_its_tokenizer_cannot_be_read(with_tokenizer, tmp_path, capsys, monkeypatch):
    def import_without_tokenizer() -> str:
        imported(with_tokenizer, tmp_path)
        assert (tmp_path / "imported_tokenizer.json").is_file()
        assert not (tmp_path / "imported_tokenizer.bin").exists()
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "tokenizers", None)
        assert "pip install tokenizers" in import_without_tokenizer()
    change(with_tokenizer / "tokenizer.json", decoder=None)
    assert "byte-level BPE is supported" in import_without_tokenizer()
    export_hf.main([str(tmp_path / "imported.bin"), "-o", str(tmp_path / "out")])
    assert "no tokenizer is written" in capsys.readouterr().err
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_tokenizer_of_more_tokens_than_the_model_is_said_to_be_anothers(with_tokenizer, tmp_path, capsys):
    make_model(LLAMAS[0]).save_pretrained(with_tokenizer)
    imported(with_tokenizer, tmp_path)
    assert "322 tokens and the model 53" in capsys.readouterr().err


@each_family
def test_a_tokenizer_of_another_vocabulary_is_refused(saved, bpe, tmp_path):
    imported(saved, tmp_path)
    with pytest.raises(UserError, match="321 tokens and .*imported.bin 53"):
        export_hf.main([str(tmp_path / "imported.bin"), "--tokenizer", str(bpe)])


@pytest.mark.parametrize(("vocab_size", "eos"), [(257, 256), (50257, 50256), (300, None)])
@pytest.mark.parametrize("family", FIRST, ids=name_of)
def test_the_end_of_text_token_is_said_where_it_is_known(family, vocab_size, eos, tmp_path, rng):
    write_random(tmp_path / "model.bin", replace(family, vocab_size=vocab_size), rng)
    export_hf.main([str(tmp_path / "model.bin")])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.eos_token_id == eos


LATER = [pytest.param(each, marks=pytest.mark.long) for each in (LLAMAS[0], PYTHIAS[0])]


@pytest.mark.parametrize("theirs", [GPT2S[0], *LATER], ids=name_of, indirect=True)
def test_both_programs_run_anywhere_and_fail_in_one_line(saved, tmp_path):
    def run(script: str, *flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "dev" / "hf" / script), *flags]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert run("import_hf.py", "saved", "-o", "model.bin").returncode == 0
    assert run("export_hf.py", "model.bin").returncode == 0
    assert (tmp_path / "model" / "config.json").is_file()
    for script, flags in (("import_hf.py", ["gone", "-o", "x.bin"]), ("export_hf.py", ["gone.bin", "-o", "x"])):
        failed = run(script, *flags)
        assert (failed.returncode, failed.stderr.count("\n")) == (1, 1), failed.stderr
        assert failed.stderr.startswith("error: gone")

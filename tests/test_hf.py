"""Models to and from Hugging Face's transformers: the same weights and settings, or one line that says why not."""

import ast
import errno
import inspect
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import conftest
import generate
from dev import foreign
from dev.data.common import load_tokenizer
from dev.hf import export_hf, import_hf
from dev.hf.common import config_json, end_tokens, families, family_of, named_tensors, transformers_parameters
from dev.hf.family import COMMON, Family, Settings
from dev.hf.gpt2 import GPT2Family
from dev.hf.pythia import PythiaFamily
from dev.hf.qwen3 import Qwen3Family
from dev.scripts import kind_of
from kernels.rope import rope_table
from llmc.data.find_tokenizer import load_model_tokenizer, open_tokenizer
from llmc.data.hf_tokenizer import NEIGHBOURS
from llmc.data.token_file import open_tokens
from llmc.data.tokenizer import StreamDecoder, write_tokenizer
from llmc.files import model_file
from llmc.files.checkpoint import save_checkpoint
from llmc.files.model_file import read_model, write_model
from llmc.model.tensors import Config, num_parameters
from models import FAMILIES, GPT2S, LLAMAS, PYTHIAS, QWENS
from oracle import flat_parameters_of, opinionated, transformers_model
from support.vocabularies import BEGIN, END, LEARNED, LIBRARIES, Library, beginning
from train_gpt2_fp32 import GPT2Config

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

GPT2, LLAMA, PYTHIA, QWEN3 = GPT2S[0], LLAMAS[0], PYTHIAS[0], QWENS[0]
FIRST = [family[0] for family in FAMILIES]
ROOT = Path(__file__).resolve().parents[1]
BF16 = "--dtype", "bf16"


def id_of(value) -> str:
    return getattr(value, "NAME", None) or str(value)


each_family = pytest.mark.parametrize("config", FIRST, ids=id_of)
gpt2_and_llama = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=id_of)


def assert_parameters(config: Config, tensors: dict[str, np.ndarray], model) -> None:
    """Every number is the same, and what is not transformers' is 0."""
    theirs = transformers_parameters(model)
    for name, view, shape in named_tensors(config, tensors):
        np.testing.assert_array_equal(view.reshape(shape), theirs.pop(name).detach().float().numpy(), name)
    assert not theirs
    assert not any(tensor.any() for name, tensor in tensors.items() if name not in dict(config.parameters()))
    assert not tensors["wte"][config.vocab_size :].any()


def tensors_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in transformers_parameters(model).items()}


@pytest.fixture
def config() -> Config:
    return GPT2


@pytest.fixture
def theirs(config):
    """transformers' model, fp32."""
    return transformers_model(config).float()


@pytest.fixture
def saved(theirs, tmp_path) -> Path:
    theirs.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def model(tmp_path) -> Path:
    return tmp_path / "imported.bin"


def imported(source, tmp_path, *flags: str) -> tuple[Config, dict[str, np.ndarray]]:
    path = tmp_path / "imported.bin"
    import_hf.main([str(source), "-o", str(path), *flags])
    return read_model(path, kind_of(path).Config)


def exported(model: Path, out: Path, *flags: str) -> Path:
    export_hf.main([str(model), "-o", str(out), *flags])
    return out


def refusal(source, tmp_path, *flags: str) -> str:
    message = conftest.refusal(imported, source, tmp_path, *flags)
    assert not (tmp_path / "imported.bin").exists() and not list(tmp_path.glob("*.part"))
    return message


def change(path: Path, **settings) -> None:
    """Sets fields of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def write_random(path: Path, config: Config, rng) -> Path:
    write_model(path, config, rng.standard_normal(num_parameters(config), np.float32))
    return path


# Weights


@pytest.mark.parametrize("config", [each for family in FAMILIES for each in family], ids=id_of)
def test_a_model_has_its_weights_after_import_and_after_export(config, theirs, saved, model, tmp_path):
    """And so its logits: tests/test_oracle.py compares those of these models."""
    read, tensors = imported(saved, tmp_path)
    assert read == config
    assert_parameters(config, tensors, theirs)
    params = flat_parameters_of(theirs, config).astype(np.float32)
    params[config.vocab_size * config.channels : config.sizes()["Vp"] * config.channels] = 7  # must not matter
    write_model(tmp_path / "model.bin", config, params)
    export_hf.main([str(tmp_path / "model.bin")])
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tied = again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert tied == getattr(config, "tied", config.NAME == "GPT-2")
    assert type(again) is type(theirs) and again.dtype == torch.float32
    for name, parameter in theirs.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    before = model.read_bytes()
    imported(tmp_path / "model", tmp_path)
    assert model.read_bytes() == before


@each_family
def test_weights_exported_in_bf16_are_those_that_transformers_rounds(
    config, theirs, saved, model, tmp_path, monkeypatch
):
    """Directly, and where llm.c has such a file, by way of its version 5."""
    monkeypatch.setattr(model_file, "ROUNDED", 700)  # numbers at a time
    imported(saved, tmp_path)
    weights = load_file(exported(model, tmp_path / "out", *BF16) / "model.safetensors")
    wanted = tensors_of(theirs.bfloat16())
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(weights[name].view(torch.int16), tensor.view(torch.int16)), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    if config.header()[1] != 3:
        said = conftest.refusal(exported, model, tmp_path / "v5.bin", *BF16)
        assert "v5.bin: llm.c has no file in bf16 for such a " in said and not list(tmp_path.glob("v5*"))
        return
    v5 = exported(model, tmp_path / "v5.bin", *BF16)
    assert v5.stat().st_size - config.HEADER_BYTES == (model.stat().st_size - config.HEADER_BYTES) // 2
    imported(tmp_path / "out", tmp_path)
    assert exported(v5, tmp_path / "v3.bin").read_bytes() == model.read_bytes()


@pytest.mark.parametrize("out", ["out", "v5.bin"])
def test_an_export_in_bf16_takes_the_memory_of_a_tensor_at_most(out, tmp_path, monkeypatch, rng):
    monkeypatch.setattr(model_file, "ROUNDED", 1000)
    model = write_random(tmp_path / "model.bin", config := GPT2Config(8, 128, 16, 2, 64), rng)
    exported(model, tmp_path / f"first_{out}", *BF16)
    tracemalloc.start()
    exported(model, tmp_path / out, *BF16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < peak < num_parameters(config)  # a quarter of its bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_exported_as_several_files_and_put_together(dtype, theirs, model, tmp_path, monkeypatch):
    monkeypatch.setattr(export_hf, "FILE_BYTES", 5000 * dtype.itemsize)
    theirs.to(dtype).save_pretrained(tmp_path / "saved")
    imported(tmp_path / "saved", tmp_path)
    before, index = model.read_bytes(), tmp_path / "out" / "model.safetensors.index.json"
    out = exported(model, tmp_path / "out", "--dtype", "bf16" if dtype == torch.bfloat16 else "fp32")
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert names == [f"model-{n:05}-of-{len(names):05}.safetensors" for n in range(1, len(names) + 1)] != []
    assert all((out / name).stat().st_size < 5000 * dtype.itemsize + 4000 for name in names)  # and the header
    total = dtype.itemsize * sum(parameter.numel() for parameter in theirs.parameters())
    assert json.loads(index.read_text())["metadata"]["total_size"] == total
    again = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    for name, parameter in theirs.named_parameters():
        assert again.dtype == parameter.dtype and torch.equal(again.get_parameter(name), parameter), name
    for _ in "with the index", "without it":
        imported(out, tmp_path)
        assert model.read_bytes() == before
        model.unlink()
        for missing in (out / names[1], out / names[-1]):
            aside = missing.rename(tmp_path / "aside")
            assert f"{missing} is missing" in refusal(out, tmp_path)
            aside.rename(missing)
        index.unlink(missing_ok=True)


@each_family
@pytest.mark.parametrize("prefix, dtype", [
    (None, torch.float32), ("_orig_mod.", torch.float16), ("module.", torch.bfloat16),
    ("module._orig_mod.", torch.float64),
])  # fmt: skip
def test_weights_are_understood_as_programs_save_them(prefix, dtype, config, theirs, saved, tmp_path):
    """In other precisions; without the model's prefix and with the buffers of old files; and after training, with what
    DistributedDataParallel and torch.compile put before names."""
    tensors, own = tensors_of(theirs.to(dtype)), family_of(config).PREFIX
    if prefix is None:
        tensors = {name.removeprefix(own): tensor for name, tensor in tensors.items()}
        for name in "h.0.attn.bias", "layers.0.attention.masked_bias", "layers.0.self_attn.rotary_emb.inv_freq":
            tensors[name] = torch.ones(3)
    save_file({(prefix or "") + name: tensor for name, tensor in tensors.items()}, saved / "model.safetensors")
    assert_parameters(*imported(saved, tmp_path), theirs)


@gpt2_and_llama
def test_a_tied_weight_may_lie_under_the_classifiers_name_and_an_untied_one_is_refused(
    config, theirs, saved, model, tmp_path
):
    """safetensors' save_model leaves a tied weight out, and the file's metadata names it. Without that, transformers
    ties by the config."""
    weights, embedding = saved / "model.safetensors", family_of(config).NAMES["wte"][0]
    save_model(theirs, weights)
    tensors = load_file(weights)
    head = tensors["lm_head.weight"]
    assert embedding not in tensors
    if config is LLAMA:  # nothing says that it is tied, so the model has the numbers twice
        change(saved / "config.json", tie_word_embeddings=None)
        _, found = imported(saved, tmp_path)
        np.testing.assert_array_equal(found["wte"], found["lm_head"])
        change(saved / "config.json", tie_word_embeddings=True)
    for both in {}, {embedding: head.clone()}:
        save_file(tensors | both, weights)
        assert_parameters(*imported(saved, tmp_path), theirs)
    model.unlink()
    save_file(tensors | {embedding: head + 1}, weights)
    assert f"lm_head.weight is not {embedding}; a tied" in refusal(saved, tmp_path)


@each_family
def test_a_weight_that_is_not_finite_is_told(theirs, tmp_path, capsys):
    _, first, second, *_ = theirs.double().parameters()
    with torch.no_grad():
        first.view(-1)[-1], second.view(-1)[-1] = torch.nan, 1e300  # which becomes infinity in fp32
    theirs.save_pretrained(tmp_path / "saved")
    capsys.readouterr()
    imported(tmp_path / "saved", tmp_path)
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path / 'saved'}: weights are not finite") and said.count("\n") == 1
    assert "and in 1 other tensors" in said


def test_heads_that_no_config_says_can_be_given_and_are_else_a_guess_that_is_said(theirs, tmp_path, capsys):
    for channels, heads in (768, 12), (1024, 16), (1280, 20), (1600, 25):
        shapes = {"wte.weight": [7, channels], "wpe.weight": [5, channels], "h.0.ln_1.bias": [channels]}
        given = Settings("here", {}, {f"transformer.{name}": shape for name, shape in shapes.items()})
        assert GPT2Family.read_config(given) == GPT2Config(5, 7, 1, heads, channels)
    save_file(tensors_of(theirs), weights := tmp_path / "model.safetensors")
    assert imported(weights, tmp_path)[0].num_heads == 1
    out, said = capsys.readouterr()
    assert f"no tokenizer is in {tmp_path}: the model is imported without one\n" in out and said.count("\n") == 1
    assert "model.safetensors: no config.json says" in said and "1 of 24 channels" in said and "--heads" in said
    assert imported(weights, tmp_path, "--heads", "3")[0].num_heads == 3
    theirs.config.save_pretrained(tmp_path)
    assert imported(weights, tmp_path)[0].num_heads == 3
    assert not capsys.readouterr().err


# Folders that make no model


def test_tensors_that_make_no_model_are_refused(saved, tmp_path):
    path = saved / "model.safetensors"
    tensors = load_file(path)
    bias, weight = "transformer.h.1.ln_1.bias", "transformer.h.1.attn.c_attn.weight"
    classifier = "is the head of a classifier; a language model, GPT2LMHeadModel, is needed"
    for changed, said in (
        ({bias: None}, f"{bias} is missing"), ({f"module.{bias}": torch.zeros(24)}, f"tensor {bias} is there twice"),
        ({bias: tensors[bias].to(torch.int8)}, f"{bias} is of type I8"),
        ({weight: torch.zeros(72, 24)}, "is (72, 24); a GPT-2 of these sizes has it as (24, 72)"),
        ({"crossattention.x": torch.zeros(3)}, "tensor transformer.crossattention.x is none of GPT-2's"),
        ({"score.weight": torch.zeros(3)}, f"tensor score.weight {classifier}"),
        ({name: None for name in tensors} | {"a": torch.zeros(3)}, "no GPT-2"),
        ({"transformer.h.0.attn.c_attn.lora_A.weight": torch.zeros(3, 3)},
         f"{path}: an adapter (LoRA), not a model: merge it"),
    ):  # fmt: skip
        save_file({name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}, path)
        assert said in refusal(saved, tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert "not a whole safetensors file" in refusal(saved, tmp_path)
    path.unlink()
    names = '{"weight_map": {"a": "../b.safetensors"}}'
    for index, said in ("{}", "it has no weight_map"), (names, "'../b.safetensors' is no name of a safetensors file"):
        (saved / "model.safetensors.index.json").write_text(index)
        assert said in refusal(saved, tmp_path)
    (saved / "adapter_config.json").write_text("{}")
    assert refusal(saved, tmp_path).startswith(f"{saved}: an adapter (LoRA), not a model: merge it")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_pointer_of_git_lfs_in_place_of_a_file_is_told(name, saved, tmp_path):
    path, said = saved / name, f"{saved / name}: a pointer of Git LFS, not the file itself: "
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    for source in (saved, path) if name == "model.safetensors" else (saved,):
        assert refusal(source, tmp_path).startswith(said)
    assert name != "tokenizer.json" or said in conftest.refusal(open_tokenizer, path)


def test_a_model_comes_without_a_tokenizer_that_is_empty(saved, tmp_path, capsys):
    (saved / "tokenizer.json").write_text("")
    imported(saved, tmp_path)
    assert f"no {tmp_path / 'imported_tokenizer.json'}: {saved / 'tokenizer.json'}: not JSON" in capsys.readouterr().err
    assert not list(tmp_path.glob("*tokenizer*"))


def test_a_directory_one_level_too_high_is_told_where_the_model_lies(saved, hub_cache, tmp_path):
    for step in 9, 10:
        folder = Path(shutil.copytree(saved, tmp_path / "run" / f"checkpoint-{step}"))
        os.utime(folder, (step, step))
    newest = f"run: no model.safetensors there; the newest of 2 is {folder}: name that directory"
    assert refusal(tmp_path / "run", tmp_path).endswith(newest)
    place = keep(hub_cache, "a/model", saved)
    for source in place.parents[1], hub_cache:
        assert refusal(source, tmp_path).endswith(f"no model.safetensors there; it is in {place}: name that directory")


@pytest.mark.parametrize("config", [LLAMA], ids=id_of)
def test_a_llama_says_its_heads_itself_and_needs_its_classifier_unless_it_is_tied(saved, tmp_path):
    assert "--heads is for a GPT-2 without config.json" in refusal(saved, tmp_path, "--heads", "3")
    change(saved / "config.json", tie_word_embeddings=False)
    assert "tensor lm_head.weight is missing" in refusal(saved, tmp_path)
    change(saved / "config.json", model_type="mixtral")
    *others, last = families()
    assert f"model_type is 'mixtral' in its config.json; {', '.join(others)} or {last} is" in refusal(saved, tmp_path)
    (saved / "config.json").unlink()
    assert "another model needs a config.json" in refusal(saved, tmp_path)


def test_an_import_that_fails_leaves_the_model_that_was_there(saved, model, tmp_path, monkeypatch):
    imported(saved, tmp_path)
    before = model.read_bytes()

    def fail(tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(import_hf, "read", fail)
    assert "imported.bin: cannot be written (no space left" in conftest.refusal(imported, saved, tmp_path)
    assert model.read_bytes() == before and not list(tmp_path.glob("*.part"))


def test_a_long_import_shows_how_far_it_is(saved, tmp_path, monkeypatch, capsys):
    seconds = iter(range(0, 10_000, 2))
    monkeypatch.setattr(import_hf.time, "monotonic", lambda: next(seconds))
    imported(saved, tmp_path)
    percent = [int(line.partition("%")[0]) for line in capsys.readouterr().out.splitlines() if "% of" in line]
    assert len(percent) > 2 and percent == sorted(percent) and percent[-1] <= 100


@pytest.mark.parametrize("variant", [{"norm": "rms"}, {"tied_norm": True}], ids=str)
def test_a_pythia_that_transformers_does_not_have_is_not_exported(variant, tmp_path, rng):
    model = write_random(tmp_path / "model.bin", replace(PYTHIA, **variant), rng)
    assert "neither RMSNorm nor one norm for both" in conftest.refusal(export_hf.main, [str(model)])
    assert [*tmp_path.iterdir()] == [model]


def test_both_programs_run_anywhere_and_fail_in_one_line(saved, tmp_path):
    def run(script: str, *flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "dev" / "hf" / script), *flags]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert run("import_hf.py", "saved", "-o", "model.bin").returncode == 0 and (tmp_path / "model.bin").is_file()
    failed = run("export_hf.py", "gone.bin", "-o", "x")
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1) and failed.stderr.startswith("error: gone")


# Settings

SCALED = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip
OLD = {"rope_parameters": None}  # before transformers 5


def settings_of(config: Config) -> dict:
    """What transformers writes into config.json."""
    return AutoConfig.for_model(**config_json(config)).to_dict()


def read_settings(family: type[Family], settings: dict) -> Config:
    """What an import makes of a config.json."""
    given = Settings("here", settings)
    given.check(COMMON + family.REQUIRED)
    return family.read_config(given)


@pytest.mark.parametrize(
    ("config", "setting", "value", "supported"),
    [
        (GPT2, "activation_function", "relu", "gelu_new or gelu_pytorch_tanh"),
        (GPT2, "layer_norm_epsilon", 1e-6, "1e-05"), (GPT2, "scale_attn_weights", False, "True"),
        (GPT2, "scale_attn_by_inverse_layer_idx", True, "False"), (GPT2, "add_cross_attention", True, "False"),
        (LLAMA, "hidden_act", "gelu", "silu"), (LLAMA, "attention_bias", True, "False"),
        (LLAMA, "mlp_bias", True, "False"), (LLAMA, "pretraining_tp", 2, "1"),
        (LLAMA, "head_dim", 16, "hidden_size / num_attention_heads, 48 / 6,"),
        (LLAMA, "num_key_value_heads", 4, "a divisor of num_attention_heads, 6,"),
        (LLAMA, "intermediate_size", None, "a whole number from 1 on"), (LLAMA, "rms_norm_eps", "1e-5", "a number"),
        (LLAMA, "vocab_size", 2**31, "a whole number below 2**31"),
        (PYTHIA, "hidden_act", "relu", "gelu_pytorch_tanh or gelu or gelu_new or gelu_fast"),
        (PYTHIA, "attention_bias", False, "True"), (PYTHIA, "tie_word_embeddings", True, "False"),
        (PYTHIA, "intermediate_size", 95, "4 times hidden_size, 24,"),
        (PYTHIA, "head_dim", 4, "hidden_size / num_attention_heads, 24 / 3,"),
        (QWEN3, "hidden_act", "gelu", "silu"), (QWEN3, "attention_bias", True, "False"),
        (QWEN3, "use_sliding_window", True, "False"), (QWEN3, "layer_types", 7, "full_attention alone"),
        (QWEN3, "num_key_value_heads", 5, "a divisor of num_attention_heads, 6,"),
        *((config, "is_causal", False, "True") for config in FIRST),
        *((config, "per_layer_config", {"0": {}}, "none") for config in FIRST),
        *((config, "quantization_config", {"quant_method": "bitsandbytes"}, "none") for config in FIRST),
        *((config, "attention_chunk_size", 8, "none") for config in FIRST),
        *((config, "layer_types", ["full_attention", "sliding_attention"], "full_attention alone") for config in FIRST),
        *((config, "sliding_window", 8, "none") for config in (GPT2, LLAMA, PYTHIA)),
    ],
    ids=id_of,
)  # fmt: skip
def test_a_model_that_computes_something_else_is_refused(config, setting, value, supported):
    said = conftest.refusal(read_settings, family_of(config), settings_of(config) | {setting: value})
    assert said == f"here: {setting} is {value!r} in its config.json; {supported} is supported"


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}},
         "rope_scaling.rope_type is 'linear' in its config.json; default or llama3 is supported"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"} | SCALED | {"high_freq_factor": 8.0}},
         "rope_scaling.high_freq_factor is 8.0 in its config.json; 4 is supported"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"} | SCALED | {"factor": 0.5}}, "rope_scaling.factor is 0.5"),
        (LLAMA, {"rope_parameters": 7}, "rope_parameters is 7 in its config.json; an object is supported"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 7e4}}}, "rope_parameters.full_attention is {"),
        (LLAMA, {"rope_parameters": {"mrope_section": [8, 8]}}, "rope_parameters.mrope_section is [8, 8]"),
        (LLAMA, OLD | {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor is 0.5"),
        (LLAMA, {"rope_local_base_freq": 1e4}, "rope_local_base_freq is 10000.0"),
        (PYTHIA, {"rotary_emb_base": 50, "rope_theta": 70}, "rope_theta is 70"),
        (PYTHIA, {"rope_scaling": {"rope_type": "llama3"} | SCALED}, "rope_scaling.rope_type is 'llama3'"),
        (QWEN3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'"),
    ],
    ids=id_of,
)  # fmt: skip
def test_a_setting_of_positions_that_nobody_knows_is_refused_by_its_name(config, settings, said):
    message = conftest.refusal(read_settings, family_of(config), settings_of(config) | settings)
    assert message.startswith(f"here: {said}")


# What no logit depends on: dropout, first weights, heads of classifiers, tokens' roles, how attention is computed; and
# what the tensors show: GPT-2's sizes, and whether weights are tied.
HARMLESS = {
    "_attn_implementation", "attention_dropout", "attn_pdrop", "bos_token_id", "classifier_dropout", "embd_pdrop",
    "eos_token_id", "hidden_dropout", "initializer_range", "is_decoder", "max_window_layers",
    "n_embd", "n_inner", "n_layer", "n_positions", "num_labels", "pad_token_id", "problem_type",
    "reorder_and_upcast_attn", "resid_pdrop", "summary_activation", "summary_first_dropout", "summary_last_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "tie_word_embeddings", "use_cache", "vocab_size",
}  # fmt: skip


def settings_read(module) -> set[str]:
    """The settings that a module of transformers reads of a config, and those that its config class names."""
    found, nodes = set(), [*ast.walk(ast.parse(inspect.getsource(module)))]
    methods = {node.func for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config") and node not in methods:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            if ast.unparse(node.args[0]).endswith("config") and isinstance(node.args[1], ast.Constant):
                found.add(node.args[1].value)
        elif isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            found |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
    return found


@pytest.mark.parametrize("kind", families())
def test_every_setting_that_transformers_reads_is_looked_at(kind):
    """A setting that fails here is new: refuse what it changes, or name it among the HARMLESS."""
    family, noted = families()[kind], set()

    class Noting(Settings):
        def get(self, name, default=None):
            noted.add(name)
            return super().get(name, default)

    config = next(config for config in FIRST if type(config) is family.Config)
    theirs = transformers_model(config)
    shapes = {name: list(tensor.shape) for name, tensor in tensors_of(theirs).items()}
    given = Noting("here", theirs.config.to_dict() | {"sliding_window": None}, shapes)
    given.check(COMMON + family.REQUIRED + family.ALSO.get(kind, ()))
    family.read_config(given)
    here = f"transformers.models.{kind}"
    classes = [import_module(f"{here}.configuration_{kind}"), import_module(f"{here}.modeling_{kind}")]
    names = ["masking_utils"] + ["modeling_rope_utils"] * (kind != "gpt2")
    shared = [import_module(f"transformers.{name}") for name in names]
    other_names = {ours for ours, name in theirs.config.attribute_map.items() if name in noted | HARMLESS}
    if "use_sliding_window" in noted:  # else transformers sets it to None
        other_names.add("sliding_window")
    read = set().union(*map(settings_read, [*classes, *shared]))
    assert read - noted - HARMLESS - other_names == set()


@pytest.mark.parametrize("config, settings", [(LLAMA, {}), (LLAMAS[1], {"head_dim": None})], ids=id_of)
def test_a_mistral_without_a_window_is_imported_as_the_llama_that_it_is(config, settings, theirs, tmp_path):
    given = {name: value for name, value in theirs.config.to_dict().items() if name not in ("model_type", "dtype")}
    mistral = MistralForCausalLM(MistralConfig(**given | {"sliding_window": None}))
    mistral.load_state_dict(theirs.state_dict())
    mistral.save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    read, tensors = imported(tmp_path / "saved", tmp_path)
    assert read == config
    assert_parameters(config, tensors, mistral)


def test_a_gelu_is_understood_as_every_release_writes_it():
    settings = settings_of(PYTHIA)
    for act, gelu in {"gelu": "erf", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}.items():
        assert read_settings(PythiaFamily, settings | {"hidden_act": act}) == replace(PYTHIA, gelu=gelu)
    del settings["hidden_act"]
    assert read_settings(PythiaFamily, settings) == replace(PYTHIA, gelu="erf")


def test_the_published_config_json_is_the_preset():
    """What that of Qwen/Qwen3-0.6B says, but for what only matters to who generates."""
    published = {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    assert read_settings(Qwen3Family, published) == Qwen3Family.Config.described("qwen3-0.6b")


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA, {"rope_parameters": {"rope_theta": 70000}}),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7e4} | SCALED
          | {"original_max_position_embeddings": 20}}),
        (LLAMA, OLD), (LLAMA, OLD | {"rope_theta": 7e4, "rope_scaling": {"type": "default"}}),
        (LLAMA, OLD | {"rope_theta": 7e4, "rope_scaling": {"rope_type": "llama3"} | SCALED}),
        (LLAMA, OLD | {"rope_theta": 7e4, "rope_scaling": {"type": "llama3"} | SCALED | {"factor": 32}}),
        (PYTHIA, OLD), (PYTHIA, OLD | {"rotary_pct": 0.75, "rotary_emb_base": 500}),
        (PYTHIA, {"rope_parameters": {"rope_theta": 70.0}, "rotary_pct": 1}),
        (PYTHIA, {"rope_parameters": {"partial_rotary_factor": 0.75, "rope_type": "default"}, "rotary_pct": 0.25}),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"} | SCALED}),  # added to transformers 5's, whose theta it hides
        (LLAMA, {"rope_scaling": {"type": "llama3", "rope_theta": 7e4} | SCALED}),
        (LLAMA, {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | SCALED}),
        (LLAMA, {"rope_scaling": {}, "rope_theta": 9.0, "rope_interleaved": False}),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"} | SCALED, "original_max_position_embeddings": 20}),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"} | dict(list(SCALED.items())[:3])}),  # the length is missing
        (PYTHIA, {"rope_scaling": {"type": "default", "rope_theta": 30.0}, "rotary_pct": 0.75}),
        (PYTHIA, OLD | {"rotary_emb_base": 50, "rope_theta": 50, "partial_rotary_factor": None}),
        (QWEN3, {"rope_scaling": {"rope_theta": 30.0}}),
    ],
    ids=id_of,
)  # fmt: skip
def test_positions_are_turned_as_transformers_turns_them(config, settings, tmp_path):
    given = {name: value for name, value in (settings_of(config) | settings).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(given))
    theirs, read = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path)), read_settings(family_of(config), given)
    R, scaling = read.sizes().get("R", read.head_size), getattr(read, "rope_scaling", 0) or None
    ours = rope_table(2, R, read.rope_theta, scaling, getattr(read, "original_length", 8192))[1]
    np.testing.assert_allclose(np.arctan2(ours[:, 1], ours[:, 0]), theirs.rotary_emb.inv_freq.numpy(), rtol=1e-4)


# By name

COMMIT = "0123456789" * 4


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
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
    asked, place = [], tmp_path / "fetched" / COMMIT

    def snapshot_download(name, revision=None, allow_patterns=None, tqdm_class=None):
        asked.append((name, revision, allow_patterns, tqdm_class))
        place.mkdir(parents=True, exist_ok=True)
        for file in allow_patterns:
            if (tmp_path / "repository" / file).is_file():
                shutil.copy(tmp_path / "repository" / file, place)
        return str(place)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def test_a_model_that_was_fetched_before_is_imported_by_name_without_a_connection(
    theirs, hub_cache, tmp_path, monkeypatch
):
    """Some versions of huggingface_hub ask the server whenever a commit is named. So nobody names one here."""
    real = huggingface_hub.snapshot_download

    def snapshot_download(name, revision=None, **settings):
        assert revision is None
        return real(name, **settings)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    keep(hub_cache, "some-one/a.model", tmp_path / "saved")
    assert_parameters(*imported("some-one/a.model", tmp_path), theirs)


@pytest.mark.parametrize(("shard", "terminal"), [("1GB", True), ("20KB", False)])
def test_only_what_the_import_reads_is_fetched(shard, terminal, with_tokenizer, hub, tmp_path, monkeypatch, capsys):
    theirs, repository = transformers_model(replace(LLAMA, vocab_size=330)).float(), tmp_path / "repository"
    (with_tokenizer / "model.safetensors").unlink()
    theirs.save_pretrained(with_tokenizer.rename(repository), max_shard_size=shard)
    weights = sorted(path.name for path in repository.glob("model*.safetensors"))
    for name in ("consolidated.safetensors", "pytorch_model.bin", "README.md", "tokenizer.model.v3"):
        (repository / name).write_text("of no use")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert_parameters(*imported("a/model", tmp_path), theirs)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / f"imported_{name}").read_bytes() == (repository / name).read_bytes()
    first, second = hub
    assert first[:2] == ("a/model", None) and second[:2] == ("a/model", COMMIT)
    assert sorted(first[2]) == [
        "adapter_config.json", "additional_chat_templates/*", "chat_template.jinja", "config.json",
        "generation_config.json", "merges.txt", "model.safetensors.index.json", "special_tokens_map.json",
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
    ]  # fmt: skip
    assert second[2] == weights and second[3] is (None if terminal else import_hf.RareBar)
    said = capsys.readouterr().out
    assert "fetching a/model from Hugging Face\n" in said
    assert f"fetching a/model: {weights[0]}" + (" and " if len(weights) > 1 else "\n") in said


def test_the_weights_of_a_model_that_cannot_be_imported_are_not_fetched(hub, tmp_path):
    settings = tmp_path / "repository" / "config.json"
    settings.parent.mkdir()
    settings.write_text(json.dumps(settings_of(LLAMA) | {"model_type": "mistral"}))  # a window of 4096 is the default
    assert refusal("a/mistral", tmp_path) == "a/mistral: sliding_window is 4096 in its config.json; none is supported"
    change(settings, hidden_act="gelu")
    assert refusal("a/mistral", tmp_path).startswith("a/mistral: hidden_act is 'gelu' in its config.json")
    change(settings, model_type="llama", hidden_act="silu", head_dim=16)
    assert refusal("a/llama", tmp_path).startswith("a/llama: head_dim is 16 in its config.json")
    change(settings, head_dim=1, num_attention_heads=48, num_key_value_heads=1)
    assert "are odd, and RoPE turns pairs" in refusal("a/llama", tmp_path)
    assert len(hub) == 4


@pytest.mark.parametrize("config", [LLAMA], ids=id_of)
def test_a_model_without_safetensors_is_refused_by_its_name(theirs, hub, tmp_path):
    theirs.save_pretrained(tmp_path / "repository", max_shard_size="20KB")
    (tmp_path / "repository" / "model-00002-of-00007.safetensors").unlink()
    assert refusal("a/model", tmp_path).startswith("a/model: its model-00002-of-00007.safetensors was not found; if ")
    (tmp_path / "repository" / "model.safetensors.index.json").unlink()
    shutil.rmtree(tmp_path / "fetched")
    assert refusal("a/model", tmp_path).startswith("a/model: its model.safetensors was not found; if the model has ")


def test_a_directory_wins_over_a_name_and_nothing_is_fetched_for_what_is_none_or_into_no_place(
    saved, hub, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    saved.rename("a/model")
    imported("a/model", tmp_path)
    model.unlink()
    Path("a/link").symlink_to("gone")
    for name in "a/link", "./gone", "gone/", "../gone", "/gone", "a/b/c", "~/gone", "gone.safetensors", "a/ö":
        assert refusal(name, tmp_path).endswith(": no such file or directory")
    said = conftest.refusal(import_hf.main, ["b/model", "-o", "gone/model.bin"])
    assert "is not a directory: make it, or name another file with -o" in said and not hub


def answer(kind: str, status: int) -> Exception:
    """An error of huggingface_hub's for what a server answers."""
    response = SimpleNamespace(headers={}, request=None, status_code=status)
    return getattr(errors, kind)(f"{status} Client Error. (Request ID: x)\n\nmore of it", response=response)


ELSEWHERE = "or fetch it elsewhere and name its directory"


@pytest.mark.parametrize(("name", "error", "said"), [
    ("a/model", None, "no such file or directory, and the model can be neither found in huggingface_hub's cache, {}, "),
    ("a--model", None, "no such file or directory, and no name of a model at Hugging Face"),
    ("a/model", answer("RepositoryNotFoundError", 401), "no such file or directory, and no such model at Hugging Face"),
    ("a/model", answer("GatedRepoError", 403), "gated: ask for access at https://huggingface.co/a/model, then log in"),
    ("a/model", answer("HfHubHTTPError", 401), "not for this token (401 client error. (request id: x)): log in again"),
    ("a/model", answer("HfHubHTTPError", 429), "cannot be fetched (429 client error. (request id: x)): try again"),
    ("a/model", OSError(errno.ENOSPC, "No space left on device"), "huggingface_hub's cache, {}, cannot be written "),
])  # fmt: skip
def test_what_keeps_a_model_from_being_fetched_is_one_line(name, error, said, hub_cache, tmp_path, monkeypatch):
    def snapshot_download(*args, **settings):
        raise error

    if error:
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    message = refusal(name, tmp_path)
    assert message.startswith(f"{name}: {said.format(hub_cache)}")
    assert message.endswith(ELSEWHERE) == ("found in" in said or "cannot be fetched" in said)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refusal(name, tmp_path).endswith("to fetch a model of that name: pip install huggingface_hub")


# The tokenizer

SAMPLES = ["", " ", "It's the tokenizer's  own test,\n\n  isn't it?", "Größe 日本語 🙂 \t\x00\x7f"]
EOT = LEARNED.eot
BOS, LAST = EOT + 2, EOT + 9  # of with_tokenizer


@pytest.fixture
def bpe(tmp_path) -> Path:
    """A tokenizer's .bin."""
    write_tokenizer(tmp_path / "bpe.bin", LEARNED.tokens, EOT)
    return tmp_path / "bpe.bin"


@pytest.fixture
def with_tokenizer(tmp_path) -> Path:
    """A Llama as transformers saves one. It has more rows than its tokenizer has tokens. That begins every text with
    one, and leaves out ids before its last token."""
    folder = tmp_path / "saved"
    transformers_model(replace(LLAMA, vocab_size=330)).float().save_pretrained(folder)
    content = json.loads(export_hf.tokenizer_json(LEARNED))
    content["model"]["vocab"]["ĠĠĠĠĠĠ"] = LAST
    library = Library.from_str(json.dumps(content))
    library.add_special_tokens([BEGIN])
    library.post_processor = beginning(library)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"eos_token": "{END}", "bos_token": "{BEGIN}"}}')
    (folder / "special_tokens_map.json").write_text(f'{{"eos_token": "{END}"}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    change(folder / "config.json", bos_token_id=BOS, eos_token_id=EOT)
    change(folder / "generation_config.json", bos_token_id=BOS, eos_token_id=[EOT, 7], top_k=20)
    return folder


def make_data(monkeypatch, texts: list[str], *flags: str) -> np.ndarray:
    """Runs dev/data/text.py on these texts in this process. Returns all tokens of the data, which are `mine`."""
    monkeypatch.syspath_prepend(ROOT / "dev" / "data")
    import text

    Path("in").mkdir()
    for number, content in enumerate(texts):
        Path(f"in/{number}.txt").write_text(content, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["text.py", "in", "-o", "mine", "--val", "0.3", "--workers", "1", *flags])
    text.main()
    return np.concatenate([open_tokens(f"mine_{split}_000000.bin")[:] for split in ("train", "val")])


def test_an_exported_tokenizer_splits_text_as_ours_does(bpe, tmp_path, rng):
    tokenizer, model = open_tokenizer(bpe), tmp_path / "model.bin"
    write_random(model, replace(GPT2, vocab_size=tokenizer.vocab_size), rng)
    out = exported(model, tmp_path / "out", "--tokenizer", str(bpe))
    theirs = AutoTokenizer.from_pretrained(out)
    assert AutoModelForCausalLM.from_pretrained(out).config.eos_token_id == EOT
    assert (len(theirs), theirs.eos_token_id) == (tokenizer.vocab_size, EOT)
    assert theirs.unk_token == END  # CTranslate2 refuses a GPT-2 without it
    for text in [*SAMPLES, Path(__file__).read_text(encoding="utf-8").replace(END, "")]:
        tokens = tokenizer.encode(text)
        assert theirs.encode(text) == tokens and theirs.decode(tokens) == text
    assert theirs.encode(f"a{END}b") == [*tokenizer.encode("a"), EOT, *tokenizer.encode("b")]


def test_a_tokenizer_goes_along_with_its_model_there_and_back(with_tokenizer, model, tmp_path, capsys):
    config, _ = imported(with_tokenizer, tmp_path)
    first = open_tokenizer(with_tokenizer / "tokenizer.json")
    for path in tmp_path / "imported_tokenizer.json", tmp_path / "imported_tokenizer.bin":
        tokenizer = open_tokenizer(path)
        assert (tokenizer.tokens, tokenizer.eot, tokenizer.bos) == (first.tokens, EOT, BOS)
        assert tokenizer.fits(config.vocab_size) and tokenizer.encode(SAMPLES[2]) == first.encode(SAMPLES[2])
    out = exported(model, tmp_path / "out")
    assert not capsys.readouterr().err
    for name in {"tokenizer.json", *NEIGHBOURS} - {"config.json"}:
        assert (out / name).read_bytes() == (with_tokenizer / name).read_bytes(), name
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (BOS, EOT)
    assert theirs.generation_config.eos_token_id == [EOT, 7]
    (tmp_path / "alone").mkdir()
    for name in "imported.bin", "imported_tokenizer.bin":
        shutil.copy(tmp_path / name, tmp_path / "alone")
    (tmp_path / "checkpoint").mkdir()
    model.rename(tmp_path / "checkpoint" / "model.bin")
    shutil.copy(with_tokenizer / "tokenizer.json", tmp_path / "checkpoint")  # named like the library's own
    for source in tmp_path / "checkpoint", tmp_path / "alone" / "imported.bin":
        ours = AutoTokenizer.from_pretrained(exported(source, tmp_path / f"of_{source.stem}"))
        assert [ours.encode(text) for text in SAMPLES] == [[BOS, *first.encode(text)] for text in SAMPLES]
        assert (ours.bos_token_id, ours.eos_token_id) == (BOS, EOT)


@pytest.mark.parametrize("bin_alone", [False, True])
def test_a_tokenizer_goes_whole_through_data_a_run_and_an_export(
    bin_alone, with_tokenizer, model, tmp_path, trainer_here, monkeypatch, capsys
):
    """Also where the data have nothing but its .bin."""
    monkeypatch.chdir(tmp_path)
    config, _ = imported(with_tokenizer / "model.safetensors", tmp_path)  # which takes along what lies beside it
    texts = [f"{number}: the model's tokens" for number in range(60)]
    data = make_data(monkeypatch, texts, "--tokenizer", "imported_tokenizer.bin")
    assert (data == BOS).sum() == (data == EOT).sum() == 60 and data[0] == BOS and data[-1] == EOT
    for path in Path().glob("mine_*") if bin_alone else ():
        if not path.name.endswith(("_000000.bin", "mine_tokenizer.bin")):
            path.unlink()
    flags = "-e imported.bin -i mine -b 1 -t 16 -x 1 -m 2 -g 40 --device cpu --checkpoint-dir run".split()
    out, error = trainer_here(kind_of(model), tmp_path, flags)
    assert error == "" and "bits/byte" in out
    for path in *Path().glob("mine_*"), *Path().glob("imported*"):
        path.unlink()
    checkpoint = Path("run/step_00000001")
    generate.main(["-e", str(checkpoint), "--prompt", "the model isn't", *"-g 40 --ignore-eot --device cpu".split()])
    written = capsys.readouterr()
    assert written.out.startswith("the model isn't") and written.err.startswith("40 tokens in")
    out = exported(checkpoint, Path("out"))
    for name in {"tokenizer.json", *NEIGHBOURS} - {"config.json"}:
        assert (out / name).read_bytes() == (with_tokenizer / name).read_bytes(), name
    trained = load_model_tokenizer(checkpoint / "model.bin", config.vocab_size, encodes=True)
    first, theirs = open_tokenizer(with_tokenizer / "tokenizer.json"), AutoTokenizer.from_pretrained(out)
    for text in SAMPLES:
        assert [BOS, *first.encode(text)] == [BOS, *trained.encode(text)] == theirs.encode(text)
    assert theirs.convert_tokens_to_ids("ĠĠĠĠĠĠ") == LAST
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == config.vocab_size > first.vocab_size


def test_an_export_takes_the_tokenizer_along_and_replaces_nothing(with_tokenizer, model, tmp_path, rng):
    imported(with_tokenizer, tmp_path)
    other = exported(model, tmp_path / "other.bin")
    for name in (".bin", "_tokenizer.json", "_tokenizer.bin", "_tokenizer_config.json"):
        assert (tmp_path / f"other{name}").read_bytes() == (tmp_path / f"imported{name}").read_bytes()
    (tmp_path / "out").mkdir()
    for path in (tmp_path / "mine_tokenizer.json", tmp_path / "out" / "notes.txt"):
        path.write_text("precious")
    params = rng.standard_normal(num_parameters(GPT2), np.float32)
    checkpoint = save_checkpoint(tmp_path / "run", 20, GPT2, params, params, params, {})
    before = sorted(tmp_path.rglob("*"))
    for name, there in ("imported.bin", "imported.bin"), ("mine.bin", "mine_tokenizer.json"), ("out", "out"):
        said = conftest.refusal(exported, other, tmp_path / name, *BF16)
        assert said.endswith(f"{there} exists already: remove it, or name another with -o")
    for flags in [], ["-o", str(checkpoint / "out")]:
        said = conftest.refusal(export_hf.main, [str(tmp_path / "run"), *flags])
        assert said.endswith("a run may remove this checkpoint with all that is in it: name another place with -o")
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "mine_tokenizer.json").read_text() == "precious"


@pytest.mark.parametrize("config", [replace(QWEN3, vocab_size=LEARNED.vocab_size)], ids=id_of)
def test_an_export_ends_texts_where_the_data_does(saved, model, bpe, tmp_path):
    """A chat model's own files may name the end of a turn alone."""
    (saved / "tokenizer.json").write_text(export_hf.tokenizer_json(open_tokenizer(bpe)))
    for name in "config.json", "generation_config.json":
        change(saved / name, eos_token_id=7)
    imported(saved, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(exported(model, tmp_path / "out"))
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == [7, EOT]


@each_family
def test_a_model_without_a_tokenizer_keeps_its_list_of_end_tokens(saved, model, tmp_path):
    for name in "config.json", "generation_config.json":
        change(saved / name, eos_token_id=[3, 5], pad_token_id=4)
    imported(saved, tmp_path)
    assert end_tokens(model) == {3, 5}
    out = exported(v2 := exported(model, tmp_path / "v2.bin"), tmp_path / "out")
    assert (out / "generation_config.json").read_bytes() == (saved / "generation_config.json").read_bytes()
    theirs = AutoModelForCausalLM.from_pretrained(out).config
    assert (theirs.eos_token_id, theirs.pad_token_id) == ([3, 5], 4)
    (tmp_path / "v2_generation_config.json").unlink()
    assert end_tokens(v2) == {3, 5}  # as config.json says
    (tmp_path / "v2_config.json").write_text('{"eos_token_id": "</s>"}')
    said = conftest.refusal(end_tokens, v2)
    assert "v2_config.json: eos_token_id is '</s>'; the number of a token" in said


@pytest.mark.parametrize(("vocab_size", "eos"), [(257, 256), (50257, 50256), (300, None)])
def test_the_end_of_text_token_is_said_where_it_is_known(vocab_size, eos, tmp_path, rng, capsys):
    model = write_random(tmp_path / "model.bin", replace(GPT2, vocab_size=vocab_size), rng)
    export_hf.main([str(model)])
    said = capsys.readouterr().err
    assert said == f"no tokenizer is written: none is beside {model}; name its file with --tokenizer\n"
    assert not (tmp_path / "model" / "tokenizer.json").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.eos_token_id == eos


def test_a_model_is_imported_where_its_tokenizer_cannot_be_read(
    with_tokenizer, model, bpe, tmp_path, capsys, monkeypatch
):
    def said_by_import() -> str:
        imported(with_tokenizer, tmp_path)
        assert not (tmp_path / "imported_tokenizer.bin").exists()
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    own, whole = tmp_path / "imported_tokenizer.json", (with_tokenizer / "tokenizer.json").read_bytes()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "tokenizers", None)
        assert "pip install tokenizers" in said_by_import() and own.is_file()
    change(with_tokenizer / "tokenizer.json", decoder=None)
    assert "byte-level BPE is supported" in said_by_import() and not own.is_file()
    exported(model, tmp_path / "out")
    assert "no tokenizer is written" in capsys.readouterr().err
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    (with_tokenizer / "tokenizer.json").write_bytes(whole)
    transformers_model(LLAMA).save_pretrained(with_tokenizer)
    capsys.readouterr()
    assert f"{LAST + 1} tokens and the model 53" in said_by_import() and own.is_file()
    said = conftest.refusal(export_hf.main, [str(model), "--tokenizer", str(bpe)])
    assert f"{EOT + 1} tokens and {model} 53: use the model's own tokenizer" in said


def test_files_of_the_model_that_was_there_go_and_others_are_in_the_way(with_tokenizer, model, tmp_path, capsys):
    (with_tokenizer / "additional_chat_templates").mkdir()
    (with_tokenizer / "additional_chat_templates" / "rag.jinja").write_text("")
    imported(with_tokenizer, tmp_path)
    assert capsys.readouterr().err.endswith("left out, an export will not have them: rag.jinja\n")
    beside = {path.name for path in tmp_path.glob("imported_*")}
    transformers_model(LLAMA).save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "generation_config.json").unlink()
    imported(tmp_path / "bare", tmp_path)
    assert {path.name for path in tmp_path.glob("imported_*")} == {"imported_config.json"} < beside
    assert capsys.readouterr().out.count("removed ") == len(beside) - 1
    model.unlink()
    (tmp_path / "imported_generation_config.json").write_text("{}")
    message = refusal(tmp_path / "bare", tmp_path)
    assert message.startswith(f"{tmp_path / 'imported_generation_config.json'} would be taken for a file of ")


# Tokenizers from elsewhere


def save_of_kind(kind: str, config: Config, folder: Path):
    """Saves a model with as many rows as a tokenizer of LIBRARIES has tokens, and the tokenizer. Returns both. The
    model's matrices are large: it does not repeat one token."""
    library = LIBRARIES[kind]
    theirs = opinionated(replace(config, vocab_size=library.get_vocab_size(), max_seq_len=64)).float()
    theirs.save_pretrained(folder)
    library.save(str(folder / "tokenizer.json"))
    return theirs, library


@pytest.mark.parametrize("kind", ["llama2_like", "mistral_like"])
def test_byte_fallback_is_imported_makes_data_writes_texts_and_is_exported(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    theirs, library = save_of_kind(kind, LLAMA, Path("saved"))
    for name in "config.json", "generation_config.json":
        change(Path("saved") / name, eos_token_id=2)
    imported("saved", tmp_path)
    binary = open_tokenizer("imported_tokenizer.bin")
    assert b"\n" in binary.tokens and b" the" in binary.tokens
    assert "so a .bin cannot encode: use the .json" in conftest.refusal(binary.encode, "the")

    texts = [f"{number} of the theatre\n ▁ naïve 你好 🙂 </s>" for number in range(30)]
    data = make_data(monkeypatch, texts, "--tokenizer", "imported_tokenizer.json")
    assert (data == 1).sum() == (data == 2).sum() == 30  # <s>, text, </s>
    documents = [part[1:-1].tolist() for part in np.split(data, np.flatnonzero(data == 1)[1:])]
    library.encode_special_tokens = True
    assert sorted(documents) == sorted(library.encode(text, add_special_tokens=False).ids for text in texts)
    library.encode_special_tokens = False

    capsys.readouterr()
    for prompt in "the other 你", "":
        ids = library.encode(prompt).ids or [1]
        written = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=2)[0].tolist()
        generate.main(["-e", "imported.bin", "--prompt", prompt, *"-g 20 --temperature 0 --device cpu".split()])
        stream = StreamDecoder(open_tokenizer("imported_tokenizer.json"), terminal=False)  # not all of it is UTF-8
        wanted = "".join(map(stream.push, written[1:])) + stream.flush()
        assert capsys.readouterr().out == wanted + "\n" and not wanted.startswith(" ")
    out = exported(Path("imported.bin"), Path("out"))
    assert (out / "tokenizer.json").read_bytes() == Path("saved/tokenizer.json").read_bytes()
    Path("imported_tokenizer.json").unlink()
    exported(Path("imported.bin"), Path("without"))
    assert "no tokenizer is written: " in capsys.readouterr().err and not Path("without/tokenizer.json").exists()


@pytest.mark.parametrize("letter, memory, seconds", [("e", 1 << 28, 60), ("a", 1 << 40, 1)])
def test_a_tokenizer_that_takes_too_much_is_tried_elsewhere_and_left_out(
    letter, memory, seconds, with_tokenizer, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(foreign, "MEMORY", memory)
    monkeypatch.setattr(foreign, "SECONDS", seconds)
    longer = {"type": "Replace", "pattern": {"String": letter}, "content": letter * (1000 if seconds == 60 else 2)}
    path = with_tokenizer / "tokenizer.json"
    change(path, normalizer={"type": "Sequence", "normalizers": [longer] * (4 if seconds == 60 else 25)})
    capfd.readouterr()
    imported(with_tokenizer, tmp_path)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f": {path}: it takes more than" in said
    assert not list(tmp_path.glob("imported_tokenizer.*")) and (tmp_path / "imported_tokenizer_config.json").is_file()
    ask = ["-e", str(tmp_path / "imported.bin"), "--tokenizer", str(path), "--prompt", "e"]
    for open_it in [lambda: generate.main(ask), lambda: load_tokenizer(path)][: 2 if seconds > 1 else 0]:
        assert conftest.refusal(open_it).startswith(f"{path}: it takes more than")


def test_vocab_json_and_merges_txt_become_a_tokenizer_json(tmp_path, capsys, monkeypatch):
    _, library = save_of_kind("gpt2_like", GPT2, saved := tmp_path / "saved")
    (saved / "tokenizer.json").unlink()
    library.model.save(str(saved))
    change(saved / "vocab.json", **{END: EOT})
    imported(saved, tmp_path)
    assert "transformers has made a tokenizer.json of vocab.json and merges.txt" in capsys.readouterr().out
    for path in tmp_path / "imported_tokenizer.json", tmp_path / "imported_tokenizer.bin":
        assert [open_tokenizer(path).encode(text) for text in SAMPLES] == [library.encode(text).ids for text in SAMPLES]
    (saved / "merges.txt").write_text("no merges")
    monkeypatch.setattr(foreign, "limit", lambda memory, seconds: None)  # in this process, which has PyTorch already
    monkeypatch.setattr(import_hf, "try_tokenizer", lambda path, out: foreign.convert(path, out, 0, 0))
    imported(saved, tmp_path)
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and f"{saved}: transformers makes no tokenizer.json for it" in said.err
    assert f"removed {tmp_path / 'imported_tokenizer.bin'}" in said.out
    assert not (tmp_path / "imported_tokenizer.json").exists()

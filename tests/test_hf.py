"""Models to and from Hugging Face's transformers: the same weights, the same logits, or one line that says why not."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2LMHeadModel, GPT2Model
from transformers import GPT2Config as HFConfig

import train_gpt2_fp32 as trainer
from dev import export_hf, import_hf
from llmc.checkpoint import GPT2Config, read_model, write_model
from llmc.errors import UserError
from llmc.tokenizer import Tokenizer, write_tokenizer
from oracle import MODEL_FP32, MODEL_TF32, assert_close, parameters_of, transformers_gpt2

SHAPES = [(17, 53, 2, 3, 24), (8, 128, 1, 1, 5), (32, 257, 3, 2, 128)]  # maxT, V, L, NH, C
ROOT = Path(__file__).resolve().parents[1]


def config_of(shape: tuple) -> GPT2Config:
    max_seq_len, vocab_size, *rest = shape
    return GPT2Config(max_seq_len, vocab_size, -(-vocab_size // 128) * 128, *rest)


def flat(model) -> np.ndarray:
    """The parameters of a transformers model as a model file has them, by the tests' own table."""
    padded = -(-model.config.vocab_size // 128) * 128
    return np.concatenate([tensor.float().numpy().ravel() for tensor in parameters_of(model, padded).values()])


def tensors_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def theirs():
    return transformers_gpt2(*SHAPES[0]).float()


@pytest.fixture
def saved(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def imported(source, tmp_path, *flags: str) -> tuple[GPT2Config, np.ndarray]:
    import_hf.main([str(source), "-o", str(tmp_path / "imported.bin"), *flags])
    return read_model(tmp_path / "imported.bin")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_exported_model_has_the_same_logits_in_transformers(shape, dev, tmp_path, rng):
    config = config_of(shape)
    params = flat(transformers_gpt2(*shape).float()).copy()
    params[config.vocab_size * config.channels : config.padded_vocab_size * config.channels] = 7  # must not matter
    write_model(tmp_path / "model.bin", config, params)
    export_hf.main([str(tmp_path / "model.bin"), "-o", str(tmp_path / "out")])
    exported, info = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert exported.lm_head.weight is exported.transformer.wte.weight
    B, T = 2, config.max_seq_len - 1
    tokens = rng.integers(0, config.vocab_size, (B, T), dtype=np.int32)
    model = trainer.gpt2_build_from_checkpoint(str(tmp_path / "model.bin"), B, T, "softmax", inference=True)
    dev.copy_in(model.inputs, tokens)
    trainer.gpt2_forward(model, B, T)
    logits = dev.to_host(model.acts(B, T).logits)[..., : config.vocab_size]
    with torch.no_grad():
        wanted = exported.double().eval()(torch.tensor(tokens).long()).logits
    assert_close("logits", logits, wanted, MODEL_TF32 if dev.tf32() else MODEL_FP32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_transformers_saves_is_imported_and_exported_again_bit_by_bit(shape, tmp_path):
    theirs = transformers_gpt2(*shape).float()
    theirs.save_pretrained(tmp_path / "saved")
    config, params = imported(tmp_path / "saved", tmp_path)
    assert config == config_of(shape)
    np.testing.assert_array_equal(params, flat(theirs))
    export_hf.main([str(tmp_path / "imported.bin")])
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "imported")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


@pytest.mark.parametrize(("channels", "heads"), [(768, 12), (1024, 16), (1280, 20), (1600, 25)])
def test_a_lone_file_of_any_width_of_gpt2_gets_its_heads(channels, heads, tmp_path):
    with torch.device("meta"):  # shapes without numbers, which would take a while to draw
        model = GPT2LMHeadModel(HFConfig(n_positions=5, vocab_size=7, n_layer=1, n_head=heads, n_embd=channels))
    tensors = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    config, _ = imported(tmp_path / "model.safetensors", tmp_path)
    assert config == GPT2Config(5, 7, 128, 1, heads, channels)


def test_heads_that_no_config_says_can_be_given(theirs, tmp_path):
    save_file(tensors_of(theirs), tmp_path / "model.safetensors")
    assert imported(tmp_path / "model.safetensors", tmp_path)[0].num_heads == 1
    assert imported(tmp_path / "model.safetensors", tmp_path, "--heads", "3")[0].num_heads == 3


def test_names_without_prefix_and_the_buffers_of_old_files_are_understood(theirs, tmp_path):
    GPT2Model(theirs.config).save_pretrained(tmp_path / "old")  # for its config.json
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(theirs).items()}
    for layer in range(theirs.config.n_layer):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 17, 17, dtype=torch.uint8).tril()
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(old, tmp_path / "old" / "model.safetensors")
    config, params = imported(tmp_path / "old", tmp_path)
    assert config == config_of(SHAPES[0])
    np.testing.assert_array_equal(params, flat(theirs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_precisions_become_fp32(dtype, theirs, tmp_path):
    theirs.to(dtype).save_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(imported(tmp_path / "saved", tmp_path)[1], flat(theirs))


def test_a_model_in_several_files_is_put_together(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 2
    np.testing.assert_array_equal(imported(tmp_path / "saved", tmp_path)[1], flat(theirs))
    files[1].unlink()
    with pytest.raises(UserError, match="is missing"):
        imported(tmp_path / "saved", tmp_path)


def test_an_untied_classifier_is_refused_and_a_tied_one_is_not(saved, tmp_path):
    tensors = load_file(saved / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, saved / "model.safetensors")
    imported(saved, tmp_path)
    tensors["lm_head.weight"][3, 2] += 1
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(UserError, match="lm_head.weight"):
        imported(saved, tmp_path)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model_type", "llama"), ("activation_function", "relu"), ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True), ("add_cross_attention", True),
        ("n_head", 5),
    ],
)  # fmt: skip
def test_a_model_that_computes_something_else_is_refused(setting, value, saved, tmp_path):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {setting: value}))
    with pytest.raises(UserError, match="saved.*" + ("5 heads" if setting == "n_head" else setting)):
        imported(saved, tmp_path)
    assert not (tmp_path / "imported.bin").exists()


def test_damaged_or_foreign_files_are_refused(saved, tmp_path):
    def refusal(source) -> str:
        with pytest.raises(UserError) as caught:
            imported(source, tmp_path)
        assert not (tmp_path / "imported.bin").exists()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    path = saved / "model.safetensors"
    assert "no such file" in refusal(tmp_path / "nowhere")
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if "h.1.ln_1.bias" not in name}, path)
    assert "h.1.ln_1.bias is missing" in refusal(saved)
    save_file(tensors | {"transformer.h.1.attn.c_attn.weight": torch.zeros(72, 24)}, path)
    assert "is (72, 24); a GPT-2 of these sizes has it as (24, 72)" in refusal(saved)
    save_file(tensors | {"transformer.h.0.crossattention.c_attn.weight": torch.zeros(3)}, path)
    assert "none of GPT-2's" in refusal(saved)
    save_file({"a": torch.zeros(3)}, path)
    assert "no GPT-2" in refusal(saved)
    path.write_bytes(b"\0" * 100)
    assert "not a whole safetensors file" in refusal(saved)
    path.unlink()
    assert "no model.safetensors" in refusal(saved)
    save_file(tensors, path)
    (saved / "config.json").write_text("[")
    assert "config.json: not a JSON object" in refusal(saved)


def test_an_export_never_replaces_what_is_there(saved, tmp_path):
    imported(saved, tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        export_hf.main([str(tmp_path / "imported.bin"), "-o", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    assert not list(tmp_path.glob("*.part"))


@pytest.fixture
def bpe(tmp_path) -> Path:
    """A small byte-pair vocabulary, learned from this file by tokens' frequency, as a tokenizer file."""
    import tiktoken._educational as educational

    text = Path(__file__).read_text(encoding="utf-8")
    learned = educational.bpe_train(text, 320, export_hf.GPT2_PATTERN, visualise=None)
    tokens = sorted(learned, key=learned.get) + [b"<|endoftext|>"]
    write_tokenizer(tmp_path / "bpe.bin", tokens, len(tokens) - 1)
    return tmp_path / "bpe.bin"


def test_an_exported_tokenizer_splits_text_as_ours_does(bpe, tmp_path):
    tokenizer = Tokenizer.load(bpe)
    shape = (8, tokenizer.vocab_size, 1, 1, 8)
    write_model(tmp_path / "model.bin", config_of(shape), flat(transformers_gpt2(*shape).float()))
    export_hf.main([str(tmp_path / "model.bin"), "-o", str(tmp_path / "out"), "--tokenizer", str(bpe)])
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "out").config.eos_token_id == tokenizer.eot
    assert (len(exported), exported.eos_token_id) == (tokenizer.vocab_size, tokenizer.eot)
    samples = ["", " ", "It's the tokenizer's  own test,\n\n  isn't it?", "Größe 日本語 🙂 \t\x00\x7f"]
    for text in [*samples, Path(__file__).read_text(encoding="utf-8").replace("<|endoftext|>", "")]:
        tokens = tokenizer.encode(text)
        assert exported.encode(text) == tokens
        assert exported.decode(tokens) == text
    assert exported.encode("a<|endoftext|>b") == [*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode("b")]


def test_a_tokenizer_of_another_vocabulary_is_refused(saved, bpe, tmp_path):
    imported(saved, tmp_path)
    with pytest.raises(UserError, match="321 tokens and .*imported.bin 53"):
        export_hf.main([str(tmp_path / "imported.bin"), "--tokenizer", str(bpe)])


@pytest.mark.parametrize(("vocab_size", "eos"), [(257, 256), (50257, 50256), (300, None)])
def test_the_end_of_text_token_is_said_where_it_is_known(vocab_size, eos, tmp_path):
    shape = (4, vocab_size, 1, 1, 2)
    write_model(tmp_path / "model.bin", config_of(shape), flat(transformers_gpt2(*shape).float()))
    export_hf.main([str(tmp_path / "model.bin")])
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "model").config.eos_token_id == eos


def test_both_programs_run_anywhere_and_fail_in_one_line(saved, tmp_path):
    def run(script: str, *flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "dev" / script), *flags]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert run("import_hf.py", "saved", "-o", "model.bin").returncode == 0
    assert run("export_hf.py", "model.bin").returncode == 0
    assert (tmp_path / "model" / "config.json").is_file()
    for script, flags in (("import_hf.py", ["gone", "-o", "x.bin"]), ("export_hf.py", ["gone.bin", "-o", "x"])):
        failed = run(script, *flags)
        assert (failed.returncode, failed.stderr.count("\n")) == (1, 1), failed.stderr
        assert failed.stderr.startswith("error: gone")

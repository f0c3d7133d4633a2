"""generate.py: the text that transformers would write, and one line for what cannot be."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import device
import generate
from conftest import refusal
from dev.hf import export_hf
from dev.hf.common import families, family_of
from llmc.data.find_tokenizer import tokenizer_files
from llmc.data.token_file import write_tokens
from llmc.data.tokenizer import write_tokenizer
from llmc.files.checkpoint import save_checkpoint
from llmc.files.model_file import write_model
from llmc.step.sampler import Sampler, samplers_of
from models import TINY, described
from oracle import flat_parameters_of, opinionated
from support.texts import recomputed
from train_gpt2_fp32 import GPT2Config

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
CONFIG = GPT2Config(40, 257, 2, 2, 32)
KNOWN = [family.Config for family in families().values()]
OTHERS = [described(name, 257, 40)[1] for name, (kind, _) in TINY.items() if name != "gpt2" and kind.Config in KNOWN]
EOT = 256
gpt2_alone = pytest.mark.parametrize("theirs", [CONFIG], indirect=True, ids=lambda config: config.NAME)


@pytest.fixture(scope="module", params=[CONFIG, *OTHERS], ids=lambda config: config.NAME)
def theirs(request):
    """transformers' model of 257 byte tokens."""
    return opinionated(request.param)


@pytest.fixture
def config(theirs):
    return next(c for c in (CONFIG, *OTHERS) if family_of(c).TYPE == theirs.config.model_type)


@pytest.fixture
def model(theirs, config, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "tiny.bin", config, flat(theirs, config))
    write_tokenizer(tmp_path / "tiny_tokenizer.bin", [bytes([byte]) for byte in range(EOT)] + [b"<|endoftext|>"], EOT)
    return tmp_path / "tiny.bin"


def flat(theirs, config=CONFIG) -> np.ndarray:
    return flat_parameters_of(theirs, config).astype(np.float32)


def text_of(tokens: list[int]) -> str:
    """What a file gets of byte tokens."""
    text = b"".join(b"<|endoftext|>" if token == EOT else bytes([token]) for token in tokens)
    return text.decode(errors="replace") + "\n"


@pytest.fixture
def run(request, capsys):
    """run(*flags) is what generate.py writes, run in this process on the test's device, which is the CPU if it has
    none. The texts go on after a token that ends one, unless `ends`."""
    if "one_dev" not in request.fixturenames:
        device.use("cpu")

    def run(*flags, ends: bool = False):
        capsys.readouterr()
        ignore = [] if ends else ["--ignore-eot"]
        generate.main(["--device", device.kind, "--precision", "fp32", *ignore, *map(str, flags)])
        return capsys.readouterr()

    return run


def expected_tokens(
    theirs, prompt: str, count: int, T: int = 40, sampler=None, eot=None, bos: bool = True, **sampling
) -> list[int]:
    """The prompt's tokens and those that follow by transformers' logits and the sampler, of seed 1337 by default,
    before the token eot. bos: whether the model sees the token that begins a text first."""

    def logits_after(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return theirs(torch.tensor([tokens])).logits[0, -1].numpy()

    tokens = [*[EOT] * bos, *prompt.encode()]
    return tokens[bos:] + recomputed(logits_after, tokens, count, sampler or Sampler(1337), T, eot, **sampling)


def expected(*given, **sampling) -> str:
    return text_of(expected_tokens(*given, **sampling))


@pytest.mark.parametrize(
    ("flags", "sampling"),
    [
        ([], {}), (["--temperature", "0.7"], {"temperature": 0.7}),
        (["--top-k", "40", "--top-p", "0.9", "--temperature", "1.5"], {"top_k": 40, "top_p": 0.9, "temperature": 1.5}),
        (["-t", "9"], {"T": 9}), (["--temperature", "0"], {"temperature": 0.0}), (["--no-bos"], {"bos": False}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_sampled_text_is_drawn_from_the_logits_of_transformers(one_dev, flags, sampling, model, theirs, run):
    assert run("-e", model, "--prompt", "If ", "-g", 30, *flags).out == expected(theirs, "If ", 30, **sampling)


@gpt2_alone
@pytest.mark.parametrize("name", [
    "tiny_generation_config.json", "generation_config.json", "tiny_config.json", "tiny_tokenizer_config.json",
])  # fmt: skip
def test_a_text_ends_before_every_token_that_a_file_beside_the_model_names(name, model, theirs, run):
    tokens = expected_tokens(theirs, "x", 30)
    first = next(n for n in range(7, 30) if tokens[n] < 128 and tokens[n] not in tokens[:n])
    named = {"eos_token": chr(tokens[first])} if "tokenizer" in name else {"eos_token_id": [tokens[-1], tokens[first]]}
    Path(name).write_text(json.dumps(named))
    assert EOT not in tokens[:first] and tokens[-1] not in tokens[:first]
    flags = "-e", model, "-g", 30, "--prompt", "x"
    done = run(*flags, ends=True)
    assert done.out == text_of(tokens[:first]) and done.err.startswith(f"{first} tokens in ")  # with this one
    assert run(*flags).out == text_of(tokens)


@gpt2_alone
def test_several_samples_are_one_batch_and_the_first_is_that_of_the_seed_alone(model, theirs, run):
    flags = "-e", model, "--prompt", "ab", "-g", 20, "--seed", 5
    texts = [expected(theirs, "ab", 20, sampler=each) for each in samplers_of(5, 3)]
    assert run(*flags).out == texts[0] and len(set(texts)) == 3
    assert run(*flags, "--samples", 3).out == "---\n".join(texts)


@gpt2_alone
def test_prompts_of_different_lengths_are_one_batch_and_come_as_lines_of_json(model, theirs, run):
    def lines_of(name, *flags) -> list[dict]:
        out = run("-e", model, "--prompts", name, "-g", 25, "--seed", 19, *flags, ends=True).out
        return [json.loads(line) for line in out.splitlines()]

    prompts = ["a", "four words are here", "Grüße 🙂"]
    Path("prompts.txt").write_text("a\r\nfour words are here\n\nGrüße 🙂\n", encoding="utf-8")
    found = lines_of("prompts.txt", "--samples", 2)
    assert {one["end"] for one in found} == {"length", "eot"}
    assert [(one["prompt"], one["sample"]) for one in found] == [(p, n) for p in prompts for n in range(2)]
    for one in found:
        prompt = one["prompt"]
        tokens = expected_tokens(theirs, prompt, 25, sampler=samplers_of(19, 2)[one["sample"]], eot=EOT)
        written = tokens[len(prompt.encode()) :]
        assert one["text"] == text_of(written)[:-1]
        assert (one["tokens"], one["end"]) == ((25, "length") if len(written) == 25 else (len(written) + 1, "eot"))
    more = {"id": 7, "tags": ["é", None]}  # other fields are passed through, but for those that the program writes
    rest = ["", "two\nlines"]
    objects = [{"prompt": prompt, "text": "the answer", "sample": "x"} | more for prompt in prompts + rest]
    Path("prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in objects))
    again = lines_of("prompts.jsonl")
    assert again[:3] == [one | more for one in found[::2]] and [one["prompt"] for one in again[3:]] == rest
    Path("list.json").write_text(json.dumps([*objects[:3], *rest], indent=1))
    assert lines_of("list.json") == again[:3] + [{k: v for k, v in one.items() if k not in more} for one in again[3:]]
    Path("half.json").write_text('["\\ud83d"]')  # of a pair of UTF-16
    assert [one["prompt"] for one in lines_of("half.json")] == ["\ufffd"]


@gpt2_alone
def test_control_characters_are_kept_but_on_a_terminal(model, theirs, monkeypatch, run):
    flags, prompt = ("-e", model, "-g", 60, "-t", 40), ("--prompt", "If \x07")
    text = expected(theirs, "If \x07", 60)
    spared = "".join(c for c in text if c in "\t\n\v\f\r" or not (ord(c) < 32 or 127 <= ord(c) < 160))
    assert len(text) - len(spared) > 1
    assert run(*flags, *prompt).out == text
    Path("one.jsonl").write_text(json.dumps({"prompt": "If \x07"}))
    with monkeypatch.context() as on:
        on.setattr("sys.stdout.isatty", lambda: True)
        assert run(*flags, *prompt).out == spared
        assert "If \x07" + json.loads(run(*flags, "--prompts", "one.jsonl").out)["text"] + "\n" == text
    stop = next(c for c in text[9:] if c not in spared)
    assert run(*flags, *prompt, "--stop", stop).out == text[: text.index(stop, 4)] + "\n"


@gpt2_alone
@pytest.mark.parametrize("flag, content, prompt", [
    ("--prompt-file", "\ufeffIf so:\n\tgo\n", "If so:\n\tgo"),  # without the mark and the last line break
    ("--prompts", "go on\n", "go on"),
])  # fmt: skip
def test_a_prompt_may_come_from_a_file_or_standard_input(model, theirs, monkeypatch, flag, content, prompt, run):
    Path("prompt.txt").write_bytes(content.encode())
    text = run("-e", model, flag, "prompt.txt", "-g", 9).out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert run("-e", model, flag, "-", "-g", 9).out == text
    assert expected(theirs, prompt, 9) == (prompt + json.loads(text)["text"] + "\n" if flag == "--prompts" else text)


@gpt2_alone
def test_a_text_ends_before_a_stop_text_however_tokens_spell_it(model, theirs, run):
    whole = expected(theirs, "If ", 30)[:-1]
    never = "☃", "☃" * 500, whole[-1] + "☃"
    for stops in (whole[8:9],), (whole[8:10],), ("☃☃", whole[9:12]), never:
        at = min((whole.index(stop, 3) for stop in stops if stop in whole), default=len(whole))
        flags = [flag for stop in stops for flag in ("--stop", stop)]
        assert run("-e", model, "--prompt", "If ", "-g", 30, *flags).out == whole[:at] + "\n"


@given(
    text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=2), cut=st.data()
)  # fmt: skip
def test_what_may_begin_a_stop_text_is_held_back_and_nothing_else(text, stops, cut):
    class Spelled:
        push, flush = staticmethod(lambda token: token), staticmethod(lambda: "")

    ours, rest, at = generate.Text({}, 0, "", Spelled, stops, set()), text, len(text)
    while rest and not ours.end:
        n = cut.draw(st.integers(0, 3))
        ours.push(rest[:n])
        rest = rest[n:]
        seen = text[: len(text) - len(rest)]
        assert seen.startswith(ours.text)
        if not ours.end:
            held = seen[len(ours.text) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    if not ours.end:
        ours.finish("length")
    at = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    assert ours.text == text[:at] and ours.end == ("stop" if at < len(text) or at == 0 and stops and text else "length")


def test_a_checkpoint_brings_its_tokenizer_along(model, config, theirs, tmp_path, monkeypatch, run):
    tokens = [bytes([byte]).swapcase() for byte in range(256)] + [b"<|endoftext|>"]
    write_tokenizer("data_tokenizer.bin", tokens, EOT)
    params, flags = flat(theirs, config), {"data": "data", "tokenizer": "data_tokenizer.bin"}
    files = tokenizer_files(Path("data_tokenizer.bin"), "model_")
    checkpoint = save_checkpoint(tmp_path / "run", 20, config, params, params, params, {"flags": flags}, files)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for name in ("gpt2_tokenizer.bin", "data_tokenizer.bin"):  # of other data, of as many tokens
        shutil.copy(tmp_path / "tiny_tokenizer.bin", name)
    done, text = run("-e", checkpoint, "-g", 30), expected(theirs, "", 30)
    swapped = "".join(c.swapcase() if c.isascii() else c for c in text)
    assert done.out == swapped.replace("<|ENDOFTEXT|>", "<|endoftext|>") != text
    assert done.err.startswith("30 tokens in ")


def test_the_model_sees_as_many_tokens_as_it_was_trained_at_by_its_checkpoint(model, config, theirs, tmp_path, run):
    """Also with rotary positions. -t may go beyond, which is said; a .bin by itself does not say how many they were.
    This checkpoint has no tokenizer, and asks for one."""
    params, state = flat(theirs, config), {"flags": {"sequence_length": 9, "tokenizer": None}}
    checkpoint = save_checkpoint(tmp_path / "run", 20, config, params, params, params, state)
    beyond = "-t 20 goes beyond the 9 tokens at which the model was trained\n"
    for of, flags, T, said in (
        (checkpoint, (), 9, ""), (checkpoint, ("-t", 9), 9, ""), (checkpoint, ("-t", 5), 5, ""),
        (checkpoint, ("-t", 20), 20, beyond), (model, (), 40, ""),
    ):  # fmt: skip
        done = run("-e", of, "--prompt", "If ", "-g", 30, "--tokenizer", "tiny_tokenizer.bin", *flags)
        assert (done.out, done.err.partition("30 tokens in")[0]) == (expected(theirs, "If ", 30, T=T), said)
    assert re.search("step_00000020 .* without a tokenizer: .*--tokenizer", refusal(run, "-e", checkpoint))


REMEDY = "a trained model is needed: a .bin, or the directory of a checkpoint"


@pytest.mark.parametrize(
    "name, said",
    [
        ("d12", f"d12: not trained yet; train it with train_gpt2_fp32.py -e d12; {REMEDY}"),
        ("smollm2-135m", f"smollm2-135m: not trained yet; train it with train_llama3.py -e smollm2-135m; {REMEDY}"),
        ("layers=2", f"layers=2: not trained yet; train it with train_gpt2_fp32.py -e layers=2; {REMEDY}"),
        ("lr=3/step_1", f"lr=3/step_1: no such file or directory; {REMEDY}"),
        ("tokens.bin", "tokens.bin: not a GPT-2 model (found GPT-2 tokens, expected magic number 20240326); " + REMEDY),
        ("lfs.bin", "lfs.bin: a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`"),
        ("hf/x.safetensors", "hf/x.safetensors: a model in Hugging Face's format; make a .bin of it: "
         "dev/hf/import_hf.py hf -o model.bin"),
    ],
)  # fmt: skip
def test_what_is_no_trained_model_is_refused_with_a_remedy_that_the_program_has(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokens("tokens.bin", np.zeros(300, np.int64))
    Path("lfs.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    Path("hf/x.safetensors").write_bytes(b"\0" * 2000)
    for main, flags in ((generate.main, ["--device", "cpu", "-e", name]), (export_hf.main, [name, "-o", "out"])):
        assert refusal(main, flags).removesuffix("; dev/download_starter_pack.sh fetches gpt2_124M.bin") == said
    assert not Path("out").exists()


FILES = {
    "breaks.txt": b"\n\r\n", "latin1.txt": b"a\nGr\xfc\xdfe", "long.txt": b"x\n" + b"y" * 40,
    "no.jsonl": b'{"prompt": "a"}\n{"text": "b"}\n', "broken.jsonl": b'{"prompt": "a"',
    "none.json": b"[]", "number.json": b'["a", 3]',
}  # fmt: skip


@gpt2_alone
def test_bad_prompts_stops_and_samples_are_told_in_one_line(model, capsys, monkeypatch, run):
    for name, data in FILES.items():
        Path(name).write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    form = 'not of the form {"prompt": "text"}'
    for flags, said in (
        (["--prompt", "x" * 40], "--prompt has 41 tokens, and the model sees 40: shorten it"),
        (["--prompt", "x" * 8, "-t", "8"],
         "--prompt has 9 tokens, and the model sees 8: shorten it, or raise -t (at most 40)"),
        (["--prompts", "long.txt"], "long.txt, line 2 has 41 tokens, and the model sees 40: "),
        (["--no-bos"], "--prompt has no tokens, and --no-bos puts none"),
        *(([flag, name], said) for flag in ("--prompt-file", "--prompts") for name, said in (
            ("breaks.txt", f"breaks.txt is empty: write a prompt into it, or leave {flag} out"),
            ("gone.txt", f"{flag} gone.txt: no such file or directory; name a file"),
            ("latin1.txt", "latin1.txt is not UTF-8 from byte 4 on: convert it (iconv -t UTF-8)"))),
        (["--prompts", "no.jsonl"], f"no.jsonl, line 2: {form}"),
        (["--prompts", "broken.jsonl"], f"broken.jsonl, line 1: {form}"),
        (["--prompts", "number.json"], f"number.json, record 2: {form}"),
        (["--prompts", "none.json"], "none.json has no prompt: write one into it"),
        (["--prompt", "a\udcfc"], "--prompt is not UTF-8: convert it"),
        (["--prompt-file", "-"], "standard input is empty: write a prompt into it, "),
        (["--samples", "65536"], "65536 texts at once are more than 65535: lower --samples "),
    ):  # fmt: skip
        assert refusal(run, "-e", model, *flags).startswith(said) and capsys.readouterr().out == ""
    use = device.use

    def with_little_memory(kind: str) -> None:
        use(kind)
        device.current.device.memory = lambda: (1 << 20, 1 << 30)

    monkeypatch.setattr(device, "use", with_little_memory)
    said = refusal(run, "-e", model, "--samples", "2000")
    assert "so lower --samples or give fewer prompts" in said and "B=2000, " in said


@gpt2_alone
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_the_program_in_one_line(one_dev, value, model, theirs, run):
    params = flat(theirs)
    params[[CONFIG.channels * ord("b"), CONFIG.channels * 5]] = value  # of the token that comes, and of another
    write_model(model, CONFIG, params)
    said = refusal(run, "-e", model, "--prompt", "b")
    assert "tiny.bin: its logits are NaN or infinity after 0 tokens of a text" in said


@gpt2_alone
def test_a_reader_who_leaves_early_and_an_ascii_terminal_are_no_errors(model):
    command, env = f"{sys.executable} {ROOT}/generate.py --device cpu -e {model} ", {"PYTHONIOENCODING": "ascii"}
    leaves = "-g 300 -t 8 | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}"
    for more, code, out in (leaves, (0, 1), ""), ("--prompt Grüße -g 0", (0,), "Gr??e\n"):
        done = subprocess.run(["bash", "-c", command + more], env=os.environ | env, capture_output=True, text=True)
        assert "Traceback" not in done.stderr and done.returncode in code and done.stdout == out

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
from oracle import flat_parameters_of, opinionated, sample
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
def dev(one_dev):
    return one_dev


@pytest.fixture
def written(request, capsys):
    """written(*flags) is what generate.py writes, run in this process on the test's device, which is the CPU if it has
    none."""
    if "dev" not in request.fixturenames:
        device.use("cpu")

    def written(*flags) -> str:
        capsys.readouterr()
        generate.main(["--device", device.kind, "--precision", "fp32", "--ignore-eot", *map(str, flags)])
        return capsys.readouterr().out

    return written


def expected_tokens(
    theirs, prompt: str, count: int, T: int = 40, sampler=None, eot=None, bos: bool = True, **sampling
) -> list[int]:
    """The prompt's tokens and those that follow by transformers' logits and the sampler, of seed 1337 by default,
    before the token eot. When there are more than T, the model sees the last half of T, and more as they come. bos:
    whether it sees the token that begins a text first."""
    tokens, sampler = [*[EOT] * bos, *prompt.encode()], sampler or Sampler(1337)
    seen = tokens[:]
    for _ in range(count):
        if len(seen) > T:
            seen = seen[-max(1, T // 2) :]
        with torch.no_grad():
            logits = theirs(torch.tensor([seen])).logits[0, -1].numpy()
        token = sample(logits, sampler.random_f32(), **sampling)
        if token == eot:
            break
        tokens.append(token)
        seen.append(token)
    return tokens[bos:]


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
def test_sampled_text_is_drawn_from_the_logits_of_transformers(dev, flags, sampling, model, theirs, written):
    text = written("-e", model, "--prompt", "If ", "-g", 30, *flags)
    assert text == expected(theirs, "If ", 30, **sampling)


def lines_of(capsys, *flags) -> list[dict]:
    """The lines of JSON that generate.py writes."""
    generate.main(["--device", "cpu", "--precision", "fp32", *map(str, flags)])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@gpt2_alone
def test_a_text_ends_before_the_token_that_ends_a_text(model, theirs, capsys):
    """Each seed until one draws that token."""
    for seed in range(40):
        generate.main(["--device", "cpu", "-e", str(model), "-g", "39", "--seed", str(seed)])
        done = capsys.readouterr()
        tokens = expected_tokens(theirs, "", 39, sampler=Sampler(seed), eot=EOT)
        assert done.out == text_of(tokens)
        assert int(done.err.split()[0]) == min(39, len(tokens) + 1)
        if len(tokens) < 39:
            return
    pytest.fail("none of the texts ends")


@gpt2_alone
@pytest.mark.parametrize("name", ["tiny_generation_config.json", "generation_config.json", "tiny_config.json"])
def test_a_text_ends_before_every_token_that_generation_config_names(name, model, theirs, capsys, written):
    tokens = expected_tokens(theirs, "", 30)
    ends = [tokens[9], tokens[25]]
    first = min(tokens.index(end) for end in ends)
    Path(name).write_text(json.dumps({"eos_token_id": ends}))
    assert EOT not in tokens[:first]
    generate.main(["--device", "cpu", "--precision", "fp32", "-e", str(model), "-g", "30"])
    assert capsys.readouterr().out == text_of(tokens[:first])
    assert written("-e", model, "-g", 30) == text_of(tokens)  # with --ignore-eot


@gpt2_alone
def test_a_text_ends_before_the_token_that_the_tokenizers_config_names(model, theirs, capsys):
    tokens = expected_tokens(theirs, "x", 30)
    end = next(token for token in tokens[6:] if token < 128 and token not in tokens[:6])
    Path("tiny_tokenizer_config.json").write_text(json.dumps({"eos_token": chr(end)}))
    generate.main(["--device", "cpu", "--precision", "fp32", "-e", str(model), "-g", "30", "--prompt", "x"])
    at = tokens.index(end)
    assert EOT not in tokens[:at] and capsys.readouterr().out == text_of(tokens[:at])


@gpt2_alone
def test_several_samples_are_one_batch_and_the_first_is_that_of_the_seed_alone(model, theirs, written):
    alone = written("-e", model, "--prompt", "ab", "-g", 20, "--seed", 5)
    three = written("-e", model, "--prompt", "ab", "-g", 20, "--seed", 5, "--samples", 3)
    texts = [text_of(expected_tokens(theirs, "ab", 20, sampler=each)) for each in samplers_of(5, 3)]
    assert alone == texts[0] and three == "---\n".join(texts) and len(set(texts)) == 3


@gpt2_alone
def test_prompts_of_different_lengths_are_one_batch_and_come_as_lines_of_json(model, theirs, capsys, tmp_path):
    device.use("cpu")
    prompts = ["a", "four words are here", "Grüße 🙂"]
    (tmp_path / "prompts.txt").write_text("a\r\nfour words are here\n\nGrüße 🙂\n", encoding="utf-8")
    found = lines_of(capsys, "-e", model, "--prompts", "prompts.txt", "-g", 25, "--samples", 2, "--seed", 9)
    assert [(one["prompt"], one["sample"]) for one in found] == [(p, n) for p in prompts for n in range(2)]
    for one in found:
        prompt = one["prompt"]
        tokens = expected_tokens(theirs, prompt, 25, sampler=samplers_of(9, 2)[one["sample"]], eot=EOT)
        assert one["text"] == text_of(tokens[len(prompt.encode()) :])[:-1]
        length = len(tokens) - len(prompt.encode())
        assert (one["tokens"], one["end"]) == ((25, "length") if length == 25 else (length + 1, "eot"))
    more = {"id": 7, "tags": ["é", None]}  # other fields are passed through, but for those that the program writes
    rest = ["", "two\nlines"]
    objects = [{"prompt": prompt, "text": "the answer", "sample": "x"} | more for prompt in prompts + rest]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in objects))
    again = lines_of(capsys, "-e", model, "--prompts", "prompts.jsonl", "-g", 25, "--seed", 9)
    assert again[:3] == [one | more for one in found[::2]] and [one["prompt"] for one in again[3:]] == rest
    (tmp_path / "list.json").write_text(json.dumps([*objects[:3], *rest], indent=1))
    listed = lines_of(capsys, "-e", model, "--prompts", "list.json", "-g", 25, "--seed", 9)
    assert listed == again[:3] + [{k: v for k, v in one.items() if k not in more} for one in again[3:]]
    (tmp_path / "half.json").write_text('["\\ud83d"]')  # of a pair of UTF-16
    assert [one["prompt"] for one in lines_of(capsys, "-e", model, "--prompts", "half.json", "-g", 1)] == ["\ufffd"]


@gpt2_alone
def test_control_characters_are_kept_but_on_a_terminal(model, theirs, monkeypatch, written):
    flags = "-e", model, "--prompt", "If \x07", "-g", 60, "-t", 40
    text = expected(theirs, "If \x07", 60)
    spared = "".join(c for c in text if c in "\t\n\v\f\r" or not (ord(c) < 32 or 127 <= ord(c) < 160))
    assert len(text) - len(spared) > 1
    assert written(*flags) == text
    Path("one.jsonl").write_text(json.dumps({"prompt": "If \x07"}))
    with monkeypatch.context() as on:
        on.setattr("sys.stdout.isatty", lambda: True)
        assert written(*flags) == spared
        for_json = written(*flags[:2], *flags[4:], "--prompts", "one.jsonl")
    assert "If \x07" + json.loads(for_json)["text"] + "\n" == text
    stop = next(c for c in text[9:] if c not in spared)
    assert written(*flags, "--stop", stop) == text[: text.index(stop, 4)] + "\n"


@gpt2_alone
@pytest.mark.parametrize("flag", ["--prompt-file", "--prompts"])
def test_a_prompt_may_come_from_a_file_or_standard_input(model, theirs, tmp_path, monkeypatch, flag, written):
    (tmp_path / "prompt.txt").write_bytes("\ufeffIf so:\n\tgo\n".encode())
    (tmp_path / "line.txt").write_bytes(b"go on\n")
    name = "prompt.txt" if flag == "--prompt-file" else "line.txt"
    by_file = written("-e", model, flag, name, "-g", 9)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(name).read_bytes())))
    assert written("-e", model, flag, "-", "-g", 9) == by_file
    if flag == "--prompt-file":
        assert by_file == expected(theirs, "If so:\n\tgo", 9)  # without the mark and the last line break
    else:
        assert json.loads(by_file)["text"] == expected(theirs, "go on", 9).removeprefix("go on")[:-1]


@gpt2_alone
def test_a_text_ends_before_a_stop_text_however_tokens_spell_it(model, theirs, written):
    whole = expected(theirs, "If ", 30)[:-1]
    assert len(whole) > 12
    for stop in whole[8:9], whole[8:10], whole[9:12]:
        at = whole.index(stop, 3)
        assert written("-e", model, "--prompt", "If ", "-g", 30, "--stop", stop) == whole[:at] + "\n"
        found = written("-e", model, "--prompt", "If ", "-g", 30, "--stop", "☃☃", "--stop", stop)
        assert found == whole[:at] + "\n"
    for stop in "☃", "☃" * 500:
        assert written("-e", model, "--prompt", "If ", "-g", 30, "--stop", stop) == whole + "\n"
    assert written("-e", model, "--prompt", "If ", "-g", 30, "--stop", whole[-1] + "☃") == whole + "\n"


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=2)


@given(text=st.text("ab", max_size=20), stops=STOPS, cut=st.data())
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


def test_a_checkpoint_brings_its_tokenizer_along(model, config, theirs, tmp_path, capsys, monkeypatch):
    tokens = [bytes([byte]).swapcase() for byte in range(256)] + [b"<|endoftext|>"]
    write_tokenizer("data_tokenizer.bin", tokens, EOT)
    params, flags = flat(theirs, config), {"data": "data", "tokenizer": "data_tokenizer.bin"}
    files = tokenizer_files(Path("data_tokenizer.bin"), "model_")
    checkpoint = save_checkpoint(tmp_path / "run", 20, config, params, params, params, {"flags": flags}, files)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("gpt2_tokenizer.bin", "data_tokenizer.bin"):  # of other data, of as many tokens
        shutil.copy(tmp_path / "tiny_tokenizer.bin", name)
    device.use("cpu")
    generate.main(["--device", "cpu", "--precision", "fp32", "--ignore-eot", "-e", str(checkpoint), "-g", "30"])
    done = capsys.readouterr()
    text = expected(theirs, "", 30)
    swapped = "".join(c.swapcase() if c.isascii() else c for c in text)
    assert done.out == swapped.replace("<|ENDOFTEXT|>", "<|endoftext|>") != text
    assert done.err.startswith("30 tokens in ")


@gpt2_alone
def test_a_checkpoint_without_a_tokenizer_asks_for_one(model, theirs, tmp_path, written):
    params, flags = flat(theirs), {"data": "data", "tokenizer": None}
    checkpoint = save_checkpoint(tmp_path / "run", 20, CONFIG, params, params, params, {"flags": flags})
    assert re.search("step_00000020 .* without a tokenizer: .*--tokenizer", refusal(written, "-e", checkpoint))
    named = ("--tokenizer", "tiny_tokenizer.bin")
    assert written("-e", checkpoint, "-g", 5, *named) == expected(theirs, "", 5)


def test_the_model_sees_as_many_tokens_as_it_was_trained_at_by_its_checkpoint(model, config, theirs, tmp_path, capsys):
    """Also with rotary positions. -t may go beyond, which is said; a .bin by itself does not say how many they were."""
    params = flat(theirs, config)
    state = {"flags": {"sequence_length": 9}}
    checkpoint = save_checkpoint(tmp_path / "run", 20, config, params, params, params, state)
    device.use("cpu")

    def said(*flags) -> tuple[str, str]:
        named = "--tokenizer", "tiny_tokenizer.bin"
        generate.main(["--device", "cpu", "--ignore-eot", "--prompt", "If ", "-g", "30", *named, *map(str, flags)])
        text, error = capsys.readouterr()
        return text, error.partition("30 tokens in")[0]

    beyond = "-t 20 goes beyond the 9 tokens at which the model was trained\n"
    assert said("-e", checkpoint) == said("-e", checkpoint, "-t", 9) == (expected(theirs, "If ", 30, T=9), "")
    assert said("-e", checkpoint, "-t", 5) == (expected(theirs, "If ", 30, T=5), "")
    assert said("-e", checkpoint, "-t", 20) == (expected(theirs, "If ", 30, T=20), beyond)
    assert said("-e", model) == (expected(theirs, "If ", 30), "")


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


@gpt2_alone
def test_bad_prompts_stops_and_samples_are_told_in_one_line(model, capsys, tmp_path, monkeypatch):
    device.use("cpu")
    files = {
        "breaks.txt": b"\n\r\n", "latin1.txt": b"a\nGr\xfc\xdfe", "long.txt": b"x\n" + b"y" * 40,
        "no.jsonl": b'{"prompt": "a"}\n{"text": "b"}\n', "broken.jsonl": b'{"prompt": "a"',
        "none.json": b"[]", "number.json": b'["a", 3]',
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)

    def told(*flags) -> str:
        message = refusal(generate.main, ["--device", "cpu", "-e", str(model), *flags])
        assert capsys.readouterr().out == ""
        return message

    assert told("--prompt", "x" * 40) == "--prompt has 41 tokens, and the model sees 40: shorten it"
    longer = "has 9 tokens, and the model sees 8: shorten it, or raise -t (at most 40)"
    assert told("--prompt", "x" * 8, "-t", "8") == f"--prompt {longer}"
    assert told("--prompts", "long.txt").startswith("long.txt, line 2 has 41 tokens, and the model sees 40: ")
    assert told("--no-bos").startswith("--prompt has no tokens, and --no-bos puts none")
    for flag in "--prompt-file", "--prompts":
        assert told(flag, "breaks.txt") == f"breaks.txt is empty: write a prompt into it, or leave {flag} out"
        assert f"{flag} gone.txt: no such file or directory; name a file" in told(flag, "gone.txt")
        assert told(flag, "latin1.txt") == "latin1.txt is not UTF-8 from byte 4 on: convert it (iconv -t UTF-8)"
    for place in "no.jsonl, line 2", "broken.jsonl, line 1", "number.json, record 2":
        assert told("--prompts", place.split(",")[0]) == f'{place}: not of the form {{"prompt": "text"}}'
    assert told("--prompts", "none.json").startswith("none.json has no prompt: write one into it")
    assert "--prompt is not UTF-8: convert it" in told("--prompt", "a\udcfc")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert told("--prompt-file", "-").startswith("standard input is empty: write a prompt into it, ")
    use = device.use

    def with_little_memory(kind: str) -> None:
        use(kind)
        device.current.device.memory = lambda: (1 << 20, 1 << 30)

    monkeypatch.setattr(device, "use", with_little_memory)
    said = told("--samples", "2000")
    assert "so lower --samples or give fewer prompts" in said and "B=2000, " in said
    assert told("--samples", "65536").startswith("65536 texts at once are more than 65535: lower --samples ")


@gpt2_alone
@pytest.mark.parametrize("flags", [[], ["--temperature", "0"], ["--top-p", "0.5"], ["--top-k", "3"]], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_the_program_in_one_line(flags, value, model, theirs, dev, written):
    params = flat(theirs)
    params[[CONFIG.channels * ord("b"), CONFIG.channels * 5]] = value  # of the token that comes, and of another
    write_model(model, CONFIG, params)
    said = refusal(written, "-e", model, "--prompt", "b", *flags)
    assert "tiny.bin: its logits are NaN or infinity after 0 tokens of a text" in said


@gpt2_alone
def test_a_reader_who_leaves_early_and_an_ascii_terminal_are_no_errors(model):
    command, env = f"{sys.executable} {ROOT}/generate.py --device cpu -e {model} ", {"PYTHONIOENCODING": "ascii"}
    leaves = "-g 300 -t 8 | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}"
    for more, code, out in (leaves, (0, 1), ""), ("--prompt Grüße -g 0", (0,), "Gr??e\n"):
        done = subprocess.run(["bash", "-c", command + more], env=os.environ | env, capture_output=True, text=True)
        assert "Traceback" not in done.stderr and done.returncode in code and done.stdout == out

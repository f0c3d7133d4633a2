"""Conversations with a model: answers as transformers', a cache that stays, and what does not fit."""

import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import device
import generate
from conftest import refusal
from dev.chat import typed
from llmc.data.find_tokenizer import open_tokenizer
from llmc.files.model_file import write_model
from llmc.step.generation import Writer
from oracle import flat_parameters_of, opinionated
from support.chats import save_tokenizer, talk
from train_llama3 import Llama3Config
from train_qwen3 import Qwen3Config

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    "llama3": Llama3Config(256, 325, 2, 4, 2, 32, 40, tied=True), "qwen3": Qwen3Config(256, 325, 2, 4, 2, 32, 40, 8)
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def made(request, tmp_path_factory) -> SimpleNamespace:
    """A model with its tokenizer and template, and transformers' model."""
    folder, config = tmp_path_factory.mktemp("talk"), MODELS[request.param]
    theirs = opinionated(config)
    tokenizer = open_tokenizer(save_tokenizer(folder, request.param, "m_"))
    assert tokenizer.vocab_size == config.vocab_size
    write_model(folder / "m.bin", config, flat_parameters_of(theirs, config).astype(np.float32))
    save_tokenizer(folder / "theirs", request.param)
    library = AutoTokenizer.from_pretrained(folder / "theirs")
    return SimpleNamespace(path=folder / "m.bin", config=config, theirs=theirs, tokenizer=tokenizer, library=library)


def their_answer(made, messages, count: int) -> str:
    tokens = made.library.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    found = []
    while len(found) < count:
        with torch.no_grad():
            token = int(made.theirs(torch.tensor([tokens + found])).logits[0, -1].argmax())
        if token in made.tokenizer.ends:
            break
        found.append(token)
    return b"".join(map(made.tokenizer.decode, found)).decode(errors="replace")


@pytest.fixture
def converse(made, monkeypatch, capsys):
    """converse(lines, *flags) is what generate.py --chat prints, and how many tokens went through the model at each
    turn."""
    device.use("cpu")
    reads, read = [], Writer.read

    def counting(writer, texts, kept=0):
        reads.append((len(texts[0]) - kept, kept))
        read(writer, texts, kept)

    monkeypatch.setattr(Writer, "read", counting)

    def converse(lines: str, *flags, model: Path = made.path):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        how = ["--device", "cpu", "--precision", "fp32", "--temperature", "0", "--chat"]
        capsys.readouterr()
        generate.main([*how, "-e", str(model), *map(str, flags)])
        return capsys.readouterr(), reads

    return converse


def test_answers_are_those_of_transformers_and_only_new_tokens_go_through_the_model(made, converse):
    questions, messages, wanted = ["the theatre?", "then 你好", "and?"], talk(system="be the other")[:0], ""
    messages = [{"role": "system", "content": "be the other"}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": their_answer(made, messages, 12)})
        wanted += messages[-1]["content"] + "\n"
    said, reads = converse("\n".join(questions) + "\n", "-g", 12, "-t", 256, "--system", "be the other")
    assert said.out == wanted and "left out" not in said.err
    (first, none), *others = reads
    assert none == 0 and len(reads) == 3
    assert all(kept >= first - 1 for _, kept in others)  # but for what answers come back as


def test_a_model_of_nan_does_not_talk(made, converse, tmp_path):
    for file in made.path.parent.glob("m_*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    parameters = flat_parameters_of(made.theirs, made.config).astype(np.float32)
    parameters[: made.config.vocab_size * made.config.channels] = np.nan
    write_model(tmp_path / "m.bin", made.config, parameters)
    assert "its logits are NaN or infinity" in refusal(converse, "the?\n", "-g", 4, model=tmp_path / "m.bin")


def test_reset_and_quit_and_a_context_that_is_full(made, converse):
    one, reads = converse("the theatre?\n/reset\nthe theatre?\n/quit\nthe\n", "-g", 8)
    first, second = one.out[: len(one.out) // 2], one.out[len(one.out) // 2 :]
    assert first == second and len(reads) == 2
    long = "the theatre there then the other\n"
    said, reads = converse(long * 6 + "x" * 300 + "\n", "-g", 10, "-t", 150)
    assert "the context of 150 tokens is full: the oldest turns are left out" in said.err
    assert "shorten it, or raise -t" in said.err and all(new + kept <= 140 for new, kept in reads)


def test_a_message_that_is_too_long_leaves_the_conversation_as_it_is(made, converse):
    flags = "-g", 8, "-t", 150
    said, _ = converse("the theatre?\n" + "x" * 300 + "\nthen?\n", *flags)
    assert "shorten it" in said.err and said.out == converse("the theatre?\nthen?\n", *flags)[0].out


def test_standard_input_may_be_closed(made, converse, monkeypatch):
    device.use("cpu")
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in refusal(generate.main, ["--device", "cpu", "--chat", "-e", str(made.path)])


def test_ctrl_c_ends_an_answer_and_not_the_conversation(made, converse, monkeypatch):
    push, count, before = generate.Text.push, [0], signal.getsignal(signal.SIGINT)

    def interrupt(text, token):
        count[0] += 1
        push(text, token)
        if count[0] == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generate.Text, "push", interrupt)
    said, reads = converse("the\nthen\n", "-g", 9, "--ignore-eot")
    assert count[0] == 12 and len(reads) == 2 and signal.getsignal(signal.SIGINT) is before


def test_a_file_of_conversations_is_answered(made, converse, tmp_path):
    messages = talk("the theatre?", "there", "then?", "left out")
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": messages, "id": 7}) + "\n" + json.dumps({"prompt": "the"}) + "\n")
    said, _ = converse("", "--prompts", file, "-g", 9)
    found = [json.loads(line) for line in said.out.splitlines()]
    assert found[0]["id"] == 7 and found[0]["text"] == their_answer(made, messages[:3], 9)
    assert found[1]["text"] == their_answer(made, talk("the"), 9)
    file.write_text(json.dumps({"messages": talk("a", "b", "")}))
    assert "line 1: turn 3, the user's, is empty" in refusal(converse, "", "--prompts", file)
    file.write_text('"a"\n{"prompt": "b"\n')
    assert "line 2: not of the form" in refusal(converse, "", "--prompts", file)
    assert refusal(converse, "", "--tokenizer", "bytes").startswith("bytes: no chat template")
    for flags in ("--no-bos",), ("--samples", 2):
        assert "leave --no-bos and --samples out" in refusal(converse, "", *flags)
    assert converse("", "--prompt", "the", "-g", 9)[0].out == their_answer(made, talk("the"), 9) + "\n"


def test_ctrl_c_before_a_line_ends_nothing(monkeypatch, capsys):
    lines = iter([KeyboardInterrupt, "one", "", EOFError])

    def read(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    assert [typed(terminal=True) for _ in range(3)] == ["one", " ", ""]
    assert "/quit or Ctrl-D ends this" in capsys.readouterr().out


def read_until(place: int, wanted: str) -> str:
    text, end = "", time.monotonic() + 60
    while wanted not in text:
        assert select.select([place], [], [], end - time.monotonic())[0], text
        text += os.read(place, 4096).decode(errors="replace")
    return text


@pytest.mark.parametrize("made", ["qwen3"], indirect=True)
def test_on_a_terminal_ctrl_c_ends_an_answer_and_what_is_typed_meanwhile_is_not_lost(made):
    own, theirs = pty.openpty()
    slow = f"""if True:
        import sys, time, generate
        from llmc.step.generation import Writer
        tokens = Writer.tokens
        def slowly(*args):
            for _ in tokens(*args):
                time.sleep(0.1)
                yield [{made.tokenizer.tokens.index(b"a")}]
        Writer.tokens = slowly
        generate.main(sys.argv[1:])
    """
    flags = "--chat", "--device", "cpu", "-g", "150", "-t", "256"
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "-e", str(made.path), *flags], stdin=theirs, stdout=theirs, stderr=theirs,
        cwd=ROOT, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    try:
        read_until(own, "> ")
        os.write(own, b"one\n")
        read_until(own, "aaa")
        os.write(own, b"two\n")  # typed while it answers
        time.sleep(0.3)
        os.write(own, b"\x03")
        said = read_until(own, "> ")
        assert said.count("a") < 100
        said = read_until(own, "aaa")
        os.write(own, b"/quit\n\x03")
        with suppress(OSError):  # once the program has ended
            read_until(own, "what is never said")
        assert process.wait(5) == 0
    finally:
        process.kill()
        os.close(own)

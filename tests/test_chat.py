"""Conversations: what is read, the template's text against transformers', and which tokens are learned."""

import json
import re
import subprocess
import sys
from pathlib import Path

import conftest
from dev.data import chat
from device.errors import UserError
from llmc.data.chat import ChatTemplate, conversation_of
from llmc.data.dataloader import DataLoader
from llmc.data.find_tokenizer import open_tokenizer
from llmc.data.token_file import MARK, UNMARKED, open_tokens, write_tokens
from llmc.data.tokenizer import byte_tokenizer
from support.chats import TEMPLATES, save_tokenizer, talk

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

TALKS = [
    talk("the theatre?", "there"),
    talk("  the\n", "\n they're \n\n", "and 你好 🙂?", "café", system="be  short "),
    talk("x <|im_end|> y", "a b", "a b", "a b", "a", "a"),
    talk("1990", "cafe\u0301 then\n"),
]


def saved(tmp_path: Path, name: str):
    path = save_tokenizer(tmp_path / name, name)
    tokenizer = open_tokenizer(path)
    return path, tokenizer, ChatTemplate(path, tokenizer), AutoTokenizer.from_pretrained(path.parent)


def run(monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["chat.py", *map(str, arguments)])
    chat.main()
    return capsys.readouterr().out


def write_lines(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_those_of_transformers(name, tmp_path):
    _, tokenizer, template, theirs = saved(tmp_path, name)
    for messages in TALKS:
        text, _ = template.answers(messages)
        assert text == theirs.apply_chat_template(messages, tokenize=False)
        ids, places = tokenizer.encode_with_places(text)
        assert ids == theirs.apply_chat_template(messages, return_dict=False) and len(places) == len(ids)
        prompt = template.render(messages[:-1], prompt=True)
        wanted = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode(prompt) == wanted


words = st.text(st.sampled_from("ab é\n 你🙂<|'{%}>\t"), min_size=1, max_size=12).filter(str.strip)


@pytest.fixture(scope="module", params=TEMPLATES)
def each(request, tmp_path_factory):
    return saved(tmp_path_factory.mktemp("each"), request.param)


@settings(max_examples=25, deadline=None)
@given(contents=st.lists(words, min_size=2, max_size=6), system=st.just("") | words)
def test_tokens_are_those_of_transformers_for_any_contents(each, contents, system):
    _, tokenizer, template, theirs = each
    messages = talk(*contents[: len(contents) // 2 * 2], system=system)
    tokens = chat.Encoder(tokenizer, template, "answers", 10**6)("", {"messages": messages})
    assert (tokens & UNMARKED).tolist() == theirs.apply_chat_template(messages, return_dict=False)
    assert 0 < (tokens >= 0).sum() < len(tokens)


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_and_what_ends_them_are_learned_and_nothing_else(name, tmp_path):
    _, tokenizer, template, theirs = saved(tmp_path, name)
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    for messages in TALKS:
        text, answers = template.answers(messages)
        contents = [message["content"] for message in messages if message["role"] == "assistant"]
        wanted = [(content.strip() if name == "llama3" else content) + end for content in contents]
        found = [text[a:b] for a, b in answers]
        if name == "qwen3":  # it puts an empty thought before the last answer, which the model must write itself
            wanted[-1] = "<think>\n\n</think>\n\n" + wanted[-1].lstrip("\n")
        assert found == wanted
        if name == "generation":
            mask = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            learned = chat.Encoder(tokenizer, template, "answers", 10**6)("", {"messages": messages}) >= 0
            assert learned.tolist() == list(map(bool, mask["assistant_masks"]))


def test_encoded_answers_are_whole_tokens_and_learn_says_which(tmp_path):
    _, tokenizer, template, _ = saved(tmp_path, "qwen3")
    record = {"messages": TALKS[1]}

    def learned(learn: str, longest: int = 1000) -> list[str]:
        tokens = chat.Encoder(tokenizer, template, learn, longest)("", record)
        parts = np.split(tokens, np.flatnonzero(np.diff(tokens >= 0)) + 1)
        return [b"".join(tokenizer.decode(t) for t in part).decode() for part in parts if part[0] >= 0]

    last = "<think>\n\n</think>\n\ncafé<|im_end|>"
    # The line break before the first answer and its own are one token.
    assert learned("answers") == ["\n\n they're \n\n<|im_end|>", last]
    assert learned("last") == [last]
    assert len(learned("all")) == 1 and learned("all")[0].endswith("café<|im_end|>\n")
    encoder = chat.Encoder(tokenizer, template, "last", 20)
    assert encoder("here", record) is None
    assert encoder.places == {"left out: nothing to learn in its first 20 tokens": "here"}


def test_all_bytes_of_a_character_are_learned():
    """With a vocabulary of bytes a character is several tokens. All of them have its place, the first one's, too."""
    text, tokenizer = "a\u65e5\U0001f642\u00e9", byte_tokenizer()
    places = [(n, n + 1) for n, character in enumerate(text) for _ in character.encode()]
    assert tokenizer.encode_with_places(text) == ([*text.encode()], places)


def test_records_are_known_by_their_keys():
    wanted = talk("q", "a")
    for record in (
        {"messages": wanted, "tools": None, "id": 3},
        {"messages": [{**wanted[0], "tool_calls": None}, wanted[1]]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": wanted},
        {"prompt": "q", "completion": "a"},
        {"prompt": wanted[:1], "completion": wanted[1:]},
        {"instruction": "q", "input": "", "output": "a"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, wanted[1]]},
    ):
        assert conversation_of(record) == (wanted, set())
    thought = talk("q", "<think>\nhm\n</think>\n\na")
    assert conversation_of({"messages": thought}) == (wanted, {"thoughts"})
    assert conversation_of({"instruction": "q", "input": "i", "output": "a"})[0] == talk("q\n\ni", "a")
    assert conversation_of({"messages": wanted}, answered=False)[0] == wanted[:1]


@pytest.mark.parametrize("record, wrong", [
    (["q", "a"], "list"),
    ({}, "it has nothing, and must"),
    ({"text": "a"}, "it has text, and must have one of messages, conversations"),
    ({"prompt": "q"}, "it has prompt, and must"),
    ({"messages": talk("q", "a"), "instruction": "q", "output": "a"}, "output, and must have one of"),
    ({"messages": talk("q", " ")}, "turn 2, the assistant's, is empty"),
    ({"messages": talk("q", "a", "q")}, "does not end with an answer"),
    ({"messages": [{"role": "system", "content": "s"}]}, "does not end with an answer"),
    ({"messages": [*talk("q", "a"), {"role": "system", "content": "s"}]}, "does not end with an answer"),
    ({"messages": talk("q", "a")[::-1]}, "turn 1 is the assistant's"),
    ({"messages": talk("q")[:1] * 2}, "turn 2 is the user's, and must be the assistant's"),
    ({"messages": []}, "no list of messages"),
    ({"messages": ["q"]}, "turn 1 has no role"),
    ({"messages": [{"role": "user", "content": None}]}, "turn 1 has content that is no text"),
    ({"messages": [{"role": "tool", "content": "3"}]}, "tools"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "turn 1 has content that is no text"),
])  # fmt: skip
def test_what_is_no_conversation_is_said(record, wrong):
    with pytest.raises(UserError, match=wrong):
        conversation_of(record)


def test_a_template_may_not_leave_its_sandbox_and_may_refuse(tmp_path):
    path, tokenizer, _, _ = saved(tmp_path, "chatml")
    for source, wrong in (
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__.mro() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for m in messages %}{{ m.content[:1] }}{% endfor %}", "does not put each answer"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }};{% endfor %}", "the turns before turn 2 in"),
    ):
        given = tmp_path / "t.jinja"
        given.write_text(source)
        with pytest.raises(UserError, match=wrong):
            ChatTemplate(path, tokenizer, given).answers(talk("aa", "bb"))
    with pytest.raises(UserError, match="does not know the role 'developer'"):
        ChatTemplate(path, tokenizer).render([{"role": "developer", "content": "x"}])
    for source in "{% if %}", "{% for m in messages %}" * 30 + "{% endfor %}" * 30, "{{" + "(" * 3000 + ")" * 3000:
        given.write_text(source)
        assert "has a mistake" in conftest.refusal(ChatTemplate, path, tokenizer, given)
    (path.parent / "chat_template.jinja").unlink()
    assert "no chat template" in conftest.refusal(ChatTemplate, path, tokenizer)
    (path.parent / "tokenizer_config.json").write_text(json.dumps({"chat_template": [5, {"template": "x"}]}))
    assert "no chat template" in conftest.refusal(ChatTemplate, path, tokenizer)


def test_marked_tokens_are_read_as_inputs_and_targets(tmp_path):
    ids, learned = np.arange(13) % 7, np.arange(13) % 3 == 1
    tokens = np.where(learned, np.int32(ids), np.int32(ids) | MARK)
    write_tokens(path := tmp_path / "x_train.bin", tokens, 7, True)
    assert open_tokens(path).marked and (open_tokens(path)[:] & UNMARKED).tolist() == ids.tolist()
    loader = DataLoader(tmp_path / "x", "train", 2, 3, 7)
    inputs, targets = np.zeros((2, 2, 3), np.int32)
    loader.next_batch(inputs, targets)
    assert inputs.ravel().tolist() == ids[:6].tolist()
    assert targets.ravel().tolist() == np.where(learned, ids, -1)[1:7].tolist()
    assert "outside the model's vocabulary of 6" in conftest.refusal(DataLoader, tmp_path / "x", "train", 2, 3, 6)
    assert "not all within" in conftest.refusal(write_tokens, path, tokens, 6, True)
    write_tokens(path, tokens, 7, True, 3)
    DataLoader(tmp_path / "x", "train", 2, 3, 7)
    assert "use -t 3" in conftest.refusal(DataLoader, tmp_path / "x", "train", 2, 4, 7)
    damaged = bytearray(path.read_bytes())
    damaged[12:16] = (-5).to_bytes(4, "little", signed=True)
    path.write_bytes(damaged)
    assert "its rows have -5 tokens" in conftest.refusal(DataLoader, tmp_path / "x", "train", 2, 3, 7)


def test_a_dataset_of_chats(tmp_path, monkeypatch, capsys):
    path, tokenizer, template, theirs = saved(tmp_path, "chatml")
    talks = [talk("the theatre?", f"there {n}", "then?", "the end") for n in range(40)]
    records = [{"messages": each} for each in talks]
    bad = [{"messages": talk("q", "")}] * 2 + [{"text": "x"}, records[0], {"messages": talk("the " * 99, "a")}]
    file = write_lines(tmp_path / "chats.jsonl", records + bad)
    flags = file, "--model", path.parent, "-t", 64, "-o", tmp_path / "out" / "chats", "--val", 0.2
    said = run(monkeypatch, capsys, *flags)
    assert f"turn 2, the assistant's, is empty: 2 (first: {file}, record 41)" in said
    assert "left out: nothing to learn in its first 64 tokens: 1" in said and "duplicates     1" in said
    found, count = [], 0
    for split in "train", "val":
        (shard,) = (tmp_path / "out").glob(f"chats_{split}.bin")
        tokens = open_tokens(shard)
        found.append(tokens[:] & UNMARKED)
        count += int((tokens[:] >= 0).sum())
    wanted = [theirs.apply_chat_template(each, return_dict=False) for each in talks]
    assert sorted(np.concatenate(found).tolist()) == sorted(sum(wanted, []))
    assert count == sum(len(tokenizer.encode(f"there {n}<|im_end|>") + tokenizer.encode("the end<|im_end|>"))
                        for n in range(40))  # fmt: skip
    assert (tmp_path / "out" / "chats_chat_template.jinja").read_text() == template.source
    assert "belongs to another dataset" in conftest.refusal(run, monkeypatch, capsys, *flags, "--learn", "all")
    model = "--model", path.parent
    assert "-o must be a prefix" in conftest.refusal(run, monkeypatch, capsys, file, *model)
    assert "-o must be a prefix" in conftest.refusal(run, monkeypatch, capsys, file, *model, "-o", tmp_path)
    few = [write_lines(tmp_path / f"{n}.jsonl", records[:n]) for n in (1, 2)]
    refused = conftest.refusal(run, monkeypatch, capsys, few[0], *model, "-o", tmp_path / "few")
    assert "too few conversations, 1" in refused and not list(tmp_path.glob("few_*"))
    assert "conversations  train 1, val 1" in run(monkeypatch, capsys, few[1], *model, "-o", tmp_path / "few")
    shown = run(monkeypatch, capsys, file, "--model", path.parent, "--show", 1)
    assert "<|im_start|>assistant\n[there 0<|im_end|>]\n<|im_start|>user\nthen?" in shown


def test_files_without_a_conversation_are_refused(tmp_path, monkeypatch, capsys):
    path, *_ = saved(tmp_path, "chatml")
    file = write_lines(tmp_path / "c.jsonl", [{"text": "x"}])
    assert "too few conversations, 0" in conftest.refusal(run, monkeypatch, capsys, file, "--model", path, "--show", 1)
    file.write_bytes(b'{"prompt": "\xe9", "completion": "e"}')
    assert "save it as UTF-8" in conftest.refusal(run, monkeypatch, capsys, file, "--model", path, "--show", 1)


def test_the_command_fits_both_splits(tmp_path, monkeypatch, capsys):
    path, tokenizer, _, _ = saved(tmp_path, "chatml")
    long = {"prompt": "q0", "completion": "a b " * 300}
    for n in range(4):  # in one of these the long conversation is for validation
        file = write_lines(tmp_path / f"{n}.jsonl", [long, *({"prompt": f"{n}", "completion": c} for c in "cdf")])
        said = run(monkeypatch, capsys, file, "--model", path, "-o", tmp_path / f"o{n}")
        B, T = map(int, re.search(r"-b (\d+) -t (\d+)", said).groups())
        for split in "train", "val":
            DataLoader(tmp_path / f"o{n}", split, B, T, tokenizer.vocab_size)


def test_what_ends_a_text_in_config_json_is_kept(tmp_path):
    (tmp_path / "c_config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "c_generation_config.json").write_text('{"top_k": 5}')
    chat.write_ends(tmp_path / "c", {7})
    assert json.loads((tmp_path / "c_generation_config.json").read_text()) == {"top_k": 5, "eos_token_id": [3, 7]}


def test_all_forms_in_all_kinds_of_files_have_the_same_conversations(tmp_path, monkeypatch, capsys):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    path, *_ = saved(tmp_path, "chatml")
    asked = [(f"the {n}?", f"in the {n} there") for n in range(20)]
    forms = [
        [{"messages": talk(*each)} for each in asked],
        [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in asked],
        [{"prompt": q, "completion": a} for q, a in asked],
        [{"instruction": q, "input": "", "output": a} for q, a in asked],
    ]
    write_lines(tmp_path / "0.jsonl", forms[0])
    (tmp_path / "1.json").write_text(json.dumps(forms[1]))
    datasets.Dataset.from_list(forms[2]).to_parquet(tmp_path / "2.parquet")
    datasets.Dataset.from_list(forms[3]).save_to_disk(tmp_path / "3")
    found = set()
    for name in "0.jsonl", "1.json", "2.parquet", "3":
        run(monkeypatch, capsys, tmp_path / name, "--model", path, "-o", tmp_path / f"out{name[0]}", "--val", 0.2)
        found.add(tuple((tmp_path / f"out{name[0]}_{split}.bin").read_bytes() for split in ("train", "val")))
    assert len(found) == 1


def test_each_conversation_may_have_a_row(tmp_path, monkeypatch, capsys):
    path, tokenizer, _, _ = saved(tmp_path, "llama3")
    file = write_lines(tmp_path / "chats.jsonl", ({"prompt": f"the {n}", "completion": "there"} for n in range(30)))
    flags = "--model", path, "-t", 80, "--pack", "one", "--val", 0.3
    run(monkeypatch, capsys, file, *flags, "-o", tmp_path / "chats")
    loader = DataLoader(tmp_path / "chats", "train", 1, 80, tokenizer.vocab_size, 3)
    inputs, targets = np.zeros((2, 1, 80), np.int32)
    assert loader.unused == 0
    for _ in range(loader.num_batches):
        loader.next_batch(inputs, targets)
        assert inputs[0, 0] == tokenizer.tokens.index(b"<|begin_of_text|>")
        learned = b"".join(map(tokenizer.decode, targets[targets >= 0]))
        assert learned == b"there<|eot_id|>" and (inputs == tokenizer.eot).any()


def test_rows_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch, capsys):
    path, *_ = saved(tmp_path, "chatml")
    file = write_lines(tmp_path / "chats.jsonl", ({"prompt": f"the {n}", "completion": "there"} for n in range(30)))
    given = file, "--model", path, "-o", tmp_path / "new" / "chats", "--pack", "one", "-t", 10_000
    monkeypatch.setattr(chat, "free_memory", lambda: 1 << 20)
    said = conftest.refusal(run, monkeypatch, capsys, *given)
    assert said.startswith("-t 10000: 30 rows of 10,000 tokens need 2 MiB of memory, and 1")
    assert said.endswith("are free: lower -t, or leave --pack one out")
    assert not (tmp_path / "new").exists()


def test_sigterm_leaves_no_folder(tmp_path):
    path, *_ = saved(tmp_path, "chatml")
    file = write_lines(tmp_path / "chats.jsonl", ({"prompt": f"the {n}", "completion": "there"} for n in range(30)))
    (tmp_path / "out").mkdir()
    program = "; ".join([
        "import os, runpy, signal, sys", "from llmc.data import token_file",
        "token_file.write_tokens = lambda *_: os.kill(os.getpid(), signal.SIGTERM)",
        "runpy.run_path(sys.argv[0], run_name='__main__')",
    ])  # fmt: skip
    given = chat.__file__, file, "--model", path, "-o", tmp_path / "out" / "chats"
    done = subprocess.run([sys.executable, "-c", f"import sys; del sys.argv[0]; {program}", *map(str, given)],
                          capture_output=True, text=True, cwd=Path(chat.__file__).parents[2], timeout=60)  # fmt: skip
    assert (done.returncode, done.stderr) == (143, "") and not list((tmp_path / "out").iterdir())


def test_a_template_of_ones_own_says_what_ends_an_answer(tmp_path, monkeypatch, capsys):
    path, tokenizer, _, _ = saved(tmp_path, "llama3")  # whose files name <|eot_id|> alone
    given = tmp_path / "own.jinja"
    given.write_text(TEMPLATES["chatml"])
    file = write_lines(tmp_path / "c.jsonl", ({"prompt": f"the {n}", "completion": "there"} for n in range(9)))
    run(monkeypatch, capsys, file, "--model", path, "--template", given, "-o", tmp_path / "c")
    for name in "c_tokenizer.json", "c_tokenizer.bin":
        found = open_tokenizer(tmp_path / name)
        assert found.tokens.index(b"<|im_end|>") in found.ends
        assert ChatTemplate(tmp_path / name, found).source == TEMPLATES["chatml"]

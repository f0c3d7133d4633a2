"""Tokenizer files, encoding and decoding, against tiktoken, transformers and small vocabularies."""

import copy
import json
import os
import shutil
import struct
import sys
from pathlib import Path

import generate
from conftest import refusal
from dev.data.common import encode_texts, load_tokenizer, write_vocabulary
from dev.hf.common import take_tokenizer_along
from device.errors import UserError
from llmc.data.find_tokenizer import (
    check_tokenizer,
    find_tokenizer,
    load_model_tokenizer,
    model_tokenizers,
    named_tokenizer,
    open_tokenizer,
    tokenizer_files,
)
from llmc.data.hf_tokenizer import HuggingFaceTokenizer
from llmc.data.tokenizer import (
    END_OF_TEXT,
    GPT2_PATTERN,
    StreamDecoder,
    Tokenizer,
    byte_tokenizer,
    gpt2_tokenizer,
    write_tokenizer,
)
from llmc.files.model_file import write_model
from llmc.model.tensors import num_parameters
from support.vocabularies import BEGIN, BYTE_LEVEL, CORPUS, GPT2_SPLIT, LEARNED, LIBRARIES, train
from train_gpt2_fp32 import GPT2Config

import numpy as np
import pytest
import regex
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

GPT2_TOKENIZER = GPT2Config.DEFAULT_TOKENIZER
PIECES = st.one_of(
    st.sampled_from(["the", " theatres", "1990", *"'s 't 're 've 'm 'll 'd 'S".split(), *" ,\n\té你🙂", "e\u0301"]),
    st.sampled_from(["<|endoftext|>", "<|eot_id|>", "<|im_start|>", "<|begin_of_text|>", "</s>", "<0x0A>", "▁"]),
    st.text(st.characters(codec="utf-8"), max_size=5),
)
TEXTS = st.lists(PIECES, max_size=30).map("".join)


@pytest.fixture
def file(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.bin", LEARNED.tokens, LEARNED.eot)
    return tmp_path / "tokenizer.bin"


def test_a_tokenizer_file_has_the_layout_of_llm_c_and_is_read_back_exactly(file):
    data, tokenizer = file.read_bytes(), open_tokenizer(file)
    assert struct.unpack("<256I", data[:1024]) == (20240328, 2, 317, 316) + (0,) * 252
    assert data[1024:] == b"".join(bytes([len(token)]) + token for token in LEARNED.tokens)
    assert (tokenizer.tokens, tokenizer.eot, tokenizer.vocab_size) == (LEARNED.tokens, 316, 317)
    assert [tokenizer.decode(i) for i in range(317)] == LEARNED.tokens
    assert "token -1 " in refusal(tokenizer.decode, -1)
    assert tokenizer.decode(317) == tokenizer.decode(10**6) == b""  # a model's padding
    file.write_bytes(struct.pack("<256I", 20240328, 1, 50257, *[0] * 253) + 50257 * b"\x01a")
    assert open_tokenizer(file).eot == 50256  # of version 1
    write_tokenizer(file, [*LEARNED.tokens, b"<s>"], 316, bos=317)
    assert open_tokenizer(file).bos == 317


def test_a_damaged_tokenizer_is_refused(file):
    data = file.read_bytes()

    def message(changed):
        file.write_bytes(changed)
        return refusal(open_tokenizer, file)

    assert "damaged at token 316" in message(data[:-1])
    assert "1 bytes too long" in message(data + b"x")
    assert "damaged at token 0" in message(data[:1024] + b"\0" + data[1025:])
    assert "damaged at token 0" in message(data[:1024])
    assert "version 3" in message(data[:4] + struct.pack("<I", 3) + data[8:])
    assert "end-of-text token 317" in message(data[:12] + struct.pack("<I", 317) + data[16:])
    assert "end-of-text token 50256" in message(data[:4] + struct.pack("<I", 1) + data[8:])
    assert "found a GPT-2 model" in message(struct.pack("<I", 20240326) + data[4:])
    assert "too short" in message(data[:100])
    for word, value in (4, 318), (5, 3), (7, 1):  # what begins a text, where spaces are put, special tokens
        assert "damaged in its header" in message(data[: 4 * word] + struct.pack("<I", value) + data[4 * word + 4 :])
    assert "damaged in its header" in message(data[:28] + struct.pack("<I", 1) + data[32:] + struct.pack("<I", 317))
    os.unlink(file)
    assert "no such file" in refusal(open_tokenizer, file)


def test_a_token_that_does_not_fit_a_file_is_not_written(tmp_path):
    for token in (b"", b"x" * 256):
        with pytest.raises(ValueError, match=f"1 to 255 bytes, and token 1 has {len(token)};"):
            write_tokenizer(tmp_path / "t.bin", [b"a", token], 0)
    with pytest.raises(ValueError, match="end-of-text"):
        write_tokenizer(tmp_path / "t.bin", [b"a"], 1)
    assert os.listdir(tmp_path) == []


@given(TEXTS)
@example("they've it's I'm we'll he'd can't you're the\n\n  1990s'  ")
def test_text_is_split_as_the_library_splits_it_for_gpt2(text):
    pieces = BYTE_LEVEL["gpt2_like"].pre_tokenizer.pre_tokenize_str(text)
    assert regex.findall(GPT2_PATTERN, text) == [text[start:end] for _, (start, end) in pieces]


def test_a_vocabulary_that_cannot_spell_every_text_decodes_but_does_not_encode():
    assert byte_tokenizer().encode("é\0") == [0xC3, 0xA9, 0] and byte_tokenizer().eot == 256
    tokenizer = Tokenizer([b"a", b"b", b"<|endoftext|>"], eot=2)
    assert tokenizer.decode(1) == b"b" and tokenizer.encode("") == []  # of a text that begins with nothing
    assert "byte 0" in refusal(tokenizer.encode, "a")


def test_gpt2s_own_encoding_is_rebuilt_from_its_tokens(tmp_path, monkeypatch):
    """Where tiktoken has, or can download, GPT-2's vocabulary."""
    monkeypatch.chdir(tmp_path)
    try:
        tokenizer = gpt2_tokenizer()
    except UserError as error:
        pytest.skip(str(error))
    write_tokenizer("gpt2_tokenizer.bin", tokenizer.tokens, tokenizer.eot)
    text = CORPUS * 3 + open(__file__).read()
    assert open_tokenizer("gpt2_tokenizer.bin").encode(text) == tiktoken.get_encoding("gpt2").encode_ordinary(text)
    assert gpt2_tokenizer().encode("<|endoftext|>") == [50256]


def test_the_tokenizer_of_a_dataset_is_its_own_or_the_models(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkdir("data")
    spellings = ["data/x", "data/x_train.bin", "data/x_train_*.bin", "data/x_val_000000.bin"]
    assert [find_tokenizer(data, default=GPT2_TOKENIZER) for data in spellings] == [None] * 4
    write_tokenizer(GPT2_TOKENIZER, [b"a"], 0)
    assert {str(find_tokenizer(data, default=GPT2_TOKENIZER)) for data in spellings} == {GPT2_TOKENIZER}
    for suffixes in (".json",), (".bin", ".json"):
        for suffix in suffixes:
            write_tokenizer(f"data/x_tokenizer{suffix}", [b"a"], 0)
        found = {str(find_tokenizer(data, default=GPT2_TOKENIZER)) for data in spellings}
        assert found == {f"data/x_tokenizer{suffixes[0]}"}
    assert not capsys.readouterr().out
    for model, default in (None, None), (None, "missing.bin"), (Path("n.bin"), GPT2_TOKENIZER):  # not to guess
        assert find_tokenizer("data/y", model, default) is None
        assert "if gpt2_tokenizer.bin is its, copy it to <prefix>_tokenizer.bin\n" in capsys.readouterr().out
    assert str(find_tokenizer("data/y", Path("gpt2_124M.bin"), GPT2_TOKENIZER)) == GPT2_TOKENIZER
    for name in ("n_tokenizer.json", "n_tokenizer.bin"):
        shutil.copy("data/x_tokenizer.json", name)
        assert str(find_tokenizer("data/y", Path("n.bin"), GPT2_TOKENIZER)) == name
        assert str(find_tokenizer("data/x", Path("n.bin"))) == "data/x_tokenizer.bin"
    for prefix in ("data/x_values", "data/x_train", "data/x_val_train"):  # which are no splits of data/x
        for suffix in (".bin", ".json"):
            write_tokenizer(f"{prefix}_tokenizer{suffix}", [b"a"], 0)
        for data in (prefix, f"{prefix}_train_*.bin", f"{prefix}_val.bin"):
            assert str(find_tokenizer(data)) == f"{prefix}_tokenizer.bin"
            assert str(model_tokenizers(Path("m.bin"), {"data": data})[0]) == f"{prefix}_tokenizer.json"
            assert str(model_tokenizers(Path("n.bin"), {"data": data})[0]) == "n_tokenizer.json"


def test_bytes_that_are_no_characters_are_replaced_and_controls_left_out():
    tokenizer = byte_tokenizer()

    def streamed(data):
        stream = StreamDecoder(tokenizer)
        return "".join(map(stream.push, data)) + stream.flush()

    assert streamed(b"a\tb\r\n\x0b\x0c c") == "a\tb\r\n\x0b\x0c c"
    assert streamed(b"\x00\x07\x08\x1b[2J\x7f\xc2\x9b1m") == "[2J1m"
    assert streamed(b"\xff\xe4\xbda\xe4") == "\ufffd\ufffda\ufffd"
    stream = StreamDecoder(tokenizer)
    assert [stream.push(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert stream.push(256) == "<|endoftext|>"


# tokenizer.json, against transformers


@pytest.fixture
def json_file(tmp_path):
    """Writes a tokenizer.json: a kind's, with parts of it changed."""

    def write(kind="gpt2_like", name="tokenizer.json", **changes):
        content = json.loads(LIBRARIES[kind].to_str())
        for part, change in changes.items():
            content[part] = content[part] | change if part == "model" else change
        (tmp_path / name).write_text(json.dumps(content))
        return tmp_path / name

    return write


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_tokenizer_json_encodes_as_transformers_does_and_its_tokens_make_up_the_text(json_file, kind):
    path = json_file(kind)
    ours, theirs = open_tokenizer(path), PreTrainedTokenizerFast(tokenizer_file=str(path))

    @given(TEXTS)
    def check(text):
        wanted = theirs.encode(text, add_special_tokens=False)
        ordinary = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode(text) == wanted
        assert ours.encode_ordinary_batch([text, text]) == [ordinary, ordinary]
        assert ours.encode(text) == wanted  # special tokens are so again
        if kind == "gpt2_like":  # a .bin is enough
            assert (LEARNED.encode(text), LEARNED.encode_ordinary_batch([text])) == (wanted, [ordinary])
        for ids in wanted, ordinary:
            spelled = b"".join(map(ours.decode, ids)).decode()
            if kind in BYTE_LEVEL:
                assert spelled == ours.normal(text)
            elif not any(token in ours.special for token in ids):  # after these a space is put again
                assert spelled in (ours.normal(text), " " + ours.normal(text))
            stream = StreamDecoder(ours, terminal=False)
            decoded = LIBRARIES[kind].decode(ids, skip_special_tokens=False)
            assert "".join(map(stream.push, ids)) + stream.flush() == decoded

    check()
    assert isinstance(ours, HuggingFaceTokenizer)
    assert len(ours.encode(CORPUS)) < 0.8 * len(CORPUS.encode())


def test_a_text_begins_with_what_the_file_puts_there_or_else_with_what_ends_one(json_file, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|eot_id|>"}')  # the end of a turn, not of a text
    llama3 = open_tokenizer(json_file("llama3_like"))
    assert [llama3.tokens[token] for token in (llama3.bos, llama3.eot)] == [b"<|begin_of_text|>", b"<|end_of_text|>"]
    assert llama3.ends == {llama3.bos, llama3.eot, llama3.tokens.index(b"<|eot_id|>")}
    for kind in ("gpt2_like", "smollm2_like", "pythia_like"):
        ours = open_tokenizer(json_file(kind))
        assert ours.tokens[ours.eot] == b"<|endoftext|>" and ours.bos == ours.eot
    assert LEARNED.bos == LEARNED.eot
    (tmp_path / "config.json").write_text("{")
    assert f"{tmp_path / 'config.json'}: not JSON" in refusal(open_tokenizer, tmp_path / "tokenizer.json")


@pytest.mark.parametrize("neighbour, content, ends", [
    ("special_tokens_map.json", {"eos_token": "the"}, ["the"]), ("config.json", {"eos_token_id": 5}, [5]),
    ("tokenizer_config.json", {"eos_token": "<|b|>"}, ["<|b|>"]),
    ("tokenizer_config.json", {"eos_token": {"content": "<|b|>"}}, ["<|b|>"]),
    ("generation_config.json", {"eos_token_id": [5, 7, 10**6, None]}, [5, 7]),
    ("tokenizer_config.json", {"eos_token": "\ud800", "eos_token_id": True}, ["</s>"]),
    ("config.json", {"eos_token_id": 10**9}, ["</s>"]),
])  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "x_"])
def test_a_text_ends_at_every_token_that_a_neighbour_names_by_the_bin_as_by_the_json(
    tmp_path, prefix, neighbour, content, ends
):
    path = tmp_path / f"{prefix}tokenizer.json"
    train(GPT2_SPLIT, last=["</s>", "<|b|>"]).save(str(path))
    (tmp_path / f"{prefix}{neighbour}").write_text(json.dumps(content))
    ours = open_tokenizer(path)
    write_vocabulary(tmp_path / "y", ours, path)
    names = [name if isinstance(name, int) else ours.tokens.index(name.encode()) for name in ends]
    assert ours.eot == names[0]
    assert ours.ends == open_tokenizer(tmp_path / "y_tokenizer.bin").ends == {*names}


def test_a_bin_encodes_only_where_it_splits_as_its_json(json_file, tmp_path, capsys):
    for kind in LIBRARIES:
        ours = open_tokenizer(path := json_file(kind))
        write_vocabulary(tmp_path / "x", ours, path)
        alone = shutil.copy(tmp_path / "x_tokenizer.bin", tmp_path / "alone.bin")
        assert (open_tokenizer(alone).bos, open_tokenizer(alone).special) == (ours.bos, ours.special)
        if kind == "gpt2_like":
            assert load_tokenizer(alone).encode(CORPUS) == ours.encode(CORPUS)
            assert "alone.bin: a .bin does not say how text is split" in capsys.readouterr().out
        else:
            assert refusal(load_tokenizer, alone).startswith(f"{alone}: its model's text is split in another way")
    permuted = json.loads(LIBRARIES["gpt2_like"].to_str())["model"]["merges"][::-1]
    assert not open_tokenizer(json_file("gpt2_like", model={"merges": permuted})).as_gpt2


def test_a_document_begins_and_ends_and_does_neither_twice(json_file):
    llama3 = open_tokenizer(json_file("llama3_like"))
    begin, end, (the,) = [llama3.bos], [llama3.eot], llama3.encode_ordinary_batch(["the"])
    begins, ends = "<|begin_of_text|>", "<|end_of_text|>"
    for text in "the", f"{begins}the", f"the{ends}", f"{begins}the{ends}":
        assert encode_texts(llama3, [text], special=True) == [begin + the + end]
    as_text = encode_texts(llama3, [f"{begins}the"])[0]
    assert as_text[:1] == begin and as_text[-1:] == end and as_text.count(llama3.bos) == 1
    assert encode_texts(byte_tokenizer(), ["a", f"{END_OF_TEXT}b"], special=True) == [[256, 97], [256, 98]]
    with_bin = Tokenizer([*LEARNED.tokens, b"<s>"], LEARNED.eot, bos=317)  # of the names also without its .json
    assert with_bin.encode("<s>the<|endoftext|>") == [317, *LEARNED.encode("the"), LEARNED.eot]
    for prompt, bos, tokens in (f"{begins}the", True, begin + the), ("the", True, begin + the), ("the", False, the):
        assert generate.tokens_of([("--prompt", {"prompt": prompt})], llama3, 9, 9, bos) == [tokens]


def test_a_tokenizer_is_found_by_whatever_is_named(json_file, tmp_path, capsys):
    place = tmp_path / "m"
    place.mkdir()
    shutil.move(json_file("gpt2_like"), place / "x_tokenizer.json")
    write_tokenizer(place / "x_tokenizer.bin", LEARNED.tokens, LEARNED.eot)
    beside = ("x_config.json", "x_tokenizer_config.json", "x_chat_template.jinja", "x_vocab.json")
    for name in beside:
        (place / name).write_text("{}")
    write_model(place / "x.bin", config := GPT2Config(8, 317, 1, 1, 8), np.zeros(num_parameters(config), np.float32))
    for name in "", "x_tokenizer.json", "x_tokenizer.bin", "x.bin", *beside:
        assert named_tokenizer(place / name) == place / "x_tokenizer.json"
        said = capsys.readouterr().err
        assert said in ("", f"{place / name}: its tokenizer is {place / 'x_tokenizer.json'}\n")
        assert bool(said) == (name != "x_tokenizer.json")
    (place / "x_tokenizer.json").unlink()
    for name in "", "x_tokenizer.bin", "x.bin", "x_config.json":
        assert named_tokenizer(place / name) == place / "x_tokenizer.bin"
    shutil.copy(place / "x_tokenizer.bin", place / "y_tokenizer.bin")
    assert "m has several tokenizers: name one of " in refusal(named_tokenizer, place)
    for name in "x_tokenizer.bin", "y_tokenizer.bin":
        (place / name).unlink()
    for name in "", "x.bin", "x_config.json":
        assert refusal(named_tokenizer, place / name).endswith("no tokenizer is there; name its tokenizer.json")
    for name in "gpt2", "bytes", "gone.json", "gone.bin":
        assert named_tokenizer(Path(name)) == Path(name)


GPT2, LLAMA3 = (json.loads(LIBRARIES[kind].to_str()) for kind in ("gpt2_like", "llama3_like"))
LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPACES = {"type": "WhitespaceSplit"}
REMOVED = {"type": "Split", "pattern": {"String": "e"}, "behavior": "Removed", "invert": False}
KINDS, UNREADABLE = "byte-level BPE is supported", "the tokenizers library cannot read it ("


def with_tokens(content: dict, **tokens: int) -> dict:
    return {"vocab": content["model"]["vocab"] | tokens}


def beginning_with(**tokens) -> dict:
    """Llama 3's post-processor, with another description of the token that it puts before a text."""
    processor = copy.deepcopy(LLAMA3["post_processor"])
    processor["processors"][1]["special_tokens"] = tokens
    return {"post_processor": processor}


@pytest.mark.parametrize("kind, changes, words", [
    ("gpt2_like", {"decoder": {"type": "Metaspace", "replacement": "▁"}}, f"its decoder is Metaspace; {KINDS}"),
    ("gpt2_like", {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}},
     "its tokens do not spell a text: \"It's"),
    ("gpt2_like", {"model": with_tokens(GPT2, **{"##e": 400, "##h": 401})
                   | {"merges": [], "continuing_subword_prefix": "##"}}, "its tokens do not spell a text"),
    ("gpt2_like", {"added_tokens": []}, "it does not say which token ends a text; put the model's "),
    *(("gpt2_like", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [cuts, LETTERS]}},
       f"its pre-tokenizer leaves characters out; {KINDS}") for cuts in (SPACES, REMOVED)),
    *(("gpt2_like", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": text}}, UNREADABLE)
      for text in ("", "!!", "AAAAAA==", "CAAAAGFiY2RlZmdoAAA=")),
    ("gpt2_like", {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
     f"{UNREADABLE}index out of"),
    ("gpt2_like", {"model": {"dropout": 1.5}}, f"{UNREADABLE}Dropout should"),
    ("llama3_like", beginning_with(), f"{UNREADABLE}no entry found"),
    *(("llama3_like", {"model": with_tokens(LLAMA3, ĠĠthe=token)}, f"tokens with ids up to {token} are no vocabulary")
      for token in (2**20, 2**32 - 1)),
    *(("llama3_like", {"added_tokens": [*LLAMA3["added_tokens"][:-1], LLAMA3["added_tokens"][-1] | {"id": token}]},
       f"it adds a token with the id {token}, which no model has") for token in (2**20, 2**32 - 1)),
    *(("llama3_like", beginning_with(**{BEGIN: {"id": BEGIN, "ids": [token], "tokens": [BEGIN]}}),
       f"it begins a text with token {token} of") for token in (2**20, 2**32 - 1)),
])  # fmt: skip
def test_a_tokenizer_json_that_cannot_be_used_is_refused(json_file, kind, changes, words, capfd):
    """Also where a library panics, which is no Exception."""
    path = json_file(kind, **changes)
    message = refusal(open_tokenizer, path)
    assert message.startswith(f"{path}: {words}")
    assert "normalizer" not in changes or capfd.readouterr().err == ""  # that of a library is kept away


def test_a_text_that_a_library_cannot_encode_is_refused(json_file):
    path = json_file(normalizer={"type": "Replace", "pattern": {"Regex": "(q+)+$"}, "content": "x"})
    for ours, text, words in (
        (open_tokenizer(path), "q" * 40 + "!", f"{path}: the tokenizers library cannot encode a text ("),
        (LEARNED, " " * 2_000_000, "tiktoken cannot encode a text ("),
    ):
        for encode in ours.encode, lambda text, ours=ours: ours.encode_ordinary_batch([text]):
            assert refusal(encode, text).startswith(words)


def test_what_draws_or_cuts_is_switched_off_and_a_line_says_so(json_file, capsys):
    ours = open_tokenizer(json_file(
        "llama3_like", model={"dropout": 0.5},
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "!"},
    ))  # fmt: skip
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "tokenizer.json: switched off here: dropout of 0.5, truncation, padding" in said
    want = LIBRARIES["llama3_like"].encode(CORPUS, add_special_tokens=False).ids
    for _ in range(3):
        assert ours.encode(CORPUS) == ours.encode_ordinary_batch([CORPUS])[0] == want


def test_a_byte_without_a_token_is_said(json_file, capsys):
    vocab = {name: token for name, token in GPT2["model"]["vocab"].items() if name != "Ã"}
    open_tokenizer(json_file(model={"vocab": vocab, "merges": []}))
    assert "no token for 1 bytes, the first 0xc3: texts lose them\n" in capsys.readouterr().err


# The tokenizer of a model


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Where a model could stand, in an empty current directory."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("m")
    return Path("m/tiny.bin")


def upper_case(path):
    """A byte tokenizer whose letters are all capitals."""
    write_tokenizer(path, [bytes([byte]).upper() for byte in range(256)] + [b"<|endoftext|>"], 256)


def test_a_models_tokenizer_is_the_named_one_or_beside_it_and_else_asked_for(model, monkeypatch):
    byte_tokens = byte_tokenizer().tokens
    upper_case("gpt2_tokenizer.bin")
    upper_case("m/gpt2_tokenizer.bin")
    for vocab_size in (257, 258, 50257):
        message = refusal(load_model_tokenizer, model, vocab_size)
        assert message.startswith("m/tiny.bin: no file beside it says") and "--tokenizer" in message
    write_tokenizer("m/tiny_tokenizer.bin", byte_tokens, 256)
    assert load_model_tokenizer(model, 257).tokens == byte_tokens
    assert load_model_tokenizer(model, 257, Path("gpt2_tokenizer.bin")).tokens[97] == b"A"
    assert "257 tokens and m/tiny.bin 256" in refusal(load_model_tokenizer, model, 256)  # without a row for its eot
    assert load_model_tokenizer(model, 258).decode(257) == load_model_tokenizer(model, 999).decode(998) == b""
    named = Path("gpt2_tokenizer.bin")
    assert load_model_tokenizer(model, 384, named).decode(383) == b""
    assert "257 tokens and m/tiny.bin 400" in refusal(load_model_tokenizer, model, 400, named)
    os.unlink("m/tiny_tokenizer.bin")
    assert load_model_tokenizer(model, 257, Path("bytes")).tokens == byte_tokens
    monkeypatch.setattr("llmc.data.find_tokenizer.gpt2_tokenizer", byte_tokenizer)  # which tiktoken would download
    assert load_model_tokenizer(model, 257, Path("gpt2")).tokens == byte_tokens
    gpt2 = model.with_name("gpt2_124M.bin")  # the starter pack's tokenizer belongs to it
    assert load_model_tokenizer(gpt2, 257).tokens[97] == b"A"
    assert "257 tokens and m/gpt2_124M.bin 256" in refusal(load_model_tokenizer, gpt2, 256)


def test_more_tokens_than_the_model_has_rows_are_said_at_once(model, json_file, capsys):
    """Where they are its own, as where [PAD] was added to it. Else they are refused."""
    size = LIBRARIES["gpt2_like"].get_vocab_size()
    added = json.loads(LIBRARIES["gpt2_like"].to_str())["added_tokens"]
    padding = added[0] | {"id": size, "content": "[PAD]"}
    path = json_file("gpt2_like", "m/tiny_tokenizer.json", added_tokens=[*added, padding])
    tokenizer = load_model_tokenizer(model, size)
    said = capsys.readouterr().err
    assert said.startswith("m/tiny_tokenizer.json: the model has no row for 1 of") and "'[PAD]'" in said
    assert said.count("\n") == 1
    assert generate.tokens_of([("--prompt", {"prompt": "the"})], tokenizer, 9, 9)[0][1:] == tokenizer.encode("the")
    assert "'[PAD]'" in refusal(generate.tokens_of, [("--prompt", {"prompt": "a[PAD]"})], tokenizer, 9, 9)
    assert tokenizer.text_bytes(size)(np.array([0]), np.array([size - 1])) == 0
    shutil.copy(path, "other.json")
    assert f"{size + 1} tokens and m/tiny.bin {size}" in refusal(load_model_tokenizer, model, size, Path("other.json"))

    take_tokenizer_along(Path("other.json"), model, size)  # an import
    assert open_tokenizer("m/tiny_tokenizer.bin").tokens == tokenizer.tokens[:size]
    assert "other.json: the model has no row for 1 of" in capsys.readouterr().err
    check_tokenizer(Path("data_tokenizer.json"), open_tokenizer(path), model, size)
    assert "data_tokenizer.json: the model has no row for 1 of" in capsys.readouterr().err


def test_a_checkpoint_from_before_it_held_its_tokenizer_finds_it_beside_the_data(model, capsys):
    for name in "gpt2_tokenizer.bin", "data_tokenizer.bin":
        upper_case(name)
    assert load_model_tokenizer(model, 257, trained={"data": "data"}).tokens[97] == b"A"
    assert capsys.readouterr().err == "tokenizer: data_tokenizer.bin, which lies where the data of m/tiny.bin was\n"
    for recorded in None, "elsewhere/data_tokenizer.bin":  # a newer one, which lacks it: none is guessed
        message = refusal(load_model_tokenizer, model, 257, None, {"data": "data", "tokenizer": recorded})
        assert message.startswith("m was trained without a tokenizer: ") and "--tokenizer" in message


def test_the_tokenizer_of_data_is_compared_with_the_models(model):
    data, tokens = Path("data_tokenizer.bin"), byte_tokenizer().tokens
    others = Tokenizer(tokens[::-1], 0)
    check_tokenizer(data, others, model, 257)  # there is none beside the model
    write_tokenizer("m/tiny_tokenizer.bin", tokens, 256)
    for padding in [], [b"<|unused 257|>"]:
        check_tokenizer(data, Tokenizer([*tokens, *padding], 256), model, 999)
    for tokenizer, size, words in (
        (others, 257, "other tokens than m/tiny_tokenizer.bin, the tokenizer of the model m/tiny.bin"),
        (Tokenizer(tokens[1:250], 0), 257, "other tokens than m/tiny_tokenizer.bin"),
        (others, 999, "257 tokens and the model m/tiny.bin 999: use data (-i) and a model (-e) of the same tokenizer"),
    ):
        assert refusal(check_tokenizer, data, tokenizer, model, size).startswith(f"data_tokenizer.bin has {words}")


def test_the_files_of_a_tokenizer_are_it_and_what_it_needs_beside_it(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "tokenizer.bin"):
        (tmp_path / f"x_{name}").write_text(f"x {name}")
        (tmp_path / name).write_text(name)
    (tmp_path / "x_config.json").write_text("")
    names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    files = {f"model_{name}": f"x {name}".encode() for name in names}
    assert tokenizer_files(tmp_path / "x_tokenizer.json", "model_") == files
    binary = {"model_tokenizer.bin": b"x tokenizer.bin"}
    assert tokenizer_files(tmp_path / "x_tokenizer.bin", "model_") == binary | files
    (tmp_path / "y_tokenizer.bin").write_text("alone")
    assert tokenizer_files(tmp_path / "y_tokenizer.bin", "z_") == {"z_tokenizer.bin": b"alone"}
    assert tokenizer_files(tmp_path / "tokenizer.json", "z_")["z_config.json"] == b"config.json"


def test_a_tokenizer_json_beside_a_model_is_preferred_where_the_library_is(model, json_file, monkeypatch):
    size = LIBRARIES["smollm2_like"].get_vocab_size()
    ours = open_tokenizer(json_file("smollm2_like"))
    write_tokenizer("m/tiny_tokenizer.bin", [b"%d" % i for i in range(size)], 0)
    assert load_model_tokenizer(model, size).tokens[7] == b"7"
    shutil.move("tokenizer.json", "m")
    assert load_model_tokenizer(model, size).tokens == ours.tokens
    vocab = json.loads(LIBRARIES["smollm2_like"].to_str())["model"]["vocab"]
    json_file("smollm2_like", "m/tiny_tokenizer.json", model={"vocab": {**vocab, "Ġtheatres": size}})
    assert load_model_tokenizer(model, size + 1).tokens[size] == b" theatres"

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_model_tokenizer(model, size).tokens[7] == b"7"
    os.unlink("m/tiny_tokenizer.bin")
    assert "pip install tokenizers" in refusal(load_model_tokenizer, model, size)

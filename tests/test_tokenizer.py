"""Tokenizer files, encoding and decoding, against tiktoken and a small vocabulary learned here."""

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
from llmc.data import find_tokenizer as find_tokenizer_module
from llmc.data.find_tokenizer import (
    check_tokenizer,
    find_tokenizer,
    load_model_tokenizer,
    model_tokenizers,
    named_tokenizer,
    open_tokenizer,
    tokenizer_files,
)
from llmc.data.hf_tokenizer import HuggingFaceTokenizer, byte_letters
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
from train_gpt2_fp32 import GPT2Config

import numpy as np
import pytest
import regex
import tiktoken
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = "the theatre there, then the other: they're bathing in the 1990s' weather — naïve café 你好 🙂🙂\n\n  end  "
GPT2_TOKENIZER = GPT2Config.DEFAULT_TOKENIZER
WORDS = ["the", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", *" 19,\n\té你🙂"]
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.characters(codec="utf-8")), max_size=60).map("".join)


LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPELLINGS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # bytes as letters, and nothing else


def train(pre_tokenizer, first=(), last=(), **model):
    """A byte-level BPE of the tokenizers library: special tokens `first`, 256 bytes, 90 merges, added tokens `last`."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + 346, special_tokens=list(first), initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([CORPUS * 3], trainer)
    content = json.loads(library.to_str())
    content["model"] |= model
    if model.get("ignore_merges"):
        content["model"]["vocab"]["Ġtheatres"] = len(content["model"]["vocab"])  # a token that no merge leads to
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.add_tokens(list(last))
    return library


def gpt2_like():
    return train(pre_tokenizers.ByteLevel(add_prefix_space=False), last=[AddedToken("<|endoftext|>", special=True)])


def llama3_like():
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    library = train(
        pre_tokenizers.Sequence([split, SPELLINGS]),
        last=[AddedToken(name, special=True) for name in names], ignore_merges=True,
    )  # fmt: skip
    begin = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", library.token_to_id("<|begin_of_text|>"))]
    )
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return library


def smollm2_like():
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return train(split, first=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])


def pythia_like():
    library = train(
        pre_tokenizers.ByteLevel(add_prefix_space=False), first=["<|endoftext|>", "<|padding|>"],
        last=[" " * n for n in range(24, 1, -1)],
    )  # fmt: skip
    library.normalizer = normalizers.NFC()
    return library


def llama2_like(prepend=True):
    """As Llama 2 and the first Mistrals: ▁ for a space, and <0x0A> for a byte of a character without a token."""
    begins = ["<unk>", "<s>", "</s>"]
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prepend:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    library.train_from_iterator(
        CORPUS[:-30].split(" "),
        trainers.BpeTrainer(vocab_size=330, special_tokens=[*begins, *(f"<0x{byte:02X}>" for byte in range(256))]),
    )  # fmt: skip
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    content = json.loads(library.to_str())
    library = tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": content["added_tokens"][:3]}))
    library.add_tokens([AddedToken("▁▁", normalized=False)])  # as Gemma's
    return library


def mistral_like():
    return llama2_like(prepend=False)


BYTE_LEVEL = {library.__name__: library() for library in (gpt2_like, llama3_like, smollm2_like, pythia_like)}
LIBRARIES = BYTE_LEVEL | {library.__name__: library() for library in (llama2_like, mistral_like)}
SPELLED = sorted(BYTE_LEVEL["gpt2_like"].get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
LEARNED = Tokenizer([*(bytes(map(byte_letters().index, name)) for name, _ in SPELLED), b"<|endoftext|>"], len(SPELLED))


@pytest.fixture
def file(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.bin", LEARNED.tokens, LEARNED.eot)
    return tmp_path / "tokenizer.bin"


def test_a_tokenizer_file_has_the_layout_of_llm_c(tmp_path):
    write_tokenizer(tmp_path / "t.bin", [b"a", b"bc", b"<|e|>"], 2)
    data = (tmp_path / "t.bin").read_bytes()
    assert struct.unpack("<256I", data[:1024]) == (20240328, 2, 3, 2) + (0,) * 252
    assert data[1024:] == b"\x01a\x02bc\x05<|e|>"


def test_a_tokenizer_is_read_back_exactly(file):
    tokenizer = open_tokenizer(file)
    assert (tokenizer.tokens, tokenizer.eot, tokenizer.vocab_size) == (LEARNED.tokens, 316, 317)
    assert [tokenizer.decode(i) for i in range(317)] == LEARNED.tokens
    assert "token -1 " in refusal(tokenizer.decode, -1)
    assert tokenizer.decode(317) == tokenizer.decode(10**6) == b""  # a model's padding


def test_version_1_ends_a_text_with_gpt2s_token(tmp_path):
    path = tmp_path / "t.bin"
    tokens = [b"%d" % i for i in range(50257)]
    write_tokenizer(path, tokens, 7)
    data = bytearray(path.read_bytes())
    struct.pack_into("<2I", data, 4, 1, 50257)
    struct.pack_into("<I", data, 12, 0)
    path.write_bytes(data)
    tokenizer = open_tokenizer(path)
    assert tokenizer.eot == 50256 and tokenizer.tokens == tokens


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
def test_a_tokenizer_file_alone_is_enough_to_encode_as_gpt2(text):
    ids = LEARNED.encode(text)
    assert ids == LEARNED.encode_ordinary_batch([text])[0] == BYTE_LEVEL["gpt2_like"].encode(text).ids
    assert b"".join(map(LEARNED.decode, ids)).decode() == text


@given(TEXTS)
@example("they've it's I'm we'll he'd can't you're the\n\n  1990s'  ")
def test_text_is_split_as_the_library_splits_it_for_gpt2(text):
    pieces = BYTE_LEVEL["gpt2_like"].pre_tokenizer.pre_tokenize_str(text)
    assert regex.findall(GPT2_PATTERN, text) == [text[start:end] for _, (start, end) in pieces]


@given(st.text())
def test_the_byte_tokenizer_spells_text_byte_by_byte(text):
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)


def test_a_vocabulary_that_cannot_spell_every_text_decodes_but_does_not_encode():
    tokenizer = Tokenizer([b"a", b"b", b"<|endoftext|>"], eot=2)
    assert tokenizer.decode(1) == b"b"
    assert "byte 0" in refusal(tokenizer.encode, "a")
    assert tokenizer.encode("") == []  # of a text that begins with nothing


def test_gpt2s_own_encoding_is_rebuilt_from_its_tokens(tmp_path, monkeypatch):
    """Where tiktoken has, or can download, GPT-2's vocabulary."""
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except OSError:
        pytest.skip("GPT-2's vocabulary cannot be downloaded")
    monkeypatch.chdir(tmp_path)
    tokenizer = gpt2_tokenizer()
    write_tokenizer("gpt2_tokenizer.bin", tokenizer.tokens, tokenizer.eot)
    text = CORPUS * 3 + open(__file__).read()
    assert open_tokenizer("gpt2_tokenizer.bin").encode(text) == gpt2.encode_ordinary(text)
    assert gpt2_tokenizer().encoding.encode("<|endoftext|>", allowed_special="all") == [50256]


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

PIECES = st.one_of(
    st.sampled_from(["the ", "theatre", " theatres", "1990", "'S", "  ", "\r\n", "\x00\x1b", "é", "e\u0301", "🙂"]),
    st.sampled_from(["<|endoftext|>", "<|eot_id|>", "<|im_start|>", "<|begin_of_text|>", "</s>", "<0x0A>", "▁"]),
    st.text(st.characters(codec="utf-8"), max_size=5),
)
HF_TEXTS = st.lists(PIECES, max_size=20).map("".join)
every_kind = pytest.mark.parametrize("kind", LIBRARIES)


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


@every_kind
def test_a_tokenizer_json_encodes_as_transformers_does(json_file, kind):
    path = json_file(kind)
    ours, theirs = open_tokenizer(path), PreTrainedTokenizerFast(tokenizer_file=str(path))

    @given(HF_TEXTS)
    def check(text):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        ordinary = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode_ordinary_batch([text, text]) == [ordinary, ordinary]
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)  # special tokens are so again

    check()
    assert isinstance(ours, HuggingFaceTokenizer)
    assert len(ours.encode(CORPUS)) < 0.8 * len(CORPUS.encode())


@every_kind
def test_the_bytes_of_its_tokens_make_up_the_text(json_file, kind):
    ours = open_tokenizer(json_file(kind))

    @given(HF_TEXTS)
    def check(text):
        for ids in (ours.encode(text), *ours.encode_ordinary_batch([text])):
            spelled = b"".join(map(ours.decode, ids)).decode()
            if kind in BYTE_LEVEL:
                assert spelled == ours.normal(text)
            elif not any(token in ours.special for token in ids):  # after these a space is put again
                assert spelled in (ours.normal(text), " " + ours.normal(text))
            stream = StreamDecoder(ours, terminal=False)
            decoded = LIBRARIES[kind].decode(ids, skip_special_tokens=False)
            assert "".join(map(stream.push, ids)) + stream.flush() == decoded

    check()


def test_a_text_begins_with_what_the_file_puts_there_or_else_with_what_ends_one(json_file, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|eot_id|>"}')  # the end of a turn, not of a text
    llama3 = open_tokenizer(json_file("llama3_like"))
    assert [llama3.tokens[token] for token in (llama3.bos, llama3.eot)] == [b"<|begin_of_text|>", b"<|end_of_text|>"]
    for kind in ("gpt2_like", "smollm2_like", "pythia_like"):
        ours = open_tokenizer(json_file(kind))
        assert ours.tokens[ours.eot] == b"<|endoftext|>" and ours.bos == ours.eot
    assert LEARNED.bos == LEARNED.eot


@pytest.mark.parametrize("neighbour, content, end", [
    ("tokenizer_config.json", {"eos_token": "<|b|>"}, b"<|b|>"),
    ("config.json", {"eos_token_id": 5}, None),
    ("generation_config.json", {"eos_token_id": [5, 7]}, None),
    ("tokenizer_config.json", {"eos_token": "\ud800", "eos_token_id": True}, b"</s>"),
    ("config.json", {"eos_token_id": 10**9}, b"</s>"),
])  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "x_"])
def test_the_end_of_text_is_named_by_a_neighbour(tmp_path, prefix, neighbour, content, end):
    library = train(SPELLINGS, last=["</s>", "<|b|>"])
    (tmp_path / f"{prefix}tokenizer.json").write_text(library.to_str())
    (tmp_path / f"{prefix}{neighbour}").write_text(json.dumps(content))
    ours = open_tokenizer(tmp_path / f"{prefix}tokenizer.json")
    assert ours.eot == (5 if end is None else ours.tokens.index(end))


@pytest.mark.parametrize("neighbour, content, ends", [
    ("tokenizer_config.json", {"eos_token": {"content": "<|eot_id|>"}}, ["<|eot_id|>"]),
    ("special_tokens_map.json", {"eos_token": "the"}, ["the"]), ("config.json", {"eos_token_id": 9}, [9]),
    ("generation_config.json", {"eos_token_id": [3, 9, 10**6, None]}, [3, 9]),
])  # fmt: skip
def test_a_text_ends_at_every_token_that_a_file_names_by_the_bin_as_by_the_json(json_file, neighbour, content, ends):
    ours = open_tokenizer(path := json_file("llama3_like"))
    write_vocabulary(path.with_name("x"), ours, path)
    (path.with_name(f"x_{neighbour}")).write_text(json.dumps(content))
    names = [name if isinstance(name, int) else ours.tokens.index(name.encode()) for name in ends]
    for suffix in "json", "bin":
        assert open_tokenizer(path.with_name(f"x_tokenizer.{suffix}")).ends == {ours.bos, ours.eot, *names}


def test_a_bin_encodes_only_where_it_splits_as_its_json(json_file, tmp_path, capsys):
    for kind in LIBRARIES:
        ours = open_tokenizer(path := json_file(kind))
        write_vocabulary(tmp_path / "x", ours, path)
        alone = shutil.copy(tmp_path / "x_tokenizer.bin", tmp_path / "alone.bin")
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


def test_a_tokenizer_whose_end_of_text_is_unknown_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(train(SPELLINGS).to_str())
    message = refusal(open_tokenizer, tmp_path / "tokenizer.json")
    assert "tokenizer.json: it does not say which token ends a text" in message and "eos_token" in message
    (tmp_path / "config.json").write_text("{")
    assert f"{tmp_path / 'config.json'}: not JSON" in refusal(open_tokenizer, tmp_path / "tokenizer.json")


LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPACES = {"type": "WhitespaceSplit"}
REMOVED = {"type": "Split", "pattern": {"String": "e"}, "behavior": "Removed", "invert": False}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"decoder": {"type": "Metaspace", "replacement": "▁"}}, "its decoder is Metaspace"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}}, "its tokens do not spell a text: \"It's"),
        ({"model": {"vocab": {**json.loads(LIBRARIES["gpt2_like"].to_str())["model"]["vocab"], "##e": 400, "##h": 401},
                    "merges": [], "continuing_subword_prefix": "##"}}, "its tokens do not spell a text"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPACES, LETTERS]}}, "leaves characters out"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [REMOVED, LETTERS]}}, "leaves characters out"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(json_file, changes, words):
    path = json_file(**changes)
    message = refusal(open_tokenizer, path)
    assert str(path) in message and words in message and "byte-level BPE is supported" in message


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
    vocab = json.loads(LIBRARIES["gpt2_like"].to_str())["model"]["vocab"]
    open_tokenizer(json_file(model={"vocab": {k: v for k, v in vocab.items() if k != "Ã"}, "merges": []}))
    assert "no token for 1 bytes, the first 0xc3: texts lose them\n" in capsys.readouterr().err


@pytest.mark.parametrize("charsmap", ["", "!!", "AAAAAA==", "CAAAAGFiY2RlZmdoAAA="])
def test_a_panic_of_the_library_is_one_line(json_file, charsmap, capfd):
    path = json_file(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap})
    assert refusal(open_tokenizer, path).startswith(f"{path}: the tokenizers library cannot read it (")
    assert capfd.readouterr().err == ""


def test_what_the_libraries_raise_is_one_line(json_file):
    """Plain Exceptions, and panics of Rust, which are no Exceptions."""
    template = json.loads(LIBRARIES["llama3_like"].to_str())["post_processor"]
    template["processors"][1]["special_tokens"] = {}
    path = json_file("llama3_like", post_processor=template)
    assert refusal(open_tokenizer, path).startswith(f"{path}: the tokenizers library cannot read it (no entry found")
    path = json_file(model={"dropout": 1.5})
    assert refusal(open_tokenizer, path).startswith(f"{path}: the tokenizers library cannot read it (Dropout should")
    path = json_file(normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "x"})
    assert refusal(open_tokenizer, path).startswith(f"{path}: the tokenizers library cannot read it (index out of")
    path = json_file(normalizer={"type": "Replace", "pattern": {"Regex": "(q+)+$"}, "content": "x"})
    ours = open_tokenizer(path)
    for encode in ours.encode, lambda text: ours.encode_ordinary_batch([text]):
        assert refusal(encode, "q" * 40 + "!").startswith(f"{path}: the tokenizers library cannot encode a text (")
    for encode in LEARNED.encode, lambda text: LEARNED.encode_ordinary_batch([text]):
        assert "tiktoken cannot encode a text" in refusal(encode, " " * 2_000_000)


@pytest.mark.parametrize("token", [2**20, 2**31 + 5, 2**32 - 1])
@pytest.mark.parametrize("where", ["vocabulary", "added", "front"])
def test_a_token_beyond_the_vocabulary_is_refused(json_file, token, where):
    content = json.loads(LIBRARIES["llama3_like"].to_str())
    if where == "vocabulary":
        changes = {"model": {"vocab": content["model"]["vocab"] | {"ĠĠthe": token}}}
    elif where == "added":
        changes = {"added_tokens": content["added_tokens"][:-1] + [content["added_tokens"][-1] | {"id": token}]}
    else:
        content["post_processor"]["processors"][1]["special_tokens"]["<|begin_of_text|>"]["ids"] = [token]
        changes = {"post_processor": content["post_processor"]}
    path = json_file("llama3_like", **changes)
    message = refusal(open_tokenizer, path)
    assert message.startswith(f"{path}: ")


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
    monkeypatch.setattr(find_tokenizer_module, "gpt2_tokenizer", byte_tokenizer)  # which tiktoken would download
    assert load_model_tokenizer(model, 257, Path("gpt2")).tokens == byte_tokens


def test_the_starter_packs_tokenizer_belongs_to_its_models(model):
    upper_case("m/gpt2_tokenizer.bin")
    assert load_model_tokenizer(model.with_name("gpt2_124M.bin"), 257).tokens[97] == b"A"
    assert "257 tokens and m/gpt2_124M.bin 256" in refusal(load_model_tokenizer, model.with_name("gpt2_124M.bin"), 256)


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
    upper_case("data_tokenizer.bin")
    assert load_model_tokenizer(model, 257, trained={"data": "data"}).tokens[97] == b"A"
    assert capsys.readouterr().err == "tokenizer: data_tokenizer.bin, which lies where the data of m/tiny.bin was\n"


@pytest.mark.parametrize("recorded", [None, "elsewhere/data_tokenizer.bin"])
def test_where_a_checkpoint_holds_no_tokenizer_none_is_guessed(model, recorded):
    upper_case("gpt2_tokenizer.bin")
    upper_case("data_tokenizer.bin")
    message = refusal(load_model_tokenizer, model, 257, None, {"data": "data", "tokenizer": recorded})
    assert message.startswith("m ") and "--tokenizer" in message


@pytest.mark.parametrize("beside", ["m/tiny_tokenizer.bin", "m/gpt2_tokenizer.bin"])
def test_the_tokenizer_of_data_is_compared_with_the_models(model, beside):
    data, size = Path("data_tokenizer.bin"), 257 if "gpt2" in beside else 999
    if "gpt2" in beside:
        model = Path("m/gpt2_tiny.bin")
    byte_tokens = byte_tokenizer().tokens
    padded = Tokenizer([*byte_tokens, b"<|unused 257|>"], 256)
    write_tokenizer(beside, byte_tokens, 256)
    check_tokenizer(data, Tokenizer(byte_tokens, 256), model, size)
    if size == 999:
        check_tokenizer(data, padded, model, size)
    others = Tokenizer(byte_tokens[::-1], 0)
    for tokenizer in (others, Tokenizer(byte_tokens[1:250], 0)):
        message = refusal(check_tokenizer, data, tokenizer, model, size)
        assert "data_tokenizer.bin" in message and str(model) in message and "use data (-i)" in message
    if size == 257:
        message = refusal(check_tokenizer, data, others, model, size)
        assert f"other tokens than {beside}" in message
        os.unlink(beside)
        check_tokenizer(data, others, model, size)


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

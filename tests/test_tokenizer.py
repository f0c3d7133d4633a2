"""Tokenizer files, encoding and decoding, against tiktoken and a small vocabulary learned here."""

import os
import struct
from collections import Counter

import pytest
import regex
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from llmc.errors import UserError
from llmc.tokenizer import (
    GPT2_PATTERN,
    StreamDecoder,
    Tokenizer,
    byte_encoding,
    find_tokenizer,
    gpt2_encoding,
    token_bytes,
    write_tokenizer,
)

CORPUS = "the theatre there, then the other: they're bathing in the 1990s' weather — naïve café 你好 🙂🙂\n\n  end  "
SPLITTER = regex.compile(openai_public.r50k_pat_str)  # tiktoken's
TEXTS = st.text(st.one_of(st.sampled_from("the 'rs19,\n\t é你🙂"), st.characters(codec="utf-8")), max_size=60)


def learn_vocabulary(corpus, size):
    """Byte-pair encoding by the book: the most frequent pair of neighbours becomes one token, again and again."""
    tokens = [bytes([byte]) for byte in reversed(range(256))]  # ids are not byte values, as in GPT-2
    text = [bytes([byte]) for byte in corpus.encode()]
    while len(tokens) < size:
        (a, b), _ = Counter(zip(text, text[1:], strict=False)).most_common(1)[0]
        tokens.append(a + b)
        merged, i = [], 0
        while i < len(text):
            step = 2 if text[i : i + 2] == [a, b] else 1
            merged.append(b"".join(text[i : i + step]))
            i += step
        text = merged
    return tokens


LEARNED = Tokenizer([*learn_vocabulary(CORPUS, 300), b"<|endoftext|>"], eot=300)


def encode_by_the_book(tokenizer, text):
    """Merges, in each piece of text by itself, the pair of neighbours that was learned first, until none is known."""
    ranks = {token: rank for rank, token in enumerate(tokenizer.tokens) if rank != tokenizer.eot}
    ids = []
    for piece in SPLITTER.findall(text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            pairs = [(ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)]
            rank, i = min(pairs, default=(len(ranks), 0))
            if rank == len(ranks):
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def refusal(function, *args):
    with pytest.raises(UserError) as caught:
        function(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


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
    tokenizer = Tokenizer.load(file)
    assert (tokenizer.tokens, tokenizer.eot, tokenizer.vocab_size) == (LEARNED.tokens, 300, 301)
    assert [tokenizer.decode(i) for i in range(301)] == LEARNED.tokens
    for token in (-1, 301):
        assert f"token {token} " in refusal(tokenizer.decode, token)


def test_version_1_ends_a_text_with_gpt2s_token(tmp_path):
    path = tmp_path / "t.bin"
    tokens = [b"%d" % i for i in range(50257)]
    write_tokenizer(path, tokens, 7)
    data = bytearray(path.read_bytes())
    struct.pack_into("<2I", data, 4, 1, 50257)
    struct.pack_into("<I", data, 12, 0)
    path.write_bytes(data)
    tokenizer = Tokenizer.load(path)
    assert tokenizer.eot == 50256 and tokenizer.tokens == tokens


def test_a_damaged_tokenizer_is_refused(file):
    data = file.read_bytes()

    def message(changed):
        file.write_bytes(changed)
        return refusal(Tokenizer.load, file)

    assert "damaged at token 300" in message(data[:-1])
    assert "1 bytes too long" in message(data + b"x")
    assert "damaged at token 0" in message(data[:1024] + b"\0" + data[1025:])
    assert "damaged at token 0" in message(data[:1024])
    assert "version 3" in message(data[:4] + struct.pack("<I", 3) + data[8:])
    assert "end-of-text token 301" in message(data[:12] + struct.pack("<I", 301) + data[16:])
    assert "end-of-text token 50256" in message(data[:4] + struct.pack("<I", 1) + data[8:])
    assert "found a model" in message(struct.pack("<I", 20240326) + data[4:])
    assert "too short" in message(data[:100])
    os.unlink(file)
    assert "no such file" in refusal(Tokenizer.load, file)


def test_a_token_that_does_not_fit_a_file_is_not_written(tmp_path):
    for token in (b"", b"x" * 256):
        with pytest.raises(ValueError, match="1 to 255"):
            write_tokenizer(tmp_path / "t.bin", [b"a", token], 0)
    with pytest.raises(ValueError, match="end-of-text"):
        write_tokenizer(tmp_path / "t.bin", [b"a"], 1)
    assert os.listdir(tmp_path) == []


@given(TEXTS)
def test_a_tokenizer_file_alone_is_enough_to_encode(text):
    ids = LEARNED.encode(text)
    assert ids == encode_by_the_book(LEARNED, text)
    assert b"".join(map(LEARNED.decode, ids)).decode() == text


def test_learned_merges_are_used():
    assert len(LEARNED.encode(CORPUS)) < 0.7 * len(CORPUS.encode())


@given(TEXTS)
def test_text_is_split_as_tiktoken_splits_it_for_gpt2(text):
    assert regex.findall(GPT2_PATTERN, text) == SPLITTER.findall(text)


@given(st.text())
def test_the_byte_encoding_spells_text_byte_by_byte(text):
    encoding = byte_encoding()
    assert encoding.encode_ordinary(text) == list(text.encode())
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)


def test_the_byte_encoding_becomes_a_tokenizer_file(tmp_path):
    encoding = byte_encoding()
    write_tokenizer(tmp_path / "t.bin", token_bytes(encoding), encoding.eot_token)
    tokenizer = Tokenizer.load(tmp_path / "t.bin")
    assert tokenizer.tokens == [bytes([byte]) for byte in range(256)] + [b"<|endoftext|>"]
    assert tokenizer.encode("<|endoftext|>é") == list("<|endoftext|>é".encode())
    assert tokenizer.encoding.encode("<|endoftext|>", allowed_special="all") == [256]


def test_a_vocabulary_that_cannot_spell_every_text_decodes_but_does_not_encode():
    tokenizer = Tokenizer([b"a", b"b", b"<|endoftext|>"], eot=2)
    assert tokenizer.decode(1) == b"b"
    assert "byte 0" in refusal(tokenizer.encode, "a")


def test_gpt2s_own_encoding_is_rebuilt_from_its_tokens(tmp_path, monkeypatch):
    """Where tiktoken has, or can download, GPT-2's vocabulary."""
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except OSError:
        pytest.skip("GPT-2's vocabulary cannot be downloaded")
    monkeypatch.chdir(tmp_path)
    write_tokenizer("gpt2_tokenizer.bin", token_bytes(gpt2), gpt2.eot_token)
    text = CORPUS * 3 + open(__file__).read()
    assert Tokenizer.load("gpt2_tokenizer.bin").encode(text) == gpt2.encode_ordinary(text)
    assert gpt2_encoding().encode("<|endoftext|>", allowed_special="all") == [50256]


def test_gpt2s_encoding_comes_from_the_file_in_the_current_directory_or_is_asked_for(tmp_path, monkeypatch):
    def unreachable(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    monkeypatch.chdir(tmp_path)
    assert "gpt2_tokenizer.bin" in refusal(gpt2_encoding)
    tokens = LEARNED.tokens[:300] + [b"unused %d" % i for i in range(300, 50256)] + [b"<|endoftext|>"]
    write_tokenizer("gpt2_tokenizer.bin", tokens, 50256)
    assert gpt2_encoding().encode_ordinary(CORPUS) == LEARNED.encode(CORPUS)


def test_the_tokenizer_of_a_dataset_is_its_own_or_gpt2s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("data")
    spellings = ["data/x", "data/x_train.bin", "data/x_train_*.bin", "data/x_val_000000.bin"]
    assert [find_tokenizer(data) for data in spellings] == [None] * 4
    write_tokenizer("gpt2_tokenizer.bin", [b"a"], 0)
    assert {str(find_tokenizer(data)) for data in spellings} == {"gpt2_tokenizer.bin"}
    write_tokenizer("data/x_tokenizer.bin", [b"a"], 0)
    assert {str(find_tokenizer(data)) for data in spellings} == {"data/x_tokenizer.bin"}
    assert str(find_tokenizer("data/y")) == "gpt2_tokenizer.bin"
    assert find_tokenizer("data/y", "data") is None


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"])))
def test_streamed_text_is_the_text_however_characters_are_split(text):
    stream = StreamDecoder(LEARNED)
    pieces = [stream.push(token) for token in LEARNED.encode(text)]
    assert "".join(pieces) + stream.flush() == text


def test_bytes_that_are_no_characters_are_replaced_and_controls_left_out():
    tokenizer = Tokenizer(token_bytes(byte_encoding()), 256)

    def streamed(data):
        stream = StreamDecoder(tokenizer)
        return "".join(map(stream.push, data)) + stream.flush()

    assert streamed(b"a\tb\r\n\x0b\x0c c") == "a\tb\r\n\x0b\x0c c"
    assert streamed(b"\x00\x07\x08\x1b[2J\x7f\xc2\x9b1m") == "[2J1m"
    assert streamed(b"\xff\xe4\xbda\xe4") == "\ufffd\ufffda\ufffd"
    stream = StreamDecoder(tokenizer)
    assert [stream.push(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert stream.push(256) == "<|endoftext|>"

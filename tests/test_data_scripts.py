"""The dataset scripts, run as programs on small files of the formats that they download."""

import hashlib
import json
import re
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path

from conftest import refusal
from dev.data import shards
from dev.data.common import NoWayBack, download, encode, load_tokenizer
from device.errors import UserError
from llmc.data.dataloader import DataLoader
from llmc.data.find_tokenizer import find_tokenizer, open_tokenizer
from llmc.data.hf_tokenizer import byte_letters
from llmc.data.token_file import open_tokens, write_tokens
from llmc.data.tokenizer import byte_tokenizer, write_tokenizer

import numpy as np
import pytest
import tokenizers
from test_download import Server
from tokenizers import decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "dev" / "data"
EOT = 256


@pytest.fixture
def tokenizer(tmp_path):
    """The byte tokenizer's file, in place of GPT-2's vocabulary, which would have to be downloaded."""
    bytewise = byte_tokenizer()
    write_tokenizer(tmp_path / "bytes.bin", bytewise.tokens, bytewise.eot)
    return tmp_path / "bytes.bin"


def run(script, *args, fails=False):
    result = subprocess.run([sys.executable, SCRIPTS / script, *map(str, args)], capture_output=True, text=True)
    assert (result.returncode == 1) == fails, result.stderr
    if fails:
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        return result.stderr
    return result.stdout


def decoded(path):
    """The texts of a byte-level token file; end-of-text tokens stand before each."""
    tokens = open_tokens(path)[:]
    assert tokens[0] == EOT
    return [bytes(text.astype(np.uint8)[1:]).decode() for text in np.split(tokens, np.flatnonzero(tokens == EOT)[1:])]


# Flags and errors


@pytest.mark.parametrize("script, flags, words", [
    ("text.py", ["--field", "a", "--field", "b"], "argument --field: its value is given twice: .* all its values"),
    ("text.py", ["--val", "0.1", "-o", "p", "--val", "0.2"], "argument --val: its value is given twice"),
    ("python_docs.py", ["--out", "a", "--out=b"], "argument --out: .*twice"),
    ("hellaswag.py", ["--tokenizer", "a.bin", "--tokenizer", "a.bin"], "argument --tokenizer: .*twice"),
    ("python_docs.py", ["--out", "a", __file__, "b"], "unrecognized arguments: .* pattern, put it in quotes"),
    ("text.py", ["--val", "9" * 5000], "argument --val: 99.* below 1; --help"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line_of_at_most_500_characters(tmp_path, script, flags, words):
    result = subprocess.run([sys.executable, SCRIPTS / script, *flags], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2 and re.match(f"error: {words}", result.stderr) and not list(tmp_path.iterdir())
    assert result.stderr.count("\n") == 1 and len(result.stderr) <= 500


def test_an_error_without_its_middle_keeps_the_remedy():
    said = str(UserError(f"data/{'x' * 9999}\n.txt: no such file; name one", "line\nof a compiler"))
    assert len(said.split("\n")[0]) <= 450 and said.startswith("data/xx")
    assert said.endswith("x\\n.txt: no such file; name one\nline\nof a compiler")


# Python's documentation


def test_python_docs_hold_every_topic_and_their_tokenizer_belongs_to_them(tmp_path):
    from pydoc_data.topics import topics

    prefix = tmp_path / "data" / "python_docs"
    run("python_docs.py", "--out", prefix)
    train, val = (open_tokens(f"{prefix}_{split}.bin")[:] for split in ("train", "val"))
    assert 0.095 < val.size / (train.size + val.size) < 0.105
    write_tokens(tmp_path / "all.bin", np.concatenate([train, val]))
    assert decoded(tmp_path / "all.bin") == [topics[name] for name in sorted(topics)]
    path = find_tokenizer(prefix)
    assert path == prefix.with_name("python_docs_tokenizer.bin")
    assert open_tokenizer(path).eot == EOT and open_tokenizer(path).vocab_size == 257
    DataLoader(prefix, "train", 12, 64, 257)
    DataLoader(prefix, "val", 12, 64, 257)


# Downloads


@pytest.fixture
def server():
    server = Server({"text.txt": b""})
    yield server
    server.shutdown()
    server.server_close()


def download_text(server, folder, answer: tuple, sha256: str) -> None:
    """Downloads text.txt. answer: status, body, and what the server says the body's length is, -1 where nothing."""
    server.answers["text.txt"] = [lambda whole, start: answer]
    download(f"{server.url}/text.txt", folder / "text.txt", sha256)


def test_a_download_arrives_whole_and_is_not_repeated(server, tmp_path):
    path = tmp_path / "data" / "text.txt"
    body = bytes(range(256)) * 1000
    for length in len(body), -1:
        for _ in range(2):
            download_text(server, path.parent, (200, body, length), hashlib.sha256(body).hexdigest())
            assert path.read_bytes() == body
        path.unlink()
    assert len(server.requests) == 2


@pytest.mark.parametrize("status, body, length", [
    (404, b"page", 4), (500, b"", 0), (200, b"x" * 500, 1000), (200, b"x", 1),
])  # fmt: skip
def test_a_download_that_fails_breaks_off_or_is_of_another_file_leaves_nothing(server, tmp_path, status, body, length):
    with pytest.raises(UserError, match="again"):
        download_text(server, tmp_path, (status, body, length), hashlib.sha256(b"y").hexdigest())
    assert list(tmp_path.iterdir()) == []


def test_a_redirect_never_leaves_https():
    redirect = NoWayBack().redirect_request
    arguments = urllib.request.Request("https://a.example/"), None, 302, "Found", {}
    assert redirect(*arguments, "https://b.example/").full_url == "https://b.example/"
    for to in "http://a.example/", "ftp://a.example/":
        assert "only https is used" in refusal(redirect, *arguments, to)


# HellaSwag


def hellaswag_line(label=3, endings=("skis.", "tiles off.", "a cube — café.", "roofing."), ctx="A man on a roof. he"):
    return json.dumps({"ind": 24, "ctx": ctx, "label": label, "endings": endings, "split": "val"})


def test_hellaswag_has_the_layout_of_llm_c(tmp_path, tokenizer):
    lines = [hellaswag_line(), hellaswag_line(0, ["a", "b", "c", "d" * 400], "x"), hellaswag_line("1")]
    out = tmp_path / "data" / "hellaswag_val.bin"
    out.parent.mkdir()
    out.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")  # as if it had been downloaded
    assert "3 examples" in run("hellaswag.py", "--tokenizer", tokenizer, "--out", out)

    data = out.read_bytes()
    header = struct.unpack("<256i", data[:1024])
    stream = list(struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024:]))
    longest = 0
    for number, line in enumerate(lines):
        example = json.loads(line)
        start, size, index, label, num_endings, length, *rest = stream[: stream[1] // 2]
        assert (start, index, label, num_endings) == (65535, number, int(example["label"]), 4)
        for text in [example["ctx"], *(f" {ending}" for ending in example["endings"])]:
            tokens, rest = rest[:length], rest[length:]
            assert bytes(tokens).decode() == text
            length, rest = (rest[0], rest[1:]) if rest else (None, [])
        assert length is None
        longest = max(longest, size)
        stream = stream[size // 2 :]
    assert stream == []
    assert header == (20240522, 1, 3, longest) + (0,) * 252


@pytest.mark.parametrize(
    "line, words",
    [
        (hellaswag_line(4), "label 4"),
        (hellaswag_line(endings=["a", "b", "c"]), "3 endings"),
        ("<!DOCTYPE html>", "not a HellaSwag example"),
    ],
)
def test_a_line_that_is_no_example_is_refused_by_its_number(tmp_path, tokenizer, line, words):
    (tmp_path / "h.jsonl").write_text(f"{hellaswag_line()}\n{line}\n")
    message = run("hellaswag.py", "--tokenizer", tokenizer, "--out", tmp_path / "h.bin", fails=True)
    assert "h.jsonl, line 2" in message and words in message
    assert not (tmp_path / "h.bin").exists()


def test_hellaswag_refuses_a_vocabulary_beyond_16_bits_at_once(tmp_path):
    write_tokenizer(tmp_path / "large.bin", [*byte_tokenizer().tokens, *[b"unused"] * 70_000], EOT)
    message = run("hellaswag.py", "--tokenizer", tmp_path / "large.bin", "--out", tmp_path / "h.bin", fails=True)
    assert "large.bin: 70257 tokens" in message and "16 bits" in message


# Tokenizers that change something


def test_every_script_says_that_a_normalizer_changes_its_texts(tmp_path, tokenizer, capsys):
    assert load_tokenizer(tokenizer).normalizer is None and capsys.readouterr().out == ""
    library = tokenizers.Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(byte_letters())}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder, library.normalizer = decoders.ByteLevel(), tokenizers.normalizers.NFC()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "nfc.json"))
    changing = load_tokenizer(tmp_path / "nfc.json")
    said = capsys.readouterr().out
    assert said == f"{tmp_path}/nfc.json: its normalizer (NFC) changes texts before they are encoded\n"
    tokens, surrogate = encode(changing, ["e\u0301", "\ud83d"])
    assert bytes(tokens) == "é".encode() and bytes(surrogate) == "\ufffd".encode()


# Shards


@pytest.fixture
def texts(rng):
    return [rng.integers(0, 257, size) for size in rng.integers(0, 60, 300)]


def write_shards(texts, prefix, shard_tokens=1000):
    prefix.parent.mkdir(exist_ok=True)
    writer = shards.ShardWriter(prefix, "train", shard_tokens, 257)
    for item, tokens in enumerate(texts):
        writer.add(item, tokens)
    writer.finish(len(texts))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("shard_tokens", [11, 64, 1000, 9999])
def test_shards_of_any_size_hold_all_texts_in_order(texts, tmp_path, shard_tokens):
    out = tmp_path / "out" / "web"
    write_shards(texts, out, shard_tokens)
    found = [open_tokens(path)[:] for path in sorted(out.parent.glob("web_train_*.bin"))]
    assert [len(tokens) for tokens in found[:-1]] == [shard_tokens] * (len(found) - 1)
    assert 0 < found[-1].size <= shard_tokens
    assert np.concatenate(found).tolist() == np.concatenate(texts).tolist()


def test_an_interrupted_run_goes_on_to_the_same_shards(texts, tmp_path, monkeypatch):
    write_shards(texts, tmp_path / "whole" / "web")
    whole = contents(tmp_path / "whole")

    write_tokens = shards.write_tokens
    for stop_after in range(10**6):
        written = 0

        def stopping(*args, stop_after=stop_after):
            nonlocal written
            if written == 1 + stop_after % 2:
                raise KeyboardInterrupt
            written += 1
            write_tokens(*args)

        monkeypatch.setattr(shards, "write_tokens", stopping)
        try:
            write_shards(texts, tmp_path / "parts" / "web")
            break
        except KeyboardInterrupt:
            assert contents(tmp_path / "parts") != whole
    assert stop_after >= 4
    assert contents(tmp_path / "parts") == whole

    monkeypatch.setattr(shards, "write_tokens", None)  # done: nothing is written any more
    write_shards(texts, tmp_path / "parts" / "web")

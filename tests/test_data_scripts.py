"""The dataset scripts on small files of the formats that they download."""

import hashlib
import json
import re
import urllib.request

from conftest import refusal
from dev.data import hellaswag, python_docs, shards, text
from dev.data.common import NoWayBack, download, encode, load_tokenizer
from device.errors import UserError
from llmc.data.dataloader import DataLoader
from llmc.data.find_tokenizer import find_tokenizer, open_tokenizer
from llmc.data.token_file import open_tokens
from llmc.data.tokenizer import byte_tokenizer, write_tokenizer
from support.datasets import EOT, byte_level, contents, printed, texts_of
from support.evaluations import write_evaluation
from support.server import Server

import numpy as np
import pytest
import tokenizers


@pytest.fixture
def tokenizer(tmp_path):
    """The byte tokenizer's file, in place of GPT-2's vocabulary, which would have to be downloaded."""
    bytewise = byte_tokenizer()
    write_tokenizer(tmp_path / "bytes.bin", bytewise.tokens, bytewise.eot)
    return tmp_path / "bytes.bin"


# Flags and errors


@pytest.mark.parametrize("script, flags, words", [
    (text, ["--field", "a", "--field", "b"], "argument --field: its value is given twice: .* all its values"),
    (text, ["--val", "0.1", "-o", "p", "--val", "0.2"], "argument --val: its value is given twice"),
    (hellaswag, ["--tokenizer", "a.bin", "--tokenizer=a.bin"], "argument --tokenizer: .*twice"),
    (python_docs, ["--out", "a", __file__, "b"], "unrecognized arguments: .* pattern, put it in quotes"),
    (text, ["--val", "9" * 5000], "argument --val: 99.* below 1; --help"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line_of_at_most_500_characters(capsys, script, flags, words):
    with pytest.raises(SystemExit, match="^2$"):
        printed(script, *flags)
    said = capsys.readouterr().err
    assert re.match(f"error: {words}", said) and said.count("\n") == 1 and len(said) <= 500


def test_an_error_without_its_middle_keeps_the_remedy():
    said = str(UserError(f"data/{'x' * 9999}\n.txt: no such file; name one", "line\nof a compiler"))
    assert len(said.split("\n")[0]) <= 490 and said.startswith("data/xx")
    assert said.endswith("x\\n.txt: no such file; name one\nline\nof a compiler")


# Python's documentation


def test_python_docs_hold_every_topic_and_their_tokenizer_belongs_to_them(tmp_path):
    from pydoc_data.topics import topics

    prefix = tmp_path / "data" / "python_docs"
    printed(python_docs, "--out", prefix)
    train, val = (open_tokens(f"{prefix}_{split}.bin")[:] for split in ("train", "val"))
    assert 0.095 < val.size / (train.size + val.size) < 0.105
    assert texts_of(np.concatenate([train, val])) == [topics[name] for name in sorted(topics)]
    path = find_tokenizer(prefix)
    assert path == prefix.with_name("python_docs_tokenizer.bin")
    assert open_tokenizer(path).eot == EOT and open_tokenizer(path).vocab_size == 257
    for split in "train", "val":
        DataLoader(prefix, split, 12, 64, 257)


def test_python_docs_replace_no_file_of_somebody_else(tmp_path):
    for _ in range(2):
        printed(python_docs, "--out", tmp_path / "pd")
    for name, own in contents(tmp_path).items():
        (tmp_path / name).write_bytes(b"mine")
        assert f"{name} belongs to another dataset" in refusal(printed, python_docs, "--out", tmp_path / "pd")
        assert (tmp_path / name).read_bytes() == b"mine"
        (tmp_path / name).write_bytes(own)


# Downloads


@pytest.fixture
def server():
    with Server({"text.txt": b""}) as server:
        yield server


def download_text(server, path, answer: tuple, sha256: str) -> None:
    """answer: status, body, and the length that the server names."""
    server.answers["text.txt"] = [lambda whole, start: answer]
    download(f"{server.url}/text.txt", path, sha256)


def test_a_download_arrives_whole_and_is_not_repeated(server, tmp_path):
    path, body = tmp_path / "data" / "text.txt", bytes(range(256)) * 1000
    for length in len(body), -1:
        for _ in range(2):
            download_text(server, path, (200, body, length), hashlib.sha256(body).hexdigest())
            assert path.read_bytes() == body
        path.unlink()
    assert len(server.requests) == 2


@pytest.mark.parametrize("answer, wanted", [
    ((404, b"page", 4), b"page"), ((500, b"", 0), b""), ((200, b"x" * 500, 1000), b"x" * 500), ((200, b"x", 1), b"y"),
])  # fmt: skip
def test_a_download_that_fails_breaks_off_or_is_of_another_file_leaves_nothing(server, tmp_path, answer, wanted):
    sha256 = hashlib.sha256(wanted).hexdigest()
    assert "again" in refusal(download_text, server, tmp_path / "text.txt", answer, sha256)
    assert list(tmp_path.iterdir()) == []


def test_a_redirect_never_leaves_https():
    redirect = NoWayBack().redirect_request
    arguments = urllib.request.Request("https://a.example/"), None, 302, "Found", {}
    assert redirect(*arguments, "https://b.example/").full_url == "https://b.example/"
    for to in "http://a.example/", "ftp://a.example/":
        assert "only https is used" in refusal(redirect, *arguments, to)


# HellaSwag


def hellaswag_line(label=3, endings=("skis.", "tiles off.", "a cube — café.", "roofing."), ctx="A man on a roof. he"):
    example = {"ind": 24, "ctx": ctx, "label": label, "endings": endings, "split": "val"}
    return json.dumps(example, ensure_ascii=False)


def test_hellaswag_has_the_layout_of_llm_c(tmp_path, tokenizer):
    lines = [hellaswag_line(), hellaswag_line(0, ["a", "b", "c", "d" * 400], "x\u2028\x85"), hellaswag_line("1")]
    out = tmp_path / "data" / "hellaswag_val.bin"
    out.parent.mkdir()
    out.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")  # as if it had been downloaded
    for _ in range(2):
        assert "3 examples" in printed(hellaswag, "--tokenizer", tokenizer, "--out", out)

    wanted = [
        (int(example["label"]), [*example["ctx"].encode()], [[*f" {ending}".encode()] for ending in example["endings"]])
        for example in map(json.loads, lines)
    ]
    write_evaluation(tmp_path / "wanted.bin", wanted)
    assert out.read_bytes() == (tmp_path / "wanted.bin").read_bytes()
    out.write_bytes(b"mine")
    assert "belongs to another" in refusal(printed, hellaswag, "--tokenizer", tokenizer, "--out", out)
    assert out.read_bytes() == b"mine"


@pytest.mark.parametrize("line, words", [
    (hellaswag_line(4), "label 4"), (hellaswag_line(endings=["a", "b", "c"]), "3 endings"),
    ("<!DOCTYPE html>", "not a HellaSwag example"),
])  # fmt: skip
def test_a_line_that_is_no_example_is_refused_by_its_number(tmp_path, tokenizer, line, words):
    (tmp_path / "h.jsonl").write_text(f"{hellaswag_line()}\n{line}\n")
    message = refusal(printed, hellaswag, "--tokenizer", tokenizer, "--out", tmp_path / "h.bin")
    assert "h.jsonl, line 2" in message and words in message and not (tmp_path / "h.bin").exists()


def test_hellaswag_refuses_a_vocabulary_beyond_16_bits_at_once(tmp_path):
    write_tokenizer(tmp_path / "large.bin", [*byte_tokenizer().tokens, *[b"unused"] * 70_000], EOT)
    message = refusal(printed, hellaswag, "--tokenizer", tmp_path / "large.bin", "--out", tmp_path / "h.bin")
    assert "large.bin: 70257 tokens" in message and "16 bits" in message


# Tokenizers that change something


def test_every_script_says_that_a_normalizer_changes_its_texts(tmp_path, tokenizer, capsys):
    assert load_tokenizer(tokenizer).normalizer is None and capsys.readouterr().out == ""
    library = byte_level("<|endoftext|>")
    library.normalizer = tokenizers.normalizers.NFC()
    library.save(str(tmp_path / "nfc.json"))
    changing = load_tokenizer(tmp_path / "nfc.json")
    said = capsys.readouterr().out
    assert said == f"{tmp_path}/nfc.json: its normalizer (NFC) changes texts before they are encoded\n"
    tokens, surrogate = encode(changing, ["e\u0301", "\ud83d"])
    assert bytes(tokens) == "é".encode() and bytes(surrogate) == "\ufffd".encode()


# Shards


@pytest.fixture
def texts(rng):
    return [rng.integers(0, 257, size) for size in rng.integers(0, 60, 40)]


@pytest.mark.parametrize("shard_tokens", [11, 64, 1000, 9999])
def test_shards_of_any_size_hold_all_texts_in_order(texts, tmp_path, shard_tokens):
    shards.write_shards(texts, tmp_path / "web", "train", shard_tokens, 257)
    found = [open_tokens(path)[:] for path in sorted(tmp_path.glob("web_train_*.bin"))]
    assert [len(tokens) for tokens in found[:-1]] == [shard_tokens] * (len(found) - 1)
    assert 0 < found[-1].size <= shard_tokens
    assert np.concatenate(found).tolist() == np.concatenate(texts).tolist()


def test_a_run_that_was_stopped_writes_the_shards_that_are_missing(texts, tmp_path, monkeypatch):
    shards.write_shards(texts, tmp_path / "web", "train", 100, 257)
    whole, write_tokens, written = contents(tmp_path), shards.write_tokens, []
    for name in sorted(whole)[5:]:
        (tmp_path / name).unlink()
    monkeypatch.setattr(shards, "write_tokens", lambda *args: written.append(args[0].name) or write_tokens(*args))
    shards.write_shards(texts, tmp_path / "web", "train", 100, 257)
    assert contents(tmp_path) == whole and written == sorted(whole)[5:]

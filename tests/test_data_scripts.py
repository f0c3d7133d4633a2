"""The dataset scripts, run as programs on small files of the formats that they download."""

import argparse
import json
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from dev.data import shards
from dev.data.common import download, encode, load_tokenizer
from dev.data.shards import write_shards
from device.errors import UserError
from llmc.data.dataloader import DataLoader, open_tokens, write_tokens
from llmc.data.tokenizer import Tokenizer, byte_letters, byte_tokenizer, find_tokenizer, write_tokenizer

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "dev" / "data"
EOT = 256


@pytest.fixture
def tokenizer(tmp_path):
    """The byte tokenizer's file, in place of GPT-2's vocabulary, which would have to be downloaded."""
    bytewise = byte_tokenizer()
    write_tokenizer(tmp_path / "bytes.bin", bytewise.tokens, bytewise.eot)
    return tmp_path / "bytes.bin"


@pytest.fixture
def large_tokenizer(tmp_path):
    """A tokenizer.json of 70,002 tokens, in whose texts none but the last are used: 69,744 and on are the bytes, the
    last two begin and end a text, as in Llama 3's."""
    names = ["<|begin_of_text|>", "<|end_of_text|>"]
    spellings = [f"unused{i}" for i in range(70_000 - 256)] + byte_letters()
    library = tokenizers.Tokenizer(models.BPE({spelling: i for i, spelling in enumerate(spellings)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken(name, special=True) for name in names])
    library.post_processor = processors.TemplateProcessing(single=f"{names[0]} $A", special_tokens=[(names[0], 70_000)])
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def large_tokens(text):
    """A text as a dataset of large_tokenizer's holds it."""
    return [70_000, *(69_744 + byte for byte in text.encode())]


def run(script, *args, fails=False):
    result = subprocess.run([sys.executable, SCRIPTS / script, *map(str, args)], capture_output=True, text=True)
    assert (result.returncode == 1) == fails, result.stderr
    if fails:
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        return result.stderr
    return result.stdout


def decoded(path):
    """The texts of a byte-level token file; end-of-text tokens stand before each."""
    tokens = open_tokens(path)
    assert tokens[0] == EOT
    return [bytes(text.astype(np.uint8)[1:]).decode() for text in np.split(tokens, np.flatnonzero(tokens == EOT)[1:])]


# Python's documentation


def test_python_docs_hold_every_topic_and_their_tokenizer_belongs_to_them(tmp_path):
    from pydoc_data.topics import topics

    prefix = tmp_path / "data" / "python_docs"
    run("python_docs.py", "--out", prefix)
    train, val = (open_tokens(f"{prefix}_{split}.bin") for split in ("train", "val"))
    assert 0.095 < val.size / (train.size + val.size) < 0.105
    write_tokens(tmp_path / "all.bin", np.concatenate([train, val]))
    assert decoded(tmp_path / "all.bin") == [topics[name] for name in sorted(topics)]
    path = find_tokenizer(prefix)
    assert path == prefix.with_name("python_docs_tokenizer.bin")
    assert Tokenizer.load(path).eot == EOT and Tokenizer.load(path).vocab_size == 257
    DataLoader(prefix, "train", 12, 64, 257)
    DataLoader(prefix, "val", 12, 64, 257)


# Tiny Shakespeare


def test_tiny_shakespeare_is_cut_into_speeches_with_the_validation_first(tmp_path, tokenizer):
    speeches = [f"Speaker {i}:\nWords of number {i}, naïve ones.\n\n" for i in range(50)]
    (tmp_path / "text.txt").write_text("".join(speeches), encoding="utf-8")
    prefix = tmp_path / "x"
    run("tiny_shakespeare.py", "--text", tmp_path / "text.txt", "--tokenizer", tokenizer, "--out", prefix)
    val, train = open_tokens(f"{prefix}_val.bin"), open_tokens(f"{prefix}_train.bin")
    assert val.size == (val.size + train.size) // 10
    write_tokens(tmp_path / "all.bin", np.concatenate([val, train]))
    assert decoded(tmp_path / "all.bin") == [*speeches, ""]
    assert Tokenizer.load(f"{prefix}_tokenizer.bin").eot == EOT


def test_a_text_of_shakespeares_length_gives_llm_cs_validation_split(tmp_path, tokenizer):
    (tmp_path / "text.txt").write_text("x" * 400_000)
    run("tiny_shakespeare.py", "--text", tmp_path / "text.txt", "--tokenizer", tokenizer, "--out", tmp_path / "x")
    assert open_tokens(tmp_path / "x_val.bin").size == 32768


def test_a_text_that_cannot_be_read_is_refused(tmp_path, tokenizer):
    args = ["--tokenizer", tokenizer, "--out", tmp_path / "x", "--text"]
    assert "missing.txt: no such file" in run("tiny_shakespeare.py", *args, tmp_path / "missing.txt", fails=True)
    (tmp_path / "text.txt").write_bytes(b"caf\xe9")
    words = "text.txt: not UTF-8 text (at byte 3): save it as UTF-8"
    assert words in run("tiny_shakespeare.py", *args, tmp_path / "text.txt", fails=True)
    assert not list(tmp_path.glob("x_*"))


def test_a_text_is_encoded_by_a_tokenizer_json_and_its_tokens_are_of_32_bits_if_they_must(tmp_path, large_tokenizer):
    speeches = [f"Speaker {i}:\nnaïve <|begin_of_text|> words.\n\n" for i in range(9)]
    (tmp_path / "text.txt").write_text("".join(speeches), encoding="utf-8")
    prefix = tmp_path / "x"
    run("tiny_shakespeare.py", "--text", tmp_path / "text.txt", "--tokenizer", large_tokenizer, "--out", prefix)
    val, train = open_tokens(f"{prefix}_val.bin"), open_tokens(f"{prefix}_train.bin")
    assert val.dtype == train.dtype == np.uint32
    assert np.concatenate([val, train]).tolist() == [t for text in [*speeches, ""] for t in large_tokens(text)]
    tokenizer = Tokenizer.load(find_tokenizer(prefix))
    assert (tokenizer.vocab_size, tokenizer.tokens[tokenizer.eot]) == (70_002, b"<|begin_of_text|>")
    assert b"".join(map(tokenizer.decode, train[-30:])).endswith(b"words.\n\n<|begin_of_text|>")


# Downloads


@pytest.fixture
def server():
    """Answers every request with the next of `answers`: status, body, and what it says the body's length is."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body, length = server.answers.pop(0)
            self.send_response(status)
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}/text.txt"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_download_arrives_whole_and_is_not_repeated(server, tmp_path):
    path = tmp_path / "data" / "text.txt"
    body = bytes(range(256)) * 1000
    for length in (len(body), None):
        server.answers = [(200, body, length)]
        download(server.url, path)
        assert path.read_bytes() == body
        download(server.url, path)
        path.unlink()


@pytest.mark.parametrize("status, body, length", [(404, b"page", 4), (500, b"", 0), (200, b"x" * 500, 1000)])
def test_a_download_that_fails_or_breaks_off_leaves_nothing(server, tmp_path, status, body, length):
    server.answers = [(status, body, length)]
    with pytest.raises(UserError, match="again"):
        download(server.url, tmp_path / "text.txt")
    assert list(tmp_path.iterdir()) == []


# HellaSwag


def hellaswag_line(label=3, endings=("skis.", "tiles off.", "a cube — café.", "roofing."), ctx="A man on a roof. he"):
    return json.dumps({"ind": 24, "ctx": ctx, "label": label, "endings": endings, "split": "val"})


def test_hellaswag_has_the_layout_of_llm_c(tmp_path, tokenizer):
    lines = [hellaswag_line(), hellaswag_line(0, ["a", "b", "c", "d" * 400], "x"), hellaswag_line("1")]
    (tmp_path / "h.jsonl").write_text("\n".join(lines) + "\n")
    out = tmp_path / "data" / "hellaswag_val.bin"
    assert "3 examples" in run("hellaswag.py", "--jsonl", tmp_path / "h.jsonl", "--tokenizer", tokenizer, "--out", out)

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
    args = ["--tokenizer", tokenizer, "--out", tmp_path / "h.bin", "--jsonl", tmp_path / "h.jsonl"]
    message = run("hellaswag.py", *args, fails=True)
    assert "h.jsonl, line 2" in message and words in message
    assert not (tmp_path / "h.bin").exists()


def test_hellaswag_refuses_a_vocabulary_beyond_16_bits_at_once(tmp_path, large_tokenizer):
    (tmp_path / "h.jsonl").write_text("no matter")
    args = ["--tokenizer", large_tokenizer, "--out", tmp_path / "h.bin", "--jsonl", tmp_path / "h.jsonl"]
    message = run("hellaswag.py", *args, fails=True)
    assert "tokenizer.json: 70002 tokens" in message and "16 bits" in message


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


class Texts(list):
    """A list that slices as a datasets.Dataset does."""

    def __getitem__(self, key):
        assert isinstance(key, slice)
        return {"text": super().__getitem__(key)}


@pytest.fixture
def texts(rng):
    letters = np.array(list("abc é"))
    return Texts("".join(rng.choice(letters, size)) for size in rng.integers(0, 60, 300))


def settings(tokenizer, out, **others):
    return argparse.Namespace(**{"tokenizer": tokenizer, "out": out, "shard_tokens": 1000, "texts": None} | others)


def joined(texts):
    return [token for text in texts for token in (EOT, *text.encode())]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_hold_all_texts_in_order_and_the_first_is_for_validation(texts, tokenizer, tmp_path):
    out = tmp_path / "out" / "web"
    write_shards(texts, settings(tokenizer, out), split="train", first_split="val")
    shards = [out.with_name("web_val_000000.bin"), *sorted(out.parent.glob("web_train_*.bin"))]
    sizes = [open_tokens(shard).size for shard in shards]
    assert sizes[:-1] == [1000] * (len(sizes) - 1) and 0 < sizes[-1] <= 1000 and len(sizes) > 8
    assert np.concatenate([open_tokens(shard) for shard in shards]).tolist() == joined(texts)
    loader = DataLoader(out, "train", 2, 64, 257)
    assert [file.name for file in loader.files][0] == "web_train_000001.bin"
    assert DataLoader(out, "val", 2, 64, 257).num_tokens == 1000
    assert find_tokenizer(out).name == "web_tokenizer.bin"


@pytest.mark.parametrize("shard_tokens", [11, 64, 5000])
def test_shards_of_any_size_hold_all_texts(texts, tokenizer, tmp_path, shard_tokens):
    few = Texts(list(texts)[:40])
    write_shards(few, settings(tokenizer, tmp_path / "o" / "web", shard_tokens=shard_tokens, texts=30), split="train")
    shards = sorted((tmp_path / "o").glob("web_train_*.bin"))
    assert np.concatenate([open_tokens(shard) for shard in shards]).tolist() == joined(list(texts)[:30])


def test_an_interrupted_run_goes_on_to_the_same_shards(texts, tokenizer, tmp_path, monkeypatch):
    write_shards(texts, settings(tokenizer, tmp_path / "whole" / "web"), split="train")
    whole = contents(tmp_path / "whole")

    write_tokens = shards.write_tokens
    monkeypatch.setattr(shards, "TEXTS_AT_ONCE", 17)
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
            write_shards(texts, settings(tokenizer, tmp_path / "parts" / "web"), split="train")
            break
        except KeyboardInterrupt:
            assert contents(tmp_path / "parts") != whole
    assert stop_after >= 4
    assert contents(tmp_path / "parts") == whole

    monkeypatch.setattr(shards, "write_tokens", None)  # done: nothing is written any more
    write_shards(texts, settings(tokenizer, tmp_path / "parts" / "web"), split="train")


def test_going_on_with_other_settings_is_refused(texts, tokenizer, tmp_path):
    write_shards(texts, settings(tokenizer, tmp_path / "web"), split="train")
    for change in ({"shard_tokens": 999}, {"texts": 7}):
        with pytest.raises(UserError, match=next(iter(change))):
            write_shards(texts, settings(tokenizer, tmp_path / "web", **change), split="train")
    (tmp_path / "web_train.progress.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        write_shards(texts, settings(tokenizer, tmp_path / "web"), split="train")


def test_fineweb_and_tinystories_read_files_of_the_hubs_formats(tmp_path, texts, tokenizer, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for suffix, write in ((".parquet", "to_parquet"), (".jsonl", "to_json")):
        web = tmp_path / f"web{suffix}"
        getattr(datasets.Dataset.from_dict({"text": list(texts), "id": ["x"] * len(texts)}), write)(str(web))
        args = ["--tokenizer", tokenizer, "--shard-tokens", 4000]
        out = tmp_path / suffix / "fineweb"
        run("fineweb.py", *args, "--out", out, "--files", web)
        shards = [out.with_name("fineweb_val_000000.bin"), *sorted(out.parent.glob("fineweb_train_*.bin"))]
        assert np.concatenate([open_tokens(shard) for shard in shards]).tolist() == joined(texts)
        out = tmp_path / suffix / "tinystories"
        run("tinystories.py", *args, "--out", out, "--texts", 100, "--train-files", web, "--val-files", web)
        for split in ("train", "val"):
            tokens = open_tokens(out.with_name(f"tinystories_{split}_000000.bin"))
            assert tokens.tolist() == joined(list(texts)[:100])


@pytest.mark.parametrize(
    "script", ["python_docs", "tiny_shakespeare", "hellaswag", "tinystories", "fineweb", "text x -o y"]
)
def test_a_wrong_flag_is_refused_in_one_line(script):
    script, *args = script.split()
    command = [sys.executable, SCRIPTS / f"{script}.py", *args, "--no-such-flag"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unrecognized arguments: --no-such-flag; --help lists the flags\n"

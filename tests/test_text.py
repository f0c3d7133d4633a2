"""dev/data/text.py: what a dataset made of files of text holds, and what is asked instead of guessed."""

import bz2
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import conftest
from dev.data import text as script
from dev.data.common import lines_of
from llmc.data.dataloader import DataLoader
from llmc.data.find_data import find_token_files
from llmc.data.hf_tokenizer import byte_letters
from llmc.data.token_file import open_tokens

import datasets
import numpy as np
import pyarrow
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

ROOT, EOT, BYTES = Path(__file__).resolve().parents[1], 256, ["--tokenizer", "bytes"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    os.mkdir("in")


@pytest.fixture
def prepare(monkeypatch, capsys):  # runs text.py in this process; returns what it prints
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["text.py", "--workers", "1", *map(str, args)])
        return script.main() or capsys.readouterr().out

    return run


def refusal(prepare, *args):
    message = conftest.refusal(prepare, *args, "-o", "no", *([] if "--tokenizer" in args else BYTES))
    assert not list(Path().glob("no*")) and "\n" not in message
    return message


def documents(prefix, split):
    tokens = np.concatenate([open_tokens(path)[:] for path in find_token_files(prefix, split)])
    return [bytes(text.astype(np.uint8)[1:]).decode() for text in np.split(tokens, np.flatnonzero(tokens == EOT)[1:])]


def both(prefix):
    return sorted(documents(prefix, "train") + documents(prefix, "val"))


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def write_texts(count, words=40, folder="in"):
    for number in range(count):
        text = " ".join(random.Random(number).choices("the theatre naïve 你好 🙂 1990 it's bathing".split(), k=words))
        Path(folder, f"{number:03}.txt").write_text(f"{number} {text}", encoding="utf-8")


ROWS = [{"text": "one é", "title": "A"}, {"text": "two\r\nlines, \"q\"", "title": ""}, {"text": "NA", "title": "007"}]
TEXTS = ["one é", 'two\nlines, "q"', "NA"]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = 'text,title\n"one é",A\n"two\r\nlines, ""q""",\nNA,007\n'
SAVED = datasets.Dataset.from_list(ROWS)
WRITTEN = {
    "a.jsonl": LINES.encode(), "b.json": LINES.encode(), "a.json": json.dumps(ROWS, indent=1).encode(),
    "a.csv": TABLE.encode(), "a.TSV": re.sub(",(?! )", "\t", TABLE).encode(), "a.csv.bz2": bz2.compress(TABLE.encode()),
    "a.ndjson.gz": gzip.compress(LINES.encode()), "a.jsonl.zst": pyarrow.compress(LINES.encode(), "zstd", asbytes=True),
    "a[1].parquet": SAVED.to_parquet, "saved": SAVED.save_to_disk,
    "splits": datasets.DatasetDict(train=SAVED).save_to_disk,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_every_kind_of_file_becomes_the_same_documents(prepare, name):
    data(name) if callable(data := WRITTEN[name]) else Path(name).write_bytes(data)
    prepare(name, "-o", "x", *BYTES)
    assert both("x") == sorted(TEXTS) and len(list(Path().glob("x*"))) == 4
    prepare(name, "-o", "y [1]*", *BYTES, "--field", "title", "text")
    assert both("y [1]*") == sorted(["A\n\none é", 'two\nlines, "q"', "007\n\nNA"])
    assert re.search("no (field|column) body, but text, title", refusal(prepare, name, "--field", "text", "body"))


def test_a_folders_texts_are_read_in_order_and_what_is_skipped_is_counted_by_suffix(prepare):
    SAVED.save_to_disk("saved")
    os.rename("saved/data-00000-of-00001.arrow", "in/i.arrow")
    texts = {"a.txt": "plain\ntext", "b.md": "# head\n", "c.PY": "x = 1\n", "sub/z.text": "below"}
    os.mkdir("in/sub")
    for name in [*texts, "e.pdf", "f.pdf", "g.tar.gz", "README", ".hidden.txt", "h.rst"]:
        Path("in", name).write_text("\ufeff" + texts.get(name, " ").replace("\n", "\r\n"), newline="")
    Path("in/j.json").write_text(json.dumps(["list \ud83d", "of texts"]))
    os.symlink(".", "in/loop")
    said = prepare("in", "-o", "x", *BYTES, "--suffix", ".py")
    wanted = [*list(texts.values())[:3], *TEXTS, "list \ufffd", "of texts", "below"]
    assert both("x") == sorted(wanted)
    assert [text for text in wanted if text in documents("x", "train")] == documents("x", "train")
    assert "skipped        .pdf 2, .tar.gz 1, none 2\n" in said and "blank          1\n" in said
    assert json.loads(Path("x_summary.json").read_text())["skipped"] == {".pdf": 2, ".tar.gz": 1, "none": 2}
    assert "--suffix .pdf reads such files as text" in refusal(prepare, "in/e.pdf")


@pytest.mark.parametrize("name, data, encoding", [
    ("a.jsonl", '{"text": "naïve"}\n', "utf-16"), ("a.csv", "text\nnaïve\n", "cp1252"),
    ("a.json", '["naïve"]', "cp437"),
    *(("a.txt", "naïve", encoding) for encoding in ("utf-16", "utf-16-le", "cp1252", "cp437")),
])  # fmt: skip
def test_what_is_not_utf_8_is_refused_by_its_byte_and_right_in_the_encoding_named(prepare, name, data, encoding):
    Path(name).write_bytes(data.encode(encoding))
    Path("b.txt").write_bytes("second".encode(encoding))
    at = {"utf-16": "0, it begins as utf-16", "utf-16-le": "1"}.get(encoding, data.index("ï"))
    assert refusal(prepare, name).startswith(f"{name}: not UTF-8 text (at byte {at}): name the encoding of all files")
    prepare(name, "b.txt", "-o", "x", *BYTES, "--encoding", encoding)
    assert [text.strip() for text in both("x")] == ["naïve", "second"]


def test_the_byte_is_right_wherever_it_is(prepare, monkeypatch):
    monkeypatch.setattr("dev.data.common.BLOCK", 7)
    for size in range(12, 20):
        Path("a.txt").write_bytes("é".encode() * size + b"\xe9x")
        assert f"a.txt: not UTF-8 text (at byte {2 * size})" in refusal(prepare, "a.txt")
    for name in ("cp99999", "rot13"):
        assert f"--encoding {name}: Python knows no such" in refusal(prepare, "a.txt", "--encoding", name)


@given(st.lists(st.text(st.sampled_from("aé \n\r"), max_size=9)), st.integers(1, 9))
def test_lines_and_cuts_lose_nothing_whatever_the_blocks(blocks, longest):
    parts = list(script.cut(blocks, longest))
    assert "".join(parts) == "".join(lines_of("x", blocks)) == "".join(blocks) and max(map(len, parts)) <= longest
    assert parts == list(script.cut(["".join(blocks)], longest))


def test_bad_input_is_said_in_one_line_that_names_the_file(prepare, monkeypatch):
    monkeypatch.setattr("dev.data.common.LONGEST", 99_999)
    write_texts(9)
    files = {
        "a.jsonl": b'{"text": "x"}\n{', "b.jsonl": b'{"text": 3}', "c.jsonl": b"[1]", "d.csv": b"text\n1,2\n",
        "e.parquet": b"PAR1 no", "f.txt.gz": b"no gzip", "g.jsonl": b'{"body": "x"}', "h.csv": b'text\n"open',
        "i.json": b"[1", "j.arrow": b"no", "k.jsonl": b"[" * 99999, "l.txt": b"zero \0", "m.jsonl": b"",
        "o.txt.gz": gzip.compress(b"broken off" * 999)[:40], "p.jsonl.zst": WRITTEN["a.jsonl.zst"][:20],
        "q.jsonl": b"\n\n\n" + b"x" * 100_000, "r.json": b"[" + b" " * 99_999, "s.csv": b'text\nx\n"' + b"w\n" * 60_000,
    }  # fmt: skip
    for name, data in files.items():
        Path(name).write_bytes(data)
    os.mkfifo("pipe.txt")
    os.symlink("nowhere", "link.txt")
    os.mkdir("empty")
    words = dict.fromkeys(files, "") | {
        "a.jsonl": "record 2", "b.jsonl": "record 1", "d.csv": "as many fields", "l.txt": "byte 5", "gone": "no such",
        "g.jsonl": "no field text, but body: name", "m.jsonl": "too little", "pipe.txt": "regular", "link.txt": "no",
        "q.jsonl": ", line 4: longer than 99,999", "r.json": ": longer", "s.csv": "record 2: .* larger", "empty": "no",
        "owner/name": "cannot be loaded", "in/000.txt": "too little text",
    }  # fmt: skip
    for name, word in words.items():
        assert re.match(f"{re.escape(name)}\\b.*{word}", refusal(prepare, name))
    chat_tokenizer("ascii.json", 128)
    assert refusal(prepare, "in", "--tokenizer", "ascii.json").startswith("--tokenizer: it cannot spell '")
    with pytest.raises(subprocess.CalledProcessError) as refused:  # the error comes from another process
        forks("in", "--tokenizer", "ascii.json", "--workers", "2", "-o", "no")
    assert refused.value.returncode == 1 and "--tokenizer: it cannot spell '" in refused.value.stderr
    assert "lower it" in conftest.refusal(prepare, "in", "-o", "x", "--train-tokenizer", "9999")


def test_of_equal_texts_one_stays_and_added_texts_move_none_across(prepare):
    write_texts(400, words=60)
    os.mkdir("more")
    write_texts(500, words=60, folder="more")
    prepare("in", "-o", "x", *BYTES, "--val", "0.2")
    assert "duplicates     400\n" in prepare("in", "more", "-o", "y", *BYTES, "--val", "0.2")
    assert len(both("y")) == len(set(both("y"))) == 500
    assert all(set(documents("x", split)) <= set(documents("y", split)) for split in ("train", "val"))
    assert 0.1 < len(documents("y", "val")) / 500 < 0.3


@pytest.mark.parametrize("files, words, least", [(60, 40, None), (300, 60, 4096), (1, 9000, 4096)])
def test_a_small_set_leaves_4096_tokens_or_a_tenth_for_validation(prepare, files, words, least):
    write_texts(files, words)
    said = prepare("in", "-o", "x", *BYTES)
    train, val = (sum(open_tokens(path).size for path in find_token_files("x", split)) for split in ("train", "val"))
    assert 0 <= val - (least or (train + val) / 10) < (train + val) / 40
    assert DataLoader("x", "val", 4, int(said.split(" -t ")[1].split()[0]), 257).num_tokens == val


def forks(*args: str) -> None:
    """Runs the program by itself. It forks, and a fork of the tests' process may wait for ever for a lock that one of
    its threads held."""
    command = [sys.executable, ROOT / "dev/data/text.py", *args]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


def test_a_run_that_is_stopped_goes_on_to_the_same_files(prepare):
    write_texts(300, words=400)
    args = ["in", "--train-tokenizer", "300", "--shard-tokens", "4000", "-o"]
    prepare(*args, "whole/x")
    stops = [("generator", signal.SIGKILL), ("x_tokenizer.json", signal.SIGINT), ("x_train_000001.bin", signal.SIGKILL)]
    for until, stop in stops:
        command = [sys.executable, ROOT / "dev/data/text.py", *args, "stopped/x", "--workers", "2"]
        process = subprocess.Popen(command, stdout=-3, stderr=subprocess.PIPE, text=True, start_new_session=True)
        while process.poll() is None and not list(Path("stopped/x_work").glob(f"*/{until}")):
            time.sleep(0.001)
        os.killpg(process.pid, stop) if stop == signal.SIGINT else process.kill()  # the other processes follow
        said = process.communicate()[1]
        assert not list(Path("stopped").glob("x_*.bin")) and "Traceback" not in said
        assert stop == signal.SIGKILL or said.endswith("interrupted; run the same command again to go on\n")
    forks(*args, "stopped/x", "--workers", "2")
    assert contents("stopped") == contents("whole") and not Path("stopped/x_work").exists()
    assert "belongs to another dataset" in conftest.refusal(prepare, "in", *BYTES, "-o", "whole/x")


def chat_tokenizer(path, alphabet=256):
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters()[:alphabet])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", tokenizers.AddedToken("<|im_end|>", rstrip=True)])
    library.save(path)


@pytest.mark.parametrize("tokenizer, name, token", [("chat.json", "<|im_end|>", 257), ("bytes", "<|endoftext|>", 256)])
def test_names_of_special_tokens_are_text_unless_the_flag_says_otherwise(prepare, tokenizer, name, token):
    chat_tokenizer("chat.json")
    [Path(f"in/{number}.txt").write_text(f"{number} said{name} \nyes{name}") for number in range(30)]
    args = ["in", "--tokenizer", tokenizer, "-o"]
    assert f"special tokens {name} 30\n" in (said := prepare(*args, "text")) and "--special-tokens encodes" in said
    assert "--special-tokens encodes" not in prepare(*args, "special", "--special-tokens")
    plain, special = (open_tokens(f"{prefix}_train_000000.bin")[:].tolist() for prefix in ("text", "special"))
    texts = plain.count(EOT)  # one stands before each
    assert [tokens.count(token) - texts * (token == EOT) for tokens in (plain, special)] == [0, 2 * texts]


def test_plain_text_becomes_bytes_without_the_libraries_and_else_the_missing_one_is_named(prepare, monkeypatch):
    write_texts(60)
    prepare("in", *BYTES, "-o", "with/x")
    Path("a.jsonl").write_text(LINES)
    chat_tokenizer("chat.json")
    for package in ("datasets", "tokenizers", "pyarrow", "tqdm"):
        monkeypatch.setitem(sys.modules, package, None)
    prepare("in", *BYTES, "-o", "without/x")
    assert contents("with") == contents("without")
    for name in ("a.jsonl", "owner/name"):
        assert refusal(prepare, name).endswith("install it with: pip install datasets")
    assert refusal(prepare, "in", "--tokenizer", "chat.json").endswith("pip install tokenizers")


def test_a_work_directory_of_somebodys_is_refused_and_stays(prepare):
    write_texts(20)
    Path("mine_work").mkdir()
    Path("mine_work/thesis.txt").write_text("mine")
    said = conftest.refusal(prepare, "in", "-o", "mine", *BYTES)
    assert said.startswith("mine_work: a run removes it, and its thesis.txt is not ours")
    assert os.listdir("mine_work") == ["thesis.txt"]

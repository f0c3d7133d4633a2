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
from functools import partial
from pathlib import Path

import conftest
from dev.data import documents as reading
from dev.data import text as script
from dev.data.common import lines_of
from llmc.data.dataloader import DataLoader
from llmc.data.find_data import find_token_files
from llmc.data.token_file import open_tokens
from support.datasets import EOT, byte_level, contents, printed, texts_of
from train_qwen3 import Qwen3

import datasets
import numpy as np
import pyarrow
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

ROOT, BYTES = Path(__file__).resolve().parents[1], ["--tokenizer", "bytes"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    os.mkdir("in")


def prepare(*args) -> str:
    return printed(script, "--workers", 1, *args)


def refusal(*args):
    message = conftest.refusal(prepare, *args, "-o", "no", *([] if "--tokenizer" in args else BYTES))
    assert not list(Path().glob("no*")) and "\n" not in message
    return message


def documents(prefix, split):
    return texts_of(np.concatenate([open_tokens(path)[:] for path in find_token_files(prefix, split)]))


def both(prefix):
    return sorted(documents(prefix, "train") + documents(prefix, "val"))


def write_texts(count, words=40, folder="in"):
    for number in range(count):
        text = " ".join(random.Random(number).choices("the theatre naïve 你好 🙂 1990 it's bathing".split(), k=words))
        Path(folder, f"{number:03}.txt").write_text(f"{number} {text}", encoding="utf-8")


ENDS = "é\u2028\u2029\x85\x0b\x0c\x1c\x1e"  # of lines elsewhere, but in none of these files
ROWS = [{"text": ENDS, "title": "A"}, {"text": 'two\r\nlines, "q"', "title": ""}, {"text": "NA", "title": "007"}]
TEXTS = [ENDS, 'two\nlines, "q"', "NA"]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
TABLE = f'text,title\n"{ENDS}",A\n"two\r\nlines, ""q""",\nNA,007\n'
ZSTD, SAVED = pyarrow.compress(LINES.encode(), "zstd", asbytes=True), datasets.Dataset.from_list(ROWS)
WRITTEN = {
    "a.jsonl": LINES.encode(), "b.json": LINES.encode(), "a.json": json.dumps(ROWS, indent=1).encode(),
    "a.csv": TABLE.encode(), "a.TSV": re.sub(",(?! )", "\t", TABLE).encode(), "a.csv.bz2": bz2.compress(TABLE.encode()),
    "a.ndjson.gz": gzip.compress(LINES.encode()), "a.jsonl.zst": ZSTD,
    "a[1].parquet": SAVED.to_parquet, "saved": SAVED.save_to_disk,
    "splits": datasets.DatasetDict(train=SAVED).save_to_disk,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_every_kind_of_file_becomes_the_same_documents(name):
    data(name) if callable(data := WRITTEN[name]) else Path(name).write_bytes(data)
    how = [*BYTES, *(["--separator", "tab"] if name == "a.TSV" else [])]
    prepare(name, "-o", "x", *how)
    assert both("x") == sorted(TEXTS) and len(list(Path().glob("x*"))) == 4
    prepare(name, "-o", "y [1]*", *how, "--field", "title", "text")
    assert both("y [1]*") == sorted([f"A\n\n{ENDS}", 'two\nlines, "q"', "007\n\nNA"])
    assert re.search("no (field|column) body, but text, title", refusal(name, *how, "--field", "text", "body"))


WHOLE = [{"q": f"Q{number}", "a": f"A{number}"} for number in range(3)]
NULLS = [{"q": "Q3", "a": None}, {"q": None, "a": "A4"}, {"q": "Q5", "a": None}]
OTHERS = [{"q": 6, "a": "A6"}, {"q": "Q7"}, ["Q8", "A8"], {"q": "Q9", "a": {}}]


@pytest.mark.parametrize("name, data, lost", [
    ("a.jsonl", "\n".join(map(json.dumps, WHOLE + NULLS + OTHERS)).encode(),
     {"null in a": (4, 2), "null in q": (5, 1), "int in q": (7, 1), "no field a": (8, 1), "list for an object": (9, 1),
      "dict in a": (10, 1)}),
    ("a.json", json.dumps([*WHOLE, *OTHERS[1:3]]).encode(), {"no field a": (4, 1), "list for an object": (5, 1)}),
    ("a.parquet", datasets.Dataset.from_list(WHOLE + NULLS).to_parquet, {"null in a": (4, 2), "null in q": (5, 1)}),
    ("a.csv", b"q,a\nQ0,A0\nQ1,A1\nQ2,A2\nQ3, \n,A6", {}),
    ("a.tsv", b"q\ta\nQ0\tA0\nQ1\tA1\nQ2\tA2\nQ3\t \n\tA6", {}),
])  # fmt: skip
def test_half_records_are_left_out_those_with_a_blank_field_kept_and_all_counted(name, data, lost):
    data(name) if callable(data) else Path(name).write_bytes(data)
    said = prepare(name, "-o", "x", *BYTES, "--field", "q", "a")
    summary = json.loads(Path("x_summary.json").read_text())
    wanted = {f"{note} (first: {name}, record {number})": count for note, (number, count) in lost.items()}
    assert summary["left out"] == wanted and all(f"{note} {count}" in said for note, count in wanted.items())
    blank = ["Q3", "A6"] if not lost else []
    assert both("x") == sorted([f"Q{number}\n\nA{number}" for number in range(3)] + blank)
    kept = {f"blank {field} (first: {name}, record {number})": 1 for field, number in [("a", 4), ("q", 5)]}
    assert summary["kept"] == (kept if blank else {}) and summary["blank"] == 0


def test_a_tsv_has_no_quotes_and_another_separator_is_asked_for():
    rows = ["id\ttext", '1\t"To be, or', "2\tplain", '3\t"Help!" he cried', '4\tquestion"']
    Path("a.tsv").write_text("\n".join(rows))
    said = prepare("a.tsv", "-o", "x", *BYTES)
    assert both("x") == sorted(row[2:] for row in rows[1:])
    assert "kept           begins with a quote (first: a.tsv, record 1) 2\n" in said
    Path("b.csv").write_text('id;text\n1;"a;b"\n2;c, d')
    prepare("b.csv", "-o", "y", *BYTES, "--separator", ";")
    assert both("y") == ["a;b", "c, d"]


def test_records_are_cut_at_100000_characters_and_that_is_said():
    rows = [f"{number} " + "word " * (300 if number else 50_000) for number in range(20)]
    Path("a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    said = prepare("a.jsonl", "-o", "x", *BYTES)
    assert "kept           longer than 100000 characters, cut (first: a.jsonl, record 1) 1\n" in said
    assert set(rows[1:]) < set(both("x")) and sum(map(len, both("x"))) == sum(map(len, rows))


def test_a_part_within_a_text_has_no_begin_token():
    texts = ["".join(f"{number} {word}\n" for word in range(200)) for number in "abcd"]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, texts)))
    prepare("a.jsonl", "-o", "x", *BYTES, "--longest", "100", "--val", "0.3")
    parts = json.loads(Path("x_summary.json").read_text())["documents"]
    for split, count in parts.items():  # where a text goes on after a part of the other split, the token stands
        pieces = documents("x", split)
        assert all(sum(piece in text for text in texts) == 1 for piece in pieces) and 4 < len(pieces) < count

    chat_tokenizer("begin.json", begin="<|im_end|>")
    prepare("a.jsonl", "-o", "y", "--tokenizer", "begin.json", "--longest", "100", "--val", "0.3")
    tokens = [open_tokens(f"y_{split}_000000.bin")[:] for split in ("train", "val")]
    assert (np.concatenate(tokens) == 257).sum() == 4
    summary = json.loads(Path("y_summary.json").read_text())
    assert list(summary["tokens"].values()) == list(map(len, tokens))

    Path("b.txt").write_text("".join(f"<|endoftext|>{number}\n" for number in range(100, 300)))
    prepare("b.txt", "-o", "z", *BYTES, "--special-tokens", "--longest", "170", "--val", "0.3")
    assert len(documents("z", "train") + documents("z", "val")) == 200


def test_a_folders_texts_are_read_in_order_and_what_is_skipped_is_counted_by_suffix():
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
    assert ".pdf is a PDF, no text: pdftotext makes text of it.\n" in said


@pytest.mark.parametrize("name, data, encoding", [
    ("a.jsonl", '{"text": "naïve"}\n', "utf-16"), ("a.csv", "text\nnaïve\n", "cp1252"),
    ("a.json", '["naïve"]', "cp437"),
    *(("a.txt", "naïve", encoding) for encoding in ("utf-16", "utf-16-le", "cp1252")),
])  # fmt: skip
def test_what_is_not_utf_8_is_refused_by_its_byte_and_right_in_the_encoding_named(name, data, encoding):
    Path(name).write_bytes(data.encode(encoding))
    Path("b.txt").write_bytes("second".encode(encoding))
    at = {"utf-16": "0, it begins as utf-16", "utf-16-le": "1"}.get(encoding, data.index("ï"))
    assert refusal(name).startswith(f"{name}: not UTF-8 text (at byte {at}): name the encoding of all files")
    prepare(name, "b.txt", "-o", "x", *BYTES, "--encoding", encoding)
    assert [text.strip() for text in both("x")] == ["naïve", "second"]


def test_the_byte_is_right_wherever_it_is(monkeypatch):
    monkeypatch.setattr("dev.data.common.BLOCK", 7)
    for size in range(12, 20):
        Path("a.txt").write_bytes("é".encode() * size + b"\xe9x")
        assert f"a.txt: not UTF-8 text (at byte {2 * size})" in refusal("a.txt")
    for name in ("cp99999", "rot13"):
        assert f"--encoding {name}: Python knows no such" in refusal("a.txt", "--encoding", name)


def test_all_files_that_are_not_utf_8_are_named_and_a_flag_leaves_them_out():
    write_texts(9)
    for number in range(2, 7):
        Path(f"in/{number:03}.txt").write_bytes(b"na\xefve" * number)
    first = "in/002.txt: not UTF-8 text (at byte 2)"
    said = refusal("in")
    assert said.startswith(f"{first}, in/003.txt: ") and " and 2 more files: name" in said and "--skip-undecod" in said
    assert refusal("in/002.txt", "in/000.txt").startswith(f"{first}: name")
    said = prepare("in", "-o", "x", *BYTES, "--skip-undecodable")
    assert f"left out       undecodable (first: {first}) 5\n" in said and len(both("x")) == 4


@pytest.mark.parametrize("flags, code, words", [
    ("--suffix txt", 2, "'txt' must be one suffix with its dot"), ("--suffix a.py b.py", 2, "'a.py' must be"),
    ("--suffix .gz", 2, "must be one suffix"), ("--suffix .PDF", 2, "a PDF, no text: pdftotext"),
    ("--suffix .py .txt", 0, "--suffix .py changes nothing"),
    ("--field a", 0, "--field changes nothing"), ("--split test", 0, "--split changes nothing"),
    ("--separator ;", 0, "--separator changes nothing"), ("--separator ;;", 2, "must be one character"),
])  # fmt: skip
def test_a_flag_that_does_nothing_is_refused_or_said(monkeypatch, capsys, flags, code, words):
    write_texts(9)
    said = []
    monkeypatch.setattr(script, "say", said.append)
    try:
        prepare("in", "-o", "x", *BYTES, *flags.split())
        assert len(said) == 1
    except SystemExit as end:
        assert end.code == code and not list(Path().glob("x*"))
        said.append(capsys.readouterr().err)
    assert words in said[0]


def test_the_hub_is_asked_only_for_what_is_nowhere_here_and_after_a_line(monkeypatch, capsys):
    asked = []
    hub = lambda self, name, timeout: asked.append((name, capsys.readouterr().err))  # noqa: E731
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", hub)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    Path("a.jsonl").write_text(LINES)
    json_lines = partial(datasets.load_dataset, "json", data_files={"valid": "a.jsonl"})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split: json_lines(split=split))
    assert refusal("in/missing").startswith("in/missing: no such file") and not asked
    assert "Unknown split" in (said := refusal("data/missing", "--split", "test")) and "valid" in said
    said = "data/missing: no such file or directory; asking the Hugging Face hub for a data set of this name\n"
    assert asked == [("data/missing", said)]
    datasets.DatasetDict(train=SAVED, valid=SAVED).save_to_disk("splits")
    assert refusal("splits", "--split", "test").endswith("has no such split, but train, valid")
    SAVED.save_to_disk("saved")
    assert "--split test: saved has no such split" in refusal("saved", "--split", "test")


def test_the_last_line_trains_the_model_that_is_beside_the_tokenizer():
    write_texts(60)
    os.mkdir("q")
    chat_tokenizer("q/q_tokenizer.json")
    Path("q/q.bin").write_bytes(Qwen3.Config.MAGIC.to_bytes(4, "little"))
    assert "\n    python train_gpt2_fp32.py -i x -e d6 " in prepare("in", "-o", "x", *BYTES)
    said = prepare("in", "-o", "y", "--tokenizer", "q/q_tokenizer.json")
    assert "\n    python train_qwen3.py -i y -e q/q.bin -b 4 -t " in said


def test_what_this_program_did_not_make_is_neither_replaced_nor_removed(monkeypatch):
    write_texts(9)
    os.mkdir("x_work")
    theirs = ("x_summary.json", "x_val_000000.bin", "x_train_000007.bin", "x_tokenizer.json", "x_work/notes.txt")
    for name in theirs:
        Path(name).write_text("mine")
        said = conftest.refusal(prepare, "in", "-o", "x", *BYTES)
        assert said == f"{name} belongs to another dataset: choose another -o, or remove it"
        assert Path(name).read_text() == "mine" and len(list(Path().glob("x*"))) == 1 + (name[:6] != "x_work")
        os.remove(name)
    make = script.make
    monkeypatch.setattr(script, "make", lambda *args: Path("x_val_000000.bin").write_text("mine") and make(*args))
    assert "x_val_000000.bin belongs" in conftest.refusal(prepare, "in", "-o", "x", *BYTES)  # it came during the work
    os.remove("x_val_000000.bin")
    prepare("in", "-o", "x", *BYTES)
    assert len(both("x")) == 9 and not Path("x_work").exists()


@given(st.lists(st.text(st.sampled_from("aé \n\r"), max_size=9)), st.integers(1, 9))
def test_lines_and_cuts_lose_nothing_whatever_the_blocks(blocks, longest):
    parts = list(reading.cut(blocks, longest))
    assert "".join(parts) == "".join(lines_of("x", blocks)) == "".join(blocks) and max(map(len, parts)) <= longest
    assert parts == list(reading.cut(["".join(blocks)], longest))


REFUSED = {  # name of a file: what is in it, and a part of the line that refuses it
    "a.jsonl": (b'{"text": "x"}\n{', "record 2"), "b.jsonl": (b"[1]", ""), "c.jsonl": (b"[" * 99_999, ""),
    "d.jsonl": (b"", "too little text"), "e.jsonl": (b"\n\n\n" + b"x" * 100_000, ", line 4: longer than 99,999"),
    "f.jsonl": (b'{"text": null}\n' * 3, "record 1: null in text, and no record has text: name the fields"),
    "g.jsonl": (b'{"text": ["x"]}', "record 1: list in text"), "h.jsonl": (b'{"text": 3}', "record 1: int in text"),
    "i.jsonl": (b'{"a": "x"}\n{"b": "y"}', "no field text, but a, b: name"),
    "j.jsonl": (b'{"%s": "x"}' % (b"x" * 9999), "no field text, but xxx"), "p.jsonl.zst": (ZSTD[:20], ""),
    "a.json": (b"[1", ""), "b.json": (b"[" + b" " * 99_999, ": longer"), "a.csv": (b"text\n1,2\n", "as many fields"),
    "b.csv": (b'text\n"open', ""), "c.csv": (b'text\nx\n"' + b"w\n" * 60_000, "record 2: .* larger"),
    "d.csv": (b"text,text\na,b", "names text twice"),
    "e.csv": (b"id;text\n1;a", "but id;text: name one with --field; if ';' separates"),
    "a.parquet": (b"PAR1 no", ""), "a.arrow": (b"no", ""), "a.txt": (b"zero \0", "byte 5"),
    "a.txt.gz": (b"no gzip", ""), "b.txt.gz": (gzip.compress(b"broken off" * 999)[:40], ""),
    "pipe.txt": (None, "regular"), "link.txt": (None, "no"), "gone": (None, "no such"), "empty": (None, "no"),
    "in/000.txt": (None, "too little text"), "owner/name": (None, "cannot be loaded"),
    "a.f90": (b" ", ": what is in it. --suffix .f90 reads such files"),
    "a.pdf": (b"\xff", ": a PDF, no text: pdftotext"), "pdfs": (None, ": no text there; skipped: .pdf 1; .pdf is a"),
    "b.DOCX": (b"", "pandoc"), "c.zip": (b"", "unpack it"), "d.tar.gz": (b"", "unpack it"), "f.jpg": (b"", "tesseract"),
    "e.xlsx": (b"", "libreoffice --convert-to csv"), "g.doc": (b"", "libreoffice --convert-to txt"),
}  # fmt: skip


def test_bad_input_is_said_in_one_line_that_names_the_file(monkeypatch):
    monkeypatch.setattr("dev.data.common.LONGEST", 99_999)
    write_texts(9)
    for name, (data, _) in REFUSED.items():
        if data is not None:
            Path(name).write_bytes(data)
    os.mkfifo("pipe.txt")
    os.symlink("nowhere", "link.txt")
    os.mkdir("empty")
    os.mkdir("pdfs")
    os.link("a.pdf", "pdfs/a.pdf")
    for name, (_, words) in REFUSED.items():
        assert re.match(f"{re.escape(name)}\\b.*{words}", said := refusal(name)) and len(said) <= 490


def test_a_tokenizer_that_cannot_spell_the_texts_or_be_learned_is_refused():
    write_texts(9)
    chat_tokenizer("ascii.json", 128)
    assert refusal("in", "--tokenizer", "ascii.json").startswith("--tokenizer: it cannot spell '")
    with pytest.raises(subprocess.CalledProcessError) as refused:  # the error comes from another process
        forks("in", "--tokenizer", "ascii.json", "--workers", "2", "-o", "no")
    assert refused.value.returncode == 1 and "--tokenizer: it cannot spell '" in refused.value.stderr
    assert "lower it" in conftest.refusal(prepare, "in", "-o", "x", "--train-tokenizer", "9999")


def test_of_equal_texts_one_stays_and_added_texts_move_none_across():
    write_texts(200, words=60)
    os.mkdir("more")
    write_texts(250, words=60, folder="more")
    prepare("in", "-o", "x", *BYTES, "--val", "0.2")
    assert "duplicates     200\n" in prepare("in", "more", "-o", "y", *BYTES, "--val", "0.2")
    assert len(both("y")) == len(set(both("y"))) == 250
    assert all(set(documents("x", split)) <= set(documents("y", split)) for split in ("train", "val"))
    assert 0.1 < len(documents("y", "val")) / 250 < 0.3


@pytest.mark.parametrize("files, words, least", [(60, 40, None), (300, 60, 4096), (1, 9000, 4096)])
def test_a_small_set_leaves_4096_tokens_or_a_tenth_for_validation(files, words, least):
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


def test_a_run_that_is_stopped_goes_on_to_the_same_files():
    write_texts(300, words=400)
    args = ["in", "--train-tokenizer", "300", "--shard-tokens", "4000", "-o"]
    prepare(*args, "whole/x")
    for until, stop in ("generator", signal.SIGKILL), ("x_tokenizer.json", signal.SIGINT):
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


def chat_tokenizer(path, alphabet=256, begin=None):
    library = byte_level("<|endoftext|>", tokenizers.AddedToken("<|im_end|>", rstrip=True), alphabet=alphabet)
    if begin:
        begins = {"single": f"{begin} $A", "special_tokens": [(begin, library.token_to_id(begin))]}
        library.post_processor = tokenizers.processors.TemplateProcessing(**begins)
    library.save(path)


@pytest.mark.parametrize("tokenizer, name, token", [("chat.json", "<|im_end|>", 257), ("bytes", "<|endoftext|>", 256)])
def test_names_of_special_tokens_are_text_unless_the_flag_says_otherwise(tokenizer, name, token):
    chat_tokenizer("chat.json")
    [Path(f"in/{number}.txt").write_text(f"{number} said{name} \nyes{name}") for number in range(30)]
    args = ["in", "--tokenizer", tokenizer, "-o"]
    assert f"special tokens {name} 60\n" in (said := prepare(*args, "text")) and "--special-tokens encodes" in said
    assert "--special-tokens encodes" not in prepare(*args, "special", "--special-tokens")
    plain, special = (open_tokens(f"{prefix}_train_000000.bin")[:].tolist() for prefix in ("text", "special"))
    texts = plain.count(EOT)  # one stands before each
    assert [tokens.count(token) - texts * (token == EOT) for tokens in (plain, special)] == [0, 2 * texts]


def test_plain_text_becomes_bytes_without_the_libraries_and_else_the_missing_one_is_named(monkeypatch):
    write_texts(60)
    prepare("in", *BYTES, "-o", "with/x")
    Path("a.jsonl").write_text(LINES)
    chat_tokenizer("chat.json")
    for package in ("datasets", "tokenizers", "pyarrow", "tqdm"):
        monkeypatch.setitem(sys.modules, package, None)
    prepare("in", *BYTES, "-o", "without/x")
    assert contents("with") == contents("without")
    for name in ("a.jsonl", "owner/name"):
        assert refusal(name).endswith("install it with: pip install datasets")
    assert refusal("in", "--tokenizer", "chat.json").endswith("pip install tokenizers")

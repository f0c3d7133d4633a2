"""dev/data/text.py: what a dataset made of files of text holds, and that nothing half-made is taken for one."""

import gzip
import json
import multiprocessing
import os
import pickle
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import conftest
import device
import generate
from dev.data import documents as reader
from dev.data import recommend
from dev.data import text as script
from dev.data.common import Unsuitable
from dev.hf import export_hf
from llmc.data.dataloader import find_token_files, open_tokens
from llmc.data.tokenizer import HuggingFaceTokenizer, Tokenizer, byte_letters, load_model_tokenizer
from llmc.run.arguments import parse_arguments
from train_gpt2_fp32 import GPT2, GPT2Config

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "dev" / "data"
EOT = 256
WORDS = "the theatre of the absurd is bathing in thé weather — naïve café 你好 🙂 1990 it's\n\n\t end".split(" ")
WORDS += ["".join(random.Random(number).choices("aeiounrst", k=6)) for number in range(300)]


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def prepare(monkeypatch, capsys):
    """Runs text.py in this process, without measuring the machine; returns what it prints."""
    monkeypatch.setattr(script, "recommend", lambda *args: [])

    def run(*args):
        script.load_tokenizer.cache_clear()  # another test's, at the same place in another folder
        monkeypatch.setattr(sys, "argv", ["text.py", *map(str, args), "--workers", "1"])
        script.main()
        return capsys.readouterr().out

    return run


def refusal(prepare, *args):
    """What text.py says where it refuses; it leaves nothing."""
    before = {path.name for path in Path().iterdir()}
    message = conftest.refusal(prepare, *args)
    assert {path.name for path in Path().iterdir()} == before
    return message


def documents(prefix, split):
    """The documents of a byte-level dataset's split."""
    tokens = np.concatenate([open_tokens(path) for path in find_token_files(prefix, split)])
    assert tokens[0] == EOT
    return [bytes(text.astype(np.uint8)[1:]).decode() for text in np.split(tokens, np.flatnonzero(tokens == EOT)[1:])]


def contents(folder="."):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def write_texts(folder, numbers, words=40):
    """A file for each number, of its own random words."""
    Path(folder).mkdir(exist_ok=True)
    for number in numbers:
        text = " ".join(random.Random(number).choices(WORDS, k=words))
        Path(folder, f"{number:03}.txt").write_text(f"{number} {text}", encoding="utf-8")


def read(path, longest=1000):
    """The documents of a file or folder, and what was skipped."""
    texts, notes = read_with_notes(path, longest)
    return texts, notes.skipped


def read_with_notes(path, longest=10**5, encoding=None):
    """The documents of a file or folder, and what is to be said of its files."""
    notes = reader.Notes()
    units = reader.units_of(reader.find_files([path], notes), "text", encoding)
    return [text for parts in units for text in reader.read_documents(parts, "text", longest, notes, encoding)], notes


# What is read


def test_a_folder_of_every_kind_becomes_its_documents(prepare, monkeypatch):
    monkeypatch.setattr(script, "LEAST_TOKENS", 2)
    monkeypatch.setattr(script, "ENOUGH", 2)
    os.makedirs("in/sub/.git")
    german = GERMAN * 9
    files = {
        "a.txt": b"plain\r\ntext", "b.md": b"# head\n", "c.rst": "naïve 你好\n".encode(),
        "d.TXT.gz": gzip.compress(b"packed"), "e.txt": "\ufeffmarked".encode(), "f.txt": "wide é".encode("utf-16"),
        "g.txt": german.encode("cp1252"), "sub/h.htm.gz": gzip.compress(b"<p>first<p>second &amp; <b>third</b>"),
        "i.jsonl": b'{"text": "one\\ud83d\\r\\nline", "id": 1}\n\n{"text": "two"}', "sub/j.ndjson.gz":
        gzip.compress(b'{"text": "three"}\n'), "k.txt": b"", "l.md": b" \n\t\n", "m.txt": b"\x00\x01\x02" * 99,
        "n.txt": b"a gzip\x08\x03\x04\x05\x06 no", "o.pdf": b"%PDF", "p.txt.gz": b"no gzip", ".q.txt": b"hidden",
        "sub/.git/r.txt": b"hidden", "s.txt.gz": gzip.compress(b"broken off" * 999)[:40],
    }  # fmt: skip
    for name, data in files.items():
        Path("in", name).write_bytes(data)
    os.symlink("nowhere", "in/t.txt")
    Path("named").write_text("a file that is named")
    said = prepare("in", "named", "-o", "x", "--tokenizer", "bytes", "--val", "0.5")
    wanted = [
        "plain\ntext", "# head\n", "naïve 你好\n", "packed", "marked", "wide é", german, "one\ufffd\nline", "two",
        "first\n\nsecond & third", "three", "a file that is named",
    ]  # fmt: skip
    found = {split: documents("x", split) for split in ("train", "val")}
    assert sorted(found["train"] + found["val"]) == sorted(wanted)
    for texts in found.values():
        assert texts == [text for text in wanted if text in texts]  # in order
    skipped = "2 binary (in/m.txt, in/n.txt), 2 damaged (in/p.txt.gz, in/s.txt.gz), 2 empty (in/k.txt, in/l.md), "
    assert f"{skipped}1 lines empty (in/i.jsonl), 1 not readable (in/t.txt), 1 of another kind (in/o.pdf)\n" in said
    assert f"documents   12 (train {len(found['train'])}, val {len(found['val'])}); duplicates removed: 0" in said


def test_links_to_folders_are_followed_once_and_what_cannot_be_opened_is_counted(monkeypatch):
    scan = os.scandir

    def refusing(folder):
        if str(folder).endswith("locked"):
            raise PermissionError(13, "Permission denied", folder)
        return scan(folder)

    for number, folder in enumerate(("in/sub/deep", "in/locked", "elsewhere")):
        os.makedirs(folder)
        Path(folder, "a.txt").write_text(f"text {number}")
    os.symlink("../..", "in/sub/loop")
    os.symlink("../elsewhere", "in/linked")
    os.symlink("self.txt", "in/self.txt")
    os.mkfifo("in/pipe.txt")
    monkeypatch.setattr(os, "scandir", refusing)
    assert read("in") == (["text 2", "text 0"], {"not readable": 3})


GERMAN = "Größere Bäche fließen über schöne Wiesen, und süße Äpfel fallen auf grüne Hügel. "
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"


@pytest.mark.parametrize("text", [GERMAN * 9, JAPANESE * 9])
def test_a_text_of_which_a_few_bytes_are_damaged_is_read_without_them(text):
    data = text.encode()
    Path("a.txt").write_bytes(data + b"\xff" + data + "ß".encode()[:1])
    assert read("a.txt", 10**5) == ([text + "\ufffd" + text + "\ufffd"], {})
    Path("a.txt").write_bytes(b"plain " * 99 + "é".encode("latin-1"))
    assert read("a.txt") == (["plain " * 99 + "é"], {})


@pytest.mark.parametrize("encoding", ["shift-jis", "euc-jp", "utf-8"])
def test_an_encoding_is_detected_wherever_the_blocks_end(monkeypatch, encoding):
    monkeypatch.setattr(reader, "SAMPLE", 400)
    for block in range(500, 504):
        monkeypatch.setattr(reader, "BLOCK", block)
        Path("a.txt").write_bytes(("plain\n" * 200 + JAPANESE * 40).encode(encoding))
        assert read("a.txt", 10**5) == (["plain\n" * 200 + JAPANESE * 40], {})


# A line is a text, after the encodings in which such texts are found.
SENTENCES = [line.split(": ", 1) for line in (ROOT / "tests/data/encodings.txt").read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    "encoding, text", [(encoding, text) for names, text in SENTENCES for encoding in names.split()]
)
def test_texts_in_the_encodings_of_twenty_languages_are_guessed_right(encoding, text):
    for size in (1, 40):
        Path("a.txt").write_bytes((f"{text}\n" * size).encode(encoding, "ignore"))  # quotes that some of them lack
        texts, notes = read_with_notes("a.txt")
        assert texts == [Path("a.txt").read_bytes().decode(encoding)]
        assert list(notes.guessed) == ["a.txt"]


def test_an_encoding_that_is_named_is_that_of_all_that_is_not_utf_8(prepare):
    turkish, japanese = "Dün akşam tımarın ıslık çaldığını gördüm.", "昨日の夕方、橋の下で"
    for encoding, text in (("cp1254", turkish), ("iso2022_jp", japanese), ("utf-16-le", "wide"), ("cp1252", "plain")):
        Path("a.txt").write_bytes(text.encode(encoding))
        texts, notes = read_with_notes("a.txt", encoding=encoding)
        assert texts == [text] and not notes.guessed and not notes.skipped
    for written in ("utf-8", "utf-8-sig", "utf-16"):
        Path("a.txt").write_bytes(turkish.encode(written))
        assert read_with_notes("a.txt", encoding="cp1254")[0] == [turkish]
    Path("a.txt").write_bytes(turkish.encode("cp1254"))
    texts, notes = read_with_notes("a.txt", encoding="shift_jis")
    assert texts == [] and notes.skipped == {"not shift_jis": 1} and notes.examples == {"not shift_jis": ["a.txt"]}
    os.mkdir("in")
    for number in range(9):
        Path(f"in/{number}.txt").write_bytes(f"{number} {turkish}".encode("cp1254"))
    args = ["in", "-o", "x", "--tokenizer", "bytes", "--val", "0.5", "--longest", "100000"]
    assert "guessed" not in prepare(*args, "--encoding", "windows-1254")
    assert all(turkish in text for split in ("train", "val") for text in documents("x", split))
    assert "was made with --encoding cp1254, now None" in refusal(prepare, *args)
    for name in ("cp99999", "rot13", ""):
        with pytest.raises(SystemExit, match="2"):
            prepare(*args, "--encoding", name)


def test_html_is_read_in_the_encoding_that_it_declares():
    for declaration in ('<meta charset="windows-1254">', '<meta content="text/html; charset=iso-8859-9">'):
        Path("a.html").write_bytes(f"<html><head>{declaration}</head><p>Iğdır ışıl ışıl</p>".encode("cp1254"))
        texts, notes = read_with_notes("a.html")
        assert "".join(texts).strip() == "Iğdır ışıl ışıl" and not notes.guessed
    for wrong in ("utf-8", "klingon", "utf-16", "rot13"):  # which it is not, and which are none
        Path("a.html").write_bytes(f'<meta charset="{wrong}"><p>{GERMAN}</p>'.encode("cp1252"))
        texts, notes = read_with_notes("a.html")
        assert "".join(texts).strip() == GERMAN.strip() and notes.guessed


def test_all_parts_of_a_file_are_of_one_encoding(monkeypatch):
    monkeypatch.setattr(reader, "UNIT", 1000)
    text = "".join(f"{text}\n" for names, text in SENTENCES if "cp1250" in names) * 9
    Path("a.txt").write_bytes(("plain\n" * 300 + text).encode("cp1250"))
    texts, notes = read_with_notes("a.txt")
    assert len(texts) > 5 and "".join(texts) == "plain\n" * 300 + text
    assert [guess[0] for guess in notes.guessed.values()] == ["cp1250"]


def test_records_may_begin_with_some_that_have_no_text():
    lines = ['{"text": null}', "{", '{"text": "one"}', '{"id": 1}', '{"text": "two"}']
    Path("a.jsonl").write_text("\n".join(lines))
    assert read("a.jsonl") == (["one", "two"], {"lines without a text in text": 2, "lines that are no JSON": 1})


def test_what_has_no_telling_suffix_in_a_folder_is_what_its_bytes_are():
    os.mkdir("in")
    texts = {"README": "plain", "chapter.1": "numbered", "letter to Mr. Smith": "named", "é": "wide".encode("utf-16")}
    texts |= {"packed.gz": gzip.compress(b"packed"), "page": " <!DOCTYPE HTML><p>a <b>page</b></p>"}
    for name, text in texts.items():
        Path("in", name).write_bytes(text if isinstance(text, bytes) else text.encode())
    Path("in/program").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(99))
    Path("in/broken.gz").write_bytes(b"\x1f\x8b broken")
    Path("in/nothing").touch()
    os.mkfifo("in/pipe")
    os.symlink("nowhere", "in/link")
    for other in ("a.pdf", "b.csv", "c.py"):
        Path("in", other).write_text("of another kind")
    found, notes = read_with_notes("in")
    assert sorted(found) == sorted(["plain", "numbered", "named", "wide", "packed", "a page\n\n"])
    assert notes.skipped == {"binary": 1, "damaged": 1, "empty": 1, "not readable": 2, "of another kind": 3}
    assert notes.examples["binary"] == ["in/program"] and notes.examples["damaged"] == ["in/broken.gz"]
    assert notes.examples["of another kind"] == ["in/a.pdf", "in/b.csv", "in/c.py"]
    os.mkdir("other")
    Path("other/a.tex").write_text("plain")
    assert read("other/a.tex")[0] == ["plain"]  # as the refusal of a folder of such advises


def test_html_loses_tags_and_what_no_browser_shows():
    page = """<!DOCTYPE html><html><head><title>T</title><style>p {}</style><script>if (a < b) "</p>"</script></head>
    <body><nav>Home</nav><h1>A  head</h1><p>some <em>text</em>,
    <a href="x">a&nbsp;link</a>.<br>line<pre>  kept
      as it is</pre><ul><li>one<li>two</ul><table><tr><td>1</td><td>2</td></tr></table>&lt;tag&gt; &eacute;</body>"""
    wanted = (
        "A head\n\nsome text, a\xa0link.\nline\n\n  kept\n      as it is\n\none\ntwo\n\n1 2\n\n<tag> é"
    )
    for size in (1, 7, 10**6):
        pieces = (page[i : i + size] for i in range(0, len(page), size))
        text = "".join(reader.without_tags(pieces))
        assert "\n".join(line.rstrip() for line in text.split("\n")) == wanted


@given(st.text(st.sampled_from("ab \n"), max_size=300), st.integers(2, 40), st.integers(1, 50))
def test_cutting_loses_nothing_whatever_the_blocks(text, longest, block):
    pieces = list(reader.cut([text], longest))
    assert "".join(pieces) == text and all(0 < len(piece) <= longest for piece in pieces)
    assert pieces == list(reader.cut((text[i : i + block] for i in range(0, len(text), block)), longest))
    for piece, after in zip(pieces, pieces[1:], strict=False):
        if "\n\n" in piece[longest // 2 + 1 :]:
            assert piece.endswith("\n\n") or (piece + after[:1]).endswith("\n\n")


@given(st.lists(st.text(st.sampled_from("aé "), max_size=30), min_size=1), st.integers(1, 64), st.booleans())
def test_a_file_in_parts_has_the_lines_of_the_whole(tmp_path, lines, unit, ends):
    data = "\n".join(lines) + "\n" * ends
    Path("a.txt").write_text(data, encoding="utf-8")
    Path("b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    before, reader.UNIT = reader.UNIT, unit
    try:
        for name in ("a.txt", "b.jsonl"):
            texts, _ = read(name)
            found = "\n".join(texts).split("\n") if name == "a.txt" else texts
            assert [line for line in found if line.strip()] == [line for line in lines if line.strip()]
    finally:
        reader.UNIT = before


def test_parquet_is_read_by_row_groups(prepare, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [f"row {number}\r\n" for number in range(50)]
    columns = {"body": [*rows, None, " "], "id": range(52)}
    parquet.write_table(arrow.table(columns), "a.parquet", row_group_size=7)
    parquet.write_table(arrow.table({"text": arrow.array(["x", "y", "x"]).dictionary_encode()}), "few.parquet")
    assert read("few.parquet")[0] == ["x", "y", "x"]
    Path("b.parquet").write_bytes(Path("a.parquet").read_bytes())
    monkeypatch.setattr(reader, "UNIT", 200)
    said = prepare("a.parquet", "-o", "x", "--tokenizer", "bytes", "--val", "0.4", "--field", "body")
    assert sorted(documents("x", "train") + documents("x", "val")) == sorted(row.replace("\r", "") for row in rows)
    assert "2 rows empty" in said and len(reader.units_of(reader.find_files(["a.parquet"], reader.Notes()), "body")) > 2
    assert "duplicates removed: 50" in prepare(
        "a.parquet", "b.parquet", "-o", "y", "--tokenizer", "bytes", "--val", "0.4", "--field", "body"
    )
    message = refusal(prepare, "a.parquet", "-o", "z", "--tokenizer", "bytes")
    assert "there is no column of text called text; it has texts in body: name one with --field" in message
    Path("c.parquet").write_bytes(b"PAR1 no")
    assert "c.parquet: no table" in refusal(prepare, "c.parquet", "-o", "z", "--tokenizer", "bytes")


def test_duplicates_are_removed_wherever_they_are(prepare, monkeypatch):
    write_texts("in", range(40))
    write_texts("copies", range(20, 60))
    monkeypatch.setattr(reader, "FILES_IN_UNIT", 7)
    for name, compared in (("x", script.COMPARED), ("y", 5)):  # one range of hashes, and sixteen
        monkeypatch.setattr(script, "COMPARED", compared)
        assert "duplicates removed: 20\n" in prepare("in", "copies", "-o", name, "--tokenizer", "bytes", "--val", "0.3")
        numbers = [[int(text.split()[0]) for text in documents(name, split)] for split in ("train", "val")]
        assert sorted(sum(numbers, [])) == list(range(60)) and all(each == sorted(each) for each in numbers)
    assert contents() and open_tokens("x_train_000000.bin").tolist() == open_tokens("y_train_000000.bin").tolist()


def test_texts_that_are_added_move_none_from_one_split_to_the_other(prepare):
    write_texts("in", range(0, 200, 2), words=5)
    prepare("in", "-o", "x", "--tokenizer", "bytes", "--val", "0.2")
    write_texts("in", range(1, 200, 2), words=5)
    prepare("in", "-o", "y", "--tokenizer", "bytes", "--val", "0.2")
    for split in ("train", "val"):
        assert set(documents("x", split)) <= set(documents("y", split))
    share = len(documents("y", "val")) / 200
    assert 0.1 < share < 0.3  # 0.2, with a deviation of 0.03
    prepare("in", "-o", "z", "--tokenizer", "bytes", "--val", "0.5")
    assert set(documents("y", "val")) < set(documents("z", "val"))


def a_book(characters=300_000):
    words = iter(random.Random(0).choices(WORDS, k=characters // 4))
    return "\n\n".join(" ".join(line) for line in zip(*[words] * 12, strict=False))[:characters]


@pytest.mark.parametrize("files", [1, 60])
def test_a_book_or_a_few_small_files_are_split_by_default_and_that_is_said(prepare, files):
    os.mkdir("in")
    book = a_book()
    for number in range(files):
        Path(f"in/{number}").write_text(book if files == 1 else f"{number} {book[number * 500 :][:400]}")
    said = prepare("in", "-o", "x", "--tokenizer", "bytes")
    by = re.search(r"^split       by (--val .*), since --val 0.01 --longest 100000 leaves too little", said, re.M)[1]
    sizes = {split: len("".join(documents("x", split)).encode()) for split in ("train", "val")}
    assert sum(sizes.values()) == sum(len(path.read_bytes()) for path in Path("in").iterdir())
    assert 520 <= sizes["val"] < 0.3 * sizes["train"]
    prepare("in", "-o", "y", "--tokenizer", "bytes", *by.split())  # by the same hash, so it can be named
    for split in ("train", "val"):
        assert documents("x", split) == documents("y", split)
    assert said[said.index("documents") :] in prepare("in", "-o", "x", "--tokenizer", "bytes")  # there already


@pytest.mark.parametrize("flag, value", [("--val", "0.02"), ("--longest", "20000")])
def test_of_the_split_what_is_given_is_kept(prepare, flag, value):
    Path("book").write_text(a_book())
    said = prepare("book", "-o", "x", "--tokenizer", "bytes", flag, value)
    assert f"{flag} {value}" in said[said.index("split       by --") :].split(", since")[0]
    longest = max(len(text) for split in ("train", "val") for text in documents("x", split))
    assert longest <= 20_000 and (longest > 10_000) == (flag == "--longest")


# Restarted, and in parallel


def in_two_processes(files_in_unit):
    """The beginning of the command that runs text.py in two processes, without measuring the machine."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dev.data import documents, text; "
    code += f"documents.FILES_IN_UNIT = {files_in_unit}; text.recommend = lambda *args: []; text.run(text.main)"
    return [sys.executable, "-c", code, "--workers", "2"]


def test_a_run_that_is_stopped_anywhere_goes_on_to_the_same_files(prepare, monkeypatch):
    monkeypatch.setattr(reader, "FILES_IN_UNIT", 4)
    write_texts("in", range(15))
    args = ["../in", "--train-tokenizer", "280", "--longest", "1000", "--shard-tokens", "1500"]

    def make(folder):
        os.makedirs(folder, exist_ok=True)
        monkeypatch.chdir(folder)
        try:
            return prepare(*args, "-o", "x")
        finally:
            monkeypatch.chdir("..")

    make("whole")
    whole, replace, stops = contents("whole"), os.replace, 0
    assert sum(name.startswith("x_train") for name in whole) > 1
    while True:
        left = stops

        def stopping(source, target):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            replace(source, target)

        folder = f"part{stops}"
        monkeypatch.setattr(os, "replace", stopping)
        try:
            make(folder)
            break
        except KeyboardInterrupt:
            if not all(whole.get(name) == data for name, data in contents(folder).items()):
                pytest.fail("something other than the finished files")
            if any(Path(folder).glob("x_val*")):  # which come last: all else is there
                missing = whole.keys() - contents(folder).keys()
                assert all(name.startswith("x_val") or name == "x_summary.json" for name in missing)
        finally:
            monkeypatch.setattr(os, "replace", replace)
        make(folder)
        assert contents(folder) == whole and not Path(folder, "x_work").exists()
        stops += 1
    assert stops >= 12
    assert "there already" in make("whole")


def test_a_run_that_is_killed_or_interrupted_goes_on_to_the_same_files(prepare):
    write_texts("in", range(40), words=300)
    args = ["in", "--tokenizer", "bytes", "--val", "0.1", "--shard-tokens", "1999", "-o"]
    prepare(*args, "whole/x")
    os.makedirs("stopped")
    command = [*in_two_processes(3), *args]
    for stopped_at, stop in (("read_100000/000004.npz", signal.SIGKILL), ("x_train_000001.bin", signal.SIGINT)):
        process = subprocess.Popen(
            [*command, "stopped/x"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        while process.poll() is None and not Path("stopped/x_work", stopped_at).exists():
            time.sleep(0.001)
        if stop == signal.SIGKILL:
            process.kill()  # the main process alone: the others follow it
            assert process.wait() == -signal.SIGKILL
        else:
            os.killpg(process.pid, signal.SIGINT)  # all of them, as Ctrl-C does
            said = process.communicate()[1]
            assert said.endswith("interrupted; run the same command again to go on\n") and "Traceback" not in said
            assert process.returncode == 1
        assert not list(Path("stopped").glob("x_*.bin"))
    subprocess.run([*command, "stopped/x"], check=True, capture_output=True)
    assert contents("stopped") == contents("whole")


def test_a_run_that_goes_on_with_other_options_or_texts_is_refused(prepare, monkeypatch):
    write_texts("in", range(20))
    args = ["in", "-o", "x", "--val", "0.3"]
    with monkeypatch.context() as patch:
        patch.setattr(script.Job, "encode", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(*args, "--tokenizer", "bytes")
    before = contents("x_work")
    for more, words in (
        (["--tokenizer", "bytes", "--val", "0.2"], "--val 0.3, now 0.2"),
        (["--train-tokenizer", "300"], "--tokenizer bytes, now None"),
        (["--tokenizer", "bytes", "--longest", "999"], "--longest 100000, now 999"),
    ):  # fmt: skip
        message = refusal(prepare, *args, *more)
        assert "x_work" in message and words in message and "remove it" in message
    write_texts("in", [77])
    assert "PATH 20 files" in refusal(prepare, *args, "--tokenizer", "bytes")
    assert contents("x_work") == before
    os.unlink("in/077.txt")
    prepare(*args, "--tokenizer", "bytes")
    assert "x_* was made with --val 0.3" in refusal(prepare, *args, "--tokenizer", "bytes", "--val", "0.4")
    os.unlink("x_summary.json")
    assert "belongs to another dataset" in refusal(prepare, *args, "--tokenizer", "bytes")


def test_what_is_left_of_another_dataset_is_not_taken_for_a_part_of_this(prepare):
    write_texts("in", range(20))
    args = ["in", "-o", "x", "--val", "0.3", "--tokenizer"]
    os.makedirs("x_work/read_100000")  # of a run that was stopped while it removed its folder
    Path("x_work/read_100000/000000.npz").write_bytes(b"another")
    Path("x_work/x_tokenizer.bin").write_bytes(b"another")
    prepare(*args[:-1], "--train-tokenizer", "300")
    for path in [*Path().glob("x_train*"), *Path().glob("x_val*")]:
        path.unlink()
    assert "x_tokenizer.json belongs to another" in refusal(prepare, *args, "bytes")  # by which prompts were encoded
    prepare(*args, "x_tokenizer.json")
    assert len(contents()) == 5


def test_all_processes_have_ended_with_their_work():
    assert list(script.in_order(2, abs, [(-1,), (2,)])) == [1, 2]
    assert not multiprocessing.active_children()  # for which Python would wait later, and Ctrl-C be a traceback


def test_two_runs_at_the_same_place_do_not_meet(prepare):
    write_texts("in", range(20))
    with script.locked(Path("x_work")):
        assert "another run" in refusal(prepare, "in", "-o", "x", "--tokenizer", "bytes")


# Bad input


def test_bad_input_is_said_in_one_line(prepare):
    os.mkdir("binary")
    Path("binary/a.txt").write_bytes(bytes(range(256)) * 9)
    Path("binary/b.md").write_bytes(b"")
    Path("one.txt").write_text("\n".join(map(str, range(9999))))
    Path("a.jsonl").write_text('{"body": "x", "n": 1}\n')
    write_texts("in", range(20))
    Path("tiny.txt").write_text("hello")
    os.makedirs("y_work/lock")
    as_given = ["--val", "0.01", "--longest", "100000"]
    for args, words in [
        (["missing"], "missing: no such file"),
        (["binary"], "binary: no text there (skipped: 1 binary (binary/a.txt), 1 empty (binary/b.md))"),
        (["a.jsonl"], "its first line has no text in text; it has texts in body: name one with --field"),
        (["one.txt", *as_given], "none of 1 documents falls to"),
        (["tiny.txt"], "none of 1 documents falls to val by --val 0.01; add text"),
        (["in", "-o", "y"], "y_work: cannot be written to"),
        (["in", "--tokenizer", "gone.json"], "gone.json: no such file"),
        (["in", "-o", "x*"], "-o x*"),
    ]:
        options = ["-o", "x", "--tokenizer", "bytes"] if "--tokenizer" not in args else ["-o", "x"]
        message = refusal(prepare, *options, *args)
        assert words in message and ("finely" in message) == (args[0] == "one.txt")
        if args[0] == "one.txt":  # the remedy is one
            prepare("one.txt", "-o", "fine", "--tokenizer", "bytes", *message.split("finely: ")[1].split())


def test_a_vocabulary_or_a_text_that_is_too_small_is_said_and_can_be_mended(prepare):
    write_texts("in", range(20))
    message = refusal(prepare, "in", "-o", "x", "--train-tokenizer", "9999", "--val", "0.3")
    possible = int(message.split(" for ")[1].split()[0])
    assert "--train-tokenizer 9999" in message and 300 < possible < 9999
    prepare("in", "-o", "x", "--train-tokenizer", possible, "--val", "0.3")
    assert Tokenizer.load("x_tokenizer.bin").vocab_size == possible


# Tokenizers


AWKWARD = [
    "", " ", "  two  spaces ", "\n\n\n", "tab\there", "it's WE'LL don’t", "naïve café", "你好，世界", "🙂🙃👩‍👩‍👧",
    "e\u0301 é", "٣١٤ 3.14159", "a\u200bb", "\u00a0x", "\x00\x7f", "<|endoftext|>", "a<|endoftext|>b", "<|endof",
    "ﬁ ligature", "\r\nold", "\ud83d half", "ÿ" * 50, "the theatre " * 20, " " * 300 + "end",
]  # fmt: skip


@pytest.fixture
def trained(prepare):
    """A dataset with a vocabulary of its own, and the checkpoint of a model that was trained on it for a step."""
    write_texts("in", range(200), words=60)
    prepare("in", "-o", "data/mine", "--train-tokenizer", "400", "--val", "0.1")
    flags = "-i data/mine -e layers=1,heads=1,channels=16 -b 1 -t 64 -x 1 -g 8 --device cpu --checkpoint-dir run"
    done = subprocess.run(
        [sys.executable, ROOT / "train_gpt2_fp32.py", *flags.split()], capture_output=True, text=True, check=True
    )
    assert "data/mine_tokenizer.bin" in done.stdout and "generating:\n---\n" in done.stdout
    return Path("run/step_00000001")


def test_prompts_are_encoded_as_the_tokenizers_library_does_from_i_alone(trained, capsys):
    library = tokenizers.Tokenizer.from_file("data/mine_tokenizer.json")
    ours = load_model_tokenizer(trained / "model.bin", 400, trained={"data": "data/mine"}, encodes=True)
    for prompt in AWKWARD:
        clean = prompt.replace("\ud83d", "\ufffd")
        assert ours.encode(prompt) == library.encode(clean, add_special_tokens=False).ids
    generate.main(["-e", str(trained), "--prompt", "naïve theatre 🙂", "-g", "3", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("naïve theatre 🙂")
    export_hf.main([str(trained), "-o", "out"])
    exported = tokenizers.Tokenizer.from_file("out/tokenizer.json")
    assert exported.to_str() == library.to_str()
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"] == ours.eot
    assert json.loads(Path("out/tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


def test_the_data_is_encoded_as_the_tokenizers_library_does_and_the_bin_decodes_it(trained):
    library = tokenizers.Tokenizer.from_file("data/mine_tokenizer.json")
    binary = Tokenizer.load("data/mine_tokenizer.bin")
    tokens = open_tokens("data/mine_train_000000.bin")
    texts = b"".join(map(binary.decode, tokens)).decode().split("<|endoftext|>")[1:]
    assert tokens.tolist() == [token for text in texts for token in (binary.eot, *library.encode(text).ids)]
    assert binary.tokens == Tokenizer.load("data/mine_tokenizer.json").tokens


@pytest.mark.parametrize("suffix", ["json", "bin"])
def test_a_tokenizer_that_is_given_goes_along(prepare, trained, suffix):
    os.mkdir("other")
    for kind in ("json", "bin"):
        os.rename(f"data/mine_tokenizer.{kind}", f"other/tokenizer.{kind}")
    if suffix == "json":  # whose end of text only a neighbour names
        content = Path("other/tokenizer.json").read_text().replace("<|endoftext|>", "<|stop|>")
        Path("other/tokenizer.json").write_text(content)
        Path("other/tokenizer_config.json").write_text('{"eos_token": "<|stop|>"}')
    given = Tokenizer.load(f"other/tokenizer.{suffix}")
    prepare("in", "-o", "data/new", "--tokenizer", f"other/tokenizer.{suffix}", "--val", "0.1")
    assert Tokenizer.load("data/new_tokenizer.bin").tokens == given.tokens
    assert Path("data/new_tokenizer.json").exists() == (suffix == "json")
    tokens = open_tokens("data/new_train_000000.bin").tolist()
    assert tokens[0] == given.eot and len(tokens) > 1000
    ours = load_model_tokenizer(Path("none.bin"), 400, trained={"data": "data/new_train_*.bin"}, encodes=True)
    assert isinstance(ours, HuggingFaceTokenizer) == (suffix == "json") and ours.eot == given.eot
    for prompt in AWKWARD:
        assert ours.encode(prompt) == given.encode(prompt)


def write_tokenizer_json(path, alphabet, normalizer=None, unknown=None):
    """A tokenizer.json that has a token for each byte of the alphabet, and no other but the end of a text."""
    letters = byte_letters()
    names = [letters[byte] for byte in sorted({*alphabet})] + ([unknown] if unknown else [])
    library = tokenizers.Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [], unk_token=unknown))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    if normalizer:
        library.normalizer = normalizer
    library.save(path)


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_a_tokenizer_that_cannot_spell_the_text_is_refused(prepare, unknown):
    write_tokenizer_json("ascii.json", bytes(range(128)), unknown=unknown)
    write_texts("in", range(20))
    args = ["-o", "x", "--tokenizer", "ascii.json", "--val", "0.3"]
    message = refusal(prepare, "in", *args)
    assert message.startswith("--tokenizer: it cannot spell '") and "--train-tokenizer" in message
    assert str(pickle.loads(pickle.dumps(Unsuitable(message)))) == message  # as it comes from another process
    os.mkdir("plain")
    for number in range(20):
        Path(f"plain/{number}.txt").write_text(f"{number} it needs no other letter")
    assert "normalizer" not in prepare("plain", *args)


def test_what_a_normalizer_changes_is_said_with_the_bytes_that_are_left(prepare):
    normalizer, name = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]), "NFD + Lowercase"
    kept = lambda text: unicodedata.normalize("NFD", text).lower()  # noqa: E731
    write_tokenizer_json("changing.json", bytes(range(256)), normalizer)
    texts = [f"{number} re\u0301sume\u0301 Été, the theatre" for number in range(20)]
    os.mkdir("in")
    for number, text in enumerate(texts):
        Path(f"in/{number}.txt").write_text(text, encoding="utf-8")
    said = prepare("in", "-o", "x", "--tokenizer", "changing.json", "--val", "0.3")
    size = sum(len(kept(text).encode()) for text in texts)
    line = rf"^normalizer  {re.escape(name)} changes texts .*: {size:,} \(train .*\) bytes after it$"
    assert re.search(line, said, re.M)
    assert f"bytes       {sum(len(text.encode()) for text in texts):,} " in said
    tokenizer = Tokenizer.load("x_tokenizer.json")
    found = b"".join(map(tokenizer.decode, open_tokens("x_train_000000.bin"))).decode().split("<|endoftext|>")[1:]
    assert {*found} < {kept(text) for text in texts}


# What is advised


@pytest.mark.parametrize("kind, speed", [("cpu", 2e11), ("cuda", 4e14)])
def test_the_model_that_is_advised_fits_the_data_and_grows_with_it(monkeypatch, kind, speed):
    device.use("cpu")
    monkeypatch.setattr(device, "use", lambda how: None)
    for name, stands in (("kind", kind), ("name", "a machine"), ("memory", lambda: (10**11, 10**11))):
        monkeypatch.setattr(device.current.device, name, stands)
    monkeypatch.setattr(recommend, "product_seconds", lambda m, n, k: 2 * m * n * k / speed)
    before = 0
    for val in (65, 300, 3_000, 10**5, 10**6, 10**8):
        train = val if val == 65 else 99 * val
        lines = recommend.recommend(Path("data/my texts"), 16384, train, val)
        command = shlex.split(lines[-2])
        assert command[:2] == ["python", "train_gpt2_fp32.py"]
        args = parse_arguments(GPT2Config, command[2:])
        assert args.batch_size * args.sequence_length < val and args.data == "data/my texts"
        config = GPT2.Config.described(args.model, 16384)
        size = recommend.num_parameters(config)
        seen = args.max_steps * (args.total_batch_size or args.batch_size * args.sequence_length)
        assert seen <= min(20 * size, max(16 * train, 64)) and args.sequence_length <= config.max_seq_len
        assert size >= before
        before = size
    assert f"step_{args.max_steps:08d}" in lines[-1]
    assert before > (5e7 if kind == "cuda" else 2e6)



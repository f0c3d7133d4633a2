"""The documents in files of text: which files there are, and what each of them holds.

    .txt .text .md .markdown .rst   one document a file
    .html .htm .xhtml               the same, without tags, scripts, styles and navigation
    .jsonl .ndjson                  one document a line, in a field of the object there
    .parquet                        one document a row, in a column

All but .parquet, which is compressed in itself, may be compressed, as .txt.gz. In a folder, a file whose name has no
suffix, or one that names no type, as in chapter.1, is what its first bytes are: HTML, text, or binary.

The encoding of a plain text is what its byte order mark says, else UTF-8 where it is that, else what the caller names,
else what an HTML document declares, else what chardet guesses; what a few damaged bytes stood for becomes U+FFFD. Line
ends become "\\n". A document that is longer than the caller wants is cut, at an empty line where it has one, so that no
more of it than that is held.

The work is divided into units, which do not depend on one another: some files, or a part of a large one.
"""

import codecs
import gzip
import importlib
import io
import json
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import islice
from typing import Any, BinaryIO

from device.errors import UserError, first_line
from llmc.data.tokenizer import without_surrogates
from llmc.files.files import CONTROLS, MARKS, MOST_CONTROLS, looks_like_text

TEXT, HTML = (".txt", ".text", ".md", ".markdown", ".rst"), (".html", ".htm", ".xhtml")
LINES, TABLE = (".jsonl", ".ndjson"), (".parquet",)
KINDS = TEXT + HTML + LINES + TABLE

BLOCK = 1 << 20          # bytes or characters that are read at once
SAMPLE = 1 << 16         # bytes from which an encoding is detected
HEAD = 1 << 12           # bytes that tell what a file without a suffix is; HTML declares its encoding in them
FIRST_LINES = 100        # of records, one of which must have the field
EXAMPLES = 3             # of the files that are skipped for a reason, by name
UNIT = 1 << 23           # bytes of files in a unit of work
FILES_IN_UNIT = 1000
MOST_WRONG = 0.01        # of the characters of a text in the encoding that it seems to have
AS_LIKELY = 1.02         # a guess is uncertain where another reading of the text is as likely but for such a factor
WIDER = {  # encodings to the commoner ones that have their characters and more
    "iso8859-1": "cp1252", "gb2312": "gb18030", "euc_kr": "cp949", "shift_jis_2004": "cp932",
}  # fmt: skip
ESCAPE = b"\x1b$"         # begins Japanese, Korean or Chinese characters in ISO-2022, whose bytes are all ASCII


class Unreadable(Exception):
    """Why a file or a line is left out: a reason that many may share."""


class Notes:
    """What is to be said of the files that were read.

    skipped: reason -> number of files, lines or rows. examples: reason -> the first few files. guessed: file -> its
    encoding, and another where that is as likely.
    """

    def __init__(
        self, skipped: dict[str, int] | tuple = (), examples: dict[str, list[str]] | tuple = (),
        guessed: dict[str, list[str]] | tuple = (),
    ) -> None:  # fmt: skip
        self.skipped, self.examples, self.guessed = Counter(skipped), dict(examples), dict(guessed)

    def skip(self, reason: str, path: str) -> None:
        self.add(Notes({reason: 1}, {reason: [path]}))

    def add(self, other: "Notes") -> None:
        """Adds what was noted later."""
        self.skipped.update(other.skipped)
        for reason, paths in other.examples.items():
            self.examples[reason] = list(dict.fromkeys(self.examples.get(reason, []) + paths))[:EXAMPLES]
        self.guessed.update(other.guessed)

    def reasons(self) -> str:
        """What was skipped, with examples."""
        return listed((why, number, self.examples.get(why, [])) for why, number in sorted(self.skipped.items()))


def listed(items: Iterable[tuple[str, int, list[str]]]) -> str:
    """Numbers of files, each with the names of some: "2 empty (a.txt, b.txt)"."""
    return ", ".join(
        f"{number:,} {what}" + (f" ({', '.join(paths)}{', …' * (number > len(paths))})" if paths else "")
        for what, number, paths in items
    )


File = tuple[str, str, int, int]  # path, kind, size in bytes, time of the last change in ns


@dataclass(frozen=True, slots=True)
class Part:
    """A file; or the lines of a file that begin at bytes start..end-1; or the row group `start` of a .parquet."""

    path: str
    kind: str  # one of KINDS, whatever the file's name
    size: int  # bytes to read
    start: int = 0
    end: int | None = None


def find_files(paths: list[str], notes: Notes) -> list[File]:
    """The files that paths stand for, in an order that depends on their names alone.

    A folder stands for all files in and below it, links included, but for hidden ones. A file that is named counts as
    plain text where its name says nothing. Notes as skipped what a folder holds that is of none of the KINDS or cannot
    be opened. Raises UserError for a path that is not there.
    """
    found = []
    for path in paths:
        try:
            if os.path.isdir(path):
                found += files_below(path, notes)
            elif file := file_at(path, kind_of(path) or ".txt"):
                found.append(file)
            else:  # such as a pipe, which cannot be read twice
                raise UserError(f"{path}: neither a file nor a folder; save its content as a file")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror.lower()}; name files and folders of text") from None
    return found


def files_below(top: str, notes: Notes) -> Iterator[File]:
    """The files of a folder that `find_files` wants."""

    def unreadable(error: OSError) -> None:
        notes.skip("not readable", str(error.filename))

    seen = set()  # folders, which links may lead to again
    for folder, folders, names in os.walk(top, onerror=unreadable, followlinks=True):
        place = os.stat(folder)
        if (place.st_dev, place.st_ino) in seen:
            folders.clear()
            continue
        seen.add((place.st_dev, place.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = os.path.join(folder, name)
            try:
                kind = kind_of(name) or (kind_by_content(path) if says_nothing(name) else None)
                file = kind and file_at(path, kind)
            except Unreadable as reason:
                notes.skip(str(reason), path)
                continue
            except OSError:  # such as a link to nowhere
                file = None
            if file:
                yield file
            else:
                notes.skip("not readable" if kind or says_nothing(name) else "of another kind", path)


def file_at(path: str, kind: str) -> File | None:
    """A file, None for what is there and none."""
    found = os.stat(path)
    return (path, kind, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def kind_of(path: str) -> str | None:
    """Which of the KINDS a file's name says it is of."""
    suffix = os.path.splitext(path.lower().removesuffix(".gz"))[1]
    return suffix if suffix in KINDS else None


def says_nothing(name: str) -> bool:
    """Whether a file's name has no suffix that could name a type, such as README, chapter.1 or Mr. Smith."""
    suffix = os.path.splitext(name.lower().removesuffix(".gz"))[1]
    return not re.fullmatch(r"\.(?=.*[a-z])[a-z0-9_+-]{1,9}", suffix)


def kind_by_content(path: str) -> str | None:
    """Which of the KINDS a file is of, None for what is there and no file. Raises Unreadable for binary."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        return None
    try:
        with open_part(Part(path, TEXT[0], 0)) as file:
            head = file.read(HEAD)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise Unreadable("damaged") from None
    if head and not looks_like_text(head):
        raise Unreadable("binary")
    return HTML[0] if re.match(rb"\s*<(!doctype html|html)\b", head, re.I) else TEXT[0]


def units_of(files: list[File], field: str, encoding: str | None = None) -> list[list[Part]]:
    """The units of work, in the order of the files. Raises UserError where a file of records lacks the field, a package
    that reads one is missing, or nothing can be read of a .parquet."""
    units: list[list[Part]] = []
    room = files_left = 0
    for path, kind, size, _ in files:
        for part in parts_of(path, kind, size, field, encoding):
            if part.size > room or not files_left:
                units.append([])
                room, files_left = UNIT, FILES_IN_UNIT
            units[-1].append(part)
            room, files_left = room - part.size, files_left - 1
    return units


def parts_of(path: str, kind: str, size: int, field: str, encoding: str | None = None) -> list[Part]:
    """A file as parts of about UNIT bytes, where it can be divided; checks its first record."""
    if kind in LINES:
        check_lines(path, field)
    if kind in TABLE:
        with open_table(path) as table:
            check_column(path, table, field)
            groups = table.num_row_groups
        return [Part(path, kind, size // groups, group, group + 1) for group in range(groups)]
    if size <= UNIT or path.lower().endswith(".gz") or kind in HTML or not lines_are_bytes(path, encoding):
        return [Part(path, kind, size)]
    return [Part(path, kind, min(UNIT, size - start), start, start + UNIT) for start in range(0, size, UNIT)]


def read_documents(
    parts: list[Part], field: str, longest: int, notes: Notes, encoding: str | None = None
) -> Iterator[str]:
    """The documents in a unit, none of them blank or longer than `longest` characters. Notes the files and lines that
    hold none, and the encodings that were guessed. encoding: of the texts that are not UTF-8, where it is known."""
    for part in parts:
        found = False
        try:
            for text in documents_of(part, field, longest, notes, encoding):
                if text.strip():
                    found = True
                    yield text
            if not found and part.start == 0 and (part.kind in TEXT + HTML or part.size == 0):
                notes.skip("empty", part.path)
        except Unreadable as reason:
            notes.skip(str(reason), part.path)
        except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError):
            notes.skip("damaged", part.path)
        except OSError:
            notes.skip("not readable", part.path)


def documents_of(part: Part, field: str, longest: int, notes: Notes, encoding: str | None) -> Iterator[str]:
    """The documents in a part, blank ones too. Raises Unreadable, or what the modules for gzip and for files raise."""
    if part.kind in LINES:
        return read_lines(part, field, longest, notes)
    if part.kind in TABLE:
        return read_table(part, field, longest, notes)
    text = decoded(part, notes, encoding)
    return cut(without_tags(text) if part.kind in HTML else text, longest)


def open_part(part: Part) -> BinaryIO:
    """A file that holds the bytes of a part, of one of text or lines, and nothing else."""
    if part.path.lower().endswith(".gz"):
        return gzip.open(part.path)
    file = open(part.path, "rb")
    if part.end is None:
        return file
    with file:
        start, end = (line_start(file, at, part.kind in LINES) for at in (part.start, part.end))
        file.seek(start)
        return io.BytesIO(file.read(max(0, end - start)))


def line_start(file: BinaryIO, at: int, whole: bool) -> int:
    """Where the first line begins at or after a byte. Unless lines must be whole, in one that goes on for a BLOCK it
    is where the next word begins, or the next character of UTF-8."""
    file.seek(max(0, at - 1))
    line = file.readline(-1 if whole else BLOCK) if at else b""
    if whole or len(line) < BLOCK or line.endswith(b"\n"):
        return file.tell()
    return at - 1 + (line.find(b" ") + 1 or next(i for i in range(1, BLOCK) if line[i] & 0xC0 != 0x80))


def lines_are_bytes(path: str, encoding: str | None) -> bool:
    """Whether a file can be divided after any byte that ends a line: not in UTF-16 and UTF-32."""
    if encoding and not is_ascii_based(encoding):
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError:
        return False  # which is counted when it is read
    return not any(head.startswith(mark) for mark, encoding in MARKS if encoding != "utf-8-sig")


# Plain text and HTML


def decoded(part: Part, notes: Notes, named: str | None) -> Iterator[str]:
    """The characters of a part, BLOCK at a time. Raises Unreadable where they are no text."""
    with open_part(part) as file:
        encoding = encoding_of(file, part, notes, named)
        file.seek(0)
        text = io.TextIOWrapper(file, encoding, errors="replace")
        while block := text.read(BLOCK):
            yield block


def encoding_of(file: BinaryIO, part: Part, notes: Notes, named: str | None) -> str:
    """What the text in a part is encoded in, but for a few damaged bytes; notes it where it is a guess.

    file: of `open_part`. named: the encoding of what has no byte order mark and is not UTF-8, where the user names it.
    Raises Unreadable where it is no text.
    """
    head = file.read(HEAD)
    marked = next((encoding for mark, encoding in MARKS if head.startswith(mark)), None)
    encoding = marked or (named if named and not is_ascii_based(named) else "utf-8")
    size, characters, wrong, sample = survey(file, encoding)
    plain = size == characters  # characters of ASCII alone, as those of ISO-2022 seem to be
    if 10 * wrong <= size - characters and not (plain and (named or sample)):  # others take two bytes or more each
        return encoding
    if named:
        if fits(file, named):
            return named
        raise Unreadable(f"not {named}")
    declared = declared_encoding(head) if part.kind in HTML else None
    if declared and fits(file, declared):
        return declared
    if part.end is not None:  # all parts of a file are of one encoding: where its first part is not UTF-8 decides
        with open(part.path, "rb") as whole:
            sample = survey(whole, encoding, sample_only=True)[3]
    guess = guess_encoding(sample)
    if guess and fits(file, guess[0]):
        notes.guessed[part.path] = guess
        return guess[0]
    if plain:
        return encoding
    raise Unreadable("of an unknown encoding")


def fits(file: BinaryIO, encoding: str) -> bool:
    """Whether a file is text in an encoding, but for a few damaged bytes. Raises Unreadable for binary."""
    _, characters, wrong, _ = survey(file, encoding)
    return wrong <= MOST_WRONG * characters


def is_ascii_based(encoding: str) -> bool:
    return "a\n".encode(encoding) == b"a\n"


def declared_encoding(head: bytes) -> str | None:
    """The encoding that HTML declares for itself, None where it declares none that is known."""
    found = re.search(rb"""(?:charset|<\?xml[^>]*\bencoding)\s*=\s*["']?([\w.:-]+)""", head, re.I)
    try:
        codec = codecs.lookup(found[1].decode("ascii", "replace")) if found else None
        return WIDER.get(codec.name, codec.name) if codec and is_ascii_based(codec.name) else None
    except (LookupError, ValueError):
        return None


def guess_encoding(sample: bytes) -> list[str]:
    """The encoding that a text which is not UTF-8 is probably in, and another where that is as likely and gives another
    text; none where nothing fits."""
    chardet = optional("chardet", "a text that is not UTF-8")
    if int(chardet.__version__.partition(".")[0]) < 7:  # whose guesses are wrong far more often
        raise UserError("a text that is not UTF-8 needs chardet 7; install it with: pip install 'chardet>=7'")
    telling = (line for line in sample.splitlines(True) if not line.isascii() or ESCAPE in line)
    lines = b"".join(telling)
    found = chardet.detect_all(lines, ignore_threshold=True, compat_names=False, exclude_encodings=["utf-8"])
    readings = {}  # what the sample is in each encoding, the likeliest first
    for guess in found:
        encoding = guess["encoding"]
        if encoding and guess["confidence"] * AS_LIKELY >= found[0]["confidence"]:
            encoding = codecs.lookup(encoding).name
            encoding = WIDER.get(encoding, encoding)
            readings.setdefault(lines.decode(encoding, "replace"), encoding)
    return list(readings.values())[:2]


def survey(file: BinaryIO, encoding: str, sample_only: bool = False) -> tuple[int, int, int, bytes]:
    """Of a file that is read in an encoding: its bytes, its characters, how many of them are wrong, and a sample from
    about the first wrong one, or the first ESCAPE, on. sample_only: read no further than that. Raises Unreadable for
    binary."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    wide = b"\0" in "a".encode(encoding)
    size = characters = wrong = controls = 0
    sample = b""
    file.seek(0)
    block = file.read(BLOCK)
    while block and not (sample_only and sample):
        more = file.readline(BLOCK) + file.read(BLOCK)
        text = decoder.decode(block, final=not more)
        size, characters = size + len(block), characters + len(text)
        controls += len(block) - len(block.translate(None, CONTROLS))
        if b"\0" in block and not wide:
            raise Unreadable("binary")
        found = text.count("\ufffd") - block.count("\ufffd".encode())
        if (found or ESCAPE in block) and not sample:
            at = len(text[: text.find("\ufffd")].encode()) if found else block.find(ESCAPE)
            around = block + more
            start = max(around.rfind(b"\n", 0, at) + 1, at - SAMPLE // 2)
            sample = around[start : start + SAMPLE]
            if start + SAMPLE < len(around):  # no character must be cut in two
                sample = sample[: max(sample.rfind(b"\n"), sample.rfind(b" ")) + 1] or sample
        wrong += found
        block = more
    if controls > MOST_CONTROLS * size and not wide:
        raise Unreadable("binary")
    return size, characters, wrong, sample


def cut(blocks: Iterable[str], longest: int) -> Iterator[str]:
    """A text in pieces of at most `longest` characters. A piece ends after the last empty line within it, else after
    its last line or word; where these lie is the same however the text comes in blocks."""
    text = ""
    for block in blocks:
        text += block
        start = 0
        while len(text) - start > longest:
            end = start + longest
            for mark in ("\n\n", "\n", " "):
                found = text.rfind(mark, start + longest // 2, end)
                if found > 0:
                    end = found + len(mark)
                    break
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text


def without_tags(blocks: Iterable[str]) -> Iterator[str]:
    """The text that a browser would show of an HTML document, about."""
    parser = HTMLText()
    try:
        for block in blocks:
            parser.feed(block)
            yield parser.taken()
        parser.close()
    except AssertionError:  # how html.parser says that a declaration makes no sense
        raise Unreadable("damaged") from None
    yield parser.taken()


class HTMLText(HTMLParser):
    """Collects text; the end of a block is a line's end, a paragraph or heading stands between empty lines."""

    HIDDEN = frozenset("script style template title nav noscript svg".split())
    PARAGRAPHS = frozenset("p h1 h2 h3 h4 h5 h6 pre blockquote ul ol dl table section article".split())
    LINES = frozenset("br div li dt dd tr hr header footer main aside figure figcaption form address".split())
    CELLS = frozenset("td th".split())

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text: list[str] = []
        self.hidden: list[str] = []  # elements that are open and hide what is in them
        self.pre = 0                 # how many <pre> are open
        self.breaks = 2              # line ends at the end of what is written; 2 as well at the very beginning
        self.space = True            # whether it ends in white space

    def taken(self) -> str:
        """What has been collected since the last call."""
        text, self.text = "".join(self.text), []
        return text

    def handle_starttag(self, tag: str, attributes: list) -> None:
        if tag in self.HIDDEN:
            self.hidden.append(tag)
        self.pre += tag == "pre"
        self.end_line(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.hidden:
            del self.hidden[self.hidden.index(tag) :]
        self.pre = max(0, self.pre - (tag == "pre"))
        self.end_line(tag)

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        self.end_line(tag)

    def handle_data(self, data: str) -> None:
        if self.hidden:
            return
        if not self.pre:
            data = re.sub(r"[ \t\n\r\f]+", " ", data)
            data = data[1:] if self.space and data.startswith(" ") else data
        if data:
            self.text.append(data)
            self.breaks = len(data) - len(data.rstrip("\n"))
            self.space = data[-1].isspace()

    def end_line(self, tag: str) -> None:
        """Ends the line, or the paragraph, where a tag does."""
        wanted = 2 if tag in self.PARAGRAPHS else tag in self.LINES
        if wanted > self.breaks:
            if self.text and not self.pre:
                self.text[-1] = self.text[-1].rstrip(" ")
            self.text.append("\n" * (wanted - self.breaks))
            self.breaks, self.space = wanted, True
        elif tag in self.CELLS and not self.space:
            self.text.append(" ")
            self.breaks, self.space = 0, True


# Records


def read_lines(part: Part, field: str, longest: int, notes: Notes) -> Iterator[str]:
    """The documents of the lines in a part."""
    with open_part(part) as file:
        for line in file:
            try:
                text = text_in(record_of(line), field) if line.strip() else ""
            except Unreadable as reason:
                notes.skip(f"lines {reason}", part.path)
                continue
            if not text.strip():
                notes.skip("lines empty", part.path)
            yield from cut([plain_line_ends(text)], longest)


def record_of(line: bytes) -> Any:
    """What a line of JSON holds. Raises Unreadable where it is none."""
    try:
        return json.loads(line.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError):
        raise Unreadable("that are no JSON") from None


def text_in(record: Any, field: str) -> str:
    """The text in a field of an object. Raises Unreadable where there is none."""
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise Unreadable(f"without a text in {field}")
    return without_surrogates(text)


def plain_line_ends(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_lines(path: str, field: str) -> None:
    """Raises UserError where none of a file's FIRST_LINES has a text in the field."""
    lines = []
    with suppress(OSError, EOFError, zlib.error), open_part(Part(path, LINES[0], 0)) as file:  # counted when it is read
        lines = list(islice(filter(bytes.strip, file), FIRST_LINES))
    for line in lines:
        with suppress(Unreadable):
            text_in(record_of(line), field)
            return
    if lines:
        try:
            first = record_of(lines[0])
        except Unreadable:
            raise UserError(f"{path}: its first line is not JSON; a .jsonl has an object on each line") from None
        names = [name for name, value in first.items() if isinstance(value, str)] if isinstance(first, dict) else []
        raise UserError(f"{path}: its first line has no text in {field}; {fields(names)}")


def fields(names: list[str]) -> str:
    """Where a file of records has texts."""
    named = ", ".join(name[:40] for name in names[:9])
    return f"it has texts in {named}: name one with --field" if names else "it has no texts"


def open_table(path: str) -> Any:
    """A pyarrow.parquet.ParquetFile. Raises UserError where there is none in the file."""
    parquet = optional("pyarrow.parquet", ".parquet")
    try:
        return parquet.ParquetFile(path)
    except Exception as error:  # Arrow's errors are of several kinds
        raise UserError(
            f"{path}: no table can be read from it ({first_line(error)}); fetch it again, or leave it out"
        ) from None


def check_column(path: str, table: Any, field: str) -> None:
    """Raises UserError where a table has no column of texts of that name."""
    names = [name for name, kind in zip(table.schema_arrow.names, table.schema_arrow.types, strict=True)
             if re.match("(large_)?string|dictionary<values=(large_)?string", str(kind))]  # fmt: skip
    if field not in names:
        raise UserError(f"{path}: there is no column of text called {field}; {fields(names)}")


def read_table(part: Part, field: str, longest: int, notes: Notes) -> Iterator[str]:
    """The documents of the rows in a part."""
    with open_table(part.path) as table:
        batches = table.iter_batches(64, [part.start], [field])
        while True:
            try:
                texts = next(batches).column(0).to_pylist()
            except StopIteration:
                return
            except (ValueError, NotImplementedError):  # Arrow's errors are such
                raise Unreadable("damaged") from None
            for text in texts:
                if text is None or not text.strip():
                    notes.skip("rows empty", part.path)
                else:
                    yield from cut([plain_line_ends(text)], longest)


def optional(name: str, what: str) -> Any:
    """A package that only `what` needs. Raises UserError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0].replace("_", "-")
        raise UserError(f"{what} needs {package}; install it with: pip install {package}") from None

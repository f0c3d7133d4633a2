"""Files of text as documents: what is a text, what is a record, and what is said of half a record."""

import csv
import glob
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from dev.data import common
from device.errors import UserError, escaped, first_line
from llmc.data.hf_tokenizer import without_surrogates

import numpy as np

KINDS = {  # of a table the character between columns; a .tsv has no quotes
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".jsonl": "lines", ".ndjson": "lines",
    ".json": "list", ".csv": ",", ".tsv": "tsv", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
UNDECODABLE = "undecodable"
UNDECODABLE_REMEDY = "name the encoding of all files with --encoding, or leave such files out with --skip-undecodable"

File = tuple[str, str, int, int]  # path, kind, size in bytes, time of the last change in ns


def records_of(path: str, kind: str, fields: tuple[str, ...], blocks: Callable[..., Iterator[str]]) -> Iterator[Any]:
    """The records of a file; of tables and of the formats of datasets the fields alone, or all if none are named.
    Raises what Python's modules and datasets do where it is damaged."""
    if kind in ("parquet", "arrow"):
        datasets = common.library("datasets", path)
        rows = datasets.load_dataset(kind, data_files=glob.escape(path), split="train", streaming=True)
        check_fields(path, fields, rows.column_names)
        yield from rows.select_columns(list(fields)) if fields else rows
    elif kind in ("lines", "list"):
        blocks = partial(blocks, translate=False)  # JSON lines end at line feeds alone
        if kind == "list" and next(filter(None, map(str.lstrip, blocks())), "")[:1] == "[":
            yield from json.loads(common.bounded(path, blocks()))
        else:
            yield from map(json.loads, filter(str.strip, common.lines_of(path, blocks())))
    else:
        csv.field_size_limit(common.LONGEST)
        how = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == "tsv" else {"delimiter": kind, "strict": True}
        table = csv.DictReader(common.lines_of(path, blocks()), **how)
        names = table.fieldnames or [*fields]
        others = [mark for mark in ",;\t|" if any(mark in name for name in names)]
        hint = f"; if {others[0]!r} separates the columns, name it with --separator" if others else ""
        check_fields(path, fields, names, hint)
        if twice := [name for name in fields if names.count(name) > 1]:
            raise UserError(f"{path}: the first line names {twice[0]} twice: rename one of these columns")
        for record in table:
            if None in record or None in record.values():
                raise ValueError("not as many fields as the first line names")
            yield record


def check_fields(path: str, fields: tuple[str, ...], names: Iterable[str], hint: str = "") -> None:
    if missing := [name for name in fields if name not in names]:
        raise UserError(f"{path}: no field {missing[0]}, but {', '.join(map(str, names))}: name one with --field{hint}")


def named(value: Any) -> str:
    """The type of a value in a record."""
    return "null" if value is None else type(value).__name__


def text_of(record: Any, fields: tuple[str, ...]) -> tuple[str | None, str]:
    """The text of a record, None if it has not all fields, and what is wrong with the record, or ""."""
    record = {fields[0]: record} if isinstance(record, str) else record
    if not isinstance(record, dict):
        return None, f"{named(record)} for an object"
    blank = ""
    for name in fields:
        if name not in record:
            return None, f"no field {name}"
        if not isinstance(text := record[name], str):
            return None, f"{named(text)} in {name}"
        if not text.strip():
            blank = f"blank {name}"
    texts = [record[name] for name in fields if record[name].strip()]
    return "\n\n".join(texts), blank if texts else ""


class Text(NamedTuple):
    blocks: Iterable[str]  # without any, the record has no text
    place: str             # file and record
    note: str              # what is wrong with it, or ""


def texts_of(path: str, kind: str, fields: tuple[str, ...], encoding: str) -> Iterator[Text]:
    """The texts in a file. Raises UserError where it is damaged, and where no record has one."""
    blocks = partial(common.blocks_of, path, encoding, UNDECODABLE_REMEDY)
    if kind not in ("parquet", "arrow"):
        deque(blocks(), 0)  # a file is taken whole or not at all
    if kind == "text":
        yield Text(blocks(), path, "")
        return
    names, done, first = {}, 0, ""  # the fields that records have, in order; records; what is wrong with the first
    whole = False  # whether a record has all fields
    try:
        for done, record in enumerate(records_of(path, kind, fields, blocks), 1):  # noqa: B007  for the messages
            text, note = text_of(record, fields)
            whole, first = whole or text is not None, first or note
            names |= dict.fromkeys(record) if isinstance(record, dict) else {}
            if text is not None:
                text = without_surrogates(text).replace("\r\n", "\n").replace("\r", "\n")
                if kind == "tsv" and any(record[name].startswith('"') for name in fields):
                    note = note or "begins with a quote"
            yield Text([] if text is None else [text], f"{path}, record {done}", note)
    except UserError:
        raise
    except Exception as error:  # of many kinds
        raise UserError(f"{path}, record {done + 1}: {type(error).__name__}: {first_line(error)}") from None
    if not done:
        yield Text([""], path, "")  # one blank text
    elif not whole:
        check_fields(path, fields, names)
        raise UserError(f"{path}, record 1: {first}, and no record has text: name the fields with --field")


def cut(blocks: Iterable[str], longest: int) -> Iterator[str]:
    """A text in parts of at most `longest` characters. A part ends after its last empty line, else after its last line
    or word, however the text comes in blocks."""
    text = ""
    for block in blocks:
        text, start = text + block, 0
        while len(text) - start > longest:
            found = ((text.rfind(mark, start + longest // 2, start + longest), mark) for mark in ("\n\n", "\n", " "))
            end = next((at + len(mark) for at, mark in found if at > 0), start + longest)
            yield text[start:end]
            start = end
        text = text[start:]
    yield text


def documents(files: list[File], fields: tuple[str, ...], encoding: str, longest: tuple[int, int]) -> Iterator[dict]:
    """All documents, at most longest[0] characters of a file of text or longest[1] of a record.

    "bytes": of UTF-8; 0 if it is blank or left out. "high", "low": a hash, 16 bytes of BLAKE2b. "inner": whether it
    goes on with the text of the document before. "note": why it is left out, or what is to be said of it, or "".
    "place": if there is a note, file and record.
    """

    def document(text: str, place: str, note: str, inner: bool = False) -> dict[str, Any]:
        data = text.encode()
        high, low = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), "<i8").tolist()
        size = len(data) if text.strip() else 0
        place = escaped(place) if note else ""  # a path may be no UTF-8
        return {"text": text, "high": high, "low": low, "bytes": size, "inner": inner, "note": note, "place": place}

    for path, kind, *_ in files:
        most = longest[kind != "text"]
        try:
            for blocks, place, note in texts_of(path, kind, fields, encoding):
                for number, text in enumerate(cut(blocks, most)):
                    note = f"longer than {most} characters, cut" if number == 1 else note * (number == 0)
                    yield document(text, place, note, number > 0)
        except common.Undecodable as error:
            yield document("", error.what, UNDECODABLE)

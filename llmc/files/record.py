"""The record of a checkpoint, state.json, and what may stand in it.

A file with the right checksum may still be hostile: whoever changes a number can compute the checksum, too. So `RECORD`
says what each value may be, and `load_record` refuses other values. Only `flags`, which has the flags of the run, is
checked elsewhere, by the command line's parser (llmc/run/settings.py).
"""

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from llmc.files.files import read_file

MAX_STEPS = 2**32 - 1  # kernels/dropout.cuh has 32 bits for a step
MAX_COUNT = 2**63 - 1  # NumPy, files and operating systems count no further


def whole(low: int, high: int) -> Callable[[object], bool]:
    """Whether something is a whole number in this range."""
    return lambda value: type(value) is int and low <= value <= high


def text(value: object) -> bool:
    return isinstance(value, str)


count = whole(0, MAX_COUNT)

# A function: whether a value may stand there. A dict: an object with these keys; a key with "?" may be missing, and
# other keys may be there. A list: an array of any length, whose elements are all as its one element says. A tuple: an
# array of this length, whose elements are each as said.
LOADER = {
    "epoch": whole(0, 2**32 - 1), "place": count, "batch": count, "num_tokens": count, "B": count, "T": count,
    "shuffle_seed": lambda value: value is None or type(value) is int and value >= 0, "fingerprint": text,
    "files?": [(count, whole(-MAX_COUNT, MAX_COUNT), whole(0, 2**64 - 1), text)],  # size, ns since 1970, inode, SHA-256
}  # fmt: skip
BEST = {"val_loss": lambda x: type(x) in (int, float) and abs(x) < 2**127, "val_batches": count, "val_data": text}
STATE = {
    "loader?": LOADER, "sampler?": whole(1, 2**64 - 1), "run?": text, "flags?": {}, "skipped?": count, "best?": BEST,
}  # fmt: skip
FILE = {"bytes": count, "crc32": whole(0, 2**32 - 1)}
RECORD = {"step": whole(0, MAX_STEPS), "files": {"model.bin": FILE, "optimizer.bin": FILE}, "state": STATE}


def write_record(file: BinaryIO, record: dict) -> None:
    """Writes a record to state.json, with its checksum."""
    record = json.loads(json.dumps(record))  # as a reader will see it
    file.write(json.dumps(record | {"crc32": crc32(record)}, indent=1).encode())


def load_record(checkpoint: Path) -> dict:
    """The contents of a checkpoint's state.json: its "step", its "files", and the "state" that `save_checkpoint` got.
    Raises OSError if there is no such file, and ValueError, which says why, if it is not what was written."""
    data = read_file(checkpoint / "state.json")
    try:
        record = json.loads(data)
        if not isinstance(record, dict) or record.pop("crc32", None) != crc32(record):
            raise ValueError("not what was written")
    except (ValueError, RecursionError) as error:
        raise ValueError("not what was written") from error
    check(record, RECORD, "")
    for name, entry in record["files"].items():
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ValueError(f"it lists a file named {name[:80]!r}")
        check(entry, FILE, f"files.{name}")
    return record


def crc32(record: dict) -> int:
    """The checksum of a record without its checksum."""
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def check(value: object, schema, where: str) -> None:
    """Raises ValueError unless the value is as the schema says. where: its name."""
    fits = type(value) is type(schema) or isinstance(schema, tuple) and isinstance(value, list)
    if callable(schema):
        fits = schema(value)
    elif fits and isinstance(schema, dict):
        for key, inner in schema.items():
            name = key.removesuffix("?")
            if name in value:
                check(value[name], inner, f"{where}.{name}".lstrip("."))
            elif name == key:
                raise ValueError(f"{where}.{name} is missing".lstrip("."))
    elif fits and isinstance(schema, list):
        for each in value:
            check(each, schema[0], where)
    elif fits := fits and len(value) == len(schema):
        for each, inner in zip(value, schema, strict=True):
            check(each, inner, where)
    if not fits:
        raise ValueError(f"{where} is {json.dumps(value)[:80]}")

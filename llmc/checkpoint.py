"""Models, debug states and training checkpoints on disk.

A model `.bin` is a header of 32-bit words, which the model's Config knows to read and write, then raw fp32 tensors; in
llm.c's version 5 they are bf16. A debug state `.bin` is llm.c's. A training checkpoint is a directory that holds all a
run needs to go on as if it had never stopped:

    step_00000020/
      model.bin       the parameters, as a model
      optimizer.bin   header int32[256]: 20241121, 1, then the number of parameters as two int32, low half first;
                      fp32 m, then fp32 v, each in the order of the parameters
      model_tokenizer.bin, model_tokenizer.json and others
                      the files of the tokenizer that the run used, where it used one
      state.json      the step, what the run wants remembered, and sizes and CRC-32 of the other files

The one with the lowest validation loss, where a run keeps that, is named `best`, and its state has the loss.

Only the run that has locked the directory of its checkpoints changes anything there. Whoever only reads a checkpoint
needs no lock.
"""

import json
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, dropwhile
from pathlib import Path

import device
from device.errors import UserError
from llmc import ranks
from llmc.files import (
    DEBUG_STATE,
    HEADER_BYTES,
    file_size,
    first_word,
    make_header,
    open_file,
    read_header,
    replacing,
)
from llmc.lock import Lock
from llmc.scripts import kind_of_magic
from llmc.tensors import Config, layout, num_parameters

import numpy as np

# Models

FP32_VERSION = 3  # of llm.c's files; those in bf16 differ from it in the version and the tensors' type alone
ROUNDED = 1 << 20  # numbers that are rounded to bf16 at a time


def model_path(path: str | Path) -> Path:
    """The file of a model that is named by itself, by the directory of its checkpoint, or by a --checkpoint-dir: the
    newest checkpoint's, which is said on stderr then.

    Raises UserError where a directory has none, for a model as Hugging Face keeps it, or a file of one, where the
    tokenizer in a checkpoint is not the one that was saved there, and as `newest_checkpoint` does.
    """
    path = Path(path)
    folder, file = (path, path / "model.bin") if path.is_dir() else (path.parent, path)
    if path.exists() and (folder / "config.json").is_file() and not kind_of_magic(first_word(file)):
        raise UserError(
            f"{path}: a model in Hugging Face's format; make a .bin of it: dev/import_hf.py {folder} -o model.bin"
        )
    if not path.is_dir() or file.exists():
        _check_saved_tokenizer(file)
        return file
    newest = newest_checkpoint(path)
    if newest is None:
        raise UserError(f"{path}: neither a model.bin nor a checkpoint in it; name a .bin or a --checkpoint-dir")
    if ranks.rank() == 0:
        ranks.say(f"{path}: its newest checkpoint is {newest.name}")
    _check_saved_tokenizer(newest / "model.bin")
    return newest / "model.bin"


def read_model_header(path: str | Path, kind: type[Config], remedy: str | None = None) -> Config:
    """The sizes of the model in `path`.

    remedy: what to do where there is none (where one can be had). Raises UserError where the file is missing, of
    another kind or version, has senseless sizes, or is not as long as its own header says.
    """
    header = read_header(path, kind.MAGIC, remedy or kind.FETCH, kind.HEADER_BYTES)
    itemsize = 2 if _is_bf16(header, kind) else 4
    header[1] = FP32_VERSION if itemsize == 2 else header[1]
    config = kind.from_header(header, str(path))
    config.check(str(path))
    _check_size(path, kind.HEADER_BYTES + itemsize * _file_layout(config)[1], remedy or kind.FETCH)
    return config


def _is_bf16(header: np.ndarray, kind: type[Config]) -> bool:
    return kind.BF16_VERSION is not None and header[1] == kind.BF16_VERSION


def conversion(path: str | Path, kind: type[Config]) -> str:
    """A line that says what becomes of a model file's weights where they are of another type than the run's, else
    nothing."""
    in_file = device.BF16 if _is_bf16(read_header(path, kind.MAGIC, kind.FETCH, kind.HEADER_BYTES), kind) else None
    if in_file == device.BF16 and device.floatX != device.BF16:
        return f"{path}: its weights are bf16 and become fp32"
    if in_file != device.BF16 and device.floatX == device.BF16:
        return f"{path}: its weights are fp32; forward and backward take them rounded to bf16"
    return ""


def read_model(
    path: str | Path, kind: type[Config], remedy: str | None = None
) -> tuple[Config, dict[str, np.ndarray]]:
    """The model in `path`: its sizes, and the file's tensors by name, in its order, fp32: read-only memory
    maps, or of a file in bf16 arrays.

    remedy, and UserError: as of `read_model_header`. Raises UserError also where a tensor that is no parameter is not
    0, and where the file belongs to a checkpoint and is not the one that was saved (`check_saved`).
    """
    config = read_model_header(path, kind, remedy)
    check_saved(Path(path))
    return config, _tensors(path, config)


def _tensors(path: str | Path, config: Config) -> dict[str, np.ndarray]:
    if _is_bf16(read_header(path, config.MAGIC, config.FETCH, config.HEADER_BYTES), type(config)):
        body = device.from_bf16(np.memmap(path, dtype="<u2", mode="r", offset=config.HEADER_BYTES))
    else:
        body = np.memmap(path, dtype="<f4", mode="r", offset=config.HEADER_BYTES)
    tensors = _named_views(body, config)
    for name in tensors.keys() - {name for name, _ in config.parameters()}:
        if tensors[name].any():
            raise UserError(f"{path}: {name} is not 0, and a {config.NAME} has none: this is another kind of model")
    return tensors


def write_model(path: str | Path, config: Config, params, bf16: bool = False) -> None:
    """Writes parameters, fp32 (num_parameters,) in the order of their table, on the host or the device, or the tensors
    that `read_model` gives, as a model; with bf16 rounded to that, as llm.c's version 5.

    `path` appears whole or not at all. Raises UserError where the system refuses to write, or llm.c has no such file.
    """
    pieces = _model_pieces(config, params)
    if bf16:
        header = next(pieces)
        if config.BF16_VERSION is None or header[1] != FP32_VERSION:
            raise UserError(f"{path}: llm.c has no file in bf16 for such a {config.NAME}: leave --dtype bf16 out")
        header[1] = config.BF16_VERSION
        pieces = chain([header], in_bf16(pieces))
    _write(path, pieces)


def in_bf16(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Contiguous fp32 arrays, rounded to bf16 a few numbers at a time."""
    for piece in pieces:
        flat = piece.reshape(-1)
        for at in range(0, flat.size, ROUNDED):
            yield device.to_bf16(flat[at : at + ROUNDED])


@contextmanager
def new_model(path: str | Path, config: Config) -> Iterator[dict[str, np.ndarray]]:
    """The tensors of a model file that is being made, by name, all 0, to be filled in the block; `path` appears once
    the block is done, or not at all. They lie in the file itself, so that a model larger than the memory can be made.

    Raises UserError where the system refuses to write.
    """
    _, length = _file_layout(config)
    with replacing(path) as file:
        file.write(_header(config).tobytes())
        file.flush()
        os.posix_fallocate(file.fileno(), 0, config.HEADER_BYTES + 4 * length)  # a disk that is full says so here
        body = np.memmap(file, dtype="<f4", mode="r+", offset=config.HEADER_BYTES, shape=(length,))
        yield _named_views(body, config)
        body.flush()


def _header(config: Config) -> np.ndarray:
    header = config.header()
    if header.nbytes != config.HEADER_BYTES:
        raise ValueError(f"{config.SCRIPT}: HEADER_BYTES is {config.HEADER_BYTES}, header() has {header.nbytes} bytes")
    return header


def _file_layout(config: Config) -> tuple[dict[str, tuple[int, tuple]], int]:
    return layout(config.file_tensors(), config.sizes(), align=1)


def _named_views(body: np.ndarray, config: Config) -> dict[str, np.ndarray]:
    starts, _ = _file_layout(config)
    return {name: body[start : start + math.prod(shape)].reshape(shape) for name, (start, shape) in starts.items()}


def _model_pieces(config: Config, params) -> Iterator[np.ndarray]:
    """A model file's contents."""
    if isinstance(params, Mapping):
        yield from (_header(config), *params.values())
        return
    if not isinstance(params, Iterator):
        _check_length(params, config)
    yield _header(config)
    there, _ = layout(config.parameters(), config.sizes(), align=1)
    pieces = Pieces(params)
    for name, (_, shape) in _file_layout(config)[0].items():
        length = math.prod(shape)
        if name in there:
            start = there[name][0]
            yield from pieces.part(start, start + length)
        else:
            yield np.zeros(length, "<f4")


class Pieces:
    """A flat array, on the host or the device or an iterator over its pieces on the host, of which parts are wanted:
    of an iterator in ascending order, so that there is never a whole copy."""

    def __init__(self, values):
        self.values, self.start, self.piece = values, 0, np.empty(0, "<f4")

    def part(self, start: int, end: int) -> Iterator[np.ndarray]:
        if not isinstance(self.values, Iterator):
            yield from device.pieces(self.values[start:end])
            return
        while start < end:
            behind = self.start + self.piece.size
            if start >= behind:
                self.start, self.piece = behind, next(self.values)
                continue
            piece = self.piece[start - self.start : end - self.start]
            yield piece
            start += piece.size


# Debug states: a batch, and what one forward and backward pass of a reference implementation made of it


@dataclass(frozen=True)
class DebugState:
    """What a debug state `.bin` holds. logits have no padding; grads do, as the model's parameters."""

    x: np.ndarray       # int32 (B, T), inputs
    y: np.ndarray       # int32 (B, T), targets
    logits: np.ndarray  # fp32 (B, T, V)
    loss: float         # mean over the batch
    grads: np.ndarray   # fp32 (num_parameters,), of the mean loss, in the order of the parameters


def read_debug_state(path: str | Path, config: Config) -> DebugState:
    """The debug state in `path`, version 2, that belongs to a model of the given sizes.

    Its arrays are read-only memory maps. Raises UserError where the file is missing, of another kind or version, or of
    another size than the model asks for.
    """
    remedy = "fetch it with dev/download_starter_pack.sh, or write it with dev/write_reference.py"
    header = read_header(path, DEBUG_STATE, remedy)
    version, B, T = (int(n) for n in header[1:4])
    if version != 2:
        raise UserError(f"{path}: debug state version {version}; version 2 is needed: {remedy}")
    if B < 1 or T < 1:
        raise UserError(f"{path}: B {B}, T {T} make no batch; {remedy}")
    sizes = [B * T, B * T, B * T * config.vocab_size, 1, num_parameters(config)]
    _check_size(path, HEADER_BYTES + 4 * sum(sizes), remedy)
    body = np.memmap(path, dtype="<i4", mode="r", offset=HEADER_BYTES)
    x, y, logits, loss, grads = np.split(body, np.cumsum(sizes)[:-1])
    return DebugState(
        x.reshape(B, T), y.reshape(B, T), logits.view("<f4").reshape(B, T, config.vocab_size),
        float(loss.view("<f4")[0]), grads.view("<f4"),
    )


def write_debug_state(
    path: str | Path,
    config: Config,
    x: np.ndarray,
    y: np.ndarray,
    logits: np.ndarray,
    loss: float,
    grads: np.ndarray,
) -> None:
    """Writes a debug state, version 2, with arrays as `DebugState` has them; `path` appears whole or not at all."""
    B, T = x.shape
    if y.shape != (B, T) or logits.shape != (B, T, config.vocab_size):
        raise ValueError(f"x {x.shape}, y {y.shape} and logits {logits.shape} do not belong together")
    _check_length(grads, config)
    tokens = np.asarray(x, "<i4"), np.asarray(y, "<i4")
    numbers = np.asarray(logits, "<f4"), np.asarray([loss], "<f4"), np.asarray(grads, "<f4")
    _write(path, (make_header(DEBUG_STATE, 2, B, T), *tokens, *numbers))


# Training checkpoints

OPTIMIZER = 20241121
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of a state.json that is not ours
STEP = re.compile(r"step_\d{8,}")  # the name of a checkpoint
BEST = "best"                      # and of the one with the lowest validation loss
REPLACED = ".replaced.part"        # and what follows it while another is put in its place
LOCK = ".llm.cupy.lock"
SECONDS = 5                        # between two lines of progress
NONE: Mapping[str, bytes] = {}     # no tokenizer


def lock_checkpoints(directory: str | Path) -> Lock:
    """Takes a directory of checkpoints, which is made where it is missing, for the run that this process is, and gives
    back their names to those that a killed run was replacing.

    Raises UserError where another run has it for longer than a `Lock` waits, nothing can be written there, and where it
    is itself a checkpoint.
    """
    directory = Path(directory)
    above = os.path.normpath(directory / "..")
    if STEP.fullmatch(directory.name) or all((directory / name).exists() for name in ("model.bin", "state.json")):
        raise UserError(f"{directory} is a checkpoint, not a directory of checkpoints: use --checkpoint-dir {above}")
    lock = Lock(directory / LOCK, directory, "--checkpoint-dir", make=True)
    try:
        _put_back(directory)
    except OSError as error:
        lock.release()
        raise UserError(
            f"{directory}: cannot be written ({error.strerror.lower()}); choose another --checkpoint-dir"
        ) from None
    return lock


def save_checkpoint(
    directory: str | Path, step: int, config: Config, params, m, v, state: dict,
    tokenizer: Mapping[str, bytes] = NONE, name: str | None = None,
) -> Path:  # fmt: skip
    """Writes the checkpoint `directory/step_<step>`, or `directory/<name>`, and returns its path.

    params, m and v are fp32 (num_parameters,), on the host or the device, or iterators over such an array in pieces on
    the host; `state` is anything JSON can hold; `tokenizer` has the tokenizer's files by name, each of at
    least a byte. All is written and synced in a directory beside, which is then renamed, so the checkpoint appears
    complete or not at all. One that is already there under the same name is replaced. Raises UserError where the system
    refuses to write.
    """
    directory = Path(directory)
    final = directory / (name or f"step_{step:08d}")
    part = directory / f"{final.name}.part"
    replaced = directory / f"{final.name}{REPLACED}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _put_back(directory)
        _remove(*_named(directory, ".part"), *_named(directory, REPLACED))  # what a run that was killed left
        part.mkdir()
        try:
            files = {
                "model.bin": _write(part / "model.bin", _model_pieces(config, params)),
                "optimizer.bin": _write(part / "optimizer.bin", _optimizer_pieces(config, m, v)),
            }
            for name, content in tokenizer.items():
                files[name] = _write(part / name, [np.frombuffer(content, np.uint8)])
            record = json.loads(json.dumps({"step": step, "files": files, "state": state}))  # as a reader will see it
            with replacing(part / "state.json") as file:
                file.write(json.dumps(record | {"crc32": _record_crc32(record)}, indent=1).encode())
            _sync_directory(part)
            if final.exists():
                os.rename(final, replaced)
            try:
                os.rename(part, final)
            finally:
                _put_back(directory)
            _sync_directory(directory)
        finally:
            _remove(part, replaced)
    except OSError as error:
        raise UserError(f"{final}: cannot be written ({error.strerror.lower()})") from error
    return final


def _named(directory: Path, suffix: str) -> list[Path]:
    """What is named as checkpoints are, and then so."""
    return [*directory.glob(f"step_*{suffix}"), *directory.glob(f"{BEST}{suffix}")]


def _put_back(directory: Path) -> None:
    """Gives checkpoints their names back that were being replaced by others which never came to be."""
    for replaced in _named(directory, REPLACED):
        final = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if not final.exists():
            os.rename(replaced, final)


def checkpoints(directory: str | Path) -> list[Path]:
    """What is called a checkpoint in `directory`, whole or not, newest first, and BEST behind all others; also one that
    is being replaced, until the other is in its place. Raises UserError where it cannot be read."""
    directory = Path(directory)
    try:
        there = sorted(directory.iterdir(), reverse=True) if directory.is_dir() else []
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be read ({error.strerror.lower()}); choose another --checkpoint-dir"
        ) from None
    found = {path.name.removesuffix(REPLACED): path for path in there}  # of two with one name, the one without suffix
    steps = sorted((int(name.removeprefix("step_")), path) for name, path in found.items() if STEP.fullmatch(name))
    best = [found[BEST]] if BEST in found and found[BEST].is_dir() else []
    return [path for _, path in reversed(steps)] + best


def newest_checkpoint(directory: str | Path) -> Path | None:
    """The checkpoint of the highest step in `directory`, BEST where there is no other, or None where there is none.
    Raises UserError where one of its files is missing or not of full length, or its state.json damaged; an older one is
    named, but never taken for it."""
    newest = next(iter(checkpoints(directory)), None)
    if newest is not None:
        for name, expected in read_record(newest)["files"].items():
            _check_size(newest / name, expected["bytes"], _remedy(newest))
    return newest


def kept_loss(directory: str | Path, run: str, measure: dict) -> float:
    """The validation loss of the checkpoint BEST in `directory`; infinity where there is none. run and measure: the
    run's, and which data its losses are of, as `llmc.validation` says it.

    Raises UserError where what has that name is not complete, another run's, or its loss is of other data: a checkpoint
    that takes its place need not be better.
    """
    path = Path(directory) / BEST
    if not os.path.lexists(path):
        return math.inf
    remedy = f"move {path} away, or leave --best out"
    if not _is_complete(path):
        raise UserError(f"{path}: no checkpoint, or damaged; {remedy}")
    state = read_record(path)["state"]
    found = state.get("best")
    if not isinstance(found, dict) or type(found.get("val_loss")) is not float or math.isnan(found["val_loss"]):
        raise UserError(f"{path}: this checkpoint does not record its validation loss; {remedy}")
    if state.get("run") != run:
        raise UserError(f"{path}: this is the best checkpoint of another run; {remedy}")
    if found.get("val_data") != measure["val_data"]:
        raise UserError(f"{path}: its loss is of other validation data: name that data (-j, -i), {remedy}")
    if found != found | measure:
        before, now = found.get("val_batches"), measure["val_batches"]
        raise UserError(f"{path}: its loss is of {before} validation batches, and now of {now}: -m {before}, {remedy}")
    return found["val_loss"]


def _remedy(path: Path) -> str:
    """What to do about a checkpoint that is damaged."""
    older = _older(path)
    if older:
        return f"to resume from {older}, an older checkpoint that is complete, remove {path}"
    return f"there is no older checkpoint to resume from: remove {path} to start afresh"


def _older(path: Path) -> Path | None:
    """The newest of the complete checkpoints that are older than this one; beside BEST, the newest."""
    there = checkpoints(path.parent)
    older = there if path.name == BEST else dropwhile(lambda other: other != path, there)
    return next((other for other in older if other != path and _is_complete(other)), None)


def _is_complete(path: Path) -> bool:
    """Whether its files are all there, in full length."""
    try:
        return all((path / name).stat().st_size == of["bytes"] for name, of in _parse_record(path)["files"].items())
    except (*DAMAGE, OSError):
        return False


def load_checkpoint(
    path: str | Path, kind: type[Config]
) -> tuple[Config, dict[str, np.ndarray], np.ndarray, np.ndarray, dict]:
    """Reads the checkpoint directory `path`: (config, tensors, m, v, state). config and tensors are `read_model`'s; m
    and v are fp32 (num_parameters,), read-only.

    `state` is what `save_checkpoint` was given, and has the checkpoint's own step under "step". Every byte is checked
    against the recorded CRC-32. Raises UserError where a file is missing or damaged.
    """
    path = Path(path)
    record = read_record(path)
    for name, expected in record["files"].items():
        _check_file(path / name, expected, _remedy(path))
    config = read_model_header(path / "model.bin", kind)
    tensors = _tensors(path / "model.bin", config)
    n = num_parameters(config)
    moments = np.memmap(path / "optimizer.bin", dtype="<f4", mode="r", offset=HEADER_BYTES)
    if moments.size != 2 * n:
        raise UserError(f"{path / 'optimizer.bin'}: belongs to another model than model.bin beside it; {_remedy(path)}")
    return config, tensors, moments[:n], moments[n:], record["state"] | {"step": record["step"]}


def prune_checkpoints(directory: str | Path, keep: int, run: str) -> list[Path]:
    """Removes all but the `keep` newest of the complete checkpoints whose state says that they are of this run, and
    returns what it removed. 0 keeps all; BEST does not count, and stays.

    Raises UserError where the system refuses to.
    """
    own = [path for path in checkpoints(directory) if STEP.match(path.name) and _is_complete(path)] if keep > 0 else []
    own = [path for path in own if _parse_record(path)["state"].get("run") == run]
    for path in own[keep:]:
        doomed = path.with_name(f"{path.name}.pruned.part")  # no half-removed directory is ever called a checkpoint
        try:
            os.rename(path, doomed)
        except OSError as error:
            raise UserError(f"{path}: cannot be removed ({error.strerror.lower()})") from None
        _remove(doomed)
    return own[keep:]


def read_record(path: Path) -> dict:
    """What state.json of a checkpoint holds: its "step", "files", and as "state" what `save_checkpoint` was given.
    Raises UserError where it is missing or damaged."""
    name = path / "state.json"
    try:
        return _parse_record(path)
    except OSError as error:
        raise UserError(
            f"{name}: {error.strerror.lower()}; {path} is not a complete checkpoint; {_remedy(path)}"
        ) from None
    except DAMAGE:
        raise UserError(f"{name}: damaged; {_remedy(path)}") from None


def training_flags(model: Path) -> dict:
    """The flags that the model in a checkpoint was trained with, as far as they are recorded; none for a model by
    itself. Raises UserError as `read_record` does."""
    if model.name != "model.bin" or not os.path.lexists(model.parent / "state.json"):
        return {}
    return read_record(model.parent)["state"].get("flags", {})


def check_saved(file: Path) -> None:
    """Raises UserError where a file that lies in a checkpoint is not the one that was saved there, by its size and
    CRC-32, or the checkpoint's state.json is damaged. A file that lies anywhere else passes."""
    if os.path.realpath(file) != os.path.abspath(file):  # a link leads there
        file = Path(os.path.realpath(file))
    checkpoint = file.parent
    if not os.path.lexists(checkpoint / "state.json"):
        return
    expected = read_record(checkpoint)["files"].get(file.name)
    if expected is not None:
        older = _older(checkpoint)
        which = "another" if checkpoint.name == BEST else "an older"
        remedy = f"use {older}, {which} checkpoint that is complete" if older else "no older checkpoint is beside it"
        _check_file(file, expected, remedy)


def _check_saved_tokenizer(model: Path) -> None:
    """Raises UserError, as `check_saved` does, where the tokenizer's files that were saved with the model of a
    checkpoint are not the ones that lie beside it."""
    if model.name == "model.bin" and os.path.lexists(model.parent / "state.json"):
        for name in read_record(model.parent)["files"].keys() - {"model.bin", "optimizer.bin"}:
            check_saved(model.parent / name)


def _check_file(file: Path, expected: dict, remedy: str) -> None:
    """Raises UserError where a file does not have the size and the CRC-32 that were recorded."""
    _check_size(file, expected["bytes"], remedy)
    if _file_crc32(file) != expected["crc32"]:
        raise UserError(f"{file}: damaged (its CRC-32 is not the recorded one); {remedy}")


def _parse_record(path: Path) -> dict:
    with open_file(path / "state.json") as file:
        record = json.loads(file.read())
    if record.pop("crc32") != _record_crc32(record) or not {"step", "files", "state"} <= record.keys():
        raise ValueError("not what was written")
    return record


def _record_crc32(record: dict) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _file_crc32(path: Path) -> int:
    """The CRC-32 of a file. Where that takes long, the progress goes to stderr."""
    crc, shown = 0, time.monotonic()
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        while chunk := file.read(1 << 24):
            crc = zlib.crc32(chunk, crc)
            if time.monotonic() - shown > SECONDS and ranks.rank() == 0:
                shown = time.monotonic()
                ranks.say(f"checking {path}: {100 * file.tell() // size}% of {size:,} bytes")
    return crc


def _optimizer_pieces(config: Config, m, v) -> Iterator[np.ndarray]:
    yield make_header(OPTIMIZER, 1, *np.array([num_parameters(config)], "<i8").view("<i4"))
    for moment in (m, v):
        if isinstance(moment, Iterator):
            for piece in moment:  # noqa: UP028  (`yield from` would end it where this ends early)
                yield piece
        else:
            _check_length(moment, config)
            yield from device.pieces(moment)


def _write(path: str | Path, pieces: Iterable[np.ndarray]) -> dict:
    """Writes arrays one after the other; returns what a checkpoint records of the file."""
    crc = size = 0
    with replacing(path) as file:
        for array in pieces:
            data = memoryview(np.ascontiguousarray(array)).cast("B")
            file.write(data)
            crc = zlib.crc32(data, crc)
            size += len(data)
    return {"bytes": size, "crc32": crc}


def _check_length(values, config: Config) -> None:
    if values.shape != (num_parameters(config),):
        raise ValueError(f"expected {num_parameters(config)} values for {config}, got shape {values.shape}")


def _check_size(path: str | Path, expected: int, remedy: str) -> None:
    size = file_size(path, remedy)
    if size != expected:
        raise UserError(f"{path}: {size} bytes, but its header asks for {expected}: truncated or damaged; {remedy}")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(*directories: Path) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)

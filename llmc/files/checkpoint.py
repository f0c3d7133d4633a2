"""Models and training checkpoints on disk.

A model `.bin` is a header of 32-bit words, which the model's Config reads and writes, and then raw fp32 tensors; in
llm.c's version 5 they are bf16. A training checkpoint is a directory with all that a run needs to continue as if it had
never stopped:

    step_00000020/
      model.bin       the parameters, as a model
      optimizer.bin   header int32[256]: 20241121, 1, then the number of parameters as two int32, low half first;
                      fp32 m, then fp32 v, each in the order of the parameters
      model_tokenizer.bin, model_tokenizer.json and others
                      the files of the run's tokenizer, if it has one
      state.json      the step, the state of the run, and sizes and CRC-32 of the other files

If a run keeps the checkpoint with the lowest validation loss, this is named `best`, and its state has the loss.

Only the run that has locked the directory of its checkpoints changes anything there. To read a checkpoint, no lock is
needed.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, dropwhile
from pathlib import Path
from typing import BinaryIO

import device
from device.errors import UserError, say
from llmc.files import record as records
from llmc.files.directory import Directory, Lock, make_directory, why
from llmc.files.files import (
    HEADER_BYTES,
    crc32_of,
    file_size,
    first_word,
    make_header,
    read_header,
    replacing,
    script_of,
)
from llmc.model.tensors import Config, layout, num_parameters
from llmc.ranks import ranks

import numpy as np

# Models

FP32_VERSION = 3  # of llm.c's files; those in bf16 differ in the version and in the tensors' type only
ROUNDED = 1 << 20  # numbers that are rounded to bf16 at a time


def model_path(path: str | Path) -> Path:
    """The file of a model. `path` is this file, or the directory of its checkpoint, or a --checkpoint-dir. The last
    means the newest checkpoint there, and stderr names it.

    Raises UserError if a directory has no model, for a model in Hugging Face's format or a file of one, if the
    tokenizer in a checkpoint is not the one that was saved there, and as `newest_checkpoint` does.
    """
    path = Path(path)
    folder, file = (path, path / "model.bin") if path.is_dir() else (path.parent, path)
    if path.exists() and (folder / "config.json").is_file() and script_of(first_word(file))[1] is None:
        raise UserError(
            f"{path}: a model in Hugging Face's format; make a .bin of it: dev/hf/import_hf.py {folder} -o model.bin"
        )
    if not path.is_dir() or file.exists():
        _check_saved_tokenizer(file)
        return file
    newest = newest_checkpoint(path)
    if newest is None:
        raise UserError(f"{path}: neither a model.bin nor a checkpoint in it; name a .bin or a --checkpoint-dir")
    if ranks.rank() == 0:
        say(f"{path}: its newest checkpoint is {newest.name}")
    _check_saved_tokenizer(newest / "model.bin")
    return newest / "model.bin"


def read_model_header(path: str | Path, kind: type[Config], remedy: str | None = None) -> Config:
    """The sizes of the model in `path`.

    remedy: what to do if there is none (where to get one). Raises UserError if the file is missing, is of another kind
    or version, has senseless sizes, or is not as long as its own header says.
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
    """If a model file's weights have another type than the run's, a line that says how they are converted; else
    nothing."""
    in_file = device.BF16 if _is_bf16(read_header(path, kind.MAGIC, kind.FETCH, kind.HEADER_BYTES), kind) else None
    if in_file == device.BF16 and device.floatX != device.BF16:
        return f"{path}: its weights are bf16 and become fp32"
    if in_file != device.BF16 and device.floatX == device.BF16:
        return f"{path}: its weights are fp32; the model computes with them rounded to bf16"
    return ""


def read_model(
    path: str | Path, kind: type[Config], remedy: str | None = None
) -> tuple[Config, dict[str, np.ndarray]]:
    """The model in `path`: its sizes, and the file's tensors by name, in its order, fp32. They are read-only memory
    maps, or arrays if the file is in bf16.

    remedy, and UserError: as for `read_model_header`. Raises UserError also if a tensor that is no parameter is not 0,
    or if the file belongs to a checkpoint and is not the one that was saved (`check_saved`).
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
    """Writes parameters as a model file. params: fp32 (num_parameters,) in the order of their table, on the host or the
    device; or the tensors that `read_model` gives. bf16: rounds them to bf16, as llm.c's version 5.

    `path` appears whole or not at all. Raises UserError if the system refuses to write, or if llm.c has no such file.
    """
    pieces = _model_pieces(config, params)
    if bf16:
        header = next(pieces)
        if config.BF16_VERSION is None or header[1] != FP32_VERSION:
            raise UserError(f"{path}: llm.c has no file in bf16 for such a {config.NAME}: leave --dtype bf16 out")
        header[1] = config.BF16_VERSION
        pieces = chain([header], in_bf16(pieces))
    with replacing(path) as file:
        _write(file, pieces)


def in_bf16(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Contiguous fp32 arrays, rounded to bf16 a few numbers at a time. Raises UserError if a number that is finite
    would become infinity."""
    for whole in pieces:
        flat = whole.reshape(-1)
        for at in range(0, flat.size, ROUNDED):
            piece = flat[at : at + ROUNDED]
            rounded = device.to_bf16(piece)
            infinite = (rounded & 0x7FFF) == 0x7F80
            if (lost := piece[infinite & np.isfinite(piece)]).size:
                raise UserError(f"a weight is {lost[0]:g}, and bf16 ends before that: leave --dtype bf16 out")
            yield rounded


@contextmanager
def new_model(path: str | Path, config: Config) -> Iterator[dict[str, np.ndarray]]:
    """The tensors of a new model file, by name. They are all 0, and the block fills them. `path` appears when the block
    is done, or not at all. The tensors lie in the file itself, so a model may be larger than the memory.

    Raises UserError if the system refuses to write.
    """
    _, length = _file_layout(config)
    with replacing(path) as file:
        file.write(_header(config).tobytes())
        file.flush()
        os.posix_fallocate(file.fileno(), 0, config.HEADER_BYTES + 4 * length)  # a full disk fails here
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
    """Gives parts of a flat array. The array is on the host or the device, or an iterator over its pieces on the host.
    From an iterator, parts must be asked for in ascending order, so that there is never a whole copy."""

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


# Training checkpoints

OPTIMIZER = 20241121
STEP = re.compile(r"step_\d{8,}")  # the name of a checkpoint
BEST = "best"                      # the name of the one with the lowest validation loss
REPLACED = ".replaced.part"        # added to a name while another checkpoint replaces this one
PRUNED = ".pruned.part"            # added to a name before the checkpoint is removed
LEFT = re.compile(r"(step_\d{8,}|best)(\.replaced|\.pruned)?\.part")  # a directory that a killed run may leave
LOCK = ".llm.cupy.lock"
NONE: Mapping[str, bytes] = {}     # no tokenizer


def lock_checkpoints(directory: str | Path) -> Lock:
    """Locks a directory of checkpoints for this process's run. Makes the directory if it is missing. If a killed run
    was replacing checkpoints, gives these their names back. Removes what else such a run has left.

    Raises UserError if another run has the lock for longer than a `Lock` waits, if nothing can be written there, or if
    the directory is itself a checkpoint.
    """
    directory = Path(directory)
    above = os.path.normpath(directory / "..")
    if STEP.fullmatch(directory.name) or all((directory / name).exists() for name in ("model.bin", "state.json")):
        raise UserError(f"{directory} is a checkpoint, not a directory of checkpoints: use --checkpoint-dir {above}")
    lock = Lock(directory / LOCK, directory, "--checkpoint-dir", make=True)
    try:
        _clean(lock.directory)
    except OSError as error:
        lock.release()
        raise UserError(f"{directory}: cannot be written ({why(error)}); choose another --checkpoint-dir") from None
    return lock


def save_checkpoint(
    directory: Directory | str | Path, step: int, config: Config, params, m, v, state: dict,
    tokenizer: Mapping[str, bytes] = NONE, name: str | None = None,
) -> Path:  # fmt: skip
    """Writes the checkpoint `directory/step_<step>`, or `directory/<name>`, and returns its path.

    params, m and v are fp32 (num_parameters,), on the host or the device, or iterators over the pieces of such an array
    on the host. `state` is anything JSON can hold. `tokenizer` has the tokenizer's files by name, each of at least a
    byte. All is written and synced in a directory beside, which is then renamed, so the checkpoint appears complete or
    not at all. It replaces one of the same name, which is removed when the new one is on disk and not before. Raises
    UserError if the system refuses to write, and if a directory that is open is no longer at its path.
    """
    place = directory.path if isinstance(directory, Directory) else Path(directory)
    final = name or f"step_{step:08d}"
    part, replaced = f"{final}.part", f"{final}{REPLACED}"
    try:
        where = _opened(directory)
        where.check_in_place()
        _clean(where)
        inside = where.make(part)
        try:
            pieces = {
                "model.bin": _model_pieces(config, params),
                "optimizer.bin": _optimizer_pieces(config, m, v),
            } | {name: [np.frombuffer(content, np.uint8)] for name, content in tokenizer.items()}
            files = {}
            for file_name, contents in pieces.items():
                with inside.new_file(file_name) as file:
                    files[file_name] = _write(file, contents)
            record = json.loads(json.dumps({"step": step, "files": files, "state": state}))  # as a reader will see it
            with inside.new_file("state.json") as file:
                file.write(json.dumps(record | {"crc32": records.crc32(record)}, indent=1).encode())
            inside.sync()
            if final in where.names():
                where.rename(final, replaced)
            try:
                where.rename(part, final)
            finally:
                _put_back(where)
        except BaseException:
            _remove(where, part)
            raise
        where.sync()
        _remove(where, replaced)
    except OSError as error:
        raise UserError(f"{place / final}: cannot be written ({why(error)})") from error
    return place / final


def _opened(directory: Directory | str | Path) -> Directory:
    if isinstance(directory, Directory):
        return directory
    make_directory(Path(directory))
    return Directory(directory)


def _clean(where: Directory) -> None:
    """Gives checkpoints their names back, if a run was replacing them and did not finish. Then removes what it left."""
    if any(LEFT.fullmatch(name) for name in where.names()):
        _put_back(where)
        where.sync()  # a replaced checkpoint goes when the other one is on disk
        _remove(where, *(name for name in where.names() if LEFT.fullmatch(name)))


def _put_back(where: Directory) -> None:
    names = where.names()
    for name in names:
        final = name.removesuffix(REPLACED)
        if LEFT.fullmatch(name) and name != final not in names:
            where.rename(name, final)


def checkpoints(directory: str | Path) -> list[Path]:
    """The paths in `directory` with the name of a checkpoint, whole or not, newest first, and BEST last. A checkpoint
    that is being replaced counts until the other is in its place. Raises UserError if the directory cannot be read."""
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
    """The checkpoint of the highest step in `directory`; BEST if there is no other; None if there is none. Raises
    UserError if one of its files is missing or too short, or if its state.json is damaged. The message names an older
    checkpoint, but this function never returns the older one instead."""
    newest = next(iter(checkpoints(directory)), None)
    if newest is not None:
        for name, expected in read_record(newest)["files"].items():
            _check_size(newest / name, expected["bytes"], _remedy(newest))
    return newest


def kept_loss(directory: str | Path, run: str, measure: dict) -> float:
    """The validation loss of the checkpoint BEST in `directory`; infinity if there is none. run: what identifies the
    run. measure: which data its losses are of, from `llmc.run.validation`.

    Raises UserError if BEST is not complete, belongs to another run, or has a loss of other data: then a checkpoint
    that replaces it need not be better.
    """
    path = Path(directory) / BEST
    if not os.path.lexists(path):
        path = Path(directory) / f"{BEST}{REPLACED}"  # as a save that failed may leave it
    if not os.path.lexists(path):
        return math.inf
    remedy = f"move {path} away, or leave --best out"
    if not _is_complete(path):
        raise UserError(f"{path}: no checkpoint, or damaged; {remedy}")
    state = read_record(path)["state"]
    if "best" not in state or state.get("run") != run:
        raise UserError(f"{path}: this is not the best checkpoint of this run; {remedy}")
    found = state["best"]
    if found != found | measure:
        before = f"of other validation data (-j, -i) or not of {measure['val_batches']} batches (-m)"
        raise UserError(f"{path}: its loss is {before}; {remedy}")
    return found["val_loss"]


def _remedy(path: Path) -> str:
    """What to do about a checkpoint that is damaged: take the newest complete one that is older. For BEST, the newest
    complete one."""
    there = checkpoints(path.parent)
    older = there if path.name == BEST else dropwhile(lambda other: other != path, there)
    for other in older:
        if other != path and _is_complete(other):
            return f"use {other}, which is complete; to resume from it, remove {path}"
    return f"no older checkpoint is beside it: to start afresh, remove {path}"


def _is_complete(path: Path) -> bool:
    """Whether all its files are there, in full length."""
    try:
        files = records.read_record(path)["files"]
        return all((path / name).stat().st_size == expected["bytes"] for name, expected in files.items())
    except (ValueError, OSError):
        return False


def load_checkpoint(
    path: str | Path, kind: type[Config]
) -> tuple[Config, dict[str, np.ndarray], np.ndarray, np.ndarray, dict]:
    """Reads the checkpoint directory `path`: (config, tensors, m, v, state). config and tensors are `read_model`'s; m
    and v are fp32 (num_parameters,), read-only.

    `state` is what `save_checkpoint` was given, and has the checkpoint's own step under "step". Every byte is checked
    against the recorded CRC-32. Raises UserError if a file is missing or damaged.
    """
    path = Path(path)
    record = read_record(path)
    for name, expected in record["files"].items():
        _check_file(path / name, expected, _remedy(path))
    try:
        config = read_model_header(path / "model.bin", kind)
        tensors = _tensors(path / "model.bin", config)
        moments = np.memmap(path / "optimizer.bin", dtype="<f4", mode="r", offset=HEADER_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({why(error)}); {_remedy(path)}") from None
    n = num_parameters(config)
    if moments.size != 2 * n:
        raise UserError(f"{path / 'optimizer.bin'}: belongs to another model than model.bin beside it; {_remedy(path)}")
    return config, tensors, moments[:n], moments[n:], record["state"] | {"step": record["step"]}


def prune_checkpoints(directory: Directory | str | Path, keep: int, run: str) -> list[Path]:
    """Removes the complete checkpoints whose state says that they are of this run, except the `keep` newest. Returns
    what it removed. 0 keeps all. BEST does not count, and stays.

    Raises UserError if the system refuses, or as `save_checkpoint` and `read_record` do.
    """
    where = _opened(directory)
    own = [path for path in checkpoints(where.path) if STEP.match(path.name) and _is_complete(path)] if keep > 0 else []
    doomed = [path for path in own if read_record(path)["state"].get("run") == run][keep:]
    for path in doomed:
        try:
            where.check_in_place()
            where.rename(path.name, path.name + PRUNED)  # so no half-removed directory has the name of a checkpoint
            where.sync()
        except OSError as error:
            raise UserError(f"{path}: cannot be removed ({why(error)})") from None
        _remove(where, path.name + PRUNED)
    return doomed


def read_record(path: Path) -> dict:
    """The record of a checkpoint (record.py). Raises UserError if the file is missing or damaged."""
    name = path / "state.json"
    try:
        return records.read_record(path)
    except OSError as error:
        raise UserError(
            f"{name}: {error.strerror.lower()}; {path} is not a complete checkpoint; {_remedy(path)}"
        ) from None
    except ValueError as error:
        raise UserError(f"{name}: damaged: {error}; {_remedy(path)}") from None


def training_flags(model: Path) -> dict:
    """The flags with which the model in a checkpoint was trained, if they are recorded. Empty for a model outside
    a checkpoint. Raises UserError as `read_record` does."""
    if model.name != "model.bin" or not os.path.lexists(model.parent / "state.json"):
        return {}
    return read_record(model.parent)["state"].get("flags", {})


def check_saved(file: Path) -> None:
    """Raises UserError if a file in a checkpoint is not the one that was saved there, by its size and CRC-32, or if the
    checkpoint's state.json is damaged. A file anywhere else passes."""
    if os.path.realpath(file) != os.path.abspath(file):  # it is a link
        file = Path(os.path.realpath(file))
    checkpoint = file.parent
    if not os.path.lexists(checkpoint / "state.json"):
        return
    expected = read_record(checkpoint)["files"].get(file.name)
    if expected is not None:
        _check_file(file, expected, _remedy(checkpoint))


def _check_saved_tokenizer(model: Path) -> None:
    """Raises UserError, as `check_saved` does, if the tokenizer's files beside the model of a checkpoint are not the
    ones that were saved with it."""
    if model.name == "model.bin" and os.path.lexists(model.parent / "state.json"):
        for name in read_record(model.parent)["files"].keys() - {"model.bin", "optimizer.bin"}:
            check_saved(model.parent / name)


def _check_file(file: Path, expected: dict, remedy: str) -> None:
    """Raises UserError if a file does not have the recorded size and CRC-32, or cannot be read."""
    _check_size(file, expected["bytes"], remedy)
    try:
        found = crc32_of(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({why(error)}); {remedy}") from None
    if found != expected["crc32"]:
        raise UserError(f"{file}: damaged (its CRC-32 is not the recorded one); {remedy}")


def _optimizer_pieces(config: Config, m, v) -> Iterator[np.ndarray]:
    yield make_header(OPTIMIZER, 1, *np.array([num_parameters(config)], "<i8").view("<i4"))
    for moment in (m, v):
        if isinstance(moment, Iterator):
            for piece in moment:  # noqa: UP028  (`yield from` would end it where this ends early)
                yield piece
        else:
            _check_length(moment, config)
            yield from device.pieces(moment)


def _write(file: BinaryIO, pieces: Iterable[np.ndarray]) -> dict:
    """Writes arrays one after the other. Returns what a checkpoint records about the file."""
    crc = size = 0
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


def _remove(where: Directory, *names: str) -> None:
    """Removes directories, as far as the system lets us. Files, which no run of ours makes, stay."""
    for name in names:
        if where.is_directory(name):
            with suppress(OSError):
                where.remove(name)

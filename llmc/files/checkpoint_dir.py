"""A directory of checkpoints (--checkpoint-dir): which it has, which of them are whole, and how they come and go.

    step_00000020/   the checkpoint of a step; checkpoint.py says what is in it
    best/            the checkpoint with the lowest validation loss, if the run keeps one; its state has the loss

Only the run that has locked the directory changes anything there. To read a checkpoint, no lock is needed. A checkpoint
appears whole or not at all: it is written under a name that ends in `.part`, and renamed when all of it is on disk.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path

from device.errors import UserError, say
from llmc.files.directory import Directory, Lock, exists, make_directory, why
from llmc.files.files import check_size, crc32_of
from llmc.files.record import load_record

STEP = re.compile(r"step_\d{8,}")  # the name of a checkpoint
BEST = "best"                      # the name of the one with the lowest validation loss
REPLACED = ".replaced.part"        # added to a name while another checkpoint replaces this one
PRUNED = ".pruned.part"            # added to a name before the checkpoint is removed
LEFT = re.compile(r"(step_\d{8,}|best)(\.replaced|\.pruned)?\.part")  # a directory that a killed run may leave
FILE = re.compile(r"state\.json|optimizer\.bin|model(\.bin|_[\w.-]+)")  # of a checkpoint; model_… are the tokenizer's
LOCK = ".llm.cupy.lock"


# Which checkpoints there are


def checkpoints(directory: str | Path) -> list[Path]:
    """The paths in `directory` with the name of a checkpoint, whole or not, newest first, and BEST last. A checkpoint
    that is being replaced counts until the other is in its place. Raises UserError if the directory cannot be read."""
    directory = Path(directory)
    try:
        there = sorted(directory.iterdir(), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        there = []
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be read ({why(error)}); choose another --checkpoint-dir"
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
            check_size(newest / name, expected["bytes"], remedy_for(newest))
    return newest


def remedy_for(path: Path) -> str:
    """What to do about a damaged checkpoint: use the newest whole one that is older; for BEST, the newest whole one."""
    there = checkpoints(path.parent)
    older = there if path.name == BEST else dropwhile(lambda other: other != path, there)
    for other in older:
        if other != path and is_whole(other):
            return f"use {other}, which is complete; to resume from it, move {path} away"
    return f"no older checkpoint is beside it: to start afresh, move {path} away"


def is_whole(path: Path) -> bool:
    """Whether all files of a checkpoint are there, in full length."""
    try:
        files = load_record(path)["files"]
        return all((path / name).stat().st_size == expected["bytes"] for name, expected in files.items())
    except (ValueError, OSError):
        return False


# What a checkpoint has recorded


def read_record(path: Path) -> dict:
    """The record of a checkpoint (record.py). Raises UserError if the file is missing or damaged."""
    name = path / "state.json"
    try:
        return load_record(path)
    except FileNotFoundError:
        raise UserError(f"{name}: not there, so {path} is not a complete checkpoint; {remedy_for(path)}") from None
    except OSError as error:
        remedy = f"try again; if it stays so, {remedy_for(path)}"
        raise UserError(f"{name}: cannot be read ({why(error)}); {remedy}") from None
    except ValueError as error:
        raise UserError(f"{name}: damaged: {error}; {remedy_for(path)}") from None


def training_flags(model: Path) -> dict:
    """The flags with which the model in a checkpoint was trained, if they are recorded. Empty for a model outside
    a checkpoint. Raises UserError as `read_record` does."""
    if model.name != "model.bin" or not exists(model.parent / "state.json"):
        return {}
    return read_record(model.parent)["state"].get("flags", {})


def kept_loss(directory: str | Path, run: str, measure: dict) -> float:
    """The validation loss of the checkpoint BEST in `directory`; infinity if there is none. run: what identifies the
    run. measure: which data its losses are of, from `llmc.run.validation`.

    Raises UserError if BEST is not whole, belongs to another run, or has a loss of other data: then a checkpoint that
    replaces it need not be better.
    """
    places = [Path(directory) / name for name in (BEST, f"{BEST}{REPLACED}")]  # the latter after a save that failed
    try:
        path = next(filter(exists, places), None)
    except OSError as error:
        raise UserError(f"{places[0]}: cannot be read ({why(error)}); try again, or leave --best out") from None
    if path is None:
        return math.inf
    remedy = f"move {path} away, or leave --best out"
    if not is_whole(path):
        raise UserError(f"{path}: no checkpoint, or damaged; {remedy}")
    state = read_record(path)["state"]
    if "best" not in state or state.get("run") != run:
        raise UserError(f"{path}: this is not the best checkpoint of this run; {remedy}")
    found = state["best"]
    if found != found | measure:
        before = f"of other validation data (-j, -i) or not of {measure['val_batches']} batches (-m)"
        raise UserError(f"{path}: its loss is {before}; {remedy}")
    return found["val_loss"]


def check_files(path: Path) -> dict:
    """Reads every byte of a checkpoint. Returns its record. Raises UserError if a file is not the one that was
    saved."""
    record = read_record(path)
    for name, expected in record["files"].items():
        _check_file(path / name, expected, remedy_for(path))
    return record


def check_saved(file: Path) -> None:
    """Raises UserError if a file in a checkpoint is not the one that was saved there, by its size and CRC-32, or if the
    checkpoint's state.json is damaged. A file anywhere else passes."""
    if os.path.realpath(file) != os.path.abspath(file):  # it is a link
        file = Path(os.path.realpath(file))
    checkpoint = file.parent
    if not exists(checkpoint / "state.json"):
        return
    expected = read_record(checkpoint)["files"].get(file.name)
    if expected is not None:
        _check_file(file, expected, remedy_for(checkpoint))


def check_saved_tokenizer(model: Path) -> None:
    """Raises UserError, as `check_saved` does, if the tokenizer's files beside the model of a checkpoint are not the
    ones that were saved with it."""
    if model.name == "model.bin" and exists(model.parent / "state.json"):
        for name in read_record(model.parent)["files"].keys() - {"model.bin", "optimizer.bin"}:
            check_saved(model.parent / name)


def _check_file(file: Path, expected: dict, remedy: str) -> None:
    """Raises UserError if a file does not have the recorded size and CRC-32, or cannot be read."""
    check_size(file, expected["bytes"], remedy)
    try:
        found = crc32_of(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({why(error)}); try again; if it stays so, {remedy}") from None
    if found != expected["crc32"]:
        raise UserError(f"{file}: damaged (its CRC-32 is not the recorded one); {remedy}")


# How checkpoints come and go


def lock_checkpoints(directory: str | Path) -> Lock:
    """Locks a directory of checkpoints for this process's run. Makes the directory if it is missing. If a killed run
    was replacing checkpoints, gives these their names back. Removes what else such a run has left.

    Raises UserError if another run has the lock for longer than a `Lock` waits, if nothing can be written there, if a
    directory has a name that we take and files that are not ours, or if the directory is itself a checkpoint.
    """
    directory = Path(directory)
    above = os.path.normpath(directory / "..")
    if STEP.fullmatch(directory.name) or all((directory / name).exists() for name in ("model.bin", "state.json")):
        raise UserError(f"{directory} is a checkpoint, not a directory of checkpoints: use --checkpoint-dir {above}")
    lock = Lock(directory / LOCK, directory, "--checkpoint-dir", make=True)
    try:
        _clean(lock.directory)
    except UserError:
        lock.release()
        raise
    except OSError as error:
        lock.release()
        raise UserError(f"{directory}: cannot be written ({why(error)}); choose another --checkpoint-dir") from None
    return lock


@contextmanager
def new_checkpoint(directory: Directory | str | Path, name: str) -> Iterator[Directory]:
    """A new directory below `directory`, to which the block writes a checkpoint's files. It gets its name when the
    block is done and all of it is on disk. It replaces a checkpoint of the same name, which is removed when the new one
    is on disk and not before. If the block fails, it leaves nothing behind.

    Raises UserError if the system refuses to write, and if a directory that is open is no longer at its path.
    """
    place = directory.path if isinstance(directory, Directory) else Path(directory)
    part, replaced = f"{name}.part", f"{name}{REPLACED}"
    try:
        where = _opened(directory)
        where.check_in_place()
        _clean(where)
        inside = where.make(part)
        try:
            yield inside
            inside.sync()
            if name in where.names():
                _check_ours(where, name)
                where.rename(name, replaced)
            try:
                where.rename(part, name)
            finally:
                _put_back(where)
        except BaseException:
            _remove(where, part)
            raise
        where.sync()
        _remove(where, replaced)
    except OSError as error:
        raise UserError(f"{place / name}: cannot be written ({why(error)})") from error


def prune_checkpoints(directory: Directory | str | Path, keep: int, run: str) -> list[Path]:
    """Removes the checkpoints of a run, except the `keep` newest. 0 keeps all. Returns what it removed. A checkpoint
    counts if it is whole and its state names this run. BEST does not count, and stays.

    Raises UserError if the system refuses, if a checkpoint has other files than its own, which then stay, or as
    `new_checkpoint` and `read_record` do.
    """
    where = _opened(directory)
    own = [path for path in checkpoints(where.path) if STEP.match(path.name) and is_whole(path)] if keep > 0 else []
    doomed = [path for path in own if read_record(path)["state"].get("run") == run][keep:]
    removed, refused = [], None
    for path in doomed:
        try:
            where.check_in_place()
            _check_ours(where, path.name)
            where.rename(path.name, path.name + PRUNED)  # so no half-removed directory has the name of a checkpoint
            where.sync()
        except OSError as error:
            raise UserError(f"{path}: cannot be removed ({why(error)})") from None
        except UserError as error:  # it stays, and the others go
            refused = error
            continue
        _remove(where, path.name + PRUNED)
        removed.append(path)
    if refused:
        raise refused
    return removed


def _opened(directory: Directory | str | Path) -> Directory:
    if isinstance(directory, Directory):
        return directory
    make_directory(Path(directory))
    return Directory(directory)


def _clean(where: Directory) -> None:
    """Gives checkpoints their names back, if a run was replacing them and did not finish. Then removes what it left."""
    left = [name for name in where.names() if LEFT.fullmatch(name)]
    for name in left:
        _check_ours(where, name)
    if left:
        _put_back(where)
        where.sync()  # a replaced checkpoint goes when the other one is on disk
        _remove(where, *(name for name in where.names() if LEFT.fullmatch(name)))


def _put_back(where: Directory) -> None:
    """Gives each replaced checkpoint its name back, unless another checkpoint has the name by now."""
    names = where.names()
    for name in names:
        final = name.removesuffix(REPLACED)
        if LEFT.fullmatch(name) and name != final not in names:
            where.rename(name, final)


def _check_ours(where: Directory, name: str) -> None:
    """Raises UserError if a directory that a run would remove has files that no checkpoint has."""
    if where.is_directory(name):
        inside = Directory(where.path / name, where)
        for each in inside.names():
            if not FILE.fullmatch(each) or inside.is_directory(each):
                raise UserError(f"{inside.path}: a run would remove it, and its {each} is not ours: move it away")


def _remove(where: Directory, *names: str) -> None:
    """Removes directories, as far as the system lets us, and says in a line where it does not. Files, which no run of
    ours makes, stay."""
    for name in names:
        try:
            if where.is_directory(name):
                where.remove(name)
        except OSError as error:
            say(f"{where.path / name}: not removed ({why(error)}); the next run here tries again")

"""Models, debug states and training checkpoints on disk.

A model `.bin` and a debug state `.bin` are llm.c's own formats: a header of 256 int32, then raw fp32 tensors.
A training checkpoint is a directory that holds all a run needs to go on as if it had never stopped:

    step_00000020/
      model.bin       the parameters, as an llm.c model
      optimizer.bin   header int32[256]: 20241121, 1, then the number of parameters as two int32, low half first;
                      fp32 m, then fp32 v, each in the order of the parameters
      state.json      the step, what the run wants remembered, and sizes and CRC-32 of the other two files
"""

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmc.errors import UserError
from llmc.files import DEBUG_STATE, HEADER_BYTES, MODEL, file_size, make_header, read_header, replacing

FETCH = "fetch it with dev/download_starter_pack.sh, or start from random weights with -e d12"


@dataclass(frozen=True)
class GPT2Config:
    """The sizes that fix every tensor of the model. The names in brackets are the ones used for shapes."""

    max_seq_len: int        # (maxT) longest sequence: rows of wpe
    vocab_size: int         # (V) tokens that the tokenizer knows
    padded_vocab_size: int  # (Vp) V rounded up to a multiple of 128: rows of wte
    num_layers: int         # (L)
    num_heads: int          # (NH)
    channels: int           # (C)

    def check(self, source: str) -> None:
        """Raises UserError, naming `source`, for sizes that make no model."""
        for name, value in vars(self).items():
            if value < 1:
                raise UserError(f"{source}: {name} is {value}; it must be at least 1")
        if self.channels % self.num_heads:
            raise UserError(f"{source}: {self.channels} channels cannot be split among {self.num_heads} heads evenly")
        if self.padded_vocab_size < self.vocab_size or self.padded_vocab_size % 128:
            raise UserError(
                f"{source}: padded_vocab_size is {self.padded_vocab_size}; "
                f"it must be a multiple of 128, no less than vocab_size {self.vocab_size}"
            )


def num_parameters(config: GPT2Config) -> int:
    """How many fp32 numbers a model has, padding of the vocabulary included."""
    C = config.channels
    embeddings = (config.padded_vocab_size + config.max_seq_len) * C
    weights = (3 + 1 + 4 + 4) * C * C  # qkv, attproj, fc, fcproj
    biases_and_layernorms = (3 + 1 + 4 + 1) * C + 4 * C
    return embeddings + config.num_layers * (weights + biases_and_layernorms) + 2 * C


# Models


def read_model_header(path: str | Path) -> GPT2Config:
    """The sizes of the model in `path`, an llm.c `.bin` of version 3.

    Raises UserError where the file is missing, of another kind or version, has senseless sizes, or is not as long as
    its own header says.
    """
    header = read_header(path, MODEL, FETCH)
    version = int(header[1])
    if version != 3:
        kind = {1: "fp32 without padding", 2: "bf16 without padding", 5: "bf16"}.get(version, "unknown")
        raise UserError(f"{path}: model version {version} ({kind}); version 3 (fp32) is needed: {FETCH}")
    max_seq_len, vocab_size, num_layers, num_heads, channels, padded_vocab_size = (int(n) for n in header[2:8])
    config = GPT2Config(max_seq_len, vocab_size, padded_vocab_size, num_layers, num_heads, channels)
    config.check(str(path))
    _check_size(path, HEADER_BYTES + 4 * num_parameters(config))
    return config


def read_model(path: str | Path) -> tuple[GPT2Config, np.ndarray]:
    """The model in `path`: its sizes, and its parameters as one read-only memory map, fp32 (num_parameters,).

    Raises UserError as `read_model_header` does.
    """
    config = read_model_header(path)
    return config, np.memmap(path, dtype="<f4", mode="r", offset=HEADER_BYTES)


def write_model(path: str | Path, config: GPT2Config, params: np.ndarray) -> None:
    """Writes parameters, fp32 (num_parameters,) in the file's order, as an llm.c model of version 3.

    `path` appears whole or not at all. Raises UserError where the system refuses to write.
    """
    _write(path, _model_header(config), _flat(params, config))


def _model_header(config: GPT2Config) -> np.ndarray:
    return make_header(
        MODEL, 3, config.max_seq_len, config.vocab_size,
        config.num_layers, config.num_heads, config.channels, config.padded_vocab_size,
    )


# Debug states: a batch, and what one forward and backward pass of a reference implementation made of it


@dataclass(frozen=True)
class DebugState:
    """What a debug state `.bin` holds. logits have no padding; grads do, as the model's parameters."""

    x: np.ndarray       # int32 (B, T), inputs
    y: np.ndarray       # int32 (B, T), targets
    logits: np.ndarray  # fp32 (B, T, V)
    loss: float         # mean over the batch
    grads: np.ndarray   # fp32 (num_parameters,), of the mean loss, in the order of the parameters


def read_debug_state(path: str | Path, config: GPT2Config) -> DebugState:
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
    sizes = np.array([B * T, B * T, B * T * config.vocab_size, 1, num_parameters(config)], dtype=np.int64)
    _check_size(path, HEADER_BYTES + 4 * int(sizes.sum()), remedy)
    body = np.memmap(path, dtype="<i4", mode="r", offset=HEADER_BYTES)
    x, y, logits, loss, grads = np.split(body, np.cumsum(sizes)[:-1])
    return DebugState(
        x.reshape(B, T), y.reshape(B, T), logits.view("<f4").reshape(B, T, config.vocab_size),
        float(loss.view("<f4")[0]), grads.view("<f4"),
    )


def write_debug_state(
    path: str | Path,
    config: GPT2Config,
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
    numbers = np.asarray(logits, "<f4"), np.asarray([loss], "<f4"), _flat(grads, config)
    _write(path, make_header(DEBUG_STATE, 2, B, T), np.asarray(x, "<i4"), np.asarray(y, "<i4"), *numbers)


# Training checkpoints

OPTIMIZER = 20241121
OLDER = "resume from an older checkpoint, or remove this one"


def save_checkpoint(
    directory: str | Path, step: int, config: GPT2Config, params: np.ndarray, m: np.ndarray, v: np.ndarray, state: dict
) -> Path:
    """Writes the checkpoint `directory/step_<step>` and returns its path.

    params, m and v are fp32 (num_parameters,); `state` is anything JSON can hold. All is written and synced in a
    directory beside, which is then renamed, so the checkpoint appears complete or not at all. One that is already
    there for the same step is replaced. Raises UserError where the system refuses to write.
    """
    directory = Path(directory)
    final = directory / f"step_{step:08d}"
    part = directory / f"{final.name}.part"
    replaced = directory / f"{final.name}.replaced.part"
    n = num_parameters(config)
    optimizer_header = make_header(OPTIMIZER, 1, *np.array([n], "<i8").view("<i4"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove(*directory.glob("step_*.part"))  # what a run that was killed left
        part.mkdir()
        try:
            files = {
                "model.bin": _write(part / "model.bin", _model_header(config), _flat(params, config)),
                "optimizer.bin": _write(part / "optimizer.bin", optimizer_header, _flat(m, config), _flat(v, config)),
            }
            record = json.loads(json.dumps({"step": step, "files": files, "state": state}))  # as a reader will see it
            with replacing(part / "state.json") as file:
                file.write(json.dumps(record | {"crc32": _record_crc32(record)}, indent=1).encode())
            _sync_directory(part)
            if final.exists():
                os.rename(final, replaced)
            os.rename(part, final)
            _sync_directory(directory)
        finally:
            _remove(part, replaced)
    except OSError as error:
        raise UserError(f"{final}: cannot be written ({error.strerror.lower()})") from error
    return final


def check_checkpoint_directory(directory: str | Path) -> None:
    """Raises UserError where `save_checkpoint` could not write to `directory`, which need not exist. Makes nothing."""
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{directory}: checkpoints cannot be written there; choose another --checkpoint-dir")


def newest_checkpoint(directory: str | Path) -> Path | None:
    """The checkpoint of the highest step in `directory` whose files are all there in full length, or None."""
    return next(iter(_complete_checkpoints(directory)), None)


def load_checkpoint(path: str | Path) -> tuple[GPT2Config, np.ndarray, np.ndarray, np.ndarray, dict]:
    """Reads the checkpoint directory `path`: (config, params, m, v, state), arrays fp32 (num_parameters,), read-only.

    `state` is what `save_checkpoint` was given, and has the checkpoint's own step under "step". Every byte is checked
    against the recorded CRC-32. Raises UserError where a file is missing or damaged.
    """
    path = Path(path)
    record = _read_record(path)
    for name, expected in record["files"].items():
        _check_size(path / name, expected["bytes"], OLDER)
        if _file_crc32(path / name) != expected["crc32"]:
            raise UserError(f"{path / name}: damaged (its CRC-32 is not the recorded one); {OLDER}")
    config, params = read_model(path / "model.bin")
    n = num_parameters(config)
    moments = np.memmap(path / "optimizer.bin", dtype="<f4", mode="r", offset=HEADER_BYTES)
    if moments.size != 2 * n:
        raise UserError(f"{path / 'optimizer.bin'}: made for another model than model.bin beside it; {OLDER}")
    return config, params, moments[:n], moments[n:], record["state"] | {"step": record["step"]}


def prune_checkpoints(directory: str | Path, keep: int) -> list[Path]:
    """Removes all but the `keep` newest complete checkpoints, and returns what it removed. 0 keeps all.

    Raises UserError where the system refuses to.
    """
    old = _complete_checkpoints(directory)[keep:] if keep > 0 else []
    for path in old:
        doomed = path.with_name(f"{path.name}.replaced.part")  # no half-removed directory is ever called a checkpoint
        try:
            os.rename(path, doomed)
        except OSError as error:
            raise UserError(f"{path}: cannot be removed ({error.strerror.lower()})") from None
        _remove(doomed)
    return old


def _complete_checkpoints(directory: str | Path) -> list[Path]:
    """Newest first."""
    complete = []
    directory = Path(directory)
    for path in directory.iterdir() if directory.is_dir() else ():
        if not re.fullmatch(r"step_\d{8,}", path.name):
            continue
        try:
            files = _read_record(path)["files"]
            if all((path / name).stat().st_size == expected["bytes"] for name, expected in files.items()):
                complete.append(path)
        except (UserError, OSError):
            continue
    return sorted(complete, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def _read_record(path: Path) -> dict:
    name = path / "state.json"
    try:
        record = json.loads(name.read_bytes())
        intact = record.pop("crc32") == _record_crc32(record) and {"step", "files", "state"} <= record.keys()
    except OSError as error:
        raise UserError(f"{name}: {error.strerror.lower()}; {path} is not a complete checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise UserError(f"{name}: damaged; {OLDER}")
    return record


def _record_crc32(record: dict) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _file_crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            crc = zlib.crc32(chunk, crc)
    return crc


def _write(path: str | Path, *arrays: np.ndarray) -> dict:
    """Writes arrays one after the other; returns what a checkpoint records of the file."""
    crc = size = 0
    with replacing(path) as file:
        for array in arrays:
            data = memoryview(np.ascontiguousarray(array)).cast("B")
            file.write(data)
            crc = zlib.crc32(data, crc)
            size += len(data)
    return {"bytes": size, "crc32": crc}


def _flat(values: np.ndarray, config: GPT2Config) -> np.ndarray:
    if values.shape != (num_parameters(config),):
        raise ValueError(f"expected {num_parameters(config)} values for {config}, got shape {values.shape}")
    return np.asarray(values, "<f4")


def _check_size(path: str | Path, expected: int, remedy: str = FETCH) -> None:
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

"""A model in a file: a header of 32-bit words, which the model's Config reads and writes, and then raw fp32 tensors.

In llm.c's version 5 the tensors are bf16. A file may be larger than the memory: tensors are read as memory maps, and
written a piece at a time.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import device
from device.errors import UserError
from llmc.files.checkpoint_dir import check_saved
from llmc.files.files import check_size, map_file, read_header, replacing, write_arrays
from llmc.files.interrupted import repeated
from llmc.model.tensors import Config, layout, num_parameters

import numpy as np

FP32_VERSION = 3  # of llm.c's files; those in bf16 differ only in the version and in the tensors' type
ROUNDED = 1 << 20  # numbers that are rounded to bf16 at a time


# Reading


def read_model_header(path: str | Path, kind: type[Config], remedy: str | None = None) -> Config:
    """The sizes of the model in `path`.

    remedy: what to do if there is no such file (where to get one). Raises UserError if the file is missing, is of
    another kind or version, has senseless sizes, or is not as long as its own header says.
    """
    header = read_header(path, kind.MAGIC, remedy or kind.FETCH, kind.HEADER_BYTES)
    itemsize = 2 if _is_bf16(header, kind) else 4
    header[1] = FP32_VERSION if itemsize == 2 else header[1]
    config = kind.from_header(header, str(path))
    config.check(str(path))
    check_size(path, kind.HEADER_BYTES + itemsize * _file_layout(config)[1], remedy or kind.FETCH)
    return config


def read_model(
    path: str | Path, kind: type[Config], remedy: str | None = None
) -> tuple[Config, dict[str, np.ndarray]]:
    """The model in `path`: its sizes, and the file's tensors (`map_tensors`).

    remedy, and UserError: as for `read_model_header`. Raises UserError also if a tensor that is no parameter is not 0,
    or if the file belongs to a checkpoint and is not the one that was saved (`check_saved`).
    """
    config = read_model_header(path, kind, remedy)
    check_saved(Path(path))
    return config, map_tensors(path, config)


def map_tensors(path: str | Path, config: Config) -> dict[str, np.ndarray]:
    """The tensors of a model file by name, in its order, fp32. They are read-only memory maps; if the file is in bf16,
    arrays. Raises UserError if a tensor that is no parameter is not 0."""
    if _is_bf16(read_header(path, config.MAGIC, config.FETCH, config.HEADER_BYTES), type(config)):
        body = device.from_bf16(map_file(path, "<u2", config.HEADER_BYTES))
    else:
        body = map_file(path, "<f4", config.HEADER_BYTES)
    tensors = _named_views(body, config)
    for name in tensors.keys() - {name for name, _ in config.parameters()}:
        if tensors[name].any():
            raise UserError(f"{path}: {name} is not 0, and a {config.NAME} has none: this is another kind of model")
    return tensors


def conversion(path: str | Path, kind: type[Config]) -> str:
    """A line that says how a model file's weights are converted, if they have another type than the run's; else an
    empty string."""
    in_file = device.BF16 if _is_bf16(read_header(path, kind.MAGIC, kind.FETCH, kind.HEADER_BYTES), kind) else None
    if in_file == device.BF16 and device.floatX != device.BF16:
        return f"{path}: its weights are bf16 and become fp32"
    if in_file != device.BF16 and device.floatX == device.BF16:
        return f"{path}: its weights are fp32; the model computes with them rounded to bf16"
    return ""


def _is_bf16(header: np.ndarray, kind: type[Config]) -> bool:
    return kind.BF16_VERSION is not None and header[1] == kind.BF16_VERSION


def _file_layout(config: Config) -> tuple[dict[str, tuple[int, tuple]], int]:
    return layout(config.file_tensors(), config.sizes(), align=1)


def _named_views(body: np.ndarray, config: Config) -> dict[str, np.ndarray]:
    starts, _ = _file_layout(config)
    return {name: body[start : start + math.prod(shape)].reshape(shape) for name, (start, shape) in starts.items()}


# Writing


def write_model(path: str | Path, config: Config, params, bf16: bool = False) -> None:
    """Writes parameters as a model file. params: as for `model_pieces`. bf16: rounds them to bf16, as llm.c's version
    5.

    `path` appears whole or not at all. Raises UserError if the system refuses to write, or if llm.c has no such file.
    """
    pieces = model_pieces(config, params)
    if bf16:
        header = next(pieces)
        if config.BF16_VERSION is None or header[1] != FP32_VERSION:
            raise UserError(f"{path}: llm.c has no file in bf16 for such a {config.NAME}: leave --dtype bf16 out")
        header[1] = config.BF16_VERSION
        pieces = chain([header], in_bf16(pieces))
    with replacing(path) as file:
        write_arrays(file, pieces)


def model_pieces(config: Config, params) -> Iterator[np.ndarray]:
    """The contents of a model file: the header, and the tensors a piece at a time.

    params: fp32 (num_parameters,) in the order of their table, on the host or the device; or an iterator over the
    pieces of such an array on the host; or the tensors of a file by name, as `map_tensors` gives them.
    """
    if isinstance(params, Mapping):
        yield from (_header(config), *params.values())
        return
    if not isinstance(params, Iterator):
        check_count(params, config)
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


def in_bf16(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Rounds contiguous fp32 arrays to bf16, a few numbers at a time. Raises UserError if a number that is finite would
    become infinity."""
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
        body = repeated(np.memmap)(file, dtype="<f4", mode="r+", offset=config.HEADER_BYTES, shape=(length,))
        yield _named_views(body, config)
        body.flush()


def check_count(values, config: Config) -> None:
    """Raises ValueError unless there is a number for each parameter."""
    if values.shape != (num_parameters(config),):
        raise ValueError(f"expected {num_parameters(config)} values for {config}, got shape {values.shape}")


def _header(config: Config) -> np.ndarray:
    header = config.header()
    if header.nbytes != config.HEADER_BYTES:
        raise ValueError(f"{config.SCRIPT}: HEADER_BYTES is {config.HEADER_BYTES}, header() has {header.nbytes} bytes")
    return header


class Pieces:
    """Gives parts of a flat array. The array is on the host or the device, or an iterator over its pieces on the host.
    From an iterator, parts must be asked for in ascending order, so that there is never a whole copy."""

    def __init__(self, values):
        self.values, self.start, self.piece = values, 0, np.empty(0, "<f4")

    def part(self, start: int, end: int) -> Iterator[np.ndarray]:
        """The numbers from `start` to `end`, in one piece or several."""
        if not isinstance(self.values, Iterator):
            yield from device.pieces(self.values[start:end])
            return
        while start < end:
            next_start = self.start + self.piece.size
            if start >= next_start:
                self.start, self.piece = next_start, next(self.values)
                continue
            piece = self.piece[start - self.start : end - self.start]
            yield piece
            start += piece.size

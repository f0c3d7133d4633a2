"""A training checkpoint: a directory with all that a run needs to continue as if it had never stopped.

    step_00000020/
      model.bin       the parameters, as a model (model_file.py)
      optimizer.bin   header int32[256]: 20241121, 1, then the number of parameters as two int32, low half first;
                      fp32 m, then fp32 v, each in the order of the parameters
      model_tokenizer.bin, model_tokenizer.json and others
                      the files of the run's tokenizer, if it has one
      state.json      the step, the state of the run, and sizes and CRC-32 of the other files (record.py)

checkpoint_dir.py says which checkpoints a directory has.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import device
from device.errors import UserError, say
from llmc.files.checkpoint_dir import check_files, check_saved_tokenizer, new_checkpoint, newest_checkpoint, remedy_for
from llmc.files.directory import Directory, why
from llmc.files.files import HEADER_BYTES, file_size, first_word, make_header, map_file, write_arrays
from llmc.files.magic import script_of
from llmc.files.model_file import check_count, map_tensors, model_pieces, read_model_header
from llmc.files.record import write_record
from llmc.model.tensors import Config, num_parameters
from llmc.ranks import ranks

import numpy as np

OPTIMIZER = 20241121
NO_TOKENIZER: Mapping[str, bytes] = {}


def save_checkpoint(
    directory: Directory | str | Path, step: int, config: Config, params, m, v, state: dict,
    tokenizer: Mapping[str, bytes] = NO_TOKENIZER, name: str | None = None,
) -> Path:  # fmt: skip
    """Writes the checkpoint `directory/step_<step>`, or `directory/<name>`, and returns its path.

    params, m and v are fp32 (num_parameters,), on the host or the device, or iterators over the pieces of such an array
    on the host. `state` is anything JSON can hold. `tokenizer` has the tokenizer's files by name, each of at least a
    byte. The checkpoint appears complete or not at all, and may replace one of the same name (`new_checkpoint`). Raises
    UserError as `new_checkpoint` does.
    """
    name = name or f"step_{step:08d}"
    contents = {"model.bin": model_pieces(config, params), "optimizer.bin": _optimizer_pieces(config, m, v)}
    contents |= {file: [np.frombuffer(data, np.uint8)] for file, data in tokenizer.items()}
    with new_checkpoint(directory, name) as inside:
        files = {}
        for file_name, pieces in contents.items():
            with inside.new_file(file_name) as file:
                files[file_name] = write_arrays(file, pieces)
        with inside.new_file("state.json") as file:
            write_record(file, {"step": step, "files": files, "state": state})
    return inside.path.with_name(name)


def _optimizer_pieces(config: Config, m, v) -> Iterator[np.ndarray]:
    yield make_header(OPTIMIZER, 1, *np.array([num_parameters(config)], "<i8").view("<i4"))
    for moment in (m, v):
        if isinstance(moment, Iterator):
            for piece in moment:  # noqa: UP028  (`yield from` would end it where this ends early)
                yield piece
        else:
            check_count(moment, config)
            yield from device.pieces(moment)


def load_checkpoint(
    path: str | Path, kind: type[Config]
) -> tuple[Config, dict[str, np.ndarray], np.ndarray, np.ndarray, dict]:
    """Reads the checkpoint directory `path`: (config, tensors, m, v, state). config and tensors are `read_model`'s; m
    and v are fp32 (num_parameters,), read-only.

    `state` is what `save_checkpoint` was given, and has the checkpoint's own step under "step". Every byte is checked
    against the recorded CRC-32. Raises UserError if a file is missing or damaged.
    """
    path = Path(path)
    record = check_files(path)
    try:
        config = read_model_header(path / "model.bin", kind)
        tensors = map_tensors(path / "model.bin", config)
        n, optimizer = num_parameters(config), path / "optimizer.bin"
        if file_size(optimizer, remedy_for(path)) != HEADER_BYTES + 8 * n:
            raise UserError(f"{optimizer}: cut off, or of another model than model.bin beside it; {remedy_for(path)}")
        moments = map_file(optimizer, "<f4", HEADER_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({why(error)}); {remedy_for(path)}") from None
    return config, tensors, moments[:n], moments[n:], record["state"] | {"step": record["step"]}


def model_path(path: str | Path) -> Path:
    """The file of a model. `path` is this file, or the directory of its checkpoint, or a --checkpoint-dir. The last
    means the newest checkpoint there, and stderr names it.

    Raises UserError if a directory has no model, for a model in Hugging Face's format or a file of one, if the
    tokenizer in a checkpoint is not the one that was saved there, and as `newest_checkpoint` does.
    """
    path = Path(path)
    folder, file = (path, path / "model.bin") if path.is_dir() else (path.parent, path)
    if path.exists() and (folder / "config.json").is_file() and script_of(first_word(file)) is None:
        raise UserError(
            f"{path}: a model in Hugging Face's format; make a .bin of it: dev/hf/import_hf.py {folder} -o model.bin"
        )
    if path.is_dir() and not file.exists():
        newest = newest_checkpoint(path)
        if newest is None:
            raise UserError(f"{path}: neither a model.bin nor a checkpoint in it; name a .bin or a --checkpoint-dir")
        if ranks.rank() == 0:
            say(f"{path}: its newest checkpoint is {newest.name}")
        file = newest / "model.bin"
    check_saved_tokenizer(file)
    return file

"""Which file has the tokenizer of a dataset or a model, and what it takes to load it."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from device.errors import UserError, escaped
from llmc.data.hf_tokenizer import NEIGHBOURS, OLDER, HuggingFaceTokenizer, named_ends, neighbours
from llmc.data.tokenizer import STARTER, Tokenizer, byte_tokenizer, gpt2_tokenizer, read_tokenizer, say_once
from llmc.files.checkpoint_dir import newest_checkpoint
from llmc.files.directory import why
from llmc.files.files import first_word, read_file
from llmc.files.magic import script_of


def open_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer: a `.json` as HuggingFaceTokenizer does, any other file as `read_tokenizer` does. A text ends
    also at the tokens that the files beside it name. Raises UserError if the file is missing, damaged or something
    else."""
    tokenizer = HuggingFaceTokenizer(path) if Path(path).suffix == ".json" else read_tokenizer(path)
    tokenizer.ends.update(named_ends(Path(path), tokenizer.tokens))
    return tokenizer


def named_tokenizer(name: Path) -> Path:
    """The tokenizer's own file, for whatever the user names: that file, "gpt2" or "bytes"; a folder, a model, its
    weights or a file that goes along with a tokenizer. Of a `.bin` and the .json beside it, it is the .json, which
    encodes exactly, and a line says so. Raises UserError if there is none, or if a folder has several."""
    if str(name) in ("gpt2", "bytes"):
        return name
    if name.is_dir():
        place = newest_checkpoint(name) or name
        found = [*place.glob("*tokenizer.json")] or [*place.glob("*tokenizer.bin")]
        if len(found) > 1:
            raise UserError(f"{place} has several tokenizers: name one of {', '.join(sorted(map(str, found)))[:300]}")
    elif name.suffix == ".bin" and name.is_file() and not script_of(first_word(name)):  # no model
        found = [name.with_suffix(".json")] if importlib.util.find_spec("tokenizers") else []
        found = [path for path in found if path.is_file()] or [name]
    elif beside := [end for end in (*NEIGHBOURS, *OLDER) if name.name.endswith(end)]:
        prefix = name.name.removesuffix(max(beside, key=len))
        found = [path for end in (".json", ".bin") if (path := name.with_name(f"{prefix}tokenizer{end}")).is_file()]
    elif name.suffix in (".bin", ".safetensors") and name.is_file():
        found = model_tokenizers(name)
    else:
        return name
    if not found:
        raise UserError(f"{name}: no tokenizer is there; name its tokenizer.json")
    if found[0] != name:
        say_once(f"{name}: its tokenizer is {found[0]}")
    return found[0]


# The tokenizer of a dataset


def find_tokenizer(data: str | Path, model: Path | None = None, default: str | None = None) -> Path | None:
    """The tokenizer for a dataset, which is a prefix, a file or a glob: its own, else the one of the `model` that
    trains on it (a .bin first).

    default: the file of the tokenizer that all models of this kind have, if there is one. A new model takes it, if it
    lies in the current directory. If the starter pack's lies there, another model may not have it: a line says how to
    name it.
    """
    files = sorted(model_tokenizers(model), key=lambda path: path.suffix != ".bin") if model else []
    if found := own_tokenizer(data) or next(iter(files), None):
        return found
    if model is None and default and Path(default).is_file():
        return Path(default)
    if STARTER.is_file():
        what = f"{data}: no tokenizer is beside it or the model; if {STARTER} is its, copy it to <prefix>_tokenizer.bin"
        print(escaped(what))
    return None


def own_tokenizer(data: str | Path) -> Path | None:
    """The tokenizer that lies beside a dataset, `<prefix>_tokenizer.bin` or `.json`, if any."""
    return next(filter(Path.is_file, _own_tokenizers(data, ".bin", ".json")), None)


def _own_tokenizers(data: str | Path, *suffixes: str) -> list[Path]:
    """Where a dataset's own tokenizer may be. `data` may be a prefix that contains the name of a split."""
    heads = [str(data)]
    for split in ("_train", "_val"):
        head, found, tail = str(data).rpartition(split)
        if found and "/" not in tail:
            heads.append(head)
    return [Path(f"{head}_tokenizer{suffix}") for head in sorted(heads, key=len, reverse=True) for suffix in suffixes]


# The tokenizer of a model


def model_tokenizers(model: Path, trained: Mapping[str, Any] | None = None) -> list[Path]:
    """The tokenizer files for a model that exist, the best first. Beside the model, as in a checkpoint, they are
    `<model>_tokenizer.json`, `tokenizer.json` and `<model>_tokenizer.bin`, and of `gpt2_*.bin` the starter pack's
    `gpt2_tokenizer.bin`. A .json says how a prompt is encoded.

    trained: the flags that a checkpoint has recorded. Old checkpoints hold no tokenizer; for them the .json and the
    .bin of their data follow."""
    names = [f"{model.stem}_tokenizer.json", "tokenizer.json", f"{model.stem}_tokenizer.bin"]
    files = [model.with_name(name) for name in names + [STARTER.name] * model.name.startswith("gpt2_")]
    if trained and "tokenizer" not in trained and trained.get("data"):
        files += _own_tokenizers(trained["data"], ".json", ".bin")
    return list(filter(Path.is_file, files))


def load_model_tokenizer(
    model: Path, vocab_size: int, file: Path | None = None, trained: Mapping[str, Any] | None = None,
    encodes: bool = False,
) -> Tokenizer:  # fmt: skip
    """The tokenizer of a model of vocab_size tokens: the one that the user names, a file, "gpt2" or "bytes"; else the
    best of `model_tokenizers`. encodes: whether text must be encoded exactly. A .bin is enough to decode, and comes
    first if the tokenizers library, which reads a .json, is missing.

    Raises UserError if there is none; for a file that is not for this model; and for a .json that cannot be read.
    """
    named = {"gpt2": gpt2_tokenizer, "bytes": byte_tokenizer}.get(str(file))
    files = model_tokenizers(model, trained)
    if not encodes and not importlib.util.find_spec("tokenizers"):
        files.sort(key=lambda path: path.suffix == ".json")
    file = file or next(iter(files), None)
    if file is None:
        wrong = f"{model}: no file beside it says which tokenizer it has"
        if trained and "tokenizer" in trained:
            wrong = f"{model.parent} was trained without a tokenizer"
        raise UserError(f"{wrong}: name it with --tokenizer FILE, or --tokenizer gpt2 or bytes")
    tokenizer = named() if named else open_tokenizer(file)
    own = file in model_tokenizers(model)
    if not tokenizer.fits(vocab_size, own):
        sizes = f"{file} has {tokenizer.vocab_size} tokens and {model} {vocab_size}"
        raise UserError(f"{sizes}: name the model's own tokenizer with --tokenizer")
    tokenizer.say_rows(file, vocab_size)
    if not own and file in files:
        print(f"tokenizer: {escaped(file)}, which lies where the data of {model} was", file=sys.stderr)
    return tokenizer


def check_tokenizer(path: Path, tokenizer: Tokenizer, model: Path, vocab_size: int) -> None:
    """Raises UserError if a dataset's tokenizer, from the file `path`, is not the tokenizer of a model of vocab_size
    tokens. It must have as many tokens, apart from padding. If a `.bin` lies beside the model (`model_tokenizers`), it
    must have the same tokens. Then it may have more tokens than the model has rows, and a line says so."""
    known = next((file for file in model_tokenizers(model) if file.suffix == ".bin"), None)
    theirs = open_tokenizer(known).tokens if known else []
    same = known and all(a == b for a, b in zip(tokenizer.tokens, theirs, strict=False))  # apart from padding
    wrong = f"has other tokens than {known}, the tokenizer of the model {model}" if known and not same else ""
    if not tokenizer.fits(vocab_size, own=bool(same)):
        wrong = f"has {tokenizer.vocab_size} tokens and the model {model} {vocab_size}"
    if wrong:
        raise UserError(f"{path} {wrong}: use data (-i) and a model (-e) of the same tokenizer")
    tokenizer.say_rows(path, vocab_size)


# The files that belong to a tokenizer


def tokenizer_files(path: Path, prefix: str) -> dict[str, bytes]:
    """The contents of a tokenizer's files, by the names that they get with another prefix: the file itself; beside an
    `x_tokenizer.bin` the `x_tokenizer.json` that says how a prompt is encoded; beside a .json the NEIGHBOURS. Empty
    files are left out. Raises UserError if one cannot be read."""
    places = neighbours(path) | {f"tokenizer{path.suffix}": path}
    try:
        files = {prefix + name: read_file(file) for name, file in places.items() if file.is_file()}
    except OSError as error:
        raise UserError(f"{error.filename}: {why(error)}") from None
    return {name: content for name, content in files.items() if content}

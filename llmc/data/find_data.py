"""Which token files a dataset's name stands for: -i and -j take a file, a prefix, a folder or a pattern."""

import re
from glob import escape
from pathlib import Path

from device.errors import UserError
from llmc.data.token_file import REMEDY, TEXT_REMEDY, open_tokens
from llmc.files.directory import glob

SUFFIXES = (".bin", ".npy")


def find_token_files(name: str | Path, split: str) -> list[Path]:
    """The token files that `name` stands for, in order. split: "train" or "val".

    The name of a file stands for this file. Any other name is the first of these for which there are files: a prefix,
    for `<prefix>_<split>.bin`; a prefix, for the shards `<prefix>_<split>_<number>.bin`; a folder, for `<split>.bin` in
    it, as in nanoGPT; a pattern with `*`, `?` or `[`. A `.npy` may take the place of each `.bin`. Raises UserError if
    there are no files.
    """
    if Path(name).is_file():
        return [Path(name)]
    if files := _files_of_split(name, split):
        return files
    if _is_pattern(name):
        if files := sorted(glob(str(name))):
            return [Path(file) for file in files]
        raise UserError(f"{name}: no file matches; {REMEDY}")
    if str(name).endswith(SUFFIXES):
        raise UserError(f"{name}: no such file; {REMEDY}")
    if Path(name).is_dir():
        raise UserError(f"{name}: a folder without {split}.bin; name a dataset in it (-i {name}/PREFIX); {TEXT_REMEDY}")
    for other in sorted(glob(f"{escape(str(name))}_{split}_*"))[:1]:
        raise UserError(
            f"{name}_{split}.bin: no such file, nor {name}_{split}_NUMBER.bin. {other} may be of another dataset: if "
            "not, name files or a pattern with -i and -j"
        )
    raise UserError(f"{name}_{split}.bin: no such file; {REMEDY}")


def check_both_splits(name: str | Path, raw_tokens: str | None) -> None:
    """Raises UserError if the name is a file or a pattern. It then names the same files for training and validation; a
    prefix or a folder has files for each. If the files hold no tokens, the message says what they are."""
    if Path(name).is_file() or _is_pattern(name):
        for file in find_token_files(name, "train"):
            open_tokens(file, raw_tokens)
        raise UserError(f"-i {name} names files of training data: name those for validation with -j")


def _is_pattern(name: str | Path) -> bool:
    there = Path(name).is_dir() or any(_files_of_split(name, split) for split in ("train", "val"))
    return not there and any(character in str(name) for character in "*?[")


def _files_of_split(name: str | Path, split: str) -> list[Path]:
    """The files of a prefix or a folder, if it has any. Raises UserError if it has both a `.bin` and a `.npy`."""
    for head, shard in (f"{name}_{split}", ""), (f"{name}_{split}_", "[0-9]+"), (f"{name}/{split}", ""):
        there = ((suffix, sorted(glob(f"{escape(head)}*{suffix}"))) for suffix in SUFFIXES)
        kinds = [[file for file in files if re.fullmatch(shard, file[len(head) : -len(end)])] for end, files in there]
        if all(kinds):
            raise UserError(f"{kinds[0][0]} and {kinds[1][0]}: which of them? Name files or a pattern with -i and -j")
        if any(kinds):
            return [Path(file) for file in kinds[0] or kinds[1]]
    return []

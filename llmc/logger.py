"""The log file: llm.c's lines, one number each.

    s:20 tel:3.5212     validation loss before step 20
    s:20 bpb:1.1288     the same in bits per byte of text, where there is a tokenizer
    s:20 trl:3.6107     training loss of step 20
    s:20 eval:0.2955    accuracy on an evaluation set before step 20
"""

import errno
import os
from pathlib import Path

import numpy as np

from llmc.errors import UserError
from llmc.files import replacing


class Logger:
    """Appends lines to the file at `path`, each there for others to read as soon as it is written; None logs nothing.

    first_step: the first step that this run will log. Lines of that step and later ones are dropped from a file that is
    already there, so a new run (0) starts it afresh and a resumed run carries on where its checkpoint was made.
    Raises UserError where the file cannot be opened. A line that cannot be written later on is lost; the first such is
    said on stdout, and `lost` counts them.
    """

    def __init__(self, path: str | Path | None, first_step: int = 0) -> None:
        self._file, self._path, self.lost = None, path, 0
        if path is None:
            return
        if first_step > 0 and Path(path).is_file():
            kept = [line for line in _lines(path) if _parse(path, line)[0] < first_step]
            with replacing(path) as file:
                file.write("".join(kept).encode())
        try:
            self._file = open(path, "ab" if first_step > 0 else "wb", buffering=0)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written ({error.strerror.lower()}); choose another log file (-o)"
            ) from None

    def log_val(self, step: int, loss: float, bits_per_byte: float | None = None) -> None:
        self._write(step, "tel", loss)
        if bits_per_byte is not None:
            self._write(step, "bpb", bits_per_byte)

    def log_train(self, step: int, loss: float) -> None:
        self._write(step, "trl", loss)

    def log_eval(self, step: int, accuracy: float) -> None:
        self._write(step, "eval", accuracy)

    def _write(self, step: int, name: str, value: float) -> None:
        if self._file is None:
            return
        line = f"s:{step} {name}:{value:.4f}\n".encode()
        try:
            end = self._file.seek(0, os.SEEK_END) if self._file.seekable() else None
            if self._file.write(line) != len(line):
                if end is not None:
                    self._file.truncate(end)  # a disk that is full took a part of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                print(f"{self._path}: a line was lost ({error.strerror.lower()}); the run goes on", flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_log(path: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What a log holds, by name ("trl", "tel", and whatever else it has): steps int64 (n,) and values float64 (n,).

    Takes llm.c's logs as well, which have several values a line. A last line that is still being written is left out.
    Raises UserError where the file is missing or is no log.
    """
    series: dict[str, tuple[list[int], list[float]]] = {}
    for line in _lines(path):
        step, values = _parse(path, line)
        for name, value in values:
            steps, numbers = series.setdefault(name, ([], []))
            steps.append(step)
            numbers.append(value)
    return {name: (np.array(steps, np.int64), np.array(numbers)) for name, (steps, numbers) in series.items()}


def _lines(path: str | Path) -> list[str]:
    try:
        lines = Path(path).read_text().splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n") and line.strip()]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror.lower()}; give the log file of a run (-o)") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a log file; give the log file of a run (-o)") from None


def _parse(path: str | Path, line: str) -> tuple[int, list[tuple[str, float]]]:
    try:
        fields = [field.split(":") for field in line.split()]
        (s, step), *values = fields
        if s != "s" or not 0 <= int(step) < 1 << 62:
            raise ValueError(line)
        return int(step), [(name, float(value)) for name, value in values]
    except ValueError:
        raise UserError(f"{path}: not a log line: {line.strip()[:60]!r}; give the log file of a run (-o)") from None

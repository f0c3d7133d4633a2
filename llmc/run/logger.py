"""The places of a run's figures: the log file, in llm.c's lines, one number each, and TensorBoard's events.

    s:20 tel:3.5212     validation loss before step 20
    s:20 bpb:1.1288     the same in bits per byte of text, if there is a tokenizer
    s:20 trl:3.6107     training loss of step 20
    s:20 eval:0.2955    accuracy on an evaluation set before step 20
    s:20 sam:0.8412     seconds that the sample before step 20 took
"""

import errno
import io
import os
import re
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import device
from device.errors import UserError, first_line
from llmc.files.directory import File, Lock, close, why
from llmc.files.files import check_directory, open_file
from llmc.ranks import ranks
from llmc.run.program import Output
from llmc.run.settings import Settings

import numpy as np

FIGURES = {  # the figures of a step: their names in the log, if they go there, and in TensorBoard
    "val_loss": ("tel", "loss/validation"),
    "bits_per_byte": ("bpb", "loss/bits_per_byte"),
    "train_loss": ("trl", "loss/train"),
    "accuracy": ("eval", "accuracy/hellaswag"),
    "sample_seconds": ("sam", "speed/sample_seconds"),
    "norm": (None, "optimization/norm"),
    "learning_rate": (None, "optimization/learning_rate"),
    "tokens_per_second": (None, "speed/tokens_per_second"),
    "percent_of_peak": (None, "speed/MFU_percent"),
}

Report = Callable[[int, dict[str, float]], None]  # of the figures of a step

STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}  # to be opened anew, a file would be written from its beginning


class Reports:
    """A file to which a run reports. A report that cannot be written is lost: `lost` counts such reports, and a line on
    stdout names the first one."""

    def __init__(self, path: str | Path | None) -> None:
        self._file, self.path, self.lost = None, path, 0

    def _attempt(self, write: Callable[[], None], what: str) -> None:
        try:
            write()
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                print(f"{self.path}: {what} was lost ({why(error)}); the run goes on", flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._attempt(self._file.close, "a part of it")  # which a file system on a network may say only now
            self._file = None


class Logger(Reports):
    """Appends lines to the file at `path`. Others can read each line as soon as it is written. None logs nothing.

    first_step: the first step that this run will log. If the file exists, lines of this step and of later ones are
    removed from it. So a new run (0) begins with an empty log, and a resumed run continues from its checkpoint.

    Raises UserError, and leaves the file as it is, if it cannot be opened, is a pipe that nobody reads, is no log, is a
    link to a file, or has a second name; and if another run logs to it for longer than a `Lock` waits. A line that
    cannot be written later is lost.
    """

    def __init__(self, path: str | Path | None, first_step: int = 0) -> None:
        super().__init__(path)
        self._lock = None
        if path is None:
            return
        path = Path(path)
        try:
            if str(path) in STREAMS:
                self._file = os.fdopen(os.dup(STREAMS[str(path)]), "ab", buffering=0)
                return
            if path.exists() and not path.is_file():  # several runs may write to a pipe or a device
                self._file = open(path, "ab", buffering=0, opener=_open)
                return
            self._lock = Lock(path.with_name(f".{path.name}.lock"), path, "log file (-o)")
            where = self._lock.directory
            close(where.open(path.name, os.O_WRONLY | os.O_CREAT))  # raises, for example for a link
            kept = [line for line in _lines(path) if _parse(path, line)[0] < first_step]
            if first_step > 0:
                with where.replacing(path.name) as replaced:
                    replaced.write("".join(kept).encode())
            self._file = File(where.open(path.name, os.O_WRONLY | os.O_APPEND), "ab")
            if first_step == 0:
                os.ftruncate(self._file.fileno(), 0)
        except OSError as error:
            self.close()
            raise UserError(f"{path}: cannot be written ({why(error)}); choose another log file (-o)") from None
        except UserError:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        if self._lock is not None:
            self._lock.release()

    def log(self, step: int, **figures: float | None) -> None:
        """Writes a line for each of these FIGURES that has a name in the log. None is left out."""
        for figure, value in figures.items():
            name, _ = FIGURES[figure]
            if self._file is not None and name and value is not None:
                line = f"s:{step} {name}:{value:.4f}\n".encode()
                self._attempt(partial(append, self._file, line), "a line")


class TensorBoard(Reports):
    """Writes figures and samples as TensorBoard's events (`tensorboard --logdir`) to a new file in `directory`. Others
    can read each event as soon as it is written. None writes nothing.

    first_step: the first step that this run will report. An event tells TensorBoard to forget this step and later ones
    in earlier files of the directory. The files themselves stay as they are.

    Makes nothing yet. Raises UserError if the tensorboard package is missing or the directory cannot be written to.
    Events that cannot be written later are lost.
    """

    def __init__(self, directory: str | Path | None, first_step: int = 0) -> None:
        super().__init__(directory)
        if directory is None:
            return
        try:
            # Here, because only this flag needs them. Of TensorBoard's writers we take the one that writes at once, and
            # so notices a failure. tensorboardX is smaller, but would load PyTorch with its own cuBLAS, if installed.
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.record_writer import RecordWriter
        except Exception as error:  # it is missing, or something that it needs is missing or does not fit
            raise UserError(
                f"--tensorboard needs TensorBoard ({first_line(error)}); install it with: pip install tensorboard"
            ) from None
        check_directory(directory, "events", "--tensorboard")
        self._Event, self._Summary, self._Records = event_pb2.Event, summary_pb2.Summary, RecordWriter
        self._text = text_pb
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._beginning = self._record(file_version="brain.Event:2") + self._record(step=first_step, session_log=start)

    def log(self, step: int, **figures: float | None) -> None:
        """Writes these FIGURES as one event. None is left out."""
        if self.path is not None:
            given = [(FIGURES[figure][1], value) for figure, value in figures.items() if value is not None]
            values = [self._Summary.Value(tag=tag, simple_value=value) for tag, value in given]
            self._write(step, self._Summary(value=values))

    def log_sample(self, step: int, text: str) -> None:
        """TensorBoard takes text for Markdown, in which indented lines are shown as they are."""
        if self.path is not None:
            self._write(step, self._text("sample", textwrap.indent(text, "    ", lambda line: True)))

    def _write(self, step: int, summary) -> None:
        def write() -> None:
            if self._file is None:
                Path(self.path).mkdir(parents=True, exist_ok=True)
                name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"  # files are read in this order
                self._file = File(Path(self.path) / name, "xb")
            append(self._file, self._beginning + self._record(step=step, summary=summary))
            self._beginning = b""

        self._attempt(write, "an event")

    def _record(self, **fields) -> bytes:
        """An event as a record of its file."""
        record = io.BytesIO()
        self._Records(record).write(self._Event(wall_time=time.time(), **fields).SerializeToString())
        return record.getvalue()


class Logs:
    """Where a run's figures go: the log, TensorBoard's events, `report`, and the reader of its output. The reader may
    leave if the run also has a log, events or checkpoints.

    report: is called with the step and its FIGURES, by name, as soon as they are known; on rank 0 alone.
    """

    def __init__(self, settings: Settings, report: Report | None = None):
        flags = settings.flags
        self.report = report if ranks.rank() == 0 else None
        self.tensorboard = TensorBoard(flags.tensorboard, settings.first_step)
        device.compile_all()
        self.logger = Logger(flags.log, settings.first_step)
        places = flags.log, flags.checkpoint_dir, flags.tensorboard
        self.output = Output(sys.stdout, " and ".join(str(place) for place in places if place))

    def log(self, step: int, **figures: float | None) -> None:
        """Writes these of FIGURES to all of them. None is left out."""
        self.logger.log(step, **figures)
        self.tensorboard.log(step, **figures)
        if self.report:
            self.report(step, {name: value for name, value in figures.items() if value is not None})

    def close(self) -> None:
        self.logger.close()
        self.tensorboard.close()

    def raise_what_is_lost(self) -> None:
        """Raises UserError if lines or events could not be written."""
        for reports, what in ((self.logger, "line"), (self.tensorboard, "event")):
            if reports.lost:
                lost = f"{reports.lost} {what}{'s' * (reports.lost > 1)}"
                raise UserError(f"{reports.path} lacks {lost} that could not be written")


def _open(path: str, flags: int) -> int:
    """Opens a pipe or a device for writing. Raises OSError for a pipe that nobody reads; a plain open would wait."""
    descriptor = os.open(path, flags & ~os.O_CREAT | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def append(file: BinaryIO, data: bytes) -> None:
    """Appends all of data to an unbuffered file; or raises OSError, and then appends none of it."""
    end = file.seek(0, os.SEEK_END) if file.seekable() else None
    if file.write(data) != len(data):
        if end is not None:
            os.ftruncate(file.fileno(), end)  # a full disk took a part of it
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_log(path: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The figures of a log, by name ("trl", "tel", and any others): steps int64 (n,) and values float64 (n,).

    It also reads llm.c's logs, which have several values in a line. It leaves out a last line that is still being
    written. Raises UserError if the file is missing or is not a log.
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
        with open_file(path) as file:
            text = file.read().decode()
        # A power cut may leave zeros in the place of lines.
        *lines, unfinished = (line.rpartition("\0")[2] for line in text.split("\n"))
        if not re.fullmatch(r"(s(:\d*( .*)?)?)?", unfinished):
            _parse(path, unfinished)
        return [line + "\n" for line in lines if line.strip()]
    except OSError as error:
        raise UserError(f"{path}: {why(error)}; give the log file of a run (-o)") from None
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

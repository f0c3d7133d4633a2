"""How a program of this repository prints, and how it ends: if something is wrong, with one line and no traceback."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TextIO

from device.errors import UserError, escaped, first_line
from device.progress import progress
from llmc.files.directory import why
from llmc.files.interrupted import repeat_interrupted_calls
from llmc.ranks import ranks

last_checkpoint = None  # of this program's run; llmc/run/saver.py sets it


class Stdout:
    """A stream to print to, and the error that it last met, if any."""

    def __init__(self, stream: TextIO):
        self.stream, self.failure = stream, None

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self.attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            self.failure = error
            raise

    def drop(self) -> None:
        """If the stream cannot be written, drops the rest of its buffer. Else Python would fail on it at its end."""
        try:
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


class Output(Stdout):
    """Replaces `stream`, to which a run prints, within a with block. If the reader has left or the disk is full, the
    run goes on, if its figures also go `elsewhere`. stderr then says so, once."""

    def __init__(self, stream, elsewhere: str):
        super().__init__(stream)
        self.elsewhere = elsewhere

    def __enter__(self) -> None:
        sys.stdout = self

    def __exit__(self, *exception) -> None:
        sys.stdout = self.stream

    def attempt(self, work: Callable[[], object]) -> None:
        if self.failure:
            return
        try:
            work()
        except OSError as error:
            if not self.elsewhere and isinstance(error, BrokenPipeError):
                raise
            self.failure, reason = error, (error.strerror or str(error)).lower()
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())  # the rest of its buffer goes there
            if not self.elsewhere:
                raise UserError(
                    f"cannot print ({reason}); with a log (-o), --tensorboard or checkpoints a run goes on"
                ) from None
            with suppress(OSError):
                print(f"cannot print any more ({reason}): the run goes on, see {self.elsewhere}", file=sys.stderr)


def run_program(
    main: Callable[[], None], out_of_memory: str = "lower -b or -t", interrupted: str = "interrupted"
) -> None:
    """Runs `main`, and turns what the user must mend into one line on stderr and exit status 1.

    out_of_memory: the remedy to name. interrupted: what to print after Ctrl-C.
    It is no error if the reader of the output leaves (`| head`). A full disk under the output is one. If a GPU fails,
    one line says so, too, and names the last checkpoint. So it does if the system refuses to look up, list, open or
    read a file, and nobody else has said why.
    """
    repeat_interrupted_calls()
    if sys.stdout is None:  # the caller has closed it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    sys.stdout.reconfigure(errors="replace")  # the terminal may lack characters of a text
    sys.stdout = stdout = Stdout(sys.stdout)
    try:
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
            if stdout.failure:
                raise stdout.failure from None  # argparse ignores it when it prints the help
        stdout.flush()  # now, while we can still report a failure
    except UserError as error:
        fail(str(error))
    except MemoryError as error:
        fail(f"out of memory ({first_line(error)}): {out_of_memory}{resume_advice()}")
    except KeyboardInterrupt:
        ranks.fail(interrupted, 130)
        print(interrupted, file=sys.stderr, flush=True)
        if progress.running:  # NVRTC cannot be stopped, and may crash if Python ends around it
            os._exit(130)
        sys.exit(130)
    except BrokenPipeError:
        ranks.fail("", 0)
    except Exception as error:
        if error is stdout.failure:
            fail(f"cannot print ({(error.strerror or str(error)).lower()})")
        ranks.wait_for_other_failure()
        if isinstance(error, OSError):
            fail(f"{_refused(error)}{resume_advice() or '; no file that was there is lost: start this again'}")
        if not type(error).__module__.startswith(("cupy.", "cupy_backends.")):
            if ranks.size() > 1:
                traceback.print_exc()
                ranks.fail(f"a fault of this program ({type(error).__name__})")
            raise
        if type(error).__name__ in ("CompileException", "NVRTCError"):
            remedy = "CuPy and its CUDA do not fit together; reinstall cupy-cuda12x[ctk] or cupy-cuda13x[ctk]"
        else:
            remedy = "dmesg may name an Xid; nvidia-smi says whether the GPU still answers"
        fail(f"the GPU failed ({first_line(error)}): {remedy}{resume_advice()}")
    finally:
        stdout.drop()
        sys.stdout = stdout.stream


def fail(text: str) -> NoReturn:
    """Ends this program with one line, and all ranks if there are several."""
    ranks.fail(text)
    sys.exit(f"error: {text}")


def _refused(error: OSError) -> str:
    """What the system refused, and why."""
    reason = why(error) if error.strerror else first_line(error)
    if not isinstance(error.filename, str | bytes):
        return escaped(reason)
    name = os.fsdecode(error.filename)
    return escaped(f"{os.getcwd() if name == '.' else name}: {reason}")


def resume_advice() -> str:
    return f"; the run goes on from {last_checkpoint} with -y 1" if last_checkpoint else ""

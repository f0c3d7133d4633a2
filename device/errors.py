"""Errors that the user must mend, any error in one line, and lines on stderr. Also says in a line that Python is too
old, that a package is missing, and that the user has interrupted the imports: all programs import something of ours,
and so this file, before any package."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  before Python meets what it does not know
    sys.exit(f"error: llm.cupy needs Python 3.10 or later, and {sys.executable} is {sys.version.split()[0]}")

import os
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

ROOT = Path(__file__).resolve().parents[1]


class UserError(ValueError):
    """A wrong flag, file or value: its message is one line that names the thing and the remedy.

    The command line prints it as `error: message` and exits with status 1. Its message is `escaped` and `shortened`,
    because it may quote a file. output: of a compiler, whose lines follow the message.
    """

    def __init__(self, message: str, output: str = ""):
        super().__init__("\n".join([shortened(escaped(message)), *map(escaped, output.splitlines())]))


def escaped(text: object) -> str:
    """A text in one line that no terminal obeys: line breaks, control characters and all others that do not show are
    backslash escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def shortened(text: str, longest: int = 490) -> str:
    """A text without its middle, if it has more characters: a remedy stands at the end."""
    half = longest // 2 - 3
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def first_line(error: Exception) -> str:
    """The first line of an error's message, `shortened`, or its type if there is no message."""
    lines = (line.strip(" =") for line in str(error).splitlines())
    return shortened(next(filter(None, lines), type(error).__name__), 300)


def counted(number: int | str, noun: str) -> str:
    """Such as "1 batch", "2,000 batches" and "no batches"."""
    figure = f"{number:,}" if isinstance(number, int) else number
    return f"{figure} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def say(text: str) -> None:
    """Prints a line to stderr. It is no error if nobody reads it."""
    with suppress(OSError, ValueError):
        print(shortened(escaped(text)), file=sys.stderr, flush=True)


def requirements_of(package: str) -> str | None:
    """The requirements file that lists a package, or None."""
    for name in ("requirements.txt", "requirements-dev.txt"):
        if re.search(rf"^{re.escape(package)}\b", (ROOT / name).read_text("utf-8"), re.MULTILINE):
            return name
    return None


def say_what_is_missing(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Prints one line with the remedy if a package is missing, and anything else as Python does."""
    requirements = requirements_of(error.name or "") if kind is ModuleNotFoundError else None
    if requirements is None:
        sys.__excepthook__(kind, error, traceback)
        return
    made = ROOT / ".venv"
    if (made / "bin" / "python").exists() and Path(sys.prefix).resolve() != made.resolve():
        remedy = f"run this with {os.path.relpath(made / 'bin' / 'python')}, which `make setup` gives the packages"
    else:
        remedy = f"pip install -r {os.path.relpath(ROOT / requirements)}"
    print(f"error: {error.name} is missing: {remedy}", file=sys.stderr)


interrupted = False  # whether Ctrl-C came, before the program had a handler of its own


def interrupt(number: int, frame: FrameType | None) -> None:
    """Python's own handler of SIGINT, which also notes it: NumPy makes another error of it while it is imported."""
    global interrupted
    interrupted = True
    signal.default_int_handler(number, frame)


def in_one_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """For sys.excepthook: if the program was interrupted while modules were imported, says so and ends it by SIGINT.
    Else `say_what_is_missing`."""
    if not interrupted and not issubclass(kind, KeyboardInterrupt):
        say_what_is_missing(kind, error, traceback)
        return
    print("interrupted", file=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


sys.excepthook = in_one_line
own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if own and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, interrupt)

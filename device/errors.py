"""Errors that the user must mend, and any error in one line. Also says in a line that a package is missing: all
programs import something of ours, and so this file, before any package."""

import os
import re
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]


class UserError(ValueError):
    """A wrong flag, file or value: its message is one line that names the thing and the remedy.

    The command line prints it as `error: message` and exits with status 1.
    """


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if there is no message."""
    return next(filter(None, (line.strip(" =") for line in str(error).splitlines())), type(error).__name__)


def requirements_of(package: str) -> str | None:
    """The requirements file that lists a package, or None."""
    for name in ("requirements.txt", "requirements-dev.txt"):
        if re.search(rf"^{re.escape(package)}\b", (ROOT / name).read_text(), re.MULTILINE):
            return name
    return None


def say_what_is_missing(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """For sys.excepthook: prints one line with the remedy if a package is missing, and anything else as before."""
    requirements = requirements_of(error.name or "") if kind is ModuleNotFoundError else None
    if requirements is None:
        sys.__excepthook__(kind, error, traceback)
        return
    made = ROOT / ".venv"
    if (made / "bin" / "python").exists() and Path(sys.prefix).resolve() != made.resolve():
        remedy = f"run this with {os.path.relpath(made / 'bin' / 'python')}, for which `make` installs the packages"
    else:
        remedy = f"pip install -r {os.path.relpath(ROOT / requirements)}"
    print(f"error: {error.name} is missing: {remedy}", file=sys.stderr)


sys.excepthook = say_what_is_missing

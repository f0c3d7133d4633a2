"""What a training run needs beside its model. A program that is run by a Python without the packages says so in one
line, whatever imports them: all programs import something from here before anything that is not Python's own."""

import os
import re
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]


def requirements_of(package: str) -> str | None:
    """The file that lists what installs a package, or None."""
    for name in ("requirements.txt", "requirements-dev.txt"):
        if re.search(rf"^{re.escape(package)}\b", (ROOT / name).read_text(), re.MULTILINE):
            return name
    return None


def say_what_is_missing(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """For sys.excepthook: a package that is missing in one line with the remedy, anything else as before."""
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

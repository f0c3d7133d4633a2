"""Draws the book's pictures: doc/draw/<name>.py has a function draw() that gives doc/pictures/<name>.svg, or PICTURES,
which has a function for each of its pictures by their names.

    python doc/draw.py                       # all of them
    python doc/draw.py butterfly roofline    # some
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import importlib
from collections.abc import Callable

from device.errors import UserError
from llmc.run.arguments import Parser
from llmc.run.program import run_program

DOC = Path(__file__).resolve().parent
SHARED = {"__init__", "figure", "launches", "rung"}


def pictures_of(script: str) -> dict[str, Callable[[], str]]:
    """The functions of a script of doc/draw that give a picture's SVG, by the pictures' names."""
    module = importlib.import_module(f"doc.draw.{script}")
    return getattr(module, "PICTURES", None) or {script: module.draw}


SCRIPTS = sorted(path.stem for path in (DOC / "draw").glob("*.py") if path.stem not in SHARED)
DRAWINGS = {name: draw for script in SCRIPTS for name, draw in pictures_of(script).items()}
PICTURES = sorted(DRAWINGS)


def drawn(name: str) -> str:
    """The SVG of a picture."""
    return DRAWINGS[name]()


def main() -> None:
    parser = Parser(description="Draw the book's pictures into doc/pictures.")
    parser.add_argument("names", nargs="*", metavar="picture", help="a picture of doc/draw (all)")
    args = parser.parse_args()
    for name in args.names:
        if name not in PICTURES:
            raise UserError(f"{name}: not a picture; there are {', '.join(PICTURES)}")
    for name in args.names or PICTURES:
        path = DOC / "pictures" / f"{name}.svg"
        text = drawn(name)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"written: {path.relative_to(DOC.parent)}")


if __name__ == "__main__":
    run_program(main)

"""Draws the book's pictures: doc/draw/<name>.py has a function draw() that gives doc/pictures/<name>.svg.

    python doc/draw.py                       # all of them
    python doc/draw.py butterfly roofline    # some
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import importlib

from device.errors import UserError
from llmc.arguments import Parser
from llmc.program import run_program

DOC = Path(__file__).resolve().parent
SHARED = {"__init__", "figure", "launches", "operands"}
PICTURES = sorted(path.stem for path in (DOC / "draw").glob("*.py") if path.stem not in SHARED)


def drawn(name: str) -> str:
    """The SVG of a picture."""
    return importlib.import_module(f"doc.draw.{name}").draw()


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
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"written: {path.relative_to(DOC.parent)}")


if __name__ == "__main__":
    run_program(main)

"""Puts the line numbers of doc/glossary.md right: each is that of the code which is quoted beside it.

    python doc/glossary.py             # says which are wrong; exit status 1 if there are any
    python doc/glossary.py --write
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import re

from device.errors import UserError
from llmc.arguments import Parser
from llmc.program import run_program

PAGE = Path(__file__).with_name("glossary.md")
QUOTE = re.compile(r"\[([\w.]+)(?::\d+)?: (`+)(.+?)\2\]\(([^)#]+)(?:#L\d+)?\)")


def with_lines(text: str) -> str:
    """The text with the first line of each quote. Raises UserError for code that its file does not have."""

    def quote(found: re.Match) -> str:
        name, ticks, code, target = found.groups()
        lines = (PAGE.parent / target).read_text().splitlines()
        number = next((n for n, line in enumerate(lines, 1) if code in line), None)
        if number is None:
            raise UserError(f"{PAGE.name}: {name} does not have `{code}` any more: quote another line of it")
        return f"[{name}:{number}: {ticks}{code}{ticks}]({target}#L{number})"

    return QUOTE.sub(quote, text)


def main() -> None:
    parser = Parser(description="Check the line numbers of the glossary.")
    parser.add_argument("--write", action="store_true", help="write the right numbers into the page")
    args = parser.parse_args()
    before = PAGE.read_text()
    after = with_lines(before)
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    changed = [new.split("**")[1] for old, new in pairs if old != new]
    if args.write:
        PAGE.write_text(after)
    elif changed:
        raise UserError(f"the lines of {', '.join(changed)} are others now: python doc/glossary.py --write")


if __name__ == "__main__":
    run_program(main)

"""Writes what the pages quote of the code anew: the code as it is now, and the file's name.

    python doc/quotes.py            # says which pages quote what has changed; exit status 1 if any do
    python doc/quotes.py --write    # writes them: make quotes

A quote is a link to a place (doc/places.py says what that is) whose text is the code there:

    [common.cuh: `x += __shfl_xor_sync(0xffffffffu, x, offset);`](../kernels/common.cuh)<!-- warp_sum: x += -->

A fenced block may quote whole lines: <!-- ../kernels/common.cuh: warp_sum -->, with the same places, in the line above
it. From and to may be in different lines of it. Indented lines behind <!-- python dev/microscope transpose --> are
what this command prints; only --write runs it.

To write a quote, write any code between the backticks, and its place. `make quotes` does the rest.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import contextlib
import re
import shlex
import subprocess
import textwrap

from device.errors import UserError
from doc.places import line_at, lines_at, lines_of
from llmc.run.arguments import Parser
from llmc.run.program import run_program

ROOT = Path(__file__).resolve().parents[1]
QUOTE = re.compile(
    r"\[[\w.]+: (?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)\]\((?P<file>[^()\s]+)\)(?:<!-- (?P<place>.*?) -->)?", re.S
)  # fmt: skip
BLOCK = re.compile(
    r"^(?P<head><!-- (?P<file>\S+\.\w+): (?P<place>.*) -->\n(?P<fence>```+).*\n)(?:.*\n)*?(?P=fence)$", re.M
)  # fmt: skip
PRINTED = re.compile(r"^(?P<head><!-- python (?P<command>.*) -->\n\n)(?:    .*\n|\n(?=    ))+", re.M)


def renewed(page: Path, wrong: list[str]) -> str:
    """The text of a page with its quotes as the code is now. Those that lead nowhere stay, and are added to `wrong`."""
    text = page.read_text("utf-8")

    def new(found: re.Match) -> str:
        file, place = found["file"], found["place"]
        try:
            if not place:
                raise UserError("a quote needs its place behind it, as in <!-- function: begin of a line -->")
            lines = lines_of(page.parent / file)
            if found.re is BLOCK:
                return found["head"] + lines_at(lines, place) + found["fence"]
            _, code = line_at(lines, place)
            ticks = "``" if "`" in code else "`"
            return f"[{Path(file).name}: {ticks}{code}{ticks}]({file})<!-- {place} -->"
        except UserError as error:
            number = found.string.count("\n", 0, found.start()) + 1
            where = f"{page.relative_to(ROOT)}:{number}: {file}: "
            wrong.append(where + (f"{place}: {error}{elsewhere(place)}" if place else str(error)))
            return found[0]

    return QUOTE.sub(new, BLOCK.sub(new, text))


def elsewhere(place: str) -> str:
    """Where this place is found now, in words: it may have moved with its function or file."""
    files = [*ROOT.glob("*.py")]
    for folder in "device", "dev", "doc", "kernels", "llmc", "tests":
        files += [path for path in (ROOT / folder).rglob("*.*") if path.suffix in {".py", ".cu", ".cuh", ".h", ".cpp"}]
    found = []
    for path in sorted(files):
        with contextlib.suppress(UserError):
            line_at(path.read_text("utf-8").splitlines(), place)
            found.append(str(path.relative_to(ROOT)))
    return f"; is it that of {' or '.join(found)}?" if 0 < len(found) < 4 else ""


def printed(text: str, wrong: list[str]) -> str:
    """The text of a page with what its commands print now; if one fails, its old lines stay."""

    def new(found: re.Match) -> str:
        command = [sys.executable, *shlex.split(found["command"])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode:
            wrong.append(f"python {found['command']}: {done.stderr.strip()}")
            return found[0]
        return found["head"] + textwrap.indent(done.stdout, "    ")

    return PRINTED.sub(new, text)


def main() -> None:
    parser = Parser(description="Check what the pages quote of the code.")
    parser.add_argument("--write", action="store_true", help="write the quotes anew")
    args = parser.parse_args()
    wrong: list[str] = []
    for page in (ROOT / "README.md", ROOT / "exercises" / "README.md", *sorted((ROOT / "doc").rglob("*.md"))):
        before = page.read_text("utf-8")
        after = renewed(page, wrong)
        if args.write:
            page.write_text(printed(after, wrong), "utf-8")
        elif after != before:
            wrong.append(f"{page.relative_to(ROOT)} quotes code that has changed: run make quotes")
    if wrong:
        raise UserError("\n".join(wrong))


if __name__ == "__main__":
    run_program(main)

"""Writes what the pages quote of the code anew: the code as it is now, the file's name and the line's number.

    python doc/quotes.py            # says which pages quote what has changed; exit status 1 if any do
    python doc/quotes.py --write    # writes them: make quotes

A quote is a link, and behind it, in a comment, the place that it quotes. The link's target names the file:

    [common.cuh: `x += __shfl_xor_sync(0xffffffffu, x, offset);`](../kernels/common.cuh#L33)<!-- warp_sum: x += -->

Places:

    warp_sum                     the line that defines this function, class, struct, macro or constant; of a function,
                                 its name and no parameters. Vec.load is the load in Vec
    warp_sum: x +=               the one line in it that has `x +=`, from there to its end, without the comment there
    warp_sum: x += ... offset)   the same line, from `x +=` to `offset)`
    : Butterfly ... run          a line anywhere in the file

A fenced block may quote whole lines: <!-- ../kernels/common.cuh: warp_sum -->, with the same places, in the line above
it. From and to may be in different lines of it. Indented lines behind <!-- python dev/microscope transpose --> are
what this command prints; only --write runs it.

To write a quote, write any code between the backticks, and its place. `make quotes` does the rest. If a file moves,
replace its path in all pages.
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
from llmc.run.arguments import Parser
from llmc.run.program import run_program

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(
    r"\[[\w.]+(?::\d+)?: (?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)\]\((?P<file>[^()\s#]+)(?:#L\d+)?\)"
    r"(?:<!-- (?P<place>.*?) -->)?", re.S
)  # fmt: skip
BLOCK = re.compile(
    r"^(?P<head><!-- (?P<file>\S+\.\w+): (?P<place>.*) -->\n(?P<fence>```+).*\n)(?:.*\n)*?(?P=fence)$", re.M
)  # fmt: skip
PRINTED = re.compile(r"^(?P<head><!-- python (?P<command>.*) -->\n\n)(?:    .*\n|\n(?=    ))+", re.M)
PLACE = re.compile(r"(?P<name>[\w.]*)(?:: (?P<start>.+?)(?: \.\.\. (?P<stop>.+))?)?")
QUALIFIERS = re.compile(r'(?:(?:extern "C"|__(?:global|device|host|forceinline)__|static|inline) )+')
# How a definition of NAME begins, in Python and in C++, where a line may begin with the name.
PYTHON = r"\s*(async )?def NAME\(|\s*class NAME\b|NAME(: [^=]+)? = "
CPP = (
    r"\s*(struct|class|enum|union|using|#define) NAME\b(?!;)|\s*(static )?constexpr [\w ]*\bNAME( =|\[)|NAME\(|"
    r"(?!.*;$|\s*(return|else|case|if|for|while|do|asm|throw)\b)[^=;/{}]*[\w>*&)] [*&]*NAME\("
)


# ---- places in code


def definition(lines: list[str], name: str) -> range:
    """The lines of the one definition that has this name. Raises UserError if there is none, or several."""
    where = range(len(lines))
    cpp = not any(re.match(r"(from|import) \w|def ", line) for line in lines)
    for part in name.split("."):
        begins, found = re.compile((CPP if cpp else PYTHON).replace("NAME", part)), []
        for i in where:
            if begins.match(lines[i]) and not (found and i in found[-1]):  # a constructor has its struct's name
                found.append(range(i, end_of(lines, i, cpp)))
        if len(found) != 1:
            raise UserError(f"{len(found) or 'no'} definitions of {part}")
        (where,) = found
    return where


def end_of(lines: list[str], begin: int, cpp: bool) -> int:
    """Where a definition ends: it goes on with what is indented more, and with what closes a bracket."""
    if cpp and (code_of(lines[begin]).endswith(";") or lines[begin].startswith("#")):
        return next((i for i in range(begin, len(lines)) if not lines[i].endswith("\\")), begin) + 1
    for i in range(begin + 1, len(lines)):
        if lines[i].strip() and indent_of(lines[i]) <= indent_of(lines[begin]):
            line = lines[i].strip()
            if line[0] not in (")]#" if cpp else ")]"):
                return i + 1 if line[0] == "}" else i
    return len(lines)


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def code_of(line: str) -> str:
    """A line without the comment behind it."""
    return re.sub(r"\s{2,}(//|#) .*", "", line).strip()


def only(lines: list[str], where: range, text: str) -> int:
    """The one line there that has the text. Raises UserError if there is none, or several."""
    found = [i for i in where if text in lines[i]]
    if len(found) != 1:
        raise UserError(f"{len(found) or 'no'} lines with `{text}`")
    return found[0]


def resolve(lines: list[str], place: str) -> tuple[str, range, str, str]:
    """Finds a place: the definition's name and its lines; and how the place begins and ends, where it says so."""
    found = PLACE.fullmatch(place)
    if not found or not (found["name"] or found["start"]) or "--" in place:  # which would end GitHub's comment
        raise UserError("this is no place: doc/quotes.py shows what is one")
    name, start, stop = (text or "" for text in found.group("name", "start", "stop"))
    return name, definition(lines, name) if name else range(len(lines)), start, stop


def line_at(lines: list[str], place: str) -> tuple[int, str]:
    """The number of the line at a place, from 1, and what is quoted of it."""
    name, where, start, stop = resolve(lines, place)
    if not start:
        line = QUALIFIERS.sub("", lines[where[0]].strip(), count=1)
        call = f"{name.rpartition('.')[2]}("
        return where[0] + 1, line[: line.index(call) + len(call)] if call in line else code_of(line)
    i = only(lines, where, start)
    begin = lines[i].index(start)
    if not stop:
        return i + 1, code_of(lines[i][begin:])
    end = lines[i].find(stop, begin + max(0, len(start) - len(stop)))
    if end < 0:
        raise UserError(f"no `{stop}` behind `{start}`")
    return i + 1, lines[i][begin : end + len(stop)]


def lines_at(lines: list[str], place: str) -> str:
    """The whole lines at a place."""
    _, where, start, stop = resolve(lines, place)
    begin = only(lines, where, start) if start else where[0]
    end = only(lines, where[begin - where[0] :], stop) if stop else where[-1]
    return textwrap.dedent("\n".join(lines[begin : end + 1])).rstrip() + "\n"


# ---- pages


def renewed(page: Path, wrong: list[str]) -> str:
    """The text of a page with its quotes as the code is now. Those that lead nowhere stay, and are added to `wrong`."""
    text = page.read_text()

    def new(found: re.Match) -> str:
        file, place = found["file"], found["place"]
        try:
            if not place:
                raise UserError("a quote needs its place behind it, as in <!-- function: begin of a line -->")
            lines = (page.parent / file).read_text().splitlines()
            if found.re is BLOCK:
                return found["head"] + lines_at(lines, place) + found["fence"]
            number, code = line_at(lines, place)
            ticks = "``" if "`" in code else "`"
            return f"[{Path(file).name}: {ticks}{code}{ticks}]({file}#L{number})<!-- {place} -->"
        except (UserError, OSError) as error:
            says = "there is no such file" if isinstance(error, OSError) else error
            number = found.string.count("\n", 0, found.start()) + 1
            where = f"{page.relative_to(ROOT)}:{number}: {file}: "
            wrong.append(where + (f"{place}: {says}{elsewhere(place)}" if place else str(says)))
            return found[0]

    return LINK.sub(new, BLOCK.sub(new, text))


def elsewhere(place: str) -> str:
    """Where this place is found now, in words: it may have moved with its function or file."""
    files = [*ROOT.glob("*.py")]
    for folder in "device", "dev", "doc", "kernels", "llmc", "tests":
        files += [path for path in (ROOT / folder).rglob("*.*") if path.suffix in {".py", ".cu", ".cuh", ".h", ".cpp"}]
    found = []
    for path in sorted(files):
        with contextlib.suppress(UserError):
            line_at(path.read_text().splitlines(), place)
            found.append(str(path.relative_to(ROOT)))
    return f"; is it that of {' or '.join(found)}?" if 0 < len(found) < 4 else ""


def printed(text: str, wrong: list[str]) -> str:
    """The text of a page with what its commands print now; if one fails, its old lines stay."""

    def new(found: re.Match) -> str:
        command = [sys.executable, *shlex.split(found["command"])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
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
        before = page.read_text()
        after = renewed(page, wrong)
        if args.write:
            page.write_text(printed(after, wrong))
        elif after != before:
            wrong.append(f"{page.relative_to(ROOT)} quotes code that has changed: run make quotes")
    if wrong:
        raise UserError("\n".join(wrong))


if __name__ == "__main__":
    run_program(main)

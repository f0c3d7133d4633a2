"""Places in code: how the pages and the exercises name a line of a file, by what stands there and not by its number.

A link to a place has the place behind it, in a comment. The link's target names the file, and is all that GitHub needs;
doc/book.py adds the line's number when it makes the book:

    [common.cuh: `x += __shfl_xor_sync(0xffffffffu, x, offset);`](../kernels/common.cuh)<!-- warp_sum: x += -->

Places:

    warp_sum                     the line that defines this function, class, struct, macro or constant; of a function,
                                 its name and no parameters. Vec.load is the load in Vec
    warp_sum: x +=               the one line in it that has `x +=`, from there to its end, without the comment there
    warp_sum: x += ... offset)   the same line, from `x +=` to `offset)`
    : Butterfly ... run          a line anywhere in the file

If code moves within its file, no place changes. If a file moves, replace its path in all pages.
"""

import re
import textwrap
from pathlib import Path

from device.errors import UserError

PLACE = re.compile(r"(?P<name>[\w.]*)(?:: (?P<start>.+?)(?: \.\.\. (?P<stop>.+))?)?")
QUALIFIERS = re.compile(r'(?:(?:extern "C"|__(?:global|device|host|forceinline)__|static|inline) )+')
# How a definition of NAME begins, in Python and in C++, where a line may begin with the name.
PYTHON = r"\s*(async )?def NAME\(|\s*class NAME\b|NAME(: [^=]+)? = "
CPP = (
    r"\s*(struct|class|enum|union|using|#define) NAME\b(?!;)|\s*(static )?constexpr [\w ]*\bNAME( =|\[)|NAME\(|"
    r"(?!.*;$|\s*(return|else|case|if|for|while|do|asm|throw)\b)[^=;/{}]*[\w>*&)] [*&]*NAME\("
)


def lines_of(path: Path) -> list[str]:
    """The lines of a file of code. Raises UserError if there is no such file."""
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        raise UserError("there is no such file") from None


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
    if cpp and (code_of(lines[begin]).endswith((";", "}")) or lines[begin].startswith("#")):
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
        raise UserError("this is no place: doc/places.py shows what is one")
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

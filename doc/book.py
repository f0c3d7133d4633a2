"""Makes a folder of HTML pages of the book, which a browser opens from the disk, without a network.

    make book                          # installs pandoc where that is needed, then runs this
    python doc/book.py -o book

pandoc turns Markdown into HTML and formulas into MathML. What is left for this script: links between pages, a page for
each source file that is linked to, the line's number in each link to a place in code (doc/places.py), and the frame
around all.
The ladders' tables get columns for the GPUs of this machine, if doc/ladder.py has kept their times.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from html import escape, unescape

from device.errors import UserError
from doc.ladder import kept_elsewhere, kept_measurement, with_tables
from doc.places import line_at, lines_of
from llmc.run.arguments import Parser
from llmc.run.program import run_program

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "doc"
STYLE = "book.css"
MARKDOWN = "gfm+tex_math_dollars"  # GitHub's, which shows the same pages
CODE = {".cu": "cpp", ".cuh": "cpp", ".h": "cpp", ".cpp": "cpp", ".py": "python", ".sh": "bash", ".toml": "toml"}
PICTURES = {".svg", ".png"}
TO_A_PLACE = re.compile(r"\]\((?P<file>[^()\s#]+)\)<!-- (?P<place>.*?) -->")  # what follows a link's text

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="stylesheet" href="{style}">
</head>
<body>
<nav>{before}<a href="{contents}">llm.cupy, the book</a>{behind}</nav>
<main>
{body}
</main>
<nav>{before}<a href="{contents}">Contents</a>{behind}</nav>
</body>
</html>
"""


def pandoc(text: str, format: str) -> str:
    """HTML of a page's text, without a frame. Raises UserError where there is no pandoc."""
    try:
        import pypandoc
    except ImportError:
        raise UserError("the book needs pandoc: make book, or pip install pypandoc_binary") from None
    return pypandoc.convert_text(text, "html5", format=format, extra_args=["--mathml", "--wrap=preserve"])


def page_of(path: Path) -> Path | None:
    """Where in the book a file of the repository is found; None for what has no place there, such as a folder."""
    if not path.is_file() or ROOT not in path.parents:
        return None
    inside = path.relative_to(DOC) if DOC in path.parents else Path("source") / path.relative_to(ROOT)
    if path.suffix in PICTURES:
        return inside
    return inside.with_suffix(".html") if path.suffix == ".md" else inside.with_name(inside.name + ".html")


def relative(there: Path, here: Path) -> str:
    return Path(os.path.relpath(there, here.parent)).as_posix()


def link(path: Path, target: str, used: set[Path]) -> str | None:
    """The address in the book of what a page of the repository links to; None for what the book does not have. The
    file is added to those that are used."""
    if re.match(r"\w+:", target) or target.startswith("#"):
        return target
    file, _, anchor = target.partition("#")
    there = (path.parent / file).resolve()
    place = page_of(there)
    if place is None:
        return None
    used.add(there)
    if place.suffix == ".html" and there.suffix != ".md":
        anchor = anchor.replace("L", "L-", 1)
    return relative(place, page_of(path)) + (f"#{anchor}" if anchor else "")


def with_lines(page: Path, text: str) -> str:
    """The text of a page whose links to places in code lead to these lines now. Raises UserError for a place that is
    not there."""

    def numbered(found: re.Match) -> str:
        file, place = found["file"], found["place"]
        try:
            number, _ = line_at(lines_of(page.parent / file), place)
        except UserError as error:
            raise UserError(f"{page.relative_to(ROOT)}: {file}: {place}: {error}") from None
        return f"]({file}#L{number})"

    return TO_A_PLACE.sub(numbered, text)


def markdown_page(path: Path) -> tuple[str, set[Path]]:
    """A page's HTML, and the files that it uses."""
    used: set[Path] = set()

    def anchor(found: re.Match) -> str:
        address = link(path, unescape(found[1]), used)
        return found[2] if address is None else f'<a href="{escape(address)}">{found[2]}</a>'

    def picture(found: re.Match) -> str:
        return f'{found[1]}{escape(link(path, unescape(found[2]), used) or found[2])}"'

    text = with_tables(path.read_text("utf-8"), kept_measurement(), kept_elsewhere())
    body = pandoc(with_lines(path, text), MARKDOWN)
    body = re.sub(r'<a\s+href="([^"]*)"[^>]*>(.*?)</a>', anchor, body, flags=re.S)
    body = re.sub(r'(<img\s+[^>]*?src=")([^"]*)"', picture, body)
    body = re.sub(r'<img\s+[^>]*?src="([^"]*)"[^>]*>', r'<a class="picture" href="\1">\g<0></a>', body)
    body = re.sub(r"<table>(.*?)</table>", r'<div class="table"><table>\1</table></div>', body, flags=re.S)
    return body, used


def source_page(path: Path) -> tuple[str, set[Path]]:
    fence = "~" * 30
    language = f".{CODE[path.suffix]}" if path.suffix in CODE else ".makefile" if path.name == "Makefile" else ".text"
    text = f"{fence} {{{language} .numberLines .lineAnchors #L}}\n{path.read_text('utf-8')}\n{fence}\n"
    return f"<h1>{escape(path.relative_to(ROOT).as_posix())}</h1>\n{pandoc(text, 'markdown')}", set()


def frame(path: Path, body: str, order: list[Path]) -> str:
    """A whole page, with links to those before and behind it in the order of the contents."""
    here = page_of(path)
    at = order.index(path) if path in order else None
    before = order[at - 1] if at else None
    behind = order[at + 1] if at is not None and at + 1 < len(order) else None
    heading = re.search(r"<h1[^>]*>(.*?)</h1>", body, re.S)
    title = re.sub(r"<[^>]+>", "", heading[1]) if heading else path.stem

    def to(other: Path | None, text: str) -> str:
        return f'<a href="{relative(page_of(other), here)}">{text}</a>' if other else ""

    return PAGE.format(
        title=f"{title.strip()} · llm.cupy", body=body, before=to(before, "← back"), behind=to(behind, "on →"),
        style=relative(Path(STYLE), here), contents=relative(Path("index.html"), here),
    )  # fmt: skip


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raises UserError where the system refuses to write what is written within the block."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{out}: cannot be written ({reason}); choose another folder with -o") from None


def build(out: Path) -> int:
    """Writes the book, in place of an older one; returns the number of its pages."""
    if out.exists() and not (out / STYLE).exists():
        raise UserError(f"{out} exists and is not a book: choose another folder with -o")
    with writing(out):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy(DOC / STYLE, out)
    bodies: dict[Path, str] = {}
    wanted = set(DOC.rglob("*.md"))
    with ThreadPoolExecutor() as pool:
        while wanted:
            paths = sorted(wanted)
            made = pool.map(lambda path: (markdown_page if path.suffix == ".md" else source_page)(path), paths)
            used: set[Path] = set()
            for path, (body, uses) in zip(paths, made, strict=True):
                bodies[path] = body
                used |= uses
            with writing(out):
                for path in (path for path in used if path.suffix in PICTURES):
                    (out / page_of(path)).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, out / page_of(path))
            wanted = {path for path in used if path.suffix not in PICTURES} - bodies.keys()
    numbered = sorted(DOC.glob("[0-9][0-9]-*.md"))
    order = [DOC / "index.md", DOC / "cpp.md", *numbered, DOC / "glossary.md", DOC / "answers.md"]
    order = [path for path in order if path in bodies]
    with writing(out):
        for path, body in bodies.items():
            (out / page_of(path)).parent.mkdir(parents=True, exist_ok=True)
            (out / page_of(path)).write_text(frame(path, body, order), "utf-8")
    return len(bodies)


def main() -> None:
    parser = Parser(description="Make a folder of HTML pages of doc/.")
    parser.add_argument("-o", "--out", metavar="DIR", type=Path, default=ROOT / "book", help="the folder (book)")
    args = parser.parse_args()
    pages = build(args.out)
    print(f"{pages} pages: open {args.out / 'index.html'} in a browser")


if __name__ == "__main__":
    run_program(main)

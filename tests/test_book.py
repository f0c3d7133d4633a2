"""The book in doc/ and README.md cannot rot: their Python is run, their commands are run or looked up, their links lead
somewhere, and their quotes of code are what make quotes writes.

What is a command: each line of a ```sh block, and in indented blocks and `code` each line that begins with one of
PROGRAMS. A ```sh block is run line by line, from the repository's root or in a copy of it. Of every other command the
program, its flags or its target must be there.
"""

import ast
import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from html import unescape
from pathlib import Path
from typing import NamedTuple

from device.cpp.compiler import installed_compiler
from doc import book, quotes

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "doc"
PAGES = sorted(DOC.glob("[0-9][0-9]-*.md"))
ANSWERS = [DOC / "answers" / f"{page.name[:2]}.md" for page in PAGES]
# All that the book has: its pages, their answers, and what holds them together.
BOOK = [*PAGES, *ANSWERS, *(DOC / f"{name}.md" for name in ("cpp", "exchange", "glossary", "answers", "index"))]
TEXTS = sorted({ROOT / "README.md", *DOC.rglob("*.md"), *(ROOT / "exercises").rglob("*.md")})

LANGUAGES = {"python", "sh", "sh gpu", "text", "cuda", "cpp", "c", "make", "diff"}

PROGRAMS = (
    "python", "python3", "make", "pip", "bash", "gdb", "docker", "torchrun", "srun", "mpirun", "nvidia-smi", "apt-get",
    "git", "ncu", "ruff", "pytest",
)  # fmt: skip
COMMAND = re.compile(rf"(?:\$ )?((?:[A-Z_]+=\S* )*(?:{'|'.join(PROGRAMS)}) \S.*)")

MORE_THAN_NUMPY = re.compile(r"dev/data/|-m pytest|--gpus [2-9]")  # commands that need tiktoken, or PyTorch and pytest
# Lines of ```sh blocks that only make test-all runs: tests, which make test runs by themselves, and what takes longer
# than a few seconds.
LONG_LINES = ["*python -m pytest*", "LLMC_CPU_DEBUG=1 *", "python doc/ladder.py *"]

needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), reason="there is no C++ compiler"
)


# ---- what a page is made of


class Block(NamedTuple):
    """A fenced block."""

    language: str  # what stands behind its fence
    line: int      # on which its text begins
    text: str


class Link(NamedTuple):
    line: int
    picture: bool
    text: str
    target: str


FENCE = re.compile(r"^(```+)([^\n`]*)\n(.*?)^\1[ \t]*$", re.M | re.S)
COMMENT = re.compile(r"<!--.*?-->")
MATHEMATICS = re.compile(r"\$\$.*?\$\$|\$(?=\S)[^$\n]*(?<=\S)\$(?!\d)", re.S)
SPAN = re.compile(r"(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)", re.S)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)", re.S)


def without(text: str, *patterns: re.Pattern) -> str:
    """The text with a word in place of what the patterns match, its lines left where they are."""
    for pattern in patterns:
        text = pattern.sub(lambda found: "…" + "\n" * found[0].count("\n"), text)
    return text


@functools.cache
def read(path: Path) -> str:
    return path.read_text()


def blocks(path: Path) -> list[Block]:
    text = read(path)
    return [Block(m[2].strip(), text.count("\n", 0, m.start()) + 2, m[3]) for m in FENCE.finditer(text)]


def links(path: Path) -> list[Link]:
    text = without(read(path), FENCE, COMMENT, MATHEMATICS, SPAN)
    return [Link(text.count("\n", 0, m.start()) + 1, bool(m[1]), m[2], m[3]) for m in LINK.finditer(text)]


def anchors(path: Path) -> set[str]:
    """What a link to a heading of the page may end in, as GitHub names it."""
    found, slugs = set(re.findall(r'<a (?:id|name)="([^"]+)"', read(path))), []
    for heading in re.findall(r"^#{1,6} +(.+?)[ #]*$", without(read(path), FENCE), re.M):
        heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slugs.append(re.sub(r"[^\w\- ]", "", unescape(heading).lower()).replace(" ", "-"))
        found.add(slugs[-1] + f"-{slugs.count(slugs[-1]) - 1}" * (slugs.count(slugs[-1]) > 1))
    return found


def commands(path: Path) -> Iterator[tuple[int, str]]:
    """The commands of a page that stand outside of ```sh blocks, and in ```sh gpu, without their comments."""
    text = re.sub(r"[ \t]*\\\n[ \t]*", lambda m: " \0", without(read(path), FENCE))
    for number, line in enumerate(text.replace(" \0", " ").splitlines(), 1):
        candidates = [line.strip()] if line.startswith("    ") else [m[0].strip("` ") for m in SPAN.finditer(line)]
        for candidate in candidates:
            if found := COMMAND.fullmatch(candidate):
                yield number, without_comment(found[1])
    for block in blocks(path):
        if block.language == "sh gpu":
            yield from lines_of(block)


def lines_of(block: Block) -> Iterator[tuple[int, str]]:
    """The commands of a ```sh block, with their line numbers; one that ends in a backslash goes on in the next line."""
    begun = ""
    for number, line in enumerate(block.text.splitlines(), block.line):
        line = begun + line.strip()
        begun = line[:-1].rstrip() + " " if line.endswith("\\") else ""
        if not begun and (command := without_comment(line)):
            yield number, command


def without_comment(line: str) -> str:
    return re.sub(r"(^|\s+)#(?=\s|$).*", "", line).strip()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_text = pytest.mark.parametrize("path", TEXTS, ids=name_of)


# ---- Python


def python_of(path: Path) -> Iterator[ast.Module]:
    """A page's blocks of Python in their order, with the page's line numbers."""
    for block in blocks(path):
        if block.language == "python":
            yield ast.parse("\n" * (block.line - 1) + block.text, str(path))


@pytest.mark.parametrize("path", [path for path in BOOK if any(python_of(path))], ids=name_of)
def test_the_python_of_a_page_runs(path, monkeypatch, tmp_path):
    """In one namespace."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": path.stem}
    with contextlib.redirect_stdout(None):
        for tree in python_of(path):
            exec(compile(tree, str(path), "exec"), namespace)


def test_the_python_of_the_page_about_python_runs_and_pandas_reads_the_log(monkeypatch, tmp_path):
    """The page on training has the line that reads the log."""
    for package in "torch", "transformers", "pandas":
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    namespace = {}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with contextlib.redirect_stdout(io.StringIO()):
        for path in DOC / "python.md", DOC / "training.md":
            for tree in python_of(path):
                exec(compile(tree, str(path), "exec"), namespace)
    losses = {step: figures["train_loss"] for step, figures in namespace["reports"] if "train_loss" in figures}
    logged = namespace["table"]["trl"].dropna().to_dict()
    assert list(losses) == list(range(5)) and logged == {step: round(loss, 4) for step, loss in losses.items()}
    assert handlers == {number: signal.getsignal(number) for number in handlers}


def test_numpy_is_enough_for_what_the_python_of_the_pages_imports(without_packages):
    """In a Python of its own: in this one other tests have imported more."""
    nodes = (node for path in BOOK for tree in python_of(path) for node in ast.walk(tree))
    nodes = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    imports = "\n".join(sorted({ast.unparse(node) for node in nodes}))
    assert "train_gpt2_fp32" in imports
    done = run(f"python -c {shlex.quote(imports)}", ROOT, **without_packages)
    assert done.returncode == 0, done.stderr


# ---- C++


@needs_a_compiler
def test_the_cpp_of_a_construct_prints_what_its_python_prints_and_the_comment_says(tmp_path):
    """The sections of cpp.md are about one construct each: a block of Python, and one of C++. The blocks of C++ are
    compiled as one program, by the CPU device's compiler."""
    sections = re.findall(r"^## (\d+\. .*)\n((?:.*\n)*?)(?=## )", read(DOC / "cpp.md"), re.M)
    examples = {title: {m[2]: m[3] for m in FENCE.finditer(text)} for title, text in sections}
    assert all(list(example) == ["python", "cpp"] for example in examples.values()) and examples
    parts = [f"namespace n{i} {{\n{example['cpp']}}}" for i, example in enumerate(examples.values())]
    text = "\n".join(["#include <stdio.h>", *parts]).replace("int main() {", "void run() {")
    calls = "".join(f'n{i}::run(); puts("---");' for i in range(len(parts)))
    (tmp_path / "all.cpp").write_text(f"{text}\nint main() {{ {calls} }}\n")
    command = [*installed_compiler()[0], "-std=c++17", "-Wall", "-Werror", "all.cpp", "-o", "all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = subprocess.run([tmp_path / "all"], capture_output=True, text=True, check=True).stdout.split("---\n")
    for (title, example), by_cpp in zip(examples.items(), printed[:-1], strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as by_python:
            exec(example["python"], {})
        said = example["python"].rpartition("# ")[2]
        assert by_python.getvalue().split() == by_cpp.split() == said.split(), title


# ---- commands


class Line(NamedTuple):
    """A command, and what the page shows of its output: the ```text block behind the ```sh block that it ends."""

    path: Path
    number: int
    command: str
    shown: str


def lines() -> Iterator:
    for path in [DOC / "index.md", *PAGES, *ANSWERS]:
        for block in (block for block in blocks(path) if block.language == "sh"):
            rest = read(path).splitlines(keepends=True)[block.line - 1 + block.text.count("\n") :]
            behind = re.match(r"```\n\n```text\n(.*?)^```", "".join(rest), re.M | re.S)
            *_, (last, _) = lines_of(block)
            for number, command in lines_of(block):
                line = Line(path, number, command, behind[1] if behind and number == last else "")
                marks = [pytest.mark.long] * any(fnmatchcase(command, pattern) for pattern in LONG_LINES)
                yield pytest.param(line, id=f"{name_of(path)}:{number}", marks=marks)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the repository, with the data that needs no network, in which commands may write what they like."""
    copy = tmp_path_factory.mktemp("book") / ROOT.name
    for folder in "dev", "device", "doc", "exercises", "kernels", "llmc", "tests":
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.part", "work"))
    for path in *ROOT.glob("*.py"), *ROOT.glob("requirements*.txt"), ROOT / "README.md", ROOT / "pyproject.toml":
        shutil.copy(path, copy)
    assert run("python dev/data/python_docs.py", copy).returncode == 0
    return copy


@pytest.fixture(scope="module")
def without_packages(tmp_path_factory) -> dict[str, str]:
    """The environment of a Python that has, of what requirements*.txt list, NumPy alone."""
    folder = tmp_path_factory.mktemp("without")
    lines = "\n".join(map(read, ROOT.glob("requirements*.txt")))
    packages = {"cupy", *re.findall(r"^[\w-]+", lines, re.M)} - {"numpy"}
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({sorted(packages)}))\n")
    return {"PYTHONPATH": str(folder)}


def run(command: str, directory: Path, **more: str) -> subprocess.CompletedProcess:
    """What bash makes of a command, with the Python that runs the tests and more variables of the environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLMC_CPU_", "PYTEST_", "MAKE"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command], cwd=directory, env=environment | {"PATH": path, "DEBUGINFOD_URLS": ""} | more,
        capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@needs_a_compiler
@pytest.mark.parametrize("line", list(lines()))
def test_a_command_of_a_page_runs(line, copy, without_packages):
    if "gdb " in line.command and shutil.which("gdb") is None:
        pytest.skip("there is no gdb")
    packages = {} if MORE_THAN_NUMPY.search(line.command) else without_packages
    looks = re.match(r"(LLMC_CPU_\w+=\S+ )*python (dev/microscope|doc/ladder\.py) ", line.command)
    done = run(line.command, ROOT if looks else copy, **packages)  # in ROOT, what it compiles is kept
    said = f"{line.command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, f"{line.path}:{line.number}: {said}"
    # What a debugger shows of the data depends on the Python whose documentation they are made of.
    comparable = (lambda text: re.sub(r"[-\d.]+", "#", text)) if "gdb " in line.command else str
    for shown in line.shown.splitlines():
        assert comparable(shown.removesuffix(" ...")) in comparable(done.stdout), f"{shown}\n{said}"


@needs_a_compiler
def test_page_1_shows_what_its_kernels_print():
    """What each of the eight prints, but for the order of threads that is random."""
    page = DOC / "01-eight-kernels.md"
    shown = [block.text for block in blocks(page) if block.language == "text" and "nan" not in block.text]
    printed = run("python doc/eight_kernels.py --device cpu", ROOT).stdout
    assert len(shown) == 7 and [text for text in shown if text not in printed] == []
    assert "xor 1  " + " 496" * 32 in printed  # of the shuffles, which the page does not show


@functools.cache
def flags_of(path: Path) -> set[str]:
    """The flags that a program or module quotes, and those of the modules of ours that it imports."""
    quoted = " ".join(re.findall(r"""["'](--?[a-z][\w -]*)["']""", read(path)))
    found = {word for word in quoted.split() if word.startswith("-")}
    for module, names in re.findall(r"^(?:from|import) ([\w.]+)(?: import ([\w, ]+))?", read(path), re.M):
        for each in module, *(f"{module}/{name.strip()}" for name in names.split(",")):
            imported = ROOT / f"{each.replace('.', '/')}.py"
            found |= flags_of(imported) if imported.exists() else set()
    return found


def test_what_is_not_run_has_its_program_flags_and_target():
    targets = set(re.findall(r"^([a-z0-9-]+):", read(ROOT / "Makefile"), re.M))
    for place, command in ((f"{name_of(path)}:{number}", line) for path in TEXTS for number, line in commands(path)):
        program, *words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        if program == "make":
            assert words[0] in targets, f"{place}: there is no target {words[0]}"
        script = next((word for word in words if word.endswith((".py", ".sh")) and "tests/" not in word), None)
        if script:
            assert (ROOT / script).exists(), f"{place}: there is no {script}"
            flags = {word.partition("=")[0] for word in words[words.index(script) :] if re.match(r"--?[a-z]", word)}
            assert flags <= flags_of(ROOT / script), f"{place}: {script} has no {flags - flags_of(ROOT / script)}"


# ---- links, quotes, pictures


def source_of(path: Path, target: str) -> Path:
    return (path.parent / unescape(target).partition("#")[0]).resolve()


@each_text
def test_links_lead_somewhere_and_pictures_have_words(path):
    for link in links(path):
        place, target = f"{name_of(path)}:{link.line}", link.target
        if re.match(r"https?://[\w.-]+(/|$)|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        there = source_of(path, target) if file else path
        assert there.exists(), f"{place}: {target} does not exist"
        assert ROOT in (there, *there.parents), f"{place}: {target} is outside of the repository"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{place}: {there.name} has no heading #{anchor}"
        else:
            assert not anchor, f"{place}: {target}: name the place behind the link, not its line (doc/places.py)"
        if link.picture:  # for those who do not see it
            assert len(link.text.split()) > (path in BOOK), f"{place}: what does {target} show?"
    assert not re.search(r"<img(?![^>]*\balt=\"[^\"]+\")", read(path)), f"{name_of(path)}: a picture has no alt"
    assert book.with_lines(path, read(path)).count("#L") == len(book.TO_A_PLACE.findall(read(path)))


def test_a_quote_follows_its_code_or_is_named(tmp_path, monkeypatch):
    """The book's own quotes show the other ways in which a place is named."""
    monkeypatch.setattr(quotes, "ROOT", tmp_path)
    code = """\
template <int N>
__device__ inline float sum_of(float x, int n) {
    for (int k = 0; k < n; k++) x += k;  // in order
    return x;
}
"""
    right = """\
[a.cu: `x += k;`](a.cu)<!-- sum_of: x += ... ; --> [a.cu: `float sum_of(`](a.cu)<!-- sum_of -->

<!-- a.cu: sum_of -->
```cuda
__device__ inline float sum_of(float x, int n) {
    for (int k = 0; k < n; k++) x += k;  // in order
    return x;
}
```
"""
    wrong = """\
[a.cu: `none`](a.cu) [a.cu: `none`](a.cu)<!-- sum_of: y --> [a.cu: `none`](a.cu)<!-- sum_of: x -->
[a.cu: `none`](a.cu)<!-- Gone.run --> [b.cu: `none`](b.cu)<!-- x --> [a.cu: `none`](a.cu)<!-- sum_of: for ... y -->
"""
    (tmp_path / "moved.py").write_text("class Gone:\n    def run(self):\n        return 1\n")
    (page := tmp_path / "page.md").write_text(right + wrong)
    for above in 0, 10:
        (tmp_path / "a.cu").write_text("// more\n" * above + code)
        assert quotes.renewed(page, found := []) == right + wrong
        lines = f"[a.cu: `x += k;`](a.cu#L{above + 3}) [a.cu: `float sum_of(`](a.cu#L{above + 2})"
        assert book.with_lines(page, right).splitlines()[0] == lines
    assert found == [
        "page.md:10: a.cu: a quote needs its place behind it, as in <!-- function: begin of a line -->",
        "page.md:10: a.cu: sum_of: y: no lines with `y`",
        "page.md:10: a.cu: sum_of: x: 3 lines with `x`",
        "page.md:11: a.cu: Gone.run: no definitions of Gone; is it that of moved.py?",
        "page.md:11: b.cu: x: there is no such file",
        "page.md:11: a.cu: sum_of: for ... y: no `y` behind `for`",
    ]
    (tmp_path / "a.cu").write_text(code.replace("x += k", "x += N"))
    assert quotes.renewed(page, []) == (right + wrong).replace("x += k", "x += N")


def test_the_quotes_are_as_the_code_is():
    done = subprocess.run([sys.executable, DOC / "quotes.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- the book as a whole


def test_every_page_is_in_the_contents():
    for index, pages in (DOC / "index.md", BOOK), (DOC / "answers.md", ANSWERS):
        led_to = {source_of(index, link.target) for link in links(index)}
        assert [path for path in pages if path.parent == pages[0].parent and path not in led_to | {index}] == []


def test_the_weekends_have_each_page_once_with_its_minutes():
    """A minute is 100 words. A page that is edited may take ten minutes more or less than the index says."""
    weekends = read(DOC / "index.md").partition("\n## A weekend\n")[2].partition("\n## ")[0]
    minutes = {name: int(n) for name, n in re.findall(r"\]\((\d\d-[\w-]+\.md)\) (\d+)", weekends)}
    assert sorted(minutes) == [page.name for page in PAGES] and weekends.count("](") - 1 == len(PAGES)
    assert {name: n for name, n in minutes.items() if abs(n - len(read(DOC / name).split()) / 100) > 10} == {}


def test_the_project_has_one_address():
    """OWNER stands for its owner, whom nothing here knows: git grep 'OWNER.*/llm.cupy' finds each place."""
    address = re.compile(
        r"(https://(?:github\.com|codespaces\.new|colab\.research\.google\.com/github)/)([\w-]+)(/llm\.cupy)"
        r"|(https://)([\w-]+)(\.github\.io/llm\.cupy/)"
    )
    files = [*TEXTS, ROOT / "CITATION.cff", ROOT / "notebooks/llm.cupy.ipynb", *(ROOT / ".github").rglob("*.yml")]
    found = {path: list(address.finditer(read(path))) for path in files}
    owners = {match[2] or match[5] for matches in found.values() for match in matches}
    assert len(owners) == 1
    named = {name_of(path): len(matches) for path, matches in found.items() if matches}
    assert named == {
        "README.md": 3, "doc/index.md": 2, "doc/set-up.md": 1, "CITATION.cff": 2, "notebooks/llm.cupy.ipynb": 1,
        ".github/workflows/book.yml": 1,
    }  # fmt: skip
    assert f"/github/{owners.pop()}/llm.cupy/blob/main/notebooks/llm.cupy.ipynb)" in read(ROOT / "README.md")


@pytest.mark.parametrize("path", BOOK, ids=name_of)
def test_fenced_blocks_say_what_they_are(path):
    assert {block.language for block in blocks(path)} <= LANGUAGES
    assert not re.search(r"^```", without(read(path), FENCE), re.M), f"{name_of(path)}: a fence is left open"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_each_exercise_of_a_page_has_its_answer(path):
    exercises, _, _ = without(read(path), FENCE).partition("\n## Exercises\n")[2].partition("\n## ")
    asked = set(re.findall(rf"\b{int(path.name[:2])}\.\d+\b", exercises))
    assert asked and f"[Answers](answers/{path.name[:2]}.md)" in exercises
    answers = re.findall(r"^#+ .*?(\d+\.\d+)\b", read(DOC / "answers" / f"{path.name[:2]}.md"), re.M)
    assert asked <= set(answers), f"{name_of(path)}: no answers to {asked - set(answers)}"

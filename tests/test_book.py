"""The book in doc/ and README.md cannot rot: their Python is run, their commands are run or named, their links lead
somewhere, their quotes of code are what make quotes writes, and their tables are what the scripts write now.

What is a command: each line of a ```sh block, and in indented blocks and `code` each line that begins with one of
PROGRAMS. A ```sh block is run line by line, from the repository's root in a copy of it. Every other command is in
NOT_RUN, which says why it is not run; the program, its flags or its target must be there.
"""

import ast
import atexit
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
import tempfile
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
NAMES = (
    "01-eight-kernels", "02-what-bounds-a-kernel", "03-sums", "04-layernorm", "05-linear-layers",
    "06-gelu-swiglu-embedding", "07-loss", "08-attention", "09-flash-attention", "10-flash-attention-machine",
    "11-the-step", "12-two-bytes", "13-a-token-at-a-time", "14-trusting-it", "15-several-gpus",
    "16-when-the-model-does-not-fit", "17-a-hopper-product", "18-one-byte",
)  # fmt: skip
# All that the book has: its pages, their answers, and what holds them together.
BOOK = [DOC / f"{name}.md" for name in ("cpp", *NAMES, "exchange", "glossary", "answers", "index")]
BOOK += [DOC / "answers" / f"{name[:2]}.md" for name in NAMES]
TEXTS = sorted({ROOT / "README.md", *DOC.rglob("*.md"), *(ROOT / "exercises").rglob("*.md")})

LANGUAGES = {"python", "sh", "sh gpu", "text", "cuda", "cpp", "c", "make", "diff"}

PROGRAMS = (
    "python", "python3", "make", "pip", "bash", "gdb", "docker", "torchrun", "srun", "mpirun", "nvidia-smi", "apt-get",
    "git", "ncu", "ruff", "pytest",
)  # fmt: skip
COMMAND = re.compile(rf"(?:\$ )?((?:[A-Z_]+=\S* )*(?:{'|'.join(PROGRAMS)}) \S.*)")

# Commands outside of ```sh blocks, as patterns of fnmatch, without their comments.
NOT_RUN = {
    "a target of the Makefile, which tests/test_make.py reads": ["make *"],
    "tests, which run by themselves": ["*python -m pytest*"],
    "measured on the H200": [
        "python dev/bench*", "python dev/profile_step.py*", "python dev/plot_log.py*", "nvidia-smi *", "ncu *",
    ],
    "trains, or reads what was trained: long, or on the H200": [
        "python train_*.py *", "python generate.py *", "python dev/hf/export_hf.py *", "python dev/hf/import_hf.py *",
    ],
    "needs several machines": ["torchrun *", "srun *", "mpirun *"],
    "needs the network": [
        "pip install *", "apt-get *", "bash dev/download_starter_pack.sh", "docker *", "git clone *", "git worktree *",
        "python dev/data/*",
    ],
    "long": ["python -m timeit *"],
    "shown in full in page 14, where it is run": ["LLMC_CPU_DEBUG=1 *gdb *"],
    "has tests of its own": [
        "python dev/microscope *", "python doc/draw.py*", "python doc/*.py --write", "python doc/ladder.py*",
        "python doc/eight_kernels.py*", "python exercises/check.py*",
    ],
}
MORE_THAN_NUMPY = re.compile(r"dev/data/|-m pytest|--gpus [2-9]")  # commands that need tiktoken, or PyTorch and pytest
# Lines of ```sh blocks that only make test-all runs: tests, which make test runs by themselves, and what takes longer
# than a few seconds.
LONG_LINES = ["*python -m pytest*", "LLMC_CPU_DEBUG=1 *", "python doc/ladder.py *"]

needs_a_compiler = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)


# ---- what a page is made of


class Block(NamedTuple):
    """A fenced block: what stands behind its fence, the line on which its text begins, and its text."""

    language: str
    line: int
    text: str


class Link(NamedTuple):
    """A link or picture: the line it is on, whether it is a picture, its text and its target."""

    line: int
    picture: bool
    text: str
    target: str


FENCE = re.compile(r"^(```+)([^\n`]*)\n(.*?)^\1[ \t]*$", re.M | re.S)
MATHEMATICS = re.compile(r"\$\$.*?\$\$|\$(?=\S)[^$\n]*(?<=\S)\$(?!\d)", re.S)
SPAN = r"(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"
LINK = re.compile(  # code, which is passed over, or a link, whose text may hold code and brackets
    rf"{SPAN}|(?P<picture>!?)\[(?P<text>(?:[^\[\]`]|(`+)(?!`).*?(?<!`)\4(?!`)|\[[^\]]*\])*)\]"
    r"\((?P<target>[^()\s]+)\)", re.S
)  # fmt: skip
COMMENT = re.compile(r"<!--.*?-->")


def blanked(pattern: re.Pattern, text: str) -> str:
    """The text with what the pattern matches taken out, its lines left where they are."""
    return pattern.sub(lambda found: "\n" * found[0].count("\n"), text)


@functools.cache
def read(path: Path) -> str:
    return path.read_text()


def blocks(path: Path) -> list[Block]:
    text = read(path)
    return [Block(m[2].strip(), text.count("\n", 0, m.start()) + 2, m[3]) for m in FENCE.finditer(text)]


def links(path: Path) -> list[Link]:
    """The links of a page, but for those in code and in mathematics."""
    text = blanked(MATHEMATICS, blanked(COMMENT, blanked(FENCE, read(path))))
    found = [m for m in LINK.finditer(text) if m["target"]]
    return [Link(text.count("\n", 0, m.start()) + 1, bool(m["picture"]), m["text"], m["target"]) for m in found]


def anchors(path: Path) -> set[str]:
    """What a link to a heading of the page may end in, as GitHub names it."""
    found, seen = set(re.findall(r'<a (?:id|name)="([^"]+)"', read(path))), {}
    for heading in re.findall(r"^#{1,6} +(.+?)[ #]*$", blanked(FENCE, read(path)), re.M):
        heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", unescape(heading).lower()).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def commands(path: Path) -> Iterator[tuple[int, str]]:
    """The commands of a page that stand outside of ```sh blocks, and in ```sh gpu, without their comments."""
    text = re.sub(r"[ \t]*\\\n[ \t]*", lambda m: " \0", blanked(FENCE, read(path)))
    for number, line in enumerate(text.replace(" \0", " ").splitlines(), 1):
        candidates = [line.strip()] if line.startswith("    ") else [m[0].strip("` ") for m in re.finditer(SPAN, line)]
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
PROSE = [path for path in BOOK if re.match(r"\d\d", path.name)]


# ---- Python


WITH_PYTHON = [path for path in BOOK if any(block.language == "python" for block in blocks(path))]


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name_of)
def test_the_python_of_a_page_runs(path, monkeypatch, tmp_path):
    """A page's blocks in their order, in one namespace. They need NumPy at most, and what is ours."""
    monkeypatch.chdir(tmp_path)
    ours = {path.stem for path in ROOT.iterdir()}
    namespace = {"__name__": path.stem}
    with contextlib.redirect_stdout(None):
        for block in blocks(path):
            if block.language != "python":
                continue
            tree = ast.parse("\n" * (block.line - 1) + block.text, str(path))
            more = [name for name in modules_of(tree) if name not in {"numpy", *sys.stdlib_module_names, *ours}]
            assert not more, f"{path}: {more} is more than NumPy"
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
            for block in blocks(path):
                exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), namespace)
    losses = {step: figures["train_loss"] for step, figures in namespace["reports"] if "train_loss" in figures}
    logged = namespace["table"]["trl"].dropna().to_dict()
    assert list(losses) == list(range(5)) and logged == {step: round(loss, 4) for step, loss in losses.items()}
    assert handlers == {number: signal.getsignal(number) for number in handlers}


def modules_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_numpy_is_enough_for_what_the_python_of_the_pages_imports():
    """In a Python of its own: in this one other tests have imported more."""
    trees = (ast.parse(block.text) for path in WITH_PYTHON for block in blocks(path) if block.language == "python")
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    imports = "\n".join(sorted({ast.unparse(node) for node in nodes}))
    assert "train_gpt2_fp32" in imports
    done = run(f"python -c {shlex.quote(imports)}", ROOT, numpy_alone=True)
    assert done.returncode == 0, done.stderr


# ---- C++


# The sections of cpp.md that are about one construct each, by their headings.
CONSTRUCTS = dict(re.findall(r"^## (\d+\. .*)\n((?:.*\n)*?)(?=## )", read(DOC / "cpp.md"), re.M))


def pair_of(section: str) -> tuple[str, str]:
    """The text of a section's block of Python, and of the block of C++ that follows."""
    (python, first), (cpp, second) = ((m[2], m[3]) for m in FENCE.finditer(section))
    assert (python, cpp) == ("python", "cpp")
    return first, second


@pytest.fixture(scope="module")
def printed_by_cpp(tmp_path_factory) -> list[str]:
    """What the C++ of each example prints. They are compiled as one program, by the CPU device's compiler."""
    folder, texts = tmp_path_factory.mktemp("cpp"), [pair_of(section)[1] for section in CONSTRUCTS.values()]
    assert all(text.count("int main() {") == 1 for text in texts)
    parts = [f"namespace n{i} {{\n{text}}}" for i, text in enumerate(texts)]
    text = "\n".join(["#include <stdio.h>", *parts]).replace("int main() {", "void run() {")
    calls = "".join(f'n{i}::run(); puts("---");' for i in range(len(parts)))
    (folder / "all.cpp").write_text(f"{text}\nint main() {{ {calls} }}\n")
    command = [*installed_compiler()[0], "-std=c++17", "-Wall", "-Werror", "all.cpp", "-o", "all"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return subprocess.run([folder / "all"], capture_output=True, text=True, check=True).stdout.split("---\n")[:-1]


@needs_a_compiler
@pytest.mark.parametrize("i", range(len(CONSTRUCTS)), ids=lambda i: list(CONSTRUCTS)[i])
def test_the_cpp_of_a_construct_prints_what_its_python_prints_and_the_comment_says(printed_by_cpp, i):
    python, _ = pair_of(list(CONSTRUCTS.values())[i])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(python, {})
    assert printed.getvalue().split() == printed_by_cpp[i].split() == python.rpartition("# ")[2].split()


# ---- commands


class Line(NamedTuple):
    """A command, and what the page shows of its output: the ```text block behind the ```sh block that it ends."""

    path: Path
    number: int
    command: str
    shown: str


def lines() -> list:
    found = []
    for path in PROSE:
        for block in (block for block in blocks(path) if block.language == "sh"):
            behind = re.match(r"```\n\n```text\n(.*?)^```", text_behind(path, block), re.M | re.S)
            *_, (last, _) = lines_of(block)
            for number, command in lines_of(block):
                long = any(fnmatchcase(command, pattern) for pattern in LONG_LINES)
                line = Line(path, number, command, behind[1] if behind and number == last else "")
                marks = [pytest.mark.long] if long else []
                found.append(pytest.param(line, id=f"{name_of(path)}:{number}", marks=marks))
    return found


def text_behind(path: Path, block: Block) -> str:
    """The page from the end of a block on."""
    return "\n".join(read(path).splitlines()[block.line - 1 + block.text.count("\n") :]) + "\n"


def writes(command: str) -> bool:
    """Whether a command may write into the repository. The others run in it, where what they compile is kept."""
    looks = re.match(r"(LLMC_CPU_\w+=\S+ )*python (dev/microscope|doc/ladder\.py) ", command)
    return not looks or "--html" in command or "--write" in command or ">" in command


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the repository, with the data that needs no network, in which commands may write what they like."""
    copy = tmp_path_factory.mktemp("book") / ROOT.name
    ours = {"README.md", "Makefile", "pyproject.toml", "requirements.txt", "requirements-dev.txt", "conftest.py"}
    folders = {"dev", "device", "doc", "exercises", "kernels", "llmc", "tests"}
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.name in folders:
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__", "*.part"))
        elif path.name in ours or path.suffix == ".py":
            shutil.copy(path, copy)
    assert run("python dev/data/python_docs.py", copy).returncode == 0
    return copy


@functools.cache
def tools() -> str:
    """A folder in which `python` is the Python that runs the tests: a program, where there is one, as gdb needs it."""
    if Path(sys.executable).with_name("python").exists():
        return str(Path(sys.executable).parent)
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    return str(folder)


@functools.cache
def without_packages() -> str:
    """A folder for PYTHONPATH. A Python that is started with it has, of what requirements*.txt list, NumPy alone."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    lines = "\n".join(read(path) for path in sorted(ROOT.glob("requirements*.txt")))
    packages = {"cupy", *re.findall(r"^[\w-]+", lines, re.M)} - {"numpy"}
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({sorted(packages)}))\n")
    return str(folder)


def run(command: str, directory: Path, numpy_alone: bool = False) -> subprocess.CompletedProcess:
    """What bash makes of a command; with `numpy_alone` its Python has no other package."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLMC_CPU_", "PYTEST_", "MAKE"))}
    environment |= {"PATH": f"{tools()}{os.pathsep}{os.environ['PATH']}", "DEBUGINFOD_URLS": ""}
    environment |= {"PYTHONPATH": without_packages()} if numpy_alone else {}
    return subprocess.run(
        ["bash", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@needs_a_compiler
@pytest.mark.parametrize("line", lines())
def test_a_command_of_a_page_runs(line, copy):
    if "gdb " in line.command and (shutil.which("gdb") is None or tools() != str(Path(sys.executable).parent)):
        pytest.skip("there is no gdb, or no program `python` for it")
    numpy_alone = not MORE_THAN_NUMPY.search(line.command)
    done = run(line.command, copy if writes(line.command) else ROOT, numpy_alone)
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


@each_text
def test_every_command_is_run_or_named(path):
    """A command that is new is put into a ```sh block or into NOT_RUN."""
    known = [pattern for patterns in NOT_RUN.values() for pattern in patterns]
    unknown = [
        f"{name_of(path)}:{number}: {command}" for number, command in commands(path)
        if not any(fnmatchcase(command, pattern) for pattern in known)
    ]  # fmt: skip
    assert not unknown, "neither run nor in NOT_RUN:\n" + "\n".join(unknown)


def outside_of_blocks() -> dict[str, str]:
    """Those commands of all texts, each with a place where it stands."""
    return {command: f"{name_of(path)}:{number}" for path in TEXTS for number, command in commands(path)}


def script_of(command: str) -> tuple[str, list[str]] | None:
    """The program of ours that a command starts, and the flags that it is given."""
    words = shlex.split(command)
    for i, word in enumerate(words):
        if word.endswith(".py") and "tests/" not in word:
            return word, [w.partition("=")[0] for w in words[i + 1 :] if re.match(r"--?[a-z]", w)]
    return None


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
    places = outside_of_blocks()
    for command, (name, flags) in {c: found for c in places if (found := script_of(c))}.items():
        assert (ROOT / name).exists(), f"{places[command]}: there is no {name}"
        for flag in flags:
            assert flag in flags_of(ROOT / name), f"{places[command]}: {name} has no flag {flag}"
    targets = set(re.findall(r"^([a-z0-9-]+):", read(ROOT / "Makefile"), re.M))
    for command, place in places.items():
        words = [word for word in command.split() if "=" not in word]
        if words[0] == "make":
            assert words[1] in targets, f"{place}: there is no target {words[1]}"
        if words[0] == "bash":
            assert (ROOT / words[1]).exists(), f"{place}: there is no {words[1]}"


# ---- links, quotes, pictures


def source_of(path: Path, target: str) -> Path:
    return (path.parent / unescape(target).partition("#")[0]).resolve()


@each_text
def test_links_lead_somewhere(path):
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


@each_text
def test_links_to_places_in_code_lead_to_a_line(path):
    text = book.with_lines(path, read(path))
    assert text.count("#L") == len(book.TO_A_PLACE.findall(read(path)))


def test_code_may_move_within_its_file_and_no_page_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(quotes, "ROOT", tmp_path)
    code, page = tmp_path / "a.cu", tmp_path / "page.md"
    text = """\
[a.cu: `x += 1;`](a.cu)<!-- f: x += --> [the function](a.cu)<!-- f -->

<!-- a.cu: f -->
```cuda
void f(int x) {
    x += 1;
}
```
"""
    page.write_text(text)
    for above in 0, 1, 10:
        code.write_text("// more\n" * above + "void f(int x) {\n    x += 1;\n}\n")
        assert quotes.renewed(page, wrong := []) == text and wrong == []
        first = f"[a.cu: `x += 1;`](a.cu#L{above + 2}) [the function](a.cu#L{above + 1})"
        assert book.with_lines(page, text).splitlines()[0] == first
    code.write_text("void f(int x) {\n    x += 2;\n}\n")
    assert quotes.renewed(page, []) == text.replace("x += 1;", "x += 2;")


def test_a_quote_follows_its_code_or_is_named(tmp_path, monkeypatch):
    """The book's own quotes show the other ways in which a place is named."""
    monkeypatch.setattr(quotes, "ROOT", tmp_path)
    (tmp_path / "a.cu").write_text("""\
template <int N>
__device__ inline float sum_of(float x, int n) {
    for (int k = 0; k < n; k++) x += k;  // in order
    return x;
}
""")
    (tmp_path / "moved.py").write_text("class Gone:\n    def run(self):\n        return 1\n")
    (tmp_path / "page.md").write_text("""\
[x.cu: `x`](a.cu)<!-- sum_of --> [a.cu: `x`](a.cu)<!-- sum_of: for (int k -->
[a.cu: `none`](a.cu) [a.cu: `none`](a.cu)<!-- sum_of: y --> [a.cu: `none`](a.cu)<!-- sum_of: x -->
[a.cu: `none`](a.cu)<!-- Gone.run --> [b.cu: `none`](b.cu)<!-- x -->
""")
    wrong = []
    first, *others = quotes.renewed(tmp_path / "page.md", wrong).splitlines()
    assert first == (
        "[a.cu: `float sum_of(`](a.cu)<!-- sum_of --> "
        "[a.cu: `for (int k = 0; k < n; k++) x += k;`](a.cu)<!-- sum_of: for (int k -->"
    )
    assert others == (tmp_path / "page.md").read_text().splitlines()[1:]
    assert wrong == [
        "page.md:2: a.cu: a quote needs its place behind it, as in <!-- function: begin of a line -->",
        "page.md:2: a.cu: sum_of: y: no lines with `y`",
        "page.md:2: a.cu: sum_of: x: 3 lines with `x`",
        "page.md:3: a.cu: Gone.run: no definitions of Gone; is it that of moved.py?",
        "page.md:3: b.cu: x: there is no such file",
    ]


def test_the_quotes_are_as_the_code_is():
    done = subprocess.run([sys.executable, DOC / "quotes.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@each_text
def test_pictures_have_words_for_those_who_do_not_see_them(path):
    for link in filter(lambda link: link.picture, links(path)):
        words = len(link.text.split())
        assert words > (path in BOOK), f"{name_of(path)}:{link.line}: what does {link.target} show?"
    assert not re.search(r"<img(?![^>]*\balt=\"[^\"]+\")", read(path)), f"{name_of(path)}: a picture has no alt"


# ---- the book as a whole


def test_every_page_is_there_and_in_the_contents():
    contents = {source_of(DOC / "index.md", link.target) for link in links(DOC / "index.md")}
    for path in BOOK:
        if path.parent == DOC and path.name != "index.md":
            assert path in contents, f"doc/index.md does not lead to {path.name}"
    answers = {source_of(DOC / "answers.md", link.target) for link in links(DOC / "answers.md")}
    assert answers >= {path for path in BOOK if path.parent.name == "answers"}


@pytest.mark.parametrize("path", BOOK, ids=name_of)
def test_fenced_blocks_say_what_they_are(path):
    for block in blocks(path):
        assert block.language in LANGUAGES, f"{name_of(path)}:{block.line - 1}: ```{block.language}"
    odd = re.search(r"^```", blanked(FENCE, read(path)), re.M)
    assert not odd, f"{name_of(path)}: a fence is left open"


@pytest.mark.parametrize("path", [p for p in PROSE if p.parent == DOC], ids=name_of)
def test_each_exercise_of_a_page_has_its_answer(path):
    exercises, _, _ = blanked(FENCE, read(path)).partition("\n## Exercises\n")[2].partition("\n## ")
    asked = set(re.findall(rf"\b{int(path.name[:2])}\.\d+\b", exercises))
    assert asked and f"[Answers](answers/{path.name[:2]}.md)" in exercises
    answers = re.findall(r"^#+ .*?(\d+\.\d+)\b", read(DOC / "answers" / f"{path.name[:2]}.md"), re.M)
    assert asked <= set(answers), f"{name_of(path)}: no answers to {asked - set(answers)}"

"""make book: the pages that doc/book.py makes, as a headless Chromium shows them from the disk, without a network."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.long  # what the pages say is tested in test_book.py; here is what becomes of them
ROOT = Path(__file__).resolve().parents[1]
PHONE = 390


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    pytest.importorskip("pypandoc", reason="pandoc is not installed: make book does it")
    folder = tmp_path_factory.mktemp("book") / "book"
    done = subprocess.run([sys.executable, "doc/book.py", "-o", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(folder / "index.html") in done.stdout
    return folder


def pages(book: Path) -> list[Path]:
    return sorted(book.rglob("*.html"))


def attributes(text: str) -> Iterator[str]:
    """What a page links to or shows."""
    return (unescape(m[1]) for m in re.finditer(r'<(?:a|img|link)\s[^>]*?(?:href|src)="([^"]*)"', text))


def test_every_link_of_the_book_is_in_the_book(book):
    ids = {page: set(re.findall(r'\bid="([^"]+)"', page.read_text())) for page in pages(book)}
    for page in pages(book):
        for target in attributes(page.read_text()):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            parts = urlsplit(target)
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert there.is_file() and book in there.parents, f"{page.name}: {target}"
            if parts.fragment:
                assert parts.fragment in ids[there], f"{page.name}: {target}: no such place"


def test_every_page_of_doc_is_in_the_book_and_no_formula_is_left_as_text(book):
    for source in (ROOT / "doc").rglob("*.md"):
        page = (book / source.relative_to(ROOT / "doc")).with_suffix(".html")
        html = page.read_text()
        text = re.sub(r"<(pre|code|annotation)\b.*?</\1>", "", html, flags=re.S)
        left = re.search(r".*(\$\$|\\frac|\\sum|\\le|\\cdot|class=\"math).*", text)
        assert not left, f"{page.name}: {left[0]}"


def test_a_quote_of_code_leads_to_its_line(book):
    """The line's own text, with the colours taken out, holds the quoted code."""
    quotes, quote = 0, re.compile(r'<a href="([^"]*#L-\d+)">[\w.]+: <code>(.*?)</code></a>')
    for page in pages(book):
        for target, code in quote.findall(page.read_text()):
            file, _, line = unescape(target).partition("#")
            there = (page.parent / file).resolve().read_text()
            shown = re.search(rf'<span id="{line}">(.*?)</span>(?=\n<span id="L|</code>)', there, re.S)[1]
            assert unescape(code) in unescape(re.sub(r"<[^>]+>", "", shown)), f"{page.name}: {code}"
            quotes += 1
    assert quotes > 40


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_opens_from_the_disk_on_a_phone(book, chromium, scheme):
    """Nothing is asked of a network, nothing fails, formulas have a size, no page is wider than the phone; some of them
    in the dark too."""
    context = chromium.new_context(viewport={"width": PHONE, "height": 800}, color_scheme=scheme, offline=True)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
    page.on("request", lambda request: None if request.url.startswith("file:") else wrong.append(request.url))
    for path in pages(book) if scheme == "light" else [book / "index.html", *book.glob("1*.html")]:
        page.goto(path.as_uri())
        found = page.evaluate("""() => ({
            width: document.documentElement.scrollWidth,
            pictures: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src),
            flat: [...document.querySelectorAll("math")].filter(m => m.getBoundingClientRect().height < 5).length,
            paper: getComputedStyle(document.body).backgroundColor,
        })""")
        assert found["width"] <= PHONE, f"{path.name} is {found['width']} pixels wide"
        assert not found["pictures"] and not found["flat"], f"{path.name}: {found}"
        bright = sum(int(n) for n in re.findall(r"\d+", found["paper"])[:3]) > 3 * 128
        assert bright == (scheme == "light"), found["paper"]
    assert not wrong
    context.close()


def test_one_goes_through_the_book_from_page_to_page(book, chromium):
    context = chromium.new_context()
    page = context.new_page()
    page.goto((book / "index.html").as_uri())
    seen = [page.title()]
    while page.locator("nav a", has_text="on →").count():
        page.locator("nav a", has_text="on →").first.click()
        seen.append(page.title())
    numbered = len(list(book.glob("[0-9][0-9]-*.html")))
    assert len(seen) == len(set(seen)) == numbered + 4  # the contents, C++, the glossary and the answers
    page.locator("nav a", has_text="Contents").click()
    assert page.title() == seen[0]
    context.close()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_book_installs_pandoc_where_it_may(tmp_path):
    def plan(*variables: str) -> str:
        command = ["make", "--no-print-directory", "-n", "book", *variables]  # as make test-all runs this below a make
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    new = plan(f"VENV={tmp_path}/new").splitlines()
    assert any("pip install" in line and "pypandoc_binary" in line for line in new)
    assert new[-1] == f"{tmp_path}/new/bin/python doc/book.py "
    assert plan("PYTHON=mypython", "VENV=", "ARGS=-o there").split() == ["mypython", "doc/book.py", "-o", "there"]


def test_a_folder_that_is_no_book_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    done = subprocess.run([sys.executable, "doc/book.py", "-o", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "is not a book" in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "mine"

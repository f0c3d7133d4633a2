"""make book: the pages that doc/book.py makes, as a headless Chromium shows them from the disk, without a network."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.long  # what the pages say is tested in test_book.py; here is what becomes of them
ROOT = Path(__file__).resolve().parents[1]
PHONE, DESK = 390, 1280


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    pytest.importorskip("pypandoc", reason="pandoc is not installed: make book does it")
    folder = tmp_path_factory.mktemp("book") / "book"
    done = subprocess.run([sys.executable, "doc/book.py", "-o", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(folder / "index.html") in done.stdout
    return folder


def test_every_link_leads_to_a_place_in_the_book_and_no_formula_is_left_as_text(book):
    texts = {page: page.read_text() for page in book.rglob("*.html")}
    sources = {path.relative_to(ROOT / "doc").with_suffix(".html") for path in (ROOT / "doc").rglob("*.md")}
    assert sources <= {page.relative_to(book) for page in texts}
    ids = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    for page, text in texts.items():
        for target in map(unescape, re.findall(r'<(?:a|img|link)\s[^>]*?(?:href|src)="([^"]*)"', text)):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            parts = urlsplit(target)
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert there.is_file() and book in there.parents, f"{page.name}: {target}"
            assert not parts.fragment or parts.fragment in ids[there], f"{page.name}: {target}: no such place"
        if page.relative_to(book) in sources:
            words = re.sub(r"<(pre|code|annotation)\b.*?</\1>", "", text, flags=re.S)
            left = re.search(r".*(\$\$|\\frac|\\sum|\\le|\\cdot|class=\"math).*", words)
            assert not left, f"{page.name}: {left[0]}"


def test_every_picture_is_a_link_to_itself(book):
    for page in book.rglob("*.html"):
        text = page.read_text()
        pictures = re.findall(r'<img\s[^>]*?src="([^"]*)"', text)
        assert re.findall(r'<a class="picture" href="([^"]*)"><img\s[^>]*?src="\1"', text) == pictures, page.name


def test_code_of_all_languages_is_coloured(book):
    assert re.search(r'class="sourceCode cpp"[^>]*>(<[^>]*>)*extern', (book / "01-eight-kernels.html").read_text())


def test_no_page_is_wider_than_a_desk_and_no_code_is_cut_there(book, chromium):
    """Nor is a ladder's table wider than its page. On a phone it scrolls, but its times are in sight without that."""
    context = chromium.new_context(viewport={"width": DESK, "height": 800}, offline=True)
    page = context.new_page()
    for path in sorted(book.rglob("*.html")):
        page.goto(path.as_uri())
        found = page.evaluate("""() => ({
            width: document.documentElement.scrollWidth - document.documentElement.clientWidth,
            cut: [...document.querySelectorAll("pre")].filter(x => x.scrollWidth > x.clientWidth).map(x => x.innerText),
            ladders: [...document.querySelectorAll(".table")].filter(
                x => x.innerText.includes("the idea that it adds") && x.scrollWidth > x.clientWidth).length,
        })""")
        assert found == {"width": 0, "cut": [], "ladders": 0}, path.relative_to(book)
    page.set_viewport_size({"width": PHONE, "height": 800})
    ladders = 0
    for path in sorted(book.glob("*.html")):
        page.goto(path.as_uri())
        ends = page.evaluate("""() => [...document.querySelectorAll("th")]
            .filter(x => x.innerText == "µs" && x.closest(".table").innerText.includes("the idea that it adds"))
            .map(x => x.getBoundingClientRect().right)""")
        assert all(0 < end < PHONE for end in ends), (path.name, ends)
        ladders += len(ends)
    assert ladders > 10
    context.close()


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
    for path in sorted(book.rglob("*.html") if scheme == "light" else [book / "index.html", *book.glob("1*.html")]):
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

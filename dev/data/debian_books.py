"""A corpus of English books and manuals from Debian's packages, for trying out text.py on something real.

    python dev/data/debian_books.py -o data/debian_books
    python dev/data/text.py data/debian_books -o data/books --train-tokenizer 16384

Runs on Debian and what is made from it, needs no root, and installs nothing: apt-get fetches the packages that the
machine's own sources offer, dpkg-deb unpacks them, and what is text in English goes to a folder for each package,
with the package's copyright file beside it as .copyright. apt's lists and packages lie in the folder .apt there, not in
the system's.
A package that the machine's release does not have is left out. Run it again to go on after an interruption.

Each package has licences of its own, which the table names in short and its copyright file in full. They allow to
copy and change the texts; what follows from them for a model that is trained on the texts is for its user to judge.
"""

import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

from dev.data.common import DATA, make_folder, run
from dev.data.documents import Notes, Part, kind_of, read_documents
from device.errors import UserError
from llmc.files.files import replacing
from llmc.run.arguments import Parser, a_path

LEAST = 50_000_000  # bytes of text that the corpus should have


@dataclass(frozen=True)
class Book:
    """package: its name, or a pattern for the one that a package of the name before depends on. files: which of its
    files are the text, by a pattern for their paths. what, licence: of the text, in short."""

    package: str
    files: str
    what: str
    licence: str
    depends: str = ""


BOOKS = (
    Book("sword-text-kjv", r"\.bzs", "the Bible in the King James Version", "public domain"),
    Book("anarchism", r"/markdown/.*\.md", "An Anarchist FAQ", "GPL-2"),
    Book("linux-doc", r"/_sources/(?!translations/).*\.rst\.txt", "the Linux kernel's manual", "GPL-2 and others",
         r"linux-doc-[\d.]+"),
    Book("python3-doc", r"/_sources/.*\.rst\.txt", "Python's documentation", "PSF", r"python3\.\d+-doc"),
    Book("postgresql-doc", r"/html/.*\.html", "PostgreSQL's manual", "PostgreSQL", r"postgresql-doc-\d+"),
    Book("perl-doc", r"/pod/.*\.pod", "Perl's manual", "GPL-1+ or Artistic"),
    Book("git-doc", r"\.txt", "Git's manual", "GPL-2"),
    Book("python-django-doc", r"/html/(?!_modules/).*\.html", "Django's documentation", "BSD-3-clause"),
    Book("apache2-doc", r"/manual/en/.*\.html", "the Apache web server's manual", "Apache-2.0"),
    Book("debian-handbook", r"/en-US/.*\.html", "The Debian Administrator's Handbook", "GPL-2+ or CC-BY-SA-3.0"),
    Book("debian-reference-en", r"\.html", "Debian Reference", "GPL-2+"),
    Book("debian-policy", r"\.txt", "Debian Policy", "GPL-2+"),
    Book("developers-reference", r"\.txt", "Debian Developer's Reference", "GPL-2+"),
    Book("installation-guide-amd64", r"/en/.*\.html", "Debian's installation guide", "GPL-2"),
    Book("libreoffice-help-en-us", r"/en-US/text/.*\.html", "LibreOffice's help", "MPL-2.0"),
    Book("octave-doc", r"/octave\.html/(?!XREF).*\.html", "Octave's manual", "GPL-3+"),
    Book("r-doc-html", r"\.html", "R's manuals", "GPL-2+"),
    Book("exim4-doc-html", r"\.html", "the mail server Exim's manual", "GPL-2+"),
    Book("sbcl-doc", r"\.html", "Steel Bank Common Lisp's manual", "public domain"),
    Book("jargon-text", r"/jargon\.txt", "The Jargon File", "public domain"),
)  # fmt: skip


def apt(folder: Path, *command: str, cwd: Path | None = None) -> str:
    """The output of an apt program, with lists and packages of its own. Raises UserError where it fails."""
    program, *arguments = command
    options = {
        "Dir::State": folder / "state", "Dir::Cache": folder / "cache", "Dir::State::status": folder / "status",
        "APT::Sandbox::User": getuser(), "Acquire::Languages": "none",
    }  # fmt: skip
    flags = [flag for name, value in options.items() for flag in ("-o", f"{name}={value}")]
    try:
        command = [program, "-q", *flags, *arguments]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    except FileNotFoundError:
        raise UserError(f"{program}: not found; this needs Debian or one of its derivatives") from None
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith(("E:", "Err"))]
        raise UserError(f"{program} {arguments[0]}: {said[-1] if said else f'failed ({done.returncode})'}")
    return done.stdout


def package_of(book: Book, folder: Path) -> str | None:
    """The package that holds a book in this machine's release, None where there is none."""
    try:
        described = apt(folder, "apt-cache", "show", "--no-all-versions", book.package)
    except UserError:
        return None
    if not book.depends:
        return book.package
    named = re.search(r"^Depends:.*", described, re.M)
    found = re.search(rf"[ ,]({book.depends})(?=[ ,(]|$)", named[0] if named else "")
    return found[1] if found else None


def fetch(package: str, folder: Path) -> Path:
    """A package's .deb, fetched unless it is there."""
    place = folder / "packages" / package
    make_folder(place)
    if not list(place.glob("*.deb")):
        apt(folder, "apt-get", "download", package, cwd=place)
    return next(place.glob("*.deb"))


def unpack(book: Book, package: str, deb: Path, to: Path) -> None:
    """Puts the texts of a package, and its copyright file, in the folder `to`, which appears whole or not at all."""
    part, root = to.with_name(f".{to.name}.part"), deb.with_suffix("")
    for place in (part, root):
        shutil.rmtree(place, ignore_errors=True)
    part.mkdir()
    done = subprocess.run(["dpkg-deb", "-x", deb, root], capture_output=True, text=True)
    if done.returncode:
        deb.unlink()
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"{deb}: cannot be unpacked ({reason}); check the space there, and run this again")
    for path in sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink()):
        name = path.relative_to(root).as_posix()
        if f"/doc/{package}/copyright" in f"/{name}":
            shutil.copyfile(path, part / ".copyright")  # hidden, so that it does not become a text to train on
        elif re.search(rf"{book.files}(\.gz)?$", f"/{name}"):
            if path.suffix == ".bzs":
                for number, text in enumerate(sword_books(path), 1):
                    (part / f"{path.stem}_{number:02}.html").write_text(text, encoding="utf-8")
                continue
            to_name = name.replace("/", "_").removeprefix("usr_share_")
            packed = ".gz" if to_name.endswith(".gz") else ""
            plain = to_name.removesuffix(".gz")
            shutil.copyfile(path, part / ((plain if kind_of(plain) else f"{plain}.txt") + packed))
    shutil.rmtree(root)
    part.rename(to)


def sword_books(index: Path) -> Iterator[str]:
    """The books of a module of the SWORD project (zText, compressed by books), as HTML.

    A .bzs has three uint32 a book: where it begins in the .bzz, its compressed and its full length. The text is OSIS,
    an XML with a mark for every word, of which paragraphs and titles are kept and notes are not.
    """
    packed = index.with_suffix(".bzz").read_bytes()
    for start, length, _ in struct.iter_unpack("<3I", index.read_bytes()):
        text = zlib.decompress(packed[start : start + length]).decode("utf-8", "replace")
        text = re.sub(r"<note\b.*?</note>", "", text, flags=re.S)
        text = re.sub(r"<title\b[^>]*>(.*?)</title>", r"<h1>\1</h1>", text, flags=re.S)
        text = re.sub(r'<div [sS]ID="[^"]*" type="x-p"/>', "<p>", text)
        yield re.sub(r"</?(?!p\b|h1\b)[a-zA-Z][^>]*>", "", text)


def text_bytes(folder: Path) -> int:
    """How much text text.py will find in a folder, bytes of UTF-8."""
    parts = [
        Part(str(path), kind_of(path.name), path.stat().st_size)
        for path in sorted(folder.iterdir()) if kind_of(path.name)
    ]  # fmt: skip
    return sum(len(text.encode()) for text in read_documents(parts, "text", 100_000, Notes()))


def main() -> None:
    parser = Parser(description="Fetch English books and manuals from Debian packages, without root.")
    parser.add_argument("-o", "--out", metavar="DIR", type=a_path, default=DATA / "debian_books", help="(%(default)s)")
    args = parser.parse_args()
    folder = args.out.resolve() / ".apt"
    for place in ("state/lists/partial", "cache/archives/partial", "packages"):
        make_folder(folder / place)
    with replacing(folder / "status"):
        pass  # nothing is installed, as far as this apt knows
    print("fetching the lists of packages", flush=True)
    try:
        apt(folder, "apt-get", "update")
    except UserError as error:
        print(f"some lists are missing: {error}", file=sys.stderr)
    print(f"{'package':26} {'MB of text':>10}  what, licence", flush=True)
    total, missing = 0, []
    for book in BOOKS:
        to = args.out / book.package
        package = book.package if to.is_dir() else package_of(book, folder)
        if package is None:
            missing.append(book.package)
            continue
        print(f"{book.package:26} ", end="", flush=True)
        if not to.is_dir():
            unpack(book, package, fetch(package, folder), to)
        size = text_bytes(to)
        total += size
        print(f"{size / 1e6:10.1f}  {book.what}; {book.licence}", flush=True)
    if missing:
        print(f"not in this release: {', '.join(missing)}")
    if not total:
        raise UserError("no package could be fetched; check the connection, and that apt-get update works")
    print(f"{args.out}: {total / 1e6:.1f} MB of text")
    if total < LEAST:
        print(f"that is less than {LEAST / 1e6:.0f} MB: this release has few of the packages")
    print(f"next: python dev/data/text.py {args.out} -o {DATA.name}/books --train-tokenizer 16384")


if __name__ == "__main__":
    run(main)

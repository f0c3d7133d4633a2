"""Exercises that check themselves: NumPy and a C++ compiler are all that they need.

    python exercises/check.py        # what there is: solved, open, untried
    python exercises/check.py 3      # makes exercises/work/03_plane.cu, to be filled in; from then on, checks it

make exercise N=3 does the same. What is in exercises/work is yours: it is never overwritten. To begin an exercise
again, take your file away.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from device.errors import UserError
from exercises.cut import EXERCISES, HERE, WORK, Exercise, start
from llmc.run.arguments import Parser
from llmc.run.program import run_program

SOLVED = WORK / ".solved.json"
SECONDS = 30  # that a check may take


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("number", nargs="?", help="number of the exercise; without it, all are listed")
    args = parser.parse_args()
    if args.number is None:
        print_list()
        return
    if not args.number.isdecimal() or not 1 <= int(args.number) <= len(EXERCISES):
        raise UserError(f"there is no exercise {args.number}: they are numbered 1 to {len(EXERCISES)}")
    exercise = EXERCISES[int(args.number) - 1]
    work = WORK / exercise.file
    if not work.exists():
        begin(exercise, work)
        return
    picture = work.with_suffix(".html")
    picture.unlink(missing_ok=True)
    fault, remark = judge(exercise, work)
    see = f"\n\nWhat your kernel does, access by access: open {shown(picture)} in a browser." * picture.exists()
    if fault:
        print(f"{shown(work)} is not right yet.\n\n{fault}{see}")
        sys.exit(1)
    remember(exercise, work, remark)
    print(f"{shown(work)} is right.{f' {remark}' * bool(remark)}{see}\n\n{after(exercise)}")


def begin(exercise: Exercise, work: Path) -> None:
    """Make the learner's file, and say what to do with it."""
    text = start(exercise)
    try:
        WORK.mkdir(exist_ok=True)
        with open(work, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{shown(work)} cannot be made ({error.strerror})") from None
    where = f", where it says `Write here` ({holes_of(text)})" if holes_of(text) else ""
    print(f"{statement(exercise)}\n\nYour file is {shown(work)}{where}.")
    print(f"When it is ready: make exercise N={exercise.number}")


def holes_of(text: str) -> str:
    """The lines that are to be written, in words: `lines 3, 5 and 8`; empty where there are none."""
    *before, last = ["", *(str(i) for i, line in enumerate(text.splitlines(), 1) if "Write here" in line)]
    return f"lines {', '.join(before[1:])} and {last}" if before[1:] else last and f"line {last}"


def judge(exercise: Exercise, work: Path) -> tuple[str, str]:
    """What is wrong with a solution, empty where nothing is; and a remark on one that is right. What it prints is
    printed. The check is a process of its own, which may hang, crash or run out of memory."""
    try:
        text = work.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return f"It cannot be read: {error}", ""
    if holes_of(text) and text.split() == start(exercise).split():
        return f"Nothing is written yet in {holes_of(text)}.", ""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, HERE / "checks.py", str(exercise.number), work.absolute(), result]
        quiet = {"env": os.environ | {"LLMC_QUIET": "1"}, "stderr": -1}  # what it says there is why it broke off
        try:
            done = subprocess.run(command, encoding="utf-8", errors="replace", timeout=SECONDS, **quiet)
        except subprocess.TimeoutExpired:
            return f"It has not ended after {SECONDS} seconds. Is there a loop that never ends?", ""
        if result.exists():
            return tuple(json.loads(result.read_text("utf-8")))
    if broken := re.search(r"^error: (.*)", done.stderr, re.MULTILINE | re.DOTALL):  # of this machine
        raise UserError(broken[1].strip())
    if "bad_alloc" in done.stderr or "MemoryError" in done.stderr:
        return "It needs more memory than a check may have. Is there a loop that never ends?", ""
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"{name} ended it. Is an index far outside of its array, or does it divide by zero?", ""
    return f"The check broke off with status {done.returncode}:\n{done.stderr.strip()}", ""


# ---- what README.md says


def sections() -> dict[int, tuple[str, str]]:
    """Title and text of each exercise, by its number."""
    parts = re.split(r"^## (\d+)\. (.*)\n", (HERE / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    return {int(parts[i]): (parts[i + 1], parts[i + 2].strip()) for i in range(1, len(parts), 3)}


def plain(text: str) -> str:
    """Markdown's links as a terminal shows them: `code` (kernels/file.cu:12)."""
    text = re.sub(r"<!--.*?-->", "", text).replace("#L", ":")
    return re.sub(r"\[((?:`[^`]*`|[^]`])*)\]\((?:\.\./)*([^)]*)\)", r"\1 (\2)", text)


def statement(exercise: Exercise) -> str:
    title, text = sections()[exercise.number]
    text = text.partition("<details>")[0].strip()
    return f"{exercise.number}. {title}\n\n{plain(text)}\n\nHints are in exercises/README.md."


def after(exercise: Exercise) -> str:
    """What to read next."""
    _, text = sections()[exercise.number]
    return plain(text.rpartition("</details>")[2].strip())


# ---- what the learner has done


def solved() -> dict[str, str]:
    """A digest of each exercise's file when it was right last, and what `remember` adds to it."""
    try:
        return json.loads(SOLVED.read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def digest(work: Path) -> str:
    return hashlib.sha256(work.read_bytes()).hexdigest()


def remember(exercise: Exercise, work: Path, remark: str) -> None:
    """That it is right; and the next step of a project, which its remark names."""
    found = {exercise.file: digest(work), f"{exercise.file}: next": remark.partition("Next: ")[2].rstrip(".")}
    SOLVED.write_text(json.dumps(solved() | found, indent=1), "utf-8")


def state(exercise: Exercise) -> str:
    work = WORK / exercise.file
    if not work.exists() or work.read_bytes() == start(exercise).encode():
        return "untried"
    if solved().get(exercise.file) != digest(work):
        return "open"
    step = solved().get(f"{exercise.file}: next")
    return f"right, next: {step}" if step else "solved"


def print_list() -> None:
    titles, states = sections(), [state(exercise) for exercise in EXERCISES]
    for exercise, now in zip(EXERCISES, states, strict=True):
        title, text = titles[exercise.number]
        page = re.search(r"\(\.\./(doc/[^)#]*)", text)[1]
        print(f"  {exercise.number:2}  {title:34} {page:36} {now}")
    left = [exercise.number for exercise, now in zip(EXERCISES, states, strict=True) if now != "solved"]
    print(f"\n{f'Next: make exercise N={left[0]}' if left else 'All are solved.'}")


def shown(path: Path) -> str:
    return os.path.relpath(path)


if __name__ == "__main__":
    run_program(main)

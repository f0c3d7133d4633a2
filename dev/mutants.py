"""Mutation testing: makes small faults in the code, one at a time, and sees whether the tests notice each.

    python dev/mutants.py mutants.json                     # some 300 mutants; hours on two cores
    python dev/mutants.py after.json --again mutants.json  # the same faults: which of those noticed then are not now?

A mutant is a clone of the repository's last commit with one line changed: a barrier or a wait removed, `<` for `<=`,
`=` for `+=`, a check that never refuses, an offset that is off by one, a flag that is ignored. Each runs without a GPU
against the test files that name the changed file most often, until a test fails or the time is up. A mutant that does
not compile counts for nothing. With --again the test that noticed it then runs first, and mutants whose line is gone
are left out. So deleted tests are judged: what they alone noticed is printed as lost.
"""

import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, wherever this is run from

from device.errors import UserError
from llmc.run.arguments import Parser, a_path, positive
from llmc.run.program import run_program

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("kernels", "llmc", "device", "train_gpt2_fp32.py", "train_llama3.py", "train_pythia.py", "train_qwen3.py")
CODE, CPP = (".py", ".cu", ".cuh", ".cpp", ".h"), (".cu", ".cuh", ".cpp", ".h")
# name: (the files it is for, what a line must have, what stands in its place)
FAULTS = {
    "barrier": (CPP, r"\b(__syncthreads|__syncwarp|sync_threads)\([^;]*\);", ";"),
    "wait": (CODE, r"(?<=[\s.>])(\w*wait\w*)\((?=[^;]*\)(;|$))", None),
    "compare": (CODE, r" < (?=[\w(])", " <= "),
    "accumulate": (CODE, r" \+= ", " = "),
    "check": ((".py",), r"^(\s+)if (.+):$", r"\1if False:  # \2"),
    "off by one": (CODE, r"([\w)\]]) ([+-]) 1\b", r"\1 \2 0"),
    "flag": ((".py",), r"\b(args|plan|self|config)\.(recompute|offload|bitwise|sharded|logit_rows|tied)\b", "False"),
}
TEST_FILES, SECONDS = 6, 150  # tried for each mutant, and for how long


def mutants(count: int) -> list[dict]:
    """Draws so many faults, as many of each name as there are. Equal on every call for one state of the code."""
    listed = subprocess.check_output(["git", "ls-files", *PLACES], cwd=ROOT, encoding="utf-8")
    found: dict[str, list[dict]] = {name: [] for name in FAULTS}
    for path in listed.split():
        if path.endswith(CODE):
            for name, number, line, changed in faults_of(path, (ROOT / path).read_text(encoding="utf-8").split("\n")):
                found[name].append({"path": path, "line": number, "fault": name, "was": line, "is": changed})
    draw = random.Random(1)
    return [one for some in found.values() for one in draw.sample(some, min(len(some), count // len(FAULTS)))]


def faults_of(path: str, lines: list[str]) -> Iterator[tuple[str, int, str, str]]:
    """Yields (name of the fault, index of the line, the line, the changed line)."""
    python, text = path.endswith(".py"), False
    for number, line in enumerate(lines):
        was_text, text = text, text ^ (python and line.count('"""') % 2 == 1)
        code = line.split("  # " if python else "//")[0]
        if was_text or text or '"""' in line or not code.strip() or code.lstrip().startswith(("#", "import", "from")):
            continue
        for name, (suffixes, pattern, by) in FAULTS.items():
            if not path.endswith(suffixes) or not re.search(pattern, code):
                continue
            if name == "check" and not (number + 1 < len(lines) and lines[number + 1].lstrip().startswith("raise ")):
                continue
            if name == "wait":
                if not re.fullmatch(r"\s*[\w.\->:\[\]<>]+\(.*\);?", code):
                    continue
                changed = re.match(r"\s*", code)[0] + ("pass" if python else ";")
            else:
                changed = re.sub(pattern, by, code, count=1)
            if not python or parses("\n".join([*lines[:number], changed, *lines[number + 1 :]])):
                yield name, number, line, changed


def parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def tests_for(path: str, tree: Path) -> list[str]:
    """The test files that name a file most often, by its stem and as a module."""
    stem = Path(path).stem
    module = re.escape(".".join(Path(path).with_suffix("").parts))
    named = {
        test.name: 5 * len(re.findall(rf"{module}\b", text)) + len(re.findall(rf"\b{stem}\b", text))
        + 100 * (test.stem == f"test_{stem}")
        for test in sorted((tree / "tests").glob("test_*.py")) for text in [test.read_text(encoding="utf-8")]
    }  # fmt: skip
    general = ["test_model.py", "test_train.py", "test_happens_before.py", "test_microscope.py"]
    return [name for name in sorted(named, key=named.get, reverse=True)[:TEST_FILES] if named[name]] + general


def judge(mutant: dict, tree: Path, python: str, broken: set[str]) -> dict:
    """Runs tests on a clone of the repository that has this fault, the one that noticed it before first. Returns the
    mutant with "by": the test that noticed, "" if none did in time, or None if it does not compile. A test that fails
    without the fault, too, is no judge: it joins `broken`."""
    path = tree / mutant["path"]
    original = path.read_text(encoding="utf-8")
    lines = original.split("\n")
    lines[mutant["line"]] = mutant["is"]
    files = [f"tests/{name}" for name in dict.fromkeys(tests_for(mutant["path"], tree))]
    rounds = [[mutant["by"]], files] if mutant.get("by") else [files]
    by: str | None = ""
    try:
        while rounds and not by:
            path.write_text("\n".join(lines), encoding="utf-8")
            noticed, compiles = first_failure(tree, python, rounds[0], broken)
            path.write_text(original, encoding="utf-8")
            if not noticed:
                rounds.pop(0)
            elif not compiles:
                return mutant | {"by": None}
            elif first_failure(tree, python, [noticed], set())[0]:
                broken.add(noticed)
            else:
                by = noticed
    finally:
        path.write_text(original, encoding="utf-8")
    return mutant | {"by": by}


def first_failure(tree: Path, python: str, tests: list[str], broken: set[str]) -> tuple[str, bool]:
    """Returns (the first test that fails or "", whether the code compiled). A test that is not there does not fail."""
    command = [python, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    running = subprocess.Popen(
        command + [f"--deselect={test}" for test in broken], cwd=tree, stdout=subprocess.PIPE,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL,
        encoding="utf-8", start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = running.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        return "", True
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.M)
    return failed[1] if failed else "", "cannot compile" not in said


def main() -> None:
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("out", type=a_path, help="the JSON file to write")
    parser.add_argument("--again", type=a_path, metavar="JSON", help="what an earlier call wrote")
    parser.add_argument("--count", type=positive, default=300, metavar="N", help="mutants to draw (300)")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="mutants judged at a time (1)")
    args = parser.parse_args()
    if args.out.exists():
        raise UserError(f"{args.out} exists: name another file")
    drawn = [] if args.again else mutants(args.count)
    if args.again:
        for mutant in json.loads(args.again.read_text(encoding="utf-8")):
            path = ROOT / mutant["path"]
            lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
            places = [number for number, line in enumerate(lines) if line == mutant["was"]]
            if mutant["by"] and places:
                drawn.append(mutant | {"line": min(places, key=lambda number: abs(number - mutant["line"]))})
    results = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(args.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        broken: set[str] = set()
        for job in range(args.jobs):
            tree = Path(directory) / str(job)
            subprocess.run(["git", "clone", "-q", ROOT, tree], check=True)
            trees.put(tree)

        def judged(mutant: dict) -> dict:
            tree = trees.get()
            try:
                return judge(mutant, tree, sys.executable, broken)
            finally:
                trees.put(tree)

        for result in pool.map(judged, drawn):
            results.append(result)
            args.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
            how = {None: "does not compile", "": "NOT NOTICED"}.get(result["by"], result["by"])
            print(f"{result['path']}:{result['line'] + 1} {result['fault']}: {how}", flush=True)
    noticed = sum(bool(result["by"]) for result in results)
    print(f"{noticed} noticed, {sum(result['by'] == '' for result in results)} not, of {len(results)}")
    if args.again:
        for lost in (result for result in results if result["by"] == ""):
            print(f"lost: {lost['path']}:{lost['line'] + 1} {lost['fault']}: {lost['was'].strip()}")


if __name__ == "__main__":
    run_program(main)

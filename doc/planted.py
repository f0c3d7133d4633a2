"""Plants mistakes in a copy of layernorm.cu and norm.cuh, one at a time, and shows which checks of page 14 notice each.

    python doc/planted.py              # minutes; needs what the tests need
    python doc/planted.py --write      # and writes the table into doc/14-trusting-it.md

Every check runs in a process of its own, on the CPU device, and first without a mistake, where all must pass.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import os
import re
import shutil
import subprocess
import tempfile

from device.errors import UserError
from llmc.run.arguments import Parser
from llmc.run.program import run_program

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "doc" / "14-trusting-it.md"
MARKERS = "<!-- planted -->", "<!-- end of planted -->"

# What is wrong; a piece of the two files that is there once, and what takes its place.
MISTAKES = {
    "variance divided by C - 1": ("row_sum(sum) / C + eps", "row_sum(sum) / (C - 1) + eps"),
    "`=` where backward adds": ("dx[r] = memory.load_floats(p + r * C, C - i);", "dx[r] = {};"),
    "mean written one row too far": ("mean[n] = m;", "mean[n + 1] = m;"),
    "last vector of a ragged row not written": (
        "memory.store(out + start + i, y, C - i);", "if (i + WIDTH - 1 < C) memory.store(out + start + i, y, C - i);"
    ),
    "aligned load of rows that are not": (
        "x[b] = memory.load(inp + start + i, C - i);", "x[b] = Aligned::load(inp + start + i, WIDTH);"
    ),
    "NaN clamped to a number": (
        "Aligned::store(row + i, x[b], WIDTH);",
        "for (int k = 0; k < WIDTH; k++) x[b].x[k] = fminf(fmaxf(x[b].x[k], -1e30f), 1e30f);\n"
        "Aligned::store(row + i, x[b], WIDTH);",
    ),
    "no barrier before shared memory is read": (
        "            __syncthreads();\n            const int count", "            const int count"
    ),
    "no barrier before it is written again": ("            __syncthreads();  // the next", "            // the next"),
}  # fmt: skip

REPORTED = 99  # the exit status of a program that a sanitizer ends
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
RACES = [sys.executable, "dev/microscope", "layernorm_backward", "--races", "--shape", "B=8,T=300"]
CHECKS = {
    "numbers and guard zones": [*PYTEST, "tests/test_layernorm.py"],
    "orders of threads": [*PYTEST, "tests/test_thread_order.py", "-k", "again or (softmax and odd and not llama)"],
    "races": RACES,
    "NaN": [*PYTEST, "tests/test_nonfinite.py", "-k", "layernorm or fused_residual"],
    "sanitizers": [*PYTEST, "tests/test_layernorm.py", "-k", "cpu-warp32 and (sets_output or takes_no)"],
}  # fmt: skip


def environment(check: str) -> dict[str, str]:
    if check != "sanitizers":
        return dict(os.environ)
    asan = os.fsdecode(subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True).stdout).strip()
    return os.environ | {
        "CXX": "g++", "LLMC_CPU_SANITIZE": "1", "LD_PRELOAD": asan,
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode={REPORTED}", "UBSAN_OPTIONS": f"exitcode={REPORTED}",
    }  # fmt: skip


def noticed(check: str, folder: Path) -> bool:
    done = subprocess.run(
        CHECKS[check], cwd=folder, env=environment(check), capture_output=True, encoding="utf-8", errors="replace"
    )
    if "no tests ran" in done.stdout or "deselected" in done.stdout and not re.search(r"passed|failed", done.stdout):
        raise UserError(f"{check}: no test was chosen")
    return done.returncode not in (0, 1) if check == "sanitizers" else done.returncode != 0  # 1: only a wrong number


def table(folder: Path) -> str:
    paths = [folder / "kernels" / name for name in ("layernorm.cu", "norm.cuh")]
    files = {path: path.read_text("utf-8") for path in paths}
    rows = [["mistake", *CHECKS], ["---"] * (1 + len(CHECKS))]
    for mistake, (old, new) in {"none": ("", ""), **MISTAKES}.items():
        times = sum(right.count(old) for right in files.values())
        if old and times != 1:
            raise UserError(f"{mistake}: layernorm.cu and norm.cuh have `{old.strip()}` {times} times, not once")
        for path, right in files.items():
            path.write_text(right.replace(old, new) if old else right, "utf-8")
        found = [noticed(check, folder) for check in CHECKS]
        print(mistake, found, flush=True)
        if mistake == "none" and any(found):
            raise UserError("a check fails without any mistake")
        if mistake != "none":
            rows.append([mistake, *("noticed" if one else "" for one in found)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = Parser(description="Plant mistakes in layernorm.cu and norm.cuh and show which checks notice them.")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for part in ("device", "kernels", "llmc", "tests", "dev"):
            shutil.copytree(ROOT / part, Path(folder, part))
        for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
            shutil.copy(path, folder)
        made = table(Path(folder))
    print(made)
    if args.write:
        begin, end = MARKERS
        text = PAGE.read_text("utf-8")
        before, behind = text.partition(begin)[0], text.partition(end)[2]
        PAGE.write_text(f"{before}{begin}\n{made}\n{end}{behind}", "utf-8")


if __name__ == "__main__":
    run_program(main)

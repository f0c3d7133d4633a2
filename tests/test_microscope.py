"""The microscope: what it counts is what a GPU counts, and no race escapes it."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import device
from conftest import refusal
from dev.microscope import __main__, compare_ncu
from dev.microscope.launches import LAUNCHES, sizes_of
from dev.microscope.watch import watch
from device import architecture_of, kernel_declarations

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEPT = json.loads(compare_ncu.KEPT.read_text())["kernels"]


@pytest.fixture(scope="module")
def runs() -> dict:
    def look(precision: str) -> dict:
        command = [sys.executable, ROOT / "tests" / "microscope_runs.py", precision]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with ThreadPoolExecutor() as pool:
        fp32, bf16 = pool.map(look, ["fp32", "bf16"])
    of_both = {key: fp32[key] + bf16[key] for key in ("counts", "unplaced", "bytes", "flash")}
    return {**fp32, **of_both, "races": {"fp32": fp32["races"], "bf16": bf16["races"]}}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_kernel_has_a_race_and_every_one_was_looked_at(runs, precision):
    assert {kernel: races for kernel, races in runs["races"][precision].items() if races} == {}
    files = [path for path in (ROOT / "kernels").rglob("*.cu") if precision == "bf16" or not architecture_of(path)]
    kernels = {name for path in files for name in kernel_declarations(path)}
    fp8, fp16 = (
        {name for path in (ROOT / "kernels" / folder).glob("*.cu") for name in kernel_declarations(path)}
        for folder in ("fp8", "fp16")
    )
    of_the_other = {"split_kernel", "join_kernel", *fp8} if precision == "fp32" else fp16
    assert set(runs["races"][precision]) == kernels - of_the_other


def test_the_profile_counts_no_more_bytes_than_a_kernel_touches_and_by_its_rule_no_fewer(runs):
    """Where it takes an array of two bytes a number for one of four it would count more, and where it does not know
    that a kernel also reads what it writes, fewer."""
    assert len(runs["bytes"]) > 100
    assert [row for row in runs["bytes"] if row[1] > row[2]] == []
    assert [row for row in runs["bytes"] if row[3] not in (None, row[1])] == []


def test_no_access_of_flash_attention_to_shared_memory_has_a_conflict_and_ldmatrix_is_one(runs):
    assert {worst for _, worst in runs["flash"]} == {1.0}
    assert any("load_matrices" in function for function, _ in runs["flash"])


def test_every_access_has_a_line(runs):
    assert runs["unplaced"] == []


@pytest.mark.parametrize("kernel, lines", [
    ("reverse", None), ("with_barrier", None), ("reads_too_early", (8, 10)), ("overwrites_too_early", (8, 10)),
    ("missing_barrier", (24, 25)), ("blocks_in_order", (37, 37)),
])  # fmt: skip
def test_a_race_is_told_with_both_lines_both_threads_and_the_element(runs, kernel, lines):
    told = re.compile(
        r"\w+: \w+\[\d+\]: [\w.]+:(\d+) \((?:load|store) by thread \(.*?\) of block \(.*?\)\) and [\w.]+:(\d+) "
    )
    found = {tuple(sorted(map(int, told.match(race).groups()))) for race in runs["broken"][kernel]}
    assert found == ({lines} if lines else set())


@pytest.mark.parametrize("kernel, store", [
    ("return_in_loop", [11, 1, 21.0]), ("return_in_branch", [23, 1, 29.0]), ("loop_in_loop", [32, 4, 32.0]),
])  # fmt: skip
def test_lanes_that_a_branch_has_parted_meet_again_where_their_ways_do(runs, kernel, store):
    """The store's line, how many warps execute it, and with how many lanes."""
    assert [row for row in runs["lines"][kernel] if row[:2] == ["store", store[0]]] == [["store", *store]]


@pytest.mark.parametrize("kernel, found", [
    ("atomic_then_load", ["total[0]"]), ("atomic_then_store", ["out[0]"]), ("bytes", []),
    ("shared_of_the_file", ["of_the_file[31]", "of_the_file[32]"]),
])  # fmt: skip
def test_races_with_atomics_and_of_any_shared_array_are_found_and_bytes_of_a_word_do_not_race(runs, kernel, found):
    assert sorted(race.split(": ")[1] for race in runs["broken"][kernel]) == found


def test_accesses_outside_the_arrays_are_counted(runs):
    outside = {kernel: count for kernel, count in runs["outside"].items() if count}
    assert outside == {"outside": 32}


KERNEL = f'#include "{ROOT}/kernels/common.cuh"' + '''
extern "C" __global__ void add_positive_kernel(float* x) {  // hides a NaN, and lacks a barrier
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    const float own = x[threadIdx.x], other = all[threadIdx.x ^ 1];
    x[threadIdx.x] = (own > 0 ? own : 0) + (other > 0 ? other : 0);
}
'''

LAUNCHER = '''
import device
from kernels.launches import describe

cu = device.source(__file__)


def add_positive(x, n: int) -> None:
    cu.launch("add_positive_kernel", (1,), (n,), (x,))


describe(add_positive, "n=64", "x*: n", twice={"add_positive": "x"})
'''


def test_a_new_kernel_is_its_file_its_launcher_and_a_description(tmp_path):
    """Then the microscope, its races, the profile's bytes and the test of what is not finite find it."""
    (tmp_path / "add_positive.cu").write_text(KERNEL)
    (tmp_path / "add_positive.py").write_text(LAUNCHER)

    def output(program: str, *arguments: str) -> str:
        code = f"import runpy, kernels; kernels.__path__.append({str(tmp_path)!r}); runpy.{program}, None, '__main__')"
        return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True).stdout

    assert "the profile counts 512\n" in output("run_path('dev/microscope'", "add_positive")
    assert "add_positive n=64: 2 races" in output("run_path('dev/microscope'", "add_positive", "--races")
    of_it = "tests/test_nonfinite.py", "-k", "warp32-add_positive", "-p", "no:cacheprovider"
    assert "changes {'x'} and spoils set()" in output("run_module('pytest'", *of_it)


def test_what_it_counts_is_what_was_compared_with_a_gpu(runs):
    """Of the launchers that no precision has alone. Where the two differ, dev/microscope says why."""
    compared = {(row["launcher"], row["kernel"]): row["ours"] for row in KEPT}
    counted = {(launcher, kernel): counts for launcher, kernel, counts in runs["counts"]}
    today = {key: {counter: counted[key][counter] for counter in ours} for key, ours in compared.items()}
    assert today == compared, "a kernel has changed: run dev/microscope/compare_ncu.py on a GPU"
    usual = {name for name, launch in LAUNCHES.items() if not launch.precision}
    assert {key for key in counted if key[0] in usual} <= compared.keys()
    pairs = [(ours, row["ncu"][counter]) for row in KEPT for counter, ours in row["ours"].items()]
    assert sum(ours != theirs for ours, theirs in pairs) < 0.06 * len(pairs)


@pytest.mark.parametrize("work, arguments, says", [
    (__main__.main, (), "layernorm: not a launcher; there are adamw, "),
    (sizes_of, ("M=3", LAUNCHES["transpose"]),
     "--shape M=3: 'M=3' is not one of its sizes and a number, as in N=64,C=128"),
    (watch, (LAUNCHES["transpose"], {"N": 2_000_000_000, "C": 9}),
     "out would have 18,000,000,000 elements, at most 4,194,304 can be: lower a size"),
    (watch, (LAUNCHES["sample"], {"V": 2000}), "sample needs V <= Vp"),
    (watch, (LAUNCHES["quantize"], {}), "quantize is so called in bf16: --precision bf16"),
])  # fmt: skip
def test_what_it_cannot_do_is_told_in_a_line(work, arguments, says, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["microscope", "layernorm"])
    device.use("cpu")
    assert refusal(work, *arguments).startswith(says)


def test_the_tables_in_its_page_are_what_it_prints():
    """But for the numbers of the kernels' lines, which change when code moves."""
    page = (ROOT / "doc" / "microscope.md").read_text()
    command = [sys.executable, ROOT / "dev" / "microscope", "transpose"]
    printed = subprocess.run(command, capture_output=True, text=True).stdout
    page, shown = (re.sub(r"(\.cuh?):\d+ +", r"\1 ", text) for text in (page, printed))
    assert "\n".join("    " + line if line else "" for line in shown.splitlines()) in page, "run make quotes"

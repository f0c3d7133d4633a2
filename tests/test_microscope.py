"""The microscope: what it counts is what a GPU counts, and no race escapes it."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dev.microscope import compare_ncu
from dev.microscope.launches import LAUNCHES
from dev.traffic import kind_of
from device import architecture_of, kernel_declarations

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEPT = json.loads(compare_ncu.KEPT.read_text())

# Where a count differs, and why.
JOINED = "nvcc joins neighbouring accesses of four bytes, such as those to a struct Floats, into one of sixteen"
KEPT_IN_REGISTERS = "what one compiler keeps in a register the other loads again"
PREDICATED = "ncu counts an unrolled instruction as executed also where all its lanes are switched off"
TRAFFIC = "ncu also counts collisions with other traffic, which differ from run to run"
GENERIC = "ncu does not count a store through a pointer that may point to shared or to global memory"
NOT_KNOWN = "in bf16 the GPU stores nine times where the source does eight times"
LOADS = ["global load requests", "global load sectors"]
SHARED_LOADS, SHARED_STORES, STORE_CONFLICTS = "shared loads", "shared stores", "shared store conflicts"
KNOWN = [  # reason, kernels without "_kernel" and their size, counters
    (JOINED, "wte_backward wte_backward_sparse", [SHARED_LOADS, "shared load conflicts"]),
    (JOINED, "parallel_residual_backward parallel_residual_dropout_backward", [SHARED_LOADS, SHARED_STORES]),
    (JOINED, "cached_attention_shared sample", [SHARED_LOADS]),
    (PREDICATED, "rmsnorm_forward cached_attention cached_attention_shared", [SHARED_STORES]),
    (PREDICATED, "flash_attention_backward_key", ["copies to shared memory"]),
    (KEPT_IN_REGISTERS, "flash_attention_forward flash_attention_backward_query flash_attention_backward_key "
     "cached_attention fused_classifier", [SHARED_LOADS]),
    (KEPT_IN_REGISTERS, "flash_attention_backward_key", ["global load requests"]),
    (KEPT_IN_REGISTERS, "cached_attention cached_attention_shared", LOADS),
    (TRAFFIC, "flash_attention_backward_query flash_attention_backward_key fused_classifier", [STORE_CONFLICTS]),
    (TRAFFIC, "fused_classifier", ["shared load conflicts"]),
    (NOT_KNOWN, "flash_attention_backward_key", ["global store requests", "global store sectors"]),
    (GENERIC, "rmsnorm_backward", [SHARED_STORES]),
]


@pytest.fixture(scope="module")
def runs(pytestconfig) -> dict:
    # A library for the microscope is kept for a file at its place: in a folder that stays, the kernels without a
    # barrier are compiled only after a kernel has changed. Its path has a space.
    folder = pytestconfig.cache.mkdir("without barriers")

    def look(precision: str) -> dict:
        command = [sys.executable, ROOT / "tests" / "microscope_runs.py", precision, folder]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with ThreadPoolExecutor() as pool:
        fp32, bf16 = pool.map(look, ["fp32", "bf16"])
    of_both = {key: fp32[key] + bf16[key] for key in ("mutants", "counts", "unplaced", "bytes")}
    return {**fp32, **of_both, "races": {"fp32": fp32["races"], "bf16": bf16["races"]}}


def microscope(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "dev" / "microscope", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_kernel_has_a_race_and_every_one_was_looked_at(runs, precision):
    assert {kernel: races for kernel, races in runs["races"][precision].items() if races} == {}
    files = [path for path in (ROOT / "kernels").rglob("*.cu") if precision == "bf16" or not architecture_of(path)]
    kernels = {name for path in files for name in kernel_declarations(path)}
    fp8 = {name for path in (ROOT / "kernels" / "fp8").glob("*.cu") for name in kernel_declarations(path)}
    of_bf16 = {"split_kernel", "join_kernel", *fp8} if precision == "fp32" else set()
    assert set(runs["races"][precision]) == kernels - of_bf16


def test_the_profile_counts_no_more_bytes_than_a_kernel_touches_and_by_its_rule_no_fewer(runs):
    """Where it takes an array of two bytes a number for one of four it would count more, and where it does not know
    that a kernel also reads what it writes, fewer."""
    assert len(runs["bytes"]) > 100
    assert [row for row in runs["bytes"] if row[1] > row[2]] == []
    assert [row for row in runs["bytes"] if row[3] not in (None, row[1])] == []


def test_every_access_has_a_line(runs):
    assert runs["unplaced"] == []


def test_each_barrier_that_is_left_out_is_found(runs):
    """Below a path with a space, too, where each line has its number."""
    assert len(runs["mutants"]) >= 10
    for mutant in runs["mutants"]:
        assert mutant["races"], f"{mutant['file']} without its barrier {mutant['which']}, seen by {mutant['launcher']}"
        assert not any(re.search(r"\.cuh?:1 ", line) for line in mutant["races"]), mutant["races"]


@pytest.mark.parametrize("kernel, lines", [
    ("reverse_kernel", None), ("with_barrier_kernel", None),
    ("reads_too_early_kernel", (8, 10)), ("overwrites_too_early_kernel", (8, 10)), ("missing_barrier_kernel", (24, 25)),
    ("blocks_in_order_kernel", (37, 37)),
])  # fmt: skip
def test_a_race_is_told_with_both_lines_both_threads_and_the_element(runs, kernel, lines):
    races = runs["broken"][kernel]
    if lines is None:
        assert races == []
        return
    told = re.compile(
        r"\w+: \w+\[\d+\]: [\w.]+:(\d+) \((?:load|store) by thread \(.*?\) of block \(.*?\)\) and [\w.]+:(\d+) "
    )
    assert {tuple(sorted(map(int, told.match(race).groups()))) for race in races} == {lines}


@pytest.mark.parametrize("kernel, line, warps, lanes", [
    ("return_in_loop_kernel", 11, 1, 21.0), ("return_in_branch_kernel", 23, 1, 29.0),
    ("loop_in_loop_kernel", 32, 4, 32.0),
])  # fmt: skip
def test_lanes_that_a_branch_has_parted_meet_again_where_their_ways_do(runs, kernel, line, warps, lanes):
    (store,) = (row for row in runs["lines"][kernel] if row[1:3] == ["store", line])
    assert store[3:] == [warps, lanes]


@pytest.mark.parametrize("kernel, found", [
    ("atomic_then_load_kernel", ["total[0]"]), ("atomic_then_store_kernel", ["out[0]"]), ("bytes_kernel", []),
    ("shared_of_the_file_kernel", ["of_the_file[31]", "of_the_file[32]"]),
])  # fmt: skip
def test_races_with_atomics_and_of_any_shared_array_are_found_and_bytes_of_a_word_do_not_race(runs, kernel, found):
    assert sorted(race.split(": ")[1] for race in runs["broken"][kernel]) == found


def test_accesses_outside_the_arrays_are_counted(runs):
    outside = {kernel: count for kernel, count in runs["outside"].items() if count}
    assert outside == {"outside_kernel": 32}


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


# Launchers that dev/microscope/compare_ncu.py does not compare.
NOT_COMPARED = {name for name, launch in LAUNCHES.items() if launch.precision}


def test_what_it_counts_is_what_was_compared_with_a_gpu(runs):
    compared = {}
    for row in KEPT["rows"]:
        compared.setdefault((row["launcher"], row["kernel"]), {})[row["counter"]] = row["ours"]
    today = {
        (launcher, kernel): {counter: counts[counter] for counter in compared[launcher, kernel]}
        for launcher, kernel, counts in runs["counts"]
        if (launcher, kernel) in compared  # in bf16, what was recorded
        or launcher in LAUNCHES.keys() - NOT_COMPARED
    }
    assert not NOT_COMPARED & {launcher for launcher, _ in compared}
    assert today == compared, "a kernel has changed: run dev/microscope/compare_ncu.py on a GPU"


def test_it_differs_from_a_gpu_only_where_it_is_known_why():
    differ = [(kind_of(row["kernel"]), row["counter"]) for row in KEPT["rows"] if row["ours"] != row["ncu"]]
    known = {(kind, counter) for _, kinds, counters in KNOWN for kind in kinds.split() for counter in counters}
    assert set(differ) == known
    assert len(differ) < 0.1 * len(KEPT["rows"])


@pytest.mark.parametrize("arguments, says", [
    (["layernorm"], "layernorm: not a launcher; there are adamw, "),
    (["transpose", "--shape", "M=3"], "--shape M=3: 'M=3' is not one of its sizes and a number, as in N=64,C=128"),
    (["transpose", "--shape", "N=2000000000,C=9"], "out would have 18,000,000,000 elements, at most 4,194,304 can be"),
    (["sample", "--shape", "V=2000"], "sample needs V <= Vp"),
    (["quantize"], "quantize is so called in bf16: --precision bf16"),
])  # fmt: skip
def test_what_it_cannot_do_is_told_in_a_line(arguments, says):
    done = microscope(*arguments)
    assert done.returncode == 1
    assert says in done.stderr and done.stderr.count("\n") == 1


def test_the_tables_in_its_page_are_what_it_prints():
    """But for the numbers of the kernels' lines, which change when code moves."""
    page = (ROOT / "doc" / "microscope.md").read_text()
    printed = microscope("transpose").stdout.splitlines()
    page, shown = (re.sub(r"(\.cuh?):\d+ +", r"\1 ", text) for text in (page, "\n".join(printed)))
    assert "\n".join("    " + line if line else "" for line in shown.splitlines()) in page, "run make quotes"

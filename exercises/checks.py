"""What each exercise must do: check_<name>(lab) raises Wrong with what is wrong; a few return a remark.

    python exercises/checks.py NUMBER FILE RESULT     # for check.py: writes [what is wrong, remark] to RESULT, as JSON

Kernels run on the CPU device with warps of 32 lanes. If the compiler is GCC, the microscope watches every access. What
kernels write begins as UNWRITTEN and has more of it around, and what they read has NaNs around. So an element that no
thread wrote shows, and so does an access where none must be. There is so much around that a wrong index seldom leads
past it. Where it does, or past an array in shared memory, the launch fails.
"""

import json
import linecache
import multiprocessing
import os
import re
import resource
import shlex
import sys
import traceback
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import device
import kernels.adamw
import kernels.attention
import kernels.gelu
import kernels.layernorm
import kernels.reduce
from dev.microscope.report import lines_of, race_lines
from dev.microscope.watch import (
    BARRIER,
    KINDS,
    LANES,
    LOAD,
    MEETING,
    SECTOR,
    STEP,
    STORE,
    Watched,
    distinct,
    lanes_of,
    passes_of,
    sectors_of,
    use_microscope,
    watch_kernel,
)
from device import Source, ceil_div, cpp, kernel_declarations
from device.errors import UserError
from device.fp8 import from_e4m3
from doc.ladder import TF32, place_arrays, references, relative_error, text_of
from doc.rungs import TOPICS
from exercises.cut import EXERCISES, HERE, Exercise
from llmc.run.program import run_program

import numpy as np

AROUND = 1 << 18            # elements before and after what a kernel reads or writes
UNWRITTEN = 0x4EADBEEF      # as float32 1457485696.0: far from all that is to be computed
OUTSIDE = 0x7FEDBEEF        # as float32 a NaN: another number, so that it shows also where it is copied to
NULL_PAGE = 1 << 16         # addresses below are a null pointer and an offset
MEMORY = 2 << 30            # bytes that a check may have: a loop without end that is watched wants ever more
KERNEL_FP32 = 2e-5          # of 1 + the value: several roundings to fp32, and the sums of a few hundred numbers
# One block after another, so that a fault shows alike each time; the compiler's messages in English; and a launch fails
# where an index is outside of an array whose length the compiler knows. (The header's checksum makes a library that was
# built with another one another library.)
BOUNDS = [
    "-fsanitize=bounds", "-fno-sanitize-recover=bounds", "-include", str(HERE / "bounds.h"),
    f"-DBOUNDS_H={zlib.crc32((HERE / 'bounds.h').read_bytes())}",
]  # fmt: skip
ENVIRONMENT = {
    "LLMC_CPU_WARP": "32", "LLMC_CPU_THREADS": "1", "LC_ALL": "C",
    "LLMC_CPU_CXXFLAGS": f"{os.environ.get('LLMC_CPU_CXXFLAGS', '')} {shlex.join(BOUNDS)}".strip(),
}  # fmt: skip
AS_WRITTEN = "-fno-tree-sink"  # for GCC: a read stays in front of the guard, if it was written there


FLOATING_POINT = {          # what NumPy's complaints mean, by a part of them
    "overflow": "a result here is too large for a float. Does a large number reach an exponential?",
    "invalid": "a result here is not a number (NaN), as -inf - -inf, inf * 0 and 0 / 0 are",
    "divide": "here a number is divided by zero, or is the log of zero",
}


class Wrong(Exception):
    """What is wrong with a solution, in lines for the learner."""


def main() -> None:
    number, file, result = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    found = run_check(EXERCISES[int(number) - 1], Path(file))
    Path(result).write_text(json.dumps(found), "utf-8")


def run_check(exercise: Exercise, path: Path) -> tuple[str, str]:
    """What is wrong with the solution in a file, empty where nothing is; and a remark on one that is right."""
    prepare(exercise)
    try:
        return "", globals()[f"check_{exercise.name}"](Lab(path, exercise.watched())) or ""
    except Wrong as wrong:
        return str(wrong), ""


def prepare(exercise: Exercise) -> None:
    """Choose the CPU device, with the microscope if the exercise's kernels are watched."""
    os.environ |= ENVIRONMENT
    if exercise.watched():
        os.environ["LLMC_CPU_CXXFLAGS"] += f" {AS_WRITTEN}"
        use_microscope()
    else:
        device.use("cpu")


# ---- arrays


def output(*shape: int, dtype=np.float32) -> np.ndarray:
    """An array for a kernel to write."""
    n = int(np.prod(shape))
    return np.full(n + 2 * AROUND, UNWRITTEN, np.uint32).view(dtype)[AROUND : AROUND + n].reshape(shape)


def given(values: np.ndarray) -> np.ndarray:
    """An array of the same float32 values for a kernel to read or change."""
    array = output(*values.shape)
    array.base[:AROUND] = array.base[AROUND + array.size :] = OUTSIDE
    array[...] = values
    return array


def written(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32) != UNWRITTEN


def is_output(array) -> bool:
    """Whether something is an array of `output`, or a part of one."""
    base = getattr(array, "base", None)
    return isinstance(base, np.ndarray) and base.dtype == np.uint32 and base.size > 2 * AROUND


def refuse_strays(name: str, array, thread: Callable[[int], str] | None = None, case: str = "") -> None:
    """Wrong where something was written before or behind the output that `array` is, or is a part of. For a compiler
    without the microscope, which sees reads, too."""
    if not is_output(array):
        return
    base, size = array.base, array.base.size - 2 * AROUND
    past = np.flatnonzero(base[AROUND + size :] != base[0]) + size
    before = np.flatnonzero(base[:AROUND] != base[0]) - AROUND
    if past.size or before.size:
        at = int(past[0] if past.size else before[-1])
        who = thread(at) if past.size and thread else ""
        whose = f" by {who}" if who else ""
        where = "past the end of" if past.size else "before the beginning of"
        raise Wrong(f"{case}{name}[{at}] was written{whose}: that is {where} the array, which has {size} elements")


def expect(
    name: str, got: np.ndarray, want: np.ndarray, thread: Callable[..., str], tolerance: float = 0.0, case: str = ""
) -> None:
    """Wrong unless all of `got`, an output, is `want`, and nothing around it was written. thread: says, given the index
    of an element, who is to write it; it is asked for indices past the end of one-dimensional arrays too.
    tolerance: of 1 + the value's size. case: of several, which this is."""
    refuse_strays(name, got, thread if got.ndim == 1 else None, case)
    with np.errstate(all="ignore"):
        good = abs(got.astype(np.float64) - want) <= tolerance * (1 + abs(want))
    if good.all():
        return
    index = tuple(int(i) for i in np.argwhere(~good)[0])
    found = f"got {number(got[index])}" if written(got)[index] else "nothing was written"
    at = ", ".join(map(str, index))
    raise Wrong(
        f"{case}{name}[{at}]: expected {number(want[index])}, {found}; {thread(*index)} has to write it"
        f"\n{np.count_nonzero(~good)} of {got.size} elements of {name} are wrong"
    )


def number(x) -> str:
    return f"{x:.7g}"


def thread_in(watched: Watched, block: int, thread: int) -> str:
    """Names a thread by its number and its block's, with as many dimensions as the launch has."""

    def index(number: int, size: tuple[int, ...]) -> str:
        parts = number % size[0], number // size[0] % size[1], number // size[0] // size[1]
        dimensions = 3 if size[2] > 1 else 2 if size[1] > 1 else 1
        return str(parts[0]) if dimensions == 1 else f"({', '.join(map(str, parts[:dimensions]))})"

    return f"thread {index(thread, watched.block)} of block {index(block, watched.grid)}"


def in_line(blocks: int, threads: int) -> Callable[[int], str]:
    """Names the thread whose number in a grid of blocks of so many threads is an element's; empty where none has it."""
    return lambda i: f"thread {i % threads} of block {i // threads}" * (i < blocks * threads)


# ---- a solution


class Lab:
    """A solution in a file, CUDA C++ or Python. microscope: whether every access of its kernels is watched."""

    def __init__(self, path: Path, microscope: bool = False):
        self.path, self.microscope = path, microscope
        self.scratch: dict[str, np.ndarray] = {}  # that launchers have asked for last, by its purpose
        self.lines = path.read_text("utf-8").splitlines()
        if path.suffix == ".cu":
            self.module = self.compiled()
        else:
            self.names: dict = {}
            self.run(exec, compile_python(path), self.names)

    def compiled(self) -> cpp.Module:
        try:
            return cpp.compile_source(self.path)
        except UserError as error:
            found = re.search(rf"^{re.escape(str(self.path))}:(\d+):.*?error: (.*)$", str(error), re.MULTILINE)
            if found:
                raise Wrong(f"line {found[1]} does not compile: {found[2]}\n{self.quote(int(found[1]))}") from None
            first = re.search(r"^.*error: .*$", str(error), re.MULTILINE)
            if first:
                raise Wrong(f"it does not compile: {first[0]}") from None
            raise

    def quote(self, line: int) -> str:
        return f"    {line}: {self.lines[line - 1].strip()}" if 0 < line <= len(self.lines) else ""

    def launch(self, name: str, grid: tuple, block: tuple, case: str = "", **arguments) -> Watched | None:
        """Launch a kernel; under the microscope, with what was watched."""
        try:
            kernel = self.module.kernel(name)
        except AttributeError:
            raise Wrong(f"the file has no kernel {name} any more") from None

        def work() -> None:
            try:
                kernel(grid, block, tuple(arguments.values()))
            except TypeError as error:
                raise Wrong(f"the kernel's parameters are no longer what they were: {error}") from None
            except cpp.KernelError as error:
                raise self.failed(error, arguments) from None

        if not self.microscope:
            work()
            return None
        return self.watch(name, arguments, work, case)

    def watch(self, name: str, arguments: dict, work: Callable[[], None], case: str = "") -> Watched:
        """What a launch did, under the microscope. Accesses outside of the arrays, barriers in branches and races are
        Wrong."""
        around = {key: 4 * AROUND for key, value in arguments.items() if is_output(value)}
        watched = watch_kernel(name, arguments, work, self.path, around=around)
        self.refuse_stray_accesses(watched, case)
        self.refuse_divided_barriers(watched, case)
        self.refuse_races(watched)
        return watched

    def failed(self, error: cpp.KernelError, arguments: dict) -> Wrong:
        """A launch that failed, with the line that it names, or the element that an address would be."""
        text = re.sub(r" \(LLMC_CPU_\w+=1 .*\)$", "", str(error))
        address = re.search(r"invalid memory access at address (0x[0-9a-f]+|\(nil\))", text)
        arrays = {name: array for name, array in arguments.items() if isinstance(array, np.ndarray)}
        if address and arrays:
            at = int(address[1], 16) if address[1] != "(nil)" else 0
            name = min(arrays, key=lambda name: abs(at - device.address(arrays[name])))
            if at < NULL_PAGE:
                return Wrong(text.replace(address[0], "a null pointer was followed: an array that is not there, or a"
                                          " lane that has left before an instruction of the whole warp"))  # fmt: skip
            bytes_off = (at - device.address(arrays[name]) + 2**63) % 2**64 - 2**63  # an address wraps below 0
            element = bytes_off // arrays[name].itemsize
            size = arrays[name].size
            text = text.replace(address[0], f"an index far outside of its arrays: {name}[{element}], if it is {name}"
                                            f" that was meant, which has {size} elements")  # fmt: skip
        line = re.search(rf" at {re.escape(self.path.name)}:(\d+)$", text)
        return Wrong(f"{text}\n{self.quote(int(line[1]))}" if line else text)

    def quote_places(self, watched: Watched, pcs: list[int]) -> list[str]:
        """The lines of these addresses, as far as they are the learner's."""
        places = {watched.places[pc] for pc in pcs}
        return [self.quote(line) for line in sorted({one.line for one in places if one.file == self.path.name})]

    def refuse_stray_accesses(self, watched: Watched, case: str) -> None:
        steps = watched.steps[watched.steps["array"] >= 0]
        size = np.array([array.bytes for array in watched.arrays])[steps["array"]][:, None]
        shared = np.array([array.shared for array in watched.arrays])[steps["array"]][:, None]
        past = steps["offset"] + steps["size"][:, None] > size
        strays = np.argwhere(lanes_of(steps) & (past | (steps["offset"] < 0)) & ~shared)
        if not len(strays):
            return
        i, lane = strays[0]
        step, array = steps[i], watched.arrays[steps["array"][i]]
        item = np.dtype(array.dtype).itemsize
        at, elements = int(step["offset"][lane]) // item, array.bytes // item
        if past[i, lane] and at < elements:  # several numbers in one access
            at = elements
        done = {LOAD: "read", STORE: "written"}.get(step["kind"], "changed")
        who = thread_in(watched, int(step["block"]), LANES * int(step["warp"]) + int(lane))
        where = "past the end of" if past[i, lane] else "before the beginning of"
        raise Wrong("\n".join([
            f"{case}{array.name}[{at}] was {done} by {who}: that is {where} the array, which has {elements} elements",
            *self.quote_places(watched, [int(step["pc"])]),
        ]))  # fmt: skip

    def refuse_divided_barriers(self, watched: Watched, case: str) -> None:
        """Wrong where some threads of a block wait at one barrier while others wait at another one."""
        barriers = np.unique(watched.steps[watched.steps["kind"] == BARRIER][["block", "epoch", "pc"]])
        same = (barriers["block"][1:] == barriers["block"][:-1]) & (barriers["epoch"][1:] == barriers["epoch"][:-1])
        if same.any():
            first = int(np.argmax(same))
            raise Wrong("\n".join([
                f"{case}threads of one block wait at two barriers at once, because a branch has parted them. All"
                " threads of a block must reach the same barrier, so take it out of the branch",
                *self.quote_places(watched, barriers["pc"][first : first + 2].tolist()),
            ]))  # fmt: skip

    def refuse_races(self, watched: Watched) -> None:
        races = race_lines(watched)
        if races:
            pcs = watched.races[:2]["one"]["pc"].tolist() + watched.races[:2]["other"]["pc"].tolist()
            between_blocks = np.all(watched.races["one"]["block"] != watched.races["other"]["block"])
            raise Wrong("\n".join([
                "two blocks touch one address, and one of them writes. No barrier orders blocks. Does the index leave"
                " the block's number out? Is a guard missing, so that an index past the end of a row is one of the"
                " next row?" if between_blocks else
                "threads race: they touch one address, one of them writes, and no barrier lies between",
                *self.quote_places(watched, pcs), *races[:2],
                *[f"and {len(races) - 2} more pairs of lines"] * (len(races) > 2),
            ]))  # fmt: skip

    @contextmanager
    def in_place_of(self, source: Source) -> Iterator[list[Watched]]:
        """Within the block, launchers find the kernels of `source` in the solution's file, and their scratch is an
        output. The launches that the microscope has watched are added to the list."""
        path, all_watched, scratch_of_device = source.path, [], device.scratch

        def observer(name: str, arguments: dict, work: Callable[[], None]) -> None:
            def checked() -> None:
                try:
                    work()
                except cpp.KernelError as error:
                    raise self.failed(error, arguments) from None

            if self.microscope and name in kernel_declarations(self.path):
                all_watched.append(self.watch(name, arguments, checked, f"{name}: "))
            else:
                checked()
            for parameter, value in arguments.items():
                refuse_strays(parameter, value, case=f"{name}: ")

        def scratch(purpose: str, shape: tuple[int, ...], dtype) -> np.ndarray:
            self.scratch[purpose] = output(*shape, dtype=dtype)
            return self.scratch[purpose]

        source.path, device.scratch = self.path, scratch
        try:
            with device.observe(observer):
                yield all_watched
        except (AttributeError, TypeError, ValueError) as error:  # a kernel that is gone, or takes something else
            raise Wrong(f"the kernels' names and parameters must stay as they were: {error}") from None
        finally:
            source.path, device.scratch = path, scratch_of_device

    def call(self, name: str, *arguments, case: str = ""):
        """What a Python function of the solution returns. case: of several, which this is."""
        if name not in self.names:
            raise Wrong(f"the file has no function {name} any more")
        return self.run(self.names[name], *arguments, case=case)

    def run(self, function: Callable, *arguments, case: str = ""):
        try:
            with np.errstate(over="raise", invalid="raise", divide="raise"):
                return function(*arguments)
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(self.path)), 0)
            if isinstance(error, NotImplementedError):
                raise Wrong(f"nothing is written yet in line {line}") from None
            said = f"{type(error).__name__}: {error}"
            if isinstance(error, FloatingPointError):
                said = next((text for part, text in FLOATING_POINT.items() if part in str(error)), said)
            before = f"{case}: " if case else ""
            raise Wrong(f"{before}line {line}: {said}\n{self.quote(line)}".rstrip()) from None


def compile_python(path: Path):
    try:
        return compile(path.read_text("utf-8"), str(path), "exec")
    except SyntaxError as error:
        line = linecache.getline(str(path), error.lineno or 0).strip()
        raise Wrong(f"line {error.lineno} is not Python: {error.msg}\n    {error.lineno}: {line}") from None


def normal(*shape: int) -> np.ndarray:
    """Random numbers that are the same on every run, float32."""
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


# ---- the exercises


def check_who_am_i(lab: Lab) -> None:
    who = output(5 * 64, dtype=np.int32)
    lab.launch("who_am_i_kernel", (5,), (64,), who=who)
    expect("who", who, 1000 * (np.arange(320) // 64) + np.arange(320) % 64, in_line(5, 64))


def check_guard(lab: Lab) -> None:
    for N in 1000, 256, 1:
        x, out = given(normal(N)), output(N)
        lab.launch("twice_kernel", (ceil_div(N, 256),), (256,), out=out, x=x, N=N)
        expect("out", out, 2.0 * x, in_line(ceil_div(N, 256), 256))


def check_plane(lab: Lab) -> None:
    def thread(n: int, c: int) -> str:
        return f"thread ({c % 32}, {n % 4}) of block ({c // 32}, {n // 4})"

    for N, C in (8, 64), (10, 70), (3, 5):
        x, bias, out = given(normal(N, C)), given(normal(C)), output(N, C)
        grid = ceil_div(C, 32), ceil_div(N, 4)
        lab.launch("add_bias_kernel", grid, (32, 4), out=out, x=x, bias=bias, N=N, C=C)
        expect("out", out, x + bias, thread)


def check_neighbours(lab: Lab) -> None:
    x, out = given(normal(3 * 128)), output(3 * 128)
    watched = lab.launch("neighbours_kernel", (3,), (128,), out=out, x=x)
    padded = np.pad(x.reshape(3, 128).astype(np.float64), ((0, 0), (1, 1)))
    expect("out", out, (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]).reshape(-1), in_line(3, 128), KERNEL_FP32)
    expect_loads(watched, "x", x.size)


def expect_loads(watched: Watched, array: str, count: int) -> None:
    """Wrong unless a kernel's threads have read this array so many times, all together."""
    number = [one.name for one in watched.arrays].index(array)
    steps = watched.steps[(watched.steps["array"] == number) & (watched.steps["kind"] == LOAD)]
    loads = int(lanes_of(steps).sum())
    if loads != count:
        raise Wrong(f"the numbers are right, but {array} was read {loads} times; {count}, once each, would do")


def check_race(lab: Lab) -> str:
    R = 5
    x, out = given(normal(R, 128)), output(R)
    watched = lab.launch("row_sums_kernel", (1,), (128,), out=out, x=x, R=R)
    expect("out", out, x.astype(np.float64).sum(1), lambda r: "thread 0", KERNEL_FP32)
    barriers = np.count_nonzero((watched.steps["warp"] == 0) & (watched.steps["kind"] == KINDS.index("barrier"))) / R
    return f"{barriers:g} barriers a row; 8 are enough." if barriers > 8 else ""


def check_shuffle(lab: Lab) -> str:
    x, out = given(normal(3 * 64)), output(3 * 64)
    watched = lab.launch("warp_sums_kernel", (3,), (64,), out=out, x=x)
    sums = x.reshape(6, 32).astype(np.float64).sum(1)
    expect("out", out, np.repeat(sums, 32), in_line(3, 64), KERNEL_FP32)
    for warp, lanes in enumerate(out.reshape(6, 32)):
        if len(set(lanes.tolist())) > 1:
            raise Wrong(f"warp {warp}: its lanes do not have the same bits, but {sorted(set(lanes.tolist()))}")
    expect_loads(watched, "x", x.size)
    if any(array.shared and np.any(watched.steps["array"] == i) for i, array in enumerate(watched.arrays)):
        raise Wrong("the numbers are right, but go through shared memory; lanes can read each other's registers")
    shuffles = sum("shfl" in watched.names[int(step["what"])] for step in watched.steps if step["kind"] == MEETING) / 6
    if shuffles > 6:
        raise Wrong(f"the numbers are right, but a warp shuffles {shuffles:g} times; 5 are enough for 32 lanes")
    return f"A warp shuffles {shuffles:g} times; 5 are enough." if shuffles > 5 else ""


def warp_step(addresses: list[int], size: int) -> np.ndarray:
    """A warp's access as the microscope would have seen it, whose counting is then used."""
    step = np.zeros(1, STEP)
    step["size"], step["mask"] = size, (1 << len(addresses)) - 1
    step["offset"][0, : len(addresses)] = addresses
    return step


def check_sectors(lab: Lab) -> None:
    lanes = range(32)
    for what, addresses, size in (
        ("lane i reads float i", [4 * i for i in lanes], 4),
        ("lane i reads float i + 1", [4 * i + 4 for i in lanes], 4),
        ("lane i reads float 31 - i", [4 * (31 - i) for i in lanes], 4),
        ("all lanes read float 5", [20] * 32, 4),
        ("lane i reads float 2 i", [8 * i for i in lanes], 4),
        ("lane i reads float 768 i, a column of 32 rows", [4 * 768 * i for i in lanes], 4),
        ("lane i reads the four floats from 4 i on", [16 * i for i in lanes], 16),
        ("lane i reads the two floats from 2 i + 2 on", [8 * i + 8 for i in lanes], 8),
        ("lanes 0 to 4 read float i", [4 * i for i in range(5)], 4),
    ):
        want = int(distinct(sectors_of(warp_step(addresses, size)))[0])
        expect_value(what, lab.call("sectors", addresses), want)


def expect_value(what: str, got, want) -> None:
    """Wrong unless a function's result, of whole numbers, is this."""
    if got != want:
        raise Wrong(f"{what}: expected {want}, got {got!r}")


def check_banks(lab: Lab) -> None:
    for what, words in (
        ("lane i reads word i", list(range(32))),
        ("all lanes read word 5", [5] * 32),
        ("lane i reads word 2 i", list(range(0, 64, 2))),
        ("lane i reads word 32 i", list(range(0, 1024, 32))),
        ("lane i reads word 33 i", list(range(0, 33 * 32, 33))),
        ("lane i reads word i % 4 * 32", [i % 4 * 32 for i in range(32)]),
        ("lane i reads word i // 2 + i % 2 * 64", [i // 2 + i % 2 * 64 for i in range(32)]),
        ("lanes 0 to 2 read words 7, 39 and 8", [7, 39, 8]),
    ):
        expect_value(f"passes, {what}", lab.call("passes", words), passes_of_words(words))
    for stride in range(1, 97):
        want = passes_of_words([stride * i for i in range(32)])
        expect_value(f"passes_of_stride({stride})", lab.call("passes_of_stride", stride), want)


def passes_of_words(words: list[int]) -> int:
    return int(passes_of(warp_step([4 * word for word in words], 4), 4)[0][0])


def check_bias_gradient(lab: Lab) -> None:
    N, C = 603, 70  # more rows than kernels/reduce.py adds up in one stage
    dout, dbias = given(normal(N, C)), given(normal(C))
    before, rows = dbias.astype(np.float64), kernels.reduce.rows_per_chunk(N, multiple=8)
    chunks = ceil_div(N, rows)
    with lab.in_place_of(kernels.reduce.cu):
        kernels.reduce.column_sum(dbias, dout, N, C)
    padded = np.pad(dout.astype(np.float64), ((0, chunks * rows - N), (0, 0)))
    partials = lab.scratch["partials"].reshape(chunks, C)
    expect(
        "partials", partials, padded.reshape(chunks, rows, C).sum(1),
        lambda p, i: f"column_partials_kernel's thread {i // 4} of block (0, {p})", KERNEL_FP32,
    )  # fmt: skip
    expect(
        "out", dbias, before + padded.sum(0),
        lambda i: f"add_partials_kernel's thread ({i % 8}, 0) of block {i // 8}", KERNEL_FP32 * 10,
    )  # fmt: skip
    out, sums = given(before.astype(np.float32)), given(partials)
    with lab.in_place_of(kernels.reduce.cu):  # with other blocks than those of 8 x 64
        args = out, *[None] * 5, sums, chunks, C, 1
        kernels.reduce.cu.launch("add_partials_kernel", (ceil_div(C, 32), 1), (32, 8), args)
    expect(
        "out", out, before + padded.sum(0),
        lambda i: f"with blocks of (32, 8) add_partials_kernel's thread ({i % 32}, 0) of block {i // 32}",
        KERNEL_FP32 * 10,
    )  # fmt: skip


def check_layernorm(lab: Lab) -> None:
    for B, T, C in (2, 3, 64), (1, 4, 130), (1, 2, 1601):
        x, branch = 2 * normal(B * T, C) + 3, normal(1, B * T, C)[0]
        weight, bias = normal(1, C)[0], normal(2, C)[0]
        for fused in False, True:
            out, mean, rstd, residual = output(B * T, C), output(B * T), output(B * T), output(B * T, C)
            stats, norm = (mean, rstd), (given(weight), given(bias))
            with lab.in_place_of(kernels.layernorm.cu):
                if fused:
                    kernels.layernorm.fused_residual_forward(
                        residual, out, stats, given(x), given(branch), norm, B, T, C
                    )
                else:
                    kernels.layernorm.layernorm_forward(out, stats, given(x), norm, B, T, C)
            sums = x.astype(np.float64) + (branch if fused else 0)
            means, variances = sums.mean(1), sums.var(1)
            want_rstd = 1 / np.sqrt(variances + 1e-5)
            want = (sums - means[:, None]) * want_rstd[:, None] * weight + bias
            expect("mean", mean, means, lambda n: f"thread 0 of block {n}", KERNEL_FP32)
            expect("rstd", rstd, want_rstd, lambda n: f"thread 0 of block {n}", KERNEL_FP32, f"with C = {C}, ")
            threads = 32 * ceil_div(C, 128)
            expect(
                "out", out, want, lambda n, c, threads=threads: f"thread {c // 4 % threads} of block {n}", KERNEL_FP32,
                f"with C = {C}, ",
            )  # fmt: skip


def check_tf32(lab: Lab) -> None:
    for x in 1.0, -1.0, 0.5, 1.5, 0.0, 3.140625, -6.5e-20:
        bits = int(np.float32(x).view(np.uint32))
        want = bits // 2**31, bits // 2**23 % 256, bits % 2**23
        expect_value(f"fields({x})", lab.call("fields", np.float32(x)), want)
    middle = 1 + 2.0**-11  # between 1 and the next number of TF32
    beside = middle - 2.0**-23, middle + 2.0**-23
    special = [1, 1 + 2.0**-10, middle, -middle, *beside, 2 - 2.0**-23, 0.1, -1 / 3, 0, 1e-30]
    x = np.concatenate([np.array(special, np.float32), normal(500)])
    got = lab.call("to_tf32", x.copy())
    if not isinstance(got, np.ndarray) or got.dtype != np.float32 or got.shape != x.shape:
        raise Wrong("to_tf32 has to return a float32 array of the same shape")
    want = rounded_to_tf32(x)
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        i = wrong[0]
        shown = [f"{float(value)!r} ({np.float32(value).view(np.uint32):032b})" for value in (x[i], want[i], got[i])]
        raise Wrong("to_tf32 of {}:\nexpected {}\ngot      {}".format(*shown))


def rounded_to_tf32(x: np.ndarray) -> np.ndarray:
    """The nearest numbers of TF32, halfway away from zero, as float64."""
    share, exponent = np.frexp(x.astype(np.float64))  # x = share * 2^exponent, share from 1/2 on: 11 bits are kept
    return np.copysign(np.ldexp(np.floor(abs(share) * 2**11 + 0.5), exponent - 11), x)


def check_transpose(lab: Lab) -> None:
    def thread(c: int, n: int) -> str:
        return f"lane {n % 32} of a warp of block ({c // 32}, {n // 32})"

    for N, C in (70, 40), (64, 96):
        x, out = given(normal(N, C)), output(C, N)
        grid = ceil_div(C, 32), ceil_div(N, 32)
        watched = lab.launch("transpose_tile_kernel", grid, (32, 8), out=out, x=x, N=N, C=C)
        expect("out", out, x.T, thread)
    expect_no_waste(lab, watched)  # of the matrix whose rows and columns are whole sectors


def expect_no_waste(lab: Lab, watched: Watched) -> None:
    """Wrong if an access has bank conflicts, or moves more sectors than its bytes fill."""
    for line in lines_of(watched):
        array, where = watched.arrays[line.array], lab.quote(line.place.line)
        if array.shared and line.worst > 1:
            raise Wrong(
                f"the numbers are right, but an access to {array.name} takes up to {line.worst:g} times the passes that"
                f" it needs (bank conflicts):\n{where}"
            )
        least = line.bytes // 32
        if not array.shared and line.sectors > least:
            raise Wrong(
                f"the numbers are right, but {line.sectors} sectors of {array.name} move where {least} would do:"
                f" the lanes of a warp do not touch neighbours here:\n{where}"
            )


def check_gelu(lab: Lab) -> None:
    for N, C in (70, 68), (5, 7):
        inp, dout, bias = 2 * normal(N, C), normal(1, N, C)[0], normal(C)
        dinp, dbias, out_T = given(dout), given(bias), output(C, N)
        with lab.in_place_of(kernels.gelu.cu):
            kernels.gelu.gelu_backward(dinp, dbias, out_T.T, dinp, given(inp), given(bias), N, C)
        x = inp.astype(np.float64) + bias
        tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
        slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
        want = dout * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * slope)

        def thread(n: int, c: int) -> str:
            return f"thread ({c % 64 // 4}, {n % 16}) of block ({c // 64}, 0)"

        expect("out_T", out_T, (0.5 * x * (1 + tanh)).T, lambda c, n: thread(n, c) + ", by the tile,", KERNEL_FP32)
        expect("dinp", dinp, want, thread, KERNEL_FP32)
        expect("dbias", dbias, bias + want.sum(0), lambda c: "add_partials, from the threads' sums,", KERNEL_FP32 * 10)


def check_online_softmax(lab: Lab) -> None:
    def pair(what: str, got, x: np.ndarray) -> tuple[float, float]:
        try:
            largest, total = (float(value) for value in got)
        except (TypeError, ValueError):
            raise Wrong(f"{what}: expected two numbers, got {got!r}") from None
        want = (x.max(), np.exp(x - x.max()).sum()) if x.size else (-np.inf, 0.0)
        if not (largest == want[0] and abs(total - want[1]) <= 1e-9 * (1 + want[1])):
            raise Wrong(
                f"{what}: expected ({number(want[0])}, {number(want[1])}), got ({number(largest)}, {number(total)})"
            )
        return largest, total

    x = normal(40).astype(np.float64) * 3
    for what, values in ("rising", np.sort(x)), ("falling", np.sort(x)[::-1]), ("large", 1000 * x):
        for width in 1, 7, 40:
            state = -np.inf, 0.0
            for i in range(0, 40, width):
                seen = values[: i + width]
                case = f"fold, {what} numbers, {width} at a time, after {seen.size}"
                state = pair(case, lab.call("fold", *state, values[i : i + width].copy(), case=case), seen)
    for what, a, b in ("the smaller first", x[:9] - 800, x[9:]), ("the larger first", x[:9] + 800, x[9:]), (
        "a EMPTY", x[:0], x
    ), ("b EMPTY", x, x[:0]), ("both EMPTY", x[:0], x[:0]):  # fmt: skip
        states = [(one.max(), np.exp(one - one.max()).sum()) if one.size else (-np.inf, 0.0) for one in (a, b)]
        case = f"merge, {what}"
        pair(case, lab.call("merge", *states, case=case), np.concatenate([a, b]))


def check_softmax(lab: Lab) -> None:
    for T, scale in (37, 0.125), (160, 1.0), (40, 60.0):
        rows = 2 * T
        scores = normal(2, T, T).reshape(rows, T)
        att, lengths = given(scores), np.arange(rows) % T + 1
        with lab.in_place_of(kernels.attention.cu):
            kernels.attention.launch_by_att_row("softmax_forward_kernel", rows, (att, np.float32(scale), rows, T))
        with np.errstate(under="ignore"):
            x = np.where(np.arange(T) < lengths[:, None], scale * scores.astype(np.float64), -np.inf)
            x = np.exp(x - x.max(1, keepdims=True))
        want = x / x.sum(1, keepdims=True)

        def thread(n: int, s: int) -> str:
            return f"lane {s // 4 % 32} of warp {n % 8} of block {n // 8}"

        expect("att", att, want, thread, KERNEL_FP32, f"with T = {T} and scale {scale:g}, ")


def tiles_of(k: np.ndarray, v: np.ndarray, width: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tiles of `width` rows, each in place of the one before."""
    memory = np.empty((2, width, k.shape[1]))
    for i in range(0, len(k), width):
        rows = len(k[i : i + width])
        memory[...] = np.nan
        memory[0, :rows], memory[1, :rows] = k[i : i + width], v[i : i + width]
        yield memory[0, :rows], memory[1, :rows]
    memory[...] = np.nan


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p, out and lse by whole matrices."""
    s = scale * q @ k.T
    largest = s.max(1, keepdims=True)
    p = np.exp(s - largest)
    lse = largest[:, 0] + np.log(p.sum(1))
    p /= p.sum(1, keepdims=True)
    return p, p @ v, lse


def flash_cases() -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray, float, int]]:
    q, k, v = (normal(i + 2, 8, 4)[i].astype(np.float64) for i in range(3))
    yield "one tile", q[:3], k, v, 0.5, 8
    yield "two tiles", q[:3], k, v, 0.5, 4
    rising = np.concatenate([k[:4], 30 * k[4:]])
    yield "two tiles, the second with larger scores", q, rising, v, 0.5, 4
    yield "tiles of 3 rows, large scores", q, 50 * k, v, 1.0, 3


def expect_matrix(what: str, got, want: np.ndarray) -> None:
    """Wrong unless a function's result is this array, to the rounding of float64."""
    if np.shape(got) != want.shape:
        raise Wrong(f"{what}: expected an array {want.shape}, got {np.shape(got) or type(got).__name__}")
    good = abs(np.asarray(got) - want) <= 1e-9 * (1 + abs(want))
    if not good.all():
        index = tuple(int(i) for i in np.argwhere(~good)[0])
        remark = "; a tile was used after the next one had taken its place?" if np.isnan(got[index]) else ""
        place = ", ".join(map(str, index))
        raise Wrong(f"{what}[{place}]: expected {number(want[index])}, got {number(got[index])}{remark}")


def check_flash_forward(lab: Lab) -> None:
    for what, q, k, v, scale, width in flash_cases():
        _, want_out, want_lse = attention(q, k, v, scale)
        got = lab.call("flash_forward", q.copy(), tiles_of(k, v, width), scale, case=what)
        if not isinstance(got, tuple) or len(got) != 2:
            raise Wrong(f"flash_forward has to return out and lse, not {type(got).__name__}")
        expect_matrix(f"{what}: lse", got[1], want_lse)
        expect_matrix(f"{what}: out", got[0], want_out)


def check_flash_backward(lab: Lab) -> None:
    for what, q, k, v, scale, width in flash_cases():
        p, out, lse = attention(q, k, v, scale)
        dout = normal(9, *q.shape)[8].astype(np.float64)
        dp = dout @ v.T
        ds = p * (dp - (dp * p).sum(1, keepdims=True))
        arguments = q.copy(), out.copy(), lse.copy(), dout.copy(), tiles_of(k, v, width), scale
        got = lab.call("flash_backward", *arguments, case=what)
        try:
            dq, dkv = got
            pairs = [(dk, dv) for dk, dv in dkv]
        except (TypeError, ValueError):
            raise Wrong("flash_backward has to return dq, and a list with a pair dk, dv for each tile") from None
        expect_value(f"{what}: the number of pairs dk, dv", len(pairs), ceil_div(len(k), width))
        expect_matrix(f"{what}: dq", dq, scale * ds @ k)
        for i, (dk, dv) in enumerate(pairs):
            tile = slice(i * width, (i + 1) * width)
            expect_matrix(f"{what}: tile {i}'s dk", dk, scale * ds[:, tile].T @ q)
            expect_matrix(f"{what}: tile {i}'s dv", dv, p[:, tile].T @ dout)


# Where lane 0's elements are, and how far each bit of a lane's number and of i moves an element: (rows, columns).
FRAGMENTS = {
    "a": ([(0, 1), (0, 2), (1, 0), (2, 0), (4, 0)], [(8, 0), (0, 4)]),
    "b": ([(1, 0), (2, 0), (0, 1), (0, 2), (0, 4)], [(4, 0)]),
    "c": ([(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)], [(0, 1), (8, 0)]),
}


def place(matrix: str, lane: int, i: int) -> tuple[int, int]:
    of_lane, of_i = FRAGMENTS[matrix]
    moves = [move for bit, move in enumerate(of_lane) if lane >> bit & 1]
    moves += [move for bit, move in enumerate(of_i) if i >> bit & 1]
    return sum(row for row, _ in moves), sum(column for _, column in moves)


def check_fragments(lab: Lab) -> None:
    for matrix, (_, of_i) in FRAGMENTS.items():
        for lane in range(32):
            for i in range(1 << len(of_i)):
                got = lab.call(f"{matrix}_at", lane, i)
                expect_value(f"row and column of lane {lane}'s {matrix}[{i}]", got, place(matrix, lane, i))
    for lane in range(32):
        for i in range(4):
            row, column = place("c", lane, i)
            expect_value(f"lane and i of C[{row}][{column}]", lab.call("holder_of_c", row, column), (lane, i))


def check_adamw(lab: Lab) -> None:
    n, lr, beta1, beta2, eps, decay = 1030, 0.1, 0.9, 0.999, 0.01, 0.1  # an eps that shows where it is added
    params, m, v = given(normal(n)), given(np.zeros(n, np.float32)), given(np.zeros(n, np.float32))
    scale = 0.5
    norm = given(np.array([0, scale, 0, 0], np.float32))
    want, want_m, want_v = params.astype(np.float64), np.zeros(n), np.zeros(n)
    for t in 1, 2, 3:
        grads = normal(t, n)[t - 1]
        with lab.in_place_of(kernels.adamw.cu):
            kernels.adamw.adamw(params, given(grads), m, v, norm, n, lr, beta1, beta2, eps, decay, t)
        g = scale * grads.astype(np.float64)
        want_m = beta1 * want_m + (1 - beta1) * g
        want_v = beta2 * want_v + (1 - beta2) * g**2
        step = want_m / (1 - beta1**t) / (np.sqrt(want_v / (1 - beta2**t)) + eps)
        want = want - lr * (step + decay * want)
        for name, got, values in ("m", m, want_m), ("v", v, want_v), ("params", params, want):
            expect(name, got, values, in_line_of_four, KERNEL_FP32, f"after step {t}, ")


def in_line_of_four(i: int) -> str:
    return f"thread {i // 4 % 256} of block {i // 1024}"


def check_tensor_cores(lab: Lab) -> None:
    def thread(m: int, n: int) -> str:
        warp, lane, i = m % 32 // 16 * 2 + n % 16 // 8, m % 8 * 4 + n % 8 // 2, m % 16 // 8 * 2 + n % 2
        return f"lane {lane} of warp {warp} of block ({n // 16}, {m // 32}), as its d[{i}],"

    def product(what: str, a: np.ndarray, b: np.ndarray, tolerance: float) -> None:
        (M, K), N = a.shape, b.shape[1]
        out, case = output(M, N), f"with M = {M}, N = {N}, K = {K} and {what}, "
        grid = ceil_div(N, 16), ceil_div(M, 32)
        lab.launch("product_kernel", grid, (128,), case, out=out, a=given(a), b=given(b), M=M, N=N, K=K)
        expect("out", out, rounded_to_tf32(a) @ rounded_to_tf32(b), thread, tolerance, case)

    for M, N, K in (32, 16, 8), (64, 48, 24), (37, 21, 13):
        product("whole numbers", np.rint(4 * normal(M, K)), np.rint(4 * normal(K, N)), 0.0)
    product("any numbers", normal(32, 40), normal(40, 16), KERNEL_FP32)


def check_swizzle(lab: Lab) -> None:
    N, C = 64, 96
    x, out = given(normal(N, C)), output(C, N)
    watched = lab.launch("swizzled_transpose_kernel", (C // 32, N // 32), (256,), out=out, x=x, N=N, C=C)
    expect("out", out, x.T, lambda c, n: f"a thread of block ({c // 32}, {n // 32})")
    size = sum(array.bytes for array in watched.arrays if array.shared)
    if size > 4096:
        raise Wrong(f"the numbers are right, but the tile has {size} bytes; 4096 are enough")
    expect_no_waste(lab, watched)


def to_bf16(x: np.ndarray) -> np.ndarray:
    return device.from_bf16(device.to_bf16(x)).reshape(np.shape(x))


def check_bf16_sum(lab: Lab) -> None:
    for term in 1.0, 0.25, 64.0, 1.5, 0.02001953125, 3.0, 1.0078125, 1.9921875:
        total, before = np.float32(0), np.float32(-1)
        while total != before:
            total, before = to_bf16(total + np.float32(term))[()], total
        expect_value(f"stops_at({term:g})", lab.call("stops_at", term), float(total))
    for name, most in ("sum_in_fp32", 2.0**-8), ("sum_in_bf16", 0.02):
        for what, x in (
            ("4096 ones", np.ones(4096)), ("1, 1, 1 and 0.25", np.array([1, 1, 1, 0.25])), ("one number", np.ones(1)),
            ("65536 numbers", to_bf16(abs(normal(65536)))),
        ):  # fmt: skip
            got, want = lab.call(name, x.astype(np.float32), case=f"{name}, {what}"), x.astype(np.float64).sum()
            try:
                value = float(got)
            except (TypeError, ValueError):
                raise Wrong(f"{name}, {what}: expected a number, got {got!r}") from None
            if not abs(value - want) <= most * want:
                raise Wrong(f"{name}, {what}: expected {number(want)}, give or take {most:.1%}, got {number(value)}")
            if value != to_bf16(value):
                raise Wrong(f"{name}, {what}: {value!r} is not a bf16 number")


def check_flash_attention(lab: Lab) -> str:
    """By the arrays, sizes and tolerance of the ladder, in the place of one of its rungs."""
    topic, source = TOPICS["flash_attention"], Source(lab.path)
    rung = next(rung for rung in topic.rungs if rung.kernel == "swizzled_kernel")

    def place(how: str, values: np.ndarray) -> np.ndarray:
        return output(*values.shape) if how == "write" else given(values)

    for sizes in topic.odd, topic.fours, topic.round:
        arrays = place_arrays(topic, sizes, place)
        with lab.in_place_of(source) as watched:
            rung.launch(source, arrays)
        for name, want in references(topic, sizes).items():
            got, case = getattr(arrays, name), f"with {text_of(sizes)}, {name}"
            for index in np.ndindex(want.shape):
                t, h = index[1:3] if name == "out" else index[:0:-1]
                which = f"{case} of query {t} of head {h}" + "".join(f", channel {i}" for i in index[3:])
                if not written(got[index]):
                    raise Wrong(f"{which}: nothing was written")
                if not abs(got[index] - want[index]) <= 20 * TF32 * (1 + abs(want[index])):
                    raise Wrong(f"{which}: expected {number(want[index])}, got {number(got[index])}")
            if relative_error(got, want) > TF32:
                raise Wrong(f"{case} is off by {relative_error(got, want):.1e} of itself; {TF32:g} is allowed")
    lines = [line for one in watched for line in lines_of(one)]
    size = topic.bytes(SimpleNamespace(**topic.round))
    moved = SECTOR * sum(line.sectors for line in lines if not watched[0].arrays[line.array].shared) / size
    shared = [line for line in lines if watched[0].arrays[line.array].shared]
    passes = sum(line.passes for line in shared) / (sum(line.least_passes for line in shared) or 1)
    uses_mma = any("mma" in watched[0].names[int(step["what"])] for step in watched[0].steps if step["kind"] == MEETING)
    if not shared:
        left = "Next: tiles in shared memory."
    elif not uses_mma:
        left = "Next: tensor cores."
    elif passes > 1.005:
        left = f"An access to shared memory takes {passes:.2f} passes for each that it needs."
        left += " Next: a swizzle, or other rows for the lanes of an access."
    else:
        left = "No two lanes meet in a bank. What is left is asynchronous copies, and 32 queries a warp."
    return f"It moves {moved:.2f} bytes for each that must be moved. {left}"


RANKS = 3
PATIENCE = 2  # seconds that a rank waits for what another one sends


def check_ring(lab: Lab) -> None:
    """Three processes, which this one starts. Each has a pipe to read from, into which the rank before it writes."""
    fork = multiprocessing.get_context("fork")
    rings, results = ([fork.Pipe(duplex=False) for _ in range(RANKS)] for _ in range(2))
    cases = [normal(RANKS, n) for n in (3, 12, 7, 2)]

    def work(rank: int) -> None:
        receive, send = rings[rank][0], rings[(rank + 1) % RANKS][1]
        try:
            done = [reduced(lab, rank, i, case[rank].copy(), send, receive) for i, case in enumerate(cases)]
            results[rank][1].send(("", done))
        except Wrong as wrong:
            results[rank][1].send((str(wrong), []))

    processes = [fork.Process(target=work, args=(rank,), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    ended = [result.recv() if result.poll(3 * PATIENCE) else ("it has not ended", []) for result, _ in results]
    for process in processes:
        process.kill()
        process.join()
    for rank, (wrong, _) in enumerate(ended):
        if wrong and "waits" not in wrong:
            raise Wrong(f"rank {rank}: {wrong}")
    for rank, (wrong, _) in enumerate(ended):  # who waits may do so because of another rank's mistake
        if wrong:
            raise Wrong(f"rank {rank}: {wrong}")
    for case, *arrays in zip(cases, *[arrays for _, arrays in ended], strict=True):
        n = case.shape[1]
        for rank, (x, sent) in enumerate(arrays):
            want = case.astype(np.float64).sum(axis=0)
            wrong = np.flatnonzero(abs(x - want) > KERNEL_FP32)
            if wrong.size:
                i = int(wrong[0])
                raise Wrong(f"n = {n}, rank {rank}: x[{i}]: expected {number(want[i])}, got {number(x[i])}")
            if x.tobytes() != arrays[0][0].tobytes():
                raise Wrong(f"n = {n}: ranks 0 and {rank} have sums with different bits")
            most = 2 * (RANKS - 1) * ceil_div(n, RANKS)
            if sent > most:
                raise Wrong(f"n = {n}: the sums are right, but rank {rank} has sent {sent} numbers; {most} are enough")


def reduced(
    lab: Lab, rank: int, case: int, x: np.ndarray, send: Connection, receive: Connection
) -> tuple[np.ndarray, int]:
    """x after the learner's all_reduce, and how many numbers this rank has sent. A rank may be a case ahead."""
    sent, before = 0, (rank - 1) % RANKS

    def send_copy(array: np.ndarray) -> None:
        nonlocal sent
        sent += np.size(array)
        send.send((case, np.array(array)))

    def wait_for() -> np.ndarray:
        if not receive.poll(PATIENCE):
            raise TimeoutError(f"it waits for rank {before}, which sends nothing")
        of_case, array = receive.recv()
        if of_case != case:
            raise RuntimeError(f"rank {before} has sent more arrays than this rank has received")
        return array

    lab.call("all_reduce", rank, RANKS, x, send_copy, wait_for)
    return x, sent


def tanh_layers(weights: np.ndarray) -> tuple[list[tuple[Callable, Callable]], list[int]]:
    """Layers x + w tanh(x), forward and backward, which make one array each; and how often each has run forward."""
    runs = [0] * len(weights)

    def layer(l: int, w: float) -> tuple[Callable, Callable]:
        def forward(x: np.ndarray) -> np.ndarray:
            runs[l] += 1
            out = np.tanh(x)
            out *= w
            out += x
            return out

        def backward(x: np.ndarray, dout: np.ndarray) -> np.ndarray:
            dx = np.tanh(x)
            dx *= dx
            dx -= 1
            dx *= -w
            dx += 1
            dx *= dout
            return dx

        return forward, backward

    return [layer(l, w) for l, w in enumerate(weights)], runs


def check_segments(lab: Lab) -> None:
    for L in 1, 2, 7, 16, 61:
        case, right = f"with {L} layer{'s' * (L > 1)}", f"with {L} layer{'s' * (L > 1)}: the gradient is right, but"
        x, want = normal(2, 512, 64).astype(np.float64)
        layers, runs = tanh_layers(normal(L).astype(np.float64))
        arguments, inputs = (x.copy(), want.copy(), layers), [x]
        for forward, _ in layers[:-1]:
            inputs.append(forward(inputs[-1]))
        for _, backward in reversed(layers):
            want = backward(inputs.pop(), want)
        runs[:] = [0] * L
        tracemalloc.start()
        try:
            got = lab.call("backward_through", *arguments, case=case)
            arrays = tracemalloc.get_traced_memory()[1] // x.nbytes
        finally:
            tracemalloc.stop()
        expect_matrix(f"{case}: the gradient of x", got, want)
        if max(runs) > 2:
            raise Wrong(f"{right} layer {np.argmax(runs)} has run forward {max(runs)} times; 2 are enough")
        if arrays > (enough := int(2 * L**0.5) + 3):
            raise Wrong(f"{right} {arrays} arrays were in memory at a time; {enough} are enough")


class Block:
    """A producer and two consumers. They take turns in a random order, in which copies come and products end, too.
    Wrong where one reads or overwrites what it must not, or nobody can go on."""

    def __init__(self, lab: Lab, case: str, tiles: int, steps: int, stages: int):
        self.lab, self.case, self.steps, self.total = lab, case, steps, tiles * steps
        self.stages = [Stage() for _ in range(stages)]
        self.roles = {"the producer": "producer", "consumer 0": "consumer", "consumer 1": "consumer"}
        self.turns = {who: lab.call(role, tiles, steps, stages, case=case) for who, role in self.roles.items()}
        self.state = {who: Turn() for who in self.roles}

    def wrong(self, text: str) -> Wrong:
        return Wrong(f"{self.case}: {text}")

    def run(self, rng: np.random.Generator, actors: tuple[str, ...]) -> None:
        """Until nobody of the actors can go on. Copies come and products end at random times in between."""
        while True:
            able = [(self.step, who) for who in actors if self.can_go_on(who)]
            able += [(self.arrives, stage) for stage in self.stages if stage.coming]
            able += [(self.ends, who) for who in actors if self.state[who].under_way]
            if not able:
                return
            act, on = able[rng.integers(len(able))]
            act(on)

    def can_go_on(self, who: str) -> bool:
        turn = self.state[who]
        if turn.instruction is None and not turn.over:
            turn.instruction = self.lab.run(next, self.turns[who], None, case=self.case)
            turn.over = turn.instruction is None
        if turn.instruction is None:
            return False
        stages = range(len(self.stages))
        what, *of = turn.instruction if isinstance(turn.instruction, tuple) and turn.instruction else (None,)
        if what == "wait" and len(of) == 3 and of[0] in ("full", "empty") and of[1] in stages and of[2] in (0, 1):
            return self.stages[of[1]].phases[of[0]] % 2 != of[2]
        if what == "finish" and len(of) == 1 and isinstance(of[0], int) and of[0] >= 0:
            return len(turn.under_way) <= of[0]
        if what in ("copy", "start", "arrive") and len(of) == 1 and of[0] in stages or what == "store" and not of:
            return True
        raise self.wrong(f"{who} yields {turn.instruction!r}, which is no instruction")

    def step(self, who: str) -> None:
        turn, (what, *of) = self.state[who], self.state[who].instruction
        turn.instruction = None
        if what == "copy":
            self.copy(self.stages[of[0]], of[0])
        elif what == "start":
            stage = self.stages[of[0]]
            if stage.coming or stage.pair != turn.started:
                there = "which is still coming" if stage.coming else f"where pair {stage.pair} is"
                raise self.wrong(f"{who} starts the product of pair {turn.started} in stage {of[0]}, {there}")
            turn.under_way.append(of[0])
            turn.started, turn.most = turn.started + 1, max(turn.most, len(turn.under_way))
        elif what == "arrive":
            if of[0] in turn.under_way:
                raise self.wrong(f"{who} arrives at empty[{of[0]}] while its product still reads this stage")
            self.stages[of[0]].arrived += 1
            if self.stages[of[0]].arrived == 2:
                self.stages[of[0]].arrived = 0
                self.stages[of[0]].phases["empty"] += 1
        elif what == "store":
            turn.stored += 1
            if turn.under_way or turn.started != turn.stored * self.steps:
                done = turn.started - len(turn.under_way)
                raise self.wrong(f"{who} stores tile {turn.stored - 1} when {done} products are done")

    def copy(self, stage: "Stage", number: int) -> None:
        pair = self.state["the producer"].started
        if pair == self.total:
            raise self.wrong(f"the producer asks for pair {pair}: there are {self.total}")
        for who in "consumer 0", "consumer 1":
            turn = self.state[who]
            if stage.pair is not None and turn.started - len(turn.under_way) <= stage.pair:
                before = f"pair {stage.pair} in stage {number}, which {who} has not read"
                raise self.wrong(f"pair {pair} overwrites {before}")
        stage.pair, stage.coming = pair, True
        self.state["the producer"].started += 1

    def arrives(self, stage: "Stage") -> None:
        stage.coming = False
        stage.phases["full"] += 1

    def ends(self, who: str) -> None:
        self.state[who].under_way.pop(0)

    def finished(self) -> None:
        """Wrong if somebody waits, or has left something undone."""
        waiting = [f"{who} at {turn.instruction}" for who, turn in self.state.items() if turn.instruction]
        if waiting:
            raise self.wrong("nobody can go on: " + ", ".join(waiting))
        for who, turn in self.state.items():
            if turn.started < self.total or (turn.stored * self.steps < self.total and who != "the producer"):
                raise self.wrong(f"{who} ends after {turn.started} of {self.total} pairs and {turn.stored} tiles")


@dataclass
class Stage:
    """pair: the number of the one that is in it or is coming. arrived: of the consumers, in this phase of "empty"."""

    pair: int | None = None
    coming: bool = False
    arrived: int = 0
    phases: dict[str, int] = field(default_factory=lambda: {"full": 0, "empty": 0})


@dataclass
class Turn:
    """A producer or consumer: what it wants to do next, and how many pairs it has started. under_way: stages that its
    products read, and the most at a time."""

    instruction: tuple | None = None
    over: bool = False
    started: int = 0
    stored: int = 0
    under_way: list[int] = field(default_factory=list)
    most: int = 0


def check_stages(lab: Lab) -> None:
    for tiles, steps, stages in (1, 4, 4), (1, 7, 2), (3, 5, 4), (2, 6, 3), (3, 1, 2):
        case = f"with {tiles} tile{'s' * (tiles > 1)} of {steps} pair{'s' * (steps > 1)} and {stages} stages"
        most = [0, 0]  # products under way, of each consumer
        for seed in range(40):
            block = Block(lab, case, tiles, steps, stages)
            block.run(np.random.default_rng(seed), tuple(block.roles))
            block.finished()
            most = [max(m, block.state[f"consumer {i}"].most) for i, m in enumerate(most)]
        if min(most) < min(2, steps):
            raise Wrong(f"{case}: the sums are right, but a consumer has only one product under way at a time")
        block = Block(lab, case, tiles, steps, stages)
        block.run(np.random.default_rng(0), ("the producer",))
        if (ahead := block.state["the producer"].started) < min(stages, block.total):
            raise Wrong(f"{case}: the sums are right, but the producer copies only {ahead} of {stages} stages ahead")


def check_one_byte(lab: Lab) -> None:
    q = np.arange(256, dtype=np.uint8)
    expect_all("numbers_of, byte 0x{:02x}", q, lab.call("numbers_of", q.copy()), from_e4m3(q))
    for largest, want in (
        (448, 1), (448.1, 2), (-449, 2), (224, 0.5), (1, 2.0**-8), (-3e-7, 2.0**-30), (3e38, 2.0**120),
        (np.nan, np.nan), (-np.inf, np.nan),
    ):  # fmt: skip
        what = f"scale_of, largest number {largest:g}"
        got = lab.call("scale_of", np.array([[0, largest], [largest / 3, 0]], np.float32), case=what)
        expect_all(what, q[:1], np.atleast_1d(got), np.array([want]))
    numbers = from_e4m3(q[:127]).astype(np.float64)
    middle = (numbers[:-1] + numbers[1:]) / 2
    sizes = np.concatenate([numbers, (1 - 2.0**-20) * middle, (1 + 2.0**-20) * middle, [464, 1e6], abs(normal(500))])
    nearest = np.concatenate([np.searchsorted(middle, sizes), np.arange(126) + np.arange(126) % 2])
    x, want = np.concatenate([sizes, middle]), numbers[nearest]
    x, want = np.concatenate([x, -x]), np.concatenate([want, -want])
    for scale in 1.0, 2.0**-30, 32.0:
        what = f"quantize, {{:.9g}} with scale {scale:g}"
        got = lab.call("quantize", x * scale, scale, case=f"quantize with scale {scale:g}")
        if getattr(got, "dtype", None) != np.uint8:
            raise Wrong("quantize has to return uint8")
        expect_all(what, x * scale, from_e4m3(got), want)
    a, b = (normal(N, 16).argsort(axis=None).reshape(N, 16).astype(np.uint8) for N in (5, 7))
    want = 2.0**-7 * (from_e4m3(a).astype(np.float64) @ from_e4m3(b).T)
    expect_matrix("product", lab.call("product", a.copy(), 0.25, b.copy(), 2.0**-5), want)


def expect_all(what: str, inputs: np.ndarray, got, want: np.ndarray) -> None:
    """Raises Wrong unless a function's results for the inputs are those wanted. what: names the first input that has
    another, which takes the place of {}."""
    if np.shape(got) != want.shape:
        name = what.partition(",")[0]
        raise Wrong(f"{name}: expected an array {want.shape}, got {np.shape(got) or type(got).__name__}")
    wrong = np.flatnonzero((got != want) & ((got == got) | (want == want)))
    if wrong.size:
        i = wrong[0]
        raise Wrong(f"{what.format(inputs[i])}: expected {number(want[i])}, got {number(got[i])}")


if __name__ == "__main__":
    run_program(main)

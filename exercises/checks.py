"""What each exercise must do: check_<name>(lab) raises Wrong with what is wrong; a few return a remark.

    python exercises/checks.py NUMBER FILE RESULT     # for check.py: writes [what is wrong, remark] to RESULT, as JSON,
                                                      # and what a kernel's last launch did to FILE's name with .html

Results are compared with NumPy's. Kernels run on the CPU device with warps of 32 lanes. If the compiler is GCC, the
microscope watches every access. What kernels write begins as UNWRITTEN and has more of it around, and what they read
has NaNs around. So an element that no thread wrote shows, and so does an access where none must be. There is so much
around that a wrong index seldom leads past it. Where it does, or past an array in shared memory, the launch fails.
"""

import json
import os
import queue
import re
import resource
import shlex
import sys
import traceback
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import device
import kernels.adamw
import kernels.attention
import kernels.gelu
import kernels.layernorm
import kernels.reduce
from dev.microscope.report import lines_of, page_of, race_lines, thread_of, write_page
from dev.microscope.watch import BARRIER, LANES, LOAD, MEETING, SECTOR, Watched, lanes_of, use_microscope, watch_kernel
from device import Source, ceil_div, cpp, kernel_declarations
from device.errors import UserError
from device.fp8 import from_e4m3
from doc.ladder import TF32, place_arrays, references, relative_error, text_of
from doc.rungs import TOPICS, Rung, adamw_step
from doc.rungs import rung as rung_of
from exercises.cut import EXERCISES, HERE, Exercise
from llmc.run.program import run_program

import numpy as np

AROUND = 1 << 18            # elements before and after what a kernel reads or writes
UNWRITTEN = 0x4EADBEEF      # as float32 1457485696.0: far from all that is to be computed
OUTSIDE = 0x7FEDBEEF        # as float32 a NaN: another number, so that it shows also where it is copied to
MEMORY = 2 << 30            # bytes that a check may have: a loop without end that is watched wants ever more
MOST_ACCESSES = 10_000_000  # of lanes, that a check can keep
ROUNDING = 2e-5             # of 1 + the value: several roundings to fp32, and the sums of a few hundred numbers
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
NULL = "a null pointer was followed, perhaps by an instruction of a whole warp that a lane has left before"
AS_WRITTEN = "-fno-tree-sink"  # for GCC: a read stays in front of the guard, if it was written there


class Wrong(Exception):
    """What is wrong with a solution, in lines for the learner."""


def main() -> None:
    number, file, result = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    found = run_check(EXERCISES[int(number) - 1], Path(file), Path(file).with_suffix(".html"))
    Path(result).write_text(json.dumps(found), "utf-8")


def run_check(exercise: Exercise, path: Path, picture: Path | None = None) -> tuple[str, str]:
    """What is wrong with the solution in a file, empty where nothing is; and a remark on one that is right. The
    microscope's page of its last launch goes to `picture`, if there was one."""
    prepare(exercise)
    lab = Lab(path, exercise.watched())
    try:
        lab.load()
        return "", globals()[f"check_{exercise.name}"](lab) or ""
    except Wrong as wrong:
        return f"{lab.case}: {wrong}" if lab.case else str(wrong), ""
    finally:
        if picture and lab.watched:
            write_page(picture, path.stem, [page_of(one) for one in lab.watched])


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


def is_ours(array) -> bool:
    """Whether something is an array of `output` or `given`, or a part of one."""
    base = getattr(array, "base", None)
    return isinstance(base, np.ndarray) and base.dtype == np.uint32 and base.size > 2 * AROUND


def normal(*shape: int) -> np.ndarray:
    """Random numbers that are the same on every run, float32."""
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def shown(x, digits: int = 7) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(shown(each, digits) for each in x)})"
    if isinstance(x, np.ndarray) and x.shape:
        return f"an array {x.shape}"
    return f"{x:.{digits}g}" if isinstance(x, int | float | np.number) else repr(x)


def both_shown(want, got) -> tuple[str, str]:
    """With so many digits that one sees the difference."""
    digits = 17 if shown(want) == shown(got) else 7
    return shown(want, digits), shown(got, digits)


# ---- a solution


class Lab:
    """A solution in a file, CUDA C++ or Python. microscope: whether every access of its kernels is watched."""

    def __init__(self, path: Path, microscope: bool = False):
        self.path, self.microscope = path, microscope
        self.case = ""                    # of several, which is being checked, in words
        self.watched: list[Watched] = []  # the last launches of its kernels
        self.scratch: dict[str, np.ndarray] = {}  # that launchers have asked for last, by its purpose
        self.lines = path.read_text("utf-8").splitlines()

    def load(self) -> None:
        """Compile the file, or run it."""
        self.names: dict = {}
        try:
            if self.path.suffix == ".cu":
                cpp.compile_source(self.path)
            else:
                self.run(exec, compile("\n".join(self.lines) + "\n", str(self.path), "exec"), self.names)
        except SyntaxError as error:
            raise Wrong(f"line {error.lineno} is not Python: {error.msg}\n{self.quote(error.lineno)}") from None
        except UserError as error:
            found = re.search(r"^(.*?):(\d+):.*?error: (.*)$", str(error), re.MULTILINE)
            if not found:
                raise
            line = self.quote(int(found[2])) if found[1] == str(self.path) else found[1]
            raise Wrong(f"line {found[2]} does not compile: {found[3]}\n{line}") from None

    def quote(self, line: int | None) -> str:
        return f"    {line}: {self.lines[line - 1].strip()}" if 0 < (line or 0) <= len(self.lines) else ""

    # Python

    def call(self, name: str, *arguments, parts: int = 0):
        """What a Python function of the solution returns: so many results, if several."""
        if name not in self.names:
            raise Wrong(f"the file has no function {name} any more")
        result = self.run(self.names[name], *arguments)
        if parts and not (isinstance(result, tuple | list) and len(result) == parts):
            raise Wrong(f"{name} has to return {parts} results, not {type(result).__name__}")
        return result

    def run(self, function: Callable, *arguments):
        try:
            with np.errstate(over="raise", invalid="raise", divide="raise"):
                return function(*arguments)
        except (Exception, SystemExit) as error:
            if isinstance(error, Wrong | SyntaxError):
                raise
            frames = traceback.extract_tb(error.__traceback__)
            line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(self.path)), 0)
            if isinstance(error, NotImplementedError):
                raise Wrong(f"nothing is written yet in line {line}") from None
            raise Wrong(f"line {line}: {type(error).__name__}: {error}\n{self.quote(line)}".rstrip()) from None

    # kernels

    def launch(self, name: str, grid: tuple, block: tuple, *arguments) -> None:
        source = Source(self.path)
        with self.in_place_of(source):
            source.launch(name, grid, block, arguments)

    @contextmanager
    def in_place_of(self, source: Source) -> Iterator[None]:
        """Within the block, launchers find the kernels of `source` in the solution's file, and their scratch is an
        output."""
        path, scratch_of_device, self.watched = source.path, device.scratch, []

        def observer(name: str, arguments: dict, work: Callable[[], None]) -> None:
            def checked() -> None:
                try:
                    work()
                except cpp.KernelError as error:
                    raise self.failed(str(error), arguments) from None

            if self.microscope and name in kernel_declarations(self.path):
                around = {key: 4 * AROUND for key, value in arguments.items() if is_ours(value)}
                self.watched.append(watch_kernel(name, arguments, checked, self.path, around=around))
                self.refuse_accesses(self.watched[-1])
            else:
                checked()
            self.refuse_writes_around(arguments)

        def scratch(purpose: str, shape: tuple[int, ...], dtype) -> np.ndarray:
            self.scratch[purpose] = output(*shape, dtype=dtype)
            return self.scratch[purpose]

        source.path, device.scratch = self.path, scratch
        try:
            with device.observe(observer):
                yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # a kernel is gone, or takes something else
            raise Wrong(f"the kernels' names and parameters must stay as they were: {error}") from None
        finally:
            source.path, device.scratch = path, scratch_of_device

    def failed(self, text: str, arguments: dict) -> Wrong:
        """A launch that failed, with the lines that it names, or the element that an address would be."""
        text = re.sub(r" \(LLMC_CPU_\w+=1 .*\)$", "", text).replace("invalid memory access at address (nil)", NULL)
        if address := re.search(r"invalid memory access at address (0x[0-9a-f]+)", text):
            at, arrays = int(address[1], 16), {k: x for k, x in arguments.items() if isinstance(x, np.ndarray)}
            name = min(arrays, key=lambda name: abs(at - device.address(arrays[name])))
            bytes_off = (at - device.address(arrays[name]) + 2**63) % 2**64 - 2**63  # an address wraps below 0
            text = text.replace(address[0], f"an index far outside: {name}[{bytes_off // arrays[name].itemsize}], if"
                                            f" {name} was meant, which has {arrays[name].size} elements")  # fmt: skip
        lines = sorted(set(map(int, re.findall(rf"(?: at |\(){re.escape(self.path.name)}:(\d+)", text))))
        return Wrong("\n".join([text, *map(self.quote, lines)]))

    def refuse_writes_around(self, arguments: dict) -> None:
        """For a compiler without the microscope, which sees reads, too."""
        for name, array in arguments.items():
            if is_ours(array):
                changed = np.flatnonzero(array.base != array.base[0]) - AROUND
                changed = changed[(changed < 0) | (changed >= array.base.size - 2 * AROUND)]
                if changed.size:
                    raise Wrong(f"{name}[{changed[0]}] was written: that is outside of the array")

    def refuse_accesses(self, one: Watched) -> None:
        """Wrong where threads touch what is outside of the arrays, wait at different barriers, or race."""
        steps = one.steps[one.steps["array"] >= 0]
        size = np.array([1 << 62 if array.shared else array.bytes for array in one.arrays])[steps["array"]][:, None]
        strays = lanes_of(steps) & ((steps["offset"] + steps["size"][:, None] > size) | (steps["offset"] < 0))
        if strays.any():
            i, lane = np.argwhere(strays)[0]
            array, offset = one.arrays[steps[i]["array"]], int(steps[i]["offset"][lane])
            at = (offset if offset < 0 else offset + int(steps[i]["size"]) - 1) // np.dtype(array.dtype).itemsize
            raise Wrong(f"{array.name}[{at}] is outside of the array, which has {array.bytes // 4} elements, and was"
                        f" {self.by_whom(one, steps[i], lane)}")  # fmt: skip

        barriers = np.unique(one.steps[one.steps["kind"] == BARRIER][["block", "epoch", "pc"]])
        same = np.flatnonzero(np.all([barriers[key][1:] == barriers[key][:-1] for key in ("block", "epoch")], axis=0))
        if same.size:
            raise Wrong("threads of one block wait at two barriers at once, because a branch has parted them\n"
                        + self.quote_places(one, barriers["pc"][same[0] : same[0] + 2]))  # fmt: skip

        if races := race_lines(one):
            pcs = np.concatenate([one.races[:2]["one"]["pc"], one.races[:2]["other"]["pc"]])
            told = "\n".join([self.quote_places(one, pcs), *races[:2]])
            raise Wrong("threads race: they touch one address, one of them writes, and no barrier lies between (none"
                        f" lies between blocks)\n{told}")  # fmt: skip

    def quote_places(self, one: Watched, pcs) -> str:
        """The learner's lines of these addresses."""
        chains = [(*one.places[int(pc)].frames, ("", one.places[int(pc)].file, one.places[int(pc)].line)) for pc in pcs]
        lines = {next((n for _, file, n in chain if file == self.path.name), 0) for chain in chains} - {0}
        return "\n".join(map(self.quote, sorted(lines)))

    def by_whom(self, one: Watched, step: np.void, lane: int) -> str:
        done = "read" if step["kind"] == LOAD else "written"
        who = thread_of(one, {"thread": LANES * int(step["warp"]) + int(lane), "block": int(step["block"])})
        return f"{done} by {who}\n{self.quote_places(one, [step['pc']])}".rstrip()

    def steps_of(self, array: str) -> np.ndarray:
        """The accesses of the last launch to an array."""
        one = self.watched[-1]
        return one.steps[one.steps["array"] == [each.name for each in one.arrays].index(array)]

    # what is expected

    def expect(self, what: str, got, want, tolerance: float = 0.0, inputs: np.ndarray | None = None) -> None:
        """Wrong unless a result is this number or tuple, or, of a kernel's array `what` or a function's, each element
        is. tolerance: of 1 + the value's size. inputs: of a function of single numbers."""
        try:
            found = np.asarray(got, np.float64)
        except (TypeError, ValueError):
            found = np.array([])
        same_shape = found.shape == np.shape(want)
        good = close(found, np.asarray(want), tolerance) if same_shape else np.array(False)
        if good.all():
            return
        if not same_shape or not isinstance(want, np.ndarray):
            raise Wrong("{}: expected {}, got {}".format(what, *both_shown(want, got)))
        index = tuple(int(i) for i in np.argwhere(~good)[0])
        of = f" of {shown(inputs[index])}" if inputs is not None else ""
        expected, told = both_shown(want[index], found[index])
        told = f"got {told}"
        if is_ours(got):
            unwritten = got[index].view(np.uint32) == UNWRITTEN
            told = "nothing was written" if unwritten else told + self.writer(what, got, index)
        raise Wrong(f"{what}[{', '.join(map(str, index))}]{of}: expected {expected}, {told}")

    def writer(self, name: str, array: np.ndarray, index: tuple[int, ...]) -> str:
        """Which thread has written an element of a kernel's array, and in which line, if the microscope has seen it."""
        at = int(np.ravel_multi_index(index, array.shape)) * array.itemsize
        for one in reversed(self.watched):
            numbers = [i for i, each in enumerate(one.arrays) if each.name == name]
            steps = one.steps[np.isin(one.steps["array"], numbers) & (one.steps["kind"] != LOAD)]
            hit = lanes_of(steps) & (steps["offset"] <= at) & (at < steps["offset"] + steps["size"][:, None])
            if hit.any():
                i, lane = np.argwhere(hit)[-1]
                return f", {self.by_whom(one, steps[i], lane)}"
        return ""

    def at_most(self, what: str, count: float, most: float, line: int = 0) -> None:
        """Wrong if a right solution takes more of something than is needed."""
        if count > most:
            quoted = f"\n{self.quote(line)}" if line else ""
            raise Wrong(f"the numbers are right, but {what}: {count:g}, and {most:g} would do{quoted}")

    def expect_no_waste(self) -> None:
        """Wrong if an access has bank conflicts, or moves more sectors than its bytes fill."""
        for line in lines_of(self.watched[-1]):
            array = self.watched[-1].arrays[line.array]
            if array.shared:
                self.at_most(f"passes of an access to {array.name} (bank conflicts)", line.worst, 1, line.place.line)
            else:
                self.at_most(f"sectors of {array.name} that move", line.sectors, line.bytes // SECTOR, line.place.line)

    def expect_releases_after_reads(self, tile: int) -> None:
        """Wrong if a warp arrives before all its lanes have read their `tile` bytes. On the CPU device the numbers are
        right all the same: there no copy comes in between."""
        one = self.watched[-1]
        for block, warp in np.unique(self.steps_of("tiles")[["block", "warp"]]):
            steps = one.steps[(one.steps["block"] == block) & (one.steps["warp"] == warp)]
            loads = (steps["kind"] == LOAD) & np.isin(
                steps["array"], [i for i, array in enumerate(one.arrays) if array.name == "tiles"]
            )
            read = np.cumsum(np.where(loads, lanes_of(steps).sum(1) * steps["size"], 0))
            meetings = np.flatnonzero(steps["kind"] == MEETING)
            if not read[-1]:
                continue  # the producer's
            for number in range(read[-1] // tile):
                if number >= len(meetings) or read[meetings[number]] < (number + 1) * tile:
                    place = steps["pc"][np.flatnonzero(loads & (read > number * tile))[0]]
                    raise Wrong(f"the numbers are right, but warp {warp} of block {block} does not wait for its lanes"
                                f" between its reads of tile {number} and its arrival at `empty`: the next copy could"
                                f" overwrite what a lane still reads\n{self.quote_places(one, [place])}")  # fmt: skip


def close(found: np.ndarray, want: np.ndarray, tolerance: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        near = abs(found - want) <= tolerance * (1 + abs(want))
    return near | (found == want) | np.isnan(found) & np.isnan(want)


# ---- the exercises


def check_who_am_i(lab: Lab) -> None:
    who = output(5 * 64, dtype=np.int32)
    lab.launch("who_am_i_kernel", (5,), (64,), who)
    lab.expect("who", who, 1000 * (np.arange(320) // 64) + np.arange(320) % 64)


def check_guard(lab: Lab) -> None:
    for N in 1000, 256, 1:
        lab.case, x, out = f"N = {N}", given(normal(N)), output(N)
        lab.launch("twice_kernel", (ceil_div(N, 256),), (256,), out, x, N)
        lab.expect("out", out, 2.0 * x)


def check_plane(lab: Lab) -> None:
    for N, C in (8, 64), (10, 70), (3, 5):
        lab.case, x, bias, out = f"N = {N}, C = {C}", given(normal(N, C)), given(normal(C)), output(N, C)
        lab.launch("add_bias_kernel", (ceil_div(C, 32), ceil_div(N, 4)), (32, 4), out, x, bias, N, C)
        lab.expect("out", out, x + bias)


def check_neighbours(lab: Lab) -> None:
    x, out = given(normal(3 * 128)), output(3 * 128)
    lab.launch("neighbours_kernel", (3,), (128,), out, x)
    padded = np.pad(x.reshape(3, 128).astype(np.float64), ((0, 0), (1, 1)))
    lab.expect("out", out, (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]).reshape(-1), ROUNDING)
    lab.at_most("numbers of x that are read", lanes_of(lab.steps_of("x")).sum(), x.size)


def check_race(lab: Lab) -> str:
    R = 5
    x, out = given(normal(R, 128)), output(R)
    lab.launch("row_sums_kernel", (1,), (128,), out, x, R)
    lab.expect("out", out, x.astype(np.float64).sum(1), ROUNDING)
    steps = lab.watched[-1].steps
    barriers = np.count_nonzero((steps["warp"] == 0) & (steps["kind"] == BARRIER)) / R
    return f"{barriers:g} barriers per row; 8 are enough." if barriers > 8 else ""


def check_shuffle(lab: Lab) -> None:
    x, out = given(normal(3 * 64)), output(3 * 64)
    lab.launch("warp_sums_kernel", (3,), (64,), out, x)
    lab.expect("out", out, np.repeat(x.reshape(6, 32).astype(np.float64).sum(1), 32), ROUNDING)
    lab.expect("out", out, np.repeat(out[::32], 32))  # to the last bit
    lab.at_most("numbers of x that are read", lanes_of(lab.steps_of("x")).sum(), x.size)
    one = lab.watched[-1]
    shared = [i for i, array in enumerate(one.arrays) if array.shared]
    lab.at_most("accesses to shared memory", np.isin(one.steps["array"], shared).sum(), 0)
    shuffles = sum("shfl" in one.names[int(step["what"])] for step in one.steps if step["kind"] == MEETING)
    lab.at_most("shuffles of a warp, of which one may tell the sum", shuffles / 6, 6)


def check_sectors(lab: Lab) -> None:
    for lanes, size, first in (
        (32, 4, "4 * i"), (32, 4, "4 * i + 4"), (32, 4, "4 * (31 - i)"), (32, 4, "20"), (32, 4, "8 * i"),
        (32, 4, "4 * 768 * i"), (32, 16, "16 * i"), (32, 8, "8 * i + 8"), (5, 4, "4 * i"),
    ):  # fmt: skip
        addresses = [eval(first, {"i": i}) for i in range(lanes)]
        lab.case = f"lanes 0 to {lanes - 1} read {size} bytes, lane i from byte {first} on"
        sectors = {byte // SECTOR for address in addresses for byte in range(address, address + size)}
        lab.expect("sectors", lab.call("sectors", addresses), len(sectors))


def check_banks(lab: Lab) -> None:
    def passes(words: list[int]) -> int:
        return max(Counter(word % 32 for word in set(words)).values())

    for word in "i", "5", "2 * i", "32 * i", "33 * i", "i % 4 * 32", "i // 2 + i % 2 * 64":
        words, lab.case = [eval(word, {"i": i}) for i in range(32)], f"lane i reads word {word}"
        lab.expect("passes", lab.call("passes", words), passes(words))
    lab.case = "lanes 0 to 2 read words 7, 39 and 8"
    lab.expect("passes", lab.call("passes", [7, 39, 8]), 2)
    for stride in range(1, 97):
        lab.case = f"stride {stride}"
        lab.expect("passes_of_stride", lab.call("passes_of_stride", stride), passes([stride * i for i in range(32)]))


def check_topic(
    lab: Lab, source: Source, name: str, *cases: dict[str, float], rung: Rung | None = None, tolerance: float = ROUNDING
) -> None:
    """By the arrays and the reference of a ladder, whose last rung, or this one, launches the kernels of `source`.
    cases: the topic's sizes, and numbers that take the place of its own."""

    def place(how: str, values: np.ndarray) -> np.ndarray:
        return output(*values.shape) if how in ("write", "scratch") else given(values)

    for case in cases:
        sizes = {key: case[key] for key in TOPICS[name].odd}
        topic = replace(TOPICS[name], numbers={key: case.get(key, x) for key, x in TOPICS[name].numbers.items()})
        lab.case, arrays = text_of(case), place_arrays(topic, sizes, place)
        with lab.in_place_of(source):
            (rung or topic.rungs[-1]).launch(source, arrays)
        for key, want in references(topic, sizes).items():
            lab.expect(key, getattr(arrays, key), want, tolerance)
            lab.expect(f"the relative error of {key}", relative_error(getattr(arrays, key), want), 0, TF32)


def check_bias_gradient(lab: Lab) -> None:
    N, C = 603, 70  # more rows than kernels/reduce.py adds up in one stage
    before, dout = normal(C), given(normal(N, C))
    rows, dbias = kernels.reduce.rows_per_chunk(N, multiple=8), given(before)
    with lab.in_place_of(kernels.reduce.cu):
        kernels.reduce.column_sum(dbias, dout, N, C)
    sums = np.add.reduceat(dout.astype(np.float64), range(0, N, rows))
    lab.expect("partials", lab.scratch["partials"].reshape(sums.shape), sums, ROUNDING)
    lab.expect("out0", dbias, before + sums.sum(0), 10 * ROUNDING)


def check_layernorm(lab: Lab) -> None:
    sizes = {"N": 18, "C": 64}, {"N": 17, "C": 5}, {"N": 17, "C": 1601}  # few rows have a kernel of their own
    check_topic(lab, kernels.layernorm.cu, "layernorm_forward", *sizes)


def check_tf32(lab: Lab) -> None:
    for x in 1.0, -1.0, 0.5, 1.5, 0.0, 3.140625, -6.5e-20:
        bits = int(np.float32(x).view(np.uint32))
        lab.expect(f"fields({x})", lab.call("fields", np.float32(x)), (bits >> 31, bits >> 23 & 255, bits % 2**23))
    middle = 1 + 2.0**-11  # between 1 and the next number of TF32
    beside = middle - 2.0**-23, middle + 2.0**-23
    special = [1, 1 + 2.0**-10, middle, -middle, *beside, 2 - 2.0**-23, 0.1, -1 / 3, 0, 1e-30]
    x = np.concatenate([np.array(special, np.float32), normal(500)])
    lab.expect("to_tf32", lab.call("to_tf32", x.copy()), rounded_to_tf32(x), inputs=x)


def rounded_to_tf32(x: np.ndarray) -> np.ndarray:
    """The nearest numbers of TF32, halfway away from zero, as float64."""
    share, exponent = np.frexp(x.astype(np.float64))  # x = share * 2^exponent, share from 1/2 on: 11 bits are kept
    return np.copysign(np.ldexp(np.floor(abs(share) * 2**11 + 0.5), exponent - 11), x)


def check_transpose(lab: Lab) -> None:
    for N, C in (70, 40), (64, 96):
        lab.case, x, out = f"N = {N}, C = {C}", given(normal(N, C)), output(C, N)
        lab.launch("transpose_tile_kernel", (ceil_div(C, 32), ceil_div(N, 32)), (32, 8), out, x, N, C)
        lab.expect("out", out, x.T)
    lab.expect_no_waste()  # of the matrix whose rows and columns are whole sectors


def check_gelu(lab: Lab) -> None:
    check_topic(lab, kernels.gelu.cu, "gelu_backward", {"N": 70, "C": 68}, {"N": 5, "C": 7}, tolerance=10 * ROUNDING)


def pair(x: np.ndarray) -> tuple[float, float]:
    """The largest number, and the sum of exponentials without its part."""
    return (float(x.max()), float(np.exp(x - x.max()).sum())) if x.size else (-np.inf, 0.0)


def check_online_softmax(lab: Lab) -> None:
    x = normal(40).astype(np.float64) * 3
    for what, values in ("rising", np.sort(x)), ("falling", np.sort(x)[::-1]), ("large", 1000 * x):
        for width in 1, 7, 40:
            state = -np.inf, 0.0
            for i in range(0, 40, width):
                seen, lab.case = values[: i + width], f"{what} numbers, {width} at a time, after {min(i + width, 40)}"
                state = lab.call("fold", *state, values[i : i + width].copy(), parts=2)
                lab.expect("fold", tuple(state), pair(seen), 1e-9)
    for a, b in (x[:9] - 800, x[9:]), (x[:9] + 800, x[9:]), (x[:0], x), (x, x[:0]), (x[:0], x[:0]):
        lab.case = f"merge of {shown(pair(a))} and {shown(pair(b))}"
        lab.expect("merge", tuple(lab.call("merge", pair(a), pair(b), parts=2)), pair(np.concatenate([a, b])), 1e-9)


def check_softmax(lab: Lab) -> None:
    cases = ({"H": 2, "T": T, "scale": scale} for T, scale in ((37, 0.125), (160, 1.0), (40, 60.0)))
    check_topic(lab, kernels.attention.cu, "softmax", *cases)


def tiles_of(k: np.ndarray, v: np.ndarray, width: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tiles of `width` rows, each in place of the one before, and NaNs in place of the last."""
    memory = np.empty((2, width, k.shape[1]))
    for i in range(0, len(k), width):
        rows = len(k[i : i + width])
        memory[...] = np.nan
        memory[0, :rows], memory[1, :rows] = k[i : i + width], v[i : i + width]
        yield memory[0, :rows], memory[1, :rows]
    memory[...] = np.nan


def peak_of(work: Callable) -> tuple:
    """What it returns, and the most bytes that NumPy has in the meantime."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def flash_cases(lab: Lab) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, float, int, tuple]]:
    """q, k, v, the scale, a tile's width, and by whole matrices p, out and lse."""
    q, k, v = (normal(i + 2, 8, 4)[i].astype(np.float64) for i in range(3))
    rising = np.concatenate([k[:4], 30 * k[4:]])
    for lab.case, q, k, scale, width in (  # noqa: B007, B020
        ("one tile", q[:3], k, 0.5, 8), ("two tiles", q[:3], k, 0.5, 4),
        ("two tiles, the second with larger scores", q, rising, 0.5, 4),
        ("tiles of 3 rows, large scores", q, 50 * k, 1.0, 3),
    ):  # fmt: skip
        s = scale * q @ k.T
        p = np.exp(s - s.max(1, keepdims=True))
        lse, p = s.max(1) + np.log(p.sum(1)), p / p.sum(1, keepdims=True)
        yield q, k, v, scale, width, (p, p @ v, lse)


def check_flash_forward(lab: Lab) -> None:
    for q, k, v, scale, width, (_, want_out, want_lse) in flash_cases(lab):
        out, lse = lab.call("flash_forward", q.copy(), tiles_of(k, v, width), scale, parts=2)
        lab.expect("lse", lse, want_lse, 1e-9)
        lab.expect("out", out, want_out, 1e-9)
    q, k, v = (normal(i + 2, 1024, 64)[i].astype(np.float64) for i in range(3))
    lab.case, q = "64 tiles of 16 keys", q[:8]
    _, peak = peak_of(lambda: lab.call("flash_forward", q, tiles_of(k, v, 16), 0.125, parts=2))
    lab.at_most("rows of 64 numbers in memory at a time", peak // k[0].nbytes, 256)


def check_flash_backward(lab: Lab) -> None:
    for q, k, v, scale, width, (p, out, lse) in flash_cases(lab):
        dout = normal(9, *q.shape)[8].astype(np.float64)
        dp = dout @ v.T
        ds = scale * p * (dp - (dp * p).sum(1, keepdims=True))
        tiles = tiles_of(k, v, width)
        dq, dkv = lab.call("flash_backward", q.copy(), out.copy(), lse.copy(), dout.copy(), tiles, scale, parts=2)
        dk, dv = lab.run(lambda: [np.concatenate([pair[i] for pair in dkv]) for i in (0, 1)])  # noqa: B023
        lab.expect("the number of pairs dk, dv", len(dkv), ceil_div(len(k), width))
        for name, got, want in ("dq", dq, ds @ k), ("dk", dk, ds.T @ q), ("dv", dv, p.T @ dout):
            lab.expect(name, got, want, 1e-9)


FRAGMENTS = {  # row and column of a lane's elements, and how many it has
    "a": (lambda lane, i: (lane // 4 + i % 2 * 8, lane % 4 + i // 2 * 4), 4),
    "b": (lambda lane, i: (lane % 4 + 4 * i, lane // 4), 2),
    "c": (lambda lane, i: (lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2), 4),
}


def check_fragments(lab: Lab) -> None:
    for matrix, (place, count) in FRAGMENTS.items():
        for lane, i in np.ndindex(LANES, count):
            lab.expect(f"{matrix}_at({lane}, {i})", lab.call(f"{matrix}_at", lane, i), place(lane, i))
    for lane, i in np.ndindex(LANES, 4):
        place = FRAGMENTS["c"][0](lane, i)
        lab.expect(f"holder_of_c{place}", lab.call("holder_of_c", *place), (lane, i))


def check_adamw(lab: Lab) -> None:
    n, scale, recipe = 1030, 0.5, {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 0.01, "weight_decay": 0.1}
    arrays = {"params": given(normal(n)), "m": given(np.zeros(n)), "v": given(np.zeros(n))}
    want, norm = {name: array.astype(np.float64) for name, array in arrays.items()}, given(np.array([0, scale, 0, 0]))
    for t in 1, 2, 3:
        lab.case, grads = f"step {t}", normal(t, n)[t - 1]
        with lab.in_place_of(kernels.adamw.cu):
            kernels.adamw.adamw(grads=given(grads), norm=norm, n=n, t=t, **arrays, **recipe)
        want = adamw_step(SimpleNamespace(**want, **recipe, grads=scale * grads.astype(np.float64), t=t))
        for name in "m", "v", "params":
            lab.expect(name, arrays[name], want[name], ROUNDING)


def check_tensor_cores(lab: Lab) -> None:
    whole = [(*sizes, 4, True) for sizes in ((32, 16, 8), (64, 48, 24), (37, 21, 13))]
    for M, N, K, size, is_whole in (*whole, (32, 16, 40, 1, False)):
        lab.case = f"M = {M}, N = {N}, K = {K}, {'whole' if is_whole else 'any'} numbers"
        a, b, out = size * normal(M, K), size * normal(K, N), output(M, N)
        a, b = (np.rint(a), np.rint(b)) if is_whole else (a, b)
        lab.launch("product_kernel", (ceil_div(N, 16), ceil_div(M, 32)), (128,), out, given(a), given(b), M, N, K)
        lab.expect("out", out, rounded_to_tf32(a) @ rounded_to_tf32(b), 0.0 if is_whole else ROUNDING)


def check_swizzle(lab: Lab) -> None:
    N, C = 64, 96
    x, out = given(normal(N, C)), output(C, N)
    lab.launch("swizzled_transpose_kernel", (C // 32, N // 32), (256,), out, x, N, C)
    lab.expect("out", out, x.T)
    lab.at_most("bytes of shared memory", sum(one.bytes for one in lab.watched[-1].arrays if one.shared), 4096)
    lab.expect_no_waste()


def to_bf16(x: np.ndarray) -> np.ndarray:
    return device.from_bf16(device.to_bf16(x)).reshape(np.shape(x))


def check_bf16_sum(lab: Lab) -> None:
    def refuse(x) -> None:
        raise Wrong("stops_at adds up in bf16, step by step: write a formula")

    bf16, lab.names["bf16"] = lab.names.get("bf16"), refuse
    for term in 1.0, 0.25, 64.0, 1.5, 0.02001953125, 3.0, 1.0078125, 1.9921875:
        total, before = np.float32(0), np.float32(-1)
        while total != before:
            total, before = to_bf16(total + np.float32(term))[()], total
        lab.expect(f"stops_at({term:g})", lab.call("stops_at", term), float(total))
    lab.names["bf16"] = bf16
    for name, share in ("sum_in_fp32", 2.0**-8), ("sum_in_bf16", 0.02):
        for lab.case, x in (
            ("4096 ones", np.ones(4096)), ("1, 1, 1 and 0.25", np.array([1, 1, 1, 0.25])), ("one number", np.ones(1)),
            ("65536 numbers", to_bf16(abs(normal(65536)))),
        ):  # fmt: skip
            got, want = lab.call(name, x.astype(np.float32)), float(x.astype(np.float64).sum())
            lab.expect(name, got, want, share * want / (1 + want))
            lab.expect(f"{name}, as bf16 has it", got, float(to_bf16(np.float32(got))))
    numbers = to_bf16(abs(normal(16, 256)))
    exact = to_bf16(numbers.astype(np.float64).sum(axis=1))
    if [lab.call("sum_in_bf16", x.copy()) for x in numbers] == exact.tolist():
        raise Wrong("sum_in_bf16 adds in more than bf16: each of 16 sums of 256 numbers is as if it were rounded once")


RANKS = 3
PATIENCE = 2  # seconds that a rank waits for what another one sends


def check_ring(lab: Lab) -> None:
    """Each rank is a thread, and has a queue into which the rank before it sends."""
    for n in 3, 12, 7, 2:
        lab.case, x, queues, sent = f"n = {n}", normal(RANKS, n), [queue.Queue() for _ in range(RANKS)], [0] * RANKS
        want = x.astype(np.float64).sum(axis=0)

        def work(rank: int, x=x, queues=queues, sent=sent) -> str:
            def send(array: np.ndarray) -> None:
                sent[rank] += np.size(array)
                queues[(rank + 1) % RANKS].put(np.array(array))

            def receive() -> np.ndarray:
                try:
                    return queues[rank].get(timeout=PATIENCE)
                except queue.Empty:
                    raise TimeoutError(f"it waits for rank {(rank - 1) % RANKS}, which sends nothing") from None

            try:
                lab.call("all_reduce", rank, RANKS, x[rank], send, receive)
            except Wrong as wrong:
                return f"rank {rank}: {wrong}"
            return ""

        with ThreadPoolExecutor(RANKS) as pool:
            told = sorted(filter(None, pool.map(work, range(RANKS))), key=lambda text: "waits" in text)
        if told:  # who waits may do so because of another rank's mistake
            raise Wrong(told[0])
        for rank in range(RANKS):
            lab.expect(f"rank {rank}'s x", x[rank], want, ROUNDING)
            lab.expect(f"rank {rank}'s x, to the last bit as rank 0's", x[rank], x[0])
            lab.at_most(f"arrays that rank {rank} has not received", queues[rank].qsize(), 0)
            lab.at_most(f"numbers that rank {rank} has sent", sent[rank], 2 * (RANKS - 1) * ceil_div(n, RANKS))


def check_flash_attention(lab: Lab) -> str:
    """With the arrays of the ladder's rungs."""
    topic, kernel = TOPICS["flash_attention"], "flash_attention_kernel"
    rung = rung_of(kernel, lambda a: (a.B * a.NH, ceil_div(a.T, 64)), (128,))
    cases, pairs = (topic.odd, topic.fours, topic.round), lambda T: T * (T + 1) / 2  # of a query and a key
    lab.microscope = False
    check_topic(lab, Source(lab.path), "flash_attention", *cases, rung=rung, tolerance=20 * TF32)
    lab.microscope = True
    few = {"B": 1, "T": 16, "NH": 1}
    check_topic(lab, Source(lab.path), "flash_attention", few, rung=rung, tolerance=20 * TF32)
    if lanes_of(lab.watched[-1].steps).sum() / pairs(16) * pairs(topic.round["T"]) > MOST_ACCESSES:
        return "It loads so often that the check cannot watch all of it. Next: keep in registers what is used again."
    check_topic(lab, Source(lab.path), "flash_attention", *cases, rung=rung, tolerance=20 * TF32)
    (one,) = lab.watched
    lines = list(lines_of(one))
    shared = [line for line in lines if one.arrays[line.array].shared]
    moved = SECTOR * sum(line.sectors for line in lines) / topic.bytes(SimpleNamespace(**topic.round))
    passes = sum(line.passes for line in shared) / (sum(line.least_passes for line in shared) or 1)
    uses_mma = any("mma" in one.names[int(step["what"])] for step in one.steps if step["kind"] == MEETING)
    steps = ("tiles in shared memory", not shared), ("tensor cores", not uses_mma), ("a swizzle", passes > 1.005)
    left = next((f"Next: {step}." for step, missing in steps if missing), "It has all steps that the check can see.")
    return f"It moves {moved:.2f} bytes for each that must move, in {passes:.2f} passes for each needed. {left}"


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
        lab.case, (x, want) = f"layers: {L}", normal(2, 512, 64).astype(np.float64)
        layers, runs = tanh_layers(normal(L).astype(np.float64))
        arguments, inputs = (x.copy(), want.copy(), layers), [x]
        for forward, _ in layers[:-1]:
            inputs.append(forward(inputs[-1]))
        for _, backward in reversed(layers):
            want = backward(inputs.pop(), want)
        runs[:] = [0] * L
        given = [array.copy() for array in arguments[:2]]
        got, peak = peak_of(lambda: lab.call("backward_through", *arguments))  # noqa: B023
        lab.expect("the gradient of x", got, want, ROUNDING)
        for name, array, before in zip(("x", "dout"), arguments, given, strict=False):
            lab.expect(f"{name}, which may not change", array, before)
        lab.at_most("times that a layer has run forward", max(runs), 2)
        lab.at_most("arrays in memory at a time", peak // x.nbytes, int(2 * L**0.5) + 3)


class Block:
    """A producer and two consumers. They take turns in a random order, in which copies come and products end, too.
    Wrong where one reads or overwrites what it must not, or nobody can go on."""

    def __init__(self, lab: Lab, tiles: int, steps: int, stages: int):
        self.lab, self.steps, self.total = lab, steps, tiles * steps
        phases = {"pair": None, "coming": False, "arrived": 0, "full": 0, "empty": 0}  # the last two count their ends
        self.stages = [SimpleNamespace(number=i, **phases) for i in range(stages)]
        self.producer, *self.consumers = self.roles = [
            SimpleNamespace(name=name, turns=lab.call(name.split()[0], tiles, steps, stages), instruction=None,
                            started=0, stored=0, under_way=[], pending=0, least=2)
            for name in ("producer", "consumer 0", "consumer 1")
        ]  # fmt: skip

    def run(self, rng: np.random.Generator, *roles: SimpleNamespace) -> None:
        """Until none of the roles can go on. Copies come and products end at random times in between."""
        while True:
            able = [(self.step, role) for role in roles if self.can_go_on(role)]
            able += [(self.arrives, stage) for stage in self.stages if stage.coming]
            able += [(lambda role: role.under_way.pop(0), role) for role in roles if role.under_way]
            if not able:
                return
            act, on = able[rng.integers(len(able))]
            act(on)

    def arrives(self, stage: SimpleNamespace) -> None:
        stage.coming = False
        stage.full += 1

    def can_go_on(self, role: SimpleNamespace) -> bool:
        if role.instruction is None:
            role.instruction = self.lab.run(next, role.turns, ("end",))
        stages = range(len(self.stages))
        kind, *of = role.instruction if isinstance(role.instruction, tuple) and role.instruction else ("",)
        if kind == "wait" and len(of) == 3 and of[0] in ("full", "empty") and of[1] in stages and of[2] in (0, 1):
            return getattr(self.stages[of[1]], of[0]) % 2 != of[2]
        if kind == "finish" and len(of) == 1 and isinstance(of[0], int) and of[0] >= 0:
            return len(role.under_way) <= of[0]
        if kind in ("copy", "start", "arrive") and len(of) == 1 and of[0] in stages or role.instruction == ("store",):
            return True
        if role.instruction == ("end",):
            return False
        raise Wrong(f"{role.name} yields {role.instruction!r}, which is no instruction")

    def step(self, role: SimpleNamespace) -> None:
        """Wrong if the role's instruction comes too early or too often."""
        (kind, *of), pair = role.instruction, role.started
        stage = self.stages[of[0]] if kind in ("copy", "start", "arrive") else None
        there = f"pair {stage.pair}{', still coming,' * stage.coming} is in the stage, " if stage else ""
        read = [consumer.started - len(consumer.under_way) for consumer in self.consumers]  # pairs, from the first on
        right = True
        if kind == "copy":
            right = pair < self.total and (stage.pair is None or min(read) > stage.pair)
            stage.pair, stage.coming, role.started = pair, True, pair + 1
        elif kind == "start":
            right = not stage.coming and stage.pair == pair
            role.under_way.append(stage.number)
            role.started, role.pending = pair + 1, role.pending + 1  # pending: products that may still run
            if pair % self.steps:
                role.least = min(role.least, role.pending)
        elif kind == "finish":
            role.pending = min(role.pending, of[0])
        elif kind == "arrive":
            right = stage.number not in role.under_way
            stage.empty, stage.arrived = stage.empty + stage.arrived, 1 - stage.arrived
        elif kind == "store":
            role.stored += 1
            right = not role.under_way and pair == role.stored * self.steps
        if not right:
            raise Wrong(f"{role.name} does {role.instruction} too early or too often, for pair {pair}: {there}"
                        f"consumers have finished {read[0]} and {read[1]} products")  # fmt: skip
        role.instruction = None

    def finished(self) -> None:
        """Wrong if somebody waits, or has left something undone."""
        if any(role.instruction != ("end",) for role in self.roles):
            raise Wrong(f"nobody can go on: {', '.join(f'{role.name} at {role.instruction}' for role in self.roles)}")
        for role in self.roles:
            self.lab.expect(f"pairs of the {role.name}", role.started, self.total)
        for role in self.consumers:
            self.lab.expect(f"tiles that the {role.name} stores", role.stored * self.steps, self.total)


def check_stages(lab: Lab) -> None:
    for tiles, steps, stages in (1, 4, 4), (1, 7, 2), (3, 5, 4), (2, 6, 3), (3, 1, 2):
        lab.case = f"{tiles} tiles of {steps} pairs, {stages} stages"
        for seed in range(40):
            block = Block(lab, tiles, steps, stages)
            block.run(np.random.default_rng(seed), *block.roles)
            block.finished()
            for consumer in block.consumers:
                lab.expect("products under way at a time", consumer.least, 2)
        block = Block(lab, tiles, steps, stages)
        block.run(np.random.default_rng(0), block.producer)
        lab.expect("stages that the producer fills before a product is done", block.producer.started,
                   min(stages, block.total))  # fmt: skip


def check_one_byte(lab: Lab) -> None:
    q = np.arange(256, dtype=np.uint8)
    lab.expect("numbers_of", lab.call("numbers_of", q.copy()), from_e4m3(q), inputs=q)
    for largest, want in (
        (448, 1), (448.1, 2), (-449, 2), (224, 0.5), (1, 2.0**-8), (-3e-7, 2.0**-30), (3e38, 2.0**120),
        (np.nan, np.nan), (-np.inf, np.nan),
    ):  # fmt: skip
        lab.case = f"largest number {largest:g}"
        lab.expect("scale_of", lab.call("scale_of", np.array([[0, largest], [largest / 3, 0]], np.float32)), want)
    numbers = from_e4m3(q[:127]).astype(np.float64)
    middle = (numbers[:-1] + numbers[1:]) / 2
    sizes = np.concatenate([numbers, (1 - 2.0**-20) * middle, (1 + 2.0**-20) * middle, [464, 1e6], abs(normal(500))])
    nearest = np.concatenate([np.searchsorted(middle, sizes), np.arange(126) + np.arange(126) % 2])
    x, want = np.concatenate([sizes, middle]), numbers[nearest]
    x, want = np.concatenate([x, -x]), np.concatenate([want, -want])
    for scale in 1.0, 2.0**-30, 32.0:
        lab.case = f"scale {scale:g}"
        got = lab.call("quantize", x * scale, scale)
        if getattr(got, "dtype", None) != np.uint8:
            raise Wrong("quantize has to return uint8")
        lab.expect("quantize", from_e4m3(got), want, inputs=x * scale)
    a, b = (np.random.default_rng(N).choice(np.delete(q, [0x7F, 0xFF]), (N, 16)) for N in (5, 7))
    lab.case, want = "", 2.0**-7 * (from_e4m3(a).astype(np.float64) @ from_e4m3(b).T)
    lab.expect("product", lab.call("product", a.copy(), 0.25, b.copy(), 2.0**-5), want, ROUNDING * abs(want).max())


def check_two_products(lab: Lab) -> None:
    """All numbers are whole and small. So sums are exact, and the rounding of p to bf16 decides the result."""
    B = 3
    q, k, v = (np.random.default_rng(i).integers(-5, 6, (B, 16, 64)).astype(np.float32) for i in range(3))
    ones, picks = np.zeros_like(q), np.zeros_like(v)
    ones[:, np.arange(16), np.arange(16)] = picks[:, np.arange(16), np.arange(16) + 1] = 1
    for lab.case, x, y, z in (
        ("q and v pick: out has k, transposed, from channel 1 on", ones, k, picks),
        ("v picks: out has p, from channel 1 on", q, k, picks), ("any q, k and v", q, k, v),
    ):  # fmt: skip
        out = output(B, 16, 64)
        lab.launch("two_products_kernel", (B,), (32,), out, given(x), given(y), given(z))
        lab.expect("out", out, to_bf16(x @ y.transpose(0, 2, 1)) @ z)
    lab.expect_no_waste()


def check_four_bits(lab: Lab) -> None:
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    number_of = np.concatenate([numbers, -numbers, np.full(240, np.nan)])
    middle, size = (numbers[:-1] + numbers[1:]) / 2, 16
    x = normal(5, 4, size)
    x[0] = 0
    for i, amax in enumerate((6, 6.0000005, 3, -12)):  # at the end of a scale's range, and just beyond
        x[1, i] = np.clip(x[1, i], -1, 1)
        x[1, i, 3 * i] = amax
    x[2] *= 2.0 ** np.array([[-90], [-20], [20], [90]])
    scales = np.ones(x.shape[:2])
    for row, column in np.argwhere(abs(x).max(axis=2) > 0):
        scales[row, column] = next(2.0**k for k in range(-130, 130) if abs(x[row, column]).max() <= 6 * 2.0**k)
    x = x.reshape(len(x), -1)
    lab.expect("scales_of", lab.call("scales_of", x.copy(), size), scales)
    sizes = np.concatenate([numbers, middle, (1 - 2.0**-20) * middle, (1 + 2.0**-20) * middle, [6.5, 100]])
    codes = np.concatenate([np.arange(8), np.arange(7) + np.arange(7) % 2, np.arange(7), np.arange(1, 8), [7, 7]])
    sizes, want = (np.resize(each, (2, 2 * size)) for each in (sizes, numbers[codes]))
    for two in np.array([[1.0, 0.25], [2.0**-40, 8]]):
        signs = np.where(np.arange(2 * size) % 3 == 0, -1.0, 1.0)
        inp = signs * sizes * np.repeat(np.array([two, two[::-1]]), size, axis=1)
        got = lab.call("quantize", inp.copy(), np.array([two, two[::-1]]), size)
        if getattr(got, "dtype", None) != np.uint8:
            raise Wrong("quantize has to return uint8")
        lab.expect("quantize", number_of[got], signs * want, inputs=inp)
    rng = np.random.default_rng(29)
    a, b = (rng.integers(0, 16, (N, 48), np.uint8) for N in (5, 7))
    scales_a, scales_b = (2.0 ** rng.integers(-9, 9, (N, 3)) for N in (5, 7))
    inp, weight = (number_of[q] * np.repeat(scale, size, axis=1) for q, scale in ((a, scales_a), (b, scales_b)))
    got = lab.call("product", a.copy(), scales_a.copy(), b.copy(), scales_b.copy(), size)
    lab.expect("product", got, inp @ weight.T, ROUNDING)


def check_tma_ring(lab: Lab) -> None:
    """All numbers are whole and small, so sums are exact in every order."""
    B = 3
    for N in 16, 64, 40, 203:
        x = np.random.default_rng(N).integers(-9, 10, (B, N, 64)).astype(np.float32)
        lab.case, out, numbers = f"N = {N}", output(B, 64), device.to_bf16(x)
        lab.launch("tma_ring_kernel", (B,), (96,), out, device.tensor_map(numbers, x.shape, (1, 16, 64)), N)
        lab.expect("out", out, x.sum(1))
        lab.expect_releases_after_reads(16 * 32 * 2)


if __name__ == "__main__":
    run_program(main)

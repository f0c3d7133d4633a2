"""Runs a launcher under the microscope: what its kernels' warps touched, line by line of the source.

LLMC_CPU_MICROSCOPE=1 builds the CPU device for it (device/cpp/microscope.h); dev/microscope tells what is counted.
"""

import ctypes
import functools
import math
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import device
import kernels
from dev.microscope.launches import Launch
from dev.traffic import bytes_of
from device.cpp import compiler
from device.cpp.launch import KernelError, runtime
from device.errors import UserError

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SECTOR, BANKS, LANES = 32, 32, 32
MAX_ELEMENTS = 1 << 22  # elements of an array: every access is kept, some 400 bytes per element
MULTIPROCESSORS = 132  # of an H200: some launchers share out their work among them
LOAD, STORE, ATOMIC, BARRIER, MEETING = range(5)
KINDS = ("load", "store", "atomic", "barrier", "meeting")

# As in device/cpp/microscope.h.
STEP = np.dtype([
    ("pc", "i8"), ("block", "i4"), ("warp", "i4"), ("epoch", "i4"), ("mask", "u4"), ("array", "i4"), ("kind", "u1"),
    ("size", "u1"), ("unused", "u1", 2), ("what", "i8"), ("offset", "i8", LANES),
])  # fmt: skip
ACCESS = [("pc", "i8"), ("block", "i4"), ("thread", "i4"), ("kind", "u1"), ("unused", "u1", 7)]
OUTSIDE = np.dtype([("pc", "i8"), ("count", "i8")])
RACE = np.dtype([("one", ACCESS), ("other", ACCESS), ("array", "i4"), ("count", "i4"), ("offset", "i8")])
DEVICE, STATIC_SHARED, DYNAMIC_SHARED = range(3)

# One access, written as a function: the line that calls it is the one to show.
WRAPPERS = re.compile(r"Aligned::|Ragged::|copy_four|copy_one|Tile::put|__ld|__st|atomic")
BUILT_IN = re.compile(r"\d(threadIdx|blockIdx|blockDim|gridDim)$")
HEADERS = ("cuda_on_cpu.h", "runtime.h", "<stdin>", "??")


class CArray(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t), ("space", ctypes.c_int), ("item", ctypes.c_int)]


class CResult(ctypes.Structure):
    _fields_ = [
        ("steps", ctypes.c_void_p), ("step_count", ctypes.c_int64), ("races", ctypes.c_void_p),
        ("race_count", ctypes.c_int64), ("outside", ctypes.c_void_p), ("outside_count", ctypes.c_int64),
        ("library", ctypes.c_void_p), ("grid", ctypes.c_int32 * 3),
        ("block", ctypes.c_int32 * 3),
    ]  # fmt: skip


@dataclass
class Array:
    """What kernels touch: a parameter's array, or one in shared memory."""

    name: str
    shared: bool
    bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, order=True)
class Place:
    """A line of a kernel file, and the functions through which it was reached, innermost first."""

    file: str
    line: int
    frames: tuple[tuple[str, str, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def innermost(self) -> str:
        """The function in which the access stands; empty where the compiler has lost it."""
        return self.frames[0][0] if self.frames else ""


@dataclass
class Watched:
    """A kernel's launch: `steps` (STEP) are its warp instructions, in each block's and warp's order."""

    kernel: str
    file: Path
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arrays: list[Array]
    steps: np.ndarray
    races: np.ndarray
    places: dict[int, Place]
    names: dict[int, str]       # of barriers and of what lanes exchange, by `what` of a step
    least_bytes: float          # that the kernel must move, as the profile counts
    outside: dict[Place, int]   # accesses to what is none of the arrays, by line


def use_microscope(precision: str = "fp32") -> None:
    """Choose the CPU device, built for the microscope, and its precision; UserError where the compiler cannot."""
    if "clang" in compiler.installed_compiler()[1]:
        raise UserError("the microscope needs GCC, whose instrumentation keeps vectors whole: set CXX=g++")
    os.environ |= {"LLMC_CPU_MICROSCOPE": "1", "LLMC_CPU_WARP": "32", "LLMC_CPU_ORDER": "forward"}
    os.environ |= {"LLMC_CPU_DEBUG": "0", "LLMC_CPU_SANITIZE": "0"}
    device.CpuDevice.multiprocessors = MULTIPROCESSORS
    device.use("cpu")
    device.use_precision(precision)


def watch(launch: Launch, sizes: dict[str, int]) -> list[Watched]:
    """The kernels that a launcher launches on arrays of these sizes, in their order.

    Raises UserError for sizes that the launcher does not take, and for arrays of more than MAX_ELEMENTS elements.
    """
    for name, shape in launch.shapes_at(sizes).items():
        if (count := math.prod(shape)) > MAX_ELEMENTS:
            raise UserError(f"{name} would have {count:,} elements, at most {MAX_ELEMENTS:,} can be: lower a size")
    watched, call = [], launch.prepare(sizes)

    def observer(name: str, arguments: dict, work: Callable[[], None]) -> None:
        if name in FILES:
            watched.append(watch_kernel(name, arguments, work, others=call.arrays))
        else:
            work()

    with device.observe(observer):
        call()
    return watched


FILES = {name: path for folder in kernels.__path__ for path in sorted(Path(folder).rglob("*.cu"))
         for name in device.kernel_declarations(path)}  # fmt: skip


def watch_kernel(
    name: str, arguments: dict, work: Callable[[], None], file: Path | None = None,
    others: dict[str, np.ndarray] | None = None, around: dict[str, int] | None = None,
) -> Watched:  # fmt: skip
    """Does `work`, which launches this one kernel, under the microscope. others: arrays that the kernel may know by
    their addresses alone. around: of some arrays, how many bytes before and behind them count as theirs, so that an
    access there has an offset below 0 or past the array's end."""
    file = file or FILES[name]
    library = device.module(file).library_path
    arrays, given, margins = [], [], []
    in_arguments = {device.address(value) for value in arguments.values() if isinstance(value, np.ndarray)}
    unknown = {
        key: value for key, value in (others or {}).items()
        if key not in arguments and device.address(value) not in in_arguments
    }  # fmt: skip
    for key, value in (arguments | unknown).items():
        if isinstance(value, np.ndarray):
            arrays.append(Array(key, False, value.nbytes, value.shape, value.dtype.name))
            margins.append((around or {}).get(key, 0))
            address = value.__array_interface__["data"][0] - margins[-1]
            given.append((address, value.nbytes + 2 * margins[-1], DEVICE, value.itemsize))
    for variable, offset, size in shared_variables(library):
        arrays.append(Array(variable, True, size, (size // 4,), "float32"))
        given.append((offset, size, STATIC_SHARED, 4))
    arrays.append(Array("dynamic shared memory", True, 0, (0,), "float32"))
    given.append((0, 0, DYNAMIC_SHARED, 4))

    begin, end = runtime().llmc_microscope_begin, runtime().llmc_microscope_end
    end.restype = ctypes.POINTER(CResult)
    begin((CArray * len(given))(*(CArray(*one) for one in given)), len(given))
    try:
        work()
    except KernelError as error:
        raise UserError(str(error)) from None
    finally:
        result = end().contents
    steps, races = copied(result.steps, result.step_count, STEP), copied(result.races, result.race_count, RACE)
    outside = copied(result.outside, result.outside_count, OUTSIDE)
    for i, margin in enumerate(margins):
        of_array = steps["array"] == i
        steps["offset"][of_array] -= margin * lanes_of(steps[of_array])
        races["offset"][races["array"] == i] -= margin
    dynamic = steps[steps["array"] == len(arrays) - 1]
    if dynamic.size:
        arrays[-1].bytes = int((dynamic["offset"].max(axis=1) + dynamic["size"]).max())
        arrays[-1].shape = (-(-arrays[-1].bytes // 4),)
    all_pcs = steps["pc"], races["one"]["pc"], races["other"]["pc"], outside["pc"]
    for pcs in all_pcs:
        pcs -= (result.library or 0) + 1  # of the call, not of what follows it
    pcs = {int(pc) for pcs in all_pcs for pc in np.unique(pcs)}
    names = {int(what): ctypes.string_at(int(what)).decode() for what in np.unique(steps["what"]) if what}
    places, least = places_of(library, file, tuple(sorted(pcs))), bytes_of(name, arguments) if name in FILES else 0.0
    strays: dict[Place, int] = {}
    for pc, count in outside.tolist():
        if places[pc].frames:  # and not where the launch's arguments are read
            strays[places[pc]] = strays.get(places[pc], 0) + count
    return Watched(
        name, file, tuple(result.grid), tuple(result.block), arrays, steps, races, places, names, least, strays
    )


def copied(address: int | None, count: int, dtype: np.dtype) -> np.ndarray:
    if not count:
        return np.zeros(0, dtype)
    return np.frombuffer(ctypes.string_at(address, count * dtype.itemsize), dtype).copy()


# ---- what the compiler knows of a library


@functools.cache
def shared_variables(library: Path) -> list[tuple[str, int, int]]:
    """Name, offset among the thread-local variables, and bytes of each __shared__ variable."""
    table = run_tool(["readelf", "-sW", str(library)])
    found = {}
    for fields in map(str.split, table.splitlines()):
        if len(fields) == 8 and fields[3] == "TLS" and fields[6] != "UND" and not BUILT_IN.search(fields[7]):
            found[fields[7]] = int(fields[1], 16), int(fields[2], 0)
    names = run_tool(["c++filt", *found]).splitlines() if found else []
    return [(name.rpartition("::")[2], *where) for name, where in zip(names, found.values(), strict=True)]


@functools.cache
def places_of(library: Path, file: Path, pcs: tuple[int, ...]) -> dict[int, Place]:
    """Where each address of a library stands in the source, which is `file` and what it includes."""
    if not pcs:
        return {}
    lines = run_tool(["addr2line", "-aCfi", "-e", str(library)], "\n".join(map(hex, pcs))).splitlines()
    places, frames = {}, []
    for line in [*lines, "0x"]:
        if line.startswith("0x"):
            if frames:
                places[pcs[len(places)]] = place_of(list(zip(frames[::2], frames[1::2], strict=True)), file)
            frames = []
        else:
            frames.append(line)
    return places


def place_of(frames: list[tuple[str, str]], file: Path) -> Place:
    """The line to show for a chain of inlined calls, innermost first."""
    chain = []
    for function, where in frames:
        path, _, line = re.sub(r" \(discriminator \d+\)$", "", where).rpartition(":")
        if Path(path).name not in HEADERS and line.isdecimal():
            chain.append((function, Path(path).name, int(line)))
    if not chain:  # the compiler has lost the line
        return Place(file.name, 1)
    shown = next((frame for frame in chain if not WRAPPERS.match(frame[0])), chain[-1])
    return Place(shown[1], shown[2], tuple(chain))


def run_tool(command: list[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=os.fsencode(text or ""), capture_output=True, check=True)
        return os.fsdecode(done.stdout)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"the microscope needs {command[0]}, which comes with g++'s binutils ({error})") from None


# ---- counting


def lanes_of(steps: np.ndarray) -> np.ndarray:
    """(n, 32) bool: which lanes take part."""
    return steps["mask"][:, None] >> np.arange(LANES, dtype=np.uint32) & 1 == 1


def distinct(values: np.ndarray) -> np.ndarray:
    """For each row of (n, k), how many different numbers it has; negative ones do not count."""
    values = np.sort(values, axis=1)
    first = np.ones(values.shape, bool)
    first[:, 1:] = values[:, 1:] != values[:, :-1]
    return (first & (values >= 0)).sum(axis=1)


def sectors_of(steps: np.ndarray) -> np.ndarray:
    """(n, 64): the first and last sector of each lane's access; -1 for a lane that takes no part."""
    first, last = steps["offset"] // SECTOR, (steps["offset"] + steps["size"][:, None] - 1) // SECTOR
    return np.where(np.tile(lanes_of(steps), 2), np.concatenate([first, last], axis=1), -1)


def passes_of(steps: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For accesses of one size to shared memory: how many passes each takes, and how many it needs at least."""
    words = max(1, size // 4)
    phases = max(1, size // 4)                  # groups of lanes that are served one after the other
    word = steps["offset"][:, :, None] // 4 + np.arange(words)
    word = np.where(lanes_of(steps)[:, :, None], word, -1).reshape(len(steps) * phases, -1)
    word.sort(axis=1)
    first = word >= 0
    first[:, 1:] &= word[:, 1:] != word[:, :-1]
    of_bank = np.zeros((len(word), BANKS), np.int64)
    row, column = np.nonzero(first)
    np.add.at(of_bank, (row, word[row, column] % BANKS), 1)
    passes = of_bank.max(axis=1).reshape(len(steps), phases)
    return passes.sum(axis=1), (passes > 0).sum(axis=1)

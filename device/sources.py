"""Kernel files: a .cu file whose kernels Python calls, its text for NVRTC, and what its kernels read and write."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

from device import current
from device.observing import ACCESSES, READS, SETS, UPDATES, observed
from device.tma import TensorMap

imported: list["Source"] = []  # the files beside the modules of launchers that have been imported


def source(python_file: str | Path, needed: Callable[[], bool] = lambda: True) -> "Source":
    """The .cu file beside a module of launchers: `cu = device.source(__file__)`. needed: whether device.compile_all
    compiles it on the device in use. Otherwise it is compiled when a kernel of it is first launched, if ever."""
    found = Source(Path(python_file).with_suffix(".cu"), needed)
    imported.append(found)
    return found


class Source:
    """A .cu file, `path`. It is compiled for the device in use when somebody first launches a kernel of it or asks for
    the warp size."""

    def __init__(self, path: Path, needed: Callable[[], bool] = lambda: True):
        self.path, self.needed = path, needed

    def launch(self, name: str, grid: tuple, block: tuple, args: tuple, shared_mem: int = 0) -> None:
        """Launches the kernel of this name on the device in use. grid and block have one to three sizes. args are
        device arrays for pointers, Python ints for integers, np.float32 for floats and what device.tensor_map returns
        for tensor maps. shared_mem: bytes of dynamic shared memory."""
        device = current.device
        key = self.path, name, device.floatX
        kernel = device.kernels.get(key)
        if kernel is None:
            kernel = device.kernels[key] = device.kernel(self.path, name)
        if current.observers:
            ACCESSES[name] = parameters = kernel_accesses(self.path)[name]
            seen = (one.array if isinstance(one, TensorMap) else one for one in args)
            arguments = dict(zip(parameters, seen, strict=True))
            observed(name, arguments, functools.partial(kernel, grid, block, args, shared_mem))
        else:
            kernel(grid, block, args, shared_mem)

    def constant(self, name: str) -> int:
        """A number that this file, or one that it includes, defines by `constexpr int`."""
        return constants_of(self.path)[name]

    def blocks_at_once(self, kernel: str) -> int:
        """How many blocks of a kernel a multiprocessor can run at once: the second number of its __launch_bounds__."""
        return blocks_at_once(self.path, kernel)

    @property
    def warp_size(self) -> int:
        """Lanes in a warp of this file's kernels: 32 on CUDA, 1 on the CPU. With LLMC_CPU_WARP=32, or if the file
        itself fixes WARP_SIZE, 32 on the CPU, too."""
        return current.device.warp_size(self.path)

    @property
    def width(self) -> int:
        """Numbers of the type `floatX` that a thread of this file's kernels moves at a time, WIDTH of common.cuh: 16
        bytes; or 16 numbers if a warp is a single thread (CPU_WIDTH of cuda_on_cpu.h)."""
        return 16 // current.device.floatX.itemsize if self.warp_size > 1 else 16

    @property
    def floats(self) -> int:
        """fp32 numbers that a thread of this file's kernels moves at a time, FLOATS of common.cuh."""
        return 4 if self.warp_size > 1 else 16

    def block(self, threads: int) -> int:
        """Threads for a block whose threads cooperate (share memory, wait for one another): as many as asked for; or
        one if a warp is a single thread, so that on the CPU no thread waits for another."""
        return threads if self.warp_size > 1 else 1

    def threads(self, most: int, needed: int) -> int:
        """Threads for a block in which `needed` of them have work. On a GPU a block has `most`. On the CPU idle threads
        take time, so there it has at most as many as are needed."""
        return most if self.warp_size > 1 else min(most, needed)


def cuda_source(path: Path) -> str:
    """The text of a .cu file, with the files themselves in place of the `#include "..."` lines, each once.

    So NVRTC needs no include path, and CuPy's cache sees a change in an included file. #line keeps the line numbers in
    the compiler's messages right.
    """
    seen = set()

    def text_of(path: Path) -> str:
        if path.resolve() in seen:
            return ""
        seen.add(path.resolve())
        text = path.read_text("utf-8").replace("#pragma once", "")

        def inline(match: re.Match) -> str:
            included = path.parent / match[1]
            line = text.count("\n", 0, match.start()) + 2
            return f'#line 1 "{included.name}"\n{text_of(included)}\n#line {line} "{path.name}"'

        return re.sub(r'^#include "([^"]+)".*$', inline, text, flags=re.MULTILINE)

    return text_of(path)


@functools.cache
def architecture_of(path: Path) -> str:
    """The one GPU architecture that a .cu file is for: "90a" if it says `#define ARCHITECTURE 90a`, because it has
    instructions that no other GPU knows. Empty for a file that is for all GPUs."""
    found = re.search(r"^#define ARCHITECTURE (\w+)", path.read_text("utf-8"), re.MULTILINE)
    return found[1] if found else ""


@functools.cache
def constants_of(path: Path) -> dict[str, int]:
    """The numbers that a .cu file, or one that it includes, defines by `constexpr int`."""
    definitions = re.findall(r"^constexpr int ([^;]*);", cuda_source(path), re.MULTILINE)
    pairs = (re.fullmatch(r"(\w+) = (\d+)", one.strip()) for line in definitions for one in line.split(","))
    return {found[1]: int(found[2]) for found in pairs if found}


@functools.cache
def blocks_at_once(path: Path, kernel: str) -> int:
    """Source.blocks_at_once."""
    return int(re.search(rf"__launch_bounds__\(\d+, (\d+)\)\s+{kernel}\b", path.read_text("utf-8"))[1])


@functools.cache
def kernel_declarations(path: Path) -> dict[str, list[str]]:
    """The kernels that a .cu file declares, each with the declarations of its parameters."""
    declared = re.findall(r"__global__[^;{]*?(\w+)\s*\(([^()]*)\)\s*\{", path.read_text("utf-8"))
    return {name: parameters.split(",") for name, parameters in declared}


@functools.cache
def programmatic_kernels(path: Path) -> set[str]:
    """The kernels of a .cu file that may start before the previous launch has ended (dependent_launch.cuh:
    PROGRAMMATIC)."""
    return set(re.findall(r"\bPROGRAMMATIC\s+(\w+)\s*\(", path.read_text("utf-8")))


@functools.cache
def kernel_accesses(path: Path) -> dict[str, dict[str, str | None]]:
    """For each kernel of a .cu file, what it does with each of its parameters, in their order. It READS the array
    behind a const pointer. If the declaration says SETS, it SETS the whole array without reading it. Else it UPDATES
    the array. It READS what lies behind a tensor map, or SETS it. None for a parameter that is neither."""

    def access(declaration: str) -> str | None:
        words = re.findall(r"\w+|\*", declaration)
        if "TensorMap" in words:
            return SETS if "SETS" in words else READS
        if "*" not in words:
            return None
        return READS if "const" in words[: words.index("*")] else SETS if "SETS" in words else UPDATES

    return {
        name: {re.findall(r"\w+", one)[-1]: access(one) for one in declarations}
        for name, declarations in kernel_declarations(path).items()
    }

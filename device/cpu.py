"""The CPU as a device. A C++ compiler builds the .cu files (cpp/) and cpp/products.cu, which multiplies matrices.

The docstrings here say what each operation does on both devices. Here all work is done when a call returns, so the
operations for streams have nothing to do.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from device import cpp
from device.bf16 import BF16, DEFINES, floatX_of, from_bf16, to_bf16
from device.fp8 import E4M3, from_e4m3
from device.tma import TensorMap

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # for PyTorch's threads, which gloo brings along

PRODUCTS = Path(__file__).parent / "cpp" / "products.cu"
PRODUCT_ROWS = 264  # that a block of product_kernel can have
CAUSAL = {"": 0, "c": 1, "a": 2}  # as product_kernel knows it


class CpuDevice:
    kind = "cpu"
    identity = ""
    compute_capability = 0
    precision, floatX, tf32 = "fp32", floatX_of("fp32"), False
    shared_memory = 227 << 10  # as on compute capability 9.0; runtime.cpp refuses more
    recording = True
    l2_bytes = 50 << 20  # as an H100 has
    multiprocessors = 4  # not the number of cores: the way in which a sum is shared out decides how it is rounded
    has_streams = False  # so a plan runs in program order
    stream = main_stream = side_stream = fetch_stream = update_stream = store_stream = None
    in_comm_work = False

    def __init__(self):
        self.kernels: dict[tuple[Path, str, np.dtype], Callable[..., None]] = {}  # which Source.launch has found
        self.modules: dict[tuple[Path, np.dtype], cpp.Module] = {}
        self.constants: dict[tuple, np.ndarray] = {}
        self.regions: dict[str, list] = defaultdict(list)  # of device.scratch
        cpp.warp_size()  # a wrong LLMC_CPU_WARP is refused now, not at the first launch
        self.cores = cpp.threads()
        self.name = f"CPU, {self.cores} cores"

    def use_precision(self, precision: str) -> str:
        """Chooses "fp32"; "tf32", in which matrix products round their operands to 10 bits of mantissa; "fp16", in
        which our launchers round them to fp16 (kernels/fp16/); "bf16", in which `floatX`, the type of parameters,
        activations and their gradients, is BF16; or "fp8", in which also some products take operands of one byte
        (kernels/fp8/). Returns the precision that the device then has: a CPU has no TF32, a GPU before compute
        capability 8.0 has only fp32 and, from 7.5 on, fp16, and one before 8.9 has no fp8."""
        self.precision = "fp32" if precision == "tf32" else precision
        self.floatX = floatX_of(self.precision)
        return self.precision

    # Memory

    def empty(self, shape, dtype=np.float32):
        """An uninitialised device array."""
        return np.empty(shape, dtype)

    def pinned(self, shape, dtype) -> np.ndarray:
        """A host array for copies to and from the device. On CUDA it is page-locked memory, so that the copies are
        asynchronous."""
        return np.empty(shape, dtype)

    def large_pinned(self, shape, dtype=np.float32) -> np.ndarray:
        """A host array of zeros that may be as large as a buffer of the device. On CUDA it is page-locked memory
        (host.py). `copy`, `copy_in` and `fill_zero` take such arrays, too. Raises UserError if the system refuses."""
        return np.zeros(shape, dtype)

    def copy_in(self, dst, src: np.ndarray) -> None:
        """Starts to copy a contiguous host array over the beginning of a device array. src must not change until
        `synchronize`."""
        dst.reshape(-1)[: src.size] = src.reshape(-1)

    def copy_out(self, dst: np.ndarray, src) -> None:
        """Starts to fill a host array from the beginning of a device array. dst is valid after `synchronize`."""
        dst.reshape(-1)[:] = src.reshape(-1)[: dst.size]

    def asarray(self, array: np.ndarray):
        """A device array with the contents of a host array."""
        return np.array(array)

    def to_host(self, array) -> np.ndarray:
        """A new host array with the contents of a device array."""
        return np.array(array)

    def pieces(self, array) -> Iterator[np.ndarray]:
        """The pieces of a flat device array, one after another on the host. There is never a whole copy of it."""
        yield array

    def fill_zero(self, array) -> None:
        """Sets a contiguous device array to zero."""
        array.fill(0)

    def copy(self, dst, src) -> None:
        """Copies a contiguous device array over another of the same size and type. Either may be a host array of
        `large_pinned` instead."""
        dst[:] = src

    def synchronize(self) -> None:
        """Waits until all work given to the device is done."""

    def event(self) -> CpuEvent:
        """A mark after the work that the device has been given. `.wait()` waits until this work is done.
        `.since(begin)` waits, too, and returns the milliseconds from an earlier event to this one, by the device's own
        clock: it does not matter when the host looks."""
        return CpuEvent()

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device's memory."""
        return host_memory()

    def address(self, array) -> int:
        """The address at which a device array begins, as kernels see it."""
        return array.__array_interface__["data"][0]

    def tensor_map(self, array, shape: tuple[int, ...], box: tuple[int, int, int]) -> TensorMap:
        """A map of a bf16 array that has three axes (shape: their sizes), for copies of boxes: 64 numbers of the last
        axis, and at most 256 of each other one. In shared memory a row of a box has 128 bytes, and chunk c of 16 bytes
        of row r lies where chunk c ^ r % 8 would. Numbers of a box outside the array become zeros. The array, and each
        of its rows, begins at a multiple of 16 bytes."""
        made = TensorMap.of(array)
        made.view(np.int64)[:4] = self.address(array), *shape  # the kernel knows the box
        return made

    # Kernels

    def warp_size(self, path: Path) -> int:
        """Lanes in a warp of a file's kernels."""
        return self.module(path).warp_size

    def kernel(self, path: Path, name: str) -> Callable[..., None]:
        """A kernel of a .cu file, to be called as `kernel(grid, block, args, shared_mem=0)`."""
        return self.module(path).kernel(name)

    def why_not_kernels(self, path: Path) -> str:
        """Why this device cannot run a file's kernels, in a line; empty if it can."""
        return ""

    def module(self, path: Path) -> cpp.Module:
        key = path, self.floatX
        if key not in self.modules:
            self.modules[key] = cpp.compile_source(path, *DEFINES[self.floatX])
        return self.modules[key]

    def compile_all(self, paths: list[Path]) -> None:
        """Compiles kernel files, several at a time."""
        paths = [*paths, PRODUCTS]
        keys = [(path, self.floatX) for path in paths]
        self.modules.update(zip(keys, cpp.compile_all(paths, *DEFINES[self.floatX]), strict=True))

    # Products

    def gemm(
        self, c, a, b, m: int, n: int, k: int, trans_a: bool = False, trans_b: bool = False, add=None, bias=None,
        scale_a=None, scale_b=None,
    ) -> None:  # fmt: skip
        """c (m, n) = op(a) (m, k) @ op(b) (k, n) + add (m, n), all by rows and contiguous. Either a, b and c are fp32,
        and the product is in TF32 if `tf32` is true; or a and b are bf16, and c is bf16 or fp32. Sums are always fp32.
        add has c's type, and is c itself, or does not overlap it, or is None.

        Or a and b are e4m3 (fp8.py), quantized matrices, and the product is multiplied by their scales scale_a[0] and
        scale_b[0]. Then trans_a is false and trans_b true, k is a multiple of 16 and n of 8, and the arrays lie at
        multiples of 16 bytes. A GPU's sums are a little less wide (cublaslt.py).

        Or a and b are fp16 (numpy.float16), and c and bias fp32. Then, too, the product is multiplied by scale_a[0] and
        scale_b[0], which are powers of two, and scale_b[1] is the product of both.

        With trans_a, a lies in memory as (k, m) and op transposes it; trans_b likewise, b as (n, k). bias (n,), of the
        type of a and b, is added to every row before the row is rounded.
        """
        if a.dtype == E4M3:
            self.multiply_e4m3(c, a, b, m, n, k, add, bias, scale_a, scale_b)
        else:
            self.multiply(c, a, b, m, n, k, 1, trans_a, trans_b, add, bias, "", scale_a, scale_b)

    def gemm_strided_batched(
        self, c, a, b, m: int, n: int, k: int, count: int, trans_a: bool = False, trans_b: bool = False,
        causal: str = "", scale_a=None, scale_b=None,
    ) -> None:  # fmt: skip
        """`gemm` for `count` matrices that follow one another in each of a, b and c; c is set.

        causal: "c" or "a" if this matrix is causal attention: in memory, (T, T) matrices one below another. Above their
        diagonals a must be 0, and c may become anything. There the CPU leaves out what it can; cuBLAS multiplies whole
        matrices."""
        self.multiply(c, a, b, m, n, k, count, trans_a, trans_b, None, None, causal, scale_a, scale_b)

    def multiply(
        self, c, a, b, m, n, k, count, trans_a, trans_b, add=None, bias=None, causal="", scale_a=None, scale_b=None
    ) -> None:  # fmt: skip
        """`gemm` for `count` matrices."""
        flat = [x.reshape(-1)[: count * size] for x, size in ((c, m * n), (a, m * k), (b, k * n))]
        wide = [as_floats(x, scale) for x, scale in zip(flat, (None, scale_a, scale_b), strict=True)]
        args = *wide, m, n, k, int(trans_a), int(trans_b), np.float32(add is c), CAUSAL[causal]
        self.module(PRODUCTS).kernel("product_kernel")(product_grid(m, n, count, self.cores), (1,), args)
        add_to(wide[0].reshape(-1, n), bias, None if add is c else add)
        if wide[0] is not flat[0]:
            flat[0][:] = to_bf16(wide[0])

    @np.errstate(over="ignore", invalid="ignore")  # a kernel says nothing of infinity and NaN either
    def multiply_e4m3(self, c, a, b, m: int, n: int, k: int, add, bias, scale_a, scale_b) -> None:
        """`gemm` for quantized operands."""
        product = np.empty((m, n), np.float32)
        self.multiply(product, from_e4m3(a), from_e4m3(b), m, n, k, 1, False, True)
        product *= scale_a[0] * scale_b[0]
        add_to(product, bias, add)
        c.reshape(-1)[: m * n].reshape(m, n)[:] = to_bf16(product) if c.dtype == BF16 else product

    # Streams, as a recording uses them

    def on(self, stream: Any):
        """A context: within it, work goes to this stream. `stream` is the present one. main_stream and side_stream are
        a recording's; fetch_stream, update_stream and store_stream are for numbers that lie on the host."""
        return nullcontext()

    def mark(self, stream: Any) -> Any:
        """A mark after all work that a stream has been given."""
        return None

    def wait(self, stream: Any, mark: Any) -> None:
        """Makes a stream wait for the work before a mark."""

    def capture(self, work: Callable[[], None]) -> CpuGraph:
        """A graph of what `work` gives to the device. `launch(stream)` does it. On CUDA, `work` runs now, and the
        device only records what it gives. On the CPU, `work` runs at each launch."""
        return CpuGraph(work)

    def on_comm_stream(self, work: Callable[[int], None], urgent: bool = True, after: list | None = None) -> None:
        """Calls `work` with a CUDA stream for communication between GPUs. All that `work` launches and copies goes to
        this stream. It begins after the marks `after`; without marks, after all work that the present stream has been
        given. It runs beside what follows, until `wait_comm`. If it is urgent, its kernels come before all others; else
        they run when the others leave room. All work of `on_comm_stream` is done in the order of the calls."""
        outer, self.in_comm_work = self.in_comm_work, True
        try:
            work(0)
        finally:
            self.in_comm_work = outer

    def mark_comm(self) -> Any:
        """A mark after all work of `on_comm_stream` so far."""
        return None

    def wait_comm(self) -> None:
        """Makes the present stream wait for all work of `on_comm_stream`. A graph does so at its end."""

    # Other GPUs of this machine

    def memory_handle(self, array) -> tuple[str, int]:
        """A handle to an array on a GPU. With it another process of this machine can open the array. Raises an error if
        CUDA gives none."""
        raise NotImplementedError("processes that train on the CPU share no memory")

    def open_memory(self, handle: tuple[str, int], like):
        """The array on another process's GPU that has this handle, with the shape and type of `like`. Raises an error
        if this GPU cannot access the other one's memory."""
        raise NotImplementedError("processes that train on the CPU share no memory")

    def memory_operations(self, operations: list[tuple[str, Any, int]]) -> None:
        """Does operations on single words, one after another, without using a multiprocessor. ("write", word, value)
        sets a word; ("wait", word, value) waits until the word has this value. A word is an array (1,) of uint32 on
        this GPU; a word to be written may also be on another GPU. A GPU that sees the written word also sees all that
        this device did before, because CUDA puts a memory fence before each write. Raises an error if CUDA has no
        such operations (CUDA driver API, cuStreamBatchMemOp)."""
        for what, word, value in operations:
            if what == "write":
                word[0] = value
            while what == "wait" and word[0] != value:
                time.sleep(0)  # lets other threads go on


class CpuGraph:
    def __init__(self, work: Callable[[], None]):
        self.work = work

    def launch(self, stream: Any) -> None:
        self.work()


class CpuEvent:
    def __init__(self):
        self.time = time.perf_counter()  # all work is done when a call returns

    def wait(self) -> None:
        pass

    def since(self, begin: CpuEvent) -> float:
        return 1000 * (self.time - begin.time)


def add_to(product, *arrays) -> None:
    """product (m, n), fp32, += each of the arrays (m, n) or (n,), of bf16 or fp32, that is not None."""
    for array in arrays:
        if array is not None:
            product += (from_bf16(array) if array.dtype == BF16 else array).reshape(-1, product.shape[1])


def as_floats(x: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """A product's matrix as fp32, in fp16 times its scale: this rounds nothing, because the scale is a power of two."""
    return x.astype(np.float32) * scale[0] if x.dtype == np.float16 else from_bf16(x) if x.dtype == BF16 else x


@functools.cache
def product_grid(m: int, n: int, count: int, cores: int) -> tuple[int, int, int]:
    """The grid with which product_kernel multiplies: the one with which the busiest core has the least to do. A block
    multiplies its rows by its columns. It also packs both, and a number takes as long to pack as some 20 to multiply.
    So fewer blocks are better, if the cores can share them evenly."""
    fewest_columns, fewest_rows = -(-n // 1024), -(-m // PRODUCT_ROWS)

    def work(grid: tuple[int, int]) -> int:
        columns, rows = grid
        # Of the largest block: multiples of products.cu's COLUMNS and ROWS, as they are with AVX-512.
        width, height = 32 * -(-n // (32 * columns)), 8 * -(-m // (8 * rows))
        return -(-columns * rows * count // cores) * (width * height + 20 * (width + height))

    most_columns = max(fewest_columns, min(2 * cores, n // 64))
    most_rows = max(fewest_rows, min(2 * cores, m // 64))
    grids = itertools.product(range(fewest_columns, most_columns + 1), range(fewest_rows, most_rows + 1))
    return *min(grids, key=work), count


def host_memory() -> tuple[int, int]:
    """(free, total) bytes of the host's memory."""
    kilobytes = dict(re.findall(r"^(\w+): *(\d+) kB", Path("/proc/meminfo").read_text("utf-8"), re.MULTILINE))
    return int(kilobytes["MemAvailable"]) << 10, int(kilobytes["MemTotal"]) << 10

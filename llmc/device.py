"""The one place that knows about devices: an NVIDIA GPU through CuPy, or the CPU.

A device is chosen once, by `use`; everything else here then works on it. Arrays are `cupy.ndarray` on CUDA and
`numpy.ndarray` on the CPU, kernels are the same .cu files on both (NVRTC, or the C++ compiler: llmc/cpu), and matrix
products are cuBLAS's or NumPy's. CuPy is imported only when CUDA is used.
"""

import ctypes
import functools
import inspect
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

# Idle OpenMP threads spin, and steal the cores from the kernels that run next. OpenBLAS's do so too, lose much when a
# core is busy otherwise, and round differently when there are more of them: products are shared out here instead
# (CpuDevice.product). NumPy reads this when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402

from llmc import cpu  # noqa: E402
from llmc.errors import UserError, first_line  # noqa: E402

NVRTC_OPTIONS = ("--std=c++17",)
PIECE = 1 << 24  # floats that `pieces` copies to the host at a time
CUBLAS_WORKSPACE = 32 << 20  # bytes


# What to do where CUDA does not work, by a part of what it says.
CUDA_REMEDY = "install CuPy for your driver (cupy-cuda12x[ctk] or cupy-cuda13x[ctk])"
GPU_IS_FULL = "other programs have taken the GPU's memory; nvidia-smi names them"
CUDA_REMEDIES = {
    "InsufficientDriver": "update NVIDIA's driver, or install CuPy for the CUDA that it knows (cupy-cuda12x[ctk])",
    "NoDevice": "nvidia-smi and CUDA_VISIBLE_DEVICES say which GPUs this program sees",
    "MemoryAllocation": GPU_IS_FULL, "ALLOC_FAILED": GPU_IS_FULL, "Out of memory": GPU_IS_FULL,
    "DevicesUnavailable": "another program has the GPU to itself; nvidia-smi names it",
}


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up: how many blocks of b make up for a."""
    return -(-a // b)


def cuda_source(path: Path) -> str:
    """The text of a .cu file with its `#include "..."` lines replaced by those files.

    NVRTC then needs no include path, CuPy's cache sees a change in an included file, and #line keeps the compiler's
    messages true.
    """

    def inline(match: re.Match) -> str:
        included = path.parent / match[1]
        line = text.count("\n", 0, match.start()) + 2
        return f'#line 1 "{included.name}"\n{cuda_source(included)}\n#line {line} "{path.name}"'

    text = path.read_text().replace("#pragma once", "")
    return re.sub(r'^#include "([^"]+)".*$', inline, text, flags=re.MULTILINE)


class Source:
    """A .cu file whose kernels are its attributes: `source.some_kernel(grid, block, args, shared_mem=0)` launches one.

    grid and block are tuples; args are device arrays for pointers, Python ints for integers and np.float32 for floats.
    The file is compiled for the device in use when a kernel of it is first called, or its warp size is asked for.
    """

    def __init__(self, path: Path):
        self._path = path

    @property
    def warp_size(self) -> int:
        """Lanes in a warp of this file's kernels: 32 on CUDA; on the CPU 1, but 32 where LLMC_CPU_WARP=32 or the file
        itself fixes WARP_SIZE."""
        return _device.warp_size(self._path)

    def block(self, threads: int) -> int:
        """Threads for a block whose threads cooperate (share memory, wait for one another): as many as asked for, but
        one where a warp is a single thread, so that on the CPU nobody waits for anybody."""
        return threads if self.warp_size > 1 else 1

    def __getattr__(self, name: str) -> Callable:
        kernel = _device.kernel(self._path, name)
        setattr(self, name, kernel)  # found without a lookup from now on
        return kernel

    def _forget(self) -> None:
        path = self._path
        self.__dict__.clear()
        self._path = path


class CudaKernel:
    """A CuPy RawKernel that asks for more than the default 48 KiB of shared memory where a launch needs it."""

    def __init__(self, raw):
        self.raw = raw
        self.shared_limit = (48 << 10) - raw.shared_size_bytes  # what the kernel declares itself counts, too

    def __call__(self, grid: tuple, block: tuple, args: tuple, shared_mem: int = 0) -> None:
        if shared_mem > self.shared_limit:
            self.raw.max_dynamic_shared_size_bytes = self.shared_limit = shared_mem
        self.raw(grid, block, args, shared_mem=shared_mem)


class CudaDevice:
    kind = "cuda"

    def __init__(self, number: int = 0):
        import cupy
        from cupy.cuda import cublas, runtime
        from cupy.cuda.device import get_cublas_handle

        self.cupy = cupy
        count = runtime.getDeviceCount()
        cupy.cuda.Device(number % count).use()
        self.properties = runtime.getDeviceProperties(runtime.getDevice())
        self.name = self.properties["name"].decode()
        self.identity = ":".join(f"{self.properties[key]:x}" for key in ("pciDomainID", "pciBusID", "pciDeviceID"))
        self.multiprocessors = self.properties["multiProcessorCount"]
        self.shared_memory = self.properties["sharedMemPerBlockOptin"]
        self.compute_capability = self.properties["major"] * 10 + self.properties["minor"]
        self.modules, self.constants, self.opened = {}, {}, {}
        # Streams of our own: the default one can not be captured into a graph. The second is for what is done `beside`
        # the first, which has priority, because more waits for it; the third for what other ranks wait for, the fourth
        # for what they can wait longer for.
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self.stream.use()
        self.second_stream = cupy.cuda.Stream(non_blocking=True)
        self.third_stream = cupy.cuda.Stream(non_blocking=True, priority=-2)
        self.fourth_stream = cupy.cuda.Stream(non_blocking=True)
        self.blas_handle, self.second_blas_handle = get_cublas_handle(), second_cublas_handle(cublas)
        self.blas = cublas
        self.captured_blas = CapturedBlas(runtime.runtimeGetVersion() // 1000)
        self.workspaces = cupy.empty((2, CUBLAS_WORKSPACE), np.uint8)
        self.capturing, self.recording, self.communicating = False, True, None
        self.use_tf32(True)

    def use_tf32(self, on: bool) -> bool:
        self.tf32 = on and self.compute_capability >= 80
        for handle in (self.blas_handle, self.second_blas_handle):
            self.blas.setMathMode(handle, 3 if self.tf32 else 0)  # CUBLAS_TF32_TENSOR_OP_MATH, which CuPy omits
        return self.tf32

    def warp_size(self, path: Path) -> int:
        return 32

    def empty(self, shape, dtype):
        return self.cupy.empty(shape, dtype)

    def pinned(self, shape, dtype) -> np.ndarray:
        count = int(np.prod(shape))
        memory = self.cupy.cuda.alloc_pinned_memory(max(1, count) * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def copy_in(self, dst, src: np.ndarray) -> None:
        dst.data.copy_from_host_async(src.ctypes.data, src.nbytes, self.stream)

    def copy_out(self, dst: np.ndarray, src) -> None:
        src.data.copy_to_host_async(dst.ctypes.data, dst.nbytes, self.stream)

    def asarray(self, array: np.ndarray):
        return self.cupy.asarray(array)

    def to_host(self, array) -> np.ndarray:
        return self.cupy.asnumpy(array)

    def pieces(self, array) -> Iterator[np.ndarray]:
        yield from (self.to_host(array[start : start + PIECE]) for start in range(0, array.size, PIECE))

    def fill_zero(self, array) -> None:
        array.data.memset_async(0, array.nbytes, self.stream)

    def copy(self, dst, src) -> None:
        dst.data.copy_from_device_async(src.data, src.nbytes, self.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def event(self) -> "CudaEvent":
        return CudaEvent(self.cupy, self.stream)

    def memory(self) -> tuple[int, int]:
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return free + self.cupy.get_default_memory_pool().free_bytes(), total

    def kernel(self, path: Path, name: str) -> CudaKernel:
        return CudaKernel(self.module(path).get_function(name))

    def module(self, path: Path):
        if path not in self.modules:
            self.modules[path] = self.cupy.RawModule(code=cuda_source(path), options=NVRTC_OPTIONS)
        return self.modules[path]

    def compile_all(self, paths: list[Path]) -> None:
        with ThreadPoolExecutor() as pool:  # NVRTC lets go of the interpreter's lock
            list(pool.map(lambda path: self.module(path).compile(), paths))

    def sgemm(self, c, a, b, m, n, k, trans_a, trans_b, beta) -> None:
        # cuBLAS stores matrices by columns, so it sees each of ours transposed: c^T = op(b)^T op(a)^T.
        blas = self.captured_blas if self.capturing else self.blas
        blas.sgemm(
            self.blas_handle, int(trans_b), int(trans_a), n, m, k, address_of(1.0),
            b.data.ptr, k if trans_b else n, a.data.ptr, m if trans_a else k, address_of(beta), c.data.ptr, n,
        )  # fmt: skip

    def sgemm_strided_batched(self, c, a, b, m, n, k, trans_a, trans_b, count) -> None:
        blas = self.captured_blas if self.capturing else self.blas
        blas.sgemmStridedBatched(
            self.blas_handle, int(trans_b), int(trans_a), n, m, k, address_of(1.0),
            b.data.ptr, k if trans_b else n, n * k, a.data.ptr, m if trans_a else k, m * k,
            address_of(0.0), c.data.ptr, n, m * n, count,
        )  # fmt: skip

    def capture(self, work: Callable[[], None]):
        """The launches of `work` as a CUDA graph; none of them is done."""
        # Each of CuPy's calls sets the handle's stream, and that takes from cuBLAS the workspace that it was given. It
        # needs one: it would otherwise allocate memory, which a capture forbids.
        handles, streams = (self.blas_handle, self.second_blas_handle), (self.stream, self.second_stream)
        for handle, stream, workspace in zip(handles, streams, self.workspaces, strict=True):
            self.blas.setStream(handle, stream.ptr)
            self.captured_blas.set_workspace(handle, workspace.data.ptr, workspace.nbytes)
        self.join_communication()
        self.stream.begin_capture()
        self.capturing = True
        try:
            self.wait_for(self.second_stream, self.stream)  # `communicate` waits for it, so it must be in the capture
            work()
            self.join()
            self.join_communication()
        finally:
            self.capturing = False
            graph = self.stream.end_capture()
        return graph

    def record(self, work: Callable[..., None]) -> Callable[..., None]:
        return Recording(self, work) if self.recording else work

    @contextmanager
    def beside(self) -> Iterator[None]:
        if not self.capturing:
            yield
            return
        self.wait_for(self.second_stream, self.stream)
        first, self.blas_handle = self.blas_handle, self.second_blas_handle
        try:
            with self.on(self.second_stream):
                yield
        finally:
            self.blas_handle = first

    @contextmanager
    def on(self, stream) -> Iterator[None]:
        """Within the block, work is given to this stream."""
        before, self.stream = self.stream, stream
        stream.use()
        try:
            yield
        finally:
            self.stream = before
            before.use()

    def join(self) -> None:
        if self.capturing:
            self.wait_for(self.stream, self.second_stream)

    def communicate(self, work: Callable[[int], None], last: bool) -> None:
        stream = self.fourth_stream if last else self.third_stream
        self.wait_for(stream, self.stream)
        if self.capturing and self.stream is not self.second_stream:
            self.wait_for(stream, self.second_stream)
        if self.communicating not in (None, stream):
            self.wait_for(stream, self.communicating)
        with self.on(stream):
            work(stream.ptr)
        self.communicating = stream

    def communicated(self):
        return self.mark(self.communicating or self.stream)

    def join_communication(self, mark=None) -> None:
        if mark is not None:
            self.stream.wait_event(mark)
        elif self.communicating:
            self.wait_for(self.stream, self.communicating)
            self.communicating = None

    def address(self, array) -> int:
        return array.data.ptr

    def memory_handle(self, array) -> tuple[str, int]:
        base, size = ctypes.c_void_p(), ctypes.c_size_t()
        address = ctypes.c_void_p(array.data.ptr)
        call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return self.cupy.cuda.runtime.ipcGetMemHandle(base.value).hex(), array.data.ptr - base.value

    def open_memory(self, handle: tuple[str, int], like):
        name, offset = handle
        if name not in self.opened:  # one allocation can hold several arrays, and CUDA opens it once
            self.opened[name] = self.cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(name))
        # As if it were this device's: CuPy would make a context on the other one.
        here = self.cupy.cuda.runtime.getDevice()
        memory = self.cupy.cuda.UnownedMemory(self.opened[name], offset + like.nbytes, self, here)
        return self.cupy.ndarray(like.shape, like.dtype, self.cupy.cuda.MemoryPointer(memory, offset))

    def memory_operations(self, operations) -> None:
        # A CUstreamBatchMemOpParams has 48 bytes: what to do, address, value, and how a word is compared (1: equal).
        parameters = np.zeros((len(operations), 6), np.uint64)
        for fields, (what, word, value) in zip(parameters, operations, strict=True):
            fields[:4] = {"wait": 1, "write": 2}[what], word.data.ptr, value, what == "wait"
        stream, address = ctypes.c_void_p(self.stream.ptr), ctypes.c_void_p(parameters.ctypes.data)
        call_driver("cuStreamBatchMemOp_v2", stream, len(operations), address, 0)

    def wait_for(self, stream, other) -> None:
        """Lets a stream wait for all work that another one has been given."""
        stream.wait_event(self.mark(other))

    def mark(self, stream):
        """An event behind all work that a stream has been given."""
        event = self.cupy.cuda.Event(block=False, disable_timing=True)
        event.record(stream)
        return event


def call_driver(function: str, *arguments) -> None:
    """Calls a function of CUDA's driver that CuPy does not have; by the time that CuPy works, its library is there."""
    error = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if error:
        raise RuntimeError(f"{function} returned {error}")


class CapturedBlas:
    """cuBLAS's products for the time of a capture, when CuPy refuses to call them: the same functions by ctypes, with
    the arguments of CuPy's. CuPy has loaded the library already; the name alone finds it."""

    def __init__(self, cuda_version: int):
        library = ctypes.CDLL(f"libcublas.so.{cuda_version}")
        pointer, size, number = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
        shape = [pointer, number, number, number, number, number, pointer]  # handle, transpositions, n, m, k, alpha
        self.sgemm = library.cublasSgemm_v2
        self.sgemm.argtypes = [*shape, pointer, number, pointer, number, pointer, pointer, number]
        self.sgemmStridedBatched = library.cublasSgemmStridedBatched
        matrix = [pointer, number, size]
        self.sgemmStridedBatched.argtypes = [*shape, *matrix, *matrix, pointer, *matrix, number]
        self.set_workspace = library.cublasSetWorkspace_v2
        self.set_workspace.argtypes = [pointer, pointer, ctypes.c_size_t]
        for function in (self.sgemm, self.sgemmStridedBatched, self.set_workspace):
            function.errcheck = check_cublas


@functools.cache
def second_cublas_handle(cublas) -> int:
    """A handle beside CuPy's own, made once: each has memory of its own on the device."""
    return cublas.create()


def check_cublas(status: int, function, arguments) -> None:
    if status != 0:
        raise RuntimeError(f"{function.__name__} failed with status {status}")


@functools.cache
def address_of(factor: float) -> int:
    """Where a product's factor lies on the host, as cuBLAS wants it."""
    FACTORS.append(np.array([factor], np.float32))
    return FACTORS[-1].ctypes.data


FACTORS: list[np.ndarray] = []  # keeps them where they are


class CudaEvent:
    def __init__(self, cupy, stream):
        self.event = cupy.cuda.Event(block=False, disable_timing=True)
        self.event.record(stream)

    def wait(self) -> float:
        self.event.synchronize()
        return time.perf_counter()


class Recording:
    """Work on the device that is done over and over: the first call does it, later calls with the same arguments replay
    it as a CUDA graph.

    A graph holds the launches with their arguments, so replaying costs the host one call however many kernels there
    are. The first call also loads every kernel, which a capture could not do.
    """

    def __init__(self, device: CudaDevice, work: Callable[..., None]):
        self.device, self.work = device, work
        self.graphs = {}  # by the arguments; None where there was one call

    def __call__(self, *arguments) -> None:
        if arguments not in self.graphs:
            self.graphs[arguments] = None
            self.work(*arguments)
            self.device.join_communication()
            return
        if self.graphs[arguments] is None:
            self.graphs[arguments] = self.device.capture(lambda: self.work(*arguments))
        self.graphs[arguments].launch(self.device.stream)


class CpuDevice:
    kind = "cpu"
    identity = ""
    compute_capability = 0
    tf32 = False
    shared_memory = 227 << 10  # as on compute capability 9.0; runtime.cpp refuses more
    recording = False
    multiprocessors = 4  # however many cores there are: how sums are shared out decides how they are rounded

    def __init__(self):
        self.modules, self.constants = {}, {}
        cpu.warp_size()  # a wrong LLMC_CPU_WARP is refused now, not at the first launch
        cores = cpu.threads()
        self.pool = ThreadPoolExecutor(cores, initializer=lambda: np.seterr(over="ignore", invalid="ignore"))
        self.name = f"CPU, {cores} cores"

    def use_tf32(self, on: bool) -> bool:
        return False

    def warp_size(self, path: Path) -> int:
        return self.module(path).warp_size

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    pinned = empty

    def copy_in(self, dst, src: np.ndarray) -> None:
        dst.reshape(-1)[: src.size] = src.reshape(-1)

    def copy_out(self, dst: np.ndarray, src) -> None:
        dst.reshape(-1)[:] = src.reshape(-1)[: dst.size]

    def asarray(self, array: np.ndarray):
        return np.array(array)

    def to_host(self, array) -> np.ndarray:
        return np.array(array)

    def pieces(self, array) -> Iterator[np.ndarray]:
        yield array

    def fill_zero(self, array) -> None:
        array.fill(0)

    def copy(self, dst, src) -> None:
        dst[:] = src

    def synchronize(self) -> None:
        pass

    def event(self) -> "CpuEvent":
        return CpuEvent()

    def memory(self) -> tuple[int, int]:
        return host_memory()

    def kernel(self, path: Path, name: str) -> Callable:
        return self.module(path).kernel(name)

    def module(self, path: Path) -> cpu.Module:
        if path not in self.modules:
            self.modules[path] = cpu.compile_source(path)
        return self.modules[path]

    def compile_all(self, paths: list[Path]) -> None:
        self.modules.update(zip(paths, cpu.compile_all(paths), strict=True))

    def sgemm(self, c, a, b, m, n, k, trans_a, trans_b, beta) -> None:
        (a,), (b,), (c,) = matrix(a, m, k, trans_a), matrix(b, k, n, trans_b), matrix(c, m, n, False)
        self.product(c, a, b, np.float32(beta))

    def product(self, c, a, b, beta) -> None:
        """c = a @ b + beta * c, c's longer side shared out among the cores; NumPy lets go of the interpreter's lock."""

        def part(share: slice) -> None:
            rows, columns = (share, slice(None)) if c.shape[0] >= c.shape[1] else (slice(None), share)
            if beta == 0.0:
                np.matmul(a[rows], b[:, columns], out=c[rows, columns])
            else:
                c[rows, columns] *= beta
                c[rows, columns] += a[rows] @ b[:, columns]

        self.share(max(c.shape), part, c.size * a.shape[1])

    def share(self, length: int, part: Callable[[slice], None], work: int) -> None:
        """Do `part` for slices that together make up range(length), on several cores where the work is worth it.

        How many slices there are depends on the work alone: a product of another shape may be rounded differently.
        """
        parts = 1 if work < 1 << 18 else 2 if work < 1 << 26 else 8
        shares = [slice(i * length // parts, (i + 1) * length // parts) for i in range(parts)]
        with np.errstate(over="ignore", invalid="ignore"):  # as on a GPU, what is not finite is no one's business here
            list(self.pool.map(part, shares) if parts > 1 else map(part, shares))

    def sgemm_strided_batched(self, c, a, b, m, n, k, trans_a, trans_b, count) -> None:
        a, b, c = matrix(a, m, k, trans_a, count), matrix(b, k, n, trans_b, count), matrix(c, m, n, False, count)
        self.share(count, lambda s: np.matmul(a[s], b[s], out=c[s]), count * m * n * k)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass

    def address(self, array) -> int:
        return array.__array_interface__["data"][0]

    def memory_operations(self, operations) -> None:
        for what, word, value in operations:
            if what == "write":
                word[0] = value
            while what == "wait" and word[0] != value:
                time.sleep(0)  # lets other threads go on

    def communicate(self, work: Callable[[int], None], last: bool) -> None:
        work(0)

    def communicated(self) -> None:
        pass

    def join_communication(self, mark: None = None) -> None:
        pass


class CpuEvent:
    def __init__(self):
        self.time = time.perf_counter()  # all work is done when a call returns

    def wait(self) -> float:
        return self.time


class ObservedDevice:
    """A device with an observer in front of its kernel launches, matrix products and memsets."""

    def __init__(self, device: CudaDevice | CpuDevice, observer: Callable):
        self.device, self.observer = device, observer
        for name in ("sgemm", "sgemm_strided_batched", "fill_zero"):
            work = getattr(device, name)
            setattr(self, name, functools.partial(self.call, name, work, list(inspect.signature(work).parameters)))

    def __getattr__(self, name: str):
        return getattr(self.device, name)

    def call(self, name: str, work: Callable, parameters: list[str], *arguments) -> None:
        self.observer(name, dict(zip(parameters, arguments, strict=True)), lambda: work(*arguments))

    def kernel(self, path: Path, name: str) -> Callable:
        kernel, parameters = self.device.kernel(path, name), kernel_parameters(path)[name]

        def launch(grid: tuple, block: tuple, args: tuple, shared_mem: int = 0) -> None:
            arguments = dict(zip(parameters, args, strict=True))
            self.observer(name, arguments, lambda: kernel(grid, block, args, shared_mem))

        return launch


def kernel_declarations(path: Path) -> dict[str, list[str]]:
    """The kernels that a .cu file declares, each with the declarations of its parameters."""
    declared = re.findall(r"__global__[^;{]*?(\w+)\s*\(([^()]*)\)\s*\{", path.read_text())
    return {name: parameters.split(",") for name, parameters in declared}


def kernel_parameters(path: Path) -> dict[str, list[str]]:
    """The same, each with the names of its parameters."""
    declared = kernel_declarations(path)
    return {name: [re.findall(r"\w+", one)[-1] for one in parameters] for name, parameters in declared.items()}


def matrix(array: np.ndarray, rows: int, columns: int, transposed: bool, count: int = 1) -> np.ndarray:
    """The beginning of a contiguous array as `count` matrices (rows, columns), each of which may lie transposed."""
    flat = array.reshape(-1)[: count * rows * columns]
    if transposed:
        return flat.reshape(count, columns, rows).transpose(0, 2, 1)
    return flat.reshape(count, rows, columns)


_device: CudaDevice | CpuDevice | None = None
_why_not_cuda = ""
_sources: list[Source] = []


def use(kind: str = "auto", number: int = 0) -> str:
    """Choose the device: "cuda", "cpu", or "auto" (CUDA where it works, else the CPU, and `why_not_cuda` says why).
    Returns "cuda" or "cpu". number: which GPU, of those that this program sees; it starts over where they are fewer.

    Raises UserError where CUDA is asked for and does not work.
    """
    global _device, _why_not_cuda
    if kind not in ("auto", "cuda", "cpu"):
        raise UserError(f"device {kind!r} is not one of auto, cuda, cpu")
    device, _why_not_cuda = None, ""
    if kind != "cpu":
        try:
            device = CudaDevice(number)
        except Exception as error:  # CuPy missing, no driver, no GPU, a driver too old: each its own type
            _why_not_cuda = first_line(error)
            if kind == "cuda":
                remedy = next((CUDA_REMEDIES[part] for part in CUDA_REMEDIES if part in _why_not_cuda), CUDA_REMEDY)
                raise UserError(
                    f"CUDA does not work here ({_why_not_cuda}): {remedy}, or run with --device cpu"
                ) from None
    _device = device or CpuDevice()
    forget_kernels()
    return _device.kind


def source(python_file: str) -> Source:
    """The .cu file beside a module of launchers: `cu = device.source(__file__)`."""
    found = Source(Path(python_file).with_suffix(".cu"))
    _sources.append(found)
    return found


def compile_all() -> None:
    """Compile every kernel file that has been imported, several at a time, rather than each at its first launch."""
    _device.compile_all([source._path for source in _sources])


def kind() -> str:
    """"cuda" or "cpu"."""
    return _device.kind


def why_not_cuda() -> str:
    """Why "auto" came to mean the CPU, in a line; empty where it did not."""
    return _why_not_cuda


def name() -> str:
    """What the device calls itself: "NVIDIA H200", or "CPU, 2 cores"."""
    return _device.name


def identity() -> str:
    """What tells a GPU from the others of its machine; empty on the CPU."""
    return _device.identity


def compute_capability() -> int:
    """A GPU's compute capability, 90 for 9.0; 0 on the CPU."""
    return _device.compute_capability


def multiprocessors() -> int:
    """Among how many blocks work should at least be shared out: a GPU's multiprocessors, a fixed number on the CPU."""
    return _device.multiprocessors


def shared_memory() -> int:
    """Bytes of shared memory that a block can have."""
    return _device.shared_memory


def use_tf32(on: bool) -> bool:
    """Let matrix products round their operands to TF32 (10 mantissa bits); returns whether they now do."""
    return _device.use_tf32(on)


def tf32() -> bool:
    """Whether matrix products round their operands to TF32."""
    return _device.tf32


def use_recording(on: bool) -> None:
    """Let `record` replay what it is given as a graph (where there are graphs), or leave every launch to be seen."""
    _device.recording = on


@contextmanager
def observe(observer: Callable[[str, dict, Callable[[], None]], None]) -> Iterator[None]:
    """Within the block, `observer(name, arguments, work)` stands for every kernel launch, matrix product and memset: it
    has to call `work()`. name: the kernel's, "sgemm", "sgemm_strided_batched" or "fill_zero"; arguments: by the names
    of its parameters. What `record` replays is not seen (see `use_recording`)."""
    global _device
    observed = _device
    _device = ObservedDevice(observed, observer)
    forget_kernels()
    try:
        yield
    finally:
        _device = observed
        forget_kernels()


def forget_kernels() -> None:
    """Let every source look its kernels up again, on the device that is now in use."""
    for source in _sources:
        source._forget()


def empty(shape, dtype=np.float32):
    """An uninitialised device array."""
    return _device.empty(shape, dtype)


def zeros(shape, dtype=np.float32):
    """A device array of zeros."""
    array = _device.empty(shape, dtype)
    _device.fill_zero(array)
    return array


def pinned(shape, dtype) -> np.ndarray:
    """A host array for copies to and from the device, in page-locked memory on CUDA so that they are asynchronous."""
    return _device.pinned(shape, dtype)


def copy_in(dst, src: np.ndarray) -> None:
    """Start copying a contiguous host array over the beginning of a device array. src must not change until
    `synchronize`."""
    if not src.flags.c_contiguous or src.size > dst.size or src.dtype != dst.dtype:
        raise ValueError(f"{src.dtype} {src.shape} does not fit into {dst.dtype} {dst.shape}, or is not contiguous")
    _device.copy_in(dst, src)


def copy_out(dst: np.ndarray, src) -> None:
    """Start filling a host array from the beginning of a device array; dst is valid after `synchronize`."""
    _device.copy_out(dst, src)


def asarray(array: np.ndarray):
    """A device array with the contents of a host array."""
    return _device.asarray(array)


def to_host(array) -> np.ndarray:
    """A new host array with the contents of a device array."""
    return _device.to_host(array)


def constant(values: tuple[int, ...], dtype):
    """A device array of these integers, which is made once and must not be written to."""
    key = values, np.dtype(dtype)
    if key not in _device.constants:
        _device.constants[key] = _device.asarray(np.array(values, dtype))
    return _device.constants[key]


def address(array) -> int:
    """Where a device array begins in memory, as kernels see it."""
    return _device.address(array)


def memory_handle(array) -> tuple[str, int]:
    """What another process of this machine can open an array on a GPU by. Raises an error where CUDA does not let
    it."""
    return _device.memory_handle(array)


def open_memory(handle: tuple[str, int], like):
    """The array on another process's GPU that has this handle, of the shape and type of `like`. Raises an error where
    this GPU does not reach that one's memory."""
    return _device.open_memory(handle, like)


def memory_operations(operations: list[tuple[str, object, int]]) -> None:
    """Does operations on single words, one after another, that occupy no multiprocessor: ("write", word, value) sets a
    word, ("wait", word, value) waits until it has that value. A word is an array (1,) of uint32, of this GPU or, to be
    written, another one's. What the device did before is there for all GPUs when they see a word written, since CUDA
    has a memory fence before each write. Raises an error where CUDA has no such operations (CUDA driver API,
    cuStreamBatchMemOp)."""
    _device.memory_operations(operations)


def pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """A flat device or host array, piece by piece on the host, so that there is never a whole copy of it."""
    return iter([array]) if isinstance(array, np.ndarray) else _device.pieces(array)


def fill_zero(array) -> None:
    """Set a contiguous device array to zero."""
    _device.fill_zero(array)


def copy(dst, src) -> None:
    """Copy a contiguous device array over another of the same size and type."""
    _device.copy(dst, src)


def synchronize() -> None:
    """Wait until all work given to the device is done."""
    _device.synchronize()


def event():
    """A mark behind the work that the device has been given: `.wait()` waits until that is done and returns when it was
    (time.perf_counter)."""
    return _device.event()


def memory() -> tuple[int, int]:
    """(free, total) bytes of the device's memory."""
    return _device.memory()


def host_memory() -> tuple[int, int]:
    """(free, total) bytes of the host's memory."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        available = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:  # not Linux
        available = None
    return int(available[1]) << 10 if available else total, total


def sgemm(c, a, b, m: int, n: int, k: int, trans_a: bool = False, trans_b: bool = False, beta: float = 0.0) -> None:
    """c (m, n) = op(a) (m, k) @ op(b) (k, n) + beta * c, all by rows and contiguous, fp32 (TF32 products if `tf32()`).

    With trans_a, a lies in memory as (k, m) and op transposes it; trans_b likewise, b as (n, k).
    """
    _device.sgemm(c, a, b, m, n, k, trans_a, trans_b, beta)


def sgemm_strided_batched(
    c, a, b, m: int, n: int, k: int, count: int, trans_a: bool = False, trans_b: bool = False
) -> None:
    """`sgemm` for `count` matrices that follow one another in each of a, b and c; c is set."""
    _device.sgemm_strided_batched(c, a, b, m, n, k, trans_a, trans_b, count)


def record(work: Callable[..., None]) -> Callable[..., None]:
    """A function that does `work` each time it is called; on CUDA as a replayed graph, from the second call with the
    same arguments on, unless `use_recording` has turned that off.

    For the same arguments `work` must give the device the same launches on the same arrays every time, and may not copy
    to or from the host.
    """
    return _device.record(work)


def beside() -> AbstractContextManager[None]:
    """Within the block, work is given to the device that may be done beside what follows the block, until `join`: it
    writes nothing which that reads or writes, and reads nothing which that writes. Blocks are done one after another,
    each after what came before it. A replayed graph has a second stream for them; else they are done where they stand.
    """
    return _device.beside()


def join() -> None:
    """What follows is done after all blocks of `beside`. `record` wants none to be left open."""
    _device.join()


def communicate(work: Callable[[int], None], last: bool = False) -> None:
    """Do `work`, given a CUDA stream, which is for what several GPUs do together: it waits for all that the device has
    been given, and is done beside what follows, until `join_communication`. Within a block of `beside`, while a step is
    recorded, it waits for that block alone. What `work` launches and copies is given to that stream. Its kernels come
    before all others or, with `last`, where the others leave room; all work of `communicate` is done in the order
    given. The CPU does it at once."""
    _device.communicate(work, last)


def communicated():
    """A mark behind all work of `communicate` so far, for `join_communication`."""
    return _device.communicated()


def join_communication(mark=None) -> None:
    """What follows is done after all work of `communicate`, or, given a mark, after the work before it. `record` does
    so by itself at its end."""
    _device.join_communication(mark)

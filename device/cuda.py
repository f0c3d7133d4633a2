"""An NVIDIA GPU through CuPy. CpuDevice (cpu.py) has the same operations, and its docstrings explain them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from device.bf16 import DEFINES, floatX_of
from device.cublas import Cublas
from device.cuda_kernel import CudaKernel, ProgrammaticKernel
from device.driver import call_driver
from device.errors import UserError
from device.host import page_locked
from device.nvrtc import NVRTC_OPTIONS, architecture_for, check_cupys_cache, compile_file
from device.progress import progress
from device.sources import architecture_of, programmatic_kernels
from device.tma import TensorMap

import numpy as np

PIECE = 1 << 24  # floats that `pieces` copies to the host at a time


class CudaDevice:
    kind = "cuda"
    has_streams = True
    emulates = False  # whether it runs what an older GPU would run

    def __init__(self, number: int = 0):
        import cupy
        from cupy.cuda import runtime

        self.cupy = cupy
        count = runtime.getDeviceCount()
        check_cupys_cache()
        cupy.cuda.Device(number % count).use()
        self.properties = runtime.getDeviceProperties(runtime.getDevice())
        self.name = self.properties["name"].decode()
        self.identity = ":".join(f"{self.properties[key]:x}" for key in ("pciDomainID", "pciBusID", "pciDeviceID"))
        self.multiprocessors = self.properties["multiProcessorCount"]
        self.shared_memory = self.properties["sharedMemPerBlockOptin"]
        self.l2_bytes = self.properties["l2CacheSize"]
        self.compute_capability = self.properties["major"] * 10 + self.properties["minor"]
        # With this variable tests run what an older GPU would run, one of compute capability 7.5, say. Kernels become
        # PTX for it, which the driver compiles for this GPU. Only cuBLAS knows this GPU as it is.
        if older := os.environ.get("LLMC_COMPUTE_CAPABILITY"):
            self.compute_capability, self.emulates = older_capability(older, self.compute_capability), True
            self.shared_memory = min(self.shared_memory, (64 if self.compute_capability < 80 else 99) << 10)
        self.kernels: dict[tuple[Path, str, np.dtype], Callable[..., None]] = {}  # which Source.launch has found
        self.modules: dict[tuple[Path, np.dtype], Any] = {}
        self.constants: dict[tuple, Any] = {}
        self.regions: dict[str, list] = defaultdict(list)  # of device.scratch
        self.opened: dict[str, int] = {}
        # Streams of our own, because the default stream cannot be captured into a graph. The main stream has priority
        # over the side stream, because more work waits for it. The next two are for communication between GPUs. The
        # urgent one does what other ranks need soon, before everything else; the patient one does what they need later.
        # The last three fetch, update and store numbers that lie on the host.
        self.main_stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self.side_stream = cupy.cuda.Stream(non_blocking=True)
        self.urgent_stream = cupy.cuda.Stream(non_blocking=True, priority=-2)
        self.patient_stream = cupy.cuda.Stream(non_blocking=True)
        self.fetch_stream, self.store_stream = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self.update_stream = cupy.cuda.Stream(non_blocking=True, priority=-2)
        self.stream = self.main_stream
        self.stream.use()
        self.waiting: set = set()  # streams that wait for another stream before their next launch
        self.blas = Cublas(cupy, [self.main_stream, self.side_stream])
        self.gemm, self.gemm_strided_batched = self.blas.gemm, self.blas.gemm_strided_batched
        self.capturing, self.recording = False, True
        self.comm_stream, self.in_comm_work = None, False
        self.use_precision("tf32")

    def use_precision(self, precision: str) -> str:
        if self.compute_capability < 80 and (precision != "fp16" or self.compute_capability < 75):
            precision = "fp32"
        if precision == "fp8" and self.compute_capability < 89:
            precision = "bf16"
        self.precision, self.floatX = precision, floatX_of(precision)
        self.blas.use_precision(precision)
        return precision

    @property
    def tf32(self) -> bool:
        return self.precision == "tf32"

    # Memory

    def empty(self, shape, dtype=np.float32):
        return self.cupy.empty(shape, dtype)

    def pinned(self, shape, dtype) -> np.ndarray:
        count = int(np.prod(shape))
        memory = self.cupy.cuda.alloc_pinned_memory(max(1, count) * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def large_pinned(self, shape, dtype=np.float32) -> np.ndarray:
        size, runtime = int(np.prod(shape)) * np.dtype(dtype).itemsize, self.cupy.cuda.runtime
        memory = page_locked(
            size, self.identity, lambda address, size: runtime.hostRegister(address, size, 0), runtime.hostUnregister
        )
        return memory.view(dtype).reshape(shape)

    def copy_in(self, dst, src: np.ndarray) -> None:
        if isinstance(dst, np.ndarray):
            self.copy(dst.reshape(-1)[: src.size], src)
            return
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
        if isinstance(array, np.ndarray):
            self.synchronize()
            array.fill(0)
            return
        array.data.memset_async(0, array.nbytes, self.stream)

    def copy(self, dst, src) -> None:
        if isinstance(dst, np.ndarray) or isinstance(src, np.ndarray):
            runtime = self.cupy.cuda.runtime  # which sees from the addresses where each array lies
            runtime.memcpyAsync(
                self.address(dst), self.address(src), src.nbytes, runtime.memcpyDefault, self.stream.ptr
            )
            return
        dst.data.copy_from_device_async(src.data, src.nbytes, self.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def event(self) -> CudaEvent:
        return CudaEvent(self.cupy, self.stream)

    def memory(self) -> tuple[int, int]:
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return free + self.cupy.get_default_memory_pool().free_bytes(), total

    def address(self, array) -> int:
        return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr

    def tensor_map(self, array, shape: tuple[int, ...], box: tuple[int, int, int]) -> TensorMap:
        made = TensorMap.of(array)
        rows, columns = shape[1:]
        sizes, strides = (ctypes.c_uint64 * 3)(*shape[::-1]), (ctypes.c_uint64 * 2)(2 * columns, 2 * columns * rows)
        boxes, steps = (ctypes.c_uint32 * 3)(*box[::-1]), (ctypes.c_uint32 * 3)(1, 1, 1)
        # 9: bf16, 0: not interleaved, 3: swizzled by 128 bytes, 2: L2 fetches 128 bytes, 0: zeros outside the array.
        call_driver(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(made.ctypes.data), 9, 3, ctypes.c_void_p(array.data.ptr), sizes,
            strides, boxes, steps, 0, 3, 2, 0,
        )  # fmt: skip
        return made

    # Kernels

    def warp_size(self, path: Path) -> int:
        return 32

    def kernel(self, path: Path, name: str) -> CudaKernel:
        function = self.module(path).get_function(name)
        # A driver before CUDA 12.3 cannot capture programmatic launches into a graph.
        can = self.compute_capability >= 90 and self.cupy.cuda.runtime.driverGetVersion() >= 12030
        kind = ProgrammaticKernel if can and name in programmatic_kernels(path) else CudaKernel
        return kind(function, name, self)

    def module(self, path: Path):
        if (path, self.floatX) not in self.modules:
            self.load(path, self.compiled(path))
        return self.modules[path, self.floatX]

    def load(self, path: Path, code: bytes) -> None:
        module = self.cupy.cuda.Module()
        module.load(code)
        self.modules[path, self.floatX] = module

    def compiled(self, path: Path) -> bytes:
        if why := self.why_not_kernels(path):
            raise UserError(why)
        nvrtc = self.cupy.cuda.nvrtc
        architecture = architecture_of(path) or architecture_for(nvrtc, self.compute_capability, self.name)
        kind = "compute" if self.emulates else "sm"  # PTX, which the driver compiles for the GPU, or its own code
        with progress.compiling():
            return compile_file(nvrtc, path, (*NVRTC_OPTIONS, *DEFINES[self.floatX], f"-arch={kind}_{architecture}"))

    def why_not_kernels(self, path: Path) -> str:
        architecture = architecture_of(path)
        if not architecture:
            return ""
        capability = int(architecture.rstrip("a"))
        if capability == self.compute_capability:
            return ""
        return f"{path.name} is for GPUs of compute capability {capability / 10}, which {self.name} is not"

    def compile_all(self, paths: list[Path]) -> None:
        paths = [path for path in paths if (path, self.floatX) not in self.modules]
        progress.expect(len(paths))
        codes: dict[Path, bytes] = {}
        failures: list[BaseException] = []

        def compile_one(path: Path) -> None:
            try:
                codes[path] = self.compiled(path)
            except BaseException as error:
                failures.append(error)

        # NVRTC releases the interpreter's lock. After Ctrl-C nobody waits for these threads. A join without a timeout
        # may hear of Ctrl-C only when the file is compiled, because the system may tell another thread of it.
        threads = [threading.Thread(target=compile_one, args=(path,), daemon=True) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(timeout=0.1)
        for failure in failures:
            raise failure
        for path in paths:  # by this thread, which has chosen the GPU
            self.load(path, codes[path])

    # Streams

    @contextmanager
    def on(self, stream) -> Iterator[None]:
        before = self.stream
        self.switch(stream)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, stream) -> None:
        if stream is not self.stream:
            self.stream = stream
            stream.use()
            self.blas.use_stream(stream)

    def mark(self, stream):
        event = self.cupy.cuda.Event(block=False, disable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream, mark) -> None:
        stream.wait_event(mark)
        self.waiting.add(stream)

    def capture(self, work: Callable[[], None]):
        self.wait_comm()
        with self.blas.captured():
            self.main_stream.begin_capture()
            self.capturing = True
            try:
                self.wait(self.side_stream, self.mark(self.main_stream))  # so the side stream belongs to the graph
                work()
                self.wait(self.main_stream, self.mark(self.side_stream))
                self.wait_comm()
            finally:
                self.capturing = False
                graph = self.main_stream.end_capture()
        return graph

    def on_comm_stream(self, work: Callable[[int], None], urgent: bool = True, after: list | None = None) -> None:
        stream = self.urgent_stream if urgent else self.patient_stream
        for mark in after or [self.mark(self.stream)]:
            self.wait(stream, mark)
        if self.comm_stream not in (None, stream):
            self.wait(stream, self.mark(self.comm_stream))
        outer, self.in_comm_work = self.in_comm_work, True
        try:
            with self.on(stream):
                work(stream.ptr)
        finally:
            self.in_comm_work = outer
        self.comm_stream = stream

    def mark_comm(self):
        return self.mark(self.comm_stream or self.stream)

    def wait_comm(self) -> None:
        if self.comm_stream:
            self.wait(self.stream, self.mark_comm())
            self.comm_stream = None

    # Other GPUs of this machine

    def memory_handle(self, array) -> tuple[str, int]:
        base, size = ctypes.c_void_p(), ctypes.c_size_t()
        address = ctypes.c_void_p(array.data.ptr)
        call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return self.cupy.cuda.runtime.ipcGetMemHandle(base.value).hex(), array.data.ptr - base.value

    def open_memory(self, handle: tuple[str, int], like):
        name, offset = handle
        if name not in self.opened:  # one allocation can hold several arrays, and CUDA opens it once
            self.opened[name] = self.cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(name))
        # CuPy is told that the memory is this device's; else it would make a context on the other device.
        here = self.cupy.cuda.runtime.getDevice()
        memory = self.cupy.cuda.UnownedMemory(self.opened[name], offset + like.nbytes, self, here)
        return self.cupy.ndarray(like.shape, like.dtype, self.cupy.cuda.MemoryPointer(memory, offset))

    def memory_operations(self, operations: list[tuple[str, Any, int]]) -> None:
        # A CUstreamBatchMemOpParams has 48 bytes: what to do, address, value, and how a word is compared (1: equal).
        parameters = np.zeros((len(operations), 6), np.uint64)
        for fields, (what, word, value) in zip(parameters, operations, strict=True):
            fields[:4] = {"wait": 1, "write": 2}[what], word.data.ptr, value, what == "wait"
        stream, address = ctypes.c_void_p(self.stream.ptr), ctypes.c_void_p(parameters.ctypes.data)
        call_driver("cuStreamBatchMemOp_v2", stream, len(operations), address, 0)


class CudaEvent:
    def __init__(self, cupy, stream):
        self.cupy, self.event = cupy, cupy.cuda.Event()
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, begin: CudaEvent) -> float:
        self.wait()
        return self.cupy.cuda.get_elapsed_time(begin.event, self.event)


def older_capability(text: str, own: int) -> int:
    """The compute capability that LLMC_COMPUTE_CAPABILITY names, 75 for 7.5. Raises UserError if it is no number, or
    above the GPU's own."""
    if not text.isdecimal() or not 50 <= int(text) <= own:
        raise UserError(f"LLMC_COMPUTE_CAPABILITY={text} is no number from 50 to {own}, such as 75 for 7.5")
    return int(text)

"""cuBLAS's matrix products: of fp32 matrices through CuPy; the others, and those that add to another matrix, by
cublaslt.py."""

from __future__ import annotations

import ctypes
import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from device.bf16 import BF16
from device.cublaslt import CublasLt

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKSPACE = 32 << 20  # bytes
CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT = 14, 68, -1
# CUBLAS_DEFAULT_MATH, and two that CuPy lacks: CUBLAS_TF32_TENSOR_OP_MATH and
# CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
MATH_MODES = {"fp32": 0, "tf32": 3, "fp16": 0, "bf16": 16, "fp8": 16}
TYPES = {BF16: CUDA_R_16BF, np.dtype(np.float32): 0}  # CUDA_R_32F


class Cublas:
    """Products on the streams of a CudaDevice. Each stream has a handle of its own, because two products that run at
    the same time must not share a workspace."""

    def __init__(self, cupy: Any, streams: list[Any]):
        from cupy.cuda import cublas, runtime
        from cupy.cuda.device import get_cublas_handle

        self.cupy_calls, self.streams = cublas, streams
        cuda_version = runtime.runtimeGetVersion() // 1000
        self.captured_calls = CapturedCalls(cuda_version)
        self.handles = [get_cublas_handle(), *(another_handle(cublas, i) for i in range(1, len(streams)))]
        self.workspaces = cupy.empty((len(streams), WORKSPACE), np.uint8)
        self.calls, self.at = self.cupy_calls, 0  # at: number of the present stream
        self.lt = CublasLt(cupy, self.handles[0], cuda_version)

    def use_precision(self, precision: str) -> None:
        """Sets cuBLAS's math mode. Without it cuBLAS could split a bf16 product's sum, and add up the parts in bf16."""
        for handle in self.handles:
            self.cupy_calls.setMathMode(handle, MATH_MODES[precision])
        self.lt.precision = precision

    @property
    def handle(self) -> int:
        return self.handles[self.at]

    def use_stream(self, stream: Any) -> None:
        """Gives the products that follow to this stream, if it has a handle."""
        if stream in self.streams:
            self.at = self.streams.index(stream)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Within the block products can be captured into a graph."""
        # Each of CuPy's calls sets the handle's stream, and after that cuBLAS no longer uses the workspace that it was
        # given. Without one it would allocate memory, which a capture forbids. So we set it again.
        for handle, stream, workspace in zip(self.handles, self.streams, self.workspaces, strict=True):
            self.cupy_calls.setStream(handle, stream.ptr)
            self.captured_calls.set_workspace(handle, workspace.data.ptr, workspace.nbytes)
        self.calls = self.captured_calls
        try:
            yield
        finally:
            self.calls = self.cupy_calls

    def gemm(
        self, c, a, b, m: int, n: int, k: int, trans_a: bool = False, trans_b: bool = False, add=None,
        bias=None, scale_a=None, scale_b=None,
    ) -> None:  # fmt: skip
        if a.dtype != np.float32 or bias is not None or add is not None and add is not c:
            here = self.streams[self.at], self.workspaces[self.at], self.calls is self.captured_calls
            self.lt.gemm(c, a, b, m, n, k, trans_a, trans_b, add, bias, scale_a, scale_b, *here)
            return
        # cuBLAS stores matrices by columns, so it sees each of ours transposed: c^T = op(b)^T op(a)^T.
        shape = self.handle, int(trans_b), int(trans_a), n, m, k, address_of(1.0)
        ld_a, ld_b = m if trans_a else k, k if trans_b else n
        self.calls.sgemm(*shape, b.data.ptr, ld_b, a.data.ptr, ld_a, address_of(float(add is c)), c.data.ptr, n)

    def gemm_strided_batched(
        self, c, a, b, m: int, n: int, k: int, count: int, trans_a: bool = False, trans_b: bool = False,
        causal: str = "", scale_a=None, scale_b=None,
    ) -> None:  # fmt: skip
        if a.dtype == np.float16:
            here = self.streams[self.at], self.workspaces[self.at], self.calls is self.captured_calls
            self.lt.gemm(c, a, b, m, n, k, trans_a, trans_b, None, None, scale_a, scale_b, *here, count)
            return
        shape = self.handle, int(trans_b), int(trans_a), n, m, k, address_of(1.0)
        ld_a, ld_b = m if trans_a else k, k if trans_b else n
        if a.dtype == BF16:
            self.calls.gemmStridedBatchedEx(
                *shape, b.data.ptr, CUDA_R_16BF, ld_b, n * k, a.data.ptr, CUDA_R_16BF, ld_a, m * k, address_of(0.0),
                c.data.ptr, TYPES[c.dtype], n, m * n, count, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT,
            )  # fmt: skip
        else:
            self.calls.sgemmStridedBatched(
                *shape, b.data.ptr, ld_b, n * k, a.data.ptr, ld_a, m * k, address_of(0.0), c.data.ptr, n, m * n, count
            )


class CapturedCalls:
    """cuBLAS's products during a capture, when CuPy refuses to call them: the same functions by ctypes, with the same
    arguments as CuPy's. CuPy has already loaded the library, so its name is enough to find it."""

    def __init__(self, cuda_version: int):
        library = ctypes.CDLL(f"libcublas.so.{cuda_version}")
        pointer, size, number = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
        shape = [pointer, number, number, number, number, number, pointer]  # handle, transpositions, n, m, k, alpha
        self.sgemm = library.cublasSgemm_v2
        self.sgemm.argtypes = [*shape, pointer, number, pointer, number, pointer, pointer, number]
        self.sgemmStridedBatched = library.cublasSgemmStridedBatched
        matrix = [pointer, number, size]
        self.sgemmStridedBatched.argtypes = [*shape, *matrix, *matrix, pointer, *matrix, number]
        self.gemmStridedBatchedEx = library.cublasGemmStridedBatchedEx
        typed = [pointer, number, number, size]
        self.gemmStridedBatchedEx.argtypes = [*shape, *typed, *typed, pointer, *typed, number, number, number]
        self.set_workspace = library.cublasSetWorkspace_v2
        self.set_workspace.argtypes = [pointer, pointer, ctypes.c_size_t]
        for function in (self.sgemm, self.sgemmStridedBatched, self.gemmStridedBatchedEx, self.set_workspace):
            function.errcheck = check_status


@functools.cache
def another_handle(cublas: Any, number: int) -> int:
    """A handle beside CuPy's own. It is made once, because each handle has memory of its own on the device."""
    return cublas.create()


def check_status(status: int, function: Any, arguments: tuple) -> None:
    if status != 0:
        raise RuntimeError(f"{function.__name__} failed with status {status}")


@functools.cache
def address_of(factor: float) -> int:
    """The address of a product's factor on the host, which cuBLAS asks for."""
    FACTORS.append(np.array([factor], np.float32))
    return FACTORS[-1].ctypes.data


FACTORS: list[np.ndarray] = []  # keeps the factors at their addresses

"""A kernel of a .cu file on an NVIDIA GPU, and how it is launched."""

import ctypes
from typing import Any

from device.driver import LaunchAttribute, LaunchConfig, call_driver
from device.errors import UserError

import numpy as np

# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, set to 1: the kernel may start early.
PROGRAMMATIC = LaunchAttribute(6, 0, (1,))
# CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES and CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STATIC_SHARED, DYNAMIC_SHARED = 1, 8


class CudaKernel:
    """A CuPy Function that asks for more than the default 48 KiB of shared memory if a launch needs more."""

    def __init__(self, function, name: str, device: Any):  # a CudaDevice
        self.function, self.name, self.device, self.driver = function, name, device, device.cupy.cuda.driver
        self.static = self.driver.funcGetAttribute(STATIC_SHARED, function.ptr)  # bytes, which count, too
        self.shared_limit = (48 << 10) - self.static

    def __call__(self, grid: tuple, block: tuple, args: tuple, shared_mem: int = 0) -> None:
        if shared_mem > self.shared_limit:
            self.allow(shared_mem)
        self.function(grid, block, args, shared_mem=shared_mem)

    def allow(self, shared_mem: int) -> None:
        if self.static + shared_mem > self.device.shared_memory:
            raise UserError(
                f"a block of {self.name} needs {self.static + shared_mem:,} bytes of shared memory, and one of "
                f"{self.device.name} has {self.device.shared_memory:,}: take a model with fewer channels"
            )
        self.driver.funcSetAttribute(self.function.ptr, DYNAMIC_SHARED, shared_mem)
        self.shared_limit = shared_mem


class ProgrammaticKernel(CudaKernel):
    """A kernel that may start before the previous launch has ended (dependent_launch.cuh: PROGRAMMATIC). This needs
    compute capability 9.0 or later. CuPy has no such launch, so we call CUDA's driver. If the kernel's stream has to
    wait for another stream, the kernel is launched like all others, and starts when everything before it has ended."""

    def __call__(self, grid: tuple, block: tuple, args: tuple, shared_mem: int = 0) -> None:
        stream = self.device.stream
        if stream in self.device.waiting:
            self.device.waiting.remove(stream)
            super().__call__(grid, block, args, shared_mem)
            return
        if shared_mem > self.shared_limit:
            self.allow(shared_mem)
        values = (ctypes.c_int64 * len(args))(*map(bits_of, args))  # a kernel reads only the bytes of its parameter
        first = ctypes.addressof(values)
        addresses = (ctypes.c_void_p * len(args))(*range(first, first + 8 * len(args), 8))
        config = LaunchConfig(
            (*grid, 1, 1)[:3], (*block, 1, 1)[:3], shared_mem, stream.ptr, ctypes.pointer(PROGRAMMATIC), 1
        )
        call_driver("cuLaunchKernelEx", ctypes.byref(config), ctypes.c_void_p(self.function.ptr), addresses, None)


def bits_of(argument: Any) -> int:
    """An argument as a kernel gets it: the address of a device array, an int, or the bits of a numpy.float32."""
    if isinstance(argument, np.float32):
        return int(argument.view(np.int32))
    if isinstance(argument, (int, np.integer)):
        return int(argument)
    return 0 if argument is None else argument.data.ptr

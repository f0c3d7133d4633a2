"""CUDA's driver API, called through ctypes: functions that CuPy lacks, and the structures that they take."""

import ctypes
import functools


@functools.cache
def driver() -> ctypes.CDLL:
    """CUDA's driver. If CuPy works, the library is there."""
    return ctypes.CDLL("libcuda.so.1")


def call_driver(function: str, *arguments) -> None:
    """Calls a function of CUDA's driver that CuPy does not have."""
    error = getattr(driver(), function)(*arguments)
    if error:
        raise RuntimeError(f"{function} returned {error}")


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of CUDA's driver API."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int64 * 8)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of CUDA's driver API."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip

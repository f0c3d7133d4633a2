"""Kernels of a compiled library as Python callables that check their arguments."""

import ctypes
import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from device.errors import UserError

import numpy as np

# The types that a parameter may have: C's scalar types, each with a letter of the struct module, which also knows the
# range; and the element types of pointers, each with NumPy's type.
SCALARS = {
    "int": "i", "int32_t": "i", "unsigned": "I", "unsigned int": "I", "uint32_t": "I",
    "long": "l", "unsigned long": "L", "long long": "q", "int64_t": "q", "unsigned long long": "Q", "uint64_t": "Q",
    "size_t": "N", "float": "f", "double": "d", "TensorMap": "0q128s",
}  # fmt: skip
ELEMENTS = {
    "float": "f4", "float2": "f4", "float3": "f4", "float4": "f4", "double": "f8",
    "int": "i4", "int2": "i4", "int4": "i4", "int32_t": "i4", "long long": "i8", "int64_t": "i8",
    "unsigned": "u4", "unsigned int": "u4", "uint32_t": "u4",
    "unsigned long long": "u8", "size_t": "u8", "uint64_t": "u8",
    "unsigned short": "u2", "uint16_t": "u2", "bf16": "u2", "unsigned char": "u1", "uint8_t": "u1",
}  # fmt: skip


class KernelError(RuntimeError):
    """A kernel failed, or cannot be launched in this way: an assertion, a deadlock, a block that is too large.

    Names the kernel and, if it ran, block, thread and line.
    """


@dataclass
class Parameter:
    """One parameter of a kernel: its name, its type without `const` and `__restrict__` (but with `const` before a `*`),
    and the text that declares it."""

    name: str
    type: str
    declaration: str = ""

    @classmethod
    def parse(cls, declaration: str, kernel: str, path: Path) -> "Parameter":
        declaration = " ".join(re.sub(r"__restrict__|__restrict|__grid_constant__", " ", declaration).split())
        words = re.findall(r"\w+|\*", declaration)
        name, words = words[-1], words[:-1]
        pointer = words.count("*") == 1
        c_type = " ".join(word for word in words if word not in ("const", "*"))
        if words.count("*") > 1 or c_type not in (ELEMENTS if pointer else SCALARS):
            raise UserError(f"{path}: {kernel}: the CPU device does not know the type of parameter `{declaration}`")
        if pointer:
            c_type = ("const " if "const" in words[: words.index("*")] else "") + c_type + "*"
        return cls(name, c_type, declaration)

    def converter(self, kernel: str) -> Callable:
        """A function that checks one argument and returns what goes into the packed arguments."""
        where = f"{kernel}: {self.name} ({self.type})"
        if self.type.endswith("*"):
            return _pointer_converter(where, self.type)
        if self.type == "TensorMap":
            return np.ndarray.tobytes
        wanted = {"float": np.float32, "double": np.float64}.get(self.type)

        def floating(value):
            if type(value) is not wanted:
                raise TypeError(f"{where} takes numpy.{wanted.__name__}, not {type(value).__name__}")
            return value

        def integer(value):
            if type(value) is not int and not isinstance(value, np.integer):
                raise TypeError(f"{where} takes an int, not {type(value).__name__}")
            return value

        return floating if wanted else integer


def _pointer_converter(where: str, c_type: str) -> Callable:
    dtype = np.dtype(ELEMENTS[c_type.removeprefix("const ").removesuffix("*")])
    read_only = c_type.startswith("const ")

    def pointer(array):
        if array is None:
            return 0
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{where} takes a NumPy array or None, not {type(array).__name__}")
        flags = array.flags
        if array.dtype is not dtype and array.dtype != dtype:
            raise TypeError(f"{where} takes an array of {dtype}, not of {array.dtype}")
        if not flags.c_contiguous:
            raise TypeError(f"{where} takes a contiguous array, not one with strides {array.strides}")
        if not read_only and not flags.writeable:
            raise TypeError(f"{where} is written to, but the array is read-only")
        return array.__array_interface__["data"][0]

    return pointer


class Kernel:
    """kernel(grid, block, args, shared_mem=0) runs the kernel, and returns when it is done.

    grid, block: an int, or 1 to 3 of them. args: one for each parameter: NumPy arrays (C-contiguous, of the pointer's
    type; None for a null pointer), Python or NumPy ints, numpy.float32. shared_mem: bytes of dynamic shared memory.
    Raises TypeError for arguments that do not fit the parameters, KernelError if the launch fails.
    """

    def __init__(self, name: str, parameters: list[Parameter], address: int, runtime: ctypes.CDLL):
        self.name, self.parameters = name, parameters
        self._address = ctypes.c_void_p(address)
        self._launch = runtime.llmc_launch
        self._convert = [parameter.converter(name) for parameter in parameters]
        letters = "".join("P" if p.type.endswith("*") else SCALARS[p.type] for p in parameters)
        # grid, block, shared_mem. Aligned as C does, also at the end, because the kernel's stub copies the structure.
        self._pack = struct.Struct(f"@6iN{letters}0q").pack

    def __call__(self, grid, block, args, shared_mem: int = 0) -> None:
        if len(args) != len(self._convert):
            names = ", ".join(parameter.name for parameter in self.parameters)
            raise TypeError(f"{self.name} takes {len(self._convert)} arguments ({names}), not {len(args)}")
        values = [convert(value) for convert, value in zip(self._convert, args, strict=True)]
        try:
            packed = self._pack(*_three(grid), *_three(block), shared_mem, *values)
        except struct.error as error:
            numbers = {p.name: v for p, v in zip(self.parameters, values, strict=True) if "*" not in p.type}
            launch = f"grid {grid}, block {block}, shared_mem {shared_mem}, {numbers}"
            raise TypeError(f"{self.name} cannot take {launch}: {error}") from None
        error = self._launch(self._address, packed)
        if error is not None:
            raise KernelError(error.decode())


def _three(dims) -> tuple:
    if isinstance(dims, (int, np.integer)):
        return dims, 1, 1
    return (*dims, 1, 1)[:3] if 1 <= len(dims) <= 3 else dims


class Library(NamedTuple):
    """A compiled file, open. The descriptor stays open as long as the process lives, so no other file gets its name in
    /proc."""

    path: Path
    descriptor: int

    @property
    def name(self) -> str:
        """The open file's name, for this process and for gdb; the path where there is no /proc."""
        name = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        return name if os.path.exists(name) else str(self.path)


class Module:
    """A compiled .cu file, `path`, and the library made of it, `library_path`. `warp_size` is the number of lanes in
    its warps, `kernels` the names of its kernels."""

    def __init__(self, library: Library, path: Path, warp_size: int):
        self.library_path, self.path, self.warp_size = library.path, path, warp_size
        self._library = _load(library)
        manifest = json.loads(ctypes.string_at(self._address("llmc_manifest")))
        self._parameters = {name: [Parameter(*p) for p in parameters] for name, parameters in manifest.items()}
        self._kernels: dict[str, Kernel] = {}

    @property
    def kernels(self) -> list[str]:
        return list(self._parameters)

    def kernel(self, name: str) -> Kernel:
        """The kernel of that name. Raises AttributeError if the file has none."""
        if name not in self._parameters:
            raise AttributeError(f"{self.path} has no kernel {name}; it has {', '.join(self._parameters)}")
        if name not in self._kernels:
            address = self._address(f"llmc_kernel_{name}")
            self._kernels[name] = Kernel(name, self._parameters[name], address, _runtime)
        return self._kernels[name]

    def _address(self, symbol: str) -> int:
        return ctypes.addressof(ctypes.c_char.in_dll(self._library, symbol))


def _load(library: Library, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(library.name, mode)
    except OSError as error:
        reason = str(error).removeprefix(f"{library.name}: ")
        remedy = "set CXX to a C++ compiler such as g++, or LLMC_CACHE_DIR to a folder whose files may be executed"
        raise UserError(f"{library.path} cannot be loaded ({reason}): {remedy}") from None


_runtime: ctypes.CDLL | None = None


def load_runtime(library: Library) -> None:
    """Loads the runtime, once. The kernels' libraries find its functions by name."""
    global _runtime
    if _runtime is None:
        _runtime = _load(library, ctypes.RTLD_GLOBAL)
        _runtime.llmc_launch.argtypes = ctypes.c_void_p, ctypes.c_char_p
        _runtime.llmc_launch.restype = ctypes.c_char_p


def runtime() -> ctypes.CDLL:
    """The runtime, which the first compiled file has loaded."""
    return _runtime

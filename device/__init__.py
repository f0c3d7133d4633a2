"""The one place that knows about devices: an NVIDIA GPU through CuPy, or the CPU.

`use` chooses a device once. Everything else here then works on it. The methods of CpuDevice (cpu.py), such as `empty`,
can be called as `device.empty`, and do the same on CudaDevice (cuda.py). Arrays are `cupy.ndarray` on CUDA and
`numpy.ndarray` on the CPU. Both run the same .cu files: NVRTC compiles them, or a C++ compiler (cpp/), and `Source`
(sources.py) launches their kernels by name. cuBLAS (cublas.py) computes matrix products on CUDA, products.cu on the
CPU. CuPy is imported only when CUDA is used.
"""

from collections.abc import Callable, Iterator
from typing import Any

from device import current, errors  # noqa: F401  errors before what imports packages
from device.bf16 import BF16, from_bf16, to_bf16
from device.cpu import CpuDevice, host_memory
from device.cuda import CudaDevice
from device.errors import UserError, first_line
from device.observing import accesses, observe, observed_operation
from device.recording import Hook, Launch, Recording, touch
from device.sources import Source, architecture_of, cuda_source, imported, kernel_declarations, source
from device.tma import TensorMap

import numpy as np

__all__ = [
    "BF16", "CpuDevice", "CudaDevice", "Hook", "Launch", "Source", "TensorMap", "accesses", "architecture_of",
    "ceil_div", "compile_all", "constant", "copy", "copy_in", "cuda_source", "fill_zero", "from_bf16", "gemm",
    "gemm_strided_batched", "host_memory", "kernel_declarations", "observe", "pieces", "record", "reserve", "scratch",
    "source", "staged", "to_bf16", "to_floatX", "to_floats", "touch", "use", "use_precision", "use_recording",
    "why_not_cuda", "width", "zeros",
]  # fmt: skip

# What to do if CUDA does not work, by a part of its message.
REMEDY = "install CuPy for your driver (cupy-cuda12x[ctk] or cupy-cuda13x[ctk])"
GPU_IS_FULL = "other programs have taken the GPU's memory; nvidia-smi names them"
REMEDIES = {
    "InsufficientDriver": "update NVIDIA's driver, or install CuPy for the CUDA that it knows (cupy-cuda12x[ctk])",
    "NoDevice": "nvidia-smi and CUDA_VISIBLE_DEVICES say which GPUs this program sees",
    "MemoryAllocation": GPU_IS_FULL, "ALLOC_FAILED": GPU_IS_FULL, "Out of memory": GPU_IS_FULL,
    "DevicesUnavailable": "another program has the GPU to itself; nvidia-smi names it",
}

STAGED = 1 << 20  # floats that go to the device at a time; these stay in the host's caches

why_not_cuda = ""  # why "auto" chose the CPU, in a line; empty if it did not


def __getattr__(name: str) -> Any:
    """What else the device in use has, such as `multiprocessors` or `synchronize`. Observers see none of it."""
    if current.device is None:
        raise AttributeError(f"module 'device' has no attribute {name!r}" + "; call device.use first" * name.islower())
    return getattr(current.device, name)


def use(kind: str = "auto", number: int = 0) -> str:
    """Chooses the device: "cuda", "cpu", or "auto" (CUDA if it works, else the CPU, and `why_not_cuda` says why).
    Returns "cuda" or "cpu". number: which of the GPUs that this program sees, modulo their count.

    Raises UserError if CUDA is asked for and does not work.
    """
    global why_not_cuda
    if kind not in ("auto", "cuda", "cpu"):
        raise UserError(f"device {kind!r} is not one of auto, cuda, cpu")
    found, why_not_cuda = None, ""
    if kind != "cpu":
        try:
            found = CudaDevice(number)
        except Exception as error:  # CuPy missing, no driver, no GPU, a driver too old: each its own type
            why_not_cuda = first_line(error)
            if kind == "cuda":
                remedy = next((REMEDIES[part] for part in REMEDIES if part in why_not_cuda), REMEDY)
                raise UserError(
                    f"CUDA does not work here ({why_not_cuda}): {remedy}, or run with --device cpu"
                ) from None
    current.device = found or CpuDevice()
    return current.device.kind


def compile_all() -> None:
    """Compiles every kernel file that has been imported and is needed, several at a time. Otherwise each is compiled at
    its first launch."""
    current.device.compile_all([source.path for source in imported if source.needed()])


def use_precision(precision: str) -> str:
    """CpuDevice.use_precision. Raises UserError for fp16, bf16 or fp8 on a GPU that has none."""
    found = current.device.use_precision(precision)
    needed = {"fp16": "7.5", "bf16": "8.0", "fp8": "8.9"}.get(precision)
    if needed and found != precision:
        instead = "fp16 or fp32" if has_fp16_alone() else found
        raise UserError(
            f"--precision {precision} needs a GPU of compute capability {needed} or later, and {current.device.name} "
            f"is of {current.device.compute_capability / 10}: use --precision {instead}"
        )
    return found


def has_fp16_alone() -> bool:
    """Whether the device is a GPU whose tensor cores know neither TF32 nor bf16."""
    return 75 <= current.device.compute_capability < 80


def width() -> int:
    """How many numbers of the type `floatX` a thread moves in one access of 16 bytes."""
    return 16 // current.device.floatX.itemsize


def use_recording(on: bool) -> None:
    """on: recordings made from now on replay their launches. Off: they do not, so that observers see every launch."""
    current.device.recording = on


def record(
    work: Callable[..., None], gradients: list[Any] = (),
    hooks: Callable[[tuple, list[Launch]], list[Hook]] = lambda arguments, launches: [],
) -> Recording:  # fmt: skip
    """A function that does `work` each time it is called. From the second call with the same arguments on, it replays
    the launches as recording.py says, on CUDA as a graph, unless `use_recording` has turned that off.

    gradients: arrays that hold weights' gradients. hooks: a function that is called once for each combination of
    arguments, with these and the launches that were noted. It returns the work to do beside these launches.

    For the same arguments `work` must always give the device the same launches on the same arrays. It must not copy to
    or from the host.
    """
    return Recording(current.device, work, list(gradients), hooks)


def gemm(
    c, a, b, m: int, n: int, k: int, trans_a: bool = False, trans_b: bool = False, add=None, bias=None,
    scale_a=None, scale_b=None,
) -> None:  # fmt: skip
    """CpuDevice.gemm."""
    if current.observers:
        observed_operation("gemm", locals())
    else:
        current.device.gemm(c, a, b, m, n, k, trans_a, trans_b, add, bias, scale_a, scale_b)


def gemm_strided_batched(
    c, a, b, m: int, n: int, k: int, count: int, trans_a: bool = False, trans_b: bool = False, causal: str = "",
    scale_a=None, scale_b=None,
) -> None:  # fmt: skip
    """CpuDevice.gemm_strided_batched."""
    if current.observers:
        observed_operation("gemm_strided_batched", locals())
    else:
        current.device.gemm_strided_batched(c, a, b, m, n, k, count, trans_a, trans_b, causal, scale_a, scale_b)


def fill_zero(array) -> None:
    """CpuDevice.fill_zero."""
    if current.observers:
        observed_operation("fill_zero", locals())
    else:
        current.device.fill_zero(array)


def copy(dst, src) -> None:
    """CpuDevice.copy."""
    if current.observers:
        observed_operation("copy", locals())
    else:
        current.device.copy(dst, src)


def zeros(shape, dtype=np.float32):
    """A device array of zeros."""
    array = current.device.empty(shape, dtype)
    fill_zero(array)
    return array


def reserve(needed: dict[str, int]) -> None:
    """Allocates scratch ahead, so that no step has to. needed: purpose, bytes."""
    for purpose, size in needed.items():
        if size:
            scratch(purpose, (size,), np.uint8)


def scratch(purpose: str, shape: tuple[int, ...], dtype):
    """An uninitialised device array for numbers that a launcher needs only between its own launches.

    Arrays of the same purpose share memory. If launches on the main stream and on the side stream use the same purpose,
    the results are right, but the streams wait for one another (recording.py, rule 2). So give each its own purpose.
    Raises RuntimeError on other streams, because no plan orders their launches.

    If the memory is too small, a larger region is allocated, and the old one stays. An array always lies in the first
    region that has room for it: so a step is replayed on the memory that its launches were noted with.
    """
    running, dtype = current.device, np.dtype(dtype)
    if running.stream is not running.main_stream and running.stream is not running.side_stream:
        raise RuntimeError(f"scratch {purpose!r} on a stream that is not recorded")
    regions, size = running.regions[purpose], int(np.prod(shape)) * dtype.itemsize
    if not regions or regions[-1].size < size:
        regions.append(running.empty((size,), np.uint8))
    region = next(one for one in regions if one.size >= size)
    return region[:size].view(dtype).reshape(shape)


def constant(values: tuple[float, ...], dtype):
    """A device array of these numbers. It is made once, and nobody may write to it."""
    key, made = (values, np.dtype(dtype)), current.device.constants
    if key not in made:
        made[key] = current.device.asarray(np.array(values, dtype))
    return made[key]


def copy_in(dst, src: np.ndarray) -> None:
    """CpuDevice.copy_in. Raises ValueError if src is not contiguous, has another type, or is larger than dst."""
    if not src.flags.c_contiguous or src.size > dst.size or src.dtype != dst.dtype:
        raise ValueError(f"{src.dtype} {src.shape} does not fit into {dst.dtype} {dst.shape}, or is not contiguous")
    current.device.copy_in(dst, src)


def staged(values: np.ndarray | None, n: int) -> Iterator[tuple[int, Any]]:
    """The pieces of a flat fp32 array (n,) of the host, one after another on the device, each with the place of its
    first number. None: the pieces are uninitialised."""
    room = current.device.empty((min(STAGED, n),))
    for at in range(0, n, STAGED):
        piece = room[: min(STAGED, n - at)]
        if values is not None:
            copy_in(piece, values[at : at + piece.size])
        yield at, piece
        current.device.synchronize()  # from now on the caller may change the values


def pieces(array) -> Iterator[np.ndarray]:
    """The pieces of a flat device or host array, one after another on the host. There is never a whole copy of it."""
    return iter([array]) if isinstance(array, np.ndarray) else current.device.pieces(array)


def to_floats(array) -> np.ndarray:
    """A host array with the contents of a device array of fp32 or bf16, as fp32."""
    host = current.device.to_host(array)
    return from_bf16(host) if host.dtype == BF16 else host


def to_floatX(values: np.ndarray) -> np.ndarray:
    """fp32 values on the host, rounded to the type `floatX`."""
    return to_bf16(values) if current.device.floatX == BF16 else values


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up: how many blocks of b cover a."""
    return -(-a // b)

"""An observer in front of a device: it sees all kernel launches, matrix products, memsets and copies, and what each of
them reads and writes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from device import current
from device.sources import READS, SETS, UPDATES, kernel_accesses

# The parameters of the operations that are not kernels. Each operation writes its first parameter.
OPERATIONS = {
    "gemm": ("c", "a", "b", "m", "n", "k", "trans_a", "trans_b", "beta", "bias"),
    "gemm_strided_batched": ("c", "a", "b", "m", "n", "k", "count", "trans_a", "trans_b", "causal"),
    "fill_zero": ("array",),
    "copy": ("dst", "src"),
}
DEFAULTS = {"trans_a": False, "trans_b": False, "beta": 0.0, "bias": None, "causal": ""}

ACCESSES: dict[str, dict[str, str | None]] = {}  # of the kernels that have been observed, as kernel_accesses gives them

Observer = Callable[[str, dict[str, Any], Callable[[], None]], None]


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Within the block, the device calls `observer(name, arguments, work)` in place of every kernel launch, matrix
    product, memset and copy. The observer must call `work()`, which does it. name: the kernel's, or one of OPERATIONS.
    arguments: by the names of the parameters. The observer does not see what a recording replays (`use_recording`)."""
    observed = current.device
    current.switch(ObservedDevice(observed, observer))
    try:
        yield
    finally:
        current.switch(observed)


def unobserved() -> Any:
    """The device in use, without the observers in front of it."""
    device = current.device
    while isinstance(device, ObservedDevice):
        device = device.device
    return device


class ObservedDevice:
    """A device with an observer in front of it."""

    def __init__(self, device: Any, observer: Observer):
        self.device, self.observer = device, observer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.device, name)
        return self.observed(name, found) if name in OPERATIONS else found

    def observed(self, name: str, operation: Callable[..., None]) -> Callable[..., None]:
        def call(*given, **named) -> None:
            parameters = OPERATIONS[name]
            arguments = {key: DEFAULTS[key] for key in parameters if key in DEFAULTS}
            arguments |= dict(zip(parameters, given, strict=False)) | named
            self.observer(name, arguments, lambda: operation(*given, **named))

        return call

    def kernel(self, path: Path, name: str) -> Callable[..., None]:
        kernel, parameters = self.device.kernel(path, name), kernel_accesses(path)[name]
        ACCESSES[name] = parameters

        def launch(grid: tuple, block: tuple, args: tuple, shared_mem: int = 0) -> None:
            arguments = dict(zip(parameters, args, strict=True))
            self.observer(name, arguments, lambda: kernel(grid, block, args, shared_mem))

        return launch


def accesses(name: str, arguments: dict[str, Any]) -> dict[str, str]:
    """For a launch that an observer sees, what it does with each of its arrays: it READS the array, SETS all of it
    without reading it, or UPDATES it."""
    if name in OPERATIONS:
        written = UPDATES if arguments.get("beta") else SETS
        arrays = [key for key in OPERATIONS[name] if key in ("a", "b", "c", "bias", "array", "dst", "src")]
        return {key: READS if i else written for i, key in enumerate(arrays) if arguments[key] is not None}
    return {key: access for key, access in ACCESSES[name].items() if access and arguments[key] is not None}

"""Observers of the device in use: they see all kernel launches, matrix products, memsets and copies, and what each
of them reads and writes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from device import current

READS, SETS, UPDATES = "reads", "sets", "updates"

# The arrays of the operations that are not kernels. Each operation writes the first one.
OPERATIONS = {
    "gemm": ("c", "a", "b", "add", "bias", "scale_a", "scale_b"),
    "gemm_strided_batched": ("c", "a", "b", "scale_a", "scale_b"),
    "fill_zero": ("array",), "copy": ("dst", "src"),
}  # fmt: skip

ACCESSES: dict[str, dict[str, str | None]] = {}  # of the kernels that have been observed, as kernel_accesses gives them

Observer = Callable[[str, dict[str, Any], Callable[[], None]], None]


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Within the block, the device calls `observer(name, arguments, work)` in place of every kernel launch, matrix
    product, memset and copy. The observer must call `work()`, which does it. name: the kernel's, or one of OPERATIONS.
    arguments: by the names of the parameters. The observer does not see what a recording replays (`use_recording`).

    Within an inner block, the inner observer comes first, and its `work()` calls the outer one."""
    outer = current.observers
    current.observers = [*outer, observer]
    try:
        yield
    finally:
        current.observers = outer


def observed(name: str, arguments: dict[str, Any], work: Callable[[], None]) -> None:
    """Gives a launch or an operation to the observers."""
    for observer in current.observers:
        work = partial(observer, name, arguments, work)
    work()


def observed_operation(name: str, arguments: dict[str, Any]) -> None:
    """Gives one of OPERATIONS to the observers."""
    observed(name, arguments, partial(getattr(current.device, name), **arguments))


def accesses(name: str, arguments: dict[str, Any]) -> dict[str, str]:
    """For a launch that an observer sees, what it does with each of its arrays: it READS the array, SETS all of it
    without reading it, or UPDATES it."""
    if name in OPERATIONS:
        written, *read = OPERATIONS[name]
        updated = arguments.get("add") is arguments[written]
        of_all = {written: UPDATES if updated else SETS} | dict.fromkeys(read, READS)
    else:
        of_all = ACCESSES[name]
    return {key: access for key, access in of_all.items() if access and arguments[key] is not None}

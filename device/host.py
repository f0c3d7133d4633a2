"""Large amounts of page-locked memory, which a GPU reads and writes by itself while the host does something else."""

from __future__ import annotations

import mmap
import os
import platform
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from weakref import finalize

from device.cpu import host_memory
from device.errors import UserError, first_line
from device.progress import telling

import numpy as np

STRETCH = 1 << 28  # bytes that a thread touches at a time


def page_locked(
    size: int, identity: str, lock: Callable[[int, int], None], unlock: Callable[[int], None]
) -> np.ndarray:  # fmt: skip
    """Page-locked memory of zeros, uint8 (size,), on the NUMA node of a GPU, where the system says which that is.
    identity: of the GPU, as CudaDevice has it. lock(address, size): page-locks memory that is there. unlock(address):
    undoes this, before the memory goes back to the system; at the end of the process the system does it.

    Threads touch all pages first, in parallel. CUDA alone would do that one page after another, which takes many times
    as long. A page lies on the node of the thread that touches it first.

    Raises UserError if the system refuses.
    """
    if size == 0:
        return np.empty(0, np.uint8)
    done = 0
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # large pages are there sooner; a system need not have them
            memory.madvise(mmap.MADV_HUGEPAGE)
        array, cpus = np.frombuffer(memory, np.uint8), cpus_near(identity)

        def touch(start: int) -> int:
            array[start : min(size, start + STRETCH) : mmap.PAGESIZE] = 0
            return start + STRETCH

        with ThreadPoolExecutor(min(32, len(cpus)), initializer=stay_on, initargs=(cpus,)) as pool, telling(
            lambda: f"page-locked memory: {done >> 30} of {size / 2**30:.1f} GiB are ready"
        ):
            for end in pool.map(touch, range(0, size, STRETCH)):
                done = min(end, size)
            lock(array.ctypes.data, size)
            # The finalizer holds the memory until it is unlocked. NumPy 2.5 lets go of an array's memory first.
            finalize(array, lambda address, memory: unlock(address), array.ctypes.data, memory).atexit = False
    except (OSError, RuntimeError) as error:  # of the system, or of CUDA
        remedy = "raise the limit"
        if "microsoft" in platform.release().lower():
            remedy = "WSL page-locks little memory, whatever the limit is: run this under Linux itself"
        raise UserError(
            f"--offload: this machine refuses {size >> 20} MiB of page-locked memory ({first_line(error)}); "
            f"{free_memory() >> 20} MiB are free, and ulimit -l is {locked_limit()}: {remedy}, or leave --offload out"
        ) from None
    return array


def locked_limit() -> str:
    """What `ulimit -l` says."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"


def stay_on(cpus: set[int]) -> None:
    """Keeps this thread on some CPUs."""
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)  # 0: the thread that calls


def cpus_near(identity: str) -> set[int]:
    """The CPUs on a GPU's NUMA node on which this process may run; all on which it may run, where the system does not
    say which node that is. identity: PCI domain, bus and device, hexadecimal, between colons."""
    own = os.sched_getaffinity(0)
    try:
        domain, bus, number = (int(part, 16) for part in identity.split(":"))
        place = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{number:02x}.0/numa_node")
        node = int(place.read_text("utf-8"))
        text = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text("utf-8").strip()
        ends = [part.split("-") for part in text.split(",")]
        near = {cpu for first, *rest in ends for cpu in range(int(first), int(rest[0] if rest else first) + 1)}
    except (OSError, ValueError):  # node -1: the system does not know
        return own
    return own & near or own


def free_memory() -> int:
    """How many bytes of the host's memory are free for this process: those that are free on the machine, or fewer in a
    container (cgroup, version 2 or 1) with a limit."""
    return min(host_memory()[0], container_memory())


def container_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """How many bytes are left until the container's limit; a large number if there is none."""
    for limit, used in (("memory.max", "memory.current"),
                        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):  # fmt: skip
        with suppress(OSError, ValueError):  # no such file; "max"
            limit, used = (root / limit), (root / used)
            statistics = dict(line.split() for line in (limit.parent / "memory.stat").read_text("utf-8").splitlines())
            reclaimable = int(statistics.get("inactive_file", 0))  # files that the system keeps while there is room
            return max(0, int(limit.read_text("utf-8")) - int(used.read_text("utf-8")) + reclaimable)
    return 1 << 62

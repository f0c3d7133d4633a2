"""No kernel lacks a barrier: whichever thread of a block goes first, the results are the same to the last bit.

The CPU device can run the threads of a block, between two waits, forward or shuffled (LLMC_CPU_ORDER). What
one thread reads that another wrote without a barrier between them then differs.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import device
from dev.microscope.launches import LAUNCHES
from device import cpp, cpu
from kernels import flash_attention

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
launched: set[str] = set()


def results_by_order(run: Callable[[], None], arrays: list[np.ndarray], monkeypatch) -> list[list[bytes]]:
    """What the arrays hold after run() in each order, each time from what they hold now."""
    before, results = [array.copy() for array in arrays], []
    for order in "forward", "shuffled":
        monkeypatch.setenv("LLMC_CPU_ORDER", order)
        for array, values in zip(arrays, before, strict=True):
            array[...] = values
        run()
        results.append([array.tobytes() for array in arrays])
    return results


@pytest.fixture
def seen(monkeypatch) -> SimpleNamespace:
    """Runs each kernel that the test launches in each order. kernels: their names; dependent: of those whose results
    depend on the order. beside: arrays that a kernel may know by their addresses alone."""
    monkeypatch.setenv("LLMC_CPU_WARP", "32")
    device.use("cpu")
    monkeypatch.setattr(device.current.device, "multiprocessors", 1)  # so each block takes several turns
    seen, run = SimpleNamespace(kernels=set(), dependent=set(), beside=[]), cpp.Kernel.__call__

    def run_in_each_order(kernel, *given) -> None:
        arrays = [array for array in (*given[2], *seen.beside) if type(array) is np.ndarray]  # a tensor map is none
        forward, shuffled = results_by_order(lambda: run(kernel, *given), arrays, monkeypatch)
        (seen.kernels if forward == shuffled else seen.dependent).add(kernel.name)

    monkeypatch.setattr(cpp.Kernel, "__call__", run_in_each_order)
    return seen


@pytest.mark.parametrize("name, hard", [
    (name, hard) for name, launch in LAUNCHES.items() for hard in (False, True)[: 1 + bool(launch.hard)]
])  # fmt: skip
def test_the_order_of_threads_changes_no_bit_of_any_kernels_results(seen, monkeypatch, name, hard):
    """In flash attention by wgmma, query heads that share keys have a block each, or one together."""
    launch = LAUNCHES[name]
    for precision in [launch.precision] if launch.precision else ["fp32", "bf16"]:
        device.use_precision(precision)
        call = launch.prepare(launch.hard if hard else {})
        seen.beside = list(call.arrays.values())
        call()
        if "wgmma" in name:
            monkeypatch.setattr(flash_attention, "min_blocks", lambda: 1)
            call()
    launched.update(seen.kernels)
    assert not seen.dependent


def test_every_kernel_was_among_them():
    if not launched:
        pytest.skip("the tests above have not run")
    files = [*sorted((ROOT / "kernels").rglob("*.cu")), cpu.PRODUCTS]
    assert launched == {name for path in files for name in cpp.compile_source(path).kernels}


@pytest.mark.parametrize("name, whole", [
    ("reverse_kernel", True), ("reads_too_early_kernel", False), ("overwrites_too_early_kernel", False),
])  # fmt: skip
def test_a_missing_barrier_is_caught(seen, name, whole):
    kernel, (R, N) = cpp.compile_source(ROOT / "tests" / "cu" / "missing_barriers.cu").kernel(name), (5, 128)
    x = np.random.default_rng(0).random((R, N), dtype=np.float32)
    kernel((1,), (N,), (np.zeros_like(x), x, R, N))
    assert seen.dependent == (set() if whole else {name})

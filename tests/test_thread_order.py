"""No kernel lacks a barrier: whichever thread of a block goes first, the results are the same to the last bit.

The CPU device can run the threads of a block, between two waits, forward or shuffled (LLMC_CPU_ORDER). What
one thread reads that another wrote without a barrier between them then differs.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import device
from dev.microscope.launches import LAUNCHES, sizes_of
from device import cpp, cpu
from kernels import flash_attention

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
ORDERS = ["forward", "shuffled"]

# Sizes at which blocks come back to their shared memory, rows end within a warp, and sums have several stages.
HARD = {
    "encoder_backward": "B=1,T=9,C=2100,V=5", "layernorm_backward": "B=1,T=200,C=300",
    "rmsnorm_backward": "B=1,T=31,C=261", "parallel_residual_backward": "B=1,T=40,C=2100",
    "parallel_residual_backward:dropout": "B=1,T=40,C=2100", "parallel_residual_forward": "B=1,T=3,C=2101",
    "fused_residual_forward": "B=1,T=3,C=2101", "rmsnorm_forward": "B=1,T=3,C=2101",
    "fused_classifier": "V=2500,Vp=2560", "attention_forward": "T=37", "attention_backward": "T=37",
    "flash_attention_forward": "T=161,NH=1", "flash_attention_backward": "T=161,NH=1", "adamw": "n=10001",
    "flash_attention_forward:wgmma": "T=261", "flash_attention_backward:wgmma": "T=261",
    "flash_attention_forward:wgmma128": "T=261,NH=1", "flash_attention_backward:wgmma128": "T=261,NH=1",
    "global_norm": "n=10001", "gelu_backward": "N=133,C=67", "swiglu_backward": "N=133,C=67", "transpose": "N=133,C=67",
    "recompute_norm": "T=67,C=67", "matvec": "C=1100,OC=5", "cached_attention_forward": "T=2,splits=1,HS=20",
    "cached_attention_forward:shared": "NH=5,splits=2,context=300,position=190", "sample": "B=1,V=5003,Vp=5120,top_k=7",
    "sample:top_p": "B=1,V=5003,Vp=5120", "quantize": "N=80,C=400", "gelu_backward:fp8": "N=80,C=400",
    "swiglu_backward:fp8": "N=80,C=272", "fused_residual_forward:fp8": "T=40", "layernorm_recompute:fp8": "T=40,C=400",
    "fused_residual_rmsnorm_forward:fp8": "T=40", "rmsnorm_recompute:fp8": "T=40,C=400", "qk_norm_backward:fp8": "T=40",
}  # fmt: skip

launched: set[str] = set()


def results_by_order(run: Callable[[], None], arrays: list[np.ndarray], monkeypatch) -> list[list[bytes]]:
    """What the arrays hold after run() in each order, each time from what they hold now."""
    before, results = [array.copy() for array in arrays], []
    for order in ORDERS:
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
    yield seen
    device.use_precision("fp32")


@pytest.mark.parametrize("name, sizes", [
    (name, sizes) for name in LAUNCHES for sizes in ("", HARD.get(name)) if sizes is not None
])  # fmt: skip
def test_the_order_of_threads_changes_no_bit_of_any_kernels_results(seen, monkeypatch, name, sizes):
    """In flash attention by wgmma, query heads that share keys have a block each, or one together."""
    launch = LAUNCHES[name]
    for precision in [launch.precision] if launch.precision else ["fp32", "bf16"]:
        device.use_precision(precision)
        call = launch.prepare(sizes_of(sizes, launch))
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

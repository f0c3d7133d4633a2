"""What a kernel has to do at least: the bytes that it must move between memory and chip, and its FLOPs."""

import re
from types import SimpleNamespace

import device
from kernels.launches import FLOPS, MOVED, TWICE

# Parameters of kernels that are small beside the others: numbers for a row or a column, sums, tables and scales.
SMALL = set(
    "weight weight0 weight1 qweight kweight bias shift shift0 shift1 mean rstd partials stats norm losses targets "
    "tokens positions starts states drawn random table sum scale out_scale a_scale previous_amax block_amax".split()
)

PRODUCTS = {
    "gemm": lambda a: 2 * a.m * a.n * a.k,
    # Of causal attention cuBLAS computes whole matrices, and the CPU the half that is needed.
    "gemm_strided_batched": lambda a: (1 if a.causal and device.kind == "cpu" else 2) * a.m * a.n * a.k * a.count,
}
FLOPS.update(PRODUCTS)


def kind_of(kernel: str) -> str:
    """A kernel's name for these tables: without the size that it is compiled for, and the instruction."""
    return re.sub(r"(_wgmma)?_kernel(_\d+)?$", "", kernel)


def bytes_of(kernel: str, arguments: dict) -> float:
    """The bytes that a call of a kernel, given its arguments by name, reads and writes at least; 0 if its FLOPs are
    counted. The second pass of a kernel that quantizes mostly has nothing to do."""
    kind = kind_of(kernel)
    if arguments.get("second_pass") or kind in FLOPS:
        return 0
    if kind in MOVED:
        return MOVED[kind](SimpleNamespace(**arguments))
    moved = [name for name, value in arguments.items() if getattr(value, "ndim", 0) and name not in SMALL]
    return sum(arguments[name].nbytes * (2 if name in TWICE.get(kind, "").split() else 1) for name in moved)


def flops_of(kernel: str, arguments: dict) -> float:
    """The FLOPs of a call, 0 where nobody counts them."""
    kind = kind_of(kernel)
    return FLOPS[kind](SimpleNamespace(**arguments)) if kind in FLOPS else 0

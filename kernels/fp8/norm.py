"""The launch of the forward kernels of norms with a quantized output, whose body is norm_forward_fp8 (norm.cuh)."""

import device
from device.sources import Source
from kernels.fp8.quantize import MAX_AMAXES
from kernels.norm import MAX_THREADS, forward_blocks


def quantized_forward_blocks(cu: Source, kernel: str, N: int, C: int) -> tuple[tuple, tuple, int]:
    """forward_blocks for such a kernel, whose blocks have at most MAX_THREADS threads. There are no more blocks than
    run at once: each leaves an amax, and each block of pass 2 reads all of them. So pass 2 has the same grid."""
    (blocks,), (threads, rows), shared_mem = forward_blocks(cu, N, C)
    at_once = min(MAX_AMAXES, cu.blocks_at_once(kernel) * MAX_THREADS // (threads * rows)) * device.multiprocessors
    return (min(blocks, at_once),), (threads, rows), shared_mem

"""qk_norm's backward pass with a quantized result: the launcher of qk_norm.cu."""

import device
from device import ceil_div
from kernels.fp8 import source
from kernels.fp8.quantize import launch_both_passes, quantize, quantized
from kernels.fp8.quantized import Quantized
from kernels.launches import describe
from kernels.qk_norm import GRADIENTS, WEIGHTS, lanes, qk_norm_backward, sums_bytes
from kernels.reduce import MAX_PARTIALS, add_partials, partials_of
from kernels.rope import angles

cu = source(__file__)


@qk_norm_backward.register(Quantized)
def quantized_backward(
    dinp: Quantized, dweights, dout, inp, weights, rstd, table, B: int, T: int, NH: int, NKV: int, HS: int
) -> None:
    """qk_norm_backward. Sets q and q_T of dinp (B*T,(NH+2*NKV)*HS), and its scale. dinp must not overlap dout, which
    may be overwritten."""
    N, heads = B * T, NH + 2 * NKV
    if HS != cu.constant("HEAD_SIZE"):
        qk_norm_backward(dout, dweights, dout, inp, weights, rstd, table, B, T, NH, NKV, HS)
        quantize(dinp, dout, N, heads * HS)
        return
    kernel, positions = "qk_norm_backward_fp8_kernel", cu.constant("POSITIONS")
    chunks = min(ceil_div(N, positions) * heads, cu.blocks_at_once(kernel) * device.multiprocessors, MAX_PARTIALS)
    partials = partials_of(chunks * 2 * HS)
    shared_mem = cu.block(256) // lanes(cu) * sums_bytes(cu, HS) + 4 * positions * HS * device.floatX.itemsize
    args = partials, dout, inp, *weights, rstd, table, N, T, NH, NKV
    launch_both_passes(cu, kernel, chunks, dinp.scale, (dinp.q, dinp.q_T), *args, shared_mem=shared_mem)
    add_partials([*dweights], partials, chunks, HS)


describe(qk_norm_backward, "B=2 T=16 NH=2 NKV=1 HS=128", f"dout inp: B,T,NH+2*NKV,HS; {WEIGHTS}; {GRADIENTS}",
         lambda size, a: angles(size, a) | {"dinp": quantized(size.B * size.T, (size.NH + 2 * size.NKV) * size.HS)},
         "fp8", hard="T=40", needs="B * T % 16 == 0; HS == 128", precision="bf16",
         moved={"qk_norm_backward_fp8": lambda a: a.inp.nbytes * (2 + (a.NH + a.NKV) / (a.NH + 2 * a.NKV))})

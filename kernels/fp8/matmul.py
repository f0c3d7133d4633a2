"""Linear layers with quantized operands: the launchers of matmul.cu, and products by cublasLt."""

import device
from device import ceil_div
from kernels.fp8 import source
from kernels.fp8.quantize import gradient_scratch, input_scratch, quantize, quantize_by_scale
from kernels.fp8.quantized import MULTIPLE, Quantized, QuantizedWeight, WeightGradient, WeightOnly, check_written
from kernels.launches import describe
from kernels.matmul import matmul_backward_inp, matmul_backward_weight, matmul_forward, matvec_block

import numpy as np

cu = source(__file__)


@matmul_forward.register(QuantizedWeight)
def quantized_forward(
    out, inp, weight: QuantizedWeight, bias, B: int, T: int, C: int, OC: int, residual=None
) -> None:  # fmt: skip
    """matmul_forward. inp (B,T,C) is Quantized, or this quantizes it and sets weight.input_scale. If the weight is
    stale, this quantizes it, too. If B*T is no multiple of MULTIPLE, the product is in bf16."""
    N = B * T
    if N % MULTIPLE:
        matmul_forward(out, inp, weight.bf16, bias, B, T, C, OC, residual)
        return
    if weight.stale:
        quantize(weight.quantized, weight.bf16, OC, C)
        weight.stale = False
    x = inp if isinstance(inp, Quantized) else input_scratch(weight.input_scale, N, C, transposed=False)
    if x is not inp:
        quantize(x, inp, N, C)
    w = weight.quantized
    gemm(out, x.q, x.scale, w.q, w.scale, N, OC, C, residual, bias)


@matmul_backward_inp.register(QuantizedWeight)
def quantized_backward_inp(
    dinp, dout, weight: QuantizedWeight, B: int, T: int, C: int, OC: int, accumulate: bool = False
) -> None:
    """matmul_backward_inp. dout (B,T,OC) is Quantized, or this quantizes it, for matmul_backward_weight as well: it
    must follow before another gradient with OC columns is quantized."""
    N = B * T
    if N % MULTIPLE:
        matmul_backward_inp(dinp, dout, weight.bf16, B, T, C, OC, accumulate)
        return
    d = dout if isinstance(dout, Quantized) else gradient_scratch(weight.grad_scale, N, OC)
    if d is not dout:
        quantize(d, dout, N, OC)
    w = weight.quantized
    gemm(dinp, d.q, d.scale, w.q_T, w.scale, N, C, OC, add=dinp if accumulate else None)


@matmul_backward_weight.register(WeightGradient)
def quantized_backward_weight(
    dweight: WeightGradient, dout, inp, B: int, T: int, C: int, OC: int, accumulate: bool
) -> None:
    """matmul_backward_weight. If dout is not Quantized, matmul_backward_inp has quantized it. inp is Quantized, or this
    quantizes it by weight.input_scale, which forward has set."""
    N, weight = B * T, dweight.weight
    if N % MULTIPLE:
        matmul_backward_weight(dweight.array, dout, inp, B, T, C, OC, accumulate)
        return
    d = dout if isinstance(dout, Quantized) else gradient_scratch(weight.grad_scale, N, OC)
    x = inp if isinstance(inp, Quantized) else input_scratch(weight.input_scale, N, C, transposed=True)
    if x is not inp:
        quantize_by_scale(x, inp, N, C)
    out = dweight.array
    gemm(out, d.q_T, d.scale, x.q_T, x.scale, OC, C, N, add=out if accumulate else None)


def gemm(
    out, a, scale_a, b, scale_b, m: int, n: int, k: int, add=None, bias=None
) -> None:  # fmt: skip
    """out (m,n) = scale_a a (m,k) @ (scale_b b (n,k))^T + add (m,n) + bias (n). a and b are e4m3."""
    check_written(scale_a, a)
    check_written(scale_b, b)
    device.gemm(out, a, b, m, n, k, trans_b=True, add=add, bias=bias, scale_a=scale_a.scale, scale_b=scale_b.scale)


@matmul_forward.register(WeightOnly)
def weight_only_forward(
    out, inp, weight: WeightOnly, bias, B: int, T: int, C: int, OC: int, residual=None
) -> None:  # fmt: skip
    """matmul_forward. The product of a single row reads q. For several rows the weight is dequantized first."""
    if B * T > 1:
        whole = device.scratch("dequantized weight", (OC, C), device.floatX)
        cu.launch("dequantize_kernel", (ceil_div(OC * C, cu.width * 256),), (256,), (whole, *weight, OC * C))
        matmul_forward(out, inp, whole, bias, B, T, C, OC, residual)
        return
    # Several warps compute each of 2048 outputs, too: a token of Llama 3.2 1B takes 0.84 ms, not 0.92.
    block = matvec_block(cu, C, OC, few=3072)
    cu.launch("matvec_fp8_kernel", (ceil_div(OC, block[1]),), block, (out, inp, *weight, bias, residual, C, OC))


def weight_only(size, a) -> dict:
    q = np.random.default_rng(3).integers(0, 127, (size.OC, size.C), np.uint8)
    return {"weight": WeightOnly(device.asarray(q), device.asarray(np.ones(1, np.float32)))}


for rows, variant in (1, "fp8"), (2, "fp8 rows"):
    describe(matmul_forward, f"B=1 T={rows} C=256 OC=64", "out residual: B,T,OC; inp: B,T,C; bias: OC", weight_only,
             variant, needs="C % 16 == 0", precision="bf16", moved={"matvec_fp8": lambda a: a.q.nbytes})

"""Matrix products by cublasLt: all of matrices in bf16, fp16 and e4m3; in fp32 those that add a bias or a matrix other
than the result. CuPy has no calls for cublasLt, so we call it through ctypes.

cublasLt offers several algorithms for a product. It puts the one first that it expects to be the fastest, and is often
wrong: on an H200 the fastest ones take 4% (4096 rows) and 6% (16384 rows) less for all products of GPT-2 124M. So we
time the algorithms at the first product of a kind. The measured times change no bits of the result: we time only
algorithms that cut the sum over k into as many parts as the first one, and that give the first one's result for the
matrices at hand. A small result may not show that an algorithm adds in another order, because after rounding to bf16
few numbers differ. So small results are left to the first algorithm; and so are products of fp32 matrices, where a
faster one gained nothing in a step, and of fp16.

Some algorithms round the product before they add a bias. The bias at hand would not show this, because a model that
begins to train has biases of 0. So random numbers take its place while we compare and time. A matrix that is added may
be rounded with the product or after it, and its numbers may hide those of the product. So we compare without it, too.

Hopper's tensor cores keep some 14 bits of a sum of products of e4m3 (DeepSeek-V3, arXiv 2412.19437, 3.3.2). By default
cublasLt adds such sums up in fp32, over and over. "Fast accumulation" leaves that out. We let it do so where the result
is bf16, which has 8 bits. A weight's gradient, a sum over all rows of a batch, is fp32 and does without.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from device.bf16 import BF16, to_bf16
from device.errors import UserError
from device.fp8 import E4M3

import numpy as np

# What cublasLt.h calls them
COMPUTE_32F, COMPUTE_32F_FAST_TF32, R_32F, R_16F, R_16BF, R_8F_E4M3 = 68, 77, 0, 2, 14, 28
FP16 = np.dtype(np.float16)
TYPES = {BF16: R_16BF, FP16: R_16F, np.dtype(np.float32): R_32F, E4M3: R_8F_E4M3}
DESCRIPTION_POINTER_MODE, POINTERS_TO_DEVICE = 2, 1
LAYOUT_COUNT, LAYOUT_STRIDE = 5, 6
DESCRIPTION_TRANSPOSES_A, DESCRIPTION_TRANSPOSES_B, DESCRIPTION_EPILOGUE, DESCRIPTION_BIAS = 3, 4, 7, 8
DESCRIPTION_SCALE_A, DESCRIPTION_SCALE_B, DESCRIPTION_FAST_ACCUMULATION, DESCRIPTION_BIAS_TYPE = 17, 18, 25, 26
EPILOGUE_BIAS = 4
PREFERRED_WORKSPACE, PREFERRED_REDUCTIONS, PREFERRED_ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # of a, b, c and d
REDUCTION_IN_FP32 = 2
ALGORITHM_PARTS = 2

MAX_ALGORITHMS = 8
COMPARED = 1 << 19  # words of 16 bits at either end of a result
MIN_COMPARED = {BF16: 1 << 20, np.dtype(np.float32): 1 << 14}  # so many numbers show whether two algorithms agree


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [("data", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", c_float),
                ("reserved", c_int * 4)]  # fmt: skip


@dataclass
class Plan:
    """How products of a kind are done. layouts: of the matrices as cublasLt sees them, by columns, each transposed."""

    description: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]
    algorithms: list[Algorithm]  # the first one is used
    timed: bool = False


class CublasLt:
    """Products with sums in fp32. precision: "tf32" if products of fp32 matrices round their operands."""

    def __init__(self, cupy: Any, handle: int, cuda_version: int):
        self.cupy, self.handle = cupy, c_void_p(handle)  # a handle of cuBLAS is one of cublasLt, too
        self.library = ctypes.CDLL(f"libcublasLt.so.{cuda_version}")  # libcublas has loaded it, so its name is enough
        self.plans: dict[tuple, Plan] = {}
        self.zero_and_one = cupy.asarray(np.array([0, 1], np.float32))  # fp16's beta, which lies beside its alpha
        self.precision = "fp32"

    def call(self, function: str, *arguments: Any) -> None:
        status = getattr(self.library, f"cublasLt{function}")(*arguments)
        if status != 0:
            raise RuntimeError(f"cublasLt{function} failed with status {status}")

    def gemm(
        self, c, a, b, m: int, n: int, k: int, trans_a: bool, trans_b: bool, add, bias, scale_a, scale_b,
        stream: Any, workspace: Any, capturing: bool, count: int = 1,
    ) -> None:  # fmt: skip
        """CpuDevice.gemm, and CpuDevice.gemm_strided_batched of fp16."""
        alignment = alignment_of(a, b, c, add, bias)
        kind = m, n, k, trans_a, trans_b, a.dtype, c.dtype, count
        beside = add is not None and add is not c  # one matrix more to read: another algorithm may be the fastest
        key = *kind, beside, bias is not None, alignment, self.precision
        if key not in self.plans:
            self.plans[key] = self.plan(*kind, bias, alignment, workspace.nbytes)
        plan = self.plans[key]

        if a.dtype == E4M3:  # cublasLt's a is our b
            self.describe(plan.description, DESCRIPTION_SCALE_A, c_void_p(scale_b.data.ptr))
            self.describe(plan.description, DESCRIPTION_SCALE_B, c_void_p(scale_a.data.ptr))

        def multiply(algorithm: Algorithm, add=add) -> None:
            pointer_a, pointer_b, pointer_c, scratch = (c_void_p(array.data.ptr) for array in (a, b, c, workspace))
            pointer_add, beta = (pointer_c, 0.0) if add is None else (c_void_p(add.data.ptr), 1.0)
            layout_b, layout_a, layout_c = plan.layouts
            factors = ctypes.byref(c_float(1.0)), ctypes.byref(c_float(beta))  # of the product, and of what was there
            if a.dtype == FP16:
                factors = c_void_p(scale_b.data.ptr + 4), c_void_p(self.zero_and_one.data.ptr + 4 * int(beta))
            self.call(
                "Matmul", self.handle, plan.description, factors[0], pointer_b, layout_b, pointer_a,
                layout_a, factors[1], pointer_add, layout_c, pointer_c, layout_c,
                ctypes.byref(algorithm), scratch, c_size_t(algorithm.workspace), c_void_p(stream.ptr),
            )  # fmt: skip

        enough = a.dtype not in (np.float32, FP16) and m * n >= MIN_COMPARED[c.dtype]
        if not plan.timed and enough and add is not c and not capturing:  # c may be written several times
            if bias is not None:
                random = self.cupy.asarray(to_bf16(np.random.default_rng(0).standard_normal(n)))
                self.describe(plan.description, DESCRIPTION_BIAS, c_void_p(random.data.ptr))
            self.put_fastest_first(plan, multiply, c, stream, calls=5 if m * n * k < 1 << 36 else 1)
        if bias is not None:
            self.describe(plan.description, DESCRIPTION_BIAS, c_void_p(bias.data.ptr))
        multiply(plan.algorithms[0])

    def plan(
        self, m: int, n: int, k: int, trans_a: bool, trans_b: bool, factors: np.dtype, result: np.dtype,
        count: int, bias, alignment: int, workspace: int,
    ) -> Plan:  # fmt: skip
        """What cublasLt recommends for products of a kind, with these types of factors and result. The first algorithm
        is the one that it expects to be the fastest. count: products that follow one another in memory. bias: the array
        or None. alignment: from alignment_of. workspace: bytes."""
        # cublasLt stores matrices by columns, so it sees each of ours transposed: c^T = op(b)^T op(a)^T.
        description, preference = c_void_p(), c_void_p()
        compute = COMPUTE_32F_FAST_TF32 if self.precision == "tf32" else COMPUTE_32F
        self.call("MatmulDescCreate", ctypes.byref(description), compute, R_32F)
        self.describe(description, DESCRIPTION_TRANSPOSES_A, c_int32(trans_b))
        self.describe(description, DESCRIPTION_TRANSPOSES_B, c_int32(trans_a))
        if bias is not None:
            self.describe(description, DESCRIPTION_EPILOGUE, c_uint32(EPILOGUE_BIAS))
            self.describe(description, DESCRIPTION_BIAS, c_void_p(bias.data.ptr))  # its alignment matters
            self.describe(description, DESCRIPTION_BIAS_TYPE, c_int32(TYPES[bias.dtype]))
        if factors == FP16:  # the scales lie on the device
            self.describe(description, DESCRIPTION_POINTER_MODE, c_int32(POINTERS_TO_DEVICE))
        if factors == E4M3:
            self.describe(description, DESCRIPTION_FAST_ACCUMULATION, c_int8(result == BF16))
        layouts = (
            self.layout(factors, k if trans_b else n, n if trans_b else k, count),
            self.layout(factors, m if trans_a else k, k if trans_a else m, count),
            self.layout(result, n, m, count),
        )
        self.call("MatmulPreferenceCreate", ctypes.byref(preference))
        preferred = {PREFERRED_WORKSPACE: c_size_t(workspace), PREFERRED_REDUCTIONS: c_uint32(REDUCTION_IN_FP32)}
        preferred |= {which: c_uint32(alignment) for which in PREFERRED_ALIGNMENTS}
        for which, value in preferred.items():
            size = c_size_t(ctypes.sizeof(value))
            self.call("MatmulPreferenceSetAttribute", preference, which, ctypes.byref(value), size)
        found, offered = (Algorithm * MAX_ALGORITHMS)(), c_int()
        matrices = (*layouts, layouts[-1])
        try:
            self.call(
                "MatmulAlgoGetHeuristic", self.handle, description, *matrices, preference, MAX_ALGORITHMS, found,
                ctypes.byref(offered),
            )  # fmt: skip
            algorithms = [algorithm for algorithm in found[: offered.value] if algorithm.status == 0]
            if not algorithms:
                raise RuntimeError(f"cublasLt has no algorithm for a product of {m} x {k} and {k} x {n}")
        except RuntimeError as error:
            if factors != E4M3:
                raise
            raise UserError(
                f"this cuBLAS does not multiply matrices of fp8 on this GPU ({error}): use --precision bf16"
            ) from None
        self.call("MatmulPreferenceDestroy", preference)
        return Plan(description, layouts, algorithms)

    def describe(self, description: c_void_p, which: int, value: Any) -> None:
        """Sets one of a product's attributes."""
        size = c_size_t(ctypes.sizeof(value))
        self.call("MatmulDescSetAttribute", description, which, ctypes.byref(value), size)

    def layout(self, dtype: np.dtype, rows: int, columns: int, count: int) -> c_void_p:
        """`count` matrices that lie by columns, without gaps."""
        made = c_void_p()
        self.call("MatrixLayoutCreate", ctypes.byref(made), TYPES[dtype], c_uint64(rows), c_uint64(columns),
                  c_int64(rows))  # fmt: skip
        for which, value in (LAYOUT_COUNT, c_int32(count)), (LAYOUT_STRIDE, c_int64(rows * columns)):
            size = c_size_t(ctypes.sizeof(value))
            self.call("MatrixLayoutSetAttribute", made, which, ctypes.byref(value), size)
        return made

    def put_fastest_first(self, plan: Plan, multiply: Any, c, stream: Any, calls: int) -> None:
        """Times the plan's algorithms, `calls` products at a time, and sorts them. Drops those that may give other bits
        than the first one. multiply(algorithm) sets c; with None as `add`, to the product without it. If that is 0
        everywhere, the plan stays as it is."""
        first = plan.algorithms[0]
        words = c.reshape(-1).view(np.uint16)
        ends = words[:COMPARED], words[-COMPARED:]

        def results(algorithm: Algorithm) -> list:
            multiply(algorithm, None)
            alone = [end.copy() for end in ends]
            multiply(algorithm)
            return alone + [end.copy() for end in ends]

        expected = results(first)
        if not any(end.any() for end in expected[:2]):  # zeros show no difference: a later product may
            return

        def same(algorithm: Algorithm) -> bool:
            if self.parts(algorithm) != self.parts(first):
                return False
            return all(bool((a == b).all()) for a, b in zip(results(algorithm), expected, strict=True))

        def seconds(algorithm: Algorithm) -> float:
            stream.begin_capture()
            try:
                for _ in range(calls):
                    multiply(algorithm)
            finally:
                graph = stream.end_capture()
            events = [self.cupy.cuda.Event() for _ in range(4)]
            for event in events:
                graph.launch(stream)
                event.record(stream)
            events[-1].synchronize()
            return min(map(self.cupy.cuda.get_elapsed_time, events, events[1:]))

        plan.algorithms = sorted(filter(same, plan.algorithms), key=seconds) or [first]
        plan.timed = True

    def parts(self, algorithm: Algorithm) -> int:
        """Into how many parts the algorithm cuts the sum over k. It adds up the parts at the end."""
        value, written = c_int32(), c_size_t()
        self.call(
            "MatmulAlgoConfigGetAttribute", ctypes.byref(algorithm), ALGORITHM_PARTS, ctypes.byref(value),
            c_size_t(ctypes.sizeof(value)), ctypes.byref(written),
        )  # fmt: skip
        return value.value


def alignment_of(*arrays) -> int:
    """The largest power of 2, up to 16, that divides the addresses of all these arrays. An array may be None."""
    addresses = 16
    for array in arrays:
        if array is not None:
            addresses |= array.data.ptr
    return addresses & -addresses

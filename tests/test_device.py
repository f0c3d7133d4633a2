"""device: the same calls on the CPU and on CUDA."""

import re
import time
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import device
from conftest import refusal
from device import ceil_div, cpu, cuda, cuda_kernel, current, from_bf16, nvrtc, to_bf16
from device.cublaslt import CublasLt, Plan
from device.cuda_kernel import CudaKernel, ProgrammaticKernel
from device.fp8 import E4M3
from device.sources import programmatic_kernels
from kernels import gelu
from oracle import BF16, assert_close, guarded, kernel_tolerance, normal, to_numpy

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st


def stored(matrices: np.ndarray, transposed: bool) -> np.ndarray:
    """The matrices (..., rows, columns) as they lie in memory."""
    return np.ascontiguousarray(matrices.swapaxes(-1, -2) if transposed else matrices)


any_product = given(
    m=st.integers(1, 90), n=st.integers(1, 90), k=st.integers(1, 90), trans_a=st.booleans(), trans_b=st.booleans()
)


@any_product
@example(m=64, n=32, k=16, trans_a=False, trans_b=False)
@example(m=5, n=300, k=211, trans_a=True, trans_b=True)  # enough work to be shared out among cores
@example(m=701, n=30, k=3200, trans_a=False, trans_b=True)
def test_gemm_multiplies_by_rows_and_adds_what_was_there_or_another_matrix(each_product, m, n, k, trans_a, trans_b):
    rng = np.random.default_rng([m, n, k])
    a, b, before = normal(rng, m, k), normal(rng, k, n), normal(rng, m, n)
    want = a.astype(np.float64) @ b
    for dtype in {each_product.floatX, np.dtype(np.float32)}:  # weights' gradients are fp32 in any case
        for adds in "nothing", "what was there", "another matrix":
            with guarded(each_product) as memory:
                c = memory.update(before, dtype) if adds == "what was there" else memory.write((m, n), dtype)
                add = {"nothing": None, "what was there": c}.get(adds, memory.read(before, dtype))
                inputs = memory.read(stored(a, trans_a)), memory.read(stored(b, trans_b))
                each_product.gemm(c, *inputs, m, n, k, trans_a, trans_b, add)
            # cuBLAS rounds the product to c's type before it adds a matrix, if it likes.
            twice = dtype != np.float32 and each_product.kind == "cuda" and add is not None
            allowed = BF16 if twice else kernel_tolerance(each_product)
            assert_close(f"c {dtype} + {adds}", c, want + before * (add is not None), allowed)


@pytest.mark.parametrize("trans_a, trans_b, with_bias, with_add", [
    (False, True, False, False), (False, False, False, False), (True, False, False, False), (False, True, True, False),
    (False, True, False, True), (False, True, True, True),
])  # fmt: skip
@pytest.mark.parametrize("m, n, k", [(768, 2304, 512), (1024, 512, 768), (100, 3072, 4096), (64, 48, 40), (12, 64, 96)])
def test_whichever_algorithm_is_the_fastest_the_bits_are_the_same(
    each_product, m, n, k, trans_a, trans_b, with_bias, with_add
):
    if each_product.kind != "cuda" or each_product.floatX != each_product.BF16:
        pytest.skip("only products of bf16 matrices on a GPU are timed")
    rng, small = np.random.default_rng([m, n, k]), m * n < 10_000

    def operands(zero_bias: bool = False) -> tuple:
        """A product's matrices, its bias or None, and what is added or None."""
        a, b = (stored(normal(rng, *shape), turned) for shape, turned in (((m, k), trans_a), ((k, n), trans_b)))
        bias = np.zeros(n, np.float32) if zero_bias else normal(rng, n)
        a, b, bias, add = (each_product.asarray(device.to_bf16(x)) for x in (a, b, bias, normal(rng, m, n)))
        return a, b, bias if with_bias else None, add if with_add else None

    def multiply(a, b, bias, add) -> np.ndarray:
        each_product.gemm(c, a, b, m, n, k, trans_a, trans_b, add, bias)
        return each_product.to_host(c)

    for dtype in [each_product.BF16] if with_bias or with_add else [each_product.BF16, np.dtype(np.float32)]:
        c = each_product.empty((m, n), dtype)
        plans = current.device.blas.lt.plans
        plans.clear()
        multiply(*operands(zero_bias=True))  # in training a product is timed before its bias has learned anything
        (plan,) = plans.values()
        usable = plan.algorithms if plan.timed else plan.algorithms[:1]
        assert plan.timed == (m * n >= (1 << 20 if dtype == each_product.BF16 else 1 << 14))
        for _ in range(200 if small else 1):  # other matrices than those with which the algorithms were compared
            given, results = operands(), []
            for algorithm in usable:
                plan.algorithms, plan.timed = [algorithm], True
                results.append(multiply(*given))
            assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("status, why", [
    (15, "cublasLtMatmulAlgoGetHeuristic failed with status 15"),  # CUBLAS_STATUS_NOT_SUPPORTED
    (0, "cublasLt has no algorithm for a product of 32 x 64 and 64 x 16"),
])  # fmt: skip
def test_a_cublas_without_products_of_fp8_for_this_gpu_is_told_in_one_line(status, why):
    class Library:
        def __getattr__(self, name: str):
            return lambda *arguments: status if name == "cublasLtMatmulAlgoGetHeuristic" else 0

    lt = object.__new__(CublasLt)
    lt.library, lt.handle, lt.precision = Library(), None, "fp8"
    kind = 32, 16, 64, False, True
    said = refusal(lt.plan, *kind, E4M3, device.BF16, 1, None, 16, 0)
    assert said == f"this cuBLAS does not multiply matrices of fp8 on this GPU ({why}): use --precision bf16"
    with pytest.raises(RuntimeError, match=why):
        lt.plan(*kind, device.BF16, device.BF16, 1, None, 16, 0)


def test_algorithms_are_not_compared_by_a_result_of_zeros():
    lt, plan, multiplied = object.__new__(CublasLt), Plan(None, (None,) * 3, ["first", "second"]), []
    lt.put_fastest_first(
        plan, lambda *algorithm_and_add: multiplied.append(algorithm_and_add[0]), np.zeros(4, np.float32), None, calls=1
    )
    assert set(multiplied) == {"first"} and not plan.timed and plan.algorithms == ["first", "second"]


def test_algorithms_that_cublaslt_gives_with_a_bad_status_are_left_out():
    class Library:
        def __getattr__(self, name: str):
            return lambda *arguments: 0

        def cublasLtMatmulAlgoGetHeuristic(self, *arguments) -> int:
            found, count = arguments[-2], arguments[-1]._obj
            count.value, found[1].status = 3, 15
            for i in range(3):
                found[i].workspace = i
            return 0

    lt = object.__new__(CublasLt)
    lt.library, lt.handle, lt.precision = Library(), None, "bf16"
    plan = lt.plan(32, 16, 64, False, True, device.BF16, device.BF16, 1, None, 16, 0)
    assert [algorithm.workspace for algorithm in plan.algorithms] == [0, 2]


@pytest.mark.parametrize("wrong", [None, 0, 123, -1])
@pytest.mark.parametrize("wrongly", [True, None], ids=["with_add", "alone"])
@pytest.mark.parametrize("dtype", [device.BF16, np.dtype(np.float32)])
def test_an_algorithm_is_dropped_if_its_result_differs_at_either_end(wrong, wrongly, dtype):
    lt, c = object.__new__(CublasLt), np.zeros((1 << 10, 1 << 11), dtype)
    lt.parts = lambda algorithm: 1

    def multiply(algorithm: str, add: object = True) -> None:
        c[:] = 1
        if algorithm == "second" and wrong is not None and add is wrongly:
            c.reshape(-1)[wrong] = 2

    lt.cupy = SimpleNamespace(cuda=SimpleNamespace(Event=MagicMock, get_elapsed_time=lambda begin, end: 1.0))
    plan = Plan(None, (None,) * 3, ["first", "second"])
    lt.put_fastest_first(plan, multiply, c, MagicMock(), calls=1)
    assert plan.timed and plan.algorithms == (["first", "second"] if wrong is None else ["first"])


@pytest.mark.parametrize("capability, version, early", [(90, 12030, True), (90, 12020, False), (89, 13000, False)])
def test_kernels_start_early_if_the_gpu_and_a_driver_that_captures_such_launches_allow_it(capability, version, early):
    gpu, function = object.__new__(cuda.CudaDevice), SimpleNamespace(ptr=1)
    driver_api = SimpleNamespace(funcGetAttribute=lambda attribute, pointer: 0)
    runtime = SimpleNamespace(driverGetVersion=lambda: version)
    gpu.cupy = SimpleNamespace(cuda=SimpleNamespace(driver=driver_api, runtime=runtime))
    gpu.module = lambda path: SimpleNamespace(get_function=lambda name: function)
    gpu.compute_capability = capability
    kinds = [type(gpu.kernel(gelu.cu.path, name)) for name in programmatic_kernels(gelu.cu.path)]
    assert kinds and set(kinds) == {ProgrammaticKernel if early else CudaKernel}


def test_a_kernel_whose_stream_waits_for_another_one_does_not_start_early(monkeypatch):
    """It may read parameters at once, and the other stream may update them."""
    early, function, stream = MagicMock(), MagicMock(ptr=1), MagicMock(ptr=2)
    monkeypatch.setattr(cuda_kernel, "call_driver", early)
    driver_api = SimpleNamespace(funcGetAttribute=lambda attribute, pointer: 0)
    cupy = SimpleNamespace(cuda=SimpleNamespace(driver=driver_api))
    gpu = SimpleNamespace(stream=stream, waiting={stream}, cupy=cupy)
    kernel = ProgrammaticKernel(function, "rope_kernel", gpu)
    kernel((1,), (32,), ())
    assert function.call_count == 1 and early.call_count == 0
    kernel((1,), (32,), ())
    assert function.call_count == 1 and early.call_count == 1


def test_a_kernel_gets_the_shared_memory_that_its_gpu_has_and_more_is_refused_in_one_line():
    allowed = []
    driver_api = SimpleNamespace(
        funcGetAttribute=lambda attribute, pointer: {1: 384}[attribute],
        funcSetAttribute=lambda pointer, attribute, value: allowed.append((attribute, value)),
    )
    gpu = SimpleNamespace(name="NVIDIA L4", shared_memory=99 << 10, cupy=SimpleNamespace(
        cuda=SimpleNamespace(driver=driver_api)))  # fmt: skip
    function = MagicMock(ptr=1)
    kernel = CudaKernel(function, "layernorm_backward_kernel", gpu)
    most = (99 << 10) - 384
    for shared_mem in 48 * 1024 - 384, 50_000, 49_999, most:
        kernel((1,), (32,), (), shared_mem)
    assert allowed == [(8, 50_000), (8, most)] and function.call_count == 4
    assert refusal(kernel, (1,), (32,), (), most + 1) == (
        "a block of layernorm_backward_kernel needs 101,377 bytes of shared memory, and one of NVIDIA L4 has 101,376: "
        "take a model with fewer channels"
    )


@any_product
@example(m=64, n=64, k=64, trans_a=False, trans_b=True)
@example(m=7, n=5, k=3, trans_a=True, trans_b=False)
def test_gemm_strided_batched_multiplies_each_of_the_matrices(each_product, m, n, k, trans_a, trans_b):
    rng, count = np.random.default_rng([m, n, k]), 5
    a, b = normal(rng, count, m, k), normal(rng, count, k, n)
    for dtype in {each_product.floatX, np.dtype(np.float32)}:
        with guarded(each_product) as memory:
            c = memory.write((count, m, n), dtype)
            inputs = memory.read(stored(a, trans_a)), memory.read(stored(b, trans_b))
            each_product.gemm_strided_batched(c, *inputs, m, n, k, count, trans_a, trans_b)
        assert_close(f"c {dtype}, batched", c, a.astype(np.float64) @ b, kernel_tolerance(each_product))


@pytest.mark.parametrize("G", [1, 3])  # matrices one below another
@pytest.mark.parametrize("T, HS", [(5, 3), (64, 40), (203, 8), (600, 17)])  # 600: several parts of a sum
def test_the_products_of_causal_attention_need_nothing_above_the_diagonal(each_product, T, HS, G):
    rng, count, close = np.random.default_rng([T, G]), 2, kernel_tolerance(each_product)
    att = np.tril(normal(rng, count, G, T, T))
    queries, keys = normal(rng, count, G * T, HS), normal(rng, count, T, HS)
    stacked = att.reshape(count, G * T, T).astype(np.float64)
    with guarded(each_product) as memory:
        a, q, k = memory.read(att), memory.read(queries), memory.read(keys)
        scores = memory.scratch((count, G, T, T))
        out, back = memory.write((count, G * T, HS)), memory.write((count, T, HS))
        each_product.gemm_strided_batched(scores, q, k, G * T, T, HS, count, trans_b=True, causal="c")
        each_product.gemm_strided_batched(out, a, k, G * T, HS, T, count, causal="a")
        each_product.gemm_strided_batched(back, a, q, T, HS, G * T, count, trans_a=True, causal="a")
    want = (queries @ keys.swapaxes(1, 2)).reshape(count, G, T, T)
    found = to_numpy(scores)
    assert_close("scores", np.tril(found), np.tril(want), close + (BF16 if each_product.floatX == device.BF16 else 0))
    assert_close("out", out, stacked @ keys, close)
    assert_close("back", back, stacked.swapaxes(1, 2) @ queries, close)
    if each_product.kind == "cpu" and T > 60:
        assert np.isnan(found[:, 0, 0, T - 1]).all()  # left as it was


@pytest.mark.parametrize("trans_a, trans_b", [(False, True), (False, False), (True, False), (True, True)])
@pytest.mark.parametrize("m, n, k", [(300, 270, 530), (65, 1100, 257)])  # more rows, columns and terms than a block has
def test_on_the_cpu_a_product_has_the_same_bits_on_any_number_of_cores(m, n, k, trans_a, trans_b):
    rng, dev = np.random.default_rng([m, n, k]), cpu.CpuDevice()
    a, b = normal(rng, m, k), normal(rng, k, n)
    results, grids = [], set()
    for cores in 1, 2, 5, 64:
        dev.cores, c = cores, normal(rng, m, n)
        dev.gemm(c, stored(a, trans_a), stored(b, trans_b), m, n, k, trans_a, trans_b)
        results.append(c)
        grids.add(cpu.product_grid(m, n, 1, cores))
    assert_close("c", results[0], a.astype(np.float64) @ b, kernel_tolerance(dev))
    assert len(grids) > 2 and all(np.array_equal(c, results[0]) for c in results)


bf16 = device.source(Path(__file__).parent / "cu" / "bf16.cu")


def check_rounding(dev, words: np.ndarray) -> None:
    """Compares the host's and the kernels' rounding with PyTorch's, for an even number of fp32 numbers, given as words.
    Every NaN becomes 0x7fff; PyTorch has several."""
    values = words.view(np.float32)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    want = np.where(np.isnan(values), np.uint16(0x7FFF), theirs)
    assert np.array_equal(to_bf16(values), want)
    pairs, singles, x = dev.empty(words.shape, device.BF16), dev.empty(words.shape, device.BF16), dev.asarray(values)
    bf16.launch("to_bf16_kernel", (ceil_div(words.size // 2, 256),), (256,), (pairs, singles, x, words.size // 2))
    dev.synchronize()
    assert np.array_equal(dev.to_host(pairs), want) and np.array_equal(dev.to_host(singles), want)


def test_fp32_numbers_are_rounded_to_the_nearest_bf16_as_pytorch_does(dev):
    # Each bf16 number with something behind it: nothing, little, the tie and its neighbours, nearly the next number.
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    words = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | lower).reshape(-1)
    check_rounding(dev, words)
    zero, least, most = np.float32([-0.0, 2**-133, 3.3895314e38])
    assert to_bf16(np.array([zero, least / 2, least * 0.75, most, most * 1.002, most * 1.00195])).tolist() == [
        0x8000, 0, 1, 0x7F7F, 0x7F80, 0x7F7F
    ]  # fmt: skip


@pytest.mark.long
def test_every_fp32_number_is_rounded_to_the_nearest_bf16_as_pytorch_does(dev):
    count = 1 << 24
    for first in range(0, 1 << 32, count):
        check_rounding(dev, np.arange(first, first + count, dtype=np.uint32))


def test_every_bf16_number_is_the_fp32_number_of_that_value(dev):
    words = np.arange(1 << 16, dtype=np.uint16)
    want = torch.from_numpy(words).view(torch.bfloat16).float().numpy()
    out = dev.empty(words.shape)
    bf16.launch("to_float_kernel", (256,), (256,), (out, dev.asarray(words), words.size))
    dev.synchronize()
    assert np.array_equal(from_bf16(words).view(np.uint32), want.view(np.uint32))
    assert np.array_equal(dev.to_host(out).view(np.uint32), want.view(np.uint32))


def test_a_shorter_copy_goes_to_or_comes_from_the_beginning(dev):
    array = dev.zeros((2, 5), np.int32)
    dev.copy_in(array, np.array([7, 8, 9], np.int32))
    back = dev.pinned((4,), np.int32)
    dev.copy_out(back, array)
    dev.synchronize()
    assert back.tolist() == [7, 8, 9, 0]
    assert dev.to_host(array).tolist() == [[7, 8, 9, 0, 0], [0] * 5]


def test_host_copies_are_new_arrays(dev):
    host = np.ones(3, np.float32)
    array = dev.asarray(host)
    for copy in host, dev.to_host(array):
        copy[:] = 2
    assert dev.to_host(array).tolist() == [1, 1, 1]
    dev.fill_zero(array)
    assert dev.to_host(array).tolist() == [0, 0, 0]


def test_events_come_to_pass_in_order(dev):
    began = time.perf_counter()
    first, second, third = dev.event(), dev.event(), dev.event()
    assert 0 <= second.since(first) <= third.since(first) <= 1000 * (time.perf_counter() - began)


def test_an_inner_observer_sees_what_is_launched_first_and_its_work_calls_the_outer_one(dev):
    seen = []

    def observer(of: str, name: str, arguments: dict, work) -> None:
        seen.append(f"{of} sees {name} of {', '.join(arguments)}")
        work()
        seen.append(f"{of} is done")

    array, other = dev.asarray(np.ones(3, np.float32)), dev.zeros((3,))
    with dev.observe(partial(observer, "outer")):
        with dev.observe(partial(observer, "inner")):
            dev.fill_zero(array)
        dev.copy(dst=array, src=other)
    dev.fill_zero(array)
    assert seen == [
        "inner sees fill_zero of array", "outer sees fill_zero of array", "outer is done", "inner is done",
        "outer sees copy of dst, src", "outer is done",
    ]  # fmt: skip
    assert not dev.to_host(array).any()


def test_all_kernel_files_are_compiled_at_once(dev, monkeypatch):
    """A file that no launcher uses on this device is left out: in fp32 the ones for wgmma, fp8 and fp16. So is GELU's
    erf form, which is compiled when it is launched."""
    assert any("hopper" in source.path.name for source in dev.sources.imported)
    monkeypatch.setattr(dev.current.device, "modules", {})  # which tests share
    dev.compile_all()
    compiled = {path for path, _ in dev.current.device.modules}
    left_out = re.compile("hopper|fp8/|fp16/|erf")
    kernels = {source.path for source in dev.sources.imported if not left_out.search(str(source.path))}
    assert compiled == kernels | ({cpu.PRODUCTS} if dev.kind == "cpu" else set())
    gelu.gelu_forward(dev.empty((1, 4)), dev.zeros((1, 4)), dev.zeros((4,)), 1, 4)


@pytest.mark.parametrize("name, wish, says", [
    ("WARP", "16", "it can be 1 or 32"), ("THREADS", "0", "it must be a number, at least 1"),
    ("THREADS", "many", "it must be a number, at least 1"),
])  # fmt: skip
def test_a_warp_of_another_size_and_no_number_of_threads_are_refused(name, wish, says, monkeypatch):
    monkeypatch.setenv(f"LLMC_CPU_{name}", wish)
    assert refusal(device.use, "cpu") == f"LLMC_CPU_{name} is {wish}; {says}"


def test_scratch_is_reused_and_grows_and_an_old_view_stays_valid(dev):
    def scratch(*shape: int, dtype=np.float32):
        return device.scratch("partials", shape, dtype)

    first = scratch(3, 4)
    assert first.shape == (3, 4) and first.dtype == np.float32
    for again in scratch(24, dtype=np.uint16), scratch(2):
        assert device.address(again) == device.address(first), "one region"

    device.copy(first, dev.asarray(np.arange(12, dtype=np.float32).reshape(3, 4)))
    larger = scratch(5, 4)  # which the region has no room for
    device.fill_zero(larger)
    assert larger.shape == (5, 4) and not device.touch([extent(larger)], [extent(first)])
    assert np.array_equal(dev.to_host(first), np.arange(12).reshape(3, 4)), "a recorded step may still use it"
    assert device.address(scratch(3, 4)) == device.address(first), "as in its notes"
    assert device.address(scratch(13)) == device.address(larger)


def test_two_purposes_of_scratch_never_overlap(dev):
    purposes = "input_T", "weight_T"
    views = [device.scratch(purpose, (size,), np.float32) for size in (5, 900, 7) for purpose in purposes]
    for one, other in product(views[::2], views[1::2]):
        assert not device.touch([extent(one)], [extent(other)])


def test_scratch_that_is_reserved_is_not_allocated_in_a_step(dev, monkeypatch):
    device.reserve({"partials": 400, "dsum": 64, "dkv_heads": 0})
    assert set(current.device.regions) == {"partials", "dsum"}  # of no bytes there is no region
    monkeypatch.setattr(current.device, "empty", None)
    assert device.scratch("partials", (100,), np.float32).size == 100
    assert device.scratch("dsum", (32,), np.uint16).size == 32


def extent(array) -> tuple[int, int]:
    """The addresses of an array's bytes."""
    return device.address(array), device.address(array) + array.nbytes


def test_cupys_folder_becomes_ours_alone_or_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "cupy" / "cache"
    monkeypatch.setenv("CUPY_CACHE_DIR", str(folder))
    nvrtc.check_cupys_cache()
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "kernel.cubin").touch()
    (folder / "kernel.cubin").chmod(0o666)
    said = refusal(nvrtc.check_cupys_cache)
    assert "kernel.cubin belongs to another user, or can be written by one: remove it" in said
    monkeypatch.setenv("CUPY_CACHE_DIR", "/proc/none")
    assert refusal(nvrtc.check_cupys_cache).startswith("/proc/none: no such file or directory: set CUPY_CACHE_DIR")

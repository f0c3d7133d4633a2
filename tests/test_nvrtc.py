"""Every kernel compiles for real GPUs, by the compiler that CuPy uses, on a machine that need not have one."""

import contextlib
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from unittest.mock import patch

import device
from dev.microscope.launches import LAUNCHES
from device.errors import UserError
from device.sources import programmatic_kernels
from kernels import flash_attention, layernorm

import pytest

pytest.importorskip("cupy.cuda", reason="CuPy, which binds NVRTC, is not installed")
from support.nvrtc import LETS_OTHERS_START, compile_kernels, compiled  # noqa: E402

KERNELS = sorted((Path(__file__).parent.parent / "kernels").rglob("*.cu"))
# Bytes of shared memory that a block can have, by compute capability (CUDA programming guide): T4; A100; RTX 30 and 40;
# H100 and H200; B200; RTX 50.
SHARED_MEMORY = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# Compute capabilities and precisions; before 8.0 there is no bf16.
BUILDS = (75, "fp32"), (90, "bf16")
FURTHER = [  # in make test-all
    build for build in product(SHARED_MEMORY, ("fp32", "bf16")) if build not in (*BUILDS, (75, "bf16"))
]
PRODUCTS_IN_TF32 = "flash_attention", (90, "fp32")  # nowhere else does fp32 have code of its own for newer GPUs

LARGE = {"C": 5120}, {"V": 128_256, "Vp": 128_256}  # channels, Pythia 12B; tokens, Llama 3

# Bytes per thread that a kernel may spill, or keep of a local array in memory, by compute capability. On 9.0 the first
# kernel takes 3% less time with it (4 bytes, by NVRTC 13.2). The others have as many registers as was best on 9.0, and
# NVRTC 13.5 needs more elsewhere.
MAY_SPILL = {
    "flash_attention_backward_query_kernel_64": {90: 8, 100: 16, 120: 8},
    "layernorm_quantize_kernel": {89: 12, 100: 68, 120: 140},
    "gelu_backward_fp8_kernel": {89: 8},
}

# The arrays that kernels may read before grid_dependency_synchronize (dependent_launch.cuh): parameters, what is
# constant, and positions.
POSITIONS = {"positions", "starts"}
MAY_READ = {
    "matvec_kernel": {"weight", "bias"},
    "matvec_gelu_kernel": {"weight", "bias"},
    "matvec_gelu_erf_kernel": {"weight", "bias"},
    "matvec_fp8_kernel": {"q", "scale", "bias"},
    "layernorm_few_rows_kernel": {"weight", "bias"},
    "rmsnorm_few_rows_kernel": {"weight"},
    "parallel_residual_few_rows_kernel": {"weight0", "shift0", "weight1", "shift1"},
    "qk_norm_forward_kernel": {"qweight", "kweight", "table", "starts"},
    "rope_kernel": {"table", "starts"},
    "cached_attention_kernel": {"positions"},
    "cached_attention_shared_kernel": {"positions"},
    "add_splits_kernel": {"positions"},
}


def meets(path: Path, build: tuple[int, str]) -> bool:
    """Whether a GPU launches kernels of a file in a precision: those of fp8/ and fp16/ in theirs, whose other arrays
    are bf16 and fp32; and those for a single architecture there, in bf16."""
    capability, floats = build
    if architecture := device.architecture_of(path):
        return build == (int(architecture.rstrip("a")), "bf16")
    return {"fp8": floats == "bf16" and capability >= 89, "fp16": floats == "fp32"}.get(path.parent.name, True)


ALL = [(path, build) for path in KERNELS for build in (*BUILDS, *FURTHER) if meets(path, build)]
ORDINARY = [(path, build) for path, build in ALL if build in BUILDS or (path.stem, build) == PRODUCTS_IN_TF32]


@pytest.fixture(scope="module", autouse=True)
def all_compiled(pytestconfig):
    """Compiles on all cores what the tests will ask for: NVRTC lets go of the interpreter's lock."""

    def compile_one(pair: tuple[Path, tuple[int, str]]) -> None:
        path, build = pair
        with contextlib.suppress(pytest.fail.Exception):  # the test compiles it again, and says why it failed
            compiled(path, *build, pytestconfig.cache)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, ORDINARY))


@cache
def dynamic_shared_memory(capability: int, precision: str) -> dict[tuple[Path, str], int]:
    """The most bytes of dynamic shared memory that launchers give to a block on such a GPU, by file and kernel: at the
    sizes of their descriptions, and at LARGE ones."""
    asked = defaultdict(int)

    def launch(source: device.Source, name: str, grid, block, args, shared_mem: int = 0) -> None:
        asked[source.path, name] = max(shared_mem, asked[source.path, name])

    gpu = device.CpuDevice()
    gpu.kind, gpu.compute_capability, gpu.shared_memory = "cuda", capability, SHARED_MEMORY[capability]
    gpu.warp_size, gpu.gemm, gpu.gemm_strided_batched = lambda path: 32, *[lambda *args, **named: None] * 2
    gpu.why_not_kernels = lambda path: capability != 90 and device.architecture_of(path)
    with patch.object(device.current, "device", gpu), patch.object(device.Source, "launch", launch):
        gpu.use_precision(precision)
        for described in LAUNCHES.values():
            for sizes in {}, described.hard, *(large for large in LARGE if large.keys() <= described.sizes.keys()):
                with contextlib.suppress(UserError):  # this GPU or this precision lacks it
                    described.prepare(sizes)()
    return asked


@pytest.mark.parametrize("path, capability, precision", [
    pytest.param(path, *build, marks=[pytest.mark.long] * ((path, build) not in ORDINARY), id=f"{path.stem} {build}")
    for path, build in ALL
])  # fmt: skip
def test_every_kernel_compiles_fits_the_gpu_and_waits_before_it_touches_what_others_write(
    path, capability, precision, pytestconfig
):
    """It stays in registers, and a block gets the shared memory that it needs. The wait is there if a kernel starts
    early and the GPU has the instruction. The launch of any other one waits."""
    kernels = compiled(path, capability, precision, pytestconfig.cache)
    dynamic = dynamic_shared_memory(capability, precision)
    shared = {kernel: static + dynamic.get((path, kernel), 0) for kernel, (*_, static, _) in kernels.items()}
    assert not {kernel: size for kernel, size in shared.items() if size > SHARED_MEMORY[capability]}
    assert kernels.keys() == device.kernel_declarations(path).keys()
    spilling = {
        kernel: f"stack frame {frame}, spill stores {stores}, spill loads {loads} bytes"
        for kernel, (frame, stores, loads, *_) in kernels.items()
        if max(frame, stores, loads) > MAY_SPILL.get(kernel, {}).get(capability, 0)
    }
    assert not spilling
    early = {kernel: accesses for kernel, (*_, accesses) in kernels.items() if accesses is not None}
    assert early.keys() == (programmatic_kernels(path) if capability >= 90 else set())
    # No kernel starts before the encoder has waited, so all kernels after it may read a text's position at once.
    late = {kernel for kernel, accesses in early.items() if LETS_OTHERS_START not in accesses}
    assert late == early.keys() & {"encoder_forward_kernel"}
    for kernel, accesses in early.items():
        parameters = [declared.split()[-1].lstrip("*") for declared in device.kernel_declarations(path)[kernel]]
        for access, *numbers in map(str.split, {*accesses} - {LETS_OTHERS_START}):
            arrays = {parameters[int(number)] for number in numbers}
            assert arrays and arrays <= MAY_READ.get(kernel, set()), f"{kernel}: {access} of {arrays} before the wait"
            assert access.startswith("ld.") and ".nc" not in access, f"{kernel}: {access}"
            # The first-level cache may still have a position of the step before.
            assert not arrays & POSITIONS or access.startswith("ld.volatile"), f"{kernel}: {access}"


def test_two_blocks_of_attentions_backward_pass_fit_where_a_multiprocessor_has_100_kib(pytestconfig):
    """In bf16, on compute capability 8.6, 8.9 and 12.0. There it keeps 1 KiB of shared memory for each block."""
    path = flash_attention.cu.path
    static = {kernel: size for kernel, (*_, size, _) in compiled(path, 90, "bf16", pytestconfig.cache).items()}
    asked = dynamic_shared_memory(86, "bf16")
    backward = {kernel: static[kernel] + asked[path, kernel] for kernel in static if "backward" in kernel}
    assert len(backward) == 4 and all(2 * (size + 1024) <= 100 << 10 for size in backward.values()), backward


def test_a_launch_that_needs_more_shared_memory_than_the_gpu_has_is_seen(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LARGE", ({"C": 12_640},))
    asked = dynamic_shared_memory.__wrapped__(86, "fp32")
    static = 384
    assert asked[layernorm.cu.path, "layernorm_backward_kernel"] + static > SHARED_MEMORY[86]


def test_an_access_before_the_wait_is_seen():
    text = "asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");"
    source = f'extern "C" __global__ void early(float* x, float* y) {{ float a = x[0]; {text} y[0] = a; }}'
    assert compile_kernels(source, "early.cu", ("--gpu-architecture=sm_90",))["early"][-1] == ["ld.global.f32 0"]


def test_a_load_that_the_assembler_may_move_before_the_wait_is_seen():
    text = "asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");"
    source = f'extern "C" __global__ void late(const float* __restrict__ x, float* y) {{ {text} y[0] = x[0]; }}'
    assert compile_kernels(source, "late.cu", ("--gpu-architecture=sm_90",))["late"][-1] == ["ld.global.nc.f32 0"]


def test_a_kernel_with_too_few_registers_is_seen_to_spill():
    source = """
        extern "C" __global__ void crowded(float* x) {
            float v[64];
            #pragma unroll
            for (int i = 0; i < 64; i++) v[i] = x[i];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 64; i++) x[i] = v[63 - i] * v[i];
        }"""
    options = ("--gpu-architecture=sm_90", "--maxrregcount=24")
    frame, stores, loads, *_ = compile_kernels(source, "crowded.cu", options)["crowded"]
    assert frame > 0 and stores > 0 and loads > 0

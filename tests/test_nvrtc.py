"""Every kernel compiles for real GPUs, by the compiler that CuPy uses, on a machine that need not have one."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import device
from device.sources import programmatic_kernels

import pytest

pytest.importorskip("cupy.cuda", reason="CuPy, which binds NVRTC, is not installed")
from support.nvrtc import compile_kernels, compiled  # noqa: E402

KERNELS = sorted((Path(__file__).parent.parent / "kernels").rglob("*.cu"))
# Compute capabilities and precisions; before 8.0 there is no bf16.
BUILDS = (75, "fp32"), (90, "bf16")  # T4; H100 and H200
FURTHER = (90, "fp32"), (80, "fp32"), (80, "bf16"), (100, "fp32"), (100, "bf16")  # A100; B200; in make test-all
PRODUCTS_IN_TF32 = "flash_attention", (90, "fp32")  # nowhere else does fp32 have code of its own for newer GPUs

# Bytes a thread that a kernel may spill, or keep of a local array in memory, by precision; each with its reason.
MAY_SPILL = {
    ("flash_attention_backward_query_kernel_64", "fp32"): 8,  # 4 bytes, by NVRTC 13.2 for 9.0: still 3% less time
}

# What kernels may read before grid_dependency_synchronize (dependent_launch.cuh), by the instruction's name: weights,
# and a position that only says what to prefetch.
MAY_READ = {
    "matvec_kernel": "ld.global",
    "matvec_fp8_kernel": "ld.global",
    "cached_attention_kernel": "ld.volatile.global",
    "cached_attention_shared_kernel": "ld.volatile.global",
}


def meets(path: Path, build: tuple[int, str]) -> bool:
    """Whether a file is for a GPU in a precision: one that is for a single architecture is in bf16."""
    return not device.architecture_of(path) or build == (int(device.architecture_of(path).rstrip("a")), "bf16")


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


@pytest.mark.parametrize("path, capability, precision", [
    pytest.param(path, *build, marks=[pytest.mark.long] * ((path, build) not in ORDINARY), id=f"{path.stem} {build}")
    for path, build in ALL
])  # fmt: skip
def test_every_kernel_compiles_stays_in_registers_and_waits_before_it_touches_what_others_write(
    path, capability, precision, pytestconfig
):
    """The wait is there if a kernel starts early and the GPU has the instruction. The launch of any other one waits."""
    kernels = compiled(path, capability, precision, pytestconfig.cache)
    assert kernels.keys() == device.kernel_declarations(path).keys()
    spilling = {
        kernel: f"stack frame {frame}, spill stores {stores}, spill loads {loads} bytes"
        for kernel, (frame, stores, loads, _) in kernels.items()
        if max(frame, stores, loads) > MAY_SPILL.get((kernel, precision), 0)
    }
    assert not spilling
    early = {kernel: accesses for kernel, (*_, accesses) in kernels.items() if accesses is not None}
    assert early.keys() == (programmatic_kernels(path) if capability >= 90 else set())
    assert not {
        (kernel, access) for kernel, accesses in early.items() for access in accesses
        if not access.startswith(MAY_READ.get(kernel, "nothing"))
    }  # fmt: skip


def test_an_access_before_the_wait_is_seen():
    text = "asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");"
    source = f'extern "C" __global__ void early(float* x, float* y) {{ float a = x[0]; {text} y[0] = a; }}'
    assert compile_kernels(source, "early.cu", ("--gpu-architecture=sm_90",))["early"][3] == ["ld.global.f32"]


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
    frame, stores, loads, _ = compile_kernels(source, "crowded.cu", options)["crowded"]
    assert frame > 0 and stores > 0 and loads > 0

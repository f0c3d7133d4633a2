"""Every kernel compiles for real GPUs, by the compiler that CuPy uses, on a machine that need not have one."""

import contextlib
import functools
import hashlib
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import device
from device.bf16 import DEFINES, floatX_of
from device.cuda import NVRTC_OPTIONS
from device.sources import programmatic_kernels

import pytest

nvrtc = pytest.importorskip("cupy.cuda", reason="CuPy, which binds NVRTC, is not installed").nvrtc

KERNELS = sorted((Path(__file__).parent.parent / "kernels").rglob("*.cu"))
# Compute capabilities and precisions; before 8.0 there is no bf16.
BUILDS = (75, "fp32"), (90, "bf16")  # T4; H100 and H200
FURTHER = (90, "fp32"), (80, "fp32"), (80, "bf16"), (100, "fp32"), (100, "bf16")  # A100; B200; in make test-all
PRODUCTS_IN_TF32 = "flash_attention", (90, "fp32")  # nowhere else does fp32 have code of its own for newer GPUs

# Bytes a thread that a kernel may spill, or keep of a local array in memory, by precision; each with its reason.
MAY_SPILL = {
    ("flash_attention_backward_query_kernel_64", "fp32"): 8,  # 4 bytes, by NVRTC 13.2 for 9.0: still 3% less time
}


# What comes from NVRTC's cache, which goes by the PTX, comes without the assembler's report: this is in no other PTX.
NEW = f"\n__device__ int compiled_at_{time.time_ns()};\n"


# What kernels may read before grid_dependency_synchronize (dependent_launch.cuh), by the instruction's name: weights,
# and a position that only says what to prefetch.
MAY_READ = {
    "matvec_kernel": "ld.global",
    "matvec_fp8_kernel": "ld.global",
    "cached_attention_kernel": "ld.volatile.global",
    "cached_attention_shared_kernel": "ld.volatile.global",
}


def compile_kernels(source: str, name: str, options: tuple[str, ...]) -> dict[str, list]:
    """Bytes of [stack frame, spill stores, spill loads] a thread, by kernel, as the assembler reports them; and behind
    them the accesses to memory before the kernel waits for the launch in front of it, None where it does not wait."""
    program = nvrtc.createProgram(source + NEW, name, [], [])
    try:
        nvrtc.compileProgram(program, (*options, "--ptxas-options=-v"))
        assert len(nvrtc.getCUBIN(program)) > 0
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program).strip("\0"), pytrace=False)
    else:
        log = nvrtc.getProgramLog(program)
        ptx = nvrtc.getPTX(program).decode()
        texts = dict(re.findall(r"^\.visible \.entry (\w+)(.*?)^}", ptx, re.DOTALL | re.MULTILINE))
        for trouble in "instructions are serialized", "wait_group is injected":  # wgmma's, where it sees no other way
            assert trouble not in log, log
    finally:
        nvrtc.destroyProgram(program)
    sizes = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    rows = re.findall(rf"Compiling entry function '(\w+)'.*?{sizes}", log, re.DOTALL)
    return {kernel: [*map(int, sizes), early_accesses(texts[kernel])] for kernel, *sizes in rows}


def early_accesses(text: str) -> list[str] | None:
    before, wait, _ = text.partition("griddepcontrol.wait")
    accesses = re.findall(r"\b(?:ld|st|atom|red|cp)\.(?!param|shared)[\w.]+", before)
    return sorted(set(accesses)) if wait else None


@functools.cache
def compiler() -> str:
    """Which NVRTC compiles, and how this file asks it."""
    nvrtc.getSupportedArchs()  # loads it
    loaded = sorted(set(re.findall(r"/\S*/libnvrtc\.so\S*", Path("/proc/self/maps").read_text())))
    files = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in loaded]
    return f"{nvrtc.getVersion()} {files} {Path(__file__).read_text()}"


def meets(path: Path, build: tuple[int, str]) -> bool:
    """Whether a file is for a GPU in a precision: one that is for a single architecture is in bf16."""
    return not device.architecture_of(path) or build == (int(device.architecture_of(path).rstrip("a")), "bf16")


ALL = [(path, build) for path in KERNELS for build in (*BUILDS, *FURTHER) if meets(path, build)]
ORDINARY = [(path, build) for path, build in ALL if build in BUILDS or (path.stem, build) == PRODUCTS_IN_TF32]

each_file_and_build = pytest.mark.parametrize("path, capability, precision", [
    pytest.param(path, *build, marks=[pytest.mark.long] * ((path, build) not in ORDINARY), id=f"{path.stem} {build}")
    for path, build in ALL
])  # fmt: skip


def compiled(path: Path, capability: int, precision: str, cache: pytest.Cache) -> dict[str, list]:
    """What `compile_kernels` says of a file. It is kept for the next run, as the CPU device keeps its libraries, and
    holds for the same text, options and compiler: most changes change no kernel."""
    # The second option is CuPy's own addition: NVRTC 13.0 and earlier refuse a kernel's lambdas without it.
    options = (*NVRTC_OPTIONS, "--device-as-default-execution-space")
    options += (f"--gpu-architecture=sm_{device.architecture_of(path) or capability}",)
    options += DEFINES[floatX_of(precision)]
    source = device.cuda_source(path)
    key = hashlib.sha256(repr((compiler(), options, source)).encode()).hexdigest()
    name = f"nvrtc/{path.parent.name}_{path.stem}_{capability}_{precision}"
    known, kernels = cache.get(name, (None, None))
    if known != key:
        kernels = compile_kernels(source, path.name, options)
        cache.set(name, (key, kernels))
    return kernels


@pytest.fixture(scope="module", autouse=True)
def all_compiled(pytestconfig):
    """Compiles on all cores what the tests will ask for: NVRTC lets go of the interpreter's lock."""

    def compile_one(pair: tuple[Path, tuple[int, str]]) -> None:
        path, build = pair
        with contextlib.suppress(pytest.fail.Exception):  # the test compiles it again, and says why it failed
            compiled(path, *build, pytestconfig.cache)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, ORDINARY))


@each_file_and_build
def test_every_kernel_of_a_file_compiles(path, capability, precision, pytestconfig):
    bounds = r"(?:__launch_bounds__\([^)]*\)\s*)?(?:PROGRAMMATIC\s+)?"
    declared = re.findall(rf"__global__\s+void\s+{bounds}(\w+)\s*\(", path.read_text())
    assert sorted(compiled(path, capability, precision, pytestconfig.cache)) == sorted(declared)


@each_file_and_build
def test_kernels_keep_what_they_work_on_in_registers(path, capability, precision, pytestconfig):
    spilling = {
        kernel: f"stack frame {frame}, spill stores {stores}, spill loads {loads} bytes"
        for kernel, (frame, stores, loads, _) in compiled(path, capability, precision, pytestconfig.cache).items()
        if max(frame, stores, loads) > MAY_SPILL.get((kernel, precision), 0)
    }
    assert not spilling


@each_file_and_build
def test_a_kernel_that_starts_early_waits_before_it_touches_what_others_write(
    path, capability, precision, pytestconfig
):
    """Where the GPU has the instruction. It is in no other kernel, whose launch waits."""
    early = {kernel: found for kernel, (*_, found) in compiled(path, capability, precision, pytestconfig.cache).items()}
    waiting = {kernel for kernel, found in early.items() if found is not None}
    assert waiting == (programmatic_kernels(path) if capability >= 90 else set())
    assert not {
        (kernel, access) for kernel in waiting for access in early[kernel]
        if not access.startswith(MAY_READ.get(kernel, "nothing"))
    }


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

"""Compiles a kernel file by NVRTC, as the GPU device does, and keeps what NVRTC reports. This needs no GPU."""

import functools
import hashlib
import os
import re
import time
from collections import defaultdict
from pathlib import Path

import device
from device.bf16 import DEFINES, floatX_of
from device.nvrtc import NVRTC_OPTIONS

import pytest
from cupy.cuda import nvrtc

# What comes from NVRTC's cache, which goes by the PTX, comes without the assembler's report: this is in no other PTX.
NEW = f"\n__device__ int compiled_at_{time.time_ns()};\n"

LETS_OTHERS_START = "griddepcontrol.launch_dependents"


def compile_kernels(source: str, name: str, options: tuple[str, ...]) -> dict[str, list]:
    """Bytes of [stack frame, spill stores, spill loads] per thread and of static shared memory per block, by kernel, as
    the assembler reports them; then what `early_accesses` says."""
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
    shared = r"Used \d+ registers(?:.*, (\d+) bytes smem)?"
    rows = re.findall(rf"Compiling entry function '(\w+)'(?s:.*?){sizes}(?s:.*?){shared}", log)
    return {kernel: [*(int(size or 0) for size in sizes), early_accesses(texts[kernel])] for kernel, *sizes in rows}


def early_accesses(text: str) -> list[str] | None:
    """The accesses to memory before the kernel waits for the previous launch, and LETS_OTHERS_START if that stands
    there, too; and wherever they stand, loads of what is constant while the kernel runs (.nc), because the assembler
    may move these before the wait. An access is the instruction's name and the numbers of the parameters whose arrays
    it may touch: "ld.global.f32 0". None if the kernel does not wait."""
    before, wait, _ = text.partition("griddepcontrol.wait")
    access = r"\b((?:ld|st|atom|red|cp)\.(?!param|shared)[\w.]+)[^;]*?\[(%rd\d+)"
    pointers = pointers_of(text)
    found = re.findall(access, before) + [(name, base) for name, base in re.findall(access, text) if ".nc" in name]
    accesses = {" ".join((name, *map(str, sorted(pointers[base])))) for name, base in found}
    accesses |= {LETS_OTHERS_START} & {*re.findall(LETS_OTHERS_START, before)}
    return sorted(accesses) if wait else None


def pointers_of(text: str) -> dict[str, set[int]]:
    """Which of a kernel's parameters may be part of each 64-bit register of its PTX, an address for example."""
    pointers = defaultdict(set)
    known = -1
    while known != (known := sum(map(len, pointers.values()))):  # a loop hands registers to lines above
        for operation, target, operands in re.findall(r"([a-z][\w.]+)\s+(%rd\d+),([^;]*);", text):
            if operation.startswith("ld.param"):
                pointers[target] |= {int(number) for number in re.findall(r"_param_(\d+)\]", operands)}
            elif not operation.startswith("ld."):
                for source in re.findall(r"%rd\d+", operands):
                    pointers[target] |= pointers[source]
    return pointers


@functools.cache
def compiler() -> str:
    """Which NVRTC compiles, and how this file asks it."""
    nvrtc.getSupportedArchs()  # loads it
    loaded = sorted(set(re.findall(r"/\S*/libnvrtc\.so\S*", Path("/proc/self/maps").read_text())))
    files = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in loaded]
    return f"{nvrtc.getVersion()} {files} {Path(__file__).read_text()}"


def compiled(path: Path, capability: int, precision: str, cache: pytest.Cache) -> dict[str, list]:
    """What `compile_kernels` says of a file. It is kept for the next run, as the CPU device keeps its libraries, and
    holds for the same text, options and compiler: most changes change no kernel."""
    options = (*NVRTC_OPTIONS, *DEFINES[floatX_of(precision)], f"-arch=sm_{device.architecture_of(path) or capability}")
    source = device.cuda_source(path)
    key = hashlib.sha256(repr((compiler(), options, source)).encode()).hexdigest()
    name = f"nvrtc/{path.parent.name}_{path.stem}_{capability}_{precision}"
    known, kernels = cache.get(name, (None, None))
    if known != key:
        kernels = compile_kernels(source, path.name, options)
        cache.set(name, (key, kernels))
    return kernels

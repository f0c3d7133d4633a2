"""NVRTC, called by CuPy's binding but with options of our own: CuPy adds an -arch of its own, and a file that is for a
single architecture needs another one. The code is kept in the folder where CuPy keeps what it compiles."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from device.cache import private_folder, refuse_anothers
from device.errors import UserError
from device.sources import cuda_source

# NVRTC 13.0 and earlier refuse a kernel's lambdas without the last one.
NVRTC_OPTIONS = ("--std=c++17", "-ftz=true", "--device-as-default-execution-space")
HASH_BYTES = 32


def architecture_for(nvrtc: Any, capability: int, name: str) -> int:
    """The compute capability to compile for: that of the GPU of this name, or the next older one of its generation,
    whose code the GPU runs, too. Raises UserError if the compiler knows neither."""
    known = nvrtc.getSupportedArchs()
    if fit := [each for each in known if each // 10 == capability // 10 and each <= capability]:
        return max(fit)
    major, minor = nvrtc.getVersion()
    wheel = "cupy-cuda12x" if capability < min(known) else f"cupy-cuda{major}x"
    raise UserError(
        f"NVRTC {major}.{minor} does not compile for {name}, of compute capability {capability / 10}: "
        f"pip install -U --upgrade-strategy eager '{wheel}[ctk]'"
    )


def compile_file(nvrtc: Any, path: Path, options: tuple[str, ...]) -> bytes:
    """The code of a .cu file, from the cache if it is there. options[-1] is an -arch. For a virtual one, such as
    compute_75, the code is PTX. Raises UserError if it cannot be compiled or kept."""
    source = cuda_source(path)
    key = hashlib.sha256(repr((nvrtc.getVersion(), options, source)).encode()).hexdigest()
    kept = cupys_cache() / f"{path.stem}-{key[:32]}"
    with suppress(OSError):
        content = kept.read_bytes()
        code = content[HASH_BYTES:]
        if content[:HASH_BYTES] == hashlib.sha256(code).digest():
            return code

    program = nvrtc.createProgram(source, path.name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        code = nvrtc.getPTX(program) if "-arch=compute" in options[-1] else nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        major, minor = nvrtc.getVersion()
        raise UserError(
            f"NVRTC {major}.{minor} cannot compile {path}; if you did not change it, reinstall cupy-cuda{major}x[ctk]:",
            nvrtc.getProgramLog(program).strip("\0"),
        ) from None
    finally:
        nvrtc.destroyProgram(program)

    try:
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:  # which this user alone can write
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(file.name, kept)  # another process may do the same now; either file will do
    except OSError as error:
        raise unusable(error) from None
    return code


def cupys_cache() -> Path:
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def unusable(error: OSError) -> UserError:
    return UserError(f"{cupys_cache()}: {error.strerror.lower()}: set CUPY_CACHE_DIR to a folder of your own")


def check_cupys_cache() -> None:
    """Makes the folder in which CuPy keeps compiled kernels, and we ours, this user's alone. Raises UserError if it, or
    a file in it, is somebody else's."""
    folder = cupys_cache()
    try:
        descriptor = private_folder(folder, "CUPY_CACHE_DIR")
        try:
            for name in os.listdir(descriptor):
                with suppress(FileNotFoundError):  # another process of ours compiles, too
                    found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    refuse_anothers(folder / name, found, "CUPY_CACHE_DIR")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unusable(error) from None

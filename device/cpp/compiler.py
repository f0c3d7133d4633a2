"""Builds a .cu file into a shared library with the system's C++ compiler, once for each content.

A library's file ends with its SHA-256, which ELF allows. A file that lacks a part, after a power cut or on a full disk,
would end the process with a bus error when it is loaded. The folder is this user's alone (device/cache.py), and the
file that is loaded is the open one that was checked.
"""

import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from device.cache import own_folder, private_folder, refuse_anothers
from device.cpp.launch import Library, Module, Parameter, load_runtime
from device.errors import UserError
from device.progress import progress

HERE = Path(__file__).parent
BUILDING = ".building-"  # folders in which libraries are built, beside these; each is locked while it is in use

running: set[subprocess.Popen] = set()  # compilers
cancelled = threading.Event()  # set: they are ended

MODES = ("DEBUG", "SANITIZE", "MICROSCOPE")  # LLMC_CPU_DEBUG=1 and so on

# For the microscope GCC calls functions of ours (microscope.h) before each access and in each basic block. Vectors are
# accessed as a whole (-fno-tree-sra), and no access or branch is moved or doubled. Each call returns to a place of its
# own, which tells the line, by DWARF 4. (With DWARF 5 binutils 2.40 confuses the files of a text from a pipe.)
INSTRUMENTED = [
    "-O2", "-g", "-gdwarf-4", "-fsanitize=thread", "-fsanitize-coverage=trace-pc", "-fno-tree-sra",
    "-fno-tree-vectorize", "-fno-optimize-sibling-calls", "-fno-crossjumping", "-fno-tree-tail-merge",
    "-fno-tree-loop-im", "-fno-thread-jumps", "-fno-reorder-blocks",
]  # fmt: skip

# __launch_bounds__(...) may stand before or after `void`, with parentheses inside. We rewrite it as @...@ for KERNEL.
LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\(((?:[^()]|\([^()]*\))*)\)")
KERNEL = re.compile(r'extern\s*"C"\s*__global__\s+(?:@(.*?)@\s*)?void\s+(?:@(.*?)@\s*)?(\w+)\s*\(([^()]*)\)\s*\{', re.S)


def warp_size() -> int:
    """Lanes in a warp, for a kernel file that does not fix them itself: LLMC_CPU_WARP, 1 or 32 (default 1)."""
    value = os.environ.get("LLMC_CPU_WARP") or "1"
    if value not in ("1", "32"):
        raise UserError(f"LLMC_CPU_WARP is {value}; it can be 1 or 32")
    return int(value)


def threads() -> int:
    """Worker threads: LLMC_CPU_THREADS, or one for each core that the process may use."""
    value = os.environ.get("LLMC_CPU_THREADS") or str(len(os.sched_getaffinity(0)))
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"LLMC_CPU_THREADS is {value}; it must be a number, at least 1")
    return int(value)


def compile_source(path: str | Path, *defines: str) -> Module:
    """Compiles a .cu file, or fetches it from the cache, and loads it. defines: -D... for the compiler.

    Raises UserError if there is no compiler, or if the file does not compile (with the compiler's message).
    """
    path = Path(path).resolve()
    source = path.read_text("utf-8")
    fixed = re.search(r"^[ \t]*#[ \t]*define[ \t]+WARP_SIZE[ \t]+32\b", source, re.M)
    warp = 32 if fixed else warp_size()
    with progress.compiling():
        load_runtime(_build_runtime())
        library = _cached(
            path.stem,
            [*_included(path), HERE / "cuda_on_cpu.h", HERE / "runtime.h"],
            [f"-DWARP_SIZE={warp}", *defines],
            lambda command: _with_launch_stubs(path, command),
        )
    return Module(library, path, warp)


def compile_all(paths, *defines: str) -> list[Module]:
    """compile_source for several files, as many at a time as there are cores. Returns the modules in the files'
    order. Ctrl-C, or a file that does not compile, ends the compilers of the others."""
    paths = list(paths)
    progress.expect(len(paths) + 1)
    with progress.compiling():
        _build_runtime()
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            try:
                return list(pool.map(lambda path: compile_source(path, *defines), paths))
            except BaseException:
                cancelled.set()  # first, for those that begin now
                for process in list(running):
                    _end(process)
                raise
    finally:
        cancelled.clear()


def _build_runtime() -> Library:
    # Never sanitised, because it moves stacks about; never with -ffast-math, because its sums have a fixed order.
    files = [HERE / "runtime.cpp", HERE / "runtime.h", *([HERE / "microscope.h"] if "MICROSCOPE" in _modes() else [])]
    return _cached("runtime", files, None, lambda command: f'#include "{HERE / "runtime.cpp"}"\n')


def _included(path: Path) -> list[Path]:
    """The file and all files that it includes with #include "...", for the cache's key."""
    files = [path]
    for file in files:
        for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', file.read_text("utf-8"), re.M):
            found = (file.parent / name).resolve()
            if found.exists() and found not in files:
                files.append(found)
    return files


def _cached(name: str, files: list[Path], defines: list[str] | None, make_text: Callable[[list[str]], str]) -> Library:
    """The shared library built from the C++ text that `make_text` returns for the compiler's command. The text includes
    the files.

    defines: of a kernel file; None for the runtime.
    """
    cxx, version = installed_compiler()
    modes = _modes()
    flags = _flags(defines, modes)
    key = hashlib.sha256(json.dumps([cxx, version, _cpu(), flags]).encode())
    for file in files:
        key.update(b"\0" + file.read_bytes())
        if modes:  # debug information holds the path
            key.update(str(file).encode())
    library = _cache_dir() / f"{name}-{key.hexdigest()[:24]}.so"
    folder_descriptor = None
    try:
        folder_descriptor = private_folder(library.parent, "LLMC_CACHE_DIR")
        _remove_leftovers(library.parent)
        if found := _whole(library, folder_descriptor):
            return found
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=BUILDING) as folder, _locked(folder):
            built, object_file = os.path.join(folder, "built.so"), os.path.join(folder, "built.o")
            command = [*cxx, *flags, f"-I{HERE}", "-x", "c++", "-c", "-", "-o", object_file]
            _run(command, make_text([*cxx, *flags]), files[0], folder)
            # Linked without the flags of the compilation: with -ffast-math GCC adds start-up code that makes the whole
            # process flush denormal numbers to zero.
            link = [flag for flag in flags if flag.startswith("-fsanitize")] if "SANITIZE" in modes else []
            _run([*cxx, "-shared", "-pthread", *link, object_file, "-o", built, "-lm"], "", files[0], folder)
            if not os.path.exists(built):
                raise UserError(f"{' '.join(cxx)} has made no library of {files[0]}: set CXX to a C++ compiler")
            content = Path(built).read_bytes()
            whole = Path(folder) / "whole.so"
            with open(whole, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(content + hashlib.sha256(content).digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(whole, library)  # another process may do the same now; either file will do
        if found := _whole(library, folder_descriptor):
            return found
        raise UserError(f"{library} has changed since it was written: set LLMC_CACHE_DIR to another folder")
    except OSError as error:  # also where there is no room for a folder
        raise UserError(f"{library}: cannot be written ({(error.strerror or str(error)).lower()}): set "
                        "LLMC_CACHE_DIR to a folder that can be written") from None
    finally:
        if folder_descriptor is not None:
            os.close(folder_descriptor)


def _whole(path: Path, folder: int) -> Library | None:
    """The library of this name in an open folder, if it is there as it was built. Raises UserError if it is somebody
    else's."""
    try:
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    library, found = Library(path, descriptor), os.fstat(descriptor)
    try:
        refuse_anothers(path, found, "LLMC_CACHE_DIR")
    except UserError:
        os.close(descriptor)
        raise
    if stat.S_ISREG(found.st_mode):  # from a pipe a read would wait
        with suppress(OSError), open(descriptor, "rb", closefd=False) as file:
            content = file.read()
            if content[-32:] == hashlib.sha256(content[:-32]).digest():
                return library
    os.close(descriptor)
    return None


def _modes() -> list[str]:
    return [mode for mode in MODES if os.environ.get(f"LLMC_CPU_{mode}", "0") not in ("", "0")]


def _flags(defines: list[str] | None, modes: list[str]) -> list[str]:
    common = ["-std=c++17", "-fPIC", "-pthread", "-DLLMC_CPU", *(f"-DLLMC_{mode}" for mode in modes)]
    if defines is None:
        return [*common, "-O2", "-g", "-Wall"]
    # Hidden: several libraries may have functions of the same names.
    common += ["-fvisibility=hidden", "-fno-exceptions"]
    x86 = platform.machine() in ("x86_64", "AMD64")
    if "MICROSCOPE" in modes:
        common += INSTRUMENTED
    elif "SANITIZE" in modes:
        # -g1: the lines that reports name, but no variables. With -g, compiling took a third to two thirds longer.
        common += ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    elif "DEBUG" in modes:
        common += ["-O0", "-g3"]
    else:
        # Infinity and NaN keep their meaning, so a division by infinity must not use an estimated reciprocal.
        common += ["-O3", "-march=native" if x86 else "-mcpu=native", "-ffast-math", "-fno-finite-math-only"]
        common += ["-mrecip=none"] if x86 else []
        # With a GPU's warps, results are rounded as the source says, so kernels that compute the same round alike.
        common += ["-fno-unsafe-math-optimizations", "-ffp-contract=off"] if warp_size() == 32 else []
        if x86 and "clang" in installed_compiler()[1]:
            common.append("-fveclib=libmvec")
        if "clang" not in installed_compiler()[1]:
            # GCC keeps a loop over a thread's CPU_WIDTH numbers as a loop, so that it can vectorise it. And it takes
            # the widest vectors; by default it would take half as wide ones.
            common += ["--param", "max-completely-peel-times=4"]
            common += ["-mprefer-vector-width=512"] if x86 else []
            # By default GCC copies a struct by 16 bytes. A load of a whole vector from the copy then waits until the
            # stores have reached the cache. With this, layernorm takes half as long. GCC 12 was the first to have it.
            major = re.search(r"(\d+)\.\d+\.\d+", installed_compiler()[1])
            common += ["-mmove-max=512", "-mstore-max=512"] if x86 and major and int(major[1]) >= 12 else []
    further = _words("LLMC_CPU_CXXFLAGS", os.environ.get("LLMC_CPU_CXXFLAGS", ""))
    return [*common, "-Wno-unknown-pragmas", *defines, *further]


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Within it a folder is in use."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # where there are no locks, leftovers stay
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@functools.cache
def _remove_leftovers(folder: Path) -> None:
    """Removes the folders of compilations that were killed."""
    for leftover in folder.glob(f"{BUILDING}*"):
        with suppress(OSError):
            if leftover.stat().st_mtime > time.time() - 1:  # it may not be locked yet
                continue
            descriptor = os.open(leftover, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover)
            finally:
                os.close(descriptor)


def _run(command: list[str], text: str, path: Path, folder: str | None = None) -> str:
    """What a compiler prints for this text. Its temporary files go to the folder. If we are interrupted, it ends."""
    environment = os.environ | ({"TMPDIR": folder} if folder else {})
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, env=environment, start_new_session=True) as process:
        running.add(process)
        try:
            if cancelled.is_set():
                _end(process)
            output, error = process.communicate(os.fsencode(text))  # it has names of files
        except BaseException:
            _end(process)
            raise
        finally:
            running.discard(process)
    if process.returncode:
        raise UserError(f"{command[0]} cannot compile {path}:", error.decode("utf-8", "replace").strip())
    return os.fsdecode(output)


def _end(process: subprocess.Popen) -> None:
    """Ends a compiler, with the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def installed_compiler() -> tuple[tuple[str, ...], str]:
    """The compiler's command and what it says about its version. Raises UserError if there is none."""
    return _find_compiler(os.environ.get("CXX", ""))


@functools.cache
def _find_compiler(wish: str) -> tuple[tuple[str, ...], str]:
    """The compiler's command and what it says about its version."""
    for command in [_words("CXX", wish)] if wish.strip() else [["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            try:
                version = os.fsdecode(subprocess.run([*command, "--version"], capture_output=True).stdout)
            except OSError as error:
                raise UserError(f"{command[0]} cannot be run ({error.strerror}): set CXX to a C++ compiler") from None
            return tuple(command), version
    looked_for = f"the compiler that CXX names, {wish}," if wish else "a C++ compiler (g++ or clang++)"
    raise UserError(f"the CPU device needs {looked_for} and finds none: install one, on Debian or Ubuntu with "
                    "`apt-get install g++`")


def _words(name: str, value: str) -> list[str]:
    """The words of an environment variable, as a shell splits them. One that is a program's path may have spaces."""
    try:
        return [value] if shutil.which(value) else shlex.split(value)
    except ValueError as error:
        raise UserError(f"{name} cannot be split into words ({str(error).lower()}): {value}") from None


@functools.cache
def _cpu() -> str:
    """What -march=native depends on."""
    first = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0]
    return "\n".join(re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*", first, re.M))


def _cache_dir() -> Path:
    """The folder of the compiled libraries: LLMC_CACHE_DIR, or one among the user's caches."""
    wish = os.environ.get("LLMC_CACHE_DIR")
    try:
        return Path(wish) if wish else Path(os.environ.get("XDG_CACHE_HOME") or own_folder()) / "llm.cupy"
    except RuntimeError:
        raise UserError("there is no home directory: set LLMC_CACHE_DIR to a folder that can be written") from None


def _with_launch_stubs(path: Path, command: list[str]) -> str:
    """C++ that includes the .cu file, and has for each of its kernels the loop over a block's threads.

    We find the kernels in the preprocessed text, so that a macro may write one. The preprocessor does not see
    cuda_on_cpu.h, so `__global__` and `__launch_bounds__` are still in this text.
    """
    text = _run([*command, "-x", "c++", "-E", "-P", str(path)], "", path)
    text = LAUNCH_BOUNDS.sub(r"@\1@", text)
    stubs, manifest = [], {}
    for bounds_before, bounds_after, name, declared in KERNEL.findall(text):
        declarations = [] if declared.strip() in ("", "void") else declared.split(",")
        parameters = [Parameter.parse(declaration, name, path) for declaration in declarations]
        manifest[name] = [[p.name, p.type] for p in parameters]
        max_threads = (bounds_before or bounds_after or "0").split(",")[0]
        stubs.append(f"""
struct {name}_args {{ {" ".join(p.declaration + ";" for p in parameters)} }};
LLMC_FLATTEN static void {name}_threads(const void* packed, const llmc::Builtins& builtins, llmc::Index from) {{
    const {name}_args args = *(const {name}_args*)packed;
    (void)args;
    LLMC_FOR_EACH_THREAD(builtins, from, {name}({", ".join("args." + p.name for p in parameters)}))
}}
extern "C" __attribute__((visibility("default"))) const llmc::Kernel llmc_kernel_{name} =
    {{"{name}", {name}_threads, WARP_SIZE, {max_threads}}};""")
    if not manifest:
        raise UserError(f'{path}: no kernel declared as extern "C" __global__ void name(...)')
    return f"""#include "cuda_on_cpu.h"
#include "{path}"
static_assert(WARP_SIZE == llmc::built_warp_size, "a kernel file fixes its warp size by a line `#define WARP_SIZE 32`");
{"".join(stubs)}
extern "C" __attribute__((visibility("default"))) const char llmc_manifest[] = R"({json.dumps(manifest)})";
"""

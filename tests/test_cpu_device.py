"""The CPU device runs CUDA's execution model: grids, blocks, warps, barriers, shuffles, atomics."""

import errno
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import device
from conftest import refusal
from device import cpp
from device.cpp import compiler, launch
from device.progress import Progress

import numpy as np
import pytest

CU = Path(__file__).parent / "cu"
ROOT = Path(__file__).parent.parent
SANITIZED = os.environ.get("LLMC_CPU_SANITIZE", "0") not in ("", "0")


@pytest.fixture(params=["forward", "shuffled"])
def order(request, monkeypatch):
    monkeypatch.setenv("LLMC_CPU_ORDER", request.param)
    return request.param


def kernel(file, name):
    return cpp.compile_source(CU / file).kernel(name)


def poisoned(*shape, dtype=np.float32):
    return np.full(shape, np.nan if dtype == np.float32 else -777, dtype)


def random(*shape):
    return np.random.default_rng(20240326).standard_normal(shape, np.float32)


# Execution


@pytest.mark.parametrize("grid, block", [((3, 2, 2), (4, 3, 2)), ((5,), (64,)), (7, 1), ((1, 6), (2, 31))])
def test_every_thread_of_every_block_runs_once_with_its_own_index(grid, block, order):
    g, b = ((*np.atleast_1d(dims), 1, 1)[:3] for dims in (grid, block))
    out = poisoned(np.prod(g), *b[::-1], 4, dtype=np.int32)
    kernel("warps.cu", "index_kernel")(grid, block, (out, None, 3 << 40, 2 << 40, 1 << 31, np.float64(5)))
    assert out[0, 0, 0, 0, 3] == 3 + 2 + 1 + 5 + 1  # every kind of argument arrived
    out[0, 0, 0, 0, 3] = 0
    z, y, x = np.indices(b[::-1])
    assert (out[..., 0] == x).all() and (out[..., 1] == y).all() and (out[..., 2] == z).all()
    assert (out[..., 3] == np.arange(np.prod(g)).reshape(-1, 1, 1, 1)).all()


@pytest.mark.parametrize("block", [32, 40, 96, (8, 4, 2)])
@pytest.mark.parametrize("argument, width", [(1, 32), (5, 32), (3, 8), (17, 32), (2, 4), (9, 16)])
def test_shuffles_move_what_cuda_says(block, argument, width, order):
    """From a lane that is beyond the block comes NaN. A sum by shuffles adds in the order of a butterfly."""
    n = int(np.prod(block))
    x, out = random(n), poisoned(4, n)
    kernel("warps.cu", "exchange_kernel")(1, block, (out, x, argument, width))
    lane = np.arange(n) % 32
    warp_start = np.arange(n) - lane
    segment = lane // width * width
    down = np.where(lane - segment + argument >= width, lane, lane + argument)
    xor = np.where((lane ^ argument) // width * width <= segment, lane ^ argument, lane)
    warps = np.pad(x, (0, -n % 32), constant_values=np.nan)
    for row, source in enumerate([segment + argument % width, xor, down]):
        np.testing.assert_array_equal(out[row], warps[warp_start + source])
    butterfly = warps.reshape(-1, 32)
    for distance in (16, 8, 4, 2, 1):
        butterfly = butterfly + butterfly[:, np.arange(32) ^ distance]
    np.testing.assert_array_equal(out[3], butterfly.reshape(-1)[:n])


def test_votes(order):
    x = np.random.default_rng(1).integers(-2, 3, 96, dtype=np.int32)
    x[32:64], x[64:] = 1, -1
    out = poisoned(96, dtype=np.int32)
    kernel("warps.cu", "vote_kernel")(1, 96, (out, x))
    assert (out == (x > 0).reshape(3, 32).any(1).repeat(32)).all()


@pytest.mark.parametrize("n", [1, 33, 96])
def test_a_block_counts_the_threads_that_say_yes(order, n):
    x = np.random.default_rng(n).integers(-2, 3, n, dtype=np.int32)
    out = poisoned(n, 2, dtype=np.int32)
    kernel("warps.cu", "count_kernel")(2, n, (out, x))
    assert (out == [(x > 0).sum(), (x < 0).sum()]).all()


def test_threads_that_have_returned_are_not_waited_for(order):
    out = poisoned(100, 2, dtype=np.int32)
    kernel("warps.cu", "early_return_kernel")(3, 100, (out,))
    t = np.arange(100)
    assert (out[:, 0] == np.where(t % 3 == 1, -777, t)).all()
    assert (out[:, 1] == np.where((t % 3 == 1) | (t < 40), -777, t)).all()


@pytest.mark.parametrize("n", [1, 33, 20000])
def test_dynamic_shared_memory_is_aligned_and_the_blocks_own(n, order):
    x, out = random(5, n), poisoned(5, n)
    kernel("warps.cu", "dynamic_shared_kernel")(5, 64, (out, x, n), shared_mem=4 * n)
    assert (out == x[:, ::-1]).all()


def test_atomics_lose_nothing_between_os_threads(order):
    n = 500 * 128
    total, count = np.zeros(1, np.float32), np.zeros(1, np.uint32)
    kernel("warps.cu", "atomics_kernel")(500, 128, (total, count))
    assert total[0] == n and count[0] == n  # n < 2**24: exact in float32


def test_intrinsics(order):
    x = np.abs(random(40)) + 0.1
    out = poisoned(5, 40)
    kernel("warps.cu", "intrinsics_kernel")(1, 40, (out, x))
    v = x.astype(np.float64)
    largest, smallest = np.maximum(1, np.trunc(v)), np.minimum(2.5, v)
    expected = [v**-0.5, np.exp(v) + v / 3, 1 - v, v + 3, largest + smallest]
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)  # a few ulp


def run_python(program: str, **env: str) -> subprocess.CompletedProcess:
    """Runs it in a process of its own, with what these programs import."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    program = "import os\nimport numpy as np\nfrom device import cpp\n" + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=120)


COPY = f"""
launch = cpp.compile_source({str(CU / "basics.cu")!r}).kernel("copy_kernel")
def copies():
    x, out = np.ones(1 << 20, np.float32), np.zeros(1 << 20, np.float32)
    launch(1 << 12, 256, (out, x, x.size))
    return bool((out == 1).all())
"""


@pytest.mark.skipif(SANITIZED, reason="runs one worker in any case")
def test_packed_arguments_are_as_long_as_the_structure_that_a_kernel_copies():
    """C pads a structure with a pointer at its end, too."""
    given = []
    runtime = SimpleNamespace(llmc_launch=lambda address, packed: given.append(packed))
    kernel = launch.Kernel("kernel", [launch.Parameter("x", "float*"), launch.Parameter("n", "int")], 0, runtime)
    kernel(1, 1, (np.zeros(1, np.float32), 7))
    assert len(given[0]) == 4 * 6 + 8 + 8 + 4 + 4


def test_there_are_as_many_workers_as_cores_that_the_process_may_use():
    done = run_python(f"""{COPY}
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
before = len(os.listdir("/proc/self/task"))
assert copies() and len(os.listdir("/proc/self/task")) == before and cpp.threads() == 1
""", LLMC_CPU_THREADS="")  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_forked_child_can_launch():
    done = run_python(f"""{COPY}
assert copies()
child = os.fork()
if child == 0:
    os._exit(0 if copies() else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""", LLMC_CPU_THREADS="2")  # fmt: skip
    assert done.returncode == 0, done.stderr


# Faults of kernels


@pytest.mark.skipif(SANITIZED, reason="shared memory is not refilled there")
def test_a_missing_barrier_shows_in_another_order_of_threads(monkeypatch):
    x = random(64)
    # Twice forward: after that shared memory holds the right values already, which must not help the other order.
    for order in ("forward", "forward", "shuffled"):
        monkeypatch.setenv("LLMC_CPU_ORDER", order)
        without, whole = poisoned(64), poisoned(64)
        kernel("failures.cu", "missing_barrier_kernel")(2, 64, (without, x))
        kernel("failures.cu", "with_barrier_kernel")(2, 64, (whole, x))
        assert np.array_equal(whole, x[::-1])
    assert not np.array_equal(without, x[::-1])


@pytest.mark.parametrize("name, ones", [("waits_kernel", 1.0), ("writes_too_early_kernel", 2.0)])
def test_the_tma_reads_what_it_stores_as_late_as_it_may(name, ones, order):
    device.use("cpu")
    arrays = [np.zeros((16, 64), device.BF16) for _ in range(2)]
    maps = [device.tensor_map(array, (1, 16, 64), (1, 16, 64)) for array in arrays]
    kernel("tma_stores.cu", name)(1, 32, maps, 2 * 16 * 64)
    assert [np.unique(device.to_floats(array)).tolist() for array in arrays] == [[ones], [2.0]]


@pytest.mark.parametrize("name, grid, block, args, message", [
    ("assert_kernel", 4, 256, (np.where(np.arange(1000) == 777, -1, 0).astype(np.int32), 1000), "assert_kernel, block "
     "(3, 0, 0), thread (9, 0, 0): assertion `x[i] >= 0` failed at failures.cu:5"),
    ("barrier_in_a_branch_kernel", 1, 40, (), "deadlock: 1 thread waits at __shfl_xor_sync (failures.cu:10, first "
     "thread (3, 0, 0)), 39 threads wait at __syncthreads (failures.cu:12, first thread (0, 0, 0))"),
    ("mbarrier_kernel", 1, 40, (1,), "deadlock: 39 threads wait at mbarrier_wait (failures.cu:"),
    ("different_meetings_kernel", 1, 32, (poisoned(32),), "lanes of a warp meet at"),
])  # fmt: skip
def test_a_fault_names_kernel_block_threads_and_line(name, grid, block, args, message, monkeypatch, order):
    monkeypatch.setenv("LLMC_CPU_WARP", "32")
    with pytest.raises(cpp.KernelError, match=re.escape(message)):
        kernel("failures.cu", name)(grid, block, args)
    kernel("failures.cu", "mbarrier_kernel")(4, 40, (2,))  # and the device still works


@pytest.mark.skipif(SANITIZED, reason="the sanitizer ends the process")
@pytest.mark.parametrize("name, args, message", [
    ("wild_pointer_kernel", "(np.zeros(4, np.float32), 1 << 44)", "invalid memory access"),
    pytest.param("division_kernel", "(x, 0)", "integer division by zero", marks=pytest.mark.skipif(
        compiler.platform.machine() == "aarch64", reason="there the quotient is 0, and no signal comes")),
    ("recursion_kernel", "(x, 100000)", "invalid memory access"),
])
def test_a_crash_in_a_kernel_is_an_exception(name, args, message):
    done = run_python(f"""
module = cpp.compile_source({str(CU / "failures.cu")!r})
x = np.zeros(64, np.int32)
try:
    module.kernel({name!r})(3, 32, {args})
except cpp.KernelError as error:
    print(error)
module.kernel("recursion_kernel")(3, 32, (x, 3))
print("still alive")
""")
    assert f"{name}, block (" in done.stdout and message in done.stdout and "still alive" in done.stdout, done


# Launches


@pytest.mark.parametrize("name, args, message", [
    ("copy", (), r"copy_kernel takes 3 arguments \(out, x, N\), not 0"),
    ("copy", (poisoned(4), np.zeros(4), 4), r"copy_kernel: x \(const float\*\) takes an array of float32"),
    ("copy", (poisoned(8)[::2], poisoned(4), 4), r"out \(float\*\) takes a contiguous array"),
    ("copy", (np.broadcast_to(np.float32(0), 1), poisoned(1), 1), r"out \(float\*\) is written to"),
    ("copy", (poisoned(4), poisoned(4), 4.0), r"N \(int\) takes an int, not float"),
    ("copy", (poisoned(4), poisoned(4), 1 << 31), "copy_kernel cannot take .*'N': 2147483648}: "),
    *(("fill", (poisoned(4), wrong), r"fill_kernel: value \(float\) takes numpy.float32")
      for wrong in (1.5, 1, np.float64(1.5))),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(name, args, message):
    with pytest.raises(TypeError, match=message):
        kernel("basics.cu", f"{name}_kernel")(1, 32, args)


@pytest.mark.parametrize("grid, block, shared, message", [
    (0, 1, 0, "no such grid"), ((1, 1 << 16), 1, 0, "no such grid"), (1, 0, 0, "no such block"),
    (1, 1025, 0, "no such block"), (1, (1, 1, 65), 0, "no such block"), (1, 1, 1 << 20, "shared memory"),
    (1, 65, 0, "more threads than the kernel's __launch_bounds__, 64"),
])  # fmt: skip
def test_launches_that_a_gpu_refuses_are_refused(grid, block, shared, message):
    with pytest.raises(cpp.KernelError, match=message):
        kernel("basics.cu", "bounded_kernel" if block == 65 else "nothing_kernel")(grid, block, (), shared_mem=shared)


# Compilation


@pytest.mark.parametrize("warp", [1, 32])
def test_a_launcher_asks_the_file_that_it_launches_for_its_warp_size_and_blocks(warp, monkeypatch):
    """A file that fixes WARP_SIZE at 32 gets whole warps, also where other files are built with warps of one lane."""
    monkeypatch.setenv("LLMC_CPU_WARP", str(warp))
    device.use("cpu")
    free, fixed = device.Source(CU / "basics.cu"), device.Source(CU / "warps.cu")
    assert (free.warp_size, free.block(256)) == ((1, 1) if warp == 1 else (32, 256))
    assert (fixed.warp_size, fixed.block(256)) == (32, 256)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A new folder for libraries. It has the runtime already, which takes seconds to build."""
    folder, runtime = tmp_path / "cache", compiler._build_runtime()
    folder.mkdir()
    shutil.copy(runtime.path, folder)
    monkeypatch.setenv("LLMC_CACHE_DIR", str(folder))
    monkeypatch.setattr(compiler, "_build_runtime", lambda: runtime)  # for this process, whose runtime is loaded
    return folder


@pytest.fixture
def two(tmp_path) -> Path:
    """A file with a kernel that stores 2."""
    path = tmp_path / "two.cu"
    path.write_text('extern "C" __global__ void two_kernel(float* out) { out[0] = 2; }\n')
    return path


def test_libraries_are_cached_by_content_by_what_is_included_and_by_the_arguments_in_cxx(tmp_path, cache, monkeypatch):
    command, _ = compiler.installed_compiler()
    (tmp_path / "value.cuh").write_text("#define VALUE 1.0f\n")
    source = '#include "value.cuh"\nextern "C" __global__ void value_kernel(float* out) { out[0] = VALUE + MORE; }\n'
    (tmp_path / "value.cu").write_text(source)

    def value(more: int):
        monkeypatch.setenv("CXX", shlex.join([*command, f"-DMORE={more}"]))
        out = poisoned(1)
        cpp.compile_source(tmp_path / "value.cu").kernel("value_kernel")(1, 1, (out,))
        return out[0], len(list(cache.glob("value-*.so")))

    assert value(0) == value(0) == (1.0, 1)
    (tmp_path / "value.cuh").write_text("#define VALUE 2.0f\n")
    assert value(0) == (2.0, 2) and value(3) == (5.0, 3)
    assert not list(cache.glob(".building*"))


def test_a_damaged_library_in_the_cache_is_built_anew(cache, two):
    def damage(name: str, share: float, zeros: bool = False) -> None:
        """Keeps a share of the library's bytes, and its length if there are zeros behind them."""
        (library,) = cache.glob(f"{name}-*.so")
        content = library.read_bytes()
        kept = content[: int(share * len(content))]
        library.write_bytes(kept.ljust(len(content), b"\0") if zeros else kept)
        assert not is_whole(library)

    def use() -> None:
        """In a process of its own, which a damaged library would kill."""
        done = run_python(f"""
            out = np.zeros(1, np.float32)
            cpp.compile_source({str(two)!r}).kernel("two_kernel")(1, 1, (out,))
            print(out[0])
        """)
        assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")
        assert len(list(cache.iterdir())) == 2 and all(map(is_whole, cache.iterdir()))

    use()
    damage("two", 0)
    use()
    damage("two", 0.5, zeros=True)
    damage("runtime", 0.5)
    use()


def is_whole(library: Path) -> bool:
    found = compiler._whole(library, os.open(library.parent, os.O_RDONLY))
    return found is not None and found.path == library


@pytest.mark.parametrize("what", ["loose folder", "loose file", "another's folder", "another's file", "link"])
def test_only_our_own_kernels_run(tmp_path, cache, two, monkeypatch, what):
    """os.geteuid stands in for the other user, whom a test cannot be."""
    file, us, fstat = cpp.compile_source(two).library_path, os.geteuid(), os.fstat
    cache.chmod(0o777)
    if what == "loose file":
        file.chmod(0o666)
    elif what == "link":  # it is built anew, and the target stays
        file.rename(tmp_path / "target")
        file.symlink_to(tmp_path / "target")
    elif what != "loose folder":
        monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    if what == "another's file":  # in a folder of ours

        def theirs(descriptor: int) -> os.stat_result:
            found = fstat(descriptor)
            return os.stat_result((*found[:4], us + stat.S_ISDIR(found.st_mode), *found[5:]))

        monkeypatch.setattr(os, "fstat", theirs)
    if what in ("loose folder", "link"):
        assert cpp.compile_source(two).library_path == file and not file.is_symlink()
    else:
        said = refusal(cpp.compile_source, two)
        refused = cache if what == "another's folder" else file
        assert said.startswith(f"{refused} belongs to another user, ") and "LLMC_CACHE_DIR" in said
    assert stat.S_IMODE(os.stat(cache).st_mode) == (0o777 if what == "another's folder" else 0o700)


def test_what_is_loaded_is_what_was_checked(cache, two):
    shutil.copy(cpp.compile_source(two).library_path, cache / "checked.so")  # which is not loaded yet
    library = compiler._whole(cache / "checked.so", os.open(cache, os.O_RDONLY))
    library.path.unlink()
    library.path.write_bytes(b"another's")
    assert launch.Module(library, two, 1).kernels == ["two_kernel"]


def test_users_who_share_a_home_have_a_folder_each(tmp_path, monkeypatch):
    for name in "LLMC_CACHE_DIR", "XDG_CACHE_HOME":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler._cache_dir() == tmp_path / ".cache" / "llm.cupy"
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert compiler._cache_dir() == tmp_path / ".cache-4321" / "llm.cupy"


@pytest.mark.parametrize("environment, says", [
    ({"CXX": "true"}, r"true has made no library of .*: set CXX to a C\+\+ compiler"),
    ({"CXX": 'g++ "'}, r'CXX cannot be split into words \(no closing quotation\): g\+\+ "'),
    ({"CXX": "{folder}/no compiler"}, r"no compiler cannot be run \(Exec format error\): set CXX to a C\+\+ compiler"),
    ({"CXX": "", "PATH": "{folder}"}, r"a C\+\+ compiler .*apt-get install g\+\+"),
    ({"LLMC_CACHE_DIR": "/proc/none"}, r"/proc/none/.* cannot be written \(no such file or directory\): set LLMC"),
    ({"LLMC_CACHE_DIR": "{folder}/full"}, r"cannot be written \(no space left on device\): set LLMC_CACHE_DIR"),
])  # fmt: skip
def test_one_line_says_why_a_compiler_or_its_cache_is_of_no_use(tmp_path, monkeypatch, environment, says):
    """`true` makes nothing, and the disk may have no inode left."""
    (tmp_path / "no compiler").write_bytes(b"\x7fELF")
    (tmp_path / "no compiler").chmod(0o755)
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(folder=tmp_path))

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    if "full" in str(environment):
        monkeypatch.setattr(compiler.tempfile, "TemporaryDirectory", full)
    compiler._find_compiler.cache_clear()
    assert re.search(says, refusal(cpp.compile_source, CU / "basics.cu"))


def test_a_library_that_cannot_be_loaded_is_refused_in_a_line(two):
    said = refusal(launch._load, launch.Library(two, os.open(two, os.O_RDONLY)))
    assert re.fullmatch(
        rf"{two} cannot be loaded \(.*\): set CXX to a C\+\+ compiler .*, or LLMC_CACHE_DIR to .*", said
    )


def test_a_compiler_below_a_path_with_a_space_is_found(tmp_path, monkeypatch):
    (tmp_path / "my g++").symlink_to(shutil.which(compiler.installed_compiler()[0][0]))
    monkeypatch.setenv("CXX", str(tmp_path / "my g++"))
    assert compiler.installed_compiler()[0] == (str(tmp_path / "my g++"),)


def test_a_compilation_that_takes_long_says_so_on_stderr(cache, two):
    done = run_python(f"""
        from device.progress import progress
        progress.next = 0.01
        cpp.compile_all([{str(two)!r}])
        print("done")
    """, LLMC_QUIET="")  # fmt: skip
    assert done.stdout == "done\n"
    assert re.fullmatch(r"compiling kernels: [01] of 2 files are ready after 0 s\n", done.stderr), done.stderr


def test_progress_counts_the_time_of_many_short_compilations_together(capsys, monkeypatch):
    monkeypatch.setattr("device.progress.INTERVAL", 0.1)
    monkeypatch.delenv("LLMC_QUIET")
    one, begun = Progress(), time.monotonic()
    one.next = 0.1
    for _ in range(10):
        with one.compiling():
            time.sleep(0.03)
    said, seconds = capsys.readouterr(), time.monotonic() - begun
    assert said.out == "" and 2 <= said.err.count("compiling kernels: ") <= 10 * seconds and " of " not in said.err


def test_processes_that_compile_the_same_file_at_once_do_not_disturb_each_other(cache, two):
    program = f"""
        out = np.zeros(1, np.float32)
        cpp.compile_all([{str(two)!r}, {str(CU / "bf16.cu")!r}])[0].kernel("two_kernel")(1, 1, (out,))
        print(out[0])
    """
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(run_python, [program] * 2))
    assert [each.stdout for each in done] == ["2.0\n"] * 2


def test_loading_a_kernel_leaves_denormal_numbers_alone(cache, two):
    cpp.compile_source(two)
    assert np.float32(1e-40) * np.float32(0.5) > 0


def test_loops_over_threads_are_vectorised():
    """Or the device would be an order of magnitude slower."""
    if "clang" in compiler.installed_compiler()[1] or compiler.platform.machine() != "x86_64":
        pytest.skip("looks for a function of GCC's on x86-64")
    library = cpp.compile_source(CU / "basics.cu").library_path.read_bytes()
    assert re.search(rb"_ZGV\w+_tanhf", library)  # libmvec's vector tanh


def run_sanitized(launches: str) -> subprocess.CompletedProcess:
    """launches: Python that launches kernels of `module`, failures.cu."""
    command, version = compiler.installed_compiler()
    asked = [[*command, f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
    libraries = [subprocess.run(one, capture_output=True, text=True).stdout.strip() for one in asked]
    if "clang" in version or not all(map(os.path.isabs, libraries)):
        pytest.skip("preloads GCC's sanitizer libraries")
    program = f"""
x = np.zeros(100, np.float32)
module = cpp.compile_source({str(CU / "failures.cu")!r})
{launches}
print("unharmed")
"""
    environment = {"LLMC_CPU_SANITIZE": "1", "LD_PRELOAD": ":".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    return run_python(program, **environment)


@pytest.mark.parametrize("name, too_many, line", [("off_by_one_kernel", 100, 42), ("shared_off_by_one_kernel", 64, 48)])
def test_the_sanitizer_finds_an_overflow_and_its_line(name, too_many, line):
    done = run_sanitized(f"module.kernel({name!r})(1, 128, (x, {too_many}))")
    assert any(tool in done.stderr for tool in ("AddressSanitizer", "runtime error")), done  # the latter is UBSan's
    assert f"failures.cu:{line}" in done.stderr and "unharmed" not in done.stdout, done


def test_the_sanitizer_finds_nothing_in_whole_kernels_and_forgets_arrays_of_threads_that_did_not_return():
    """Later threads get their stacks."""
    done = run_sanitized("""
module.kernel("off_by_one_kernel")(1, 128, (x, 99))
module.kernel("shared_off_by_one_kernel")(1, 128, (x, 63))
try:
    module.kernel("arrays_on_stacks_kernel")(1, 40, (x, 3))
except cpp.KernelError as error:
    print(error)
module.kernel("large_array_kernel")(2, 40, (x, 500))
""")
    assert "deadlock: 39 threads wait" in done.stdout and "unharmed" in done.stdout, done

"""Every rung of doc/ladder is right at odd sizes, races nowhere and compiles for a GPU; pages show what was kept."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import device
from conftest import DEVICES, switch_device
from dev.microscope.report import race_lines
from dev.microscope.watch import use_microscope
from device import cpp
from device.bf16 import DEFINES
from device.cpu import CpuDevice
from device.errors import UserError
from doc import ladder
from doc.rungs import TOPICS, Rung
from oracle import assert_close, guarded

import numpy as np
import pytest
from lazy import LazyDevice

ROOT = Path(__file__).parent.parent
each_topic = pytest.mark.parametrize("name", TOPICS)
needs_gpu = pytest.mark.skipif("cuda" not in DEVICES, reason="no GPU here")


def compare(name: str, rung: Rung, sizes: dict[str, int], do: Callable[[Callable[[], None]], object]) -> None:
    """Compares a rung with NumPy, on arrays between guard zones; do(launch) launches it."""
    topic = TOPICS[name]
    with ladder.precision_of(name), guarded(device) as memory:

        def place(how: str, values: np.ndarray):
            given = values.shape if how in ("write", "scratch") else ladder.as_floats(values)
            return getattr(memory, how)(given, values.dtype)

        arrays = ladder.place_arrays(topic, sizes, place)
        do(lambda: rung.launch(ladder.kernels_of(name), arrays))
    for key, want in ladder.references(topic, sizes).items():
        tolerance = ladder.tolerance(topic, rung, key)
        assert_close(f"{name} {rung.kernel} {key}", getattr(arrays, key), want, tolerance)


@needs_gpu
@each_topic
def test_every_rung_gives_what_numpy_gives_and_writes_nothing_else(name, monkeypatch):
    switch_device("cuda", monkeypatch)
    for rung in (rung for rung in TOPICS[name].rungs if not ladder.lacks(name, rung)):
        for sizes in ladder.sizes_for(TOPICS[name], rung):
            compare(name, rung, sizes, lambda launch: launch())


@needs_gpu
@each_topic
def test_every_rung_without_atomics_gives_the_same_bits_again(name, monkeypatch):
    switch_device("cuda", monkeypatch)
    with ladder.precision_of(name):
        ordered = [rung for rung in TOPICS[name].rungs if rung.ordered and not ladder.lacks(name, rung)]
        assert [rung.kernel for rung in ordered if ladder.repeats_that_differ(name, rung)] == []


@needs_gpu
@each_topic
def test_rungs_agree_at_the_sizes_that_are_timed(name, monkeypatch):
    switch_device("cuda", monkeypatch)
    topic, production = TOPICS[name], {}
    outputs = ladder.shapes_of(f"{topic.sets} {topic.adds}", SimpleNamespace(**topic.bench))
    for rung in reversed([rung for rung in topic.rungs if not ladder.lacks(name, rung)]):  # from the one that trains
        arrays = ladder.place_arrays(topic, topic.bench, ladder.on_device)
        with ladder.precision_of(name):
            rung.launch(ladder.kernels_of(name), arrays)
        made = {key: ladder.as_floats(getattr(arrays, key)) for key in outputs}
        production = production or made
        for key, want in production.items():
            error = float(((made[key] - want) ** 2).sum() ** 0.5 / (want**2).sum() ** 0.5)
            # fp32's errors grow with the root of a sum's length, thousands here; those of TF32 and bf16 may be in both.
            of_products = 2 * (ladder.BF16 if key in topic.bf16 else ladder.TF32)
            assert error < (of_products if topic.flops else 10 * ladder.FP32), f"{rung.kernel} {key}: {error}"


@pytest.mark.parametrize("these", ["short", pytest.param("all", marks=pytest.mark.long)])
def test_every_rung_gives_on_the_cpu_what_numpy_gives_and_races_nowhere(these, pytestconfig):
    """In a process of its own: the microscope's runtime is another one than the tests'."""
    folder = pytestconfig.cache.mkdir("rungs_without_barriers")  # stays, as do the libraries for its files
    code = "import sys; sys.path[:0] = '.', 'tests'; import test_ladder; test_ladder.watch_all(*sys.argv[1:])"
    command = [sys.executable, "-c", code, folder, these]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def watch_all(folder: str, these: str) -> None:
    """All rungs that stand in the topics' files. Unless these are "all", only the last one of Hopper's products: it has
    the ideas of the others. And two rungs without one of their barriers, in this folder: they race."""
    use_microscope()
    for floatX, defines in DEFINES.items():
        names = [name for name, topic in TOPICS.items() if bool(topic.bf16) == (floatX == device.BF16)]
        cpp.compile_all([ladder.LADDER / f"{name}.cu" for name in names], *defines)
    rungs = {(name, rung.kernel): rung for name in TOPICS for rung in TOPICS[name].rungs if rung.in_file}
    for (name, kernel), rung in rungs.items():
        if these == "all" or name != "matmul_hopper" or kernel == "pingpong_kernel":
            for sizes in ladder.sizes_for(TOPICS[name], rung)[:-1]:
                seen = []
                compare(name, rung, sizes, lambda launch: seen.extend(ladder.watch(name, launch)))  # noqa: B023
                assert seen and [line for one in seen for line in race_lines(one)] == [], (name, kernel)

    # What the pages say: one float of each sector of 8; a column of a tile in one bank of 32, or in all of them.
    assert ladder.counts("copy", rungs["copy", "run_a_thread_kernel"]) == {"sectors": 8}
    assert ladder.counts("transpose", rungs["transpose", "tile_kernel"])["worst"] == 32
    assert ladder.counts("transpose", rungs["transpose", "padded_tile_kernel"])["worst"] == 1
    # And ldmatrix: the eight rows of a matrix in the same banks, and swizzled.
    with ladder.precision_of(name := "flash_attention_bf16"):
        for kernel, mean in ("ldmatrix_kernel", 6.6), ("swizzled_kernel", 1):
            assert round(ladder.counts(name, rungs[name, kernel])["mean"], 2) == mean

    original, ladder.LADDER = ladder.LADDER, Path(folder) / "doc" / "ladder"
    shutil.copytree(original, ladder.LADDER, dirs_exist_ok=True)
    shutil.copytree(ROOT / "kernels", Path(folder) / "kernels", dirs_exist_ok=True)
    for name, kernel, which in ("transpose", "tile_kernel", 0), ("layernorm_forward", "block_a_row_kernel", 2):
        parts = (original / f"{name}.cu").read_text().split("__syncthreads();")
        parts[which : which + 2] = [";".join(parts[which : which + 2])]
        (ladder.LADDER / f"{name}.cu").write_text("__syncthreads();".join(parts))
        watched = ladder.watch_rung(name, rungs[name, kernel], TOPICS[name].fours)
        assert [line for one in watched for line in race_lines(one)], (name, kernel)


@pytest.mark.long
def test_every_rung_compiles_for_a_gpu_and_spills_next_to_nothing(pytestconfig):
    pytest.importorskip("cupy.cuda", reason="CuPy, which binds NVRTC, is not installed")
    from support.nvrtc import compiled

    builds = [(ladder.LADDER / f"{name}.cu", "bf16" if topic.bf16 else "fp32") for name, topic in TOPICS.items()]
    with ThreadPoolExecutor() as pool:  # NVRTC lets go of the interpreter's lock
        reports = list(pool.map(lambda build: compiled(build[0], 90, build[1], pytestconfig.cache), builds))
    for (path, _), kernels in zip(builds, reports, strict=True):
        assert sorted(kernels) == sorted(device.kernel_declarations(path))
        assert all(max(bytes_of_a_thread) <= 16 for *bytes_of_a_thread, _ in kernels.values()), kernels


def test_a_rung_that_launches_kernels_of_other_files_too_is_timed_as_a_replayed_graph(monkeypatch):
    device.current.device = LazyDevice()
    device.use_recording(True)
    topic = TOPICS["gelu_backward"]
    monkeypatch.setattr(topic, "bench", topic.odd)
    monkeypatch.setattr(ladder, "SETS_BYTES", 0)
    assert ladder.seconds("gelu_backward", topic.rungs[0], rounds=1) > 0
    device.use("cpu")


def test_every_kernel_is_a_rung_or_part_of_one_and_every_rung_has_been_timed_and_counted():
    launched, kept = (ROOT / "doc" / "rungs.py").read_text(), ladder.kept_measurement()
    for name, topic in TOPICS.items():
        for kernel in device.kernel_declarations(ladder.LADDER / f"{name}.cu"):
            assert re.search(rf"\b{kernel}\b", launched), f"{name}: {kernel}"
        for measured in kept["times"], kept["counts"]:
            assert list(measured[name]) == [rung.kernel for rung in topic.rungs], name


def test_pages_show_what_was_measured():
    """In a process of its own, where no device is in use: doc/book.py needs none."""
    code = """if True:
        from doc import ladder
        kept, texts = ladder.kept_measurement(), {p.name: p.read_text() for p in ladder.LADDER.parent.glob("*.md")}
        print(*(name for name, text in texts.items() if ladder.with_tables(text, kept) != text))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", ""), "run python doc/ladder.py --write"


class MadeUpGPU(CpuDevice):
    """The CPU under the name and the compute capability of a GPU."""

    kind, has_streams, precision = "cuda", False, "tf32"

    def __init__(self, name: str, compute_capability: int):
        super().__init__()
        self.name, self.compute_capability = name, compute_capability


@pytest.fixture
def climb_on(monkeypatch, tmp_path, capsys):
    """climb_on(gpu, arguments) runs the program on a made-up GPU where all rungs take 100 microseconds, and gives what
    it prints. What is kept stands in tmp_path: to begin with, the book's times of gelu."""
    monkeypatch.setattr(ladder, "MEASURED", tmp_path / "measured.json")
    book = ladder.load(ladder.LADDER / "measured.json")
    times = {"times": {"gelu": book["times"]["gelu"]}, "ceilings": {"gelu": book["ceilings"]["gelu"]}}
    (tmp_path / "measured.json").write_text(json.dumps(book | times))

    def climb(gpu: CpuDevice, *arguments: str) -> str:
        ceilings = {"copy": 1e12, "TF32" if gpu.compute_capability >= 80 else "fp32": 5e13, "bf16": 1e14}
        monkeypatch.setattr(device, "use", lambda kind: "cuda")
        monkeypatch.setattr(device.current, "device", gpu)
        monkeypatch.setattr(ladder, "find_ceilings", lambda: (ceilings, "made up"))
        monkeypatch.setattr(ladder, "seconds", lambda name, rung: 1e-4)
        monkeypatch.setattr(ladder, "repeats_that_differ", lambda name, rung: 0)
        monkeypatch.setattr(sys, "argv", ["ladder.py", *arguments])
        ladder.main()
        return capsys.readouterr().out

    return climb


def test_a_readers_gpu_is_kept_in_a_file_of_its_own_and_shown_beside_the_books(climb_on):
    book = ladder.kept_measurement()
    mine = MadeUpGPU("NVIDIA GeForce RTX 4090", 89)
    printed = climb_on(mine, "gelu", "--keep")
    first = ladder.figures_of("gelu", "formula_kernel", book)
    assert re.search(rf"  100 +1,007 +101% +{re.escape(first[0])} +{first[2]}$", printed.splitlines()[4])
    assert printed.endswith("written: doc/ladder/measured-nvidia-geforce-rtx-4090.json\n")
    climb_on(mine, "copy", "--keep")
    (kept,) = ladder.kept_elsewhere()
    assert list(kept["times"]) == ["copy", "gelu"] and ladder.kept_measurement() == book

    page = "<!-- ladder: gelu -->\n<!-- end of ladder -->\n"
    shown = ladder.with_tables(page, book, [kept])
    assert "| RTX 4090: µs | of its ceiling |" in shown and shown.count("| 100 | 101% |") == len(TOPICS["gelu"].rungs)
    assert "RTX" not in ladder.with_tables(shown, book)


def test_a_gpu_without_tf32_climbs_what_it_can_and_says_what_the_rest_needs(climb_on):
    """A T4, in fp32."""
    assert climb_on(MadeUpGPU("Tesla T4", 75), "matmul", "--keep").count("needs 8.0") == 3
    (kept,) = ladder.kept_elsewhere()
    for rung in TOPICS["matmul"].rungs:
        assert kept["times"]["matmul"][rung.kernel] == ({"lacks": "needs 8.0"} if rung.tf32 else {"microseconds": 100})


@pytest.mark.parametrize("M, N, K", [(261, 264, 264), (800, 8, 8), (600, 200, 136), (128, 384, 512)])
def test_consumers_in_ping_pong_find_their_stages(M, N, K, monkeypatch):
    """Of two blocks that make 6, 7, 10 and 2 tiles, through rings of 4 stages, which K takes 5, 1, 3 and 8 of."""
    switch_device("cpu", monkeypatch)
    monkeypatch.setattr(device.current.device, "multiprocessors", 2)
    (rung,) = (rung for rung in TOPICS["matmul_hopper"].rungs if rung.kernel == "pingpong_kernel")
    compare("matmul_hopper", rung, {"M": M, "N": N, "K": K}, lambda launch: launch())


def test_a_product_stored_through_a_tensor_map_is_declared_to_be_written():
    declared = device.sources.kernel_accesses(ladder.LADDER / "matmul_hopper.cu")["store_kernel"]
    assert declared == {"c": "sets", "a": "reads", "b": "reads", "M": None, "N": None, "K": None}


def test_a_reader_may_time_a_topic_at_other_sizes(climb_on, monkeypatch):
    topic = TOPICS["gelu"]
    monkeypatch.setattr(topic, "bench", topic.bench)
    gpu = MadeUpGPU("NVIDIA H100", 90)
    assert "times at N=64, C=256\n" in climb_on(gpu, "gelu", "--sizes", "N=64,C=256")
    for wrong in ["N=64"], ["N=64,C=0"], ["C=256,N=64,N=8"], ["N=64,M=8"], ["N=64;C=8"], ["N=64,C=256", "--keep"]:
        with pytest.raises(UserError, match="--sizes"):
            climb_on(gpu, "gelu", "--sizes", *wrong)


def test_the_books_gpu_is_kept_in_the_book(climb_on, tmp_path):
    book = ladder.kept_measurement()
    assert climb_on(MadeUpGPU(book["machine"], 90), "copy", "--keep").endswith("written: doc/ladder/measured.json\n")
    assert climb_on(MadeUpGPU(TOPICS["matmul_hopper"].gpu, 90), "matmul_hopper", "--keep").endswith("/measured.json\n")
    kept = ladder.kept_measurement()
    assert kept["times"]["gelu"] == book["times"]["gelu"] and kept["counts"] == book["counts"]
    assert kept["machine"] == book["machine"] != TOPICS["matmul_hopper"].gpu and ladder.kept_elsewhere() == []
    assert kept["ceilings"]["matmul_hopper"]["bf16"] == pytest.approx(2 * 8192**3 / 1e-4)  # its own last rung's
    (tmp_path / "measured-a-gpu.json").write_text('{"times"')
    with pytest.raises(UserError, match=r"measured-a-gpu\.json is damaged: remove it and measure again with --keep"):
        ladder.kept_elsewhere()


def test_a_wrong_result_is_noticed():
    """The comparison with NumPy can fail."""
    device.use("cpu")
    topic, rung = TOPICS["copy"], TOPICS["copy"].rungs[-1]
    right = ladder.references(topic, topic.odd)
    assert ladder.check("copy", rung, topic.odd, right) == 0
    with pytest.raises(UserError, match="copy, cudaMemcpyAsync, n=1001: out is off by 2e-05 of itself"):
        ladder.check("copy", rung, topic.odd, {"out": right["out"] * (1 + 2 * ladder.FP32)})
    assert ladder.relative_error(np.array([1.0, np.nan]), np.ones(2)) == np.inf

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


def rungs_of(these: str) -> dict[tuple[str, str], Rung]:
    """All rungs that stand in the topics' files. Unless these are "all", only the last one of Hopper's products: it has
    the ideas of the others."""
    rungs = {(name, rung.kernel): rung for name in TOPICS for rung in TOPICS[name].rungs if rung.in_file}
    last = [kernel for name, kernel in rungs if name == "matmul_hopper"][-1]
    return {key: rung for key, rung in rungs.items() if these == "all" or key[0] != "matmul_hopper" or key[1] == last}


@pytest.fixture(scope="module", params=["short", pytest.param("all", marks=pytest.mark.long)])
def watched(request, pytestconfig) -> dict:
    """What `watch_all` finds, in a process of its own: the microscope's runtime is another one than the tests'."""
    # A library for the microscope is kept for a file at its place: those without a barrier are in a folder that stays.
    code = "import sys; sys.path[:0] = '.', 'tests'; import test_ladder; test_ladder.watch_all(*sys.argv[1:])"
    command = [sys.executable, "-c", code, pytestconfig.cache.mkdir("rungs_without_barriers"), request.param]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {"these": request.param, **json.loads(done.stdout)}


def watch_all(folder: str, these: str) -> None:
    """Prints, as JSON, for these rungs how each compares with NumPy on the CPU device and which races the microscope
    sees, and those of two rungs of which a barrier is left out: in this folder."""
    use_microscope()
    found = {"wrong": {}, "races": {}, "without a barrier": {}, "counts": {}}
    for floatX, defines in DEFINES.items():
        names = [name for name, topic in TOPICS.items() if bool(topic.bf16) == (floatX == device.BF16)]
        cpp.compile_all([ladder.LADDER / f"{name}.cu" for name in names], *defines)
    rungs = rungs_of(these)
    for (name, kernel), rung in rungs.items():
        seen, wrong = [], []
        for sizes in ladder.sizes_for(TOPICS[name], rung)[:-1]:
            try:
                compare(name, rung, sizes, lambda launch: seen.extend(ladder.watch(name, launch)))  # noqa: B023
            except AssertionError as error:
                wrong.append(str(error))
        found["wrong"][f"{name} {kernel}"] = wrong
        found["races"][f"{name} {kernel}"] = [line for one in seen for line in race_lines(one)]
    for pair in ("copy", "run_a_thread_kernel"), ("transpose", "tile_kernel"), ("transpose", "padded_tile_kernel"):
        found["counts"][" ".join(pair)] = ladder.counts(pair[0], rungs[pair])

    original, ladder.LADDER = ladder.LADDER, Path(folder) / "doc" / "ladder"
    shutil.copytree(original, ladder.LADDER, dirs_exist_ok=True)
    shutil.copytree(ROOT / "kernels", Path(folder) / "kernels", dirs_exist_ok=True)
    for name, kernel, which in ("transpose", "tile_kernel", 0), ("layernorm_forward", "block_a_row_kernel", 2):
        parts = (original / f"{name}.cu").read_text().split("__syncthreads();")
        parts[which : which + 2] = [";".join(parts[which : which + 2])]
        (ladder.LADDER / f"{name}.cu").write_text("__syncthreads();".join(parts))
        watched = ladder.watch_rung(name, rungs[name, kernel], TOPICS[name].fours)
        found["without a barrier"][name] = [line for one in watched for line in race_lines(one)]
    json.dump(found, sys.stdout)


def test_every_rung_gives_what_numpy_gives_on_the_cpu(watched):
    assert list(watched["wrong"]) == [f"{name} {kernel}" for name, kernel in rungs_of(watched["these"])]
    assert not any(watched["wrong"].values()), watched["wrong"]


def test_no_rung_races_and_a_rung_without_a_barrier_does(watched):
    assert not any(watched["races"].values()), watched["races"]
    assert all(watched["without a barrier"].values()), watched["without a barrier"]


def test_the_microscope_counts_what_the_pages_say(watched):
    """One float of each sector of 8; a column of a tile of 32 x 32 in a single bank of 32, and of one with longer rows
    in all of them."""
    assert watched["counts"]["copy run_a_thread_kernel"] == {"sectors": 8}
    assert watched["counts"]["transpose tile_kernel"]["worst"] == 32
    assert watched["counts"]["transpose padded_tile_kernel"]["worst"] == 1


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


@each_topic
def test_every_kernel_is_a_rung_or_part_of_one(name):
    text = (ladder.LADDER / f"{name}.cu").read_text()
    launched = Path(ROOT / "doc" / "rungs.py").read_text()
    kernels = re.findall(r"void (?:__\S+\s+)?(\w+_kernel)\(", text)
    assert all(re.search(rf"\b{kernel}\b", launched) for kernel in kernels)


def test_every_rung_has_been_timed_and_counted():
    kept = ladder.kept_measurement()
    kernels = {name: [rung.kernel for rung in topic.rungs] for name, topic in TOPICS.items()}
    for measured in kept["times"], kept["counts"]:
        assert {name: list(measured[name]) for name in measured} == kernels


@pytest.mark.parametrize("page", sorted((ROOT / "doc").glob("*.md")), ids=lambda page: page.name)
def test_pages_show_what_was_measured(page):
    text = page.read_text(encoding="utf-8")
    assert ladder.with_tables(text, ladder.kept_measurement()) == text, "run python doc/ladder.py --write"


def test_tables_are_written_where_no_device_is_in_use():
    page = "open('doc/01-eight-kernels.md').read()"
    write = f"from doc import ladder; ladder.with_tables({page}, ladder.kept_measurement())"
    done = subprocess.run([sys.executable, "-c", write], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


def test_a_readers_gpu_is_kept_in_a_file_of_its_own_and_shown_beside_the_books(climb_on, tmp_path):
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
    printed = climb_on(MadeUpGPU("Tesla T4", 75), "matmul", "--keep")
    (kept,) = ladder.kept_elsewhere()
    for rung in TOPICS["matmul"].rungs:
        assert kept["times"]["matmul"][rung.kernel] == ({"lacks": "needs 8.0"} if rung.tf32 else {"microseconds": 100})
    assert printed.count("needs 8.0") == 3


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

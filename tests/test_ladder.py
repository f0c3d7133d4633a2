"""Every rung of doc/ladder is right at odd sizes, races nowhere and compiles for a GPU; pages show what was kept."""

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import device
from conftest import DEVICES, switch_device
from dev.microscope import race_lines
from dev.watch import use_microscope
from device import cpp
from device.bf16 import DEFINES
from device.errors import UserError
from doc import ladder
from doc.rungs import TOPICS, Rung
from oracle import assert_close, guarded

import numpy as np
import pytest

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
    for rung in TOPICS[name].rungs:
        for sizes in ladder.sizes_for(TOPICS[name], rung):
            compare(name, rung, sizes, lambda launch: launch())


@needs_gpu
@each_topic
def test_every_rung_without_atomics_gives_the_same_bits_again(name, monkeypatch):
    switch_device("cuda", monkeypatch)
    with ladder.precision_of(name):
        ordered = [rung for rung in TOPICS[name].rungs if rung.ordered]
        assert [rung.kernel for rung in ordered if ladder.repeats_that_differ(name, rung)] == []


@needs_gpu
@each_topic
def test_rungs_agree_at_the_sizes_that_are_timed(name, monkeypatch):
    switch_device("cuda", monkeypatch)
    topic, production = TOPICS[name], {}
    outputs = ladder.shapes_of(f"{topic.sets} {topic.adds}", SimpleNamespace(**topic.bench))
    for rung in reversed(topic.rungs):  # from the one that trains
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


@pytest.fixture(scope="module")
def watched() -> dict:
    """What `watch_all` finds, in a process of its own: the microscope's runtime is another one than the tests'."""
    code = "import sys; sys.path[:0] = '.', 'tests'; import test_ladder; test_ladder.watch_all()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def see_launch(name: str, seen: list, launch: Callable[[], None]) -> None:
    seen += ladder.watch(name, launch)


def watch_all() -> None:
    """Prints, as JSON, for every rung of a topic's file how it compares with NumPy on the CPU device and which races
    the microscope sees, and those of two rungs of which a barrier is left out."""
    use_microscope()
    found = {"wrong": {}, "races": {}, "without a barrier": {}, "counts": {}}
    for floatX, defines in DEFINES.items():
        names = [name for name, topic in TOPICS.items() if bool(topic.bf16) == (floatX == device.BF16)]
        cpp.compile_all([ladder.LADDER / f"{name}.cu" for name in names], *defines)
    rungs = {(name, rung.kernel): rung for name in TOPICS for rung in TOPICS[name].rungs if rung.in_file}
    for (name, kernel), rung in rungs.items():
        seen, wrong = [], []
        see = functools.partial(see_launch, name, seen)
        for sizes in ladder.sizes_for(TOPICS[name], rung)[:-1]:
            try:
                compare(name, rung, sizes, see)
            except AssertionError as error:
                wrong.append(str(error))
        found["wrong"][f"{name} {kernel}"] = wrong
        found["races"][f"{name} {kernel}"] = [line for one in seen for line in race_lines(one)]
    for pair in ("copy", "run_a_thread_kernel"), ("transpose", "tile_kernel"), ("transpose", "padded_tile_kernel"):
        found["counts"][" ".join(pair)] = ladder.counts(pair[0], rungs[pair])

    original = ladder.LADDER
    with tempfile.TemporaryDirectory() as folder:
        ladder.LADDER = Path(folder) / "doc" / "ladder"
        shutil.copytree(original, ladder.LADDER)
        shutil.copytree(ROOT / "kernels", Path(folder) / "kernels")
        for name, kernel, which in ("transpose", "tile_kernel", 0), ("layernorm_forward", "block_a_row_kernel", 2):
            parts = (original / f"{name}.cu").read_text().split("__syncthreads();")
            parts[which : which + 2] = [";".join(parts[which : which + 2])]
            (ladder.LADDER / f"{name}.cu").write_text("__syncthreads();".join(parts))
            watched = ladder.watch_rung(name, rungs[name, kernel], TOPICS[name].fours)
            found["without a barrier"][name] = [line for one in watched for line in race_lines(one)]
    json.dump(found, sys.stdout)


def test_every_rung_gives_what_numpy_gives_on_the_cpu(watched):
    assert list(watched["wrong"]) == [f"{name} {r.kernel}" for name in TOPICS for r in TOPICS[name].rungs if r.in_file]
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
    from test_nvrtc import compiled

    builds = [(ladder.LADDER / f"{name}.cu", "bf16" if topic.bf16 else "fp32") for name, topic in TOPICS.items()]
    with ThreadPoolExecutor() as pool:  # NVRTC lets go of the interpreter's lock
        reports = list(pool.map(lambda build: compiled(build[0], 90, build[1], pytestconfig.cache), builds))
    for (path, _), kernels in zip(builds, reports, strict=True):
        assert sorted(kernels) == sorted(device.kernel_declarations(path))
        assert all(max(spilled) <= 16 for spilled in kernels.values()), kernels


@each_topic
def test_every_kernel_is_a_rung_or_part_of_one(name):
    text = (ladder.LADDER / f"{name}.cu").read_text()
    launched = Path(ROOT / "doc" / "rungs.py").read_text()
    kernels = re.findall(r"void (?:__\S+\s+)?(\w+_kernel)\(", text)
    assert all(re.search(rf"\b{kernel}\b", launched) for kernel in kernels)
    for rung in TOPICS[name].rungs:
        title, idea = ladder.title_and_idea(name, rung)
        assert 0 < len(title) < 60 and "|" not in idea and idea.endswith(".") and not idea[0].islower()


def test_every_rung_has_been_timed_and_counted():
    """But for the times of two topics, which wait for a GPU: until then no page shows their tables."""
    kept = ladder.kept_measurement()
    assert list(kept["counts"]) == list(TOPICS)
    assert list(kept["times"]) == [name for name in TOPICS if name in kept["times"]]
    assert set(TOPICS) - set(kept["times"]) <= {"matmul_bf16", "flash_attention_bf16"}
    for name, topic in TOPICS.items():
        kernels = [rung.kernel for rung in topic.rungs]
        assert list(kept["counts"][name]) == kernels
        if name in kept["times"]:
            assert list(kept["times"][name]) == kernels
            assert all(one["microseconds"] > 0 for one in kept["times"][name].values())


@pytest.mark.parametrize("page", sorted((ROOT / "doc").glob("*.md")), ids=lambda page: page.name)
def test_pages_show_what_was_measured(page):
    text = page.read_text(encoding="utf-8")
    assert ladder.with_tables(text, ladder.kept_measurement()) == text, "run python doc/ladder.py --write"


def test_a_table_is_written_between_its_markers_and_nowhere_else():
    kept = ladder.kept_measurement()
    before = "# Page\n\n<!-- ladder: copy -->\nold\n<!-- end of ladder -->\n\nThe end.\n"
    after = ladder.with_tables(before, kept)
    assert after.startswith("# Page\n\n<!-- ladder: copy -->\n| rung |")
    assert after.endswith("<!-- end of ladder -->\n\nThe end.\n")
    assert "old" not in after and ladder.with_tables(after, kept) == after
    with pytest.raises(UserError, match="nonsense: not a topic"):
        ladder.with_tables(before.replace("copy", "nonsense"), kept)


def test_a_table_is_not_shown_before_it_is_measured():
    """And is then, with the ceiling of its own precision."""
    page = "Before.\n\n<!-- ladder: matmul_bf16 -->\n<!-- end of ladder -->\n"
    kept = {"times": {}, "counts": {}, "copy": 4e12, "product": 4e14, "product in bf16": 8e14, "machine": "a GPU"}
    assert ladder.with_tables(page, kept) == page
    topic = TOPICS["matmul_bf16"]
    microseconds = topic.flops(SimpleNamespace(**topic.bench)) / 4e14 * 1e6  # half of the ceiling
    kept["times"] = {"matmul_bf16": {rung.kernel: {"microseconds": microseconds} for rung in topic.rungs}}
    shown = ladder.with_tables(page, kept)
    assert shown.count("| 400 | 50% |") == len(topic.rungs) and "| of the bf16 product |" in shown
    assert "matrices in bf16, 800 TFLOP/s" in shown
    assert ladder.with_tables(shown, kept | {"times": {}}) == page


@pytest.mark.parametrize(
    "arguments, message",
    [(["layernorm"], "layernorm: not a topic; there are copy, column_sum"), (["gelu", "--keep"], "gelu: --keep")],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message):
    command = [sys.executable, "doc/ladder.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_a_wrong_result_is_noticed():
    """The comparison with NumPy can fail."""
    device.use("cpu")
    topic, rung = TOPICS["copy"], TOPICS["copy"].rungs[-1]
    right = ladder.references(topic, topic.odd)
    assert ladder.check("copy", rung, topic.odd, right) == 0
    with pytest.raises(UserError, match="copy, cudaMemcpyAsync, n=1001: out is off by 2e-05 of itself"):
        ladder.check("copy", rung, topic.odd, {"out": right["out"] * (1 + 2 * ladder.FP32)})
    assert ladder.relative_error(np.array([1.0, np.nan]), np.ones(2)) == np.inf

"""Climbs a layer's ladder: kernels from the naive one to the one that trains, each with one idea more.

    python doc/ladder.py layernorm_forward         # one topic; without one, all of them
    python doc/ladder.py layernorm_forward --keep  # and keeps what was measured
    python doc/ladder.py matmul_hopper --sizes M=4096,N=3072,K=768  # at other sizes than the book's
    python doc/ladder.py --write                   # fills the tables of doc/*.md from doc/ladder/measured.json

The rungs of a topic are the kernels of doc/ladder/<topic>.cu and, last, the launcher of kernels/ itself (doc/rungs.py).
Each is first compared with NumPy in float64, its outputs poisoned with NaNs, at odd sizes and at round ones. Then

- on a GPU it is timed at the shapes of GPT-2 124M with B=4 and T=1024, on several sets of arrays in turn so that none
  is still in L2, and compared with what the same GPU does at best: a large copy, a large matrix product;
- on a CPU the microscope counts what it asks of a GPU's memory (dev/microscope): the bytes of the 32-byte sectors
  that its accesses touch, for each byte that the topic has to move; and in shared memory the passes of an access for
  each that it needs, at worst and on average. Times of a CPU would teach nothing about a GPU.

The tables of the pages show the GPU that doc/ladder/measured.json names, or the topic itself. On it, --keep puts times
into this file, and on a CPU counts. Another GPU's times go to a file of its own beside it, which git ignores; the
command and `make book` show them beside the book's. The pictures of rungs show the book's: `python doc/draw.py`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import device
from dev.bench.ceilings import measure_ceilings
from dev.bench.ceilings import seconds as best_seconds
from dev.microscope.report import columns, lines_of, race_lines
from dev.microscope.watch import FILES, SECTOR, Watched, use_microscope, watch_kernel
from device.errors import UserError
from doc.rungs import TOPICS, Rung, Topic
from kernels.reduce import MAX_PARTIALS
from llmc.files.files import replacing
from llmc.run.arguments import Parser
from llmc.run.program import run_program

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LADDER = ROOT / "doc" / "ladder"
MEASURED = LADDER / "measured.json"

# Relative error norms. fp32 rounds at 6e-8, and of a sum's hundreds of roundings most cancel. TF32 keeps 10 bits of the
# factors of a product: it rounds at 5e-4, and errors of single products average out. An array in bf16 has been rounded
# to 7 bits, which is at most 3.9e-3 of a number, and 1.7e-3 as a norm.
FP32, TF32, BF16 = 1e-5, 1e-3, 2.5e-3

# ---- arrays


@contextmanager
def precision_of(name: str) -> Iterator[None]:
    """Within the block the device computes in bf16 if the topic does and the device can, and else as before."""
    before = device.precision
    device.use_precision("bf16" if TOPICS[name].bf16 and not lacking(BF16_FROM) else before)
    try:
        yield
    finally:
        device.use_precision(before)


TF32_FROM = BF16_FROM = 80  # compute capabilities


def lacking(capability: int) -> str:
    """What the device in use lacks where this capability is needed, in words; empty where it lacks nothing."""
    too_old = device.kind == "cuda" and device.compute_capability < capability
    return f"needs {capability / 10}" if too_old else ""


def lacks(name: str, rung: Rung) -> str:
    """What the device in use lacks to run a rung, in words; empty where it lacks nothing."""
    if rung.in_file and device.why_not_kernels(LADDER / f"{name}.cu"):  # of a file for a single architecture
        return "needs 9.0"
    return lacking(BF16_FROM if TOPICS[name].bf16 else TF32_FROM if rung.tf32 else 0)


def shapes_of(text: str, size: SimpleNamespace) -> dict[str, tuple[int, ...]]:
    pairs = [word.split("=") for word in text.split()]
    return {name: tuple(int(eval(part, {"P": MAX_PARTIALS}, vars(size))) for part in shape.split(","))
            for name, shape in pairs}  # fmt: skip


def host_arrays(topic: Topic, sizes: dict[str, int]) -> tuple[dict, dict, dict]:
    """What a rung reads, what it updates and what it sets: NumPy arrays by their names, random numbers or NaNs. Those
    in bf16 are of their bits (device/bf16.py)."""
    size, rng = SimpleNamespace(**sizes), np.random.default_rng(1)

    def random(shape: tuple) -> np.ndarray:
        return np.resize(rng.standard_normal(min(int(np.prod(shape)), 1 << 22), np.float32), shape)

    given = topic.reads, topic.adds
    reads, adds = ({name: random(shape) for name, shape in shapes_of(text, size).items()} for text in given)
    for name, array in topic.others(size, reads | adds).items():
        (adds if name in adds else reads)[name] = array
    sets = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes_of(topic.sets, size).items()}
    for named in reads, adds, sets:
        named.update({name: device.to_bf16(array) for name, array in named.items() if name in topic.bf16})
    return reads, adds, sets


def as_floats(array: np.ndarray) -> np.ndarray:
    return device.from_bf16(array) if array.dtype == device.BF16 else array


def references(topic: Topic, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    reads, adds, _ = host_arrays(topic, sizes)
    given = {name: as_floats(array) for name, array in (reads | adds).items()}
    exact = {k: x.astype(np.float64) if x.dtype == np.float32 else x for k, x in given.items()}
    return topic.reference(SimpleNamespace(**sizes, **exact, **topic.numbers))


def place_arrays(topic: Topic, sizes: dict[str, int], place: Callable[[str, np.ndarray], object]) -> SimpleNamespace:
    """The sizes, numbers and device arrays that a rung is given; place(how, values) puts an array on the device, where
    how is "read", "update", "write" or "scratch"."""
    reads, adds, sets = host_arrays(topic, sizes)
    shapes = shapes_of(topic.scratch, SimpleNamespace(**sizes))
    scratch = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    kinds = ("read", reads), ("update", adds), ("write", sets), ("scratch", scratch)
    placed = {k: place(how, x) for how, named in kinds for k, x in named.items()}
    return SimpleNamespace(**sizes, **{k: np.float32(x) for k, x in topic.numbers.items()}, **placed)


def on_device(how: str, values: np.ndarray):
    return device.asarray(values)


def kernels_of(name: str) -> device.Source:
    """The topic's file, for the device in use now."""
    return device.Source(LADDER / f"{name}.cu")


def sizes_for(topic: Topic, rung: Rung) -> list[dict[str, int]]:
    """Where a rung is compared with NumPy."""
    return [topic.fours, topic.round] if rung.fours else [topic.odd, topic.fours, topic.round]


# ---- checking, timing and counting


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want|, infinite where got holds what is not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got.astype(np.float64) - want) / (np.linalg.norm(want) or 1.0))


def tolerance(topic: Topic, rung: Rung, output: str) -> float:
    return BF16 if output in topic.bf16 else TF32 if rung.tf32 else FP32


def check(name: str, rung: Rung, sizes: dict[str, int], wanted: dict[str, np.ndarray]) -> float:
    """The largest relative error of a rung's outputs; UserError where one is above its tolerance."""
    arrays = place_arrays(TOPICS[name], sizes, on_device)
    rung.launch(kernels_of(name), arrays)
    device.synchronize()
    errors = {key: relative_error(device.to_floats(getattr(arrays, key)), want) for key, want in wanted.items()}
    for key, error in errors.items():
        if error > tolerance(TOPICS[name], rung, key):
            raise UserError(f"{name}, {rung.kernel}, {text_of(sizes)}: {key} is off by {error:.2g} of itself")
    return max(errors.values())


SETS_BYTES = 400 << 20  # of arrays in turn: several times the L2 of any GPU so far


def seconds(name: str, rung: Rung, rounds: int = 9) -> float:
    """The median time of a launch at the bench sizes."""
    topic, cu = TOPICS[name], kernels_of(name)
    sets = [place_arrays(topic, topic.bench, on_device)]
    while len(sets) < min(16, SETS_BYTES // topic.bytes(SimpleNamespace(**topic.bench))):
        copies = {key: value.copy() if hasattr(value, "nbytes") else value for key, value in vars(sets[0]).items()}
        sets.append(SimpleNamespace(**copies))

    def timed(repeats: int) -> Callable[[], float]:
        def work() -> None:
            for _ in range(repeats):
                for arrays in sets:
                    rung.launch(cu, arrays)

        recorded = device.record(work) if rung.recorded else work

        def once() -> float:
            device.synchronize()
            started = time.perf_counter()
            recorded()
            device.synchronize()
            return (time.perf_counter() - started) / (repeats * len(sets))

        once(), once()  # the first call loads the kernels, the second records them
        return once

    repeats = max(1, round(0.005 / (timed(1)() * len(sets))))  # 5 ms, so that starting a graph does not count
    once = timed(repeats)
    return float(np.median([once() for _ in range(rounds)]))


LARGE = dict.fromkeys("MNK", 8192)


def product_in_bf16() -> float:
    """FLOP/s of a large square matrix product in bf16."""
    topic, sizes = TOPICS["matmul_bf16"], LARGE
    with precision_of("matmul_bf16"):
        arrays = place_arrays(topic, sizes, on_device)
        return topic.flops(arrays) / best_seconds(lambda: device.gemm(arrays.c, arrays.a, arrays.b, *sizes.values()))


def find_ceilings() -> tuple[dict[str, float], str]:
    """Of this GPU: bytes/s of a large copy, FLOP/s of a large product by its type; and the same in words."""
    measured = measure_ceilings()
    ceilings = {"copy": measured.copy, device.precision.replace("tf", "TF"): measured.product}
    if lack := lacking(BF16_FROM):
        return ceilings, f"{measured.description}; TF32 and bf16: {lack}"
    ceilings["bf16"] = product_in_bf16()
    return ceilings, f"{measured.description}, in bf16 {ceilings['bf16'] / 1e12:.4g} TFLOP/s"


def ceilings_of(name: str, measured: dict, ceilings: dict[str, float]) -> dict[str, float]:
    """A topic that times the ceiling's product itself, as its last rung, has its ceiling from there: by the same
    method, on a GPU that is as warm. After a second of products an H100 lowers its clock."""
    topic, timed = TOPICS[name], measured[TOPICS[name].rungs[-1].kernel]
    if not ceilings or topic.bench != LARGE or "microseconds" not in timed:
        return ceilings
    rate = topic.flops(SimpleNamespace(**topic.bench)) / (timed["microseconds"] * 1e-6)
    return ceilings | {ceiling_of(topic, ceilings): rate}


def repeats_that_differ(name: str, rung: Rung, repeats: int = 9) -> int:
    """How many repetitions of a launch at the bench sizes leave other bits in their outputs than the first one."""
    topic, cu = TOPICS[name], kernels_of(name)
    arrays = place_arrays(topic, topic.bench, on_device)
    outputs = shapes_of(f"{topic.sets} {topic.adds}", SimpleNamespace(**topic.bench))
    start = {key: getattr(arrays, key).copy() for key in outputs}
    first, differ = {}, 0
    for _ in range(1 + repeats):
        for key, values in start.items():
            device.copy(getattr(arrays, key), values)
        rung.launch(cu, arrays)
        first = first or {key: getattr(arrays, key).copy() for key in outputs}
        differ += any(bool((getattr(arrays, key) != values).any()) for key, values in first.items())
    return differ


def watch(name: str, launch: Callable[[], None]) -> list[Watched]:
    """The kernels that `launch` launches, a rung of this topic, under the microscope."""
    watched, path = [], LADDER / f"{name}.cu"
    own = device.kernel_declarations(path)

    def observer(kernel: str, arguments: dict, work: Callable[[], None]) -> None:
        if kernel in own or kernel in FILES:
            watched.append(watch_kernel(kernel, arguments, work, path if kernel in own else None))
        else:
            work()  # a matrix product

    with device.observe(observer):
        launch()
    return watched


def watch_rung(name: str, rung: Rung, sizes: dict[str, int]) -> list[Watched]:
    arrays = place_arrays(TOPICS[name], sizes, on_device)
    return watch(name, lambda: rung.launch(kernels_of(name), arrays))


def counts(name: str, rung: Rung) -> dict[str, float]:
    """What a rung asks of memory at the round sizes: sectors (bytes moved for each that must be), worst and mean
    (conflicts in shared memory). Nothing where it is no kernel of ours."""
    topic, moved, passes, least, worst = TOPICS[name], 0, 0, 0, 0.0
    for one in watch_rung(name, rung, topic.round):
        for line in lines_of(one):
            moved += SECTOR * line.sectors
            passes, least, worst = passes + line.passes, least + line.least_passes, max(worst, line.worst)
    size = SimpleNamespace(**topic.round)
    return ({"sectors": round(moved / topic.bytes(size), 2)} if moved else {}) | (
        {"worst": round(float(worst), 2), "mean": round(passes / least, 2)} if least else {}
    )  # fmt: skip


# ---- what is shown


def text_of(sizes: dict[str, int]) -> str:
    return ", ".join(f"{key}={size}" for key, size in sizes.items())


def title_and_idea(name: str, rung: Rung) -> tuple[str, str]:
    """Of a kernel, from the comment above it: "Title: the idea. More about it." """
    if not rung.in_file:
        return rung.kernel, rung.idea
    text = (LADDER / f"{name}.cu").read_text("utf-8")
    comment = re.search(rf'((?:^//.*\n)+)extern "C" __global__[^(]*(?:\([\d, ]*\))?\s+{rung.kernel}\(', text, re.M)
    words = " ".join(re.sub(r"^// ?", "", comment[1], flags=re.M).split())
    title, idea = words.split(": ", 1)
    idea = re.split(r"(?<=[a-z0-9)])\. ", idea + " ")[0].strip().rstrip(".")
    return title, idea[0].upper() + idea[1:] + "."


def linked(name: str, rung: Rung) -> str:
    """A rung's title for a table: a link to its kernel (doc/places.py), or to the file of kernels/ that it is of."""
    title, _ = title_and_idea(name, rung)
    if rung.in_file:
        return f"[{title}](ladder/{name}.cu)<!-- {rung.kernel} -->"
    _, _, file = rung.kernel.partition(" of ")
    return f"[{title}](../{file})" if file else title


def ceiling_of(topic: Topic, ceilings: dict[str, float]) -> str:
    """Which of a machine's ceilings a topic is compared with: "copy", or the type of the product."""
    return "copy" if not topic.flops else "bf16" if topic.bf16 else "TF32" if "TF32" in ceilings else "fp32"


def figures_of(name: str, kernel: str, kept: dict) -> tuple[str, str, str]:
    """A rung on a machine: microseconds, or what the machine lacks; GB/s or TFLOP/s; the share of its ceiling."""
    timed, topic = kept["times"].get(name, {}).get(kernel, {}), TOPICS[name]
    if "microseconds" not in timed:
        return timed.get("lacks", ""), "", ""
    size, ceilings = SimpleNamespace(**topic.bench), kept["ceilings"][name]
    work, unit = (topic.flops(size), 1e12) if topic.flops else (topic.bytes(size), 1e9)
    rate = work / (timed["microseconds"] * 1e-6)
    share = rate / ceilings[ceiling_of(topic, ceilings)]
    percent = f"{share:.0%}" if share > 0.095 else f"{share:.1%}"
    return three_digits(timed["microseconds"]), three_digits(rate / unit), percent


def three_digits(x: float) -> str:
    return f"{x:,.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}"


def load(path: Path) -> dict:
    """What was kept in a file: by topic and kernel the times and counts, by topic the ceilings of the same run."""
    empty = {"times": {}, "ceilings": {}, "counts": {}}
    try:
        return empty | json.loads(path.read_text("utf-8")) if path.exists() else empty
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged: remove it and measure again with --keep") from None


def kept_measurement() -> dict:
    """What the book shows."""
    return load(MEASURED)


def gains(name: str) -> list[float]:
    """How many times as fast each rung of a topic is as the rung before it, as the book has them."""
    times = [timed["microseconds"] for timed in kept_measurement()["times"][name].values()]
    return [before / after for before, after in zip(times, times[1:], strict=False)]


def kept_elsewhere() -> list[dict]:
    """What was kept on other GPUs than the book's."""
    return [load(path) for path in sorted(MEASURED.parent.glob("measured-*.json"))]


def keep(name: str, measured: dict, ceilings: dict[str, float]) -> Path:
    """Keeps a topic's times, if there are ceilings, or its counts. Returns the file."""
    path, book = MEASURED, kept_measurement()
    if ceilings and device.name != machine_of(name, book):
        path = MEASURED.with_name(f"measured-{re.sub('[^a-z0-9]+', '-', device.name.lower()).strip('-')}.json")
    kept = load(path)
    if ceilings:
        if path != MEASURED or not TOPICS[name].gpu:
            kept["machine"] = device.name
        kept["times"][name], kept["ceilings"][name] = measured, ceilings
    else:
        kept["counts"][name] = measured
    for key in "times", "ceilings", "counts":
        kept[key] = {topic: kept[key][topic] for topic in TOPICS if topic in kept[key]}
    with replacing(path) as file:
        file.write((json.dumps(kept, indent=1) + "\n").encode())
    return path


def machine_of(name: str, book: dict) -> str:
    """The GPU whose times the book shows for a topic."""
    return TOPICS[name].gpu or (book["machine"] if "machine" in book else device.name)


def short(machine: str) -> str:
    return machine.removeprefix("NVIDIA ").removeprefix("GeForce ")


def rows_of(name: str, kept: dict, others: list[dict]) -> Iterator[tuple[str, ...]]:
    """The table of a topic, without its head; microseconds and shares of other machines are its last columns."""
    for rung in TOPICS[name].rungs:
        _, idea = title_and_idea(name, rung)
        timed = kept["times"].get(name, {}).get(rung.kernel, {})
        counted = kept["counts"].get(name, {}).get(rung.kernel, {})
        if timed.get("differ"):
            idea += f" {timed['differ']} of 9 repetitions have other bits than the first run."
        sectors = f"{counted['sectors']:.2f}" if "sectors" in counted else ""
        conflicts = f"{counted['worst']:.2g} / {counted['mean']:.2f}" if "worst" in counted else ""
        beside = [cell for other in others for cell in figures_of(name, rung.kernel, other)[::2]]
        yield linked(name, rung), idea, *figures_of(name, rung.kernel, kept), sectors, conflicts, *beside


def table(name: str, kept: dict, others: list[dict]) -> str:
    """A topic's table for a page, in Markdown, with what its columns are. A topic that has no times has no rates."""
    topic, ceilings = TOPICS[name], kept["ceilings"].get(name, {})
    kind = ceiling_of(topic, ceilings)
    unit, ceiling = ("TFLOP/s", f"{kind} product") if topic.flops else ("GB/s", "copy")
    heads = ["rung", "the idea that it adds", "µs", unit, f"of the {ceiling}", "sectors", "conflicts"]
    heads += [head for other in others for head in (f"{short(other['machine'])}: µs", "of its ceiling")]
    lines = [
        f"| {' | '.join(heads)} |",
        f"|---|---|{'--:|' * (len(heads) - 2)}",
        *("| " + " | ".join(cells) + " |" for cells in rows_of(name, kept, others)),
    ]
    caption = f"`python doc/ladder.py {name}`. "
    if ceilings:
        best = "a copy of 1 GiB, " if kind == "copy" else f"a product of 8192 x 8192 matrices in {kind}, "
        best += speed(ceilings, kind)
        caption += f"Times: {machine_of(name, kept)}, {text_of(topic.bench)}; the ceiling: {best}, in the same run. "
    for other in others:
        ceilings = other["ceilings"][name]
        kind = ceiling_of(topic, ceilings)
        if kind in ceilings:
            best = "a large copy, " if kind == "copy" else f"a large product in {kind}, "
            caption += f"{other['machine']}, the same sizes; its ceiling: {best}{speed(ceilings, kind)}. "
    caption += (
        f"Counts: the microscope, {text_of(topic.round)}. Sectors: bytes of the sectors that accesses touch, for each "
        "byte that has to move (a cache serves some). Conflicts: passes of an access to shared memory for each that it "
        "needs, worst / mean."
    )
    return "\n".join([*lines, "", caption])


def speed(ceilings: dict[str, float], kind: str) -> str:
    return f"{ceilings[kind] / 1e9:.0f} GB/s" if kind == "copy" else f"{ceilings[kind] / 1e12:.0f} TFLOP/s"


BEGIN, END = "<!-- ladder: {} -->", "<!-- end of ladder -->"


def with_tables(page: str, kept: dict, others: list[dict] = ()) -> str:
    """A page's text with each table between its markers, nothing between those of a topic that has not been timed;
    UserError for a topic that there is not. others: of GPUs that get columns beside."""

    def fill(match: re.Match) -> str:
        name = match[1]
        if name not in TOPICS:
            raise UserError(f"ladder: {name}: not a topic; there are {', '.join(TOPICS)}")
        beside = [other for other in others if name in other["times"]]
        rows = f"{table(name, kept, beside)}\n" if name in kept["times"] else ""
        return f"{BEGIN.format(name)}\n{rows}{END}"

    return re.sub(rf"^{BEGIN.format('(.*?)')}$.*?^{END}$", fill, page, flags=re.M | re.S)


def write_tables() -> None:
    for path in sorted(LADDER.parent.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = with_tables(before, kept_measurement())
        if after != before:
            with replacing(path) as file:
                file.write(after.encode())
            print(f"written: {path.relative_to(ROOT)}")


def climb(name: str, ceilings: dict[str, float], counting: bool) -> tuple[dict, list[str]]:
    """Checks the rungs of a topic, and times them, if there are ceilings, or counts; prints its table. Returns what was
    measured, by kernel, and the races that the microscope saw."""
    topic, measured, races, errors = TOPICS[name], {}, [], []
    at = f"times at {text_of(topic.bench)}" if ceilings else f"counts at {text_of(topic.round)}" if counting else ""
    print(f"{name}, doc/ladder/{name}.cu: {at or 'compared with NumPy'}", flush=True)
    wanted = [references(topic, sizes) for sizes in (topic.odd, topic.fours, topic.round)]
    for rung in topic.rungs:
        if lack := lacks(name, rung):
            measured[rung.kernel] = {"lacks": lack}
            errors.append("")
            continue
        sizes = sizes_for(topic, rung)
        error = max(check(name, rung, s, w) for s, w in zip(sizes, wanted[-len(sizes) :], strict=True))
        if ceilings:
            measured[rung.kernel] = {"microseconds": round(1e6 * seconds(name, rung), 2)}
            if not all(other.ordered for other in topic.rungs):
                measured[rung.kernel]["differ"] = repeats_that_differ(name, rung)
        if counting:
            measured[rung.kernel] = counts(name, rung)
            races += [line for one in watch_rung(name, rung, sizes[0]) for line in race_lines(one)]
        errors.append(f"{error:.1e}")
    ceilings = ceilings_of(name, measured, ceilings)
    seen, nothing = {name: measured}, {"times": {}, "counts": {}}
    kept = nothing | ({"times": seen, "ceilings": {name: ceilings}} if ceilings else {"counts": seen})
    book = kept_measurement()
    others = [book] if ceilings and name in book["times"] and machine_of(name, book) != device.name else []
    rows = [("rung", "error", "us", "TFLOP/s" if topic.flops else "GB/s", "ceiling", "sectors", "conflicts")]
    rows[0] += (f"us, {short(machine_of(name, book))}", "ceiling") if others else ()
    for error, (title, _, *figures) in zip(errors, rows_of(name, kept, others), strict=True):
        rows.append((title, error, *figures))
    shown = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    print(*columns([tuple(row[i] for i in shown) for row in rows], left=1), "", sep="\n")
    for kernel, figures in measured.items():
        if figures.get("differ"):
            print(f"  {kernel}: {figures['differ']} of 9 repetitions have other bits than the first run\n")
    print(*(f"  race: {line}" for line in races), sep="\n", end="\n" if races else "", flush=True)
    return measured, races


def sizes_from(text: str, wanted: dict[str, int]) -> dict[str, int]:
    """The sizes that --sizes gives: as many, and of the same names, as the topic has."""
    found = dict(re.findall(r"(\w+)=([1-9]\d*)(?:,|$)", text))
    if text != ",".join(f"{name}={size}" for name, size in found.items()) or found.keys() != wanted.keys():
        raise UserError(f"--sizes {text}: give the topic's sizes, as in {text_of(wanted).replace(' ', '')}")
    return {name: int(found[name]) for name in wanted}


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("topic", nargs="?", help="one of " + ", ".join(TOPICS))
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: CUDA where it works")
    parser.add_argument("--keep", action="store_true", help="keep the figures in doc/ladder/, in the file of this GPU")
    parser.add_argument("--sizes", help="time one topic at these sizes, for example M=4096,N=3072,K=768")
    parser.add_argument("--write", action="store_true", help="only fill the tables of doc/*.md, from measured.json")
    args = parser.parse_args()
    if args.topic and args.topic not in TOPICS:
        raise UserError(f"{args.topic}: not a topic; there are {', '.join(TOPICS)}")
    if args.write:
        if args.topic or args.keep or args.sizes:
            raise UserError("--write takes nothing else: it fills all tables from what was kept")
        write_tables()
        return
    if args.sizes:
        if args.keep or not args.topic:
            raise UserError("--sizes goes with one topic and without --keep: the book has the sizes of doc/rungs.py")
        TOPICS[args.topic].bench = sizes_from(args.sizes, TOPICS[args.topic].bench)
    ceilings, counting = {}, device.use(args.device) == "cpu"
    if counting:
        try:
            use_microscope()
        except UserError as error:
            if args.keep:
                raise
            print(f"no counts: {error}")
            counting = False
    else:
        ceilings, description = find_ceilings()
        print(f"{device.name}, {description}\n", flush=True)
    races, paths = [], {}
    for name in [args.topic] if args.topic else TOPICS:
        with precision_of(name):
            measured, found = climb(name, ceilings, counting)
        races += found
        if args.keep:
            paths[keep(name, measured, ceilings_of(name, measured, ceilings))] = None
    for path in paths:
        print(f"written: doc/ladder/{path.name}")
    if races:
        sys.exit(1)


if __name__ == "__main__":
    run_program(main, out_of_memory="the arrays of this topic need a larger GPU; name other topics one by one")

"""Climbs a layer's ladder: kernels from the naive one to the one that trains, each with one idea more.

    python doc/ladder.py layernorm_forward      # one topic; without one, all of them
    python doc/ladder.py --keep                 # all, and keeps what was measured in doc/ladder/measured.json
    python doc/ladder.py --write                # fills the tables of doc/*.md from there

The rungs of a topic are the kernels of doc/ladder/<topic>.cu and, last, the launcher of kernels/ itself (doc/rungs.py).
Each is first compared with NumPy in float64, its outputs poisoned with NaNs, at odd sizes and at round ones. (Topics
whose name ends in _bf16 have arrays of that type, and are given numbers that it holds exactly.) Then

- on a GPU it is timed at the shapes of GPT-2 124M with B=4 and T=1024, on several sets of arrays in turn so that none
  is still in L2, and compared with what the same GPU does at best: a large copy, a large matrix product in TF32 or in
  bf16;
- on a CPU the microscope counts what it asks of a GPU's memory (dev/microscope.py): the bytes of the 32-byte sectors
  that its accesses touch, for each byte that the topic has to move; and in shared memory the passes of an access for
  each that it needs, at worst and on average. Times of a CPU would teach nothing about a GPU, and there are none.
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
from dev.ceilings import measure_ceilings
from dev.ceilings import seconds as best_seconds
from dev.microscope import columns, lines_of, race_lines
from dev.watch import FILES, SECTOR, Watched, use_microscope, watch_kernel
from device.errors import UserError
from doc.rungs import TOPICS, Rung, Topic
from kernels.reduce import MOST_PARTIALS
from llmc.arguments import Parser
from llmc.files import replacing
from llmc.program import run_program

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
    """Within the block the device computes in bf16 if the topic does, and else as before."""
    before = device.precision
    device.use_precision("bf16" if TOPICS[name].bf16 else before)
    try:
        yield
    finally:
        device.use_precision(before)


def shapes_of(text: str, size: SimpleNamespace) -> dict[str, tuple[int, ...]]:
    pairs = [word.split("=") for word in text.split()]
    return {name: tuple(int(eval(part, {"P": MOST_PARTIALS}, vars(size))) for part in shape.split(","))
            for name, shape in pairs}  # fmt: skip


def host_arrays(topic: Topic, sizes: dict[str, int]) -> tuple[dict, dict, dict]:
    """What a rung reads, what it updates and what it sets: NumPy arrays by their names, random numbers or NaNs. Those
    in bf16 are of their bits (device/bf16.py)."""
    size, rng = SimpleNamespace(**sizes), np.random.default_rng(1)

    def random(shape: tuple) -> np.ndarray:
        return np.resize(rng.standard_normal(min(int(np.prod(shape)), 1 << 22), np.float32), shape)

    reads = {name: random(shape) for name, shape in shapes_of(topic.reads, size).items()}
    adds = {name: random(shape) for name, shape in shapes_of(topic.adds, size).items()}
    others = topic.others(size, reads | adds)
    reads |= {name: array for name, array in others.items() if name not in adds}
    adds |= {name: array for name, array in others.items() if name in adds}
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
    return topic.reference(SimpleNamespace(**sizes, **exact))


def place_arrays(topic: Topic, sizes: dict[str, int], place: Callable[[str, np.ndarray], object]) -> SimpleNamespace:
    """The sizes and device arrays that a rung is given; place(how, values) puts an array on the device, where how is
    "read", "update", "write" or "scratch"."""
    reads, adds, sets = host_arrays(topic, sizes)
    shapes = shapes_of(topic.scratch, SimpleNamespace(**sizes))
    scratch = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    kinds = ("read", reads), ("update", adds), ("write", sets), ("scratch", scratch)
    return SimpleNamespace(**sizes, **{k: place(how, x) for how, named in kinds for k, x in named.items()})


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


def product_in_bf16() -> float:
    """FLOP/s of a large square matrix product in bf16."""
    topic, sizes = TOPICS["matmul_bf16"], dict.fromkeys("MNK", 8192)
    arrays = place_arrays(topic, sizes, on_device)
    return topic.flops(arrays) / best_seconds(lambda: device.gemm(arrays.c, arrays.a, arrays.b, *sizes.values()))


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
    text = (LADDER / f"{name}.cu").read_text()
    comment = re.search(rf'((?:^//.*\n)+)extern "C" __global__[^(]*(?:\([\d, ]*\))?\s+{rung.kernel}\(', text, re.M)
    words = " ".join(re.sub(r"^// ?", "", comment[1], flags=re.M).split())
    title, idea = words.split(": ", 1)
    idea = re.split(r"(?<=[a-z0-9)])\. ", idea + " ")[0].strip().rstrip(".")
    return title, idea[0].upper() + idea[1:] + "."


def rate_of(topic: Topic, microseconds: float, kept: dict) -> tuple[str, str]:
    """GB/s or TFLOP/s, and the share of what the machine does at best."""
    size = SimpleNamespace(**topic.bench)
    work, unit, most = topic.bytes(size), 1e9, kept["copy"]
    if topic.flops:
        work, unit, most = topic.flops(size), 1e12, kept["product in bf16" if topic.bf16 else "product"]
    rate = work / (microseconds * 1e-6)
    return three_digits(rate / unit), f"{rate / most:.0%}" if rate / most > 0.095 else f"{rate / most:.1%}"


def three_digits(x: float) -> str:
    return f"{x:,.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}"


def kept_measurement() -> dict:
    if not MEASURED.exists():
        return {"times": {}, "counts": {}}
    return json.loads(MEASURED.read_text())


def rows_of(name: str, kept: dict) -> Iterator[tuple[str, ...]]:
    """The table of a topic, without its head."""
    topic = TOPICS[name]
    times, counted = kept["times"].get(name, {}), kept["counts"].get(name, {})
    for rung in topic.rungs:
        title, idea = title_and_idea(name, rung)
        timed, counted_here = times.get(rung.kernel), counted.get(rung.kernel, {})
        if timed and timed.get("differ"):
            idea += f" {timed['differ']} of 9 repetitions have other bits than the first run."
        microseconds, rate, share = "", "", ""
        if timed:
            microseconds = three_digits(timed["microseconds"])
            rate, share = rate_of(topic, timed["microseconds"], kept)
        sectors = f"{counted_here['sectors']:.2f}" if "sectors" in counted_here else ""
        conflicts = f"{counted_here['worst']:.2g} / {counted_here['mean']:.2f}" if "worst" in counted_here else ""
        yield title, idea, microseconds, rate, share, sectors, conflicts


def table(name: str, kept: dict) -> str:
    """A topic's table for a page, in Markdown, with what its columns are."""
    topic = TOPICS[name]
    product, type_of_product = ("product in bf16", "bf16") if topic.bf16 else ("product", "TF32")
    unit, ceiling = ("TFLOP/s", f"{type_of_product} product") if topic.flops else ("GB/s", "copy")
    lines = [
        f"| rung | the idea that it adds | µs | {unit} | of the {ceiling} | sectors | conflicts |",
        "|---|---|--:|--:|--:|--:|--:|",
        *("| " + " | ".join(cells) + " |" for cells in rows_of(name, kept)),
    ]
    caption = f"`python doc/ladder.py {name}`. "
    if name in kept["times"]:
        best = f"a copy of 1 GiB, {kept['copy'] / 1e9:.0f} GB/s"
        if topic.flops:
            best = f"a product of 8192 x 8192 matrices in {type_of_product}, {kept[product] / 1e12:.0f} TFLOP/s"
        caption += f"Times: {kept['machine']}, {text_of(topic.bench)}; the ceiling: {best}, in the same run. "
    caption += (
        f"Counts: the microscope, {text_of(topic.round)}. Sectors: bytes of the sectors that accesses touch, for each "
        "byte that has to move (a cache serves some). Conflicts: passes of an access to shared memory for each that it "
        "needs, worst / mean."
    )
    return "\n".join([*lines, "", caption])


BEGIN, END = "<!-- ladder: {} -->", "<!-- end of ladder -->"


def with_tables(page: str, kept: dict) -> str:
    """A page's text with each table between its markers, nothing between those of a topic that has not been timed;
    UserError for a topic that there is not."""

    def fill(match: re.Match) -> str:
        if match[1] not in TOPICS:
            raise UserError(f"ladder: {match[1]}: not a topic; there are {', '.join(TOPICS)}")
        rows = f"{table(match[1], kept)}\n" if match[1] in kept["times"] else ""
        return f"{BEGIN.format(match[1])}\n{rows}{END}"

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
    wanted = [references(topic, sizes) for sizes in (topic.odd, topic.fours, topic.round)]
    kept = {"times": {}, "counts": {}}
    rows = [("rung", "error", "us", "TFLOP/s" if topic.flops else "GB/s", "ceiling", "sectors", "conflicts")]
    for rung in topic.rungs:
        sizes = sizes_for(topic, rung)
        error = max(check(name, rung, s, w) for s, w in zip(sizes, wanted[-len(sizes) :], strict=True))
        if ceilings:
            measured[rung.kernel] = {"microseconds": round(1e6 * seconds(name, rung), 2)}
            if not all(other.ordered for other in topic.rungs):
                measured[rung.kernel]["differ"] = repeats_that_differ(name, rung)
            kept |= {"times": {name: measured}} | ceilings
        if counting:
            measured[rung.kernel] = counts(name, rung)
            races += [line for one in watch_rung(name, rung, sizes[0]) for line in race_lines(one)]
            kept |= {"counts": {name: measured}}
        errors.append(error)
    for error, (title, _, *figures) in zip(errors, rows_of(name, kept), strict=True):
        rows.append((title, f"{error:.1e}", *figures))
    shown = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    at = f"times at {text_of(topic.bench)}" if ceilings else f"counts at {text_of(topic.round)}" if counting else ""
    print(f"{name}, doc/ladder/{name}.cu: {at or 'compared with NumPy'}")
    print(*columns([tuple(row[i] for i in shown) for row in rows], left=1), "", sep="\n")
    for kernel, figures in measured.items():
        if figures.get("differ"):
            print(f"  {kernel}: {figures['differ']} of 9 repetitions have other bits than the first run\n")
    print(*(f"  race: {line}" for line in races), sep="\n", end="\n" if races else "", flush=True)
    return measured, races


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("topic", nargs="?", help="one of " + ", ".join(TOPICS))
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: CUDA where it works")
    parser.add_argument("--keep", action="store_true", help="keep all topics' figures in doc/ladder/measured.json")
    parser.add_argument("--write", action="store_true", help="only fill the tables of doc/*.md from there")
    args = parser.parse_args()
    if args.topic and args.topic not in TOPICS:
        raise UserError(f"{args.topic}: not a topic; there are {', '.join(TOPICS)}")
    if args.topic and args.keep:
        raise UserError(f"{args.topic}: --keep measures all topics, since they share a machine and its ceilings")
    if args.write:
        write_tables()
        return
    ceilings, counting = {}, device.use(args.device) == "cpu"
    if counting:
        try:
            use_microscope()
        except UserError as error:
            print(f"no counts: {error}")
            counting = False
    else:
        if device.compute_capability < 80:
            raise UserError(f"{device.name} has no TF32, which the ladders use: run with --device cpu")
        measured = measure_ceilings()
        ceilings = {"copy": measured.copy, "product": measured.product, "product in bf16": product_in_bf16()}
        in_bf16 = f"in bf16 {ceilings['product in bf16'] / 1e12:.4g} TFLOP/s"
        print(f"{device.name}, {measured.description}, {in_bf16}\n")
    kept, races = kept_measurement(), []
    for name in [args.topic] if args.topic else TOPICS:
        with precision_of(name):
            measured, found = climb(name, ceilings, counting)
        races += found
        if args.keep and (ceilings or counting):
            kept["times" if ceilings else "counts"][name] = measured
    if args.keep:
        if ceilings:
            kept |= {"machine": device.name} | ceilings
        with replacing(MEASURED) as file:
            file.write((json.dumps(kept, indent=1) + "\n").encode())
        print(f"written: {MEASURED.relative_to(ROOT)}")
    if races:
        sys.exit(1)


if __name__ == "__main__":
    run_program(main)

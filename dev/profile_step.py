"""Takes a training step apart: each kernel's time beside what the machine can do.

    python dev/profile_step.py                            # GPT-2 124M at B4 T1024 on a GPU, B4 T64 on the CPU
    python dev/profile_step.py train_llama3 -b 2 -a softmax --out softmax.png

Rows are the kernels by their names, and matrix products as gemm m x n x k, with BLAS's letters for how the operands
lie: T is transposed. Bytes are counted from a kernel's arguments, each array read once and written once; FLOPs as
2 m n k, and for flash attention those of the causal half: 2 products forward, 3 in the kernel of dq, 4 in that of dk
and dv. For the products of matrix attention on the CPU they are those of the causal half, too. They are held against
the ceilings that dev/bench/ceilings.py measures: a large product, a large copy.

On CUDA a call's time is what passes between two events around it, while other work keeps the GPU busy so that the host
is ahead. A stream holds only some 1,000 launches and events before the host has to wait. So there is such work in front
of every GROUP calls. Events cost time themselves: what they add to a kernel that does nothing is taken off.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import math
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import device
from dev.bench.ceilings import Ceilings, measure_ceilings, product_seconds, random_array
from dev.bench.workload import LEARNING_RATE, Ours, Workload, make_parser, time_steps, workload_of, write_data
from dev.pictures import check_picture, save_picture
from dev.traffic import bytes_of, flops_of, kind_of
from llmc.run.arguments import a_path, positive
from llmc.run.program import run_program
from train_gpt2_fp32 import training_step

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

matplotlib.use("Agg")  # no display needed

GROUP = 200  # calls, each with two events


def label_of(kernel: str, arguments: dict) -> str:
    """The row that a call belongs to."""
    if not kernel.startswith("gemm"):
        return kind_of(kernel)
    a = SimpleNamespace(**arguments)
    letters = "".join("T" if transposed else "N" for transposed in (a.trans_a, a.trans_b))
    return f"gemm {a.m} x {a.n} x {a.k} {letters}" + (f" x{a.count}" if "count" in arguments else "")


@dataclass
class Row:
    """Device calls that are listed together. calls, bytes and flops are those of one step."""

    label: str
    calls: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: list[float] = field(default_factory=list)  # one per step
    spans: list = field(default_factory=list)           # events around each call of the current step

    def count(self, kernel: str, arguments: dict) -> None:
        """Adds what one call has to do."""
        self.calls += 1
        self.bytes += bytes_of(kernel, arguments)
        self.flops += flops_of(kernel, arguments)


def event_overhead() -> float:
    """Seconds that two events add to the time of the kernel between them. We launch a kernel that does nothing between
    two events, and subtract its time in a recorded step."""
    if device.kind == "cpu":
        return 0.0
    import cupy

    nothing = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    recorded = device.record(lambda: [nothing((1,), (32,), ()) for _ in range(200)])
    alone = []
    for _ in range(10):
        started = time.perf_counter()
        recorded()
        device.synchronize()
        alone.append((time.perf_counter() - started) / 200)
    keep_busy(0.02)()
    spans = []
    for _ in range(200):
        start = device.event()
        nothing((1,), (32,), ())
        spans.append((start, device.event()))
    return max(0.0, float(np.median([seconds_of(*span) for span in spans])) - min(alone))


def seconds_of(begin, end) -> float:
    """Seconds between two events."""
    return end.since(begin) / 1000


def keep_busy(seconds: float) -> Callable[[], None]:
    """Work that keeps the device busy for about so long, to be launched ahead of what is timed."""
    if device.kind == "cpu":
        return lambda: None
    n = 4096
    count = math.ceil(seconds / product_seconds(n, n, n))
    a, b, c = random_array(n * n), random_array(n * n), device.empty((n * n,))
    work = device.record(lambda: [device.gemm(c, a, b, n, n, n) for _ in range(count)])
    for _ in range(2):  # the second call records it; from then on it is replayed, and an observer does not see it
        work()
    device.synchronize()
    return work


def rows_of_steps(ours: Ours, steps: int) -> list[Row]:
    """The rows of some training steps, not recorded, each with its seconds in every step."""
    overhead, rows = event_overhead(), {}

    def row(kernel: str, arguments: dict) -> Row:
        label = label_of(kernel, arguments)
        return rows.setdefault(label, Row(label))

    def count(kernel: str, arguments: dict, work: Callable[[], None]) -> None:
        row(kernel, arguments).count(kernel, arguments)
        work()

    def take_time(kernel: str, arguments: dict, work: Callable[[], None]) -> None:
        spans, start = row(kernel, arguments).spans, device.event()
        work()
        spans.append((start, device.event()))

    device.use_recording(False)
    step_of = training_step(ours.training, ours.batches)
    with device.observe(count):
        step_of(0, LEARNING_RATE)
    device.synchronize()
    device.use_recording(True)
    with device.observe(take_time):
        started = time.perf_counter()
        step_of(1, LEARNING_RATE)
        launching = time.perf_counter() - started
    device.synchronize()
    for found in rows.values():
        found.spans.clear()
    busy = keep_busy(1.5 * launching * min(1, GROUP / sum(found.calls for found in rows.values())))
    given = 0  # calls of the step

    def take_time_behind_work(kernel: str, arguments: dict, work: Callable[[], None]) -> None:
        nonlocal given
        if given % GROUP == 0:
            busy()
        given += 1
        take_time(kernel, arguments, work)

    with device.observe(take_time_behind_work):
        for step in range(2, 2 + steps):
            given = 0
            step_of(step, LEARNING_RATE)
            device.synchronize()
            for found in rows.values():
                found.seconds.append(sum(max(0.0, seconds_of(*span) - overhead) for span in found.spans))
                found.spans.clear()
    if overhead:
        print(f"taken off each call for its events: {1e6 * overhead:.2f} us")
    return list(rows.values())


def cache_bytes() -> int:
    """The size of the last cache before memory: a GPU's L2, a CPU's L3. 0 where it is not known."""
    if device.kind == "cuda":
        from cupy.cuda import runtime

        return runtime.getDeviceProperties(runtime.getDevice())["l2CacheSize"]
    sizes = [path.read_text("utf-8") for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[1]) << 10 for text in sizes if (size := re.match(r"(\d+)K", text))), default=0)


@dataclass
class Line:
    """A row of the table, for one step. share and of_ceiling are fractions; of_ceiling is None where nothing is
    counted."""

    label: str
    calls: int
    microseconds: float  # of one call
    ms: float            # of all
    share: float
    amount: str
    achieved: str
    of_ceiling: float | None
    note: str


def lines_of(rows: list[Row], ceilings: Ceilings) -> list[Line]:
    """The table, longest first."""
    cache, cache_name = cache_bytes(), "L2" if device.kind == "cuda" else "L3"
    total = sum(float(np.median(row.seconds)) for row in rows)
    lines = []
    for row in rows:
        seconds = max(1e-9, float(np.median(row.seconds)))
        amount, achieved, of_ceiling, note = "-", "-", None, "not counted"
        if row.flops:
            rate = row.flops / seconds
            amount, achieved = f"{row.flops / row.calls / 1e9:.4g} GFLOP", f"{rate / 1e12:.4g} TFLOP/s"
            of_ceiling, note = rate / ceilings.product, ""
        elif row.bytes:
            size, rate = row.bytes / row.calls, row.bytes / seconds
            amount, achieved = f"{size / 1e6:.4g} MB", f"{rate / 1e9:.4g} GB/s"
            of_ceiling, note = rate / ceilings.copy, f"in {cache_name}" if size <= cache else ""
        lines.append(
            Line(
                row.label, row.calls, 1e6 * seconds / row.calls, 1e3 * seconds, seconds / total,
                amount, achieved, of_ceiling, note,
            )  # fmt: skip
        )
    return sorted(lines, key=lambda line: -line.ms)


COLUMNS = "{:48} {:>5} {:>11} {:>10} {:>6}  {:>13} {:>14} {:>10}  {}"


def print_lines(lines: list[Line], step_ms: float) -> None:
    print(COLUMNS.format("", "calls", "us per call", "ms per step", "share", "each", "achieved", "of ceiling", ""))
    for line in lines:
        of_ceiling = "-" if line.of_ceiling is None else f"{100 * line.of_ceiling:.0f}%"
        numbers = (line.calls, f"{line.microseconds:.1f}", f"{line.ms:.3f}", f"{100 * line.share:.1f}%")
        print(COLUMNS.format(line.label, *numbers, line.amount, line.achieved, of_ceiling, line.note).rstrip())
    print(f"{'sum':48} {'':17} {sum(line.ms for line in lines):10.3f}")
    how = "recorded and replayed" if device.kind == "cuda" else "with the batch and the losses"
    print(f"{f'a training step, {how}':48} {'':17} {step_ms:10.3f}", flush=True)


def draw(lines: list[Line], title: str, out: Path) -> None:
    """Bars of milliseconds, coloured by how near the ceiling they are. Raises UserError as `save_picture` does."""
    shown = [line for line in lines if line.share >= 0.005]
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.27 * len(shown)), layout="constrained")
    colours, scale = matplotlib.colormaps["RdYlGn"], matplotlib.colors.Normalize(0, 1)
    axes.barh(
        [line.label for line in shown], [line.ms for line in shown],
        color=["lightgrey" if line.of_ceiling is None else colours(scale(line.of_ceiling)) for line in shown],
    )  # fmt: skip
    for i, line in enumerate(shown):
        of_ceiling = "" if line.of_ceiling is None else f"{100 * line.of_ceiling:.0f}% "
        axes.text(line.ms, i, f" {of_ceiling}{line.note}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.01)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("milliseconds per training step")
    axes.set_title(title, fontsize=10)
    bar = figure.colorbar(matplotlib.cm.ScalarMappable(scale, colours), ax=axes, fraction=0.03)
    bar.set_label("of the measured ceiling (matrix product or copy)", fontsize=8)
    save_picture(figure, out)
    plt.close(figure)


def profile_step(workload: Workload, steps: int | None, out: Path) -> None:
    write_data(workload)
    ceilings = measure_ceilings()
    print(f"{device.name}\n{ceilings.description}", flush=True)
    ours = Ours(workload)
    step_ms, _ = time_steps(ours, steps)
    # A small model's step on a CPU takes milliseconds, and some take half as long again as others: a few tell nothing.
    lines = lines_of(rows_of_steps(ours, steps or min(100, max(3, int(5000 / step_ms)))), ceilings)
    how = f"{device.precision}, {ours.training.activations.attention} attention"
    title = f"{workload.model}, B {workload.B}, T {workload.T}, {how} on {device.name}: {step_ms:.2f} ms per step"
    print(f"\n{title}\n")
    print_lines(lines, step_ms)
    draw(lines, title, out)
    print(out)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("Time each kernel of a training step beside what the machine can do.")
    parser.add_argument("--steps", type=positive, metavar="N", help="steps to time (those of 5 s, 3 to 100)")
    parser.add_argument("--out", type=a_path, default=Path("profile.png"), metavar="PNG", help="picture (%(default)s)")
    args = parser.parse_args(arguments)
    check_picture(args.out)
    device.use(args.device)
    with tempfile.TemporaryDirectory() as directory:
        profile_step(workload_of(args, directory), args.steps, args.out)


if __name__ == "__main__":
    run_program(main)

"""Takes a training step apart: each kernel's time beside what the machine can do.

    python dev/profile.py                            # 124M at B4 T1024 on a GPU, B4 T64 on the CPU
    python dev/profile.py -b 16 -a softmax --out softmax.png

Rows are the launchers of kernels/ (the kernels among the products of attention by matrices and of linear layers by
their own names), and matrix products m x n x k. Bytes are counted from the launchers' arguments, each array read once
and written once, FLOPs as 2 m n k, and for flash attention those of the causal half. They are held against the ceilings
that dev/bench.py measures: a large product, a large copy.

On CUDA a call's time is what passes between two events around it, while earlier work keeps the GPU busy so that the
host is ahead. Events cost time themselves: what they add to a kernel that does nothing is taken off.
"""

import sys
from pathlib import Path

if not __package__:  # run as a program: this file would hide the standard library's profile, which others import
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import inspect
import math
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt

from llmc import device  # first: it sets what NumPy must find in the environment

import numpy as np  # isort: skip

import kernels.matmul
import train_gpt2_fp32
from dev.bench import (
    Ceilings,
    Ours,
    Workload,
    add_workload_arguments,
    measure_ceilings,
    random_array,
    time_steps,
    workload_of,
    write_data,
)
from llmc.arguments import Parser, positive
from llmc.errors import UserError
from llmc.files import replacing

# Floats that a launcher's kernels must move, from its arguments by name, its matrix products left out.
FLOATS = {
    "encoder_forward": lambda a: 2 * a.B * a.T * a.C + a.T * a.C + a.B * a.T,
    "encoder_backward": lambda a: a.B * a.T * a.C + 2 * a.T * a.C + 2 * distinct(a.count) * a.C,
    "layernorm_forward": lambda a: 2 * a.B * a.T * (a.C + 1),
    "fused_residual_forward": lambda a: a.B * a.T * (4 * a.C + 2),
    "layernorm_backward": lambda a: a.B * a.T * (4 * a.C + 2),
    "layernorm_transposed": lambda a: 2 * a.B * a.T * (a.C + 1),
    "gelu_forward": lambda a: 2 * a.N * a.C,
    "gelu_backward": lambda a: 4 * a.N * a.C,
    "fused_classifier": lambda a: 2 * a.B * a.T * a.Vp,
    "add_bias_kernel": lambda a: 2 * a.B * a.T * a.OC,
    "matmul_backward_bias": lambda a: a.B * a.T * a.OC,
    "transpose": lambda a: 2 * a.N * a.C,
    "adamw": lambda a: 7 * a.n,
    "global_norm": lambda a: a.n,
    "fill_zero": lambda a: a.array.size,
    # Attention by matrices. Of a causal matrix half is read, and all is written, zeros and all.
    "permute_kernel": lambda a: 6 * a.B * a.T * a.C,
    "permute_backward_kernel": lambda a: 6 * a.B * a.T * a.C,
    "unpermute_kernel": lambda a: 2 * a.B * a.T * a.C,
    "unpermute_backward_kernel": lambda a: 2 * a.B * a.T * a.C,
    "softmax_forward_kernel": lambda a: 1.5 * a.B * a.NH * a.T * a.T,
    "relu_forward_kernel": lambda a: 1.5 * a.B * a.NH * a.T * a.T,
    "softmax_backward_kernel": lambda a: 2 * a.B * a.NH * a.T * a.T,
    "relu_backward_kernel": lambda a: 2 * a.B * a.NH * a.T * a.T,
}

FLOPS = {  # of causal attention: two products forward, five backward, each of half a matrix
    "flash_attention_forward": lambda a: 2 * a.B * a.T * a.T * a.C,
    "flash_attention_backward": lambda a: 5 * a.B * a.T * a.T * a.C,
}


def distinct(count) -> int:
    """How many different tokens a batch has, from `count` of sort_by_token."""
    return int(np.count_nonzero(device.to_host(count)))


@dataclass
class Row:
    """Device calls that are listed together. calls, floats and flops are those of one step."""

    label: str
    calls: int = 0                                      # of the launcher, or of the product
    counted: int = -1                                   # the launcher's call that was counted last
    floats: float = 0.0
    flops: float = 0.0
    seconds: list[float] = field(default_factory=list)  # one a step
    spans: list = field(default_factory=list)           # marks around each device call of the step at hand


class Recorder:
    """Stands between the trainer and the device, and notes every device call with its time, by launcher.

    While installed, launchers of kernels/ know of the call they are in, and each kernel launch, product and memset is
    put between two marks. Calls, floats and FLOPs are counted while `counting`: for one step, and not for those that
    are timed, whose launches counting would delay.
    """

    def __init__(self):
        self.rows: dict[str, Row] = {}
        self.stack: list[tuple[str, inspect.BoundArguments, int]] = []
        self.launches, self.counting = 0, False
        self.saved: list[tuple[object, str, object]] = []
        self.cuda = device.kind() == "cuda"

    def replace(self, owner, name: str, value) -> None:
        self.saved.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, value)

    def __enter__(self) -> "Recorder":
        for name, function in list(vars(train_gpt2_fp32).items()):
            if inspect.isfunction(function) and function.__module__.startswith("kernels."):
                self.replace(train_gpt2_fp32, name, self.launcher(name, function))
        self.replace(kernels.matmul, "transpose", self.launcher("transpose", kernels.matmul.transpose))
        self.replace(device, "fill_zero", self.launcher("fill_zero", device.fill_zero))
        chosen = device._device
        load = chosen.kernel
        self.replace(chosen, "kernel", lambda path, name: self.kernel(name, load(path, name)))
        self.replace(chosen, "sgemm", self.product(chosen.sgemm))
        self.replace(chosen, "sgemm_strided_batched", self.product(chosen.sgemm_strided_batched))
        self.replace(chosen, "fill_zero", self.kernel("fill_zero", chosen.fill_zero))
        for source in device._sources:
            source._forget()
        return self

    def __exit__(self, *exception) -> None:
        for owner, name, value in reversed(self.saved):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        for source in device._sources:
            source._forget()

    def launcher(self, name: str, function: Callable) -> Callable:
        signature = inspect.signature(function)

        def call(*args, **kwargs):
            self.launches += 1
            self.stack.append((name, signature.bind(*args, **kwargs), self.launches))
            try:
                return function(*args, **kwargs)
            finally:
                self.stack.pop()

        return call

    def kernel(self, kernel_name: str, launch: Callable) -> Callable:
        def call(*args, **kwargs):
            if not self.stack:
                return launch(*args, **kwargs)
            launcher, bound, number = self.stack[-1]
            label = kernel_name if kernel_name in FLOATS else launcher
            row = self.row(label)
            if self.counting and row.counted != number:
                a = SimpleNamespace(**bound.arguments)
                row.calls += 1
                row.counted = number
                row.floats += FLOATS[label](a) if label in FLOATS else 0.0
                row.flops += FLOPS[label](a) if label in FLOPS else 0.0
            self.time(row, launch, args, kwargs)

        return call

    def product(self, multiply: Callable) -> Callable:
        signature = inspect.signature(multiply)

        def call(*args, **kwargs):
            if not self.stack:
                return multiply(*args, **kwargs)
            a = SimpleNamespace(**signature.bind(*args, **kwargs).arguments)
            count = getattr(a, "count", 1)
            times = f" x{count}" if count > 1 else ""
            row = self.row(f"{self.stack[-1][0]} {a.m} x {a.n} x {a.k}{times}")
            if self.counting:
                row.flops += 2.0 * a.m * a.n * a.k * count
                row.calls += 1
            self.time(row, multiply, args, kwargs)

        return call

    def row(self, label: str) -> Row:
        return self.rows.setdefault(label, Row(label))

    def time(self, row: Row, work: Callable, args: tuple, kwargs: dict) -> None:
        start = self.mark()
        work(*args, **kwargs)
        row.spans.append((start, self.mark()))

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = device._device.cupy.cuda.Event()
        event.record(device._device.stream)
        return event

    def end_step(self, overhead: float) -> None:
        """Turns the marks of a finished step into seconds, less the overhead of each pair."""
        device.synchronize()
        for row in self.rows.values():
            row.seconds.append(sum(max(0.0, self.between(*span) - overhead) for span in row.spans))
            row.spans.clear()

    def between(self, start, end) -> float:
        return device._device.cupy.cuda.get_elapsed_time(start, end) / 1000 if self.cuda else end - start


def event_overhead() -> float:
    """Seconds that two events around a kernel that does nothing measure beyond what it takes in a recorded step."""
    if device.kind() == "cpu":
        return 0.0
    cupy, stream = device._device.cupy, device._device.stream
    nothing = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    recorded = device.record(lambda: [nothing((1,), (32,), ()) for _ in range(200)])
    alone = []
    for _ in range(10):
        started = time.perf_counter()
        recorded()
        device.synchronize()
        alone.append((time.perf_counter() - started) / 200)
    busy = keep_busy(0.02)
    busy()
    events = [cupy.cuda.Event() for _ in range(401)]
    events[0].record(stream)
    for before in range(0, 400, 2):
        events[before].record(stream)
        nothing((1,), (32,), ())
        events[before + 1].record(stream)
    device.synchronize()
    between = [cupy.cuda.get_elapsed_time(events[i], events[i + 1]) / 1000 for i in range(0, 400, 2)]
    return max(0.0, float(np.median(between)) - min(alone))


def keep_busy(seconds: float) -> Callable[[], None]:
    """Work that keeps the device busy for about so long, to be launched ahead of what is timed."""
    n = 4096
    a, b, c = random_array(n * n), random_array(n * n), device.empty((n * n,))
    multiply = device._device.sgemm
    multiply(c, a, b, n, n, n, False, True, 0.0)
    device.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        multiply(c, a, b, n, n, n, False, True, 0.0)
    device.synchronize()
    count = math.ceil(seconds * 10 / (time.perf_counter() - started))

    def work() -> None:
        for _ in range(count):
            multiply(c, a, b, n, n, n, False, True, 0.0)

    return work


def cache_bytes() -> int:
    """The size of the last cache before memory: a GPU's L2, a CPU's L3. 0 where it is not known."""
    if device.kind() == "cuda":
        return device._device.properties["l2CacheSize"]
    sizes = [path.read_text() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
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
    cache, cache_name = cache_bytes(), "L2" if device.kind() == "cuda" else "L3"
    total = sum(float(np.median(row.seconds)) for row in rows)
    lines = []
    for row in rows:
        seconds = max(1e-9, float(np.median(row.seconds)))
        amount, achieved, of_ceiling, note = "-", "-", None, "not counted"
        if row.flops:
            rate = row.flops / seconds
            amount, achieved = f"{row.flops / row.calls / 1e9:.4g} GFLOP", f"{rate / 1e12:.4g} TFLOP/s"
            of_ceiling, note = rate / ceilings.product, ""
        elif row.floats:
            size, rate = 4 * row.floats / row.calls, 4 * row.floats / seconds
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
    print(COLUMNS.format("", "calls", "us a call", "ms a step", "share", "each", "achieved", "of ceiling", ""))
    for line in lines:
        of_ceiling = "-" if line.of_ceiling is None else f"{100 * line.of_ceiling:.0f}%"
        numbers = (line.calls, f"{line.microseconds:.1f}", f"{line.ms:.3f}", f"{100 * line.share:.1f}%")
        print(COLUMNS.format(line.label, *numbers, line.amount, line.achieved, of_ceiling, line.note).rstrip())
    print(f"{'sum':48} {'':17} {sum(line.ms for line in lines):10.3f}")
    how = "recorded and replayed" if device.kind() == "cuda" else "with the batch and the losses"
    print(f"{f'a training step, {how}':48} {'':17} {step_ms:10.3f}", flush=True)


def draw(lines: list[Line], title: str, out: Path) -> None:
    """Bars of milliseconds, coloured by how near the ceiling they are. Raises UserError where `out` is not writable."""
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
    axes.set_xlabel("milliseconds a training step")
    axes.set_title(title, fontsize=10)
    bar = figure.colorbar(matplotlib.cm.ScalarMappable(scale, colours), ax=axes, fraction=0.03)
    bar.set_label("of the measured ceiling (matrix product or copy)", fontsize=8)
    with replacing(out) as file:
        figure.savefig(file, format="png", dpi=150)
    plt.close(figure)


def record_steps(ours: Ours, steps: int) -> list[Row]:
    """The rows of some eager training steps, each with its seconds in every step."""
    overhead = event_overhead()
    with Recorder() as recorder:
        ours.forward_backward()  # loads the kernels
        ours.update(0)
        device.synchronize()
        recorder.counting = True
        started = time.perf_counter()
        ours.forward_backward()
        ours.update(0)
        launching = time.perf_counter() - started
        device.synchronize()
        recorder.counting = False
        for row in recorder.rows.values():
            row.spans.clear()
        busy = keep_busy(1.5 * launching) if device.kind() == "cuda" else lambda: None
        for step in range(steps):
            busy()
            ours.forward_backward()
            ours.update(step)
            recorder.end_step(overhead)
    if overhead:
        print(f"taken off each call for its events: {1e6 * overhead:.2f} us")
    return list(recorder.rows.values())


def profile(workload: Workload, steps: int, out: Path) -> None:
    write_data(workload.data, workload.B, workload.T, workload.V)
    ceilings = measure_ceilings()
    print(f"{device.name()}\n{ceilings.description}", flush=True)
    ours = Ours(workload)
    step_ms, _ = time_steps(ours, max(5, steps) if device.kind() == "cuda" else steps)
    rows = record_steps(ours, steps)
    lines = lines_of(rows, ceilings)
    attention = f"{ours.model.attention} attention"
    title = f"{workload.model}, B {workload.B}, T {workload.T}, {attention} on {device.name()}: {step_ms:.2f} ms a step"
    print(f"\n{title}\n")
    print_lines(lines, step_ms)
    draw(lines, title, out)
    print(out)


def main() -> None:
    parser = Parser(
        description="Time each kernel of a training step beside what the machine can do.",
        epilog="Flags not listed here go to train_gpt2_fp32.py.",
        allow_abbrev=False,
    )
    add_workload_arguments(parser)
    parser.add_argument("--steps", type=positive, metavar="N", help="steps to time (10; on the CPU 3)")
    parser.add_argument("--out", type=Path, default=Path("profile.png"), metavar="PNG", help="picture (%(default)s)")
    args, rest = parser.parse_known_args()
    if args.out.suffix.lower() != ".png":
        raise UserError(f"--out {args.out}: the picture is a PNG; give it the suffix .png")
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: there is no directory {args.out.parent}")
    device.use(args.device)
    with tempfile.TemporaryDirectory() as directory:
        profile(workload_of(args, rest, directory), args.steps or (10 if device.kind() == "cuda" else 3), args.out)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except MemoryError as error:
        sys.exit(f"error: out of memory ({error}): lower -b or -t")

"""What a run tells the person who watches it, and how that person stops it."""

import re
import signal

from llmc import device

# Dense TF32 peaks in TFLOP/s, from NVIDIA's datasheets, by words of the device's name. The first match counts.
TF32_PEAKS = (
    ("B200", 1125.0), ("H200", 494.5), ("GH200", 494.5), ("H100 PCIe", 378.0), ("H100 NVL", 417.5), ("H100", 494.5),
    ("A100", 156.0), ("L40S", 183.0), ("L40", 90.5), ("L4", 60.0), ("A40", 74.8), ("A10", 62.5), ("RTX 4090", 82.6),
    ("RTX 3090", 35.6),
)  # fmt: skip


def tf32_peak() -> float | None:
    """The GPU's TF32 ceiling in FLOP/s, or None where it is not known or TF32 is off."""
    if not device.tf32():
        return None
    return next((1e12 * peak for part, peak in TF32_PEAKS if re.search(rf"\b{part}\b", device.name())), None)


def print_table(sections: list[list[tuple[str, object]]]) -> None:
    """llm.c's start-up table: sections of (parameter, value)."""
    rule = "+-----------------------+----------------------------------------------------+"
    row = "| {:<21} | {:<50} |"
    print(rule)
    print(row.format("Parameter", "Value"))
    print(rule)
    for section in sections:
        for parameter, value in section:
            print(row.format(parameter, str(value)))
        print(rule, flush=True)


class StepTimer:
    """How long steps take when the next is launched while the device works on the one before: a step lasts from its own
    launch, or from the end of the one before where that was later, to its end."""

    def __init__(self):
        self.milliseconds = []
        self.last_end = 0.0

    def add(self, started: float, end: float) -> float:
        """Notes a step that was launched and ended at these times (time.perf_counter) and returns its milliseconds."""
        self.milliseconds.append(1000 * (end - max(started, self.last_end)))
        self.last_end = end
        return self.milliseconds[-1]

    def average(self, last: int = 0) -> float:
        """The average of all steps, or of the `last` ones; the first, which also compiles, counts only while alone."""
        timed = self.milliseconds[1:][-last:] or self.milliseconds or [0.0]
        return sum(timed) / len(timed)


def print_step(
    step: int, steps: int, loss: float, norm: float | None, learning_rate: float, ms: float, average_ms: float,
    tokens: int, flops: float,
) -> None:  # fmt: skip
    """One line for a finished step, counted from 1. norm: of the gradients, where it was computed; average_ms: a step's
    recent average, for the time left; tokens and flops: of a step."""
    parts = [f"step {step:4}/{steps}: train loss {loss:.6f} ({ms:.2f} ms, {1000 * tokens / ms:.0f} tok/s)"]
    if norm is not None:
        parts.append(f"norm {norm:.4f}")
    parts.append(f"lr {learning_rate:.2e}")
    peak = tf32_peak()
    if peak:
        parts.append(f"{100 * flops / (ms / 1000) / peak:.1f}% of TF32 peak")
    parts.append(f"{duration(average_ms / 1000 * (steps - step))} left")
    print(", ".join(parts), flush=True)


def duration(seconds: float) -> str:
    """Such as 1h05m or 2m07s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


class StopRequest:
    """Ctrl-C and SIGTERM only ask a run to stop, at the end of its step; a second one stops it at once."""

    def __init__(self):
        self.name = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    @property
    def requested(self) -> bool:
        return self.name is not None

    def receive(self, number, frame) -> None:
        self.name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)

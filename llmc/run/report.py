"""What a run prints for its user, and how the user stops it."""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import device
from device.errors import UserError, escaped
from llmc.ranks import ranks
from llmc.run.program import Stdout

# Dense TF32 peaks in TFLOP/s with sums in fp32, from NVIDIA's datasheets and whitepapers, by the device's whole name
# without "NVIDIA ". A laptop's GPU, a slice of a GPU (MIG) and a virtual one have names of their own, and other peaks.
# Left out: names that stand for two GPUs (RTX 3050, RTX 3080), and Turing (RTX 20xx), which has neither TF32 nor bf16.
TF32_PEAKS = {
    # Data centre
    "GB300": 1250.0, "GB200": 1250.0, "B300 SXM6 AC": 1125.0, "B200": 1125.0,
    "GH200 480GB": 494.5, "GH200 144G HBM3e": 494.5, "H200": 494.5, "H200 NVL": 417.5,
    "H100 80GB HBM3": 494.5, "H100 PCIe": 378.0, "H100 NVL": 417.5,
    "A100-SXM4-40GB": 156.0, "A100-SXM4-80GB": 156.0, "A100-PCIE-40GB": 156.0, "A100 80GB PCIe": 156.0,
    "A800-SXM4-80GB": 156.0, "A800 80GB PCIe": 156.0,
    "A40": 74.8, "A30": 82.0, "A10": 62.5, "A2": 9.0, "L40S": 183.0, "L40": 90.5, "L4": 60.0,
    # GeForce for desktops
    "GeForce RTX 3060": 12.7, "GeForce RTX 3060 Ti": 16.2, "GeForce RTX 3070": 20.3, "GeForce RTX 3070 Ti": 21.7,
    "GeForce RTX 3080 Ti": 34.1, "GeForce RTX 3090": 35.6, "GeForce RTX 3090 Ti": 40.0,
    "GeForce RTX 4060": 15.1, "GeForce RTX 4060 Ti": 22.1, "GeForce RTX 4070": 29.1, "GeForce RTX 4070 SUPER": 35.5,
    "GeForce RTX 4070 Ti": 40.1, "GeForce RTX 4070 Ti SUPER": 44.1, "GeForce RTX 4080": 48.7,
    "GeForce RTX 4080 SUPER": 52.2, "GeForce RTX 4090": 82.6, "GeForce RTX 4090 D": 73.5,
    "GeForce RTX 5050": 13.2, "GeForce RTX 5060": 19.2, "GeForce RTX 5060 Ti": 23.7, "GeForce RTX 5070": 30.9,
    "GeForce RTX 5070 Ti": 43.9, "GeForce RTX 5080": 56.3, "GeForce RTX 5090": 104.8,
    # Workstations, whose tensor cores do not halve their rate for sums in fp32
    "RTX A2000": 16.0, "RTX A2000 12GB": 16.0, "RTX A4000": 38.3, "RTX A4500": 47.3, "RTX A5000": 55.6,
    "RTX A5500": 68.2, "RTX A6000": 77.4,
    "RTX 2000 Ada Generation": 24.0, "RTX 4000 SFF Ada Generation": 38.3, "RTX 4000 Ada Generation": 53.4,
    "RTX 4500 Ada Generation": 79.3, "RTX 5000 Ada Generation": 130.6, "RTX 5880 Ada Generation": 138.6,
    "RTX 6000 Ada Generation": 182.1,
    "RTX PRO 6000 Blackwell Workstation Edition": 251.9, "RTX PRO 6000 Blackwell Max-Q Workstation Edition": 219.5,
}  # fmt: skip


def tensor_core_peak() -> float | None:
    """The GPU's ceiling in FLOP/s for products in TF32, in bf16, where it is twice as high, or in fp8, where it is four
    times as high. None if it is not known, or if products are in fp32."""
    factor = {"fp32": None, "tf32": 1e12, "bf16": 2e12, "fp8": 4e12}[device.precision]
    peak = TF32_PEAKS.get(device.name.removeprefix("NVIDIA "))
    return factor * peak if factor and peak else None


def percent_of_peak(flops: float, ms: float) -> float | None:
    """The share of the GPU's ceiling that so many operations in so many milliseconds reach: the model FLOPs
    utilisation, if they are `flops_per_token`'s. None as `tensor_core_peak`."""
    peak = tensor_core_peak()
    return 100 * flops / (ms / 1000) / peak if peak else None


def print_table(sections: list[list[tuple[str, object]]]) -> None:
    """llm.c's start-up table: sections of (parameter, value)."""
    rule = "+-----------------------+----------------------------------------------------+"
    row = "| {:<21} | {:<50} |"
    print(rule)
    print(row.format("Parameter", "Value"))
    print(rule)
    for section in sections:
        for parameter, value in section:
            print(row.format(parameter, escaped(value)))
        print(rule, flush=True)


class StepTimer:
    """How long steps take on average. The first step, which also compiles, counts only while there is no other."""

    def __init__(self):
        self.steps, self.total, self.last = 0, 0.0, deque(maxlen=20)

    def add(self, milliseconds: float) -> None:
        """Notes how long a step has taken."""
        if self.steps == 1:
            self.total = 0.0
            self.last.clear()
        self.steps, self.total = self.steps + 1, self.total + milliseconds
        self.last.append(milliseconds)

    def average(self) -> float:
        """The average of all steps."""
        return self.total / max(1, self.steps - 1)

    def recent_average(self) -> float:
        """The average of the last steps."""
        return sum(self.last) / max(1, len(self.last))


def print_step(
    step: int, steps: int, loss: float, norm: float | None, learning_rate: float, ms: float, average_ms: float,
    tokens_per_second: float, percent_of_peak: float | None,
) -> None:  # fmt: skip
    """Prints a line for a finished step, counted from 1. norm: of the gradients, if it was computed. average_ms: the
    recent average of a step, for the time left. percent_of_peak: the model FLOPs utilisation, if it is known."""
    parts = [f"step {step:4}/{steps}: train loss {loss:.6f} ({ms:.2f} ms, {tokens_per_second:.0f} tok/s)"]
    if norm is not None:
        parts.append(f"norm {norm:.4f}")
    parts.append(f"lr {learning_rate:.2e}")
    if percent_of_peak is not None:
        parts.append(f"MFU {percent_of_peak:.1f}% of {device.precision.replace('tf', 'TF')} peak")
    parts.append(f"{duration(average_ms / 1000 * (steps - step))} left")
    print(", ".join(parts), flush=True)


def print_validation(loss: float, bits_per_byte: float | None) -> None:
    """Prints a line for a validation, with bits per byte if they are known."""
    print(f"val loss {loss:.6f}" + ("" if bits_per_byte is None else f", {bits_per_byte:.4f} bits/byte"), flush=True)


def duration(seconds: float) -> str:
    """Such as 1h05m or 2m07s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


class StopRequest:
    """Ctrl-C, SIGTERM and SIGHUP ask a run to stop. It stops after the present step, batch or token. A second request
    stops it at once. But a terminal that is closed may send SIGHUP twice, and this is one request. Under nohup SIGHUP
    is no request. A scheduler and the process that started the ranks may both send a signal to a rank: signals within a
    second are one request, too."""

    def __init__(self, several: bool = False):
        self.number, self.signals, self.several, self.received = None, [signal.SIGINT, signal.SIGTERM], several, None
        self.heeded: int | None = None  # the step before which the run has stopped
        self.failure = ""  # why data could not be read, which stops a run, too
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self.signals.append(signal.SIGHUP)
        for number in self.signals:
            signal.signal(number, self.receive)

    @property
    def name(self) -> str:
        return "data that cannot be read" if self.failure else signal.Signals(self.number).name

    def requested(self) -> bool:
        return self.number is not None

    def told(self, failure: str) -> bool:
        """Whether any rank has been told to stop, or could not read its data. All ranks must ask alike. failure: of
        this rank's data."""
        of_ranks = ranks.all_gather(failure or self.number)
        r, heard = next(((r, heard) for r, heard in enumerate(of_ranks) if heard), (0, None))
        if heard is None:  # a signal that comes now counts next time
            return False
        if isinstance(heard, str):
            self.failure = f"rank {r} on {ranks.hosts()[r]}: {heard}" if ranks.size() > 1 else heard
        else:
            self.number = heard
        return True

    def receive(self, number, frame) -> None:
        if self.received is not None:  # only with several ranks
            if time.monotonic() - self.received > 1 and number != signal.SIGHUP:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.number, self.received = number, time.monotonic()
        for each in self.signals if not self.several else []:
            again = each == number == signal.SIGHUP
            signal.signal(each, signal.SIG_IGN if again else signal.SIG_DFL)


class Output(Stdout):
    """Replaces `stream`, to which a run prints, within a with block. If the reader has left or the disk is full, the
    run goes on, if its figures also go `elsewhere`. stderr then says so, once."""

    def __init__(self, stream, elsewhere: str):
        super().__init__(stream)
        self.elsewhere = elsewhere

    def __enter__(self) -> None:
        sys.stdout = self

    def __exit__(self, *exception) -> None:
        sys.stdout = self.stream

    def attempt(self, work: Callable[[], object]) -> None:
        if self.failure:
            return
        try:
            work()
        except OSError as error:
            if not self.elsewhere and isinstance(error, BrokenPipeError):
                raise
            self.failure, reason = error, (error.strerror or str(error)).lower()
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())  # the rest of its buffer goes there
            if not self.elsewhere:
                raise UserError(
                    f"cannot print ({reason}); with a log (-o), --tensorboard or checkpoints a run goes on"
                ) from None
            with suppress(OSError):
                print(f"cannot print any more ({reason}): the run goes on, see {self.elsewhere}", file=sys.stderr)

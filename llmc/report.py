"""What a run tells the person who watches it, and how that person stops it."""

import re
import signal
from argparse import Namespace
from pathlib import Path

from llmc import device
from llmc.checkpoint import GPT2Config, num_parameters
from llmc.dataloader import DataLoader

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


def flops_per_token(config: GPT2Config, T: int) -> float:
    """Forward and backward FLOPs a token: 6 for each weight and 6 L C T for causal attention, as llm.c counts them."""
    return 6.0 * num_parameters(config) + 6.0 * config.num_layers * config.channels * T


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


def run_table(
    args: Namespace, model, tokenizer_path: Path | None, train_loader: DataLoader, val_loader: DataLoader,
    val_batches: int, steps: int, first_step: int,
) -> list[list[tuple[str, object]]]:  # fmt: skip
    """The sections of the start-up table: every setting of the run, and what it found. model is the trainer's GPT2."""
    config, accumulation = model.config, (args.total_batch_size or args.B * args.T) // (args.B * args.T)
    return [
        [
            ("device", device.name()),
            ("matrix products", "TF32" if device.tf32() else "fp32"),
            ("attention", model.attention),
        ],
        [
            ("train data", args.data),
            ("val data", args.val_data),
            ("tokenizer", tokenizer_path or "none: samples are printed as numbers"),
            ("HellaSwag", args.hellaswag or "none"),
            ("log file", args.log or "none"),
            ("order", "as in the file" if args.shuffle_seed is None else f"shuffled by seed {args.shuffle_seed}"),
        ],
        [
            ("batch size B", args.B),
            ("sequence length T", args.T),
            ("batches a step", f"{accumulation}: {accumulation * args.B * args.T} tokens"),
            ("learning rate", f"{args.learning_rate:g}, {args.schedule}, {args.warmup} warm-up steps"),
            ("final fraction", args.final_fraction),
            ("weight decay", args.weight_decay),
            ("gradient norm", f"at most {args.grad_clip}" if args.grad_clip else "not clipped"),
            ("val every, batches", f"{args.val_every} steps, {val_batches}"),
            ("sample every, tokens", f"{args.sample_every} steps, {args.sample_tokens}"),
            ("checkpoints", f"{args.checkpoint_dir}, every {args.checkpoint_every} steps, keep {args.keep or 'all'}"
             if args.checkpoint_dir else "none"),
            ("seed", args.seed),
        ],
        [
            ("model", args.model if first_step == 0 else f"checkpoint of step {first_step}"),
            ("max sequence length", config.max_seq_len),
            ("vocabulary", f"{config.vocab_size}, padded to {config.padded_vocab_size}"),
            ("layers/heads/channels", f"{config.num_layers}, {config.num_heads}, {config.channels}"),
            ("parameters", num_parameters(config)),
        ],
        [
            ("train tokens", f"{train_loader.num_tokens} ({train_loader.num_batches} batches)"),
            ("val tokens", f"{val_loader.num_tokens} ({val_loader.num_batches} batches)"),
            ("steps", f"{steps}" if first_step == 0 else f"{first_step} to {steps}"),
        ],
        [(name, f"{megabytes} MiB") for name, megabytes in model.megabytes.items()]
        + [("in all", f"{sum(model.megabytes.values())} MiB")],
    ]  # fmt: skip


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
    tokens: int, config: GPT2Config, T: int,
) -> None:  # fmt: skip
    """One line for a finished step, counted from 1. norm: of the gradients, where it was computed; average_ms: a step's
    recent average, for the time left; tokens: of a step."""
    parts = [f"step {step:4}/{steps}: train loss {loss:.6f} ({ms:.2f} ms, {1000 * tokens / ms:.0f} tok/s)"]
    if norm is not None:
        parts.append(f"norm {norm:.4f}")
    parts.append(f"lr {learning_rate:.2e}")
    peak = tf32_peak()
    if peak:
        parts.append(f"{100 * tokens * flops_per_token(config, T) / (ms / 1000) / peak:.1f}% of TF32 peak")
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

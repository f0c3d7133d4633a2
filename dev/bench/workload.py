"""What the benchmarks time: a model script, a batch, weights from a seed, and made-up tokens to train on; and our
training step on it, beside those of other trainers. What asks something of a Model stands here."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import device
from dev.scripts import model_kinds
from device.errors import UserError
from llmc.data.batches import Batches
from llmc.data.dataloader import DataLoader
from llmc.data.token_file import write_tokens
from llmc.model.activations import choose_attention
from llmc.model.model import Model
from llmc.model.tensors import Config, name_tensors
from llmc.ranks import ranks
from llmc.run.arguments import Parser, add_device_arguments, natural, on_off, parse_arguments, positive
from llmc.run.settings import check_flags
from llmc.run.start import Origin, Text, build_training
from llmc.step.training import Training
from train_gpt2_fp32 import training_step

import numpy as np

SCRIPTS = {kind.Config.SCRIPT.removesuffix(".py"): kind for kind in model_kinds()}
LEARNING_RATE = 3e-4
SEED = 1337


@dataclass(frozen=True)
class Workload:
    """What every trainer is given: a kind of model and one of it (-e) with its sizes, a batch (B, T), how many batches
    a step has on each rank, and the prefix of token files. flags: further flags of the model script."""

    kind: type[Model]
    model: str
    config: Config
    B: int
    T: int
    batches: int
    data: str
    flags: tuple[str, ...]

    def __str__(self) -> str:
        """The flags of dev/bench that ask for it."""
        script, V = self.kind.Config.SCRIPT.removesuffix(".py"), self.config.vocab_size
        vocabulary = [] if V == describe(self.kind, self.model, None).vocab_size else ["--vocab-size", str(V)]
        return " ".join([script, "-e", self.model, "-b", str(self.B), "-t", str(self.T), *vocabulary, *self.flags])

    @property
    def step_tokens(self) -> int:
        """On this rank."""
        return self.batches * self.B * self.T

    def build(self) -> Training:
        """What trains our model, as the script makes it."""
        sizes = ["-e", self.model, "-b", str(self.B), "-t", str(self.T)]
        args = parse_arguments(self.kind.Config, [*sizes, "--seed", str(SEED), "--device", device.kind, *self.flags])
        check_flags(args)
        tokenizer = SimpleNamespace(vocab_size=self.config.vocab_size)
        return build_training(self.kind, args, Text(None, tokenizer), Origin(None, {}, None))[0]

    def loader(self) -> DataLoader:
        return DataLoader(self.data, "train", self.B, self.T, self.config.vocab_size)


def make_parser(description: str, trains: bool = True) -> argparse.ArgumentParser:
    """A parser with the flags that ask for a workload; with those of training alone where it trains."""
    parser = Parser(description=description, allow_abbrev=False)
    parser.last_counts = True  # as in the trainers
    add = parser.add_argument
    add("script", nargs="?", type=lambda text: Path(text).stem, choices=tuple(SCRIPTS), default="train_gpt2_fp32",
        help="the model script (%(default)s)")  # fmt: skip
    add("-e", "--model", metavar="MODEL", help="a model that the script can start from random weights")
    add("-b", "--batch-size", type=positive, default=4, metavar="B", help="sequences per batch (%(default)s)")
    add("-t", "--sequence-length", type=positive, metavar="T", help="tokens (1024; on the CPU 64)")
    add("-d", "--total-batch-size", type=positive, metavar="D", help="tokens per step, as -d (B T per rank)")
    add("--vocab-size", type=positive, metavar="V", help="tokens in the vocabulary (the model's)")
    if trains:
        add("--logit-rows", type=natural, metavar="N", help="positions with logits at a time (all if they fit)")
        add("-z", "--zero-stage", type=on_off, default=True, metavar="0|1", help="shard AdamW's moments (1)")
        add("--bitwise", type=on_off, default=False, metavar="0|1", help="the same bits on any number of GPUs (0)")
        add("--recompute", type=on_off, default=False, metavar="0|1", help="run each layer again in backward (0)")
        add("--offload", type=on_off, default=False, metavar="0|1", help="keep AdamW's state on the host (0)")
    else:
        parser.set_defaults(logit_rows=None, zero_stage=True, bitwise=False, recompute=False, offload=False)
    add_device_arguments(parser)
    return parser


def workload_of(args: argparse.Namespace, directory: str) -> Workload:
    """What the flags ask for, on the device in use. Raises UserError where they make no model."""
    kind = SCRIPTS[args.script]
    model = args.model or next(iter(kind.Config.PRESETS))
    config = describe(kind, model, args.vocab_size)
    T = args.sequence_length or (1024 if device.kind == "cuda" else 64)
    device.use_precision(args.precision)
    choose_attention(args.attention, config.head_size)  # refuses what the model cannot have
    of_ranks = ranks.size() * args.batch_size * T
    batches = (args.total_batch_size or of_ranks) // of_ranks
    return Workload(kind, model, config, args.batch_size, T, batches, f"{directory}/tokens", further_flags(args))


def further_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """The flags of how a model computes that are not the script's defaults."""
    flags = ["-a", args.attention] if args.attention != "auto" else []
    flags += ["--precision", args.precision] if args.precision != "tf32" else []
    flags += [] if args.logit_rows is None else ["--logit-rows", str(args.logit_rows)]
    flags += [] if args.zero_stage else ["-z", "0"]
    for name in ("bitwise", "recompute", "offload"):
        flags += [f"--{name}", "1"] if getattr(args, name) else []
    flags += ["-d", str(args.total_batch_size)] if args.total_batch_size else []
    return tuple(flags)


def describe(kind: type[Model], model: str, V: int | None) -> Config:
    """The sizes of a model, of vocabulary V, or where that is None its own."""
    config = kind.Config.described(model, V)
    if config is None:
        raise UserError(f"-e {model}: name one of {', '.join(kind.Config.PRESETS)}, or describe a model: its weights "
                        "are made here")  # fmt: skip
    return config


def tensors_of(model: Model, memory) -> SimpleNamespace:
    """Parameters by name, fp32 on the host, from memory that holds all of them."""
    config = model.config
    return name_tensors(device.to_floats(memory), config.PARAMETERS, config.sizes(), align=1, absent=config.absent)


# Our training step


class Ours:
    """The training step of the model script. Every trainer has launch(step), which returns the events of the step's
    begin and end. end.since(begin), in milliseconds, waits for the end; then loss(step) is known. count: how many
    batches a step has."""

    def __init__(self, workload: Workload):
        self.training, self.count = workload.build(), workload.batches
        self.name = f"llm.cupy ({' '.join((self.training.activations.attention, *workload.flags))})"
        self.batches = Batches(self.training.batch, self.training.acts.losses, workload.loader(), workload.batches)
        device.compile_all()
        self.train_step = training_step(self.training, self.batches)

    def launch(self, step: int):
        self.train_step(step, LEARNING_RATE)
        return self.batches.begin, device.event()

    def loss(self, step: int) -> float:
        return self.batches.mean_loss(step)


def time_steps(trainer, steps: int | None) -> tuple[float, float]:
    """The median milliseconds of a step after the first few, and the loss of the very first step. Without `steps`, as
    many are timed as take ten seconds, at least 5 and at most 100."""
    warm_up = 2 if device.kind == "cpu" or trainer.count > 1 else 10
    milliseconds, running, first_loss = [], None, None

    def finish() -> None:
        nonlocal first_loss
        if running is not None:
            step, begin, end = running
            milliseconds.append(end.since(begin))
            loss = trainer.loss(step)
            first_loss = loss if step == 0 else first_loss

    def enough() -> bool:
        timed = milliseconds[warm_up:]
        return len(timed) >= (steps or 100) or steps is None and len(timed) >= 5 and sum(timed) > 10_000

    step = 0
    while not enough():
        launched = step, *trainer.launch(step)
        finish()  # the step before, while the device works on this one
        running = launched
        step += 1
    device.synchronize()
    return float(np.median(milliseconds[warm_up:])), first_loss


# Tokens


def zipf_tokens(count: int, V: int) -> np.ndarray:
    """`count` tokens below V, of which the one of rank r comes with a probability proportional to 1 / (r + q)
    (Zipf-Mandelbrot), where q makes the most frequent one as frequent as in English text: 3.7%."""
    ranks = np.arange(1.0, V + 1)
    low, high = -1 + 1e-9, 1e9
    for _ in range(200):
        q = (low + high) / 2
        weights = 1 / (ranks + q)
        low, high = (q, high) if weights[0] / weights.sum() > 0.037 else (low, q)
    random = np.random.default_rng(SEED)
    drawn = np.searchsorted(np.cumsum(weights) / weights.sum(), random.random(count), side="right")
    return random.permutation(V)[np.minimum(drawn, V - 1)]


def write_data(workload: Workload) -> None:
    """A file of tokens for training, of at least 64 batches."""
    V = workload.config.vocab_size
    write_tokens(f"{workload.data}_train.bin", zipf_tokens(max(1 << 18, 64 * workload.B * workload.T) + 1, V), V)

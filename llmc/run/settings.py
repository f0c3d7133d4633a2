"""What a run does. The flags, a checkpoint, the data and the device decide this, once."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import device
from device.errors import UserError, escaped
from kernels.fp8.quantized import MULTIPLE
from llmc.files.record import MAX_STEPS
from llmc.model.model import Model
from llmc.model.tensors import Config
from llmc.ranks import ranks
from llmc.run.arguments import make_parser
from llmc.run.schedule import LearningRateSchedule

# The flags that a checkpoint records, beside the precision. A resumed run keeps those that it is not given. It refuses
# another value of a FIXED one, with one exception: flash attention and softmax may replace each other. beta1 and beta2
# are FIXED because AdamW corrects m and v as if all steps had had the same. The data MAY_CHANGE its place; its
# fingerprint shows whether it is the same data.
FIXED = (
    "attention", "dropout", "beta1", "beta2", "schedule", "warmup", "final_fraction", "batch_size", "sequence_length",
    "total_batch_size", "seed",
)  # fmt: skip
MAY_CHANGE = (
    "learning_rate", "weight_decay", "grad_clip", "eps", "skip_nonfinite", "max_steps", "data", "val_data",
    "raw_tokens", "zero_stage", "bitwise", "logit_rows", "recompute", "offload",
)  # fmt: skip

# What old checkpoints, which do not record these flags, were trained with.
OF_OLD_CHECKPOINTS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}

# Flags that need not be the same on all ranks. They name files that may lie in another place on each machine, or files
# that only rank 0 uses.
OF_A_RANK = ("data", "val_data", "model", "log", "hellaswag", "tensorboard", "gpus", "given", "repeated")

FIRST_SEED = 1337  # of weights and samples, unless a seed is given
DEFAULT_LENGTH = 1024  # of a sequence at most, unless -t is given: llm.c's


@dataclass(frozen=True)
class Settings:
    """Everything that is decided before the first step. Nothing changes it afterwards.

    flags: those of the command line, and in a resumed run those that its checkpoint has recorded. batches: how many
    this rank has in a step, of B sequences of T tokens each. step_tokens: how many tokens all ranks have in a step.
    first_step: the run begins with this step, counted from 0. steps: it ends before this step. seed: of weights,
    samples and dropout. shuffle_seed: of the data's order; None for the order of the file.
    """

    flags: Namespace
    B: int
    T: int
    batches: int
    step_tokens: int
    steps: int
    first_step: int
    val_batches: int
    seed: int
    shuffle_seed: int | None
    val_data: str
    schedule: LearningRateSchedule

    def learning_rate(self, step: int) -> float:
        return self.schedule.get_learning_rate(step)

    def validates(self, step: int) -> bool:
        """Whether the run validates before this step; it does so at the end, too. -v 0: never."""
        every = self.flags.val_every
        return every > 0 and (step == self.steps or step % every == 0)

    def reports(self, step: int) -> bool:
        """Whether a step is printed and logged; the first and the last always are."""
        return step in (self.first_step, self.steps - 1) or (step + 1) % self.flags.log_every == 0

    def samples(self, step: int) -> bool:
        """Whether the run samples before this step; it does so at the end, too. -s 0 or -g 0: never."""
        every = self.flags.sample_every
        if not every or not self.flags.sample_tokens:
            return False
        return step == self.steps or step > 0 and step % every == 0

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due before this step; one is due at the end, too."""
        every = self.flags.checkpoint_every
        return step == self.steps or every > 0 and step % every == 0

    def without_effect(self, raw: bool) -> list[str]:
        """A line for each flag that was given and does nothing, or not what it seems to. raw: whether a file of the
        data has no header."""
        flags, schedule, warmup = self.flags, self.schedule, self.flags.warmup
        rate = flags.learning_rate
        idle = [
            ("final_fraction", flags.schedule == "constant", "-q does nothing: -k constant does not decay"),
            ("zero_stage", ranks.size() == 1, "-z does nothing: there is one GPU"),
            ("val_data", not flags.val_every, "-j does nothing: -v 0 switches validation off"),
            ("val_max_batches", not flags.val_every, "-m does nothing: -v 0 switches validation off"),
            ("sample_tokens", flags.sample_tokens and not flags.sample_every, "-g does nothing: -s 0 samples never"),
            ("sample_every", flags.sample_every and not flags.sample_tokens, "-s does nothing: -g 0 samples no token"),
            ("raw_tokens", not raw, "--raw-tokens does nothing: each file of tokens says its own type"),
        ]
        lines = [f"{flag} stands behind another value of the same flag: the last counts" for flag in flags.repeated]
        lines += [line for name, does_nothing, line in idle if does_nothing and name in flags.given]
        if 0 < self.steps < warmup:
            last = schedule.get_learning_rate(self.steps - 1)
            lines.append(
                f"the run ends within its {warmup} warm-up steps (-u): the learning rate ends at {last:g}, not {rate:g}"
            )
        elif flags.schedule != "constant" and 0 < self.steps == warmup:
            lines.append("the warm-up (-u) takes the whole run, so the learning rate does not decay (-k)")
        elif flags.schedule == "wsd" and warmup > schedule.decay_start:
            after = schedule.get_learning_rate(warmup)
            lines.append(
                f"the warm-up (-u) ends at step {warmup}, after wsd's decay has begun at step {schedule.decay_start}: "
                f"the learning rate falls at once from {rate:g} to {after:g}"
            )
        return lines

    def recorded(self) -> dict[str, object]:
        """The flags that a checkpoint records, for `resumed_flags`."""
        return {name: getattr(self.flags, name) for name in FIXED + MAY_CHANGE} | {
            "max_steps": self.steps,
            "seed": self.shuffle_seed,
            "total_batch_size": self.step_tokens,
            "val_data": None if self.val_data == self.flags.data else self.val_data,
            "precision": self.flags.precision,
        }


def check_same_flags(flags: Namespace) -> None:
    """Raises UserError if another rank has other flags than rank 0."""
    given = {name: value for name, value in vars(flags).items() if name not in OF_A_RANK}
    for name, value in sorted(given.items()):
        ranks.check_same("--" + name.replace("_", "-"), value, "start all ranks with the same flags")


def recorded_flags(config: type[Config], recorded: dict[str, object], checkpoint: Path) -> dict[str, object]:
    """The flags that a checkpoint has recorded, as the command line's parser takes them, and the names of the model and
    the tokenizer. Leaves out other names. Raises UserError for a value that the parser refuses."""
    parser = make_parser(config)

    def refuse(why: str) -> NoReturn:
        raise UserError(f"{checkpoint / 'state.json'}: damaged: {why}; use another checkpoint")

    parser.error = refuse
    known = [name for name in (*FIXED, *MAY_CHANGE, "precision", "model", "tokenizer") if name in recorded]
    none = [name for name in known if recorded[name] is None]
    for name in known:
        optional = name in ("model", "tokenizer") or parser.get_default(name) is None
        if type(recorded[name]) not in (bool, int, float, str) and not (name in none and optional):
            refuse(f"{name} is {json.dumps(recorded[name])[:80]}")
    spelled = {name: recorded[name] for name in known if name not in none}
    tokenizer = {"tokenizer": str(spelled.pop("tokenizer"))} if "tokenizer" in spelled else {}
    words = [f"--{name.replace('_', '-')}={int(x) if type(x) is bool else x}" for name, x in spelled.items()]
    taken = parser.parse_args(words)
    return {name: getattr(taken, name) for name in spelled} | tokenizer | dict.fromkeys(none)


def resumed_flags(flags: Namespace, recorded: dict[str, object]) -> Namespace:
    """The flags of a resumed run. Flags that were not given get the values that its checkpoint has recorded. Prints
    which flags have changed. Raises UserError for a flag that must not change."""
    merged, recorded = dict(vars(flags)), OF_OLD_CHECKPOINTS | recorded
    for name, before in ((name, recorded[name]) for name in FIXED + MAY_CHANGE if name in recorded):
        now, flag = merged[name], "--" + name.replace("_", "-")
        if name not in flags.given or name == "attention" and now == "auto":
            merged[name] = before
        elif now == before:
            continue
        elif name == "attention" and "relu" not in (before, now):
            print(f"{flag} was {before} and is now {now}: the same function, rounded in another way")
        elif name in MAY_CHANGE:
            print(escaped(f"{flag} was {before} and is now {now}"))
        else:
            raise UserError(f"cannot resume: {flag} was {before} and is now {now}; leave it out, or start another run")
    return Namespace(**merged)


def check_flags(flags: Namespace) -> None:
    """Raises UserError for flags that contradict one another or the number of ranks."""
    N, rows = ranks.size(), flags.batch_size * flags.sequence_length
    if flags.total_batch_size and flags.total_batch_size % (N * rows):
        product = "B*T" if N == 1 else f"{N} ranks * B*T"
        raise UserError(
            f"-d {flags.total_batch_size} is not a multiple of {product} = {N * rows}: change -d, -b or -t"
        )
    if flags.precision == "fp8" and rows % MULTIPLE:
        raise UserError(
            f"--precision fp8 needs a multiple of {MULTIPLE} positions per batch, and B*T = {rows}: change -b or -t, "
            "or use --precision bf16"
        )
    if flags.attention == "flash" and "precision" in flags.given and flags.precision == "fp32":
        raise UserError("-a flash computes in TF32 or bf16: leave --precision fp32 out, or use -a softmax")


def check_model_flags(kind: type[Model], flags: Namespace, recorded: dict[str, object]) -> None:
    """Raises UserError for a flag that this kind of model does not have. recorded: the flags of the checkpoint."""
    if flags.dropout and not kind.DROPS:
        remedy = "start another run" if recorded.get("dropout") else "leave it out"
        name = kind.Config.NAME
        raise UserError(f"--dropout {flags.dropout:g}: {name} trains without dropout, as llm.c does; {remedy}")


def with_length(flags: Namespace, config: Config) -> Namespace:
    """The flags, and if they have no -t, the one that follows: the model's longest sequence, at most DEFAULT_LENGTH."""
    length = flags.sequence_length or min(DEFAULT_LENGTH, config.max_seq_len)
    return Namespace(**vars(flags) | {"sequence_length": length})


def check_length(flags: Namespace, config: Config) -> None:
    """Raises UserError if the sequences are too long for the model."""
    if flags.sequence_length > config.max_seq_len:
        raise UserError(
            f"-t {flags.sequence_length} is above the model's longest sequence, {config.max_seq_len}: lower -t"
        )


def choose_precision(flags: Namespace, before: str | None) -> Namespace:
    """Sets the device to the run's precision, and returns the flags with it. A resumed run keeps the precision that it
    had `before`, unless --precision is given. If the device lacks TF32, the run is in fp32. If a run's precision
    changes, a line says so; so does one, on stderr, if a run did not ask for the only precision that its GPU has tensor
    cores for. Raises UserError for fp16, bf16 or fp8 on a GPU that lacks it."""
    asked = flags.precision if before is None or "precision" in flags.given else before
    if asked == "fp32" and flags.attention == "flash" and "precision" not in flags.given:
        asked = "tf32"  # on every device flash attention is in TF32
    now = device.use_precision(asked)
    if before not in (None, now) and not (flags.attention == "flash" and {before, now} <= {"fp32", "tf32"}):
        why = f", which is what {device.name} has" if now != asked else ""
        print(f"the run was in {before} and goes on in {now}{why}")
    elif before is None and "precision" in flags.given and now != asked:
        print(f"{device.name} has no {asked}: the run is in {now}")
    elif before is None and "precision" not in flags.given and device.has_fp16_alone() and ranks.rank() == 0:
        print(f"{device.name} has no TF32; --precision fp16 multiplies on its tensor cores", file=sys.stderr)
    return Namespace(**vars(flags) | {"precision": now})


def make_settings(flags: Namespace, first_step: int, train_batches: int, val_batches: int) -> Settings:
    """The settings of a run, from its flags and the number of batches in its data. Raises UserError if the run would
    have no step, or fewer than it has already done."""
    B, T = flags.batch_size, flags.sequence_length
    step_tokens = flags.total_batch_size or ranks.size() * B * T
    steps = train_batches // (step_tokens // (B * T)) if flags.max_steps is None else flags.max_steps
    if steps == 0 and flags.max_steps is None:
        raise UserError(
            f"a step takes {step_tokens // (B * T)} batches (-d {step_tokens}), and {flags.data} has {train_batches}, "
            "so an epoch has no step: lower -d, or set the number of steps with -x"
        )
    if steps > MAX_STEPS:
        raise UserError(f"{steps} steps are more than the {MAX_STEPS} that a run may have: lower -x, or raise -d")
    if first_step > steps:
        raise UserError(
            f"the checkpoint in {flags.checkpoint_dir} has already done step {first_step}, and -x is {steps}: raise -x"
        )
    return Settings(
        flags, B, T, step_tokens // (ranks.size() * B * T), step_tokens, steps, first_step,
        min(val_batches, flags.val_max_batches), FIRST_SEED if flags.seed is None else flags.seed, flags.seed,
        flags.val_data or flags.data,
        LearningRateSchedule(flags.schedule, flags.learning_rate, flags.warmup, steps, flags.final_fraction),
    )  # fmt: skip

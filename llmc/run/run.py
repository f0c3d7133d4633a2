"""The life of a training run, whatever the model: what it starts from, and its parts."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import device
from device.errors import UserError
from llmc.data.batches import Batches
from llmc.data.dataloader import DataLoader
from llmc.data.evaluation import EvalLoader
from llmc.data.find_data import check_both_splits, find_token_files
from llmc.data.find_tokenizer import check_tokenizer, find_tokenizer, open_tokenizer, own_tokenizer
from llmc.data.tokenizer import Tokenizer
from llmc.files.checkpoint_dir import checkpoints, lock_checkpoints, newest_checkpoint, read_record
from llmc.model.activations import Cache, choose_attention
from llmc.model.adamw import Recipe
from llmc.model.model import Model
from llmc.model.model_file import conversion, read_model
from llmc.model.tensors import Config, num_parameters, padded
from llmc.model.weights import load_weights, randomize
from llmc.ranks import collectives, ranks
from llmc.run import program
from llmc.run.arguments import MUST_RESUME
from llmc.run.checkpoint import load_checkpoint, model_path
from llmc.run.report import StopRequest
from llmc.run.saver import Saver
from llmc.run.settings import (
    FIRST_SEED,
    Settings,
    check_flags,
    check_length,
    check_model_flags,
    recorded_flags,
    resumed_flags,
    settle,
    settle_precision,
)
from llmc.run.validation import Validation
from llmc.run.watch import Watch
from llmc.step.generation import Writer, print_sample
from llmc.step.sampler import Sampler
from llmc.step.training import Training, make_training


class Run:
    """A run as the flags ask for it. Its parts:

    settings     what was decided before the first step
    training     the model, what it trains with, and what several ranks exchange for it
    batches      the training data on its way to the model
    stop         whether the run is told to stop
    watch        what is printed and logged of the steps
    saver        checkpoints
    validation   the loss on validation data
    samples      the tokenizer and the random numbers of samples

    To make a Run compiles the kernels and prints the start-up table. Raises UserError for anything that is wrong with
    flags and files, before anything is written. Use it in a with block; the reader of the block's output may leave. The
    end of the block ends the run: with UserError if data could not be read, or if the last checkpoint, lines of the log
    or events for TensorBoard could not be written, and with SystemExit(128 + the signal's number) if the run was told
    to stop.
    """

    def __init__(self, kind: type[Model], args: Namespace):
        device.use(args.device, ranks.local_rank())
        # Lock first, then look: the run that has the directory may be writing its last checkpoint.
        lock = lock_checkpoints(args.checkpoint_dir) if args.checkpoint_dir and ranks.rank() == 0 else None
        origin, flags = find_origin(kind, args)
        text = find_text(kind, flags, origin.source)
        collectives.start()  # after the checks that fail soon: gloo takes two seconds to import
        self.training, flags, state = build_training(kind, flags, text.tokenizer, origin)
        model, batch, losses = self.training.model, self.training.batch, self.training.acts.losses
        if text.tokenizer and origin.source:
            check_tokenizer(text.path, text.tokenizer, origin.source, model.config.vocab_size)
        train_loader, val_loader, questions = open_data(flags, model.config.vocab_size, origin.checkpoint)
        first_step = state["step"] if state else 0
        self.settings = settle(flags, first_step, train_loader.num_tokens, val_loader.num_batches if val_loader else 0)
        if state:
            train_loader.load_state(state["loader"])
        if args.checkpoint_dir:
            ranks.of_rank_0(train_loader.identify)
        self.batches = Batches(batch, losses, train_loader, self.settings.batches)
        self.stop = StopRequest(several=ranks.size() > 1)
        self.validation = Validation(self.training, self.settings, val_loader, questions, text.tokenizer)
        self.samples = make_samples(self.training, self.settings, text.tokenizer, state)
        recorded = self.settings.recorded() | {"tokenizer": str(text.path) if text.path else None}
        recorded["model"] = flags.model if origin.checkpoint is None else origin.recorded.get("model")
        self.saver = Saver(self.training, self.settings, recorded, self.fingerprint(recorded, state), text.path, lock)
        self.saver.good = program.last_checkpoint = origin.checkpoint
        self.validation.lowest = self.saver.lowest_loss(self.validation.measure)
        self.watch = Watch(self.training, self.batches, self.settings, state.get("skipped", 0) if state else 0)
        self.watch.begin(run_table(self, text.path, origin.checkpoint))

    # What the loop of `train` calls, in the order in which it does

    def position(self) -> dict:
        """What a run needs, beside its parameters and moments, to continue from here."""
        return {"loader": self.batches.loader.state(), "sampler": self.samples.sampler.state}

    def save(self, step: int, position: dict) -> None:
        """Writes a checkpoint of the run as it was before `step`, at this position."""
        self.finish_steps(position)
        with ranks.long_work():
            self.saver.save(step, position, self.watch.guard)

    def validate(self, step: int) -> float | None:
        """Prints and logs the validation loss, and the score on HellaSwag if a flag asks for it. Returns the loss.
        Returns None if the run is told to stop before the end."""
        loss = None
        if not self.told_to_stop():
            self.finish_steps(self.position())
            loss = self.validation.run(step, self.training.exchange, self.watch.logs, self.told_to_stop)
        if loss is None:
            self.stop.heeded = step
        return loss

    def save_best(self, step: int, position: dict, loss: float | None) -> None:
        """With --best, if this validation loss is the lowest so far: writes a checkpoint of the run as it is before
        `step`, at this position. It replaces the best one so far."""
        if self.settings.flags.best and loss is not None and loss < self.validation.lowest:
            with ranks.long_work():
                self.validation.lowest = self.saver.save_best(
                    step, position, self.watch.guard, loss, self.validation.measure
                )

    def sample(self, step: int) -> None:
        """Prints and logs a sample, unless the run is told to stop."""
        if self.told_to_stop():
            return
        self.finish_steps(self.position())
        if ranks.rank() == 0:
            count, stopped, started = self.settings.flags.sample_tokens, self.stop.requested, time.perf_counter()
            with ranks.long_work():
                text = print_sample(self.samples.writer, self.samples.tokenizer, self.samples.sampler, count, stopped)
            self.watch.logs.log(step, sample_seconds=time.perf_counter() - started if count else None)
            self.watch.logs.tensorboard.log_sample(step, text)

    def told_to_stop(self) -> bool:
        """Whether any rank has been told to stop, or could not read its data. All ranks must ask alike."""
        return self.stop.told(self.batches.failure or self.validation.batches.failure)

    def report(self, step: int, position: dict) -> None:
        """Call it when the device has been given all of a step; it may still be working on it. Reports the step before.
        position: before this step."""
        self.watch.launched(step, position, self.saver)
        if device.kind == "cpu":
            self.watch.finish(self.saver, self.position())  # this step is over already

    def stop_before(self, step: int, position: dict) -> None:
        """Saves the run as it was before a step that is dropped, because the run is told to stop."""
        self.stop.heeded = step
        self.save(step, position)

    def finish_steps(self, position: dict) -> None:
        """Reports the step that the device works on, once it is over. Then gives every rank all parameters, because
        something may read them between steps. position: after that step."""
        self.watch.finish(self.saver, position)
        self.training.exchange.gather_parameters()

    # The life of the run

    def __enter__(self) -> Run:
        self.watch.logs.output.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.watch.finish(self.saver, self.position())
                self.watch.end(self.stop)
        finally:
            self.watch.logs.output.__exit__(kind, error, trace)
        if kind is None:
            self.finish()

    def finish(self) -> None:
        """Takes leave of the other ranks, and says what has been lost."""
        self.watch.logs.close()
        self.saver.release()
        speaks = ranks.rank() == 0  # for all ranks; after ranks.finish each process is by itself
        ranks.finish()
        self.saver.raise_what_is_unsaved(speaks)
        self.watch.logs.raise_what_is_lost()
        if self.stop.failure and speaks:
            raise UserError(f"{self.stop.failure}{program.resume_advice()}")
        if self.stop.failure:
            sys.exit(1)
        if self.stop.heeded is not None:
            sys.exit(128 + self.stop.number)

    def fingerprint(self, recorded: dict, state: dict | None) -> str:
        """Identifies this run, so that it leaves the checkpoints of other runs alone."""
        loader = self.batches.loader
        started = recorded | {"model": repr(self.training.model.config), "fingerprint": loader.fingerprint}
        own = hashlib.sha256(json.dumps(started, sort_keys=True).encode()).hexdigest()[:16]
        return state.get("run", own) if state else own


@dataclass
class Samples:
    """What samples are made with."""

    tokenizer: Tokenizer | None
    sampler: Sampler
    writer: Writer


@dataclass(frozen=True)
class Origin:
    """What a run starts from: a checkpoint, with the flags that it recorded; else the file of a model, `source`; or
    neither, for random weights."""

    checkpoint: Path | None
    recorded: dict
    source: Path | None


@dataclass(frozen=True)
class Text:
    """The tokenizer of the data, where there is one, and its file."""

    path: Path | None
    tokenizer: Tokenizer | None


def make_samples(training: Training, settings: Settings, tokenizer: Tokenizer | None, state: dict | None) -> Samples:
    """What samples are made with, in the memory of training's activations."""
    activations, sampler = training.activations, Sampler(settings.seed)
    if state:
        sampler.state = state["sampler"]
    cache = Cache(training.model.without_codes(), 1, settings.T, activations.attention, activations.memory)
    return Samples(tokenizer, sampler, Writer(cache))


def find_origin(kind: type[Model], args: Namespace) -> tuple[Origin, Namespace]:
    """What the run starts from, and the flags that follow. Raises UserError for flags that contradict the checkpoint or
    one another."""
    checkpoint, recorded = ranks.of_rank_0(lambda: find_checkpoint(kind, args))
    checkpoint, flags = checkpoint and Path(checkpoint), args
    if checkpoint is not None:
        flags = resumed_flags(args, recorded)
    elif args.resume == MUST_RESUME:
        raise UserError(
            f"-y {MUST_RESUME}: there is no checkpoint in {args.checkpoint_dir}; -y 1 would start from the beginning"
        )
    elif args.resume:
        print(f"no checkpoint in {args.checkpoint_dir} yet: starting from the beginning")
    check_flags(flags)
    check_model_flags(kind, flags, recorded)
    flags = settle_precision(flags, recorded.get("precision"))
    if ranks.rank() > 0:
        flags = Namespace(**vars(flags) | {"log": None, "tensorboard": None})
    random = checkpoint is None and kind.Config.described(flags.model) is not None
    return Origin(checkpoint, recorded, None if random else model_path(checkpoint or flags.model)), flags


def find_text(kind: type[Model], flags: Namespace, source: Path | None) -> Text:
    """The tokenizer of the data. source: the model's file, if there is one. Raises UserError if the validation data has
    another tokenizer, or if other ranks have another one."""
    path = find_tokenizer(flags.data, source, kind.Config.DEFAULT_TOKENIZER)
    tokenizer = open_tokenizer(path) if path else None
    seen = path and hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    ranks.check_same("the fingerprint of the tokenizer", seen, "have the data's tokenizer on all machines")
    check_val_tokenizer(flags, path, tokenizer)
    return Text(path, tokenizer)


def open_data(
    flags: Namespace, V: int, checkpoint: Path | None
) -> tuple[DataLoader, DataLoader | None, EvalLoader | None]:
    """The training data, the validation data unless it is not used, and HellaSwag's questions if a flag asks for them.
    Raises UserError if there is no such data, or if another rank has other data. checkpoint: of a resumed run."""
    B, T, remedy = flags.batch_size, flags.sequence_length, "use the same data on all machines"
    if checkpoint is not None:
        check_recorded_data(flags, checkpoint)
    if flags.val_every and flags.val_data is None:
        check_both_splits(flags.data, flags.raw_tokens)
    train = DataLoader(flags.data, "train", B, T, V, flags.seed, flags.raw_tokens)
    val = None
    if flags.val_every:
        val = DataLoader(flags.val_data or flags.data, "val", B, T, V, raw_tokens=flags.raw_tokens)
    ranks.check_same("the fingerprint of the training data (-i)", train.fingerprint, remedy)
    ranks.check_same("the fingerprint of the validation data (-j)", val and val.fingerprint, remedy)
    questions = EvalLoader(flags.hellaswag, B, T, V) if flags.hellaswag else None
    count = questions.num_examples if questions else 0
    ranks.check_same("the number of --hellaswag's questions", count, remedy)
    return train, val, questions


def build_training(
    kind: type[Model], flags: Namespace, tokenizer: Tokenizer | None, origin: Origin
) -> tuple[Training, Namespace, dict | None]:
    """What trains the model that the flags ask for; the flags, with the attention and the chunks of logits that it has;
    and the state of the checkpoint, if a run is resumed."""
    described = kind.Config.described(flags.model, tokenizer.vocab_size if tokenizer else None)
    config = tensors = moments = state = None
    if origin.checkpoint is not None:
        if ranks.rank() == 0:  # the others need not have it on their machines
            config, tensors, *moments, state = load_checkpoint(origin.checkpoint, kind.Config)
            if not {"loader", "sampler"} <= state.keys():
                raise UserError(f"{origin.checkpoint}: it does not say where a run goes on: start a new one with -e")
        sizes, state = ranks.of_rank_0(lambda: (asdict(config), state))
        config = kind.Config(**sizes)
        if "model" in flags.given and ranks.rank() == 0:
            check_same_model(flags.model, described, config, origin.checkpoint, origin.recorded.get("model"))
    else:
        config = described
    if config is None:
        config, tensors = read_model(origin.source, kind.Config, kind.Config.fetch_or_start())
        converted = conversion(origin.source, kind.Config)
        if converted:
            print(converted, flush=True)
    check_length(flags, config)
    attention = choose_attention(flags.attention, config.head_size)
    B, T, seed = flags.batch_size, flags.sequence_length, FIRST_SEED if flags.seed is None else flags.seed
    training = make_training(
        kind, config, B, T, attention, sharded=flags.zero_stage, bitwise=flags.bitwise, logit_rows=flags.logit_rows,
        recompute=flags.recompute, offload=flags.offload,
        dropout=(flags.dropout, seed) if flags.dropout else None,
        **{name: getattr(flags, name) for name in Recipe._fields},
    )  # fmt: skip
    rows = training.activations.logit_rows
    flags = Namespace(**vars(flags) | {"attention": attention, "logit_rows": rows if rows < B * T else 0})
    if origin.checkpoint is not None:
        training.exchange.load_checkpoint(training.adamw, tensors, moments)
    elif tensors is not None:
        load_weights(training.model, training.adamw, tensors)
    else:
        randomize(training.model, training.adamw, seed)
    if ranks.size() > 1:
        ranks.check_same("the checksum of the model", training.exchange.checksum(), "use the same -e on all machines")
    return training, flags, state


def find_checkpoint(kind: type[Model], args: Namespace) -> tuple[str | None, dict]:
    """The checkpoint from which the run continues, if any, and the flags that it recorded. Raises UserError if it is
    damaged or no run's, or if a new run would mix its checkpoints with those of another run in the directory."""
    if not args.checkpoint_dir:
        return None, {}
    if args.resume:
        newest = newest_checkpoint(args.checkpoint_dir)
        if newest is None:
            return None, {}
        recorded = read_record(newest)["state"].get("flags", {})
        return str(newest), recorded_flags(kind.Config, recorded, newest)
    there = checkpoints(args.checkpoint_dir)
    if there:
        raise UserError(
            f"{args.checkpoint_dir} has checkpoints of another run, the newest {there[0].name}: go on from it with "
            "-y 1, or choose another --checkpoint-dir"
        )
    return None, {}


def check_recorded_data(flags: Namespace, checkpoint: Path) -> None:
    """Raises UserError if the data that a checkpoint has recorded is not there. The message says what was recorded, and
    which flag names another place."""
    for flag, name, split in ("-i", "data", "train"), ("-j", "val_data", "val"):
        recorded = getattr(flags, name)
        if name in flags.given or recorded is None or split == "val" and not flags.val_every:
            continue
        try:
            find_token_files(recorded, split)
        except UserError:
            where = "" if os.path.isabs(recorded) else f" below {os.getcwd()}"
            raise UserError(
                f"{checkpoint} was trained with {flag} {recorded}, and there is no such data{where}: {flag} may name "
                "where it is now"
            ) from None


def check_val_tokenizer(args: Namespace, path: Path | None, tokenizer: Tokenizer | None) -> None:
    """Raises UserError if another tokenizer than that of the training data, `path`, lies beside the validation data.
    The loss would say nothing about the text, and bits per byte would count the wrong bytes."""
    own = own_tokenizer(args.val_data) if args.val_data not in (None, args.data) else None
    if own and tokenizer and open_tokenizer(own).tokens != tokenizer.tokens:
        raise UserError(
            f"-j {args.val_data} was made with the tokenizer {own}, and -i {args.data} with {path}: use "
            "validation data that was made with the same tokenizer"
        )


def check_same_model(
    given: str, described: Config | None, config: Config, checkpoint: Path, before: str | None
) -> None:
    """Raises UserError if -e names another model than the one with which the run continues: one of other sizes, or
    another file than the one from which the run was started, unless that file is the checkpoint itself. described: the
    model that -e describes; None for a file. config: the checkpoint's. before: -e at the start of the run."""
    if described is not None:
        same = described == config
    else:
        same = given == before or is_same_file(given, before or "")
        same = same or is_same_file(model_path(given), checkpoint / "model.bin")
    if not same:
        was = f", whose run was started with -e {before}" if before else ""
        raise UserError(f"cannot resume: -e {given} is another model than {checkpoint}{was}: leave -e out")


def is_same_file(one: str | Path, other: str | Path) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


PRODUCTS = {
    "fp32": "fp32", "tf32": "TF32", "bf16": "bf16, sums in fp32",
    "fp8": "large ones of layers in e4m3, others in bf16", "no codes": "bf16: in e4m3 no matrix would be faster",
}  # fmt: skip


def run_table(run: Run, tokenizer: Path | None, checkpoint: Path | None) -> list[list[tuple[str, object]]]:
    """The sections of the start-up table: every setting of the run, and the data that it found."""
    s, args, training, config = run.settings, run.settings.flags, run.training, run.training.model.config
    train_data, val_data = run.batches.loader, run.validation.batches.loader
    offload, coded = training.adamw.offload, training.model.codes.size > 0
    return [
        [
            ("device", device.name),
            *([("why not CUDA", device.why_not_cuda)] if device.why_not_cuda else []),
            ("matrix products", PRODUCTS["no codes" if device.precision == "fp8" and not coded else device.precision]),
            *([("activations, weights", "bf16; AdamW, losses and statistics in fp32")]
              if device.floatX == device.BF16 else []),
            ("attention", args.attention),
            *([("activations", "recomputed, but for each layer's input")] if args.recompute else []),
            *([("logits", f"of {args.logit_rows} positions at a time")] if args.logit_rows else []),
            *([("ranks", ranks_and_hosts()), ("exchange", collectives.way())] if ranks.size() > 1 else []),
            *([("AdamW's moments", f"shared out among {ranks.size()} ranks")] if training.exchange.sharded else []),
            *([("gradients", "summed batch by batch: bitwise")] if training.exchange.bitwise else []),
        ],
        [
            ("train data", args.data),
            ("val data", s.val_data if val_data else "none: no validation"),
            ("tokenizer", tokenizer or "none: samples are printed as numbers"),
            ("HellaSwag", args.hellaswag or "none"),
            ("log file", args.log or "none"),
            *([("TensorBoard", args.tensorboard)] if args.tensorboard else []),
            ("order", "as in the file" if s.shuffle_seed is None else f"shuffled by seed {s.shuffle_seed}"),
        ],
        [
            ("batch size B", s.B),
            ("sequence length T", s.T),
            ("batches a step", f"{run.batches.count * ranks.size()}: {s.step_tokens} tokens"),
            ("learning rate", f"{args.learning_rate:g}, {args.schedule}, {args.warmup} warm-up steps"),
            ("final fraction", args.final_fraction),
            ("weight decay", args.weight_decay),
            ("beta1, beta2, eps", f"{args.beta1:g}, {args.beta2:g}, {args.eps:g}"),
            ("gradient norm", f"at most {args.grad_clip}" if args.grad_clip else "not clipped"),
            *([("dropout", args.dropout)] if args.dropout else []),
            *([("val every, batches", f"{args.val_every} steps, {s.val_batches}")] if val_data else []),
            ("sample every, tokens", f"{args.sample_every or 'no'} steps, {args.sample_tokens}"),
            ("checkpoints", f"{args.checkpoint_dir}, every {args.checkpoint_every} steps, keep {args.keep or 'all'}"
             + (" and the best" if args.best else "") if args.checkpoint_dir else "none"),
            ("seed", s.seed),
        ],
        [
            ("model", args.model if checkpoint is None else f"checkpoint of step {s.first_step}"),
            ("max sequence length", config.max_seq_len),
            ("vocabulary", f"{config.vocab_size}, padded to {padded(config.vocab_size)}"),
            *config.rows(),
            ("parameters", num_parameters(config)),
        ],
        [
            ("train tokens", f"{train_data.num_tokens} ({train_data.num_batches} batches)"),
            *([("val tokens", f"{val_data.num_tokens} ({val_data.num_batches} batches)")] if val_data else []),
            ("steps", f"{s.steps}" if s.first_step == 0 else f"{s.first_step} to {s.steps}"),
        ],
        [(name, f"{megabytes} MiB") for name, megabytes in training.megabytes.items()]
        + [("in all", f"{sum(training.megabytes.values())} MiB")]
        + ([("AdamW's state", f"{offload.bytes >> 20} MiB of the host's memory")] if offload else []),
    ]  # fmt: skip


def ranks_and_hosts() -> str:
    """How many ranks there are, and on which machines."""
    counts = Counter(ranks.hosts())
    return f"{ranks.size()}: " + ", ".join(f"{count} on {host}" for host, count in counts.items())

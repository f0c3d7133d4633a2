"""The life of a training run, whatever the model."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from math import isfinite
from pathlib import Path

import device
from device.errors import UserError
from llmc import collectives, program, ranks
from llmc.arguments import check_same_flags, check_total_batch_size, complete, recorded_flags, resume_flags
from llmc.attention import choose_attention
from llmc.batches import Batches, evaluate, validate
from llmc.checkpoint import (
    checkpoints,
    load_checkpoint,
    lock_checkpoints,
    model_path,
    newest_checkpoint,
    prune_checkpoints,
    read_model,
    read_model_header,
    read_record,
    save_checkpoint,
)
from llmc.dataloader import DataLoader
from llmc.evaluation import EvalLoader
from llmc.exchange import Exchange, exchanging_model
from llmc.generation import print_sample
from llmc.logger import Logger, TensorBoard
from llmc.model import Model
from llmc.report import (
    Output,
    StepTimer,
    StopRequest,
    percent_of_peak,
    print_step,
    print_table,
    print_validation,
)
from llmc.sampler import Sampler
from llmc.schedule import LearningRateSchedule
from llmc.tensors import Config, flops_per_token, num_parameters, padded
from llmc.tokenizer import Tokenizer, check_tokenizer, find_tokenizer, own_tokenizer, tokenizer_files

import numpy as np

MOST_SKIPPED = 20  # steps in a row that are not finite; by then it is not the data


class Run:
    """A run as the flags ask for it. Iterated over, it gives each step that is to be trained, counted from 0; between
    them it prints, validates, samples, logs and saves where that is due, and it ends when it is told to.

    model: the model to train. batches: the training data on its way to it, with batches.count batches a step.

    Making one compiles the kernels and prints the start-up table. Raises UserError for all that can be wrong with
    flags and files, before anything is written. The iteration ends with UserError where a step was not finite
    (`not_finite`) and where the last checkpoint, lines of the log or events for TensorBoard could not be written, and
    with SystemExit(128 + the signal's number) where the run was told to stop.
    """

    def __init__(self, kind: type[Model], args: Namespace):
        self.args = args
        ranks.start(args.gpus)
        self.leads = ranks.rank() == 0  # prints, logs, samples and saves
        check_same_flags(args)
        device.use(args.device, ranks.local_rank())
        collectives.start()
        # Before anything is looked up there, because the run that has it may be writing its last checkpoint.
        self.lock = lock_checkpoints(args.checkpoint_dir) if args.checkpoint_dir and self.leads else None
        checkpoint, recorded = ranks.of_rank_0(lambda: find_checkpoint(args))
        if checkpoint is not None:
            checkpoint = Path(checkpoint)
            if not recorded:
                print(f"{checkpoint} does not say with which flags it was made: those of this command line count")
            resume_flags(args, recorded)
        elif args.resume:
            print(f"no checkpoint in {args.checkpoint_dir} yet: starting from the beginning")
            complete(args)
        else:
            check_total_batch_size(args)
        if not self.leads:
            args.log = args.tensorboard = None
        self.use_precision(recorded.get("tf32"))
        B, T = args.B, args.T
        random = checkpoint is None and kind.Config.described(args.model) is not None
        source = None if random else model_path(checkpoint or args.model)
        self.tokenizer_path = find_tokenizer(args.data, model=source)
        self.tokenizer = Tokenizer.load(self.tokenizer_path) if self.tokenizer_path else None
        seen = self.tokenizer_path and hashlib.sha256(Path(self.tokenizer_path).read_bytes()).hexdigest()[:16]
        ranks.check_same("the fingerprint of the tokenizer", seen, "have the data's tokenizer on all machines")
        self.tokenizer_files = tokenizer_files(self.tokenizer_path, "model_") if self.tokenizer_path else {}
        check_val_tokenizer(args, self.tokenizer_path, self.tokenizer)
        self.exchange, state = build_model(kind, args, self.tokenizer, checkpoint, source)
        self.model = self.exchange.model
        self.checkpoint = checkpoint
        self.model.dropout, self.model.dropout_seed = args.dropout, args.seed
        self.model.skip_nonfinite = args.skip_nonfinite
        V = self.model.config.vocab_size
        if self.tokenizer and source:
            check_tokenizer(self.tokenizer_path, self.tokenizer, source, V)
        self.text_bytes = self.tokenizer.text_bytes(V) if self.tokenizer else None
        train_loader = DataLoader(args.data, "train", B, T, V, args.shuffle_seed)
        val_loader = DataLoader(args.val_data, "val", B, T, V)
        remedy = "use the same data on all machines"
        ranks.check_same("the fingerprint of the training data (-i)", train_loader.fingerprint, remedy)
        ranks.check_same("the fingerprint of the validation data (-j)", val_loader.fingerprint, remedy)
        self.batch_tokens = args.total_batch_size or ranks.size() * B * T
        self.steps = train_loader.num_tokens // self.batch_tokens if args.max_steps is None else args.max_steps
        if self.steps == 0 and args.max_steps is None:
            raise UserError(
                f"-d {self.batch_tokens} is more than the {train_loader.num_tokens} tokens of {args.data}, so an epoch "
                "has no step: lower -d, or set the number of steps with -x"
            )
        self.val_batches = min(val_loader.num_batches, args.val_max_batches)
        self.schedule = LearningRateSchedule(
            args.schedule, args.learning_rate, args.warmup, self.steps, args.final_fraction
        )
        self.sampler = Sampler(args.seed)
        self.first_step = self.skipped = self.skipped_in_a_row = 0
        if state is not None:
            self.first_step, self.sampler.state = state["step"], state["sampler"]
            self.skipped = state.get("skipped", 0)
            program.last_checkpoint = checkpoint
            if self.first_step > self.steps:
                raise UserError(
                    f"the checkpoint in {args.checkpoint_dir} is of step {self.first_step} of {self.steps}: raise -x"
                )
            train_loader.load_state(state["loader"])
        used = str(self.tokenizer_path) if self.tokenizer_path else None
        self.flags = recorded_flags(args) | {"tf32": args.tf32, "tokenizer": used}
        self.flags["model"] = args.model if checkpoint is None else recorded.get("model")  # as the run was started
        started = self.flags | {"model": repr(self.model.config), "fingerprint": train_loader.fingerprint}
        self.identity = hashlib.sha256(json.dumps(started, sort_keys=True).encode()).hexdigest()[:16]
        if state is not None:
            self.identity = state.get("run", self.identity)
        self.batches = Batches(self.model, train_loader, self.batch_tokens // (ranks.size() * B * T))
        self.validation = Batches(self.model, val_loader)
        self.questions = Batches(self.model, EvalLoader(args.hellaswag, B, T, V)) if args.hellaswag else None
        of_questions = self.questions.loader.num_examples if self.questions else 0
        ranks.check_same("the number of --hellaswag's questions", of_questions, remedy)
        self.norms = device.pinned((2, 4), np.float32)
        self.tensorboard = TensorBoard(args.tensorboard, self.first_step)
        device.compile_all()
        self.logger = Logger(args.log, self.first_step)
        places = args.log, args.checkpoint_dir, args.tensorboard
        self.output = Output(sys.stdout, " and ".join(str(place) for place in places if place))
        with self.output:
            print_table(run_table(self))

        def forward_loss() -> None:
            self.model.forward(B, T)
            self.model.loss(B, T, dloss=1.0 / self.batch_tokens)

        self.forward_loss = device.record(forward_loss)
        self.flops = self.batch_tokens * flops_per_token(self.model.config, T)
        self.timer, self.stop = StepTimer(), StopRequest(several=ranks.size() > 1)
        self.batches.stopped = self.told_to_stop
        self.running = None  # the step that the device works on: number, position before it, when launched, its end
        self.unsaved = ""                  # why the checkpoint that was last due could not be written
        self.saved_step = self.first_step  # of the newest checkpoint
        self.good_checkpoint = checkpoint  # the newest that was saved while steps were finite

    def use_precision(self, before: bool | None) -> None:
        """Products in TF32 or not, as -f says and the device can; where a run is resumed, as they were `before`. Raises
        UserError for a -f that asks for something else."""
        args, names = self.args, {True: "TF32", False: "fp32"}
        if before is not None and "tf32" not in args.given:
            args.tf32 = before or args.attention == "flash"  # which is in TF32 on any device
        device.use_tf32(args.tf32)
        now = device.tf32
        if before not in (None, now) and args.attention != "flash":
            if "tf32" in args.given and args.tf32 != before:
                raise UserError(
                    f"cannot resume: products were in {names[before]}, and -f asks for {names[now]}; leave it out, or "
                    "start another run"
                )
            print(f"products were in {names[before]} and are now in {names[now]}, which is what {device.name} has")
        args.tf32 = now

    def learning_rate(self, step: int) -> float:
        return self.schedule.get_learning_rate(step)

    def told_to_stop(self) -> bool:
        """Whether any rank has been told to stop. All ranks must ask alike."""
        heard = next((number for number in ranks.all_gather(self.stop.number) if number), None)
        if heard is None:  # but a signal may have come meanwhile, which is for the next time
            return False
        self.stop.number = heard
        return True

    def __iter__(self) -> Iterator[int]:
        with self.output:
            yield from self.all_steps()
        ranks.finish()
        if self.unsaved and not self.leads:
            sys.exit(1)
        if self.unsaved:
            raise UserError(f"the last checkpoint could not be written: {self.unsaved}")
        if self.logger.lost:
            raise UserError(f"{self.args.log} lacks {self.logger.lost} lines that could not be written")
        if self.tensorboard.lost:
            raise UserError(f"{self.args.tensorboard} lacks {self.tensorboard.lost} events that could not be written")
        if self.stopped:
            sys.exit(128 + self.stop.number)

    def all_steps(self) -> Iterator[int]:
        args, stopped = self.args, self.told_to_stop
        for step in range(self.first_step, self.steps + 1):
            last = step == self.steps
            here = self.position()  # a run that is resumed here samples again what this one is about to
            # Who is told to stop may soon be killed: saving comes first.
            due = last or step % args.val_every == 0
            validated = not due or not stopped() and self.validate(step)
            sample = last or args.sample_every and step > 0 and step % args.sample_every == 0
            if args.sample_tokens and sample and not stopped():
                self.finish_steps()
                if self.leads:
                    text = print_sample(
                        self.model, self.tokenizer, self.sampler, args.sample_tokens, self.stop.requested
                    )
                    self.tensorboard.log_sample(step, text)
            ends = last or stopped()  # a request from here on is for the next step to hear
            save = ends or args.checkpoint_every and step % args.checkpoint_every == 0
            if save:
                self.save(step, here)
            if ends:
                break
            started = time.perf_counter()
            yield step
            if self.batches.dropped:
                self.save(step, here)
                break
            self.launched(step, here, started)
        self.finish_running_step()
        self.stopped = not (last and validated)
        if self.stopped:
            print(f"stopped by {self.stop.name} after {step} of {self.steps} steps")
        if self.skipped:
            print(f"steps whose loss or gradients were not finite: {self.skipped}")
        print(f"total average iteration time: {self.timer.average():.6f} ms")
        self.logger.close()
        self.tensorboard.close()
        if self.lock is not None:
            self.lock.release()

    def position(self) -> dict:
        """What a run must know, beside its parameters and moments, to go on from here."""
        return {"loader": self.batches.loader.state(), "sampler": self.sampler.state}

    def launched(self, step: int, before: dict, started: float) -> None:
        """Called when all of a step has been given to the device, which may still be working on it."""
        device.copy_out(self.norms[step % 2], self.model.norm)
        launched = step, before, started, device.event()
        self.finish_running_step(before)  # the one before, while the device works on this one
        self.running = launched
        if device.kind == "cpu":
            self.finish_running_step()  # it is over already

    def finish_running_step(self, after: dict | None = None) -> None:
        """Waits for the step that the device works on, if any, and reports it. after: the position behind that step,
        where it is not the present one. Raises UserError as `not_finite` does."""
        if self.running is None:
            return
        step, before, started, end = self.running
        ms = self.timer.add(started, end.wait())
        norm, _, _, own_overflow = map(float, self.norms[step % 2])
        overflow = any(ranks.all_gather(own_overflow))  # with -z a rank sees only what its own shard leaves out
        self.running, loss = None, self.batches.mean_loss(step)
        rate, speed = self.learning_rate(step), 1000 * self.batch_tokens / ms
        percent = percent_of_peak(self.flops / ranks.size(), ms)
        shown = norm if self.args.grad_clip else None
        print_step(step + 1, self.steps, loss, shown, rate, ms, self.timer.recent_average(), speed, percent)
        self.logger.log_train(step, loss)
        self.tensorboard.log_train(step, loss, shown, rate, speed, percent)
        if isfinite(norm) and not overflow:
            self.skipped_in_a_row = 0
        elif overflow:
            self.not_finite(step, loss, "parameters with such a gradient are left as they were, and the others "
                            "have taken the step", step + 1, after or self.position())  # fmt: skip
        else:
            self.not_finite(step, loss, "all parameters are left as they were", step, before)

    def finish_steps(self) -> None:
        """finish_running_step, and every rank then has all parameters, for what reads them between steps."""
        self.finish_running_step()
        self.exchange.gather_parameters()

    def not_finite(self, step: int, loss: float, kept: str, save_as: int, position: dict) -> None:
        """Counts a step whose loss or gradients were not finite; raises UserError unless such steps are skipped, or
        where they are too many in a row. The device holds back the step that it may be working on by now.

        Before that, it saves where the run is, as of step `save_as`, and removes no older checkpoint: the parameters
        may be the cause."""
        what = f"step {step + 1}: its loss ({loss:g}) or gradients are not finite, so {kept}"
        self.skipped_in_a_row += 1
        if self.args.skip_nonfinite and self.skipped_in_a_row < MOST_SKIPPED:
            self.skipped += 1
            print(f"{what}; {self.skipped} such steps so far", flush=True)
            return
        self.save(save_as, position)
        skipping = (
            f"that is so in {MOST_SKIPPED} steps in a row" if self.args.skip_nonfinite
            else "--skip-nonfinite leaves such steps out"
        )  # fmt: skip
        newest, good = program.last_checkpoint, self.good_checkpoint
        reached = f"; the state that it came to: {newest}" if newest != good else ""
        raise UserError(
            f"{what}. A learning rate that is too high (-l, -u), gradients that are not clipped (--grad-clip 1), or "
            f"damaged weights or data lead there; {skipping}; last good checkpoint: {good or 'none'}{reached}"
        )

    def validate(self, step: int) -> bool:
        """Prints and logs the validation loss, and the score on HellaSwag where that is asked for. Whether it came to
        an end: it is given up where the run is told to stop."""
        self.finish_steps()
        if ranks.size() > 1:
            ranks.check_same(
                f"the checksum of the parameters before step {step + 1}", self.exchange.checksum(),
                "a GPU or its memory may be at fault: go on from an earlier checkpoint without that machine",
            )  # fmt: skip
        found = validate(self.validation, self.forward_loss, self.val_batches, self.text_bytes, self.told_to_stop)
        if found is None:
            return False
        print_validation(*found)
        self.logger.log_val(step, *found)
        self.tensorboard.log_val(step, *found)
        accuracy = evaluate(self.questions, self.forward_loss, self.told_to_stop) if self.questions else None
        if accuracy is not None:
            print(f"HellaSwag accuracy {accuracy:.4f} of {self.questions.loader.num_examples}", flush=True)
            self.logger.log_eval(step, accuracy)
            self.tensorboard.log_eval(step, accuracy)
        return accuracy is not None or not self.questions

    def save(self, step: int, position: dict) -> None:
        """Writes a checkpoint of where the run was before `step`, if it has trained since the last one and is told
        where to, and removes those of this run that are too many, but for a time when steps are being skipped. Where
        that fails the run goes on, and the next checkpoint that is due is tried all the same."""
        self.finish_steps()
        model, directory = self.model, self.args.checkpoint_dir
        if not directory or step == self.saved_step:
            return
        state = position | {"run": self.identity, "flags": self.flags, "skipped": self.skipped}
        m, v = self.exchange.whole_moments()

        def write() -> tuple[str, str]:
            """The path, and what went wrong."""
            params, tokenizer = model.params_memory, self.tokenizer_files
            try:
                return str(save_checkpoint(directory, step, model.config, params, m, v, state, tokenizer)), ""
            except UserError as error:
                return "", str(error)

        path, self.unsaved = write() if self.leads else ("", "")
        if self.exchange.sharded:
            for _ in chain(m, v):  # what is left of the pieces, to which all ranks must come
                pass
        path, self.unsaved = ranks.all_gather((path, self.unsaved))[0]
        if self.unsaved:
            print(f"not saved: {self.unsaved}", flush=True)
            return
        self.saved_step, program.last_checkpoint = step, Path(path)
        print(f"saved {path}", flush=True)
        if self.skipped_in_a_row:
            return
        self.good_checkpoint = Path(path)
        if not self.leads:
            return
        try:
            prune_checkpoints(directory, self.args.keep, self.identity)
        except UserError as error:
            print(f"an old checkpoint stays: {error}", flush=True)


def run_table(run: Run) -> list[list[tuple[str, object]]]:
    """The sections of the start-up table: every setting of the run, and what it found."""
    args, model, config, first_step = run.args, run.model, run.model.config, run.first_step
    train_data, val_data = run.batches.loader, run.validation.loader
    return [
        [
            ("device", device.name),
            *([("why not CUDA", device.why_not_cuda)] if device.why_not_cuda else []),
            ("matrix products", "TF32" if device.tf32 else "fp32"),
            ("attention", model.attention),
            *([("ranks", ranks_and_hosts()), ("exchange", collectives.way())] if ranks.size() > 1 else []),
            *([("AdamW's moments", f"shared out among {ranks.size()} ranks")] if run.exchange.sharded else []),
            *([("gradients", "summed batch by batch: bitwise")] if run.exchange.bitwise else []),
        ],
        [
            ("train data", args.data),
            ("val data", args.val_data),
            ("tokenizer", run.tokenizer_path or "none: samples are printed as numbers"),
            ("HellaSwag", args.hellaswag or "none"),
            ("log file", args.log or "none"),
            *([("TensorBoard", args.tensorboard)] if args.tensorboard else []),
            ("order", "as in the file" if args.shuffle_seed is None else f"shuffled by seed {args.shuffle_seed}"),
        ],
        [
            ("batch size B", args.B),
            ("sequence length T", args.T),
            ("batches a step", f"{run.batches.count * ranks.size()}: {run.batch_tokens} tokens"),
            ("learning rate", f"{args.learning_rate:g}, {args.schedule}, {args.warmup} warm-up steps"),
            ("final fraction", args.final_fraction),
            ("weight decay", args.weight_decay),
            ("gradient norm", f"at most {args.grad_clip}" if args.grad_clip else "not clipped"),
            *([("dropout", args.dropout)] if args.dropout else []),
            ("val every, batches", f"{args.val_every} steps, {run.val_batches}"),
            ("sample every, tokens", f"{args.sample_every} steps, {args.sample_tokens}"),
            ("checkpoints", f"{args.checkpoint_dir}, every {args.checkpoint_every} steps, keep {args.keep or 'all'}"
             if args.checkpoint_dir else "none"),
            ("seed", args.seed),
        ],
        [
            ("model", args.model if run.checkpoint is None else f"checkpoint of step {first_step}"),
            ("max sequence length", config.max_seq_len),
            ("vocabulary", f"{config.vocab_size}, padded to {padded(config.vocab_size)}"),
            *config.rows(),
            ("parameters", num_parameters(config)),
        ],
        [
            ("train tokens", f"{train_data.num_tokens} ({train_data.num_batches} batches)"),
            ("val tokens", f"{val_data.num_tokens} ({val_data.num_batches} batches)"),
            ("steps", f"{run.steps}" if first_step == 0 else f"{first_step} to {run.steps}"),
        ],
        [(name, f"{megabytes} MiB") for name, megabytes in model.megabytes.items()]
        + [("in all", f"{sum(model.megabytes.values())} MiB")],
    ]  # fmt: skip


def ranks_and_hosts() -> str:
    """How many ranks there are, and on which machines."""
    counts = Counter(ranks.hosts())
    return f"{ranks.size()}: " + ", ".join(f"{count} on {host}" for host, count in counts.items())


def find_checkpoint(args: Namespace) -> tuple[str | None, dict]:
    """The checkpoint that the run goes on from, if any, and what it recorded of the flags. Raises UserError where it is
    damaged, or where a new run would be mixed up with the one that has checkpoints in the directory."""
    if not args.checkpoint_dir:
        return None, {}
    if args.resume:
        newest = newest_checkpoint(args.checkpoint_dir)
        return (str(newest), read_record(newest)["state"].get("flags", {})) if newest else (None, {})
    there = checkpoints(args.checkpoint_dir)
    if there:
        raise UserError(
            f"{args.checkpoint_dir} has checkpoints of another run, the newest {there[0].name}: go on from it with "
            "-y 1, or choose another --checkpoint-dir"
        )
    return None, {}


def check_val_tokenizer(args: Namespace, path: Path | None, tokenizer: Tokenizer | None) -> None:
    """Raises UserError where the validation data lies beside another tokenizer than the training data's, in `path`:
    its loss would say nothing of the text, and bits per byte would count the wrong bytes."""
    own = own_tokenizer(args.val_data) if args.val_data != args.data else None
    if own and tokenizer and Tokenizer.load(own).tokens != tokenizer.tokens:
        raise UserError(
            f"the data of -j {args.val_data} is of the tokenizer {own}, and that of -i {args.data} of {path}: use "
            "validation data that was made with the same tokenizer"
        )


def build_model(
    kind: type[Model], args: Namespace, tokenizer: Tokenizer | None, checkpoint: Path | None, source: Path | None
) -> tuple[Exchange, dict | None]:
    """The model that the flags ask for, with its exchange, and where a run is resumed, the state of its checkpoint.
    source: the file of a model that does not start from random weights."""
    described = kind.Config.described(args.model, tokenizer.vocab_size if tokenizer else None)
    config = tensors = moments = state = None
    if checkpoint is not None:
        if ranks.rank() == 0:  # the others need not have it on their machines
            config, tensors, *moments, state = load_checkpoint(checkpoint, kind.Config)
        sizes, state = ranks.of_rank_0(lambda: (asdict(config), state))
        config = kind.Config(**sizes)
        if "model" in args.given and ranks.rank() == 0:
            check_same_model(args.model, described, config, checkpoint, state.get("flags", {}).get("model"))
    else:
        config = described
    if config is None:
        config, tensors = read_model(source, kind.Config, kind.Config.fetch_or_start())
    if args.T > config.max_seq_len:
        raise UserError(f"-t {args.T} is above the model's longest sequence, {config.max_seq_len}: lower -t")
    args.attention = choose_attention(args.attention, config.channels, config.num_heads)
    model, exchange = exchanging_model(kind, config, args.B, args.T, args.attention, args.zero_stage, args.bitwise)
    if checkpoint is not None:
        exchange.load_checkpoint(tensors, moments)
    elif tensors is not None:
        model.load(tensors)
    else:
        model.randomize(args.seed)
    if ranks.size() > 1:
        ranks.check_same("the checksum of the model", exchange.checksum(), "use the same -e on all machines")
    return exchange, state


def check_same_model(
    given: str, described: Config | None, config: Config, checkpoint: Path, before: str | None
) -> None:
    """Raises UserError where -e names another model than the one that the run goes on with: one of other sizes, or
    another file than the run was started with, unless that is the checkpoint itself. described: the model that -e
    describes, None for a file. config: the checkpoint's. before: -e as it was; old checkpoints do not say."""
    if described is not None:
        same = described == config
    elif given == before or is_same_file(given, before or ""):
        same = True
    elif is_same_file(model_path(given), checkpoint / "model.bin"):
        same = True
    else:
        sizes = read_model_header(model_path(given), type(config)) if os.path.exists(given) else config
        same = before is None and sizes == config
        if same:
            print(f"{checkpoint} does not say with which model its run was started: -e {given} does not count")
    if not same:
        was = f", whose run was started with -e {before}" if before else ""
        raise UserError(f"cannot resume: -e {given} is another model than {checkpoint}{was}: leave -e out")


def is_same_file(one: str | Path, other: str | Path) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)

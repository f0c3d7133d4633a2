"""The life of a training run, whatever the model: its parts, and what the loop over steps asks of them."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from types import TracebackType

import device
from device.errors import UserError
from llmc.data.batches import Batches
from llmc.data.dataloader import DataLoader
from llmc.data.find_tokenizer import model_tokenizers, tokenizer_files
from llmc.data.tokenizer import Tokenizer
from llmc.files.checkpoint_dir import lock_checkpoints
from llmc.files.directory import Lock
from llmc.model.activations import Cache
from llmc.model.fp8 import in_bf16
from llmc.model.model import Model
from llmc.ranks import collectives, ranks
from llmc.run import program
from llmc.run.logger import Report
from llmc.run.report import Reporter
from llmc.run.saver import Saver
from llmc.run.settings import Settings, make_settings
from llmc.run.start import Origin, Text, build_training, find_origin, find_text, open_data
from llmc.run.stop import StopRequest
from llmc.run.table import run_table
from llmc.run.validation import Validation
from llmc.step.generation import Writer, print_sample
from llmc.step.sampler import Sampler
from llmc.step.training import Training


class Run:
    """A run as the flags ask for it. Its parts:

    settings     what was decided before the first step
    training     the model, what it trains with, and what several ranks exchange for it
    batches      the training data on its way to the model
    stop         whether somebody asks the run to stop
    validation   the loss on validation data
    samples      the tokenizer and the random numbers of samples
    saver        checkpoints
    reporter     what is printed and logged of the steps

    report is called with the figures of each step (`Logs`).

    To make a Run compiles the kernels and prints the start-up table. Raises UserError for anything that is wrong with
    flags and files, before anything is written. Use it in a with block; the reader of the block's output may leave. The
    end of the block ends the run: with UserError if data could not be read, or if the last checkpoint, lines of the log
    or events for TensorBoard could not be written, and with SystemExit(128 + the signal's number) if a signal stopped
    the run.
    """

    def __init__(self, kind: type[Model], args: Namespace, report: Report | None = None):
        # First what can be refused soon. The lock comes before any look at the checkpoints: the run that has the
        # directory may be writing its last one.
        device.use(args.device, ranks.local_rank())
        lock = lock_checkpoints(args.checkpoint_dir) if args.checkpoint_dir and ranks.rank() == 0 else None
        origin, flags = find_origin(kind, args)
        text = find_text(kind, flags, origin.source)

        # Then what takes time: the model and the data. With them all is known that decides what the run does.
        collectives.start()  # gloo takes two seconds to import
        self.training, flags, state = build_training(kind, flags, text, origin)
        data = open_data(flags, self.training.model.config.vocab_size, origin.checkpoint, state)
        epoch, val_batches = data.train.num_batches, data.val.num_batches if data.val else 0
        if state and flags.max_steps is None:  # an old checkpoint, whose run counted an epoch as llm.c does
            epoch = data.train.num_tokens // (flags.batch_size * flags.sequence_length)
        self.settings = make_settings(flags, state.get("step", 0), epoch, val_batches)
        if args.checkpoint_dir:
            ranks.of_rank_0(data.train.identify)  # which reads all training data, unless the checkpoint knows it

        # Last the parts that take their orders from the settings.
        training, s = self.training, self.settings
        self.batches = Batches(training.batch, training.acts.losses, data.train, s.batches)
        self.validation = Validation(training, s, data.val, data.questions, text.tokenizer)
        self.samples = make_samples(training, s, text.tokenizer, state)
        self.saver = make_saver(training, s, data.train, text, origin, state, lock)
        self.validation.lowest = self.saver.lowest_loss(self.validation.measure)
        self.reporter = Reporter(training, self.batches, s, state.get("skipped", 0), report)
        self.stop = StopRequest(several=ranks.size() > 1)  # until now the kernels were compiled, which Ctrl-C ends
        for line in s.without_effect(data.raw):
            print(line)
        self.reporter.begin(run_table(s, training, data, text.path, origin.checkpoint))

    # What the loop of `train` calls, in the order in which it does

    def position(self) -> dict:
        """What a run needs to continue from here, beside its parameters and moments."""
        return {"loader": self.batches.loader.state(), "sampler": self.samples.sampler.state}

    def save(self, step: int, position: dict) -> None:
        """Writes a checkpoint of the run as it was before `step`, at this position."""
        self.finish_steps(position)
        with ranks.long_work():
            self.saver.save(step, position, self.reporter.guard)

    def validate(self, step: int) -> float | None:
        """Prints and logs the validation loss, and the score on HellaSwag if a flag asks for it. Returns the loss.
        Returns None if the run is to stop before the end."""
        loss = None
        if not self.stop_requested():
            self.finish_steps(self.position())
            loss = self.validation.run(step, self.training.exchange, self.reporter.logs, self.stop_requested)
        if loss is None:
            self.stop.stopped_before = step
        return loss

    def save_best(self, step: int, position: dict, loss: float | None) -> None:
        """With --best, if this validation loss is the lowest so far: writes a checkpoint of the run as it is before
        `step`, at this position. It replaces the best one so far."""
        if self.settings.flags.best and loss is not None and loss < self.validation.lowest:
            with ranks.long_work():
                self.validation.lowest = self.saver.save_best(
                    step, position, self.reporter.guard, loss, self.validation.measure
                )

    def sample(self, step: int) -> None:
        """Prints and logs a sample, unless the run is to stop."""
        if self.stop_requested():
            return
        self.finish_steps(self.position())
        if ranks.rank() == 0:
            count, stopped, started = self.settings.flags.sample_tokens, self.stop.requested, time.perf_counter()
            with ranks.long_work():
                text = print_sample(self.samples.writer, self.samples.tokenizer, self.samples.sampler, count, stopped)
            self.reporter.logs.log(step, sample_seconds=time.perf_counter() - started if count else None)
            self.reporter.logs.tensorboard.log_sample(step, text)

    def stop_requested(self) -> bool:
        """Whether the run is to stop: a rank was asked to, or could not read its data. All ranks must call it alike."""
        return self.stop.requested_on_any_rank(self.batches.failure or self.validation.batches.failure)

    def report(self, step: int, position: dict) -> None:
        """Call it when the device has been given all of a step, and may still work on it. Reports the step before.
        position: before this step."""
        self.reporter.launched(step, position, self.saver)
        if device.kind == "cpu":
            self.reporter.finish(self.saver, self.position())  # this step is over already

    def stop_before(self, step: int, position: dict) -> None:
        """Saves the run as it was before a step that is dropped, because the run is to stop."""
        self.stop.stopped_before = step
        self.save(step, position)

    def finish_steps(self, position: dict) -> None:
        """Waits for the step that the device works on, and reports it. Then gives every rank all parameters, because
        something may read them between steps. position: after that step."""
        self.reporter.finish(self.saver, position)
        self.training.exchange.gather_parameters()

    # The life of the run

    def __enter__(self) -> Run:
        self.reporter.logs.output.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.reporter.finish(self.saver, self.position())
                self.reporter.end(self.stop)
        finally:
            self.reporter.logs.output.__exit__(kind, error, trace)
        if kind is None:
            self.finish()
        self.stop.release()

    def finish(self) -> None:
        """Takes leave of the other ranks, and says what could not be written."""
        self.reporter.logs.close()
        self.saver.release()
        speaks = ranks.rank() == 0  # for all ranks; after ranks.finish each process is by itself
        ranks.finish()
        self.saver.raise_what_is_unsaved(speaks)
        self.reporter.logs.raise_what_is_lost()
        if self.stop.failure and speaks:
            raise UserError(f"{self.stop.failure}{program.resume_advice()}")
        if self.stop.failure:
            sys.exit(1)
        if self.stop.stopped_before is not None:
            sys.exit(128 + self.stop.number)


@dataclass
class Samples:
    """What samples are made with."""

    tokenizer: Tokenizer | None
    sampler: Sampler
    writer: Writer


def make_samples(training: Training, settings: Settings, tokenizer: Tokenizer | None, state: dict) -> Samples:
    """What samples are made with, in the memory of training's activations. state: of the checkpoint from which the run
    goes on, if it does."""
    activations, sampler = training.activations, Sampler(settings.seed)
    sampler.state = state.get("sampler", sampler.state)
    cache = Cache(in_bf16(training.model), 1, settings.T, activations.attention, activations.memory)
    return Samples(tokenizer, sampler, Writer(cache))


def make_saver(
    training: Training, settings: Settings, loader: DataLoader, text: Text, origin: Origin, state: dict,
    lock: Lock | None,
) -> Saver:  # fmt: skip
    """The saver of a run. It knows the run by a word that its checkpoints have recorded, so that it leaves the
    checkpoints of other runs alone. state: of the checkpoint from which the run goes on, if it does."""
    recorded = settings.recorded() | {"tokenizer": str(text.path) if text.path else None}
    recorded["model"] = settings.flags.model if origin.checkpoint is None else origin.recorded.get("model")
    started = recorded | {"model": repr(training.model.config), "fingerprint": loader.fingerprint}
    run = hashlib.sha256(json.dumps(started, sort_keys=True).encode()).hexdigest()[:16]
    saver = Saver(training, settings, recorded, state.get("run", run), text.path, lock)
    beside = [path for path in model_tokenizers(origin.source) if path.suffix == ".bin"] if origin.source else []
    if beside and text.path:  # they have the same tokens, and the data may have no more than its .bin
        saver.tokenizer = tokenizer_files(beside[0], "model_") | saver.tokenizer
    saver.good = program.last_checkpoint = origin.checkpoint
    return saver

"""A model trained for some steps, on one rank or as one of several, and all that this leaves behind."""

import contextlib
import io
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import device
from llmc.data.batches import Batches
from llmc.files.checkpoint import load_checkpoint
from llmc.model.activations import Cache
from llmc.model.fp8 import in_bf16
from llmc.ranks import ranks
from llmc.run import program
from llmc.run.saver import Saver
from llmc.run.validation import Validation
from llmc.step.generation import Writer, print_sample
from llmc.step.sampler import Sampler
from llmc.step.training import Training
from models import GivenBatches, build, flat_parameters, kind_of, make_batches, state_of
from train_gpt2_fp32 import training_step

import numpy as np

Found = dict[str, np.ndarray]


def first_parameters(config) -> np.ndarray:
    flat = flat_parameters(config)
    some = flat[::5]
    some[some != 0] = -0.0  # which has the bits of 0 no more once 0 is added; a padded vocabulary keeps its 0
    return flat


def train(
    config, batches: np.ndarray, grad_clip: float = 0.0, attention: str = "softmax", precision: str = "fp32",
    spoilt: int | None = None, looks: bool = False, checkpoint: Path | None = None, directory: Path | None = None,
    saves: int | None = None, **flags,
) -> Found:  # fmt: skip
    """Trains on batches (steps, batches per step, 2, B, T), as a rank or the only one, with dropout if the model has
    it. Returns the fp32 parameters, in bf16 those of the master copy, AdamW's m and v, and each step's loss.

    The losses of batch `spoilt` have a gradient that is not finite. looks: validates and samples before the third step.
    checkpoint: what to go on from. directory: where to save, before step `saves` or after the last."""
    device.use_precision(precision)
    kind, (B, T) = kind_of(config), batches.shape[-2:]
    training = build(
        device, config, B, T, attention, first_parameters(config), grad_clip=grad_clip, weight_decay=0.1,
        dropout=(0.1, 3) if kind.DROPS else None, **flags,
    )  # fmt: skip
    model, loader, loss, found = training.model, InOrder(batches), training.model.loss, {}
    first = resume(training, checkpoint) if checkpoint else 0
    if spoilt is not None:
        model.loss = lambda acts, batch, dloss, accumulate: loss(
            acts, batch, np.inf if loader.last == spoilt else dloss, accumulate
        )
    sent = Batches(training.batch, training.acts.losses, loader, batches.shape[1] // ranks.size())
    train_step, last = training_step(training, sent), first + len(batches)
    look = make_look(training, *make_batches(config, 1, B, T)) if looks else None
    ends = []
    for step in range(first, last + 1):
        if directory and step == (last if saves is None else saves):
            training.exchange.gather_parameters()
            if ranks.size() > 1:
                device.synchronize()  # ranks that are threads cannot tell a device's message from a host's
            save(training, directory, step)
        if step == last:
            break
        if looks and step == 2:
            found |= look(step)
        train_step(step, 1e-2)
        ends.append(device.event())
        if len(ends) > 1:  # as in a run, there are two steps in flight
            ends[-2].wait()
            found[f"loss {step - 1}"] = np.array(sent.mean_loss(step - 1))
    device.synchronize()
    if ends:
        found[f"loss {last - 1}"] = np.array(sent.mean_loss(last - 1))
    training.exchange.gather_parameters()
    found |= zip(("parameters", "m", "v"), state_of(training), strict=True)
    assert not model.has_copy or np.array_equal(
        device.to_host(model.params_memory), device.to_bf16(found["parameters"])
    )
    return found


def differing(one: Found, *others: Found) -> set[str]:
    """What of all that they have in common has not the same bits everywhere. -0 is not 0."""
    return {
        name for other in others for name in one.keys() & other.keys() if other[name].tobytes() != one[name].tobytes()
    }


def same(one: Found, *others: Found) -> bool:
    return not differing(one, *others)


class InOrder(GivenBatches):
    """A loader of the batches of all steps. last: the number of the one that it gave last."""

    def __init__(self, batches: np.ndarray):
        super().__init__(batches.reshape(-1, *batches.shape[2:]))
        self.count, self.marked = 0, bool((batches < 0).any())

    def next_batch(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        super().next_batch(inputs, targets)
        self.last, self.count = self.count, self.count + 1

    def skip(self) -> None:
        next(self.rest)
        self.count += 1


def make_look(training: Training, batch: tuple[np.ndarray, np.ndarray]):
    """look(step) does between two steps what a run does: each rank validates, here on one batch, and rank 0 samples.
    Returns the losses and the text."""
    activations, (B, T) = training.activations, batch[0].shape
    settings = SimpleNamespace(B=B, T=T, val_batches=1)
    validation = Validation(training, settings, GivenBatches(repeat(batch)), None, None)
    writer = Writer(Cache(in_bf16(training.model), 1, T, activations.attention, activations.memory))

    def look(step: int) -> Found:
        training.exchange.gather_parameters()
        found = {f"validation {step}": validation.batches.run(validation.forward_loss).copy()}
        if ranks.rank() == 0:
            with contextlib.redirect_stdout(io.StringIO()):
                text = print_sample(writer, None, Sampler(step), 5)
            found[f"text {step}"] = np.array(text)
        return found

    return look


def save(training: Training, directory: Path, step: int) -> None:
    """As a run does."""
    settings = SimpleNamespace(flags=SimpleNamespace(checkpoint_dir=directory, keep=0), first_step=0)
    saver = Saver(training, settings, {}, "run", None, SimpleNamespace(directory=directory))
    saver.save(step, {}, SimpleNamespace(skipped=0, in_a_row=0))
    program.last_checkpoint = None  # which the errors of other tests would name
    assert saver.unsaved == {}


def resume(training: Training, checkpoint: Path) -> int:
    """Goes on from a checkpoint as a run does, and returns its step."""
    tensors = moments = None
    if ranks.rank() == 0:
        _, tensors, *moments, _ = load_checkpoint(checkpoint, type(training.model.config))
    training.exchange.load_checkpoint(training.adamw, tensors, moments)
    return int(checkpoint.name.removeprefix("step_"))

"""Batches on their way to the device, losses on their way back, and the figures that come from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import log

import device
from device.errors import UserError
from kernels.encoder import sort_by_token
from llmc.data.dataloader import DataLoader
from llmc.data.evaluation import EvalLoader
from llmc.model.batch import RANDOM_WORDS, Batch, random_words
from llmc.ranks import ranks

import numpy as np


class Batches:
    """Carries batches to the device, into `device_batch`, and their losses (B,T) back, while the device still works on
    earlier ones.

    A step has `count` batches on each rank, and step_tokens tokens on all ranks together. In the order of the data, the
    first batch is rank 0's first, the next is rank 1's first, and so on. The page-locked arrays are double buffered:
    step n may fill slot n % 2 once the losses of step n - 2 have been read.

    marked: whether the loader has targets that are not learned, -1. Then a step's first `read` reads all its batches,
    because the loss is the mean over all targets that the step learns. learned: how many a step learns, on all ranks,
    at least 1; of step n at n % 2.

    failure: why a batch could not be read; empty if all could be. begin: the device's event before the first batch of
    the last step; earlier work of the device is not the step's.

    Raises UserError if a step has more batches than the host has memory for.
    """

    def __init__(self, device_batch: Batch, losses, loader: DataLoader | EvalLoader, count: int = 1):
        self.device_batch, self.device_losses, self.loader, self.count = device_batch, losses, loader, count
        self.marked, self.learned = getattr(loader, "marked", False), [self.step_tokens] * 2
        self.failure, self.begin = "", device.event()
        self.ends = deque(maxlen=2)  # of the step's last two batches
        needed, (free, _) = 2 * 4 * count * (device_batch.memory.size + losses.size), device.host_memory()
        if count > 1 and needed > free:
            raise UserError(
                f"-d {self.step_tokens} makes {count} batches per step on each rank; their tokens and losses take "
                f"{needed >> 20} MiB of the host's memory, and {free >> 20} MiB are free: lower -d"
            )
        self.batches = device.pinned((2, count, device_batch.memory.size), np.int32)
        self.losses = device.pinned((2, count, *losses.shape), np.float32)

    @property
    def step_tokens(self) -> int:
        return self.count * ranks.size() * self.device_batch.B * self.device_batch.T

    def tokens(self, step: int, i: int) -> np.ndarray:
        """Batch i of a step on the host, (4,B,T): inputs, targets, and the two arrays of `sort_by_token`."""
        return tokens_in(self.batches[step % 2, i], self.device_batch)

    def read(self, step: int, i: int) -> None:
        """Reads this rank's batch i into page-locked memory, for `send`, and skips those of the other ranks. If that
        fails, `failure` says why: all ranks must hear of it before they go on."""
        if self.marked and i > 0:
            return  # it was read with the first
        for n in range(self.count) if self.marked else [i]:
            for r in range(ranks.size()):
                self.read_next(step, n) if r == ranks.rank() else self.loader.skip()
        if self.marked:
            own = sum(count_learned(self.tokens(step, n)[1]) for n in range(self.count))
            self.learned[step % 2] = max(1, sum(ranks.all_gather(own)))
            self.batches[step % 2, :, -1] = dloss_word(self.learned[step % 2])

    def read_next(self, step: int, i: int) -> None:
        """Reads the loader's next batch, as batch i of a step."""
        tokens = self.tokens(step, i)
        try:
            self.loader.next_batch(tokens[0], tokens[1])
        except UserError as error:
            self.failure = str(error)
            tokens[:2] = 0
        number = i * ranks.size() + ranks.rank()
        complete(self.batches[step % 2, i], self.device_batch, step, number, self.step_tokens)

    def stopped(self) -> bool:
        """Never true, but raises UserError if a batch could not be read. For callers that have no other reason to stop
        a step."""
        if self.failure:
            raise UserError(self.failure)
        return False

    def send(self, step: int, i: int) -> None:
        """Sends batch i of a step, which has been read, to the device. At most two batches are in flight, so that a
        step ends soon after a request to stop."""
        if i == 0:
            self.begin = device.event()
            self.ends.clear()
        if len(self.ends) == 2:
            self.ends[0].wait()
        self.device_batch.copy_in(self.batches[step % 2, i])

    def fetch_losses(self, step: int, i: int) -> None:
        """Starts to copy the losses of batch i of a step to the host."""
        device.copy_out(self.losses[step % 2, i], self.device_losses)
        if self.count > 2:
            self.ends.append(device.event())

    def mean_loss(self, step: int) -> float:
        """The mean over all targets that a step learns, on all ranks, once the device has finished it."""
        by_rank = ranks.all_gather([float(losses.mean(dtype=np.float64)) for losses in self.losses[step % 2]])
        means = [own[i] for i in range(self.count) for own in by_rank]  # in the order of the data
        return sum(means) / len(means) * (self.step_tokens / self.learned[step % 2])

    def run(self, forward_loss: Callable[[], None]) -> np.ndarray:
        """Runs one batch, the loader's next, and waits for its losses (B,T). They mean nothing if there is a
        `failure`."""
        self.read_next(0, 0)
        self.device_batch.copy_in(self.batches[0, 0])
        forward_loss()
        self.fetch_losses(0, 0)
        device.synchronize()
        return self.losses[0, 0]

    def each(self, num_batches: int, work: Callable[[], object], stopped: Callable[[], bool] | None) -> list | None:
        """Calls work once for each of the loader's first num_batches batches, which the ranks share out among
        themselves. Returns the list of its results, for all batches on every rank; or None if `stopped`, which is asked
        before each round of batches and at the end."""
        stopped = stopped or self.stopped
        self.loader.reset()
        own = []
        for i in range(num_batches):
            if i % ranks.size() == 0 and stopped():
                return None
            if i % ranks.size() == ranks.rank():
                own.append(work())
            else:
                self.loader.skip()
        if stopped():
            return None
        by_rank = ranks.all_gather(own)
        return [by_rank[i % ranks.size()][i // ranks.size()] for i in range(num_batches)]


def tokens_in(words: np.ndarray, batch: Batch) -> np.ndarray:
    """The arrays (4,B,T) of a batch in its words on the host: inputs, targets, and the two of `sort_by_token`."""
    return words[: 4 * batch.B * batch.T].reshape(4, batch.B, batch.T)


def count_learned(targets: np.ndarray) -> int:
    return int(np.count_nonzero(targets >= 0))


def dloss_word(learned: int) -> np.int32:
    """The bits of Batch.dloss, where a step learns so many targets."""
    return np.float32(1 / learned).view(np.int32)


def complete(words: np.ndarray, batch: Batch, step: int, i: int, learned: int) -> None:
    """Sets what follows from a batch's inputs, the random words of batch i of a step, and dloss for a step that learns
    so many targets, in the batch's words on the host."""
    tokens = tokens_in(words, batch)
    tokens[2:] = np.reshape(sort_by_token(tokens[0]), (2, batch.B, batch.T))
    words[-RANDOM_WORDS - 1 : -1] = random_words(batch.dropout, step, i)
    words[-1] = dloss_word(learned)


def fill_batch(batch: Batch, inputs: np.ndarray, targets: np.ndarray, step: int = 0) -> None:
    """Fills a batch on the device from integers (B,T) on the host: tokens of the model's vocabulary, and the token
    after each, or -1 where that is not learned. step: decides which activations are dropped, if the batch has dropout.
    Raises UserError if they are not integers of this shape."""
    for values in map(np.asarray, (inputs, targets)):
        if values.shape != (batch.B, batch.T) or values.dtype.kind not in "iu":
            raise UserError(f"a batch takes integers ({batch.B}, {batch.T}), and not {values.dtype} {values.shape}")
    words = np.empty(batch.memory.size, np.int32)
    tokens_in(words, batch)[:2] = inputs, targets
    complete(words, batch, step, 0, max(1, count_learned(np.asarray(targets))))
    batch.copy_in(words)
    device.synchronize()


def validate(
    batches: Batches,
    forward_loss: Callable[[], None],
    num_batches: int,
    text_bytes: Callable[[np.ndarray, np.ndarray], int] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> tuple[float, float | None] | None:
    """The mean loss over what is learned of the first num_batches of the validation data, in nats per token, and the
    same in bits per byte (`bits_per_byte`). text_bytes counts a batch's bytes (`Tokenizer.text_bytes`); without it the
    second is None. Returns None in place of the pair if `stopped` before the end. Raises UserError if nothing is
    learned; without `stopped`, also if a batch cannot be read."""

    def work() -> list:
        loss = float(batches.run(forward_loss).mean(dtype=np.float64))
        inputs, targets = batches.tokens(0, 0)[:2]
        learned = targets >= 0
        num_bytes = 0 if text_bytes is None else text_bytes(inputs[learned], targets[learned])
        return [loss, num_bytes, count_learned(targets)]

    found = batches.each(num_batches, work, stopped)
    if found is None:
        return None
    total, num_bytes, learned = (sum(values) for values in zip(*found, strict=True))
    if not learned:
        raise UserError(f"nothing of the first {num_batches} validation batches is learned: raise -m, or change -j")
    loss = total / num_batches * (num_batches * batches.device_batch.B * batches.device_batch.T / learned)
    return loss, bits_per_byte(loss, learned, num_bytes)


def bits_per_byte(loss: float, num_tokens: int, num_bytes: int) -> float | None:
    """Converts a mean loss over num_tokens targets, in nats per token, to bits per byte: the sum of the losses, in
    bits, divided by num_bytes, the bytes of text that the targets stand for. None if they stand for no text.

    It does not depend on how text is divided into tokens. So it compares models with different vocabularies, on the
    same text. A token that ends a text stands for no byte. But its loss counts, because the model must also predict
    that the text is over.
    """
    return loss * num_tokens / (log(2) * num_bytes) if num_bytes else None


def evaluate(
    batches: Batches, forward_loss: Callable[[], None], stopped: Callable[[], bool] | None = None
) -> tuple[int, int] | None:
    """How many multiple-choice questions the model answers right, and how many it answers (`count_correct`). None if
    `stopped` before the end."""
    questions = batches.loader
    found = batches.each(questions.num_batches, lambda: questions.count_correct(batches.run(forward_loss)), stopped)
    return None if found is None else tuple(map(sum, zip(*found, strict=True)))

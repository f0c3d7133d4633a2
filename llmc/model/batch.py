"""A batch on the device, and the embedding of its tokens."""

from __future__ import annotations

from typing import Any

import device
from device.errors import UserError
from kernels.dropout import Dropout
from kernels.encoder import encoder_backward, encoder_forward

import numpy as np

RANDOM_WORDS = 6  # see random_words


class Batch:
    """B sequences of T tokens on the device. All of it comes in one copy, to memory (4 B T + RANDOM_WORDS + 1,), int32:

    inputs, targets (B,T)   the tokens, and the token after each; -1 for a target that is not learned
    by_token                two arrays (B T,), order and count, which sort_by_token of kernels/encoder.py makes of
                            the inputs, for the embedding's gradient
    random (RANDOM_WORDS,)  what random_words makes for dropout; None in a pass without it
    dloss (1,), fp32        the gradient of each loss: 1 / the targets that the whole step learns

    fill_batch of llmc/data/batches.py fills all of it from tokens. For forward alone inputs are enough.

    filled: false once somebody has taken `inputs`, until the batch is filled again. dropout: the rate and the seed of
    dropout; None without it. positions, int32 (B,): where each sequence begins in its text; None: at 0, as in training.
    rows: EmbeddingRows of llmc/ranks/embedding_rows.py, which exchange the embedding's rows among ranks; None on a
    single rank.
    """

    def __init__(self, B: int, T: int, dropout: tuple[float, int] | None = None, positions=None):
        self.memory = device.zeros((4 * B * T + RANDOM_WORDS + 1,), np.int32)
        self._inputs, self.targets, *by_token = self.memory[: 4 * B * T].reshape(4, B, T)
        self.by_token = [array.reshape(-1) for array in by_token]
        self.dropout, self.positions, self.filled = dropout, positions, True
        self.rows: Any = None

    @property
    def B(self) -> int:
        return self.targets.shape[0]

    @property
    def T(self) -> int:
        return self.targets.shape[1]

    @property
    def inputs(self):
        """The inputs' array. Who takes it may write to it, so backward refuses the batch until it is filled again."""
        self.filled = False
        return self._inputs

    @property
    def sorted_inputs(self) -> tuple:
        """inputs and by_token, for backward. Raises UserError if the inputs may have been written alone."""
        if not self.filled:
            raise UserError("batch.inputs may have been written alone: fill the batch with fill_batch before backward")
        return self._inputs, *self.by_token

    @property
    def random(self):
        return self.memory[-RANDOM_WORDS - 1 : -1] if self.dropout else None

    @property
    def dloss(self):
        return self.memory[-1:].view(np.float32)

    def copy_in(self, words: np.ndarray) -> None:
        """Starts to copy the whole batch, as it lies in memory, from the host. It must not change until
        `device.synchronize`."""
        device.copy_in(self.memory, words)
        self.filled = True


def random_words(dropout: tuple[float, int] | None, step: int, i: int) -> np.ndarray:
    """The words that decide which activations batch i of a step drops, as kernels/dropout.cuh reads them: the seed's
    two words, step, batch, the rate as a threshold for random words, and the bits of the float 1 / (1 - rate)."""
    rate, seed = dropout or (0.0, 0)
    seed, threshold, scale = seed % 2**64, min(round(rate * 2**32), 2**32 - 1), np.float32(1 / (1 - rate))
    words = [seed % 2**32, seed >> 32, step, i, threshold, scale.view(np.uint32)]
    return np.array(words, np.uint32).view(np.int32)


def embedding_forward(out, batch: Batch, wte, wpe, B: int, T: int, C: int, dropout: Dropout | None = None) -> None:
    """out (B,T,C) = encoder_forward of a batch's inputs. First fetches their rows of wte (Vp,C) from other ranks, if
    these have updated them."""
    if batch.rows:
        batch.rows.gather(wte, C)
    encoder_forward(out, batch._inputs, wte, wpe, B, T, C, dropout, batch.positions)


def embedding_backward(dwte, dwpe, dout, batch: Batch, B: int, T: int, C: int) -> None:
    """encoder_backward for a batch: from dout (B,T,C), adds to dwte (Vp,C), and to dwpe (maxT,C) if there is one. In
    a step's last batch several ranks may keep dwte's rows instead. adamw_update then sums them over ranks."""
    if batch.rows and batch.rows.deferred:
        batch.rows.keep(dwpe, dout, C)
    else:
        encoder_backward(dwte, dwpe, dout, *batch.sorted_inputs, B, T, C)

"""What dropout draws, read back from the device."""

from pathlib import Path

import device
from kernels.dropout import Dropout
from llmc.model.batch import random_words
from oracle import to_numpy

import numpy as np
import torch

cu = device.source(Path(__file__).parents[1] / "cu" / "dropout.cu")


def words(rate: float, seed: int = 3, step: int = 5, i: int = 0) -> np.ndarray:
    """A batch's words for dropout at this rate, int32 (6,)."""
    return random_words((rate, seed), step, i)


def factors(dropout: Dropout | None, *shape: int) -> torch.Tensor | float:
    """What an array (..., C) is multiplied by, float64 of that shape: 0 or 1 / (1 - rate)."""
    if dropout is None:
        return 1.0
    out = device.empty(shape)
    C = shape[-1]
    random = device.asarray(dropout.random)
    cu.launch("dropout_ones_kernel", (out.size // C,), (cu.block(32),), (out, C, random, dropout.site))
    device.synchronize()
    return torch.from_numpy(to_numpy(out).astype(np.float64))

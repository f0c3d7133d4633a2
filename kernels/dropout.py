"""One place where activations are dropped. The numbers that decide come from dropout.cuh."""

from typing import NamedTuple

import device

import numpy as np


class Dropout(NamedTuple):
    """Dropout as launchers take it."""

    random: object  # (6,) int32 on the device: see dropout.cuh
    site: int       # tells this place from the others that draw with the same `random`


def dropout_at(random, site: int) -> Dropout | None:
    """The dropout at a place; None if there is no `random`, in a pass without dropout."""
    return None if random is None else Dropout(random, site)


def drop_a_fifth(site: int = 0) -> Dropout:
    """A dropout for descriptions of launchers: of the seed 1, the step 0 and the batch 0."""
    words = [1, 0, 0, 0, 2**32 // 5, np.float32(1.25).view(np.int32)]
    return Dropout(device.asarray(np.array(words, np.int32)), site)

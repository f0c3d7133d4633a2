"""One place where activations are dropped. The numbers that decide come from dropout.cuh."""

from typing import NamedTuple


class Dropout(NamedTuple):
    """Dropout as launchers take it."""

    random: object  # (6,) int32 on the device: see dropout.cuh
    site: int       # tells this place from the others that draw with the same `random`

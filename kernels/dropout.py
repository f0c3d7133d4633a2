"""One place where activations are dropped. The numbers that decide come from dropout.cuh."""

from typing import NamedTuple


class Dropout(NamedTuple):
    """Dropout as launchers take it."""

    random: object  # (6,) int32 on the device: see dropout.cuh
    site: int       # tells this place from the others that draw with the same `random`


def dropout_at(random, site: int) -> Dropout | None:
    """The dropout at a place; None if there is no `random`, in a pass without dropout."""
    return None if random is None else Dropout(random, site)

"""Exercise 23: a ring all-reduce of three ranks.

Each rank has gradients of its own, and all ranks need their sum. Rank r can send to rank r + 1 and receive
from rank r - 1, the last rank to the first: a ring. If each rank sent its whole array round, every link would carry
ranks - 1 arrays. If ranks send parts, a link carries less than two arrays, however many ranks there are.
"""

from collections.abc import Callable

import numpy as np


def all_reduce(
    rank: int, ranks: int, x: np.ndarray, send: Callable[[np.ndarray], None], receive: Callable[[], np.ndarray]
) -> None:
    """x (n) of every rank becomes the sum of all ranks' x, in place, with the same bits everywhere.

    send(array) sends a copy to the next rank and does not wait. receive() waits for an array from the rank before.
    x has `ranks` parts, np.array_split(x, ranks), which are views of it. A rank sends one part at a time, and
    2 (ranks - 1) in all.
    """
    parts = np.array_split(x, ranks)
    for step in range(ranks - 1):  # reduce-scatter: rank r ends with the sum of part r + 1
        send(parts[(rank - step) % ranks])
        parts[(rank - step - 1) % ranks] += receive()
    for step in range(ranks - 1):  # all-gather
        send(parts[(rank - step + 1) % ranks])
        parts[(rank - step) % ranks][...] = receive()

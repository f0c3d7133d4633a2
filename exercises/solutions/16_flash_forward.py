"""Exercise 16: flash attention on paper, forward."""

from collections.abc import Iterable

import numpy as np


def flash_forward(
    q: np.ndarray, tiles: Iterable[tuple[np.ndarray, np.ndarray]], scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """out (M, HS) = softmax(scale * q k^T) v and lse (M) = log(sum(exp(scale * q k^T))), over all rows of k and v.

    q: (M, HS). tiles: the rows of k and v, a tile at a time: each is a pair k (N, HS), v (N, HS). You can use a tile
    until you ask for the next one, which overwrites it. Each tile comes once. There is no mask.
    """
    largest, total = np.full(len(q), -np.inf), np.zeros(len(q))
    out = np.zeros(q.shape)
    for k, v in tiles:
        s = scale * q @ k.T
        new = np.maximum(largest, s.max(axis=1))
        p, rescale = np.exp(s - new[:, None]), np.exp(largest - new)
        total = rescale * total + p.sum(axis=1)
        out = rescale[:, None] * out + p @ v
        largest = new
    return out / total[:, None], largest + np.log(total)

"""Exercise 17: flash attention on paper, backward."""

from collections.abc import Iterable

import numpy as np


def flash_backward(
    q: np.ndarray, out: np.ndarray, lse: np.ndarray, dout: np.ndarray,
    tiles: Iterable[tuple[np.ndarray, np.ndarray]], scale: float,
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:  # fmt: skip
    """dq (M, HS), and for each tile the pair dk (N, HS), dv (N, HS): the gradients of sum(dout * out).

    q, out and dout: (M, HS), lse: (M); out and lse are what flash_forward returned for q, tiles and scale. The tiles
    come once more. You can use each until you ask for the next one. With p = softmax(scale * q k^T):
      dv = p^T dout;  dp = dout v^T;  ds = p * (dp - rowsum(dp * p));  dq = scale * ds k;  dk = scale * ds^T q
    Here rowsum is over all tiles, but you need it in the first. Find another sum that equals it and that you have.
    """
    D = (dout * out).sum(axis=1)
    dq, dkv = np.zeros(q.shape), []
    for k, v in tiles:
        p = np.exp(scale * q @ k.T - lse[:, None])
        ds = p * (dout @ v.T - D[:, None])
        dq += scale * ds @ k
        dkv.append((scale * ds.T @ q, p.T @ dout))
    return dq, dkv

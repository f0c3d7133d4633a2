"""The AdamW optimizer: the launcher of adamw.cu."""

import numpy as np

from llmc import device
from llmc.device import ceil_div

cu = device.source(__file__)


def adamw(
    params, grads, m, v, grad_scale, n: int,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, t: int,
) -> None:  # fmt: skip
    """One AdamW step over n consecutive floats: params, m and v (n) are updated from grads (n).

    grad_scale: a device array whose one float multiplies every gradient, or None. t counts steps from 1.
    """
    block = 256
    scalars = (lr, beta1, beta2, 1.0 - beta1, 1.0 - beta2, 1.0 - beta1**t, 1.0 - beta2**t, eps, weight_decay)
    cu.adamw_kernel(
        (ceil_div(n, 4 * block),), (block,), (params, grads, m, v, grad_scale, n, *map(np.float32, scalars))
    )

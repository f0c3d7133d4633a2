"""The AdamW optimizer: the launcher of adamw.cu."""

import device
from device import ceil_div

import numpy as np

cu = device.source(__file__)


def adamw(
    params, grads, m, v, norm, n: int,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, t: int, *, rounded=None, rates=None,
) -> None:  # fmt: skip
    """One AdamW step over n consecutive floats: params, m and v (n) are updated from grads (n). rounded (n) is set to
    the new params in bf16; None where there is no such copy.

    norm (4) comes from global_norm. norm[1] multiplies every gradient; if it is NaN, nothing changes. If the square of
    a gradient is not finite, the parameters of its thread (four of them on a GPU) stay as they are in params and in
    rounded, and norm[3] becomes 1. t counts steps from 1. rates (3): on the device lr and the corrections
    1 - beta1^t and 1 - beta2^t, which replace lr and t; or None.
    """
    block = 256  # on an H200 64 to 512 take as long, 1024 18% longer
    scalars = (lr, beta1, beta2, 1.0 - beta1, 1.0 - beta2, 1.0 - beta1**t, 1.0 - beta2**t, eps, weight_decay)
    args = params, rounded, grads, m, v, norm, rates, n, *map(np.float32, scalars)
    cu.launch("adamw_kernel", (ceil_div(n, cu.floats * block),), (block,), args)

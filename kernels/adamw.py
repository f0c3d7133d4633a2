"""The AdamW optimizer: the launcher of adamw.cu, and a model's update by it."""

import numpy as np

from kernels.reduce import global_norm
from llmc import device
from llmc.device import ceil_div
from llmc.model import Model

cu = device.source(__file__)


def adamw(
    params, grads, m, v, grad_scale, n: int,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, t: int,
) -> None:  # fmt: skip
    """One AdamW step over n consecutive floats: params, m and v (n) are updated from grads (n).

    grad_scale: a device array whose one float multiplies every gradient; where it is NaN, nothing changes. t counts
    steps from 1.
    """
    block = 256
    scalars = (lr, beta1, beta2, 1.0 - beta1, 1.0 - beta2, 1.0 - beta1**t, 1.0 - beta2**t, eps, weight_decay)
    cu.adamw_kernel(
        (ceil_div(n, 4 * block),), (block,), (params, grads, m, v, grad_scale, n, *map(np.float32, scalars))
    )


def adamw_update(
    model: Model, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, t: int, grad_clip: float = 0.0
) -> None:
    """One AdamW step on all parameters of a model; t counts steps from 1. weight_decay applies to its matrices alone.

    grad_clip: the gradients are scaled down to this norm if theirs, which is left in model.norm[0], is larger; 0 leaves
    them alone. Where their norm is not finite nothing changes, and model.norm[2] counts the step; without
    model.skip_nonfinite nothing changes in the steps after it either.
    """
    n = model.grads_memory.size
    global_norm(model.norm, model.grads_acts.partials, model.grads_memory, n, grad_clip, model.skip_nonfinite)
    grad_scale = model.norm[1:]
    for start, end, decayed in model.decay_ranges if weight_decay else [(0, n, False)]:
        buffers = model.params_memory, model.grads_memory, model.m_memory, model.v_memory
        decay = weight_decay if decayed else 0.0
        adamw(*(x[start:end] for x in buffers), grad_scale, end - start, lr, beta1, beta2, eps, decay, t)

"""The AdamW optimizer: the launcher of adamw.cu, and a model's update by it."""

import numpy as np

from kernels.reduce import global_norm
from llmc import device
from llmc.device import ceil_div
from llmc.model import Model

cu = device.source(__file__)


def adamw(
    params, grads, m, v, norm, n: int,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, t: int,
) -> None:  # fmt: skip
    """One AdamW step over n consecutive floats: params, m and v (n) are updated from grads (n).

    norm (4): what global_norm leaves. norm[1] multiplies every gradient; where it is NaN, nothing changes. A gradient
    whose square is not finite leaves its parameter, and up to three beside it, as they are, and norm[3] = 1 says so.
    t counts steps from 1.
    """
    block = 256
    scalars = (lr, beta1, beta2, 1.0 - beta1, 1.0 - beta2, 1.0 - beta1**t, 1.0 - beta2**t, eps, weight_decay)
    cu.adamw_kernel(
        (ceil_div(n, 4 * block),), (block,), (params, grads, m, v, norm, n, *map(np.float32, scalars))
    )


def adamw_update(
    model: Model, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, t: int, grad_clip: float = 0.0
) -> None:
    """One AdamW step on all parameters of a model; t counts steps from 1. weight_decay applies to its matrices alone.

    grad_clip: the gradients are scaled down to this norm if theirs, which is left in model.norm[0], is larger; 0 leaves
    them alone. Where the norm is not finite nothing changes, nor without model.skip_nonfinite in the steps after it.

    Without grad_clip the norm is only that of the gradients that backward adds to, which are few: of norms, biases, and
    embeddings that are no classifier's. A NaN on its way through the layers reaches them all the same. What is left is
    a weight's gradient that overflows by itself, and leaves its parameter as it is.
    """
    n = model.grads_memory.size
    checked = [model.grads_memory] if grad_clip else model.added_to
    global_norm(model.norm, model.grads_acts.partials, checked, grad_clip, model.skip_nonfinite)
    for start, end, decayed in model.decay_ranges if weight_decay else [(0, n, False)]:
        buffers = model.params_memory, model.grads_memory, model.m_memory, model.v_memory
        decay = weight_decay if decayed else 0.0
        adamw(*(x[start:end] for x in buffers), model.norm, end - start, lr, beta1, beta2, eps, decay, t)

"""The AdamW optimizer: the launcher of adamw.cu, and a model's update by it."""

import numpy as np

from kernels.exchange import (
    Range,
    embedding,
    gather_first,
    gather_sums,
    late,
    overlaps,
    sum_late,
    taken_first,
    without,
)
from kernels.reduce import global_norm
from llmc import device, ranks
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
    block = 256  # on an H200 64 to 512 take as long, 1024 18% longer
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

    Of several ranks each updates what model.shard says. With -z it then lacks what others have updated, but for what
    forward begins with, and knows of no parameter that others have left out: the next step brings both;
    gather_parameters brings parameters alone. When this is called ranks still lack sums of gradients (`late`): those
    that the norm needs come first, others while parameters are updated. All ranks must call it.
    """
    n, (own, _) = model.grads_memory.size, model.shard
    checked = [(0, n)] if grad_clip else model.added_to
    decayed_ranges = model.decay_ranges if weight_decay else [(0, n, False)]
    missing = late(model) if ranks.size() > 1 and not model.bitwise else []
    # With -z one rank's shard is mostly the embedding: it could begin with little before that is summed.
    first = missing if model.sharded else overlaps(missing, checked)
    missing = without(missing, first)
    # With -z a rank has the sums of its own shard alone, but that ranks of one memory all have those of vectors.
    whole = without(model.added_to, embedding(model)) if model.of_ranks else []
    partial_sums = model.sharded and not model.bitwise and without(checked, whole) != []

    def update(ranges: list[Range]) -> None:
        for begin, stop, decayed in decayed_ranges:
            for start, end in overlaps(overlaps([(begin, stop)], [model.shard]), ranges):
                buffers = model.params_memory[start:end], model.grads_memory[start:end]
                moments = model.m_memory[start - own : end - own], model.v_memory[start - own : end - own]
                decay = weight_decay if decayed else 0.0
                adamw(*buffers, *moments, model.norm, end - start, lr, beta1, beta2, eps, decay, t)

    if model.bitwise:
        gather_sums(model)
    sum_late(model, first)
    device.join_communication()
    sum_late(model, missing)
    if partial_sums:
        checked = overlaps(checked, [model.shard])
    global_norm(
        model.norm, model.grads_acts.partials, [model.grads_memory[start:end] for start, end in checked], grad_clip,
        model.skip_nonfinite, partial_sums,
    )  # fmt: skip
    # With -z what the other ranks take first is updated first, else what has its sums already.
    early = taken_first(model) if model.sharded else without([(0, n)], missing)
    update(early)
    if model.sharded:
        gather_first(model, early)
    else:
        device.join_communication()
    update(without([(0, n)], early))
    device.join_communication()  # what gather_first has started

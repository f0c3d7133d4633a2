"""A model's update by AdamW, on one rank or several."""

import device
from kernels.adamw import adamw
from kernels.exchange import Range
from kernels.reduce import SQUARES, norm_of_squares, sum_squares
from llmc import collectives
from llmc.exchange import Exchange, overlaps, without

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def adamw_update(exchange: Exchange, lr: float, weight_decay: float, grad_clip: float, t: int) -> None:
    """One AdamW step on all parameters of a model; t counts steps from 1. weight_decay applies to its matrices alone.

    grad_clip: the gradients are scaled down to this norm if theirs, which is left in model.norm[0], is larger; 0 leaves
    them alone. Where the norm is not finite nothing changes, nor without model.skip_nonfinite in the steps after it.

    Without grad_clip the norm is only that of the gradients that backward adds to, which are few: of norms, biases, and
    embeddings that are no classifier's. A NaN on its way through the layers reaches them all the same. What is left is
    a weight's gradient that overflows by itself, and leaves its parameter as it is.

    Several ranks: each updates its shard. With -z it then lacks what others have updated, but for what forward begins
    with, and does not know of a parameter that another rank has left out: the next step brings both. When this is
    called ranks still lack sums of gradients (`exchange.late`): those that the norm needs come first, others while
    parameters are updated. All ranks must call it.
    """
    model = exchange.model
    n, (own, _) = model.grads_memory.size, exchange.shard
    checked = [(0, n)] if grad_clip else model.added_to
    decayed_ranges = model.decay_ranges if weight_decay else [(0, n, False)]
    # With -z one rank's shard is mostly the embedding: it could begin with little before that is summed.
    first = exchange.late if exchange.sharded else overlaps(exchange.late, checked)
    missing = without(exchange.late, first)

    def update(ranges: list[Range]) -> None:
        for begin, stop, decayed in decayed_ranges:
            for start, end in overlaps(overlaps([(begin, stop)], [exchange.shard]), ranges):
                params, rounded = model.master_and_copy(start, end)
                moments = model.m_memory[start - own : end - own], model.v_memory[start - own : end - own]
                decay, scalars = weight_decay if decayed else 0.0, (end - start, lr, BETA1, BETA2, EPS)
                adamw(
                    params, model.grads_memory[start:end], *moments, model.norm, *scalars, decay, t, rounded=rounded
                )

    if exchange.bitwise:
        exchange.gather_sums()
    exchange.sum_late(first)
    device.join_communication()
    exchange.sum_late(missing)
    update_norm(exchange, checked, grad_clip)
    # With -z what the other ranks read first is updated first, else what has its sums already.
    early = exchange.plan.first if exchange.sharded else without([(0, n)], missing)
    update(early)
    if exchange.sharded:
        exchange.gather_first(early)
    else:
        device.join_communication()
    update(without([(0, n)], early))
    device.join_communication()  # what gather_first has started


def update_norm(exchange: Exchange, checked: list[Range], grad_clip: float) -> None:
    """Sets model.norm from the gradients in some ranges (kernels/reduce.py: global_norm). With -z a rank has the sums
    of its own shard alone, but that ranks with peer access all have those of vectors: then the ranks add up their
    squares."""
    model, partials = exchange.model, exchange.model.grads_acts.partials.reshape(-1)
    of_all = exchange.sharded and not exchange.bitwise and without(checked, exchange.known_to_all) != []
    if of_all:
        checked = overlaps(checked, [exchange.shard])
        device.fill_zero(partials[:SQUARES])
    used = sum_squares(partials, [model.grads_memory[start:end] for start, end in checked])
    if of_all:
        used = SQUARES
        collectives.all_reduce([partials[:used]])
        device.join_communication()
    norm_of_squares(model.norm, partials, used, grad_clip, model.skip_nonfinite)

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

    grad_clip: if the norm of the gradients is larger, they are scaled down to this norm; 0: they stay as they are. The
    norm goes to model.norm[0]. If it is not finite, nothing changes; without model.skip_nonfinite, nothing changes in
    the steps after it either.

    Without grad_clip the norm covers only the gradients to which backward adds. These are few: of norms, of biases, and
    of embeddings that no classifier shares. A NaN on its way through the layers reaches them, too. One case remains: a
    weight's gradient overflows by itself. Then AdamW leaves its parameter as it is.

    With several ranks, each updates its shard. With -z it then lacks the parameters that other ranks have updated,
    except those with which forward begins. And it does not know whether another rank has left out a parameter. The next
    step brings both. When this function is called, ranks still lack the sums of some gradients (`exchange.late`). Those
    that the norm needs come first, the others while parameters are updated. All ranks must call this function.
    """
    model = exchange.model
    n, (own, _) = model.grads_memory.size, exchange.shard
    checked = [(0, n)] if grad_clip else model.added_to
    decayed_ranges = model.decay_ranges if weight_decay else [(0, n, False)]
    # With -z one rank's shard is mostly the embedding, so it has little to update before the embedding's sum is there.
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
    # With -z a rank first updates what other ranks read first; else what already has its sums.
    early = exchange.plan.first if exchange.sharded else without([(0, n)], missing)
    update(early)
    if exchange.sharded:
        exchange.gather_first(early)
    else:
        device.join_communication()
    update(without([(0, n)], early))
    device.join_communication()  # waits for what gather_first has started


def update_norm(exchange: Exchange, checked: list[Range], grad_clip: float) -> None:
    """Sets model.norm from the gradients in some ranges (kernels/reduce.py: global_norm). With -z a rank has only the
    sums of its own shard. Then the ranks add up their squares, unless all have the sums of these ranges
    (`known_to_all`)."""
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

"""The training step of a model script's loop, for benchmarks and tests, which have no run."""

from collections.abc import Callable

from llmc.batches import Batches
from llmc.exchange import Exchange
from llmc.update import adamw_update


def train_step(
    exchange: Exchange, batches: Batches, weight_decay: float = 0.0, grad_clip: float = 0.0
) -> Callable[[int, float], None]:
    """A function of a step's number and learning rate that trains for this step: forward and backward on each of its
    batches, then AdamW. The launches are recorded once and replayed."""
    model = exchange.model
    B, T = model.B, model.T

    def forward_backward(first: bool, last: bool) -> None:
        if first:
            model.zero_grad()
        model.forward(B, T, training=True)
        model.loss(B, T, dloss=1.0 / batches.step_tokens)
        model.backward(B, T, accumulate=not first)

    recorded = exchange.record(forward_backward)

    def step_of(step: int, learning_rate: float) -> None:
        for i in range(batches.count):
            batches.send(step, i)
            recorded(first=i == 0, last=i + 1 == batches.count)
            batches.fetch_losses(step, i)
        adamw_update(exchange, learning_rate, weight_decay, grad_clip, step + 1)

    return step_of

"""The step of training that the GPT-2 and Llama 3 scripts show, for a model whose script need not show it again."""

from collections.abc import Callable

from kernels.adamw import adamw_update
from llmc import device
from llmc.batches import Batches
from llmc.model import Model


def train_step(
    model: Model, batches: Batches, weight_decay: float = 0.0, grad_clip: float = 0.0
) -> Callable[[int, float], None]:
    """A function that trains for one step, given its number and its learning rate: forward and backward on each of the
    step's batches, then AdamW. A GPU records its launches once and replays them."""
    B, T = model.B, model.T

    def forward_backward(accumulate: bool) -> None:
        if not accumulate:
            model.zero_grad()
        model.forward(B, T, training=True)
        model.loss(B, T, dloss=1.0 / (batches.count * B * T))
        model.backward(B, T, accumulate)

    first_batch = device.record(lambda: forward_backward(accumulate=False))
    further_batch = device.record(lambda: forward_backward(accumulate=True))

    def train_step(step: int, learning_rate: float) -> None:
        for i in range(batches.count):
            batches.send(step, i)
            first_batch() if i == 0 else further_batch()
            batches.fetch_losses(step, i)
        adamw_update(model, learning_rate, 0.9, 0.999, 1e-8, weight_decay, step + 1, grad_clip)

    return train_step

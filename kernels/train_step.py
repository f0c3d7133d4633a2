"""A training step, whatever the model: batches in, zero, forward, loss, backward, update."""

from collections.abc import Callable

from kernels.adamw import adamw_update
from kernels.exchange import add_batch, gather_beside_forward
from llmc import device
from llmc.batches import Batches
from llmc.model import Model


def train_step(
    model: Model, batches: Batches, weight_decay: float = 0.0, grad_clip: float = 0.0
) -> Callable[[int, float], None]:
    """A function that trains for one step, given its number and its learning rate: forward and backward on each of the
    step's batches, then AdamW. A GPU records its launches once and replays them."""
    B, T = model.B, model.T

    def forward_backward(begins: bool, first: bool, last: bool) -> None:
        if begins:
            gather_beside_forward(model)
        if first:
            model.zero_grad()
        model.forward(B, T, training=True)
        model.loss(B, T, dloss=1.0 / batches.step_tokens)
        model.backward(B, T, accumulate=not first, last=last)
        add_batch(model)

    recorded = device.record(forward_backward)

    def step_of(step: int, learning_rate: float) -> None:
        # of_step sends each batch to the device, and its losses back.
        for i, (first, last) in enumerate(batches.of_step(step)):
            recorded(i == 0, first, last)
        if batches.dropped:
            return  # the run is told to stop: what this step has added up is dropped
        adamw_update(model, learning_rate, 0.9, 0.999, 1e-8, weight_decay, step + 1, grad_clip)

    return step_of

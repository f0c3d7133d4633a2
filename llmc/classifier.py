"""The classifier as a layer of a model: logits, losses, and gradients.

For a whole batch at once, forward computes the logits, the loss turns them into their gradient, and backward multiplies
with this. By chunks of model.logit_rows positions, the logits of all positions never exist at the same time: a chunk
goes from its logits to the gradients before the next one takes its memory. In training, backward does all this. Without
training, the loss does, and computes losses only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import device
from kernels.classifier import fused_classifier
from kernels.encoder import encoder_forward
from kernels.matmul import matmul_backward_inp, matmul_forward
from llmc.tensors import padded

if TYPE_CHECKING:
    from llmc.model import Model

CHUNK = 1024  # logit_rows, if the logits of a whole batch do not fit


def classifier_forward(model: Model, inp, weight, B: int, T: int) -> None:
    """Computes the logits of inp (B,T,C) with weight (Vp,C): acts(B, T).logits (B*T,Vp) = inp @ weight^T. By chunks,
    this happens later, and inp must stay as it is. When the model writes text, logits are (B,Vp): of each sequence only
    the row that model.last names."""
    model.classified = inp.reshape(B * T, -1), weight
    if model.positions is not None:
        acts, (Vp, C) = model.acts(B, T), weight.shape
        if T > 1:
            encoder_forward(acts.last, model.last, inp, None, B, 1, C)  # copies these rows, as from an embedding
        matmul_forward(acts.logits, acts.last if T > 1 else inp, weight, None, B, 1, C, Vp)
    elif not model.logit_rows:
        logits_of(model, 0, B * T, B, T)


def classifier_loss(model: Model, B: int, T: int, dloss: float) -> None:
    """Sets acts(B, T).losses (B,T) to the cross-entropy of model.targets. If dloss, the gradient of each single loss,
    is not 0, the logits become their gradient. By chunks, backward then does both."""
    model.dloss = dloss
    if model.logit_rows and dloss:
        return
    for start, end in chunks(model, B * T):
        if model.logit_rows:
            logits_of(model, start, end, B, T)
        losses_of(model, start, end, B, T)


def backward_by_chunks(model: Model, dinp, dweight, B: int, T: int, accumulate: bool) -> None:
    """dinp (B,T,C) = the gradient of classifier_forward's inp; it may have the memory of inp. dweight (Vp,C) += the
    gradient of its weight, or = without accumulate. Sets the losses, too."""
    inp, weight = model.classified
    Vp, C = weight.shape
    dinp = dinp.reshape(-1, C)  # a small batch has only its first rows
    for start, end in chunks(model, B * T):
        logits_of(model, start, end, B, T)
        losses_of(model, start, end, B, T)
        N, dlogits = end - start, model.acts(B, T).logits[: end - start]
        device.gemm(dweight, dlogits, inp[start:end], Vp, C, N, trans_a=True, beta=float(accumulate or start > 0))
        matmul_backward_inp(dinp[start:end], dlogits, weight, None, 1, N, C, Vp)


def chunks(model: Model, rows: int) -> Iterator[tuple[int, int]]:
    """The ranges of rows whose logits exist at the same time."""
    step = model.logit_rows or rows
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def logits_of(model: Model, start: int, end: int, B: int, T: int) -> None:
    """Sets the first rows of acts(B, T).logits to the logits of rows start to end."""
    inp, weight = model.classified
    Vp, C = weight.shape
    matmul_forward(model.acts(B, T).logits[: end - start], inp[start:end], weight, None, 1, end - start, C, Vp)


def losses_of(model: Model, start: int, end: int, B: int, T: int) -> None:
    """Sets the losses of rows start to end, and their logits to their gradient."""
    acts, V = model.acts(B, T), model.config.vocab_size
    fused_classifier(
        acts.logits[: end - start], acts.losses.reshape(-1)[start:end], model.dloss, model.targets[start:end],
        1, end - start, V, padded(V),
    )  # fmt: skip

"""The loss of a model that predicts the next token."""

from kernels.classifier import classifier
from llmc.model.model import Model


def cross_entropy_loss(model: Model, acts, batch, dloss=None, accumulate: bool = False) -> None:
    """Sets acts.losses (B,T) to the cross-entropy of batch.targets, from acts.ln[L] (B,T,C). Overwrites
    acts.logits.

    With dloss, the gradient of each loss, such as batch.dloss: also sets acts.dln (B,T,C) to the gradient of
    acts.ln[L], and adds the gradient of the classifier's weight to grads.head (Vp,C). Without accumulate it sets
    grads.head instead.
    """
    C, V = model.config.channels, model.config.vocab_size
    classifier(
        acts.losses, acts.logits, acts.ln[-1], model.params.head, batch.targets, batch.B, batch.T, C, V,
        dloss=dloss, dinp=acts.dln, dweight=model.grads.head, accumulate=accumulate,
    )  # fmt: skip

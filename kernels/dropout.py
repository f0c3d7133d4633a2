"""Where a model drops activations while it trains. The numbers that decide come from dropout.cuh."""

from types import SimpleNamespace
from typing import NamedTuple


class Dropout(NamedTuple):
    """Dropout at one place of a model, as launchers take it."""

    random: object  # model.random (6,) int32 on the device: see dropout.cuh
    site: int       # tells this place from the model's others


def dropouts(model, training: bool) -> SimpleNamespace:
    """The places where a model drops: `.encoded`, the embedding, and for each layer `.layer[l].attproj` and
    `.layer[l].fcproj`, what attention and MLP add to the residual stream. Each is a Dropout, or None where nothing is
    dropped: when the model does not train, or trains without dropout."""

    def at(site: int) -> Dropout | None:
        return Dropout(model.random, site) if training and model.dropout else None

    layers = range(model.config.num_layers)
    return SimpleNamespace(
        encoded=at(0), layer=[SimpleNamespace(attproj=at(1 + 2 * l), fcproj=at(2 + 2 * l)) for l in layers]
    )

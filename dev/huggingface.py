"""Our models as Hugging Face's transformers names, lays out and describes them: what is common to all of them. What is
a model's own stands in its script, and llmc/huggingface.py says how."""

import math
from collections.abc import Iterator, Mapping
from itertools import groupby

from device.errors import UserError
from llmc.huggingface import HuggingFace
from llmc.scripts import model_kinds
from llmc.tensors import Config


def families() -> dict[str, type[HuggingFace]]:
    """What the scripts say of their models, by transformers' name of the kind."""
    return {kind.HuggingFace.TYPE: kind.HuggingFace for kind in model_kinds() if kind.HuggingFace}


def family_of(config: Config) -> type[HuggingFace]:
    """What its script says of a model. Raises UserError where transformers has none like it."""
    for kind in model_kinds():
        if kind.Config is type(config) and kind.HuggingFace:
            return kind.HuggingFace
    raise UserError(f"{config.SCRIPT} does not say what Hugging Face's transformers call a {config.NAME}")


def named_tensors(config: Config, tensors) -> Iterator[tuple[str, object, tuple[int, ...]]]:
    """The parameters of a model, or their gradients, as transformers sees them: for each of its tensors the name, a
    view into ours that has the numbers in its order, and its shape.

    tensors: ours by name, in a mapping or as attributes: NumPy's or CuPy's arrays or PyTorch's tensors, those with a
    part for each layer as (L, ...), the vocabulary padded or not. An axis of theirs may be split into several in a
    view: `view.reshape(shape)` is their tensor, and `view[...] = theirs.reshape(view.shape)` sets ours. A view may be
    a Reordered, which can do just that.
    """
    tensors = tensors if isinstance(tensors, Mapping) else vars(tensors)
    family = family_of(config)
    for layered, rows in groupby(config.parameters(), lambda row: row[1][0] == "L"):
        ours = [name for name, _ in rows]
        for layer in range(config.num_layers) if layered else (None,):
            for name in ours:
                tensor = tensors[name][layer] if layered else tensors[name]
                for theirs, view in zip(family.NAMES[name], family.parts(config, name, tensor), strict=True):
                    split = tuple(view.shape)
                    yield theirs.format(layer), view, (math.prod(split[:-1]), split[-1]) if len(split) > 2 else split


def transformers_parameters(model) -> dict:
    """The parameters of a transformers model by the names that they have in files."""
    renamed = families()[model.config.model_type].RENAMED
    return {renamed.get(name, name): parameter for name, parameter in model.named_parameters()}


def config_json(config: Config, eot: int | None = None, bos: int | None = None) -> dict:
    """A model in the terms of transformers: what its config.json holds and its config class takes. eot and bos: the
    tokens that end and begin a text, where they are known. Raises UserError for a model that transformers has not."""
    common = {"vocab_size": config.vocab_size, "bos_token_id": bos, "eos_token_id": eot, "torch_dtype": "float32"}
    family = family_of(config)
    return common | {"model_type": family.TYPE} | family.config_json(config)

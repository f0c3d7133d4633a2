"""A model in Hugging Face's transformers: what its file here says about it, and how we read its config.json.

The two sides cut and order the same numbers differently. transformers has one tensor for each layer; we have one tensor
with a part for each layer. We have q, k and v in one tensor. If R channels of a head are rotated, their RoPE pairs
channels i and i + R/2, ours 2i and 2i + 1. So the rows of q and k are in another order. They do not pad the vocabulary.
"""

import math
import re
import reprlib
from pathlib import Path
from typing import NoReturn

from device.errors import UserError
from kernels.rope import HIGH, LOW, ORIGINAL_LENGTH
from llmc.model.tensors import Config

import numpy as np

ROPE = {  # what may be said in rope_parameters
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings",
}  # fmt: skip
COMMON = (  # settings of every kind, as in REQUIRED below
    ("is_causal", True, (True,)), ("per_layer_config", None, (None,)), ("attention_chunk_size", None, (None,)),
    ("quantization_config", None, (None,)),
)  # fmt: skip


class Family:
    """What a file here says about a kind of model. Its subclass has:

    Config      of our model, from its script
    TYPE        its model_type in config.json
    PREFIX      how the names of tensors begin, except the classifier's; a model saved without classifier lacks it
    NAMES       our tensor, and theirs in the order in which ours holds them; {} stands for the layer
    RENAMED     parameters of a transformers model that have another name in files: {name: name in files}
    REQUIRED    settings with which a model may compute something else than ours: (setting, default, allowed values)
    ALSO        further model_types that compute the same, and what each requires beside REQUIRED

    and the functions below.
    """

    Config: type[Config]
    TYPE: str
    PREFIX: str
    NAMES: dict[str, tuple[str, ...]]
    RENAMED: dict[str, str] = {}
    REQUIRED: tuple[tuple[str, object, tuple], ...]
    ALSO: dict[str, tuple[tuple[str, object, tuple], ...]] = {}

    @staticmethod
    def parts(config: Config, name: str, tensor) -> list:
        """The parts of one of our tensors, of one layer, in the order of theirs: views, or Reordered. The tensor is an
        array of NumPy or CuPy, or a tensor of PyTorch, without the vocabulary's padding."""
        raise NotImplementedError

    @staticmethod
    def config_json(config: Config) -> dict:
        """The part of config.json that only this kind has. Raises UserError for a model that transformers lacks."""
        raise NotImplementedError

    @staticmethod
    def read_config(given: "Settings") -> Config:
        """The sizes of a model. Raises UserError if ours computes something else."""
        raise NotImplementedError


class Reordered:
    """The rows of a tensor in another order that no view can give."""

    def __init__(self, tensor, order: np.ndarray):
        self.tensor, self.order = tensor, order
        self.shape, self.size = tensor.shape, math.prod(tensor.shape)

    def reshape(self, *shape):
        return self.tensor[self.order].reshape(*shape)

    def __setitem__(self, everything, values) -> None:
        self.tensor[self.order] = values

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.tensor[self.order], dtype)


class Settings:
    """The settings of a config.json. shapes: of the tensors beside it, by name. heads: how many heads the user says
    that there are. UserErrors name `source`."""

    def __init__(
        self, source: str | Path, values: dict, shapes: dict[str, list[int]] | None = None, heads: int | None = None
    ):
        self.source, self.values, self.shapes, self.heads = source, values, shapes or {}, heads

    def get(self, name: str, default=None):
        return self.values.get(name, default)

    def refuse(self, name: str, value, supported: str) -> NoReturn:
        raise UserError(f"{self.source}: {name} is {reprlib.repr(value)} in its config.json; {supported} is supported")

    def check(self, required: tuple) -> None:
        """Raises UserError for a setting with which transformers computes something else than ours does."""
        for name, default, values in required:
            value = self.get(name, default)
            if value not in values:
                self.refuse(name, value, " or ".join("none" if value is None else str(value) for value in values))
        layers = self.get("layer_types")
        if layers and not (isinstance(layers, list) and all(kind == "full_attention" for kind in layers)):
            self.refuse("layer_types", layers, "full_attention alone")

    def number(self, name: str, default: float) -> float:
        """A setting that is a number. Raises UserError if it is something else."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not abs(value) < 2**127:  # the range of fp32
            self.refuse(name, value, "a number")
        return float(value)

    def size(self, name: str, default: int | None = None) -> int:
        """A setting that is a size. Raises UserError if it is missing or something else."""
        value = default if self.get(name) is None else self.get(name)
        if type(value) is not int or value < 1:
            self.refuse(name, value, "a whole number from 1 on")
        if value >= 1 << 31:
            self.refuse(name, value, "a whole number below 2**31")
        return value

    def rope(
        self, types: tuple[str, ...], rotary: float | None = None,
        names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    ) -> tuple[float, float, int, float]:  # fmt: skip
        """RoPE's theta; its scaling factor, 0 for none; the number of positions at which a scaled model was first
        trained; and the share of a head that RoPE rotates. The share is the whole head, unless a default, `rotary`, is
        given. names: of theta and the share where they stand by themselves.

        The precedence is that of transformers 5. An object rope_scaling, as files had it before and as model cards say
        to add it, hides an object rope_parameters. In the object, theta and the share hide those by themselves. Raises
        UserError for every setting of RoPE that is not known here."""
        where = "rope_scaling" if self.get("rope_scaling") else "rope_parameters"
        found = self.get(where) or {}
        if not isinstance(found, dict):
            self.refuse(where, found, "an object")
        known = {"rope_scaling", "rope_parameters", *names}
        for name, value in self.values.items():  # false and null stand for what a model does not have
            if re.search("rope|rotary", name) and name not in known and value not in (None, False):
                same = {"rope_theta": names[0], "partial_rotary_factor": names[1]}.get(name)
                if not same or value != self.get(same):  # old files of GPT-NeoX say both
                    self.refuse(name, value, "a model without it")
        alone = {names[0]: 1e4, names[1]: rotary or 1} | {n: v for n, v in self.values.items() if v is not None}
        found = {"rope_theta": alone[names[0]], "partial_rotary_factor": alone[names[1]]} | found
        kind = found.get("rope_type", found.get("type", "default"))
        if kind not in types:
            self.refuse(f"{where}.rope_type", kind, " or ".join(types))
        length = self.get("original_max_position_embeddings", found.get("original_max_position_embeddings"))
        found["original_max_position_embeddings"] = self.get("max_position_embeddings") if length is None else length
        required = {} if rotary else {"partial_rotary_factor": 1}
        if kind == "llama3":  # the factor and the length may have any value
            required |= {"low_freq_factor": LOW, "high_freq_factor": HIGH}
        for name, value in required.items():
            if found.get(name) != value:
                self.refuse(f"{where}.{name}", found.get(name), f"{value:g}")
        for name in found:
            if name not in ROPE:
                self.refuse(f"{where}.{name}", found[name], "a model without it")
        named = Settings(self.source, {f"{where}.{name}": value for name, value in found.items()})  # as in messages
        theta, scaling, share = (
            named.number(f"{where}.{name}", 0.0) for name in ("rope_theta", "factor", "partial_rotary_factor")
        )
        if kind != "llama3":
            return theta, 0.0, ORIGINAL_LENGTH, share
        if scaling < 1:
            self.refuse(f"{where}.factor", scaling, "a number from 1 on")
        return theta, scaling, named.size(f"{where}.original_max_position_embeddings"), share

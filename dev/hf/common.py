"""Our models as Hugging Face's transformers names, lays out and describes them: what is common to all of them. What is
a model's own stands in its file beside this one; family.py says how. And the tokenizer that goes along with a .bin."""

import math
import sys
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from itertools import groupby
from pathlib import Path

from dev.foreign import try_tokenizer
from dev.hf.family import Family
from device.errors import UserError
from llmc.data import hf_tokenizer
from llmc.data.find_tokenizer import open_tokenizer, tokenizer_files
from llmc.data.tokenizer import write_tokenizer
from llmc.files.files import replacing
from llmc.model.tensors import Config, name_tensors, num_parameters

import numpy as np

SAVE_AGAIN = "save the model again with save_pretrained"
read_json = partial(hf_tokenizer.read_json, remedy=SAVE_AGAIN)


@cache
def families() -> dict[str, type[Family]]:
    """The subclasses of Family in the files beside this one, by transformers' names of the kind. Nothing lists them."""
    files = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    modules = [import_module(f"dev.hf.{name}") for name in files if not name.endswith("_hf")]  # those are programs
    found = [each for module in modules for each in vars(module).values() if hasattr(each, "REQUIRED")]
    return {name: family for family in found for name in (family.TYPE, *family.ALSO)}


def family_of(config: Config) -> type[Family]:
    """What a file here says of a model. Raises UserError where none does."""
    for family in families().values():
        if family.Config is type(config):
            return family
    raise UserError(f"no file in dev/hf/ says what Hugging Face's transformers call a {config.NAME} ({config.SCRIPT})")


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
        ours = list(rows)
        for layer in range(config.num_layers) if layered else (None,):
            for name, shape in ours:
                tensor = tensors[name][layer] if layered else tensors[name]
                if shape[0] == "Vp":
                    tensor = tensor[: config.vocab_size]
                for theirs, view in zip(family.NAMES[name], family.parts(config, name, tensor), strict=True):
                    split = tuple(view.shape)
                    yield theirs.format(layer), view, (math.prod(split[:-1]), split[-1]) if len(split) > 2 else split


def transformers_parameters(model) -> dict:
    """The parameters of a transformers model by the names that they have in files."""
    renamed = families()[model.config.model_type].RENAMED
    return {renamed.get(name, name): parameter for name, parameter in model.named_parameters()}


def flat_parameters_of(model, config: Config, gradients: bool = False) -> np.ndarray:
    """The parameters of a transformers model, or the gradients that backward left in it, float64 (num_parameters,) in
    the order of our table. The rows of the padded vocabulary are 0."""
    flat, theirs = np.zeros(num_parameters(config)), transformers_parameters(model)
    for name, view, _ in named_tensors(config, name_tensors(flat, config.parameters(), config.sizes(), align=1)):
        values = theirs[name].grad if gradients else theirs[name].detach()
        view[...] = values.cpu().numpy().reshape(view.shape)
    return flat


def config_json(config: Config, eot: int | None = None, bos: int | None = None, dtype: str = "float32") -> dict:
    """A model in the terms of transformers: what its config.json holds and its config class takes. eot and bos: the
    tokens that end and begin a text, where they are known; dtype: of the weights. Raises UserError for a model that
    transformers has not."""
    common = {"vocab_size": config.vocab_size, "bos_token_id": bos, "eos_token_id": eot, "torch_dtype": dtype}
    family = family_of(config)
    return common | {"model_type": family.TYPE} | family.config_json(config)


def end_tokens(model: Path) -> set[int]:
    """The tokens that end a text as the generation_config.json beside a .bin names them, else its config.json; none if
    there are no such files. Raises UserError if one names something else."""
    for name in f"{model.stem}_generation_config.json", "generation_config.json", f"{model.stem}_config.json":
        path = model.with_name(name)
        found = read_json(path).get("eos_token_id") if path.is_file() else None
        ends = found if isinstance(found, list) else [found]
        if found is not None:
            if not all(type(end) is int for end in ends):
                raise UserError(f"{path}: eos_token_id is {found!r}; the number of a token, or a list, is needed")
            return set(ends)
    return set()


def take_tokenizer_along(found: Path, model: Path, vocab_size: int) -> set[Path]:
    """Writes a tokenizer's files, and those that belong to it, beside the model, with the names that generate.py looks
    for. A .json is tried first, and written as a .bin, too; where that cannot be done, stderr says why. If it cannot be
    used, or is missing, the others go along without it. Returns the files that it wrote."""
    files = {model.with_name(name): data for name, data in tokenizer_files(found, f"{model.stem}_").items()}
    own, binary = (model.with_name(f"{model.stem}_tokenizer{suffix}") for suffix in (".json", ".bin"))
    try:
        try_tokenizer(found)
    except UserError as error:
        print(f"no {own}: {error}", file=sys.stderr)
        files.pop(own, None)  # an empty file was left out before
    for path, content in files.items():
        with replacing(path) as file:
            file.write(content)
        print(f"wrote {path}")
    if found.suffix == ".bin" or own not in files:
        return set(files)
    try:
        read = open_tokenizer(found)
        if not read.fits(vocab_size, own=True):
            raise UserError(f"{found} has {read.vocab_size} tokens and the model {vocab_size}")
        read.say_rows(found, vocab_size)
        kept = read.tokens[:vocab_size]
        write_tokenizer(binary, kept, read.eot, read.bos, read.special, read.space, read.as_gpt2)
        print(f"wrote {binary}")
        return {*files, binary}
    except UserError as error:
        print(f"no {binary}: {error}", file=sys.stderr)
        return set(files)

"""The model scripts: each train_*.py in the repository's root. Nothing lists them."""

from functools import cache
from importlib import import_module
from pathlib import Path

from device.errors import UserError
from llmc.files.checkpoint import model_path
from llmc.files.files import first_word
from llmc.model.model import Model
from llmc.model.tensors import Config
from train_gpt2_fp32 import GPT2

NEEDED = "a trained model is needed: a .bin, or the directory of a checkpoint"
ROOT = Path(__file__).resolve().parents[1]


@cache
def model_kinds() -> tuple[type, ...]:
    """The kinds of models, subclasses of Model, in the order of their scripts' names. A script with the model of
    another script adds none."""
    scripts = [import_module(path.stem) for path in sorted(ROOT.glob("train_*.py"))]
    return tuple(
        found
        for script in scripts
        for found in vars(script).values()
        if isinstance(found, type) and found.__module__ == script.__name__ and hasattr(found, "Config")
    )


def small_model(config: type[Config]) -> str:
    """A small model with heads of 64 channels, which any attention takes, as -e describes it: what a sanitizer runs."""
    own = [word for word in ("kv_heads=1", "head_size=64") if word.partition("=")[0] in config.DESCRIPTION]
    return ",".join([config.PRESETS["tiny"], "layers=2", "heads=2", *own])


def script_configs() -> dict[str, type]:
    """For each script by name the class of its model's sizes, also for a script that takes its model from another."""
    modules = {path.name: import_module(path.stem) for path in sorted(ROOT.glob("train_*.py"))}
    return {
        name: next(each.Config for each in vars(module).values() if isinstance(each, type) and hasattr(each, "Config"))
        for name, module in modules.items()
    }


def kind_of_magic(magic: int | None) -> type | None:
    """The kind of the models whose files begin with this number."""
    return next((kind for kind in model_kinds() if kind.Config.MAGIC == magic), None)


def kind_of(path: Path) -> type[Model]:
    """The kind of the model in a file. If the file is no model, this is GPT-2, which then refuses the file."""
    return kind_of_magic(first_word(path)) or GPT2


def find_model(name: Path) -> Path:
    """The file of the model. `name` is this file or the directory of its checkpoint. Raises UserError if `name`
    describes a model that is not trained yet, and as model_path does."""
    for kind in model_kinds():
        word = str(name).partition("=")[0]
        if not name.exists() and (word in kind.Config.PRESETS or word in kind.Config.DESCRIPTION):
            raise UserError(f"{name}: not trained yet; train it with {kind.Config.SCRIPT} -e {name}; {NEEDED}")
    return model_path(name)

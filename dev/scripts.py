"""The model scripts: each train_*.py in the repository's root. Nothing lists them."""

from functools import cache
from importlib import import_module
from pathlib import Path

from llmc.model.tensors import Config

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
        name: next(each for each in vars(module).values() if isinstance(each, type) and hasattr(each, "PRESETS"))
        for name, module in modules.items()
    }


def kind_of_magic(magic: int | None) -> type | None:
    """The kind of the models whose files begin with this number."""
    return next((kind for kind in model_kinds() if kind.Config.MAGIC == magic), None)

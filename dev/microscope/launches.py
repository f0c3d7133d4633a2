"""Every launcher of kernels/ with arguments to call it with, as kernels/launches.py says."""

import pkgutil
from importlib import import_module

import kernels
from device.errors import UserError
from kernels import launches
from kernels.launches import Launch

for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
    import_module(module.name)

LAUNCHES: dict[str, Launch] = dict(sorted(launches.LAUNCHES.items()))


def launches_in(precision: str) -> dict[str, Launch]:
    return {name: launch for name, launch in LAUNCHES.items() if launch.precision in ("", precision)}


def sizes_of(text: str, launch: Launch) -> dict[str, int]:
    """A launch's sizes with those that a text such as "B=2,T=8" sets; UserError where it does not say so."""
    sizes = dict(launch.sizes)
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in sizes or not value.isdecimal() or not (name != "own") <= int(value) < 1 << 31:
            known = ",".join(f"{key}={size}" for key, size in launch.sizes.items())
            raise UserError(f"--shape {text}: {word!r} is not one of its sizes and a number, as in {known}")
        sizes[name] = int(value)
    return sizes

"""Launchers that are chosen by the type of an argument: as functools.singledispatch does, but by any one argument."""

from collections.abc import Callable
from functools import wraps
from inspect import signature


def dispatched(parameter: str) -> Callable[[Callable], Callable]:
    """A decorator for a launcher. `launcher.register(kind)` decorates another function, which is called in its place if
    the argument `parameter` is a `kind`; it stands in launcher.registry."""

    def decorate(launcher: Callable) -> Callable:
        place, registry = list(signature(launcher).parameters).index(parameter), {}

        @wraps(launcher)
        def call(*args, **kwargs):
            argument = args[place] if place < len(args) else kwargs[parameter]
            return registry.get(type(argument), launcher)(*args, **kwargs)

        def register(kind: type) -> Callable[[Callable], Callable]:
            def add(other: Callable) -> Callable:
                registry[kind] = other
                return other

            return add

        call.register, call.registry = register, registry
        return call

    return decorate

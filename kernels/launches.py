"""How each launcher can be called: for the microscope, the profile, and the tests of all kernels. A description stands
at the end of the launcher's file:

    describe(transpose, "N=64 C=128", "out: C,N; inp: N,C", hard="N=133 C=67")

    call = LAUNCHES["transpose"].prepare({"N": 32})  # makes the arrays on the device in use
    call()                                           # can be repeated: what it reads and adds to stays finite
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import device
from device.errors import UserError

import numpy as np

ROWS, MATRIX = "B=2 T=8 C=128", "N=64 C=128"  # the usual sizes

Given = dict | Callable[[SimpleNamespace, SimpleNamespace], dict]


class Launch(NamedTuple):
    """What `describe` says of a launcher."""

    launcher: Callable
    sizes: dict[str, int]
    arrays: dict[str, str]  # as they are called in the description: their shapes
    given: Given
    hard: dict[str, int]
    needs: list[str]
    precision: str
    hides: list[str]

    def shapes_at(self, sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
        """The shape of each array where the sizes are these."""
        names = self.sizes | sizes
        shapes = {name.strip("*").split(".")[-1]: lengths.split(",") for name, lengths in self.arrays.items()}
        return {name: tuple(eval(length, {}, names) for length in shape) for name, shape in shapes.items()}

    def prepare(self, sizes: dict[str, int]) -> Callable[[], None]:
        """A call of the launcher with arrays of these sizes on the device in use, filled with random numbers.

        Raises UserError for sizes and a precision that the launcher does not take.
        """
        if self.precision not in ("", device.precision):
            raise UserError(f"{self.launcher.__name__} is so called in {self.precision}: --precision {self.precision}")
        size = SimpleNamespace(**self.sizes | sizes)
        for need in self.needs:
            if not eval(need, {}, vars(size)):
                raise UserError(f"{self.launcher.__name__} needs {need}")
        wanted = inspect.signature(self.launcher).parameters
        rng, arrays, given = np.random.default_rng(1), {}, {"eps": 1e-5, **vars(size)}
        for key, (name, shape) in zip(self.arrays, self.shapes_at(sizes).items(), strict=True):
            values = rng.standard_normal(shape, np.float32)
            values = abs(values) if name in ("rstd", "v") else values
            arrays[name] = device.asarray(values if key.endswith("*") else device.to_floatX(values))
            whole, dot, _ = key.partition(".")
            given |= {whole: (*given.get(whole, ()), arrays[name])} if dot else {name: arrays[name]}
        given |= self.given(size, SimpleNamespace(**arrays)) if callable(self.given) else self.given
        arguments = {name: given[name] for name in wanted if name in given}

        def call() -> None:
            self.launcher(**arguments)

        call.arguments, call.arrays = arguments, arrays  # which a launcher may be given by their addresses alone
        return call


LAUNCHES: dict[str, Launch] = {}  # by the launcher's name; after a colon, the variant: attention_forward:relu

# What kernels do at least, for the profile (dev/traffic.py). The names are theirs, without "_kernel" and the size that
# they are compiled for.
TWICE: dict[str, str] = {}  # the arrays that a kernel both reads and writes
MOVED: dict[str, Callable[[SimpleNamespace], float]] = {}  # bytes, from the kernel's arguments
FLOPS: dict[str, Callable[[SimpleNamespace], float]] = {}


def describe(
    launcher: Callable, sizes: str, arrays: str, given: Given | None = None, variant: str = "", *, hard: str = "",
    needs: str = "", precision: str = "", hides: str = "", twice: dict | None = None, moved: dict | None = None,
) -> None:  # fmt: skip
    """Adds a call of a launcher to LAUNCHES.

    sizes: "N=64 C=128", small ones. hard: others, at which blocks use their shared memory again, and rows end within a
    warp. arrays: "out inp: N,C; dbias*: C", shapes of expressions of the sizes; a star says that an array is fp32 in
    any precision; norm.weight and norm.bias make up the argument norm. given: the other arguments, or a function that
    makes them of the sizes and the arrays. Names that the launcher does not have are left out. needs: what must be true
    of the sizes. precision: the only one in which the launcher is so called. hides: arrays in which a NaN may come to
    nothing.

    The profile counts each array of a kernel once, and those that TWICE names twice, but no small ones (dev/traffic.py:
    SMALL). Kernels for which this is not true have a function in MOVED, or in FLOPS.
    """

    def numbers(text: str) -> dict[str, int]:
        return {name: int(value) for name, value in (word.split("=") for word in text.split())}

    groups = (group.split(":") for group in arrays.split(";"))
    shapes = {name: shape.strip() for names, shape in groups for name in names.split()}
    conditions = [need.strip() for need in needs.split(";") if need]
    name = launcher.__name__ + (f":{variant}" if variant else "")
    LAUNCHES[name] = Launch(
        launcher, numbers(sizes), shapes, given or {}, numbers(hard), conditions, precision, hides.split()
    )  # fmt: skip
    TWICE.update(twice or {})
    MOVED.update(moved or {})


def random_tokens(V: int, *shape: int) -> np.ndarray:
    """Token ids below V. Every second one is V // 2."""
    ids = np.random.default_rng(2).integers(0, V, shape, np.int32)
    ids.reshape(-1)[::2] = V // 2
    return ids
